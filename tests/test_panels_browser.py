"""The tab and the report in a real browser: pictures, numbers on hover, alerts that lead somewhere, no far request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from panels_run import (
    DECODER,
    ENCODER,
    EVIL,
    HEADER,
    STEPS,
    Watched,
    chromium,
    product,
    tensorboard,
    wait_for_runs,
    write_run,
)
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from flowscope.records import Record
from flowscope.sinks import protobufs, read_run
from flowscope.views.report import write_report

TIMEOUT = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("panels")
    for run in ("a", "b"):
        write_run(folder / run, run)
    return folder


@pytest.fixture(scope="module")
def server(browser: Any, logdir: Path) -> Iterator[str]:
    with tensorboard(logdir) as address:
        wait_for_runs(address, 2)
        yield address


@pytest.fixture(scope="module")
def tab(browser: Any, server: str) -> Iterator[Watched]:
    """TensorBoard's page with the tab open; it takes seconds to load, so the tests share it."""
    watched = Watched(browser)
    watched.page.set_default_timeout(TIMEOUT)
    watched.page.goto(f"{server}#flowscope")
    watched.page.frame_locator("iframe").locator(".heat canvas").first.wait_for()
    yield watched
    watched.page.close()


@pytest.fixture(params=["tab", "report"])
def opened(request: pytest.FixtureRequest, browser: Any, logdir: Path, tmp_path: Path) -> Iterator[tuple[Watched, Any]]:
    """A page and the part of it that shows the panels; what it asked for and complained about is checked afterwards."""
    if request.param == "tab":
        allowed, watched = request.getfixturevalue("server"), request.getfixturevalue("tab")
        watched.page.mouse.move(0, 0)
        (frame,) = (frame for frame in watched.page.frames if "plugin_entry" in frame.url)
        frame.goto(frame.url.partition("#")[0])  # the tab from its start, in the same TensorBoard
        panels: Any = watched.page.frame_locator("iframe")
    else:
        watched = Watched(browser)
        watched.page.set_default_timeout(TIMEOUT)
        file = write_report({run: read_run(logdir / run) for run in ("a", "b")}, tmp_path / "report.html")
        allowed = file.as_uri()
        watched.page.goto(allowed)
        panels = watched.page
    panels.locator(".heat canvas").first.wait_for()
    yield watched, panels
    assert watched.strangers(allowed) == []
    assert watched.requests, "the list of requests must not be empty, or it proves nothing"
    assert watched.complaints == []
    if request.param == "report":
        watched.page.close()


def hover(panels: Any, run: str, row: int, rows: int, column: int) -> list[str]:
    """The lines of the readout over a cell."""
    figure = panels.locator("figure.heat").filter(has=panels.locator("figcaption", has_text=run))
    canvas = figure.locator("canvas")
    box = canvas.bounding_box()
    at = {"x": (column + 0.5) / len(STEPS) * box["width"], "y": (row + 0.5) / rows * box["height"]}
    canvas.hover(position=at, force=True)  # a mark may lie above the cell
    return figure.locator(".readout > *").all_inner_texts()


def test_a_known_cell_reads_its_known_value(opened: tuple[Watched, Any]) -> None:
    _, panels = opened
    # (1 + 1) * 10**-3 / (2 + 1) and ten times that
    assert hover(panels, "a · enc", 1, 5, 2) == ["enc.0", "step 2", "6.667e-4"]
    assert hover(panels, "b · enc", 1, 5, 2) == ["enc.0", "step 2", "0.006667"]
    assert product("a", 2)[1] == pytest.approx(2e-3 / 3)


