"""token_collapse and representation_collapse against the measured calibrations."""

from __future__ import annotations

import numpy as np
import pytest
from detector_records import header, layout, play, record, slope, told

DEPTH = 24
HEAD = header(layout(depth=DEPTH))


def tokens(first: float, last: float) -> dict[str, np.ndarray]:
    """1 - token cosine falls geometrically from the first point to the last."""
    return {"token_cosine": 1 - np.geomspace(1 - first, 1 - last, DEPTH + 1)}


def depth_metrics(cosine: float, to_input: float) -> dict[str, np.ndarray]:
    return {"cosine": np.full(DEPTH, cosine), "cosine_to_input": np.linspace(1.0, to_input, DEPTH + 1)}


def test_post_norm_tokens_collapse_at_step_5_and_are_told_at_the_second_record():
    # measured: .989 at step 0, 1.000 from step 5
    lasts = [0.989, 0.994, 0.997, 0.9985, 0.9993, 0.99995, 0.99998, 0.99999]
    (alert,) = play((record(s, tokens(0.02, last)) for s, last in enumerate(lasts)), HEAD)
    assert alert.kind == "token_collapse"
    assert (alert.since, alert.step) == (5, 6)
    assert alert.value > 0.999
    # 1 - cos is .98 * r^l with r^24 = 2e-5/.98; below 1e-3 from l = 24 ln(980)/ln(49000) = 15.3 on: x_16
    assert alert.where == "blocks.15"
    assert "warm-up" in alert.advice


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.59), (0.0, 0.88), (0.0, 0.08), (0.0, 0.994), (0.995, 0.9995)])
def test_healthy_token_cosines_are_silent(first, last):
    """Pre-LN 24 and 96 blocks, Keel, Post-LN at the start, and tokens that were alike when they came in."""
    assert play((record(s, tokens(first, last)) for s in range(15)), HEAD) == []


@pytest.mark.parametrize(("product", "count"), [(0.9, 0), (0.2, 1)])
def test_a_few_collapsed_points_count_only_with_a_gradient_that_falls_too(product, count):
    """Measured: the last points of a healthy 10-block Pre-LN model reach .9993 for some steps, its product above 1."""
    flow = {"token_cosine": [0.1] * 21 + [0.9993] * 4, **slope(product, DEPTH)}
    alerts = play((record(s, flow) for s in range(5)), HEAD)
    assert [alert.kind for alert in alerts] == ["token_collapse"] * count


def test_without_tokens_there_is_nothing_to_say():
    assert play((record(s, {"token_cosine": np.full(DEPTH + 1, np.nan)}) for s in range(5)), HEAD) == []


def test_collapse_over_half_the_depth_is_an_error_at_once():
    (alert,) = play([record(0, {"token_cosine": np.array([0.0] + [0.99999] * DEPTH)})], HEAD)
    assert (alert.severity, alert.where, alert.step) == ("error", "blocks.0", 0)


@pytest.mark.parametrize(
    ("cosine", "to_input"),
    [(0.99999, 0.998), (0.999999, 0.862), (0.998, 0.12), (0.89, 0.0), (1.0, 1.0)],
)
def test_adjacent_cosines_near_one_from_the_start_are_healthy(cosine, to_input):
    """DeepNorm, Keel, Pre-LN, Post-LN, and branches that start at zero."""
    assert play((record(s, depth_metrics(cosine, to_input)) for s in range(40)), HEAD) == []


def test_layer_scale_that_starts_as_identity_and_opens_is_healthy():
    series = [depth_metrics(1 - 1e-6 * 1.2**s, 1 - 1e-5 * 1.2**s) for s in range(40)]
    assert play((record(s, m) for s, m in enumerate(series)), HEAD) == []


def test_blocks_that_turn_into_copies_are_told():
    series = [depth_metrics(0.97, 0.3)] * 12 + [depth_metrics(0.99999, 0.9995)] * 3
    (alert,) = play((record(s, m) for s, m in enumerate(series)), HEAD)
    assert told([alert]) == [("representation_collapse", "blocks.0", 13, "raised")]
    assert alert.severity == "warning"


def test_blocks_that_turn_into_copies_while_the_last_point_still_differs_are_silent():
    series = [depth_metrics(0.97, 0.3)] * 12 + [depth_metrics(0.99999, 0.3)] * 8
    assert play((record(s, m) for s, m in enumerate(series)), HEAD) == []


def ranks(*series: tuple[float, ...]) -> list:
    return [record(s, {"effective_rank": values} if s % 2 == 0 else {}) for s, values in _doubled(series)]


def _doubled(series):
    return [(s, series[s // 2]) for s in range(2 * len(series))]


CHAIN = header(layout("network", 3, "chain"))


def test_samples_that_fall_into_one_vector_are_told_across_records_without_ranks():
    # self-supervised training without stop-gradient: 32 features of 64 samples
    series = [(30, 25, 22, 20), (30, 25, 15, 8), (30, 24, 4, 1.05), (30, 24, 3, 1.01), (30, 24, 3, 1.0)]
    (alert,) = play(ranks(*series), CHAIN)
    assert (alert.kind, alert.step, alert.since, alert.where) == ("rank_collapse", 6, 4, "network.2")


def test_softmax_between_layers_is_told_from_the_start():
    (alert,) = play(ranks(*[(20, 3, 1.01, 1.0)] * 4), CHAIN)
    assert (alert.kind, alert.where) == ("rank_collapse", "network.1")


@pytest.mark.parametrize(
    "series",
    [
        [(20, 12, 9, 1.0)] * 5,  # regression: one output unit has rank 1 by construction
        [(20, 12, 9, 2.0), (20, 12, 5, 1.2), (20, 12, 4, 1.1)],  # two classes
        [(1.0, 1.0, 1.0, 1.0)] * 5,  # a batch of one
        [(30, 25, 22, 20), (30, 20, 10, 6), (30, 18, 8, 4)],  # ten classes, learned
        [(59.0, 58.0, 59.0, 57.0)] * 5,  # DeepNorm, Keel
    ],
)
def test_healthy_ranks_are_silent(series):
    assert play(ranks(*series), CHAIN) == []


def test_collapsed_tokens_explain_a_collapsed_rank():
    both = {"token_cosine": [0.0, 0.5, 0.99999, 0.99999], "effective_rank": [30, 20, 1.0, 1.0]}
    first = {"token_cosine": [0.0, 0.1, 0.2, 0.3], "effective_rank": [30, 25, 20, 20]}
    (alert,) = play((record(s, first if s < 2 else both) for s in range(8)), CHAIN)
    assert alert.kind == "token_collapse"
