"""A folder of runs as one table: what it says is what the runs' files say, and their arrays are not read for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flowscope import FlowscopeError
from flowscope.cli import main
from flowscope.records import Alert, Record, RunHeader
from flowscope.runs_table import rows_of
from flowscope.sinks import JsonlSink, read_run


def alert(kind: str, step: int, severity: str = "error", state: str = "raised", since: int | None = None) -> Alert:
    return Alert(kind, severity, "blocks.3", step, 1.0, 2.0, "message", "advice", state, since)  # type: ignore[arg-type]


def write(
    folder: Path, steps: int, loss: float | None, alerts: list[Alert] | None = None, share: float | None = None
) -> None:
    sink = JsonlSink(folder)
    sink.write(RunHeader("0"))
    for step in range(steps):
        sink.write(Record(step, loss, {"gain": np.arange(4.0)}, notes=('a quoted ","metrics": in a note',)))
    for event in alerts or []:
        sink.write(event)
    if share is not None:  # known after some steps
        sink.write(RunHeader("0", cost={"share": share}))
    sink.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write(tmp_path / "run10", 3, 0.5, share=0.0123)
    write(tmp_path / "run9", 4, 2.5, [alert("spike", 1, "warning", since=0), alert("vanishing_gradient", 2)])
    write(tmp_path / "sweep/run2", 5, None, [alert("spike", 1), alert("spike", 3, state="resolved")])
    write(tmp_path / "empty", 0, None)
    return tmp_path


def test_a_row_says_what_the_run_says(runs: Path) -> None:
    rows = {row.run: row for row in rows_of(runs)}
    assert [*rows] == ["empty", "run9", "run10", "sweep/run2"]
    sick = rows["run9"]
    assert (sick.verdict, sick.first, sick.where, sick.since, sick.standing) == ("error", "spike", "blocks.3", 0, 2)
    assert (sick.loss, sick.step, sick.records) == (2.5, 3, 4)
    assert sick.bytes == (runs / "run9/flowscope.jsonl").stat().st_size
    over = rows["sweep/run2"]
    assert (over.verdict, over.first, over.standing, over.loss) == ("ok", "spike", 0, None)
    assert (rows["run10"].verdict, rows["run10"].first, rows["run10"].own) == ("ok", None, 0.0123)
    assert sick.own is None
    assert (rows["empty"].verdict, rows["empty"].step) == ("none", None)


def test_reading_without_arrays_is_reading_all_but_the_arrays(runs: Path) -> None:
    whole, light = read_run(runs / "run9"), read_run(runs / "run9", metrics=False)
    assert whole.records[0].metrics
    assert not light.records[0].metrics
    assert light.skipped_lines == 0
    assert [(r.step, r.loss, r.notes) for r in light.records] == [(r.step, r.loss, r.notes) for r in whole.records]
    assert light.alerts == whole.alerts
    assert light.header == whole.header


@pytest.mark.parametrize(
    ("column", "first"), [("loss", "run10"), ("verdict", "run9"), ("step", "run10"), ("since", "run9")]
)
def test_rows_are_sorted_by_a_column_and_those_without_a_value_come_last(runs: Path, column: str, first: str) -> None:
    rows = rows_of(runs, column)
    assert rows[0].run == first
    if column != "verdict":
        gaps = [getattr(row, column) is None for row in rows]
        assert gaps == sorted(gaps)


def test_the_command_prints_a_table_and_one_array(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "run",
        "verdict",
        "first",
        "alert",
        "where",
        "since",
        "loss",
        "steps",
        "time",
        "own",
        "time",
        "disk",
    ]
    assert len(lines) == 4
    assert "spike (+1)" in lines[1]
    assert main(["runs", str(runs), "--json", "--sort", "loss"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in told][:2] == ["run10", "run9"]
    assert told[1]["first"] == "spike"


def test_an_empty_folder_and_an_unknown_column_are_told(
    tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(tmp_path / "nothing")]) == 1
    assert "there is no run in" in capsys.readouterr().err
    with pytest.raises(FlowscopeError, match="expected one of run, verdict"):
        rows_of(runs, "los")


def test_the_table_imports_no_torch(runs: Path) -> None:
    code = (
        "import sys, flowscope.cli as c; c.main(['runs', sys.argv[1]]); print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, runs], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "False"


def test_compare_takes_a_folder_of_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "empty/flowscope.jsonl").unlink()
    assert main(["compare", str(runs), "-o", str(runs / "c.html")]) == 0
    page = (runs / "c.html").read_text()
    assert all(f'"name": "{name}"' in page or f'"name":"{name}"' in page for name in ("run9", "run10", "run2"))
    assert main(["compare", str(runs / "run9"), "-o", str(runs / "c.html")]) == 2
    assert "expected two runs or a folder of them" in capsys.readouterr().err