def test_changing_metric_flow_scale_and_run(opened: tuple[Watched, Any]) -> None:
    _, panels = opened
    panels.locator("#metric").select_option("update_ratio")
    panels.locator("h2 code", has_text="update_ratio").wait_for()
    assert hover(panels, "a", 2, 3, 0) == ["head</script>.weight", "step 0", "3e-60"]
    panels.locator("#metric").select_option("gradient_product")
    panels.locator("#flow").select_option("dec")
    panels.locator("figcaption", has_text="a · dec").wait_for()
    assert hover(panels, "a · dec", 1, 4, 5) == [DECODER[1], "step 15", "not seen or NaN"]
    assert hover(panels, "a · dec", 3, 4, 5) == [DECODER[3], "step 15", "32"]
    assert panels.locator(".colour-bar .not-seen").is_visible()
    before = panels.locator(".picture .shades span").all_inner_texts()
    # 0.5 to 32, and exact zeros, which have an edge of their own on a logarithmic scale
    assert before == ["0", "0.1", "1", "10", "100"]
    panels.locator("#scale").select_option("linear")
    panels.locator(".picture .shades span", has_text="20").first.wait_for()
    assert panels.locator(".picture .shades span").all_inner_texts() != before
    panels.locator(".runs label").filter(has_text="a").locator("input").uncheck()
    panels.locator("figcaption", has_text="a · dec").wait_for(state="detached")
    assert panels.locator("figure.heat").count() == 1


def test_an_alert_leads_to_its_layer_and_step(opened: tuple[Watched, Any]) -> None:
    _, panels = opened
    panels.locator("#metric").select_option("update_ratio")
    panels.locator("h2 code", has_text="update_ratio").wait_for()
    panels.locator(".alert button", has_text="vanishing_gradient").click()
    panels.locator(".detail", has_text="the gradient is gone").wait_for()
    assert "pre-norm, or wrap" in panels.locator(".detail").inner_text()
    readout = panels.locator(".heat .readout:visible > *")
    readout.first.wait_for()
    # where it began, the worst cell of its column: row 0 at step 2 is 10**-4 / 3, and the column ends at 5 / 3
    ends = "over depth at this step: 3.333e-5 (enc:input) to 1.667 (enc.3)"
    assert readout.all_inner_texts() == ["enc:input", "step 2", "3.333e-5", ends]
    assert panels.locator(".mark.error").get_attribute("title").endswith("least: 3.333e-5 at enc:input")
    # from row 2 up to row 0: centres of rows, in heights of the picture
    reach, picture = panels.locator(".reach.up").bounding_box(), panels.locator(".heat canvas").first.bounding_box()
    assert reach["y"] - picture["y"] == pytest.approx(0.1 * picture["height"], abs=1)
    assert reach["height"] == pytest.approx(0.4 * picture["height"], abs=1)
    panels.locator(".verdict.error summary").click()
    card = panels.locator(".verdict.error").inner_text()
    assert "Gradient is lost between enc.3 and enc:input" in card
    assert "First: representation_collapse at enc.3 (step 2); then: vanishing_gradient" in card
    assert "What to do: pre-norm, or wrap" in card
    assert panels.locator(".chip").all_inner_texts() == ["first (0)", "2", "last (15)"]
    assert panels.locator(".timeline .when").all_inner_texts() == ["steps 2 to 10", "since step 2"]
    assert "told at step 5" in panels.locator(".detail").inner_text()


def test_the_loss_of_both_runs_is_drawn(opened: tuple[Watched, Any]) -> None:
    _, panels = opened
    picture = panels.locator(".loss svg")
    assert picture.get_attribute("aria-label") == "Loss: a ends at 1.5; b ends at 1.5"  # 3 - 15 / 10
    assert picture.locator("path.line").count() == 2
    box = picture.bounding_box()
    picture.hover(position={"x": box["width"] * 0.99, "y": box["height"] / 2})
    assert panels.locator(".loss .readout > *").all_inner_texts() == ["a, step 15: 1.5", "b, step 15: 1.5"]


def test_a_run_keeps_its_colour_while_others_come_and_go(opened: tuple[Watched, Any]) -> None:
    _, panels = opened

    def colours() -> list[str]:
        swatches = panels.locator(".runs .swatch")
        return [swatches.nth(i).evaluate("node => node.style.background") for i in range(2)]

    before = colours()
    assert before[0] != before[1]
    panels.locator(".runs input").nth(0).uncheck()
    panels.locator("figcaption", has_text="a · enc").wait_for(state="detached")
    assert colours() == ["transparent", before[1]]
    panels.locator(".runs input").nth(0).check()
    panels.locator("figcaption", has_text="a · enc").wait_for()
    assert colours() == before


def test_a_hostile_name_is_text(opened: tuple[Watched, Any]) -> None:
    _, panels = opened
    assert hover(panels, "a · enc", 2, 5, 0)[0] == EVIL
    assert panels.locator("img").count() == 0
    panels.locator(".alert button", has_text="representation_collapse").click()
    assert f"copies at {EVIL}" in panels.locator(".detail").text_content()
    panels.locator(".about summary").first.click()
    assert "</script><b>bold</b>" in panels.locator(".about").first.inner_text()


