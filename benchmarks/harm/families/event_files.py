"""A damaged event file takes nothing from the runs beside it, and no request of the tab brings anything down.

Events with valid frames and hostile content, broken frames, and requests with any query, before the tab's routes.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto
from werkzeug.test import Client

from benchmarks.harm.attack import Outcome, Plan
from benchmarks.harm.recorded import train
from benchmarks.patience import OutOfPatience, patience
from flowscope.views.plugin import FlowPlugin

BESIDE = "event files: an intact run beside a damaged one stays visible"
ANSWERED = "event files: requests are answered, or refused with a reason"
QUERIES = "routes: traversal, parameters, methods: no file read, no header injected, TensorBoard lives"
FIRST = {BESIDE: (488, 397), QUERIES: (864, 862)}
FILES, REQUESTS = 500, 500
NAME = "events.out.tfevents.1.x"

TENSORS: list[Any] = [
    np.zeros(0), np.zeros((0, 3)), np.float64(3), np.zeros((2, 2, 2, 2)), np.full(7, np.nan), np.full(7, np.inf),
    np.arange(7) * 1e300, np.array(["x", "y"], dtype=object), np.array([b"\xff\xfe"], dtype=object),
    np.array([True, False]), np.zeros(100_000), np.array(["[" * 5000], dtype=object), np.array([1 + 2j, 3]),
]  # fmt: skip
TEXTS = [
    "null", "5", '"x"', "[]", "{}", "[[1]]", '{"type":"alert"}', '{"kind":1,"severity":2}', '{"flows":3}',
    '{"flows":[{}]}', '{"flows":[],"labels":{"a":5}}', '{"labels":"x"}', '{"version":{}}', '{"config":5}', "[" * 5000,
    '{"kind":"k","severity":"error","where":"w","step":1e400,"message":"m","advice":"a"}', '{"metrics":[{"name":3}]}',
]  # fmt: skip
TAGS = [
    "flowscope/", "flowscope/header", "flowscope/alerts", "flowscope/gradient_product@", "flowscope/__proto__",
    "flow/loss", "x" * 5000, "flowscope/<script>", "flowscope/a\0b", "flowscope/cosine_matrix",
]  # fmt: skip
CONTENTS = [
    b"", b"null", b"[]", b"\xff", b"{}", b'{"labels": 5}', b'{"labels": [1, null, {}]}', b"[" * 5000,
    b'{"labels": ["a"], "version": [2]}', b'{"labels": {"a": 1}}',
]  # fmt: skip


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Damaged runs beside an intact one, then requests."""
    logging.getLogger("tensorboard").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        intact = train(Path(folder) / "intact").parent
        (source,) = intact.glob("events*")
        events = [bytes(event) for event in RawEventFileLoader(str(source)).Load()]
        for number in range(plan.count(FILES)):
            logs = Path(folder) / "logs"
            shutil.copytree(intact, logs / "good")
            (logs / "bad").mkdir()
            kind = plan.random.choice(list(KINDS))
            KINDS[kind](logs / "bad" / NAME, events, plan.random)
            yield from _asked(logs, f"file {number} ({kind})")
            shutil.rmtree(logs)
        yield from _requests(intact, plan)


def _asked(logs: Path, case: str) -> Iterator[Outcome]:
    try:
        with patience(60):
            ask = _tab(logs)
            status, seen = ask("overview", {})
            good = next((run for run in seen.get("runs", ()) if run["name"] == "good"), None)
            yield Outcome(BESIDE, case, bool(good and good["last_step"] == 7), f"{status} {str(seen)[:200]}")
            for run in ("bad", "good"):
                for key in ("gradient_product", "cosine_matrix", "alerts", "header"):
                    for route, more in (("series", {}), ("record", {"step": "3"})):
                        status, answer = ask(route, {"run": run, "key": key, **more})
                        told = status == 200 or (status == 404 and bool(answer["error"]))
                        yield Outcome(ANSWERED, f"{case}, {route} {run} {key}", told, f"{status} {str(answer)[:200]}")
    except (Exception, OutOfPatience) as error:
        yield Outcome(BESIDE, case, False, f"{type(error).__name__}: {error}")


