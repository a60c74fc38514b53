"""The page in a real browser: one run, eight, fifty; wide and narrow, light and dark; ways in and ways out."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_runs import HEADER, LABELS, LOST_AT, POINTS, STEPS, is_sick, name_of, record, run, written
from panels_run import Watched, chromium, tensorboard, wait_for_runs
from PIL import Image

from flowscope.metrics import spec_of
from flowscope.records import Record, Run
from flowscope.sinks import TensorBoardSink
from flowscope.views.report import MOST_BYTES, write_report

SECONDS = 2.0
"""Of the processor, until the first picture."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("reports")
    return {
        count: write_report({name_of(n): run(n) for n in range(count)}, folder / f"{count}.html", title="sweep")
        for count in (1, 8, 50)
    }


def opened(browser: Any, file: Path, width: int = 1440, scheme: str = "light", view: str = "") -> Watched:
    watched = Watched(browser, color_scheme=scheme)
    watched.page.set_viewport_size({"width": width, "height": 900})
    watched.page.goto(file.as_uri() + view)
    watched.page.locator(".heat canvas").first.wait_for(timeout=60_000)
    return watched


@pytest.mark.parametrize("count", [1, 8, 50])
@pytest.mark.parametrize("width", [1440, 1000])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_answer_is_on_the_first_screen(
    browser: Any, reports: dict[int, Path], count: int, width: int, scheme: str
) -> None:
    watched = opened(browser, reports[count], width, scheme)
    page = watched.page
    sentence = page.locator(".verdict.error .state")
    assert f"between blocks.11 and {POINTS[0]}" in sentence.inner_text()
    assert f"since step {LOST_AT}." in sentence.inner_text()
    assert sentence.bounding_box()["y"] < 900  # type: ignore[index]
    # nothing makes the page scroll sideways, and no text is too small to be read
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    heights = page.evaluate(
        "[...document.querySelectorAll('.plot svg text')].map(text => text.getBoundingClientRect().height)"
    )
    assert min(heights) >= 11
    # what is written differs from what it is written on
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert abs(brightness(ink) - brightness(paper)) > 120
    assert (brightness(paper) > 128) == (scheme == "light")
    assert page.locator(".all-runs tbody tr").count() == (count if count > 1 else 0)
    if count > 1:  # nor does the table of runs
        assert page.locator(".all-runs .scrolls").evaluate("node => node.scrollWidth <= node.clientWidth")
    assert watched.complaints == []
    page.close()


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_fifty_runs_are_filtered_sorted_grouped_and_told_apart(browser: Any, reports: dict[int, Path]) -> None:
    assert reports[50].stat().st_size < MOST_BYTES
    watched = opened(browser, reports[50])
    page = watched.page
    rows = page.locator(".all-runs tbody tr")
    page.get_by_role("button", name="verdict").click()
    sick = [n for n in range(50) if is_sick(n)]
    verdicts = rows.locator("td.sign").all_inner_texts()
    assert [text.split()[-1] for text in verdicts] == ["error"] * len(sick) + ["ok"] * (50 - len(sick))
    page.get_by_role("columnheader", name="loss").get_by_role("button").click()
    assert rows.first.locator("td:nth-child(9)").inner_text() == "1.2 %"
    losses = [float(text) for text in rows.locator("td:nth-child(7)").all_inner_texts()]
    assert losses == sorted(losses)
    page.get_by_label("Group runs").select_option("verdict")
    assert page.locator(".all-runs tr.group").all_inner_texts() == ["error", "ok"]
    page.get_by_label("Group runs").select_option("none")
    page.get_by_label("Filter runs").fill("vanishing")
    assert rows.count() == len(sick)
    page.get_by_role("button", name="show these").click()
    page.locator("figure.heat").nth(len(sick) - 1).wait_for()
    assert page.locator("figure.heat").count() == len(sick)
    colours = page.evaluate(
        "[...document.querySelectorAll('.all-runs tr.shown .swatch')].map(one => one.style.background)"
    )
    assert len(set(colours)) == len(sick) > 6
    assert page.locator(".runs").bounding_box()["height"] > 100  # type: ignore[index]
    assert watched.complaints == []
    page.close()


