"""A group of good runs: how often it calls a good run bad, and what it says of one that parts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from flowscope.cli import main
from flowscope.config import WatchConfig
from flowscope.corridor import Corridor, PartedFromGroup, add, is_group, listed, live, opened
from flowscope.corridor.curves import Stack, joined_rows, numbers_of, thinned
from flowscope.corridor.golden import MOST_BYTES, packed
from flowscope.corridor.spread import STEADY, trailing, usual
from flowscope.corridor.tournament import QUIET, WINDOWS, Bounds
from flowscope.detectors import DetectorSet
from flowscope.errors import FlowscopeError
from flowscope.metrics import Metric
from flowscope.records import FlowLayout, Record, Run, RunHeader
from flowscope.sinks import JsonlSink

STEPS = (*range(6), *range(10, 400, 30))
DEPTH = 9
POINTS = ("embed", *(f"blocks.{n}" for n in range(DEPTH)))
SPECS = {
    "act_rms": Metric("act_rms", "", scale="log"),
    "cosine": Metric("cosine", "", rows="blocks", bounds=(-1.0, 1.0)),
    "gain": Metric("gain", "", scale="log", rows="blocks", of_gradient=True),
    "top_channel": Metric("top_channel", ""),
    "checksum": Metric("checksum", "", drawn=False),
    "entropy": Metric("entropy", "", rows="modules"),
    "param_norm": Metric("param_norm", "", scale="log", rows="parameters"),
    "output_deviation": Metric("output_deviation", "", scale="log", rows="model", view="Depth"),
}
MODULES = tuple(f"blocks.{n}.attention" for n in range(DEPTH))
PARAMETERS = ("embed.weight", *(f"{name}.qkv.weight" for name in MODULES), "head.weight")
HEADER = RunHeader(
    "1",
    (FlowLayout("blocks", "blocks", POINTS, POINTS[1:]),),
    {
        "act_rms": POINTS,
        "gain": POINTS[1:],
        "cosine": POINTS[1:],
        "top_channel": POINTS,
        "entropy": MODULES,
        "param_norm": PARAMETERS,
        "output_deviation": ("the whole model",),
    },
    environment={"torch": "2.13.0"},
    metrics=SPECS,
    setup={"optimizers": [{"class": "AdamW", "groups": [{"lr": 1e-3, "parameters": ["w"]}]}], "seeds": {"torch": 1}},
)
Change = Callable[[int, dict[str, np.ndarray]], None]


def good_run(seed: int, change: Change | None = None, steps: Iterable[int] = STEPS, depth: int = DEPTH) -> Run:
    """A run whose seed moves everything a little, for its whole length and at each step."""
    random = np.random.default_rng(seed)
    drift = random.normal(0, 0.05, depth + 1)
    relative = np.linspace(0, 1, depth + 1)
    records = []
    for step in sorted(STEPS):
        noise = random.normal(0, 0.03, depth + 1)
        metrics = {
            "act_rms": np.exp(relative + drift + noise),
            "gain": np.exp(random.normal(0, 0.04, depth) - 0.1),
            "cosine": 0.8 + random.normal(0, 0.02, depth),
            "top_channel": random.integers(0, 512, depth + 1).astype(float),
            "checksum": random.normal(0, 1e9, 3),
            "entropy": 2 + random.normal(0, 0.1, depth),
            "param_norm": np.exp(random.normal(0, 0.01, depth + 2)),
            "output_deviation": np.exp(random.normal(0, 0.05, 1)),
        }
        loss = {"loss": np.array([3 - math.log(1 + step) / 4 + random.normal(0, 0.05)])}
        if change is not None:
            change(step, {**metrics, **loss})
        labels = {key: tuple(f"{key}.{n}" for n in range(value.size)) for key, value in metrics.items()}
        if depth == DEPTH:
            labels = dict(HEADER.labels)
        if step in set(steps):
            records.append(Record(step, float(loss["loss"][0]), metrics, metric_labels=labels, specs=SPECS))
    return Run(HEADER, records)


def group(runs: int = 7, first: int = 0) -> Corridor:
    return Corridor.of_runs("recipe", [good_run(seed) for seed in range(first, first + runs)])


def breaks_at_340(step: int, values: dict[str, np.ndarray]) -> None:
    """From step 340 on block 7 adds too much, then gradients die there, then the loss is lost."""
    if step >= 340:
        values["act_rms"][8:] *= 3
    if step >= 370:
        values["gain"][7] *= 0.2
    if step >= 370:
        values["loss"] += 3


# -- the rate ---------------------------------------------------------------------------------------------------------


def drawn(random: np.random.Generator, heavy: bool) -> Run:
    """A run of two metrics, three rows, six steps: numbers that depend on each other over rows and steps."""

    def numbers(*shape: int) -> np.ndarray:
        return random.standard_cauchy(shape) if heavy else random.normal(size=shape)

    common, walk = numbers(1, 3), np.cumsum(numbers(6, 1), axis=0)
    values = {"a": common + walk + numbers(6, 3), "b": 10 * common + numbers(6, 3) * random.choice([1, 5])}
    specs = {name: Metric(name, "") for name in values}
    records = [Record(k, float(walk[k, 0]), {name: v[k] for name, v in values.items()}, specs=specs) for k in range(6)]
    return Run(RunHeader(metrics=specs), records)


@pytest.mark.parametrize(("runs", "heavy", "tries"), [(3, False, 500), (5, True, 300), (9, False, 200)])
def test_of_exchangeable_runs_one_in_n_plus_one_parts_at_most(runs, heavy, tries):
    """No rule of scale or tail is trusted here: drawn runs, normal and Cauchy, whole-run false alarms counted."""
    random = np.random.default_rng(runs)
    parted = warned = 0
    for _ in range(tries):
        corridor = Corridor.of_runs("drawn", [drawn(random, heavy) for _ in range(runs)])
        departure = corridor.judge(drawn(random, heavy).records)
        parted += departure is not None
        warned += departure is not None and departure.certain
    most = stats.binom.ppf(0.999, tries, 1 / (runs + 1))
    assert parted <= most
    assert parted > 0.2 * tries / (runs + 1)  # the rate is used, not left lying
    assert warned <= stats.binom.ppf(0.999, tries, 0.01 if not heavy else 0.05)


def naive_judged(good: Sequence[Run], new: Run) -> tuple[list[float], list[float]]:
    """Scores of the new run and of the good ones, (a_j) and (b_j), one number after the other, in plain loops."""
    keys = ["loss", "act_rms", "gain", "cosine", "top_channel", "entropy", "param_norm", "output_deviation"]
    logs = ("act_rms", "gain", "param_norm", "output_deviation")
    told = [[{**r.metrics, "loss": np.array([r.loss])} for r in run.records] for run in (*good, new)]

    def value(run: int, key: str, k: int, row: int, window: int) -> float:
        numbers = [told[run][k - w][key][row] for w in range(window)]
        return sum(math.log(n) if key in logs else n for n in numbers) / window

    ours, theirs = [], []
    count = len(good)
    for left_out in range(count):
        members = [n for n in range(count) if n != left_out]
        best = {left_out: 0.0, count: 0.0}
        for key in keys:
            rows = len(told[0][0][key])
            for window in WINDOWS:
                ends = range(window - 1, len(STEPS))
                cell = {(k, r): [value(n, key, k, r, window) for n in members] for k in ends for r in range(rows)}
                middle = {place: sorted(v) for place, v in cell.items()}
                centre = {p: (v[(len(v) - 1) // 2] + v[len(v) // 2]) / 2 for p, v in middle.items()}
                lowest = -math.log(5) if key in logs else -math.inf
                variance = {p: np.var([max(x - centre[p], lowest) for x in v], ddof=1) for p, v in cell.items()}
                overall = np.mean(list(variance.values()))
                unit = 1.0 if key in (*logs, "cosine") else max(abs(c) for c in centre.values())
                scale = {}
                for k, r in cell:
                    near = [variance[q, s] for q in ends if abs(q - k) <= 1 for s in range(rows)]
                    of_step = (sum(near) + 4 * overall) / (len(near) + 4)
                    of_row = np.mean([variance[q, r] for q in ends])
                    scale[k, r] = math.sqrt(of_step * of_row / overall + (0.02 * unit) ** 2)
                off = [abs(max(x - centre[p], lowest)) / scale[p] for p, v in cell.items() for x in v]
                tail = max(max(off) * math.sqrt(count / (count - 2)), stats.norm.isf(0.05 / (2 * len(cell))))
                for run in best:
                    here = {p: max(value(run, key, *p, window) - centre[p], lowest) for p in cell}
                    far = max(abs(here[p]) / scale[p] for p in cell) / tail
                    best[run] = max(best[run], far)
        ours.append(best[count])
        theirs.append(best[left_out])
    return ours, theirs


def falls_away(step: int, values: dict[str, np.ndarray]) -> None:
    """One row is all but zero in one step: as far off as a fifth."""
    if step == 130:
        values["act_rms"][4] = 1e-20


@pytest.mark.parametrize("falls", [False, True])
def test_scores_are_those_of_plain_loops(falls):
    assert (STEADY, QUIET) == (0.02, 0.05)
    good, new = [good_run(seed) for seed in range(4)], good_run(99, breaks_at_340)
    for run in (good[1], new) if falls else ():
        falls_away(130, run.records[STEPS.index(130)].metrics)
    ours, theirs = naive_judged(good, new)
    corridor = Corridor.of_runs("recipe", good)
    assert corridor.bounds.of_good == pytest.approx(theirs, rel=1e-6)
    departure = corridor.judge(new.records)
    assert departure is not None
    farthest = max(one.times for one in departure.beyond)
    # the farthest number of act_rms is told when it is first seen: no farther than the run's whole score (fp32)
    assert 1 < farthest <= min(a / b for a, b in zip(ours, theirs, strict=True)) * (1 + 1e-5)


def test_the_model_is_t_on_the_logarithms_of_whole_run_scores():
    bounds = Bounds(np.array([1.0, 2.0, 4.0]))
    # mean of logs log 2, variance log 2 squared from two degrees and .25 from four; scores of 16 lie 3 log 2 above
    spread = math.sqrt((2 * math.log(2) ** 2 + 4 * 0.25) / 6)
    expected = 1 - stats.t.cdf(3 * math.log(2) / (spread * math.sqrt(4 / 3)), 6)
    assert bounds.chance_of(np.array([16.0, 16.0, 16.0])) == pytest.approx(expected)
    # the nearest bound decides
    assert bounds.beyond(np.array([1.5, 2.5, 3.0])) == pytest.approx(0.75)
    assert bounds.beyond(np.array([[3.0, 1.5], [3.0, 2.5], [6.0, 4.4]])) == pytest.approx([1.5, 1.1])


# -- centre and scale -------------------------------------------------------------------------------------------------


def test_a_variance_is_the_product_of_its_row_and_its_step():
    # two runs a and -a: the variance of a cell is 2 a^2; K = 1, so that a step has no neighbour
    values = np.array([[[1.0, 2.0, 3.0]], [[-1.0, -2.0, -3.0]]])
    centre, scale = usual(values)
    assert centre.tolist() == [[0.0, 0.0, 0.0]]
    overall = (2 + 8 + 18) / 3
    step = (2 + 8 + 18 + 4 * overall) / 7
    expected = [math.sqrt(step * row / overall + STEADY**2) for row in (2, 8, 18)]
    assert scale[0] == pytest.approx(expected)


def test_a_row_that_one_run_did_not_see_is_not_judged():
    values = np.ones((3, 2, 2))
    values[1, 0, 1] = np.nan
    assert np.isinf(usual(values)[1]).tolist() == [[False, True], [False, False]]


def test_trailing_means_and_joined_rows_by_hand():
    values = np.arange(10.0).reshape(1, 5, 2)
    assert trailing(values, 4)[0].tolist() == [[3.0, 4.0], [5.0, 6.0]]
    assert trailing(values[:, :3], 4).shape == (1, 0, 2)
    assert joined_rows(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), 2).tolist() == [1.5, 4.0]


def test_thinning_keeps_the_first_steps_and_the_last():
    stack = Stack("a", tuple(range(100)), np.arange(200.0).reshape(1, 100, 2), 2, ("x", "y"))
    few = thinned(stack, 8, 1)
    assert few.steps[:3] == (0, 1, 2)
    assert few.steps[-1] == 99
    assert len(few.steps) == 8
    assert few.values[0, :, 0].tolist() == [2 * step + 0.5 for step in few.steps]
    assert few.labels == ("x",)


def test_the_band_is_the_quantiles_over_runs():
    runs = [
        Run(RunHeader(metrics=SPECS), [Record(0, None, {"act_rms": np.array([v])}, specs=SPECS)]) for v in (1, 10, 100)
    ]
    steps, band = Corridor.of_runs("three", runs).band("act_rms")
    assert steps == (0,)
    assert band[:, 0, 0] == pytest.approx([10**0.2, 10.0, 10**1.8])  # a tenth of the way in logarithms, 0 to 2


# -- what is said -----------------------------------------------------------------------------------------------------


def test_the_sentence_names_step_place_and_metrics_in_order():
    departure = group().judge(good_run(99, breaks_at_340).records)
    assert departure is not None
    assert str(departure).startswith(
        "parts from its group of 7 runs at step 340 at blocks.7, first in act_rms, then loss, then gain"
    )
    assert departure.certain
    assert departure.certified == 1 / 8
    assert [(one.metric, one.step) for one in departure.beyond[:3]] == [("act_rms", 340), ("loss", 370), ("gain", 370)]


def where_of(**louder: tuple[slice, float]) -> str:
    """The place that is told where rows of some metrics are so many times what they were, from the first step on."""

    def change(step: int, values: dict[str, np.ndarray]) -> None:
        for key, (rows, factor) in louder.items():
            values[key][rows] *= factor

    departure = group().judge(good_run(99, change).records)
    assert departure is not None
    return departure.where


def test_the_place_is_what_comes_first_in_the_step():
    fourth, behind = slice(4, 5), slice(4, None)
    # act_rms has a point before the first block
    assert where_of(act_rms=(behind, 3)) == "blocks.3"
    assert where_of(act_rms=(behind, 2), cosine=(slice(5, None), 0.1)) == "blocks.3"  # the first, not the farthest
    assert where_of(act_rms=(behind, 3), entropy=(slice(3, None), 0.1)) == "blocks.3.attention"  # the inner of two
    assert (
        where_of(act_rms=(behind, 3), param_norm=(fourth, 1.5)) == "blocks.3.attention.qkv.weight"
    )  # nothing before it
    assert where_of(output_deviation=(slice(None), 3), gain=(fourth, 0.1)) == "head"  # behind all blocks
    assert where_of(loss=(slice(None), 3), gain=(slice(2, 7), 0.1)) == "blocks.6"  # the first from the output


def test_weights_that_part_later_are_what_updates_made_of_them():
    def change(step: int, values: dict[str, np.ndarray]) -> None:
        if step >= 10:
            values["param_norm"][4] *= 3
            values["act_rms"][2] *= 3

    departure = group().judge(good_run(99, change).records)
    assert departure is not None
    assert (departure.step, departure.where) == (10, "blocks.1")


def test_runs_of_the_recipe_stay_in_the_corridor():
    corridor = group()
    found = [corridor.judge(good_run(seed).records) for seed in range(50, 80)]
    parted = [departure for departure in found if departure is not None]
    assert not any(departure.certain for departure in parted)
    assert len(parted) <= stats.binom.ppf(0.999, 30, 1 / 8)


def test_a_metric_that_does_not_repeat_neither_alarms_nor_hides_others():
    """top_channel is a random index of 512: a change of it is lost in its noise, one of act_rms beside it is not."""

    def other_channel(step: int, values: dict[str, np.ndarray]) -> None:
        values["top_channel"][:] = 7 * values["top_channel"] % 512

    def louder(step: int, values: dict[str, np.ndarray]) -> None:
        values["act_rms"][3] *= 2

    assert group().judge(good_run(60, other_channel).records) is None
    departure = group().judge(good_run(60, louder).records)
    assert departure is not None
    assert (departure.step, departure.where, departure.beyond[0].metric) == (0, "blocks.2", "act_rms")


def test_another_cadence_is_judged_at_the_steps_it_shares():
    corridor = group()
    assert corridor.judge(good_run(99, breaks_at_340, steps=range(1, 400, 7)).records) is None
    departure = corridor.judge(good_run(99, breaks_at_340, steps=range(0, 400, 20)).records)  # 370 is not among them
    assert departure is not None
    assert departure.step == 340


def test_another_depth_is_laid_beside_by_relative_depth():
    deep = good_run(99, depth=2 * DEPTH)
    assert group().judge(deep.records) is None

    def louder(step: int, values: dict[str, np.ndarray]) -> None:
        values["act_rms"][12:] *= 3

    departure = group().judge(good_run(99, louder, depth=2 * DEPTH).records)
    assert departure is not None
    assert departure.beyond[0].metric == "act_rms"


def test_what_identifies_values_is_not_compared():
    assert "checksum" not in numbers_of(good_run(0).records[0])
    assert "checksum" not in group().stacks


# -- live -------------------------------------------------------------------------------------------------------------


def played(run: Run, corridor: Corridor, cut: int | None = None):
    sets = [DetectorSet(WatchConfig(), further=[PartedFromGroup(corridor)]) for _ in range(2)]
    found = []
    for n, record in enumerate(run.records):
        if n == cut:
            sets[1].load_state_dict(json.loads(json.dumps(sets[0].state_dict(), allow_nan=False)))
        found += sets[cut is not None and n >= cut].check(record, run.header)
    return [alert for alert in found if alert.kind == "parted_from_reference"]


def test_a_run_under_way_is_told_at_the_step_where_it_parts():
    (alert,) = played(good_run(99, breaks_at_340), group())
    assert (alert.step, alert.where, alert.severity) == (340, "blocks.7", "warning")
    assert "first in act_rms" in alert.message
    assert "1 of 8 good runs does so at most" in alert.message
    assert alert.value < alert.limit == 0.01


def test_its_state_can_be_taken_over():
    run, corridor = good_run(99, breaks_at_340), group()
    for cut in (5, 17, len(run.records) - 1):
        assert played(run, corridor, cut) == played(run, corridor)


def test_three_runs_give_a_note_where_the_model_is_not_sure():
    def little(step: int, values: dict[str, np.ndarray]) -> None:
        values["act_rms"][3] *= 1.6

    found = played(good_run(99, little), group(3))
    assert {alert.severity for alert in found} == {"info"}
    assert "1 of 4 good runs does so at most" in found[0].message


def test_what_is_set_up_otherwise_is_said_first():
    run = good_run(99, breaks_at_340)
    setup = {
        **HEADER.setup,
        "optimizers": [{"class": "AdamW", "groups": [{"lr": 3e-3, "parameters": ["w"]}]}],
        "seeds": {"torch": 7},
    }
    run.header = RunHeader(**{**vars(HEADER), "setup": setup})
    (alert,) = played(run, group())
    assert "0.001 -> 0.003" in alert.message
    good = [good_run(seed) for seed in range(4)]
    for n, one in enumerate(good):
        one.header = RunHeader(**{**vars(HEADER), "setup": {**HEADER.setup, "seeds": {"torch": n}}})
    (alert,) = played(run, Corridor.of_runs("recipe", good))
    assert "seed" not in alert.message  # seeds differ among the good runs


# -- golden profiles --------------------------------------------------------------------------------------------------


def written(runs: Sequence[Run], folder: Path) -> list[Path]:
    paths = []
    for n, run in enumerate(runs):
        sink = JsonlSink(folder / f"run{n}")
        for event in (run.header, *run.records):
            sink.write(event)
        sink.close()
        paths.append(folder / f"run{n}")
    return paths


def test_a_profile_says_what_the_runs_say(tmp_path):
    paths = written([good_run(seed) for seed in range(5)], tmp_path / "good")
    file = add(paths, "recipe", tmp_path / "golden")
    assert file.stat().st_size <= MOST_BYTES
    assert is_group(file)
    assert is_group(tmp_path / "good")
    assert not is_group(paths[0])
    whole, kept = opened(tmp_path / "good"), opened(file)
    # values are kept to a twentieth of a deviation
    assert kept.bounds.of_good == pytest.approx(whole.bounds.of_good, rel=0.05)
    bad = good_run(99, breaks_at_340).records
    assert str(kept.judge(bad)) == str(whole.judge(bad))
    (profile,) = listed(tmp_path / "golden")
    assert (profile.name, profile.runs, profile.steps) == ("recipe", 5, len(STEPS))
    assert "torch 2.13.0" in str(profile)


def test_a_profile_of_many_large_runs_fits(tmp_path):
    random, names = np.random.default_rng(0), [f"metric_{n}" for n in range(30)]
    labels = tuple(f"blocks.{n}.some.long.path.of.a.weight" for n in range(70))
    stacks = [Stack(name, tuple(range(40)), random.normal(size=(19, 40, 70)), 70, labels) for name in names]
    file = tmp_path / "large.npz"
    file.write_bytes(packed(Corridor("large", HEADER, stacks)))
    assert file.stat().st_size <= MOST_BYTES
    corridor = opened(file)
    assert (corridor.runs, len(corridor.stacks)) == (19, 30)
    new = [Record(k, None, {name: random.normal(size=70) for name in names}) for k in range(40)]
    assert corridor.judge(new) is None
    for record in new:
        record.metrics["metric_7"] = record.metrics["metric_7"] + 5.0
    departure = corridor.judge(new)
    assert departure is not None
    assert {one.metric for one in departure.beyond} == {"metric_7"}


def test_the_command_adds_lists_and_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    paths = written([*(good_run(seed) for seed in range(5)), good_run(99, breaks_at_340)], tmp_path / "runs")
    assert main(["golden", "add", *map(str, paths[:5]), "--name", "recipe"]) == 0
    assert main(["golden", "list"]) == 0
    assert "recipe: 5 runs" in capsys.readouterr().out
    assert main(["golden", "check", str(paths[5]), "recipe"]) == 1
    assert "warning: the run parts from its group of 5 runs at step 340 at blocks.7" in capsys.readouterr().out
    assert main(["golden", "check", str(paths[0]), "recipe"]) == 0
    assert "stays with its group" in capsys.readouterr().out
    assert main(["golden", "check", str(paths[0]), "another"]) == 2
    assert "there: recipe" in capsys.readouterr().err


def test_a_profile_of_other_versions_says_so(tmp_path, capsys):
    good = [good_run(seed) for seed in range(4)]
    file = add(written(good, tmp_path / "good"), "recipe", tmp_path)
    run = good_run(99)
    for torch_version, first in (
        ("2.14.0", "stale: the good runs were made with torch 2.13.0, now 2.14.0"),
        ("2.13.0", ""),
    ):
        setup = {**HEADER.setup, "optimizers": [{"class": "SGD", "groups": []}]}
        run.header = RunHeader(**{**vars(HEADER), "environment": {"torch": torch_version}, "setup": setup})
        (path,) = written([run], tmp_path / torch_version)
        assert main(["golden", "check", str(path), str(file)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(first or "differs: optimizer")
        assert [line.split()[0] for line in lines] == [*(["stale:"] if first else []), "differs:", "differs:", "stays"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda folder: add([folder / "a"], "recipe", folder), "flowscope.jsonl"),
        (lambda folder: add(written([good_run(0), good_run(1)], folder), "recipe", folder), "got 2 runs"),
        (lambda folder: add([], "a/b", folder), "expected that of a recipe"),
        (lambda folder: opened(folder), "got 0 runs below it"),
        (lambda folder: live(folder / "none"), "expected a folder of good runs"),
        (lambda folder: opened(_text(folder / "x.npz")), "expected a profile"),
    ],
)
def test_wrong_calls_say_what_was_expected(call, words, tmp_path):
    with pytest.raises(FlowscopeError, match=words):
        call(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_profile_is_refused(tmp_path):
    whole, random = packed(group(3)), np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole[: random.integers(len(whole))] if random.random() < 0.3 else whole)
        for place in random.integers(len(damaged), size=random.integers(4)) if damaged else ():
            damaged[place] = random.integers(256)
        (tmp_path / "x.npz").write_bytes(damaged)
        try:
            opened(tmp_path / "x.npz")
        except FlowscopeError:
            refused += 1
    assert refused > 20


def _text(file: Path) -> Path:
    file.write_text("no profile")
    return file
