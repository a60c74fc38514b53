"""`FlowscopeCallback` in real Lightning runs: steps, losses, scopes, stopping, checkpoints, exceptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flowscope
from flowscope.integrations.lightning import FlowscopeCallback

WIDTH, DEPTH, BATCH = 6, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Lit(pl.LightningModule):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 2)
        self.fail_at = fail_at
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.fail_at:
            raise RuntimeError("a broken batch")
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data(batches: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(batches * BATCH, 5, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=BATCH)


def make_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**settings, **options})


def make_model(**options: Any) -> Lit:
    torch.manual_seed(0)
    return Lit(**options)


def test_records_have_the_steps_and_the_losses() -> None:
    watcher, model = FlowscopeCallback(every=1), make_model()
    make_trainer(watcher).fit(model, data())
    assert watcher.scope is not None
    records = list(watcher.scope.records)
    assert [r.step for r in records] == [0, 1, 2, 3]
    assert [r.loss for r in records] == pytest.approx(model.losses, rel=1e-6)
    assert all(r["gradient_product"].shape == (DEPTH + 1,) for r in records)


def test_gradient_norms_are_those_of_a_bare_loop() -> None:
    watcher = FlowscopeCallback(every=1)
    make_trainer(watcher).fit(make_model(), data())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    assert watcher.scope is not None
    for record, (x, y) in zip(watcher.scope.records, data(), strict=True):
        h = model.embed(x)
        points = [h]
        for block in model.blocks:
            h = block(h)
            points.append(h)
        loss = nn.functional.mse_loss(model.head(h), y)
        expected = [g.norm().item() for g in torch.autograd.grad(loss, points, retain_graph=True)]
        np.testing.assert_allclose(record["grad_norm"], expected, rtol=1e-5)
        optimizer.zero_grad()
        loss.backward()
        # Lightning runs the backward inside optimizer.step(closure): this step's gradient, not the last one's
        for name, value in zip(record.labels("param_grad_norm"), record["param_grad_norm"], strict=True):
            assert value == pytest.approx(model.get_parameter(name).grad.norm().item(), rel=1e-5), name
        optimizer.step()


def test_the_first_batches_are_tried_and_the_training_is_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    bare, tried, drawn = make_model(), make_model(), []
    for model, callbacks in ((bare, []), (tried, [FlowscopeCallback(check=True)])):
        torch.manual_seed(3)
        make_trainer(*callbacks).fit(model, data())
        drawn.append(torch.rand(1))
    assert bare.losses == tried.losses
    assert torch.equal(*drawn)
    for (name, a), b in zip(bare.named_parameters(), tried.parameters(), strict=True):
        assert torch.equal(a, b), name
    report = callbacks[0].check_report
    assert report is not None
    statuses = {finding.trial: finding.status for finding in report.findings}
    assert {statuses[name] for name in ("samples", "gradient", "update", "saving", "data", "signal")} == {"pass"}
    assert capsys.readouterr().out.count(str(report)) == 1
    assert tried.trainer.callback_metrics.keys() == bare.trainer.callback_metrics.keys()


class Noisy(Lit):
    """Draws in training: a pass repeats only with the random state of then."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class DividesAgain(Lit):
    """Divides by the number of micro-batches, which Lightning does itself."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.trainer.accumulate_grad_batches


class NeverZeroed(Lit):
    """What a step leaves in the gradients stays there."""

    def optimizer_zero_grad(self, *given: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "micro", "batches", "status", "says"),
    [
        (Lit, 1, 4, "pass", "that of its 1 micro-batches"),
        (Noisy, 2, 4, "pass", "that of its 2 micro-batches"),
        (DividesAgain, 2, 4, "fail", "the gradient is 1/2 of that of one batch of the same samples"),
        (NeverZeroed, 2, 4, "fail", "times that of the step's batches"),
        (Lit, 3, 4, "skipped", "an epoch ended within it"),
        (Lit, 4, 4, "skipped", "the training is over"),
    ],
)
def test_accumulation_is_tried_on_the_trainers_own_step(
    kind: Any, micro: int, batches: int, status: str, says: str
) -> None:
    torch.manual_seed(0)
    model, callback = kind(), FlowscopeCallback(check=True)
    # what is left of a clipped gradient is next to nothing
    clip = None if kind is NeverZeroed else 0.01
    make_trainer(callback, accumulate_grad_batches=micro, gradient_clip_val=clip).fit(model, data(batches))
    assert callback.check_report is not None
    [found] = [finding for finding in callback.check_report.findings if finding.trial == "accumulation"]
    assert (found.status, says in found.message) == (status, True), found


def test_training_is_unchanged() -> None:
    bare, watched = make_model(), make_model()
    make_trainer().fit(bare, data())
    make_trainer(FlowscopeCallback(every=1)).fit(watched, data())
    assert bare.losses == watched.losses
    for (name, a), b in zip(bare.named_parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_callback_takes_alerts_as_watch_does() -> None:
    with pytest.raises(flowscope.FlowscopeError, match=r"on_alert=.*got int \(3\)"):
        FlowscopeCallback(on_alert=3)  # type: ignore[arg-type]
    watcher = FlowscopeCallback(every=1, on_alert=(action for action in [print]))
    make_trainer(watcher).fit(make_model(), data())
    assert watcher.scope is not None
    assert len(watcher.scope.records) > 0


def test_accumulated_micro_batches_are_one_step() -> None:
    watcher, model = FlowscopeCallback(every=1), make_model()
    make_trainer(watcher, accumulate_grad_batches=2).fit(model, data())
    assert watcher.scope is not None
    records = list(watcher.scope.records)
    assert [r.step for r in records] == [0, 1]
    means = [sum(model.losses[:2]) / 2, sum(model.losses[2:]) / 2]
    assert [r.loss for r in records] == pytest.approx(means, rel=1e-6)


def test_stop_on_ends_the_fit_and_the_alert_still_reaches_the_user() -> None:
    seen: list[flowscope.Alert] = []
    watcher, model = FlowscopeCallback(every=1, on_alert=seen.append, stop_on="non_finite"), make_model()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    trainer = make_trainer(watcher)
    trainer.fit(model, data(batches=9))
    assert "non_finite" in [a.kind for a in seen]
    assert trainer.should_stop
    assert trainer.global_step < 9


def test_an_action_that_stops_training_ends_the_fit_without_an_exception() -> None:
    watcher, model = FlowscopeCallback(every=1, on_alert=flowscope.actions.Stop("non_finite")), make_model()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    trainer = make_trainer(watcher)
    trainer.fit(model, data(batches=9))
    assert trainer.should_stop
    assert trainer.global_step < 9


def test_without_a_callback_alerts_go_to_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    make_trainer(FlowscopeCallback(every=1, stop_on="non_finite")).fit(model, data())
    captured = capsys.readouterr()
    assert "non_finite" in captured.out + captured.err


def gradients(state: dict[str, Tensor], batch: list[Tensor]) -> tuple[list[float], dict[str, float]]:
    """Norms of dL/dx_l and dL/dp by torch.autograd, on a model of its own."""
    model = make_model()
    model.load_state_dict(state)
    points = [model.embed(batch[0])]
    for block in model.blocks:
        points.append(block(points[-1]))
    loss = nn.functional.mse_loss(model.head(points[-1]), batch[1])
    of_points = [g.norm().item() for g in torch.autograd.grad(loss, points, retain_graph=True)]
    loss.backward()
    return of_points, {name: p.grad.norm().item() for name, p in model.named_parameters()}


class Keeping(Lit):
    """Keeps what each step begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[dict[str, Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.states.append({name: value.clone() for name, value in self.state_dict().items()})
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("precision", ["32", "16-mixed", "bf16-mixed"])
def test_gradients_are_the_true_ones_before_and_after_clipping(precision: str) -> None:
    clip, tolerance = 0.01, 1e-4 if precision == "32" else 2e-2
    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        options = {"plugins": [MixedPrecision(precision, "cpu", scaler)]}
    torch.manual_seed(0)
    watcher, model = FlowscopeCallback(every=1), Keeping()
    make_trainer(watcher, gradient_clip_val=clip, **options).fit(model, data())
    assert watcher.scope is not None
    records = watcher.scope.records
    assert [r.step for r in records] == [0, 1, 2, 3]
    for record, state, batch in zip(records, model.states, data(), strict=True):
        points, parameters = gradients(state, batch)
        np.testing.assert_allclose(record["grad_norm"], points, rtol=tolerance)
        whole = sum(norm**2 for norm in parameters.values()) ** 0.5
        assert whole > 10 * clip
        raw = dict(zip(record.labels("param_grad_norm_raw"), record["param_grad_norm_raw"], strict=True))
        used = dict(zip(record.labels("param_grad_norm"), record["param_grad_norm"], strict=True))
        for name, norm in parameters.items():
            assert raw[name] == pytest.approx(norm, rel=tolerance), name
            assert used[name] == pytest.approx(norm * clip / whole, rel=tolerance), name


def test_a_step_that_the_scaler_skips_is_a_record_that_says_so() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)  # overflows fp16 on the first backward
    watcher = FlowscopeCallback(every=1)
    trainer = make_trainer(watcher, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], max_epochs=6)
    trainer.fit(make_model(), data())
    assert watcher.scope is not None
    flags = ["skipped" in r.flags for r in watcher.scope.records]
    assert flags[0]
    assert not flags[-1]
    assert "non_finite" not in [a.kind for a in watcher.scope.alerts]


