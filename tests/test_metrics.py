"""One spec per metric, and everything that is derived from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flowscope import recorder
from flowscope.distributed import is_local
from flowscope.metrics import Metric
from flowscope.panels import catalogue
from flowscope.probes import snapshot
from flowscope.records import UNDRAWN, Record
from flowscope.sinks import reduction, tensorboard
from flowscope.sinks.binning import is_log_metric


def test_a_metric_survives_json_and_leaves_out_its_defaults() -> None:
    plain = Metric("act_kurtosis", "Fourth moment over squared second.")
    assert plain.to_json() == {"name": "act_kurtosis", "words": "Fourth moment over squared second."}
    full = Metric(
        "x", "y", rows="modules", band=("a", "b"), bounds=(0.0, 1.0), limits=("c",), drawn=False, charted="log"
    )
    for metric in (plain, full):
        assert Metric.from_json(json.loads(json.dumps(metric.to_json()))) == metric


def test_a_metric_of_a_later_version_can_be_read() -> None:
    assert Metric.from_json({"name": "x", "invented_later": 3}) == Metric("x", "")


def test_rows_say_whether_a_metric_belongs_to_a_flow() -> None:
    assert [Metric("x", "", rows=rows).per_flow for rows in ("blocks", "modules", "model")] == [True, False, False]


FROZEN = json.loads((Path(__file__).parent / "frozen_metrics.json").read_text())
NAMES = sorted(FROZEN)


def answers(name: str) -> dict[str, object]:
    """What every module that treats metrics differently says of one."""
    record = Record(0, flow_names=("rnn.l0", "net"))
    presented = catalogue.describe(name)
    return {
        "view": presented.view,
        "words": presented.words,
        "shape": presented.shape,
        "tab": presented.scale,
        "text": "log" if is_log_metric(name) else "linear",
        "band": list(presented.band) if presented.band else None,
        "bounds": list(presented.bounds) if presented.bounds else None,
        "fitted": presented.fitted,
        "limits": list(presented.limits),
        "per_flow": presented.per_flow,
        "logged": name in reduction.LOGGED,
        "chart": tensorboard.SCALARS.index(name) if name in tensorboard.SCALARS else None,
        "log_chart": name in tensorboard.LOG_CHARTS,
        "chart_of_parameters": name in tensorboard._WITHOUT_FLOW,
        "of_gradient": name in recorder.GRADIENT_METRICS,
        "undrawn": name in UNDRAWN,
        "times_loss_scale": _unscaled(name),
        "local": is_local(name, record, (), sharded=False),
        "local_where_sharded": is_local(name, record, (), sharded=True),
        "local_in_a_local_flow": is_local(name, record, {"rnn.l0"}, sharded=False),
        "wiring": snapshot.WIRING.index(name) if name in snapshot.WIRING else None,
    }


def _unscaled(name: str) -> bool:
    record = Record(0, metrics={name: np.ones(1)})
    recorder._unscale(record, 2.0)
    return bool(record.metrics[name][0] != 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_table_answers_as_it_did(name: str) -> None:
    assert answers(name) == FROZEN[name]


def test_metrics_are_frozen_whole() -> None:
    known = {*catalogue.METRICS, *UNDRAWN, *reduction.LOGGED, *tensorboard.SCALARS, *recorder.GRADIENT_METRICS}
    assert known | {"cosine_p05", "gate_p95", "my_norm", "my_share"} <= set(NAMES)
