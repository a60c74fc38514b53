"""Ranks forked from a process that has imported everything, as many as a scenario asks for: they start in no time."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Scenario = Callable[[], Any]


def run(scenarios: Mapping[str, tuple[int, Scenario]], folder: Path) -> None:
    """Run each scenario on so many ranks, in a process group of their own; `NAME-RANK.json` has what each returned.

    A scenario that fails ends the program, with its traceback.
    """
    torch.set_num_threads(1)
    for name, (count, scenario) in scenarios.items():
        with tempfile.TemporaryDirectory() as store:
            ranks = [_forked(name, rank, count, scenario, folder, Path(store)) for rank in range(count)]
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        if any(codes):
            sys.exit(f"{name}: the ranks ended with {codes}")


def _forked(name: str, rank: int, count: int, scenario: Scenario, folder: Path, store: Path) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        place = {"rank": rank, "world_size": count, "timeout": timedelta(seconds=60)}
        dist.init_process_group("gloo", store=dist.FileStore(str(store / "store"), count), **place)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(scenario()))
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # not the parent's own end


def told(name: str, count: int, folder: Path) -> list[Any]:
    """What the ranks of a scenario returned."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(count)]
