"""What wrapping is for, trained from scratch: a Post-LN decoder that does not train does so once wrapped.

Byte-level text (examples/byte_lm.py), d=64, AdamW 1e-3, clip 1, mean loss of the last 20 of 120 steps. A byte model
that knows only the frequencies is at about 3.1-3.2. The figures are printed (pytest -s).
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from wrap_models import BasicBlock

import flowscope

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from byte_lm import ByteLM, batches, load_text, train_step


@cache
def final_loss(norm: str, depth: int, mode: str | None) -> float:
    """The mean loss of the last 20 of 120 steps."""
    torch.manual_seed(0)
    model, text = ByteLM(norm=norm, depth=depth), load_text()
    data = batches(text)
    if mode is not None:
        flowscope.wrap(model, mode, example_inputs=next(batches(text, batch=2))[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [train_step(model, optimizer, next(data)).item() for _ in range(120)]
    loss = float(np.mean(losses[-20:]))
    print(f"{norm}-norm, {depth} blocks, {mode or 'plain'}: {loss:.3f}")
    return loss


def test_plain_post_ln_stays_on_its_plateau() -> None:
    assert 3.1 <= final_loss("post", 24, None) < 3.3


@pytest.mark.parametrize("mode", ["keel", "keel-postln"])
def test_post_ln_trains_once_wrapped(mode: str) -> None:
    assert final_loss("post", 24, mode) <= final_loss("post", 24, None) - 0.3


def test_keel_does_pre_ln_no_harm() -> None:
    assert final_loss("pre", 12, "keel") <= final_loss("pre", 12, None) + 0.03


class ResNet(nn.Module):
    """Two stages of two blocks for 8x8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


@pytest.mark.parametrize("mode", ["keel", "dhc"])
def test_a_resnet_trains(mode: str) -> None:
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(digits.target)
    torch.manual_seed(0)
    model = ResNet()
    flowscope.wrap(model, mode, example_inputs=images[:5])
    start = {path: p.detach().clone() for path, p in model.named_parameters() if "connection" in path}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # decayed to zero: at a constant rate the accuracy on 297 digits moves by .04 from epoch to epoch, plain or wrapped
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(0))
    for _ in range(8):
        for rows in order.split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        decay.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).double().mean().item()  # 297 unseen digits
    print(f"ResNet, {mode}: {accuracy:.3f} of unseen digits right")
    assert accuracy > 0.9
    assert all(not torch.equal(p, start[path]) for path, p in model.named_parameters() if path in start)
