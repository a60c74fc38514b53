"""A webhook's server can do anything: no call waits, nothing dies, nothing secret is logged.

Servers are sockets of this process; what they answer is fixed or drawn.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random

from benchmarks.harm.attack import Outcome, Plan
from flowscope.actions import Webhook
from flowscope.records import Alert

TIMEOUT = 0.5
SLACK = 1.5
"""Seconds beyond the timeout that a busy machine may take."""
ALERT = Alert("loss_spike", "error", "blocks.0", 7, 9.0, 3.0, "it jumped", "lower the rate")
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

NO_WAIT, BOUNDED, QUIET = "webhook: no call waits", "webhook: close is bounded", "webhook: no traceback of its thread"
ONCE, LATER = "webhook: a failure is said once", "webhook: later alerts are still sent"
SECRET = "webhook: nothing of the address but its host is logged"
FIRST = {NO_WAIT: (15, 15), BOUNDED: (15, 15), QUIET: (23, 13), ONCE: (23, 16), LATER: (15, 13), SECRET: (2, 0)}

Answer = Callable[[socket.socket], object]
FAILS, WORKS, SLOW = "fails", "works", "slow"


def _after(answer: bytes) -> Answer:
    def send(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    return send


def _drip(connection: socket.socket) -> None:
    for _ in range(15):
        connection.sendall(b"H")
        time.sleep(0.1)


SERVERS: dict[str, tuple[str, Answer]] = {
    "answers 200": (WORKS, _after(GOOD)),
    "10 MB": (WORKS, _after(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n" + b"x" * 10**7)),
    "hangs": (SLOW, lambda connection: time.sleep(4)),
    "a byte at a time": (SLOW, _drip),
    "closes at once": (FAILS, lambda connection: None),
    "500": (FAILS, _after(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")),
    "401": (FAILS, _after(b"HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm=x\r\nContent-Length: 0\r\n\r\n")),
    "100 headers": (FAILS, _after(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000 + b"\r\n")),
    "a header of 1 MB": (FAILS, _after(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 10**6 + b"\r\n\r\n")),
    "garbage": (FAILS, _after(b"\x00\xff garbage\r\n\r\n")),
    "no number as status": (FAILS, _after(b"HTTP/1.1 abc OK\r\n\r\n")),
    "redirect loop": (FAILS, _after(b"HTTP/1.1 302 F\r\nLocation: /hook\r\nContent-Length: 0\r\n\r\n")),
    "redirect to a file": (FAILS, _after(b"HTTP/1.1 302 F\r\nLocation: file:///etc/hostname\r\n\r\n")),
    "307": (FAILS, _after(b"HTTP/1.1 307 F\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n")),
}
ADDRESSES = {
    "refused": "http://127.0.0.1:9/",
    "user and password": "http://user:{secret}@127.0.0.1:9/",
    "secret path": "http://127.0.0.1:9/services/{secret}",
    "secret query": "http://127.0.0.1:9/?key={secret}",
    "no such host": "http://no-such-host.invalid/{secret}",
    "port too large": "http://127.0.0.1:99999/{secret}",
    "no number as port": "http://127.0.0.1:{secret}/",
    "space": "http://127.0.0.1:1/a {secret}",
    "CRLF": "http://127.0.0.1:1/a\r\nX: {secret}",
    "no host": "http:///{secret}",
    "brackets": "http://[{secret}",
    "no ASCII": "http://ünï.invalid/ü{secret}",
}


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Known servers, drawn answers, and addresses that lead nowhere."""
    for name in plan.some(list(SERVERS)):
        yield from _at_server(name, *SERVERS[name])
    for number in range(plan.count(40)):
        yield from _at_server(f"drawn answer {number}", FAILS, _after(_drawn(plan.random)))
    for name in plan.some(list(ADDRESSES)):
        yield from _at_address(name, ADDRESSES[name], f"s{plan.random.getrandbits(64):x}")


def _drawn(random: Random) -> bytes:
    """An answer with some bytes of its head changed, so that it is none."""
    answer = bytearray(GOOD)
    for at in range(5):  # HTTP/
        answer[at] = random.choice(b"abc \x00\xff\r\n")
    for _ in range(random.randrange(8)):
        answer[random.randrange(len(answer))] = random.randrange(256)
    return bytes(answer)


class _Watched(logging.Handler):
    """What is said and what dies while a webhook is used."""

    def __enter__(self) -> _Watched:
        self.lines: list[str] = []
        self.dead: list[str] = []
        self._hook, threading.excepthook = threading.excepthook, lambda args: self.dead.append(repr(args.exc_value))
        logging.getLogger("flowscope").addHandler(self)
        return self

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __exit__(self, *_: object) -> None:
        logging.getLogger("flowscope").removeHandler(self)
        threading.excepthook = self._hook


def _at_server(name: str, kind: str, answer: Answer) -> Iterator[Outcome]:
    requests: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as listening, _Watched() as seen:
        threading.Thread(target=_serve, args=(listening, answer, requests), daemon=True).start()
        webhook = Webhook(f"http://127.0.0.1:{listening.getsockname()[1]}/hook", timeout=TIMEOUT)
        begin = time.monotonic()
        for _ in range(3):
            webhook(ALERT)
        waited = time.monotonic() - begin
        webhook.close()
        took = time.monotonic() - begin - waited
        time.sleep(0 if kind != SLOW else 2 * TIMEOUT + SLACK)  # a slow one fails after the end
    yield Outcome(NO_WAIT, name, waited < SLACK, f"{waited:.1f} s")
    yield Outcome(BOUNDED, name, took < TIMEOUT + SLACK, f"{took:.1f} s")
    yield from _told(name, seen, failures=kind != WORKS)
    if kind != SLOW:
        yield Outcome(LATER, name, len(requests) == 3, f"{len(requests)} of 3")


def _told(name: str, seen: _Watched, *, failures: bool) -> Iterator[Outcome]:
    yield Outcome(QUIET, name, not seen.dead, str(seen.dead[:1]))
    yield Outcome(ONCE, name, len(seen.lines) == int(failures), str(seen.lines[:2]))


def _serve(listening: socket.socket, answer: Answer, requests: list[bool]) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            requests.append(True)
            threading.Thread(target=_answer, args=(connection, answer), daemon=True).start()


def _answer(connection: socket.socket, answer: Answer) -> None:
    with connection, suppress(OSError):
        answer(connection)


def _at_address(name: str, address: str, secret: str) -> Iterator[Outcome]:
    with _Watched() as seen:
        webhook = Webhook(address.format(secret=secret), timeout=20 * TIMEOUT)
        for _ in range(2):
            webhook(ALERT)
        webhook.close()
    yield from _told(name, seen, failures=True)
    yield Outcome(SECRET, name, not any(secret in line for line in seen.lines), str(seen.lines[:1]))
