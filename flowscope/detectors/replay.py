"""Judge a recorded run again, without the model: the same detectors over its records, with other limits if asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowscope.config import WatchConfig
from flowscope.detectors import Detector, DetectorSet
from flowscope.records import Alert, Record, RunHeader


def replay(
    header: RunHeader, records: Iterable[Record], config: WatchConfig, further: Sequence[Detector | type[Detector]] = ()
) -> tuple[list[Alert], DetectorSet]:
    """Run all detectors over records in the order of their steps.

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
    for record in sorted(records, key=lambda record: record.step):
        alerts += detectors.check(record, header)
    return alerts, detectors
