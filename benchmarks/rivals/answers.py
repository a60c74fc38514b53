"""What flowscope says of a run, each way by itself: limits, check, paired, corridor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

import flowscope
from flowscope.config import WatchConfig
from flowscope.corridor import Corridor
from flowscope.detectors import DetectorSet
from flowscope.records import Alert, Run
from flowscope.sinks import read_run

LOUD = ("warning", "error")


@dataclass(frozen=True)
class Answer:
    """What one way of asking said of one run.

    Attributes:
        found: whether it says that something is wrong.
        where: the place it names.
        words: the kind, phase, metric or sentence.
        step: the step it names.
        phase, metric: beside the place, where they are said.
    """

    found: bool
    where: str = ""
    words: str = ""
    step: int | None = None
    phase: str = ""
    metric: str = ""


SILENT = Answer(False)


@cache
def records(folder: Path) -> Run:
    """Return the kept records of a run."""
    return read_run(folder)


def alerts(run: Run) -> list[Alert]:
    """Return what today's detectors at their defaults raise on the records kept."""
    detectors = DetectorSet(WatchConfig())
    if run.header is None:
        return []
    told = [alert for record in run.records for alert in detectors.check(record, run.header)]
    return [alert for alert in told if alert.state == "raised" and alert.severity in LOUD]


def limits(folder: Path) -> Answer:
    """Return the first warning or error of `watch` at its defaults."""
    told = alerts(records(folder))
    return Answer(True, told[0].where, told[0].kind, told[0].step) if told else SILENT


def corridor(group: Corridor, folder: Path, *, notes: bool = False) -> Answer:
    """Return whether the run parts from a group of clean seeds: as a warning, or with `notes` as a note, too."""
    departure = group.judge(records(folder).records)
    if departure is None or not (departure.certain or notes):
        return SILENT
    return Answer(True, departure.where, str(departure), departure.step, metric=departure.beyond[0].metric)


def group_of(folders: Iterable[Path], name: str = "clean") -> Corridor:
    """Return the corridor of the runs in some folders."""
    return Corridor.of_runs(name, [records(folder) for folder in folders])


def paired(good: Path, bad: Path) -> Answer:
    """Return where the run parts from its twin of the same seed."""
    parting = flowscope.bisect(good, bad)
    if parting.phase is None:
        return SILENT
    return Answer(True, parting.where or "", parting.message, parting.step, phase=parting.phase)


def checked(model: nn.Module, loss: Callable[[Any, Any], Any], batches: Iterable[Any], optimizer: Any) -> Answer:
    """Return the first fail of `flowscope.check`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = flowscope.check(model, loss, batches, optimizer=optimizer)
    failed = [one for one in report.findings if one.status == "fail"]
    return Answer(True, failed[0].where or "", failed[0].trial) if failed else SILENT
