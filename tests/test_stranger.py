"""One class of a stranger, nothing of the package touched: a number per depth is shown wherever numbers are shown.

Its promises one by one, two ranks among them: tests/test_point_statistics.py; those of a detector of one's own:
tests/test_own_detectors.py; of a connection: tests/test_own_connections.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from own_instruments import ThirdMoment
from panels_run import client
from watch_models import Stack, data, loss_of, sgd

import flowscope
from flowscope.detectors import Limit
from flowscope.metrics import Metric
from flowscope.sinks import read_run
from flowscope.sinks.console import depth_profile_text
from flowscope.testing import check_detector

STEPS = 4
NAME = ThirdMoment.name


class Skewed(Limit):
    """A limit on the stranger's own number."""

    kind, metric, above, per = "skewed", NAME, -1.0, "flow"
    message, advice = "{where} is skewed: {value:.2g} (limit {limit:.2g}; {count} of {size} points)", "centre it"


class Trained(NamedTuple):
    """A closed run, its folder, what the callback heard, and the third moments of a naive loop [steps, P]."""

    scope: flowscope.Scope
    folder: Path
    heard: list[flowscope.Alert]
    state: dict[str, Any]
    expected: np.ndarray


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    torch.manual_seed(0)
    folder, heard, expected = tmp_path_factory.mktemp("run"), [], []
    model = Stack()
    optimizer = sgd(model)
    own = {"instruments": [ThirdMoment], "detectors": [Skewed], "on_alert": heard.append}
    with flowscope.watch(model, optimizer, every=1, log_dir=folder, **own) as scope:
        for k in range(STEPS):
            optimizer.zero_grad()
            taps: list[torch.Tensor] = []
            loss_of(model, data(k), taps).backward()
            expected.append([float((x.detach().double() ** 3).mean()) for x in taps])
            optimizer.step()
        state = scope.state_dict()
    return Trained(scope, folder, heard, state, np.array(expected))


# -- the number --------------------------------------------------------------------------------------------------------


def test_it_is_in_the_records(run: Trained) -> None:
    np.testing.assert_allclose([record[NAME] for record in run.scope.records], run.expected, rtol=1e-9)
    assert run.scope.records[0].labels(NAME) == ["blocks.0:input", *(f"blocks.{k}" for k in range(4))]


def test_it_is_in_the_json_lines_with_its_spec_in_the_header(run: Trained) -> None:
    header, *lines = (json.loads(line) for line in (run.folder / "flowscope.jsonl").read_text().splitlines())
    specs = header["metrics"] if isinstance(header["metrics"], list) else [*header["metrics"].values()]
    (spec,) = (spec for spec in specs if spec["name"] == NAME)
    assert spec["words"] == ThirdMoment.words
    records = [line for line in lines if line["type"] == "record"]
    np.testing.assert_allclose([line["metrics"][NAME] for line in records], run.expected, rtol=1e-6)
    loaded = read_run(run.folder)
    assert loaded.header is not None
    assert Metric.from_json(spec) == loaded.header.metrics[NAME] == ThirdMoment.metrics[0]
    np.testing.assert_allclose(loaded.records[-1][NAME], run.expected[-1], rtol=1e-6)


def test_it_is_in_the_tab(run: Trained) -> None:
    ask = client(run.folder)
    (shown,) = (metric for metric in ask("overview")["runs"][0]["metrics"] if metric["metric"] == NAME)
    drawn = {key: shown[key] for key in ("view", "scale", "shape", "words", "rows")}
    assert drawn == {"view": "Depth", "scale": "linear", "shape": "profile", "words": ThirdMoment.words, "rows": 5}
    series = ask("series", run=".", key=NAME)
    assert series["steps"] == [*range(STEPS)]
    np.testing.assert_allclose(series["values"], run.expected.T, rtol=1e-4)
    np.testing.assert_allclose(ask("record", run=".", key=NAME, step=2)["values"], run.expected[2], rtol=1e-4)


def test_it_is_in_the_report(run: Trained, tmp_path: Path) -> None:
    page = run.scope.report(tmp_path / "report.html").read_text()
    payload = json.loads(max(re.findall(r"<script[^>]*>(\{.*?\})</script>", page, re.S), key=len))
    assert NAME in {metric["key"] for metric in payload["runs"][0]["metrics"]}
    assert ThirdMoment.words in page


def test_it_is_drawn_by_plot_and_console_and_notebook(run: Trained) -> None:
    plot = pytest.importorskip("flowscope.plot")
    axes = plot.depth_profile(run.scope, NAME).axes[0]
    assert axes.get_yscale() == "linear"
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    assert any(len(line) == 5 and np.allclose(line, run.expected[-1]) for line in drawn)
    plot.heat_map(run.scope, NAME)
    plot.compare({"a": run.scope, "b": run.scope}, NAME)
    text = depth_profile_text({"a": run.scope.records[-1]}, NAME)
    assert text.startswith(f"{NAME} (input first; bars: ")
    assert f"<td>{NAME}</td>" in run.scope.records[-1]._repr_html_()


# -- the alarm ---------------------------------------------------------------------------------------------------------


def test_a_detector_of_it_is_heard_everywhere(run: Trained, tmp_path: Path) -> None:
    check_detector(Skewed)
    (alert,) = (alert for alert in run.scope.alerts if alert.kind == "skewed")
    assert alert in run.heard
    assert (alert.state, alert.value) == ("raised", pytest.approx(run.expected[1].max()))
    assert "is skewed" in run.scope.summary()
    assert "is skewed" in run.scope.report(tmp_path / "report.html").read_text()
    assert "skewed" in {row["owner"] for row in run.state["detectors"]["ledger"]}
    assert alert.message in {written.message for written in read_run(run.folder).alerts}
    (shown,) = (alert for alert in client(run.folder)("overview")["runs"][0]["alerts"] if alert["kind"] == "skewed")
    assert shown["key"] == NAME  # the tab opens the picture of the number that it is about
