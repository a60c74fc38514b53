"""The page docs/zoo.md: a section a zoo, each written by one run."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from benchmarks.zoo.judging import MODES, Row

PAGE = Path(__file__).parent.parent.parent / "docs" / "zoo.md"
TITLES = {
    "text": "Language models of transformers",
    "timm": "timm's families",
    "libraries": "vit-pytorch, x-transformers, diffusers",
}
HEAD = """# The zoo: `watch` and `wrap` on models of other libraries

Written by `python -m benchmarks.zoo`. *Merges* is the count from the plain model's autograd graph: adds where one
operand is the other's ancestor and a layer with weights lies between; a second count that shares no code with
flowscope. What stands behind a + lies inside another merge's branch, where no site is looked for. Projections
(`g(x) + f(x)`) are sites too and no such add, so more sites than merges are no fault. *Watch*: two steps of training,
finite numbers along a depth axis.

For each mode the sites with a connection: `refused` where `wrap` raised; **wrong** where nothing was raised, but on
other inputs than those of `wrap`, evaluated or in training, the output moved by more than 1e-4 relative (in fp64 where
rounding alone is near that), or a tensor of a connection off its first value gets no gradient: a site changes nothing.
*Change*: the largest of all. Weights that start at nothing are given values first, else there were nothing to see.
"""


def share(number: int, of: int) -> str:
    """Return a share in words."""
    return f"{number} of {of} ({number / of:.1%})" if of else "none"


def score(rows: list[Row]) -> str:
    """Return the figures of a section."""
    running = [row for row in rows if not row.broken]
    merging = [row for row in running if row.expected]
    watched = [row for row in running if row.watched is not None]
    lines = [f"{len(running)} of {len(rows)} run here, {len(merging)} of them with identity merges."]
    lines += [f"Watched: {share(sum(not row.watched for row in watched), len(watched))}."] if watched else []
    for mode in MODES:
        if not any(mode in row.sites or mode in row.faults for row in merging):
            continue  # not asked of this zoo
        passing = [row for row in merging if row.passes(mode)]
        sites = sum(min(row.sites.get(mode, 0), row.expected) for row in passing)
        wrong = sum(row.faults.get(mode, "").startswith("silent") for row in running)
        lines.append(
            f"`{mode}`: {share(len(passing), len(merging))} models, "
            f"{share(sites, sum(row.expected for row in merging))} merges, {wrong} wrong."
        )
    families = len({row.group for row in rows}) == len(rows)
    without = [row.group if families else row.name for row in running if not row.expected]
    lines += [f"Without an identity merge: {', '.join(without)}."] if without else []
    return "\n".join(lines)


def section(name: str, about: str, rows: list[Row]) -> str:
    """Return a section."""
    rows = sorted(rows, key=lambda row: (bool(row.broken), not row.expected, row.group, row.name))
    head = f"| group | model | merges | watch | {' | '.join(f'`{mode}`' for mode in MODES)} | change | note |"
    table = "\n".join([head, "|---" * (head.count("|") - 1) + "|", *map(str, rows)])
    return f"## {TITLES[name]}\n\ntorch {torch.__version__}, {about}.\n\n{score(rows)}\n\n{table}\n"


def write(sections: dict[str, str]) -> None:
    """Put sections into the page, others stay."""
    old = PAGE.read_text() if PAGE.exists() else ""
    found = {part.partition("\n")[0]: f"## {part.strip()}\n" for part in re.split(r"^## ", old, flags=re.M)[1:]}
    found |= {TITLES[name]: text for name, text in sections.items()}
    PAGE.write_text("\n".join([HEAD, *(found[title] for title in TITLES.values() if title in found)]))
