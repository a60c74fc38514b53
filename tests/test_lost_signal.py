"""`no_signal`: a gradient that becomes exactly 0, in loops; from the start on it is `no_gradient`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from detector_records import header, record
from torch import Tensor, nn

import flowscope
import flowscope.testing
from flowscope.detectors.lost_signal import NoSignal

STEPS, LOST_AT = 30, 15


def told(loss: Callable[[nn.Module, int], Tensor], rate: float = 0.1) -> list[tuple[str, str, int]]:
    """Alerts of a loop whose loss depends on the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        for step in range(STEPS):
            optimizer.zero_grad()
            value = loss(model, step)
            value.backward()
            optimizer.step()
            scope.step(loss=value)
    return [(a.kind, a.severity, a.step) for a in scope.alerts if a.kind in ("no_signal", "no_gradient")]


def rows(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(16, 4, generator=draw), torch.randint(3, (16,), generator=draw)


def masked(model: nn.Module, step: int) -> Tensor:
    """Targets without pattern, so that the loss does not fall; then the mask is empty for good."""
    x, y = rows(step)
    return (F.cross_entropy(model(x), y, reduction="none") * (step < LOST_AT)).mean()


def hinge(model: nn.Module, step: int) -> Tensor:
    """An output of 1 or more costs nothing: the last bias alone gets there in ten steps of .1."""
    return F.relu(1 - model(rows(0)[0])[:, 0]).mean()


def test_a_mask_that_becomes_empty_is_a_warning_after_three_records() -> None:
    assert told(masked) == [("no_signal", "warning", LOST_AT + 2)]


def test_a_margin_that_is_kept_is_an_info() -> None:
    (alert,) = told(hinge)
    assert alert[:2] == ("no_signal", "info")


def test_returns_that_become_equal_once_the_policy_always_wins_are_an_info() -> None:
    """The loss is about 0 all along, and its gradient fades before it is exactly 0."""

    def centred(model: nn.Module, step: int) -> Tensor:
        x, y = rows(step)
        chance = model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
        size = (1.0 if step < 6 else 0.01) * (step < LOST_AT)
        return -((chance - chance.detach()) * size * (x[:, 0] - x[:, 0].mean()) + 0.01 * size).mean()

    assert told(centred) == [("no_signal", "info", LOST_AT + 2)]


def test_a_loss_of_either_sign_that_is_0_for_good_is_an_info() -> None:
    """A policy that always wins from one step to the next: advantages of either sign, then none."""

    def policy(model: nn.Module, step: int) -> Tensor:
        x, y = rows(step)
        chance = model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
        return -(chance * (x[:, 0] - x[:, 0].mean()) * (step < LOST_AT)).mean()

    assert told(policy) == [("no_signal", "info", LOST_AT + 2)]


def test_a_record_whose_neighbours_have_a_loss_says_nothing() -> None:
    detector = NoSignal()
    names = ("param_trainable", "param_optimized", "param_grad_norm", "steps_made")
    for step, (pull, losses) in enumerate([(1.0, [1.0]), *[(0.0, [0.5, 0.0])] * 8]):
        columns = dict(zip(names, ([1.0], [1.0], [pull], [step + 1.0]), strict=True))
        found = [*detector.findings(record(step, loss=losses[-1], step_losses=losses, **columns), header())]
        assert [f for f in found if f.level == "beyond"] == []


def test_batches_without_signal_between_others_say_nothing() -> None:
    assert told(lambda model, step: masked(model, 0) * (step % 3 == 0)) == []


def test_a_loss_of_zero_with_a_gradient_says_nothing() -> None:
    def policy(model: nn.Module, step: int) -> Tensor:
        x, y = rows(step)
        chance = model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
        return -((chance - chance.detach()).exp() - 1).mul(x[:, 0]).mean()

    assert told(policy) == []


def test_from_the_start_on_it_is_no_gradient() -> None:
    assert [kind for kind, _, _ in told(lambda model, step: masked(model, LOST_AT))] == ["no_gradient"]


def test_the_detector_keeps_what_detectors_promise() -> None:
    flowscope.testing.check_detector(NoSignal)
