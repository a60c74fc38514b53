"""Loggers as sinks, each run for real and read back: Weights & Biases, MLflow, Trackio, Prometheus. No network."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from watch_models import Stack, train

import flowscope
from flowscope.metrics import of_0_1
from flowscope.records import Alert, FlowLayout, Record, RunHeader
from flowscope.sinks import Sink
from flowscope.sinks.reduction import StandingAlerts, record_scalars, spread

HEADER = RunHeader("0.1", (FlowLayout("layers", "blocks", ("a", "b", "c"), ("b", "c")),), {"gain": ("b", "c")})
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)


def record(step: int, loss: float | None = 1.5) -> Record:
    metrics = {
        "gradient_product": np.array([0.5, NAN, 0.25, 4.0, 1.0]),
        "gradient_product@decoder": np.array([8.0, 2.0, 1.0]),
        "gain": np.array([NAN, NAN]),
        "clip_ratio": np.array([0.125]),
        "act_rms": np.array([1.0, INF]),
        "cosine_matrix": np.eye(3),
        "effective_rank": np.array([3.0, 2.0]),
    }
    return Record(step, loss, metrics)


def alert(step: int, kind: str = "vanishing_gradient", **options: Any) -> Alert:
    return Alert(kind, options.pop("severity", "error"), "b", step, 1e-5, 1e-3, "gone", "look", **options)


EXPECTED = {
    "loss": 1.5,
    "gradient_product/min": 0.25,
    "gradient_product/median": 0.75,
    "gradient_product/max": 4.0,
    "gradient_product/decoder/min": 1.0,
    "gradient_product/decoder/median": 2.0,
    "gradient_product/decoder/max": 8.0,
    "clip_ratio": 0.125,
    "act_rms/min": 1.0,
    "act_rms/median": INF,
    "act_rms/max": INF,
}


# -- the reduction


def test_a_record_becomes_a_few_numbers() -> None:
    assert record_scalars(record(0)) == EXPECTED
    assert record_scalars(record(0, None), ["effective_rank"]) == {
        "effective_rank/min": 2.0,
        "effective_rank/median": 2.5,
        "effective_rank/max": 3.0,
    }
    assert math.isnan(record_scalars(record(0, NAN))["loss"])
    assert spread([]) == spread([NAN]) == {}


def test_the_number_of_names_does_not_grow_with_depth() -> None:
    counts = []
    for depth in (3, 9):
        model = Stack(depth=depth)
        with flowscope.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), config={"console": "off"}) as scope:
            train(scope, model, torch.optim.SGD(model.parameters(), lr=0.05), 1)
        counts.append(len(record_scalars(scope.records[0])))
    logged = [metric.name for metric in of_0_1().values() if metric.logged]
    assert counts[0] == counts[1] <= 3 * len(logged) + 1


def test_standing_alerts_are_those_raised_and_not_resolved() -> None:
    standing = StandingAlerts()
    standing.take(alert(1))
    standing.take(alert(2, "dead_units", severity="warning"))
    standing.take(alert(3, severity="warning"))  # the same place again, now less severe
    assert standing.counts() == {("vanishing_gradient", "warning"): 1, ("dead_units", "warning"): 1}
    standing.take(alert(4, state="resolved"))
    assert len(standing) == 1
    standing.take(alert(5, "never_raised", state="resolved"))
    assert len(standing) == 1


def watch_and_train(sink: Sink) -> tuple[flowscope.Scope, list[float]]:
    """A real run with a NaN in the weights of the head, so that there are alerts too."""
    torch.manual_seed(0)
    model = Stack()
    scope = flowscope.watch(model, every=1, sinks=[sink], config={"console": "off"})
    losses = train(scope, model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    with torch.no_grad():
        model.head.weight[0, 0] = NAN
    losses += train(scope, model, torch.optim.SGD(model.parameters(), lr=0.05), 1)
    scope.close()
    assert [r.step for r in scope.records] == [0, 1, 2]
    assert "non_finite" in [a.kind for a in scope.alerts]
    return scope, losses


# -- Weights & Biases


def wandb_records(folder: Path) -> list[Any]:
    """All records of the one offline run, from its file: LevelDB's log format, a 7-byte header of W&B's first."""
    from wandb.proto import wandb_internal_pb2

    raw = next(folder.rglob("*.wandb")).read_bytes()
    out, position, parts = [], 7, []
    while position + 7 <= len(raw):
        left = 32768 - position % 32768
        if left < 7:  # the rest of a block is too short for a header
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[position : position + 7])
        parts.append(raw[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            message = wandb_internal_pb2.Record()
            message.ParseFromString(b"".join(parts))
            out.append(message)
            parts = []
    return out


def wandb_rows(folder: Path) -> dict[int, dict[str, Any]]:
    rows = {}
    for message in wandb_records(folder):
        if message.WhichOneof("record_type") == "history":
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in message.history.item}
            rows[message.history.step.num] = items
    return rows


@pytest.fixture
def wandb_run(tmp_path: Path) -> Iterator[Any]:
    import wandb

    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, init_timeout=300)
    run = wandb.init(project="p", dir=str(tmp_path), mode="offline", settings=settings)
    yield run
    end_wandb(run)


def end_wandb(run: Any) -> None:
    """End the run and wandb's own process: only then is the file complete."""
    import wandb

    run.finish()
    wandb.teardown()


