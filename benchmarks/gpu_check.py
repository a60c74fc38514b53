"""What needs a GPU, in under five minutes on one: each check says pass or FAIL with its numbers.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --only autograd,scaler
    python benchmarks/gpu_check.py --device cpu        what means something there, so that the script itself is run

The exit status is 1 where a check failed, 2 where there is no GPU.

Checks: autograd (numbers against torch.autograd), syncs (nothing in forward, backward or the optimizer's step waits for
the device), scaler (fp16 with a GradScaler: true gradients, a skipped step), graphs (mode="reduce-overhead"), streams
(a forward on a side stream), ddp and fsdp (a group of one rank), overhead (every step sampled).
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pairing import Batch, Runner, interleave, ratio
from torch import Tensor, nn

import flowscope
from flowscope.ranks.node import Node
from flowscope.ranks.wire import Table
from flowscope.sums.buffer import HostCopy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from byte_lm import ByteLM

STEPS = 6
Outcome = tuple[bool, str]


def model_on(device: torch.device, *, depth: int = 6, width: int = 128) -> ByteLM:
    torch.manual_seed(0)
    return ByteLM(norm="pre", depth=depth, width=width, heads=4, length=64).to(device)


def batches_on(device: torch.device, count: int = STEPS, batch: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (count, batch, 65), generator=generator).to(device)
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def expected(model: nn.Module, batch: Batch) -> np.ndarray[Any, Any]:
    """Gradient norms at the input of the first block and the output of each, by autograd on an unwatched copy."""
    twin, taps, handles = copy.deepcopy(model), [], []
    blocks = flowscope.find_flows(twin)[0].outputs
    first = twin.get_submodule(blocks[0])
    handles.append(first.register_forward_pre_hook(lambda module, args: taps.append(args[0])))
    handles += [twin.get_submodule(p).register_forward_hook(lambda m, args, out: taps.append(out)) for p in blocks]
    gradients = torch.autograd.grad(loss_of(twin, batch), taps)
    for handle in handles:
        handle.remove()
    return np.array([float(g.double().norm()) for g in gradients])


def train(model: nn.Module, device: torch.device, **options: Any) -> tuple[flowscope.Scope, list[np.ndarray[Any, Any]]]:
    """Watch some steps of SGD, with what autograd says of each."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inner = model.module if hasattr(model, "module") else model
    truths = []
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}, **options) as scope:
        plain = model_on(device)
        for batch in batches_on(device):
            plain.load_state_dict({k: _whole(v) for k, v in inner.state_dict().items()})
            truths.append(expected(plain, batch))
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    return scope, truths


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compared(scope: flowscope.Scope, truths: list[np.ndarray[Any, Any]], limit: float = 1e-4) -> Outcome:
    """The largest relative difference of the gradient norms."""
    if len(scope.records) != len(truths):
        return False, f"{len(scope.records)} records of {len(truths)} steps"
    worst = max(float(np.max(np.abs(r["grad_norm"] / t - 1))) for r, t in zip(scope.records, truths, strict=True))
    flags = sorted({flag for record in scope.records for flag in record.flags})
    return worst < limit and not flags, f"largest relative difference {worst:.1e} (limit {limit:.0e}), flags {flags}"


def check_autograd(device: torch.device) -> Outcome:
    return compared(*train(model_on(device), device))


