"""`same_batch`, and the checksum of a step's inputs that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowscope
import flowscope.testing
from flowscope.detectors.same_batch import SameBatch
from flowscope.instruments.checksums import ENTRIES, ordered_checksum

STEPS = 30


def told(batches: Iterator[Tensor], every: int = 10) -> list[tuple[str, int, str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flowscope.watch(model, optimizer, every=every, config={"console": "off"}) as scope:
        for x in islice(batches, STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    return [(a.severity, a.step, a.message) for a in scope.alerts if a.kind == "same_batch"]


def fresh() -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(4, 5, generator=draw)


def test_the_first_batch_for_ever_is_a_note_said_once() -> None:
    first = next(fresh())
    ((severity, step, message),) = told(first.clone() for _ in range(STEPS))
    assert (severity, step) == ("info", 3)
    assert "that of step 0" in message


def test_fresh_batches_and_a_data_set_of_ten_read_in_order_say_nothing() -> None:
    assert told(fresh()) == []
    assert told(cycle(islice(fresh(), 10))) == []


def test_two_steps_a_batch_are_no_note() -> None:
    assert told((x for x in fresh() for _ in range(2)), every=1) == []


def test_a_cache_that_begins_later_is_told_where_every_step_is_seen() -> None:
    def stuck() -> Iterator[Tensor]:
        stream = fresh()
        yield from islice(stream, 12)
        last = next(stream)
        while True:
            yield last

    ((_, step, message),) = told(stuck(), every=1)
    assert step == 15
    assert "that of step 12" in message


def test_the_detector_keeps_its_contract() -> None:
    flowscope.testing.check_detector(SameBatch)


def bits_by_hand(x: Tensor) -> int:
    """The sum written out over Python's whole numbers."""
    view = {4: torch.int32, 8: torch.int64, 2: torch.int16}[x.element_size()]
    flat = x.reshape(-1).view(view).tolist()
    step = -(-len(flat) // ENTRIES)
    wrap, total = 2**64, 0
    for place, bits in enumerate(flat[::step], 1):
        weight = (place * 0x5851F42D4C957F2D % wrap) ^ (place * 0x14057B7EF767814F % wrap) | 1
        total += (bits + 1) * weight
    return (total + wrap // 2) % wrap - wrap // 2


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
        torch.arange(24).view(4, 6).t(),
        torch.randn(40_001, generator=torch.Generator().manual_seed(0)).bfloat16(),
    ],
    ids=["floats", "transposed_ids", "every_third_entry"],
)
def test_the_checksum_is_the_sum_by_hand(x: Tensor) -> None:
    assert int(ordered_checksum(x)) == bits_by_hand(x)


def test_the_checksum_knows_order_and_zeros() -> None:
    ids = torch.tensor([[3, 1, 2], [2, 0, 0]])
    others = [ids.flip(0), ids.flip(1), torch.cat([ids, ids.new_zeros(2, 1)], 1)]
    assert len({int(ordered_checksum(x)) for x in (ids, *others)}) == 4


def of_steps(given: Callable[[int], tuple[Tensor, ...]]) -> list[tuple[float, ...]]:
    """The metric of three steps of two micro-batches."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.fc(x * mask)

    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        for step in range(3):
            for micro in range(2):
                model(*given(2 * step + micro)).square().mean().backward()
            with torch.no_grad():
                model(*given(99))  # an evaluation is no input of the step
            optimizer.step()
            optimizer.zero_grad()
    return [tuple(record.metrics["input_checksum"].tolist()) for record in scope.records]


def test_the_metric_is_of_all_micro_batches_and_all_tensors() -> None:
    def row(n: int) -> Tensor:
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(n))

    ones = torch.ones(5)
    same, again = of_steps(lambda n: (row(n % 2), ones)), of_steps(lambda n: (row(n % 2), ones))
    assert same == again
    assert len(set(same)) == 1
    assert len(set(of_steps(lambda n: (row(n), ones)))) == 3
    assert len(set(of_steps(lambda n: (ones.expand(4, 5), row(n // 2))))) == 3
    swapped = of_steps(lambda n: (row(1 - n % 2), ones))
    assert swapped[0] != same[0]
    upper, lower = same[0]
    first, second = (int(ordered_checksum(row(n))) + 0 for n in (0, 1))
    mask = int(ordered_checksum(ones))
    total = (3 * (3 * (3 * first + mask) + second) + mask) % 2**64
    assert (int(upper), int(lower)) == (total >> 32, total & 0xFFFFFFFF)
