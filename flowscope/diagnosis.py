"""From alerts to a story: what came first, what followed. Order tells causes from consequences better than severity.

Plain data only, so that a live scope, `flowscope diagnose`, the panels and the alerts' own messages say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowscope.records import SERIOUS, Alert

SHOWN = 4
"""How many incidents a story names."""


@dataclass(frozen=True)
class Incident:
    """One alert from raised to resolved; `resolved` is None while it stands."""

    alert: Alert
    resolved: int | None = None

    @property
    def since(self) -> int:
        """The step at which the condition first held."""
        return self.alert.step if self.alert.since is None else self.alert.since

    def __str__(self) -> str:
        """Kind, place and step."""
        place = f" at {self.alert.where}" if self.alert.where else ""
        return f"{self.alert.kind}{place} (step {self.since})"


def paired(alerts: Iterable[Alert]) -> list[Incident]:
    """Pair raised with resolved alerts; in the order in which they were raised."""
    out: list[Incident] = []
    standing: dict[tuple[str, str | None, str], int] = {}
    for alert in alerts:
        condition = alert.kind, alert.flow, alert.where
        if alert.state == "raised":
            standing[condition] = len(out)
            out.append(Incident(alert))
        elif (number := standing.pop(condition, None)) is not None:
            out[number] = Incident(out[number].alert, alert.step)
    return out


def incidents(alerts: Iterable[Alert]) -> list[Incident]:
    """The pairs in the order in which the conditions began.

    Conditions of one step keep the order in which the detectors ask: a cause before what it explains.
    """
    return sorted(paired(alerts), key=lambda incident: incident.since)


def story(alerts: Iterable[Alert]) -> str | None:
    """The order of events in one sentence, "first: ... (step 4); then: ..."; None with fewer than two serious alerts.

    Infos are left out: they describe, they do not explain.
    """
    serious = [incident for incident in incidents(alerts) if incident.alert.severity in SERIOUS]
    if len(serious) < 2:
        return None
    shown = [str(incident) for incident in serious[:SHOWN]]
    rest = f"; then {len(serious) - SHOWN} more" if len(serious) > SHOWN else ""
    return f"first: {'; then: '.join(shown)}{rest}"


def follows(alert: Alert, standing: Sequence[Alert]) -> str:
    """What a new alert adds to its message when others stand already: "; first: KIND at WHERE (step N)", else ""."""
    earlier = [other for other in standing if other is not alert and other.severity in SERIOUS]
    if alert.severity not in SERIOUS or not earlier:
        return ""
    first = incidents(earlier)[0]
    # of two conditions that began together the one found earlier is the cause
    return f"; first: {first}" if first.since <= Incident(alert).since else ""


def diagnose(alerts: Iterable[Alert]) -> str:
    """The diagnosis of a run in a few lines: the story, each standing alert in full, and where to begin."""
    found = incidents(alerts)
    standing = [incident for incident in found if incident.resolved is None]
    over = len(found) - len(standing)
    if not standing:
        return "no alert stands" + (f" ({over} resolved)" if over else "")
    told = story(incident.alert for incident in found)
    lines = [f"diagnosis: {told}"] if told else []
    lines += [str(incident.alert) for incident in standing]
    serious = [incident for incident in standing if incident.alert.severity in SERIOUS]
    if told and len(serious) > 1:
        lines.append(f"begin with {serious[0]}: {serious[0].alert.advice}")
    return "\n".join(lines + ([f"({over} more were raised and resolved)"] if over else []))
