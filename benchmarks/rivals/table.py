"""The tables of docs/rivals.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.rivals import harm, programs
from benchmarks.rivals.answers import Answer
from benchmarks.rivals.columns import COLUMNS
from benchmarks.rivals.loops import Shelf
from benchmarks.rivals.mutants import Mutant
from benchmarks.rivals.score import Score
from benchmarks.rivals.students import Student

BEGIN, END = "<!-- {}: written by python -m benchmarks.rivals --write -->", "<!-- end of {} -->"
"""Around each part of the page: a student by its name, `traincheck`, `reports`."""
HELD_OUT = "bert"
"""Of this student, no single answer was looked at before the score that is called first."""


def share(part: int, whole: int) -> str:
    """Return such as `31 of 40 (78 %)`."""
    return f"{part} of {whole} ({100 * part / whole:.0f} %)" if whole else "-"


def counted(student: Student, verdicts: Mapping[Mutant, str]) -> str:
    """Return what became of the mutants of one student."""
    found = Counter(verdicts.values())
    parts = ", ".join(f"{found[verdict]} {verdict}" for verdict in harm.VERDICTS if found[verdict])
    return f"{student.name}: {len(verdicts)} mutants: {parts}."


def of_student(student: Student, scores: Mapping[str, Score]) -> str:
    """Return the table of all columns over one student."""
    held_out = " (held out)" if student.name == HELD_OUT else ""
    lines = [
        f"| {student.name}{held_out} | found | component as labelled | component as changed | clean runs flagged |",
        "|---|---|---|---|---|",
    ]
    for column in COLUMNS:
        if column in scores:
            one = scores[column]
            whole, clean = len(one.told), len(one.clean)
            cells = (share(one.found, whole), share(one.as_labelled, whole), share(one.as_written, whole))
            lines.append(f"| {column} | {' | '.join(cells)} | {one.false} of {clean} |")
    return "\n".join(lines)


def singly(scores: Mapping[str, Score]) -> str:
    """Return each harmful mutant: what is changed, and which component each way of flowscope names."""
    ways = [column for column in COLUMNS if column in scores and column.startswith("flowscope")]
    first = scores[ways[0]]
    lines = [f"| mutant | labelled; changes | {' | '.join(way.removeprefix('flowscope, ') for way in ways)} |"]
    lines.append("|---" * (2 + len(ways)) + "|")
    for name, (label, changed) in first.truth.items():
        said = [told(scores[way].told[name], scores[way].named[name]) for way in ways]
        lines.append(f"| {name} | {label}; {', '.join(sorted(changed))} | {' | '.join(said)} |")
    return "\n".join(lines)


def told(answer: Answer, named: str) -> str:
    """Return the component, `found` where none is named, `-` where nothing is said."""
    return (named or "found") if answer.found else "-"


def of_shelf(shelf: Shelf, answers: Mapping[str, tuple[dict[str, Answer], dict[str, Answer]]]) -> str:
    """Return the table of the programs of one collection; marks are of the faulty one, `twin` of the healthy one."""
    lines = [f"| program | reported | {' | '.join(programs.WAYS)} | twin |", "|---" * (3 + len(programs.WAYS)) + "|"]
    for name, one in shelf.told.items():
        if one.reason:
            lines.append(f"| {name} | {one.sources} |{' |' * len(programs.WAYS)} left out: {one.reason} |")
            continue
        faulty, healthy = answers[name]
        cells = [word(faulty[way]) if way in faulty else "" for way in programs.WAYS]
        false = ", ".join(way for way, answer in healthy.items() if answer.found)
        lines.append(f"| {name} | {one.sources} | {' | '.join(cells)} | {false or 'clean'} |")
    whole = [name for name, one in shelf.told.items() if not one.reason]
    counts = [sum(way in answers[name][0] and answers[name][0][way].found for name in whole) for way in programs.WAYS]
    some = sum(any(answer.found for answer in answers[name][0].values()) for name in whole)
    lines.append(f"| of {len(whole)}: {some} some way | | {' | '.join(map(str, counts))} | |")
    return "\n".join(lines)


def word(answer: Answer) -> str:
    """Return what is said in a word or two."""
    if not answer.found:
        return "-"
    if answer.phase:
        return f"{answer.phase}, step {answer.step}"
    return f"{answer.metric}, step {answer.step}" if answer.metric else answer.words


def write(page: Path, name: str, tables: Sequence[str]) -> None:
    """Put the tables of one part between its marks on a page; what else stands there is left alone."""
    text, (begin, end) = page.read_text(), (mark.format(name) for mark in (BEGIN, END))
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text("\n\n".join([f"{before}{begin}", *tables, f"{end}{after}"]))