def test_the_tab_shows_fifty_runs_in_one_table(browser: Any, tmp_path: Path) -> None:
    written(tmp_path, 50, TensorBoardSink)
    with tensorboard(tmp_path) as address:
        wait_for_runs(address, 50)
        watched = Watched(browser, color_scheme="dark")
        watched.page.set_viewport_size({"width": 1000, "height": 900})
        watched.page.set_default_timeout(60_000)
        watched.page.goto(f"{address}#flowscope")
        panels = watched.page.frame_locator("iframe")
        panels.locator(".heat canvas").first.wait_for()
        rows = panels.locator(".all-runs tbody tr")
        assert rows.count() == 50
        assert f"between blocks.11 and {POINTS[0]}" in panels.locator(".verdict.error .state").first.inner_text()
        panels.get_by_label("Filter runs").fill("vanishing")
        sick = [name_of(n) for n in range(50) if is_sick(n)]
        assert sorted(rows.locator("td:nth-child(2)").all_inner_texts()) == sorted(sick)
        panels.get_by_role("button", name="show these").click()
        panels.locator("figure.heat").nth(len(sick) - 1).wait_for()
        shown = panels.locator("figure.heat figcaption").all_inner_texts()
        assert len(shown) == len(sick)
        assert all(any(name in caption for caption in shown) for name in sick)
        assert panels.locator("html").evaluate("node => node.scrollWidth <= node.clientWidth")
        assert watched.strangers(address) == []
        assert watched.complaints == []
        watched.page.close()


def test_no_run_is_hidden_by_anothers_outlier(browser: Any, reports: dict[int, Path]) -> None:
    watched = opened(browser, reports[8])
    page = watched.page
    page.get_by_role("button", name="show these").click()
    page.locator("figure.heat").nth(7).wait_for()
    ticks = [page.locator("figure.heat").nth(n).locator(".shades span").all_inner_texts() for n in range(8)]
    assert "1e12" in "".join(ticks[3]) or "1e+12" in "".join(ticks[3]) or any("e1" in tick for tick in ticks[3])
    assert all(float(ticks[n][-1]) <= 10 for n in (0, 1, 2, 7))
    shades = page.locator("figure.heat .shades").first
    bar, tick = shades.locator("canvas").bounding_box(), shades.locator("span").first.bounding_box()
    assert tick["y"] >= bar["y"] + bar["height"]  # type: ignore[index]
    page.get_by_label("own scale per run").uncheck()
    page.locator(".picture > .colour-bar").wait_for()
    assert page.locator("figure.heat .shades").count() == 0
    page.close()


def test_a_click_on_the_alert_lands_on_the_darkest_cell(browser: Any, reports: dict[int, Path]) -> None:
    watched = opened(browser, reports[1])
    page = watched.page
    page.locator(".alert button").first.click()
    told = page.locator(".heat .readout:visible > *").all_inner_texts()
    least = record(LOST_AT, 0).metrics["gradient_product"][0]
    assert told[:2] == [POINTS[0], f"step {LOST_AT}"]
    assert float(told[2]) == pytest.approx(least, rel=1e-3)
    page.close()


def test_the_loss_stands_above_the_map_on_its_own_axis(browser: Any, reports: dict[int, Path]) -> None:
    watched = opened(browser, reports[1])
    strip = watched.page.locator("figure.heat .loss-strip").first
    canvas = watched.page.locator("figure.heat canvas").first
    left, below = strip.bounding_box(), canvas.bounding_box()
    assert (left["x"], left["width"]) == (pytest.approx(below["x"], abs=1), pytest.approx(below["width"], abs=1))  # type: ignore[index]
    stem = float(strip.locator(".stem").get_attribute("x1") or "nan") / 1000
    assert stem == pytest.approx((STEPS.index(LOST_AT) + 0.5) / len(STEPS), abs=1e-3)
    points = (strip.locator("polyline").get_attribute("points") or "").split()
    assert len(points) == len(STEPS)
    assert float(points[10].split(",")[0]) / 1000 == pytest.approx(10.5 / len(STEPS), abs=1e-3)
    watched.page.close()


