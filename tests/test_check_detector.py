"""`check_detector`: every built-in keeps the contract, and one broken detector a kind of breakage is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import pytest
import torch
from test_own_detectors import HeadNorm, LargeActivations, Small

from flowscope.detectors import DETECTORS, Detector, Finding
from flowscope.records import Record, RunHeader
from flowscope.testing import check_detector


@pytest.mark.parametrize("detector", [*DETECTORS, LargeActivations, HeadNorm, Small], ids=lambda kind: kind.__name__)
def test_every_detector_keeps_the_contract(detector: type[Detector]) -> None:
    check_detector(detector)


def broken(find, **more: object) -> type[Detector]:
    """A detector whose findings are those of `find(self, record)`."""

    class Broken(Detector):
        kind = "broken"

        def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
            return find(self, record)

    return type("Broken", (Broken,), more)


def finding(**changes: object) -> Finding:
    return Finding(**{"kind": "broken", "message": "m", **changes})  # type: ignore[arg-type]


def counted(self, record):
    Shared.seen.append(record.step)
    return [finding(value=float(len(Shared.seen)))]


class Shared:
    seen: ClassVar[list[int]] = []


def hidden(self, record):
    self.hidden = getattr(self, "hidden", 0) + 1
    return [finding(value=float(self.hidden))]


def growing(self, record):
    self.state["all"] = np.append(self.state.get("all", np.zeros(0)), 1.0)
    return []


def unsaved(self, record):
    self.state["seen"] = {record.step}
    return []


def changing(self, record):
    record.metrics.get("act_rms", np.zeros(1))[:] = 0.0
    return []


def slow(self, record):
    values = record.metrics.get("act_rms")
    return [finding(value=1.0)] if values is not None and sum(a * b for a in values for b in values) < -1 else []


def with_torch(self, record):
    return [finding()] if torch.tensor(1.0).item() > 2 else []


def reading(read):
    """Finds nothing, but reads a metric as `read` does."""

    def find(self, record):
        values = record.metrics.get("act_rms")
        if values is not None:
            read(values)
        return []

    return find


@pytest.mark.parametrize(
    ("detector", "words"),
    [
        (
            broken(lambda self, record: [*record.metrics["act_rms"][:0]]),
            "hold nothing: step 0 raised KeyError",
        ),
        (broken(reading(lambda values: int(values[0]))), "raised (ValueError|OverflowError): cannot convert"),
        (broken(reading(lambda values: np.nanargmax(values))), "raised ValueError: All-NaN"),
        (broken(reading(lambda values: values[3])), "have one row: step 0 raised IndexError"),
        (broken(reading(lambda values: values + np.ones(5))), "raised ValueError: operands"),
        (broken(lambda self, record: ["bad"]), "expected a Finding"),
        (broken(lambda self, record: [finding(kind="other")]), "got kind 'other'"),
        (broken(lambda self, record: [finding(severity="fatal")]), "got severity 'fatal'"),
        (broken(lambda self, record: [finding(where=3)]), "got where 3"),
        (broken(lambda self, record: [finding(message="m" * 900)]), "message of 900 characters"),
        (broken(lambda self, record: [finding(message="")]), "has no message"),
        (broken(lambda self, record: [finding(value="much")]), "got value 'much'"),
        (broken(lambda self, record: [finding(level="far")]), "got level 'far'"),
        (broken(changing), "the record was changed"),
        (broken(counted), "two fresh instances"),
        (broken(lambda self, record: [finding(value=np.random.rand())]), "two fresh instances"),
        (broken(hidden), "went on differently"),
        (broken(unsaved), "not JSON-ready"),
        (broken(growing), "its state grew"),
        (broken(slow), "a record of 1,000 rows"),
        (broken(with_torch, findings=lambda self, record, header: with_torch(self, torch)), "uses torch"),
        (broken(lambda self, record: [], kind=None), "kind: got None"),
        (broken(lambda self, record: [], level=7), "level: got 7"),
        (broken(lambda self, record: [], yields_to="non_finite"), "yields_to: got 'non_finite'"),
    ],
)
def test_each_breakage_is_refused(detector: type[Detector], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_detector(detector)
