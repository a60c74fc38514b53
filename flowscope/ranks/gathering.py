"""The rules by which ranks add up, without sockets: what a rank does with a message, and whom it tells.

Ranks are the nodes of a tree; each adds what it enters to what those below it sent, and passes it up. The first rank
has the sum, and sends it down. There is no order to keep: a sum is known by its step's stamp, and a step that some rank
does not enter has no sum. That it does not is known as soon as it, or all below a node, have gone on to a later step:
nobody waits for a limit then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from flowscope.ranks.wire import LAST, NEVER, Entry, Kind, Message, Stamp, added

CHILDREN = 4
"""Of a node."""
KEPT = 64
"""Of so many steps what was decided is remembered."""
SKIPPED = "a rank did not enter this step"


class Recent(OrderedDict[Stamp, int]):
    """A number for each of the last `KEPT` stamps."""

    def keep(self, stamp: Stamp, number: int = 0) -> None:
        """Remember it."""
        self[stamp] = number
        self.move_to_end(stamp)
        while len(self) > KEPT:
            self.popitem(last=False)


class Gathering:
    """One rank's place in the tree.

    Args:
        place: among the ranks, from 0.
        ranks: how many there are.
        send: takes the place of a neighbour and a message for it.
        deliver: takes what is for this rank itself: RESULT, VOID, NUMBER, LEFT.

    Attributes:
        place: its own.
        parent: the place of the node above, -1 for the first.
        children: those of the nodes below.
        numbers: the largest number known of a step, by stamp.
    """

    def __init__(
        self, place: int, ranks: int, send: Callable[[int, Message], None], deliver: Callable[[Message], None]
    ) -> None:
        self.place, self.parent = place, (place - 1) // CHILDREN if place else -1
        self.children = range(min(ranks, CHILDREN * place + 1), min(ranks, CHILDREN * (place + 1) + 1))
        self._send, self._deliver = send, deliver
        self._entries: dict[Stamp, dict[int, Entry]] = {}
        self._last = dict.fromkeys((place, *self.children), NEVER)
        """By source (this rank, and the nodes below): up to which step it enters nothing any more."""
        self._told = NEVER
        """The last step that the node above knows to be behind this one and all below it."""
        self._over, self.numbers, self._asked = Recent(), Recent(), Recent()
        """Steps whose sum is decided."""
        self._left: set[int] = set()

    def take(self, source: int, message: Message) -> None:
        """Take a message of a neighbour, or (`source` is the own place) what this rank itself does."""
        RULES[message.kind](self, source, message)

    def has_begun(self, stamp: Stamp) -> bool:
        """Whether a node below has entered this step, or it is decided."""
        return stamp in self._entries or stamp in self._over

    def lost(self, source: int) -> None:
        """The connection to a neighbour has ended, without a word."""
        if source == self.parent or source not in self._left:
            self.take(source, Message(Kind.LEFT, number=source, text="the connection to another rank has ended"))
        if source == self.parent:
            for stamp in [*self._entries]:
                self._void(source, Message(Kind.VOID, stamp, text=SKIPPED))

    def _spread(self, source: int, message: Message) -> None:
        """Tell all neighbours but the one it came from, and this rank."""
        for place in (self.parent, *self.children):
            if place not in (source, -1):
                self._send(place, message)
        self._deliver(message)

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _sum(self, source: int, message: Message) -> None:
        stamp, entry = message.stamp, message.entry
        assert entry is not None
        if stamp in self._over:
            if source == self.place:
                self._deliver(Message(Kind.VOID, stamp, text=SKIPPED))
            return
        self._entries.setdefault(stamp, {})[source] = entry
        self._passes(source, stamp)
        entries = self._entries.get(stamp, {})
        if len(entries) < len(self._last):
            return
        total = Message(Kind.SUM, stamp, entry=added([entries[place] for place in sorted(entries)]))
        self._entries[stamp] = {place: total.entry for place in entries if total.entry is not None}
        if self.parent < 0:
            self._result(source, Message(Kind.RESULT, stamp, entry=total.entry))
        else:
            self._told = max(self._told, stamp)
            self._send(self.parent, total)

    def _result(self, source: int, message: Message) -> None:
        self._end(message.stamp)
        self._spread(self.parent, message)

    def _end(self, stamp: Stamp) -> None:
        self._entries.pop(stamp, None)
        self._over.keep(stamp)

    def _passes(self, source: int, stamp: Stamp) -> None:
        """A source has come to a step: what it has not entered up to there it never will."""
        self._last[source] = max(self._last[source], stamp)
        for earlier, entries in [*self._entries.items()]:
            if any(self._last[place] >= earlier for place in self._last if place not in entries):
                self._void(self.place, Message(Kind.VOID, earlier, text=SKIPPED))
        behind = min(self._last.values())
        # a step that all have entered goes up as their sum
        if self.parent >= 0 and behind > self._told and len(self._entries.get(behind, ())) < len(self._last):
            self._told = behind
            self._send(self.parent, Message(Kind.PASSED, behind))

    def _void(self, source: int, message: Message) -> None:
        if message.stamp not in self._over:
            self._end(message.stamp)
            self._spread(source, message)

    def _ask(self, source: int, message: Message) -> None:
        """It reaches all: what they have said to nobody yet goes out when they are woken."""
        if message.stamp not in self._asked:
            self._asked.keep(message.stamp)
            self._spread(source, message)

    # -- numbers of steps, ranks that leave ----------------------------------------------------------------------------

    def _number(self, source: int, message: Message) -> None:
        """The largest number of a step wins; who has a smaller one hears it, who has none passes it on."""
        known = self.numbers.get(message.stamp)
        if known is None or message.number > known:
            self.numbers.keep(message.stamp, message.number)
            self._spread(source, message)
        elif message.number < known:
            larger = Message(Kind.NUMBER, message.stamp, known)
            if source == self.place:
                self._deliver(larger)
            else:
                self._send(source, larger)

    def know(self, stamp: Stamp, number: int) -> int:
        """This rank's own number of a step, told to nobody: where a smaller one is known, all hear it.

        Returns:
            The largest that is known.
        """
        known = self.numbers.get(stamp, -1)
        if -1 < known < number:
            self._number(self.place, Message(Kind.NUMBER, stamp, number))
        elif known < 0:
            self.numbers.keep(stamp, number)
        return max(known, number)

    def _leaves(self, source: int, message: Message) -> None:
        if message.number in self._left:
            return
        self._left.add(message.number)
        self._spread(source, message)
        if message.number in self._last:
            self._passes(message.number, LAST)


RULES: dict[Kind, Callable[[Gathering, int, Message], None]] = {
    Kind.SUM: Gathering._sum,
    Kind.RESULT: Gathering._result,
    Kind.VOID: Gathering._void,
    Kind.PASSED: lambda gathering, source, message: gathering._passes(source, message.stamp),
    Kind.NUMBER: Gathering._number,
    Kind.LEFT: Gathering._leaves,
    Kind.ASK: Gathering._ask,
}
