"""What watching costs among ranks: DDP on two processes (gloo, one thread each), and the sum over ranks alone.

    python benchmarks/ranks.py                       starts its two processes itself
    python benchmarks/ranks.py --pairs 200 --write docs/scale.md
    python benchmarks/ranks.py --tree docs/images/ranks.svg     a thousand ranks without a training, in one process

As in overhead.py, every variant has its own model and steps once in each round, in rotating order (the same on both
ranks), and a ratio is formed within the round. The bare variant runs twice: its ratio to itself is the error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from overhead import lm_data, lm_loss
from pairing import RATIO_HEAD, Batch, Runner, interleave, ratio
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import flowscope
from flowscope.ranks.node import Node
from flowscope.ranks.wire import Table
from flowscope.sums.buffer import HostCopy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from byte_lm import ByteLM

HEAD, TAIL = "<!-- measured by benchmarks/ranks.py -->", "<!-- end -->"
PAYLOADS: dict[str, dict[str, int]] = {}
Attach = Callable[[Runner], Callable[[Tensor], object] | None]


def runner(name: str, attach: Attach | None = None, depth: int = 12) -> Runner:
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteLM(norm="pre", depth=depth, width=128, heads=4, length=64))
    return Runner(name, model, torch.optim.AdamW(model.parameters(), lr=1e-4), lm_loss, attach)


def watched(every: int, **config: object) -> Attach:
    def attach(self: Runner) -> Callable[[Tensor], object]:
        scope = flowscope.watch(self.model, self.optimizer, every=every, config={"console": "off", **config})

        def close() -> None:
            PAYLOADS[self.name] = scope._driver.ranks.payload()
            scope.close()

        self.stack.callback(close)
        return lambda loss: scope.step(loss=loss)

    return attach


def steps(pairs: int) -> list[str]:
    """The step under DDP: bare twice, every step sampled, the default."""
    runners = [
        runner("bare"),
        runner("bare again"),
        runner("every step", watched(1, slow_every=0)),
        runner("default (every=10)", watched(10)),
    ]
    times = interleave(runners, own_data(), pairs)
    rows = [ratio(name, times[name], times["bare"]).row() for name in times if name != "bare"]
    payload = PAYLOADS["every step"]
    parts = ", ".join(f"{kind} {size:,}" for kind, size in sorted(payload.items(), key=lambda item: -item[1]))
    return [RATIO_HEAD, *rows, "", f"Sum of a sampled step: {sum(payload.values()):,} bytes ({parts})."]


def own_data() -> object:
    """Each rank's own batches of the same stream."""
    stream = lm_data()
    while True:
        both: list[Batch] = [next(stream) for _ in range(dist.get_world_size())]
        yield both[dist.get_rank()]


def depths(pairs: int) -> list[str]:
    """The bytes of a sum as depth grows."""
    lines = ["| blocks | points | parameters | units | all |", "|---|---|---|---|---|"]
    for depth in (4, 16, 64):
        interleave([runner(f"{depth}", watched(1, slow_every=0), depth)], own_data(), pairs, warmup=4)
        payload = PAYLOADS[f"{depth}"]
        cells = [payload.get(kind, 0) for kind in ("points", "parameters", "units")]
        lines.append(f"| {depth} | " + " | ".join(f"{size:,}" for size in (*cells, sum(payload.values()))) + " |")
    return lines


def tree(count: int, sums: int = 20, size: int = 3336) -> tuple[float, float, float]:
    """Ranks without a training, all in this process: each a node with a thread and sockets of its own.

    Args:
        count: how many.
        sums: so many are made, one after the other.
        size: numbers of a sum: those of the benchmark's model.

    Returns:
        Milliseconds a sum: processor time a rank, of it what its training's thread spends, and until all have it.
    """
    table = Table((("numbers", size, False),))
    nodes = [Node(place, count, "127.0.0.1", "benchmark") for place in range(count)]
    for node in nodes:
        above = node.gathering.parent
        node.start(nodes[above].address if above >= 0 else "")
    numbers = torch.ones(size, dtype=torch.float64)
    own, waits, begin = 0.0, [], 0.0
    for number in range(sums + 3):
        if number == 3:  # connections, tables
            begin, own = time.process_time(), 0.0
        start, spent = time.perf_counter(), time.thread_time()
        for node in nodes:
            node.enter((number, 0, 0), table, HostCopy([numbers]))
        own += time.thread_time() - spent
        for node in nodes:
            _, total = node.inbox.outcome((number, 0, 0), 60.0)
            assert total is not None
            assert total.numbers[0] == count
        waits.append(time.perf_counter() - start)
    used = time.process_time() - begin
    for node in nodes:
        node.inbox.left or node.leave("done")
    for node in nodes:
        node.close()
    return 1e3 * used / sums / count, 1e3 * own / sums / count, 1e3 * float(np.median(waits[3:]))


def trees(path: Path | None) -> list[str]:
    """The same for more and more ranks, as a table and as a plot."""
    counts = (2, 8, 32, 128, 512, 1000)
    found = [tree(count) for count in counts]
    lines = ["| ranks | ms of processor a rank | of it in the training's thread | ms until all have it, one machine |"]
    lines += ["|---|---|---|---|"]
    lines += [
        f"| {n} | {used:.3f} | {own:.3f} | {wait:.1f} |" for n, (used, own, wait) in zip(counts, found, strict=True)
    ]
    if path is not None:
        from matplotlib.figure import Figure

        axes = (figure := Figure(figsize=(6, 3.4), layout="constrained")).add_subplot()
        axes.plot(counts, [used for used, _, _ in found], "o-", label="a rank's processor time")
        axes.plot(counts, [own for _, own, _ in found], "s-", label="of it in the training's thread")
        axes.axhline(1.0, color="0.5", linestyle="--", label="budget")
        axes.set(xscale="log", xlabel="ranks", ylabel="ms a sampled step", ylim=(0, None))
        axes.legend()
        figure.savefig(path, metadata={"Date": None})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--write", type=Path, help="put the tables between the marks of this page")
    parser.add_argument("--tree", type=Path, help="only the sums of up to a thousand ranks, drawn to this file")
    arguments = parser.parse_args()
    if arguments.tree is not None:
        print(*trees(arguments.tree), sep="\n")
        return
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        raise SystemExit(subprocess.call([*launcher, __file__, *sys.argv[1:]], env=environment))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sections = {
        "The step": steps(arguments.pairs),
        "Bytes of a sum": depths(2),
    }
    if dist.get_rank() == 0:
        text = "\n".join("\n".join([f"### {title}", "", *lines, ""]) for title, lines in sections.items())
        print(text)
        if arguments.write is not None:
            page = arguments.write.read_text()
            before, _, rest = page.partition(HEAD)
            _, _, after = rest.partition(TAIL)
            arguments.write.write_text(f"{before}{HEAD}\n\n{text}\n{TAIL}{after}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
