"""What happened tells what a symptom means: loss jumps, ends of a chain, players, steps that spoil weights, limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from detector_records import header, layout, play, record, slope, told
from test_detectors_losses import noisy
from torch import Tensor, nn

import flowscope
from flowscope.config import WatchConfig
from flowscope.records import Alert, Record
from flowscope.sums.statistics import first_of_calls, weight_of_call

INF = float("inf")
NORMS = [1.0, 1.0, 1.0, 1.0, 1.0]


def steps(
    losses: np.ndarray,
    ratio: Sequence[float] = (),
    gradient: Sequence[float] = (),
    every: int = 10,
    **more: list[float],
) -> list[Record]:
    """Records each ten steps of a run whose weights move by 1e-3 of their norm where nothing else is said."""
    out = []
    for n, step in enumerate(range(0, len(losses), every)):
        since = losses[max(0, step - every + 1) : step + 1]
        moved = dict(enumerate(ratio)).get(n, 1e-3) if not isinstance(ratio, dict) else ratio.get(n, 1e-3)
        pulled = gradient.get(n, 0.1) if isinstance(gradient, dict) else 0.1
        own = {"step_losses": since, "param_norm": NORMS, "update_ratio": [moved] * 5, "param_grad_norm": [pulled] * 5}
        out.append(record(step, loss=float(losses[step]), **own, **more))
    return out


def raised(alerts: Sequence[Alert]) -> list[tuple[str, int, str]]:
    return [(a.kind, a.step, a.severity) for a in alerts if a.state == "raised"]


def learned(count: int = 600) -> np.ndarray:
    """From 1 to .03 in a hundred steps, and there."""
    fall = np.exp(np.linspace(0, math.log(0.03), 100))
    return np.concatenate([fall, np.full(count - 100, 0.03)]) * (1 + noisy(0, count, spread=0.05))


def copied(every: int, count: int = 800) -> np.ndarray:
    """A value net whose target is copied each so many steps: its loss jumps to 1.2 and halves each five steps."""
    losses = learned(count)
    for at in range(every, count, every):
        after = np.arange(min(every, count - at))
        losses[at : at + every] += 1.2 * 0.5 ** (after / 5)
    return losses


@pytest.mark.parametrize(("back", "severities"), [(True, {"info"}), (False, {"warning"})])
def test_a_calm_loss_that_rises_for_a_hundred_steps_is_judged_behind_its_top(back: bool, severities: set[str]) -> None:
    """A codebook's own scale grows: from .03 to 1.2 in 90 steps while steps are as usual, and down again in as many."""
    losses = learned(800)
    losses[300:] += 1.2 * np.interp(np.arange(500), [0, 90, 180], [0, 1, 0 if back else 1])
    assert {severity for kind, _, severity in raised(play(steps(losses))) if kind == "loss_spike"} == severities


# -- jumps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [100, 150, 203])
def test_a_jump_that_comes_back_while_steps_are_as_usual_is_a_note_and_told_twice(every: int) -> None:
    severities = [severity for _, _, severity in raised(play(steps(copied(every))))]
    assert severities
    assert set(severities) == {"info"}
    assert len(severities) <= 2


def test_a_jump_that_stays_is_a_warning_once_it_had_time_to_come_back() -> None:
    losses = learned()
    losses[300:] += 2.0
    ((kind, step, severity),) = raised(play(steps(losses)))
    assert (kind, severity) == ("loss_spike", "warning")
    assert 300 + 60 <= step <= 300 + 60 + 20  # sixty steps, and the record behind them


def test_a_new_stage_that_the_run_learns_on_is_a_note() -> None:
    """Harder data from step 300 on: the loss jumps to 1.5, and falls to .5 in two hundred steps, for good."""
    losses = learned()
    losses[300:500] = np.linspace(1.5, 0.5, 200) * (1 + noisy(0, 200, spread=0.03))
    losses[500:] = 0.5 * (1 + noisy(0, 100, spread=0.03))
    assert {severity for _, _, severity in raised(play(steps(losses)))} <= {"info"}


