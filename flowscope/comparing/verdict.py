"""The table of a comparison, and what it recommends with the reason."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowscope.comparing.outcomes import Outcome
from flowscope.model.plan import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = "residual"
SURE = 0.975
"""A difference counts where Student's interval over the seeds (two-sided, 95 %) leaves out 0, ..."""
LEAST = 0.002
"""... and beyond this share of the base line's loss."""


@dataclass(frozen=True)
class Row:
    """One candidate over its seeds.

    Attributes:
        label: its name.
        loss: mean over seeds of the mean over the last tenth of the steps; NaN where a training did not end.
        spread: standard deviation of that over seeds; NaN for one seed.
        gain: mean over seeds of the base line's loss minus this one's, seed by seed.
        gain_error: half of its 95 % interval over seeds (Student); NaN for one seed.
        gradient_product: geometric mean over seeds.
        step_seconds: median.
        saved_bytes: what a step keeps for backward.
        parameters: with the connections.
        error: of the first training that did not end; "" for none.
    """

    label: str
    loss: float
    spread: float
    gain: float
    gain_error: float
    gradient_product: float
    step_seconds: float
    saved_bytes: float
    parameters: int
    error: str

    @property
    def better(self) -> bool:
        """Whether it beats the base line beyond the spread of the seeds."""
        return self.gain > self.gain_error and self.gain > LEAST * abs(self.loss + self.gain)


@dataclass(frozen=True)
class ConnectionComparison:
    """What `compare_connections` returns: print it, or take `.rows`, `.recommended`, `.reason`, `.outcomes`, `.plot`.

    Attributes:
        outcomes: every training.
        steps: of each.
    """

    outcomes: tuple[Outcome, ...]
    steps: int

    @property
    def labels(self) -> list[str]:
        """The candidates, the base line first."""
        return list(dict.fromkeys(outcome.label for outcome in self.outcomes))

    @property
    def seeds(self) -> list[int]:
        """Of the trainings."""
        return list(dict.fromkeys(outcome.seed for outcome in self.outcomes))

    def of(self, label: str) -> list[Outcome]:
        """Return the trainings of a candidate, by seed."""
        return [outcome for outcome in self.outcomes if outcome.label == label]

    @property
    def rows(self) -> list[Row]:
        """The table: one row a candidate, the base line first."""
        base = {outcome.seed: outcome.loss for outcome in self.of(BASE)}
        return [row_of(label, self.of(label), base) for label in self.labels]

    @property
    def recommended(self) -> str:
        """The candidate to take; the base line where none is better."""
        return self._verdict()[0]

    @property
    def reason(self) -> str:
        """Why."""
        return self._verdict()[1]

    def _verdict(self) -> tuple[str, str]:
        base, *others = self.rows
        ended = [row for row in others if math.isfinite(row.loss)]
        if not math.isfinite(base.loss):
            if not ended:
                return BASE, "no training ended with a finite loss: there is nothing to choose between"
            best = min(ended, key=lambda row: row.loss)
            return best.label, f"the plain model did not end with a finite loss ({base.error or 'diverged'}); this did"
        if len(self.seeds) < 2:
            ahead = min(ended, key=lambda row: row.loss, default=base)
            lead = f"; {ahead.label} is ahead by {ahead.gain:.3g}" if ahead.gain > 0 else ""
            return BASE, f"one seed says nothing of chance{lead}: pass seeds=3"
        better = [row for row in ended if row.better]
        if not better:
            return BASE, f"no mode beats it beyond chance over {len(self.seeds)} seeds (95 %)"
        best = max(better, key=lambda row: row.gain)
        alike = [row for row in better if best.gain - row.gain <= max(row.gain_error, best.gain_error)]
        chosen = min(alike, key=lambda row: row.step_seconds)
        size = f"its loss is lower by {chosen.gain:.3g} +- {chosen.gain_error:.2g} over {len(self.seeds)} seeds (95 %)"
        price = f"at {chosen.step_seconds / base.step_seconds:.2f} x the time of a step"
        cheaper = f"; {best.label} is no better beyond chance and slower" if chosen is not best else ""
        return chosen.label, f"{size}, {price}{cheaper}"

    def __str__(self) -> str:
        """The table, then the recommendation."""
        rows, base = self.rows, self.rows[0]
        cells = [("mode", "loss", "gain", "gradient product", "step", "kept for backward", "parameters")]
        for row in rows:
            cells.append(
                (
                    row.label,
                    f"{row.loss:.4f}" + ("" if math.isnan(row.spread) else f" +- {row.spread:.4f}"),
                    "" if row is base else f"{row.gain:+.4f}",
                    f"{row.gradient_product:.2g}",
                    f"{row.step_seconds * 1e3:.1f} ms ({row.step_seconds / base.step_seconds:.2f} x)",
                    size_of(row.saved_bytes),
                    f"{row.parameters:,}",
                )
            )
        head = f"{self.steps} steps, seeds {', '.join(map(str, self.seeds))}; loss: mean of the last tenth"
        failed = [f"{row.label}: {row.error}" for row in rows if row.error]
        return "\n".join([head, *aligned(cells), *failed, f"recommended: {self.recommended}: {self.reason}"])

    def plot(self, path: str | Path | None = None) -> Figure:
        """Return the figure (losses by step, and loss against time); write it where a path is given.

        Needs matplotlib (`pip install flowscope[plot]`).
        """
        from flowscope.comparing.figure import draw

        return draw(self, path)


def student(seeds: int) -> float:
    """Return how many standard errors the interval over so many seeds reaches."""
    from scipy.special import stdtrit

    return float(stdtrit(seeds - 1, SURE))


def size_of(count: float) -> str:
    """Return a number of bytes as text."""
    if math.isnan(count):
        return "nan"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def row_of(label: str, outcomes: Sequence[Outcome], base: dict[int, float]) -> Row:
    """Return a candidate's row."""
    losses = [outcome.loss for outcome in outcomes]
    gains = [base.get(outcome.seed, math.nan) - outcome.loss for outcome in outcomes]
    products = [o.gradient_product for o in outcomes if o.gradient_product > 0]
    several = len(outcomes) > 1 and all(map(math.isfinite, losses))
    paired = several and all(map(math.isfinite, gains))
    return Row(
        label,
        statistics.fmean(losses),
        statistics.stdev(losses) if several else math.nan,
        statistics.fmean(gains),
        student(len(gains)) * statistics.stdev(gains) / math.sqrt(len(gains)) if paired else math.nan,
        math.exp(statistics.fmean(map(math.log, products))) if products else math.nan,
        statistics.median(o.step_seconds for o in outcomes),
        max(outcome.saved_bytes for outcome in outcomes),
        max(outcome.parameters for outcome in outcomes),
        next((outcome.error for outcome in outcomes if outcome.error), ""),
    )
