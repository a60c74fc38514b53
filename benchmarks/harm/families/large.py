"""A file of any size and kind is read in bounded time and memory, and a page of it stays under 5 MB.

Each file is read by each command in a process of its own, with a limit on its memory and its processor time.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from gzip import compress
from pathlib import Path
from typing import Any

from benchmarks.harm.attack import Outcome, Plan
from benchmarks.harm.recorded import train

READ, SMALL = "large and odd files: each command ends well in bounded time and memory", "large files: pages under 5 MB"
FIRST = {READ: (170, 151), SMALL: (34, 31)}
MEMORY = 3 << 30
SECONDS = 40
MB = 10**6

FOLLOW = """
import sys
from benchmarks.harm.reading import followed
followed(__import__("pathlib").Path(sys.argv[1]))
"""


def _line(**told: Any) -> bytes:
    return json.dumps(told).encode() + b"\n"


def _record(step: int, **told: Any) -> bytes:
    return _line(type="record", step=step, **told)


def _alert(number: int, kinds: int) -> bytes:
    words = {"where": "w", "message": "m" * 200, "advice": "a" * 100, "value": 1, "limit": 1}
    return _line(type="alert", kind=f"k{number % kinds}", severity="error", step=number, **words)


def _later(records: list[bytes], **told: Any) -> bytes:
    """The records again, with something changed in all."""
    return b"".join(_line(**{**json.loads(record), **told, "step": at}) for at, record in enumerate(records))


def _longer(record: bytes) -> bytes:
    """The record with a row more in all that is said of parameters."""
    told = json.loads(record)
    grown = {key: rows + rows[-1:] for key, rows in told["metrics"].items() if key.startswith("param")}
    return _line(**{**told, "step": told["step"] + 100, "metrics": {**told["metrics"], **grown}})


def _headed(head: bytes, **changes: Any) -> bytes:
    return _line(**{**json.loads(head), **changes})


def _all_of(records: list[bytes], value: Any) -> bytes:
    """The records with one number everywhere."""

    def filled(metric: Any) -> Any:
        return [filled(row) for row in metric] if isinstance(metric, list) else value

    metrics = [{key: filled(rows) for key, rows in json.loads(record)["metrics"].items()} for record in records]
    return b"".join(_record(step, loss=value, metrics=told) for step, told in enumerate(metrics))


# head, records, whole file -> the file that is read
FILES: dict[str, Callable[[bytes, list[bytes], bytes], bytes]] = {
    "empty": lambda head, records, whole: b"",
    "only ends of lines": lambda head, records, whole: b"\n" * 1000,
    "only the header": lambda head, records, whole: head,
    "no header": lambda head, records, whole: whole[len(head) :],
    "2,000 headers": lambda head, records, whole: head * 2000,
    "a header before each of 100,000 records": lambda head, records, whole: b"".join(
        b'{"type":"run"}\n' + _record(step) for step in range(100_000)
    ),
    "a line of 100 MB without an end": lambda head, records, whole: whole + b"x" * 100 * MB,
    "a line of 100 MB": lambda head, records, whole: whole + b"x" * 100 * MB + b"\n" + records[-1],
    "a record of 25 million numbers": lambda head, records, whole: (
        whole + b'{"type":"record","step":99,"metrics":{"own":[' + b"1,2," * (25 * MB // 2) + b"3]}}\n"
    ),
    "a name of 20 MB": lambda head, records, whole: whole + _line(type="alert", kind="k" * 20 * MB),
    "a note of 20 MB": lambda head, records, whole: head + _record(0, notes=["n" * 20 * MB]) + whole[len(head) :],
    "a message of 20 MB": lambda head, records, whole: whole + _alert(5, 1).replace(b'"m', b'"' + b"m" * 20 * MB),
    "a million empty objects": lambda head, records, whole: whole + b"{}\n" * MB,
    "300,000 records": lambda head, records, whole: (
        head + b"".join(_record(step, metrics={"gain": [1]}) for step in range(300_000))
    ),
    "100,000 alerts of 7 kinds": lambda head, records, whole: whole + b"".join(_alert(n, 7) for n in range(100_000)),
    "100,000 kinds of alerts": lambda head, records, whole: whole + b"".join(_alert(n, MB) for n in range(100_000)),
    "nested 100,000 deep": lambda head, records, whole: (
        whole + b'{"type":"record","step":3,"metrics":{"gain":' + b"[" * 100_000 + b"]" * 100_000 + b"}}\n"
    ),
    "10,000 metrics": lambda head, records, whole: (
        whole + _record(99, metrics={f"m{i}": [1, 2] for i in range(10_000)})
    ),
    "10,000 flows": lambda head, records, whole: (
        _headed(
            head,
            flows=[{"name": f"f{i}", "kind": "blocks", "points": ["a", "b"], "blocks": ["a"]} for i in range(10_000)],
        )
        + whole[len(head) :]
    ),
    "a matrix of 1,500 rows": lambda head, records, whole: (
        whole + _record(99, metrics={"cosine_matrix": [[0.123456] * 1500] * 1500})
    ),
    "a profile of a million rows": lambda head, records, whole: whole + _record(99, metrics={"gain": [0.5] * MB}),
    "steps up to 2^63": lambda head, records, whole: (
        head + b"".join(_record(step, metrics={"gain": [1]}) for step in (0, 2**31, 2**53, 2**62, 2**63 - 1))
    ),
    "steps beyond 2^63": lambda head, records, whole: head + b"".join(_record(2**63 + n) for n in range(9)),
    "negative steps": lambda head, records, whole: head + b"".join(_record(-n) for n in range(9)),
    "all numbers 1e308": lambda head, records, whole: head + _all_of(records, 1e308),
    "all numbers missing": lambda head, records, whole: head + _all_of(records, None),
    "all numbers infinite": lambda head, records, whole: head + _all_of(records, "inf"),
    "steps back and forth": lambda head, records, whole: head + b"".join(reversed(records)) + b"".join(records),
    "of the future": lambda head, records, whole: _headed(head, version="99.0", invented=[1]) + whole[len(head) :],
    "parameters join": lambda head, records, whole: whole + b"".join(map(_longer, records)),
    "UTF-16": lambda head, records, whole: whole.decode().encode("utf-16"),
    "gzip": lambda head, records, whole: compress(whole),
    "a byte order mark": lambda head, records, whole: b"\xef\xbb\xbf" + whole,
    "CRLF": lambda head, records, whole: whole.replace(b"\n", b"\r\n"),
    "NULs at the end": lambda head, records, whole: whole + b"\0" * 4096,
    "settings of other types": lambda head, records, whole: (
        _headed(head, config={"token_cosine": "abc", "every": [1], "limits": 3, "mute": {"a": 1}, "unknown": 1})
        + whole[len(head) :]
    ),
    "labels that are no lists": lambda head, records, whole: _headed(head, labels={"gain": "abc"}) + whole[len(head) :],
    "notes in each record": lambda head, records, whole: head + _later(records, notes=["n" * 1000] * 100),
}


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Each file before each command."""
    with tempfile.TemporaryDirectory() as temporary:
        intact = train(Path(temporary) / "intact")
        lines = intact.read_bytes().splitlines(keepends=True)
        records = [line for line in lines if b'"type":"record"' in line]
        folder = Path(temporary) / "large"
        folder.mkdir()
        for name in plan.some(list(FILES)):
            (folder / intact.name).write_bytes(FILES[name](lines[0], records, b"".join(lines)))
            for command, arguments in _commands(str(folder), str(intact.parent)).items():
                wrong = _run(arguments)
                yield Outcome(READ, f"{name}, {command}", not wrong, wrong)
            for page in folder.glob("*.html"):
                size = page.stat().st_size / MB
                yield Outcome(SMALL, f"{name}, {page.name}", size < 5, f"{size:.1f} MB")
                page.unlink()


def _commands(folder: str, other: str) -> dict[str, list[str]]:
    flowscope = ["-m", "flowscope"]
    return {
        "summary": [*flowscope, "summary", folder],
        "diagnose": [*flowscope, "diagnose", folder],
        "report": [*flowscope, "report", folder, "-o", f"{folder}/report.html"],
        "compare": [*flowscope, "compare", folder, other, "-o", f"{folder}/compare.html"],
        "live": ["-c", FOLLOW, folder],
    }


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def _run(arguments: list[str]) -> str:
    """What was wrong, empty where it ended well: done, or a clear word and a status of ours."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=_limited,
        timeout=20 * SECONDS,
    )
    well = done.returncode in (0, 1, 2) and "Traceback" not in done.stderr
    return "" if well else f"status {done.returncode}: {done.stderr[-200:]}"
