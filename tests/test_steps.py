"""The step's table of phases and events: walked alone, and by real loops, whose events are written out in full."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from test_inner_passes import step_inside_backward
from torch import Tensor, nn
from watch_models import IN, OUT, Stack, data, loss_of, scaled_step, sgd, watched

from flowscope.steps.phase import ENDS, STEP, Action, Event, Phase, StepMachine

pytestmark = pytest.mark.usefixtures("strict")

Told = Callable[[Any], list[str]]


def line(event: Event, phase: Phase, actions: Iterable[Action]) -> str:
    return " ".join([event.name, "->", phase.name, *(action.name.lower() for action in actions)])


def lines(text: str) -> list[str]:
    return [" ".join(row.split()) for row in text.splitlines() if row.strip()]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What a scope's machine was told, in which phase that left it, and what it asked for, one event a line.

    That a step begins (`Event.BEGIN`, after every end) is left out.
    """
    seen: dict[int, list[str]] = {}
    on = StepMachine.on

    def listening(self: StepMachine, event: Event) -> Any:
        actions = on(self, event)
        if event is not Event.BEGIN:
            seen.setdefault(id(self), []).append(line(event, self.phase, actions))
        return actions

    monkeypatch.setattr(StepMachine, "on", listening)
    return lambda scope: seen.get(id(scope._driver._machine), [])


# -- the table


def test_every_phase_answers_every_event() -> None:
    assert STEP.keys() == set(itertools.product(Phase, Event))


def test_what_ends_a_step_is_asked_for_last_and_leaves_it_ended() -> None:
    for (_, event), (phase, actions) in STEP.items():
        ends = [action for action in actions if action in ENDS]
        assert ends == list(actions[-1:] if event in (Event.LAST, Event.SKIPPED, Event.MARKED) else ())
        assert not ends or phase is Phase.ENDED


def test_no_order_of_events_reads_weights_that_have_changed_or_observes_while_paused() -> None:
    for events in itertools.product(Event, repeat=3):
        machine = StepMachine()
        machine.begin(sampling=True)
        for event in events:
            before = machine.phase
            asked = {*machine.on(event)}
            assert len(asked & ENDS) <= 1
            assert Action.REMEMBER not in asked or before not in (Phase.UPDATING, Phase.CLOSURE)
            assert not machine.paused or asked <= {Action.DROP, Action.FORGET, Action.JOIN, *ENDS}


def test_a_step_that_is_not_sampled_is_only_counted() -> None:
    machine = StepMachine()
    machine.begin(sampling=False)
    events = (Event.FORWARD, Event.BEFORE, Event.AFTER, Event.BEFORE_CLOSURE, Event.LAST)
    assert [machine.on(event) for event in events] == [(), (), (), (), (Action.END,)]


# -- pauses, and optimizers of other models


def watching(events: str) -> str:
    """The state of pause after each of these events."""
    machine, states = StepMachine(), []
    for name in events.split():
        machine.on(machine.pausing() if name == "PAUSE" else Event[name])
        states.append(machine.watching.name)
    return " ".join(states)


@pytest.mark.parametrize(
    ("events", "states"),
    [
        ("PAUSE RESUME", "PAUSED ON"),
        ("PAUSE LAST BEGIN RESUME", "PAUSED PAUSED PAUSED ON"),
        ("PAUSE FORWARD RESUME LAST BEGIN", "PAUSED MISSED RESUMING RESUMING ON"),
        ("FORWARD PAUSE RESUME LAST BEGIN", "ON MISSED RESUMING RESUMING ON"),
        ("FORWARD PAUSE LAST BEGIN RESUME", "ON MISSED MISSED PAUSED ON"),
        ("FORWARD PAUSE RESUME PAUSE LAST BEGIN", "ON MISSED RESUMING MISSED MISSED PAUSED"),
        ("FORWARD RESUME LAST BEGIN", "ON ON ON ON"),
    ],
)
def test_a_pause_ends_at_once_where_nothing_was_missed_else_with_the_step(events: str, states: str) -> None:
    assert watching(events) == states


