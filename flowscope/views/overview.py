"""What there is in a run and what is wrong with it, in the words that stand on top of the tab and of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowscope.backdrop import LOSS, read
from flowscope.diagnosis import RANK, Incident, events, most_serious, paired, story
from flowscope.metrics import Metric, spec_of, told_by_0_1
from flowscope.records import Alert, Array, RunHeader, metric_key, split_key
from flowscope.views.room import Room
from flowscope.views.series import behind_payload, strict

DRAWN_BY = ("view", "scale", "shape", "band", "bounds", "fitted", "limits", "per_flow", "opens")
SHOWN = ("formula", "unit", "source")
"""What of a metric's spec the browser draws by, and what it shows."""
FACTS = 5
"""How many flows the facts name."""


@dataclass
class RunView:
    """What is known of a run before any metric is read.

    Attributes:
        name: of the run.
        header: None where it is missing or cannot be read.
        labels: key of a metric -> its row labels, for every metric that has records.
        alerts: raised and resolved, in the order they were written.
        products: key -> the last gradient product, for the words on top.
        loss: (step, loss) pairs, thinned out.
        last_step: of the last record, None without records.
        notices: what could not be read, and why.
        stamp: changes when the run does.
        differs: what it was set up with otherwise than the run it is compared with.
    """

    name: str
    header: RunHeader | None = None
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alerts: Sequence[Alert] = ()
    products: Mapping[str, Array] = field(default_factory=dict)
    loss: Sequence[tuple[int, float]] = ()
    last_step: int | None = None
    notices: list[str] = field(default_factory=list)
    stamp: str = ""
    differs: Sequence[str] = ()


def overview_payload(runs: Sequence[RunView], room: Room | None = None) -> dict[str, Any]:
    """What the browser starts from: the runs with their flows, metrics, alerts and the verdict on each."""
    return {"runs": [_run_payload(run, room or Room()) for run in runs]}


def _run_payload(run: RunView, room: Room) -> dict[str, Any]:
    header = run.header
    found = paired(run.alerts)
    told = most_serious(found, room.alerts)
    standing = sum(incident.resolved is None for incident in found)
    spans = spans_of(run, told)
    flows = flows_of(run)
    first = flows[0]["name"] if flows else ""
    specs = header.metrics if header else {}
    keys = list(run.labels)[: room.keys]
    return {
        "name": run.name,
        "last_step": run.last_step,
        "flows": flows[: room.keys],
        "metrics": [present(spec_of(key, specs), key, len(run.labels[key]), first) for key in keys],
        "alerts": spans,
        "loss": {"steps": [step for step, _ in run.loss], "values": strict([value for _, value in run.loss])},
        "verdict": verdict(run, spans, standing),
        "facts": facts(run),
        "notices": [
            *run.notices,
            *_left_out("alerts", len(told), len(found)),
            *_left_out("metrics", len(keys), len(run.labels)),
        ],
        "differs": list(run.differs),
        "behind": _behind(header),
        "own": header.cost.get("share") if header else None,
        "config": strict(header.config) if header else {},
        "environment": strict(header.environment) if header else {},
        "stamp": run.stamp,
    }


def _behind(header: RunHeader | None) -> dict[str, Any] | None:
    """What the reference is called, and its loss; None without one."""
    backdrop = read(header.behind) if header is not None else None
    if backdrop is None:
        return None
    loss = backdrop.curves.get(LOSS)
    return {"name": backdrop.words, "loss": loss and behind_payload(loss)}


def present(spec: Metric, key: str, rows: int, first_flow: str) -> dict[str, Any]:
    """What the browser is told of the metric behind a key of `Record.metrics` with `rows` rows."""
    metric, flow = split_key(key)
    drawn = {name: getattr(spec, name) for name in (*DRAWN_BY, *SHOWN)}
    return {"key": key, "metric": metric, "flow": flow or first_flow, "rows": rows, "words": spec.says, **drawn}


def flows_of(run: RunView) -> list[dict[str, Any]]:
    """Name, kind and number of points of each flow; without a header, what the keys tell."""
    if run.header and run.header.flows:
        return [{"name": f.name, "kind": f.kind, "points": len(f.points)} for f in run.header.flows]
    points: dict[str | None, int] = {}
    for key, labels in run.labels.items():
        metric, flow = split_key(key)
        if metric == "gradient_product" or flow not in points:
            points[flow] = len(labels)
    names = sorted(points, key=lambda flow: flow or "")
    return [{"name": flow or "network", "kind": "unknown", "points": points[flow]} for flow in names]


def _left_out(what: str, shown: int, of: int) -> list[str]:
    return [f"{shown} of {of} {what} are shown, the first and most important."] if shown < of else []


def alert_spans(run: RunView) -> list[dict[str, Any]]:
    """The spans of all alerts."""
    return spans_of(run, paired(run.alerts))


def spans_of(run: RunView, incidents: Sequence[Incident]) -> list[dict[str, Any]]:
    """Each raised alert with the step at which it was resolved (None: it stands), and the metric and row to look at."""
    spans: list[dict[str, Any]] = []
    extremes = run.header.extremes if run.header and run.header.shown_by else told_by_0_1()["extremes"]
    for incident in incidents:
        alert = incident.alert
        data: dict[str, Any] = strict({key: value for key, value in alert.to_json().items() if key != "state"})
        key, row = place(run, alert)
        found = {"key": key, "row": row, "extreme": extremes.get(alert.kind)}
        # one number a page: the step at which the condition began; the one at which it was told stands beside it
        steps = {"step": incident.since, "raised": alert.step, "resolved": incident.resolved}
        spans.append({**data, "flow": alert.flow, **steps, **found})
    return spans


