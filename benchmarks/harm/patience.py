"""Ends what does not end by itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfPatience(BaseException):
    """The time is over. No `Exception`, so that nothing that is tried can catch it by mistake."""


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Raise `OutOfPatience` inside after so many seconds; in the main thread."""

    def over(*_: object) -> None:
        raise OutOfPatience(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
