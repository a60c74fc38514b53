"""When findings become alerts: warm-up, hysteresis, one alert a condition.

Raised once when a condition holds on enough records in a row, resolved once when it has been clearly gone for enough
records. "Clearly" is a second, inner limit (`WatchConfig.release_factor`): a value that wanders around the limit is
*near*, which keeps an alert standing and never raises one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flowscope.config import WatchConfig
from flowscope.detectors.detector import ANY_FLOW, AlertKey, Finding, pack
from flowscope.records import SERIOUS, Alert, Severity

TOLD = ("kind", "severity", "where", "value", "limit", "message", "advice", "flow")
"""What an alert has of the finding that raised it."""


class Cause(NamedTuple):
    """A finding, or a standing alert, that may explain others; `owner` is the name of its detector."""

    owner: str
    kind: str
    flow: str | None
    severity: Severity


@dataclass
class Standing:
    """The count behind one possible alert of one detector: records in a row with the condition, or without it.

    What was a note counts anew as a warning (`serious`).
    """

    owner: str
    run: int = 0
    clean: int = 0
    since: int | None = None
    alert: Alert | None = None
    serious: bool = False


@dataclass
class Ledger:
    """Counts findings per (kind, flow, cause) and says which alerts are newly raised or resolved."""

    config: WatchConfig
    entries: dict[AlertKey, Standing] = field(default_factory=dict)

    @property
    def standing(self) -> list[Alert]:
        """Raised and not resolved."""
        return [entry.alert for entry in self.entries.values() if entry.alert is not None]

    def causes(self, but: str = "") -> Iterator[Cause]:
        """What stands and may explain other findings: warnings and errors of all detectors except `but` (by name)."""
        for entry in self.entries.values():
            if entry.alert is not None and entry.owner != but and entry.alert.severity in SERIOUS:
                yield Cause(entry.owner, entry.alert.kind, entry.alert.flow, entry.alert.severity)

    def update(self, owner: str, findings: Iterable[Finding], step: int) -> list[Alert]:
        """Enter all findings of one detector (by its name) at one step; return what is newly raised or resolved."""
        found = {finding.key: finding for finding in findings}
        told_nothing = any(finding.flow == ANY_FLOW for finding in found.values())
        known = [key for key, entry in self.entries.items() if entry.owner == owner and key not in found]
        out = [alert for key in known if not told_nothing and (alert := self._clean(key, step)) is not None]
        for finding in found.values():
            if finding.level != "unseen":
                out += self._enter(owner, finding, step)
        return out

    def _clean(self, key: AlertKey, step: int) -> Alert | None:
        entry = self.entries[key]
        entry.run, entry.since = 0, None
        entry.clean += 1
        if entry.alert is None:
            del self.entries[key]
            return None
        if entry.clean < self.config.resolve_records:
            return None
        del self.entries[key]
        return dataclasses.replace(entry.alert, step=step, state="resolved")

    def _enter(self, owner: str, finding: Finding, step: int) -> list[Alert]:
        key, serious = finding.key, finding.severity in SERIOUS
        entry = self.entries.setdefault(key, Standing(owner))
        entry.clean = 0
        if finding.level == "near":
            entry.run, entry.since = 0, None
            if entry.alert is None:
                del self.entries[key]
            return []
        if entry.run == 0 or (serious and not entry.serious):
            entry.run, entry.since = 0, step
        entry.run, entry.serious = entry.run + 1, serious
        needed = 1 if finding.immediate else finding.records or self.config.warmup_records
        note = entry.alert
        if (note is not None and (note.severity in SERIOUS or not serious)) or entry.run < needed:
            return []
        told = {name: getattr(finding, name) for name in TOLD}
        entry.alert = Alert(step=step, since=entry.since, **told)
        ended = [] if note is None else [dataclasses.replace(note, step=step, state="resolved")]
        return [*ended, entry.alert]

    def state_dict(self) -> list[dict[str, Any]]:
        """JSON-ready; `load_state_dict` is the inverse."""
        return [{"key": list(key), **pack(dataclasses.asdict(entry))} for key, entry in self.entries.items()]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Take over what `state_dict` returned."""
        self.entries = {}
        for row in state:
            kind, flow, cause = row["key"]
            alert = None if row["alert"] is None else Alert.from_json(row["alert"])
            counts = row["owner"], row["run"], row["clean"], row["since"]
            self.entries[kind, flow, cause] = Standing(*counts, alert, row.get("serious", False))
