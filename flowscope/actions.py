"""Ready-made `on_alert` callables. Nothing acts unless it is given to `watch(on_alert=[...])`.

    Log()                        one line through the logging module
    Stop(on="error")             end the run: raises StopTraining after the step
    Snapshot(folder)             write the records around the alert, as a run folder
    Webhook(url)                 POST the alert as JSON, from a thread
    LowerLearningRate(factor)    multiply the learning rate of the group that holds the alert's place

Each takes `on`: alert kinds ("vanishing_gradient") or severities ("error"), one or several. All ranks of a distributed
run see the same alerts at the same step: `Stop` and `LowerLearningRate` act on every rank, the others on the first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flowscope.errors import FlowscopeError, StopTraining
from flowscope.faults import LOGGER
from flowscope.ranks.groups import is_first_process
from flowscope.records import SERIOUS, Alert, Event, Record, RunHeader
from flowscope.sinks.jsonl import JsonlSink
from flowscope.terminal import shown

if TYPE_CHECKING:
    from flowscope.scope import Scope

SEVERITIES = ("info", "warning", "error")


class Action(ABC):
    """What happens at an alert of the chosen kinds or severities. Subclass it and write `act`.

    An action that also has `write(event)` and `close()` receives every header, record and alert like a sink.

    Args:
        on: kinds or severities, one or several.

    Attributes:
        every_rank: whether it acts on every rank of a distributed run, or on the first alone.
    """

    every_rank: ClassVar[bool] = False

    def __init__(self, on: str | Iterable[str] = SERIOUS) -> None:
        self.on = frozenset([on] if isinstance(on, str) else on)
        self.scope: Scope | None = None

    def bind(self, scope: Scope) -> None:
        """Called by `watch`: the scope whose alerts will come."""
        self.scope = scope

    def wants(self, alert: Alert) -> bool:
        """Whether it acts on this alert."""
        return alert.state == "raised" and bool(self.on & {alert.kind, alert.severity})

    def __call__(self, alert: Alert) -> None:
        """Act, if it wants to."""
        if self.wants(alert) and (self.every_rank or is_first_process()):
            self.act(alert)

    @abstractmethod
    def act(self, alert: Alert) -> None:
        """What to do."""


class Log(Action):
    """Log the alert: info, warning or error after its severity; resolved ones as info.

    Args:
        on: as in `Action`.
        logger: a logger or its name.
    """

    def __init__(self, on: str | Iterable[str] = SEVERITIES, logger: logging.Logger | str = "flowscope.alerts") -> None:
        super().__init__(on)
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger

    def wants(self, alert: Alert) -> bool:
        """Resolved alerts too."""
        return bool(self.on & {alert.kind, alert.severity})

    def act(self, alert: Alert) -> None:
        """Log."""
        level = logging.INFO if alert.state == "resolved" else logging.getLevelName(alert.severity.upper())
        self._logger.log(level, "%s", shown(str(alert)))


class Stop(Action):
    """End the run: `StopTraining` leaves `optimizer.step()` (or `scope.step()`) after the step is complete.

    Args:
        on: as in `Action`; errors where not given.
    """

    every_rank = True

    def __init__(self, on: str | Iterable[str] = "error") -> None:
        super().__init__(on)

    def act(self, alert: Alert) -> None:
        """Ask for the stop."""
        raise StopTraining(f"training stopped by {alert}", alert)


class Snapshot(Action):
    """Write the records around an alert into a folder of their own, which `flowscope report` and `diagnose` read.

    Args:
        folder: where the folders `step-<n>-<kind>` go.
        before, after: how many records before and after the alert's.
        on: as in `Action`.
        most: how many snapshots at most.
    """

    def __init__(
        self,
        folder: str | Path,
        before: int = 20,
        after: int = 5,
        on: str | Iterable[str] = SERIOUS,
        most: int = 20,
    ) -> None:
        super().__init__(on)
        self._folder, self._after, self._left = Path(folder), after, most
        self._recent: deque[Record] = deque(maxlen=before + 1)
        self._header: RunHeader | None = None
        self._open: dict[Path, tuple[JsonlSink, int]] = {}

    def write(self, event: Event) -> None:
        """Remember what may be needed; complete what was begun."""
        if isinstance(event, RunHeader):
            self._header = event
        elif isinstance(event, Record):
            self._recent.append(event)
        for path, (sink, left) in list(self._open.items()):
            sink.write(event)
            self._keep_open(path, sink, left - isinstance(event, Record))

    def act(self, alert: Alert) -> None:
        """Begin a snapshot."""
        path = self._folder / f"step-{alert.step:06d}-{re.sub(r'[^A-Za-z0-9_.-]', '_', alert.kind)}"
        if self._left == 0 or path in self._open:
            return
        self._left -= 1
        sink = JsonlSink(path)
        for event in (self._header, *self._recent, alert):
            if event is not None:
                sink.write(event)
        self._keep_open(path, sink, self._after)

    def _keep_open(self, path: Path, sink: JsonlSink, left: int) -> None:
        """Let a snapshot take so many more records; without any it is complete."""
        self._open[path] = sink, left
        if left <= 0:
            sink.close()
            del self._open[path]

    def close(self) -> None:
        """Close what is open."""
        for sink, _ in self._open.values():
            sink.close()
        self._open.clear()


class Webhook(Action):
    """POST the alert as JSON: `{"text": one line, "alert": {...}, ...extra}`; never blocks a step.

    A thread of its own sends; what does not fit into the queue is dropped, a failure is logged once, and later alerts
    are sent all the same. Of the address only the host is ever logged: a path or a user part is often a secret. A
    redirect counts as a failure: following it would hand `headers` to whom it names. `text` is what Slack, Mattermost
    and Teams webhooks show.

    Args:
        url: http or https.
        on: as in `Action`.
        timeout: seconds for one request, and for what is still unsent when the scope closes.
        headers: further headers, such as an authorization.
        extra: further entries of the JSON object, such as the run's name.
    """

    def __init__(
        self,
        url: str,
        on: str | Iterable[str] = SERIOUS,
        timeout: float = 5.0,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(on)
        self._url, self._timeout, self._extra = address("Webhook(url)", url), timeout, dict(extra or {})
        self._headers = dict(headers or {})
        self._queue: queue.Queue[bytes | None] = queue.Queue(maxsize=100)
        self._thread: threading.Thread | None = None
        self._failed = False

    def act(self, alert: Alert) -> None:
        """Hand the alert to the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="flowscope webhook", daemon=True)
            self._thread.start()
        data = {key: value for key, value in alert.to_json().items() if key != "type"}
        payload = {"text": str(alert), "alert": data, **self._extra}
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(json.dumps(payload, default=str).encode())

    def _send_all(self) -> None:
        while (body := self._queue.get()) is not None:
            try:
                post(self._url, body, self._headers, self._timeout)
            except Exception as error:  # OSError, ValueError, HTTPException: a server and an address can do anything
                if not self._failed:
                    LOGGER.warning("flowscope: the webhook at %s failed: %s", _host(self._url), reason(error))
                self._failed = True

    def write(self, event: Event) -> None:
        """Nothing: alerts come by the call."""

    def close(self) -> None:
        """Wait for what is unsent, at most `timeout` seconds."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        thread.join(self._timeout)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leaves a redirect to the handler that makes an error of it."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


def _host(url: str) -> str:
    """What may be told of an address: its host, without user, password, path and query."""
    try:
        return urllib.parse.urlsplit(url).hostname or "(no host)"
    except ValueError:
        return "(no host)"


def address(asked: str, url: str) -> str:
    """Return the address that `asked` was given, refused where it is none of http."""
    scheme, colon, _ = url.partition("://")
    if scheme not in ("http", "https") or not colon:
        raise FlowscopeError(
            f"{asked}: got {scheme + '://...' if colon else 'one without a scheme'}, expected an address that "
            "begins with http:// or https://."
        )
    return url


def post(url: str, body: bytes, headers: Mapping[str, str], timeout: float) -> None:
    """POST JSON; a redirect is a failure."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers}, method="POST")
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout):
        pass


