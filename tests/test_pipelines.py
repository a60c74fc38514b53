"""The stages of a pipeline write a run each, and are read as one: that of one process, by torch.autograd."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from pipeline_models import MICRO, STEPS, batch, blocks
from torch import nn
from two_ranks import torchrun

from flowscope.cli import main
from flowscope.sinks import read_run
from flowscope.sinks.reading import is_run, runs_below


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
