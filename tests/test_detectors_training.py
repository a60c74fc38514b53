"""train_eval_gap, rank_desync, and what holds for all detectors: no flapping, bounded memory, second faults."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from detector_records import header, layout, play, record, slope, told

from flowscope.config import WatchConfig
from flowscope.detectors import DetectorSet
from flowscope.records import Record

NAN = float("nan")


def gapped(step: int, *gaps: float) -> Record:
    item = record(step, norm_gap=gaps)
    item.metric_labels = {**item.metric_labels, "norm_gap": ("stem.norm", "stage.norm")}
    return item


def test_running_statistics_off_the_batches_name_the_module_with_the_largest_gap():
    alerts = play(gapped(s, 0.8, 1.3) for s in range(0, 300, 10))
    assert told(alerts) == [("train_eval_gap", "stage.norm", 120, "raised")]  # the third record from step 100 on
    assert "momentum" in alerts[0].advice


@pytest.mark.parametrize("gaps", [(0.1, 0.15), (NAN, 0.1), (NAN, NAN), (0.3, 0.4)])
def test_running_statistics_that_follow_are_silent(gaps):
    assert play(gapped(s, *gaps) for s in range(0, 300, 10)) == []


def test_a_gap_resolves_well_below_the_limit_only():
    series = [1.3] * 20 + [0.3] * 20 + [0.1] * 5
    alerts = play(gapped(10 * s, 0.0, gap) for s, gap in enumerate(series))
    assert [(a.step, a.state) for a in alerts] == [(120, "raised"), (420, "resolved")]


def test_replicas_that_differ_are_an_error_at_once():
    series = [record(s, rank_gap=[0, 0, 2e-4, 0.07, 0]) for s in range(5)]
    (alert,) = play(series)
    assert told([alert]) == [("rank_desync", "blocks.1.fc.weight", 0, "raised")]
    assert (alert.severity, alert.value) == ("error", 0.07)
    assert "2 of 5" in alert.message


@pytest.mark.parametrize("gaps", [[0.0] * 5, [NAN] * 5, [NAN, 0, 0, 5e-7, 0]])
def test_equal_or_unknown_replicas_are_silent(gaps):
    assert play(record(s, rank_gap=gaps) for s in range(5)) == []


# -- all together -----------------------------------------------------------------------------------------------------


def wavering(step: int, noise: np.ndarray) -> Record:
    """Every ratio with a limit wanders around it, by less than its release."""
    limits = WatchConfig()
    flow = slope(limits.vanishing_product * noise[0], 3)
    spread = 1 - limits.token_cosine
    flow["token_cosine"] = [0.1, 0.5, 1 - spread * noise[1], 1 - spread * noise[1]]
    return record(
        step,
        flow,
        loss=None,
        param_norm=[10, 5, 2, 8, 3],
        param_grad_norm=[0.5, 0.4, 0.3, 0.2, 0.1],
        param_trainable=[1] * 5,
        param_optimized=[1] * 5,
        param_lr=[0.1] * 5,
        update_ratio=[0.001, 0.001, limits.large_update * noise[2], 0.001, 0.001],
        param_unchanged=[1 - (1 - limits.unchanged_share) * noise[3]] * 5,
        param_epsilon=[2**-7] * 5,
        clip_ratio=[1.0],
        grad_carried=[limits.carried_gradient * noise[4]],
        norm_gap=[limits.norm_gap * noise[5]],
        rank_gap=[limits.rank_gap * noise[6]] * 5,
        step_losses=math.log(10) * (1 - limits.plateau_drop * (1 + 0.1 * (noise - 1))),
        output_width=[10.0],
    )


def test_noise_around_every_limit_over_10000_records_raises_each_cause_once():
    rng = np.random.default_rng(0)
    detectors, head = DetectorSet(WatchConfig()), header(layout(depth=3))
    counts: Counter[tuple[str, str]] = Counter()
    for step in range(10_000):
        noise = np.exp(np.clip(0.2 * rng.standard_normal(10), -0.9, 0.9))  # the release is a factor of 3
        counts.update((a.kind, a.state) for a in detectors.check(wavering(step, noise), head))
    assert max(counts.values()) == 1
    raised = {kind for kind, state in counts if state == "raised"}
    assert raised >= {
        "token_collapse",
        "update_too_large",
        "gradient_accumulates",
        "train_eval_gap",
        "rank_desync",
    }


def faulty(step: int, bad: bool) -> Record:
    """A healthy record, or one with five faults at once."""
    return record(
        step,
        loss=None,
        param_norm=[10, 5, 2, 8, 3],
        param_grad_norm=[g * (9 if bad else 1) * (1 + 0.1 * math.sin(step)) for g in (0.5, 0.4, 0.3, 0.2, 0.1)],
        param_trainable=[1] * 5,
        param_optimized=[1] * 5,
        param_lr=[0.1] * 5,
        update_ratio=[0.001, 0.001, 5.0 if bad else 0.001, 0.001, 0.001],
        grad_carried=[0.9 if bad else 0.0],
        norm_gap=[2.0 if bad else 0.0],
        rank_gap=[0.1 if bad else 0.0] * 5,
        step_losses=np.full(10, 9.0 if bad else 2.0) + 0.01 * math.sin(step),
    )


def test_after_resolving_a_second_fault_raises_again_and_the_memory_is_bounded():
    detectors, head, sizes = DetectorSet(WatchConfig()), header(), []
    counts: Counter[tuple[str, str]] = Counter()
    for step in range(600):
        bad = 200 <= step < 206 or 400 <= step < 406
        counts.update((a.kind, a.state) for a in detectors.check(faulty(step, bad), head))
        sizes.append(len(json.dumps(detectors.state_dict())))
    kinds = ("update_too_large", "gradient_accumulates", "train_eval_gap", "rank_desync", "loss_spike")
    assert {kind: counts[kind, "raised"] for kind in kinds} == dict.fromkeys(kinds, 2)
    assert {kind: counts[kind, "resolved"] for kind in kinds} == dict.fromkeys(kinds, 2)
    assert max(sizes[399:]) <= 1.1 * max(sizes[199:399])


@pytest.mark.parametrize("cut", [1, 150, 203, 209, 402])
def test_a_set_that_loads_the_state_goes_on_alike(cut):
    series = [faulty(step, 200 <= step < 206 or 400 <= step < 406) for step in range(450)]
    first, second, head = DetectorSet(WatchConfig()), DetectorSet(WatchConfig()), header()
    for item in series[:cut]:
        first.check(item, head)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for item in series[cut:]:
        assert first.check(item, head) == second.check(item, head)