def test_a_compiled_module_gives_the_same_numbers() -> None:
    eager, compiled = FlowscopeCallback(every=1), FlowscopeCallback(every=1)
    make_trainer(eager).fit(make_model(), data())
    torch._dynamo.utils.counters.clear()
    make_trainer(compiled).fit(torch.compile(Forwarding(make_model()), backend="aot_eager"), data())
    assert eager.scope is not None
    assert compiled.scope is not None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for a, b in zip(eager.scope.records, compiled.scope.records, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-5)


class Forwarding(pl.LightningModule):
    """Its training_step reads no number, so that it compiles as a whole."""

    def __init__(self, model: Lit) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_an_alert_that_was_not_asked_for_stops_nothing() -> None:
    watcher, model = FlowscopeCallback(every=1, stop_on="gate_saturation"), make_model()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    trainer = make_trainer(watcher)
    trainer.fit(model, data())
    assert watcher.scope is not None
    assert "non_finite" in [a.kind for a in watcher.scope.alerts]
    assert trainer.global_step == 4


def test_log_dir_is_the_loggers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    make_trainer(FlowscopeCallback(), logger=logger, log_every_n_steps=1).fit(make_model(), data())
    assert (Path(logger.log_dir) / "flowscope.jsonl").exists()


def test_of_several_loggers_the_tensorboard_folder_is_used(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path / "board")
    loggers = [CSVLogger(tmp_path / "csv"), board]
    make_trainer(FlowscopeCallback(), logger=loggers, log_every_n_steps=1).fit(make_model(), data())
    assert (Path(board.log_dir) / "flowscope.jsonl").exists()
    assert len(list(Path(board.log_dir).glob("events.out.tfevents.*"))) == 2  # Lightning's and flowscope's
    assert not list((tmp_path / "csv").rglob("flowscope.jsonl"))