def test_wandb_rows_stand_at_the_optimizers_steps(wandb_run: Any, tmp_path: Path) -> None:
    from flowscope.integrations.wandb import WandbSink

    sink = WandbSink(wandb_run)
    sink.write(HEADER)
    sink.write(record(0))
    wandb_run.log({"mine": 1}, step=0)  # the same row
    sink.write(alert(0))
    sink.write(record(10))
    wandb_run.log({"mine": 2}, step=20)
    sink.write(record(19))  # a step late, behind the run's own step: not dropped
    sink.write(record(20))
    wandb_run.log({"mine": 3}, step=30)
    sink.write(alert(20, state="resolved"))
    sink.close()
    sink.close()
    end_wandb(wandb_run)
    rows = wandb_rows(tmp_path)
    steps = {step: row["flowscope/step"] for step, row in rows.items() if "flowscope/loss" in row}
    assert list(steps.values()) == [0, 10, 19, 20]
    assert steps[0] == 0
    assert [row["mine"] for row in rows.values() if "mine" in row] == [1, 2, 3]
    assert rows[0]["mine"] == 1
    named = {name.removeprefix("flowscope/"): value for name, value in rows[0].items() if name != "mine"}
    infinite = {name for name, value in EXPECTED.items() if math.isinf(value)}
    finite = {name: value for name, value in EXPECTED.items() if name not in infinite}
    assert finite.items() <= named.items()
    assert {named[name] for name in infinite} <= {"Infinity", INF}
    assert [row["flowscope/alerts/standing"] for row in rows.values() if "flowscope/loss" in row] == [0, 1, 1, 1]
    messages = [m.alert for m in wandb_records(tmp_path) if m.WhichOneof("record_type") == "alert"]
    assert [(m.title, m.level) for m in messages] == [("flowscope: vanishing_gradient", "ERROR")]
    assert "look" in messages[0].text
    table = next(json.loads(p.read_text()) for p in tmp_path.rglob("*.table.json"))
    assert table["columns"] == ["step", "state", "severity", "kind", "where", "message", "advice"]
    assert [row[:2] for row in table["data"]] == [[0, "raised"], [20, "resolved"]]


@pytest.mark.parametrize("unwatched", [False, True])
def test_what_the_readme_says_of_the_hooks_of_wandb_watch(wandb_run: Any, unwatched: bool) -> None:
    model = torch.nn.Linear(4, 4)
    wandb_run.watch(model, log="gradients", log_freq=1)
    model(torch.randn(2, 4)).sum().backward()
    if unwatched:
        wandb_run.unwatch(model)
    end_wandb(wandb_run)
    loss = model(torch.randn(2, 4)).sum()
    if unwatched:
        loss.backward()
        return
    with pytest.raises(AttributeError):
        loss.backward()


