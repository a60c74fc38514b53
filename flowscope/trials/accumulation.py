"""`accumulation`: the gradient of a step is that of one batch of all its samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flowscope.errors import CannotJudgeError
from flowscope.trials.bench import Bench, Step
from flowscope.trials.criteria import CLASSES, Criterion, criteria
from flowscope.trials.trial import Trial, TrialFinding

NEAR = 0.02
"""Ratios this near to each other are equal."""
ALONG = 0.98
"""Gradients with a smaller cosine have other causes than a factor."""


class Weight(NamedTuple):
    """How one micro-batch counts: its loss over the mean of its samples, and the number of these."""

    factor: float
    samples: int


class Accumulation(Trial):
    """Compare what each micro-batch weighs with its samples, and the optimizer's gradients with their sum."""

    name = "accumulation"
    proves = "micro-batches weigh as their samples do, and nothing of an earlier step is in the gradient"
    blind = "loops that it has not seen: it needs the command or a callback"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding: what the weights are instead, or by how much the gradient is another one."""
        step = bench.step
        if step is None:
            raise CannotJudgeError(bench.not_seen)
        if step.clipped_scaled:
            message = "gradients were clipped before the GradScaler unscaled them"
            yield self.failed("", message, "call scaler.unscale_(optimizer) before clip_grad_norm_")
            return
        if self._clipped_early(bench, step):
            message = f"gradients were clipped after {step.clipped_after} of {len(step.batches)} micro-batches"
            advice = "clip once a step, after its last backward"
            yield self.failed("", f"{message}: what came before counts less than what comes after", advice)
            return
        wrong = self._weights(weights_of(bench, step)) if len(step.batches) > 1 else None
        found = wrong or self._gradient(bench, step)
        if found.status == "fail" and not all(map(bench.repeats, step.batches)):
            raise CannotJudgeError(
                "the step's passes do not repeat: weights changed between them, or they draw numbers"
            )
        yield found

    @staticmethod
    def _clipped_early(bench: Bench, step: Step) -> bool:
        """Whether gradients were clipped to which a later micro-batch then added."""
        if step.clipped_after is None or not 0 < step.clipped_after < len(step.batches):
            return False
        earlier, later = (bench.gradients(step.batches[n]) for n in (0, -1))
        return bool(earlier.keys() & later.keys())

    def _weights(self, weights: Sequence[Weight] | None) -> TrialFinding | None:
        """What is wrong with the weights of several micro-batches."""
        if weights is None:
            return None
        k, total = len(weights), sum(one.samples for one in weights)
        right = [one.samples / total for one in weights]
        factors = [one.factor for one in weights]
        if _near(factors, right):
            return None
        for times, words, advice in (
            (k, f"{k} times", f"divide each micro-batch's loss by {k} before backward"),
            (1 / k, f"1/{k} of", "divide by the number of micro-batches once; trainers do it themselves"),
        ):
            if _near(factors, [times / k] * k) or _near(factors, [times * share for share in right]):
                return self.failed("", f"the gradient is {words} that of one batch of the same samples", advice)
        if _near(factors, [1 / k] * k):
            message = f"micro-batches of {min(w.samples for w in weights)} to {max(w.samples for w in weights)} targets"
            advice = "sum the losses, and divide by the count of all their targets (num_items_in_batch)"
            return self.failed("", f"{message} weigh the same, {1 / k:.3g}, unlike in one batch of all of them", advice)
        common = sum(factors)
        if _near(factors, [common * share for share in right]):
            message = (
                f"the gradient is {common:.3g} times that of one batch of the same samples, alike in all micro-batches"
            )
            return self.noted("", message, "right for a loss with a weight, or one that counts targets it leaves out")
        message = f"micro-batches weigh {', '.join(f'{f:.3g}' for f in factors[:4])}, their samples "
        message += ", ".join(f"{share:.3g}" for share in right[:4])
        return self.failed("", message, "let the weights of one step's micro-batches add up to 1")

    def _gradient(self, bench: Bench, step: Step) -> TrialFinding:
        """Whether the optimizer is given the sum of the micro-batches' gradients."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise CannotJudgeError("gradients are averaged over ranks, and only this rank's batches were seen")
        total: dict[str, Tensor] = {}
        last: dict[str, Tensor] = {}
        for batch in step.batches:
            last = bench.gradients(batch)
            for name, gradient in last.items():
                total[name] = total[name] + gradient if name in total else gradient
        shared = [name for name in total if name in step.gradients]
        if not shared:
            raise CannotJudgeError("no parameter has a gradient in both")
        real = torch.cat([step.gradients[name].double().flatten() for name in shared])
        summed = torch.cat([total[name].double().flatten() for name in shared])
        size = step.norm if step.norm is not None else float(real.norm())
        if step.clipped and step.norm is None:
            raise CannotJudgeError("the gradients were changed before the step, and what they were is not known")
        if float(summed.norm()) == 0:
            raise CannotJudgeError("the gradient is 0")
        ratio, cosine = size / float(summed.norm()), float(real @ summed / (real.norm() * summed.norm() + 1e-300))
        if abs(ratio - 1) <= 0.1 and cosine >= ALONG:
            return self.passed(f"the gradient of a step is that of its {len(step.batches)} micro-batches, as one batch")
        message = f"the optimizer's gradient is {ratio:.3g} times that of the step's batches (cosine {cosine:.2f})"
        if len(step.batches) > 1 and self._is_last(last, real, size, shared):
            message = f"the gradient is that of the last of {len(step.batches)} micro-batches alone: {ratio:.3g} times"
            message += f" that of all (cosine {cosine:.2f})"
            return self.failed("", message, "call zero_grad once a step, after optimizer.step(), not once a backward")
        if cosine < ALONG and not bench.repeatable:
            raise CannotJudgeError("the step draws random numbers (dropout) that are not repeated")
        return self.failed("", message, "look for a zero_grad that is missing, or a second backward")

    @staticmethod
    def _is_last(last: dict[str, Tensor], real: Tensor, size: float, names: Sequence[str]) -> bool:
        if any(name not in last for name in names):
            return False
        alone = torch.cat([last[name].double().flatten() for name in names])
        cosine = float(real @ alone / (real.norm() * alone.norm() + 1e-300))
        return cosine >= ALONG and abs(size / (float(alone.norm()) + 1e-300) - 1) <= 0.1


