"""Trials: what no limit on a statistic can tell, found by an experiment (`flowscope.check`, `flowscope check`).

    trial.py        the contract: Trial, TrialFinding
    bench.py        what trials work on, and the passes they may ask for
    kept.py         everything put back bitwise
    built_in.py     the trials that come with flowscope, one file each
    sitting.py      all trials one after the other: `flowscope.check`
    findings.py     what they found, printable
    command.py      `flowscope check train.py`: what of a script is listened to (tape.py), and how it ends
    passing.py      the first batches of a trainer, copied as they pass: `FlowscopeCallback(check=True)`

Importing this package does not import torch: the command does so no earlier than the script would.
"""

from __future__ import annotations

from flowscope.errors import CannotJudgeError
from flowscope.trials.findings import CheckReport
from flowscope.trials.trial import Trial, TrialFinding

__all__ = ["CannotJudgeError", "CheckReport", "Trial", "TrialFinding"]
