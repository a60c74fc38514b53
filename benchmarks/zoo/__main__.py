"""`python -m benchmarks.zoo [text | timm | libraries] [NAME ...]`: see the package."""

from __future__ import annotations

import importlib.util
import logging
import pickle
import sys
import time
import warnings
from pathlib import Path

import torch

from benchmarks.patience import time_limit
from benchmarks.zoo import images, libraries, page, text
from benchmarks.zoo.judging import Row

ZOOS = {"text": (text, "transformers"), "timm": (images, "timm"), "libraries": (libraries, "diffusers")}
SECONDS = 120
"""Of processor time a model gets; one that needs more is named."""
KEPT = Path("build") / "zoo"


def fill(name: str, chosen: list[str]) -> list[Row]:
    """Return the rows of a zoo: those kept of an earlier run as they are, but for the chosen, which are judged anew."""
    folder = KEPT / name
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for row, judged in ZOOS[name][0].rows(chosen):
        kept, start = folder / f"{row.group}.{row.name}.pickle", time.monotonic()
        if kept.exists() and not chosen:
            rows.append(pickle.loads(kept.read_bytes()))
            continue
        try:
            with time_limit(SECONDS):
                judged()
        except TimeoutError as error:
            row.broken = str(error)
        rows.append(row)
        kept.write_bytes(pickle.dumps(row))
        print(row, f"{time.monotonic() - start:.0f} s", flush=True)
    return rows


def main(arguments: list[str]) -> int:
    """Run the zoos named, or all that are installed; the status says whether none is wrong."""
    warnings.filterwarnings("ignore")
    logging.getLogger("flowscope").propagate = False
    logging.getLogger("flowscope").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    images.with_operators()  # before transformers asks for torchvision
    named = [one for one in arguments if one in ZOOS] or list(ZOOS)
    chosen = [one for one in arguments if one not in ZOOS]
    wrong = 0
    for name in named:
        if importlib.util.find_spec(ZOOS[name][1]) is None:
            print(f"{name}: {ZOOS[name][1]} is not installed")
            continue
        rows = fill(name, chosen)
        print(page.score(rows))
        wrong += sum(fault.startswith("silent") for row in rows for fault in row.faults.values())
        if not chosen:
            page.write({name: page.section(name, ZOOS[name][0].about(), rows)})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
