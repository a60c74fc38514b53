"""Synthetic records for the detector tests: a header of flows, and records whose other metrics are healthy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors import DetectorSet
from flowscope.records import Alert, FlowLayout, Record, RunHeader, metric_key

PARAMETERS = ("embed.weight", "blocks.0.fc.weight", "blocks.0.norm.weight", "blocks.1.fc.weight", "head.weight")


def layout(name: str = "blocks", depth: int = 6, kind: str = "blocks") -> FlowLayout:
    blocks = tuple(f"{name}.{i}" for i in range(depth))
    return FlowLayout(name, kind, ("embed", *blocks), blocks)


def header(*layouts: FlowLayout, parameters: Sequence[str] = PARAMETERS) -> RunHeader:
    return RunHeader("0", layouts or (layout(),), {"param_norm": tuple(parameters)})


def record(
    step: int,
    flow: Mapping[str, Iterable[float]] | None = None,
    *,
    others: Mapping[str, Mapping[str, Iterable[float]]] | None = None,
    flags: tuple[str, ...] = (),
    loss: float | None = 1.0,
    canary: Sequence[float] = (0, 0, 0, 0),
    **parameters: Iterable[float],
) -> Record:
    """A record of the first flow's metrics, those of other flows by name, and `param_*` by keyword."""
    metrics = {key: np.array([*values], dtype=np.float64) for key, values in (flow or {}).items()}
    for name, values in (others or {}).items():
        metrics |= {metric_key(key, name): np.array([*v], dtype=np.float64) for key, v in values.items()}
    metrics |= {key: np.array([*values], dtype=np.float64) for key, values in parameters.items()}
    metrics["canary"] = np.array(canary, dtype=np.float64)
    return Record(step, loss, metrics, flags, metric_labels={"param_norm": PARAMETERS})


def gradients(gain: Sequence[float], last: float = 1.0) -> dict[str, np.ndarray]:
    """The gradient metrics of a flow whose blocks have these gains (input to output)."""
    product = np.append(np.cumprod(np.array(gain)[::-1])[::-1], 1.0)
    return {"grad_norm": product * last, "gradient_product": product, "gain": np.array(gain)}


def slope(first: float, depth: int = 6, last: float = 1.0) -> dict[str, np.ndarray]:
    """Equal gains whose product at the first point is `first`."""
    return gradients([first ** (1 / depth)] * depth, last)


def play(records: Iterable[Record], head: RunHeader | None = None, config: WatchConfig | None = None) -> list[Alert]:
    """All alerts of a fresh detector set over these records."""
    detectors = DetectorSet(config or WatchConfig())
    return [alert for item in records for alert in detectors.check(item, head or header())]


def played_with_a_break(
    records: Sequence[Record], cut: int, head: RunHeader | None = None
) -> tuple[list[Alert], list[Alert]]:
    """All alerts of one detector set, and those of two where the second takes over the first's state at `cut`."""
    head, first, second = head or header(), DetectorSet(WatchConfig()), DetectorSet(WatchConfig())
    start = [alert for item in records[:cut] for alert in first.check(item, head)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    return play(records, head), start + [alert for item in records[cut:] for alert in second.check(item, head)]


def told(alerts: Iterable[Alert]) -> list[tuple[str, str, int, str]]:
    """What matters of alerts, for comparison."""
    return [(a.kind, a.where, a.step, a.state) for a in alerts]
