"""The plugin's routes on a real TensorBoard (both loaders) and, without a server, on damaged and foreign data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from panels_run import ENCODER, EVIL, HEADER, STEPS, client, get, product, record, tensorboard, wait_for_runs, write_run
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins import base_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto
from werkzeug.test import Client

from flowscope.records import Alert, Record, RunHeader
from flowscope.sinks import TensorBoardSink, protobufs
from flowscope.views import assets, overview
from flowscope.views.plugin import SAMPLES, FlowLoader

WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked in this test")
sys.meta_path.insert(0, Blocked())
from tensorboard.main import run_main
run_main()
"""


@pytest.fixture(scope="module", params=["true", "false"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """TensorBoard on two runs, with its fast and its slow loader, in a process that cannot import torch."""
    logdir = tmp_path_factory.mktemp("logdir")
    for run in ("a", "b/c"):
        write_run(logdir / run, run[0])
    (logdir / "secret.txt").write_text("secret")
    with tensorboard(logdir, f"--load_fast={request.param}", start=WITHOUT_TORCH) as address:
        wait_for_runs(address, 2)
        yield address


def test_the_overview_of_a_real_tensorboard(server: str) -> None:
    a, c = wait_for_runs(server, 2)
    assert [a["name"], c["name"]] == ["a", "b/c"]
    assert a["flows"] == [
        {"name": "enc", "kind": "blocks", "points": 5},
        {"name": "dec", "kind": "blocks", "points": 4},
    ]
    assert a["last_step"] == 15
    assert a["verdict"] == {
        "severity": "error",
        "text": f"vanishing_gradient at {EVIL} since step 2",
        "message": "the gradient is gone",
        "advice": "pre-norm, or wrap",
        "sentence": "Gradient is lost between enc.3 and enc:input (down to 6.2e-06) since step 2; "
        "first came representation_collapse at enc.3 (step 2).",
        "story": f"First: representation_collapse at enc.3 (step 2); then: vanishing_gradient at {EVIL} (step 2).",
    }
    assert [(alert["kind"], alert["step"], alert["resolved"]) for alert in a["alerts"]] == [
        ("representation_collapse", 2, 10),
        ("vanishing_gradient", 2, None),
    ]
    assert (a["alerts"][1]["key"], a["alerts"][1]["row"]) == ("gradient_product", 2)
    # 1e-4 / 16 at the input of the encoder
    assert a["facts"][0].startswith("enc: at step 15 the gradient at enc:input is 6.25e-06 times that at enc.3")
    assert c["verdict"] == {"severity": "ok", "text": "no alert"}
    assert (a["notices"], c["notices"]) == ([], [])
    assert a["loss"] == {"steps": list(STEPS), "values": [3, 2.9, 2.8, 2.5, 2, 1.5]}
    assert a["config"]["vanishing_product"] == 1e-3


def test_series_and_records_of_a_real_tensorboard(server: str) -> None:
    status, kind, series = get(server, "series", run="b/c", key="gradient_product")
    assert (status, kind) == (200, "application/json")
    assert series["steps"] == list(STEPS)
    assert [row[0] for row in series["rows"]] == list(ENCODER)
    expected = np.stack([product("b", step) for step in STEPS], axis=1)
    np.testing.assert_allclose(series["values"], expected, rtol=1e-4)
    _, _, near = get(server, "record", run="a", key="gradient_product", step=11)
    assert near["step"] == 10
    np.testing.assert_allclose(near["values"], product("a", 10), rtol=1e-4)
    _, _, matrix = get(server, "record", run="a", key="cosine_matrix", step=2)
    assert (matrix["step"], matrix["matrix"][3][1]) == (0, 0.64)
    _, _, stack = get(server, "record", run="a", key="mix_matrix", step=0)
    assert stack["stack"][1][1] == [12, 13, 14]
    _, _, decoder = get(server, "series", run="a", key="gradient_product@dec")
    assert [row[0] for row in decoder["values"]] == [0.5, None, 0, 2]


def test_what_is_not_there_is_explained(server: str) -> None:
    for query, reason in (
        ({"run": "nope", "key": "gain"}, "no run 'nope'"),
        ({"run": "a", "key": "gain"}, "run 'a' has no metric 'gain'"),
        ({"run": "a", "key": "header"}, "no metric 'header'"),
        ({"run": "a", "key": "cosine_matrix"}, "shown as a matrix"),
        ({"run": "a"}, "lacks 'key'"),
    ):
        status, _, answer = get(server, "series", **query)
        assert status == 404
        assert reason in answer["error"]
        assert "Traceback" not in answer["error"]
    status, _, answer = get(server, "record", run="a", key="cosine", step="x")
    assert (status, answer["error"]) == (404, "step is 'x'; expected a whole number of at most 19 digits")


@pytest.mark.parametrize(
    "route",
    ["../../../secret.txt", "..%2f..%2fsecret.txt", "%2e%2e/secret.txt", "/etc/passwd", "..\\secret.txt", "secret.txt"],
)
def test_files_of_the_disk_cannot_be_read(server: str, route: str) -> None:
    for query in ({}, {"run": route, "key": route}):
        status, _, body = get(server, route, **query)
        assert status == 404
        assert "secret" not in json.dumps(body).replace(route, "")
    for query in ({"run": f"../{route}", "key": "gain"}, {"run": "a", "key": f"../../{route}"}):
        status, _, body = get(server, "series", **query)
        assert status == 404


def test_scripts_are_served_as_scripts(server: str) -> None:
    for name in assets.served():
        status, kind, body = get(server, name)
        assert (status, kind) == (200, "text/css" if name.endswith(".css") else "text/javascript")
        assert body == assets.read(name)


# --- without a server -----------------------------------------------------------------------------------------------


def write_values(folder: Path, *values: Any, step: int = 0) -> None:
    writer = EventFileWriter(str(folder))
    writer.add_event(event_pb2.Event(wall_time=1.0, step=step, summary=summary_pb2.Summary(value=values)))
    writer.close()


def test_more_records_than_tensorboards_default_unless_the_user_says_how_many() -> None:
    flags = SimpleNamespace(samples_per_plugin={})
    FlowLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"flowscope": 2000}
    flags = SimpleNamespace(samples_per_plugin={"flowscope": 7})
    FlowLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"flowscope": 7}
    FlowLoader().fix_flags(SimpleNamespace(samples_per_plugin=None))