def test_wandb_in_a_real_run(wandb_run: Any, tmp_path: Path) -> None:
    from flowscope.integrations.wandb import WandbSink

    scope, losses = watch_and_train(WandbSink())
    end_wandb(wandb_run)
    rows = [row for row in wandb_rows(tmp_path).values() if "flowscope/loss" in row]
    assert [row["flowscope/step"] for row in rows] == [0, 1, 2]
    assert [row["flowscope/loss"] for row in rows[:2]] == pytest.approx(losses[:2], rel=1e-6)
    assert rows[2]["flowscope/loss"] in ("NaN",) or math.isnan(rows[2]["flowscope/loss"])
    product = scope.records[0]["gradient_product"]
    assert rows[0]["flowscope/gradient_product/min"] == pytest.approx(product.min())


def test_wandb_needs_a_run() -> None:
    from flowscope.integrations.wandb import WandbSink

    with pytest.raises(flowscope.FlowscopeError, match=r"call wandb\.init"):
        WandbSink()


# -- MLflow


@pytest.fixture
def mlflow_run(tmp_path: Path) -> Iterator[Any]:
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as run:
        yield run
    mlflow.set_tracking_uri(before)


@pytest.mark.parametrize("synchronous", [True, False])
def test_mlflow_keeps_steps_numbers_and_alerts(mlflow_run: Any, synchronous: bool) -> None:
    import mlflow

    from flowscope.integrations.mlflow import MlflowSink

    sink = MlflowSink(synchronous=synchronous)
    for event in (HEADER, record(0), alert(0), record(10), alert(10, "dead_units", severity="warning"), record(20)):
        sink.write(event)
    sink.write(alert(20, state="resolved"))
    sink.close()
    sink.close()
    client, run_id = mlflow.MlflowClient(), mlflow_run.info.run_id
    for name, value in EXPECTED.items():
        history = client.get_metric_history(run_id, f"flowscope/{name}")
        assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [
            (0, value),
            (10, value),
            (20, value),
        ], name
    standing = client.get_metric_history(run_id, "flowscope/alerts_standing")
    assert [m.value for m in sorted(standing, key=lambda m: m.step)] == [0, 1, 2]
    assert client.get_run(run_id).data.tags["flowscope.alerts"] == "dead_units"
    text = Path(client.download_artifacts(run_id, "flowscope/alerts.txt")).read_text()
    assert [line.split("step ")[1][:2] for line in text.splitlines()] == ["0:", "10", "20"]


def test_mlflow_in_a_real_run(mlflow_run: Any) -> None:
    import mlflow

    from flowscope.integrations.mlflow import MlflowSink

    scope, losses = watch_and_train(MlflowSink(mlflow_run.info.run_id))
    history = mlflow.MlflowClient().get_metric_history(mlflow_run.info.run_id, "flowscope/loss")
    assert [m.step for m in history] == [0, 1, 2]
    assert [m.value for m in history[:2]] == pytest.approx(losses[:2], rel=1e-6)
    assert math.isnan(history[2].value)
    assert mlflow.active_run().info.run_id == mlflow_run.info.run_id  # the run is the caller's to end
    assert scope.closed


def test_mlflow_needs_a_run() -> None:
    from flowscope.integrations.mlflow import MlflowSink

    with pytest.raises(flowscope.FlowscopeError, match="no active run"):
        MlflowSink()


# -- Trackio


def test_trackio_keeps_steps_numbers_and_alerts(tmp_path: Path) -> None:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    from flowscope.integrations.trackio import TrackioSink

    run = trackio.init(project="p", name="r", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    scope, losses = watch_and_train(TrackioSink(run))
    direct = TrackioSink(run)
    for event in (HEADER, record(3), alert(3), alert(3, state="resolved")):
        direct.write(event)
    direct.close()
    direct.close()
    trackio.finish()
    rows = SQLiteStorage.get_logs("p", "r")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["flowscope/loss"] for row in rows[:2]] == pytest.approx(losses[:2], rel=1e-6)
    assert {f"flowscope/{name}": value for name, value in EXPECTED.items()}.items() <= rows[3].items()
    kinds = [a["title"].removeprefix("flowscope: ") for a in SQLiteStorage.get_alerts("p", "r")]
    raised = [a.kind for a in scope.alerts if a.state == "raised"] + ["vanishing_gradient"]
    assert sorted(kinds) == sorted(raised)


