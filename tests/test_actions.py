"""What an alert may do: stop, snapshot, webhook, lower a rate, log. Each on a real run, and never unasked."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flowscope
from flowscope import StopTraining
from flowscope.actions import Action, Log, LowerLearningRate, Snapshot, Stop, Webhook
from flowscope.errors import FlowscopeError
from flowscope.records import Alert
from flowscope.sinks import read_run

ALERT = Alert("loss_spike", "warning", "", 7, 9.0, 3.0, "it jumped", "lower the rate")


class Net(nn.Module):
    """NaN where its input is NaN; three parameter matrices of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def run(on_alert: Any, *, steps: int = 14, bad: int = 11, given: bool = True, **options: Any) -> tuple[Any, Any, int]:
    """Train; the input of step `bad` holds a NaN. Returns scope, optimizer and the number of steps that were done."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD([{"params": model.body.parameters()}, {"params": model.head.parameters()}], lr=0.1)
    scope = flowscope.watch(model, optimizer if given else None, on_alert=on_alert, every=1, **options)
    done = 0
    try:
        for step in range(steps):
            x = torch.randn(4, 6)
            if step == bad:
                x[1, 2] = float("nan")
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            done += 1
            optimizer.step()
            scope.step(loss=loss)
    finally:
        scope.close()
    return scope, optimizer, done


@pytest.mark.parametrize("given", [True, False])
def test_stop_ends_the_run_after_the_step(given: bool) -> None:
    order: list[str] = []
    with pytest.raises(StopTraining, match="non_finite") as stopped:
        run([Stop(), lambda alert: order.append(alert.kind)], given=given)
    assert stopped.value.alert.kind == "non_finite"
    assert stopped.value.alert.step == 11
    assert isinstance(stopped.value, FlowscopeError)
    # every callback saw the alert, though the first of them asked for the stop
    assert order[0] == "non_finite"


def test_stop_on_other_kinds_lets_it_run() -> None:
    scope, _, done = run(Stop(on="vanishing_gradient"))
    assert done == 14
    assert "non_finite" in {alert.kind for alert in scope.alerts}


def test_any_callable_may_stop_and_other_faults_may_not(caplog: pytest.LogCaptureFixture) -> None:
    def stop(alert: Alert) -> None:
        raise StopTraining("enough")

    def fault(alert: Alert) -> None:
        raise ValueError("a fault of the callback")

    with pytest.raises(StopTraining, match="enough"):
        run(stop)
    assert run(fault)[2] == 14
    assert "a fault of the callback" in caplog.text


def test_close_and_reading_never_raise_a_stop() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = flowscope.watch(model, optimizer, on_alert=Stop())
    model(torch.full((4, 6), float("nan"))).sum().backward()
    optimizer.step()
    assert scope.alerts[0].kind == "non_finite"  # read, so judged now: the stop waits for the next step
    scope.close()
    assert not model._forward_hooks


def test_snapshot_holds_the_records_around_the_alert(tmp_path: Path) -> None:
    run(Snapshot(tmp_path / "around", before=3, after=2), steps=16)
    folder = tmp_path / "around" / "step-000011-non_finite"
    found = read_run(folder)
    assert [record.step for record in found.records] == [8, 9, 10, 11, 12, 13]
    assert [alert.kind for alert in found.alerts] == ["non_finite"]
    assert found.header is not None
    assert found.header.flows


def test_snapshot_at_most(tmp_path: Path) -> None:
    snapshot = Snapshot(tmp_path, after=0, most=2)
    for step in range(5):
        snapshot(Alert(**{**vars(ALERT), "step": step}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000-loss_spike", "step-000001-loss_spike"]


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append({"headers": dict(self.headers), **json.loads(body)})
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/hook", received
    http.shutdown()
    thread.join()
    http.server_close()


def test_webhook_posts_json_from_a_thread(server: tuple[str, list[dict[str, Any]]]) -> None:
    url, received = server
    before = threading.active_count()
    run(Webhook(url, headers={"X-Key": "k"}, extra={"run": "a"}, timeout=30))
    assert threading.active_count() == before  # close() waited for it and ended the thread
    assert [post["alert"]["kind"] for post in received][:1] == ["non_finite"]
    first = received[0]
    assert first["alert"]["step"] == 11
    assert first["run"] == "a"
    assert first["headers"]["X-Key"] == "k"
    assert first["text"].startswith("[error] step 11: non_finite")


def test_webhook_that_cannot_be_reached_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    webhook = Webhook("http://127.0.0.1:9/nobody", timeout=30)
    for _ in range(3):
        webhook(ALERT)
    webhook.close()
    assert caplog.text.count("the webhook") == 1


SECRETS = ("hunter2", "T0PATH", "K3Y")


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("http://me:hunter2@127.0.0.1:9/T0PATH?K3Y", "127.0.0.1"),
        ("http://127.0.0.1:9/T0PATH\r\nK3Y: hunter2", "127.0.0.1"),  # InvalidURL quotes all of it
        ("http://127.0.0.1:hunter2/T0PATH K3Y", "127.0.0.1"),
        ("http://[hunter2/T0PATH", "(no host)"),
        ("http://", "(no host)"),
    ],
)
def test_only_the_host_of_a_webhook_is_logged(address: str, host: str, caplog: pytest.LogCaptureFixture) -> None:
    webhook = Webhook(address, timeout=30)
    webhook(ALERT)
    webhook.close()
    assert f"the webhook at {host} failed" in caplog.text
    assert not [secret for secret in SECRETS if secret in caplog.text]


def answering(answers: list[bytes]) -> tuple[str, list[bytes], threading.Thread]:
    """A server that takes one request an answer: its address, the requests, its thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    requests: list[bytes] = []

    def serve() -> None:
        with listening:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    requests.append(connection.recv(65536))
                    connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/hook", requests, thread


