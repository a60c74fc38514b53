"""The stages of a pipeline, each of which wrote a run of its own, as one run.

What a stage's last block gives is what the next one's first block takes: the two points are one, with one gradient. So
the stages' points stand behind each other, and that one is taken from the stage that made it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flowscope.records import Alert, Alerts, Array, FlowLayout, Record, Run, RunHeader, split_key

STAGE = "stage-"
"""Folders of stages: this, and the stage's number."""


def stages_in(folder: Path) -> list[Path]:
    """The folders of a pipeline's stages in this one, in order; empty where one is missing, or there are none."""
    found = [path for path in folder.glob(f"{STAGE}*") if re.fullmatch(rf"{STAGE}\d+", path.name)]
    numbers = sorted(int(path.name.removeprefix(STAGE)) for path in found)
    return [folder / f"{STAGE}{number}" for number in numbers] if numbers == [*range(len(numbers))] else []


def chained(stages: Sequence[Run]) -> Run:
    """Return the stages' runs, in order, as one.

    Names get "stage-K: " in front; the metrics are those of each stage's first flow and of the parameters. Gradient
    products are those to the last point of the last stage. A record is of a step that all stages have, and has the last
    stage's loss.
    """
    headers = [run.header for run in stages if run.header is not None and run.header.flows]
    if len(headers) < len(stages):
        return next((run for run in stages if run.header is not None), Run())
    flows = [header.flows[0] for header in headers]
    points = [point for at, flow in enumerate(flows) for point in _named(at, flow.points[at > 0 :])]
    blocks = [block for at, flow in enumerate(flows) for block in _named(at, flow.blocks)]
    flow = FlowLayout(flows[0].name, flows[0].kind, tuple(points), tuple(blocks))
    by_step = [{record.step: record for record in run.records} for run in stages]
    together = sorted(set.intersection(*({*steps} for steps in by_step)))
    records = [_joined([steps[step] for steps in by_step], flows, flow) for step in together]
    labels = {key: rows for record in records for key, rows in record.metric_labels.items()}
    last: RunHeader = headers[-1]
    header = replace(last, flows=(flow,), labels=labels, setup={}, behind={})
    alerts = Alerts(sorted((_told(at, a) for at, run in enumerate(stages) for a in run.alerts), key=lambda a: a.step))
    return Run(header, records, alerts, sum(r.skipped_lines for r in stages), sum(r.superseded for r in stages))


def _named(stage: int, names: Sequence[str]) -> list[str]:
    return [f"{STAGE}{stage}: {name}" for name in names]


def _told(stage: int, alert: Alert) -> Alert:
    return replace(alert, message=f"{STAGE}{stage}: {alert.message}")


def _joined(records: Sequence[Record], flows: Sequence[FlowLayout], flow: FlowLayout) -> Record:
    """One record of the stages' records of one step."""
    out = Record(
        records[0].step,
        records[-1].loss,
        flags=tuple(dict.fromkeys(flag for record in records for flag in record.flags)),
        notes=tuple(note for at, record in enumerate(records) for note in _named(at, record.notes)),
        flow_names=(flow.name,),
        specs={name: spec for record in records for name, spec in record.specs.items()},
    )
    labels: dict[str, tuple[str, ...]] = {}
    # what has no flow in its name is of the first flow, or of none
    for key in [key for key in records[0].metrics if split_key(key)[1] is None]:
        pieces: list[Array] = []
        rows: list[str] = []
        for at, (record, one) in enumerate(zip(records, flows, strict=True)):
            values, names = record.metrics.get(key), record.metric_labels.get(key, ())
            if values is None or values.ndim != 1 or len(names) != len(values):
                break
            cut = int(at > 0 and tuple(names) == one.points)
            pieces.append(values[cut:])
            rows += _named(at, names[cut:])
        if len(pieces) == len(records):
            out.metrics[key], labels[key] = np.concatenate(pieces), tuple(rows)
    if "gradient_product" in out.metrics and "grad_norm" in out.metrics:
        with np.errstate(all="ignore"):
            out.metrics["gradient_product"] = out.metrics["grad_norm"] / out.metrics["grad_norm"][-1]
    out.metric_labels = labels
    return out
