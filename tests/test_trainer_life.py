"""What happens around a fit: a second one, a resume, a pickle, models that are none, wrappers' names."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowscope
from flowscope.integrations.lightning import FlowscopeCallback
from flowscope.integrations.trainer import loss_in, module_in
from flowscope.sinks import read_run

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def loader() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,))), 4)


def test_a_second_fit_goes_on_and_a_resume_without_our_state_too(tmp_path: Path) -> None:
    watcher = FlowscopeCallback(every=1, log_dir=tmp_path / "run")
    trainer, module = pl.Trainer(max_epochs=1, callbacks=[watcher], **QUIET), Lit()
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert [record.step for record in read_run(tmp_path / "run").records] == list(range(8))
    assert pickle.loads(pickle.dumps(watcher)).scope is None

    bare = pl.Trainer(max_epochs=1, **QUIET)
    bare.fit(module := Lit(), loader())
    bare.save_checkpoint(tmp_path / "bare.ckpt")
    watcher = FlowscopeCallback(every=1)
    pl.Trainer(max_epochs=2, callbacks=[watcher], **QUIET).fit(Lit(), loader(), ckpt_path=tmp_path / "bare.ckpt")
    assert watcher.scope is not None
    assert [record.step for record in watcher.scope.records] == [4, 5, 6, 7]


def test_of_manual_optimization_a_step_has_the_mean_of_its_losses() -> None:
    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization, self.told = False, []
            self.g, self.d = (nn.Sequential(nn.Linear(a, 8), nn.Tanh(), nn.Linear(8, b)) for a, b in ((4, 6), (6, 1)))

        def training_step(self, batch: Any, number: int) -> None:
            for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
                self.toggle_optimizer(optimizer)
                loss = sign * (self.d(batch[0]).mean() - self.d(self.g(torch.randn(4, 4))).mean())
                self.told.append(float(loss.detach()))
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(self.g.parameters()), torch.optim.Adam(self.d.parameters())], []

    alerts: list[Any] = []
    watcher, module = FlowscopeCallback(every=1, on_alert=alerts.append), Gan()
    pl.Trainer(max_epochs=1, callbacks=[watcher], **QUIET).fit(module, loader())
    assert watcher.scope is not None
    means = [(a + b) / 2 for a, b in zip(module.told[::2], module.told[1::2], strict=True)]
    assert [record.loss for record in watcher.scope.records] == pytest.approx(means, abs=1e-6)
    assert "no_gradient" not in {alert.kind for alert in alerts}


def test_what_a_command_line_takes_is_in_the_signature() -> None:
    callback = FlowscopeCallback(config={"metrics": ["flow"]}, flows=["net"], every=1)
    module = Lit()
    pl.Trainer(max_epochs=1, callbacks=[callback], **QUIET).fit(module, loader())
    assert callback.scope is not None
    assert [flow.name for flow in callback.scope.flows] == ["net"]
    assert callback.scope.config.metrics == ("flow",)


def test_a_model_that_is_no_module_is_looked_into_or_switches_off_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = nn.Linear(2, 2)
    assert module_in(body) is body
    assert module_in(SimpleNamespace(model_body=body)) is body
    with caplog.at_level(logging.WARNING, "flowscope"):
        assert module_in(SimpleNamespace()) is None
    assert len(caplog.records) == 1


def test_the_loss_is_found_in_what_a_step_returns() -> None:
    loss = torch.tensor(2.0)
    for output in (loss, {"loss": loss, "pred": loss}, [{"loss": loss}, {"loss": loss}]):
        assert loss_in(output) is loss
    for output in ("2", None, (loss, loss), [loss], {"pred": loss}, []):
        assert loss_in(output) is None


@pytest.mark.parametrize("names", [("_forward_module",), ("_forward_module", "module"), ("_module",), ("_orig_mod",)])
def test_wrappers_are_shown_through_in_names_and_in_flows(names: tuple[str, ...]) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(3))

    model: nn.Module = Bare()
    for name in reversed(names):
        outer = nn.Module()
        outer.add_module(name, model)
        model = outer
    for chosen in (None, ["blocks"]):
        assert [flow.name for flow in flowscope.find_flows(model, flows=chosen)] == ["blocks"]