def _tab(logs: Path) -> Callable[[str, dict[str, str]], tuple[int, Any]]:
    multiplexer = EventMultiplexer(tensor_size_guidance={"flowscope": 100})
    multiplexer.AddRunsFromDirectory(str(logs))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(logs))
    routes = FlowPlugin(SimpleNamespace(data_provider=provider)).get_plugin_apps()

    def ask(route: str, query: dict[str, str]) -> tuple[int, Any]:
        answer = Client(routes[f"/{route}"]).get(f"/{route}", query_string=query)
        return answer.status_code, json.loads(answer.data)

    return ask


# -- damage -----------------------------------------------------------------------------------------------------------


def _written(file: Path, events: list[bytes]) -> None:
    with file.open("wb") as opened:
        writer = RecordWriter(opened)
        for event in events:
            writer.write(event)


def _content(file: Path, events: list[bytes], random: Random) -> None:
    """Valid frames around events that say something else."""
    _written(file, [_hostile(event, random) if random.random() < 0.5 else event for event in events])


def _frames(file: Path, events: list[bytes], random: Random) -> None:
    """Bytes of the file changed, its end cut off."""
    _written(file, events)
    data = bytearray(file.read_bytes())
    for _ in range(random.choice([1, 5, 50])):
        data[random.randrange(len(data))] = random.randrange(256)
    file.write_bytes(data[: random.choice([len(data), random.randrange(1, len(data))])])


KINDS = {"content": _content, "frames": _frames}


def _hostile(data: bytes, random: Random) -> bytes:
    event = event_pb2.Event.FromString(data)
    for value in event.summary.value:
        for _ in range(random.choice([0, 1, 3])):
            random.choice([_tag, _tensor, _tensor, _text, _bytes, _dtype, _beside, _less])(value, random)
    if random.random() < 0.2:
        event.step = random.choice([-1, 0, 2**62, -(2**63), 2**63 - 1])
    if random.random() < 0.1:
        event.wall_time = random.choice([float("nan"), float("inf"), -1, 0, 1e300])
    return event.SerializeToString()


def _tag(value: Any, random: Random) -> None:
    value.tag = random.choice(TAGS)


def _tensor(value: Any, random: Random) -> None:
    value.tensor.CopyFrom(make_tensor_proto(random.choice(TENSORS)))


def _text(value: Any, random: Random) -> None:
    value.tensor.CopyFrom(make_tensor_proto(np.array([random.choice(TEXTS)], dtype=object)))


def _bytes(value: Any, random: Random) -> None:
    value.tensor.tensor_content = random.randbytes(random.randrange(40))


def _dtype(value: Any, random: Random) -> None:
    value.tensor.dtype = random.randrange(25)


def _beside(value: Any, random: Random) -> None:
    value.metadata.plugin_data.plugin_name = random.choice(["flowscope", "scalars", ""])
    value.metadata.plugin_data.content = random.choice(CONTENTS)


def _less(value: Any, random: Random) -> None:
    value.ClearField(random.choice(["tensor", "metadata", "tag"]))


# -- requests ---------------------------------------------------------------------------------------------------------

WORDS = [
    "", ".", "..", "../../../../etc/passwd", "%2e%2e%2fetc", "..\\..", "/etc/passwd", "file:///etc/passwd",
    "a\r\nX-Own: 1", "\0", "gain", "header", "alerts", "__proto__", "gradient_product@nowhere", "<b>", "x" * 9000,
    "3", "-1", "9" * 18, "9" * 30, "9" * 5000, "1e5", "nan", "\u0663", "\ud7ff", "'; DROP TABLE runs", "${x}",
]  # fmt: skip
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"]


def _requests(intact: Path, plan: Plan) -> Iterator[Outcome]:
    """Requests with drawn paths, queries and methods; a known one is answered after each."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(intact.parent))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(intact.parent))
    routes = FlowPlugin(SimpleNamespace(data_provider=provider)).get_plugin_apps()
    secret = Path("/etc/passwd").read_text()[:40] if Path("/etc/passwd").exists() else "root:"
    for number in range(plan.count(REQUESTS)):
        route, method = plan.random.choice(list(routes)), plan.random.choice(METHODS)
        query = {
            name: plan.random.choice(WORDS) for name in ("run", "key", "step", "tag") if plan.random.random() < 0.8
        }
        answer = Client(routes[route]).open(f"{route}", method=method, query_string=query)
        held = answer.status_code < 500 and "X-Own" not in answer.headers and secret not in answer.text
        alive = Client(routes["/overview"]).get("/overview").status_code == 200
        yield Outcome(QUERIES, f"request {number}: {method} {route} {query}"[:200], held and alive, str(answer.status))
