"""Instruments of a stranger: one that keeps its promises, and one for each way of breaking them."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.instruments import Instrument, PointStatistic, Taken
from flowscope.metrics import Metric

Array = NDArray[np.float64]


class ThirdMoment(PointStatistic):
    """The mean third power of the hidden state's entries."""

    name, unit, scale, columns = "act_third_moment", "", "linear", 2
    words = "Mean third power of the entries: 0 where they are symmetric."

    def sums(self, x: Tensor) -> Tensor:
        cube = x.double() ** 3
        return torch.stack([cube.sum(), torch.full_like(cube.sum(), x.numel())])

    def values(self, rows: Array) -> Array:
        return rows[:, 0] / rows[:, 1]


class Nameless(ThirdMoment):
    name = ""


class Wordless(ThirdMoment):
    name, words = "wordless", ""


class ChangesTraining(ThirdMoment):
    name = "changes_training"

    def sums(self, x: Tensor) -> Tensor:
        x.mul_(1.01)
        return super().sums(x)


class DrawsNumbers(ThirdMoment):
    name = "draws_numbers"

    def sums(self, x: Tensor) -> Tensor:
        random.random()
        return super().sums(x)


class ReadsTheHost(ThirdMoment):
    """A number that is read on the host makes a GPU wait."""

    name = "reads_the_host"

    def sums(self, x: Tensor) -> Tensor:
        return x.new_tensor([float(x.sum().item()), 1.0])


class Branches(ThirdMoment):
    """What is done depends on the numbers: that cuts a compiled model in two."""

    name = "branches"

    def sums(self, x: Tensor) -> Tensor:
        return super().sums(x if x.sum() > 0 else -x)


class WrongShape(ThirdMoment):
    name = "wrong_shape"

    def sums(self, x: Tensor) -> Tensor:
        return super().sums(x)[:1]


class Hooked(Instrument):
    """The mean square of the root's output, by a hook of its own; what the broken ones below are made of."""

    name = "hooked"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("hooked", "Mean square of the model's output.", rows="model"),)

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def attach(self, view: Any, hooks: Any) -> None:
        hooks.after(view.model, self.fuse, self.look, hooks.switch)

    def look(self, module: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.sums = self.added(self.of(output.detach()))

    def of(self, output: Tensor) -> Tensor:
        return torch.stack([output.square().sum(), torch.full_like(output.sum(), output.numel())])

    def added(self, sums: Tensor) -> Tensor:
        return sums if self.sums is None else self.sums + sums

    def take(self) -> Taken | None:
        sums = self.sums
        self.discard()
        return None if sums is None else Taken(self.name, [sums], self.read, "vector")

    def discard(self) -> None:
        self.sums = None

    def read(self, out: Any, host: list[Array]) -> None:
        out.add(self.metrics[0].name, host[0][:1] / host[0][1:], ("",))


class OnlyTheLast(Hooked):
    name = "only_the_last"

    def added(self, sums: Tensor) -> Tensor:
        return sums


class NeverForgets(Hooked):
    name = "never_forgets"

    def discard(self) -> None:
        pass


class CountsEvaluation(Hooked):
    name = "counts_evaluation"

    def look(self, module: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        if not torch.compiler.is_compiling():
            self.sums = self.added(self.of(output.detach()))


class OfOneRank(Hooked):
    name = "of_one_rank"

    def take(self) -> Taken | None:
        taken = super().take()
        return taken and Taken(taken.name, taken.tensors, taken.read)


class Undeclared(Hooked):
    name = "undeclared"

    def read(self, out: Any, host: list[Array]) -> None:
        super().read(out, host)
        out.add("something_else", host[0][:1], ("",))


class Unlabelled(Hooked):
    name = "unlabelled"

    def read(self, out: Any, host: list[Array]) -> None:
        out.add(self.metrics[0].name, host[0], ("",))


class InThePickle(Hooked):
    name = "in_the_pickle"

    def attach(self, view: Any, hooks: Any) -> None:
        super().attach(view, hooks)
        view.model.left_behind = lambda: None


class CountsCheckpointsTwice(Hooked):
    """It hooks a block, which a checkpoint runs twice."""

    name = "counts_twice"

    def attach(self, view: Any, hooks: Any) -> None:
        hooks.before(view.model.blocks[1], self.fuse, self.enter, hooks.switch)

    def enter(self, module: Any, args: tuple[Tensor], kwargs: Any) -> None:
        self.look(module, args, kwargs, args[0])

    def read(self, out: Any, host: list[Array]) -> None:
        out.add(self.metrics[0].name, host[0][:1], ("",))


BROKEN: tuple[tuple[type[Instrument], str], ...] = (
    (Nameless, "check_described"),
    (Wordless, "check_described"),
    (Undeclared, "check_described"),
    (Unlabelled, "check_described"),
    (WrongShape, "check_described"),
    (ChangesTraining, "check_harmless"),
    (DrawsNumbers, "check_harmless"),
    (NeverForgets, "check_steps"),
    (OnlyTheLast, "check_accumulation"),
    (CountsEvaluation, "check_no_grad"),
    (CountsCheckpointsTwice, "check_checkpointing"),
    (InThePickle, "check_copies"),
    (ReadsTheHost, "check_compile"),
    (Branches, "check_compile"),
    (OfOneRank, "check_two_ranks"),
)
