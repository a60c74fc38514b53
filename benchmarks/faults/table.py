"""The tables, as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults import rules
from benchmarks.faults.scoring import LOUD, OURS, Run, Score, add_up, by, judge

DETECTORS = (OURS, *rules.RULES)
HEAD = (
    "| detector | faulty runs alerted | right kind | right place | false-alarm runs | precision | median delay |\n"
    "|---|---|---|---|---|---|---|"
)
BEGIN, END = "<!-- tables: written by python -m benchmarks.faults -->", "<!-- end of tables -->"


def alarms_text(run: Run, detector: str = OURS) -> str:
    """The loud alarms of a run in one line."""
    loud = [alarm for alarm in run["alarms"][detector] if alarm[3] in LOUD]
    return ", ".join(f"{kind} @ {where or 'model'} ({step})" for step, kind, where, _ in loud) or "silent"


def mark(run: Run) -> str:
    """How flowscope did on one run."""
    if run["wrong"]:
        return "MISLABELLED"
    verdict = judge(run)
    if run["score"] == "healthy":
        return "FALSE" if verdict.alerted or verdict.early else "ok"
    if not verdict.alerted:
        return "MISSED"
    if verdict.early:
        return "EARLY"
    if not verdict.kind:
        return "KIND"
    return "PLACE" if verdict.placed is False else "ok"


def line(run: Run) -> str:
    """One run, for the terminal."""
    name = f"{run['case']} {'s' + str(run['seed']) if run['variation'] is None else 'v' + str(run['variation'])}"
    extra = f" [{run['wrong']}]" if run["wrong"] else ""
    return f"{name:<9} {run['seconds']:>5.1f}s {mark(run):<11}{extra} first {run['first']}: {alarms_text(run)[:160]}"


def part(count: int, whole: int) -> str:
    """Such as 12/13 (92 %)."""
    return f"{count}/{whole} ({100 * count / whole:.0f} %)" if whole else "-"


def row(score: Score) -> str:
    """A detector's line."""
    delay = "-" if score.median_delay is None else f"{score.median_delay:.0f}"
    cells = (
        score.detector,
        part(score.alerted, score.faulty),
        part(score.kind, score.faulty),
        part(score.placed, score.placeable),
        part(score.false, score.healthy),
        f"{score.precision:.2f}",
        delay,
    )
    return "| " + " | ".join(cells) + " |"


def detectors(runs: Sequence[Run]) -> str:
    """Every detector over the runs."""
    return "\n".join([HEAD, *(row(add_up(runs, name)) for name in DETECTORS)])


def families(runs: Sequence[Run]) -> str:
    """Flowscope by family."""
    lines = [
        "| family | faulty runs alerted | right kind | right place | false-alarm runs | median delay |",
        "|" + "---|" * 6,
    ]
    for family, group in by(runs, "family").items():
        score = add_up(group)
        delay = "-" if score.median_delay is None else f"{score.median_delay:.0f}"
        cells = (
            family,
            part(score.alerted, score.faulty),
            part(score.kind, score.faulty),
            part(score.placed, score.placeable),
            part(score.false, score.healthy),
            delay,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cases(runs: Sequence[Run]) -> str:
    """One line a case: what was expected, what flowscope says at the first seed, how many seeds are right, who else."""
    lines = [
        "| run | what | accepted | flowscope, seed 0 | right kind | right place | delays | others that alert |",
        "|" + "---|" * 8,
    ]
    for name, group in by(runs, "case").items():
        first, verdicts = group[0], [judge(run) for run in group]
        others = [d for d in DETECTORS[1:] if any(judge(run, d).alerted for run in group)]
        healthy = first["score"] == "healthy"
        placed = [v.placed for v in verdicts if v.placed is not None]
        delays = [str(v.delay) for v in verdicts if v.delay is not None]
        note = {"apart": " (apart)"}.get(first["score"], "")
        wrong = sum(bool(run["wrong"]) for run in group)
        cells = (
            name,
            first["title"] + note + (f" ({wrong} of {len(group)} do not show the label)" if wrong else ""),
            ", ".join(first["kinds"]) or "silence",
            alarms_text(first),
            f"{sum(not (v.alerted or v.early) for v in verdicts)}/{len(group)} silent"
            if healthy
            else f"{sum(v.kind for v in verdicts)}/{len(group)}",
            f"{sum(placed)}/{len(placed)}" if placed else "-",
            ", ".join(delays) if not healthy and delays else "-",
            ", ".join(SHORT[d] for d in others) or "-",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


SHORT = dict(zip(DETECTORS[1:], ("AT", "SD", "sd", "DD", "DC", "dc", "10x"), strict=True))


def split(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Listed runs and variations."""
    return [r for r in runs if r["variation"] is None], [r for r in runs if r["variation"] is not None]


def whole(runs: Sequence[Run], seconds: float = 0.0) -> str:
    """What the terminal shows at the end."""
    listed, varied = split(runs)
    mislabelled = [f"{r['case']}/{r['seed']}" for r in runs if r["wrong"]]
    parts = [f"\nlisted runs ({len(listed)})\n{detectors(listed)}\n\n{families(listed)}"]
    if varied:
        parts.append(f"\nvariations ({len(varied)})\n{detectors(varied)}\n\n{families(varied)}")
    if mislabelled:
        parts.append(f"\nwithout the symptom of their label, not counted: {', '.join(mislabelled)}")
    bad = [line(run) for run in runs if mark(run) not in ("ok", "MISLABELLED") and run["score"] != "apart"]
    parts.append("\nnot right:\n" + "\n".join(bad) if bad else "\nall right")
    return "\n".join([*parts, f"\n{seconds:.0f} s"])


def write(path: Path, runs: Sequence[Run]) -> None:
    """Replace the tables of a page."""
    listed, varied = split(runs)
    unshown = sum(bool(run["wrong"]) for run in listed), sum(bool(run["wrong"]) for run in varied)
    short = ", ".join(f"{short} {name}" for name, short in SHORT.items())
    text = "\n\n".join(
        [
            BEGIN,
            f"**The runs of the list**, {len(listed)} ({unshown[0]} without the symptom of their label, not counted):",
            detectors(listed),
            families(listed),
            f"**Variations drawn by seed**, {len(varied)} ({unshown[1]} without the symptom, not counted):",
            detectors(varied),
            families(varied),
            f"**Each case.** {short}.",
            cases(listed),
            END,
        ]
    )
    page = path.read_text()
    path.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: text, page, flags=re.S))
