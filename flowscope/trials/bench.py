"""What trials work on: a model, what is called its loss, some batches; and the passes that a trial may ask for."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flowscope.errors import CannotJudgeError
from flowscope.model.example_inputs import modes
from flowscope.model.nested import map_tensors, nested_tensors
from flowscope.model.plan import display_path
from flowscope.torch_internals import in_backward
from flowscope.trials.kept import put_back, referred_to

Loss = Callable[[nn.Module, Any], Tensor]
DEAR = 2e9
"""Floating-point operations of a forward pass; what needs a hundred passes is given smaller batches beyond: two cores
make some 5e10 a second."""

SAME = 1e-4
"""Losses that differ by a smaller share are of the same pass ..."""
FAR = 0.2
"""... and by a larger one of another loss: what a model keeps from pass to pass changes less within one step."""


@dataclass(frozen=True)
class Call:
    """One outermost call: copies of what was given, what came back, and the path of what was called ("" the model)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    part: str = ""


@dataclass(frozen=True)
class Seen:
    """What one module returned in one pass.

    Attributes:
        path: of the module, as people know it; "" for the whole model.
        call: which call of that module in the pass, from 0.
        leaf: whether it has no submodules.
        replayed: whether backward ran it (again), for a checkpoint.
        tensors: the floating-point tensors it returned (or all of them, see `Bench.seen`), copied.
    """

    path: str
    call: int
    leaf: bool
    replayed: bool
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Step:
    """One optimizer step of the user's loop, as it was seen.

    Attributes:
        batches: those whose losses were summed into it, in order.
        gradients: what the optimizer was given, by parameter name.
        clipped: whether they had been clipped.
        norm: their norm before that, where it is known.
        clipped_scaled: whether they were clipped while still multiplied by the GradScaler's scale.
        clipped_after: after how many of the batches they were first clipped; None where they were not, or where
            several optimizers are at work.
        changed: what changed between this step and the one before: how much of the former step was left, by name.
    """

    batches: list[Any]
    gradients: dict[str, Tensor]
    clipped: bool = False
    norm: float | None = None
    clipped_scaled: bool = False
    clipped_after: int | None = None
    changed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Resumed:
    """What a run that goes on was given by the one before.

    Attributes:
        steps: those that its optimizers had made; 0 where their state does not say.
        trained: the parameters, by name, that optimizers had state of, or that a checkpoint of a part held.
        first: the first batch that this process was trained on.
    """

    steps: int
    trained: frozenset[str]
    first: Any


