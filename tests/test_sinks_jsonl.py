"""JSON lines: what was written is read back, whatever killed the writer."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from heapq import heappush
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, FlowLayout, Record, RunHeader
from flowscope.sinks import JsonlSink, read_run, reading
from flowscope.sinks.jsonl import FILE_NAME, encode_event

POINTS = ("embed", "layers.0", "layers.1", "layers.2")


def make_header(version: str = "0.1") -> RunHeader:
    flows = (FlowLayout("layers", "blocks", POINTS, POINTS[1:]), FlowLayout("decoder", "blocks", ("a", "b"), ("b",)))
    labels = {"gradient_product": POINTS, "gain": POINTS[1:], "gain@decoder": ("b",)}
    return RunHeader(version, flows, labels, {"every": 10}, {"python": "3"})


def make_record(step: int, scale: float = 1.0) -> Record:
    metrics = {
        "gradient_product": np.array([np.nan, 1e-300, np.inf, 1.0]) * scale,
        "gain": np.array([0.5, -np.inf, 2.0]) * scale,
        "gain@decoder": np.array([3.25]) * scale,
        "cosine_matrix": np.array([[1.0, np.nan, 0.5], [np.nan, 1.0, -0.25]]),
    }
    return Record(step, 2.5, metrics, ("skipped",), ("nothing to see",))


def make_alert(step: int, kind: str = "vanishing_gradient") -> Alert:
    return Alert(kind, "error", "layers.1", step, float("nan"), 1e-3, "no gradient\nat all", "wrap | it", flow="layers")


def write(folder: Path, *events: RunHeader | Record | Alert) -> None:
    sink = JsonlSink(folder)
    for event in events:
        sink.write(event)
    sink.close()


def test_round_trip(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"  # the parents are made
    write(folder, make_header(), make_record(0), make_alert(0), make_record(10))
    for path in (folder, folder / FILE_NAME, str(folder)):
        run = read_run(path)
        assert run.header == make_header()
        assert [r.step for r in run.records] == [0, 10]
        assert (run.skipped_lines, run.superseded) == (0, 0)
        got, want = run.records[0], make_record(0)
        assert (got.loss, got.flags, got.notes, got.flow_names) == (2.5, want.flags, want.notes, ("layers", "decoder"))
        assert list(got.metrics) == list(want.metrics)
        for key, values in want.metrics.items():
            assert got.metrics[key].dtype == np.float64
            np.testing.assert_array_equal(got.metrics[key], values)
        assert got.labels("gain") == list(POINTS[1:])
        assert got.labels("gain", "decoder") == ["b"]
        assert len(run.alerts) == 1
        assert np.isnan(run.alerts[0].value)
        assert (run.alerts[0].message, run.alerts[0].flow) == ("no gradient\nat all", "layers")


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    header = RunHeader(
        "0.1", (), {}, {"limit": float("inf"), "low": float("nan"), "where": Path("x"), "n": np.int64(3)}
    )
    alert = make_alert(0)
    alert.limit = np.float32("inf")  # type: ignore[assignment]
    write(tmp_path, header, make_record(0), alert)
    lines = (tmp_path / FILE_NAME).read_text().splitlines()

    def refuse(token: str) -> None:
        raise AssertionError(token)

    decoded = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [d["type"] for d in decoded] == ["run", "record", "alert"]
    assert decoded[0]["config"] == {"limit": "inf", "low": None, "where": "x", "n": 3}
    assert decoded[1]["metrics"]["gradient_product"] == [None, 1e-300, "inf", 1.0]
    assert read_run(tmp_path).alerts[0].limit == np.inf


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    events = [make_header(), make_record(0), make_record(3), make_alert(3)]
    lines = [encode_event(event) for event in events]
    whole = b"".join(lines)
    start = len(lines[0]) + len(lines[1])
    file = tmp_path / FILE_NAME
    for end in range(start, len(whole) + 1):
        file.write_bytes(whole[:end])
        run = read_run(file)
        # an object is complete with its closing brace, one byte before the newline
        second, third = end >= start + len(lines[2]) - 1, end >= len(whole) - 1
        assert len(run.records) == 1 + second, end
        assert len(run.alerts) == third, end
        assert run.header is not None
        at_rest = end in {start, start + len(lines[2]) - 1, start + len(lines[2]), len(whole) - 1, len(whole)}
        assert run.skipped_lines == (0 if at_rest else 1), end


def test_continuing_after_a_partial_line_isolates_it(tmp_path: Path) -> None:
    lines = [encode_event(event) for event in (make_header(), make_record(0), make_record(3))]
    file = tmp_path / FILE_NAME
    for cut in (1, 20, len(lines[2]) - 2):
        file.write_bytes(lines[0] + lines[1] + lines[2][:cut])
        write(tmp_path, make_header("0.2"), make_record(5))
        run = read_run(tmp_path)
        assert [r.step for r in run.records] == [0, 5]
        assert run.skipped_lines == 1
        assert run.header is not None
        assert run.header.version == "0.2"
    file.write_bytes(lines[0] + lines[1])
    write(tmp_path, make_record(5))
    assert file.read_bytes() == lines[0] + lines[1] + encode_event(make_record(5))


def test_foreign_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    foreign = [
        b"hello", b"[1, 2]", b'"type"', b"{}", b'{"type": "other"}', b'{"type": "record"}', b'{"type": "alert"}', b"17",
        b'{"type": "record", "step": "x"}', b'{"type": "record", "step": 1, "metrics": [1]}', b"\xff\xfe\x00",
        b'{"type": "record", "step": 1, "metrics": {"gain": ["much"]}}', b'["run"]',
        b'{"type": "record", "step": Infinity}', b"[" * 100_000,
    ]  # fmt: skip
    file = tmp_path / FILE_NAME
    file.write_bytes(b"\n".join([*foreign, b"", encode_event(make_record(4))]))
    run = read_run(file)
    assert run.skipped_lines == len(foreign)
    assert [r.step for r in run.records] == [4]


def test_a_header_is_read_as_far_as_it_can_be(tmp_path: Path) -> None:
    told = json.loads(encode_event(make_header()))
    told |= {
        "flows": [1],
        "config": "every",
        "environment": [1],
        "metrics": [{"words": "no name"}, 5, {"name": "gain"}],
    }
    (tmp_path / FILE_NAME).write_bytes(json.dumps(told).encode() + b"\n" + encode_event(make_record(4)))
    run = read_run(tmp_path)
    assert run.header is not None
    assert (run.header.flows, run.header.config, run.header.environment) == ((), {}, {})
    assert [*run.header.metrics] == ["gain"]
    assert run.header.labels == make_header().labels
    assert run.records[0].labels("gain") == [*make_header().labels["gain"]]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        ({"invented_later": [1]}, True),
        ({"parameters": {"w": "shape"}}, False),
        ({"optimizers": [{"class": "SGD", "groups": [{"lr": 1}]}]}, False),
        ({"weights": [1]}, False),
        ({"seeds": None}, False),
    ],
)
def test_a_setup_is_kept_where_it_is_one(changes: dict[str, Any], kept: bool) -> None:
    setup = {"parameters": {"w": [2, 3]}, "optimizers": [{"class": "SGD", "groups": [{"parameters": ["w"], "lr": 1}]}]}
    told = {**setup, "weights": {"w": 2**35}, "seeds": {"torch": 3}, **changes}
    assert RunHeader.from_json({"type": "run", "setup": told}).setup == (told if kept else {})


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"step": 2**63 - 1}, True),
        ({"step": 2**63}, False),
        ({"step": -1}, False),
        ({"step": None}, False),
        ({"loss": "nan"}, True),
        ({"loss": [1.0]}, False),
        ({"loss": 10**400}, False),
        ({"flags": "skipped"}, False),
        ({"notes": [1]}, False),
        ({"metrics": None}, False),
        ({"metrics": {"gain": 0.5}}, True),
        ({"metrics": {"gain": [[0.5, 1.0]]}}, False),
        ({"metrics": {"cosine_matrix": [0.5, 1.0]}}, False),
        ({"metrics": {"own": [[[0.5]]]}}, True),
        ({"metrics": {"own": [[[[0.5]]]]}}, False),
        ({"metrics": {"own": [[1], [1, 2]]}}, False),
        ({"metrics": {"own": [10**400]}}, False),
        ({"metrics": {"own": {"a": 1}}}, False),
        ({"metrics": {"own": []}}, True),
    ],
)
def test_a_record_is_read_where_it_is_one(tmp_path: Path, changes: dict[str, Any], read: bool) -> None:
    told = {"type": "record", "step": 4, "loss": 0.5, "flags": [], "notes": [], "metrics": {"gain": [0.5, 1.0]}}
    (tmp_path / FILE_NAME).write_text(json.dumps(told | changes))
    run = read_run(tmp_path)
    assert (len(run.records), run.skipped_lines) == (read, not read)
    assert all(len(r.labels(key)) in (0, len(r[key])) for r in run.records for key in r.metrics)


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"value": None, "limit": "inf"}, True),
        ({"value": [1]}, False),
        ({"severity": "fatal"}, False),
        ({"state": 3}, False),
        ({"where": None}, False),
        ({"message": ["m"]}, False),
        ({"since": -3}, False),
        ({"step": 1e30}, False),
        ({"flow": 3}, False),
        ({"invented_later": 3}, True),
    ],
)
def test_an_alert_is_read_where_it_is_one(tmp_path: Path, changes: dict[str, Any], read: bool) -> None:
    told = json.loads(encode_event(make_alert(3))) | changes
    (tmp_path / FILE_NAME).write_text(json.dumps(told))
    run = read_run(tmp_path)
    assert (len(run.alerts), run.skipped_lines) == (read, not read)


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = encode_event(make_record(4)), encode_event(make_record(7))
    longest = max(len(first), len(second))
    monkeypatch.setattr(reading, "LONGEST", longest)
    file = tmp_path / FILE_NAME
    long = b"x" * longest
    for between in (long + b"\n", long + b"y\n", long * 3 + b"z\n"):
        file.write_bytes(first + between + second + long * 2)
        run = read_run(file)
        assert [record.step for record in run.records] == [4, 7]
        assert run.skipped_lines == 2
    file.write_bytes(first + b"x" * (longest - 1) + b"\n" + second)  # as long as may be: no record, but a line
    assert [record.step for record in read_run(file).records] == [4, 7]


def test_headers_between_all_records_cost_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alert is taken up once, however often the processes changed."""
    pushed: list[object] = []
    monkeypatch.setattr(reading, "heappush", lambda heap, item: (pushed.append(item), heappush(heap, item)))
    events = [event for step in range(50) for event in (make_header(), make_record(step), make_alert(step))]
    write(tmp_path, *events)
    run = read_run(tmp_path)
    assert (len(run.records), len(run.alerts), run.superseded) == (50, 50, 0)
    assert len(pushed) == 50 + 49  # the last alert is older than no header


