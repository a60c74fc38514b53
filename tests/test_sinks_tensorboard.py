"""TensorBoard: what was written is read back by its own readers, and shown by a running TensorBoard."""

from __future__ import annotations

import io
import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util.tensor_util import make_ndarray

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, FlowLayout, Record, RunHeader
from flowscope.sinks.images import Axis, heat_map
from flowscope.sinks.protobufs import compact
from flowscope.sinks.tensorboard import TensorBoardSink, alert_table, gradient_image

L = 4
POINTS = ("embed", *(f"layers.{i}" for i in range(L)))
FLOWS = (
    FlowLayout("layers", "blocks", POINTS, POINTS[1:]),
    FlowLayout("decoder", "blocks", ("a", "b", "c"), ("b", "c")),
)
LABELS = {
    "gradient_product": POINTS,
    "gradient_product@decoder": ("a", "b", "c"),
    "cosine": POINTS[1:],
    "cosine_matrix": POINTS,
    "update_ratio": ("w", "b"),
    "token_cosine": POINTS,
}
HEADER = RunHeader("0.1", FLOWS, LABELS, {"every": 10, "limit": float("inf")})


def make_record(step: int, *, matrix: bool = False) -> Record:
    metrics = {
        "gradient_product": np.array([np.nan, 1e-3, 0.01, 0.25, 1.0]) * (1 + step),
        "gradient_product@decoder": np.array([2.0, 4.0, 1.0]),
        "cosine": np.array([0.5, 0.75, np.nan, 1.0]),
        "update_ratio": np.array([1e-3, 3e-3]),
        "empty": np.zeros(0),
    }
    if matrix:
        metrics["cosine_matrix"] = np.eye(L + 1)
    return Record(step, 2.0 + step, metrics, flow_names=("layers", "decoder"), metric_labels=LABELS)


def make_alert(step: int, kind: str = "vanishing_gradient") -> Alert:
    return Alert(kind, "error", "layers.1", step, float("nan"), 1e-3, "no gradient | none\nat all", "wrap it")


def fill(folder: Path, steps: int = 12) -> None:
    sink = TensorBoardSink(folder, images_every=5)
    sink.write(HEADER)
    for step in range(steps):
        sink.write(make_record(step, matrix=step % 4 == 1))
    sink.write(make_alert(3))
    sink.write(make_alert(3, "dead_units"))
    sink.write(make_alert(8))
    sink.close()
    sink.close()


def load(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return events


def tensors(events: EventAccumulator, tag: str) -> dict[int, np.ndarray]:
    return {event.step: make_ndarray(event.tensor_proto) for event in events.Tensors(tag)}


def test_profiles_read_back(tmp_path: Path) -> None:
    fill(tmp_path / "runs" / "a")
    events = load(tmp_path / "runs" / "a")
    got = tensors(events, "flowscope/gradient_product")
    assert sorted(got) == list(range(12))
    for step, values in got.items():
        want = make_record(step).metrics["gradient_product"].astype(np.float32)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, want)
    assert tensors(events, "flowscope/gradient_product@decoder")[5].tolist() == [2.0, 4.0, 1.0]
    assert sorted(tensors(events, "flowscope/cosine_matrix")) == [1, 5, 9]
    assert tensors(events, "flowscope/cosine_matrix")[5].shape == (L + 1, L + 1)
    header = json.loads(tensors(events, "flowscope/header")[0][0])
    assert RunHeader.from_json(header).flows == FLOWS
    content = events.PluginTagToContent("flowscope")
    assert json.loads(content["flowscope/gradient_product@decoder"]) == {
        "version": 1,
        "metric": "gradient_product",
        "flow": "decoder",
        "labels": ["a", "b", "c"],
    }
    classes = {tag: events.SummaryMetadata(tag).data_class for tag in content}
    assert set(classes.values()) == {summary_pb2.DATA_CLASS_TENSOR}
    assert len([tag for tag in classes if not tag.startswith("flowscope_beginning/")]) == 7
    assert len(classes) == 7 + 5  # the profiles of the first records stand there twice


def test_tiny_gradients_stay_different_from_none() -> None:
    assert compact(np.array([1e-30, 0.5, np.inf, np.nan, 0.0])).dtype == np.float32
    assert compact(np.array([1e-60, 0.5])).dtype == np.float64
    assert compact(np.array([1e60, 0.5])).dtype == np.float64
    assert compact(np.array([1e-42, 0.5])).dtype == np.float64  # a denormal in float32 has lost digits


