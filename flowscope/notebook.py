"""How a record and a scope look in a notebook: HTML with a small inline SVG, no script, nothing fetched.

Colours follow the notebook's own text colour, so light and dark themes both work. Everything that comes from a run
(module paths, messages, notes) is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from flowscope.diagnosis import paired
from flowscope.metrics import Metric, spec_of
from flowscope.records import Alert, Record, Run, RunHeader, metric_key
from flowscope.sinks.binning import extent, log10, shortened

FLOWS = 4
ALERTS = 10
POINTS = 256
LISTED = 200
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 420, 120, 48, 8, 18

_LINE = "#3B8FD1"
_SEVERITY = {"error": "#D55E00", "warning": "#E69F00", "info": "#56B4E9"}


def record_html(record: Record) -> str:
    """One record: step, loss, flags, a profile per flow, and the range over depth of every metric, folded away."""
    parts = [f"<div><b>flowscope record</b> of step {record.step}{_loss(record)}"]
    parts += [f" <code>{escape(flag)}</code>" for flag in record.flags]
    parts.append(_profiles(record))
    parts += [f"<div><i>{escape(note)}</i></div>" for note in record.notes]
    if record.metrics:
        rows = "".join(_row(key, values) for key, values in record.metrics.items())
        head = "<tr><th>metric</th><th>shape</th><th>least</th><th>largest</th><th>not seen</th></tr>"
        parts.append(f"<details><summary>{len(record.metrics)} metrics</summary><table>{head}{rows}</table></details>")
    return "".join(parts) + "</div>"


def scope_html(header: RunHeader | None, records: Sequence[Record], alerts: Sequence[Alert]) -> str:
    """A run so far: the last profile of each flow, the alerts that stand, and those that were resolved, counted."""
    version = f" {escape(header.version)}" if header else ""
    if not records:
        return f"<div><b>flowscope</b>{version}: no record yet; the first comes with the first training step.</div>"
    last = records[-1]
    count = f"{len(records)} record{'s' * (len(records) != 1)}"
    head = f"<b>flowscope</b>{version}: {count}, last of step {last.step}{_loss(last)}"
    return f"<div>{head}{_profiles(last)}{_alerts(alerts)}</div>"


def tables_html(tables: Mapping[str, Sequence[Sequence[str]]], remarks: Sequence[str] = ()) -> str:
    """Tables with their captions (their first lines are heads), then remarks."""
    parts = []
    for caption, rows in tables.items():
        head, *lines = (list(map(escape, row)) for row in rows)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
        named = f"<caption>{escape(caption)}</caption>" if caption else ""
        top = "".join(f"<th>{cell}</th>" for cell in head)
        parts.append(f"<table>{named}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>")
    return "<div>" + "".join([*parts, *(f"<div>{escape(remark)}</div>" for remark in remarks)]) + "</div>"


def alerts_html(alerts: Sequence[Alert]) -> str:
    """Alerts as a table: a line an alert, from raised to resolved."""
    pairs = paired(alerts)
    if not pairs:
        return "<div>no alert</div>"
    rows = [("severity", "alert", "where", "since step", "until", "what it says", "what to do")]
    for one in pairs[-LISTED:]:
        until = "stands" if one.resolved is None else str(one.resolved)
        said = one.alert.message, one.alert.advice
        rows.append((one.alert.severity, one.alert.kind, one.alert.where, str(one.since), until, *said))
    hidden = len(pairs) - len(rows) + 1
    return tables_html({"": rows}, [f"{hidden} earlier ones are not shown"] * (hidden > 0))


def run_html(run: Run) -> str:
    """A recorded run: as `scope_html`, and what gives its numbers."""
    words = 'run.to_pandas("gradient_product"), run.columns(), run.to_csv(path) give the numbers'
    return f"<div>{scope_html(run.header, run.records, run.alerts)}<div><code>{escape(words)}</code></div></div>"


def _loss(record: Record) -> str:
    return "" if record.loss is None else f", loss {record.loss:.4g}"


def _row(key: str, values: NDArray[np.float64]) -> str:
    seen = values[~np.isnan(values)]
    ends = (f"{seen.min():.4g}", f"{seen.max():.4g}") if seen.size else ("-", "-")
    shape = " x ".join(map(str, values.shape))
    cells = (escape(key), shape, *ends, str(values.size - seen.size))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


# -- alerts -----------------------------------------------------------------------------------------------------------


def _alerts(alerts: Sequence[Alert]) -> str:
    pairs = paired(alerts)
    standing = [incident.alert for incident in pairs if incident.resolved is None]
    resolved = len(pairs) - len(standing)
    shown = standing[-ALERTS:]
    hidden = len(standing) - len(shown)
    words = ["" if standing else "no alert stands"]
    words += [f"{hidden} earlier ones stand too" if hidden else "", f"{resolved} resolved" if resolved else ""]
    listed = f"<ul>{''.join(map(_alert, shown))}</ul>" if shown else ""
    return f"{listed}<div>{', '.join(filter(None, words))}</div>"


def _alert(alert: Alert) -> str:
    colour = _SEVERITY.get(alert.severity, "currentColor")
    place = f" at <code>{escape(alert.where)}</code>" if alert.where else ""
    return (
        f'<li><b style="border-left:4px solid {colour};padding-left:4px">{escape(alert.severity)}</b> since step '
        f"{alert.step}: <b>{escape(alert.kind)}</b>{place}: {escape(alert.message)} &rarr; {escape(alert.advice)}</li>"
    )


# -- profiles ---------------------------------------------------------------------------------------------------------


def _profiles(record: Record) -> str:
    """The gradient product (else the first metric with a profile) of the first flows."""
    names = record.flow_names or ("",)
    parts = []
    for number, name in enumerate(names):
        key = metric_key("gradient_product", None if number == 0 else name)
        values = record.metrics.get(key)
        if values is not None and values.ndim == 1 and values.size:
            parts.append(profile_svg(values, record.metric_labels.get(key, ()), key, name, record.specs))
    hidden = len(parts) - FLOWS
    if not parts:
        return "<div>no gradient product in this record</div>"
    return "".join(parts[:FLOWS]) + (f"<div>and {hidden} more flows</div>" if hidden > 0 else "")


def profile_svg(
    values: NDArray[np.float64],
    labels: Sequence[str],
    key: str,
    flow: str = "",
    specs: Mapping[str, Metric] = MappingProxyType({}),
) -> str:
    """One profile over depth, input on the left; hovering a point gives its path and value.

    Args:
        values: [P]; NaN is a gap. On a log scale 0 lies on the foot of the chart, inf on its head, at least a decade
            apart. Beyond 256 points, evenly spaced ones are drawn, and always the least.
        labels: a path per value; missing ones are numbered.
        key: the key of the metric in `Record.metrics`, which decides the scale.
        flow: the flow's name, for the caption.
        specs: what the run says of its metrics.

    Returns:
        A `<figure>` with the SVG and a caption that names the least value and its place.
    """
    log = spec_of(key, specs).is_log
    shown = _shown(values)
    heights = log10(values) if log else values
    low, high = _range(heights, log)
    width = WIDTH - LEFT - 8
    xs = LEFT + shown.astype(np.float64) * (width / max(1, len(values) - 1))
    share = np.clip((np.clip(heights[shown], low, high) - low) / (high - low), 0, 1)
    ys = TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)
    names = [labels[i] if i < len(labels) else str(i) for i in range(len(values))]
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_LINE}"><title>{escape(names[i])}: {values[i]:.4g}</title>'
        "</circle>"
        for x, y, i in zip(xs, ys, shown.tolist(), strict=True)
        if not math.isnan(y)
    )
    svg = (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'style="color:inherit;max-width:100%" font-size="10" fill="currentColor">'
        f"<title>{escape(key)}</title>{_axes(low, high, log, names)}{_lines(xs, ys)}{dots}</svg>"
    )
    words = f"{escape(flow)}: " if flow else ""
    return f'<figure style="margin:4px 0">{svg}<figcaption>{words}{_least(values, names, key)}</figcaption></figure>'


def _shown(values: NDArray[np.float64]) -> NDArray[np.int64]:
    spaced = np.linspace(0, len(values) - 1, min(len(values), POINTS)).round().astype(np.int64)
    least = [] if np.isnan(values).all() else [int(np.nanargmin(values))]
    return np.unique(np.concatenate([spaced, np.array(least, dtype=np.int64)]))


def _range(heights: NDArray[np.float64], log: bool) -> tuple[float, float]:
    low, high = extent(heights, (0.0, 0.0) if log else (0.0, 1.0))
    if log:
        return min(math.floor(low), math.ceil(high) - 1.0), float(math.ceil(high))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _axes(low: float, high: float, log: bool, names: Sequence[str]) -> str:
    foot, right = HEIGHT - BOTTOM, WIDTH - 8
    texts = [
        (LEFT - 4, TOP + 4, "end", _tick(high, log)),
        (LEFT - 4, foot + 4, "end", _tick(low, log)),
        (LEFT, HEIGHT - 4, "start", shortened(names[0])),
        (right, HEIGHT - 4, "end", shortened(names[-1])),
    ]
    frame = f'<path d="M{LEFT} {TOP}V{foot}H{right}" fill="none" stroke="currentColor" stroke-opacity=".4"/>'
    return frame + "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>' for x, y, anchor, words in texts
    )


def _tick(value: float, log: bool) -> str:
    return f"1e{value:.0f}" if log else f"{value:.3g}"


def _lines(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> str:
    """A polyline for each stretch without NaN."""
    parts = []
    for gap, stretch in groupby(zip(xs.tolist(), ys.tolist(), strict=True), key=lambda point: math.isnan(point[1])):
        if not gap:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in stretch)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>')
    return "".join(parts)


def _least(values: NDArray[np.float64], names: Sequence[str], key: str) -> str:
    if np.isnan(values).all():
        return f"{escape(key)}: not seen"
    index = int(np.nanargmin(values))
    return f"{escape(key)}: least {values[index]:.3g} at <code>{escape(names[index])}</code>"
