"""Figures for papers, from records alone; matplotlib is imported on the first call (`pip install flowscope[plot]`).

    from flowscope import plot

    plot.depth_profile(scope.records, "gradient_product").savefig("profile.pdf")
    plot.heat_map(read_run("runs/a"), "act_rms")            # depth by step
    plot.cosine_matrix(scope.records)                       # layer by layer
    plot.gates(scope.records)                               # gated models
    plot.mixing(scope.records)                              # hyper-connections: how streams are mixed
    plot.compare({"plain": run_a, "keel": run_b})           # two runs on top of each other

Everything returns a `matplotlib.figure.Figure` that belongs to no window and to no pyplot state. Input is a `Run`, a
`Scope`, a list of `Record` or one record. A metric is drawn on the scale that its run gives it. NaN (not seen) is a gap
in a line and grey in a map. Exactly 0 is a triangle at the foot of a log axis and dark red in a map, inf likewise
at its head.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flowscope.errors import FlowscopeError
from flowscope.metrics import Metric
from flowscope.records import Key, Record
from flowscope.sinks.binning import extent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

PROFILES = 6
COLUMNS = 1000
SITES = 16
NAMED, LONGEST = 14, 24
"""So many rows of a map bear their names, and so many characters of one."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, told apart by colour-blind readers too."""
_EXPECTED = {
    1: "one value a point or block; plot.cosine_matrix and plot.mixing draw matrices.",
    2: "[P, P].",
    3: "[sites, S, S].",
}
_NOT_SEEN, _ZERO, _INFINITE = "0.8", "#67001f", "#ff2fd0"


class HasRecords(Protocol):
    """A `Run` (`flowscope.sinks.read_run`) or a `Scope`."""

    @property
    def records(self) -> Sequence[Record]:
        """The records, oldest first."""


Source = HasRecords | Sequence[Record] | Record


class _Series(NamedTuple):
    """One metric through a run: `values[i]` [L] is what the record of `steps[i]` says."""

    name: str
    metric: str
    steps: list[int]
    values: list[NDArray[np.float64]]
    labels: list[str]
    records: list[Record]

    @property
    def spec(self) -> Metric:
        """What the run says of the metric."""
        return self.records[-1].spec(self.metric)


def depth_profile(
    records: Source, metric: str = "gradient_product", *, flow: str | None = None, steps: Sequence[int] | None = None
) -> Figure:
    """A metric along depth, a line a step; the last with its 5th to 95th percentile where the metric has them.

    Args:
        records: a run, scope, list of records or record.
        metric: a metric with one value a point, block, site or parameter.
        flow: the flow, or a part of its path; None is the first.
        steps: which sampled steps; None is six evenly spaced among the records, first and last included.

    Raises:
        FlowscopeError: no record has the metric, it is no profile, a step was not sampled, or no matplotlib.
    """
    series = _series(records, metric, flow, dimensions=1)
    chosen = _chosen(series, steps)
    figure = _figure(5.5, 3.6)
    axes = figure.subplots()
    colours = _step_colours(len(chosen))
    log = series.spec.is_log
    lines = {
        f"step {series.steps[index]}": _draw_line(axes, series.values[index], colour, log=log)
        for colour, index in zip(colours, chosen, strict=True)
    }
    _draw_band(axes, series.records[chosen[-1]], metric, flow, colours[-1])
    _finish_profile(axes, metric, log=log)
    _text(axes.set_title, series.name)
    _text(axes.set_xlabel, _depth_words(series))
    _legend(axes, lines)
    return figure


def heat_map(records: Source, metric: str = "gradient_product", *, flow: str | None = None) -> Figure:
    """A metric by depth (downwards, input at the top) and step (to the right).

    At most 1,000 records are drawn, evenly spaced, first and last included; each column is as wide as the time until
    its neighbours. A log scale spans at least two decades, so that noise does not look like a slope.

    Args:
        records: a run, scope, list of records or record.
        metric: a metric with one value a point, block, site or parameter.
        flow: the flow, or a part of its path; None is the first.

    Raises:
        FlowscopeError: no record has the metric, it is no profile, or no matplotlib.
    """
    series = _series(records, metric, flow, dimensions=1)
    figure = _figure(6.0, 3.8)
    _draw_map(figure.subplots(), series, log=series.spec.is_log)
    return figure


