"""How two ranks end: the loop of ranks.py in small, many times, watched and bare, each with Python's fault handler.

    python benchmarks/exits.py --runs 100

Each rank is forked from a process that has imported everything, trains, and leaves through the interpreter's own end
(atexit, threads, static destructors). Three ways in turn: close, barrier and destroy; destroy before close; neither.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import shutil
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from overhead import lm_loss
from pairing import Runner
from torch.nn.parallel import DistributedDataParallel

from flowscope import watch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from byte_lm import VOCABULARY, ByteLM

WAYS = ("close and destroy", "destroy, then close", "neither")
LIMIT = 300.0
"""Seconds for a run."""


def rank(place: int, folder: Path, way: str, *, watched: bool) -> None:
    """What one rank does."""
    faulthandler.enable((folder / f"{place}.txt").open("w"))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=place, world_size=2, timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteLM(depth=2, width=16, heads=2, length=8))
    runner = Runner("one", model, torch.optim.AdamW(model.parameters()), lm_loss)
    scope = watch(model, runner.optimizer, every=1, config={"console": "off"}) if watched else None
    for _ in range(6):
        runner.step((torch.randint(VOCABULARY, (2, 8)), torch.randint(VOCABULARY, (2, 8))))
    if way == "close and destroy":
        if scope is not None:
            scope.close()
        dist.barrier()
    if way != "neither":
        dist.destroy_process_group()
    if way == "destroy, then close" and scope is not None:
        scope.close()
    (folder / f"{place}.done").touch()


def run(way: str, *, watched: bool) -> list[str]:
    """Two ranks; how each ended: "0" where all is well, else its code or signal, and what the fault handler wrote."""
    folder = Path(tempfile.mkdtemp())  # not a context: ranks leave this function by its end, too
    sys.stdout.flush()
    ranks: list[int] = []
    for place in range(2):
        if not (pid := os.fork()):
            rank(place, folder, way, watched=watched)
            sys.exit(0)  # as a script that has come to its end
        ranks.append(pid)
    end, codes = time.monotonic() + LIMIT, dict.fromkeys(ranks, "still there")
    while "still there" in codes.values() and time.monotonic() < end:
        time.sleep(0.01)
        for pid in [pid for pid in ranks if codes[pid] == "still there"]:
            found, status = os.waitpid(pid, os.WNOHANG)
            codes[pid] = str(os.waitstatus_to_exitcode(status)) if found else codes[pid]
    for place, pid in enumerate(ranks):
        if codes[pid] == "still there":
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        written = (folder / f"{place}.txt").read_text()
        codes[pid] += "" if (folder / f"{place}.done").exists() else " before the end of its loop"
        if codes[pid] != "0" or written:
            print(f"{way}, watched={watched}, rank {place}: {codes[pid]}\n{written}", flush=True)
    shutil.rmtree(folder)
    return [codes[pid] for pid in ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    count = parser.parse_args().runs
    ends = {(way, watched): collections.Counter[str]() for way in WAYS for watched in (False, True)}
    for number in range(count):
        for watched in (False, True):
            way = WAYS[number % len(WAYS)]
            ends[way, watched].update(run(way, watched=watched))
    print("| way | run | ranks | ended with 0 | else |\n|---|---|---|---|---|")
    for (way, watched), codes in ends.items():
        other = ", ".join(f"{code}: {times}" for code, times in codes.items() if code != "0")
        print(f"| {way} | {'watched' if watched else 'bare'} | {codes.total()} | {codes['0']} | {other or '-'} |")


if __name__ == "__main__":
    main()
