"""What two ranks do in tests/test_ranks.py: `ranks_program.py STRATEGY FOLDER`, started by torch's own launcher.

Every scenario returns plain numbers, which each rank writes to its own file; the test compares them with computations
of one process. A rank sees its half of each batch (the first or the last three of six samples).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_models import batches, build, plain, share, train
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import flowscope

Result = dict[str, Any]
FOLDER = Path()


def rank() -> int:
    return dist.get_rank()


# -- DDP --------------------------------------------------------------------------------------------------------------


def ddp_outer() -> Result:
    model = DistributedDataParallel(build())
    return train(model, share(batches(), rank()))


def ddp_inner_after() -> Result:
    model = DistributedDataParallel(build())
    return train(model, share(batches(), rank()), watch=model.module)


def ddp_inner_before() -> Result:
    inner = build()
    return train(inner, share(batches(), rank()), prepare=DistributedDataParallel)


def ddp_loss_first() -> Result:
    """The loss is given before the optimizer steps: then that of the last step is everybody's too."""
    return train(DistributedDataParallel(build()), share(batches(), rank()), loss_first=True)


def ddp_accumulate() -> Result:
    """Two micro-batches a step, the first without synchronisation."""
    model = DistributedDataParallel(build())
    return train(model, share(batches(), rank()), micro=True, quiet=model.no_sync)


def ddp_static() -> Result:
    return train(DistributedDataParallel(build(), static_graph=True), share(batches(), rank()))


def ddp_unused() -> Result:
    """A layer that only rank 0 uses, another that nobody uses."""
    model = DistributedDataParallel(build(branches=True), find_unused_parameters=True)
    return train(model, share(batches(), rank()), extra={"branch": rank() == 0})


def ddp_sparse() -> Result:
    """Steps in between are not sampled, and their losses are in the next record."""
    return train(DistributedDataParallel(build()), share(batches(7), rank()), every=_sparse)


def _sparse(step: int) -> bool:
    return step in (0, 3, 6)


def ddp_wrapped(mode: str) -> Result:
    inner = flowscope.wrap(build(), mode=mode, example_inputs=batches(1)[0][0])
    return train(DistributedDataParallel(inner), share(batches(), rank()))


def ddp_postln() -> Result:
    """`keel-postln` on a post-norm model: DDP waits for no parameter that gets no gradient."""
    inner = flowscope.wrap(build(post=True), mode="keel-postln", example_inputs=batches(1)[0][0])
    return train(DistributedDataParallel(inner), share(batches(), rank()))


def ddp_files() -> Result:
    """Only the first rank writes; every rank's callback hears the alerts, and all stop at the same step."""
    folder = FOLDER / f"run-of-{rank()}"
    seen: list[flowscope.Event] = []

    class Listener:
        def write(self, event: flowscope.Event) -> None:
            seen.append(event)

        def close(self) -> None:
            pass

    data = batches(9)
    data[4][0][5, 0, 0] = float("nan")  # in the half of the second rank
    kinds: list[str] = []
    config = {
        "log_dir": folder,
        "sinks": [Listener()],
        "on_alert": [lambda a: kinds.append(a.kind), flowscope.actions.Stop()],
    }
    result = train(DistributedDataParallel(build()), share(data, rank()), **config)
    return {**result, "files": sorted(p.name for p in folder.glob("*")), "heard": len(seen), "kinds": kinds}


# -- sharded ----------------------------------------------------------------------------------------------------------


def _shard(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)


def fsdp_outer() -> Result:
    return train(_shard(build()), share(batches(), rank()))


def fsdp_before() -> Result:
    return train(build(), share(batches(), rank()), prepare=_shard)


def fsdp_clipped() -> Result:
    def clip(model: nn.Module) -> None:
        flowscope.clip_grad_norm_(model, 0.05)

    return train(_shard(build()), share(batches(), rank()), before_step=clip)


def fsdp_wrapped(mode: str) -> Result:
    model = flowscope.wrap(build(), mode=mode, example_inputs=batches(1)[0][0])
    return train(_shard(model), share(batches(), rank()))


def fsdp_accumulate() -> Result:
    return train(_shard(build()), share(batches(), rank()), micro=True)


def fsdp1(*, whole: bool) -> Result:
    """FullyShardedDataParallel, with the parameters' own names (`use_orig_params`) and without."""
    model = FullyShardedDataParallel(
        build(),
        auto_wrap_policy=ModuleWrapPolicy({type(build().blocks[0])}),
        device_id=torch.device("cpu"),
        use_orig_params=whole,
    )
    alerts: list[str] = []
    result = train(model, share(batches(), rank()), desync_every=1, on_alert=[lambda alert: alerts.append(alert.kind)])
    return {**result, "alerts": alerts}


