"""Ends what does not end by itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

SIGNALS = {signal.ITIMER_REAL: signal.SIGALRM, signal.ITIMER_PROF: signal.SIGPROF}
"""What a timer sends."""


class OutOfPatience(BaseException):
    """The time is over. No `Exception`, so that nothing that is tried can catch it by mistake."""


def patience(seconds: float) -> AbstractContextManager[None]:
    """Raise `OutOfPatience` inside after so many seconds; in the main thread."""
    return _limit(seconds, signal.ITIMER_REAL, OutOfPatience(f"not done after {seconds:g} s"))


def time_limit(seconds: float) -> AbstractContextManager[None]:
    """Raise TimeoutError inside after so many seconds of processor time; in the main thread."""
    return _limit(seconds, signal.ITIMER_PROF, TimeoutError(f"more than {seconds:g} s"))


@contextmanager
def _limit(seconds: float, timer: int, error: BaseException) -> Iterator[None]:
    def over(*_: object) -> None:
        raise error

    before = signal.signal(SIGNALS[timer], over)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(SIGNALS[timer], before)
