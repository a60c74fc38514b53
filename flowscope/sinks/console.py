"""One line a record and alerts in full, for a terminal; profiles of several runs side by side."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowscope.backdrop import LOSS, Backdrop, Behind, read
from flowscope.diagnosis import folded
from flowscope.errors import FlowscopeError
from flowscope.records import Alert, Event, Record, RunHeader
from flowscope.sinks.binning import bin_means, extent, log10
from flowscope.terminal import block, shown

WIDTH = 40
ROWS = 14
BAR = 12

_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-=+*%#"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_NOT_SEEN = "·"
_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


class ConsoleSink:
    """Prints to a terminal or a log file: only ever whole lines, one after the other.

    On a terminal, with `rich` installed (`pip install flowscope[rich]`), lines are coloured and cut to its width.
    Nothing is repainted: a training process has other writers (prints, warnings, bars), and a view that moves the
    cursor would overwrite them. The view that repaints is `flowscope live RUN`, in a terminal of its own.

    While a tqdm bar is alive, everything is printed above it, and on a terminal records are not printed.

    Args:
        stream: where to; None is `sys.stdout` at the time of writing (so that redirection works).
        records: also print a line for each record (step, loss, least gradient product with its place, a sparkline of
            the gradient product from the input on the left to the output on the right); alerts are always printed.
    """

    def __init__(self, stream: TextIO | None = None, *, records: bool = True) -> None:
        self._stream = stream
        self._records = records
        self._closed = False
        self._behind: Backdrop | None = None

    def write(self, event: Event) -> None:
        """Print the event: a line at most for a header or record."""
        stream = self._stream if self._stream is not None else sys.stdout
        if self._closed or stream is None:  # a process without a terminal (pythonw) has no stdout
            return
        if isinstance(event, RunHeader):
            self._behind = read(event.behind)
        terminal, bar = is_terminal(stream), _progress_bar()
        if not isinstance(event, Alert) and (not self._records or (terminal and bar is not None)):
            return
        line = self._line(event, stream, terminal)
        if bar is not None:
            bar.write(line, file=stream)
        else:
            stream.write(line + "\n")
        stream.flush()

    def close(self) -> None:
        """Stop printing; the stream stays open, it is not ours."""
        self._closed = True

    def _line(self, event: Event, stream: TextIO, terminal: bool) -> str:
        ascii_only = not can_encode(stream)
        if isinstance(event, Alert):
            line = folded(event)
        elif isinstance(event, RunHeader):
            line = _header_line(event)
        else:
            columns = shutil.get_terminal_size().columns if terminal else None
            line = record_line(event, ascii_only=ascii_only, columns=columns, behind=self._behind)
        if ascii_only:
            encoding = getattr(stream, "encoding", None) or "ascii"
            line = line.encode(encoding, "replace").decode(encoding)
        # a message or a path of two lines would break the promise of one
        line = shown(line.replace("\r", " ").replace("\n", " "))
        return _coloured(line, _style(event), stream) if terminal else line


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal; a closed or strange one is not."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _progress_bar() -> Any:
    """The class of tqdm bars where one is alive, else None; tqdm is never imported for it."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return tqdm if getattr(tqdm, "_instances", None) else None


def _style(event: Event) -> str:
    if isinstance(event, Alert):
        return "green" if event.state == "resolved" else _STYLES.get(event.severity, "")
    return "dim" if isinstance(event, RunHeader) else ""


def _coloured(line: str, style: str, stream: TextIO) -> str:
    """The line in colour, where rich is installed and the terminal has colours."""
    try:
        from rich.console import Console
    except ImportError:
        return line
    console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if console.legacy_windows:  # colours there are calls, not text
        return line
    with console.capture() as captured:
        console.print(line, style=style, end="")
    return captured.get()


