"""What one sampled step says, as plain numbers: all behind the instruments (detectors, sinks, views) reads only these.

Axis letters: L depth (blocks of a flow), L+1 its points.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from flowscope.errors import FlowscopeError, nearest
from flowscope.metrics import AXES, Metric, described, spec_of, told_fields
from flowscope.validation import Step, as_far_as_it_fits, checked, fitting

ALL_DIGITS = 17
"""Of an fp64 number."""
Array = NDArray[np.float64]
Severity = Literal["info", "warning", "error"]
SERIOUS: tuple[Severity, ...] = ("warning", "error")
"""Severities of what is wrong; an info only describes."""
Key = str | tuple[str, str]


def metric_key(metric: str, flow: str | None) -> str:
    """The key of a metric in `Record.metrics`: `metric` for the first flow (flow None), `metric@flow` for others."""
    return metric if flow is None else f"{metric}@{flow}"


def split_key(key: str) -> tuple[str, str | None]:
    """The inverse of `metric_key`."""
    metric, _, flow = key.partition("@")
    return metric, flow or None


BRANCHES = "branches"
"""The kind of places that run beside each other."""


@dataclass(frozen=True)
class FlowLayout:
    """What detectors and panels need to know of a flow, without the model.

    `kind` is one of "blocks" (a stack of residual or other blocks), "stage" (one stage of a convnet), "network" (all
    stages behind each other), "chain" (parametrised layers one after another), "concat" (DenseNet: a point is a
    layer's new features), "time" (calls or steps of a recurrent layer), "branches" (places that run beside each other:
    norms, and nothing between two of them), "gates" (no points: gates of the user's own model). `cell` is the class of
    a recurrent layer ("RNN", "LSTMCell"), "found" for gates that the user did not name, else empty.
    """

    name: str
    kind: str
    points: tuple[str, ...]
    blocks: tuple[str, ...]
    cell: str = ""


@dataclass(frozen=True)
class _Group:
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class _Optimizer:
    groups: tuple[_Group, ...] = ()


@dataclass(frozen=True)
class _SetUp:
    """What `RunHeader.setup` must look like where it is read by key; its other entries are compared as they are."""

    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    optimizers: tuple[_Optimizer, ...] = ()


@dataclass(frozen=True, repr=False)
class RunHeader:
    """Written once at the head of a run (and again when the layout changes): what its metrics and their rows are.

    Attributes:
        version: of the flowscope that wrote it.
        flows: the flows, in order.
        labels: key of `Record.metrics` -> the paths of its rows.
        config: the settings.
        environment: versions of what the run was made with.
        metrics: name -> what the metric means and how it is drawn; empty in runs of 0.1.
        shown_by: kind of alert -> the metrics that show it, best first; empty in runs of 0.1.
        coverage: one line on what silence covers: what was judged, what could not be; empty before the first records
            and in runs of 0.1.
        setup: how the run is set up (flowscope/instruments/set_up.py): what `flowscope.bisect` and `flowscope compare`
            begin with; {} before the first record and in runs of 0.1.
        extremes: kind of alert -> the end ("least" or "largest") of the profile that its message speaks of.
        behind: what is drawn behind the run (flowscope/backdrop.py); {} without a reference.
        cost: what flowscope itself takes, in seconds: `sample` of a sampled step, `light_step` of another, `bare_step`
            that such a one takes without, `first_steps` of all before the first that was not sampled; `share` of the
            bare step in the long run, `budget` of it and `interval` where the interval follows the cost. {} before
            enough steps, and in runs of old.
    """

    version: str = "?"
    flows: tuple[FlowLayout, ...] = ()
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    shown_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extremes: Mapping[str, str] = field(default_factory=dict)
    coverage: str = ""
    setup: Annotated[Mapping[str, Any], fitting(_SetUp)] = field(default_factory=dict)
    behind: Mapping[str, Any] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        """Short: version, flows and number of metrics."""
        flows = ", ".join(f"{flow.name} ({flow.kind}, {len(flow.points)} points)" for flow in self.flows)
        return f"<RunHeader of flowscope {self.version}: {flows or 'no flow'}, {len(self.metrics)} metrics>"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_json` is its inverse."""
        return {
            "type": "run",
            **vars(self),
            "flows": [told_fields(flow) for flow in self.flows],
            "metrics": [metric.to_json() for metric in self.metrics.values()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunHeader:
        """Rebuild a header from `to_json`; entries and metrics that cannot be read are left out.

        Raises:
            ValueError: it is no JSON object.
        """
        if not isinstance(data, Mapping):
            raise ValueError("a header is a JSON object")
        metrics: dict[str, Metric] = {}
        for told in data.get("metrics") or ():
            with suppress(ValueError):
                metric = Metric.from_json(told)
                metrics[metric.name] = metric
        return as_far_as_it_fits(cls, {**data, "metrics": metrics})


OWN_LOSS = "the loss is this rank's own"
"""The note of a record whose loss was not averaged over the ranks: the last of a run."""


@dataclass(frozen=True)
class _RecordLine:
    """What a file may say of a record, before its numbers are arrays."""

    step: Step
    loss: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(repr=False)
class Record:
    """One sampled optimizer step.

    Attributes:
        step: the optimizer step, from 0.
        loss: mean of the losses given for this step, None where none was given.
        metrics: name -> array, ordered from input to output; `metric` is the first flow's, `metric@flow` another's.
            NaN means "not seen" (no gradient arrived, nothing ran), never zero.
        flags: what is special about this step: "skipped" (GradScaler found inf), "possibly_skipped", "unsampled" (only
            the finiteness canary is inside), "local" and "dropped" (of many ranks: docs/scale.md).
        notes: sentences about what could not be measured, and why.
    """

    step: int
    loss: float | None = None
    metrics: dict[str, Array] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    flow_names: tuple[str, ...] = ()
    metric_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    specs: Mapping[str, Metric] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        """Short: step, loss, flags and number of metrics."""
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        flags = f", {' '.join(self.flags)}" if self.flags else ""
        return f"<Record of step {self.step}{loss}{flags}: {len(self.metrics)} metrics>"

    def __getitem__(self, key: Key) -> Array:
        """`record["gain"]` (first flow that has it) or `record["gain", "decoder"]` (a flow, or a part of its path)."""
        return self.metrics[self._resolve(*key) if isinstance(key, tuple) else self._resolve(key, None)]

    def __contains__(self, key: object) -> bool:
        """Whether `record[key]` would answer."""
        try:
            self[key]  # type: ignore[index]
        except (FlowscopeError, TypeError, ValueError):
            return False
        return True

    def labels(self, metric: str, flow: str | None = None) -> list[str]:
        """The module (or parameter) paths of the entries of `record[metric]`, one each; [] where it has none."""
        key = self._resolve(metric, flow)
        labels = self.metric_labels.get(key, ())
        return list(row_names(labels, len(self.metrics[key]))) if labels else []

    def spec(self, key: str) -> Metric:
        """What the metric behind a key of `metrics` means and how it is drawn."""
        return spec_of(key, self.specs)

    def _repr_html_(self) -> str:
        from flowscope.notebook import record_html

        return record_html(self)

    def _resolve(self, metric: str, flow: str | None) -> str:
        if flow is None:
            keys = [metric, *(key for key in self.metrics if split_key(key)[0] == metric)]
            words = " Some are only in some records: WatchConfig.slow_every (cosine_matrix), seldom_every (attention)."
        else:
            name = match_flow(flow, self.flow_names)
            keys, words = [metric if name == self.flow_names[0] else metric_key(metric, name)], ""
        found = next((key for key in keys if key in self.metrics), None)
        if found is None:
            where = "" if flow is None else f" for flow {name!r}"
            near = nearest(metric, {split_key(key)[0] for key in self.metrics})
            held = "" if near else f" It has: {', '.join(sorted(self.metrics)) or 'none'}."
            raise FlowscopeError(f"record of step {self.step} has no metric {metric!r}{where}.{near}{held}{words}")
        return found

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict: NaN becomes None, infinities the strings "inf" and "-inf", 7 significant digits.

        Losses have 9, which tell any two fp32 numbers apart, metrics that are told to the bit 17.
        """
        # for a loss NaN is a value: None says that none was given
        loss = "nan" if self.loss is not None and math.isnan(self.loss) else strict_json(self.loss, 9)
        out: dict[str, Any] = {"type": "record", "step": self.step, "loss": loss}
        out |= {name: list(told) for name, told in (("flags", self.flags), ("notes", self.notes)) if told}
        out["metrics"] = {
            key: strict_json(value.tolist(), ALL_DIGITS if self.spec(key).exact else 7)
            for key, value in self.metrics.items()
        }
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any], header: RunHeader | None = None) -> Record:
        """Rebuild a record; `header` brings the labels and flow names.

        Raises:
            ValueError, TypeError, OverflowError: it is none, or a metric is no array of numbers with the axes it should
                have.
        """
        line, header = checked(_RecordLine, data), header or RunHeader()
        known = described(header.metrics)
        metrics = {key: _array(value, known.get(key.partition("@")[0])) for key, value in line.metrics.items()}
        names = tuple(flow.name for flow in header.flows)
        return cls(line.step, line.loss, metrics, line.flags, line.notes, names, header.labels, header.metrics)


@dataclass
class Alert:
    """One finding of a detector: raised once when the condition begins, and once more with state "resolved"."""

    kind: str
    severity: Severity
    where: str
    step: Step
    value: float
    limit: float
    message: str
    advice: str
    state: Literal["raised", "resolved"] = "raised"
    since: Step | None = None
    flow: str | None = None

    def __str__(self) -> str:
        """One line for people: severity, kind, place, message, advice."""
        place = f" at {self.where}" if self.where else ""
        head = f"[{self.severity}] step {self.step}: {self.kind}{place}"
        return f"{head} resolved" if self.state == "resolved" else f"{head}: {self.message} -> {self.advice}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        out = {name: strict_json(value) for name, value in vars(self).items() if value is not None}
        return {"type": "alert", **out}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Alert:
        """Rebuild an alert from `to_json`.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(data, Mapping):
            raise ValueError("an alert is a JSON object")
        # NaN is null in JSON
        numbers = {name: data[name] for name in ("value", "limit") if data.get(name) is not None}
        return checked(cls, {**data, "value": math.nan, "limit": math.nan, **numbers})


class Alerts(list[Alert]):
    """Alerts in order: a list that shows itself as lines at a prompt and as a table in a notebook."""

    def __repr__(self) -> str:
        """A line an alert."""
        return "\n".join(map(str, self)) or "[]"

    def _repr_html_(self) -> str:
        from flowscope.notebook import alerts_html

        return alerts_html(self)


Event = RunHeader | Record | Alert


@dataclass(repr=False)
class Run:
    """A run as `flowscope.sinks.read_run` found it.

    Attributes:
        header: the last header, None where the file has none.
        records: by step, one a step; each carries the labels of the header before it.
        alerts: in the order they were written.
        skipped_lines: lines that are incomplete (a kill, or a writer at work) or not flowscope's.
        superseded: records that a later record of the same step, or a resumed process, replaced.
        unsampled: what the finiteness canary alone saw, at steps that were not sampled.
    """

    header: RunHeader | None = None
    records: list[Record] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=Alerts)
    skipped_lines: int = 0
    superseded: int = 0
    unsampled: list[Record] = field(default_factory=list)

    def __repr__(self) -> str:
        """Short: how many records and alerts, of which steps."""
        ends = f", steps {self.records[0].step} to {self.records[-1].step}" if self.records else ""
        return f"<Run: {len(self.records)} records{ends}, {len(self.alerts)} alerts>"

    def _repr_html_(self) -> str:
        from flowscope.notebook import run_html

        return run_html(self)

    def columns(self, what: str | None = None, flow: str | None = None) -> dict[str, NDArray[Any]]:
        """The numbers as columns of one length, which `pandas.DataFrame`, `polars.DataFrame` and `pyarrow.table` take.

        Args:
            what: a metric, "loss", "alerts", or None: every profile and the loss.
            flow: of the metric; None is the first flow that has it.

        Returns:
            `step`, `metric`, `flow`, `row`, `name` and `value` (flowscope/frames.py); NaN is "not seen".

        Raises:
            FlowscopeError: the run has no such metric.
        """
        from flowscope.frames import columns_of

        return columns_of(self, what, flow)

    def to_pandas(self, what: str | None = None, flow: str | None = None, *, long: bool = False) -> Any:
        """The numbers as a `pandas.DataFrame`.

        Args:
            what: as in `columns`.
            flow: likewise.
            long: a line a number also where one metric was asked for.

        Returns:
            For one metric a line a step and a column a row of the profile (the paths of modules or parameters);
            for all, and for "alerts", the columns of `columns`.

        Raises:
            FlowscopeError: the run has no such metric, or pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise FlowscopeError(
                'to_pandas needs pandas, which is not installed: pip install "flowscope[pandas]".'
            ) from None
        from flowscope.frames import wide_of

        if what is None or what == "alerts" or long:
            return pandas.DataFrame(self.columns(what, flow))
        steps, names, values = wide_of(self, what, flow)
        named = names if names != [""] else [what]
        return pandas.DataFrame(values, pandas.Index(steps, name="step"), named)

    def to_csv(self, path: str | os.PathLike[str], what: str | None = None, flow: str | None = None) -> None:
        """Write `columns` as a CSV file."""
        from flowscope.frames import write_csv

        columns = self.columns(what, flow)
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            write_csv(columns, file)


def few(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def match_flow(name: str, names: Sequence[str]) -> str:
    """The one flow that `name` means: its exact name, else the only one with `name` among the parts of its path."""
    if name in names:
        return name
    found = [candidate for candidate in names if name in candidate.split(".")]
    if len(found) == 1:
        return found[0]
    raise FlowscopeError(
        f"no flow {name!r}: the flows are {list(names)}."
        + (" The name is ambiguous: give the whole name." if found else " flowscope.find_flows(model) prints them.")
    )


def strict_json(value: Any, digits: int = 7) -> Any:
    """Anything as strict JSON (RFC 8259) can hold it: what it does not know becomes text.

    NaN becomes None, infinities the strings "inf" and "-inf", other numbers keep so many significant digits.
    """
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return ("inf" if value > 0 else "-inf") if math.isinf(value) else float(f"{value:.{digits}g}")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [strict_json(item, digits) for item in value]
    if isinstance(value, Mapping):
        return {str(key): strict_json(item, digits) for key, item in value.items()}
    return strict_json(value.item(), digits) if hasattr(value, "item") else str(value)


def row_names(labels: Sequence[str], rows: int) -> Sequence[str]:
    """The labels, where there is one a row; else numbers: a file cut short or a changed model has other rows."""
    return labels if len(labels) == rows else [f"row {row}" for row in range(rows)]


def _array(value: Any, spec: Metric | None) -> Array:
    # None becomes NaN and the strings "inf" and "-inf" infinities, at any nesting
    array = np.atleast_1d(np.asarray(value, dtype=np.float64))
    if array.ndim not in ((1, 2, 3) if spec is None else (AXES[spec.shape],)):
        raise ValueError(f"a metric has {array.ndim} axes")
    return array
