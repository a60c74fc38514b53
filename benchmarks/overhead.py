"""What watching costs, as ratios to the bare step measured in the same run.

    python benchmarks/overhead.py                             all sections
    python benchmarks/overhead.py --sections step --pairs 200 --write docs/overhead.md

Every variant has its own model with equal weights; in each round each variant takes one step on the same batch, in
rotating order, and a ratio is formed within the round. The bare variant runs twice: its ratio to itself is the error of
the method. Sections: step (the budgets), compiled, blocks (cost a block at growing depth), memory, peers.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import resource
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pairing import CLOCKS, RATIO_HEAD, Batch, Ratio, Runner, interleave, ratio
from peers import PEERS
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import flowscope

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from byte_lm import ByteLM, batches, load_text  # the example's decoder, in the budget's size

BATCH, LENGTH, WIDTH, DEPTH = 8, 64, 128, 12
Attach = Callable[[Runner], Callable[[Tensor], object] | None]


def lm_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def lm_runner(name: str, attach: Attach | None = None, backend: Any = None) -> Runner:
    torch.manual_seed(0)
    model = ByteLM(norm="pre", depth=DEPTH, width=WIDTH, heads=4, length=LENGTH)
    runner = Runner(name, model, torch.optim.AdamW(model.parameters(), lr=1e-4), lm_loss, attach)
    if backend is not None:  # after attaching, as hooks must be there before the first compiled call
        model.compile(fullgraph=True, backend=backend)
    return runner


def lm_data() -> Iterator[Batch]:
    return batches(load_text(), batch=BATCH, length=LENGTH)


def watch(every: int | Callable[[int], bool] = 1, *, write: bool = False, **config: Any) -> Attach:
    """Attach flowscope with these settings; `write` also writes JSON lines and TensorBoard files."""

    def attach(runner: Runner) -> Callable[[Tensor], object]:
        log_dir = runner.stack.enter_context(tempfile.TemporaryDirectory()) if write else None
        scope = flowscope.watch(runner.model, runner.optimizer, every=every, log_dir=log_dir, config=config)
        runner.stack.callback(scope.close)
        return lambda loss: scope.step(loss=loss)

    return attach


FLOW = {"metrics": ("flow",), "slow_every": 0}
FLOW_DEPTH = {"metrics": ("flow", "depth"), "slow_every": 0}
ALL = {"metrics": ("flow", "depth", "parameters"), "slow_every": 0}


def ratio_table(rows: list[Ratio]) -> list[str]:
    return [RATIO_HEAD, *(row.row() for row in rows)]


def step_section(pairs: int) -> list[str]:
    """The budgets: 12 blocks, d=128, B=8, T=64, one thread."""
    runners = [
        lm_runner("bare"),
        lm_runner("bare again"),
        lm_runner("flow", watch(**FLOW)),
        lm_runner("flow + depth", watch(**FLOW_DEPTH)),
        lm_runner("all", watch(**ALL)),
        lm_runner("all + slow probes", watch()),
        lm_runner("all + slow, written", watch(write=True)),
        lm_runner("every=10", watch(every=10)),
        lm_runner("every=10, written", watch(every=10, write=True)),
    ]
    warmup = 20
    times = interleave(runners, lm_data(), pairs, warmup)
    bare = times["bare"]
    rows = [
        ratio("bare again (A/A)", times["bare again"], bare, note="the method's own error"),
        ratio("flow, every step", times["flow"], bare, limit=1.03, goal=1.02),
        ratio("flow + depth, every step", times["flow + depth"], bare, limit=1.05, goal=1.03),
        ratio("all, every step", times["all"], bare, limit=1.08, goal=1.06),
        ratio("all + slow probes, every step", times["all + slow probes"], bare, note="slow probes on each 10th"),
        ratio("the same, written to disk", times["all + slow, written"], bare, note="JSON lines and TensorBoard"),
    ]
    sampled = (np.arange(warmup, warmup + pairs) % 10) == 0
    for name, label in (("every=10", "default, every=10"), ("every=10, written", "default, written to disk")):
        rows.append(ratio(label, times[name], bare, window=10, limit=1.01, note="sums over 10 rounds"))
        off, on = (float(np.median(times[name][mask] / bare[mask])) for mask in (~sampled, sampled))
        rows[-1].note += f"; unsampled step {off:.3f}, sampled {on:.3f}, so {0.9 * off + 0.1 * on:.3f}"
    head = f"{DEPTH} blocks, d={WIDTH}, B={BATCH}, T={LENGTH}, AdamW; bare step {1e3 * np.median(bare):.1f} ms."
    return ["## Every step", "", head, "", *ratio_table(rows)]


def compiled_section(pairs: int) -> list[str]:
    """`torch.compile(fullgraph=True)`: ratio of a sampled and of an unsampled step, and the graphs compiled."""
    counter = CompileCounterWithBackend("inductor")
    runners = [lm_runner("bare", backend="inductor"), lm_runner("bare again", backend="inductor")]
    every = lambda step: step % 2 == 0  # noqa: E731
    inside = CompileCounterWithBackend("inductor")
    runners.append(lm_runner("flow + depth", watch(every=every, **FLOW_DEPTH), backend=inside))
    watched = lm_runner("watched", watch(every=every, **ALL), backend=counter)
    breaks = torch._dynamo.utils.counters["graph_break"]
    times = interleave([*runners, watched], lm_data(), pairs + pairs % 2, warmup=20)
    bare, on = times["bare"], slice(0, None, 2)
    rows = [
        ratio("bare again (A/A)", times["bare again"], bare),
        ratio("flow + depth, sampled step", times["flow + depth"][on], bare[on], note="what is in the graph"),
        ratio(
            "all, sampled step", times["watched"][on], bare[on], limit=1.05, note="parameters are read in eager code"
        ),
        ratio("all, unsampled step", times["watched"][1::2], bare[1::2]),
    ]
    found = f"{counter.frame_count} graphs (budget 2), {sum(breaks.values())} graph breaks (budget 0)"
    head = f"The same model, fullgraph, inductor: {found}."
    return ["## Compiled", "", head, "", *ratio_table(rows)]


class NarrowBlock(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.relu(self.linear(x))


class Narrow(nn.Module):
    """`depth` residual blocks of width 32, scaled so that every depth is stable."""

    def __init__(self, depth: int, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NarrowBlock(width, 1 / depth) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def narrow_runner(name: str, depth: int, attach: Attach | None = None) -> Runner:
    torch.manual_seed(0)
    model = Narrow(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return Runner(name, model, optimizer, lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), attach)


def narrow_data() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(16, 32, generator=generator)
        yield x, x.flip(1)


def blocks_section(pairs: int) -> list[str]:
    """Cost a block from 16 to 1,024 blocks of width 32."""
    lines = [
        "## Cost a block",
        "",
        "Residual blocks of width 32, 16 rows, SGD, every step: microseconds a block and step over the bare step.",
        "",
        "| blocks | bare, us a block | A/A | flow | all | n |",
        "|---|---|---|---|---|---|",
    ]
    costs: dict[str, list[float]] = {"flow": [], "all": []}
    for depth in (16, 64, 256, 1024):
        runners = [
            narrow_runner("bare", depth),
            narrow_runner("bare again", depth),
            narrow_runner("flow", depth, watch(**FLOW)),
            narrow_runner("all", depth, watch(**ALL)),
        ]
        times = interleave(runners, narrow_data(), pairs, warmup=12)
        scale = 1e6 / depth
        added = {name: scale * float(np.median(t - times["bare"])) for name, t in times.items()}
        for name, values in costs.items():
            values.append(added[name])
        cells = (f"{added['bare again']:+.2f}", f"{added['flow']:.1f}", f"{added['all']:.1f}", str(pairs))
        lines.append(f"| {depth} | {scale * float(np.median(times['bare'])):.1f} | {' | '.join(cells)} |")
    flat = ", ".join(f"{name} {values[-1] / values[0]:.2f} x" for name, values in costs.items())
    return [*lines, "", f"At 1,024 blocks a block costs, compared with 16: {flat} (budget: flat)."]


def memory_section(steps: int) -> list[str]:
    """10,000 sampled steps of a small model: what stays."""
    runner = narrow_runner("watched", 8, watch(**ALL, max_records=200, max_alerts=200))
    data = narrow_data()
    lines = [
        "## Memory",
        "",
        f"8 blocks of width 32, sampled every step, {steps:,} steps, 200 records kept.",
        "",
        "| step | traced Python memory, KiB | objects | resident, MiB | threads |",
        "|---|---|---|---|---|",
    ]
    tracemalloc.start()
    seen: list[tuple[int, float, int]] = []
    for k in range(1, steps + 1):
        runner.step(next(data))
        if k % (steps // 5) == 0:
            gc.collect()
            seen.append((k, tracemalloc.get_traced_memory()[0] / 1024, len(gc.get_objects())))
            lines.append(f"| {k:,} | {seen[-1][1]:.1f} | {seen[-1][2]:,} | {resident():.1f} | {thread_count()} |")
    tracemalloc.stop()
    runner.close()
    (first, size0, count0), (last, size1, count1) = seen[0], seen[-1]
    rate = 1024 * (size1 - size0) / (last - first)
    return [
        *lines,
        "",
        f"From step {first:,} on: {rate:+.2f} bytes and {count1 - count0:+d} objects in all a step grown.",
    ]


def resident() -> float:
    """Resident memory in MiB; the peak where the system has no /proc."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def thread_count() -> int:
    import threading

    return threading.active_count()


