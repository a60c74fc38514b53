"""What watching costs among ranks: DDP on two processes (gloo, one thread each), and the sum over ranks alone.

    python benchmarks/ranks.py                       starts its two processes itself
    python benchmarks/ranks.py --pairs 200 --write docs/scale.md

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


def sums() -> list[str]:
    """One SUM of fp64 numbers on two processes of this machine."""
    lines = ["| bytes | median | quartiles |", "|---|---|---|"]
    for size in (8_000, 80_000, 800_000, 8_000_000):
        vector = torch.zeros(size // 8, dtype=torch.float64)
        seconds = []
        for _ in range(60):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(vector)
            seconds.append(time.perf_counter() - start)
        low, middle, high = (1e3 * q for q in np.quantile(seconds[10:], (0.25, 0.5, 0.75)))
        lines.append(f"| {size:,} | {middle:.2f} ms | {low:.2f} to {high:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--write", type=Path, help="put the tables between the marks of this page")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        raise SystemExit(subprocess.call([*launcher, __file__, *sys.argv[1:]], env=environment))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sections = {
        "The step": steps(arguments.pairs),
        "Bytes of a sum": depths(2),
        "One sum on two processes of one machine": sums(),
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