def test_a_click_pins_the_profile_of_its_step(opened: tuple[Watched, Any]) -> None:
    _, panels = opened
    canvas = panels.locator("figure.heat canvas").first
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 2.5 / len(STEPS), "y": box["height"] * 0.9})
    panels.locator(".chip", has_text=re.compile("^2$")).wait_for()
    legend = panels.locator(".legend li").all_inner_texts()
    assert [text.strip() for text in legend] == [f"{run}, step {step}" for run in "ab" for step in (0, 15, 2)]
    assert panels.locator(".profile .limit text").text_content() == "alert limit 0.001"
    panels.get_by_label("take step 2 out").click()
    panels.locator(".chip", has_text=re.compile("^2$")).wait_for(state="detached")


def test_the_views_show_their_pictures(opened: tuple[Watched, Any]) -> None:
    _, panels = opened
    panels.get_by_role("button", name="Depth", exact=True).click()
    panels.locator(".matrix canvas").first.wait_for()
    assert panels.locator(".profile path.band").count() == 4
    box = panels.locator(".matrix canvas").first.bounding_box()
    panels.locator(".matrix canvas").first.hover(position={"x": box["width"] * 0.1, "y": box["height"] * 0.9})
    assert panels.locator(".matrix .readout:visible > *").all_inner_texts() == [f"{ENCODER[4]} and {ENCODER[0]}", "0.8"]
    panels.get_by_role("button", name="Mixing", exact=True).click()
    panels.locator(".site canvas").first.wait_for()
    assert panels.locator(".site").count() == 2 * 4
    box = panels.locator(".site canvas").nth(1).bounding_box()
    panels.locator(".site canvas").nth(1).hover(position={"x": box["width"] * 0.9, "y": box["height"] * 0.5})
    # site 1, row 1, column 2 of arange(36)
    assert panels.locator(".site .readout:visible .value").inner_text() == "14"
    panels.get_by_role("button", name="Gates", exact=True).click()
    panels.locator("h2 code", has_text="gate_mean").wait_for()
    # gates lie between 0.1 and 0.4 here: the colours span that, not all of 0 to 1
    shades = panels.locator(".picture .shades span").all_inner_texts()
    assert shades == ["0.1", "0.15", "0.2", "0.25", "0.3", "0.35", "0.4"]
    panels.get_by_role("button", name="Parameters", exact=True).click()
    panels.locator("h2 code", has_text="update_ratio").wait_for()


def test_everything_can_be_reached_with_the_keyboard(opened: tuple[Watched, Any]) -> None:
    watched, panels = opened
    canvas = panels.locator("figure.heat canvas").first
    canvas.focus()
    for key in ("ArrowLeft", "ArrowDown"):
        watched.page.keyboard.press(key)
    assert panels.locator(".heat .readout:visible > *").all_inner_texts()[:2] == ["enc.0", "step 10"]
    watched.page.keyboard.press("Enter")
    panels.locator(".chip", has_text=re.compile("^10$")).wait_for()
    panels.get_by_label("Find a metric").focus()
    watched.page.keyboard.type("mix gain")
    assert panels.locator("#metric option").all_inner_texts() == ["mix gain backward"]
    panels.get_by_role("button", name="Gates", exact=True).focus()
    watched.page.keyboard.press("Enter")
    panels.locator("h2 code", has_text="gate_mean").wait_for()
    panels.locator(".chip").first.focus()
    watched.page.keyboard.press("Enter")
    panels.locator(".chip", has_text="first").wait_for(state="detached")
    # the focus goes on to the next one instead of back to the head of the page
    assert panels.locator(".chip:focus").inner_text() == "last (15)"
    panels.locator(".alert button").first.focus()
    watched.page.keyboard.press("Enter")
    panels.locator(".detail").wait_for()


