"""`make screenshots` finds what it photographs: run on a small imitation of the demo, in a real browser."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from panels_run import chromium

from flowscope.records import Alert, FlowLayout, Record, RunHeader
from flowscope.sinks import JsonlSink, TensorBoardSink

POINTS = ("b.0:input", "b.0", "b.1", "b.2")


def write_run(folder: Path, floor: float) -> None:
    labels = {"gradient_product": POINTS, "cosine": POINTS[1:], "cosine_matrix": POINTS, "gate_mean": POINTS[2:]}
    header = RunHeader("0.1.0", (FlowLayout("b", "blocks", POINTS, POINTS[1:]),), labels)
    alert = Alert("vanishing_gradient", "error", "b.1", 5, floor, 1e-3, "it is lost", "lower the rate", flow="b")
    for sink in (JsonlSink(folder), TensorBoardSink(folder)):
        sink.write(header)
        for step in range(0, 30, 5):
            metrics = {
                "gradient_product": floor ** np.array([1.0, 0.6, 0.3, 0.0]),
                "cosine": np.array([0.2, 0.5, 0.9]),
                "cosine_matrix": 0.5 + 0.5 * np.eye(4),
                "gate_mean": np.array([0.2, 0.3]),
            }
            sink.write(Record(step, 3.0, metrics, flow_names=("b",), metric_labels=labels))
            if step == 5 and floor < 1e-3:
                sink.write(alert)
        sink.close()


def test_screenshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "examples"))
    with chromium():
        pass  # says so, or fails with CI=true, where there is no browser
    screenshots = importlib.import_module("screenshots")
    runs, images = tmp_path / "runs", tmp_path / "images"
    write_run(runs / "post_ln", 1e-5)
    write_run(runs / "pre_ln", 0.5)
    write_run(runs / "post_ln_keel", 0.1)
    monkeypatch.setattr(sys, "argv", ["screenshots.py", "--runs", str(runs), "--images", str(images)])
    screenshots.main()
    from PIL import Image

    reports = {"report_alert.png", "report_depth_dark.png", "report_gates.png", "report_runs.png"}
    assert {p.name for p in images.iterdir()} == {"tensorboard_tab.png"} | reports
    for path in images.iterdir():
        assert 10_000 < path.stat().st_size < screenshots.LIMIT
        with Image.open(path) as image:
            # a page that stayed empty has a handful of colours
            assert len(image.convert("RGB").getcolors(10**6)) > 60
