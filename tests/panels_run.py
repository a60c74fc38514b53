"""A small run with known values, a TensorBoard on loopback and a real browser: what the tests of the panels share."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins import base_plugin
from werkzeug.test import Client

from flowscope.records import Alert, FlowLayout, Record, RunHeader
from flowscope.sinks import JsonlSink, TensorBoardSink
from flowscope.views.plugin import SAMPLES, FlowLoader

EVIL = "<img src=x onerror=alert(1)>"
ENCODER = ("enc:input", "enc.0", EVIL, "enc.2", "enc.3")
DECODER = ("dec:input", "dec.0", "dec.1", "dec.2")
PARAMETERS = ("enc.0.weight", "enc.3.bias", "head</script>.weight")
STEPS = (0, 1, 2, 5, 10, 15)

HEADER = RunHeader(
    "0.1.0",
    (FlowLayout("enc", "blocks", ENCODER, ENCODER[1:]), FlowLayout("dec", "blocks", DECODER, DECODER[1:])),
    {
        "gradient_product": ENCODER,
        "gradient_product@dec": DECODER,
        "cosine": ENCODER[1:],
        "cosine_p05": ENCODER[1:],
        "cosine_p95": ENCODER[1:],
        "cosine_matrix": ENCODER,
        "update_ratio": PARAMETERS,
        "gate_mean": ENCODER[1:],
        "mix_matrix": ENCODER[1:],
        "mix_gain_backward": ENCODER[1:],
    },
    {"vanishing_product": 1e-3, "note": "</script><b>bold</b>"},
    {"torch": "none", "python": "3"},
)


def product(run: str, step: int) -> np.ndarray:
    """[5]: row r of run "a" at step s is (r + 1) * 10**-(4 - r) / (s + 1); run "b" is ten times that."""
    rows = np.arange(5)
    return (rows + 1) * 10.0 ** -(4 - rows) / (step + 1) * (10 if run == "b" else 1)


def record(run: str, step: int) -> Record:
    depth = np.linspace(0.2, 0.8, 4)
    metrics = {
        "gradient_product": product(run, step),
        "gradient_product@dec": np.array([0.5, np.nan, 0.0, 2.0]) * (step + 1),
        "cosine": depth,
        "cosine_p05": depth - 0.1,
        "cosine_p95": depth + 0.1,
        "update_ratio": np.array([1e-3, 2e-3, 3e-60]),
        "gate_mean": depth / 2,
        "mix_gain_backward": np.array([1.0, 2.0, 3.0, 4.0]),
        "mix_matrix": np.arange(36.0).reshape(4, 3, 3),
    }
    if step % 10 == 0:
        metrics["cosine_matrix"] = np.arange(25.0).reshape(5, 5) / 25
    return Record(step, 3.0 - step / 10, metrics, flow_names=("enc", "dec"), metric_labels=HEADER.labels)


def alerts() -> list[Alert]:
    vanishing = Alert(
        "vanishing_gradient",
        "error",
        EVIL,
        5,
        5e-5,
        1e-3,
        "the gradient is gone",
        "pre-norm, or wrap",
        since=2,
        flow="enc",
    )
    collapse = Alert(
        "representation_collapse", "warning", "enc.3", 2, 0.8, 0.7, f"copies at {EVIL}", "look", flow="enc"
    )
    resolved = Alert(
        "representation_collapse", "warning", "enc.3", 10, 0.5, 0.7, "fine", "", state="resolved", since=2, flow="enc"
    )
    return [collapse, vanishing, resolved]


def events(run: str) -> list[Any]:
    """What a run writes, in order; only run "a" has alerts."""
    found: list[Any] = [HEADER]
    for step in STEPS:
        found.append(record(run, step))
        found += [alert for alert in alerts() if alert.step == step and run == "a"]
    return found


def write_run(folder: Path, run: str = "a") -> Path:
    for sink in (TensorBoardSink(folder, images_every=0), JsonlSink(folder)):
        for event in events(run):
            sink.write(event)
        sink.close()
    return folder


@contextlib.contextmanager
def tensorboard(
    logdir: Path, *options: str, start: str = "from tensorboard.main import run_main; run_main()"
) -> Iterator[str]:
    """The address of a TensorBoard on loopback; it is stopped at the end."""
    command = [sys.executable, "-c", start, "--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--reload_interval", "1", *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda stream: [lines.put(line) for line in stream], args=(process.stderr,))
    reader.start()
    try:
        yield _address(lines, process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)
        process.stderr.close()


def _address(lines: queue.Queue[str], process: subprocess.Popen[str]) -> str:
    seen: list[str] = []
    end = time.monotonic() + 120
    while time.monotonic() < end and (process.poll() is None or not lines.empty()):
        with contextlib.suppress(queue.Empty):
            seen.append(lines.get(timeout=0.5))
            found = re.search(r"http://127\.0\.0\.1:\d+/", seen[-1])
            if found:
                return found.group()
    raise AssertionError("TensorBoard did not start: " + "".join(seen))


def get(address: str, route: str, **query: str | int) -> tuple[int, str, Any]:
    """Status, content type and body (JSON decoded) of a route of the plugin."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    url = f"{address}data/plugin/flowscope/{route}"
    try:
        with opener.open(f"{url}?{urllib.parse.urlencode(query)}" if query else url, timeout=30) as answer:
            status, kind, body = answer.status, answer.headers.get_content_type(), answer.read()
    except urllib.error.HTTPError as error:
        status, kind, body = error.code, error.headers.get_content_type(), error.read()
    return status, kind, json.loads(body) if kind == "application/json" else body.decode()


def wait_for_runs(address: str, count: int) -> list[dict[str, Any]]:
    """The runs of the overview, once TensorBoard has read `count` of them and stopped finding more records."""
    end = time.monotonic() + 120
    before = None
    while time.monotonic() < end:
        runs: list[dict[str, Any]] = get(address, "overview")[2]["runs"]
        stamps = [run["stamp"] for run in runs]
        if len(runs) == count and stamps == before:
            return runs
        before = stamps
        time.sleep(0.4)
    raise AssertionError(f"TensorBoard shows {before}, expected {count} runs")


FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def client(logdir: Path) -> Any:
    """Asks the plugin's routes about the runs of a folder, without a server: `ask(route, **query)`."""
    multiplexer = EventMultiplexer(tensor_size_guidance={"flowscope": SAMPLES})
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(logdir))
    plugin = FlowLoader().load(base_plugin.TBContext(data_provider=provider, logdir=str(logdir)))
    routes = plugin.get_plugin_apps()

    def ask(route: str, **query: Any) -> Any:
        return json.loads(Client(routes[f"/{route}"]).get(f"/{route}", query_string=query).data)

    return ask


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser; where none can be had, the test is skipped, but never with CI=true."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if not path or sync_playwright is None:
        missing = (
            "chromium (as root: apt-get install -y chromium)" if not path else "playwright (pip install playwright)"
        )
        words = f"NOT TESTED: the panels were not looked at in a browser; {missing} is missing"
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(words)
        pytest.skip(words)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS), headless=True)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page that remembers what it asked for, what it said on the console and which dialogs it opened."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1500, "height": 1000}, **options)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("console", self._console)
        self.page.on("dialog", self._dialog)

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(f"console: {message.text} {message.location}")

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def strangers(self, *allowed: str) -> list[str]:
        """The requests that do not begin with one of `allowed`."""
        return [url for url in self.requests if not url.startswith((*allowed, "data:", "blob:", "about:"))]
