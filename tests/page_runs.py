"""Runs as a sweep leaves them, written without training: some lose their gradient, one explodes, most are well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from flowscope.records import Alert, FlowLayout, Record, Run, RunHeader
from flowscope.sinks import JsonlSink, Sink

BLOCKS = 24
POINTS = ("blocks.0:input", *(f"blocks.{i}" for i in range(BLOCKS)))
PARAMETERS = tuple(f"blocks.{i}.{name}" for i in range(BLOCKS) for name in ("qkv.weight", "qkv.bias", "mlp.weight"))
LABELS = {"gradient_product": POINTS, "gain": POINTS[1:], "param_grad_norm": PARAMETERS, "update_ratio": PARAMETERS}
HEADER = RunHeader("0.2", (FlowLayout("blocks", "blocks", POINTS, POINTS[1:]),), LABELS, cost={"share": 0.0123})
STEPS = (*range(10), *range(10, 121, 10))
LOST_AT, TOLD_AT = 4, 5


def name_of(number: int) -> str:
    return f"pre_ln_lr{0.001 * (number + 1):.3f}_seed{number % 3}_width64_depth24"


def is_sick(number: int) -> bool:
    return number % 7 == 0


def record(step: int, number: int) -> Record:
    """The gradient of a sick run is lost between blocks.11 and blocks.0 from step 4 on."""
    share = 0.25 if is_sick(number) and step >= LOST_AT else 0.98
    gain = np.where(np.arange(BLOCKS) < 12, share, 0.99)
    product = np.append(np.cumprod(gain[::-1])[::-1], 1.0)
    ratios = 1e-3 * (1 + np.arange(len(PARAMETERS)) % 5)
    if number == 3:
        product = product * np.where(np.arange(BLOCKS + 1) == 7, 1e12, 1.0)  # one outlier
    metrics = {"gradient_product": product, "gain": gain, "param_grad_norm": ratios[::-1], "update_ratio": ratios}
    return Record(step, 4.0 if is_sick(number) else 4.0 / (1 + 0.05 * step), metrics)


def alerts(number: int) -> list[Alert]:
    if not is_sick(number):
        return []
    gone = Alert(
        "vanishing_gradient", "error", "blocks.23", TOLD_AT, 6e-8, 1e-3, "the gradient at blocks.0:input is lost",
        "wrap the blocks, or make them pre-norm", since=LOST_AT, flow="blocks",
    )  # fmt: skip
    return [gone]


def run(number: int) -> Run:
    return Run(HEADER, [record(step, number) for step in STEPS], alerts(number))


def written(folder: Path, count: int, kind: Callable[[Path], Sink] = JsonlSink) -> dict[str, Run]:
    runs = {name_of(number): run(number) for number in range(count)}
    for name, one in runs.items():
        sink = kind(folder / name)
        for event in (HEADER, *one.records, *one.alerts):
            sink.write(event)
        sink.close()
    return runs
