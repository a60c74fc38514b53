"""The last records and alerts, in memory."""

from __future__ import annotations

from collections import deque

from flowscope.records import Alert, Event, Record, RunHeader


class MemorySink:
    """Keeps what a notebook or a test wants to look at.

    Args:
        max_records: how many records are kept, the latest.
        max_alerts: how many alerts are kept, the latest.

    Attributes:
        header: the latest header, None before the first.
        records: the latest records, oldest first.
        alerts: the latest alerts, oldest first.
    """

    def __init__(self, max_records: int = 1000, max_alerts: int = 1000) -> None:
        self.header: RunHeader | None = None
        self.records: deque[Record] = deque(maxlen=max_records)
        self.alerts: deque[Alert] = deque(maxlen=max_alerts)

    def write(self, event: Event) -> None:
        """Keep the event."""
        if isinstance(event, RunHeader):
            self.header = event
        elif isinstance(event, Record):
            self.records.append(event)
        else:
            self.alerts.append(event)

    def close(self) -> None:
        """Nothing to release: what was kept stays readable."""