def test_empty_and_foreign_folders_have_no_runs(tmp_path: Path) -> None:
    assert client(tmp_path)("overview") == {"runs": []}
    write_values(tmp_path / "other", protobufs.scalar("loss", 1.0))
    assert client(tmp_path)("overview") == {"runs": []}


def test_a_file_cut_anywhere_still_answers(tmp_path: Path) -> None:
    (file,) = write_run(tmp_path / "run").glob("events*")
    whole = file.read_bytes()
    (tmp_path / "run" / "flowscope.jsonl").unlink()
    shown = set()
    for end in (*range(0, len(whole), 977), len(whole) - 1, len(whole)):
        file.write_bytes(whole[:end])
        ask = client(tmp_path)
        runs = ask("overview")["runs"]
        for run in runs:
            shown.add(run["last_step"])
            for metric in run["metrics"]:
                if metric["shape"] == "profile":
                    assert "error" not in ask("series", run=run["name"], key=metric["key"])
    assert {None, 0, 10, 15} <= shown


def test_a_run_whose_bytes_are_garbage_does_not_hide_the_others(tmp_path: Path) -> None:
    (file,) = write_run(tmp_path / "bad").glob("events*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = b"\xff" * 64
    file.write_bytes(data)
    write_run(tmp_path / "good")
    runs = {run["name"]: run for run in client(tmp_path)("overview")["runs"]}
    assert runs["good"]["last_step"] == 15
    assert runs["bad"]["last_step"] < 15


def gain(**content: Any) -> Any:
    return protobufs.profile("flowscope/gain", np.arange(3.0), {"labels": ["x", "y", "z"], "version": 1, **content})


def shape_and_bytes_disagree() -> Any:
    value = gain()
    value.tensor.tensor_content = b"123"
    return value


def of_no_known_type() -> Any:
    value = gain()
    value.tensor.dtype = 24
    return value


@pytest.mark.parametrize(
    ("damaged", "notice"),
    [
        (lambda: protobufs.strings("flowscope/header", ["[" * 5000], {"version": 1}), "header cannot be read"),
        (lambda: protobufs.profile("flowscope/header", np.ones(2), {"version": 1}), "header cannot be read"),
        (lambda: protobufs.profile("flowscope/alerts", np.ones(3), {"version": 1}), "3 alerts cannot be read"),
        (shape_and_bytes_disagree, ""),
        (of_no_known_type, ""),
        (lambda: gain(labels=5, version=[1]), "format None"),
        (lambda: gain(labels=["x", None, {}]), ""),
        (lambda: protobufs.profile("flowscope/gradient_product", np.ones((2, 2, 2)), {"version": 1}), ""),
        (lambda: protobufs.profile("flow/loss", np.ones((2, 2)), {"version": 1}), ""),
    ],
)
def test_a_damaged_run_hides_no_other(tmp_path: Path, damaged: Any, notice: str) -> None:
    write_run(tmp_path / "good")
    before = client(tmp_path)("overview")["runs"]
    intact = protobufs.profile("flowscope/cosine", np.ones(3), {"labels": ["x", "y", "z"], "version": 1})
    write_values(tmp_path / "bad", intact, damaged())
    ask = client(tmp_path)
    runs = {run["name"]: run for run in ask("overview")["runs"]}
    assert [runs["good"]] == before
    assert notice in " ".join(runs["bad"]["notices"])
    assert ask("series", run="good", key="gradient_product")["values"]
    assert ask("series", run="bad", key="cosine")["values"] == [[1], [1], [1]]
    for key in ("gain", "gradient_product"):
        answer = ask("series", run="bad", key=key)
        assert "values" in answer or "Error" not in answer["error"]  # explained, not unforeseen


def test_a_run_that_cannot_be_shown_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    words = overview.facts

    def facts(run: Any) -> list[str]:
        if run.name == "a" and run.last_step is not None:
            raise RuntimeError("unforeseen")
        return words(run)

    monkeypatch.setattr(overview, "facts", facts)
    first, second = client(tmp_path)("overview")["runs"]
    assert first["notices"] == ["This run cannot be shown (RuntimeError: unforeseen)."]
    assert second["last_step"] == 15


@pytest.mark.parametrize("step", ["9" * 30, "9" * 5000, "1e5", "\u0663"])
def test_a_step_that_is_none_is_explained(tmp_path: Path, step: str) -> None:
    write_run(tmp_path)
    ask = client(tmp_path)
    assert "at most 19 digits" in ask("record", run=".", key="cosine", step=step)["error"]
    assert ask("record", run=".", key="cosine", step="9" * 19)["step"] == 15


def test_a_run_without_header_keeps_its_rows_names(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, images_every=0)
    sink.write(record("a", 0))
    sink.close()
    ask = client(tmp_path)
    (run,) = ask("overview")["runs"]
    assert run["notices"] == [
        "The run has no header: its configuration is unknown, and rows are named as in its first record."
    ]
    assert [flow["name"] for flow in run["flows"]] == ["network", "dec"]
    assert [flow["points"] for flow in run["flows"]] == [5, 4]
    assert [row[0] for row in ask("series", run=".", key="gradient_product")["rows"]] == list(ENCODER)


def test_a_run_of_another_version_says_so(tmp_path: Path) -> None:
    future = protobufs.profile("flowscope/gain", np.arange(3.0), {"labels": ["x", "y", "z"], "version": 9})
    broken = protobufs.strings("flowscope/header", ["[" * 5000], {"version": 9})
    alert = protobufs.strings("flowscope/alerts", ["{", '"text"', '{"kind": "k"}'], {"version": 9})
    write_values(tmp_path, future, broken, alert)
    ask = client(tmp_path)
    (run,) = ask("overview")["runs"]
    assert run["notices"] == [
        "The header cannot be read: was it written by another version?",
        "Written in format 9; this tab reads 1. Install the flowscope that wrote the run beside TensorBoard; "
        "what can be understood is shown.",
        "3 alerts cannot be read: written by another version?",
    ]
    assert ask("series", run=".", key="gain")["values"] == [[0], [1], [2]]


def test_records_that_are_no_numbers_are_explained(tmp_path: Path) -> None:
    write_values(
        tmp_path,
        protobufs.strings("flowscope/gain", ["one", "two"], {}),
        protobufs.strings("flowscope/gradient_product", ["one"], {}),
        protobufs.profile("flowscope/cosine", np.zeros((2, 3, 4, 5)), {}),
        summary_pb2.Summary.Value(
            tag="flowscope/act_rms",
            tensor=make_tensor_proto(np.float32(2.0)),
            metadata=summary_pb2.SummaryMetadata(
                plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="flowscope", content=b"\xff{"),
                data_class=summary_pb2.DATA_CLASS_TENSOR,
            ),
        ),
    )
    ask = client(tmp_path)
    (run,) = ask("overview")["runs"]
    assert {metric["key"] for metric in run["metrics"]} == {"gain", "gradient_product", "cosine", "act_rms"}
    assert "'gain' of run '.' cannot be drawn" in ask("series", run=".", key="gain")["error"]
    assert "shown as a matrix" in ask("series", run=".", key="cosine")["error"]
    assert "expected 1, 2 or 3" in ask("record", run=".", key="cosine", step=0)["error"]
    assert ask("series", run=".", key="act_rms")["rows"] == [["row 0", "row 0", 0, 1]]


