"""The door to a terminal: names and messages are text of whoever wrote the run, and may hold orders to the terminal.

An escape sequence can set the title, move the cursor over other lines or hide them; a line end can forge a line.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable
from typing import TextIO

# C0 and C1 controls, directions of writing, line and paragraph separators, halves of surrogates, tags
_ORDERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)


LONGEST = 4000
"""Characters of a line; the rest of a longer one is left out."""


def shown(line: str) -> str:
    r"""One line as a terminal may have it: what would be an order is written out (`\x1b`)."""
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]} ... and {len(line) - LONGEST} characters more"
    return _ORDERS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), line)


def block(lines: Iterable[str]) -> str:
    """Several such lines as one text."""
    return "\n".join(map(shown, lines))


def paragraph(text: str) -> str:
    """A text of several lines as a terminal may have it."""
    return block(text.split("\n"))


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print text on stderr (or `stream`); where there is none, or it is closed, nobody is told and nothing raised."""
    stream = sys.stderr if stream is None else stream
    if stream is None:  # a process without a terminal
        return
    with contextlib.suppress(OSError, ValueError):
        print(paragraph(text), file=stream)


def duration(seconds: float) -> str:
    """A time in words: 8 h 02 min, 3 min 07 s, 12 s."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
