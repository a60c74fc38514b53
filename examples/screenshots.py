"""What `make screenshots` runs: pictures of the demo's TensorBoard tab and HTML report, made in a real browser.

Writes docs/images/*.png, each under 200 kB. Needs `make demo`, playwright (in the extra `dev`) and a Chromium of the
system (Debian: `apt install chromium`); nothing leaves the machine.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from flowscope.sinks import read_run
from flowscope.views.report import write_report

RUNS = Path("runs/demo")
IMAGES = Path("docs/images")
LIMIT = 200_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# the browser must not talk to its maker
FLAGS = ["--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the demo's runs (default: %(default)s)")
    parser.add_argument("--images", type=Path, default=IMAGES, help="where to (default: %(default)s)")
    arguments = parser.parse_args()
    folders = {name: arguments.runs / name for name in ("post_ln", "pre_ln", "post_ln_keel")}
    if missing := [name for name, folder in folders.items() if not folder.is_dir()]:
        sys.exit(f"{arguments.runs}: there is no run {' or '.join(missing)}; `make demo` makes them in 30 s.")
    runs, images = {name: read_run(folder) for name, folder in folders.items()}, arguments.images
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, browser() as chromium:
        twins = write_report({name: runs[name] for name in ("post_ln", "pre_ln")}, Path(scratch) / "twins.html")
        sweep = write_report(runs, Path(scratch) / "sweep.html", title="demo")
        wrapped = write_report({"post_ln_keel": runs["post_ln_keel"]}, Path(scratch) / "wrapped.html")

        with tensorboard(arguments.runs) as address:
            page = chromium.new_page(viewport={"width": 1280, "height": 1500})
            page.goto(f"{address}#flowscope")
            page.frame_locator("iframe").locator(".heats canvas").nth(1).wait_for()
            save(page, images / "tensorboard_tab.png")

        page = chromium.new_page(viewport={"width": 1280, "height": 1720})
        page.goto(twins.as_uri())
        page.locator("section.alerts").get_by_text("vanishing_gradient").click()
        save(page, images / "report_alert.png")

        page = chromium.new_page(viewport={"width": 1280, "height": 2010}, color_scheme="dark")
        page.goto(twins.as_uri())
        page.get_by_role("button", name="Depth", exact=True).click()
        page.locator(".matrices").wait_for()
        save(page, images / "report_depth_dark.png")

        page = chromium.new_page(viewport={"width": 1000, "height": 1250})
        page.goto(sweep.as_uri())
        page.get_by_role("button", name="show these").click()
        page.locator(".heat canvas").nth(2).wait_for()
        save(page, images / "report_runs.png")

        page = chromium.new_page(viewport={"width": 1280, "height": 1310})
        page.goto(wrapped.as_uri())
        page.get_by_role("button", name="Gates", exact=True).click()
        page.get_by_role("heading", name="gate mean over depth").wait_for()
        save(page, images / "report_gates.png")


@contextmanager
def browser() -> Iterator[Browser]:
    """The system's Chromium, without a window."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        sys.exit(f"no browser found among {', '.join(BROWSERS)}; Debian and Ubuntu: apt install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield chromium
        finally:
            chromium.close()


@contextmanager
def tensorboard(runs: Path) -> Iterator[str]:
    """TensorBoard on a free port of this machine; its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            address = next(
                (found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+/", line))), None
            )
            if address is None:
                sys.exit("TensorBoard ended before it said where it listens")
            yield address
        finally:
            process.terminate()


def save(page: Page, path: Path) -> None:
    """A picture of what the window shows, with as many colours as fit into the limit."""
    page.wait_for_timeout(500)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    for colours in (256, 128, 64):
        # kmeans keeps frequent colours true; a median cut alone tints the background
        image.quantize(colours, kmeans=1, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size < LIMIT:
            break
    print(f"{path}: {image.width} x {image.height}, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
