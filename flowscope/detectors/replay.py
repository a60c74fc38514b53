"""Judge a recorded run again, without the model: the same detectors over its records, with other limits if asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowscope.config import WatchConfig
from flowscope.detectors import Detector, DetectorSet
from flowscope.records import Alert, Record, RunHeader

JUDGED = 20_000
"""So many records of a run are judged again at most, that a diagnosis takes seconds."""


def replay(
    header: RunHeader, records: Iterable[Record], config: WatchConfig, further: Sequence[Detector | type[Detector]] = ()
) -> tuple[list[Alert], DetectorSet]:
    """Run all detectors over records in the order of their steps.

    Of a run of more than `JUDGED` records each n-th is judged (`stride`).

    Args:
        header: what the rows of the metrics are.
        records: sampled records, and unsampled ones of which only the finiteness canary spoke (`Run.unsampled`).
        config: the limits.
        further: detectors of one's own beside the built-in ones.

    Returns:
        The alerts, raised and resolved, as a live run would have given them, and the detectors as they are at the end.
    """
    detectors = DetectorSet(config, further=further)
    alerts: list[Alert] = []
    ordered = sorted(records, key=lambda record: record.step)
    for record in ordered[:: stride(len(ordered))]:
        alerts += detectors.check(record, header)
    return alerts, detectors


def stride(count: int) -> int:
    """Each how-manieth of so many records is judged."""
    return -(-count // JUDGED) or 1
