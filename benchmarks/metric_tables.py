"""The tables of docs/metrics.md, from the specs of the metrics.

    python -m benchmarks.metric_tables            whether the file is up to date
    python -m benchmarks.metric_tables --write    bring it up to date

A table stands at the head of each section that describes metrics, with those of its headings in their order.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from flowscope.instruments import METRICS
from flowscope.metrics import Metric

FILE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
BEGIN = "<!-- table: written by python -m benchmarks.metric_tables --write -->\n"
END = "<!-- end of table -->\n"
COLUMNS = ("metric", "says", "formula", "unit", "a row per", "scale", "healthy", "ranks")
RANKS = {"sum": "all", "first": "the first", "whole": "all; sharded: the first"}
ROWS = {"points": "point", "blocks": "block", "sites": "site", "modules": "module", "parameters": "parameter"}


def rendered(text: str) -> str:
    """The text with the table of each section brought up to date."""
    without = re.sub(rf"{re.escape(BEGIN)}.*?{re.escape(END)}\n", "", text, flags=re.DOTALL)
    sections = re.split(r"^(?=## )", without, flags=re.MULTILINE)
    return "".join(_with_table(section) for section in sections)


def _with_table(section: str) -> str:
    headings = re.findall(r"^### (.+)$", section, re.MULTILINE)
    names = [name for heading in headings for name in re.findall(r"`(\w+)`", heading)]
    if not names:
        return section
    at = section.index("### ")
    return f"{section[:at]}{BEGIN}{table([METRICS[name] for name in names])}{END}\n{section[at:]}"


def table(metrics: list[Metric]) -> str:
    """A row per metric."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *map(_row, metrics)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(metric: Metric) -> tuple[str, ...]:
    formula = f"{metric.formula} ({metric.source})" if metric.source else metric.formula
    cells = (metric.words, formula, metric.unit, ROWS.get(metric.rows, ""), metric.scale, metric.healthy)
    return (f"`{metric.name}`", *(cell.replace("|", "\\|") for cell in cells), RANKS[metric.ranks])


def main() -> None:
    """Check the file, or write it."""
    text = FILE.read_text(encoding="utf-8")
    if "--write" in sys.argv[1:]:
        FILE.write_text(rendered(text), encoding="utf-8")
    elif rendered(text) != text:
        sys.exit(f"{FILE.name} is not what the specs say: python -m benchmarks.metric_tables --write")


if __name__ == "__main__":
    main()