def place(run: RunView, alert: Alert) -> tuple[str | None, int | None]:
    """The key of the metric that shows the alert and the row it names; None where the run has no such metric or row."""
    first = run.header.flows[0].name if run.header and run.header.flows else alert.flow
    flow = None if alert.flow == first else alert.flow
    found: str | None = None
    shown_by = (run.header and run.header.shown_by) or told_by_0_1()["shown_by"]
    for metric in (*shown_by.get(alert.kind, ()), "gradient_product"):
        for key in dict.fromkeys((metric_key(metric, flow), metric)):
            if key in run.labels:
                row = _row(run.labels[key], alert.where)
                if row is not None or not alert.where:
                    return key, row
                found = found or key
    return found, None


def _row(labels: Sequence[str], where: str) -> int | None:
    for candidate in (where, f"{where}:input"):
        if candidate in labels:
            return labels.index(candidate)
    inside = [i for i, label in enumerate(labels) if where and label.startswith((f"{where}.", f"{where}#"))]
    around = [i for i, label in enumerate(labels) if label and where.startswith((f"{label}.", f"{label}#"))]
    return next(iter(inside), next(reversed(around), None))


def verdict(run: RunView, spans: Sequence[Mapping[str, Any]], of: int = 0) -> dict[str, str]:
    """The state of the run in a few words.

    Args:
        run: the run.
        spans: its alerts, or the most serious of them.
        of: how many stand in all, where these are some.

    Returns:
        `severity` ("none" without records, "ok", or the worst that stands) and `text`; where an alert stands also its
        `message` and `advice`, and in `sentence` what is lost, between which places, since when and what came first;
        where several were raised, in `story` which came first.
    """
    if run.last_step is None and not spans:
        return {"severity": "none", "text": "no record yet"}
    standing = [span for span in spans if span["resolved"] is None]
    told = story(run.alerts)
    first = {"story": f"{told[0].upper()}{told[1:]}."} if told else {}
    if not standing:
        return {"severity": "ok", "text": "no alert stands" if spans else "no alert", **first}
    worst = min(standing, key=lambda span: RANK[span["severity"]])
    of = max(of, len(standing))
    at = f" at {worst['where']}" if worst["where"] else ""
    more = f" (+{of - 1} more)" if of > 1 else ""
    text = f"{worst['kind']}{at} since step {worst['step']}{more}"
    said = {"message": worst["message"], "advice": worst["advice"], "sentence": sentence(run, worst)}
    return {"severity": worst["severity"], "text": text, **said, **first}


LOST = ("vanishing_gradient", "no_gradient", "no_signal")
"""Kinds that say that gradient does not arrive."""


def sentence(run: RunView, worst: Mapping[str, Any]) -> str:
    """The worst of what stands in one sentence: what, between which places, since which step, and what came first."""
    what = worst["kind"].replace("_", " ").capitalize()
    place = f" at {worst['where']}" if worst["where"] else ""
    if worst["kind"] in LOST and (between := _between(run, worst)):
        what, place = "Gradient is lost", between
    first = next(iter(events(run.alerts)), None)
    if first is None or (first.alert.kind, first.alert.where) == (worst["kind"], worst["where"]):
        return f"{what}{place} since step {worst['step']}."
    where = f" at {first.alert.where}" if first.alert.where else ""
    return f"{what}{place} since step {worst['step']}; first came {first.alert.kind}{where} (step {first.since})."


def _between(run: RunView, alert: Mapping[str, Any]) -> str:
    """From the last point with half of the gradient to the one with the least: " between B and A (down to 1e-7)"."""
    first = run.header.flows[0].name if run.header and run.header.flows else None
    key = metric_key("gradient_product", None if alert["flow"] in (None, first) else alert["flow"])
    product, labels = run.products.get(key), run.labels.get(key, ())
    if product is None or len(labels) != len(product) or not np.isfinite(product).any():
        return ""
    low = int(np.nanargmin(np.where(np.isfinite(product), product, np.nan)))
    behind = np.flatnonzero(product[low:] >= 0.5 * product[-1]) + low
    if not len(behind) or behind[0] == low:
        return ""
    return f" between {labels[behind[0]]} and {labels[low]} (down to {product[low]:.2g})"


def facts(run: RunView) -> list[str]:
    """One sentence a flow on how much gradient arrives, from the last record; then what silence covers."""
    sentences = [_fact(run, key, product) for key, product in run.products.items()]
    rest = len(sentences) - FACTS
    shown = sentences if rest <= 1 else [*sentences[:FACTS], f"and {rest} more flows"]
    return [*shown, run.header.coverage] if run.header is not None and run.header.coverage else shown


def _fact(run: RunView, key: str, product: Array) -> str:
    _, flow = split_key(key)
    name = flow or (run.header.flows[0].name if run.header and run.header.flows else "the network")
    labels = run.labels.get(key, ())
    named = [labels[i] if i < len(labels) else f"row {i}" for i in range(len(product))]
    seen = np.flatnonzero(np.isfinite(product))
    if not len(seen):
        return f"{name}: the last record has no finite gradient."
    first, low = int(seen[0]), int(seen[product[seen].argmin()])
    words = (
        f"{name}: at step {run.last_step} the gradient at {named[first]} is {product[first]:.3g} times that at "
        f"{named[-1]}; least {product[low]:.3g} at {named[low]}."
    )
    if first == 0 or (first == 1 and named[0].endswith(":input")):
        return words  # data at the input of the stack asks for no gradient
    return f"{words} Before {named[first]} no finite gradient was seen."
