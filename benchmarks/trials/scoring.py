"""What was found, by the right trial, at the right place; and what fails on a healthy twin."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import flowscope
from benchmarks.trials.case import Case
from benchmarks.trials.scripted import run_command

WEIGHT = {"fail": 2, "note": 1}


@dataclass
class Verdict:
    """How one program was judged."""

    case: Case
    faulty: bool
    findings: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def counting(self) -> list[dict[str, Any]]:
        """Return what is severe enough: fails, or notes of the right trial where a note is all that can be said."""
        least = WEIGHT[self.case.least]
        return [
            one
            for one in self.findings
            if one["status"] == "fail" or (WEIGHT.get(one["status"], 0) >= least and one["trial"] in self.case.trials)
        ]

    def by_trial(self) -> list[dict[str, Any]]:
        """Return those of the right trial."""
        return [one for one in self.counting() if one["trial"] in self.case.trials]

    def at_place(self) -> list[dict[str, Any]]:
        """Return those of the right trial at the right place."""
        return [
            one
            for one in self.by_trial()
            if re.search(self.case.where, one["where"] or "") and re.search(self.case.says, one["message"], re.I)
        ]

    def fails(self) -> list[dict[str, Any]]:
        """Return every fail: on a healthy twin each is false."""
        return [one for one in self.findings if one["status"] == "fail"]

    def same_note(self) -> bool:
        """Return whether a note says of a healthy twin what it says of the faulty program."""
        return any(one["status"] == "note" for one in self.at_place())


def judge(case: Case, faulty: bool) -> Verdict:
    """Run the trials on one program."""
    verdict, start = Verdict(case, faulty), time.monotonic()
    if case.script:
        verdict.findings, verdict.wrong = run_command(case, faulty)
    else:
        assert case.build is not None
        program = case.build(faulty)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                report = flowscope.check(program.model, program.loss, program.batches, optimizer=program.optimizer)
            except Exception as error:
                verdict.wrong.append(f"{type(error).__name__}: {error}")
            else:
                verdict.findings = [as_dict(one) for one in report.findings]
    verdict.seconds = time.monotonic() - start
    return verdict


def as_dict(finding: Any) -> dict[str, Any]:
    return {
        "trial": finding.trial,
        "status": finding.status,
        "where": finding.where,
        "message": finding.message,
    }


def table(pairs: Iterable[tuple[Verdict, Verdict]]) -> str:
    """Return the scores and one row a case."""
    pairs = list(pairs)
    count = len(pairs)
    found, trial, place = (
        sum(bool(which(faulty)) for faulty, _ in pairs)
        for which in (Verdict.counting, Verdict.by_trial, Verdict.at_place)
    )
    fails = sum(bool(healthy.fails()) for _, healthy in pairs)
    notes = sum(healthy.same_note() for _, healthy in pairs)
    errors = sum(bool(one.wrong) for pair in pairs for one in pair)
    lines = [
        f"{count} faults: found {found}, by the right trial {trial}, at the right place {place}; "
        f"twins with a fail {fails}, with the same note {notes}; programs with an error {errors}; "
        f"{sum(one.seconds for pair in pairs for one in pair):.0f} s",
        "",
        "| program | trial | found | by | place | twin |",
        "|---|---|---|---|---|---|",
    ]
    for faulty, healthy in pairs:
        best = (faulty.at_place() or faulty.by_trial() or faulty.counting() or [None])[0]
        how = "yes" if faulty.at_place() else "trial" if faulty.by_trial() else "other" if best else "no"
        where = "-" if best is None else best["where"] or "whole"
        false = ", ".join(sorted({one["trial"] for one in healthy.fails()}))
        false = false or ("same note" if healthy.same_note() else "clean")
        told = "-" if best is None else f"{best['trial']} ({best['status']})"
        lines.append(f"| {faulty.case.name} | {', '.join(faulty.case.trials)} | {how} | {told} | {where} | {false} |")
    return "\n".join(lines)
