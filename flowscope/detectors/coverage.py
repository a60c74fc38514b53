"""What silence covers: which numbers a run has, which kinds of alert could be judged by them, and what was left out.

"No alert" says something only together with this: a detector that never saw its numbers is silent, and so is one that
yields to an alert that stands, or is muted. `Coverage` takes down what the detectors say anyway ("unseen" findings,
causes) and knows none of them by name; its line ends what people read of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from flowscope.detectors.detector import Flags
from flowscope.records import Alert, Array, Record, RunHeader, metric_key, split_key

BEGINS = "coverage:"
"""How the line begins."""
GRADIENTS = {"grad_norm": "points of {flow}", "param_grad_norm": "parameters"}
"""The metrics that tell where a gradient was seen, and what their rows are."""
NAMED = 8
"""So many kinds are named in one place."""


class Said(NamedTuple):
    """What a detector found and nobody was told of: its kind, place, value and limit."""

    kind: str
    where: str
    value: float
    limit: float

    def __str__(self) -> str:
        """The kind, and how far beyond the limit where it is a number."""
        place = f" at {self.where}" if self.where else ""
        if not np.isfinite([self.value, self.limit]).all():
            return f"{self.kind}{place}"
        side = "below" if self.value < self.limit else "above"
        return f"{self.kind}{place} ({self.value:.4g}, {side} its limit {self.limit:.4g})"


class Mute:
    """Patterns of alerts that nobody wants to hear of.

    Args:
        patterns: "KIND" or "KIND:WHERE" as in an alert, where * matches anything; "KIND:" is the model as a whole.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._parted = [pattern.partition(":") for pattern in patterns]

    def takes(self, kind: str, where: str) -> str | None:
        """The pattern that mutes an alert of this kind at this place, None where none does."""
        for pattern, (kinds, colon, places) in zip(self.patterns, self._parted, strict=True):
            if fnmatchcase(kind, kinds) and (not colon or fnmatchcase(where, places)):
                return pattern
        return None

    def unknown(self, kinds: Iterable[str]) -> list[str]:
        """The patterns that name none of these kinds."""
        known = [*kinds]
        parted = zip(self.patterns, self._parted, strict=True)
        return [pattern for pattern, (kind, *_) in parted if not any(fnmatchcase(k, kind) for k in known)]


