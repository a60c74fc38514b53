"""What all detectors together cost for one record of a deep model: `python -m benchmarks.detectors`.

1,000 blocks and 10,000 parameters with every default metric, healthy numbers with noise. The budget is 1 ms a record.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors import DetectorSet
from flowscope.records import FlowLayout, Record, RunHeader


def make(blocks: int, parameters: int, count: int, every: int) -> tuple[RunHeader, list[Record]]:
    """A header and `count` records of a healthy run."""
    random = np.random.default_rng(0)
    paths = tuple(f"blocks.{i}" for i in range(blocks))
    names = tuple(f"blocks.{i}.weight" for i in range(parameters))
    header = RunHeader("0", (FlowLayout("blocks", "blocks", ("embed", *paths), paths),), {"param_norm": names})
    return header, [one(random, step * every, blocks, parameters, every, names) for step in range(count)]


def one(
    random: np.random.Generator, step: int, blocks: int, parameters: int, every: int, names: tuple[str, ...]
) -> Record:
    """One record."""

    def around(value: float, size: int) -> np.ndarray:
        return value * np.exp(0.1 * random.standard_normal(size))

    points, ones = blocks + 1, np.ones(parameters)
    gain = np.exp(0.001 * random.standard_normal(blocks))
    product = np.append(np.cumprod(gain[::-1])[::-1], 1.0)
    metrics = {
        "grad_norm": product,
        "gradient_product": product,
        "gain": gain,
        "act_rms": around(1, points),
        "nonfinite": np.zeros(points),
        "nonfinite_grad": np.zeros(points),
        "forward_calls": np.ones(points),
        "tracked_calls": np.ones(points),
        "backward_calls": np.ones(points),
        "cosine": random.uniform(0.8, 0.9, blocks),
        "cosine_to_input": np.linspace(1, 0.2, points),
        "token_cosine": random.uniform(0.1, 0.5, points),
        "sample_cosine": random.uniform(0.1, 0.5, points),
        "effective_rank": random.uniform(20, 30, points),
        "param_norm": around(5, parameters),
        "param_grad_norm": around(0.1, parameters),
        "param_grad_norm_raw": around(0.1, parameters),
        "update_ratio": around(1e-3, parameters),
        "param_unchanged": np.zeros(parameters),
        "param_trainable": ones,
        "param_optimized": ones,
        "param_is_norm": np.zeros(parameters),
        "param_epsilon": 1.2e-7 * ones,
        "param_lr": 1e-3 * ones,
        "weight_spread": around(1, parameters),
        "dead_fraction": random.uniform(0, 0.1, blocks),
        "saturation": random.uniform(0, 0.1, blocks),
        "clip_ratio": np.array([0.5]),
        "grad_carried": np.zeros(1),
        "output_spread": np.array([0.5]),
        "output_width": np.array([1000.0]),
        "norm_gap": random.uniform(0, 0.1, blocks),
        "rank_gap": np.zeros(parameters),
        "step_losses": 2 + 0.1 * random.standard_normal(every),
        "canary": np.zeros(4),
    }
    return Record(step, 2.0, metrics, flow_names=("blocks",), metric_labels={"param_norm": names})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detectors")
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=10_000)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--each", action="store_true", help="also by detector")
    options = parser.parse_args()
    header, records = make(options.blocks, options.parameters, options.records, options.every)
    detectors = DetectorSet(WatchConfig())
    times, alerts = [], 0
    for record in records:
        started = time.perf_counter()
        alerts += len(detectors.check(record, header))
        times.append(1e3 * (time.perf_counter() - started))
    low, middle, high = np.percentile(times, [25, 50, 75])
    print(
        f"{options.blocks} blocks, {options.parameters} parameters: {middle:.2f} ms a record "
        f"(quartiles {low:.2f} to {high:.2f}; {len(times)} records, {alerts} alerts; budget 1 ms)"
    )
    for detector in DetectorSet(WatchConfig()).detectors if options.each else ():
        own = []
        for record in records:
            started = time.perf_counter()
            list(detector.findings(record, header))
            own.append(1e3 * (time.perf_counter() - started))
        print(f"  {detector.name:26} {np.median(own):.3f}")


if __name__ == "__main__":
    main()
