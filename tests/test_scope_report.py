"""`scope.report(path)`: the run so far, in one file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import flowscope


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 5, 8)).pow(2).mean().backward()
        optimizer.step()


def test_report_of_a_scope(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = flowscope.watch(model, optimizer, config={"console": "off"})
    with pytest.raises(flowscope.FlowscopeError, match="no record yet"):
        scope.report(tmp_path / "early.html")
    train(model, optimizer, 2)
    file = scope.report(str(tmp_path / "new" / "a.html"))
    assert file == tmp_path / "new" / "a.html"
    first = file.read_text()
    assert first.startswith("<!doctype html>")
    assert "3.0" in first, "a module's path"
    train(model, optimizer, 4)
    scope.close()
    # after closing too, and with the new steps
    assert len(scope.report(tmp_path / "b.html").read_text()) > len(first)
    with pytest.raises(flowscope.FlowscopeError, match=r"b\.html"):
        scope.report(tmp_path / "b.html" / "c.html")
    assert not (tmp_path / "early.html").exists()