def test_a_slow_older_answer_does_not_overwrite_a_newer_choice(opened: tuple[Watched, Any]) -> None:
    """Pinning asks the server for a record; what is chosen while the answer is on its way stands."""
    watched, panels = opened
    late: list[Any] = []
    panels.locator(".chip", has_text="first").wait_for()
    # the tab's requests go to the server, the report has its data within: nothing to hold back there
    watched.page.route(re.compile(r"/record\?"), lambda route: late.append(route))
    canvas = panels.locator("figure.heat canvas").first
    canvas.focus()
    # pinned, and taken out again while the answer is on its way
    for key in ("ArrowLeft", "ArrowDown", "Enter", "Enter"):
        watched.page.keyboard.press(key)
    watched.page.wait_for_timeout(200)
    for route in late:
        route.continue_()
    watched.page.wait_for_timeout(500)
    assert panels.locator(".chip").all_inner_texts() == ["first (0)", "last (15)"]


def test_new_records_appear_by_themselves(browser: Any, tmp_path: Path) -> None:
    from panels_run import record

    from flowscope.sinks import TensorBoardSink

    sink = TensorBoardSink(tmp_path / "live", images_every=0)
    sink.write(HEADER)
    sink.write(record("a", 0))
    with tensorboard(tmp_path) as address:
        wait_for_runs(address, 1)
        watched = Watched(browser)
        watched.page.clock.install()
        watched.page.goto(f"{address}#flowscope")
        panels = watched.page.frame_locator("iframe")
        panels.locator(".verdict small", has_text="step 0").wait_for(timeout=TIMEOUT)
        before = wait_for_runs(address, 1)
        sink.write(record("a", 7))
        read = any(wait_for_runs(address, 1)[0]["stamp"] != before[0]["stamp"] for _ in range(20))
        assert read, "TensorBoard has not read the new record"
        watched.page.clock.fast_forward(10_000)  # the interval at which it looks
        panels.locator(".verdict small", has_text="step 7").wait_for(timeout=TIMEOUT)
        panels.locator(".step-axis span", has_text="7").wait_for(timeout=TIMEOUT)
        assert watched.complaints == []
        watched.page.close()
    sink.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_reader(browser: Any, logdir: Path, tmp_path: Path, scheme: str) -> None:
    watched = Watched(browser, color_scheme=scheme)
    watched.page.goto(write_report(read_run(logdir / "a"), tmp_path / "r.html").as_uri())
    watched.page.locator(".heat canvas").first.wait_for(timeout=TIMEOUT)
    colours = watched.page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    ink, paper = (sum(int(part) for part in colour[4:-1].split(",")) for colour in colours)
    assert (ink < 150 and paper > 700) if scheme == "light" else (ink > 600 and paper < 150)
    watched.page.close()


def test_the_tab_is_dark_when_tensorboard_is(browser: Any, server: str) -> None:
    watched = Watched(browser, color_scheme="light")
    watched.page.set_default_timeout(TIMEOUT)
    watched.page.goto(f"{server}#flowscope")
    body = watched.page.frame_locator("iframe").locator("body")
    body.locator(".heat canvas").first.wait_for()
    paper = "node => getComputedStyle(node).backgroundColor"
    assert body.evaluate(paper) == "rgb(255, 255, 255)"
    watched.page.evaluate("document.body.classList.add('dark-mode')")  # what TensorBoard's own switch does
    watched.page.frame_locator("iframe").locator("html[data-theme=dark]").wait_for()
    assert body.evaluate(paper) == "rgb(20, 23, 28)"
    watched.page.close()


def test_a_link_to_a_view_of_the_tab(browser: Any, server: str) -> None:
    watched = Watched(browser, permissions=["clipboard-read", "clipboard-write"])
    page = watched.page
    page.set_default_timeout(TIMEOUT)
    page.goto(f"{server}#flowscope")
    panels = page.frame_locator("iframe")
    panels.locator(".heat canvas").first.wait_for()
    (frame,) = (frame for frame in page.frames if "plugin_entry" in frame.url)
    links = []
    for metric in ("gradient_product", "cosine"):
        panels.locator("#metric").select_option(metric)
        panels.locator(".picture h2 code", has_text=metric).wait_for()
        if metric == "cosine":
            panels.get_by_role("button", name="Copy link to this view").click()
        else:
            panels.locator(".heat canvas").first.press("c")
        frame.wait_for_function("async metric => (await navigator.clipboard.readText()).includes(metric)", arg=metric)
        links.append(frame.evaluate("navigator.clipboard.readText()"))
    panels.get_by_label("Find a metric").press_sequentially("c")  # a letter that is written copies nothing
    assert frame.evaluate("navigator.clipboard.readText()") == links[-1]
    for metric, link in zip(("gradient_product", "cosine"), links, strict=True):
        page.goto("about:blank")
        page.goto(link)
        page.locator(".heat canvas").first.wait_for()
        assert page.locator(".picture h2 code").inner_text() == metric
    # TensorBoard has no picture for a window of its own
    assert [one for one in watched.complaints if "favicon.ico" not in one] == []
    page.close()


