"""The trainers on two processes (gloo, torch's launcher): the numbers of the whole batch in one, and a stop on both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from trainers_program import CLIP, LR, STEPS, batches, build
from two_ranks import RANKS, torchrun

Result = dict[str, Any]
SAME = ["lightning ddp", "lightning fsdp2", "transformers ddp", "accelerate ddp"]
STOPPING = ["lightning stop", "accelerate stop"]


def bare(clip: float | None) -> list[Result]:
    """The same training on whole batches in one process, by torch.autograd."""
    model, rows = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for inputs, targets in batches():
        taps: list[Tensor] = []
        loss = nn.functional.mse_loss(model(inputs, taps), targets)
        points = [g.norm().item() for g in torch.autograd.grad(loss, taps, retain_graph=True)]
        optimizer.zero_grad()
        loss.backward()
        raw = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        used = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        optimizer.step()
        rows.append({"loss": loss.item(), "points": points, "raw": raw, "used": used})
    return rows


def check_numbers(name: str, result: Result) -> None:
    expected = bare(None if name == "lightning fsdp2" else CLIP)
    assert result["steps"] == len(result["losses"]) == STEPS
    assert [label.removeprefix("model.") for label in result["labels"]] == list(expected[0]["raw"])
    for k, row in enumerate(expected):
        assert result["losses"][k] == pytest.approx(row["loss"], rel=1e-5)
        np.testing.assert_allclose(result["grad_norm"][k], row["points"], rtol=1e-5)
        np.testing.assert_allclose(result["param_grad_norm"][k], list(row["used"].values()), rtol=1e-4)
        np.testing.assert_allclose(result["param_grad_norm_raw"][k], list(row["raw"].values()), rtol=1e-4)
    assert result["alerts"] == []


def test_numbers_are_those_of_the_whole_batch_and_an_alert_stops_both(tmp_path: Path) -> None:
    # one test: the processes take some time to start, and test workers share no fixtures
    torchrun("trainers_program.py", str(tmp_path), limit=500)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in RANKS)
    assert first.keys() == second.keys() == {*SAME, *STOPPING}
    for name in SAME:
        check_numbers(name, first[name])
        check_numbers(name, second[name])
    for name in STOPPING:
        assert first[name]["steps"] == second[name]["steps"] < 8
        assert first[name]["alerts"] == second[name]["alerts"]
        assert first[name]["alerts"][0] == ["non_finite", 2]  # in the second rank's half of the batch
