"""`skip_by_gates`: leave out branches whose gate is nearly closed, while a gated model is evaluated. Off by default.

```python
skipping = flowscope.skip_by_gates(model, threshold=0.05, loader=calibration)        # whole branches, by their mean
skipping = flowscope.skip_by_gates(model, threshold=0.05, per="sample")              # each sample by its own gates
with skipping:
    model(batch)
print(skipping.report(loader, loss))          # loss before and after, share left out, time saved
```

What is left out counts as t = 0: the site hands the carry x on as it is. Nothing is touched outside the `with`.
How it is done: `skipped_block`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.extras.skipped_block import Decision, SkippedBlock
from flowscope.merging.connection import Connection
from flowscope.merging.profile import gated_connections
from flowscope.merging.weaving import WovenChild
from flowscope.model.example_inputs import as_call, evaluating
from flowscope.model.sites import uncompiled

Loss = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class SkipReport:
    """What was left out, and what it cost and saved.

    Attributes:
        threshold: of the gate, below which a branch is left out.
        shares: {"block path#site": share of the samples whose branch was left out}; NaN where none came by.
        refused: {block path: why nothing can be left out there}.
        loss_before, loss_after: mean loss over the loader without and with skipping; None without a loader.
        seconds_before, seconds_after: time of the forward passes, likewise.
    """

    threshold: float
    shares: dict[str, float]
    refused: dict[str, str]
    samples: int
    share: float
    loss_before: float | None = None
    loss_after: float | None = None
    seconds_before: float | None = None
    seconds_after: float | None = None

    def __str__(self) -> str:
        """The report as a few lines of text."""
        whole = [label for label, share in self.shares.items() if share == 1.0]
        some = [label for label, share in self.shares.items() if 0.0 < share < 1.0]
        lines = [f"{self.share:.1%} of the branches left out (gates below {self.threshold:g}, {self.samples} samples)"]
        if self.loss_before is not None and self.loss_after is not None:
            lines.append(f"  loss {self.loss_before:.4f} before, {self.loss_after:.4f} after")
        if self.seconds_before and self.seconds_after is not None:
            saved = 1.0 - self.seconds_after / self.seconds_before
            lines.append(f"  {self.seconds_before:.3f} s before, {self.seconds_after:.3f} s after ({saved:+.1%} saved)")
        for words, labels in (("always", whole), ("for some samples", some)):
            if labels:
                more = f" and {len(labels) - 8} more" if len(labels) > 8 else ""
                lines.append(f"  left out {words}: {', '.join(labels[:8])}{more}")
        lines += [f"  {path}: not skipped, {reason}" for path, reason in self.refused.items()]
        return "\n".join(lines)


class GateSkipping:
    """Made by `skip_by_gates`; a context manager, to be entered as often as one likes."""

    def __init__(self, model: nn.Module, threshold: float, by_sample: bool) -> None:
        self.model, self.threshold, self.by_sample = model, threshold, by_sample
        self.chosen: set[tuple[str, int]] = set()
        self.observing = False
        self.active: SkippedBlock | None = None
        self._means: dict[tuple[str, int], list[float]] = {}
        self._inner = uncompiled(model)
        self._blocks: list[SkippedBlock] = []
        for path, connection in gated_connections(model):
            place = path.rpartition(".")[0]
            self._blocks.append(SkippedBlock(place, self._inner.get_submodule(place), connection, self))
        self._stack: contextlib.ExitStack | None = None

    # -- on and off

    def __enter__(self) -> GateSkipping:
        """Begin to leave out branches.

        Raises:
            FlowscopeError: skipping is on already in this model.
        """
        if any("merge" in vars(block.connection) for block in self._blocks):
            raise FlowscopeError("skip_by_gates: skipping is on already in this model; leave the other `with` first.")
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for block in self._blocks:
                module = block.block
                for child in parts(module):
                    _stand_in(stack, child, "forward", functools.partial(self._child, child, child.forward))
                block.forward, block.merge = module.forward, block.connection.merge
                _stand_in(stack, module, "forward", block.run)
                _stand_in(stack, block.connection, "merge", block.meet)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Everything is as before."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def _child(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.active is None:
            return forward(*args, **kwargs)
        return self.active.child(module, forward, args, kwargs)

    # -- what is decided

    def decide(self, path: str, site: int, weight: Callable[[], Tensor]) -> Decision:
        """Return what is done about a branch."""
        if not self.by_sample:
            return Decision((path, site) in self.chosen)
        open_ = weight().flatten(1).amax(-1) >= self.threshold
        rows = open_.nonzero().flatten()
        if len(rows) == len(open_):
            return Decision()
        return Decision(True, rows if len(rows) else None)

    def observe(self, path: str, site: int, weight: Tensor) -> None:
        """Take note of the mean gate of a site."""
        self._means.setdefault((path, site), []).append(float(weight.double().mean()))

    def calibrate(self, loader: Iterable[Any], steps: int | None = None) -> None:
        """Choose the branches whose mean gate over the loader is below the threshold."""
        self._means = {}
        self.observing = True
        try:
            with evaluating(self._inner), torch.no_grad(), self:
                batches = 0
                for batch in islice(loader, steps):
                    self._forward(batch)
                    batches += 1
        finally:
            self.observing = False
            self._zero()
        if not batches:
            raise FlowscopeError("skip_by_gates(loader): got no batch, expected at least one (a generator used up?).")
        self.chosen = {key for key, means in self._means.items() if sum(means) / len(means) < self.threshold}

    # -- what came of it

    def report(
        self, loader: Iterable[Any] | None = None, loss: Loss | None = None, steps: int | None = None
    ) -> SkipReport:
        """Return what was left out: inside the `with` so far, or over a loader, run with and without skipping.

        In eval mode and without gradient. The two passes over a batch take turns in being first; both are run once
        before the clock starts.

        Args:
            loader: batches as the model takes them (a tensor, tuple or dict), or as `loss` does.
            loss: `loss(model, batch)`, a number or scalar tensor; None: the output's own `.loss`, if it has one.
            steps: how many batches at most.

        Raises:
            FlowscopeError: a loader while skipping is on, or no batch in it.
        """
        if loader is None:
            return self._summary()
        if self._stack is not None:
            raise FlowscopeError("skip_by_gates: report(loader) runs the model both ways: call it outside the `with`.")
        losses: dict[bool, list[float]] = {False: [], True: []}
        seconds = {False: 0.0, True: 0.0}
        with evaluating(self._inner), torch.no_grad():
            for number, batch in enumerate(islice(loader, steps)):
                order = (False, True) if number % 2 else (True, False)
                if not number:
                    for skip in order:
                        self._timed(batch, loss, skip)
                    self._zero()
                for skip in order:
                    took, value = self._timed(batch, loss, skip)
                    seconds[skip] += took
                    if value is not None:
                        losses[skip].append(value)
        if not seconds[False]:
            raise FlowscopeError("skip_by_gates: report(loader) got no batch, expected at least one.")
        before, after = (sum(v) / len(v) if v else None for v in (losses[False], losses[True]))
        return self._summary(before, after, seconds[False], seconds[True])

    def _timed(self, batch: Any, loss: Loss | None, skip: bool) -> tuple[float, float | None]:
        with self if skip else contextlib.nullcontext():
            started = time.perf_counter()
            result = self._forward(batch) if loss is None else loss(self.model, batch)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took = time.perf_counter() - started
        value = getattr(result, "loss", None) if loss is None else result
        return took, None if value is None else float(value)

    def _forward(self, batch: Any) -> Any:
        args, kwargs = as_call(batch)
        device = next(self._blocks[0].connection.parameters()).device
        args = tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)
        return self._inner(*args, **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in kwargs.items()})

    def _zero(self) -> None:
        for block in self._blocks:
            block.met, block.skipped = [0] * len(block.met), [0] * len(block.skipped)

    def _summary(self, *measured: float | None) -> SkipReport:
        counts = {
            f"{block.path}#{site}": (met, skipped)
            for block in self._blocks
            for site, (met, skipped) in enumerate(zip(block.met, block.skipped, strict=True))
        }
        total = sum(met for met, _ in counts.values())
        return SkipReport(
            self.threshold,
            {label: skipped / met if met else float("nan") for label, (met, skipped) in counts.items()},
            {block.path: block.refused for block in self._blocks if block.refused},
            max((met for met, _ in counts.values()), default=0),
            sum(skipped for _, skipped in counts.values()) / total if total else 0.0,
            *measured,
        )


def skip_by_gates(
    model: nn.Module,
    threshold: float = 0.05,
    *,
    loader: Iterable[Any] | None = None,
    per: Literal["block", "sample"] = "block",
    steps: int | None = None,
) -> GateSkipping:
    """Return a context manager inside which a gated model leaves out branches whose gate is below a threshold.

    For evaluation only. A branch left out counts as t = 0. The gate is that of `keel` and `highway`; with `preserve`
    it is t over its first value, the weight of the branch.

    Args:
        model: wrapped with `keel` or `highway`.
        threshold: of the gate t, between 0 and 1.
        loader: batches to calibrate on, as the model takes them. With per="block" needed, else not used.
        per: "block" leaves out a branch for all inputs where its mean gate over the loader is below the threshold;
            "sample" leaves it out for each sample whose own gates (at every position and feature) all are. The batch
            must be the first axis.
        steps: how many batches of the loader at most.

    Raises:
        FlowscopeError: no gates in the model, a threshold outside 0 to 1, per="block" without a loader.
    """
    if per not in ("block", "sample"):
        raise FlowscopeError(f"skip_by_gates(per=...): got {per!r}, expected 'block' or 'sample'.")
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0.0 <= threshold <= 1.0:
        raise FlowscopeError(f"skip_by_gates(threshold=...): got {threshold!r}, expected a gate between 0 and 1.")
    skipping = GateSkipping(model, float(threshold), per == "sample")
    if per == "block":
        if loader is None:
            raise FlowscopeError(
                "skip_by_gates(per='block'): got no loader, expected batches to calibrate on; or use per='sample'."
            )
        skipping.calibrate(loader, steps)
    return skipping


def parts(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that make up a block's branches: all inside but connections and those on the carry's path."""
    for child in block.children():
        if isinstance(child, Connection) or (isinstance(child, WovenChild) and child.flowscope_carries):
            continue
        yield child
        yield from parts(child)


def _stand_in(stack: contextlib.ExitStack, module: nn.Module, name: str, stand_in: Any) -> None:
    """Put something in place of a method of one instance until the stack closes."""
    own = vars(module)
    before = own.get(name)
    own[name] = stand_in

    def restore() -> None:
        if before is None:
            own.pop(name, None)
        else:
            own[name] = before

    stack.callback(restore)
