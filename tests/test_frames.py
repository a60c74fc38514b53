"""A run's numbers in pandas, as columns and as CSV: against the records, looked up one by one."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

import flowscope
from flowscope import FlowscopeError
from flowscope.cli import main
from flowscope.records import Alert, FlowLayout, Record, Run, RunHeader
from flowscope.sinks import JsonlSink, read_run

NAN = math.nan
LABELS = {"gain": ("b.0", "b.1"), "gain@dec": ("d.0",), "cosine_matrix": ("p", "q"), "grad_norm": ("a,b", 'c"d')}
HEADER = RunHeader("0", (FlowLayout("enc", "blocks", (), ()), FlowLayout("dec", "blocks", (), ())), LABELS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sink = JsonlSink(tmp_path / "run")
    sink.write(HEADER)
    for step in (0, 5, 7):
        metrics = {
            "gain": np.array([step + 0.25, NAN]),
            "gain@dec": np.array([step * 2.0]),
            "cosine_matrix": np.array([[1.0, step], [0.5, 1.0]]),
            "grad_norm": np.array([1e-30 * step, math.inf]),
        }
        sink.write(Record(step, None if step == 5 else 1.5 + step, metrics))
    sink.write(Alert("spike", "error", "b.1", 5, 3.0, NAN, 'a "message"', "advice, too", since=4))
    sink.close()
    return tmp_path / "run"


def test_one_metric_is_a_line_a_step_and_a_column_a_row(folder: Path) -> None:
    pytest.importorskip("pandas")
    run = read_run(folder)
    frame = run.to_pandas("gain")
    assert [*frame.index] == [0, 5, 7]
    assert frame.index.name == "step"
    assert [*frame.columns] == ["b.0", "b.1"]
    for record in run.records:
        np.testing.assert_array_equal(frame.loc[record.step].to_numpy(), record["gain"])
    assert [*run.to_pandas("gain", "dec")["d.0"]] == [0.0, 10.0, 14.0]
    assert run.to_pandas("loss")["loss"].to_dict() == {0: 1.5, 7: 8.5}


def test_all_profiles_are_a_line_a_number(folder: Path) -> None:
    pytest.importorskip("pandas")
    run = read_run(folder)
    frame = run.to_pandas()
    assert [*frame.columns] == ["step", "metric", "flow", "row", "name", "value"]
    assert len(frame) == 2 + 3 * (2 + 1 + 2)  # two losses; matrices are asked for by name
    cell = frame[(frame.step == 7) & (frame.metric == "gain") & (frame.flow == "dec")]
    assert (cell.name.item() if isinstance(cell.name, str) else cell["name"].item(), cell.value.item()) == ("d.0", 14.0)


def test_a_matrix_has_a_line_a_cell(folder: Path) -> None:
    columns = read_run(folder).columns("cosine_matrix")
    at = (columns["step"] == 5) & (columns["row"] == 0) & (columns["column"] == 1)
    assert columns["value"][at].tolist() == [5.0]
    assert columns["name"][at].tolist() == ["p"]
    with pytest.raises(FlowscopeError, match=r"matrix a record.*long=True"):
        read_run(folder).to_pandas("cosine_matrix")


def test_polars_and_arrow_take_the_same_columns(folder: Path) -> None:
    columns = read_run(folder).columns()
    assert len({len(column) for column in columns.values()}) == 1
    polars = pytest.importorskip("polars")
    assert polars.DataFrame(columns).shape == (17, 6)
    arrow = pytest.importorskip("pyarrow")
    assert arrow.table(columns).num_rows == 17


def test_alerts_are_a_table_too(folder: Path) -> None:
    pytest.importorskip("pandas")
    (line,) = read_run(folder).to_pandas("alerts").to_dict("records")
    assert (line["kind"], line["where"], line["since"], line["value"]) == ("spike", "b.1", 4, 3.0)
    assert read_run(folder).columns("alerts")["message"].tolist() == ['a "message"']


@pytest.mark.parametrize("way", ["file", "stream", "method"])
def test_csv_is_read_back_as_it_was(way: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.csv"
    if way == "method":
        read_run(folder).to_csv(file)
    else:
        assert main(["export", str(folder), "--csv", *(["-o", str(file)] if way == "file" else [])]) == 0
        if way == "stream":
            file.write_text(capsys.readouterr().out)
    with file.open(newline="") as opened:
        lines = list(csv.DictReader(opened))
    assert len(lines) == 17
    norms = [line for line in lines if line["metric"] == "grad_norm" and line["step"] == "7"]
    assert [(line["name"], line["value"]) for line in norms] == [("a,b", "7e-30"), ('c"d', "inf")]
    assert [line["value"] for line in lines if line["name"] == "b.1"] == ["", "", ""]  # not seen


def test_alerts_and_one_metric_are_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(folder), "--only", "alerts"]) == 0
    assert 'a ""message""' in capsys.readouterr().out
    assert main(["export", str(folder), "--only", "gain", "--flow", "dec"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "0,gain,dec,0,d.0,0.0"


def test_what_a_run_does_not_have_is_told_with_the_nearest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FlowscopeError, match=r"has 'gian'.*Did you mean 'gain'"):
        read_run(folder).columns("gian")
    assert main(["export", str(folder), "--only", "gian"]) == 1
    assert main(["export", str(folder), "-o", "/proc/nowhere/x.csv"]) == 1
    assert "expected a file that can be written" in capsys.readouterr().err


def test_a_live_scope_is_a_run_as_well() -> None:
    import torch
    from watch_models import Stack

    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
    columns = scope.run.columns("gain")
    assert columns["value"].tolist() == scope.records[0]["gain"].tolist()
    assert columns["name"].tolist() == scope.records[0].labels("gain")


def test_a_run_without_a_record_is_an_empty_table() -> None:
    assert {name: len(column) for name, column in Run().columns().items()} == dict.fromkeys(
        ("step", "metric", "flow", "row", "name", "value"), 0
    )
