"""What a detector is, and when its findings become alerts: warm-up, hysteresis, one alert for one cause.

A detector looks at one record and says what it finds; it counts nothing and silences nobody. `Ledger` turns findings
into alerts: raised once when a condition holds on enough records in a row, resolved once when it has been clearly gone
for enough records. "Clearly" is a second, inner limit (`WatchConfig.release_factor`): a value that wanders around the
limit is *near*, which keeps an alert standing and never raises one.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from flowscope.config import WatchConfig
from flowscope.records import SERIOUS, Alert, FlowLayout, Record, RunHeader, Severity, metric_key

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
AlertKey = tuple[str, str, str]

SHARE_RELEASE = 0.75
"""A share has no factor of three to fall by: clean means below this much of the limit."""


@dataclass(frozen=True)
class Finding:
    """What a detector says about one condition at one record.

    Attributes:
        kind, where, severity, value, limit, message, advice, flow: as in `Alert`.
        immediate: raise at the first record (errors beyond doubt), without warm-up.
        records: how many records in a row raise it; None means `WatchConfig.warmup_records`.
        cause: tells apart two conditions of one kind in one flow; an alert stands once per (kind, flow, cause).
        level: "beyond" the limit; "near" it (not clean: an alert stays, none is raised); "unseen": this record cannot
            tell (the metric is missing), so nothing is counted.
    """

    kind: str
    where: str = ""
    severity: Severity = "warning"
    value: float = math.nan
    limit: float = math.nan
    message: str = ""
    advice: str = ""
    flow: str | None = None
    immediate: bool = False
    records: int | None = None
    cause: str = ""
    level: Literal["beyond", "near", "unseen"] = "beyond"

    @property
    def key(self) -> AlertKey:
        """What one standing alert is for."""
        return self.kind, self.flow or "", self.cause


class Detector(ABC):
    """Says what is wrong in a record. Subclass it, set `kind`, write `findings`; state must be bounded.

    Attributes:
        kind: the one kind of its alerts.
        yields_to: kinds that explain this one: while an alert of such a kind stands in the same flow (or is found in
            this record), this detector's findings for that flow are left out.
        yields_to_errors: the same for kinds that explain it only where they are errors.
    """

    kind: ClassVar[str]
    yields_to: ClassVar[frozenset[str]] = frozenset()
    yields_to_errors: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: WatchConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        """What its state and its alerts are kept under: its kind; a second detector of a kind has its own."""
        return self.kind

    @abstractmethod
    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """The findings of this record; a condition that is not mentioned is clean."""

    def state_dict(self) -> dict[str, Any]:
        """What the detector has learned (baselines), JSON-ready."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - a detector without memory has nothing to load
        """Take over what `state_dict` returned."""


@dataclass(frozen=True)
class FlowView:
    """One flow of one record: its layout and its metrics, without the naming rule of further flows."""

    layout: FlowLayout
    record: Record
    first: bool

    def get(self, metric: str) -> Array | None:
        """The metric's values, or None where this record has none (not measured, or all NaN)."""
        values = self.record.metrics.get(self._key(metric))
        if values is None or values.size == 0:
            return None
        # most often the first or the last entry tells, at a tenth of the cost
        seen = not (math.isnan(values.item(0)) and math.isnan(values.item(-1)))
        return None if not seen and bool(np.isnan(values).all()) else values

    def point(self, index: int) -> str:
        """Module path of point `index`."""
        return _label(self.layout.points, index)

    def row(self, metric: str, index: int) -> str:
        """Module path of row `index` of a metric whose rows need not be points (merge sites of wrapped blocks)."""
        return self._labelled(metric, index, self.layout.points)

    def site(self, metric: str, index: int) -> str:
        """Module path of entry `index` of a metric with one entry a merge site."""
        return self._labelled(metric, index, self.layout.blocks)

    def block(self, index: int) -> str:
        """Module path of the block between points `index` and `index + 1`."""
        return _label(self.layout.blocks, index)

    def _key(self, metric: str) -> str:
        return metric_key(metric, None if self.first else self.layout.name)

    def _labelled(self, metric: str, index: int, otherwise: Sequence[str]) -> str:
        labels = self.record.metric_labels.get(self._key(metric), ())
        return labels[index].partition("#")[0] if index < len(labels) else _label(otherwise, index)


