"""The rules by which ranks add up, and their connections, without training; plain sums tell what is right."""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from flowscope.ranks.clock import Clock
from flowscope.ranks.gathering import Gathering
from flowscope.ranks.node import Node
from flowscope.ranks.wire import Entry, Kind, Message, Stamp, Table, added, decode, encode
from flowscope.steps.losses import StepLoss
from flowscope.sums.buffer import HostCopy

TABLE = Table((("first", 2, False), ("second", 1, False), ("largest", 2, True)))


class Ranks:
    """Many ranks without sockets: messages of one connection stay in order, connections go in any order."""

    def __init__(self, count: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.ways: dict[tuple[int, int], deque[Message]] = {}
        self.told: list[list[Message]] = [[] for _ in range(count)]
        self.nodes = [
            Gathering(place, count, lambda to, m, place=place: self.put(place, to, m), self.told[place].append)
            for place in range(count)
        ]

    def put(self, source: int, to: int, message: Message) -> None:
        self.ways.setdefault((source, to), deque()).append(message)

    def carry(self) -> None:
        while busy := [way for way, waiting in self.ways.items() if waiting]:
            source, to = self.draw.choice(busy)
            self.nodes[to].take(source, self.ways[source, to].popleft())

    def outcome(self, place: int, stamp: Stamp) -> Message | None:
        found = [m for m in self.told[place] if m.stamp == stamp and m.kind in (Kind.RESULT, Kind.VOID)]
        assert len({m.kind for m in found}) < 2
        return found[0] if found else None


def entered(stamp: Stamp, numbers: Any, table: Table = TABLE) -> Message:
    return Message(Kind.SUM, stamp, entry=Entry(table, np.array(numbers, dtype=float)))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 21, 40])
def test_all_ranks_have_the_sum_of_the_steps_that_all_entered_and_no_other(count: int) -> None:
    for seed in range(20):
        ranks, draw = Ranks(count, seed), random.Random(seed)
        numbers = np.random.default_rng(seed).normal(size=(8, count, 5))
        skips = {(draw.randrange(8), draw.randrange(count)) for _ in range(draw.randrange(4))}
        doing = [(step, place) for step in range(8) for place in range(count)]
        # each rank goes on in its own time, in the order of its steps
        doing.sort(key=lambda at: at[0] + draw.random() * 2)
        for place in range(count):
            for step in sorted(step for step, owner in doing if owner == place):
                if (step, place) not in skips:
                    ranks.nodes[place].take(place, entered((step, 0, 0), numbers[step, place]))
                if draw.random() < 0.5:
                    ranks.carry()
        ranks.carry()
        for place in range(count):
            ranks.nodes[place].take(place, Message(Kind.PASSED, (8, 0, 0)))
        ranks.carry()
        for step in range(8):
            missed = any(at == step for at, _ in skips)
            for place in range(count):
                outcome = ranks.outcome(place, (step, 0, 0))
                if missed:
                    assert outcome is None or outcome.kind is Kind.VOID
                    assert (step, place) in skips or outcome is not None
                    continue
                assert outcome is not None
                assert outcome.entry is not None
                expected = np.concatenate([numbers[step, :, :3].sum(0), numbers[step, :, 3:].max(0)])
                np.testing.assert_allclose(outcome.entry.numbers, expected, rtol=1e-12)
                first = ranks.outcome(0, (step, 0, 0))
                assert first is not None
                assert first.entry is not None
                np.testing.assert_array_equal(outcome.entry.numbers, first.entry.numbers)


def test_a_skipped_step_is_known_without_any_limit() -> None:
    """Rank 3 of 4 goes on: nobody has to wait until it has come to its next sampled step."""
    ranks = Ranks(4, 0)
    for place in range(3):
        ranks.nodes[place].take(place, entered((5, 0, 0), range(5)))
    ranks.carry()
    assert [ranks.outcome(place, (5, 0, 0)) for place in range(4)] == [None] * 4
    ranks.nodes[3].take(3, Message(Kind.PASSED, (5, 0, 1 << 40)))
    ranks.carry()
    for place in range(3):
        assert ranks.outcome(place, (5, 0, 0)).kind is Kind.VOID  # type: ignore[union-attr]


