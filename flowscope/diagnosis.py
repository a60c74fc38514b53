"""From alerts to a story: what came first, what followed. Order tells causes from consequences better than severity.

Plain data only, so that a live scope, `flowscope diagnose`, the panels and the alerts' own messages say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowscope.records import SERIOUS, Alert, Severity
from flowscope.terminal import block

SHOWN = 4
"""How many incidents a story names."""
FIRST = "; first: "
"""What names, in an alert's message, the one that came before it."""
LISTED = 50
"""How many alerts a diagnosis tells in a line of their own."""
RANK: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
"""The most serious first."""


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


def explains(incident: Incident, first: Incident) -> bool:
    """Whether an info may be the cause of what came `first` among the serious: it asks for a cure, and was there.

    One that only describes (layers frozen on purpose) says that nothing is to be done.
    """
    return not incident.alert.advice.startswith("nothing to do") and incident.since <= first.since


def events(alerts: Iterable[Alert]) -> list[Incident]:
    """What a story tells, in order: the serious alerts, and the infos that may have caused the first of them."""
    found = incidents(alerts)
    serious = [incident for incident in found if incident.alert.severity in SERIOUS]
    if not serious:
        return []
    return [one for one in found if one.alert.severity in SERIOUS or explains(one, serious[0])]


def story(alerts: Iterable[Alert]) -> str | None:
    """The order of events in one sentence, "first: ... (step 4); then: ..."; None with fewer than two of them."""
    serious = events(alerts)
    if len(serious) < 2:
        return None
    shown = [str(incident) for incident in serious[:SHOWN]]
    rest = f"; then {len(serious) - SHOWN} more" if len(serious) > SHOWN else ""
    return f"first: {'; then: '.join(shown)}{rest}"


def follows(alert: Alert, standing: Sequence[Alert]) -> str:
    """What a new alert adds to its message when others stand already: "; first: KIND at WHERE (step N)", else ""."""
    earlier = [other for other in standing if other is not alert]
    if alert.severity not in SERIOUS:
        return ""
    own = Incident(alert)
    causes = [one for one in incidents(earlier) if one.alert.severity in SERIOUS or explains(one, own)]
    if not causes:
        return ""
    first = causes[0]
    # of two conditions that began together the one found earlier is the cause
    return f"{FIRST}{first}" if first.since <= Incident(alert).since else ""


def folded(alert: Alert) -> str:
    """The line of a live alert: what followed another stands indented below it, and without advice of its own.

    It is most often mended with what came first; the diagnosis at the end says all.
    """
    message, first, _ = alert.message.partition(FIRST)
    if not first or alert.state == "resolved":
        return str(alert)
    place = f" at {alert.where}" if alert.where else ""
    return f"    then [{alert.severity}] step {alert.step}: {alert.kind}{place}: {message}"


def diagnose(alerts: Iterable[Alert]) -> str:
    """The diagnosis of a run as text for a terminal: the lines of `diagnosis`."""
    return block(diagnosis(alerts))


def diagnosis(alerts: Iterable[Alert]) -> list[str]:
    """The diagnosis of a run in a few lines: the story, its first standing alert in full, the rest folded below it.

    What followed is most often mended with what came first, so its advice is left out. Of many alerts the most serious
    are told, at most `LISTED` of each kind of line.
    """
    found = incidents(alerts)
    standing = [incident for incident in found if incident.resolved is None]
    over = len(found) - len(standing)
    if not standing:
        return ["no alert stands" + (f" ({over} resolved)" if over else "")]
    told = story(incident.alert for incident in found)
    lines = [f"diagnosis: {told}"] if told else []
    chain = events(incident.alert for incident in standing)
    lines += [str(chain[0].alert)] if chain else []
    lines += _listed([f"  then {one}: {one.alert.message}" for one in most_serious(chain[1:], LISTED)], len(chain) - 1)
    linked = {id(one.alert) for one in chain}
    beside = [one for one in standing if id(one.alert) not in linked]
    lines += _listed([str(one.alert) for one in most_serious(beside, LISTED)], len(beside))
    if told and len(chain) > 1:
        lines.append(f"begin with {chain[0]}")
    return lines + ([f"({over} more were raised and resolved)"] if over else [])


def most_serious(found: Sequence[Incident], count: int) -> list[Incident]:
    """At most so many incidents in their order: what stands before what is resolved, then the most serious, the first.

    Args:
        found: in the order of a story.
        count: how many.
    """
    ranked = sorted(range(len(found)), key=lambda at: (found[at].resolved is not None, RANK[found[at].alert.severity]))
    return [found[at] for at in sorted(ranked[:count])]


def _listed(lines: list[str], of: int) -> list[str]:
    return lines + ([f"  ... and {of - len(lines)} more"] if of > len(lines) else [])