def test_a_jump_of_steps_larger_than_ever_is_told_at_once() -> None:
    losses = learned()
    losses[303:340] += np.linspace(2.0, 0.0, 37)  # comes back by itself
    alerts = play(steps(losses, ratio={31: 0.3}))  # type: ignore[arg-type]
    assert ("loss_spike", 310, "warning") in raised(alerts)


@pytest.mark.parametrize(("grown", "told_at"), [(1.08, [310]), (1.01, [])])
def test_weights_that_grew_at_once_between_two_records_are_told_at_once(grown: float, told_at: list[int]) -> None:
    """A rate too high for two steps between them: the steps of the records are as usual."""
    losses = learned()
    losses[303:340] += np.linspace(2.0, 0.0, 37)
    series = steps(losses)
    for item in series:
        item.metrics["param_norm"] = item["param_norm"] * (grown if item.step > 300 else 1.0)
    assert [step for kind, step, severity in raised(play(series)) if severity == "warning"] == told_at


@pytest.mark.parametrize(("fall", "told"), [(0.004, True), (0.015, False)])
def test_weights_that_hardly_move_are_told_where_the_loss_does_not_even_creep(fall: float, told: bool) -> None:
    losses = 2.0 * (1 - fall * np.arange(300) / 120) * (1 + noisy(0, 300, spread=1e-4))
    series = steps(losses, ratio=dict.fromkeys(range(30), 5e-05), loss_classes=[math.nan])  # type: ignore[arg-type]
    assert ("update_too_small" in {kind for kind, step, _ in raised(play(series)) if step <= 130}) is told


def test_a_gradient_that_announced_it_is_told_at_once() -> None:
    losses = learned()
    losses[303:340] += np.linspace(2.0, 0.0, 37)
    assert ("loss_spike", 310, "warning") in raised(play(steps(losses, gradient={30: 3.0})))  # type: ignore[arg-type]


def test_late_blow_ups_count_though_much_more_was_learned_before() -> None:
    """From 10 to 4e-5, then 1.8 for good: less than a fifth of what was learned, and 45,000 times the level."""
    fall = np.exp(np.linspace(math.log(10), math.log(4e-5), 300))
    losses = np.concatenate([fall, np.full(300, 4e-5)]) * (1 + noisy(0, 600, spread=0.05))
    losses[400:] = 1.8 * (1 + noisy(0, 200, spread=0.05))
    assert [(kind, severity) for kind, _, severity in raised(play(steps(losses)))] == [("loss_spike", "warning")]


def judged_by_another(losses: np.ndarray, **more: dict[int, float]) -> list[Record]:
    series = steps(losses, other_losses=[1.0], trained_through=[1.0], **more)  # type: ignore[arg-type]
    for item in series:
        item.metric_labels = {"trained_through": ("",), "param_grad_norm": tuple("abcde")}
    return series


def test_a_loss_in_the_units_of_a_net_that_learns_may_come_to_any_height() -> None:
    """An actor's: its critic begins at 0 and comes to the size of returns."""
    losses = np.concatenate([noisy(0.3, 100, spread=0.01), noisy(9.0, 300, spread=0.05)])
    assert "warning" not in {s for _, _, s in raised(play(judged_by_another(losses)))}
    assert "warning" in {s for _, _, s in raised(play(steps(losses, other_losses=[1.0])))}
    assert "warning" in {s for _, _, s in raised(play(judged_by_another(losses, ratio={10: 0.3})))}


def test_of_several_players_a_loss_that_rises_is_no_alarm() -> None:
    losses = np.concatenate([noisy(0.7, 300, spread=0.01), noisy(1.9, 300, spread=0.05)])
    assert "warning" not in {s for _, _, s in raised(play(steps(losses, other_losses=[1.0])))}
    assert "warning" in {s for _, _, s in raised(play(steps(losses)))}


