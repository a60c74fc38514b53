"""The digest at the end of a run, read where it arrives: a server, a program; and the gauges of OpenTelemetry."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from flowscope import FlowscopeError
from flowscope.digest import Digest
from flowscope.records import Alert, Record
from flowscope.sinks import Sink


class Server(HTTPServer):
    got: list[Any]


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.got.append((self.headers, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = Server(("127.0.0.1", 0), Handler)
    server.got = []
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/hook"


def alert(kind: str, step: int, state: str = "raised") -> Alert:
    return Alert(kind, "error", "blocks.3", step, 0.0, 1.0, "lost <here> & there", "do this", state)  # type: ignore[arg-type]


def tell(sink: Sink) -> None:
    for step, loss in enumerate((2.5, 0.25, 1.5)):
        sink.write(Record(step, loss, {"gain": np.ones(2)}))
    for event in (alert("spike", 0), alert("vanishing_gradient", 1), alert("spike", 2, "resolved")):
        sink.write(event)
    sink.close()
    sink.close()


def test_the_digest_arrives_once_with_what_became_of_the_run(server: Server) -> None:
    tell(Digest(url(server), name="run a", headers={"X-Key": "k"}))
    ((headers, body),) = server.got
    assert headers["X-Key"] == "k"
    assert headers["Content-Type"] == "application/json"
    subject, losses, *rest = body["text"].splitlines()
    assert subject == "flowscope: run a: 3 steps in 0 s, 2 alerts (1 stands, 1 resolved)"
    assert losses == "loss 2.5 -> 1.5 (least 0.25)"
    assert "do this" in "\n".join(rest)
    run = body["run"]
    assert (run["steps"], run["records"], run["first_loss"], run["last_loss"], run["resolved"]) == (3, 3, 2.5, 1.5, 1)
    assert [standing["kind"] for standing in run["standing"]] == ["vanishing_gradient"]


def test_slack_gets_what_slack_takes(server: Server) -> None:
    tell(Digest(url(server), slack=True))
    ((_, body),) = server.got
    assert {*body} == {"text", "blocks"}
    texts = [block["text"] for block in body["blocks"] if block["type"] == "section"]
    assert all(text["type"] == "mrkdwn" and len(text["text"]) <= 3000 for text in texts)
    assert "lost &lt;here&gt; &amp; there" in texts[1]["text"]


def test_a_program_gets_the_text_and_the_subject(tmp_path: Path) -> None:
    program = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2] + '|' + sys.stdin.read())"
    tell(Digest(name="a; rm -rf", command=[sys.executable, "-c", program, str(tmp_path / "mail"), "{subject}"]))
    subject, text = (tmp_path / "mail").read_text().split("|", 1)
    assert subject.startswith("flowscope: a; rm -rf: 3 steps")
    assert text.splitlines()[0] == subject
    assert "vanishing_gradient at blocks.3" in text


def test_a_run_without_alerts_says_so(server: Server) -> None:
    digest = Digest(url(server))
    digest.write(Record(0, None))
    digest.close()
    assert server.got[0][1]["text"] == "flowscope: run: 1 steps in 0 s, no alert"


@pytest.mark.parametrize("command", [[sys.executable, "-c", "raise SystemExit(3)"], ["there-is-no-such-program"]])
def test_a_failure_is_logged_and_costs_nothing_else(command: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flowscope"):
        tell(Digest("http://127.0.0.1:9/secret", command=command))
    assert caplog.text.count("the digest was not sent") == 2
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ("neither url nor command", 'Digest("https://...")')),
        ({"url": "ftp://x"}, ("Digest(url)", "http")),
        ({"command": "mail me"}, ("expected a list", "['mail', 'me']")),
    ],
)
def test_a_wrong_digest_is_refused(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(FlowscopeError) as caught:
        Digest(**options)
    assert all(part in str(caught.value) for part in parts)


def test_opentelemetry_gauges_hold_the_latest_record_and_the_standing_alerts() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    from flowscope.integrations.opentelemetry import OpenTelemetrySink

    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    sink = OpenTelemetrySink(provider, attributes={"run": "a"}, metrics=["gain"])
    assert isinstance(sink, Sink)
    for event in (Record(7, 0.5, {"gain": np.array([1.0, 3.0, np.nan])}), alert("spike", 7)):
        sink.write(event)
    assert read(reader) == {
        ("flowscope.running", "a"): 1.0,
        ("flowscope.step", "a"): 7.0,
        ("flowscope.loss", "a"): 0.5,
        ("flowscope.gain", "", "a", "min"): 1.0,
        ("flowscope.gain", "", "a", "median"): 2.0,
        ("flowscope.gain", "", "a", "max"): 3.0,
        ("flowscope.alerts", "spike", "a", "error"): 1.0,
    }
    sink.write(alert("spike", 9, "resolved"))
    sink.close()
    after = read(reader)
    assert after["flowscope.alerts", "spike", "a", "error"] == 0
    assert after["flowscope.running", "a"] == 0
    provider.shutdown()


def read(reader: Any) -> dict[tuple[str, ...], float]:
    data = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    return {
        (metric.name, *(value for _, value in sorted(point.attributes.items()))): point.value
        for metric in metrics
        for point in metric.data.data_points
    }