@pytest.mark.parametrize("place", [0, 1, 20])
def test_who_leaves_is_told_to_all_and_its_last_sum_still_comes(place: int) -> None:
    ranks = Ranks(21, 1)
    for other in range(21):
        ranks.nodes[other].take(other, entered((1, 0, 0), [other] * 5))
    ranks.carry()
    ranks.nodes[place].take(place, Message(Kind.LEFT, number=place, text="closed"))
    for other in range(21):
        if other != place:
            ranks.nodes[other].take(other, entered((2, 0, 0), [other] * 5))
    ranks.carry()
    for other in range(21):
        assert ranks.outcome(other, (1, 0, 0)).kind is Kind.RESULT  # type: ignore[union-attr]
        if other != place:
            assert ranks.outcome(other, (2, 0, 0)).kind is Kind.VOID  # type: ignore[union-attr]
            assert [m.text for m in ranks.told[other] if m.kind is Kind.LEFT] == ["closed"]


def test_the_largest_number_of_a_step_reaches_all_who_know_the_step() -> None:
    for seed in range(30):
        ranks, draw = Ranks(21, seed), random.Random(seed)
        numbers = [draw.choice((7, 8, 8, 9)) for _ in range(21)]
        for place in draw.sample(range(21), 21):
            if draw.random() < 0.3:
                ranks.nodes[place].take(place, Message(Kind.NUMBER, (1, 0, 0), numbers[place]))
            else:
                ranks.nodes[place].know((1, 0, 0), numbers[place])
            if draw.random() < 0.5:
                ranks.carry()
        # one rank that is behind asks
        ranks.nodes[20].take(20, Message(Kind.NUMBER, (1, 0, 0), 0))
        ranks.carry()
        told = [[m.number for m in told if m.kind is Kind.NUMBER] for told in ranks.told]
        assert max(told[20]) >= numbers[ranks.nodes[20].parent]
        assert all(max(heard, default=0) <= max(numbers) for heard in told)


def test_only_what_all_have_is_added() -> None:
    one = Entry(Table((("a", 1, False), ("b", 2, False), ("m", 1, True))), np.array([1.0, 2.0, 3.0, 4.0]))
    other = Entry(Table((("a", 1, False), ("b", 3, False), ("m", 1, True))), np.array([10.0, 0, 0, 0, 5.0]))
    total = added([one, other])
    assert total.table.rows == (("a", 1, False), ("m", 1, True))
    np.testing.assert_array_equal(total.numbers, [11.0, 5.0])


def test_messages_come_as_they_were_sent_in_whatever_pieces() -> None:
    entry = Entry(TABLE, np.array([1.5, np.nan, -np.inf, 2.0**52, 1e-300]))
    sent = [Message(Kind.VOID, (1, 2, 3), 4, "why ü"), Message(Kind.SUM, (5, 0, 0), entry=entry)]
    data = b"".join(encode(m) for m in [Message(Kind.TABLE, entry=entry), *sent])
    waiting, found = bytearray(), []
    tables: dict[bytes, Table] = {}
    for byte in data:
        waiting.append(byte)
        found += decode(waiting, tables)
    assert [(m.kind, m.stamp, m.number, m.text) for m in found] == [(m.kind, m.stamp, m.number, m.text) for m in sent]
    assert found[1].entry is not None
    np.testing.assert_array_equal(found[1].entry.numbers, entry.numbers)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: a\r\nUser-Agent: somebody who knocks\r\n\r\n", b"\xff" * 64]
)
def test_strangers_are_sent_away(data: bytes) -> None:
    nodes = [Node(place, 2, "127.0.0.1", "token") for place in range(2)]
    nodes[0].start("")
    host, port = nodes[0].address.split()
    with socket.create_connection((host, int(port)), 2.0) as stranger:
        stranger.sendall(data)
        stranger.settimeout(5.0)
        assert stranger.recv(1) == b""
    nodes[1].start(nodes[0].address)
    assert totals(nodes, (1, 0, 0)) == [[3.0] * 3 + [2.0] * 2] * 2
    for node in nodes:
        node.close()


def totals(nodes: list[Node], stamp: Stamp) -> list[list[float] | None]:
    for number, node in enumerate(nodes):
        node.enter(stamp, TABLE, HostCopy([torch.full((5,), number + 1.0, dtype=torch.float64)]))
    outcomes = [node.inbox.outcome(stamp, 10.0) for node in nodes]
    assert all(there for there, _ in outcomes)
    return [None if entry is None else entry.numbers.tolist() for _, entry in outcomes]


