"""The published rules on the same runs: AUTOTRAINER and DeepDiagnosis (`benchmarks.faults.rules`), and DeepFD.

DeepFD (Cao et al., ICSE 2022; its monitor's thresholds) is no rule but a classifier: signs of a run, summed up, and
three voters, nearest neighbours, a tree and a forest. Here as there it learns from mutants, and never from the program
it is asked about: for the decoder from the encoder's runs, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.faults import rules
from benchmarks.faults.numbers_seen import Probe
from benchmarks.rivals.answers import SILENT, Answer

RULES = ("AUTOTRAINER", "DeepDiagnosis")
STEPS_AN_EPOCH = 20


def ruled(name: str, probes: list[Probe], steps: int) -> Answer:
    """Return the first alarm of a rule set."""
    alarms = rules.apply(name, probes, steps, STEPS_AN_EPOCH)
    return Answer(True, alarms[0][2], alarms[0][1], alarms[0][0]) if alarms else SILENT


SIGNS = (
    "not converged",
    "swings",
    "loss not finite",
    "accuracy stands",
    "gradient zeros",
    "gradient vanishes",
    "gradient explodes",
    "gradient not finite",
    "large weight",
    "weight not finite",
    "accuracy fell",
    "loss rose",
    "means of weights stand",
    "spreads of weights stand",
    "loss",
    "accuracy",
)


def signs(probes: Sequence[Probe]) -> list[list[float]]:
    """Return the signs at each probe, in the order of `SIGNS`; limits as its monitor has them."""
    rows, accuracies, losses = [], [], []
    for before, probe in zip([None, *probes], probes, strict=False):
        losses.append(probe.loss)
        accuracies += [] if probe.accuracy is None else [probe.accuracy]
        steps = np.diff(accuracies)
        matrices = probe.matrices or [None]
        first, last = matrices[0], matrices[-1]
        ratio = first.grad_norm / last.grad_norm if first and last.grad_norm else 1.0
        zeros = np.mean([w.grad_zero for w in probe.matrices]) if probe.matrices else 0.0
        rows.append(
            [
                max(accuracies, default=1.0) < 0.7,
                np.sum(np.abs(steps) >= 0.03) >= 0.2 * max(1, len(accuracies)),
                not math.isfinite(probe.loss) or probe.loss >= 1e5,
                len(steps) > 0 and steps.max() < 0.01,
                zeros >= 0.7,
                ratio < 1e-3 and bool(first) and first.grad_norm < 1e-4,
                ratio > 70,
                any(not w.grad_finite for w in probe.weights),
                any(w.largest > 5 for w in probe.weights),
                any(not w.finite for w in probe.weights),
                len(steps) > 0 and steps[-1] < 0,
                len(losses) > 1 and losses[-1] > losses[-2],
                stand(before, probe, "norm"),
                stand(before, probe, "variance"),
                probe.loss,
                accuracies[-1] if accuracies else 0.0,
            ]
        )
    return [[float(value) for value in row] for row in rows]


def stand(before: Probe | None, probe: Probe, number: str) -> int:
    """Return how many weights have the same number as at the probe before."""
    pairs = zip(before.weights, probe.weights, strict=False) if before is not None else ()
    return sum(getattr(last, number) == getattr(now, number) for last, now in pairs)


def summary(probes: Sequence[Probe]) -> np.ndarray:
    """Return one vector a run: of each sign its mean, spread, last value, minimum and maximum over the probes."""
    table = np.nan_to_num(np.array(signs(probes)), nan=1e3, posinf=1e3, neginf=-1e3).clip(-1e3, 1e3)
    return np.concatenate([table.mean(0), table.std(0), table[-1], table.min(0), table.max(0)])


class DeepFD:
    """The three classifiers, taught by the runs of another program.

    Args:
        runs: their probes.
        faulty: whether each is.
    """

    def __init__(self, runs: Sequence[Sequence[Probe]], faulty: Sequence[bool]) -> None:
        from sklearn.ensemble import RandomForestClassifier
        from sklearn.neighbors import KNeighborsClassifier
        from sklearn.tree import DecisionTreeClassifier

        self.voters = [
            KNeighborsClassifier(n_neighbors=min(5, len(runs))),
            DecisionTreeClassifier(random_state=0),
            RandomForestClassifier(random_state=0),
        ]
        table = np.stack([summary(run) for run in runs])
        for voter in self.voters:
            voter.fit(table, np.array(faulty))

    def __call__(self, probes: Sequence[Probe]) -> Answer:
        """Return what at least two of the three say; it names no place."""
        votes = sum(bool(voter.predict(summary(probes)[None])[0]) for voter in self.voters)
        return Answer(True, words=f"{votes} of 3 votes") if votes >= 2 else SILENT
