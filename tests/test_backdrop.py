"""The good run behind the run: kept in the header, on the console, in the tab and in the report."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from panels_run import Watched, chromium, client

from benchmarks.parting.programs import Knobs, train
from flowscope.backdrop import Behind, packed, read
from flowscope.corridor.behind import MOST_CHARACTERS, of_run, of_stacks
from flowscope.corridor.curves import Stack
from flowscope.live import LiveView
from flowscope.records import Record, Run, RunHeader
from flowscope.sinks import ConsoleSink, read_run
from flowscope.views.report import report_payload, write_report

GOOD = Knobs(steps=14)
"""Steps 0 to 10 are recorded."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run and one beside it that goes wrong, four seeds and one beside them."""
    folder = tmp_path_factory.mktemp("backdrop")
    train(folder / "good", GOOD)
    train(folder / "bad", replace(GOOD, fault="rate", since=4), reference=folder / "good")
    for seed in range(1, 5):
        train(folder / "seeds" / str(seed), replace(GOOD, seed=seed))
    train(folder / "other", replace(GOOD, seed=9), reference=folder / "seeds")
    return folder


def header_of(folder: Path) -> RunHeader:
    header = read_run(folder).header
    assert header is not None
    return header


def test_the_header_holds_the_good_run(runs: Path) -> None:
    backdrop, good = read(header_of(runs / "bad").behind), read_run(runs / "good")
    assert backdrop is not None
    assert (backdrop.name, backdrop.runs) == ("good", 1)
    losses = backdrop.curves["loss"]
    assert losses.steps == tuple(record.step for record in good.records)
    np.testing.assert_allclose(losses.values[0, :, 0], [record.loss for record in good.records], rtol=1e-4)
    for key in ("gradient_product", "act_rms", "param_norm"):
        for record in good.records:
            step, lines = backdrop.curves[key].at(record.step)
            assert step == record.step
            np.testing.assert_allclose(lines[0], record.metrics[key], rtol=2e-3, err_msg=key)


def test_several_good_runs_are_a_band_of_their_quantiles(runs: Path) -> None:
    backdrop = read(header_of(runs / "other").behind)
    assert backdrop is not None
    assert backdrop.words == "seeds (4 runs)"
    good = [read_run(runs / "seeds" / str(seed)) for seed in range(1, 5)]
    step, lines = backdrop.curves["act_rms"].at(7)
    values = np.sort([run.records[7].metrics["act_rms"] for run in good], axis=0)
    assert step == 7
    # of four, a tenth lies three tenths of the way from the first to the second, in logarithms
    logs = np.log(values)
    low, high = logs[0] + 0.3 * (logs[1] - logs[0]), logs[3] - 0.3 * (logs[3] - logs[2])
    np.testing.assert_allclose(lines, np.exp([low, (logs[1] + logs[2]) / 2, high]), rtol=2e-3)


def test_a_run_without_a_reference_has_nothing_behind_it(runs: Path) -> None:
    assert header_of(runs / "good").behind == {}
    assert read({}) is None


def test_what_is_behind_a_long_deep_run_fits() -> None:
    rng = np.random.default_rng(0)
    stacks = [
        Stack(f"m{n}", tuple(range(128)), rng.normal(size=(5, 128, 64)), 64, tuple(map(str, range(64))), per_flow=True)
        for n in range(40)
    ]
    found = of_stacks("deep", stacks)
    assert len(found["data"]) <= MOST_CHARACTERS
    backdrop = read(json.loads(json.dumps(found)))
    assert backdrop is not None
    assert len(backdrop.curves) == 40


def test_other_parameters_are_not_joined() -> None:
    values = np.ones((1, 3, 64))
    stacks = [Stack("param_norm", (0, 1, 2), values, 200, ()), Stack("loss", (0, 1, 2), values[..., :1], 1, ())]
    backdrop = read(of_stacks("good", stacks))
    assert backdrop is not None
    assert [*backdrop.curves] == ["loss"]


def test_a_kept_curve_keeps_zeros_gaps_and_places() -> None:
    values = np.array([[[1.0, np.nan, np.inf], [1e-6, 0.0, 2e3]]])
    backdrop = read(packed("good", 1, {"linear": Behind((4, 9), values), "log": Behind((4, 9), values)}, ["log"]))
    assert backdrop is not None
    np.testing.assert_allclose(backdrop.curves["linear"].values, values, atol=2e3 / 32_000)
    np.testing.assert_allclose(backdrop.curves["log"].values, values, rtol=np.log(2e9) / 32_000)
    assert backdrop.curves["log"].at(100)[0] == 9