def test_trackio_needs_a_run() -> None:
    from flowscope.integrations.trackio import TrackioSink

    with pytest.raises(flowscope.FlowscopeError, match="NoneType"):
        TrackioSink(None)


# -- Prometheus


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"flowscope_{name}", frozenset({**labels, "run": "a"}.items())


def test_prometheus_text_is_what_the_textfile_collector_reads(tmp_path: Path) -> None:
    from flowscope.integrations.prometheus import PrometheusSink

    path = tmp_path / "train.prom"
    sink = PrometheusSink(path, labels={"run": "a"})
    for event in (HEADER, record(0), alert(0), alert(0, "dead_units", severity="warning"), record(10, 2.5)):
        sink.write(event)
    sink.write(alert(10, state="resolved"))
    found = samples(path.read_text())
    assert found[key("running")] == 1
    assert found[key("step")] == 10
    assert found[key("loss")] == 2.5
    assert found[key("gradient_product", flow="", stat="min")] == 0.25
    assert found[key("gradient_product", flow="decoder", stat="max")] == 8.0
    assert found[key("act_rms", flow="", stat="max")] == INF
    assert found[key("clip_ratio", flow="", stat="median")] == 0.125
    assert found[key("alerts", kind="vanishing_gradient", severity="error")] == 0
    assert found[key("alerts", kind="dead_units", severity="warning")] == 1
    assert not [name for name, _ in found if "gain" in name or "cosine_matrix" in name]
    assert found[key("record_timestamp_seconds")] > 1.7e9
    sink.close()
    sink.close()
    assert samples(path.read_text())[key("running")] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["train.prom"]  # no half-written file is left


def test_prometheus_in_a_registry_of_the_callers() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from flowscope.integrations.prometheus import PrometheusSink

    registry = CollectorRegistry()
    for _ in range(2):  # a second run in the same process finds the names free
        sink = PrometheusSink(registry=registry, labels={"run": "a"})
        scope, losses = watch_and_train(sink)
        sink = PrometheusSink(registry=registry, labels={"run": "a"})
        sink.write(scope.records[1])
        assert samples(generate_latest(registry).decode())[key("loss")] == pytest.approx(losses[1], rel=1e-6)
        sink.close()
    assert generate_latest(registry) == b""


@pytest.mark.parametrize("path", ["train.txt", "missing/train.prom"])
def test_prometheus_refuses_a_path_that_would_never_be_read(path: str, tmp_path: Path) -> None:
    from flowscope.integrations.prometheus import PrometheusSink

    with pytest.raises(flowscope.FlowscopeError, match=r"ends in \.prom"):
        PrometheusSink(tmp_path / path)


# -- all of them


def prometheus_sink(folder: Path) -> Sink:
    from flowscope.integrations.prometheus import PrometheusSink

    return PrometheusSink(folder / "a.prom")


def mlflow_sink(folder: Path) -> Sink:
    import mlflow

    from flowscope.integrations.mlflow import MlflowSink

    client = mlflow.MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    run = client.create_run(client.create_experiment("e"))
    return MlflowSink(run.info.run_id, (folder / "mlruns").as_uri())


@pytest.mark.parametrize("make", [prometheus_sink, mlflow_sink])
def test_contract(make: Callable[[Path], Sink], tmp_path: Path) -> None:
    sink = make(tmp_path)
    assert isinstance(sink, Sink)
    event = record(0)
    before = event.to_json()
    for item in (HEADER, event, alert(0), HEADER, record(1)):
        sink.write(item)
    sink.close()
    sink.close()
    assert event.to_json() == before


def test_a_logger_that_fails_is_switched_off_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "0")
    folder = tmp_path / "made"
    folder.mkdir()
    sink = prometheus_sink(folder)
    folder.rmdir()  # nothing can be written any more
    with caplog.at_level(logging.ERROR, logger="flowscope"):
        scope, _ = watch_and_train(sink)
    assert len(scope.records) == 3
    assert len([r for r in caplog.records if "PrometheusSink" in r.getMessage()]) <= 2
    assert any("PrometheusSink" in r.getMessage() for r in caplog.records)