def test_no_more_than_two_warnings_for_one_cause() -> None:
    losses = np.concatenate([noisy(2.0, 1600, spread=0.02)])
    for at in range(203, 1600, 200):
        losses[at : at + 6] += 5
    alerts = play(record(s, step_losses=losses[s : s + 10]) for s in range(0, 1600, 10))
    assert [a.step for a in alerts if a.state == "raised"] == [200, 400]


def test_an_optimizer_that_began_anew_is_a_fact_and_the_cause_of_a_rise() -> None:
    """A resumed run: at step 300 Adam counts from 1 again, and the loss doubles for a while."""
    losses = learned()
    losses[301:330] += 0.06
    series = steps(losses)
    for item in series:
        item.metrics["optimizer_steps"] = np.array([float(item.step + 1 if item.step < 300 else item.step - 299)])
    alerts = play(series)
    (fact, jump) = [a for a in alerts if a.state == "raised"]
    assert (fact.kind, fact.severity, fact.step) == ("loss_spike", "info", 300)
    assert "began anew at step 300" in fact.message
    assert (jump.severity, "began anew at step 300" in jump.message) == ("warning", True)
    assert "load_state_dict" in jump.advice


# -- a loss that never fell -------------------------------------------------------------------------------------------


def flat(losses: np.ndarray, **more: list[float]) -> list[str]:
    series = steps(losses, loss_classes=[math.nan], **more)
    return [a.message for a in play(series) if a.kind == "loss_plateau" and a.state == "raised"]


def test_a_regression_that_never_falls_is_told_from_its_own_start() -> None:
    (message,) = flat(noisy(3.0, 200, spread=0.05))
    assert "gradients arrive and weights move" in message


@pytest.mark.parametrize(
    "losses",
    [
        np.concatenate([np.linspace(2.0, 1.0, 15), noisy(1.0, 300, spread=0.02)]),  # learned the mean, then noise
        noisy(1.0, 300, spread=0.5),  # so noisy that nothing can be said
        np.linspace(3.0, 2.8, 300) + noisy(0, 300, spread=0.01),  # slowly
        noisy(-2.0, 300, spread=0.01),  # a likelihood has no zero
    ],
)
def test_what_learned_or_cannot_be_told_is_no_plateau(losses: np.ndarray) -> None:
    assert flat(losses) == []


def test_players_and_resumed_runs_have_no_start_to_be_measured_by() -> None:
    assert flat(noisy(3.0, 300, spread=0.05), other_losses=[1.0]) == []
    later = steps(noisy(3.0, 300, spread=0.05), loss_classes=[math.nan])
    for item in later:
        item.step += 1000
    assert [a for a in play(later) if a.kind == "loss_plateau"] == []


def test_what_a_plateau_says_of_the_steps_is_so() -> None:
    for metric, words in (("update_ratio", "no weight moves"), ("param_grad_norm", "no parameter has a gradient")):
        series = steps(noisy(math.log(10), 200), loss_classes=[10.0])
        for item in series:
            item.metrics[metric] = np.zeros(5)
        messages = [a.message for a in play(series) if a.kind == "loss_plateau"]
        assert all(words in message for message in messages)


# -- the end of a chain -----------------------------------------------------------------------------------------------


def chain(product: Sequence[float], losses: np.ndarray | None, kind: str = "chain") -> list[tuple[str, int, str]]:
    series = []
    for step in range(40):
        norms = np.array(product)
        loss = None if losses is None else float(losses[step])
        flow = {"grad_norm": norms, "gradient_product": norms, "gain": norms[:-1] / norms[1:]}
        series.append(record(step, flow, loss=loss))
    head = header(layout("body", depth=4, kind=kind))
    return [one for one in raised(play(series, head)) if one[0] == "vanishing_gradient"]


HEAD_ALONE = [4e-4, 4e-4, 4e-4, 4e-4, 1.0]
FALLING, FLAT = np.linspace(1.0, 0.5, 40), np.ones(40)


