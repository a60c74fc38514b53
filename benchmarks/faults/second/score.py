"""What a set of rows says about the monitor: found, kind, place, false alarms, and labels that did not hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .program import Program
from .running import Row, figure_text


@dataclass(frozen=True)
class Judged:
    """A row and what it means. For a faulty run the three answers nest: a right place needs a right kind."""

    program: Program
    row: Row

    @property
    def in_time(self) -> list[dict[str, Any]]:
        """The alerts at or after the step at which the fault can first show."""
        return [alert for alert in self.row.alerts if alert["step"] >= self.program.starts]

    @property
    def of_kind(self) -> list[dict[str, Any]]:
        return [alert for alert in self.in_time if alert["kind"] in self.program.kinds]

    @property
    def found(self) -> bool:
        return bool(self.in_time)

    @property
    def right_kind(self) -> bool:
        return bool(self.of_kind)

    @property
    def right_place(self) -> bool:
        return any(re.search(self.program.place, alert["where"] or "") for alert in self.of_kind)

    @property
    def held(self) -> bool:
        """Whether the run bears out its label."""
        return self.row.figure is not None and self.program.holds(self.row.faulty, self.row.figure)

    def line(self) -> str:
        """The run in one line: its figure and its alerts, each kind once with the first step and place."""
        first: dict[str, str] = {}
        for alert in self.row.alerts:
            first.setdefault(alert["kind"], f"{alert['kind']}@{alert['step']}({alert['where'] or '-'})")
        form = "faulty " if self.row.faulty else "healthy"
        error = f"  CRASH {self.row.error.strip().splitlines()[-1]}" if self.row.error else ""
        told = ", ".join(first.values()) or "no alert"
        return f"{self.program.id:32} {form} {self.row.seed} {figure_text(self.row.figure):>9}  {told}{error}"


def judge(programs: Mapping[str, Program], rows: Iterable[Row]) -> list[Judged]:
    return [Judged(programs[row.program], row) for row in rows]


def share(judged: Sequence[Judged], holds: Callable[[Judged], bool]) -> str:
    return f"{sum(map(holds, judged))} of {len(judged)}"


def table(judged: Sequence[Judged]) -> list[str]:
    """The lines that are printed at the end."""
    ended = [j for j in judged if not j.row.error]
    faulty = [j for j in ended if j.row.faulty]
    healthy = [j for j in ended if not j.row.faulty]
    alone = [j for j in healthy if not j.program.fault]
    twins = [j for j in healthy if j.program.fault]
    steps = sum(j.row.steps for j in healthy)
    raised = sum(len(j.row.alerts) for j in healthy)
    lines = [
        f"faulty runs found                {share(faulty, lambda j: j.found)}",
        f"... by a right kind              {share(faulty, lambda j: j.right_kind)}",
        f"... at the right place           {share([j for j in faulty if j.program.place], lambda j: j.right_place)}",
        f"false alarms, healthy programs   {share(alone, lambda j: bool(j.row.alerts))}",
        f"false alarms, healthy twins      {share(twins, lambda j: bool(j.row.alerts))}",
        f"warnings per 1,000 healthy steps {1000 * raised / max(steps, 1):.2f} ({raised} in {steps})",
        f"labels that did not hold         {share(ended, lambda j: not j.held)}",
        f"runs that crashed                {len(judged) - len(ended)} of {len(judged)}",
    ]
    for title, wrong in {
        "missed": [j for j in faulty if not j.found],
        "found, but by another kind": [j for j in faulty if j.found and not j.right_kind],
        "right kind, wrong place": [j for j in faulty if j.right_kind and j.program.place and not j.right_place],
        "false alarms": [j for j in healthy if j.row.alerts],
        "labels that did not hold": [j for j in ended if not j.held],
        "crashed": [j for j in judged if j.row.error],
    }.items():
        if wrong:
            lines += ["", f"{title}:", *(f"  {j.line()}" for j in wrong)]
    return lines