def test_scalars_by_hand(tmp_path: Path) -> None:
    fill(tmp_path)
    events = load(tmp_path)
    scalars = {tag: tensors(events, tag) for tag in events.PluginTagToContent("scalars")}
    at = {tag: float(values[1]) for tag, values in scalars.items()}
    names = ("min", "median", "max")
    # step 1 doubles [nan, .001, .01, .25, 1]: median of the four seen is (.01 + .25) / 2, doubled
    assert [at[f"flow/layers/gradient_product/{n}"] for n in names] == pytest.approx([0.002, 0.26, 2.0])
    assert [at[f"flow/decoder/gradient_product/{n}"] for n in names] == [1.0, 2.0, 4.0]
    assert [at[f"flow/layers/cosine/{n}"] for n in names] == [0.5, 0.75, 1.0]
    assert [at[f"parameters/update_ratio/{n}"] for n in names] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert at["flow/loss"] == 3.0
    # log10 of [2e-3, .26, 2]; the middle of the logarithms is that of (log10 .02 + log10 .5) / 2
    assert [at[f"flow/layers/log10_gradient_product/{n}"] for n in names] == pytest.approx([-2.69897, -1.0, 0.30103])
    assert len(scalars) == 13 + 6


def test_a_profile_never_seen_gives_no_scalar(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(Record(0, None, {"gain": np.full(3, np.nan), "act_rms": np.array([np.inf, 1.0, 2.0])}))
    sink.close()
    events = load(tmp_path)
    # without header and flow names the flow is called network
    assert sorted(events.PluginTagToContent("scalars")) == [
        f"flow/network/act_rms/{n}" for n in ("max", "median", "min")
    ]
    assert float(tensors(events, "flow/network/act_rms/max")[0]) == np.inf
    assert np.isnan(tensors(events, "flowscope/gain")[0]).all()


def test_layout_shows_what_exists(tmp_path: Path) -> None:
    fill(tmp_path)
    events = load(tmp_path)
    written = events.Tensors("custom_scalars__config__")
    assert len(written) == 1
    layout = layout_pb2.Layout.FromString(make_ndarray(written[0].tensor_proto).item())
    charts = {category.title: category.chart for category in layout.category}
    assert list(charts) == ["loss", "flow/layers", "flow/decoder", "parameters"]
    (loss,) = charts["loss"]
    assert [re.fullmatch(tag, "flow/loss") is not None for tag in loss.multiline.tag] == [True]
    bands = [series for chart in charts["flow/layers"] for series in chart.margin.series]
    assert [(b.lower, b.value, b.upper) for b in bands[:1]] == [
        tuple(f"flow/layers/log10_gradient_product/{n}" for n in ("min", "median", "max"))
    ]
    # token_cosine is in the header's labels but not in the first record
    assert [b.value.split("/")[2] for b in bands] == ["log10_gradient_product", "cosine", "token_cosine"]


def test_alerts_of_one_step_are_repeated_together(tmp_path: Path) -> None:
    fill(tmp_path)
    events = load(tmp_path)
    got = tensors(events, "flowscope/alerts")
    kinds = {step: [json.loads(text)["kind"] for text in texts] for step, texts in got.items()}
    assert kinds == {3: ["vanishing_gradient", "dead_units"], 8: ["vanishing_gradient"]}
    table = tensors(events, "alerts")[8].item().decode().split("\n")
    assert [row.split(",")[0] for row in table[2:]] == ["| step 8", "| step 3", "| step 3"]
    assert "no gradient \\| none at all" in table[2]


def test_alert_table_by_hand() -> None:
    alert = make_alert(7)
    alert.state = "resolved"
    assert alert_table([alert]).split("\n")[2] == (
        "| step 7, resolved: **vanishing_gradient** at `layers.1` | no gradient \\| none at all | wrap it |"
    )


def test_images_come_at_their_own_pace(tmp_path: Path) -> None:
    fill(tmp_path)
    events = load(tmp_path)
    steps = {tag: sorted(tensors(events, tag)) for tag in events.PluginTagToContent("images")}
    assert steps == {
        "depth/layers/gradient_product": [0, 5, 10],
        "depth/decoder/gradient_product": [0, 5, 10],
        # first seen at step 1; due again from step 6, present at 9
        "depth/layers/cosine_matrix": [1, 9],
    }
    width, height, png = tensors(events, "depth/layers/cosine_matrix")[9]
    with Image.open(io.BytesIO(png)) as picture:
        assert picture.size == (int(width), int(height))
    fill(tmp_path / "off", steps=0)
    off = TensorBoardSink(tmp_path / "off", images_every=0)
    off.write(make_record(0, matrix=True))
    off.close()
    assert "images" not in load(tmp_path / "off").Tags()["tensors"]
    assert not load(tmp_path / "off").PluginTagToContent("scalars").keys() & {"depth/layers/gradient_product"}


def pixels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as picture:
        return np.asarray(picture.convert("RGB"))


def test_heat_map_colours() -> None:
    values = np.array([[-3.0, np.nan], [0.0, 9.0], [-1.5, -9.0]])
    png = heat_map(
        values, "t", Axis("y", ["a", "b", "c"]), Axis("x", ["0", "1"]), unit="u", log=True, limits=(-3.0, 0.0)
    )
    image = pixels(png)
    # the plot: the rectangle inside the frame; find it by its first colour, the darkest of viridis
    rows, columns = np.where((image == (68, 1, 84)).all(axis=-1))
    top, left = rows.min(), columns.min()
    height, width = 120, 240
    cells = [
        [tuple(image[top + height * (2 * r + 1) // 6, left + width * (2 * c + 1) // 4].tolist()) for c in range(2)]
        for r in range(3)
    ]
    dark, bright, grey, middle = (68, 1, 84), (253, 231, 37), (176, 176, 176), (33, 144, 141)
    assert cells == [[dark, grey], [bright, bright], [middle, dark]]


def test_deep_and_flat_profiles_are_drawn_without_warnings() -> None:
    for profile in (
        10.0 ** np.linspace(-300, 0, 1025),
        np.ones(3),
        np.full(3, np.nan),
        np.zeros(3),
        np.full(3, np.inf),
    ):
        png = gradient_image("network", [], [(0, profile), (10, profile)])
        assert max(pixels(png).shape[:2]) < 800


def test_a_new_layout_is_written_and_starts_a_new_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[int]] = []

    def draw(flow: str, labels: list[str], history: list[tuple[int, np.ndarray]]) -> bytes:
        drawn.append([step for step, _ in history])
        return gradient_image(flow, labels, history)

    monkeypatch.setattr("flowscope.sinks.tensorboard.gradient_image", draw)
    sink = TensorBoardSink(tmp_path, images_every=2)
    renamed = RunHeader("0.1", FLOWS, {"gradient_product": tuple("vwxyz")})
    profiles = [np.ones(5), np.ones(5), np.ones(5), np.ones(3)]  # the last one changes without a header
    for step, profile in enumerate(profiles):
        if step in {0, 2}:
            sink.write(HEADER if step == 0 else renamed)
        sink.write(Record(step, None, {"gradient_product": profile}, flow_names=("layers",)))
    sink.write(Record(4, None, {"gradient_product": np.ones(3)}, flow_names=("layers",)))
    sink.close()
    assert drawn == [[0], [2], [3, 4]]
    events = load(tmp_path)
    headers = [json.loads(make_ndarray(e.tensor_proto)[0]) for e in events.Tensors("flowscope/header")]
    assert [h["labels"]["gradient_product"][0] for h in headers] == ["embed", "v"]
    assert sorted(tensors(events, "depth/layers/gradient_product")) == [0, 2, 4]


def raw_events(file: Path) -> list[Any]:
    return [event_pb2.Event.FromString(raw) for raw in RawEventFileLoader(str(file)).Load()]


def test_metadata_is_written_once_a_tag(tmp_path: Path) -> None:
    fill(tmp_path)
    (file,) = tmp_path.iterdir()
    values = [value for event in raw_events(file) for value in event.summary.value]
    with_metadata = [value.tag for value in values if value.HasField("metadata")]
    assert len(with_metadata) == len(set(with_metadata))
    assert set(with_metadata) == {value.tag for value in values}


def test_everything_is_in_the_file_before_close(tmp_path: Path) -> None:
    threads = threading.active_count()
    sink = TensorBoardSink(tmp_path)
    sink.write(HEADER)
    sink.write(make_record(0))
    assert threading.active_count() == threads
    assert sorted(tensors(load(tmp_path), "flowscope/gradient_product")) == [0]
    sink.close()


def test_unwritable_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FlowscopeError, match=r"log_dir '.*file/sub'.*expected a folder.*watch\(model, log_dir="):
        TensorBoardSink(tmp_path / "file" / "sub")


LIMITED = """
import resource, sys, numpy as np
from flowscope.records import Record
from flowscope.sinks import TensorBoardSink
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
sink = TensorBoardSink(sys.argv[1], images_every=0)
written, faults = 0, 0
for step in range(8):
    try:
        sink.write(Record(step, None, {"gain": np.full(1500, 0.5)}))  # 6 kB, and the first stand twice: three fit
        written += 1
    except OSError as error:
        faults += 1
sink.close()
sink.close()
print(written, faults, "torch" in sys.modules)
"""


def run_python(code: str, *args: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_full_disk_leaves_a_readable_file(tmp_path: Path) -> None:
    process = run_python(LIMITED, str(tmp_path))
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error.decode()
    assert out.split() == [b"3", b"5", b"False"]
    assert error == b""  # no traceback of a thread either
    assert sorted(tensors(load(tmp_path), "flowscope/gain")) == [0, 1, 2]


@pytest.fixture(params=["true", "false"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    fill(tmp_path / "a")
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(tmp_path),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    command += [f"--load_fast={request.param}", "--reload_interval", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda stream: [lines.put(line) for line in stream], args=(process.stderr,))
    reader.start()
    try:
        yield wait_for_address(lines)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)
        process.stderr.close()


def wait_for_address(lines: queue.Queue[str]) -> str:
    seen: list[str] = []
    end = time.monotonic() + 40
    while time.monotonic() < end:
        try:
            seen.append(lines.get(timeout=1))
        except queue.Empty:
            continue
        found = re.search(r"http://127\.0\.0\.1:\d+/", seen[-1])
        if found:
            return found.group()
    raise AssertionError("TensorBoard did not start: " + "".join(seen))


def fetch(address: str, route: str, **query: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    with opener.open(f"{address}data/plugin/{route}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        data = answer.read()
    return json.loads(data) if answer.headers.get_content_type() == "application/json" else data


def test_a_real_tensorboard_shows_it(server: str) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end and len(fetch(server, "images/tags").get("a", ())) < 3:
        time.sleep(0.3)
    tags = fetch(server, "scalars/tags")["a"]
    assert {"flow/loss", "flow/layers/gradient_product/min", "parameters/update_ratio/max"} <= set(tags)
    loss = fetch(server, "scalars/scalars", run="a", tag="flow/loss")
    assert [row[1:] for row in loss] == [[step, 2.0 + step] for step in range(12)]
    layout = fetch(server, "custom_scalars/layout")
    assert [category["title"] for category in layout["category"]] == [
        "loss",
        "flow/layers",
        "flow/decoder",
        "parameters",
    ]
    lines = fetch(
        server, "custom_scalars/scalars", run="a", tag=layout["category"][0]["chart"][0]["multiline"]["tag"][0]
    )
    assert list(lines["tag_to_events"]) == ["flow/loss"]
    pictures = fetch(server, "images/images", run="a", tag="depth/layers/cosine_matrix", sample="0")
    assert [picture["step"] for picture in pictures] == [1, 9]
    png = fetch(server, "images/individualImage?" + pictures[-1]["query"] + "&")
    assert png.startswith(b"\x89PNG")
    texts = {event["step"]: event["text"] for event in fetch(server, "text/text", run="a", tag="alerts")}
    assert sorted(texts) == [3, 8]
    assert [texts[step].count("<tr>") for step in (3, 8)] == [1 + 2, 1 + 3]
    assert "<strong>dead_units</strong> at <code>layers.1</code>" in texts[3]


def test_a_file_cut_by_a_kill_keeps_the_earlier_records(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(HEADER)
    sink.write(make_record(0))
    sink.write(make_record(1))
    before = sink.path.stat().st_size
    sink.write(make_record(2))
    sink.close()
    whole = sink.path.read_bytes()
    for end in [*range(before, len(whole), 131), len(whole) - 1]:
        sink.path.write_bytes(whole[:end])
        assert sorted(tensors(load(tmp_path), "flowscope/gradient_product")) == [0, 1], end