def test_a_small_head_or_a_last_nonlinearity_is_none_while_the_loss_falls() -> None:
    assert chain(HEAD_ALONE, FALLING) == []
    assert chain(HEAD_ALONE, FLAT) == [("vanishing_gradient", 23, "error")]  # five records with twenty losses behind
    assert chain(HEAD_ALONE, None) == [("vanishing_gradient", 4, "info")]


def test_what_is_lost_along_the_chain_is_told_though_the_loss_falls() -> None:
    assert chain([1e-4, 1e-3, 1e-2, 1e-1, 1.0], FALLING) == [("vanishing_gradient", 1, "error")]
    assert chain(HEAD_ALONE, FALLING, kind="blocks") == [("vanishing_gradient", 1, "error")]  # x_L is a hidden state


def test_a_player_that_starves_is_named() -> None:
    def game(last: float) -> list[tuple[str, str]]:
        series = []
        for step in range(30):
            pull = 1.0 if step < 10 else last
            item = record(step, param_grad_norm=[pull, pull, 1.0, 1.0, 1.0], other_losses=[1.0], trained_through=[1.0])
            names = ("made.0.weight", "made.2.weight", "judge.0.weight", "judge.2.weight", "judge.4.weight")
            item.metric_labels = {"param_grad_norm": names, "trained_through": ("made",)}
            series.append(item)
        return [(a.kind, a.where) for a in play(series) if a.state == "raised" and a.kind == "vanishing_gradient"]

    assert game(5e-3) == [("vanishing_gradient", "made")]
    assert game(0.05) == []


@pytest.mark.parametrize(("low", "period", "count"), [(1e-4, 3, 1), (1e-4, 40, 0), (0.05, 3, 0)])
def test_a_player_whose_gradient_comes_and_goes_is_named(low: float, period: int, count: int) -> None:
    """A tanh between the two nets that is saturated for most batches: two records of three have a ten-thousandth."""
    pulls = {n: 0.1 * (low if n % period else 1.0) for n in range(30)}
    if period == 40:  # one fall, which is told as that or not at all
        pulls = {n: 0.1 * (low if n >= 25 else 1.0) for n in range(30)}
    alerts = [a for a in play(judged_by_another(np.full(300, 0.7), gradient=pulls)) if a.kind == "vanishing_gradient"]
    assert ["comes and goes" in a.message for a in alerts] == [True] * count


@pytest.mark.parametrize(("last", "count"), [(5e-3, 1), (0.05, 0)])
def test_a_player_that_is_watched_alone_starves_too(last: float, count: int) -> None:
    series = judged_by_another(np.full(300, 0.7), gradient={n: 0.1 if n < 10 else 0.1 * last for n in range(30)})
    assert [a.where for a in play(series) if a.kind == "vanishing_gradient"] == [""] * count


# -- what is returned beside the answer -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "answer", "places"),
    [
        ((0.01, 0.02), 1.0, ["mu"]),  # .05 and .04 of what they were
        ((0.01, 0.3), 1.0, []),  # one alone may: a variance that is the same everywhere
        ((0.01, 0.02), 0.1, []),  # the answer fades with them
        ((0.06, 0.2), 1.0, []),
    ],
)
def test_codes_that_the_answer_does_without_are_told(
    codes: tuple[float, float], answer: float, places: list[str]
) -> None:
    series = []
    for step in range(0, 100, 5):
        further, own = ([0.2, 0.5], 1.0) if step < 30 else ([*codes], answer)
        series.append(record(step, further_deviation=further, output_deviation=[own]))
        series[-1].metric_labels = {"further_deviation": ("mu", "logvar")}
    alerts = [a for a in play(series) if a.state == "raised"]
    assert [(a.kind, a.where) for a in alerts] == [("representation_collapse", place) for place in places]