def weights_of(bench: Bench, step: Step) -> list[Weight] | None:
    """What each micro-batch weighs; None where its loss is not one loss function's mean times a factor."""
    weights, targets = [], set()
    if len({getattr(batch, "program", None) for batch in step.batches}) > 1 or _share_a_pass(step):
        return None
    for batch in step.batches:
        loss, found, _ = criteria(bench, batch)
        if len(found) != 1 or (means := _mean_of(found[0])) is None:
            return None
        mean, count = means
        if mean == 0:
            return None
        targets.add(_only_value(found[0].target))
        weights.append(Weight(float(loss.detach()) / mean, count))
    # of true and of made-up samples: two terms of one loss, each over targets of one value
    return None if len(targets) > 1 and None not in targets else weights


def _share_a_pass(step: Step) -> bool:
    """Whether two losses of a step come from one forward pass, whose graph was kept: they are terms of one loss."""
    passes = [id(event) for batch in step.batches for event in getattr(batch, "events", ())]
    return len(set(passes)) < len(passes)


def _only_value(target: Tensor) -> float | None:
    """The value that all targets have; None where they differ."""
    values = target.detach().flatten()
    return float(values[0]) if values.numel() > 1 and bool((values == values[0]).all()) else None


def _mean_of(one: Criterion) -> tuple[float, int] | None:
    """The mean of a loss function over what counts, and the number of that."""
    count = int(one.counted.numel()) if one.kind == CLASSES else one.target.numel()
    if count == 0 or one.given.get("weight") is not None:
        return None
    value = one.value.detach().double()
    if one.given.get("reduction") == "mean":
        return float(value), count
    return float(value.sum()) / count, count


def _near(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(x - y) <= NEAR * abs(y) for x, y in zip(a, b, strict=True))