def reason(error: Exception) -> str:
    """What may be told of a failure: messages of `InvalidURL` and `HTTPException` quote the address or the answer."""
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    told = cause.strerror if isinstance(cause, OSError) else None
    return f"{type(cause).__name__}: {told}" if told else type(cause).__name__


class LowerLearningRate(Action):
    """Multiply the learning rate of the parameter groups that hold the alert's place (all of them for the root).

    A scheduler that computes rates from its own base rates overwrites it at its next step: give it too.

    Args:
        factor: between 0 and 1.
        on: as in `Action`.
        scheduler: a `torch.optim.lr_scheduler.LRScheduler` of the same optimizer, whose base rates are multiplied too.
        at_least: no rate is made lower than this.
    """

    every_rank = True

    def __init__(
        self,
        factor: float = 0.5,
        on: str | Iterable[str] = ("exploding_gradient", "update_too_large", "loss_spike"),
        scheduler: Any = None,
        at_least: float = 0.0,
    ) -> None:
        super().__init__(on)
        if not 0 < factor < 1:
            raise FlowscopeError(f"LowerLearningRate(factor): got {factor!r}, expected a number between 0 and 1.")
        self._factor, self._scheduler, self._at_least = factor, scheduler, at_least

    def act(self, alert: Alert) -> None:
        """Lower."""
        if self.scope is None:
            raise FlowscopeError("LowerLearningRate: no scope; give it to flowscope.watch(on_alert=[...]).")
        inside = self.scope.parameters_at(alert.where)
        for optimizer in self.scope.optimizers:
            lowered = []
            for number, group in enumerate(optimizer.param_groups):
                if any(id(parameter) in inside for parameter in group["params"]):
                    self._lower(group)
                    lowered.append(number)
            if lowered:
                LOGGER.warning("flowscope: %s: learning rate of group %s times %g", alert.kind, lowered, self._factor)
            if self._scheduler is not None and getattr(self._scheduler, "optimizer", None) is optimizer:
                rates = self._scheduler.base_lrs
                self._scheduler.base_lrs = [
                    self._lowered(rate) if number in lowered else rate for number, rate in enumerate(rates)
                ]

    def _lower(self, group: dict[str, Any]) -> None:
        rate = group["lr"]
        if hasattr(rate, "fill_"):
            rate.fill_(self._lowered(float(rate)))  # a tensor: compiled optimizers hold on to it
        else:
            group["lr"] = self._lowered(rate)

    def _lowered(self, rate: float) -> float:
        return min(rate, max(self._at_least, rate * self._factor))
