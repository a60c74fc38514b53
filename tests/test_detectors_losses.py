"""loss_spike, loss_plateau and the gradient spike on records made by hand, and on a published trace."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from detector_records import header, play, record, told

from flowscope.config import WatchConfig
from flowscope.detectors.losses import LossSpike
from flowscope.detectors.plateau import LossPlateau
from flowscope.detectors.spikes import GradientSpike, total_gradient
from flowscope.records import Record

CHANCE = math.log(10)


def run(losses: np.ndarray, every: int = 10, **metrics: list[float]) -> list[Record]:
    """Records at step 0 and each `every`-th, each with the losses of all steps since the one before."""
    out, since = [], 0
    for step in range(0, len(losses), every):
        own = {"step_losses": losses[since : step + 1], **metrics}
        out.append(record(step, loss=float(losses[step]), **own))
        since = step + 1
    return out


def noisy(level: float, count: int, seed: int = 0, spread: float = 0.1) -> np.ndarray:
    return level + spread * np.random.default_rng(seed).standard_normal(count)


# -- loss_spike -------------------------------------------------------------------------------------------------------


def spiked(height: float, length: int, at: int = 203, count: int = 400) -> np.ndarray:
    losses = noisy(2.0, count, spread=0.02)
    losses[at : at + length] += height
    return losses


def test_a_jump_between_two_records_is_told_at_the_next_and_resolves():
    alerts = play(run(spiked(5.0, 6)))
    # the spike ends at step 208, of the five to step 211 two are high: 220, 230 and 240 are clean
    assert [(a.kind, a.where, a.step, a.state) for a in alerts] == [
        ("loss_spike", "", 210, "raised"),
        ("loss_spike", "", 240, "resolved"),
    ]
    assert alerts[0].severity == "warning"
    assert alerts[0].value == pytest.approx(7.0, abs=0.3)


@pytest.mark.parametrize(
    "losses",
    [
        spiked(5.0, 1),
        spiked(5.0, 2),  # odd batches
        spiked(0.15, 50),  # below a tenth of the level
        np.linspace(8, 1, 400) + noisy(0, 400),
        np.abs(noisy(0, 400, spread=0.5)) * (np.random.default_rng(1).random(400) < 0.1) * 20,  # batches of one
        noisy(-0.9, 400, spread=0.01),  # a negative loss
    ],
)
def test_noise_and_odd_batches_are_no_spike(losses):
    assert play(run(losses)) == []


@pytest.mark.parametrize("every", [1, 10, 50])
def test_a_steady_climb_is_no_jump_at_any_cadence(every):
    """A generator's loss while its discriminator learns: .004 a step, .04 between two records, a noise of .005."""
    losses = np.concatenate([np.full(100, 0.7), np.linspace(0.7, 1.9, 300)]) + noisy(0.0, 400, spread=0.005)
    assert play(run(losses, every)) == []


def test_a_rise_by_less_than_half_of_what_was_learned_is_none():
    """From 10 down to 2; a rise by 3 for six steps is .375 of the progress, by 5 .625."""
    learned = np.concatenate([np.linspace(10, 2, 200) + noisy(0, 200), noisy(2, 200)])
    low, high = learned.copy(), learned.copy()
    low[303:309] += 3
    high[303:309] += 5
    assert play(run(low)) == []
    assert [(a.kind, a.step) for a in play(run(high)) if a.state == "raised"] == [("loss_spike", 310)]


def test_a_schedules_restart_is_no_spike_and_a_higher_rate_is():
    losses = spiked(5.0, 8)
    for peak, count in ((0.1, 0), (1.0, 1)):
        series = run(losses)
        for item in series:
            rate = 0.1 * 0.9 ** (item.step / 10) if item.step < 200 else peak
            item.metrics["param_lr"] = np.array([rate])
        assert len([a for a in play(series) if a.state == "raised"]) == count


def test_without_the_losses_between_the_records_the_records_own_are_taken():
    losses = spiked(5.0, 60, at=403, count=900)
    alerts = play(record(s, loss=float(losses[s])) for s in range(0, 900, 10))
    # of the records 410 to 460 the third makes three of five
    assert [(a.kind, a.step) for a in alerts if a.state == "raised"] == [("loss_spike", 430)]


def test_a_second_spike_raises_again():
    losses = spiked(5.0, 6, at=203, count=700)
    losses[503:509] += 5
    assert [a.step for a in play(run(losses)) if a.state == "raised"] == [210, 510]


def test_losses_that_were_not_given_or_are_no_numbers_say_nothing():
    assert play(record(s, loss=None, step_losses=[math.nan] * 5) for s in range(0, 900, 10)) == []


# -- loss_plateau -----------------------------------------------------------------------------------------------------


def plateau(losses: np.ndarray, width: float = 10.0) -> list[tuple[str, str, int, str]]:
    return told(play(run(losses, output_width=[width])))


def test_a_loss_that_stays_at_guessing_is_told_once_120_losses_are_there():
    """Of a record each ten steps that of step 120 is the first with 121 of them, and the second in a row raises."""
    assert plateau(noisy(CHANCE, 500)) == [("loss_plateau", "", 130, "raised")]


def test_a_loss_that_falls_later_resolves_it():
    losses = np.concatenate([noisy(CHANCE, 400), np.linspace(CHANCE, 0.5, 100), noisy(0.5, 500)])
    (raised, resolved) = plateau(losses)
    assert (raised[2], raised[3], resolved[3]) == (130, "raised", "resolved")
    assert resolved[2] > 420