def test_a_resumed_process_takes_over_at_its_first_step(tmp_path: Path) -> None:
    write(tmp_path, make_header(), make_record(0), make_alert(0), make_record(10), make_record(20), make_alert(20))
    # an alert of the new process that comes before its first record is not an old one
    write(tmp_path, make_header(), make_alert(20, "parameters_not_optimized"), make_record(20, 2.0), make_record(30))
    run = read_run(tmp_path)
    assert [r.step for r in run.records] == [0, 10, 20, 30]
    assert run.records[2]["gain"][0] == 1.0
    assert [(a.step, a.kind) for a in run.alerts] == [(0, "vanishing_gradient"), (20, "parameters_not_optimized")]
    assert run.superseded == 1
    # resumed from an older checkpoint, and killed before it came as far: nothing of the path given up stays
    write(tmp_path, make_header(), make_record(5))
    run = read_run(tmp_path)
    assert [r.step for r in run.records] == [0, 5]
    assert run.superseded == 1 + 3
    # within one process a record is only replaced by one of its own step
    write(tmp_path, make_record(3), make_record(0, 4.0))
    run = read_run(tmp_path)
    assert [r.step for r in run.records] == [0, 3, 5]
    assert run.records[0]["gain"][0] == 2.0


def test_a_record_has_the_labels_of_the_header_before_it(tmp_path: Path) -> None:
    second = RunHeader("0.1", make_header().flows, {"gain": ("x", "y", "z")})
    write(tmp_path, make_header(), make_record(0), second, make_record(1))
    run = read_run(tmp_path)
    assert [r.labels("gain") for r in run.records] == [list(POINTS[1:]), ["x", "y", "z"]]


