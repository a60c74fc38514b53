"""The stages of a pipeline write a run each, and are read as one: that of one process, by torch.autograd."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from panels_run import client
from pipeline_models import MICRO, STEPS, batch, blocks
from torch import nn
from two_ranks import torchrun

from flowscope.cli import main
from flowscope.live import follow
from flowscope.records import Alert, FlowLayout, Record, Run, RunHeader
from flowscope.sinks import read_run
from flowscope.sinks.reading import is_run, runs_below
from flowscope.sinks.stages import Arriving


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 2), ("1f1b", 2), ("interleaved", 4)])
def test_stages_are_one_run(tmp_path: Path, schedule: str, stages: int) -> None:
    tmp_path /= "run"
    torchrun("pipeline_program.py", schedule, str(tmp_path), limit=170, PYTHONWARNINGS="ignore")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"stage-{at}" for at in range(stages)]
    run, parts = read_run(tmp_path), [read_run(tmp_path / f"stage-{at}") for at in range(stages)]
    assert is_run(tmp_path)
    assert runs_below(tmp_path.parent) == [tmp_path]
    report = tmp_path.parent / "report.html"
    assert main(["report", str(tmp_path), "-o", str(report)]) == 0
    assert "stage-1: " in report.read_text()
    assert [record.step for record in run.records] == [*range(STEPS)]
    assert all(record.flags == () for record in run.records)
    assert run.header is not None
    assert len(run.header.flows[0].points) == 13
    the_same_in_the_tab(tmp_path, run)
    the_same_live(tmp_path, run)
    every = blocks()
    optimizer = torch.optim.SGD(nn.ModuleList(every).parameters(), 0.1)
    for step, record in enumerate(run.records):
        x, y = batch(step)
        optimizer.zero_grad()
        squares, sizes, losses = np.zeros(13), np.zeros(13), []
        for a, b in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
            taps = [a]
            for block in every:
                taps.append(block(taps[-1]))
            loss = nn.functional.mse_loss(taps[-1], b)
            gradients = torch.autograd.grad(loss, taps[1:], retain_graph=True)
            (loss / MICRO).backward()
            losses.append(loss.item())
            squares += [0.0, *(float(g.double().square().sum()) for g in gradients)]
            sizes += [float(tap.detach().double().square().mean()) / MICRO for tap in taps]
        optimizer.step()
        norms = np.sqrt(squares)
        # the first input asks for no gradient
        np.testing.assert_allclose(record.metrics["grad_norm"][1:], norms[1:], rtol=1e-5)
        np.testing.assert_allclose(record.metrics["gradient_product"][1:], norms[1:] / norms[-1], rtol=1e-5)
        np.testing.assert_allclose(record.metrics["act_rms"], np.sqrt(sizes), rtol=1e-5)
        if not any("rank's own" in note for note in record.notes):
            assert record.loss == pytest.approx(np.mean(losses), rel=1e-5)
        for before, after in itertools.pairwise(parts):
            one, other = before.records[step].metrics["grad_norm"], after.records[step].metrics["grad_norm"]
            assert one[-1] == pytest.approx(other[0], rel=1e-6)


def the_same_in_the_tab(folder: Path, run: Run) -> None:
    """One run, not one a stage, in its own folder and seen from above."""
    for log_dir, name in ((folder, "."), (folder.parent, "run")):
        ask = client(log_dir)
        (shown,) = ask("overview")["runs"]
        assert shown["name"] == name
        assert shown["flows"][0]["points"] == 13
        assert shown["last_step"] == STEPS - 1
        assert {"grad_norm", "gradient_product", "param_norm"} <= {metric["key"] for metric in shown["metrics"]}
        for key in ("grad_norm", "gradient_product", "param_norm"):
            found = ask("series", run=name, key=key)
            assert found["steps"] == [*range(STEPS)]
            expected = np.array([record.metrics[key] for record in run.records]).T
            np.testing.assert_allclose(np.array(found["values"], dtype=float), expected, rtol=1e-4)
            assert [row[0] for row in found["rows"]] == [*run.records[0].metric_labels[key]]
            record = ask("record", run=name, key=key, step=1)
            np.testing.assert_allclose(np.array(record["values"], dtype=float), expected[:, 1], rtol=1e-4)


def the_same_live(folder: Path, run: Run) -> None:
    batches = follow(folder, sleep=lambda seconds: None)
    events = [*next(batches), *next(batches)]
    headers = [event for event in events if isinstance(event, RunHeader)]
    assert headers[-1].flows == run.header.flows  # type: ignore[union-attr]
    records = [event for event in events if isinstance(event, Record)]
    assert [record.step for record in records] == [*range(STEPS)]
    for one, other in zip(records, run.records, strict=True):
        assert one.loss == other.loss
        np.testing.assert_array_equal(one.metrics["gradient_product"], other.metrics["gradient_product"])


def stage(number: int, step: int) -> Record:
    labels = {"grad_norm": (f"{number}.in", f"{number}.out"), "route_dead": ("moe",)}
    metrics = {"grad_norm": np.array([4.0 - number, 3.0 - number])} | ({"route_dead": np.zeros(1)} if number else {})
    return Record(step, float(number), metrics, metric_labels=labels)


def test_stages_of_a_run_that_is_being_written_come_as_their_records_do() -> None:
    """A stage may be ahead, leave a step out, and find something; what one stage alone has is there, too."""
    headers = [
        RunHeader(flows=(FlowLayout("blocks", "blocks", (f"{at}.in", f"{at}.out"), (f"{at}",)),)) for at in range(2)
    ]
    arriving = Arriving(2)
    finding = Alert("expert_collapse", "warn", "moe", 1, 1.0, 0.5, "message", "advice", flow="blocks")
    assert arriving.take(0, headers[0]) == []
    assert [arriving.take(0, stage(0, step)) for step in range(3)] == [[]] * 3
    (header,) = arriving.take(1, headers[1])
    assert header.flows[0].points == ("stage-0: 0.in", "stage-0: 0.out", "stage-1: 1.out")
    assert [event.step for event in arriving.take(1, stage(1, 0))] == [0]
    (alert,) = arriving.take(1, finding)
    assert (alert.where, alert.flow) == ("stage-1: moe", "blocks")
    (record,) = arriving.take(1, stage(1, 2))
    assert (record.step, record.loss) == (2, 1.0)
    assert record.metrics["grad_norm"].tolist() == [4.0, 3.0, 2.0]
    assert record.metric_labels["route_dead"] == ("stage-1: moe",)