def test_sockets_that_break_and_nodes_that_close() -> None:
    """Eleven nodes, three deep: sums come; a node that is gone without a word ends all of it."""
    nodes = [Node(place, 11, "127.0.0.1", "token") for place in range(11)]
    for node in reversed(nodes):  # a node below may come first
        node.start(nodes[node.gathering.parent].address if node.gathering.parent >= 0 else "")
    expected = [66.0] * 3 + [11.0] * 2
    for step in range(5):
        assert totals(nodes, (step, 0, 0)) == [expected] * 11
    peer = nodes[9]._peers[2]
    assert peer.link is not None
    peer.link.shutdown(socket.SHUT_RDWR)
    for node in nodes[:9]:
        node.enter((9, 0, 0), TABLE, HostCopy([torch.zeros(5, dtype=torch.float64)]))
    assert [node.inbox.outcome((9, 0, 0), 60.0) for node in nodes[:9]] == [(True, None)] * 9
    for node in nodes:  # also the two that entered nothing, a little later
        with node.inbox._news:
            assert node.inbox._news.wait_for(lambda inbox=node.inbox: "has ended" in inbox.left, 60.0)
    for node in nodes[:9]:  # who hears of it before the next step waits for nobody
        node.enter((10, 0, 0), TABLE, HostCopy([torch.zeros(5, dtype=torch.float64)]))
    assert [node.inbox.outcome((10, 0, 0), 60.0) for node in nodes[:9]] == [(True, None)] * 9
    for node in nodes:
        node.close()


def test_who_says_nothing_of_its_own_is_heard_when_a_rank_asks() -> None:
    """The second of two has passed a step, and has only noted it."""
    nodes = [Node(place, 2, "127.0.0.1", "token") for place in range(2)]
    nodes[0].start("")
    nodes[1].start(nodes[0].address)
    assert None not in totals(nodes, (0, 0, 0))
    nodes[1].note(Kind.PASSED, (1, 0, 1 << 40))
    nodes[0].enter((1, 0, 0), TABLE, HostCopy([torch.zeros(5, dtype=torch.float64)]))
    assert nodes[0].inbox.outcome((1, 0, 0), 0.3) == (False, None)
    nodes[0].tell(Kind.ASK, (1, 0, 0))
    assert nodes[0].inbox.outcome((1, 0, 0), 5.0) == (True, None)
    for node in nodes:
        node.close()


def test_a_node_that_finds_nobody_above_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    node = Node(1, 2, "127.0.0.1", "token")
    node.start(f"127.0.0.1 {port}")
    end = time.monotonic() + 5.0
    while not node.inbox.left and time.monotonic() < end:
        time.sleep(0.01)
    assert "no connection to the other ranks" in node.inbox.left
    node.close()


class Group:
    """A process group that has entered so many collectives."""

    def __init__(self) -> None:
        self.count = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.count


def test_the_clock_tells_the_same_step_on_two_ranks_one_of_which_left_some_out() -> None:
    """A synchronised step, two without any collective, a synchronised one again; the second rank leaves two out."""
    stamps: list[list[Stamp | None]] = []
    for skips in (set(), {1, 3}):
        group, clock = Group(), Clock()
        clock.groups = (group,)
        seen: list[Stamp | None] = []
        for step, collectives in enumerate((1, 1, 0, 0, 1, 1)):
            clock.forward_begins()
            group.count += collectives
            if step in skips:
                seen.append(None)
                continue
            clock.step_ended(StepLoss(step))
            seen.append(clock.stamp)
        stamps.append(seen)
    assert [own for own in stamps[0] if own is not None] == sorted({*stamps[0]})  # type: ignore[type-var]
    assert len({*stamps[0]}) == 6
    for step, (one, other) in enumerate(zip(*stamps, strict=True)):
        assert other == (None if step in (1, 3) else one)


def test_who_counted_fewer_steps_takes_over_the_numbers_from_there_on() -> None:
    group, clock = Group(), Clock()
    clock.groups = (group,)
    losses = [StepLoss(number) for number in range(4)]
    stamps = []
    for loss in losses:
        group.count += 1
        clock.step_ended(loss)
        stamps.append(clock.stamp)
    assert clock.catch_up({stamps[1]: 1, stamps[2]: 4}) == 2
    assert [loss.step for loss in losses] == [0, 1, 4, 5]
    assert clock.catch_up({stamps[2]: 4, stamps[3]: 3, (99, 0, 0): 200}) == 0