def test_missing_path_is_explained(tmp_path: Path) -> None:
    for path in (tmp_path / "no", tmp_path):
        with pytest.raises(FlowscopeError, match=r"expected flowscope\.jsonl or the folder.*log_dir"):
            read_run(path)


def test_unwritable_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FlowscopeError, match=r"log_dir '.*file/sub'.*expected a folder.*watch\(model, log_dir="):
        JsonlSink(tmp_path / "file" / "sub")


WRITER = """
import sys, numpy as np
from flowscope.records import Record, RunHeader
from flowscope.sinks import JsonlSink
sink = JsonlSink(sys.argv[1])
step = int(sys.argv[2])
sink.write(RunHeader("0.1", (), {}))
while True:
    sink.write(Record(step, 1.0, {"gain": np.full(3000, step + 0.5)}))
    print(step, flush=True)  # only after write returned
    step += 1
"""


def run_python(code: str, *args: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parents[1]
    # bufsize=0: a buffered readline would keep lines that communicate() never sees
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *args], cwd=root, stdout=pipe, stderr=pipe, bufsize=0)


def test_sigkill_at_random_moments_loses_at_most_the_record_being_written(tmp_path: Path) -> None:
    draw = random.Random(0)
    expected = 0  # records known to be complete
    for _ in range(5):
        process = run_python(WRITER, str(tmp_path), str(expected))
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        assert first, process.stderr.read().decode()
        time.sleep(draw.uniform(0.0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        acknowledged = 1 + int((first + process.communicate()[0]).split()[-1])
        run = read_run(tmp_path)
        # every acknowledged record, and perhaps one that was written when the kill came before the acknowledgement
        assert len(run.records) in {acknowledged, acknowledged + 1}
        for index, record in enumerate(run.records):
            assert record.step == index
            assert record["gain"].shape == (3000,)
            assert (record["gain"] == index + 0.5).all()
        expected = len(run.records)
    assert run.skipped_lines <= 5
    assert expected > 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full (Linux)")
def test_full_disk_raises_and_closes(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    sink = JsonlSink(tmp_path)
    with pytest.raises(OSError, match="No space left") as error:
        sink.write(make_record(0))
    assert error.value.errno == errno.ENOSPC
    sink.close()
    sink.close()
    with pytest.raises(OSError, match="closed"):
        sink.write(make_record(1))


LIMITED = """
import resource, sys, numpy as np
from flowscope.records import Record
from flowscope.sinks import JsonlSink
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
sink = JsonlSink(sys.argv[1])
written, faults = 0, []
for step in range(8):
    try:
        sink.write(Record(step, None, {"gain": np.full(500, 0.123456)}))  # about 4.6 kB: two fit and most of a third
        written += 1
    except OSError as error:
        faults.append(str(error))
sink.write(Record(99))  # a small one still fits: the file ended with a complete line
sink.close()
sink.close()
print(written, len(faults), faults[0])
"""


def test_a_line_that_fits_only_in_part_is_taken_back(tmp_path: Path) -> None:
    process = run_python(LIMITED, str(tmp_path))
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error.decode()
    assert out.startswith(b"2 6 "), out
    assert b"taken back" in out
    run = read_run(tmp_path)
    assert [r.step for r in run.records] == [0, 1, 99]
    assert run.skipped_lines == 0
    assert (tmp_path / FILE_NAME).read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), 0.25])
def test_a_loss_that_is_no_number_is_told_from_one_not_given(tmp_path: Path, loss: float | None) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(Record(3, loss, {"gain": np.array([1.0, 2.0])}))
    sink.close()
    (record,) = read_run(tmp_path).records
    assert record.loss == loss if loss is None or not np.isnan(loss) else np.isnan(record.loss)
