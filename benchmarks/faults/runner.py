"""Runs a case once, with flowscope at its defaults and a spectator for the others' rules, and keeps what was seen.

The records are kept too (`runs/faults`), so that changed detectors are asked again without training.
"""

from __future__ import annotations

import json
import math
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flowscope
from benchmarks.faults import rules
from benchmarks.faults.case import Case, Draw, Program, Shown
from benchmarks.faults.numbers_seen import Probe, Spectator, pack, unpack
from benchmarks.faults.scoring import OURS, Run
from flowscope.config import WatchConfig
from flowscope.detectors import DetectorSet
from flowscope.records import Alert, Record, RunHeader
from flowscope.sinks import JsonlSink

FOLDER = Path("runs/faults")


def folder_of(case: Case, draw: Draw, root: Path = FOLDER) -> Path:
    """Where one run is kept."""
    return root / case.id / (f"seed{draw.seed}" if draw.variation is None else f"variation{draw.variation}")


def train(program: Program, folder: Path | None) -> tuple[list[Alert], Spectator, Shown]:
    """The whole run."""
    alerts: list[Alert] = []
    losses: list[float] = []
    sinks: list[Any] = [JsonlSink(folder)] if folder is not None else []
    with flowscope.watch(
        program.model, program.optimizer, on_alert=alerts.append, sinks=sinks, **program.watch
    ) as scope:
        spectator = Spectator(program)
        for k in range(program.steps):
            spectator.begin(k)
            loss = program.step(k)
            scope.step(loss=loss)
            spectator.end(k, loss)
            losses.append(float(loss))
    spectator.close()
    quality = program.quality() if program.quality is not None else -losses[-1]
    return alerts, spectator, Shown(losses, quality)


def run_case(case: Case, draw: Draw, *, root: Path | None = FOLDER) -> Run:
    """Run a case and return what `scoring` reads; with `root` it is kept there and not trained again."""
    if case.ranks > 1:
        from benchmarks.faults.ranks import run_ranks

        return run_ranks(case, draw, root)
    folder = folder_of(case, draw, root) if root is not None else None
    if folder is not None and (folder / "run.json").exists():
        return json.loads((folder / "run.json").read_text())
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(draw.seed)
        program = case.build(draw)
        seen = train(program, folder)
    return describe(case, draw, program, seen, time.perf_counter() - started, folder)


def others(run: Run, probes: list[Probe]) -> dict[str, Any]:
    """What the other tools' rules say about the numbers seen."""
    found = {name: rules.apply(name, probes, run["steps"], run["epoch"]) for name in rules.RULES}
    return {name: [[step, kind, where, "warning"] for step, kind, where in alarms] for name, alarms in found.items()}


def keep(run: Run, probes: list[Probe], folder: Path) -> None:
    """Write a run beside its records; `run.json` last, as it says that the run is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "probes.json").write_text(json.dumps(pack(probes), default=float))
    (folder / "run.json").write_text(json.dumps(run, default=float))


def describe(
    case: Case,
    draw: Draw,
    program: Program,
    seen: tuple[list[Alert], Spectator, Shown],
    seconds: float,
    folder: Path | None,
) -> Run:
    """What `scoring` reads of a run that `train` has seen; kept in `folder` too."""
    alerts, spectator, shown = seen
    run = facts(case, draw, program, shown)
    run["seconds"] = round(seconds, 2)
    run["alarms"] = {OURS: plain(alerts), **others(run, spectator.probes)}
    if folder is not None:
        keep(run, spectator.probes, folder)
    return run


def facts(case: Case, draw: Draw, program: Program, shown: Shown) -> Run:
    """All of a run but its alarms."""
    quality = shown.quality if math.isfinite(shown.quality) else None
    return {
        "case": case.id,
        "title": case.title,
        "family": case.family,
        "score": case.score,
        "kinds": list(case.kinds),
        "place": program.place,
        "first": program.first,
        "steps": program.steps,
        "epoch": program.epoch,
        "seed": draw.seed,
        "variation": draw.variation,
        "taken": draw.taken,
        "wrong": program.shows(shown),
        "quality": quality,
        "loss": [float(f"{loss:.4g}") for loss in shown.losses[:: max(1, len(shown.losses) // 10)]],
    }


def plain(alerts: Sequence[Alert]) -> list[list[Any]]:
    """Raised alerts as [step, kind, where, severity]; the step is the record's, `since` may be earlier."""
    return [[a.step, a.kind, a.where, a.severity] for a in alerts if a.state == "raised"]


def replay(run: Run, folder: Path) -> Run:
    """The run with the alarms that today's detectors and rules raise on what was kept of it."""
    alerts: list[Alert] = []
    detectors, header = DetectorSet(WatchConfig()), None
    for line in (folder / "flowscope.jsonl").read_text().splitlines():
        data = json.loads(line)
        if data["type"] == "run":
            header = RunHeader.from_json(data)
        elif data["type"] == "record" and header is not None:
            alerts += detectors.check(Record.from_json(data, header), header)
    probes = unpack(json.loads((folder / "probes.json").read_text()))
    return {**run, "alarms": {OURS: plain(alerts), **others(run, probes)}}


def quiet_torch() -> None:
    """One thread: the runs are small, and others may run beside."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")
