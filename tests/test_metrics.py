"""One spec per metric, and everything that is derived from it."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import flowscope
from benchmarks import metric_tables
from flowscope import plot, recorder
from flowscope.errors import FlowscopeError
from flowscope.instruments import METRICS, PointStatistic, instruments_for
from flowscope.metrics import Metric, of_0_1, spec_of
from flowscope.model.view import ModelView
from flowscope.ranks.ranks import is_local
from flowscope.records import Alert, Record, RunHeader, split_key
from flowscope.sinks import MemorySink, Run, depth_profile_text, reduction
from flowscope.views.overview import RunView, place
from flowscope.views.report import report_payload


def test_a_metric_survives_json_and_leaves_out_its_defaults() -> None:
    plain = Metric("my_kurtosis", "Fourth moment over squared second.")
    assert plain.to_json() == {"name": "my_kurtosis", "words": "Fourth moment over squared second."}
    full = Metric(
        "x", "y", rows="modules", band=("a", "b"), bounds=(0.0, 1.0), limits=("c",), drawn=False, charted="log"
    )
    for metric in (plain, full):
        assert Metric.from_json(json.loads(json.dumps(metric.to_json()))) == metric


def test_a_metric_of_a_later_version_can_be_read() -> None:
    assert Metric.from_json({"name": "x", "invented_later": 3, "scale": "square"}) == Metric("x", "")


def test_a_metric_with_a_word_that_nobody_knows_is_refused_when_it_is_written() -> None:
    with pytest.raises(FlowscopeError, match=r"Metric\('x', scale='square'\): expected one of log, linear"):
        Metric("x", "", scale="square")  # type: ignore[arg-type]


def test_rows_say_whether_a_metric_belongs_to_a_flow() -> None:
    assert [Metric("x", "", rows=rows).per_flow for rows in ("blocks", "modules", "model")] == [True, False, False]


FROZEN = json.loads((Path(__file__).parent / "frozen_metrics.json").read_text())
NAMES = sorted(FROZEN)
COLLECTIONS = ast.Tuple | ast.List | ast.Set | ast.Dict
CHARTED = [name for name, metric in METRICS.items() if metric.charted]


def answers(name: str) -> dict[str, object]:
    """What every module that treats metrics differently says of one."""
    record = Record(0, flow_names=("rnn.l0", "net"), specs=METRICS)
    presented = spec_of(name, METRICS)
    return {
        "view": presented.view,
        "words": presented.says,
        "shape": presented.shape,
        "scale": presented.scale,
        "band": list(presented.band) if presented.band else None,
        "bounds": list(presented.bounds) if presented.bounds else None,
        "fitted": presented.fitted,
        "limits": list(presented.limits),
        "per_flow": presented.per_flow,
        "logged": presented.logged,
        "chart": CHARTED.index(name) if name in CHARTED else None,
        "log_chart": presented.charted == "log",
        "chart_of_parameters": presented.charted is not None and presented.rows == "parameters",
        "of_gradient": presented.of_gradient,
        "undrawn": not presented.drawn,
        "times_loss_scale": _unscaled(name),
        "local": is_local(name, record, (), sharded=False),
        "local_where_sharded": is_local(name, record, (), sharded=True),
        # what a flow through time writes is made of one rank's numbers
        "local_in_a_local_flow": is_local(name, record, {name} if presented.per_flow else (), sharded=False),
    }


def _unscaled(name: str) -> bool:
    record = Record(0, metrics={name: np.ones(1)}, specs=METRICS)
    recorder._unscale(record, 2.0)
    return bool(record.metrics[name][0] != 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_table_answers_as_it_did(name: str) -> None:
    assert answers(name) == FROZEN[name]


def test_metrics_are_frozen_whole() -> None:
    assert {*METRICS, "my_norm", "my_share"} <= set(NAMES)


@pytest.mark.parametrize("name", sorted(of_0_1()))
def test_runs_of_0_1_are_drawn_like_those_that_describe_themselves(name: str) -> None:
    assert replace(METRICS[name], formula="", source="", unit="") == of_0_1()[name]


KURTOSIS = Metric("my_kurtosis", "Fourth moment over squared second.", view="Depth", scale="log", logged=True)


def run_of_a_stranger() -> Run:
    """A run whose only metric no table knows; it went through JSON."""
    labels = {"my_kurtosis": ("x", "y")}
    told = RunHeader("0.2", (), labels, metrics={"my_kurtosis": KURTOSIS}, shown_by={"outliers": ("my_kurtosis",)})
    header = RunHeader.from_json(json.loads(json.dumps(told.to_json())))
    assert header == told
    return Run(header, [Record.from_json({"step": 0, "metrics": {"my_kurtosis": [3.0, 300.0]}}, header)], [])


def test_a_run_tells_everyone_of_a_metric_that_no_table_knows() -> None:
    run = run_of_a_stranger()
    strange = Alert("outliers", "warning", "y", 0, 300.0, 100.0, "m", "a")
    assert place(RunView("a", run.header, dict(run.header.labels)), strange) == ("my_kurtosis", 1)
    assert run.records[0].spec("my_kurtosis@decoder") == KURTOSIS
    (shown,) = report_payload({"a": run}, "")["runs"][0]["metrics"]
    assert (shown["view"], shown["scale"], shown["words"]) == ("Depth", "log", KURTOSIS.words)
    assert plot.depth_profile(run, "my_kurtosis").axes[0].get_yscale() == "log"
    assert "bars: log10" in depth_profile_text({"a": run.records[0]}, "my_kurtosis")
    assert set(reduction.record_scalars(run.records[0])) == {f"my_kurtosis/{end}" for end in ("min", "median", "max")}


def test_a_header_of_0_1_is_read_and_its_metrics_are_known() -> None:
    header = RunHeader.from_json({"type": "run", "version": "0.1", "flows": [], "labels": {"gain": ["a"]}})
    assert header.metrics == {}
    assert Record.from_json({"step": 0, "metrics": {"gain": [1]}}, header).spec("gain").rows == "blocks"


def test_the_header_of_a_run_has_the_spec_of_each_of_its_metrics() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    memory = MemorySink()
    with flowscope.watch(model, optimizer, sinks=[memory]):
        model(torch.randn(3, 8)).square().mean().backward()
        optimizer.step()
    header, record = memory.header, memory.records[-1]
    assert header is not None
    assert {split_key(key)[0] for key in record.metrics} <= {*header.metrics, "step_losses"}
    assert all(name == metric.name for name, metric in header.metrics.items())
    assert "route_load" not in header.metrics
    assert header.shown_by["no_gradient"] == ("backward_calls", "param_grad_norm")
    assert header.extremes == {"vanishing_gradient": "least", "exploding_gradient": "largest"}
    assert RunHeader.from_json(json.loads(json.dumps(header.to_json()))) == header


def test_the_tables_of_the_documentation_are_those_of_the_specs() -> None:
    text = metric_tables.FILE.read_text(encoding="utf-8")
    assert metric_tables.rendered(text) == text, "python -m benchmarks.metric_tables --write"


def tables_in(tree: ast.Module) -> set[str]:
    """The metrics that stand in a collection which a module or a class keeps."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    kept = [node.value for body in bodies for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]
    found = [part for value in kept if value for part in ast.walk(value) if isinstance(part, COLLECTIONS)]
    return {n.value for part in found for n in ast.walk(part) if isinstance(n, ast.Constant)} & METRICS.keys()


def test_only_what_measures_and_judges_keeps_tables_of_metrics() -> None:
    package = Path(flowscope.__file__).parent
    own = {"instruments", "detectors", "merging", "specs.py", "metrics.py"}
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] not in own and path.name != "site_metrics.py":
            assert tables_in(ast.parse(path.read_text())) == set(), f"{path}: what is said of a metric is in its spec"
    assert tables_in(ast.parse('class A:\n    B = frozenset({"gain": 1})')) == {"gain"}


def test_an_instrument_of_ones_own_cannot_say_something_else_of_a_metric() -> None:
    class Other(PointStatistic):
        name, words, columns = "gain", "Something else.", 1

    with pytest.raises(FlowscopeError, match="'gain' says something else of gain than flowscope does"):
        instruments_for(ModelView(torch.nn.Linear(2, 2)), flowscope.WatchConfig(), [Other])
