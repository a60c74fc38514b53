"""Random things that one of several ranks does on its own: `rank_scripts_program.py FOLDER FIRST COUNT`.

Four processes go through scripts, each on two, three or four of them. A script says which rank does what at which step;
every rank writes what it saw, and tests/test_rank_scripts.py judges.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from watch_models import IN, Stack

import flowscope

PASSING = (
    "skip",
    "skip3",
    "skip6",
    "raise",
    "optimizer_raises",
    "scaler",
    "pause",
    "slow",
    "read",
    "retry",
    "evaluate",
)
"""What a rank does and goes on."""
LASTING = ("close", "late", "every", "config", "scaler")
"""What keeps its records apart from then on; of ranks whose loss scales differ nothing adds up."""
AFTER = 18
"""Steps after the last event."""

Script = dict[str, Any]


def script(seed: int) -> Script:
    """What happens: how many ranks, how they train, and [step, rank, what]."""
    draw = random.Random(seed)
    ranks = draw.choice((2, 2, 3, 4))
    kinds = PASSING if draw.random() < 0.7 else PASSING + LASTING
    events = sorted((draw.randrange(11), draw.randrange(ranks), draw.choice(kinds)) for _ in range(draw.randint(1, 3)))
    if draw.random() < 0.2:  # all ranks do the same
        events += [(step, rank, what) for step, _, what in events[:1] for rank in range(ranks)]
    scaled = any(what == "scaler" for _, _, what in events)
    # of sharded gradients a scaler asks all ranks: where one leaves the step out, the bare run stands still
    sharded = draw.random() < 0.3 and not scaled
    last = max(step + {"skip3": 2, "skip6": 5, "pause": 2}.get(what, 0) for step, _, what in events)
    return {
        "seed": seed,
        "ranks": ranks,
        "sharded": sharded,
        "micro": draw.random() < 0.25,
        "every": draw.choice((1, 1, 4)),
        "loss": draw.choice(("after", "before", "never")),
        "scaled": scaled,
        "events": events,
        "steps": last + AFTER,
    }


class Rank:
    """One rank of one script."""

    def __init__(self, script: Script, group: Any, *, watched: bool) -> None:
        self.script, self.place = script, dist.get_rank()
        torch.manual_seed(script["seed"])
        inner = Stack(2)
        self.model: nn.Module = inner
        if script["sharded"]:
            mesh = DeviceMesh.from_group(group, "cpu")
            for block in inner.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(inner, mesh=mesh)
        else:
            self.model = DistributedDataParallel(inner, process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=script["scaled"])
        self.watched, self.scope = watched, None
        self.squares: list[list[float]] = []
        self.seen: list[float] = []
        inner.embed.register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if torch.is_grad_enabled():
            self.seen += [float(output.detach().double().square().sum()), output.numel()]

    def watch(self, what: set[str]) -> None:
        if self.watched and self.scope is None:
            config: dict[str, Any] = {"console": "off"}
            if "config" in what:
                config["slow_every"] = 7
            every = 3 if "every" in what else self.script["every"]
            options = {"scaler": self.scaler} if self.script["scaled"] else {}
            self.scope = flowscope.watch(self.model, self.optimizer, every=every, config=config, **options)

    def tell(self, call: Callable[[flowscope.Scope], Any]) -> None:
        if self.scope is not None and not self.scope.closed:
            call(self.scope)

    def run(self) -> dict[str, Any]:
        mine = [(step, what) for step, rank, what in self.script["events"] if rank == self.place]
        lasting = {what for _, what in mine if what in ("every", "config")}
        late = max((step for step, what in mine if what == "late"), default=0)
        data = torch.Generator().manual_seed(1000 * self.script["seed"] + self.place)
        losses: list[str] = []
        seconds: list[float] = []
        for step in range(self.script["steps"]):
            if step >= late:
                self.watch(lasting)
            what = {event for at, event in mine if at == step}
            what |= {"skip" for at, event in mine if event in ("skip3", "skip6") and at <= step < at + int(event[-1])}
            if any(event == "pause" and at + 2 == step for at, event in mine):
                self.tell(lambda scope: scope.resume())
            self.seen, start = [], time.monotonic()
            losses.append(self.step(what, data).hex())
            self.squares.append(self.seen)
            seconds.append(time.monotonic() - start)
        self.tell(lambda scope: scope.close())
        records = [] if self.scope is None else [plainly(record) for record in self.scope.records]
        return {"losses": losses, "seconds": seconds, "squares": self.squares, "records": records}

    def step(self, what: set[str], data: torch.Generator) -> float:
        if "pause" in what:
            self.tell(lambda scope: scope.pause())
        if "evaluate" in what:
            with torch.no_grad():
                (self.model if self.script["sharded"] is False else nn.Identity())(torch.ones(2, 3, IN))
        self.optimizer.zero_grad()
        parts = 2 if self.script["micro"] else 1
        total = torch.zeros(())
        for part in range(parts):
            x = torch.randn(3, 4, IN, generator=data)
            quiet = part < parts - 1 and not self.script["sharded"]
            with self.model.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
                loss = self.model(x).square().mean() / parts
                self.scaler.scale(loss).backward()
            total = total + loss.detach()
        if "skip" in what:
            return float(total)
        with contextlib.suppress(ZeroDivisionError):
            self.update(what, total)
        if "read" in what:
            self.tell(lambda scope: len(scope.records))
        if "close" in what:
            self.tell(lambda scope: scope.close())
        return float(total)

    def update(self, what: set[str], loss: Tensor) -> None:
        if "raise" in what:
            raise ZeroDivisionError
        if "slow" in what:
            time.sleep(0.3)
        if "scaler" in what:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("inf"))
                    break
        if self.script["loss"] == "before":
            self.tell(lambda scope: scope.step(loss=loss))
        if "optimizer_raises" in what:
            handle = self.optimizer.register_step_pre_hook(_fail)
            with contextlib.suppress(ZeroDivisionError):
                self.optimizer.step()
            handle.remove()
            raise ZeroDivisionError
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if "retry" in what:
            self.optimizer.step()
        if self.script["loss"] == "after":
            self.tell(lambda scope: scope.step(loss=loss))


def _fail(*args: Any) -> None:
    raise ZeroDivisionError


def plainly(record: flowscope.Record) -> dict[str, Any]:
    # a step that a scaler left out has no gradients
    told = [name for name in ("act_rms", "grad_norm", "param_norm") if name in record.metrics]
    metrics = {name: record.metrics[name].tolist() for name in told}
    return {"step": record.step, "loss": record.loss, "flags": record.flags, "notes": record.notes, "metrics": metrics}


def main(folder: str, first: str, count: str) -> None:
    logging.getLogger("flowscope").setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    groups = {ranks: dist.new_group(range(ranks)) for ranks in (2, 3)} | {4: dist.group.WORLD}
    place = dist.get_rank()
    warm = {**script(0), "events": [], "steps": 3, "ranks": 4, "sharded": False}
    for watched in (False, True):  # the first of each loads what it needs
        Rank(warm, groups[4], watched=watched).run()
    for seed in range(int(first), int(first) + int(count)):
        told: dict[str, Any] = {"script": script(seed)}
        for name in ("bare", "watched"):
            dist.barrier()
            if place < told["script"]["ranks"]:
                told[name] = Rank(told["script"], groups[told["script"]["ranks"]], watched=name == "watched").run()
        (Path(folder) / f"{seed}-{place}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