@dataclass
class Bench:
    """A model on the bench. Trials change it as they like; the one who runs them puts it back.

    Attributes:
        model: the whole model, as the loop calls it.
        batches: some batches of the training, in the loop's order; what `loss` takes.
        loss_function: `loss(model, batch) -> Tensor`, one number; None where it is not known.
        optimizers: those that hold the model's parameters.
        step: an optimizer step of the user's loop; None where it was not seen.
        not_seen: why not.
        loaders: the loop's DataLoaders, as far as they are known.
        resumed: what the run before left; None for a new one.
        repeatable: whether a pass of a seen step, made again, gives the same loss.
        seed: of the passes that must draw alike.
    """

    model: nn.Module
    batches: Sequence[Any]
    loss_function: Loss | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    step: Step | None = None
    loaders: Sequence[Any] = ()
    resumed: Resumed | None = None
    repeatable: bool = True
    seed: int = 0
    not_seen: str = "the loop was not seen; run flowscope check train.py"
    _calls: dict[int, list[Call]] = field(default_factory=dict)
    _flops: list[int] = field(default_factory=list)

    @property
    def held(self) -> list[Any]:
        """What a pass may change beside the model and its optimizers: the batches, and what the loss refers to."""
        return [self.batches, referred_to(self.loss_function)]

    # -- passes -------------------------------------------------------------------------------------------------------

    def loss(self, batch: Any) -> Tensor:
        """The training loss of a batch, one number with a graph; draws as it comes (see `alike`).

        Raises:
            CannotJudgeError: there is no loss, or it is not one number.
        """
        if self.loss_function is None:
            raise CannotJudgeError("it needs the loss, which is not known here")
        value = self.loss_function(self.model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise CannotJudgeError(f"the loss is {type(value).__name__} of {_sizes(value)}, not one number")
        return value

    @contextlib.contextmanager
    def alike(self, seed: int | None = None) -> Iterator[None]:
        """Passes begun in such a block draw the same random numbers each time; nothing outside notices."""
        seed = self.seed if seed is None else seed
        python, numbers = random.getstate(), np.random.get_state()
        devices = sorted({p.device.index or 0 for p in self.model.parameters() if p.device.type == "cuda"})
        try:
            with torch.random.fork_rng(devices):
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)

    def gradients(self, batch: Any) -> dict[str, Tensor]:
        """Gradients of a batch's loss by parameter name; what gets none is left out. Two of them draw alike.

        What was recorded draws what it drew then.
        """
        parameters = dict(self.model.named_parameters())
        for parameter in parameters.values():
            parameter.grad = None
        with self.alike():
            if (chance := getattr(batch, "chance", None)) is not None:
                torch.set_rng_state(chance)
            self.loss(batch).backward()  # type: ignore[no-untyped-call]
        return {name: p.grad.detach().clone() for name, p in parameters.items() if p.grad is not None}

    def again(self, recorded: Any) -> float:
        """The loss of a recorded pass, made again with what it drew then; NaN where it cannot be made."""
        with put_back(self.model, held=recorded), contextlib.suppress(Exception):
            torch.set_rng_state(recorded.chance)
            return float(self.loss(recorded).detach())
        return math.nan

    def repeats(self, recorded: Any) -> bool:
        """Whether a recorded pass, made again, gives the loss that it gave."""
        again = self.again(recorded)
        return math.isnan(again) or abs(again - recorded.loss) <= SAME * max(abs(again), 1e-12)

    def compare(self, recorded: Any) -> None:
        """Make a recorded pass again: `repeatable` says whether its loss is what it was.

        Where it is far from that and does repeat, what led to it was not recorded as it was: then there is no loss.
        """
        self.repeatable = self.repeats(recorded)
        loss, first, second = recorded.loss, self.again(recorded), self.again(recorded)
        if not self.repeatable and first == second and abs(first - loss) > FAR * max(abs(first), abs(loss)):

            def none(model: nn.Module, batch: Any) -> Tensor:
                raise CannotJudgeError(f"what was recorded gives a loss of {first:.4g} when played, it was {loss:.4g}")

            self.loss_function = none

    def calls(self, number: int = 0) -> list[Call]:
        """How the loss of a batch calls the model, in order.

        Where it never calls the model itself, the calls of the largest part that it does call.

        Raises:
            CannotJudgeError: there is no such batch, or its loss calls no module of the model.
        """
        if number not in self._calls:
            if number >= len(self.batches):
                raise CannotJudgeError(f"it needs {number + 1} batches, there are {len(self.batches)}")
            self._calls[number] = self._listen(self.batches[number])
        if not self._calls[number]:
            raise CannotJudgeError("the loss calls no module of the model")
        return self._calls[number]

    def _listen(self, batch: Any) -> list[Call]:
        outermost: list[Call] = []
        running: list[Call] = []

        def before(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                # copies: a forward may write into what it is given
                given = map_tensors((args, kwargs), _copied) if not running else ((), {})
                running.append(Call(given[0], given[1], None, path))

            return hook

        def after(module: nn.Module, args: Any, output: Any) -> None:
            call = running.pop()
            if not running:
                outermost.append(replace(call, output=map_tensors(output, Tensor.detach)))

        with self._hooked(before, lambda path: after, with_kwargs=True), self.alike():
            self.loss(batch)
        sizes = {c.part: sum(p.numel() for p in self.model.get_submodule(c.part).parameters()) for c in outermost}
        return [call for call in outermost if call.part == max(sizes, key=lambda part: sizes[part])]

    def run(self, call: Call, *, training: bool = False) -> Any:
        """The output for a call, without gradient, drawing alike; `training` False: in evaluation mode."""
        args, kwargs = map_tensors((call.args, call.kwargs), _copied)
        with modes(self.model, lambda module: training), torch.no_grad(), self.alike():
            return self.model.get_submodule(call.part)(*args, **kwargs)

    def look(self, call: Call, *, training: bool = False) -> list[Seen]:
        """What each module returns in `run(call)`."""
        return self.seen(lambda: self.run(call, training=training))

    def seen(self, run: Callable[[], Any], *, whole_numbers: bool = False) -> list[Seen]:
        """What each module returned while `run` ran, in the order they ended (a block after what is in it).

        With `whole_numbers` also tokens, masks and the like.
        """
        seen: list[Seen] = []
        counts: dict[tuple[str, bool], int] = {}

        def listen(path: str) -> Callable[..., None]:
            leaf, shown = not any(True for _ in self.model.get_submodule(path).children()), display_path(path)

            def after(module: nn.Module, args: Any, output: Any) -> None:
                replayed = in_backward()
                call = counts[shown, replayed] = counts.get((shown, replayed), -1) + 1
                found = tuple(_copied(t) for t in nested_tensors(output) if whole_numbers or t.is_floating_point())
                seen.append(Seen(shown, call, leaf, replayed, found))

            return after

        with self._hooked(None, listen):
            run()
        return seen

    @contextlib.contextmanager
    def place(self) -> Iterator[Callable[[], str | None]]:
        """While it is open, what it gives tells the path of the innermost module that is running, or None."""
        running: list[str] = []

        def enter(path: str) -> Callable[..., None]:
            return lambda module, args: running.append(display_path(path))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            running.pop()

        with self._hooked(enter, lambda path: leave):
            yield lambda: running[-1] if running else None

    @contextlib.contextmanager
    def _hooked(
        self,
        before: Callable[[str], Callable[..., Any]] | None,
        after: Callable[[str], Callable[..., Any]],
        *,
        with_kwargs: bool = False,
    ) -> Iterator[None]:
        """Hooks around the forward of each module, made from its path; the one after it runs where it raises, too."""
        handles: list[Any] = []
        for path, module in self.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if before is not None:
                handles.append(module.register_forward_pre_hook(before(path), with_kwargs=with_kwargs))
            handles.append(module.register_forward_hook(after(path), always_call=before is not None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # -- cost ---------------------------------------------------------------------------------------------------------

    @property
    def flops(self) -> int:
        """Floating-point operations in the matrix products of one forward pass; 0 where they cannot be counted."""
        if not self._flops:
            counter = FlopCounterMode(display=False)
            try:
                with self.alike(), counter:
                    self.loss(self.batches[0])
            except Exception:
                return 0
            self._flops.append(int(counter.get_total_flops()))
        return self._flops[0]

    def cut(self) -> Bench:
        """The same with fewer samples in the first batch, two at least, where one pass takes more than `DEAR`."""
        sizes = [x.shape[0] for x in batch_tensors(self.batches[0]) if x.dim()]
        kept = max(2, int(sizes[0] * DEAR / self.flops)) if sizes and self.flops else 0
        if not sizes or not 0 < kept < sizes[0]:
            return self
        smaller = map_batch(self.batches[0], lambda x: x[:kept] if x.dim() and x.shape[0] == sizes[0] else x)
        cut = replace(self, batches=[smaller], _calls={}, _flops=[])
        try:
            with self.alike():
                fits = bool(torch.isfinite(cut.loss(smaller).detach()).all())
        except Exception:  # sizes stand in it as numbers
            return self
        return cut if fits else self


def batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, nested or recorded."""
    held = getattr(batch, "tensors", None)
    return held if isinstance(held, list) else [*nested_tensors(batch)]


def map_batch(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with each tensor changed."""
    return batch.mapped(change) if hasattr(batch, "mapped") else map_tensors(batch, change)


def beyond_rounding(a: Tensor, b: Tensor, steps: float = 64.0) -> bool:
    """Whether two tensors differ by more than rounding: |a - b| > steps * eps * max |a|, or one is not finite alone."""
    if a.shape != b.shape:
        return True
    if a.numel() == 0 or torch.equal(a, b):
        return False
    size, gap = a.abs().double(), (a.double() - b.double()).abs()
    if not bool(torch.isfinite(gap).all()):
        return not torch.equal(torch.isfinite(a), torch.isfinite(b))
    return float(gap.max()) > steps * torch.finfo(a.dtype).eps * max(float(size.max()), torch.finfo(a.dtype).tiny)


def _sizes(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else "no tensor"


def _copied(x: Tensor) -> Tensor:
    return x.detach().clone()
