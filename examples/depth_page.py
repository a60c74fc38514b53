"""The page of the depth study: one HTML file that holds its figures, says what was run and what was not."""

from __future__ import annotations

import base64
import datetime
import html
import io
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import depth_figures as figures
import matplotlib as mpl
import numpy as np
from depth_cells import HEADS, TRAINS, VARIANTS, Cell, frequency_loss, last_gain, profile, verdict
from depth_figures import Result, Results
from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; max-width: 74rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.4rem; } p { max-width: 52rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; } th:first-child { text-align: left; }
tr + tr { border-top: 1px solid #ddd; } td.trains { background: #d9f0e3; } td.stalls { background: #f3e3c3; }
td.diverges { background: #f4cfc6; } td.none { color: #888; } small { color: #555; }
"""


def write_page(initial: Sequence[Cell], trained: Sequence[Cell], folder: Path) -> Path:
    """Write depth_study.html from what there is of the cells; return its path."""
    start, end = held(initial, folder), held(trained, folder)
    depths = sorted({cell.depth for cell in (*initial, *trained)})
    steps = {cell.depth: cell.steps for cell in trained}
    parts = [
        f"<h1>Depth study</h1>{opening(start, end)}",
        section("Where each mode stops training", WHERE, table(end, depths, steps), stops(end, depths)),
        *drawn(start, end, depths),
        section("What was not run", "", missing(trained, end)),
    ]
    page = folder / "depth_study.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Depth study</title><style>{STYLE}</style>'
    page.write_text(head + "\n".join(part for part in parts if part) + "</html>\n", encoding="utf-8")
    return page


WHERE = (
    f"Nats a byte gained over byte frequencies, mean over the last steps. The head starts from the frequencies, so "
    f"what is gained has come through the depth. Green: more than {TRAINS} (trains). Yellow: not (stalls). Red: worse "
    f"than frequencies by as much, or no number (diverges). Deeper stacks get fewer steps: compare within a column."
)


def held(cells: Iterable[Cell], folder: Path) -> Results:
    """The results that are there."""
    found: Results = {}
    for cell in cells:
        path = folder / "cells" / f"{cell.name}.json"
        if path.exists():
            found[cell.variant, cell.depth] = json.loads(path.read_text(encoding="utf-8"))
    return found


def drawn(start: Results, end: Results, depths: list[int]) -> list[str]:
    """The sections with figures."""
    best = max((d for d in depths if any(k[1] == d for k in end) and d <= 64), default=0)
    deepest = max((depth for variant, depth in end if variant == "post-keel"), default=0)
    late = [("effective_rank at x_L (of 32)", "effective_rank", lambda p: p[-1], False)]
    late += [("token_cosine at x_L", "token_cosine", lambda p: p[-1], False)]
    late += [("cosine_to_input at x_L", "cosine_to_input", lambda p: p[-1], False)]
    middle = ("adjacent cosine, median", "cosine", lambda p: float(np.nanmedian(p)), False)
    mixes = [
        (f"{name}, worst", name, lambda p: float(np.nanmax(p)), False)
        for name in ("mix_gain_forward", "mix_gain_backward")
    ]
    mixes += [("stream_cosine, mean", "stream_cosine", lambda p: float(np.nanmean(p)), False)]
    mixes += [("mix_identity_distance, mean", "mix_identity_distance", lambda p: float(np.nanmean(p)), False)]
    parts: list[tuple[str, str, list[Figure | None]]] = [
        ("Gradient at the start", SHORTCUT, [figures.shortcut(start)] if start else []),
        ("Representation at the start", "", [figures.across_depths(start, [middle, *late], 0)] if start else []),
    ]
    if end:
        shown = [depth for depth in depths if any(k[1] == depth for k in end)]
        parts += [
            (
                "Loss",
                "Smoothed over a twentieth of the run. 0 is a model that knows how often each byte occurs.",
                [figures.losses(end, shown)],
            ),
            (
                "The same stack, plain and wrapped",
                RESCUE,
                [figures.rescue(end, depth) for depth in dict.fromkeys((best, deepest))],
            ),
            ("The seesaw", SEESAW, [figures.seesaw(start, end)]),
            ("Gradient along depth", "", [figures.along_depth(end, best, "gradient_product", True)]),
            ("Cosine of neighbours after training", COSINE.format(best), [figures.cosines(end, best)]),
            ("Representation after training", "", [figures.across_depths(end, [middle, *late], -1)]),
            ("Gates after training", GATES, [figures.gates(end, shown)]),
            ("Mixing of streams after training", MIXING, [figures.across_depths(end, mixes, -1)]),
        ]
    return [
        section(title, words, *(picture(f, title) for f in drawings if f is not None))
        for title, words, drawings in parts
        if drawings
    ]


SHORTCUT = (
    "Left: what arrives. Right: what would arrive if no branch passed any gradient. The closed forms assume branches "
    "of unit size; Post-LN's branches are smaller at Xavier initialisation, so its shortcut falls more slowly, and the "
    "branches carry the rest of the total. In keel the merge keeps the carry whole; a norm after it is not counted."
)
RESCUE = (
    "Post-LN as written and after flowscope.wrap(model, mode='keel'): the same seed, batches and rate, and what the "
    "records of both say."
)
SEESAW = (
    "A point a mode and depth; larger is deeper. Green: a gradient product between 1e-3 and 100. Products are cut at "
    "1e-12. The articles' claim is that one pays for gradient with similarity: points would lie on a line from lower "
    "left to upper right."
)
COSINE = (
    "Median and 5th to 95th percentile over positions at {} blocks, as in figure 3 of the hyper-connections paper. "
    "Plain modes compare neighbouring blocks, modes with streams the inputs of neighbouring sub-layers (two a block): "
    "the closer pair, so a lower value there is not an artefact of the step."
)
GATES = "One line a depth, black is the deepest; the band is the shallowest stack's 5th to 95th percentile."
MIXING = "Gains of the composite residual mapping, the largest over depth; 1 is neutral."


def opening(start: Results, end: Results) -> str:
    """What was run, in one paragraph."""
    cells = [result["cell"] for result in (*end.values(), *start.values())]
    if not cells:
        return "<p>Nothing was run yet.</p>"
    one, versions = cells[0], next(iter((*end.values(), *start.values())))["versions"]
    spent = sum(result["cpu_seconds"] for result in (*start.values(), *end.values()))
    return (
        f"<p>A decoder of width {one['width']} with {HEADS} heads on the source of the Python standard "
        f"library (bytes, {frequency_loss():.3f} nats by frequency alone), batches of "
        f"{one['batch']} x {one['length']}, AdamW at {one['lr']:g} without warm-up, gradients clipped to 1, one seed. "
        f"{len(start)} initial states and "
        f"{len(end)} trained stacks, {spent / 60:.0f} minutes of one core. All numbers are from the records of "
        f"<code>flowscope.watch</code>.</p><p><small>{datetime.date.today()}, flowscope {versions['flowscope']}, "
        f"torch {versions['torch']}. Again: python examples/depth_study.py</small></p>"
    )


def table(end: Results, depths: list[int], steps: dict[int, int]) -> str:
    """Gain over byte frequencies, a row a mode, a column a depth."""
    head = "".join(f"<th>{depth:,}<br><small>{steps[depth]} steps</small></th>" for depth in depths)
    rows = []
    for variant, about in VARIANTS.items():
        cells = "".join(one_cell(end.get((variant, depth))) for depth in depths)
        rows.append(f"<tr><th>{html.escape(about.label)}</th>{cells}</tr>")
    return f'<div class="scroll"><table><tr><th>blocks</th>{head}</tr>{"".join(rows)}</table></div>'


def one_cell(result: Result | None) -> str:
    """A cell of the table; what the detectors said is its title."""
    if result is None:
        return '<td class="none">not run</td>'
    gain = last_gain(result)
    alerts = sorted({kind for kind, *_ in result["alerts"]})
    shown = f"{gain:+.2f}" if gain == gain else "no number"
    return f'<td class="{verdict(result)}" title="alerts: {", ".join(alerts) or "none"}">{shown}</td>'


def stops(end: Results, depths: list[int]) -> str:
    """For each mode the deepest stack that trained and the first that did not."""
    lines = []
    for variant, about in VARIANTS.items():
        known = [(depth, verdict(end[variant, depth])) for depth in depths if (variant, depth) in end]
        if not known:
            continue
        good = [depth for depth, says in known if says == "trains"]
        bad = next(((depth, says) for depth, says in known if says != "trains"), None)
        first = f"{bad[1]} at {bad[0]:,}" if bad else f"trains at every depth run (to {known[-1][0]:,})"
        product = profile(end[variant, bad[0]], "gradient_product")[0] if bad else None
        seen = f", gradient product at the end {product:.1e}" if product is not None else ""
        deepest = (
            f"trains up to {max(d for d in good if not bad or d < bad[0]):,}; "
            if bad and any(d < bad[0] for d in good)
            else ""
        )
        lines.append(f"<li>{html.escape(about.label)}: {deepest}{first}{seen}</li>")
    return f"<ul>{''.join(lines)}</ul>"


def missing(trained: Sequence[Cell], end: Results) -> str:
    """The cells without a result."""
    lost: dict[int, list[str]] = {}
    for cell in trained:
        if (cell.variant, cell.depth) not in end:
            lost.setdefault(cell.depth, []).append(VARIANTS[cell.variant].label)
    if not lost:
        return f"<p>Nothing: all {len(end)} cells of this plan are there.</p>"
    lines = []
    for depth, names in lost.items():
        which = "all modes" if len(names) == len(VARIANTS) else html.escape("; ".join(names))
        lines.append(f"<li>{depth:,} blocks, training: {which}</li>")
    return f"<p>The time budget (--minutes) left out:</p><ul>{''.join(lines)}</ul>"


def section(title: str, words: str, *content: str) -> str:
    """A heading, a paragraph, and what belongs to it."""
    text = f"<p>{html.escape(words)}</p>" if words else ""
    return f"<h2>{html.escape(title)}</h2>{text}{''.join(content)}"


def picture(figure: Figure, words: str) -> str:
    """A figure as an image inside the page."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    data = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "depth study"}):
        figure.savefig(data, format="svg", metadata={"Date": None})
    code = base64.b64encode(data.getvalue()).decode()
    return f'<figure><img alt="{html.escape(words)}" src="data:image/svg+xml;base64,{code}"></figure>'
