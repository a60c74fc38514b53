"""The figures of the depth study, from the results of its cells. Everything is drawn from records; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from depth_cells import VARIANTS, profile
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

Result = dict[str, Any]
Results = dict[tuple[str, int], Result]
"""By variant and depth."""

STYLES: dict[str, tuple[str, str]] = {
    "post-ln": ("#000000", "-"),
    "pre-ln": ("#0072B2", "-"),
    "post-keel": ("#D55E00", "-"),
    "post-keel+2": ("#D55E00", ":"),
    "pre-keel": ("#E69F00", "-"),
    "post-highway": ("#CC79A7", "-"),
    "keel-postln": ("#882255", "--"),
    "deepnorm": ("#999933", "-"),
    "shc": ("#56B4E9", "-"),
    "dhc": ("#009E73", "-"),
    "mhc": ("#44AA99", "--"),
}
FLOOR = 1e-30
POINTS = 129


def by_depth(results: Results, metric: str, value: Callable[[np.ndarray], float], at: int) -> dict[str, Any]:
    """A number of each cell, by variant: (depths, values)."""
    lines: dict[str, Any] = {}
    for variant in VARIANTS:
        found = [(d, profile(r, metric, at)) for (v, d), r in sorted(results.items()) if v == variant]
        pairs = [(depth, value(values)) for depth, values in found if values.size]
        if pairs:
            lines[variant] = tuple(zip(*pairs, strict=True))
    return lines


def draw(axes: Axes, variant: str, x: Any, y: Any, **look: Any) -> None:
    """One line in the variant's own colour."""
    colour, dashes = STYLES[variant]
    axes.plot(x, y, color=colour, linestyle=dashes, label=VARIANTS[variant].label, linewidth=1.5, **look)


def depth_axis(axes: Axes, depths: Iterable[int]) -> None:
    """Blocks on a logarithmic axis, the depths of the study as its ticks."""
    ticks = sorted(set(depths))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{tick:,}" for tick in ticks])
    axes.set_xlabel("blocks")


def across_depths(
    results: Results, panels: list[tuple[str, str, Callable[[np.ndarray], float], bool]], at: int
) -> Figure:
    """A panel a quantity, depth to the right, a line a mode."""
    figure = Figure(figsize=(4.1 * len(panels), 3.5), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, metric, value, log) in zip(grid, panels, strict=True):
        for variant, (depths, values) in by_depth(results, metric, value, at).items():
            draw(axes, variant, depths, np.maximum(values, FLOOR) if log else values, marker=".", markersize=5)
        if log:
            axes.set_yscale("log")
        depth_axis(axes, (depth for _, depth in results))
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
    legend_below(figure, grid)
    return figure


def legend_below(figure: Figure, grid: Iterable[Axes]) -> None:
    """One legend for all panels."""
    named = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(
        named.values(),
        named.keys(),
        loc="outside lower center",
        ncols=min(max(2, int(figure.get_figwidth() / 2.2)), len(named)),
        fontsize="small",
        frameon=False,
    )


def shortcut(initial: Results) -> Figure:
    """Gradient that arrives at x_0 beside what the shortcut alone would bring, with the closed forms."""
    figure = Figure(figsize=(9.5, 3.9), layout="constrained")
    total, carry = figure.subplots(1, 2)
    for variant, (depths, values) in by_depth(initial, "gradient_product", lambda p: p[0], 0).items():
        draw(total, variant, depths, values, marker=".", markersize=5)
    lines = by_depth(initial, "shortcut_product", lambda p: p[0], 0)
    for variant, (depths, values) in lines.items():
        draw(carry, variant, depths, np.maximum(values, FLOOR), marker=".", markersize=5)
    depths = np.array(sorted({depth for _, depth in initial}), dtype=float)
    forms = {
        "2^(-L/2), L = 2 x blocks": 2.0 ** -np.minimum(depths, 99),
        "(1 + 1/L^2)^(-L/2)": (1 + 1 / (2 * depths) ** 2) ** -depths,
    }
    for (name, values), dashes in zip(forms.items(), ("--", ":"), strict=True):
        carry.plot(
            depths,
            np.maximum(values, FLOOR),
            color="0.55",
            linestyle=dashes,
            linewidth=1.2,
            label=f"closed form {name}",
        )
    for axes, title in (
        (total, "gradient_product: |dL/dx_0| / |dL/dx_L|"),
        (carry, "shortcut_product: the carry alone (cut at 1e-30)"),
    ):
        axes.set_yscale("log")
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
        depth_axis(axes, depths.astype(int).tolist())
    carry.set_ylim(FLOOR, 1e2)
    legend_below(figure, (total, carry))
    return figure


