"""The scripts' cases, and the run of one through the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.trials.case import SCRIPTS, Case, script

ROOT = Path(__file__).parents[2]

script("word_language_model", "causality", where=r"rnn")
script("spectrogram", "samples", where=r"level")
script("autoencoder", "loss_path", where=r"fc2|^$|diverg")
script("two_optimizers", "update", where=r"trunk|actor")
script("word_dropout", "determinism", where=r"word_dropout", least="note")
script("accumulate_sum", "accumulation", says=r"\b4(\.0+)?\b|four")
script("accumulate_last", "accumulation", says=r"last|1/3|\b0?\.33|third|cleared|zero_grad|lost|only")
script("clip_before_unscale", "accumulation", says=r"unscale")
script("accumulate_padded", "accumulation", says=r"unequal|padding|tokens|weigh|targets|counted")
script("shifted_twice", "labels", says=r"\b2\b|two|twice")
script("first_batch_only", "data", says=r"same batch|same", least="note")
script("worker_noise", "data", says=r"worker", least="note")
script("adapters", "saving", where=r"adapters")


def run_command(case: Case, faulty: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the findings of `flowscope check --json`, and what the command itself did wrong.

    Status 0 goes with no fail and 1 with one; nothing of what the script saves may lie in the folder it ran in.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = [str(SCRIPTS / case.script), *(["--faulty"] if faulty else [])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "flowscope", "check", "--json", *program],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            timeout=300,
            check=False,
        )
        left = sorted(path.name for path in Path(folder).iterdir())
    try:
        findings = json.loads(done.stdout)
    except json.JSONDecodeError:
        return [], [f"no JSON (status {done.returncode}): {(done.stdout + done.stderr)[-400:]!r}"]
    expected = int(any(one["status"] == "fail" for one in findings))
    wrong = [f"left {', '.join(left)}"] if left else []
    if done.returncode != expected:
        wrong.append(f"status {done.returncode} where {expected} was due")
    return findings, wrong