@pytest.mark.parametrize(
    ("losses", "width"),
    [
        (noisy(0.8 * CHANCE, 600), 10.0),  # converged above zero
        (noisy(0.05, 600, spread=0.02), 10.0),  # converged
        (noisy(2 * CHANCE, 600), 10.0),  # another loss
        (np.linspace(CHANCE, 0.96 * CHANCE - 0.1, 600) + noisy(0, 600, spread=0.01), 10.0),  # falls 2.8 % in 200 steps
        (noisy(CHANCE, 600), math.nan),
        (noisy(CHANCE, 600), 50_000.0),  # a language model at 2.3
    ],
)
def test_losses_that_learn_converge_or_have_no_level_of_guessing(losses, width):
    assert plateau(losses, width) == []


def test_tasks_in_turn_have_no_common_level_of_guessing():
    """By hand: log 10 and log 2 in turn have a mean of 1.5, which is that of guessing among 4.5."""
    losses = noisy(math.log(4.5), 400)
    for turns, expected in (((4.5, 4.5), ["loss_plateau"]), ((4.5, 2.0), []), ((4.5, math.nan), [])):
        series = run(losses)
        for n, item in enumerate(series):
            item.metrics["loss_classes"] = np.array([4.5 if n % 5 else turns[n // 5 % 2]])
        assert [a.kind for a in play(series) if a.state == "raised"] == expected


def test_two_classes_with_one_output_have_log_2():
    assert [kind for kind, *_ in plateau(noisy(math.log(2), 500, spread=0.02), 1.0)] == ["loss_plateau"]


# -- the gradient spike -----------------------------------------------------------------------------------------------


def norms(values: np.ndarray, losses: np.ndarray | None = None) -> list[tuple[str, str, int, str]]:
    losses = np.full(len(values), 2.0) if losses is None else losses
    pairs = enumerate(zip(values, losses, strict=True))
    return told(play(record(s, param_grad_norm=[0.6 * g, 0.8 * g], loss=float(x)) for s, (g, x) in pairs))


def usual(count: int, spread: float = 0.1, seed: int = 0) -> np.ndarray:
    return np.exp(spread * np.random.default_rng(seed).standard_normal(count))


def test_the_norm_of_two_records_outside_the_usual_range_is_told_and_resolves():
    values = usual(100)
    values[60:64] *= 8
    assert norms(values) == [("exploding_gradient", "", 61, "raised"), ("exploding_gradient", "", 66, "resolved")]


@pytest.mark.parametrize(
    "values",
    [
        np.where(np.arange(100) == 60, 8, 1) * usual(100),  # one record
        np.exp(np.linspace(0, 6, 100)) * usual(100),  # a trend
        usual(100, spread=1.5),  # batches of one
        np.where(np.arange(100) < 10, 1e-6, 1) * usual(100),  # the first steps
    ],
)
def test_odd_records_trends_and_wide_ranges_are_no_spike(values):
    assert norms(values) == []


def test_far_beyond_one_record_is_enough():
    values = usual(100)
    values[60] *= 500
    assert [(kind, step) for kind, _, step, state in norms(values) if state == "raised"] == [("exploding_gradient", 60)]


def test_a_network_that_leaves_a_plateau_is_no_spike():
    values, losses = usual(100), noisy(2.3, 100, spread=0.01)
    values[60:70] *= 8
    losses[60:] -= np.linspace(0.1, 1.5, 40)
    assert norms(values, losses) == []


def test_bloom_2022_04_12_is_told_before_its_loss_jumps():
    """Loss and gradient norm from BigScience's chronicles (Apache-2.0), behind 120 records of the level given there."""
    rng = np.random.default_rng(0)
    before = [(31094 + k, rng.uniform(2.1, 2.46), rng.uniform(0.13, 0.17)) for k in range(120)]
    trace = [
        (31214, 2.199, 0.242), (31215, 2.220, 0.947), (31216, 2.595, 2.390), (31217, 2.242, 15.886),
        (31218, 2.345, 145.1), (31219, 5.098, 960.4), (31220, 3.492, 353.2), (31221, 3.213, 379.3),
        (31222, 2.805, 650.2),
    ]  # fmt: skip
    alerts = play(record(s, loss=loss, param_grad_norm=[g]) for s, loss, g in before + trace)
    # of the losses 31217 to 31221 three are high; at 31219 the first is
    assert told(alerts) == [("exploding_gradient", "", 31216, "raised"), ("loss_spike", "", 31221, "raised")]
    assert alerts[0].since == 31215


def test_the_total_norm_is_that_before_clipping_where_it_is_known():
    assert total_gradient(record(0, param_grad_norm=[0.6, 0.8], param_grad_norm_raw=[30, math.nan, 40])) == 50
    assert total_gradient(record(0, param_grad_norm=[0.6, 0.8])) == pytest.approx(1)
    assert total_gradient(record(0, {"grad_norm": [3, math.nan, 7]})) == 7
    assert total_gradient(record(0, param_grad_norm=[0.0, math.nan])) is None


@pytest.mark.parametrize("kind", [LossSpike, LossPlateau, GradientSpike])
def test_a_detector_that_loads_the_state_goes_on_alike(kind):
    losses = np.concatenate([noisy(CHANCE, 320), spiked(5, 40, at=103, count=600) - 2 + CHANCE])
    series = run(losses, output_width=[10.0])
    rng = np.random.default_rng(2)
    for item in series:
        item.metrics["param_grad_norm"] = np.exp(rng.standard_normal(3) + 5 * (item.step // 200 % 2))
    for cut in (1, 7, 35, 43, 60):
        first, second = kind(WatchConfig()), kind(WatchConfig())
        for item in series[:cut]:
            [*first.findings(item, header())]
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        for item in series[cut:]:
            assert [*first.findings(item, header())] == [*second.findings(item, header())]