@pytest.mark.parametrize(("decay", "share", "named"), [(10.0, 0.5, True), (0.01, 0.5, False), (10.0, 1.0, False)])
def test_a_decay_that_shrinks_the_weights_is_named_in_the_advice(decay: float, share: float, named: bool) -> None:
    """The norm of all weights is halved, or not; a gradient that fades along the chain is told either way."""
    of_run = dataclasses.replace(header(), setup={"optimizers": [{"groups": [{"weight_decay": decay}]}]})
    series = [record(s, slope(1.0 if s < 3 else 1e-5), param_norm=[1.0 if s < 3 else share] * 5) for s in range(8)]
    (alert,) = (a for a in play(series, of_run) if a.state == "raised" and a.kind == "vanishing_gradient")
    assert (f"lower weight_decay ({decay:g}): the weights have shrunk to 0.5" in alert.advice) is named
    assert ("initialise" not in alert.advice) is named


# -- whose fault a NaN is ---------------------------------------------------------------------------------------------


def test_a_step_that_spoils_weights_of_finite_gradients_is_the_cause() -> None:
    """Adam with eps=0: 0 / 0 in the step; the forward after it is only where it shows."""
    spoilt = record(3, param_norm=NORMS, param_grad_norm=[0.1] * 5, update_ratio=[1e-3, 1e-3, 1e-3, INF, INF])
    (alert,) = play([spoilt])
    assert (alert.kind, alert.where, alert.step) == ("non_finite", "blocks.1.fc", 3)
    assert "after this step, which got finite gradients" in alert.message
    assert "eps=0" in alert.advice