def test_the_newest_layout_is_shown(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, images_every=0)
    for step, names in ((0, ("p", "q", "r")), (1, ("p", "q", "r")), (2, ("s", "t"))):
        if step != 1:
            sink.write(RunHeader("0.1", HEADER.flows, {"gain": names}))
        sink.write(Record(step, None, {"gain": np.arange(float(len(names)))}))
    sink.close()
    series = client(tmp_path)("series", run=".", key="gain")
    assert ([row[0] for row in series["rows"]], series["steps"], series["dropped"]) == (["s", "t"], [2], 2)


def test_new_records_replace_what_was_kept_in_memory(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, images_every=0)
    sink.write(HEADER)
    sink.write(record("a", 0))
    multiplexer = EventMultiplexer(tensor_size_guidance={"flowscope": SAMPLES})
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    plugin = FlowLoader().load(base_plugin.TBContext(data_provider=provider, logdir=str(tmp_path)))
    routes = Client(plugin.get_plugin_apps()["/series"])
    query = {"run": ".", "key": "gradient_product"}
    assert json.loads(routes.get("/series", query_string=query).data)["steps"] == [0]
    sink.write(record("a", 1))
    sink.close()
    multiplexer.Reload()
    assert json.loads(routes.get("/series", query_string=query).data)["steps"] == [0, 1]


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, images_every=0)
    sink.write(RunHeader("0.1", (), {"gain": ("v", "w", "x", "y", "z")}, {"limit": math.inf}))
    sink.write(Record(0, None, {"gain": np.array([np.nan, np.inf, -np.inf, 0.0, 1e-60])}))
    sink.write(Alert("update_too_small", "warning", "v", 0, math.nan, math.inf, "m", "a"))
    sink.close()
    ask = client(tmp_path)
    assert ask("series", run=".", key="gain")["values"] == [[None], ["inf"], ["-inf"], [0], [1e-60]]
    (run,) = ask("overview")["runs"]
    assert run["alerts"][0]["limit"] == "inf"


def test_a_long_run_begins_at_its_first_step_though_tensorboard_samples_it(tmp_path: Path) -> None:
    labels = {"gain": ("a", "b")}
    sink = TensorBoardSink(tmp_path / "long", images_every=0)
    sink.write(RunHeader("0.2", (), labels))
    for step in range(400):
        sink.write(Record(step, None, {"gain": np.array([step, 1.0])}, metric_labels=labels))
    sink.close()
    with tensorboard(tmp_path, "--samples_per_plugin=flowscope=20") as address:
        wait_for_runs(address, 1)
        code, _, series = get(address, "series", run="long", key="gain")
        _, _, overview = get(address, "overview")
    assert code == 200
    assert series["steps"][:10] == [*range(10)]
    assert series["steps"][-1] == 399
    assert 20 <= len(series["steps"]) <= 30  # the sample, and the beginning
    assert series["values"][0][:10] == [*range(10)]
    assert [metric["key"] for metric in overview["runs"][0]["metrics"]] == ["gain"]
