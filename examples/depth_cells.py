"""One cell of the depth study: a connection mode at a depth, trained for some steps under `flowscope.watch`.

Everything the study says comes from the records of `watch`; this file only decides what is built and what is kept.
`wrap(mode="residual")` changes nothing (`x + f` stays `x + f`), so plain models have the metrics of merge sites too.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from byte_lm import VOCABULARY, ByteLM, batches, load_text, train_step
from torch import nn

import flowscope

STEPS = {8: 300, 32: 300, 64: 200, 128: 120, 256: 80, 512: 60, 1024: 40}
"""Depths of the study, and for how many steps each is trained."""
DEPTHS = tuple(STEPS)
HEADS = 2
LAST = 20
"""Losses are means over the last steps: this many, a quarter of the run where that is less."""
TRAINS = 0.1
"""A stack trains if it is this many nats a byte better than byte frequencies; the plateau of those that do not is 0."""
KEPT_PROFILES = 5
LEFT_OUT = ("mix_matrix", "cosine_matrix", "nonfinite", "nonfinite_grad", "canary", "backward_calls", "forward_calls")


@dataclass(frozen=True)
class Variant:
    """A way to build the decoder: where its norms are, and which connection its merges have."""

    norm: Literal["pre", "post"]
    mode: str
    label: str
    cost: float
    """Milliseconds a block and step, forward, backward and update: only to plan with, corrected by what is measured."""
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS: dict[str, Variant] = {
    "post-ln": Variant("post", "residual", "Post-LN", 1.2),
    "pre-ln": Variant("pre", "residual", "Pre-LN", 1.2),
    "post-keel": Variant("post", "keel", "keel -2 on Post-LN", 1.5, {"init_bias": -2.0}),
    "post-keel+2": Variant("post", "keel", "keel +2 on Post-LN", 1.5, {"init_bias": 2.0}),
    "pre-keel": Variant("pre", "keel", "keel +2 on Pre-LN", 1.5),
    "post-highway": Variant("post", "highway", "highway -2 on Post-LN", 1.5),
    "keel-postln": Variant("pre", "keel-postln", "keel-postln", 1.4),
    "deepnorm": Variant("post", "deepnorm", "deepnorm", 1.2),
    "shc": Variant("pre", "shc", "shc, 4 streams", 2.2),
    "dhc": Variant("pre", "dhc", "dhc, 4 streams", 2.8),
    "mhc": Variant("pre", "mhc", "mhc, 4 streams", 4.6),
}


EXTRAS: dict[str, Variant] = {
    "post-keel-auto": Variant("post", "keel", "keel auto on Post-LN", 1.5),
    "post-keel-4": Variant("post", "keel", "keel -4 on Post-LN", 1.5, {"init_bias": -4.0}),
    "pre-keel-2": Variant("pre", "keel", "keel -2 on Pre-LN", 1.5, {"init_bias": -2.0}),
    "post-highway+2": Variant("post", "highway", "highway +2 on Post-LN", 1.5, {"init_bias": 2.0}),
    "pre-highway": Variant("pre", "highway", "highway -2 on Pre-LN", 1.5),
    "pre-highway+2": Variant("pre", "highway", "highway +2 on Pre-LN", 1.5, {"init_bias": 2.0}),
    **{
        f"{mode}-distinct": Variant("pre", mode, f"{mode}, distinct streams", cost, {"streams_init": "distinct"})
        for mode, cost in (("shc", 2.2), ("dhc", 2.8), ("mhc", 4.6))
    },
    **{f"dhc-{n}": Variant("pre", "dhc", f"dhc, {n} streams", 1.6 + 0.3 * n, {"streams": n}) for n in (1, 2, 6, 8)},
    **{
        f"dhc-{init}": Variant("pre", "dhc", f"dhc, init {init}", 2.8, {"init": init})
        for init in ("ramp", "alternate", "mixed", "sparse")
    },
    **{
        f"dhc-s{scale}": Variant("pre", "dhc", f"dhc, scale {scale}", 2.8, {"dynamic_scale_init": scale})
        for scale in (0.1, 1.0)
    },
}
"""What single claims need beside the study's variants."""


@dataclass(frozen=True)
class Cell:
    """What is run: a variant, a depth, and how it is trained. One step is the initial state."""

    variant: str
    depth: int
    steps: int
    lr: float = 1e-3
    seed: int = 0
    width: int = 32
    batch: int = 8
    length: int = 32

    @property
    def name(self) -> str:
        """The name of the file that holds the result; it says everything that was chosen."""
        size = f"w{self.width}-b{self.batch}-t{self.length}"
        return f"{self.variant}-{self.depth}x{self.steps}-lr{self.lr:g}-seed{self.seed}-{size}"

    @property
    def work(self) -> float:
        """Expected seconds on one core, before correction."""
        # building, wrapping, and records of the whole depth come on top of the steps
        return 1e-3 * self.depth * (variant(self.variant).cost * self.steps * self.width / 32 + 6.0)


def variant(name: str) -> Variant:
    """A variant of the study, or one of those that only a claim needs."""
    return VARIANTS.get(name) or EXTRAS[name]