def check_syncs(device: torch.device) -> Outcome:
    """Torch raises at any synchronisation while a sampled step runs; the slow probes are part of it."""
    model = model_on(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
    scope = flowscope.watch(model, optimizer, every=1, config={"console": "off", "slow_every": 3})
    batches, found = batches_on(device, 12), []
    for number, batch in enumerate(batches):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
        try:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
        except RuntimeError as error:
            found.append(f"step {number}: {error}")
            break
        finally:
            torch.cuda.set_sync_debug_mode("default")
    scope.close()
    failed = "switched off" in scope.summary()
    return not found and not failed and len(scope.records) == len(batches), "; ".join(found) or scope.summary()[-200:]


def check_scaler(device: torch.device) -> Outcome:
    """fp16 with a scale of 2^16: gradients are the unscaled ones; a step with inf is skipped, and said to be."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**16)
    scope = flowscope.watch(model, optimizer, every=1, scaler=scaler, config={"console": "off"})
    truths = []
    for number, batch in enumerate(batches_on(device)):
        truths.append(expected(model, batch))
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = loss_of(model, batch)
        scaler.scale(loss * (float("inf") if number == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scope.step(loss=loss)
    scope.close()
    skipped = [record.step for record in scope.records if "skipped" in record.flags]
    pairs = [(r, t) for r, t in zip(scope.records, truths, strict=True) if r.step != 3]
    worst = max(float(np.max(np.abs(r["grad_norm"] / t - 1))) for r, t in pairs)
    errors = [alert.kind for alert in scope.alerts if alert.severity == "error"]
    good = skipped == [3] and worst < 2e-2 and not errors
    return good, f"skipped {skipped} (expected [3]), against fp32 {worst:.1e} (limit 2e-2), errors {errors}"


def check_graphs(device: torch.device) -> Outcome:
    """CUDA graphs replay the same addresses: numbers must still be each step's own."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = flowscope.watch(model, optimizer, every=1, config={"console": "off", "slow_every": 0})
    model.compile(mode="reduce-overhead", fullgraph=True)
    truths = []
    plain = model_on(device)
    for batch in batches_on(device):
        torch.compiler.cudagraph_mark_step_begin()
        plain.load_state_dict(model.state_dict())
        truths.append(expected(plain, batch))
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        scope.step(loss=loss.detach().clone())
    scope.close()
    return compared(scope, truths, 1e-3)


def check_streams(device: torch.device) -> Outcome:
    """The whole step runs on a stream of its own."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        outcome = compared(*train(model_on(device), device))
    torch.cuda.current_stream(device).wait_stream(stream)
    return outcome


def group_of_one(device: torch.device) -> None:
    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)


def check_ddp(device: torch.device) -> Outcome:
    group_of_one(device)
    good, text = compared(*train(nn.parallel.DistributedDataParallel(model_on(device)), device))
    # a group of one adds nothing up: the way of a sum from the device through the ranks' own connections
    vector = torch.arange(1 << 17, dtype=torch.float64, device=device)
    node = Node(0, 1, "127.0.0.1", "check")
    node.start("")
    start = time.perf_counter()
    node.enter((1, 0, 0), Table((("numbers", vector.numel(), False),)), HostCopy([vector.clone()]))
    _, total = node.inbox.outcome((1, 0, 0), 5.0)
    seconds = time.perf_counter() - start
    node.close()
    same = total is not None and bool(np.array_equal(total.numbers, vector.cpu().numpy()))
    return good and same, f"{text}; a sum of 1 MiB {'arrived' if same else 'IS WRONG'} after {1e3 * seconds:.2f} ms"


def check_fsdp(device: torch.device) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    group_of_one(device)
    model, mesh = model_on(device), init_device_mesh(device.type, (1,))
    for path in flowscope.find_flows(model)[0].outputs:
        fully_shard(model.get_submodule(path), mesh=mesh)
    return compared(*train(fully_shard(model, mesh=mesh), device))


def check_overhead(device: torch.device) -> Outcome:
    """Median ratio of a step with everything sampled to the bare step, paired; and the bare one to itself."""

    def runner(name: str, *, watch: bool) -> Runner:
        model = model_on(device, depth=12, width=512 if device.type == "cuda" else 64)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

        def attach(self: Runner) -> Callable[[Tensor], object]:
            scope = flowscope.watch(self.model, optimizer, every=1, config={"console": "off", "slow_every": 0})
            self.stack.callback(scope.close)
            return lambda loss: scope.step(loss=loss)

        return Runner(name, model, optimizer, synchronised, attach if watch else None)

    def synchronised(model: nn.Module, batch: Batch) -> Tensor:
        if device.type == "cuda":
            torch.cuda.synchronize()  # the step before is not part of this one
        return loss_of(model, batch)

    pairs = 100 if device.type == "cuda" else 6
    batches = iter(batches_on(device, 4 * (pairs + 20), batch=32 if device.type == "cuda" else 2))
    runners = [runner("bare", watch=False), runner("again", watch=False), runner("watched", watch=True)]
    times = interleave(runners, batches, pairs)
    found = {name: ratio(name, times[name], times["bare"]) for name in ("again", "watched")}
    text = ", ".join(f"{name} {value.quartiles[1]:.3f}" for name, value in found.items())
    limit = 1.15
    return device.type == "cpu" or found["watched"].quartiles[
        1
    ] < limit, f"{text} (limit {limit}; not judged on the CPU)"


CHECKS: dict[str, tuple[Callable[[torch.device], Outcome], bool]] = {
    "autograd": (check_autograd, True),
    "syncs": (check_syncs, False),
    "scaler": (check_scaler, True),
    "graphs": (check_graphs, False),
    "streams": (check_streams, False),
    "ddp": (check_ddp, True),
    "fsdp": (check_fsdp, True),
    "overhead": (check_overhead, True),
}
"""Name: the check, and whether it means something on a CPU."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="names of checks, with commas between them")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no GPU (torch.cuda.is_available() is False); --device cpu runs what means something without")
        return 2
    chosen = [name for name in arguments.only.split(",") if name] or list(CHECKS)
    if unknown := set(chosen) - set(CHECKS):
        print(f"gpu_check: no check {sorted(unknown)}; there are {', '.join(CHECKS)}")
        return 2
    os.environ["FLOWSCOPE_STRICT"] = "1"
    device, failed = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu"), 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: this checks the script, not a GPU"
    print(f"torch {torch.__version__}, {name}")
    for check in chosen:
        run, on_cpu = CHECKS[check]
        if device.type == "cpu" and not on_cpu:
            print(f"----  {check}: needs a GPU")
            continue
        start = time.perf_counter()
        try:
            good, text = run(device)
        except Exception as error:
            good, text = False, f"{type(error).__name__}: {error}"
        failed += not good
        print(f"{'pass' if good else 'FAIL'}  {check} ({time.perf_counter() - start:.0f} s): {text}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
