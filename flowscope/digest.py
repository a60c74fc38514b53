"""What became of a run, told once when it ends: to a webhook, to Slack, or to a command that sends mail. No torch.

scope = flowscope.watch(model, optimizer, sinks=[Digest("https://hooks.example/T0", name="run a")])
"""

from __future__ import annotations

import atexit
import json
import math
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flowscope.actions import address, post, reason
from flowscope.diagnosis import diagnosis, paired
from flowscope.errors import FlowscopeError
from flowscope.faults import LOGGER
from flowscope.records import ALL_DIGITS, Alert, Event, Record, strict_json
from flowscope.terminal import duration

LONGEST = 2900
"""Characters of a block of Slack's."""


class Digest:
    """A sink that says at the end how long the run took, how the loss went, and what was raised, stands, was resolved.

    It is sent when the scope is closed, at the end of the process at the latest; a failure is logged and costs nothing
    else. By default the body is `{"text": ..., "run": {...}}`, which Mattermost and Teams show too.

    Args:
        url: http or https, where the digest is posted; None posts nothing.
        name: of the run, in the first line.
        slack: make the body as Slack's incoming webhooks take it: `text`, and `blocks` with the lines.
        command: a program and its arguments that gets the text on its standard input, such as
            ["mail", "-s", "{subject}", "me@example.org"]; `{subject}` becomes the first line. No shell is involved.
        timeout: seconds for either.
        headers: further headers of the request.

    Raises:
        FlowscopeError: neither an address nor a command was given, or one of the wrong kind.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        name: str = "run",
        slack: bool = False,
        command: Sequence[str] | None = None,
        timeout: float = 10.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if url is None and command is None:
            raise FlowscopeError(
                "Digest(): got neither url nor command, expected an address to post to or a program that sends mail: "
                'Digest("https://...") or Digest(command=["mail", "-s", "{subject}", "me@example.org"]).'
            )
        if isinstance(command, str):
            raise FlowscopeError(f"Digest(command=...): got {command!r}, expected a list: {command.split()!r}.")
        self._url = None if url is None else address("Digest(url)", url)
        self._name, self._slack, self._command = name, slack, command
        self._timeout, self._headers = timeout, dict(headers or {})
        self._course = _Course()
        self._sent = False
        atexit.register(self.close)

    def write(self, event: Event) -> None:
        """Remember what the digest tells."""
        self._course.take(event)

    def close(self) -> None:
        """Send it, once."""
        atexit.unregister(self.close)
        if self._sent:
            return
        self._sent = True
        subject, *rest = self._course.lines(self._name)
        if self._url is not None:
            self._try(self._post, self._url, subject, rest)
        if self._command is not None:
            self._try(self._mail, [*self._command], subject, rest)

    def _try(self, send: Any, *told: Any) -> None:
        try:
            send(*told)
        except Exception as error:  # a server and a program can do anything
            LOGGER.warning("flowscope: the digest was not sent: %s", reason(error))

    def _post(self, url: str, subject: str, rest: Sequence[str]) -> None:
        text = "\n".join([subject, *rest])
        body: dict[str, Any] = {"text": text, "run": self._course.data(self._name)}
        if self._slack:
            blocks = [f"*{_escaped(subject)}*", _escaped("\n".join(rest))[:LONGEST]]
            sections = [{"type": "section", "text": {"type": "mrkdwn", "text": words}} for words in blocks if words]
            body = {"text": subject, "blocks": sections}
        post(url, json.dumps(body).encode(), self._headers, self._timeout)

    def _mail(self, command: Sequence[str], subject: str, rest: Sequence[str]) -> None:
        filled = [part.replace("{subject}", subject) for part in command]
        text = "\n".join([subject, "", *rest, ""])
        done = subprocess.run(filled, input=text, text=True, timeout=self._timeout, check=False, capture_output=True)
        if done.returncode:
            raise OSError(done.returncode, f"{command[0]} ended with status {done.returncode}")


class _Course:
    """What is kept of a run for its digest, however long it is."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._losses: list[float] = []
        self._least = math.inf
        self._step, self._records = -1, 0
        self._alerts: list[Alert] = []

    def take(self, event: Event) -> None:
        """Follow the run."""
        if isinstance(event, Alert):
            self._alerts.append(event)
        elif isinstance(event, Record):
            self._step, self._records = event.step, self._records + 1
            if event.loss is not None:
                self._losses = [*self._losses[:1], event.loss]
                self._least = min(self._least, event.loss)

    def lines(self, name: str) -> list[str]:
        """The subject, then the losses and the diagnosis."""
        found = paired(self._alerts)
        standing = sum(incident.resolved is None for incident in found)
        over = len(found) - standing
        told = [f"{standing} stand{'s' * (standing == 1)}" * bool(standing), f"{over} resolved" * bool(over)]
        alerts = (
            f"{len(found)} alert{'s' * (len(found) != 1)} ({', '.join(filter(None, told))})" if found else "no alert"
        )
        took = duration(time.monotonic() - self._begun)
        lines = [f"flowscope: {name}: {self._step + 1} steps in {took}, {alerts}"]
        if self._losses:
            lines.append(f"loss {self._losses[0]:.4g} -> {self._losses[-1]:.4g} (least {self._least:.4g})")
        return [*lines, *(diagnosis(self._alerts) if found else [])]

    def data(self, name: str) -> Any:
        """The same for programs."""
        found = paired(self._alerts)
        return strict_json(
            {
                "name": name,
                "steps": self._step + 1,
                "records": self._records,
                "seconds": round(time.monotonic() - self._begun, 3),
                "first_loss": self._losses[0] if self._losses else None,
                "last_loss": self._losses[-1] if self._losses else None,
                "standing": [i.alert.to_json() for i in found if i.resolved is None],
                "resolved": sum(i.resolved is not None for i in found),
            },
            ALL_DIGITS,
        )


def _escaped(text: str) -> str:
    """As Slack's text wants it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
