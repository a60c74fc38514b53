"""Where in a training step a scope is: a table of (phase, event) -> (phase, actions), and two small ones beside it.

Pure: events go in, actions come out; who feeds it and carries the actions out is `flowscope.steps.driver`. A step is

    forward and backward passes, any number       RUNNING
    the optimizers of the model, one or several   UPDATING, or CLOSURE while one of them runs the model itself
    the last of them has stepped                  ENDED, until the model runs again

Beside it, whether the scope is paused (`Watching`), and whose deposits are pending (`Deposits`: what backward left
before another model's optimizer stepped is that one's, unless ours steps before the model runs again).
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias


class Word(Enum):
    """A word of the tables, found in them by its identity: events come in every step, sampled or not."""

    __hash__ = object.__hash__


class Phase(Word):
    """What has happened of the step under way.

    FIRST: nothing, and no step before it: `watch` or `load_state_dict` was the last.
    ENDED: nothing: the step before it has just ended, and what comes now may still belong to that.
    RUNNING: the model has run.
    UPDATING: the first of the model's optimizers has begun its step.
    CLOSURE: an optimizer that was given a closure steps (LBFGS, Lightning): gradients come while the weights change.
    """

    FIRST, ENDED, RUNNING, UPDATING, CLOSURE = range(5)


class Event(Word):
    """What hooks and calls tell.

    FORWARD: a forward of the model in training begins.
    RAN: a part of the model has run in training, be it that its own `__call__` is not what the loop calls.
    FOUND: an optimizer of the model that was not known so far is about to step.
    BEFORE, BEFORE_CLOSURE: an optimizer of the model is about to step, without or with a closure.
    AFTER, LAST: it has stepped, and another of this step is to come, or that ends the step.
    FAILED: the step of an optimizer, or the backward that it stepped in, has raised.
    FOREIGN: an optimizer that holds none of the model's parameters has stepped.
    HELD: `scope.step` in a loop without an optimizer, and it may be one micro-batch of several: LAST or FAILED tells.
    SKIPPED: the GradScaler found inf and left the optimizer's step out.
    MARKED: `scope.step` in a loop without an optimizer: the weights have changed.
    BEGIN: it was decided whether the step under way is sampled.
    LOAD: `load_state_dict`: another run goes on here.
    PAUSE, PAUSE_MIDWAY: `scope.pause`, before or after the model has run in this step.
    RESUME: `scope.resume`.
    """

    FORWARD, RAN, FOUND, BEFORE, BEFORE_CLOSURE, AFTER, LAST, FAILED, FOREIGN, SKIPPED, MARKED = range(11)
    BEGIN, LOAD, PAUSE, PAUSE_MIDWAY, RESUME, HELD = range(11, 17)


class Action(Word):
    """What is to be done, in the order given; of a step that is not observed only what is marked with *.

    DROP: forget what is pending: it belongs to no step of ours.*
    REVIEW: look whether the gradients that backward left so far were thrown away, and forget what belongs to them.
    REPLAY: replay fused recurrent layers, unless this step's were: the weights are still (nearly) the forward's.
    REMEMBER: remember the weights: they are about to change.
    SCALE: note the loss scale of this step's backward.
    READ: read the gradients that this optimizer will use (after a closure: has used).
    MEASURE: read the gradients that no optimizer has read, and how far the weights have changed.
    FORGET: forget what was read of an update that did not happen.*
    JOIN: count the optimizer into the step that has just ended; what it is about to do ends no step of its own.*
    END: take what was deposited, and begin the next step.*
    SKIP: likewise, and the update was left out.*
    """

    DROP, REVIEW, REPLAY, REMEMBER, SCALE, READ, MEASURE, FORGET, JOIN, END, SKIP = range(11)


class Watching(Word):
    """Whether hooks observe.

    ON: yes.
    PAUSED: no, and nothing of the step under way was missed so far.
    MISSED: no, and a part of the step under way was missed.
    RESUMING: from the next step on.
    """

    ON, PAUSED, MISSED, RESUMING = range(4)


class Deposits(Word):
    """Whose gradients the pending deposits are.

    OURS: those of a step of ours.
    FOREIGN: another model's optimizer has stepped since: its own, unless an optimizer of ours steps next.
    """

    OURS, FOREIGN = range(2)


UNTOUCHED = (Phase.FIRST, Phase.ENDED)
ENDS = frozenset({Action.END, Action.SKIP})
ALWAYS = frozenset({Action.DROP, Action.FORGET, Action.JOIN}) | ENDS
"""What is done whether the step is observed or not."""

Actions: TypeAlias = tuple[Action, ...]


def _step_table() -> dict[tuple[Phase, Event], tuple[Phase, Actions]]:
    """Every phase and event: what is not named here changes nothing."""
    first, ended, running, updating, closure = Phase
    table: dict[tuple[Phase, Event], tuple[Phase, Actions]] = {(p, e): (p, ()) for p in Phase for e in Event}
    for phase in Phase:
        table[phase, Event.SKIPPED] = ended, (Action.SKIP,)
        table[phase, Event.MARKED] = ended, (Action.REPLAY, Action.SCALE, Action.READ, Action.MEASURE, Action.END)
        table[phase, Event.HELD] = updating, (Action.REPLAY, Action.SCALE, Action.READ)
        table[phase, Event.LAST] = ended, (Action.MEASURE, Action.END)
        table[phase, Event.FAILED] = phase, (Action.FORGET,)
        table[phase, Event.LOAD] = first, ()
    for phase in UNTOUCHED:
        table[phase, Event.FORWARD] = table[phase, Event.RAN] = running, ()
    for phase in (*UNTOUCHED, running):
        table[phase, Event.BEFORE] = updating, (Action.REPLAY, Action.REMEMBER, Action.SCALE, Action.READ)
        table[phase, Event.BEFORE_CLOSURE] = closure, (Action.REMEMBER,)
    for phase in (updating, closure):
        table[phase, Event.BEFORE] = updating, (Action.READ,)
        table[phase, Event.BEFORE_CLOSURE] = closure, ()
        table[phase, Event.FAILED] = running, (Action.FORGET,)
    for phase in (running, updating):
        table[phase, Event.FORWARD] = phase, (Action.REVIEW,)
    table[ended, Event.FOUND] = ended, (Action.JOIN,)
    table[closure, Event.AFTER] = updating, (Action.REPLAY, Action.READ)
    table[closure, Event.LAST] = ended, (Action.REPLAY, Action.READ, Action.MEASURE, Action.END)
    return table


STEP = _step_table()
UNOBSERVED = {at: (phase, tuple(a for a in actions if a in ALWAYS)) for at, (phase, actions) in STEP.items()}

WATCHING: dict[tuple[Watching, Event], tuple[Watching, Actions]] = {
    (Watching.ON, Event.PAUSE): (Watching.PAUSED, (Action.DROP,)),
    (Watching.ON, Event.PAUSE_MIDWAY): (Watching.MISSED, (Action.DROP,)),
    (Watching.PAUSED, Event.FORWARD): (Watching.MISSED, ()),
    (Watching.PAUSED, Event.RESUME): (Watching.ON, (Action.DROP,)),
    (Watching.MISSED, Event.RESUME): (Watching.RESUMING, (Action.DROP,)),
    (Watching.MISSED, Event.BEGIN): (Watching.PAUSED, ()),
    (Watching.RESUMING, Event.PAUSE): (Watching.MISSED, (Action.DROP,)),
    (Watching.RESUMING, Event.PAUSE_MIDWAY): (Watching.MISSED, (Action.DROP,)),
    (Watching.RESUMING, Event.BEGIN): (Watching.ON, ()),
}
"""What is not named changes nothing."""

DEPOSITS: dict[tuple[Deposits, Event], tuple[Deposits, Actions]] = {
    (Deposits.OURS, Event.FOREIGN): (Deposits.FOREIGN, ()),
    (Deposits.FOREIGN, Event.FORWARD): (Deposits.OURS, (Action.DROP,)),
    (Deposits.FOREIGN, Event.RAN): (Deposits.OURS, (Action.DROP,)),
    (Deposits.FOREIGN, Event.BEGIN): (Deposits.OURS, ()),
    (Deposits.FOREIGN, Event.PAUSE): (Deposits.OURS, ()),
    (Deposits.FOREIGN, Event.PAUSE_MIDWAY): (Deposits.OURS, ()),
}
"""What is not named changes nothing."""

ON, FOREIGN = Watching.ON, Deposits.FOREIGN
"""A member of an enum is slow to look up, and each step asks for these many times."""
RUNS = frozenset({Event.FORWARD, Event.RAN})
UPDATES = frozenset({Event.BEFORE, Event.BEFORE_CLOSURE, Event.AFTER})


class StepMachine:
    """The phase of one scope's step.

    Attributes:
        phase: what has happened of the step under way.
        watching: whether hooks observe.
        deposits: whose the pending deposits are.
        sampling: whether the step under way is sampled (`begin`).
    """

    def __init__(self) -> None:
        self.phase, self.watching, self.deposits = Phase.FIRST, Watching.ON, Deposits.OURS
        self.sampling = False

    @property
    def paused(self) -> bool:
        """Whether hooks see nothing."""
        return self.watching is not ON

    @property
    def observing(self) -> bool:
        """Whether the step under way is sampled and the scope not paused."""
        return self.sampling and self.watching is ON

    def on(self, event: Event) -> Actions:
        """Take an event; returns what is to be done, in this order."""
        self.watching, actions = WATCHING.get((self.watching, event), (self.watching, ()))
        paused = self.watching is not ON
        observing = self.sampling and not paused
        if (event in RUNS and paused) or (event in UPDATES and not observing):
            return actions
        self.deposits, of_others = DEPOSITS.get((self.deposits, event), (self.deposits, ()))
        self.phase, of_step = (STEP if observing else UNOBSERVED)[self.phase, event]
        # what is forgotten needs no review
        return actions or of_others or of_step

    def begin(self, *, sampling: bool) -> Actions:
        """The step under way begins (again)."""
        self.sampling = sampling
        return self.on(Event.BEGIN)

    def pausing(self) -> Event:
        """The event of a pause that is asked for now."""
        return Event.PAUSE if self.phase in UNTOUCHED else Event.PAUSE_MIDWAY
