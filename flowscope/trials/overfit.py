"""`overfit`: one batch can be learned by heart within fifty steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flowscope.errors import CannotJudgeError
from flowscope.trials.bench import Bench
from flowscope.trials.trial import Trial, TrialFinding

STEPS = 50
FEWEST, AFFORDED = 15, 2.5e11
"""Fewer steps, but so many, where all would take more floating-point operations than this."""
RATES = (3e-3, 3e-4)
"""Of Adam; the second where the first makes the loss rise."""
FALLEN = 0.7
"""Below this share of its start a loss has fallen."""


class Overfit(Trial):
    """Train on one batch with Adam, everything else as it is; a note where the loss does not fall."""

    name = "overfit"
    proves = "the loss of one batch falls when one trains on it: signal reaches the weights"
    blind = "whether it learns anything else; losses that are no measure of progress (adversarial ones)"
    cut = True

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding: how far the loss fell, or which parameters did not move."""
        parameters = {n: p for n, p in bench.model.named_parameters() if p.requires_grad}
        if not parameters:
            raise CannotJudgeError("no parameter is trainable")
        begin = {n: p.detach().clone() for n, p in parameters.items()}
        told = ""
        steps = int(AFFORDED / (3 * bench.flops)) if bench.flops else STEPS  # backward takes two forwards
        steps = max(FEWEST, min(STEPS, steps))
        for rate in RATES:
            with torch.no_grad():
                for n, p in parameters.items():
                    p.copy_(begin[n])
            losses = self._train(bench, list(parameters.values()), rate, steps)
            first, last = losses[0], min(losses[-5:])
            if _fallen(first, last):
                yield self.passed(
                    f"one batch: loss {first:.4g} to {last:.4g} in {len(losses)} steps of Adam at {rate:g}"
                )
                return
            told = f"one batch: loss {first:.4g}, after {len(losses)} steps of Adam at {rate:g} still {last:.4g}"
        told += f"; more than {steps} steps take too long here" if steps < STEPS else ""
        resting = [n for n, p in parameters.items() if torch.equal(p.detach(), begin[n])]
        where = resting[0].rpartition(".")[0] if resting else ""
        more = f"; {len(resting)} parameters did not move, first {resting[0]}" if resting else ""
        advice = "look whether outputs depend on inputs, targets fit the inputs, and the loss has a path to the weights"
        yield self.noted(where, told + more, advice)

    @staticmethod
    def _train(bench: Bench, parameters: list[torch.nn.Parameter], rate: float, steps: int) -> list[float]:
        optimizer = torch.optim.Adam(parameters, rate)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with bench.alike():
                loss = bench.loss(bench.batches[0])
                if not loss.requires_grad:
                    raise CannotJudgeError("the loss has no graph")
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
            if _fallen(losses[0], losses[-1]):
                break
        return losses


def _fallen(first: float, last: float) -> bool:
    return last < first - (1 - FALLEN) * abs(first)
