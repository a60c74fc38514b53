"""A damaged `flowscope.jsonl` is read as far as it can be: no traceback, no hang, nothing sent to the terminal.

A short run is damaged in bytes, in lines and in the JSON of its lines; every command that reads a run is called.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.harm.attack import Outcome, Plan
from benchmarks.harm.reading import broken, commands, large
from benchmarks.harm.recorded import train

FILES = 20_000
PAGES_EVERY = 10
"""Reports and comparisons of each n-th file."""
ROWS = {
    "summary": "damaged files: `summary` and `live`",
    "live": "damaged files: `summary` and `live`",
    "diagnose": "damaged files: `diagnose`, also as JSON",
    "diagnose --json": "damaged files: `diagnose`, also as JSON",
    "report": "damaged files: `report` and `compare`",
    "compare": "damaged files: `report` and `compare`",
}
FIRST = {
    "damaged files: `summary` and `live`": (10_084, 8_261),
    "damaged files: `diagnose`, also as JSON": (10_084, 10_028),
    "damaged files: `report` and `compare`": (3_256, 3_146),
}

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, 10**400, 1e308, -1e308, 5e-324, 0.5, "inf",
    "-inf", "nan", "", "0", "x", "blocks.0", "a\u202eb", "\x1b[2J\x1b]0;title\x07", "two\nlines\r", "\x9b31m", "<b>",
    "__proto__", [], [[]], {}, [None], [1, "x"], [[1, 2], [3]], [[1.0, 2.0]], [[[1.0]]], [[[[1.0]]]], {"a": 1}, ["inf"],
    [1.5] * 700, "x" * 9000, [{}], [True], "unsampled", "raised", "resolved", "record", "alert", "run", "error", "info",
    ["blocks.0", "blocks.1"], {"gain": ["a"]}, {"gain": "abc"},
]  # fmt: skip
KEYS = [
    "__proto__", "constructor", "", "a@b@c", "gradient_product@nowhere", "cosine_matrix", "x\u0000y", "step", "canary",
    "step_losses", "param_grad_norm", "made_anew", "gate_mean", "grad_norm@", "\x1b[31m",
]  # fmt: skip
LINES = [
    b"\n\n", b"garbage\n", b"\0" * 100 + b"\n", b"NaN\n", b"null\n", b'"record"\n', b'{"type":"record"}\n',
    b'{"type":[]}\n',
    b'{"type":"record","step":NaN}\n', b'{"type":"record","step":1e999}\n', b'{"type":"alert"}\n', b'{"type":"run"}\n',
    b'{"type":"future","step":1}\n', b"[" * 3000 + b"]" * 3000 + b"\n", b"[" * 100_000 + b"\n", b"\xff\xfe\n", b"\r\n",
    b'{"type":"record","step":' + b"9" * 5000 + b"}\n", b'{"type":"record","step":-5,"metrics":{"gain":[1]}}\n',
    b'{"type":"record","step":5,"metrics":{"grad_norm":' + b"[" * 70 + b"1" + b"]" * 70 + b"}}\n", b"\x1b[2J\n",
    b'{"type":"run","version":"99.0","flows":[],"labels":{}}\n', b'{"type":"record","step":6,"metrics":{"gain":3}}\n',
]  # fmt: skip


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Each damaged file before each command."""
    with tempfile.TemporaryDirectory() as folder:
        intact = train(Path(folder) / "intact", steps=6)
        damaged = Path(folder) / "damaged"
        damaged.mkdir()
        lines = intact.read_bytes().splitlines(keepends=True)
        for number in range(plan.count(FILES)):
            kind = plan.random.choice(list(KINDS))
            (damaged / intact.name).write_bytes(KINDS[kind](list(lines), plan.random))
            judging = ("diagnose", "diagnose --json")[number % 2]
            for name, command in commands(damaged, intact.parent).items():
                if name in ("summary", "live", judging) or (
                    number % PAGES_EVERY == 0 and name in ("report", "compare")
                ):
                    wrong = broken(name, command) or "; ".join(large(damaged))
                    yield Outcome(ROWS[name], f"file {number} ({kind}), {name}", not wrong, wrong)


