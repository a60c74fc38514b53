"""What each of the instruments for attention, activation shape and update_rms costs alone, in sampled steps.

    python benchmarks/instruments.py                                   all sizes
    python benchmarks/instruments.py --sizes 8x64x128 --pairs 300 --clock cpu

Each variant is a watched model of its own, sampled every step, with one of the three on; its step is compared with that
of a model watched without them, both in the same round (`pairing.py`). Beside the median of these ratios stands the
ratio of the fastest tenths, which a busy machine disturbs less. Attention and activation shape look at each
`seldom_every`-th sampled step after the first ten, so a run pays that share. The budget of
each is 1 % of a sampled step.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from overhead import lm_loss, machine
from pairing import CLOCKS, Runner, Times, interleave
from torch import Tensor

import flowscope
from flowscope import detectors
from flowscope.config import WatchConfig
from flowscope.instruments import parameters
from flowscope.instruments.weight_samples import WeightSamples

from byte_lm import ByteLM, batches, load_text  # isort: skip (overhead.py finds the examples)

DEPTH, BUDGET = 12, 0.01
EACH = {"slow_every": 0, "seldom_every": 1}
SELDOM = {"attention", "activation_shape"}
"""Look at each n-th sampled step only; that is what their cost is divided by."""
SIZES = ("8x64x128", "4x64x128", "2x512x256")
"""Samples x tokens x width; up to 256 tokens a batch attention looks at all rows."""


class WithoutCounts(WeightSamples):
    """Samples of the weights of which no update_rms is made."""

    def roots(self, changes: object) -> dict[int, float]:
        return {}


@contextlib.contextmanager
def without_update_rms() -> Iterator[None]:
    """What is attached inside makes no update_rms and has no detector of it."""
    others = tuple(kind for kind in detectors.DETECTORS if kind.kind != "stale_moment")
    with (
        mock.patch.object(parameters, "WeightSamples", WithoutCounts),
        mock.patch.object(detectors, "DETECTORS", others),
    ):
        yield


def runner(name: str, on: str, size: tuple[int, int, int]) -> Runner:
    """A model watched with one of the three, or none."""

    def attach(made: Runner) -> Callable[[Tensor], object]:
        off = {instrument: False for instrument in ("attention", "activation_shape") if instrument != on}
        with contextlib.nullcontext() if on == "update_rms" else without_update_rms():
            scope = flowscope.watch(made.model, made.optimizer, every=1, config={**EACH, "instruments": off})
        made.stack.callback(scope.close)
        return lambda loss: scope.step(loss=loss)

    torch.manual_seed(0)
    _, length, width = size
    model = ByteLM(norm="pre", depth=DEPTH, width=width, heads=width // 32, length=length)
    return Runner(name, model, torch.optim.AdamW(model.parameters(), lr=1e-4), lm_loss, attach)


def row(name: str, with_it: Times, without: Times) -> str:
    """A line of the table."""
    low, middle, high = np.percentile(with_it / without, [25, 50, 75]) - 1
    fast = np.percentile(with_it, 10) / np.percentile(without, 10) - 1
    added = 1e3 * float(np.median(with_it - without))
    share = middle / (WatchConfig().seldom_every if name in SELDOM else 1)
    met = "" if name == "none again" else "yes" if share <= BUDGET else "**no**"
    quartiles = f"{low:+.2%} to {high:+.2%}"
    return f"| {name} | {middle:+.2%} | {quartiles} | {fast:+.2%} | {added:+.2f} | {share:+.2%} | {met} |"


def table(size: tuple[int, int, int], pairs: int) -> list[str]:
    """One size."""
    batch, length, width = size
    kinds = ("none", "none again", "attention", "activation_shape", "update_rms")
    data = batches(load_text(), batch=batch, length=length)
    times = interleave([runner(kind, kind, size) for kind in kinds], data, pairs, warmup=12)
    step = 1e3 * float(np.median(times["none"]))
    return [
        f"## {DEPTH} blocks, d={width}, B={batch}, T={length}; sampled step {step:.1f} ms, {pairs} rounds",
        "",
        "| instrument | where it looks | quartiles | fastest tenths | added ms | a sampled step | within 1 % |",
        "|---|---|---|---|---|---|---|",
        *(row(kind, times[kind], times["none"]) for kind in kinds[1:]),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help="samples x tokens x width, comma-separated")
    parser.add_argument("--pairs", type=int, default=200, help="rounds")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine that others use as well")
    parser.add_argument("--write", type=Path, help="also write the tables to this Markdown file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    Runner.clock = staticmethod(CLOCKS[args.clock])
    text = ["# What three instruments cost", "", f"Written by `benchmarks/instruments.py`: {machine()}", ""]
    print("\n".join(text), flush=True)
    for size in args.sizes.split(","):
        batch, length, width = map(int, size.split("x"))
        lines = table((batch, length, width), args.pairs)
        print("\n".join(lines), flush=True)
        text += lines
    if args.write:
        args.write.write_text("\n".join(text))


if __name__ == "__main__":
    main()
