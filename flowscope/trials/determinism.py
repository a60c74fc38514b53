"""`determinism`: the same step twice from the same state gives the same numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flowscope.trials.bench import Bench, Seen
from flowscope.trials.kept import put_back
from flowscope.trials.layout import first_that_differs
from flowscope.trials.trial import Trial, TrialFinding


class Determinism(Trial):
    """Run a batch's loss and backward twice from the same state and the same random state."""

    name = "determinism"
    proves = "a step repeated from the same state gives the same loss and gradients, to the last bit"
    blind = "steps that differ only on other devices, with other threads, or after many steps"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding: the first module whose output differs, or the parameter whose gradient does."""
        first, second = self._pass(bench), self._pass(bench)
        for a, b in zip(first[0], second[0], strict=False):
            if a.path != b.path or not all(torch.equal(x, y) for x, y in zip(a.tensors, b.tensors, strict=False)):
                message = f"the same batch, weights and random state gave another output, first at {a.path or 'model'}"
                yield self.noted(a.path, message, "look there for state kept between calls, or an atomic add on a GPU")
                return
        for name, gradient in first[1].items():
            if name not in second[1] or not torch.equal(gradient, second[1][name]):
                message = f"the forward pass repeats to the last bit, the gradient does not, first at {name}"
                advice = (
                    "look for a checkpoint that draws anew, buffers that a forward changes, or an atomic add on a GPU"
                )
                yield self.noted(name, message, advice)
                return
        if (where := self._left_behind(bench)) is not None:
            message = (
                f"what a pass leaves behind changes the next one of the same batch, first at {where or 'the model'}"
            )
            advice = "right for a recurrent state that is carried on; else clear the cache there before each batch"
            yield self.noted(where, message, advice)
            return
        yield self.passed("loss and gradients repeat to the last bit")

    @staticmethod
    def _left_behind(bench: Bench) -> str | None:
        """Where the second of two passes differs, though no buffer did change: it is kept in plain attributes."""

        def buffers() -> list[torch.Tensor]:
            return [b.detach().clone() for b in bench.model.buffers()]

        def seen() -> list[Seen]:
            with bench.alike(), torch.no_grad():
                return bench.seen(lambda: bench.loss(bench.batches[0]))

        before, first = buffers(), seen()
        if not all(map(torch.equal, before, buffers())):
            return None
        differing = first_that_differs(first, seen(), lambda x: x)
        return None if differing is None else differing.path

    @staticmethod
    def _pass(bench: Bench) -> tuple[Any, Any]:
        gradients: dict[str, torch.Tensor] = {}
        with put_back(bench.model, list(bench.optimizers), bench.held):
            seen = bench.seen(lambda: gradients.update(bench.gradients(bench.batches[0])), whole_numbers=True)
        return seen, gradients