def each_flow(record: Record, header: RunHeader) -> Iterator[FlowView]:
    """The flows of a record in the header's order."""
    for index, layout in enumerate(header.flows):
        yield FlowView(layout, record, index == 0)


def flow_holding(path: str, header: RunHeader) -> str | None:
    """The flow that a module or parameter belongs to: the longest name it lies under, else the flow of the whole model.

    A stage of a convnet answers with the flow over all stages, which is where gradients are judged.
    """
    flows = [layout for layout in header.flows if layout.kind not in ("time", "gates")]
    whole = next((layout.name for layout in flows if layout.kind == "network" or layout.name == "network"), None)
    holding = [layout for layout in flows if path == layout.name or path.startswith(f"{layout.name}.")]
    if not holding:
        return whole or (flows[0].name if len(flows) == 1 else None)
    nearest = max(holding, key=lambda layout: len(layout.name))
    return whole if whole and nearest.kind == "stage" else nearest.name


@dataclass(frozen=True)
class FlowGroup:
    """The rows of one flow in a metric that is labelled by module or parameter.

    Attributes:
        flow: its name; None for what lies in no flow.
        rows, names: the rows in order, and their labels.
        inner: which of them lie on the depth axis, the end of a flow apart.
    """

    flow: str | None
    rows: NDArray[np.intp]
    names: tuple[str, ...]
    inner: Flags


class FlowGroups:
    """Splits the rows of such a metric by flow; computed once a layout."""

    def __init__(self) -> None:
        self._labels: tuple[str, ...] | None = None
        self._header: RunHeader | None = None
        self.known: list[FlowGroup] = []

    def of(self, labels: tuple[str, ...], header: RunHeader) -> list[FlowGroup]:
        """The groups, in the order of their first row."""
        if self._labels != labels or self._header is not header:
            self._labels, self._header = labels, header
            self.known = _groups(labels, header)
        return self.known