def can_encode(stream: TextIO) -> bool:
    """Whether the stream's encoding has the block characters of sparklines and bars."""
    try:
        (_LEVELS + _EIGHTHS + _NOT_SEEN).encode(getattr(stream, "encoding", None) or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def record_line(
    record: Record, *, ascii_only: bool = False, columns: int | None = None, behind: Backdrop | None = None
) -> str:
    """One line: step, loss, log10 of the least gradient product and its place, sparkline of the gradient product.

    Args:
        record: the record.
        ascii_only: use only ASCII in the sparkline.
        columns: make the sparkline, of at least 8 characters, so narrow that the line fits this width.
        behind: the reference: its loss stands beside, and its sparkline (of several runs their median's) on one scale.
    """
    parts = [f"step {record.step:>6}", "loss         -" if record.loss is None else f"loss {record.loss:>9.4g}"]
    flags = [f"[{flag}]" for flag in record.flags]
    curves = behind.curves if behind is not None else {}
    if record.loss is not None and LOSS in curves:
        parts[-1] += f" ({_reference_loss(curves[LOSS], record.step)})"
    if "gradient_product" in record:
        product = record["gradient_product"]
        profiles = [product]
        if "gradient_product" in curves:
            lines = curves["gradient_product"].at(record.step)[1]
            profiles.append(lines[len(lines) // 2])
        parts.append(_least(product, record.labels("gradient_product")))
        # one column is left free: a full last line makes some terminals break it
        rest = WIDTH if columns is None else columns - 1 - len("  ".join([*parts, "", *flags]))
        width = min(WIDTH, max(8, (rest - len("  reference ")) // 2 if len(profiles) > 1 else rest))
        drawn = sparklines(profiles, width, ascii_only=ascii_only)
        parts += [drawn[0], *(f"reference {bars}" for bars in drawn[1:])]
    return "  ".join([*parts, *flags])


def _reference_loss(curve: Behind, step: int) -> str:
    """What the reference had there, or at the nearest step that is kept."""
    near, lines = curve.at(step)
    ends = " to ".join(f"{value:.4g}" for value in dict.fromkeys((lines[0, 0], lines[-1, 0])))
    return f"reference {ends}" + (f" at step {near}" if near != step else "")


def _least(product: NDArray[np.float64], labels: list[str]) -> str:
    seen = ~np.isnan(product)
    if not seen.any():
        return "gradient product not seen"
    index = int(np.nanargmin(product))
    place = labels[index] if index < len(labels) else str(index)
    return f"log10 least product {float(log10(product[index])):+.1f} at {place}"


def _header_line(header: RunHeader) -> str:
    flows = ", ".join(f"{flow.name} ({len(flow.blocks)} blocks)" for flow in header.flows) or "no flow"
    return f"flowscope {header.version}: {flows}; profiles run from the input (left) to the output (right)"


def sparkline(values: ArrayLike, width: int = WIDTH, log: bool = True, *, ascii_only: bool = False) -> str:
    """A profile over depth as one line of bars.

    On a log scale the highest bar is the largest value and the lowest the smallest, with at least one decade between
    them (so that noise does not look like a slope); on a linear scale bars run from min(0, smallest) to the largest.

    Args:
        values: [L]; more than `width` values are averaged in bins (of their logarithms on a log scale).
        width: the most characters that come out.
        log: log scale (0 is drawn as the lowest bar, +inf as the highest, negative values as not seen).
        ascii_only: use `_.-=+*%#` instead of block characters.

    Returns:
        At most `width` characters, one a value or bin; a dot where nothing was seen.
    """
    (bars,) = sparklines([values], width, log, ascii_only=ascii_only)
    return bars


def sparklines(
    profiles: Sequence[ArrayLike], width: int = WIDTH, log: bool = True, *, ascii_only: bool = False
) -> list[str]:
    """Several profiles as `sparkline` draws them, on one scale."""
    flat = [np.asarray(values, dtype=np.float64).reshape(-1) for values in profiles]
    drawn = [bin_means(log10(profile) if log else profile, width) for profile in flat]
    low, high = _scale(np.concatenate(drawn), log)
    levels = _ASCII_LEVELS if ascii_only else _LEVELS
    dot = " " if ascii_only else _NOT_SEEN

    def mark(value: float) -> str:
        return dot if np.isnan(value) else levels[round(_share(value, low, high) * (len(levels) - 1))]

    return ["".join(map(mark, profile)) for profile in drawn]


def _share(value: float, low: float, high: float) -> float:
    """Where `value` lies between `low` (0) and `high` (1), held within both."""
    if high <= low:
        return 0.0 if value <= low else 1.0
    return min(1.0, max(0.0, (value - low) / (high - low)))


def depth_profile_text(
    records: Mapping[str, Record], metric: str = "gradient_product", *, rows: int = ROWS, ascii_only: bool = False
) -> str:
    """The profiles of one metric in several runs, side by side: depth downwards, a column of numbers and bars a run.

    Args:
        records: name of the run -> a record of it; all share one scale.
        metric: a metric with one value a point or block; its own scale is that of all.
        rows: at most so many rows, evenly spaced from the input to the output (both included).
        ascii_only: use `#` for bars.

    Returns:
        Lines without a newline at the end. The rows are numbered by the deepest run; runs of other depth are read at
        the same fraction of their own.

    Raises:
        FlowscopeError: no run is given, a record lacks the metric, or it is not a profile.
    """
    profiles = {name: _profile(name, record, metric) for name, record in records.items()}
    if not profiles:
        raise FlowscopeError("depth_profile_text: got no records, expected {'name of a run': record, ...}.")
    log = all(record.spec(metric).is_log for record in records.values())
    deepest = max(len(profile) for profile in profiles.values())
    shown = np.unique(np.linspace(0, deepest - 1, min(rows, deepest)).round().astype(int))
    fractions = shown / max(1, deepest - 1)
    columns = {
        name: profile[(fractions * (len(profile) - 1)).round().astype(int)] for name, profile in profiles.items()
    }
    values = np.concatenate(list(columns.values()))
    low, high = _scale(log10(values) if log else values, log)
    width = max(10 + BAR, *(len(name) + 1 for name in columns))
    scale = f"bars: {'log10 ' if log else ''}{low:.3g} to {high:.3g}"
    lines = [f"{metric} (input first; {scale})", "depth  " + "".join(f"{name:<{width}}" for name in columns)]
    for row, depth in enumerate(shown):
        cells = (_cell(float(column[row]), log, low, high, ascii_only) for column in columns.values())
        lines.append(f"{depth:>5}  " + "".join(f"{cell:<{width}}" for cell in cells))
    return block(line.rstrip() for line in lines)


def _profile(name: str, record: Record, metric: str) -> NDArray[np.float64]:
    profile = record[metric]
    if profile.ndim != 1 or not profile.size:
        raise FlowscopeError(
            f"depth_profile_text: {metric!r} of {name!r} has shape {profile.shape}, expected one value a point or "
            "block; a matrix is shown as an image by TensorBoardSink."
        )
    return profile


def _scale(heights: NDArray[np.float64], log: bool) -> tuple[float, float]:
    """The ends of the bars, of logarithms on a log scale: there at least one decade apart, else 0 is inside."""
    low, high = extent(heights)
    return (min(low, high - 1.0) if log else min(low, 0.0)), high


def _cell(value: float, log: bool, low: float, high: float, ascii_only: bool) -> str:
    if np.isnan(value):
        return f"{'-':>8} "
    share = _share(float(log10(value)) if log else value, low, high)
    return f"{value:>8.2g} {_bar(share, ascii_only)}"


def _bar(share: float, ascii_only: bool) -> str:
    """A bar of at most `BAR` characters; the smallest value keeps a trace."""
    if ascii_only:
        return "#" * max(1, round(share * BAR))
    eighths = max(1, round(share * BAR * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
