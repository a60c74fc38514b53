"""The guard of every entrance: a fault of ours is caught, said once, and never stops a run.

Whatever the user's program calls of ours goes through one of these, each under the name of a fuse, which the line in
the log and `scope.summary()` bear (tests/test_doors.py holds the table of the entrances):

    Hook         what torch calls: a fault switches the fuse off
    StepHook     likewise at the ends of steps: a fault costs that step, and the next one tries again
    CallBefore   in place of a method of the user's object, which is called in any case
    door         a method of the scope: a fault gives a value in place of the result

Further in, `Faults.guard` (an instrument, a detector, a sink, a callback: its fault switches off it alone) and
`Faults.attempt` (what every step needs) keep a fault where it is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

from flowscope.errors import FlowscopeError, StopTraining
from flowscope.meter import Meter

LOGGER = logging.getLogger("flowscope")
PATIENCE = 1.0
"""Seconds that one thread waits for another one's turn at most."""

Method = TypeVar("Method", bound=Callable[..., Any])
Observe = Callable[..., None]


def is_off() -> bool:
    """Whether the environment turns flowscope off: `watch`, callbacks and `flowscope run` then observe nothing."""
    return os.environ.get("FLOWSCOPE_OFF") == "1"


class Turn:
    """One thread at a time works on what a scope keeps of its steps: `with turn:`.

    Nobody waits longer than `PATIENCE`: a callback that waits for a thread that waits for this turn would else stop the
    training for good.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Wait for it."""
        self._lock.acquire(timeout=PATIENCE)

    def __exit__(self, *exc_info: object) -> None:
        """Let go of it."""
        with contextlib.suppress(RuntimeError):  # it was not ours: waiting took too long
            self._lock.release()

    def renew(self) -> None:
        """In a forked child: the thread that had it lives in the parent alone."""
        self._lock = threading.RLock()


