"""How long the Flow tab takes to its first picture on a long, deep run, and how large the scripts and a report are.

    python benchmarks/panels.py [--steps 100000] [--blocks 1024]

Writes what TensorBoard keeps of such a run (2,000 records a metric), starts TensorBoard on it, waits until it has read
the file, and opens the tab in headless Chromium: from the navigation until the heat map is there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from flowscope.records import Alert, FlowLayout, Record, RunHeader
from flowscope.sinks import Run, TensorBoardSink
from flowscope.views import assets
from flowscope.views.report import write_report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from panels_run import Watched, chromium, tensorboard, wait_for_runs  # noqa: E402

METRICS = ("grad_norm", "gain", "gradient_product", "act_rms", "cosine", "token_cosine")
RECORDS = 2000
REPEATS = 5


def synthetic(steps: int, blocks: int) -> Run:
    """A run whose gradient slowly vanishes towards the input, with noise."""
    names = ("layers.0:input", *(f"layers.{i}" for i in range(blocks)))
    header = RunHeader("0.1.0", (FlowLayout("layers", "blocks", names, names[1:]),), dict.fromkeys(METRICS, names))
    generator = np.random.default_rng(0)
    depth = np.linspace(1, 0, blocks + 1)
    records = []
    for step in np.linspace(0, steps, RECORDS).astype(int).tolist():
        noise = generator.normal(size=(len(METRICS), blocks + 1)) * 0.1
        values = 10 ** (noise - 6 * depth * step / steps)
        records.append(Record(step, 1.0, dict(zip(METRICS, values, strict=True)), flow_names=("layers",)))
    alert = Alert("vanishing_gradient", "error", "layers.3", records[900].step, 1e-4, 1e-3, "m", "a", flow="layers")
    return Run(header, records, [alert])


def first_paint(logdir: Path) -> tuple[list[float], list[float]]:
    """Seconds to the heat map, from the navigation and from the tab's own first request; the first find cold caches."""
    whole, own = [], []
    with tensorboard(logdir) as address, chromium() as browser:
        wait_for_runs(address, 1)
        for _ in range(REPEATS):
            watched = Watched(browser)
            asked: list[float] = []
            watched.page.on(
                "request", lambda r, asked=asked: "plugin_entry" in r.url and asked.append(time.perf_counter())
            )
            started = time.perf_counter()
            watched.page.goto(f"{address}#flowscope", wait_until="commit")
            watched.page.frame_locator("iframe").locator(".heat canvas").first.wait_for(timeout=60_000)
            painted = time.perf_counter()
            whole.append(painted - started)
            own.append(painted - asked[0])
            watched.page.close()
    return whole, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=1024)
    arguments = parser.parse_args()
    run = synthetic(arguments.steps, arguments.blocks)
    with tempfile.TemporaryDirectory() as folder:
        sink = TensorBoardSink(Path(folder) / "run", images_every=0)
        for event in (run.header, *run.records, *run.alerts):
            sink.write(event)
        sink.close()
        whole, own = first_paint(Path(folder))
        report = write_report(run, Path(folder) / "report.html").stat().st_size
    print(f"{arguments.steps:,} steps x {arguments.blocks:,} blocks, {RECORDS} records x {len(METRICS)} metrics kept")
    print(f"from the navigation to the heat map: {whole[0]:.2f} s cold, {statistics.median(whole[1:]):.2f} s warm")
    print(
        f"of that the tab's own: {own[0]:.2f} s cold, {statistics.median(own[1:]):.2f} s warm (median of {REPEATS - 1})"
    )
    print(f"report of this run: {report / 1e6:.2f} MB")
    for ending, name in ((".js", "scripts"), (".css", "style")):
        sizes = [len(assets.read(file).encode()) for file in assets.served() if file.endswith(ending)]
        print(f"{name}: {sum(sizes) / 1e3:.1f} kB, files: {len(sizes)}")


if __name__ == "__main__":
    main()
