"""Steps between two samples: nothing of ours is called but a counter, and what they do is not lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import IN, Checkpointed, Stack, data, loss_of, scaled_step, sgd, train, watched

import flowscope
from flowscope.faults import Hook
from flowscope.hooks.hooks import Hooks
from flowscope.instruments import Instrument
from flowscope.model.view import ModelView

pytestmark = pytest.mark.usefixtures("strict")

FIRST = 10
OF_SEVERAL_RECORDS = {"step_losses", "norm_gap", "dead_lasting", "input_checksum", "grad_cosine", "update_cosine"}
"""Metrics that look at the records or samples before."""


def steps_of(scope: flowscope.Scope) -> list[int]:
    return [record.step for record in scope.records]


def hooks_on(model: nn.Module) -> int:
    """How many hooks of ours a forward or a backward would call."""
    held = [d for m in model.modules() for d in (m._forward_hooks, m._forward_pre_hooks)]
    own = sum(isinstance(hook, Hook) for d in held for hook in d.values())
    held = [d for p in model.parameters() for d in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    return own + sum(d is not None for d in held)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fuse of each hook that torch calls."""
    fuses: list[str] = []
    call = Hook.__call__

    def noted(self: Hook, *args: Any) -> None:
        fuses.append(self.fuse)
        call(self, *args)

    monkeypatch.setattr(Hook, "__call__", noted)
    return fuses


def micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> Tensor:
    optimizer.zero_grad()
    losses = [loss_of(model, data(2 * k + i)) / 2 for i in range(2)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return losses[0].detach() + losses[1].detach()


def with_closure(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, data(k))
        loss.backward()
        return loss

    return optimizer.step(closure)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, data(k))
    loss.backward()
    optimizer.step()
    return loss


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize(
    ("build", "step"),
    [(Stack, plain), (Stack, micro_batches), (Stack, with_closure), (Checkpointed, plain), (Reentrant, plain)],
)
def test_records_between_light_steps_are_those_of_a_run_without_any(
    build: Callable[[], nn.Module], step: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    models = [build()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    records: list[dict[int, Any]] = []
    for model, every in zip(models, (7, 1, None), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scope = watched(model, optimizer, every=every, config={"slow_every": 0}) if every else None
        light = False
        for k in range(30):
            loss = step(model, optimizer, k)
            if scope is not None:
                scope.step(loss=loss)
                light = light or scope._driver.light.on
        if scope is not None:
            assert light == (every == 7)
            records.append({record.step: record for record in scope.records})
            scope.close()
    for watched_model in models[:2]:
        for a, b in zip(watched_model.parameters(), models[2].parameters(), strict=True):
            assert torch.equal(a, b)
    sparse, dense = records
    assert [*sparse] == [*range(FIRST), 14, 21, 28]
    for number, record in sparse.items():
        other = dense[number]
        assert record.loss == other.loss
        keys = record.metrics.keys() - OF_SEVERAL_RECORDS
        assert keys == other.metrics.keys() - OF_SEVERAL_RECORDS
        for key in keys:
            np.testing.assert_array_equal(record.metrics[key], other.metrics[key], err_msg=f"{key} at {number}")
    losses = np.concatenate([record.metrics["step_losses"] for record in sparse.values()])
    np.testing.assert_array_equal(losses, [dense[k].loss for k in range(29)])


def test_light_steps_call_one_hook_of_ours_and_forwards_without_gradient_none(called: list[str]) -> None:
    model = Stack()
    optimizer = sgd(model)
    with watched(model, optimizer, every=50) as scope:
        train(scope, model, optimizer, FIRST + 1)
        assert hooks_on(model) == 0
        called.clear()
        train(scope, model, optimizer, 1)
        assert called == ["optimizer hook"] * 2
        called.clear()
        with torch.no_grad():
            model.eval()(data()[0])
        assert called == []
        train(scope, model, optimizer, 37)
        assert hooks_on(model) == 0
        train(scope, model, optimizer, 1)
        assert hooks_on(model) > 0
        train(scope, model, optimizer, 1)
        assert steps_of(scope)[-1] == 50
        assert hooks_on(model) == 0
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert {p._backward_hooks for p in model.parameters()} == {None}
    assert {p._post_accumulate_grad_hooks for p in model.parameters()} == {None}


def test_hooks_of_others_keep_their_place_and_those_they_add_or_take_off_meanwhile() -> None:
    model = Stack()
    ours = lambda module: [isinstance(hook, Hook) for hook in module._forward_hooks.values()]  # noqa: E731
    block = model.blocks[-1]
    first = block.register_forward_hook(lambda *args: None)
    optimizer = sgd(model)
    with watched(model, optimizer, every=20) as scope:
        last = block.register_forward_hook(lambda *args: None)
        train(scope, model, optimizer, FIRST - 1)
        before = ours(block)
        assert before[0] is before[-1] is False
        assert len(before) > 2
        train(scope, model, optimizer, 3)
        assert ours(block) == [False, False]
        last.remove()
        block.register_forward_hook(lambda *args: None)
        train(scope, model, optimizer, 8)
        now = ours(block)
        assert now[0] is now[-1] is False
        assert all(now[1:-1])
        assert len(now) > 2
        first.remove()
        assert ours(block) == now[1:]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_a_loss_that_is_not_finite_or_jumps_lets_the_next_step_be_sampled(bad: float) -> None:
    model = Stack()
    optimizer = sgd(model)
    with watched(model, optimizer, every=100) as scope:
        train(scope, model, optimizer, 23)
        assert scope._driver.light.on
        plain(model, optimizer, 23)
        scope.step(loss=torch.tensor(bad))
        # once: what goes on is seen by the samples of the schedule
        for k in range(4):
            plain(model, optimizer, 24 + k)
            scope.step(loss=bad)
        assert steps_of(scope) == [*range(FIRST), 24]
        losses = scope.records[-1].metrics["step_losses"]
        assert len(losses) == 15
        assert losses[-2:].tolist() == pytest.approx([bad, bad], nan_ok=True)
        kinds = {alert.kind for alert in scope.alerts}
    assert ("non_finite" in kinds) == (not np.isfinite(bad))


@pytest.mark.parametrize("what", ["rate", "weights"])
def test_a_rate_that_jumps_and_weights_that_stay_let_a_step_be_sampled_soon(what: str) -> None:
    model = Stack()
    optimizer = sgd(model, lr=0.01)
    with watched(model, optimizer, every=30) as scope:
        train(scope, model, optimizer, 65)
        assert steps_of(scope) == [*range(FIRST), 30, 60]
        if what == "rate":
            optimizer.param_groups[0]["lr"] = 0.09
        for k in range(20):
            loss = loss_of(model, data(k))
            optimizer.zero_grad()
            loss.backward()
            if what == "weights":
                optimizer.zero_grad()
            optimizer.step()
            scope.step(loss=loss)
        found = steps_of(scope)[FIRST + 2 :]
    assert len(found) == 1
    assert 66 <= found[0] <= 74


def test_a_schedule_of_rates_is_no_jump() -> None:
    model = Stack()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
    with watched(model, optimizer, every=40) as scope:
        for k in range(70):
            scope.step(loss=plain(model, optimizer, k))
            schedule.step()
    assert steps_of(scope) == [*range(FIRST), 40]


def test_steps_of_several_optimizers_and_of_others_are_counted() -> None:
    model, other = Stack(), nn.Linear(IN, 1)
    early, late = sgd(model.embed), torch.optim.SGD([*model.blocks.parameters(), *model.head.parameters()], 0.1)
    foreign = sgd(other)
    with watched(model, [early, late], every=12) as scope:
        for k in range(37):
            loss = loss_of(model, data(k))
            loss.backward()
            if k % 3 == 0:
                early.step()
            late.step()
            for optimizer in (early, late):
                optimizer.zero_grad()
            other(data(k)[0]).sum().backward()
            foreign.step()
            scope.step(loss=loss)
        assert scope._driver.light.on
        assert scope.records[-1].metrics["steps_made"].tolist() == [13, 37]
        assert scope._driver.observation.hooks.turns.foreign == 37


def test_an_optimizer_made_anew_on_a_light_step_is_found() -> None:
    model = Stack()
    optimizer = sgd(model)
    with watched(model, optimizer, every=15) as scope:
        train(scope, model, optimizer, 20)
        assert scope._driver.light.on
        optimizer = torch.optim.Adam(model.parameters())
        train(scope, model, optimizer, 30)
        assert scope.optimizers == [optimizer]
        assert steps_of(scope) == [*range(FIRST), 15, 30, 45]


def test_a_step_that_the_scaler_leaves_out_is_a_step() -> None:
    model = Stack()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with watched(model, optimizer, every=20, scaler=scaler) as scope:
        for k in range(41):
            loss = scaled_step(model, data(k), scaler, optimizer, overflow="head" if k in (14, 33) else None)
            scope.step(loss=loss)
            assert scope._driver.count.step == k + 1
    assert steps_of(scope) == [*range(FIRST), 20, 40]
    assert [len(record.metrics["step_losses"]) for record in scope.records[-2:]] == [11, 20]


def test_calls_of_the_scope_between_two_samples_find_all_that_happened() -> None:
    model = Stack()
    optimizer = sgd(model)
    scope = watched(model, optimizer, every=25)
    train(scope, model, optimizer, 17)
    assert scope.state_dict()["step"] == 17
    train(scope, model, optimizer, 3)
    scope.pause()
    train(scope, model, optimizer, 10)
    scope.resume()
    train(scope, model, optimizer, 5)
    optimizer.zero_grad()
    loss_of(model, data()).backward()
    optimizer.step()
    scope.step(loss=1.0, step=48)
    train(scope, model, optimizer, 3)
    assert steps_of(scope) == [*range(FIRST), 50]
    scope.close()
    assert hooks_on(model) == 0


def test_losses_given_before_the_step_belong_to_it() -> None:
    model = Stack()
    optimizer = sgd(model)
    given = []
    with watched(model, optimizer, every=20) as scope:
        for k in range(41):
            optimizer.zero_grad()
            loss = loss_of(model, data(k))
            loss.backward()
            scope.step(loss=loss)
            optimizer.step()
            given.append(loss.item())
        scope.step()
        last = scope.records[-1]
    assert last.step == 40
    assert last.loss == given[40]
    np.testing.assert_array_equal(last.metrics["step_losses"], given[21:])


def test_where_a_loop_gives_no_losses_the_canary_looks_at_each_step() -> None:
    model = Stack()
    optimizer = sgd(model)
    with watched(model, optimizer, every=50) as scope:
        for k in range(16):
            optimizer.zero_grad()
            x, y = data(k)
            loss_of(model, (x * float("nan") if k == 14 else x, y)).backward()
            optimizer.step()
    assert "non_finite" in {alert.kind for alert in scope.alerts if alert.step == 14}


@pytest.mark.parametrize("says", [False, True])
def test_an_instrument_from_outside_sees_every_step_unless_it_says_otherwise(says: bool) -> None:
    class Watcher(Instrument):
        name = "watcher"
        calls = 0

        def attach(self, view: ModelView, hooks: Hooks) -> None:
            hooks.after(view.model, self.fuse, self.count)

        def count(self, *args: Any) -> None:
            Watcher.calls += 1

    if says:
        Watcher.rests = lambda self: True
    model = Stack()
    optimizer = sgd(model)
    with watched(model, optimizer, every=30, instruments=[Watcher]) as scope:
        train(scope, model, optimizer, 25)
    assert Watcher.calls == (FIRST if says else 25)


def test_what_is_compiled_keeps_its_hooks() -> None:
    model, late = Stack(2), Stack(2)
    for net, at in ((model, 0), (late, FIRST + 3)):
        optimizer = sgd(net)
        with watched(net, optimizer, every=20) as scope:
            for k in range(23):
                if k == at:
                    net.compile(backend="eager")
                train(scope, net, optimizer, 1)
                assert (hooks_on(net) == 0) == (FIRST <= k + 1 <= at)
            last = scope.records[-1]
            assert last.step == 20
            assert np.isfinite(last.metrics["grad_norm"]).all()
            assert not any(note.startswith("no hook fired") for note in last.notes)


@pytest.mark.parametrize("at", [14, 17])
def test_a_bad_gradient_under_a_finite_loss_is_told_at_its_step(at: int) -> None:
    """A root at 0 spoils the backward pass; by the next step the weights have spoiled the loss."""
    model = Stack(2)
    optimizer = sgd(model)
    with watched(model, optimizer, every=20) as scope:
        for k in range(at + 4):
            optimizer.zero_grad()
            answer = model(data(k)[0])
            root = (answer * 0).square().sum().sqrt() if k == at else 0.0
            loss = nn.functional.mse_loss(answer, data(k)[1]) + root
            assert torch.isfinite(loss) == (k <= at)
            assert hooks_on(model) == 0 or k != at  # nobody looks at this step
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    [alert] = [alert for alert in scope.alerts if alert.kind == "non_finite"]
    assert alert.step == at
    assert "backward pass" in alert.message