def _groups(labels: tuple[str, ...], header: RunHeader) -> list[FlowGroup]:
    axis = {path for layout in header.flows for path in (*layout.points, *layout.blocks)}
    ends = {layout.points[-1] for layout in header.flows if layout.points}
    rows: dict[str | None, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(flow_holding(label.partition(":")[0], header), []).append(row)
    groups = []
    for flow, found in rows.items():
        names = tuple(labels[row] for row in found)
        inner = [name not in ends and any(path in axis for path in ancestors(name)) for name in names]
        groups.append(FlowGroup(flow, np.array(found, dtype=np.intp), names, np.array(inner, dtype=bool)))
    return groups


def ancestors(path: str) -> Iterator[str]:
    """The path itself, then what holds it, from the inside out; the root is left out."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _label(names: Sequence[str], index: int) -> str:
    return names[index] if 0 <= index < len(names) else f"row {index}"


def labels_of(record: Record, header: RunHeader, metric: str) -> tuple[str, ...]:
    """The labels of a metric's entries, the record's own before the header's; empty where neither has any."""
    return record.metric_labels.get(metric) or header.labels.get(metric, ())


def label_of(record: Record, header: RunHeader, metric: str, index: int, what: str) -> str:
    """The label of entry `index` of a metric; `what` and its number where there is none."""
    labels = labels_of(record, header, metric)
    return labels[index] if index < len(labels) else f"{what} {index}"


def parameter_name(record: Record, header: RunHeader, index: int) -> str:
    """The path of entry `index` of the parameter metrics."""
    for labels in (record.metric_labels, header.labels):
        for metric in ("param_norm", "param_grad_norm", "param_trainable"):
            if index < len(labels.get(metric, ())):
                return labels[metric][index]
    return f"parameter {index}"


def module_of(parameter: str) -> str:
    """The module that owns a parameter."""
    return parameter.rpartition(".")[0]


def pack(values: Array) -> list[float | str | None]:
    """An array as JSON-ready numbers at full precision: NaN is None, infinities are strings."""
    return [None if math.isnan(v) else str(v) if math.isinf(v) else v for v in values.tolist()]


def unpack(values: Sequence[float | str | None]) -> Array:
    """The inverse of `pack`."""
    return np.asarray(values, dtype=object).astype(np.float64)


@dataclass
class Standing:
    """The count behind one possible alert of one detector: records in a row with the condition, or without it."""

    owner: str
    run: int = 0
    clean: int = 0
    since: int | None = None
    alert: Alert | None = None


@dataclass
class Ledger:
    """Counts findings per (kind, flow, cause) and says which alerts are newly raised or resolved."""

    config: WatchConfig
    entries: dict[AlertKey, Standing] = field(default_factory=dict)

    @property
    def standing(self) -> list[Alert]:
        """Raised and not resolved."""
        return [entry.alert for entry in self.entries.values() if entry.alert is not None]

    def stands(
        self,
        kinds: frozenset[str],
        flow: str | None = None,
        but: str | None = None,
        severities: Sequence[Severity] = SERIOUS,
    ) -> bool:
        """Whether an alert of one of `kinds` and `severities` stands, those of the detector `but` apart.

        With `flow` only alerts in that flow, or for the whole model, count.
        """
        entries = (entry for entry in self.entries.values() if entry.owner != but)
        alerts = [e.alert for e in entries if e.alert is not None and e.alert.severity in severities]
        return any(a.kind in kinds and (flow is None or a.flow in (flow, None)) for a in alerts)

    def update(self, owner: str, findings: Iterable[Finding], step: int) -> list[Alert]:
        """Enter all findings of one detector (by its name) at one step; return what is newly raised or resolved."""
        found = {finding.key: finding for finding in findings}
        known = [key for key, entry in self.entries.items() if entry.owner == owner and key not in found]
        out = [alert for key in known if (alert := self._clean(key, step)) is not None]
        for finding in found.values():
            if finding.level != "unseen" and (alert := self._enter(owner, finding, step)) is not None:
                out.append(alert)
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

    def _enter(self, owner: str, finding: Finding, step: int) -> Alert | None:
        key = finding.key
        entry = self.entries.setdefault(key, Standing(owner))
        entry.clean = 0
        if finding.level == "near":
            entry.run, entry.since = 0, None
            if entry.alert is None:
                del self.entries[key]
            return None
        if entry.run == 0:
            entry.since = step
        entry.run += 1
        needed = 1 if finding.immediate else finding.records or self.config.warmup_records
        if entry.alert is not None or entry.run < needed:
            return None
        entry.alert = Alert(
            finding.kind,
            finding.severity,
            finding.where,
            step,
            finding.value,
            finding.limit,
            finding.message,
            finding.advice,
            since=entry.since,
            flow=finding.flow,
        )
        return entry.alert

    def state_dict(self) -> list[dict[str, Any]]:
        """JSON-ready; `load_state_dict` is the inverse."""
        return [
            {
                "key": list(key),
                "owner": entry.owner,
                "run": entry.run,
                "clean": entry.clean,
                "since": entry.since,
                "alert": None if entry.alert is None else _plain_alert(entry.alert),
            }
            for key, entry in self.entries.items()
        ]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Take over what `state_dict` returned."""
        self.entries = {}
        for row in state:
            kind, flow, cause = row["key"]
            alert = None if row["alert"] is None else Alert.from_json(row["alert"])
            counts = row["run"], row["clean"], row["since"]
            self.entries[kind, flow, cause] = Standing(row["owner"], *counts, alert)


def _plain_alert(alert: Alert) -> dict[str, Any]:
    value, limit = pack(np.array([alert.value, alert.limit]))
    return {**dataclasses.asdict(alert), "value": value, "limit": limit}