def cosine_matrix(records: Source, *, flow: str | None = None) -> Figure:
    """The cosine between the hidden states of each pair of depths, of the last record that has it.

    Args:
        records: a run, scope, list of records or record; the metric is on the slow schedule.
        flow: the flow, or a part of its path; None is the first.

    Raises:
        FlowscopeError: no record has `cosine_matrix`, or no matplotlib.
    """
    series = _series(records, "cosine_matrix", flow, dimensions=2)
    matrix = series.values[-1]
    figure = _figure(4.6, 3.9)
    axes = figure.subplots()
    edges = np.arange(len(matrix) + 1) - 0.5
    low = -1.0 if extent(matrix)[0] < 0 else 0.0
    mesh = axes.pcolormesh(edges, edges, matrix, cmap=_colour_map(), vmin=low, vmax=1.0, rasterized=True)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    figure.colorbar(mesh, ax=axes, label="cosine")
    _text(axes.set_title, f"{series.name}, step {series.steps[-1]}")
    _text(axes.set_ylabel, _depth_words(series))
    return figure


def gates(records: Source, *, flow: str | None = None) -> Figure:
    """Mean gate values by depth and step, and the last record's along depth with its 5th to 95th percentile.

    Args:
        records: a run, scope, list of records or record of a gated model.
        flow: the flow, or a part of its path; None is the first.

    Raises:
        FlowscopeError: no record has `gate_mean`, or no matplotlib.
    """
    wanted = "plot.gates", "Gates are", "'keel' or 'highway'"
    series = _series_of_wrapped(records, "gate_mean", flow, dimensions=1, wanted=wanted)
    figure = _figure(7.5, 3.8)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
    _draw_map(left, series, log=False)
    last, depth = series.records[-1], np.arange(len(series.values[-1]))
    right.plot(series.values[-1], depth, color=COLOURS[0], marker=".")
    if (band := _band(last, "gate_mean", flow)) is not None:
        right.fill_betweenx(depth, *band, color=COLOURS[0], alpha=0.25, linewidth=0)
    right.set_xlim(0, 1)
    right.set_xlabel("gate (band: 5 to 95 %)")
    right.set_title(f"step {last.step}")
    right.grid(alpha=0.3)
    return figure