def along_depth(results: Results, depth: int, metric: str, log: bool) -> Figure:
    """A metric along the depth of one stack, at the start and at the end of training."""
    figure = Figure(figsize=(9.5, 3.9), layout="constrained")
    grid = figure.subplots(1, 2, sharey=True)
    for axes, at, title in zip(grid, (0, -1), ("at the start", "after training"), strict=True):
        for variant in VARIANTS:
            values = profile(results[variant, depth], metric, at) if (variant, depth) in results else np.array([])
            if values.size:
                draw(axes, variant, np.linspace(0, 1, len(values)), np.maximum(values, 1e-12) if log else values)
        if log:
            axes.set_yscale("log")
        axes.set_title(f"{metric}, {depth} blocks, {title}", fontsize="medium")
        axes.set_xlabel("depth (0: input, 1: output)")
        axes.grid(alpha=0.3)
    legend_below(figure, grid)
    return figure


def cosines(results: Results, depth: int) -> Figure:
    """Adjacent cosine along depth with its 5th to 95th percentile, a panel a mode (figure 3 of the HC paper)."""
    variants = [variant for variant in VARIANTS if (variant, depth) in results]
    columns = min(4, len(variants))
    rows = math.ceil(len(variants) / columns)
    figure = Figure(figsize=(2.75 * columns, 2.1 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(variants) :]:
        axes.set_axis_off()
    low = 1.0
    for axes, variant in zip(grid.flat, variants, strict=False):
        middle, *band = (profile(results[variant, depth], name) for name in ("cosine", "cosine_p05", "cosine_p95"))
        x, colour = np.linspace(0, 1, len(middle)), STYLES[variant][0]
        axes.fill_between(x, *band, color=colour, alpha=0.25, linewidth=0)
        axes.plot(x, middle, color=colour, linewidth=1.2)
        axes.set_title(VARIANTS[variant].label, fontsize="small")
        axes.grid(alpha=0.3)
        low = min(low, float(np.nanmin(band[0]))) if len(middle) else low
    grid[0, 0].set_ylim(max(-1.0, low - 0.05), 1.03)
    figure.supxlabel("depth (0: input, 1: output)", fontsize="small")
    figure.supylabel("cosine of neighbours", fontsize="small")
    return figure


def gates(results: Results, depths: list[int]) -> Figure | None:
    """Mean gate along depth after training, with its 5th to 95th percentile."""
    gated = [v for v in VARIANTS if any(profile(r, "gate_mean").size for (name, _), r in results.items() if name == v)]
    if not gated:
        return None
    figure = Figure(figsize=(3.1 * len(gated), 3.2), layout="constrained")
    grid = figure.subplots(1, len(gated), sharey=True, squeeze=False)[0]
    shades = np.linspace(0.75, 0.0, len(depths))
    for axes, variant in zip(grid, gated, strict=True):
        for shade, depth in zip(shades, depths, strict=True):
            if (variant, depth) not in results:
                continue
            mean, *band = (profile(results[variant, depth], f"gate_{name}") for name in ("mean", "p05", "p95"))
            x = np.linspace(0, 1, len(mean))
            axes.plot(x, mean, color=str(shade), linewidth=1.1, label=f"{depth:,} blocks")
            if depth == depths[0] and len(mean):
                axes.fill_between(x, *band, color="#56B4E9", alpha=0.3, linewidth=0)
        axes.set(xlabel="depth (0: input, 1: output)", ylim=(0, 1))
        axes.set_title(VARIANTS[variant].label, fontsize="medium")
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("gate_mean (t weighs the branch)")
    legend_below(figure, grid)
    return figure


def seesaw(initial: Results, trained: Results) -> Figure:
    """Gradient against similarity, a point a mode and depth: the articles' seesaw."""
    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    grid = figure.subplots(2, 2, sharex="col")
    ways = (("adjacent cosine, later half", "cosine"), ("token_cosine at x_L", "token_cosine"))
    for column, (results, at, title) in enumerate(((initial, 0, "at the start"), (trained, -1, "after training"))):
        for row, (label, metric) in enumerate(ways):
            axes = grid[row, column]
            for (variant, depth), result in sorted(results.items(), key=lambda item: item[0][1]):
                product, similar = profile(result, "gradient_product", at), profile(result, metric, at)
                if not (product.size and similar.size):
                    continue
                y = float(np.nanmedian(similar[len(similar) // 2 :])) if metric == "cosine" else float(similar[-1])
                colour = STYLES[variant][0]
                hollow = "none" if STYLES[variant][1] != "-" else colour
                size = 8 + 11 * max(0.0, math.log2(depth) - 2)
                axes.scatter(
                    max(product[0], 1e-12),
                    y,
                    s=size,
                    color=colour,
                    facecolor=hollow,
                    alpha=0.75,
                    label=VARIANTS[variant].label,
                )
            axes.axvspan(1e-3, 1e2, color="#009E73", alpha=0.06, linewidth=0)
            axes.set_xscale("log")
            axes.set_title(f"{title}", fontsize="medium")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
            if row:
                axes.set_xlabel("gradient_product at x_0")
    legend_below(figure, grid.flat)
    return figure


def losses(trained: Results, depths: list[int]) -> Figure:
    """Nats a byte gained over byte frequencies, by step; a panel a depth."""
    columns = min(3, len(depths))
    rows = math.ceil(len(depths) / columns)
    figure = Figure(figsize=(3.9 * columns, 2.8 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(depths) :]:
        axes.set_axis_off()
    for axes, depth in zip(grid.flat, depths, strict=False):
        for variant in VARIANTS:
            if (variant, depth) in trained:
                draw(axes, variant, *smooth_gain(trained[variant, depth]))
        axes.axhline(0, color="0.5", linewidth=0.8)
        axes.set_title(f"{depth:,} blocks", fontsize="medium")
        axes.set_xlabel("step")
        axes.set_ylim(-0.4, 1.0)
        axes.grid(alpha=0.3)
    figure.supylabel("nats a byte gained over byte frequencies", fontsize="small")
    legend_below(figure, grid.flat)
    return figure


def smooth_gain(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Steps and gain over byte frequencies, mean over windows of a twentieth of the run."""
    held = [(r, x) for r, x in zip(result["references"], result["losses"], strict=True) if x is not None]
    gain = np.array([r - x for r, x in held])
    width = max(1, len(gain) // 20)
    return np.arange(len(gain) - width + 1) + width / 2, np.convolve(gain, np.ones(width) / width, "valid")


def rescue(trained: Results, depth: int) -> Figure | None:
    """The plain stack that does not train beside the same stack wrapped: loss, and what `watch` recorded."""
    pair = [variant for variant in ("post-ln", "post-keel") if (variant, depth) in trained]
    if len(pair) < 2:
        return None
    figure = Figure(figsize=(11.5, 3.5), layout="constrained")
    loss, product, token = figure.subplots(1, 3)
    for variant in pair:
        result = trained[variant, depth]
        draw(loss, variant, *smooth_gain(result))
        steps = [record["step"] for record in result["records"]]
        for axes, metric, place in ((product, "gradient_product", 0), (token, "token_cosine", -1)):
            values = [record["metrics"].get(metric, [None])[place] for record in result["records"]]
            draw(axes, variant, steps, [np.nan if v is None else v for v in values], marker=".")
    product.set_yscale("log")
    for axes, title in (
        (loss, "nats gained over byte frequencies"),
        (product, "gradient_product at x_0"),
        (token, "token_cosine at x_L"),
    ):
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    legend_below(figure, (loss,))
    return figure
