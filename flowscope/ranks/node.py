"""A rank in the tree: its connections, and the thread that answers on them while the training runs.

The sums of an observer must never be part of what the training's own ranks wait for. A collective cannot be withdrawn
once it was entered, and gloo ends the process where two of different lengths meet; so ranks talk by sockets of their
own, on the host, whatever the training's backend. Only `Inbox.outcome` waits, for as long as it is told.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from flowscope.faults import LOGGER
from flowscope.ranks.gathering import KEPT, Gathering
from flowscope.ranks.wire import NEVER, Entry, Kind, Message, Stamp, Table, decode, encode
from flowscope.sums.buffer import HostCopy

CONNECT = 5.0
"""Seconds to reach the node above."""
FLUSH = 1.0
"""Seconds that closing gives to what is still to be sent."""
CHUNK = 1 << 20


def local_address(store: Any) -> str:
    """Return the address of this machine by which it reaches the process group's store: others reach it there too."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host or "localhost", getattr(store, "port", 9)))  # sends nothing
        return str(way.getsockname()[0])
    return "127.0.0.1"


class Inbox:
    """What a node has for its rank.

    Attributes:
        left: why nothing is added up any more: the first rank that left, or what failed; empty while all are there.
    """

    def __init__(self) -> None:
        self.left = ""
        self._numbers: dict[Stamp, int] = {}
        self._outcomes: dict[Stamp, Entry | None] = {}
        self._news = threading.Condition()

    def deliver(self, message: Message) -> None:
        """Put a message in its place."""
        with self._news:
            if message.kind is Kind.NUMBER:
                self._numbers[message.stamp] = message.number
            elif message.kind is Kind.LEFT:
                self.left = self.left or message.text
            elif message.kind is not Kind.ASK:
                self._outcomes[message.stamp] = message.entry
                while len(self._outcomes) > KEPT:
                    del self._outcomes[next(iter(self._outcomes))]
            self._news.notify_all()

    def take_numbers(self) -> dict[Stamp, int]:
        """The largest known numbers of steps, by stamp, that have come since this was last asked."""
        with self._news:
            numbers, self._numbers = self._numbers, {}
            return numbers

    def outcome(self, stamp: Stamp, seconds: float) -> tuple[bool, Entry | None]:
        """Whether the sum of a step is decided, within so many seconds, and the sum, None where there is none."""
        with self._news:
            there = self._news.wait_for(lambda: stamp in self._outcomes, seconds)
            return there, self._outcomes.get(stamp)


class Peer:
    """The connection to a neighbour; what is sent before there is one waits.

    Attributes:
        place: the neighbour's, -1 before it has said.
        out: bytes to be sent.
    """

    def __init__(self, place: int, link: socket.socket | None = None) -> None:
        self.place, self.link = place, link
        self.out = bytearray()
        self._in = bytearray()
        self._sent: set[bytes] = set()
        self._tables: dict[bytes, Table] = {}

    def put(self, message: Message) -> None:
        """Send it, soon."""
        if (entry := message.entry) is not None and entry.table.key not in self._sent:
            self._sent.add(entry.table.key)
            self.out += encode(Message(Kind.TABLE, entry=entry))
        self.out += encode(message)

    def adopt(self, waiting: Peer) -> None:
        """Take the place of one that had no connection yet, and what waits there."""
        self.place, self.out, self._sent = waiting.place, waiting.out, waiting._sent

    def flush(self) -> None:
        """Send what goes without waiting."""
        while self.link is not None and self.out:
            try:
                del self.out[: self.link.send(memoryview(self.out)[:CHUNK])]
            except BlockingIOError:
                return

    def received(self) -> list[Message]:
        """What has come.

        Raises:
            ConnectionError: the other end is gone.
        """
        assert self.link is not None
        chunk = self.link.recv(CHUNK)
        if not chunk:
            raise ConnectionError("closed")
        self._in += chunk
        return decode(self._in, self._tables)


