"""The rules of the tools people could use instead, as their sources or documents state them, on plain numbers.

Re-stated, not copied: patience and intervals are simplified to one probe every ten steps. Each function goes over the
probes of a run and yields (step, kind, where), kinds in our words. Limits:

- AUTOTRAINER (defaults of its monitor): after 30 % of the run and while accuracy stays below .7; blind without one.
- SageMaker Debugger's built-in rules (their documentation; the implementation is not public).
- DeepDiagnosis (its callbacks), without the rules that judge a constant of the program (rate, input range).
- TheDeepChecker (its settings).
- naive: a value that is not finite, or a gradient norm ten times the running median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.faults.numbers_seen import Layer, Probe

Alarm = tuple[int, str, str]
Rule = Callable[[list[Probe], int, int], Iterator[Alarm]]
VANISHING, EXPLODING, DEAD = "vanishing_gradient", "exploding_gradient", "dead_units"


def hidden(probe: Probe) -> list[Layer]:
    """The activations, without the last layer."""
    return [layer for layer in probe.layers if layer.kind != "Linear"]


def autotrainer(probes: list[Probe], steps: int, epoch: int) -> Iterator[Alarm]:
    """VG, GE, DR, OL, SC and NaN."""
    best, accuracies = -math.inf, []
    for probe in probes:
        if not probe.finite or probe.loss >= 1e3:
            yield probe.step, "non_finite" if not probe.finite else EXPLODING, ""
            return
        if probe.accuracy is None:
            continue
        accuracies.append(probe.accuracy)
        best = max(best, probe.accuracy)
        if probe.step < 0.3 * steps or best >= 0.7 or len(probe.matrices) < 2:
            continue
        first, last = probe.matrices[0], probe.matrices[-1]
        ratio = first.grad_norm / last.grad_norm if last.grad_norm else 0.0
        if ratio < 1e-3 and first.grad_norm < 1e-4:
            yield probe.step, VANISHING, first.name
        if ratio > 70:
            yield probe.step, EXPLODING, first.name
        zeros = [w.grad_zero for w in probe.matrices]
        if np.mean(zeros) >= 0.7:
            yield probe.step, DEAD, ""
        swings = np.abs(np.diff(accuracies)) >= 0.03
        turns = (
            np.sum(np.sign(np.diff(accuracies))[1:] * np.sign(np.diff(accuracies))[:-1] < 0) if len(swings) > 1 else 0
        )
        if turns >= 0.2 * max(5, steps / epoch) and swings.sum() >= turns:
            yield probe.step, "loss_plateau", ""
        if len(accuracies) > 3 and max(np.abs(np.diff(accuracies[-4:]))) < 0.01:
            yield probe.step, "loss_plateau", ""


def debugger(probes: list[Probe], steps: int, epoch: int, *, loss_rule: bool = True) -> Iterator[Alarm]:
    """SageMaker Debugger's rules."""
    for k, probe in enumerate(probes):
        if not probe.finite:
            yield probe.step, "non_finite", ""
        yield from _debugger_weights(probe)
        for layer in hidden(probe):
            if layer.kind == "ReLU" and layer.inactive > 0.5:
                yield probe.step, DEAD, layer.name
            if layer.saturated > 0.5:
                yield probe.step, "saturation", layer.name
        if k == 5 and _poorly_initialised(probe):
            yield probe.step, VANISHING, ""
        if loss_rule and k and not probe.loss < probes[k - 1].loss * (1 - 1e-3):
            yield probe.step, "loss_plateau", ""


def _debugger_weights(probe: Probe) -> Iterator[Alarm]:
    for w in probe.weights:
        if w.grad_mean is not None and w.grad_mean < 1e-7:
            yield probe.step, VANISHING, w.name
        if w.is_matrix and w.update > 10:
            yield probe.step, "update_too_large", w.name
        if w.is_matrix and w.update < 1e-8:
            yield probe.step, "update_too_small", w.name


def _poorly_initialised(probe: Probe) -> bool:
    matrices = probe.matrices
    variances = [w.variance for w in matrices]
    spread = len(matrices) > 1 and max(variances) > 10 * min(variances)
    return spread and all((w.grad_spread or 0.0) < 1e-3 for w in matrices)


def debugger_without_loss(probes: list[Probe], steps: int, epoch: int) -> Iterator[Alarm]:
    """The same without LossNotDecreasing, which fires on every run of mini-batches."""
    return debugger(probes, steps, epoch, loss_rule=False)


