"""What ranks tell each other about a step, and how it looks on the wire.

Axis letters: N numbers of one entry.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache

import numpy as np

from flowscope.records import Array

Stamp = tuple[int, int, int]
"""Which step: the same on all ranks that make it together, and growing with every step of a rank; see `Clock`."""
Row = tuple[str, int, bool]
"""Of a table: name, how many numbers, whether the largest over the ranks is asked for, not the sum."""
NEVER: Stamp = (-1, 0, 0)
LAST: Stamp = (2**62, 0, 0)
"""Before and after every step."""
MOST_BYTES = 1 << 30


class Kind(IntEnum):
    """Kinds of messages.

    HELLO: the first one on a connection: which rank, and that it was told of the place (`text`).
    TABLE: the table of entries that follow.
    SUM: of a rank and those below it, on its way up.
    RESULT: the sum of all, on its way down.
    VOID: a step that some rank does not enter has no sum.
    PASSED: the sender, and all below it, enter nothing up to this step any more.
    NUMBER: the number that the step has with some rank.
    LEFT: a rank enters nothing any more, and why.
    ASK: a rank waits for the sum of this step: who has not said what it has passed says it.
    """

    HELLO, TABLE, SUM, RESULT, VOID, PASSED, NUMBER, LEFT, ASK = range(9)


@dataclass(frozen=True)
class Table:
    """What the numbers of an entry are.

    Attributes:
        rows: the sums first.
    """

    rows: tuple[Row, ...]

    @cached_property
    def text(self) -> bytes:
        """As it is sent."""
        return json.dumps(self.rows).encode()

    @cached_property
    def key(self) -> bytes:
        """Eight bytes that tell it from others."""
        return hashlib.sha256(self.text).digest()[:8]

    @cached_property
    def sums(self) -> int:
        """How many of the numbers are sums."""
        return sum(count for _, count, largest in self.rows if not largest)

    @cached_property
    def places(self) -> dict[Row, slice]:
        """Where each row's numbers lie."""
        ends = np.cumsum([count for _, count, _ in self.rows]).tolist()
        return {row: slice(end - row[1], end) for row, end in zip(self.rows, ends, strict=True)}


@lru_cache(8)
def table_of(rows: tuple[Row, ...]) -> Table:
    """The table of these rows; what tells it from others is made once, as most sums have the same."""
    return Table(rows)


@dataclass(frozen=True)
class Entry:
    """The numbers of one rank, or the sum of those of several.

    Attributes:
        table: what they are.
        numbers: [N].
    """

    table: Table
    numbers: Array

    def only(self, rows: Sequence[Row]) -> Entry:
        """These rows of it."""
        if tuple(rows) == self.table.rows:
            return self
        picked = [self.numbers[self.table.places[row]] for row in rows]
        return Entry(Table(tuple(rows)), np.concatenate(picked) if picked else np.zeros(0))


def added(entries: Sequence[Entry]) -> Entry:
    """Return the sum of entries, in their order, of the rows that all of them have."""
    rows: Sequence[Row] = entries[0].table.rows
    if any(entry.table.key != entries[0].table.key for entry in entries):
        common = set.intersection(*({*entry.table.rows} for entry in entries))
        rows = [row for row in rows if row in common]
    first, *others = [entry.only(rows) for entry in entries]
    total, cut = first.numbers.copy(), first.table.sums
    for other in others:
        total[:cut] += other.numbers[:cut]
        np.maximum(total[cut:], other.numbers[cut:], out=total[cut:])
    return Entry(first.table, total)


@dataclass(frozen=True)
class Message:
    """What one rank tells another.

    Attributes:
        kind: which of the fields below count.
        stamp: the step.
        number: a step's number, or a rank.
        text: why.
        entry: of SUM and RESULT; of TABLE its table.
    """

    kind: Kind
    stamp: Stamp = NEVER
    number: int = 0
    text: str = ""
    entry: Entry | None = field(default=None, repr=False)


HEAD = struct.Struct("<BqqqqI")
"""Kind, stamp, number, bytes that follow."""


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    body = message.text.encode()
    if message.entry is not None:
        table = message.entry.table
        body = table.text if message.kind is Kind.TABLE else table.key + message.entry.numbers.astype("<f8").tobytes()
    return HEAD.pack(message.kind, *message.stamp, message.number, len(body)) + body


def decode(data: bytearray, tables: dict[bytes, Table]) -> list[Message]:
    """Take the whole messages off the front of what was received; tables are remembered, and no messages.

    Raises:
        ValueError: these are no messages of ours.
    """
    found: list[Message] = []
    at = 0
    while len(data) - at >= HEAD.size:
        kind, *stamp, number, length = HEAD.unpack_from(data, at)
        if length > MOST_BYTES or kind > max(Kind):
            raise ValueError("no message of flowscope")
        if len(data) - at - HEAD.size < length:
            break
        body = bytes(data[at + HEAD.size : at + HEAD.size + length])
        at += HEAD.size + length
        if kind == Kind.TABLE:
            table = Table(tuple((str(name), int(count), bool(most)) for name, count, most in json.loads(body)))
            tables[table.key] = table
        elif kind in (Kind.SUM, Kind.RESULT):
            table = tables.get(body[:8], Table(()))
            numbers = np.frombuffer(body, "<f8", offset=8).astype(np.float64)
            if len(numbers) != sum(count for _, count, _ in table.rows):
                raise ValueError("an entry without its table")
            found.append(Message(Kind(kind), (stamp[0], stamp[1], stamp[2]), number, entry=Entry(table, numbers)))
        else:
            found.append(Message(Kind(kind), (stamp[0], stamp[1], stamp[2]), number, body.decode()))
    del data[:at]
    return found