def mixing(records: Source, *, flow: str | None = None) -> Figure:
    """The mixing matrices [S, S] of the last record that has them, a square a site; row: output, column: input stream.

    At most 16 sites are drawn, evenly spaced, first and last included, on one scale of colours that includes 0.

    Args:
        records: a run, scope, list of records or record of a model with hyper-connections.
        flow: the flow, or a part of its path; None is the first.

    Raises:
        FlowscopeError: no record has `mix_matrix`, or no matplotlib.
    """
    wanted = "plot.mixing", "Mixing is", "'shc', 'dhc' or 'mhc'"
    series = _series_of_wrapped(records, "mix_matrix", flow, dimensions=3, wanted=wanted)
    sites = series.values[-1]
    shown = np.unique(np.linspace(0, len(sites) - 1, min(len(sites), SITES)).round().astype(int))
    columns = min(8, len(shown))
    rows = -(-len(shown) // columns)
    low, high = extent(sites, (0.0, 1.0))
    low, high = min(low, 0.0), max(high, 0.0)
    figure = _figure(1.1 * columns + 1.2, 1.3 * rows + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    for axes, site in zip(grid.flat, shown, strict=False):
        picture = axes.imshow(sites[site], cmap=_colour_map(), vmin=low, vmax=high if high > low else low + 1)
        axes.set(xticks=[], yticks=[])
        _text(axes.set_title, series.labels[site] if site < len(series.labels) else str(site), fontsize="x-small")
    figure.colorbar(picture, ax=grid, label="weight")
    _text(figure.suptitle, f"{series.name}, step {series.steps[-1]}", fontsize="medium")
    return figure


def compare(runs: Mapping[str, Source], metric: str = "gradient_product", *, flow: str | None = None) -> Figure:
    """Runs on top of each other: the last profile of each (its first dashed), and their losses where given.

    Args:
        runs: name -> run, scope, list of records or record.
        metric: a metric with one value a point, block, site or parameter.
        flow: the flow, or a part of its path, in every run; None is each run's first.

    Raises:
        FlowscopeError: no run is given, one lacks the metric, it is no profile, or no matplotlib.
    """
    if not isinstance(runs, Mapping) or not runs:
        raise FlowscopeError(
            f"plot.compare(runs): got {runs!r:.80}, expected "
            "{'plain': read_run('runs/a'), 'keel': read_run('runs/b')}."
        )
    series = {name: _series(run, metric, flow, dimensions=1) for name, run in runs.items()}
    losses = {name: [(r.step, r.loss) for r in _records(run) if r.loss is not None] for name, run in runs.items()}
    with_loss = any(losses.values())
    figure = _figure(8.5 if with_loss else 5.5, 3.6)
    left, *others = figure.subplots(1, 1 + with_loss, squeeze=False)[0]
    _draw_runs(left, series, metric)
    for axes in others:
        lines = {
            name: axes.plot(*zip(*losses[name], strict=True), color=colour)[0]
            for name, colour in zip(losses, cycle(COLOURS), strict=False)
            if losses[name]
        }
        axes.set_title("loss")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        _legend(axes, lines)
    return figure


# -- what to draw ---------------------------------------------------------------------------------------------------


def _records(source: Source) -> list[Record]:
    """Records by step, one a step (the last given)."""
    if isinstance(source, Record):
        return [source]
    given: Any = getattr(source, "records", source)
    given = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(record, Record) for record in given):
        raise FlowscopeError(
            f"flowscope.plot: got {type(source).__name__}, expected a Run, a Scope, a list of Record or a Record; "
            "flowscope.sinks.read_run(log_dir) reads a run from its folder."
        )
    by_step = {record.step: record for record in given}
    if not by_step:
        raise FlowscopeError(
            f"flowscope.plot: got a {type(source).__name__} without a record, expected at least one sampled step; "
            "train a step with flowscope.watch(model, optimizer) first."
        )
    return [by_step[step] for step in sorted(by_step)]


def _series_of_wrapped(
    source: Source, metric: str, flow: str | None, dimensions: int, wanted: tuple[str, str, str]
) -> _Series:
    """Likewise, of what only wrapped models record; `wanted` is the figure, what it shows, and the modes that do."""
    figure, shown, modes = wanted
    try:
        return _series(source, metric, flow, dimensions)
    except FlowscopeError as error:
        raise FlowscopeError(
            f"{figure}: {error} {shown} recorded in models changed by flowscope.wrap(model, mode={modes})."
        ) from None


def _series(source: Source, metric: str, flow: str | None, dimensions: int) -> _Series:
    key: Key = metric if flow is None else (metric, flow)
    records = _records(source)
    found = [record for record in records if key in record]
    if not found:
        records[-1][key]  # raises, with the list of what there is
    values = [record[key] for record in found]
    for record, value in zip(found, values, strict=True):
        if value.ndim != dimensions or not value.size:
            raise FlowscopeError(
                f"flowscope.plot: {metric!r} of step {record.step} has shape {value.shape}, expected "
                + _EXPECTED[dimensions]
            )
    return _Series(
        metric if flow is None else f"{metric} of {flow}",
        metric,
        [r.step for r in found],
        values,
        found[-1].labels(metric, flow),
        found,
    )


def _chosen(series: _Series, steps: Sequence[int] | None) -> list[int]:
    """The indices of the profiles to draw."""
    if steps is None:
        count = min(PROFILES, len(series.steps))
        return sorted({round(i) for i in np.linspace(0, len(series.steps) - 1, count).tolist()})
    missing = [step for step in steps if step not in series.steps]
    if missing or not len(steps):
        near = sorted(series.steps, key=lambda step: abs(step - (missing or [0])[0]))[:PROFILES]
        raise FlowscopeError(
            f"plot.depth_profile(steps={list(steps)}): got {missing or 'no step'}, expected sampled steps that have "
            f"the metric; nearest: {sorted(near)}. `watch(every=...)` sets which steps are sampled."
        )
    return [series.steps.index(step) for step in sorted(steps)]


def _band(record: Record, metric: str, flow: str | None) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    keys: list[Key] = [name if flow is None else (name, flow) for name in record.spec(metric).band or ()]
    return (record[keys[0]], record[keys[1]]) if keys and all(key in record for key in keys) else None


def _depth_words(series: _Series) -> str:
    """What the rows are, and which are the first and the last."""
    last, labels = len(series.values[-1]) - 1, series.labels
    if last < 1 or len(labels) != last + 1:
        return f"{_rows(series)}, input first"
    return f"{_rows(series)} (0: {labels[0]}, {last}: {labels[-1]})"


def _rows(series: _Series) -> str:
    return "parameter" if series.spec.view == "Parameters" else "depth"


# -- how to draw it ---------------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlowscopeError(
            f"flowscope.plot: matplotlib cannot be imported ({error}); expected it to be installed: "
            "pip install flowscope[plot]"
        ) from error
    # without pyplot: no window, no global list of figures to clean up
    figure = Figure(figsize=(width, height), layout="constrained")
    # what a notebook asks for where pyplot, which was not imported, has not told it how to show figures
    vars(figure)["_repr_png_"] = partial(_png, figure)
    return figure


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def _text(setter: Any, words: str, **look: Any) -> None:
    """Set a title or label that may hold module paths: a $ in one starts no formula."""
    setter(words, parse_math=False, **look)


