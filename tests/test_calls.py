"""Which call of a module is this: full lists of events, and the point that each one is answered with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flowscope.hooks.calls import ENTRY, MAX_CALLS, Calls
from flowscope.model.plan import Flow

X0 = (ENTRY, 0)


class Driver:
    """Plays events on a flow whose blocks are x + 1, and keeps what is answered."""

    def __init__(self, blocks: int, entry: int | None = 0) -> None:
        paths = tuple(f"blocks.{index}" for index in range(blocks))
        self.passes = 0
        self.calls = Calls(Flow("blocks", "blocks", paths, None if entry is None else paths[entry]), self._began)
        self.log: list[Any] = []

    def _began(self) -> None:
        self.passes += 1

    def forward(self) -> Tensor:
        """The root's forward begins, on a new input."""
        self.calls.begin_forward(training=True)
        return self.input()

    def input(self) -> Tensor:
        return torch.zeros(1, requires_grad=True) + 0

    def enter(self, x: Tensor, *, tracked: bool = True, recomputing: bool = False) -> None:
        begins = self.calls.begins(((x,), {}), recomputing=recomputing)
        if begins:
            self.calls.entered(with_grad=tracked, tracked=tracked, recomputing=recomputing)
        self.log.append("x_0" if begins else "loop")

    def block(self, index: int, x: Tensor, *, entry: bool = False, grad: bool = True) -> Tensor:
        """A block runs in the forward."""
        if entry:
            self.enter(x, tracked=grad)
        with torch.set_grad_enabled(grad):
            y = x + 1
        key = self.calls.returned(index, y, ((x,), {}), with_grad=grad)
        if grad:
            self.calls.track(key, recomputing=False)
        self.log.append(key)
        return y

    def again(self, index: int, x: Tensor) -> Tensor:
        """A checkpoint recomputes a block inside backward."""
        y = x + 1
        key = self.calls.recomputed(index, y)
        if key is not None:
            self.calls.track(key, recomputing=True)
        self.log.append((key, self.calls.ambiguous(index)))
        return y

    def gradient(self, index: int) -> None:
        """The gradient of an ambiguous recomputation arrives."""
        self.log.append(self.calls.arrived((index, 0)))


def test_a_plain_forward_counts_every_block_once():
    run = Driver(3)
    x = run.forward()
    for index in range(3):
        x = run.block(index, x, entry=index == 0)
    assert run.log == ["x_0", (0, 0), (1, 0), (2, 0)]
    assert run.calls.points() == [X0, (0, 0), (1, 0), (2, 0)]
    assert run.calls.forward == run.calls.tracked == {X0: 1, (0, 0): 1, (1, 0): 1, (2, 0): 1}
    assert run.passes == 1


def test_a_loop_over_one_block_is_a_point_a_call():
    run = Driver(1)
    x = run.forward()
    for _ in range(3):
        x = run.block(0, x * 2, entry=True)
    assert run.log == ["x_0", (0, 0), "loop", (0, 1), "loop", (0, 2)]
    assert run.calls.points() == [X0, (0, 0), (0, 1), (0, 2)]
    assert run.passes == 1