@pytest.mark.parametrize(
    "damage",
    [
        {"data": "no base64!"},
        {"data": "AAAA"},
        {"runs": "many"},
        {"curves": None},
        {"curves": [["loss", False, 0.0, 1.0, [1, 10**9, 10**9], [0]]]},
        {"curves": [["loss", False, 0.0, 1.0, [1, 2, 1], [0]]]},
        {"curves": [["loss", False]]},
    ],
)
def test_a_damaged_entry_is_left_out(damage: dict[str, Any]) -> None:
    told = packed("good", 1, {"loss": Behind((0, 1), np.array([[[1.0], [2.0]]]))})
    assert read(told) is not None
    assert read({**told, **damage}) is None


def test_the_console_says_both(runs: Path) -> None:
    run, good, stream = read_run(runs / "bad"), read_run(runs / "good"), io.StringIO()
    sink = ConsoleSink(stream)
    assert run.header is not None
    sink.write(run.header)
    for record in run.records:
        sink.write(record)
    lines = stream.getvalue().splitlines()
    assert f"loss {run.records[9].loss:>9.4g} (reference {good.records[9].loss:.4g})" in lines[10]
    bars = lines[10].split("  reference ")
    assert len(bars) == 2
    assert len(bars[1]) == len(bars[0].rsplit("  ", 1)[1]) == 5
    sink.write(Record(13, 2.0, {}))
    assert stream.getvalue().endswith(f"(reference {good.records[10].loss:.4g} at step 10)\n")


def test_live_shows_both_losses(runs: Path) -> None:
    run, good = read_run(runs / "bad"), read_run(runs / "good")
    view = LiveView()
    assert run.header is not None
    for event in (run.header, *run.records):
        view.write(event)
    first, last = good.records[0].loss, good.records[-1].loss
    assert view.text(100).splitlines()[-1].startswith("  good ")
    assert view.text(100).endswith(f" {first:.4g} to {last:.4g}")


def test_the_report_and_the_tab_hold_the_same(runs: Path) -> None:
    run, ask = read_run(runs / "bad"), client(runs)
    page = report_payload({"bad": run}, "title")
    told = ask("overview")["runs"]
    assert [one["behind"] and one["behind"]["name"] for one in told] == ["good", None, "seeds (4 runs)", *[None] * 4]
    assert page["runs"][0]["behind"] == told[0]["behind"]
    series = ask("series", run="bad", key="act_rms")
    assert page["series"]["bad"]["act_rms"]["behind"] == series["behind"]
    good = read_run(runs / "good").records[6].metrics["act_rms"]
    np.testing.assert_allclose(series["behind"]["values"][0][6], good, rtol=2e-3)
    assert ask("series", run="good", key="act_rms")["behind"] is None


def test_the_browser_draws_a_line_or_a_band_behind(runs: Path, tmp_path: Path) -> None:
    file = write_report({name: read_run(runs / name) for name in ("bad", "other")}, tmp_path / "report.html")
    with chromium() as browser:
        watched = Watched(browser)
        page = watched.page
        page.goto(file.as_uri())
        page.locator(".heat canvas").first.wait_for()
        page.locator("#metric").select_option("act_rms")
        page.locator("h2 code", has_text="act_rms").wait_for()
        # first and last step of the good run and of the median of the four, before the lines of the two runs
        classes = [path.get_attribute("class") for path in page.locator(".depth .plot path").all()]
        band, line = "line behind middle", "line behind"
        assert classes == ["band behind"] * 2 + [line] * 2 + [band] * 2 + ["line"] * 4
        legend = page.locator(".depth .legend li").all_inner_texts()
        assert [words.strip() for words in legend[:3]] == [
            "reference good, step 0",
            "reference good, step 10",
            "reference seeds (4 runs), step 0",
        ]
        loss = [path.get_attribute("class") for path in page.locator(".loss .plot path").all()]
        assert loss == [line, "band behind", band, "line", "line"]
        picture = page.locator(".loss svg")
        box = picture.bounding_box()
        picture.hover(position={"x": box["width"] * 0.98, "y": box["height"] / 2})
        last = read_run(runs / "good").records[-1].loss
        assert page.locator(".loss .readout > *").first.inner_text() == f"reference good, step 10: {last:.4g}"
        assert watched.complaints == []


def test_a_good_run_without_records_of_numbers_has_no_curves() -> None:
    assert of_run("good", Run(RunHeader(), [Record(0)]))["curves"] == []