def test_without_a_logger_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_trainer(FlowscopeCallback()).fit(make_model(), data())
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_no_hook() -> None:
    watcher, model = FlowscopeCallback(every=1), make_model(fail_at=2)
    with pytest.raises(RuntimeError, match="a broken batch"):
        make_trainer(watcher).fit(model, data())
    assert watcher.scope is not None
    assert [r.step for r in watcher.scope.records] == [0, 1]
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_checkpoint_carries_the_step_count(tmp_path: Path) -> None:
    first = make_trainer(FlowscopeCallback(every=1))
    first.fit(make_model(), data())
    first.save_checkpoint(tmp_path / "last.ckpt")
    watcher = FlowscopeCallback(every=1)
    make_trainer(watcher, max_epochs=2).fit(make_model(), data(), ckpt_path=tmp_path / "last.ckpt")
    assert watcher.scope is not None
    assert [r.step for r in watcher.scope.records][-4:] == [4, 5, 6, 7]


def test_mode_wraps_before_the_optimizer_is_made_and_the_gates_train() -> None:
    model, callback = make_model(), FlowscopeCallback(mode="keel", every=1)
    names = dict(model.named_parameters()).keys()
    make_trainer(callback).fit(model, data())
    gates = [c.gates[0] for _, c in flowscope.connections(model)]
    assert len(gates) == DEPTH
    assert names < dict(model.named_parameters()).keys()
    for gate in gates:
        assert gate.bias.item() != -2.0  # its value at the start, exact in binary
        assert gate.generator.abs().sum() > 0
    assert callback.scope is not None
    assert callback.scope.records[-1].labels("gate_mean")[0].startswith("blocks.0")
    assert not [a for a in callback.scope.alerts if a.kind in ("parameters_not_optimized", "stale_parameters")]


def test_mode_resumes_from_a_checkpoint_of_the_wrapped_module(tmp_path: Path) -> None:
    model, path = make_model(), tmp_path / "wrapped.ckpt"
    trainer = make_trainer(FlowscopeCallback(mode="keel"))
    trainer.fit(model, data())
    trainer.save_checkpoint(path)
    resumed, callback = make_model(), FlowscopeCallback(mode="keel", every=1)
    make_trainer(callback, max_epochs=2).fit(resumed, data(), ckpt_path=path)
    assert callback.scope is not None
    assert callback.scope.records[-1].step == 7
    before, after = (flowscope.connections(m)[0][1].gates[0].bias for m in (model, resumed))
    assert not torch.equal(before, after)


def test_a_second_fit_starts_a_new_scope() -> None:
    watcher = FlowscopeCallback(every=1)
    make_trainer(watcher).fit(make_model(), data())
    first = watcher.scope
    make_trainer(watcher).fit(make_model(), data(batches=2))
    assert watcher.scope is not first
    assert watcher.scope is not None
    assert [r.step for r in watcher.scope.records] == [0, 1]


class Tunable(Lit):
    """Its rate is looked for first."""

    lr = 0.05

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_a_fit_after_a_search_for_the_rate_has_its_own_steps(tmp_path: Path) -> None:
    """The search runs steps and puts the weights back: they are no steps of the fit."""
    watcher, model = FlowscopeCallback(every=1), Tunable()
    trainer = make_trainer(watcher, default_root_dir=tmp_path)
    found = Tuner(trainer).lr_find(model, train_dataloaders=data(8), num_training=6, min_lr=1e-4, max_lr=1e-2)
    assert found is not None
    searched = len(model.losses)
    assert searched >= 6
    trainer.fit(model, data())
    assert watcher.scope is not None
    records = list(watcher.scope.records)
    assert [r.step for r in records] == [0, 1, 2, 3]
    assert [r.loss for r in records] == pytest.approx(model.losses[searched:], rel=1e-6)
    assert all(np.isfinite(r["grad_norm"]).all() for r in records)
    assert not watcher.scope.alerts