def compiled() -> Result:
    """DDP compiled as a whole, watched before."""

    def prepare(model: nn.Module) -> nn.Module:
        return torch.compile(DistributedDataParallel(model), backend="aot_eager")

    return train(build(), share(batches(), rank()), prepare=prepare)


def tensor_parallel() -> Result:
    """Both ranks see the whole batch; the inner layers of each block are divided."""
    model = build()
    for block in model.blocks:
        parallelize_module(block, init_device_mesh("cpu", (2,)), {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    return train(model, batches(), foreach=False)


# -- what must not add up ---------------------------------------------------------------------------------------------


def only_first_watches() -> Result:
    model = DistributedDataParallel(build())
    data = share(batches(), rank())
    return train(model, data) if rank() == 0 else plain(model, data)


def other_schedules() -> Result:
    return train(DistributedDataParallel(build()), share(batches(), rank()), every=1 if rank() == 0 else 2)


def other_models() -> Result:
    """Stages of a pipeline: nothing in common."""
    return train(build(3 + rank()), share(batches(), rank()))


def own_pace() -> Result:
    """Two processes that train different copies, one of them for longer: nobody waits for anybody."""
    return train(build(), share(batches(3 + 4 * rank()), rank()))


def one_closes() -> Result:
    """The second rank closes its scope after two of four steps, and trains on."""

    def close(scope: flowscope.Scope, step: int) -> None:
        if rank() == 1 and step == 1:
            scope.close()

    return train(DistributedDataParallel(build()), share(batches(), rank()), after_step=close)


def one_pauses() -> Result:
    """The second rank pauses for one step."""

    def pause(scope: flowscope.Scope, step: int) -> None:
        if rank() == 1:
            (scope.pause if step == 0 else scope.resume)()

    return train(DistributedDataParallel(build()), share(batches(), rank()), after_step=pause)


def uneven() -> Result:
    """Two steps together, then inside of torch's Join four of the first rank and two of the second."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = share(batches(6), rank())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        for batch in data[:2]:
            step(*batch)
        with Join([model]):
            for batch in data[2 : 6 - 2 * rank()]:
                step(*batch)
        return {"flags": [record.flags for record in scope.records]}


def closes_alone() -> Result:
    """The first rank reads and closes while the second still sleeps before its last step."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = flowscope.watch(model, optimizer, every=1, config={"console": "off"})
    for step, (x, y) in enumerate(share(batches(), rank())):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if step == 3 and rank() == 1:
            time.sleep(6.0)
        optimizer.step()
    start = time.monotonic()
    count = len(scope.records)
    scope.close()
    return {"seconds": time.monotonic() - start, "read": count, "flags": [r.flags for r in scope.records]}


# -- replicas ---------------------------------------------------------------------------------------------------------


def in_sync() -> Result:
    return train(DistributedDataParallel(build()), share(batches(12), rank()), desync_every=1)


def past_the_wrapper() -> Result:
    """D01: every fifth step calls the inner module, which averages nothing."""
    model = DistributedDataParallel(build())

    def call(x: Tensor, step: int) -> Tensor:
        return model.module(x) if step % 5 == 4 else model(x)

    return train(model, share(batches(12), rank()), call=call, desync_every=1)


def lost_payloads() -> Result:
    """D02: gradients averaged by hand, and what one rank got is partly lost."""
    return train(build(), share(batches(12), rank()), before_step=_average, desync_every=1)


def _average(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is None:
            continue
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
        if rank() == 1 and number == 3:
            parameter.grad.zero_()


def local_clipping() -> Result:
    """D03: the clip coefficient comes from a part of the norm that differs between ranks."""

    def clip(model: nn.Module) -> None:
        mine = list(model.parameters())[rank() :: 2]
        norm = torch.nn.utils.get_total_norm([p.grad for p in mine if p.grad is not None])
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= (0.1 / norm).clamp(max=1.0)

    return train(DistributedDataParallel(build()), share(batches(12), rank()), before_step=clip, desync_every=1)


# -- the life of a job ------------------------------------------------------------------------------------------------


def closes_for_one() -> Result:
    """The second rank's loop closes its scope and goes on calling it."""

    def close(scope: flowscope.Scope, step: int) -> None:
        if rank() == 1 and step == 1:
            scope.close()
        if step > 0:
            scope.step()
            scope.pause()
            scope.resume()

    return train(DistributedDataParallel(build()), share(batches(), rank()), after_step=close)


def resumes() -> Result:
    """Goes on from what one process had (STATE), and says what it would go on from itself."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = flowscope.watch(model, optimizer, every=1, config={"console": "off"})
    scope.load_state_dict(json.loads((FOLDER / "state.json").read_text()))
    for x, y in share(batches(), rank()):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    state = scope.state_dict()
    scope.close()
    records = [(record.step, record.flags) for record in scope.records]
    return {"records": records, "state": state}


def closes_after_the_group() -> Result:
    """The group is gone before the scope is closed; its last record is everybody's still."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = flowscope.watch(model, optimizer, every=1, config={"console": "off"})
    for x, y in share(batches(), rank()):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    scope.close()
    return {"flags": [record.flags for record in scope.records], "failed": {**scope._faults.failed}}


# -- a rank that dies -------------------------------------------------------------------------------------------------


def dies() -> Result:
    """The second rank is gone in its third step (by SIGNAL): the first gets the framework's error, and can close."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = None
    if "RANKS_BARE" not in os.environ:
        scope = flowscope.watch(model, optimizer, every=1, config={"console": "off"})
    error, start = "", 0.0
    for step, (x, y) in enumerate(share(batches(), rank())):
        start = time.monotonic()
        try:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            if step == 2 and rank() == 1:
                os.kill(os.getpid(), int(os.environ["RANKS_SIGNAL"]))
                time.sleep(60)
            loss.backward()
            optimizer.step()
        except RuntimeError as caught:
            error = f"{type(caught).__name__}: {caught}"
            break
    if scope is not None:
        scope.close()
    records = len(scope.records) if scope is not None else 0
    return {"error": error, "seconds": time.monotonic() - start, "records": records}


SCENARIOS: dict[str, dict[str, Callable[[], Result]]] = {
    "ddp": {
        "outer": ddp_outer,
        "inner_after": ddp_inner_after,
        "inner_before": ddp_inner_before,
        "loss_first": ddp_loss_first,
        "accumulate": ddp_accumulate,
        "static": ddp_static,
        "unused": ddp_unused,
        "sparse": ddp_sparse,
        "keel": lambda: ddp_wrapped("keel"),
        "dhc": lambda: ddp_wrapped("dhc"),
        "postln": ddp_postln,
        "files": ddp_files,
    },
    "sharded": {
        "outer": fsdp_outer,
        "before": fsdp_before,
        "accumulate": fsdp_accumulate,
        "clipped": fsdp_clipped,
        "keel": lambda: fsdp_wrapped("keel"),
        "dhc": lambda: fsdp_wrapped("dhc"),
        "tensor_parallel": tensor_parallel,
        "compiled": compiled,
        "fsdp1": lambda: fsdp1(whole=False),
        "fsdp1_names": lambda: fsdp1(whole=True),
    },
    "apart": {
        "only_first_watches": only_first_watches,
        "other_schedules": other_schedules,
        "other_models": other_models,
        "own_pace": own_pace,
        "one_closes": one_closes,
        "one_pauses": one_pauses,
        "uneven": uneven,
        "closes_alone": closes_alone,
        "in_sync": in_sync,
        "past_the_wrapper": past_the_wrapper,
        "lost_payloads": lost_payloads,
        "local_clipping": local_clipping,
    },
    "life": {"closes_for_one": closes_for_one, "resumes": resumes, "closes_after_the_group": closes_after_the_group},
    "death": {"dies": dies},
}


def main(strategy: str, folder: str, only: str = "") -> None:
    global FOLDER
    FOLDER = Path(folder)
    limit = timedelta(seconds=60)
    if (store := os.environ.get("RANKS_STORE")) is not None:  # without a launcher, which would end all ranks with one
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group("gloo", init_method=f"file://{store}", timeout=limit, **place)
    else:
        dist.init_process_group("gloo", timeout=limit)
    results: dict[str, Result] = {}
    place = rank()  # a scenario may take the group down
    for name, scenario in SCENARIOS[strategy].items():
        if only in ("", name):
            try:
                results[name] = scenario()
            except Exception as error:
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
                raise
            finally:
                (FOLDER / f"{strategy}-{place}.json").write_text(json.dumps(results))
    if strategy == "death":
        os._exit(0)  # the group of a dead rank is not taken down
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
