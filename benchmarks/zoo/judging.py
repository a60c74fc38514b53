"""Judge `watch` and `wrap` on one model: reach against the graph's own count, and whether what is promised happens."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import flowscope
from benchmarks.zoo.expected import merges
from flowscope.errors import FlowscopeError
from flowscope.model.nested import nested_tensors

MODES: dict[str, dict[str, Any]] = {"dhc": {}, "keel": {"preserve": True}, "mhc": {}}
LIMIT = 1e-4
"""Relative change of the output that is kept; in fp64 where rounding alone is above it."""

Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
"""Makes positional and keyword arguments from a seed."""


@dataclass
class Row:
    """What one model showed.

    Attributes:
        group: what it stands for (a family, a task).
        expected: merges in the plain model's graph, outside branches.
        inner: and inside branches.
        watched: "" where `watch` recorded finite numbers, else why not; None where it was not asked.
        sites: of each mode, how many merges have a connection.
        faults: of each mode, what is wrong; "silent" in front where nothing was raised.
        refused: what `wrap` says it left alone.
    """

    name: str
    group: str
    about: str = ""
    broken: str = ""
    expected: int = 0
    inner: int = 0
    watched: str | None = None
    sites: dict[str, int] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    refused: str = ""

    def passes(self, mode: str) -> bool:
        """Whether a mode reaches the model and keeps its word."""
        return not self.broken and mode not in self.faults and self.sites.get(mode, 0) > 0

    def cell(self, mode: str) -> str:
        """Return a mode's cell."""
        if mode in self.faults:
            return "**wrong**" if self.faults[mode].startswith("silent") else "refused"
        return str(self.sites.get(mode, "-"))

    def note(self) -> str:
        """Return what is to be said of it."""
        said = list(dict.fromkeys(f"{mode}: {fault}" for mode, fault in self.faults.items()))
        if len(set(self.faults.values())) == 1 and len(self.faults) > 1:
            said = [next(iter(self.faults.values()))]
        said += [f"watch: {self.watched}"] if self.watched else []
        said += [self.refused] if self.refused else []
        return "; ".join(said).replace("\n", " ").replace("|", "/")

    def __str__(self) -> str:
        """The row of the table."""
        if self.broken:
            return f"| {self.group} | {self.name} | does not run here: {self.broken} ||||||"
        cells = [self.cell(mode) for mode in MODES]
        worst = max(self.changes.values(), default=math.nan)
        watched = "-" if self.watched is None else "no" if self.watched else "yes"
        merges = f"{self.expected} + {self.inner}" if self.inner else self.expected
        head = (self.group, f"{self.name} {self.about}".strip(), merges, watched, *cells, f"{worst:.0e}")
        return f"| {' | '.join(map(str, head))} | {self.note()} |"


def one_line(error: BaseException, length: int = 200) -> str:
    """Return what an error says, as a cell can hold it."""
    return f"{type(error).__name__}: {error}"[:length].replace("\n", " ").replace("|", "/")


def numbers(output: Any) -> list[Tensor]:
    """Return the floating tensors of an output, of a language model the logits."""
    output = output["logits"] if hasattr(output, "keys") and "logits" in output else output
    return [x for x in nested_tensors(output) if x.is_floating_point()]