def test_steps_are_zoomed_by_dragging_and_by_keys_and_the_way_back_is_there(
    browser: Any, reports: dict[int, Path]
) -> None:
    watched = opened(browser, reports[1])
    page = watched.page
    box = page.locator("figure.heat canvas").first.bounding_box()
    column = box["width"] / len(STEPS)
    page.mouse.move(box["x"] + 2.5 * column, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 6.5 * column, box["y"] + 50, steps=4)
    page.mouse.up()
    page.locator(".unzoom").wait_for()
    assert page.locator("figure.heat .step-axis span").all_inner_texts() == ["2", "3", "4", "5", "6"]
    page.locator(".unzoom").click()
    page.locator(".unzoom").wait_for(state="detached")
    assert page.locator("figure.heat .step-axis span").last.inner_text() == "120"
    page.locator("figure.heat canvas").first.focus()
    for key in ("ArrowLeft", "ArrowLeft", "[", "ArrowRight", "]"):
        page.keyboard.press(key)
    page.locator(".unzoom").wait_for()
    assert len(page.locator("figure.heat .step-axis span").all_inner_texts()) == 2
    page.close()


def test_a_view_is_in_the_address(browser: Any, reports: dict[int, Path]) -> None:
    watched = opened(browser, reports[8])
    page = watched.page
    page.locator("#metric").select_option("gain")
    page.locator(".runs label").filter(has_text=name_of(4)).locator("input").check()
    page.get_by_label("Unit of the step axis").select_option("epoch")
    page.locator(".per").fill("20")
    page.locator(".per").press("Enter")
    page.locator("figure.heat").nth(2).wait_for()
    view = page.url.partition("#")[2]
    page.close()
    again = opened(browser, reports[8], view=f"#{view}")
    assert again.page.locator(".picture h2 code").inner_text() == "gain"
    assert again.page.locator("figcaption", has_text=name_of(4)).count() == 1
    assert again.page.locator("figure.heat .step-axis span").last.inner_text() == "6"  # 120 steps, 20 an epoch
    assert again.page.locator("figure.heat .axis-title").first.inner_text() == "epoch"
    again.page.close()
    broken = opened(browser, reports[1], view="#%7Bnonsense")
    assert broken.complaints == []
    broken.page.close()


def test_the_step_axis_counts_tokens(browser: Any, reports: dict[int, Path]) -> None:
    watched = opened(browser, reports[1])
    page = watched.page
    page.get_by_label("Unit of the step axis").select_option("tokens")
    page.get_by_label("tokens a step").fill("50000")
    page.get_by_label("tokens a step").press("Enter")
    labels = page.locator("figure.heat .step-axis span")
    page.locator("figure.heat .step-axis span", has_text="6M").wait_for()  # step 120
    found = labels.all_inner_texts()
    size = {"k": 1e3, "M": 1e6}
    tokens = [float(text.rstrip("kM")) * size.get(text[-1], 1) for text in found]
    assert (len(tokens), tokens[0]) == (7, 50_000 * STEPS[0])
    assert {*tokens} <= {50_000.0 * step for step in STEPS}
    assert tokens == sorted(tokens)
    assert page.locator("figure.heat .axis-title").first.inner_text() == "tokens"
    page.locator("figure.heat canvas").first.focus()  # a cell still tells its step
    page.keyboard.press("ArrowUp")
    assert page.locator(".heat .readout:visible > *").nth(1).inner_text() == f"step {STEPS[-1]}"
    view = page.url.partition("#")[2]
    page.close()
    again = opened(browser, reports[1], view=f"#{view}")
    assert again.page.locator("figure.heat .step-axis span").all_inner_texts() == found
    assert again.complaints == []
    again.page.close()


def test_a_metric_is_told_in_words_and_kept_by_its_name(browser: Any, reports: dict[int, Path]) -> None:
    watched = opened(browser, reports[1])
    page = watched.page
    says = spec_of("gradient_product", {}).words
    assert page.locator(".picture h2").inner_text() == f"{says.rstrip('.')} gradient_product"
    assert page.locator(".depth h2").inner_text() == "gradient product over depth"
    assert page.locator(".profile > .hint").inner_text() == "↑ gradient product"
    chosen = page.locator("#metric option:checked")
    assert (chosen.inner_text(), chosen.get_attribute("value")) == ("gradient product", "gradient_product")
    assert "gradient_product" in page.url
    page.close()