class Spoils(nn.Module):
    """Blocks behind one of which, the `spoilt`-th, a NaN is made, in the forward or (`back`) of the gradient alone."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.back, self.spoilt = back, -1

    def forward(self, x: Tensor) -> Tensor:
        for n, block in enumerate(self.blocks):
            x = x + block(x)
            if n == self.spoilt:
                x = x + (0 * x).abs().sqrt() if self.back else x * math.nan
        return x


@pytest.mark.parametrize(
    ("micro", "back", "where"),
    [
        ([-1, 4, 1], False, "blocks.5"),  # first in time, though the next micro-batch is bad at a smaller depth
        ([-1, 1, 4], False, "blocks.2"),
        ([3], False, "blocks.4"),
        ([-1, 1, 4], True, "blocks.2"),  # nor is the gradient that is bad nearest the loss the first
        ([-1, 4, 1], True, "blocks.5"),
    ],
)
def test_of_several_micro_batches_the_first_that_went_bad_is_named(micro: list[int], back: bool, where: str) -> None:
    model = Spoils(back)
    model.blocks.append(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for spoilt in micro:
            model.spoilt = spoilt
            model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        scope.step()
    assert [alert.where for alert in scope.alerts if alert.kind == "non_finite"] == [where]


def test_calls_beyond_what_is_told_apart_and_ranks_keep_the_first() -> None:
    """Weights of call 3 on two ranks of 512, of call 7 on all of them."""
    sums = np.array([2 * weight_of_call(3) + 512 * weight_of_call(7), weight_of_call(1), weight_of_call(5000), 0.0])
    assert first_of_calls(sums).tolist()[:3] == [3, 1, 101]
    assert np.isnan(first_of_calls(sums)[3])


def test_weights_found_bad_after_a_good_record_name_the_step_between() -> None:
    good = record(6, param_norm=NORMS, param_grad_norm=[0.1] * 5)
    for step, words in ((7, "after the optimizer's step 6"), (10, "an optimizer's step between 6 and 9")):
        flow = {"nonfinite": [0.0, 0, 3, 3, 3, 3, 3], "nonfinite_grad": [3.0] * 7}
        bad = record(step, flow, loss=math.nan, param_norm=[1, 1, 1, INF, 1], param_grad_norm=[INF] * 5)
        (alert,) = play([good, bad])
        assert alert.where == "blocks.1.fc"
        assert words in alert.message


def test_a_loss_that_is_none_of_finite_outputs_says_what_a_mean_of_nothing_is() -> None:
    sampled = record(7, {"nonfinite": [0.0] * 7, "nonfinite_grad": [9.0] * 7}, loss=math.nan)
    between = record(7, flags=("unsampled",), canary=(0, 0, 9, 1), loss=None)
    for bad in (sampled, between):
        (alert,) = play([bad])
        assert all(word in alert.advice for word in ("empty batch", "ignored", "mask"))


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "chosen"), [(2, 1), (4, 2), (8, 1), (8, 2), (64, 8), (128, 8)])
def test_a_router_that_collapsed_is_beyond_a_limit_whatever_its_size(experts: int, chosen: int) -> None:
    """All tokens to the same K of E: loads are E / K times their mean, and E - K experts have none."""
    routes = {
        "route_dead": [1 - chosen / experts],
        "route_max_violation": [experts / chosen - 1],
        "route_worst": [experts / chosen - 1],
    }
    assert told(play(record(s, **routes) for s in range(20))) == [("expert_collapse", "router 0", 13, "raised")]
    # by hand: two of four experts a token, loads 1.4 : 1.2 : .8 : .6 of the mean, none dead
    even = {"route_dead": [0.0], "route_max_violation": [0.4 * min(1.0, experts / chosen - 1)]}
    assert play(record(s, **even, route_worst=routes["route_worst"]) for s in range(20)) == []


def test_the_first_steps_of_a_router_are_not_judged() -> None:
    dead = {"route_dead": [0.75], "route_max_violation": [7.0], "route_worst": [7.0]}
    even = {"route_dead": [0.0], "route_max_violation": [0.3], "route_worst": [7.0]}
    assert play(record(s, **(dead if s < 10 else even)) for s in range(30)) == []


ATTAINABLE = {
    # what a fault can drive the number to, by its definition: (lower end, upper end)
    "vanishing_product": (0, INF), "vanishing_gain": (0, INF), "vanishing_time": (0, INF),
    "exploding_product": (0, INF), "exploding_growth": (0, INF), "drift": (0, INF),
    "token_cosine": (-1, 1), "collapsed_rank": (1, INF), "representation_cosine": (-1, 1),
    "small_update": (0, INF), "unchanged_share": (0, 1), "large_update": (0, INF),
    "clip_ratio": (0, 1), "clipped_update": (0, INF), "carried_gradient": (0, INF),
    "loss_spike": (0, INF), "gradient_spike": (0, INF), "plateau_drop": (0, 1),
    "norm_gap": (0, INF), "rank_gap": (0, INF), "ordered_product": (0, INF),
    "sample_cosine": (-1, 1), "embedding_cosine": (-1, 1), "faded_code": (0, INF), "constant_output": (0, 1),
    "dead_units": (0, 1), "saturation": (0, 1), "symmetry": (0, INF), "gate_saturation": (0, 1),
    "stream_cosine": (-1, 1), "stream_unused": (0, 1), "mixing_gain": (0, INF),
    # Adam's first step moves an entry by the rate, and 1 / sqrt(1 - beta2) = 31.6 of it is the most any step moves it
    "moment_ratio": (0, 31.6), "headroom": (0, INF), "attention_logit": (0, INF),
    # with one of two experts a token; `test_a_router_that_collapsed...` has the others
    "expert_dead": (0, 1), "expert_violation": (0, INF), "solver_growth": (0, INF), "solver_residual": (0, INF),
}  # fmt: skip


def test_every_limit_can_be_exceeded_and_kept() -> None:
    counts = {"plateau_steps", "gap_steps"}
    for name, field in WatchConfig.model_fields.items():
        words = field.description or ""
        if name in ATTAINABLE:
            low, high = ATTAINABLE[name]
            assert low < getattr(WatchConfig(), name) < high, name
        else:
            assert name in counts or "heuristic" not in words, f"{name}: what can the number reach?"