def build(cell: Cell) -> nn.Module:
    """The decoder of a cell, the same for the same seed.

    Its head starts from the bytes' frequencies, which any stack learns through the bias alone: what is gained beyond
    them has come through the depth, and shows within tens of steps.
    """
    about = variant(cell.variant)
    torch.manual_seed(cell.seed)
    model = ByteLM(norm=about.norm, depth=cell.depth, width=cell.width, heads=HEADS, length=cell.length)
    with torch.no_grad():
        model.head.bias.copy_(log_frequencies())
    example = torch.zeros(2, cell.length, dtype=torch.long)
    return flowscope.wrap(model, about.mode, example_inputs=example, **about.options)


def sampled_steps(steps: int) -> list[int]:
    """Where records are taken: dense at first, when it is decided whether a stack trains; and the last step."""
    early = [step for step in (0, 5, 10, 20, 40) if step < steps]
    return sorted({*early, *np.linspace(0, steps - 1, 8).round().astype(int).tolist()})


def run_cell(cell: Cell, tick: Callable[[int], None] = lambda steps: None) -> dict[str, Any]:
    """Train one cell and return its result as plain numbers; stops early when the loss is no number any more."""
    started = time.process_time()
    torch.set_num_threads(1)
    model = build(cell)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell.lr)
    data = batches(load_text(), cell.batch, cell.length, seed=cell.seed)
    wanted = set(sampled_steps(cell.steps))
    losses: list[float] = []
    references: list[float] = []
    known = log_frequencies()
    config = {"console": "off", "slow_every": 1}
    with flowscope.watch(model, optimizer, every=wanted.__contains__, config=config) as scope:
        for _ in range(cell.steps):
            batch = next(data)
            loss = train_step(model, optimizer, batch)
            scope.step(loss=loss)
            losses.append(loss.item())
            references.append(-known[batch[1]].mean().item())
            tick(1)
            if not math.isfinite(losses[-1]):
                break
    connections = sum(p.numel() for _, c in flowscope.connections(model) for p in c.parameters())
    return {
        "cell": asdict(cell),
        "losses": [rounded(loss) for loss in losses],
        "references": [rounded(loss) for loss in references],
        "records": kept(scope.records),
        "alerts": [[a.kind, a.where, a.step, a.severity] for a in scope.alerts if a.state == "raised"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "connection_parameters": connections,
        "cpu_seconds": round(time.process_time() - started, 2),
        "versions": {"flowscope": flowscope.__version__, "torch": torch.__version__},
    }


def kept(records: list[flowscope.Record]) -> list[dict[str, Any]]:
    """Records as JSON: whole profiles of some, first and last among them; of the others the ends and the middle."""
    whole = set(np.linspace(0, len(records) - 1, KEPT_PROFILES).round().astype(int).tolist())
    out = []
    for number, record in enumerate(records):
        metrics: dict[str, Any] = {}
        for name, values in record.metrics.items():
            if values.ndim != 1 or name in LEFT_OUT or name.startswith(("param_", "update_", "group_")):
                continue
            chosen = values if number in whole else values[[0, len(values) // 2, -1]] if len(values) else values
            metrics[name] = [rounded(value) for value in chosen.tolist()]
        out.append(
            {
                "step": record.step,
                "loss": None if record.loss is None else rounded(record.loss),
                "whole": number in whole,
                "metrics": metrics,
            }
        )
    return out


def rounded(value: float) -> float | None:
    """Six significant digits; None where there is no number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def cached(cell: Cell, folder: Path, tick: Callable[[int], None] = lambda steps: None) -> dict[str, Any]:
    """The result of a cell: from its file if it was run before, else run now and written."""
    path = folder / "cells" / f"{cell.name}.json"
    if path.exists():
        tick(cell.steps)
        return json.loads(path.read_text(encoding="utf-8"))
    result = run_cell(cell, tick)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(result, allow_nan=False, separators=(",", ":")), encoding="utf-8")
    scratch.replace(path)  # a run that is stopped leaves whole files only
    return result


def profile(result: dict[str, Any], metric: str, at: int = -1) -> np.ndarray:
    """A metric along depth, of the first (0) or last (-1) record; empty where the mode has no such metric."""
    records = [record for record in result["records"] if record["whole"] and metric in record["metrics"]]
    if not records:
        return np.array([])
    return np.array([np.nan if v is None else v for v in records[at]["metrics"][metric]])


def last_gain(result: dict[str, Any]) -> float:
    """Nats a byte by which the last steps are better than byte frequencies on the same batches; NaN: no number."""
    losses = result["losses"]
    if any(loss is None for loss in losses):
        return float("nan")
    last = min(LAST, max(1, len(losses) // 4))
    return float(np.mean(result["references"][-last:]) - np.mean(losses[-last:]))


def verdict(result: dict[str, Any]) -> Literal["trains", "stalls", "diverges"]:
    """Whether a run got beyond byte frequencies, stayed at them, or ended worse than them."""
    gain = last_gain(result)
    if math.isnan(gain) or gain < -TRAINS:
        return "diverges"
    return "trains" if gain > TRAINS else "stalls"


@functools.cache
def log_frequencies() -> torch.Tensor:
    """Logarithm of how often each byte occurs in the text, [V]; a byte that never does counts as one that does once."""
    counts = torch.bincount(load_text().long(), minlength=VOCABULARY).clamp_min(1).double()
    return (counts / counts.sum()).log().float()


def frequency_loss() -> float:
    """The loss of a model that knows how often each byte occurs and nothing else (entropy of the text), in nats."""
    known = log_frequencies().double()
    return float(-(known.exp() * known).sum())