class Node:
    """This rank among the others; see `Gathering` for what is told to whom.

    Args:
        place: this rank's.
        ranks: how many there are.
        host: the address that others reach this machine by.
        token: what all ranks know, and nobody else.

    Attributes:
        gathering: the rules.
        inbox: what has come for this rank.
        address: "host port" of this node.
    """

    def __init__(self, place: int, ranks: int, host: str, token: str) -> None:
        self.inbox = Inbox()
        self.gathering = Gathering(place, ranks, self._send, self.inbox.deliver)
        self._token = token
        self._listener = socket.create_server((host, 0), backlog=16)
        self.address = "{} {}".format(*self._listener.getsockname()[:2])
        self._woken, self._wake = socket.socketpair()
        self._todo: deque[Callable[[], object]] = deque()
        self._peers: dict[int, Peer] = {place: Peer(place) for place in self.gathering.children}
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._ended = False

    # -- for the rank --------------------------------------------------------------------------------------------------

    def start(self, above: str) -> None:
        """Connect, and answer from now on.

        Args:
            above: the address of the node above, empty for the first one.
        """
        self._thread = threading.Thread(target=self._run, args=(above,), name="flowscope ranks", daemon=True)
        self._thread.start()

    def enter(self, stamp: Stamp, table: Table, copy: HostCopy) -> None:
        """Enter a sum with these numbers, which may be on their way from a device.

        A node with others below it takes them when those have sent theirs: one turn of the thread is enough for both.
        Once a rank has left, nobody sends any more.
        """
        self._todo.append(lambda: self._take(Message(Kind.SUM, stamp, entry=Entry(table, copy.read()[0]))))
        if not self.gathering.children or self.inbox.left or self.gathering.has_begun(stamp):
            self._rouse()

    def tell(self, kind: Kind, stamp: Stamp = NEVER, number: int = 0, text: str = "") -> None:
        """Tell the others something."""
        self._ask(lambda: self._take(Message(kind, stamp, number, text)))

    def note(self, kind: Kind, stamp: Stamp) -> None:
        """Tell it with whatever comes next, or when somebody asks: it costs no turn of the thread."""
        self._todo.append(lambda: self._take(Message(kind, stamp)))
        if len(self._todo) > KEPT:
            self._rouse()

    def know(self, stamp: Stamp, number: int) -> None:
        """This rank's number of a step, for the case that somebody asks, or has another."""
        self._todo.append(lambda: self.gathering.know(stamp, number))
        if stamp in self.gathering.numbers:
            self._rouse()

    def leave(self, why: str) -> None:
        """Enter nothing any more, and say why; what others still wait for goes on being passed on."""
        self.tell(Kind.LEFT, number=self.gathering.place, text=why)

    def end(self) -> None:
        """Let go of the connections soon."""
        self._ended = True
        self._rouse()

    def close(self) -> None:
        """Send what is to be sent, and let go of the connections."""
        self.end()
        if self._thread is None:
            self._let_go()
        else:
            self._thread.join(2 * FLUSH)

    def _ask(self, what: Callable[[], object]) -> None:
        self._todo.append(what)
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b".")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        self.gathering.take(self.gathering.place, message)

    def _send(self, place: int, message: Message) -> None:
        if (peer := self._peers.get(place)) is not None:
            peer.put(message)

    def _run(self, above: str) -> None:
        try:
            self._begin(above)
            self._turn(0.0)  # the one above hears of this rank at once
            while not self._ended:
                self._turn(None)
            end = time.monotonic() + FLUSH
            while any(peer.out and peer.link for peer in self._peers.values()) and time.monotonic() < end:
                self._turn(0.05)
        except Exception as error:
            LOGGER.debug("flowscope: the ranks' thread ended", exc_info=error)
            self.inbox.deliver(Message(Kind.LEFT, text=f"no connection to the other ranks ({error})"))
        finally:
            self._let_go()

    def _begin(self, above: str) -> None:
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        if above:
            host, port = above.split()
            peer = Peer(self.gathering.parent, socket.create_connection((host, int(port)), CONNECT))
            peer.put(Message(Kind.HELLO, number=self.gathering.place, text=self._token))
            self._peers[peer.place] = peer
            self._listen_to(peer)

    def _listen_to(self, peer: Peer) -> None:
        assert peer.link is not None
        peer.link.setblocking(False)
        peer.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(peer.link, selectors.EVENT_READ, peer)

    def _turn(self, seconds: float | None) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                with contextlib.suppress(OSError):
                    self._listen_to(Peer(-1, self._listener.accept()[0]))
            elif key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                self._hear(key.data)
        while self._todo:
            self._todo.popleft()()
        for peer in [*self._peers.values()]:
            if peer.link is None:
                continue
            try:
                peer.flush()
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
                if self._selector.get_key(peer.link).events != events:
                    self._selector.modify(peer.link, events, peer)
            except OSError:
                self._lose(peer)

    def _hear(self, peer: Peer) -> None:
        if peer.link is None:  # lost in this turn
            return
        try:
            messages = peer.received()
            for message in messages:
                if peer.place >= 0:
                    self.gathering.take(peer.place, message)
                elif message.kind is not Kind.HELLO or message.text != self._token:
                    raise ValueError("a stranger")
                else:
                    self._welcome(peer, message.number)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError):
            self._lose(peer)

    def _welcome(self, peer: Peer, place: int) -> None:
        """A node below has come: what waited for it is sent."""
        if (waiting := self._peers.get(place)) is None or waiting.link is not None:
            raise ValueError("no node below this one")
        peer.adopt(waiting)
        self._peers[place] = peer

    def _lose(self, peer: Peer) -> None:
        if peer.link is not None:
            self._selector.unregister(peer.link)
            peer.link.close()
            peer.link = None
            if peer.place >= 0:
                self.gathering.lost(peer.place)

    def _let_go(self) -> None:
        links = [peer.link for peer in self._peers.values() if peer.link is not None]
        self._selector.close()
        for link in (*links, self._listener, self._woken, self._wake):
            link.close()
