"""What the trials found, printable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape

from flowscope.terminal import shown
from flowscope.trials.trial import TrialFinding

ORDER = ("fail", "note", "skipped", "pass")


@dataclass(frozen=True)
class CheckReport:
    """The findings of all trials that ran.

    Attributes:
        findings: in the order they were found; several a trial are possible.
    """

    findings: tuple[TrialFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(finding.status != "fail" for finding in self.findings)

    @property
    def judged(self) -> bool:
        """Whether any trial could judge."""
        return any(finding.status != "skipped" for finding in self.findings)

    @property
    def status(self) -> int:
        """Of the process: 0 right (notes allowed), 1 something failed, 2 nothing could be judged."""
        return 1 if not self.ok else 0 if self.judged else 2

    def json(self) -> str:
        """One array of findings."""
        return json.dumps([asdict(finding) for finding in self.findings], indent=1)

    def _sorted(self) -> Sequence[TrialFinding]:
        return sorted(self.findings, key=lambda finding: ORDER.index(finding.status))

    def __str__(self) -> str:
        """What failed first, then notes, what could not be judged, and what held: trial, verdict, place, sentence.

        Names and messages stand there as text, whatever orders to a terminal they hold.
        """
        from flowscope.model.plan import aligned

        found = self._sorted()
        rows = [[shown(cell) for cell in (f.trial, f.status, f.where or "-", f.message)] for f in found]
        lines = aligned([("trial", "verdict", "place", "what was seen"), *rows])
        out = [lines[0]]
        for line, finding in zip(lines[1:], found, strict=True):
            out += [line, f"    next: {shown(finding.advice)}"] if finding.advice else [line]
        counts = ", ".join(f"{sum(f.status == s for f in self.findings)} {s}" for s in ORDER)
        return "\n".join([*out, counts])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(f.trial)}</td><td><b>{f.status}</b></td><td><code>{escape(f.where)}</code></td>"
            f"<td>{escape(f.message)}{f'<br><i>{escape(f.advice)}</i>' if f.advice else ''}</td></tr>"
            for f in self._sorted()
        )
        head = "<tr><th>trial</th><th>verdict</th><th>place</th><th>what was seen, and what to do next</th></tr>"
        return f"<table>{head}{rows}</table>"