class Faults:
    """The fuses of one scope; `FLOWSCOPE_STRICT=1` raises instead.

    Attributes:
        failed: the fuses that have blown, with the reason.
        turn: one thread at a time.
        meter: the time that all of it takes.
        closing: whether hooks are coming off: one that another thread still runs may find half of what it needs.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.closing = False
        self.turn = Turn()
        self.meter = Meter()

    @property
    def strict(self) -> bool:
        """Whether a fault raises."""
        return os.environ.get("FLOWSCOPE_STRICT") == "1"

    def report(self, fuse: str, error: BaseException, consequence: str = "is switched off") -> None:
        """Note that what bears `fuse` failed with `error`: logged once.

        Raises:
            BaseException: an interrupt that Python 3.11 dressed as an error, as it does in the making of a class.
        """
        raise_interrupt(error)
        if self.strict:
            raise error
        if fuse not in self.failed:
            self.failed[fuse] = reason = _words(error)
            LOGGER.error(
                "flowscope: %s failed and %s; training goes on. %s",
                fuse,
                consequence,
                reason,
                exc_info=error if LOGGER.isEnabledFor(logging.DEBUG) else None,
            )

    def guard(self, fuse: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call `function(*args, **named)` unless its fuse has blown; a fault is reported and None returned.

        `StopTraining` is no fault: the user asked for it.
        """
        if fuse in self.failed:
            return None
        try:
            return function(*args, **named)
        except StopTraining:
            raise
        except Exception as error:
            self.report(fuse, error)
            return None

    def attempt(self, fuse: str, function: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
        """Call `function(*args)`; a fault is reported once and `otherwise` returned, and the next call tries again."""
        try:
            return function(*args)
        except StopTraining:
            raise
        except Exception as error:
            self.report(fuse, error, "is left out where it fails")
            return otherwise

    def enter(self, fuse: str, function: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
        """As `attempt`; an error of the user's, in what was given, is raised."""
        try:
            return function(*args)
        except FlowscopeError:
            raise
        except Exception as error:
            self.report(fuse, error)
            return otherwise

    def remove_all(self, handles: list[Any]) -> None:
        """Take off every handle, the newest first, though one fails."""
        while handles:
            self.attempt("removing a hook", handles.pop().remove)


def door(otherwise: Callable[[Any], Any] = lambda owner: None) -> Callable[[Method], Method]:
    """A method for the user's program, of an object with `_faults`; a fault is reported, `otherwise(self)` returned.

    What is wrong with the call itself is raised: a `FlowscopeError`, and arguments that the method does not take.
    """

    def guarded(method: Method) -> Method:
        fuse = f"scope.{method.__name__}"

        @functools.wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Any:
            try:
                return method(self, *args, **named)
            except FlowscopeError:
                raise
            except Exception as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is None:
                    raise  # the arguments do not fit
                self._faults.report(fuse, error, "did not do all of it")
                return otherwise(self)

        return call  # type: ignore[return-value]

    return guarded


class Samples(Protocol):
    """What a hook asks first: whether it observes now."""

    sampling: bool


class Hook:
    """A hook of torch: guarded, and replaced by an inert standard-library method in any copy or pickle of the model.

    Args:
        fuse: what a fault switches off.
        observe: called with the hook's arguments; what it returns is not used, so the training stays what it was.
        faults: who is told.
        switch: observes only while it is sampling.
        counts: whether what runs now is a part of the training at all.
        traced: whether torch.compile traces it, which knows no clock.
    """

    def __init__(
        self,
        fuse: str,
        observe: Observe,
        faults: Faults,
        switch: Samples,
        counts: Callable[[], bool],
        traced: Callable[[], bool] = lambda: False,
    ) -> None:
        self.traced = traced
        self.fuse, self.observe, self.faults, self.switch, self.counts = fuse, observe, faults, switch, counts
        self.off: Collection[str] = faults.failed

    def __call__(self, *args: Any) -> None:
        """Observe."""
        if not self.switch.sampling or self.fuse in self.off:
            return
        try:
            if not self.counts():
                return
            if self.traced():
                self.observe(*args)
            else:
                self.faults.meter.time(self.observe, *args)
        except StopTraining:
            raise
        except Exception as error:
            if not self.faults.closing:
                self.fault(error, args)

    def fault(self, error: Exception, args: tuple[Any, ...]) -> None:
        """It failed."""
        self.faults.report(self.fuse, error)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or saved model keeps `nullcontext().__exit__`, which takes any arguments and returns None."""
        return getattr, (contextlib.nullcontext(), "__exit__")


class StepHook(Hook):
    """A hook that every step needs.

    Args:
        otherwise: called with the hook's arguments where it failed.
    """

    def __init__(self, *args: Any, otherwise: Callable[..., object]) -> None:
        super().__init__(*args)
        self.off, self._otherwise = (), otherwise

    def fault(self, error: Exception, args: tuple[Any, ...]) -> None:
        """It failed in this step; the next one tries again."""
        self.faults.report(self.fuse, error, "is left out where it fails")
        self.faults.attempt(self.fuse, self._otherwise, *args)


class CallBefore:
    """Calls `ours()` before each call of a method of the user's object, until `remove`.

    Args:
        owner: the object.
        name: of its method.
        ours: what is called first.
        faults: who is told where it fails.
    """

    def __init__(self, owner: Any, name: str, ours: Callable[[], object], faults: Faults) -> None:
        theirs = getattr(owner, name)

        @functools.wraps(theirs)
        def both(*args: Any, **named: Any) -> Any:
            faults.attempt(f"{type(owner).__name__}.{name}", ours)
            return theirs(*args, **named)

        self._owner, self._name, self._both = owner, name, both
        setattr(owner, name, both)

    def remove(self) -> None:
        """Give the object its own method back."""
        if vars(self._owner).get(self._name) is self._both:
            delattr(self._owner, self._name)


def raise_interrupt(error: BaseException | None) -> None:
    """Raise the interrupt or exit that was the cause of an error; who swallows errors asks this first.

    Raises:
        BaseException: that one.
    """
    while error is not None and isinstance(error, Exception):
        error = error.__cause__
    if error is not None:
        raise error


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an exception that cannot say what it is
        return type(error).__name__