def _legend(axes: Axes, lines: Mapping[str, Line2D]) -> None:
    legend = axes.legend(list(lines.values()), [str(name) for name in lines], fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)


def _step_colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    # the yellow end of the map is too light for lines on white
    return [colormaps["viridis"](share) for share in (np.linspace(0, 0.85, count) if count > 1 else [0.0])]


def _colour_map() -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"].with_extremes(bad=_NOT_SEEN, under=_ZERO, over=_INFINITE)


def _draw_runs(axes: Axes, series: Mapping[str, _Series], metric: str) -> None:
    """The last profile of each run and, dashed, its first; runs of other depth at the same fraction of their own."""
    log, lines = all(one.spec.is_log for one in series.values()), {}
    relative = len({len(one.values[-1]) for one in series.values()}) > 1
    for (name, one), colour in zip(series.items(), cycle(COLOURS), strict=False):
        if len(one.values) > 1:
            _draw_line(axes, one.values[0], colour, log=log, relative=relative, style="--")
        last = _draw_line(axes, one.values[-1], colour, log=log, relative=relative)
        lines[f"{name}, step {one.steps[-1]}"] = last
    _finish_profile(axes, metric, log=log)
    axes.set_title("last record (dashed: first)")
    words = _depth_words(next(iter(series.values())))
    _text(axes.set_xlabel, "relative depth (0: input, 1: output)" if relative else words)
    _legend(axes, lines)


def _draw_line(
    axes: Axes, values: NDArray[np.float64], colour: Any, *, log: bool, relative: bool = False, style: str = "-"
) -> Line2D:
    depth = np.arange(len(values)) / (max(1, len(values) - 1) if relative else 1)
    marker = "." if len(values) <= 64 and style == "-" else None
    (line,) = axes.plot(depth, values, color=colour, linestyle=style, marker=marker, linewidth=1.3)
    foot = (values == -np.inf) | (values == 0) if log else values == -np.inf
    for where, height, symbol in ((foot, 0.0, "v"), (values == np.inf, 1.0, "^")):
        if where.any():
            heights = np.full(where.sum(), height)
            edge = axes.get_xaxis_transform()
            axes.plot(depth[where], heights, symbol, color=colour, transform=edge, clip_on=False)
    return line


