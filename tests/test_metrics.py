"""One spec per metric, and everything that is derived from it."""

from __future__ import annotations

import json

from flowscope.metrics import Metric


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
