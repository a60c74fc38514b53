"""What changes, breaks or pauses while a scope is attached, and that nothing stays behind."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import IN, OUT, B, Block, D, Stack, T, close_to, data, loss_of, norms, sgd, truth, watched

pytestmark = pytest.mark.usefixtures("strict")


# -- what changes while attached


def test_parameters_frozen_and_unfrozen_later() -> None:
    model = Stack(4)
    optimizer = sgd(model)
    frozen = [model.embed, *model.blocks[:2]]
    with watched(model, optimizer) as scope:
        for step, on in enumerate([True, False, True]):
            for module in frozen:
                module.requires_grad_(on)
            twin, taps = copy.deepcopy(model), []
            loss = loss_of(twin, data(step), taps)
            seen = [t for t in taps if t.requires_grad]
            expected = norms(torch.autograd.grad(loss, seen))
            optimizer.zero_grad()
            loss_of(model, data(step)).backward()
            optimizer.step()
            record = scope.records[step]
            missing = len(taps) - len(seen)
            assert missing == (0 if on else 3)
            assert np.isnan(record["grad_norm"][:missing]).all()
            close_to(record["grad_norm"][missing:], expected)
            trainable = [float(p.requires_grad) for p in model.parameters()]
            np.testing.assert_array_equal(record["param_trainable"], trainable)
            without = [p.grad is None for p in model.parameters()]
            np.testing.assert_array_equal(np.isnan(record["param_grad_norm"]), without)


def test_parameters_replaced_after_attaching() -> None:
    model = Stack(2)
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        loss_of(model, data()).backward()
        optimizer.step()
        model.load_state_dict({k: v.clone() * 2 for k, v in model.state_dict().items()}, assign=True)
        model.head.weight = nn.Parameter(torch.randn(OUT, D))
        expected, norm = norms(truth(model, data())), model.head.weight.norm().item()
        loss_of(model, data()).backward()
        grads = [float(p.grad.norm()) for p in model.parameters()]
        optimizer.step()  # still the old tensors
    record = scope.records[1]
    close_to(record["grad_norm"], expected)
    close_to(record["param_grad_norm"], grads)
    assert record["param_norm"][record.labels("param_norm").index("head.weight")] == pytest.approx(norm)
    assert (record["param_optimized"] == 0).all()


def test_a_submodule_replaced_after_attaching() -> None:
    model = Stack(2)
    with watched(model) as scope:
        model.head = nn.Linear(D, OUT)
        optimizer = sgd(model)
        loss_of(model, data()).backward()
        optimizer.step()
    record = scope.records[0]
    at = record.labels("param_grad_norm").index("head.weight")
    close_to(record["param_grad_norm"][at], model.head.weight.grad.norm())


def test_a_model_moved_to_another_dtype_after_attaching() -> None:
    model = Stack(3)
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        loss_of(model, data()).backward()
        optimizer.step()
        model.double()
        optimizer.zero_grad()
        batch = tuple(t.double() for t in data(1))
        expected = norms(truth(model, batch))
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, batch).backward()
        optimizer.step()
    close_to(scope.records[1]["grad_norm"], expected)
    change = [(p.detach() - b).norm() / b.norm() for p, b in zip(model.parameters(), before, strict=True)]
    close_to(scope.records[1]["update_ratio"], change, rtol=1e-4)


def test_a_submodule_called_without_the_root() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Stack(3)

    model = Both()
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        for step in range(2):
            expected = norms(truth(model.encoder, data(step)), truth(model.encoder, data(10 + step)))
            optimizer.zero_grad()
            loss_of(model.encoder, data(step)).backward()
            with torch.no_grad():
                loss_of(model.encoder, data(99))
            loss_of(model.encoder, data(10 + step)).backward()
            optimizer.step()
            close_to(scope.records[step]["grad_norm"], expected)


# -- exceptions, pauses


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError("in the middle of backward")


class Fragile(Block):
    fail = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fail == "forward":
            raise MemoryError("in the middle of forward")
        return super().forward(Breaks.apply(x) if self.fail == "backward" else x)


@pytest.mark.parametrize("place", ["forward", "backward", "after"])
def test_an_exception_in_the_middle_of_a_step_leaves_nothing_in_the_next(place: str) -> None:
    model = Stack(4, Fragile)
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                model.blocks[1].fail = place
                if place == "after":
                    loss_of(model, data(77)).backward()  # and the loop skips this batch
                else:
                    with pytest.raises(MemoryError):
                        loss_of(model, data(77)).backward()
                model.blocks[1].fail = ""
                optimizer.zero_grad()
            expected = norms(truth(model, data(step)))
            loss_of(model, data(step)).backward()
            optimizer.step()
            close_to(scope.records[step]["grad_norm"], expected)
            assert (scope.records[step]["backward_calls"] == 1).all()


def test_pausing_between_and_within_steps() -> None:
    model = Stack(2)
    optimizer = sgd(model)

    def half(seed: int) -> None:
        loss_of(model, data(seed)).backward()

    with watched(model, optimizer) as scope:
        for step in range(8):
            optimizer.zero_grad()
            if step == 2:
                scope.pause()
            if step == 4:
                scope.resume()  # between steps: this one is whole
            expected = norms(truth(model, data(step)), truth(model, data(20 + step)))
            half(step)
            if step == 5:
                scope.pause()
            if step == 6:
                scope.resume()  # half of step 6 was missed: from 7 on
            half(20 + step)
            optimizer.step()
            if step in (0, 1, 4, 7):
                assert scope.records[-1].step == step
                close_to(scope.records[-1]["grad_norm"], expected)
    assert [r.step for r in scope.records] == [0, 1, 4, 7]


# -- time and memory


def test_ten_thousand_forwards_leave_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(IN, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, OUT))
    optimizer = sgd(model, 1e-4)

    def held(scope: Any) -> list[int]:
        observation = scope._driver.observation
        units, flows = (next(i for i in observation.instruments if i.name == name) for name in ("units", "flows"))
        sizes = [len(scope._driver.ended), len(units._counted), len(observation.hooks._leaves)]
        sizes += [len(held) for flow in flows.flows for held in (flow.seen.numbers, flow.calls._executed)]
        sizes += [len(getattr(measure, "_kept", ())) for flow in flows.flows for measure in flow.seen.measures]
        return [*sizes, len(observation.hooks.handles), sum(len(m._forward_hooks) for m in model.modules())]

    x, y = torch.randn(B, IN), torch.randn(B, OUT)
    with watched(model, optimizer, config={"max_records": 5, "slow_every": 3}) as scope:
        sizes = []
        for step in range(300):
            optimizer.zero_grad()
            for _ in range(2):
                nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if step in (20, 299):
                gc.collect()
                sizes.append((held(scope), sum(issubclass(type(o), Tensor) for o in gc.get_objects())))
        assert len(scope.records) == 5
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] <= sizes[0][1]


@pytest.mark.parametrize("every", [1, lambda step: False])
def test_no_activation_lives_past_backward(every: Any) -> None:
    model = Stack(3)
    optimizer = sgd(model)
    references: list[Callable[[], Any]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, i, o: references.append(weakref.ref(o.untyped_storage())))
    with watched(model, optimizer, every=every):
        loss = loss_of(model, data())
        loss.backward()
        assert len(references) == 3
        assert [r() for r in references] == [None] * 3
        optimizer.step()


@pytest.mark.parametrize("close", [True, False])
def test_scope_and_model_are_freed(close: bool) -> None:
    model = Stack(3)
    optimizer = sgd(model)
    scope = watched(model, optimizer)
    loss_of(model, data()).backward()
    optimizer.step()
    if close:
        scope.close()
        alive = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
        assert [r() for r in alive] == [None, None]  # while the scope is still there to be read
        assert scope.records[0].step == 0
        alive = (weakref.ref(scope),)
        del scope
    else:
        alive = weakref.ref(scope), weakref.ref(model)
        del scope, model, optimizer
    gc.collect()
    assert all(r() is None for r in alive)


def test_a_scope_that_is_not_kept_goes_on_observing() -> None:
    model, events = Stack(2), []

    class Sink:
        def write(self, event: Any) -> None:
            events.append(type(event).__name__)

        def close(self) -> None: ...

    watched(model, sinks=[Sink()])
    gc.collect()
    optimizer = sgd(model)
    for step in range(3):
        loss_of(model, data(step)).backward()
        optimizer.step()
    assert events.count("Record") == 3  # none waits for its loss, as none ever came
    assert T == 5
