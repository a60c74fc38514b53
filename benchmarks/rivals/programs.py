"""The programs of published reports, asked every way that applies to one.

`limits` and `paired` look at kept runs: the faulty one and its twin of the same seed. A place is not asked for: what is
wrong differs too much between them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import flowscope
from benchmarks.faults import catalogue
from benchmarks.faults.case import Draw
from benchmarks.faults.runner import run_case
from benchmarks.faults.scoring import LOUD, OURS
from benchmarks.rivals import answers
from benchmarks.rivals.answers import SILENT, Answer
from benchmarks.rivals.loops import Told, looped
from benchmarks.rivals.students import FOLDER
from benchmarks.trials import scoring, scripted
from benchmarks.trials.case import CASES

REGISTERED = (scripted,)
"""Its scripts are among the cases."""


def limits(told: Told, faulty: bool, root: Path = FOLDER) -> Answer:
    return answers.limits(looped(told, faulty, 0, root))


def check(told: Told, faulty: bool, root: Path = FOLDER) -> Answer:
    """The first fail; a note where the twin has none such."""
    failed, noted = findings(told, faulty)
    if failed:
        return Answer(True, words=failed[0])
    if faulty and (only := [one for one in noted if one not in findings(told, False)[1]]):
        return Answer(True, words=f"{only[0]} (note)")
    return SILENT


def findings(told: Told, faulty: bool) -> tuple[list[str], list[str]]:
    """Return the trials that fail, and the notes with their places."""
    assert told.build is not None
    loop = told.build(faulty, 0)
    report = flowscope.check(loop.model, loop.loss, loop.batches, optimizer=loop.optimizer)
    failed = [one.trial for one in report.findings if one.status == "fail"]
    return failed, [f"{one.trial} {one.where or ''}".strip() for one in report.findings if one.status == "note"]


def paired(told: Told, faulty: bool, root: Path = FOLDER) -> Answer:
    """The twin; of a healthy one itself."""
    return answers.paired(looped(told, False, 0, root), looped(told, faulty, 0, root))


WAYS: dict[str, Callable[[Told, bool], Answer]] = {
    "limits": limits,
    "check": check,
    "paired": paired,
}


def elsewhere(told: Told, faulty: bool) -> Answer:
    """Return what is said of a program that stands in another corpus."""
    kind, name = told.elsewhere
    if kind == "ranks":
        case = next(one for one in catalogue.CASES if one.id == (name if faulty else "D00"))
        alarms = run_case(case, Draw(0, case=case.id))["alarms"][OURS]
        loud = [alarm for alarm in alarms if alarm[3] in LOUD]
        return Answer(True, loud[0][2], loud[0][1], loud[0][0]) if loud else SILENT
    verdict = scoring.judge(CASES[name], faulty)
    told_by = verdict.by_trial() if faulty else verdict.fails()
    return Answer(True, words=f"{told_by[0]['trial']} ({told_by[0]['status']})") if told_by else SILENT


def asked(told: Told, faulty: bool) -> dict[str, Answer]:
    """Return the answers of every way that applies."""
    if told.build is None:
        return {"limits" if told.elsewhere[0] == "ranks" else "check": elsewhere(told, faulty)}
    said = {name: way(told, faulty) for name, way in WAYS.items()}
    if told.elsewhere[1] and not said["check"].found:
        said["check"] = elsewhere(told, faulty)
    return said