def test_where_no_page_may_copy_the_link_is_shown(browser: Any, logdir: Path, tmp_path: Path) -> None:
    page = browser.new_page()
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # plain http is so
    page.goto(write_report(read_run(logdir / "a"), tmp_path / "r.html").as_uri())
    page.locator(".heat canvas").first.wait_for()
    shown: list[str] = []
    page.on("dialog", lambda dialog: (shown.append(dialog.default_value), dialog.dismiss()))
    page.get_by_role("button", name="Copy link to this view").click()
    assert shown == [page.url]
    page.close()


def test_a_view_without_data_says_why_to_the_keyboard(browser: Any, tmp_path: Path) -> None:
    from flowscope.sinks import Run

    watched = Watched(browser)
    run = Run(HEADER, [Record(0, 1.0, {"gradient_product": np.ones(5)})], [])
    watched.page.goto(write_report(run, tmp_path / "r.html").as_uri())
    watched.page.get_by_role("button", name="Mixing", exact=True).focus()
    watched.page.keyboard.press("Enter")
    assert "flowscope.wrap" in watched.page.locator(".why").inner_text(timeout=TIMEOUT)
    assert watched.complaints == []
    watched.page.close()


def test_an_empty_folder_says_what_to_do(browser: Any, tmp_path: Path) -> None:
    watched = Watched(browser)
    watched.page.set_default_timeout(TIMEOUT)
    with tensorboard(tmp_path) as address:
        watched.page.goto(f"{address}data/plugin_entry.html?name=flowscope")
        watched.page.locator(".empty", has_text="No flowscope run in this log folder").wait_for()
        assert "log_dir" in watched.page.locator(".empty").inner_text()
    # opened without TensorBoard around it, the page has no icon
    assert [complaint for complaint in watched.complaints if "/favicon.ico" not in complaint] == []
    watched.page.close()


def test_what_cannot_be_read_says_why_and_hides_nothing_else(browser: Any, tmp_path: Path) -> None:
    (file,) = write_run(tmp_path / "cut").glob("events*")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    write_run(tmp_path / "good", "b")
    writer = EventFileWriter(str(tmp_path / "foreign"))
    words = protobufs.strings("flowscope/gradient_product", ["no", "numbers"], {"version": 9})
    writer.add_event(event_pb2.Event(wall_time=1.0, step=3, summary=summary_pb2.Summary(value=[words])))
    writer.close()
    watched = Watched(browser)
    watched.page.set_default_timeout(TIMEOUT)
    with tensorboard(tmp_path) as address:
        wait_for_runs(address, 3)
        watched.page.goto(f"{address}#flowscope")
        panels = watched.page.frame_locator("iframe")
        panels.locator(".runs label", has_text="good").locator("input").check()
        panels.locator("figcaption", has_text="good · enc").wait_for()
        assert "cannot be drawn" in panels.locator(".picture .empty", has_text="foreign").inner_text()
        assert "Written in format 9; this tab reads 1." in panels.locator(".verdict", has_text="foreign").inner_text()
        assert panels.locator("figcaption", has_text="cut · enc").count() == 1
        assert "Traceback" not in panels.locator("body").inner_text()
    # the route that has the reason answers 404, which the browser notes
    assert [complaint for complaint in watched.complaints if "404" not in complaint] == []
    watched.page.close()


def test_a_report_of_nothing_says_so(browser: Any, tmp_path: Path) -> None:
    from flowscope.sinks import Run

    watched = Watched(browser)
    watched.page.goto(write_report(Run(), tmp_path / "r.html").as_uri())
    watched.page.locator(".empty", has_text="nothing to draw yet").wait_for(timeout=TIMEOUT)
    assert "no record yet" in watched.page.locator(".verdict").inner_text()
    assert watched.complaints == []
    watched.page.close()
