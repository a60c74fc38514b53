"""docs/which-connection.md: a trained Pre-LN checkpoint is wrapped, its output kept, and goes on training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import wrap_models as models
from torch import Tensor, nn
from wrap_models import B, D, T

import flowscope

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/which-connection.md").read_text("utf-8"), re.M | re.S)[0]


def make() -> nn.Module:
    torch.manual_seed(0)
    return models.Stack(models.PreNormBlock, 3)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(B, T, D, generator=generator) for _ in range(count)]
    return [(x, x[..., :7].sin() + x.roll(1, -1)[..., :7]) for x in drawn]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def mean_loss(model: nn.Module, held: list[tuple[Tensor, Tensor]]) -> float:
    with torch.no_grad():
        return sum(loss_of(model, batch).item() for batch in held) / len(held)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.chdir(tmp_path)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in batches(60):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    torch.save(model.state_dict(), "pretrained.pt")
    return model


def test_the_page_converts_a_checkpoint_and_goes_on(checkpoint: nn.Module) -> None:
    held = batches(8)
    before = mean_loss(checkpoint, held)
    assert before < 0.8 * mean_loss(make(), held)
    space: dict[str, Any] = {"model": make(), "inputs": held[0][0], "loss_of": loss_of, "loader": batches(60)}
    exec(compile(BLOCK, "docs/which-connection.md", "exec"), space)
    losses = [record.loss for record in space["scope"].records]
    assert losses[0] == pytest.approx(loss_of(checkpoint, batches(1)[0]).item(), rel=1e-5)
    assert mean_loss(space["model"], held) < 0.95 * before
    again = flowscope.wrap(make(), mode="dhc", streams=4, example_inputs=held[0][0])
    again.load_state_dict(torch.load("continued.pt"))
    assert mean_loss(again, held) == mean_loss(space["model"], held)
    assert set(torch.load("pretrained.pt")) < set(torch.load("continued.pt"))


@pytest.mark.parametrize(
    ("mode", "options"), [("dhc", {}), ("shc", {}), ("mhc", {}), ("keel", {"preserve": True}), ("keel", {})]
)
def test_modes_that_keep_the_output_keep_a_trained_ones(
    checkpoint: nn.Module, mode: str, options: dict[str, Any]
) -> None:
    model, x = make(), batches(1)[0][0]
    flowscope.wrap(model, mode, example_inputs=x, **options)
    model.load_state_dict(torch.load("pretrained.pt"))
    with torch.no_grad():
        change = (model(x) - checkpoint(x)).abs().max() / checkpoint(x).abs().max()
    assert change < 1e-5 if (mode, options) != ("keel", {}) else change > 1e-3


def test_the_old_optimizer_goes_on_with_its_moments(checkpoint: nn.Module) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    flowscope.wrap(model, "keel", preserve=True, example_inputs=batches(1)[0][0], optimizer=optimizer)
    for name, parameter in model.named_parameters():
        if name in moments:
            assert torch.equal(optimizer.state[parameter]["exp_avg"], moments[name])
        else:
            assert any(parameter is p for group in optimizer.param_groups[1:] for p in group["params"])