def test_a_loop_over_two_blocks_runs_through_both():
    run = Driver(2)
    x = run.forward()
    for index in (0, 1, 0, 1):
        x = run.block(index, x, entry=index == 0)
    assert run.log == ["x_0", (0, 0), (1, 0), "loop", (0, 1), (1, 1)]
    assert run.calls.points() == [X0, (0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_loop_that_detaches_goes_on_from_the_tensor_itself():
    run = Driver(1)
    x = run.block(0, run.forward(), entry=True)
    x = run.block(0, x, entry=True)
    assert run.log == ["x_0", (0, 0), "loop", (0, 1)]
    run.block(0, x.detach(), entry=True)
    assert run.log[4:] == ["x_0", (0, 0)]


@pytest.mark.parametrize("entry", [0, None])
def test_a_second_input_begins_a_pass(entry: int | None):
    run = Driver(2, entry)
    run.forward()
    for _ in range(2):  # siamese: both inputs inside one forward of the root
        x = run.input()
        for index in range(2):
            x = run.block(index, x, entry=index == entry)
    head = [] if entry is None else ["x_0"]
    assert run.log == [*head, (0, 0), (1, 0)] * 2
    assert run.calls.points() == [X0, (0, 0), (1, 0)][entry is None :]
    assert run.calls.tracked[1, 0] == 2
    assert run.passes == 2


def test_accumulation_counts_each_forward():
    run = Driver(2)
    for _ in range(3):
        x = run.forward()
        for index in range(2):
            x = run.block(index, x, entry=index == 0)
    assert run.log == ["x_0", (0, 0), (1, 0)] * 3
    assert run.calls.forward == {X0: 3, (0, 0): 3, (1, 0): 3}
    assert run.passes == 3
    run.calls.forget(sampled=True)
    assert run.calls.forward == run.calls.tracked == {}


def test_a_checkpoint_whose_forward_waits_for_the_gradient_is_no_news():
    run = Driver(2)
    x = run.forward()
    for index in range(2):
        x = run.block(index, x, entry=index == 0)
    for index in (1, 0):
        run.again(index, run.input())
    assert run.log[3:] == [(None, False), (None, False)]
    assert run.calls.tracked == {X0: 1, (0, 0): 1, (1, 0): 1}


def test_a_reentrant_checkpoint_gives_its_gradient_in_the_recomputation():
    run = Driver(3, None)
    x = run.forward()
    for index in range(3):
        x = run.block(index, x, grad=False)
    assert run.calls.points() == [(0, 0), (1, 0), (2, 0)]
    assert run.calls.tracked == {}
    for index in (2, 1, 0):
        run.again(index, run.input())
    assert run.log[3:] == [((2, 0), False), ((1, 0), False), ((0, 0), False)]
    assert run.calls.tracked == dict.fromkeys([(0, 0), (1, 0), (2, 0)], 1)
    assert run.calls.points() == [(0, 0), (1, 0), (2, 0)]


def test_a_loop_of_reentrant_checkpoints_is_recomputed_from_the_last_call_on():
    run = Driver(1)
    x = run.forward()
    for _ in range(3):
        x = run.block(0, x, entry=True, grad=False)
    for _ in range(3):
        run.again(0, run.input())
        run.gradient(0)
    assert run.log[6:] == [((0, 2), True), (0, 2), ((0, 1), True), (0, 1), ((0, 0), True), (0, 0)]
    assert run.calls.points() == [X0, (0, 0), (0, 1), (0, 2)]


def test_the_calls_of_one_segment_are_told_by_their_gradients():
    run = Driver(1)
    x = run.forward()
    for _ in range(4):
        x = run.block(0, x, entry=True, grad=False)
    del run.log[:]
    for _ in range(2):  # two calls a segment: recomputed first to last, their gradients arrive last to first
        segment = run.input()
        run.enter(segment, recomputing=True)
        y = run.again(0, segment)
        run.enter(y, recomputing=True)
        run.again(0, y)
        run.gradient(0)
        run.gradient(0)
        run.gradient(ENTRY)
    answered = [event for event in run.log if not isinstance(event, tuple) or isinstance(event[0], int)]
    # of both segments' inputs only the first one's is x_0
    assert answered == ["x_0", "loop", (0, 3), (0, 2), None, "x_0", "loop", (0, 1), (0, 0), X0]
    assert all(
        ambiguous
        for event in run.log
        if isinstance(event, tuple) and isinstance(event[0], tuple)
        for ambiguous in event[1:]
    )


def test_recomputing_in_another_order_keeps_the_order_of_the_forward():
    run = Driver(3)
    x = run.forward()
    for index in range(3):
        x = run.block(index, x, entry=index == 0, grad=False)
    for index in (1, 2, 0):
        run.again(index, run.input())
    assert [key for key, _ in run.log[4:]] == [(1, 0), (2, 0), (0, 0)]
    assert run.calls.points() == [X0, (0, 0), (1, 0), (2, 0)]


def test_modules_that_run_in_another_order_are_points_in_that_order():
    run = Driver(3, entry=2)
    x = run.forward()
    for index in (2, 0, 1):
        x = run.block(index, x, entry=index == 2)
    assert run.calls.points() == [X0, (2, 0), (0, 0), (1, 0)]


def test_an_early_exit_leaves_the_points_behind_it_in_their_places():
    run = Driver(4)
    x = run.forward()
    for index in range(2):
        x = run.block(index, x, entry=index == 0)
    assert run.calls.points() == [X0, (0, 0), (1, 0), (2, 0), (3, 0)]
    assert run.calls.forward == {X0: 1, (0, 0): 1, (1, 0): 1}


def test_an_early_exit_out_of_a_loop_lists_what_was_not_reached_last():
    run = Driver(3)
    x = run.forward()
    for index in (0, 1, 0):
        x = run.block(index, x, entry=index == 0)
    assert run.calls.points() == [X0, (0, 0), (1, 0), (0, 1), (2, 0)]


def test_a_frozen_input_is_executed_but_not_tracked():
    run = Driver(1)
    x = run.forward().detach()
    assert run.calls.begins(((x,), {}), recomputing=False)
    run.calls.entered(with_grad=True, tracked=False, recomputing=False)
    assert run.calls.forward == {X0: 1}
    assert run.calls.tracked == {}
    assert not run.calls.waits(X0)


def test_an_evaluation_is_told_from_training():
    calls = Driver(1).calls
    calls.begin_forward(training=False)
    assert not calls.in_training
    calls.begin_forward(training=True)
    assert calls.in_training


def test_more_calls_than_are_told_apart_share_the_last_point():
    run = Driver(1, None)
    x = run.forward()
    with torch.no_grad():
        for _ in range(MAX_CALLS + 2):
            run.log[:] = [run.calls.returned(0, x, ((x,), {}), with_grad=False)]
    assert run.log == [(0, MAX_CALLS - 1)]


@pytest.mark.parametrize("entry", [0, None])
def test_outputs_are_marked_until_a_step_has_shown_that_nothing_repeats(entry: int | None):
    run = Driver(1, entry)
    run.block(0, run.forward(), entry=entry == 0)
    run.calls.forget(sampled=True)
    x = run.block(0, run.forward(), entry=entry == 0)  # unmarked: what comes next cannot be seen to go on from it
    run.block(0, x, entry=entry == 0)
    assert [event for event in run.log if event != "x_0"] == [(0, 0)] * 3
    run.calls.forget(sampled=True)  # from now on they are marked again
    del run.log[:]
    x = run.block(0, run.forward(), entry=entry == 0)
    run.block(0, x, entry=entry == 0)
    assert [event for event in run.log if isinstance(event, tuple)] == [(0, 0), (0, 1)]
