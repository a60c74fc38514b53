"""What one rank does on its own never changes the training, and never mixes steps: random scripts on two to four ranks.

`python tests/test_rank_scripts.py FOLDER` judges what a longer run of tests/rank_scripts_program.py wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rank_scripts_program import AFTER, LASTING
from two_ranks import torchrun

SCRIPTS = 20
FIRST = 1000
REJOIN = 10
"""Steps after a rank's own way within which records are everybody's again."""

LEAVES_OUT = {"skip": 1, "skip3": 3, "skip6": 6, "raise": 1}
"""What leaves out the optimizer's step, and for how many iterations."""

Told = dict[str, Any]


def judge(ranks: list[Told]) -> list[str]:
    """What is wrong with the ranks of one script."""
    wrong, script = [], ranks[0]["script"]
    for place, told in enumerate(ranks):
        if told["watched"]["losses"] != told["bare"]["losses"]:
            wrong.append(f"rank {place}: the losses are not the bare run's")
        if (more := _waited(told["watched"]["seconds"]) - _waited(told["bare"]["seconds"])) > 3.0:
            wrong.append(f"rank {place}: {more:.1f} s more")
    truth = _truth(ranks)
    steps = [[_step_of(record, truth) for record in told["watched"]["records"]] for told in ranks]
    for place, (told, found) in enumerate(zip(ranks, steps, strict=True)):
        for record, step in zip(told["watched"]["records"], found, strict=True):
            if not record["flags"] and step is None and not _apart(record) and not _made_again(record):
                wrong.append(f"rank {place}: record {record['step']} is no step of all ranks, and has no flag")
            if not record["flags"] and step is not None and record["loss"] is not None and not _own_loss(record):
                mean = np.mean([float.fromhex(told["bare"]["losses"][step]) for told in ranks])
                if abs(record["loss"] - mean) > 1e-6 * abs(mean) and not _given_twice(script):
                    wrong.append(f"rank {place}: record {record['step']} has the loss of another step")
    if not any(what in LASTING for _, _, what in script["events"]):
        wrong += _rejoined(ranks, script, steps)
    return wrong


def _waited(seconds: list[float]) -> float:
    """What steps took beyond three times the usual: what watching itself takes is no wait."""
    return float(np.maximum(np.array(seconds) - 3 * np.median(seconds), 0.0).sum())


def _truth(ranks: list[Told]) -> list[tuple[int, float]]:
    """Iterations, and the RMS over all ranks of what the embedding gave in it, from the bare run's own hooks.

    What all ranks left out is of the next step, as in one process, unless its gradients were seen to be dropped.
    """
    events, truth = ranks[0]["script"]["events"], []
    held: list[float] = []
    for step in range(ranks[0]["script"]["steps"]):
        seen = np.concatenate([np.reshape(told["bare"]["squares"][step], (-1, 2)) for told in ranks])
        held += [*seen.reshape(-1)]
        for rows in (seen, np.reshape(held, (-1, 2))):
            truth.append((step, float(np.sqrt(rows[:, 0].sum() / rows[:, 1].sum()))))
        left_out = {rank for at, rank, what in events if what in LEAVES_OUT and at <= step < at + LEAVES_OUT[what]}
        held = held if len(left_out) == len(ranks) else []
    return truth


def _step_of(record: Told, truth: list[tuple[int, float]]) -> int | None:
    """The iteration whose numbers a record has: of all ranks, and of nothing else."""
    if "act_rms" not in record["metrics"]:
        return None
    near = np.abs(np.array([value for _, value in truth]) / record["metrics"]["act_rms"][0] - 1)
    return truth[int(near.argmin())][0] if near.min() < 1e-6 else None


def _apart(record: Told) -> bool:
    return any("ranks observed this step" in note for note in record["notes"])


def _made_again(record: Told) -> bool:
    """Whether all ranks made a step again, without a pass of the model."""
    return bool(np.isnan(record["metrics"]["act_rms"]).all())


def _given_twice(script: Told) -> bool:
    """Whether a loss is given, and then the optimizer raises: the next loss joins it."""
    return script["loss"] == "before" and any(what == "optimizer_raises" for _, _, what in script["events"])


def _own_loss(record: Told) -> bool:
    return any("rank's own" in note for note in record["notes"])


def _rejoined(ranks: list[Told], script: Told, steps: list[list[int | None]]) -> list[str]:
    """Ten iterations after the last event, records are those of all ranks, and the same on each."""
    wrong, since = [], script["steps"] - AFTER + REJOIN
    count = (AFTER - REJOIN) // script["every"]
    first = ranks[0]["watched"]["records"][-count:]
    for place, (told, found) in enumerate(zip(ranks, steps, strict=True)):
        tail = told["watched"]["records"][-count:]
        if any(step is None or step < since for step in found[-count:]):
            wrong.append(
                f"rank {place}: the last records are of the iterations {found[-count:]}, from {since} on expected"
            )
        # NaN too
        wrong += [
            f"rank {place}: record {a['step']} is not the first rank's {b['step']}"
            for a, b in zip(tail, first, strict=True)
            if repr((a["step"], a["flags"], a["metrics"])) != repr((b["step"], b["flags"], b["metrics"]))
        ]
    return wrong


def judged(folder: Path) -> dict[str, list[str]]:
    """What is wrong with each script whose results are in a folder."""
    found = {}
    for first in sorted(folder.glob("*-0.json"), key=lambda path: int(path.stem.partition("-")[0])):
        seed = first.stem.partition("-")[0]
        ranks = [json.loads((folder / f"{seed}-{place}.json").read_text()) for place in range(4)]
        found[seed] = judge([told for told in ranks if "watched" in told])
    return found


def test_twenty_scripts(tmp_path: Path) -> None:
    torchrun("rank_scripts_program.py", str(tmp_path), str(FIRST), str(SCRIPTS), ranks=4, limit=280)
    found = judged(tmp_path)
    assert len(found) == SCRIPTS
    assert not {seed: wrong for seed, wrong in found.items() if wrong}


if __name__ == "__main__":
    results = judged(Path(sys.argv[1]))
    for number, wrong in results.items():
        if wrong:
            print(
                number, json.loads((Path(sys.argv[1]) / f"{number}-0.json").read_text())["script"], *wrong, sep="\n   "
            )
    print(len(results), "scripts,", sum(bool(wrong) for wrong in results.values()), "with something wrong")
