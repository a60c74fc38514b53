"""`recomputation`: what a checkpoint computes again in backward equals what it computed first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flowscope.errors import CannotJudgeError
from flowscope.model.nested import nested_tensors
from flowscope.torch_internals import in_backward
from flowscope.trials.bench import Bench, Seen
from flowscope.trials.kept import put_back
from flowscope.trials.trial import Trial, TrialFinding

DRAWS = ("dropout", "bernoulli", "rand", "normal", "uniform", "multinomial", "exponential")
"""Functions of torch that draw random numbers have one of these in their names."""


class Recomputation(Trial):
    """Compare module outputs and drawn numbers of the pass in backward with those of the first pass."""

    name = "recomputation"
    proves = "the replayed forward of each checkpoint is the forward that the loss came from"
    blind = "what happens between modules and draws no random numbers; the trial `gradient` sees that"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding: the first module, in the order of the replay, that came out otherwise."""
        draws = _Draws()
        with draws:
            seen = bench.seen(lambda: bench.gradients(bench.batches[0]))
        replayed = [one for one in seen if one.replayed]
        first = {(one.path, one.call): one for one in seen if not one.replayed}
        if not replayed:
            raise CannotJudgeError("backward runs no module again: nothing is checkpointed")
        order = [*first]
        changed = [one for one in replayed if not _equal(first.get((one.path, one.call), one), one)]
        if changed:
            # backward replays the last block first
            one = min(changed, key=lambda one: order.index((one.path, one.call)))
            yield self._failed(_block(one), one.path)
            return
        if draws.new_in_backward:
            yield self._failed(_block(replayed[0]), "a function that draws random numbers")
            return
        if (twice := _changed_again(bench)) is not None:
            message = f"backward's replay changes {twice} once more: each batch counts twice there"
            yield self.noted(
                twice.rpartition(".")[0], message, "leave layers with running statistics out of checkpoints"
            )
            return
        yield self.passed(f"{len(replayed)} modules ran again in backward, each with the result of its first run")

    def _failed(self, block: str, inner: str) -> TrialFinding:
        return self.failed(
            block,
            f"the replayed forward of {block} differs from the first (at {inner}): gradients belong to another pass",
            "checkpoint with preserve_rng_state=True, and let the block change no state that it reads",
        )


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which random numbers forward passes drew, and whether a replay drew any that were not among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn: Counter[tuple[Any, ...]] = Counter()
        self.new_in_backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; note what it drew."""
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2]
        if any(word in name for word in DRAWS) and "backward" not in name:
            backward = in_backward()
            for x in nested_tensors(result):
                key = (tuple(x.shape), x.dtype, hash(tuple(x.detach().double().flatten()[:4096].tolist())))
                self._drawn[key] += 0 if backward else 1
                self.new_in_backward += backward and not self._drawn[key]
        return result


def _changed_again(bench: Bench) -> str | None:
    """The first floating-point buffer that is another one after backward than after the forward pass."""

    def after(run: Callable[[Any], object]) -> dict[str, Tensor]:
        with put_back(bench.model), bench.alike():
            run(bench.batches[0])
            return {n: b.detach().clone() for n, b in bench.model.named_buffers() if b.is_floating_point()}

    once, whole = after(bench.loss), after(lambda batch: bench.loss(batch).backward())  # type: ignore[no-untyped-call]
    return next((n for n, b in once.items() if n in whole and not torch.allclose(b, whole[n], equal_nan=True)), None)


def _equal(a: Seen, b: Seen) -> bool:
    return len(a.tensors) == len(b.tensors) and all(map(_same, a.tensors, b.tensors))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def _block(one: Seen) -> str:
    """The numbered block that a module lies in, else the module: that is what people checkpoint."""
    parts = one.path.split(".")
    numbered = next((n for n, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: numbered + 1])