def test_a_webhook_goes_on_after_any_answer(caplog: pytest.LogCaptureFixture) -> None:
    answers = [
        b"\x00\xff no status line\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ]
    url, requests, thread = answering(answers)
    webhook = Webhook(url, timeout=30)
    for _ in answers:
        webhook(ALERT)
    webhook.close()
    thread.join(30)
    assert len(requests) == len(answers)
    assert caplog.text.count("the webhook at 127.0.0.1 failed: BadStatusLine") == 1
    assert caplog.text.count("failed") == 1


def test_a_webhook_hands_its_headers_to_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    other, seen, _ = answering([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
    url, _, thread = answering([f"HTTP/1.1 302 F\r\nLocation: {other}\r\nContent-Length: 0\r\n\r\n".encode()])
    webhook = Webhook(url, headers={"Authorization": "K3Y"}, timeout=30)
    webhook(ALERT)
    webhook.close()
    thread.join(30)
    assert not seen
    assert "failed: status 302" in caplog.text


def test_lower_learning_rate_of_the_group_at_the_place() -> None:
    model = Net()
    optimizer = torch.optim.SGD(
        [{"params": model.body.parameters(), "lr": 0.2}, {"params": model.head.parameters(), "lr": torch.tensor(0.4)}]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    action = LowerLearningRate(0.25, on="warning", scheduler=scheduler, at_least=0.04)
    with flowscope.watch(model, optimizer, on_alert=action):
        action(Alert(**{**vars(ALERT), "where": "body.2"}))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        assert float(optimizer.param_groups[1]["lr"]) == pytest.approx(0.4)
        action(Alert(**{**vars(ALERT), "where": ""}))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.04)  # not below at_least
        assert float(optimizer.param_groups[1]["lr"]) == pytest.approx(0.1)
        assert torch.is_tensor(optimizer.param_groups[1]["lr"])
        action(Alert(**{**vars(ALERT), "state": "resolved"}))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.04)
    assert [float(rate) for rate in scheduler.base_lrs] == pytest.approx([0.04, 0.1])


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flowscope.alerts"):
        Log()(ALERT)
        Log()(Alert(**{**vars(ALERT), "state": "resolved"}))
        Log(on="error")(ALERT)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


def test_without_actions_nothing_acts() -> None:
    scope, optimizer, done = run(None)
    assert done == 14
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert scope.alerts


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LowerLearningRate(2.0), ("factor", "2.0")),
        (lambda: Webhook("ftp://x"), ("Webhook", "ftp://...", "http")),
        (lambda: Webhook("hooks.example/T0"), ("Webhook", "without a scheme", "http")),
        (lambda: LowerLearningRate()(ALERT), ("watch(on_alert",)),
    ],
)
def test_wrong_use_is_explained(make: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(FlowscopeError) as error:
        make()
    for word in words:
        assert word in str(error.value)


def test_an_action_of_ones_own() -> None:
    class Count(Action):
        seen = 0

        def act(self, alert: Alert) -> None:
            self.seen += 1

    count = Count(on=("loss_spike",))
    count(ALERT)
    count(Alert(**{**vars(ALERT), "kind": "other"}))
    assert count.seen == 1