def peers_section(pairs: int) -> list[str]:
    """Other tools on the same model, each beside the bare step in rounds of its own."""
    rows: list[Ratio] = []
    skipped: list[str] = []
    for name, (attach, note) in PEERS.items():
        try:
            runners = [lm_runner("bare"), lm_runner("bare again"), lm_runner("peer", attach)]
            times = interleave(runners, lm_data(), pairs, warmup=5)
        except Exception as error:  # a peer's fault, whatever it is, must not end the benchmark
            skipped.append(f"{name} was skipped: {type(error).__name__}: {error}.")
            continue
        aa = float(np.median(times["bare again"] / times["bare"]))
        rows.append(ratio(name, times["peer"], times["bare"], note=f"{note}; A/A {aa:.3f}"))
    return ["## Peers, every step", "", *ratio_table(rows), *([""] if skipped else []), *skipped]


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if (cpuinfo.exists())
        else []
    )
    cpu = names[0] if names else platform.processor() or platform.machine()
    return (
        f"{datetime.date.today()}, {cpu}, {os.cpu_count()} cores, 1 thread used, Python {platform.python_version()}, "
        f"torch {torch.__version__}, flowscope {flowscope.__version__}."
    )


SECTIONS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "step": lambda args: step_section(args.pairs),
    "compiled": lambda args: compiled_section(args.pairs),
    "blocks": lambda args: blocks_section(args.pairs),
    "memory": lambda args: memory_section(args.steps),
    "peers": lambda args: peers_section(args.peer_pairs),
}


def run_sections(
    title: str, script: str, sections: Mapping[str, Callable[[argparse.Namespace], list[str]]], args: argparse.Namespace
) -> None:
    """Run the sections asked for, print each as it ends, and write them all where asked to."""
    torch.set_num_threads(1)
    Runner.clock = staticmethod(CLOCKS[args.clock])
    text = [f"# {title}", "", f"Written by `benchmarks/{script}`: {machine()} Clock: {args.clock}."]
    print("\n".join(text), flush=True)
    for name in args.sections.split(","):
        started = time.perf_counter()
        lines = ["", *sections[name](args)]
        print("\n".join(lines), f"\n({time.perf_counter() - started:.0f} s)", flush=True)
        text += lines
    if args.write:
        args.write.write_text("\n".join(text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated, of: %(default)s")
    parser.add_argument("--pairs", type=int, default=200, help="rounds for step, compiled and blocks")
    parser.add_argument("--peer-pairs", type=int, default=40, help="rounds for each peer")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the memory section")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine that others use as well")
    parser.add_argument("--write", type=Path, help="also write the tables to this Markdown file")
    args = parser.parse_args()
    run_sections("What watching costs", "overhead.py", SECTIONS, args)


if __name__ == "__main__":
    main()