def _draw_band(axes: Axes, record: Record, metric: str, flow: str | None, colour: Any) -> None:
    if (band := _band(record, metric, flow)) is not None:
        axes.fill_between(np.arange(len(band[0])), *band, color=colour, alpha=0.2, linewidth=0)


def _finish_profile(axes: Axes, metric: str, *, log: bool) -> None:
    if log:
        if not np.isfinite(axes.dataLim.minposy):
            axes.set_ylim(0.1, 1)  # nothing to scale by
        axes.set_yscale("log", nonpositive="mask")
        low, high = axes.get_ylim()
        if high < 10 * low:  # less than a decade: noise would look like a slope
            middle = (low * high) ** 0.5
            axes.set_ylim(middle / 10**0.5, middle * 10**0.5)
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)


def _draw_map(axes: Axes, series: _Series, *, log: bool) -> None:
    """A metric by depth and step, with the bar of its colours."""
    from matplotlib.colors import LogNorm, Normalize

    count = len(series.steps)
    shown = np.unique(np.linspace(0, count - 1, min(count, COLUMNS)).round().astype(int))
    steps = np.array(series.steps, dtype=np.float64)[shown]
    # a flow whose depth changed keeps all its columns: what a record does not have is not seen
    grid = np.full((max(len(series.values[i]) for i in shown), len(shown)), np.nan)
    for column, index in enumerate(shown):
        grid[: len(series.values[index]), column] = series.values[index]
    low, high = _limits(grid, log, series.spec.bounds)
    norm = LogNorm(low, high) if log else Normalize(low, high)
    # matplotlib masks infinities, and 0 on a log scale, like NaN; they are the worst values, not absent ones
    drawn = np.nan_to_num(grid, nan=np.nan, posinf=np.finfo(np.float64).max, neginf=np.finfo(np.float64).min)
    if log:
        drawn = np.where(drawn == 0, np.finfo(np.float64).tiny, drawn)
    edges = np.arange(len(grid) + 1) - 0.5
    mesh = axes.pcolormesh(_step_edges(steps), edges, drawn, cmap=_colour_map(), norm=norm, rasterized=True)
    axes.set_ylim(len(grid) - 0.5, -0.5)
    axes.figure.colorbar(mesh, ax=axes, label=series.metric)
    _text(axes.set_title, series.name)
    _name_rows(axes, series, len(grid))
    axes.set_xlabel("step")


def _name_rows(axes: Axes, series: _Series, count: int) -> None:
    """Each row by its name where there is room for them, else the first and the last."""
    if not len(series.labels) == count <= NAMED:
        _text(axes.set_ylabel, _depth_words(series))
        return
    names = [f"…{name[1 - LONGEST :]}" if len(name) > LONGEST else name for name in series.labels]
    axes.set_yticks(range(count), names, fontsize="small")
    for name in axes.get_yticklabels():
        name.set_parse_math(False)
    axes.set_ylabel(f"{_rows(series)}, input first")


def _step_edges(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N+1]: columns reach half-way to their neighbours."""
    if len(steps) < 2:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[:-1] + steps[1:]) / 2
    return np.array([2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]])


def _limits(grid: NDArray[np.float64], log: bool, bounds: tuple[float, float] | None) -> tuple[float, float]:
    low, high = extent(grid[grid > 0] if log else grid, (0.0, 0.0) if log else (0.0, 1.0))
    if log and not high:
        return 0.1, 1.0
    if log:
        top = np.ceil(np.log10(high))
        return float(10 ** min(np.floor(np.log10(low)), top - 2)), float(10**top)
    if high > low:
        return low, high
    # one value everywhere: what it may lie between says more than what is near it
    return bounds if bounds and bounds[0] <= low <= bounds[1] else (low - 0.5, high + 0.5)