# -- kinds of damage --------------------------------------------------------------------------------------------------


def _bytes(lines: list[bytes], random: Random) -> bytes:
    whole = bytearray(b"".join(lines))
    for _ in range(random.choice([1, 3, 20, 200])):
        whole[random.randrange(len(whole))] = random.randrange(256)
    return bytes(whole)


def _cut(lines: list[bytes], random: Random) -> bytes:
    whole = b"".join(lines)
    at = random.randrange(len(whole))
    return whole[:at] + whole[at + random.choice([len(whole), random.randrange(1, 5000)]) :]


def _headless(lines: list[bytes], random: Random) -> bytes:
    return b"".join(lines[random.randrange(1, len(lines)) :])


def _shuffled(lines: list[bytes], random: Random) -> bytes:
    lines += random.choices(lines, k=random.randrange(20))
    random.shuffle(lines)
    return b"".join(lines)


def _foreign(lines: list[bytes], random: Random) -> bytes:
    foreign = [*LINES, lines[0].decode().encode("utf-16")]
    for _ in range(random.choice([1, 4])):
        lines.insert(random.randrange(len(lines) + 1), random.choice(foreign))
    return b"".join(lines)


def _some(lines: list[bytes], random: Random) -> bytes:
    """A few lines."""
    for _ in range(random.choice([1, 2, 4])):
        at = random.randrange(len(lines))
        lines[at] = _mutated(lines[at], random)
    return b"".join(lines)


def _header(lines: list[bytes], random: Random) -> bytes:
    return b"".join([_mutated(lines[0], random), *lines[1:]])


def _alerts(lines: list[bytes], random: Random) -> bytes:
    return b"".join(_mutated(line, random) if b'"type":"alert"' in line else line for line in lines)


def _all(lines: list[bytes], random: Random) -> bytes:
    """All records alike: what differs from what it should be has always been so."""
    seed = random.random()
    return b"".join(_mutated(line, Random(seed)) if b'"type":"record"' in line else line for line in lines)


KINDS: dict[str, Callable[[list[bytes], Random], bytes]] = {
    "bytes": _bytes,
    "cut": _cut,
    "headless": _headless,
    "shuffled": _shuffled,
    "foreign lines": _foreign,
    "some lines": _some,
    "header": _header,
    "alerts": _alerts,
    "all records": _all,
}


def _mutated(line: bytes, random: Random) -> bytes:
    """The JSON of a line with some of its parts replaced, dropped, renamed or made longer."""
    told = json.loads(line)
    for _ in range(random.choice([1, 1, 2, 5])):
        place = told
        for _ in range(random.choice([0, 0, 1, 1, 2, 3])):  # shallow parts mean more
            inner = _keys(place)
            below = place[random.choice(inner)] if inner else None
            place = below if isinstance(below, dict | list) and below else place
        if keys := _keys(place):
            _change(place, random.choice(keys), random)
    try:
        return json.dumps(told).encode() + b"\n"
    except (ValueError, RecursionError):
        return b"{}\n"


def _keys(place: Any) -> list[Any]:
    return list(place) if isinstance(place, dict) else list(range(min(6, len(place))))


def _change(place: Any, key: Any, random: Random) -> None:
    value, what = place[key], random.random()
    if what < 0.2:
        del place[key]
    elif what < 0.3 and isinstance(place, dict):
        place[random.choice(KEYS)] = copy.deepcopy(value)
    elif what < 0.5 and isinstance(value, list) and value:
        place[key] = random.choice([value[:-1], value * 2, value[::-1], [value], value[:1], [*value, None], value * 40])
    elif what < 0.6 and isinstance(value, int | float):
        place[key] = random.choice([value * 10**6, -value, value + 1, str(value), [value]])
    else:
        place[key] = copy.deepcopy(random.choice(VALUES))