def pending(events: str) -> str:
    """What the last of these events asks for."""
    machine = StepMachine()
    machine.begin(sampling=True)
    for name in events.split():
        actions = machine.begin(sampling=True) if name == "BEGIN" else machine.on(Event[name])
    return " ".join(action.name.lower() for action in actions)


@pytest.mark.parametrize(
    ("events", "asked"),
    [
        ("FORWARD FOREIGN FORWARD", "drop"),
        ("FORWARD FOREIGN RAN", "drop"),
        ("FORWARD FOREIGN FORWARD FORWARD", "review"),
        ("FORWARD FOREIGN LAST", "measure end"),
        ("FORWARD FOREIGN LAST BEGIN FORWARD", ""),
        ("FORWARD LAST BEGIN FOREIGN FORWARD", "drop"),
    ],
)
def test_what_another_models_optimizer_used_is_forgotten_unless_ours_steps_next(events: str, asked: str) -> None:
    assert pending(events) == asked


# -- loops


class Tiny(nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(IN, OUT, bias=False), nn.Tanh(), nn.Linear(OUT, OUT, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def passes(model: nn.Module, seed: int = 0) -> Tensor:
    loss = loss_of(model, data(seed))
    loss.backward()
    return loss


PLAIN = """
    FORWARD -> RUNNING
    BEFORE -> UPDATING replay remember scale read
    LAST -> ENDED measure end
"""


def test_plain(told: Told) -> None:
    model = Tiny()
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        for step in range(2):
            optimizer.zero_grad()
            passes(model, step)
            optimizer.step()
        assert told(scope) == lines(PLAIN) * 2


def test_accumulation_and_two_losses(told: Told) -> None:
    model = Tiny()
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        passes(model, 0)
        passes(model, 1)
        first, second = loss_of(model, data(2)), model(data(2)[0]).square().mean()
        first.backward()
        second.backward()
        optimizer.step()
        assert told(scope) == lines("""
            FORWARD -> RUNNING
            FORWARD -> RUNNING review
            FORWARD -> RUNNING review
            FORWARD -> RUNNING review
            BEFORE -> UPDATING replay remember scale read
            LAST -> ENDED measure end
        """)


def test_a_step_not_sampled(told: Told) -> None:
    model = Tiny()
    optimizer = sgd(model)
    with watched(model, optimizer, every=lambda step: step == 1) as scope:
        for step in range(2):
            passes(model, step)
            optimizer.step()
        assert told(scope) == lines(f"""
            FORWARD -> RUNNING
            BEFORE -> RUNNING
            LAST -> ENDED end
            {PLAIN}
        """)


def test_two_nets_of_a_gan_one_of_them_watched(told: Told) -> None:
    maker, critic = nn.Linear(IN, IN), Tiny()
    of_maker, of_critic = sgd(maker), sgd(critic)
    with watched(critic, of_critic) as scope:
        for _ in range(2):
            of_critic.zero_grad()
            made = maker(data()[0])
            (critic(made.detach()) - critic(data()[0])).mean().backward()
            of_critic.step()
            critic(made).mean().backward()
            of_maker.step()
        assert told(scope) == lines("""
            FORWARD -> RUNNING
            FORWARD -> RUNNING review
            BEFORE -> UPDATING replay remember scale read
            LAST -> ENDED measure end
            FORWARD -> RUNNING
            FOREIGN -> RUNNING
            FORWARD -> RUNNING drop
            FORWARD -> RUNNING review
            BEFORE -> UPDATING replay remember scale read
            LAST -> ENDED measure end
            FORWARD -> RUNNING
            FOREIGN -> RUNNING
        """)


def test_two_nets_of_a_gan_in_one_model_with_an_optimizer_each(told: Told) -> None:
    model = nn.ModuleDict({"maker": nn.Linear(IN, IN), "critic": Tiny()})
    of_maker, of_critic = sgd(model["maker"]), sgd(model["critic"])
    with watched(model, [of_critic, of_maker]) as scope:
        made = model["maker"](data()[0])
        model["critic"](made.detach()).mean().backward()
        of_critic.step()
        model["critic"](made).mean().backward()
        of_maker.step()
        assert told(scope) == lines("""
            BEFORE -> UPDATING replay remember scale read
            AFTER -> UPDATING
            BEFORE -> UPDATING read
            LAST -> ENDED measure end
        """)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its implementations are: an optimizer around another one."""

    def __init__(self, model: nn.Module) -> None:
        self.base = sgd(model)
        super().__init__(self.base.param_groups, {})

    def climb(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.01 * parameter.grad)
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            self.climb()
            with torch.enable_grad():
                closure()
        self.base.step()


def test_sam(told: Told) -> None:
    model = Tiny()
    optimizer = Sam(model)
    with watched(model, optimizer) as scope:
        passes(model)
        optimizer.climb()
        passes(model)
        optimizer.step()
        optimizer.zero_grad()
        passes(model)
        optimizer.step(lambda: passes(model))
        assert told(scope) == lines("""
            FORWARD -> RUNNING
            FORWARD -> RUNNING review
            BEFORE -> UPDATING replay remember scale read
            FOREIGN -> UPDATING
            LAST -> ENDED measure end
            FORWARD -> RUNNING
            BEFORE_CLOSURE -> CLOSURE remember
            FORWARD -> CLOSURE
            FOREIGN -> CLOSURE
            LAST -> ENDED replay read measure end
        """)


def test_lbfgs(told: Told) -> None:
    model = Tiny()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return passes(model)

    with watched(model, optimizer) as scope:
        optimizer.step(closure)
        assert told(scope) == lines("""
            BEFORE_CLOSURE -> CLOSURE remember
            FORWARD -> CLOSURE
            FORWARD -> CLOSURE
            FORWARD -> CLOSURE
            LAST -> ENDED replay read measure end
        """)


def test_optimizers_inside_backward_that_are_found_in_the_first_one(told: Told) -> None:
    model = Tiny()
    kept = step_inside_backward(model)
    with watched(model) as scope:
        passes(model)
        passes(model)
        assert len(scope.optimizers) == len(kept) == 2
        assert told(scope) == lines("""
            FORWARD -> RUNNING
            FOUND -> RUNNING
            BEFORE -> UPDATING replay remember scale read
            AFTER -> UPDATING
            FOUND -> UPDATING
            BEFORE -> UPDATING read
            AFTER -> UPDATING
            LAST -> ENDED measure end
            FORWARD -> RUNNING
            BEFORE -> UPDATING replay remember scale read
            AFTER -> UPDATING
            BEFORE -> UPDATING read
            AFTER -> UPDATING
            LAST -> ENDED measure end
        """)


def test_grad_scaler_that_finds_inf(told: Told) -> None:
    model = Tiny()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watched(model, optimizer, scaler=scaler) as scope:
        scaled_step(model, data(), scaler, optimizer)
        scaled_step(model, data(), scaler, optimizer, overflow="layers.0")
        assert told(scope) == lines(f"""
            {PLAIN}
            FORWARD -> RUNNING
            SKIPPED -> ENDED skip
        """)
        assert [record.flags for record in scope.records] == [(), ("skipped",)]


def test_grad_scaler_with_two_optimizers_of_which_the_last_is_skipped(told: Told) -> None:
    model = Tiny()
    optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watched(model, optimizers, scaler=scaler) as scope:
        scaled_step(model, data(), scaler, *optimizers, overflow="layers.2")
        assert told(scope) == lines("""
            FORWARD -> RUNNING
            BEFORE -> UPDATING replay remember scale read
            AFTER -> UPDATING
            SKIPPED -> ENDED skip
        """)


def test_a_fused_optimizer_is_called_all_the_same(told: Told) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watched(model, optimizer, scaler=scaler) as scope:
        scaled_step(model, data(), scaler, optimizer, overflow="layers.0")
        assert told(scope) == lines(PLAIN)
        assert scope.records[0].flags == ("skipped",)


class Raises(torch.optim.SGD):
    """Raises when it is first asked to step."""

    asked = 0

    def step(self, closure: Any = None) -> None:
        self.asked += 1
        if self.asked == 1:
            raise MemoryError
        super().step(closure)


def test_exceptions_in_the_middle_of_a_step(told: Told) -> None:
    model = Tiny()
    optimizer = Raises(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        loss_of(model, data())  # and the loop skips this batch
        passes(model)
        with pytest.raises(MemoryError):
            optimizer.step()
        optimizer.step()
        assert told(scope) == lines("""
            FORWARD -> RUNNING
            FORWARD -> RUNNING review
            BEFORE -> UPDATING replay remember scale read
            FAILED -> RUNNING forget
            BEFORE -> UPDATING replay remember scale read
            LAST -> ENDED measure end
        """)


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model(told: Told, whole: bool) -> None:
    """Inside of a compiled function no hook tells that the model runs; its steps have an end all the same."""
    model = Tiny()
    optimizer = sgd(model)
    loss = torch.compile(lambda batch: loss_of(model, batch), backend="eager") if whole else None
    if not whole:
        model.compile(backend="eager", fullgraph=True)
    with watched(model, optimizer) as scope:
        for step in range(2):
            (loss(data(step)) if whole else loss_of(model, data(step))).backward()
            optimizer.step()
        assert told(scope) == [row for row in 2 * lines(PLAIN) if not (whole and "FORWARD" in row)]
        assert len(scope.records) == 2


def test_optimizers_that_are_found_one_after_the_other_are_of_one_step(told: Told) -> None:
    model = Tiny()
    first, second = (torch.optim.SGD([parameter], 0.1) for parameter in model.parameters())
    with watched(model) as scope:
        for _ in range(2):
            passes(model)
            first.step()
            second.step()
        assert told(scope) == lines("""
            FORWARD -> RUNNING
            FOUND -> RUNNING
            BEFORE -> UPDATING replay remember scale read
            LAST -> ENDED measure end
            FOUND -> ENDED join
            FORWARD -> RUNNING
            BEFORE -> UPDATING replay remember scale read
            AFTER -> UPDATING
            BEFORE -> UPDATING read
            LAST -> ENDED measure end
        """)


def test_pausing_and_resuming(told: Told) -> None:
    model = Tiny()
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        passes(model)
        scope.pause()
        optimizer.step()
        passes(model)
        scope.resume()
        optimizer.step()
        passes(model)
        optimizer.step()
        assert told(scope) == lines(f"""
            FORWARD -> RUNNING
            PAUSE_MIDWAY -> RUNNING drop
            BEFORE -> RUNNING
            LAST -> ENDED end
            FORWARD -> ENDED
            RESUME -> ENDED drop
            BEFORE -> ENDED
            LAST -> ENDED end
            {PLAIN}
        """)
        assert [record.step for record in scope.records] == [2]


def test_a_loop_without_an_optimizer(told: Told) -> None:
    model = Tiny()
    with watched(model) as scope:
        for loss in (None, 1.0):
            passes(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)
            scope.step(loss=loss)
        assert told(scope) == 2 * lines("""
            FORWARD -> RUNNING
            MARKED -> ENDED replay scale read measure end
        """)


def test_calls_that_may_be_micro_batches_wait_for_the_next_forward(told: Told) -> None:
    model = Tiny()
    with watched(model) as scope:
        passes(model)
        scope.step()
        passes(model)
        scope.step()
        for parameter in model.parameters():
            parameter.grad = None
        passes(model)
        assert told(scope) == lines("""
            FORWARD -> RUNNING
            HELD -> UPDATING replay scale read
            FAILED -> RUNNING forget
            FORWARD -> RUNNING review
            HELD -> UPDATING replay scale read
            LAST -> ENDED measure end
            FORWARD -> RUNNING
        """)


def test_a_loop_that_calls_a_method_of_the_model_and_one_that_goes_on_from_a_checkpoint(told: Told) -> None:
    model = Stack(2)
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        passes(model)
        optimizer.step()
        nn.functional.mse_loss(model.forward(data()[0]), data()[1]).backward()
        scope.step(loss=1.0)
        scope.load_state_dict(scope.state_dict())
        passes(model)
        optimizer.step()
        assert told(scope) == lines(f"""
            {PLAIN}
            RAN -> RUNNING
            LOAD -> FIRST
            {PLAIN}
        """)
