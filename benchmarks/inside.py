"""Processor time spent inside the methods of single instruments, as shares of a sampled step.

    python benchmarks/inside.py [--size 4x64x128] [--steps 40] [NAME ...]

Finer than pairs of watched and unwatched models (`instruments.py`): a tenth of a per cent shows. What an instrument
makes others do (a record that is longer by a number) is not in it.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import Counter
from typing import Any

import torch
from overhead import lm_loss

import flowscope
from flowscope.instruments.instrument import Instrument

from byte_lm import ByteLM, batches, load_text  # isort: skip (overhead.py finds the examples)

NAMES = ("objective", "output", "reach", "evaluations", "kept_updates", "made_anew", "optimizer_age", "unregistered")
WARMUP = 10
DEPTH = 12


def timed(kind: type[Instrument], spent: Counter[str]) -> None:
    """Let every method of an instrument's own add the time until it returns to `spent`, the outermost alone."""
    inside: list[str] = []
    for name, method in [*vars(kind).items()]:
        if name.startswith("__") or not callable(method) or isinstance(method, staticmethod | classmethod):
            continue

        @functools.wraps(method)
        def call(*args: Any, _method: Any = method, **kwargs: Any) -> Any:
            start = time.process_time()
            inside.append("")
            try:
                return _method(*args, **kwargs)
            finally:
                inside.pop()
                spent[kind.name] += 0 if inside else time.process_time() - start

        setattr(kind, name, call)


def main() -> None:
    """Print the shares, the largest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--size", default="4x64x128", help="samples x tokens x width")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    batch, length, width = map(int, options.size.split("x"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    spent: Counter[str] = Counter()
    for kind in Instrument.__subclasses__():
        if getattr(kind, "name", "") in options.names:
            timed(kind, spent)
    model = ByteLM(norm="pre", depth=DEPTH, width=width, heads=width // 32, length=length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = batches(load_text(), batch=batch, length=length)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        for step in range(WARMUP + options.steps):
            if step == WARMUP:
                spent.clear()
                start = time.process_time()
            loss = lm_loss(model, next(data))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
        total = time.process_time() - start
    print(f"{DEPTH} blocks, {options.size}, a sampled step {1e3 * total / options.steps:.1f} ms")
    for name, seconds in spent.most_common():
        print(f"{name:14} {1e3 * seconds / options.steps:6.3f} ms  {seconds / total:.2%}")


if __name__ == "__main__":
    main()