def deepdiagnosis(probes: list[Probe], steps: int, epoch: int) -> Iterator[Alarm]:
    """Dead, saturated, vanishing, numerical, variance, unchanged, accuracy."""
    accuracies: list[float] = []
    for probe in probes:
        if not probe.finite:
            yield probe.step, "non_finite", ""
            continue
        yield from _off(probe, lambda layer: layer.nonpositive >= 0.7, 0.5)
        for w in probe.matrices:
            if w.grad_mean < 1e-7:
                yield probe.step, VANISHING, w.name
            if w.grad_norm == 0:
                yield probe.step, "non_finite", w.name  # their "numerical": NaN, inf or a mean of 0
            if w.variance > 10:
                yield probe.step, EXPLODING, w.name
            if w.variance < 1e-5:
                yield probe.step, VANISHING, w.name
            if w.same:
                yield probe.step, "update_too_small", w.name
        accuracies += [] if probe.accuracy is None else [probe.accuracy]
        if len(accuracies) >= 5 and np.ptp(accuracies[-5:]) == 0:
            yield probe.step, "loss_plateau", ""


def _off(probe: Probe, dead: Callable[[Layer], bool], saturated: float) -> Iterator[Alarm]:
    """Dead rectifiers and saturated sigmoids."""
    for layer in hidden(probe):
        if layer.kind == "ReLU" and dead(layer):
            yield probe.step, DEAD, layer.name
        if layer.kind in ("Tanh", "Sigmoid") and layer.saturated5 > saturated:
            yield probe.step, "saturation", layer.name


PATIENCE = 5


class Patience:
    """Whether a condition has held at five probes in a row."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def __call__(self, name: str, holds: bool) -> bool:
        self.held[name] = self.held.get(name, 0) + 1 if holds else 0
        return self.held[name] >= PATIENCE


def deepchecker(probes: list[Probe], steps: int, epoch: int, *, everything: bool = True) -> Iterator[Alarm]:
    """Units, gradients, updates, weights, divergence; with `everything` also spread of activations and stagnation."""
    history: dict[str, list[float]] = {}
    patient, least = Patience(), math.inf
    for k, probe in enumerate(probes):
        if not probe.finite:
            yield probe.step, "non_finite", ""
            continue
        yield from _off(probe, lambda layer: layer.dead > 0.5, 0.85)
        yield from _gradients(probe, history)
        yield from _updates(probe, patient)
        if patient("divergence", probe.loss > 2 * least):
            yield probe.step, "loss_spike", ""
        if everything:
            for layer in hidden(probe):
                if patient(f"spread {layer.name}", not 0.5 <= layer.std <= 2):
                    yield probe.step, "representation_collapse" if layer.std < 0.5 else EXPLODING, layer.name
            if k >= PATIENCE and probe.loss > 0.95 * probes[k - PATIENCE].loss:
                yield probe.step, "loss_plateau", ""
        least = min(least, probe.loss)


def _updates(probe: Probe, patient: Patience) -> Iterator[Alarm]:
    for w in probe.matrices:
        if w.update == 0 or patient(f"small {w.name}", w.update < 1e-4):
            yield probe.step, "update_too_small", w.name
        if patient(f"large {w.name}", w.update > 0.1):
            yield probe.step, "update_too_large", w.name
        if w.tiny > 0.95:
            yield probe.step, DEAD, w.name


def _gradients(probe: Probe, history: dict[str, list[float]]) -> Iterator[Alarm]:
    for w in probe.matrices:
        seen = history.setdefault(w.name, [])
        seen.append(w.grad_mean)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.array(seen[-4:]) / np.array(seen[-5:-1]) if len(seen) >= 5 else np.array([])
        if w.grad_mean < 1e-6 or (len(ratios) == 4 and bool((ratios <= 0.5).all())):
            yield probe.step, VANISHING, w.name
        if w.grad_mean > 1e6 or (len(ratios) == 4 and bool((ratios >= 2).all())):
            yield probe.step, EXPLODING, w.name


def deepchecker_calm(probes: list[Probe], steps: int, epoch: int) -> Iterator[Alarm]:
    """The same without the spread of activations and stagnation."""
    return deepchecker(probes, steps, epoch, everything=False)


def naive(probes: list[Probe], steps: int, epoch: int) -> Iterator[Alarm]:
    """A value that is not finite, or a jump of the gradient norm."""
    norms: list[float] = []
    for probe in probes:
        if not probe.finite:
            yield probe.step, "non_finite", ""
            continue
        norm = math.sqrt(sum(w.grad_norm**2 for w in probe.weights if w.grad_norm is not None))
        if norms and norm > 10 * float(np.median(norms)):
            yield probe.step, EXPLODING, ""
        norms.append(norm)


RULES: dict[str, Rule] = {
    "AUTOTRAINER": autotrainer,
    "SageMaker Debugger": debugger,
    "SageMaker Debugger without LossNotDecreasing": debugger_without_loss,
    "DeepDiagnosis": deepdiagnosis,
    "TheDeepChecker": deepchecker,
    "TheDeepChecker without act-std, stagnation": deepchecker_calm,
    "NaN or 10 x gradient norm": naive,
}


def apply(name: str, probes: list[Probe], steps: int, epoch: int) -> list[Alarm]:
    """The first alarm of each kind."""
    first: dict[str, Alarm] = {}
    for step, kind, where in RULES[name](probes, steps, epoch):
        first.setdefault(kind, (step, kind, where))
    return sorted(first.values())