def saved(page: Any, name: str, kind: str) -> bytes:
    with page.expect_download() as download:
        page.get_by_label(re.compile(rf"^save .*{re.escape(name)} as {kind}$")).first.click()
    return Path(download.value.path()).read_bytes()


def test_pictures_and_tables_leave_the_page(browser: Any, reports: dict[int, Path]) -> None:
    watched = opened(browser, reports[1])
    page = watched.page
    lines = list(csv.reader(io.StringIO(saved(page, "gradient_product", "CSV").decode())))
    assert lines[0] == ["row", *map(str, STEPS)]
    assert [line[0] for line in lines[1:]] == [*POINTS]
    values = np.array([line[1:] for line in lines[1:]], float)
    expected = np.stack([record(step, 0).metrics["gradient_product"] for step in STEPS], 1)
    np.testing.assert_allclose(values, expected, rtol=1e-4)
    image = Image.open(io.BytesIO(saved(page, "gradient_product", "PNG")))
    assert image.width > 800
    assert len(image.convert("RGB").getcolors(1 << 20)) > 10
    drawing = saved(page, "gradient_product", "SVG").decode()
    assert drawing.startswith("<svg")
    assert "stroke: rgb(0, 114, 178)" in drawing
    assert watched.complaints == []
    page.close()


def test_parameters_are_a_sorted_table_and_a_map(browser: Any, tmp_path: Path) -> None:
    many = tuple(f"blocks.{i}.w{j}" for i in range(50) for j in range(4))
    values = np.random.default_rng(0).permutation(len(many)) * 1e-3
    header = type(HEADER)("0.2", HEADER.flows, {**LABELS, "update_ratio": many})
    records = [Record(step, 1.0, {**record(step, 1).metrics, "update_ratio": values}) for step in STEPS]
    file = write_report({"run": Run(header, records)}, tmp_path / "r.html")
    watched = opened(browser, file)
    page = watched.page
    page.locator("#metric").select_option("update_ratio")
    page.locator(".parameters tbody tr").first.wait_for()
    assert page.locator("figure.heat canvas").count() == 1
    page.locator(".parameters thead button").nth(1).click()
    first = page.locator(".parameters tbody tr").first
    assert first.locator("th").inner_text() == many[int(values.argmax())]
    page.get_by_label("Filter parameters").fill("blocks.7.")
    assert page.locator(".parameters tbody tr").count() == 4
    page.close()


def test_the_loss_is_smoothed_on_demand(browser: Any, reports: dict[int, Path]) -> None:
    watched = opened(browser, reports[8])
    line = watched.page.locator(".loss svg path.line").nth(1)
    before = line.get_attribute("d")
    watched.page.get_by_label("Smoothing of the loss").fill("0.9")
    watched.page.wait_for_function(
        "before => document.querySelectorAll('.loss svg path.line')[1].getAttribute('d') !== before", arg=before
    )
    watched.page.close()


def test_a_long_deep_run_is_seen_within_two_seconds_from_its_first_step(browser: Any, tmp_path: Path) -> None:
    points = tuple(f"layers.{i}" for i in range(100))
    header = type(HEADER)("0.2", (), {"gradient_product": points})
    rng = np.random.default_rng(0)
    profile = 0.5 + rng.random(100)
    records = [Record(10 * n, 3.0, {"gradient_product": profile * (1 + n % 7)}) for n in range(20_000)]
    file = write_report({"long": Run(header, records)}, tmp_path / "long.html")
    watched = Watched(browser)
    page = watched.page
    page.set_viewport_size({"width": 1440, "height": 900})
    clock = page.context.new_cdp_session(page)
    clock.send("Performance.enable", {"timeDomain": "threadTicks"})  # other work on this machine does not count
    page.goto(file.as_uri())
    page.locator(".heat canvas").first.wait_for(timeout=60_000)
    took = {one["name"]: one["value"] for one in clock.send("Performance.getMetrics")["metrics"]}
    assert 0 < took["ProcessTime"] <= SECONDS
    labels = page.locator("figure.heat .step-axis span").all_inner_texts()
    assert (labels[0], labels[-1]) == ("0", "199990")
    assert re.search(r"3\d\d of 20000 records", page.locator("figcaption").inner_text())
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440
    page.close()