class Coverage:
    """What became of the records of one run.

    Attributes:
        records: how many were judged.
        losses: of how many the loss was given.
        told: kind -> on how many records its detector could tell.
        present: the kinds of which some number was in a record.
        seen: key of a metric in `GRADIENTS` -> which rows ever had a gradient other than 0.
        yielded: what was found in the last record and is explained by another alert -> that alert's kind.
        spoilt: the kind that keeps all others from being asked about the last record, "" where none does.
        profiles: key of a metric with a lower and an upper limit -> its last values.
        muted: pattern -> the last of what it kept from being told.
        notes: what the last record says could not be measured.
    """

    def __init__(self, kinds: Iterable[str] = (), mute: Sequence[str] = ()) -> None:
        self.mute = Mute(mute)
        self.records = self.losses = 0
        self.told = dict.fromkeys(kinds, 0)
        self.present: set[str] = set()
        self.seen: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
        self.yielded: dict[Said, str] = {}
        self.spoilt = ""
        self.profiles: dict[str, Array] = {}
        self.muted: dict[str, Said] = {}
        self.notes: tuple[str, ...] = ()

    def begin(self, record: Record) -> None:
        """A record is about to be judged."""
        self.yielded, self.spoilt = {}, ""
        if "unsampled" in record.flags:
            return
        self.records += 1
        self.losses += record.loss is not None
        self.notes = record.notes
        for key, values in record.metrics.items():
            if values.ndim != 1 or (spec := record.specs.get(split_key(key)[0])) is None:
                continue
            if len(spec.limits) == 2:
                self.profiles[key] = values
            if split_key(key)[0] in GRADIENTS:
                arrived = self._arrived(key, record, values)
                earlier = self.seen.get(key)
                self.seen[key] = arrived if earlier is None or len(earlier) != len(arrived) else earlier | arrived

    @staticmethod
    def _arrived(key: str, record: Record, values: Array) -> Flags:
        """Where a gradient came: one of exactly 0 teaches nothing, and what is frozen may carry an old one."""
        name, flow = split_key(key)
        other = "param_trainable" if name == "param_grad_norm" else metric_key("backward_calls", flow)
        sure = record.metrics.get(other)
        known: Flags = ~np.isnan(values)
        if sure is not None and len(sure) == len(values):
            # at a point a norm that is NaN may be that of a gradient that is
            known = known & (sure == 1) if name == "param_grad_norm" else sure > 0
        seen: Flags = known & (values != 0)
        return seen

    def heard(self, kind: str, shown_by: Iterable[str], record: Record, *, told: bool | None) -> None:
        """A detector has looked at a record.

        Args:
            kind: of its alerts.
            shown_by: the metrics that show them.
            record: the one it looked at.
            told: whether it could tell; None where it said nothing: then its numbers say whether it looked at any. One
                that names none, as it judges losses, says so where it cannot tell.
        """
        metrics = tuple(shown_by)
        if not metrics or any(metric in record.metrics for metric in metrics):
            self.present.add(kind)
            told = True if told is None else told
        self.told[kind] += bool(told)

    def kept_back(self, found: Said, cause: str) -> None:
        """What was found is explained by an alert of another kind."""
        self.yielded[found] = cause

    def mutes(self, found: Said) -> bool:
        """Whether nobody is to hear of what was found."""
        pattern = self.mute.takes(found.kind, found.where)
        if pattern is not None:
            self.muted[pattern] = found
        return pattern is not None

    # -- the line -----------------------------------------------------------------------------------------------------

    def line(self, header: RunHeader, standing: Iterable[Alert] = (), failed: Iterable[str] = ()) -> str:
        """The line: what was seen and judged, what could not be and why, who yielded, what is muted.

        Args:
            header: of the run.
            standing: the alerts that stand.
            failed: the parts that are switched off because they failed.
        """
        parts = self._parts(header, standing) if self.records else ("nothing was seen, so nothing is judged",)
        off = [f"switched off: {_few(names)}"] if (names := [*failed]) else []
        return f"{BEGINS} {'; '.join([*parts, *off])}"

    def _parts(self, header: RunHeader, standing: Iterable[Alert]) -> Iterator[str]:
        judged = [kind for kind, count in self.told.items() if count]
        yield f"{self.records} records"
        yield self._loss()
        if arrived := self._gradients(header):
            yield f"gradients at {' and '.join(arrived)}"
        yield f"{len(judged)} of {len(self.told)} kinds of alert judged"
        yield from self._not_judged()
        if self.spoilt:
            yield f"while {self.spoilt} stands nothing else is judged"
        told = {alert.kind for alert in standing}
        yielded = {found: cause for found, cause in self.yielded.items() if found.kind not in told}
        for cause in dict.fromkeys(yielded.values()):
            kinds = [str(found) for found, by in yielded.items() if by == cause]
            yield f"yielded to {cause}, so without an alert: {_few(kinds)}"
        for pattern in self.mute.patterns:
            found = self.muted.get(pattern)
            yield f"muted: {pattern} ({'nothing found so far' if found is None else f'last: {found}'})"
        yield from self._untold(header, told)
        yield from self.notes[:2]

    def _loss(self) -> str:
        if not self.losses:
            return "no loss was given (scope.step(loss=...)), so nothing is judged by it"
        return f"loss on {'all' if self.losses == self.records else self.losses}"

    def _gradients(self, header: RunHeader) -> list[str]:
        """At how many of the places that could have a gradient one was ever seen."""
        found = []
        for key, seen in self.seen.items():
            name, flow = split_key(key)
            found.append(f"{seen.sum()} of {len(seen)} {GRADIENTS[name].format(flow=flow or _first_flow(header))}")
        return found

    def _untold(self, header: RunHeader, standing: set[str]) -> Iterator[str]:
        """Profiles beyond a limit that no alert speaks of."""
        told = standing | {found.kind for found in self.yielded}
        for key, values in self.profiles.items():
            name, flow = split_key(key)
            limits = _limits(header, name)
            spoken = any(name in metrics for kind, metrics in header.shown_by.items() if kind in told)
            if spoken or not limits or not np.isfinite(values).any():
                continue
            for row, limit, word in (
                (int(np.nanargmin(values)), min(limits), "below"),
                (int(np.nanargmax(values)), max(limits), "above"),
            ):
                if values[row] < limit if word == "below" else values[row] > limit:
                    place = f"of {flow or _first_flow(header)} at {_label(header, key, row)}"
                    yield f"{name} {place} is {values[row]:.2g}, {word} its limit {limit:.2g}, without an alert"

    def _not_judged(self) -> Iterator[str]:
        silent = [kind for kind, count in self.told.items() if not count and not self.spoilt]
        explained = {found.kind for found in self.yielded}
        unseen = [kind for kind in silent if kind in self.present and kind not in explained]
        absent = [kind for kind in silent if kind not in self.present and kind not in explained]
        if unseen:
            yield f"not judged, as their numbers were not seen: {_few(unseen)}"
        if absent:
            yield f"not judged, as this run has no such numbers: {_few(absent)}"


def _limits(header: RunHeader, name: str) -> list[float]:
    """The limits that a metric is drawn with, from the run's configuration; empty unless all of them are numbers."""
    fields = header.metrics[name].limits if name in header.metrics else ()
    given: list[Any] = [header.config.get(field) for field in fields]
    return [float(limit) for limit in given] if all(isinstance(limit, int | float) for limit in given) else []


def _label(header: RunHeader, key: str, row: int) -> str:
    labels = header.labels.get(key, ())
    return labels[row] if row < len(labels) else f"row {row}"


def _first_flow(header: RunHeader) -> str:
    return header.flows[0].name if header.flows else "the first flow"


def _few(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:NAMED])} and {rest} more"
