"""The stages of a pipeline, each of which writes a run of its own, as one run.

What a stage's last block gives is what the next one's first block takes: the two points are one, with one gradient. So
the stages' points stand behind each other, that one is taken from the stage that made it, and products multiply.

Axis letters: R rows of a metric.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flowscope.metrics import spec_of
from flowscope.records import Alert, Alerts, Array, Event, FlowLayout, Record, Run, RunHeader, split_key

STAGE = "stage-"
"""Folders of stages: this, and the stage's number."""


def in_order(names: Iterable[str]) -> list[str]:
    """The names of all stages among these, in order; empty where one is missing, or there are none."""
    found = {int(name.removeprefix(STAGE)): name for name in names if re.fullmatch(rf"{STAGE}\d+", name)}
    return [found[number] for number in sorted(found)] if found.keys() == {*range(len(found))} else []


def stages_in(folder: Path) -> list[Path]:
    """The folders of a pipeline's stages in this one, in order; empty where one is missing, or there are none."""
    return [folder / name for name in in_order(path.name for path in folder.glob(f"{STAGE}*"))]


class Chain:
    """How the stages of a pipeline stand behind each other.

    Names get "stage-K: " in front. A record is of a step that all stages have, with the metrics of each stage's first
    flow and of the parameters, and the last stage's loss.

    Args:
        headers: of the stages' runs, in order, each with a flow.

    Attributes:
        header: of the one run.
    """

    def __init__(self, headers: Sequence[RunHeader]) -> None:
        self._flows = flows = [header.flows[0] for header in headers]
        points = tuple(point for at, flow in enumerate(flows) for point in _named(at, flow.points[at > 0 :]))
        blocks = tuple(block for at, flow in enumerate(flows) for block in _named(at, flow.blocks))
        self._flow = FlowLayout(flows[0].name, flows[0].kind, points, blocks)
        labels: dict[str, tuple[str, ...]] = {}
        for at, header in enumerate(headers):
            for key, names in header.labels.items():
                if split_key(key)[1] is None and spec_of(key, header.metrics).shape == "profile":
                    cut = self._cut(at, names) if key in labels else 0
                    labels[key] = (*labels.get(key, ()), *_named(at, names[cut:]))
        specs = {name: spec for header in headers for name, spec in header.metrics.items()}
        shown_by = {kind: shown for header in headers for kind, shown in header.shown_by.items()}
        told: dict[str, Any] = {"labels": labels, "metrics": specs, "shown_by": shown_by, "setup": {}, "behind": {}}
        self.header = replace(headers[-1], flows=(self._flow,), **told)

    def _cut(self, stage: int, names: Sequence[str]) -> int:
        """How many of a stage's first rows are the last of the stage before it."""
        return int(stage > 0 and tuple(names) == self._flows[stage].points)

    def rows(self, key: str, pieces: Sequence[tuple[int, Sequence[str], Array]]) -> tuple[tuple[str, ...], Array]:
        """Return the names and values [..., R] of a metric over the stages.

        Args:
            key: of the metric.
            pieces: of those stages that have it, in order: number, names [R], values [..., R]. Gradient products are
                those to the last point of the last of them.
        """
        names: list[str] = []
        values: list[Array] = []
        behind: Array | float = 1.0
        for place, (at, own, found) in reversed([*enumerate(pieces)]):
            if key == "gradient_product":
                found = found * behind
                behind = found[..., :1]
            cut = self._cut(at, own) if place else 0
            names[:0] = _named(at, own[cut:])
            values.insert(0, found[..., cut:])
        return tuple(names), np.concatenate(values, axis=-1)

    def alert(self, stage: int, alert: Alert) -> Alert:
        """A stage's alert, as one of the run."""
        flow = self._flow.name if alert.flow == self._flows[stage].name else alert.flow
        told = {"where": alert.where} if alert.where else {"message": alert.message}
        named: dict[str, Any] = {name: _named(stage, [text])[0] for name, text in told.items()}
        return replace(alert, flow=flow, **named)

    def record(self, records: Sequence[Record]) -> Record:
        """One record of the stages' records of one step."""
        specs = {name: spec for record in records for name, spec in record.specs.items()}
        metrics: dict[str, Array] = {}
        labels: dict[str, tuple[str, ...]] = {}
        # what has no flow in its name is of the first flow, or of none
        for key in dict.fromkeys(key for record in records for key in record.metrics if split_key(key)[1] is None):
            have = [(at, record) for at, record in enumerate(records) if key in record.metrics]
            found = [(at, record.metric_labels.get(key, ()), record.metrics[key]) for at, record in have]
            if all(values.ndim == 1 and len(names) == len(values) for _, names, values in found):
                labels[key], metrics[key] = self.rows(key, found)
        return Record(
            records[0].step,
            records[-1].loss,
            metrics,
            tuple(dict.fromkeys(flag for record in records for flag in record.flags)),
            tuple(note for at, record in enumerate(records) for note in _named(at, record.notes)),
            (self._flow.name,),
            labels,
            specs,
        )


def chained(stages: Sequence[Run]) -> Run:
    """Return the stages' runs, in order, as one (`Chain`)."""
    headers = [run.header for run in stages if run.header is not None and run.header.flows]
    if len(headers) < len(stages):
        return next((run for run in stages if run.header is not None), Run())
    chain = Chain(headers)
    by_step = [{record.step: record for record in run.records} for run in stages]
    together = sorted(set.intersection(*({*steps} for steps in by_step)))
    records = [chain.record([steps[step] for steps in by_step]) for step in together]
    alerts = sorted((chain.alert(at, a) for at, run in enumerate(stages) for a in run.alerts), key=lambda a: a.step)
    skipped, superseded = (sum(getattr(run, name) for run in stages) for name in ("skipped_lines", "superseded"))
    return Run(chain.header, records, Alerts(alerts), skipped, superseded)


class Arriving:
    """The stages' events as they come, made into those of one run.

    Args:
        count: how many stages there are.
    """

    def __init__(self, count: int) -> None:
        self._headers: list[RunHeader | None] = [None] * count
        self._chain: Chain | None = None
        self._waiting: dict[int, dict[int, Record]] = {}
        """Records by step and stage, until all have the step."""
        self._alerts: list[tuple[int, Alert]] = []

    def take(self, stage: int, event: Event) -> list[Event]:
        """Take the next event of a stage; returns what is known of the run with it."""
        out: list[Event] = []
        if isinstance(event, RunHeader):
            self._headers[stage] = event if event.flows else None
            headers = [header for header in self._headers if header is not None]
            self._chain = Chain(headers) if len(headers) == len(self._headers) else None
            out += [self._chain.header] if self._chain is not None else []
        elif isinstance(event, Alert):
            self._alerts.append((stage, event))
        else:
            self._waiting.setdefault(event.step, {})[stage] = event
        if self._chain is None:
            return out
        for step in sorted(step for step, found in self._waiting.items() if len(found) == len(self._headers)):
            found = self._waiting[step]
            out.append(self._chain.record([found[at] for at in range(len(found))]))
            # a stage writes its steps in order: what one has not written of an earlier one never comes
            self._waiting = {later: records for later, records in self._waiting.items() if later > step}
        out += [self._chain.alert(at, alert) for at, alert in self._alerts]
        self._alerts.clear()
        return out


def _named(stage: int, names: Sequence[str]) -> list[str]:
    return [f"{STAGE}{stage}: {name}" for name in names]