def change(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the largest relative change of tensors; infinite where there are others."""
    if [x.shape for x in before] != [x.shape for x in after]:
        return math.inf
    pairs = zip(before, after, strict=True)
    return max(((b - a).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in pairs if a.numel())


def liven(model: nn.Module) -> None:
    """Move weights off values that leave something out (a head of zeros, layer scale of 1e-6, -1 + 1).

    Dropout is off: what it draws goes by the layout in memory of what it is given, which a connection may change.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() and (p.dim() < 2 or p.abs().max() < 1e-2):
                p.add_(torch.randn(p.shape, generator=generator).to(p) * 0.1)


def calibrate(model: nn.Module, inputs: Inputs) -> None:
    """Give batch norms the statistics of two batches: at 0 and 1 an untrained net's signal may grow to 1e13."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            module.reset_running_stats()
            module.momentum = None
    for seed in range(2):
        run(model.train(), inputs, seed)


def run(model: nn.Module, inputs: Inputs, seed: int) -> list[Tensor]:
    """Return the output without gradient, the same randomness each time."""
    args, kwargs = inputs(seed)
    torch.manual_seed(1)
    with torch.no_grad():
        return [x.clone() for x in numbers(model(*args, **kwargs))]


def count_merges(model: nn.Module, inputs: Inputs) -> tuple[int, int]:
    """Return the merges in the plain model's graph, outside and inside branches."""
    args, kwargs = inputs(0)
    leaves = [x.requires_grad_() for x in nested_tensors((args, kwargs)) if x.is_floating_point()]
    fed = iter([x.clone() for x in leaves])  # some models write into what they are given
    args, kwargs = flowscope.model.nested.map_tensors(
        (args, kwargs), lambda x: next(fed) if x.is_floating_point() else x
    )
    torch.manual_seed(1)
    return merges(numbers(model(*args, **kwargs)), leaves)


@contextlib.contextmanager
def hearing() -> Iterator[list[str]]:
    """Collect what flowscope's logger says."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flowscope")
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)


def watch_one(model: nn.Module, inputs: Inputs) -> str:
    """Return what `watch` does wrong in two steps; empty where it records finite numbers along a depth axis."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with hearing() as heard, flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        for seed in range(2):
            args, kwargs = inputs(seed)
            optimizer.zero_grad()
            loss = sum(x.square().mean() for x in numbers(model(*args, **kwargs)) if x.requires_grad)
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
    fault = next((line for line in heard if "fault" in line or "Traceback" in line), "")
    if fault:
        return fault[:150]
    if len(scope.records) != 2:
        return f"{len(scope.records)} records of 2 steps"
    products = [
        torch.as_tensor(x) for key, x in scope.records[-1].metrics.items() if key.startswith("gradient_product")
    ]
    if not products:
        return "no gradient product along any depth"
    if any(bool(x.isinf().any()) for x in products):  # NaN: no gradient came by, as at an input
        return "an infinite gradient product"
    seen = max(int(x.isfinite().sum()) for x in products)
    return "" if seen > 1 else f"a gradient at {seen} points"


def reached(model: nn.Module, inputs: Inputs) -> set[str]:
    """Return the parameters that a random sum of the outputs depends on."""
    generator = torch.Generator().manual_seed(2)
    model.zero_grad()
    args, kwargs = inputs(0)
    torch.manual_seed(1)
    outputs = [x for x in numbers(model(*args, **kwargs)) if x.requires_grad]
    total = sum((x.float() * torch.randn(x.shape, generator=generator)).mean() for x in outputs)
    total.mul(1e3).backward()  # type: ignore[union-attr]
    return {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}


def idle_parameters(model: nn.Module, inputs: Inputs, plain: set[str]) -> str:
    """Return which connections a site of which changes nothing, off their initial values: no gradient comes back.

    Those of blocks that the plain model's output does not depend on are left out.
    """
    found = flowscope.connections(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, connection in found:
            for p in connection.parameters():
                p.add_(torch.randn(p.shape, generator=generator).to(p) * 0.05)
    moving = reached(model.eval(), inputs)
    moving |= reached(
        model.train(), inputs
    )  # untrained and evaluated, a deep net's signal may close every gate for good
    idle = [
        f"{path}.{name}"
        for path, connection in found
        if any(name.startswith(path.rpartition(".")[0]) for name in plain)
        for name, p in connection.named_parameters()
        if p.requires_grad and f"{path}.{name}" not in moving
    ]
    return f"silent: {len(idle)} tensors move nothing, such as {idle[0]}" if idle else ""


def judge_mode(row: Row, model: nn.Module, inputs: Inputs, mode: str) -> None:
    """Note how a mode does: sites, change on other inputs than those of `wrap`, evaluated and in training, and idle."""
    wrapped = copy.deepcopy(model)
    args, kwargs = inputs(0)
    try:
        with hearing() as heard:
            flowscope.wrap(wrapped, mode, example_inputs=kwargs or args, **MODES[mode])
        row.refused = next((part for part in heard[0].split("; ") if "not wrapped" in part), "")
    except FlowscopeError as error:
        row.faults[mode] = one_line(error, 260)
        return
    row.sites[mode] = sum(connection.sites for _, connection in flowscope.connections(wrapped))
    row.changes[mode] = 0.0
    for training in (False, True):
        model.train(training), wrapped.train(training)
        try:
            moved = change(run(copy.deepcopy(model), inputs, 5), run(wrapped, inputs, 5))
            if moved > LIMIT / 10:
                double = copy.deepcopy(model).double().train(training), copy.deepcopy(wrapped).double().train(training)
                moved = change(*(run(one, in_double(inputs), 5) for one in double))
        except FlowscopeError as error:
            row.faults[mode] = f"in {'training' if training else 'evaluation'}: {one_line(error, 200)}"
            return
        row.changes[mode] = max(row.changes[mode], moved)
        if not moved <= LIMIT:
            row.faults[mode] = f"silent: {'in training ' if training else ''}the output moved by {moved:.0e}"
            return
    if fault := idle_parameters(wrapped.eval(), inputs, reached(copy.deepcopy(model).eval(), inputs)):
        row.faults[mode] = fault


def in_double(inputs: Inputs) -> Inputs:
    """Return the same inputs in fp64."""

    def make(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return flowscope.model.nested.map_tensors(inputs(seed), lambda x: x.double() if x.is_floating_point() else x)

    return make


def judge(
    row: Row, make: Callable[[], tuple[nn.Module, Inputs]], modes: Iterable[str] = MODES, watch: bool = True
) -> Row:
    """Fill a row."""
    try:
        model, inputs = make()
        liven(model)
        calibrate(model, inputs)
        model.eval()
        row.expected, row.inner = count_merges(copy.deepcopy(model), inputs)
    except TimeoutError:
        raise
    except Exception as error:
        row.broken = row.broken or one_line(error, 120)
        return row
    try:
        row.watched = watch_one(model, inputs) if watch else None
    except TimeoutError:
        raise
    except Exception as error:
        row.watched = one_line(error)
    for mode in modes:
        try:
            judge_mode(row, model.eval(), inputs, mode)
        except TimeoutError:
            raise
        except FlowscopeError as error:
            row.faults[mode] = f"in training: {one_line(error)}"
        except Exception as error:
            row.faults[mode] = f"silent: {one_line(error)}"
    gc.collect()
    return row
