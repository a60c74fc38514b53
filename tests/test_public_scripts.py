"""Two of the public training scripts (`make scripts` runs all): nets with their own losses, and a lone layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.public_scripts import NET, SCRIPTS, run


def test_each_script_has_its_flows_written_down() -> None:
    assert sorted(NET) == sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "data")
    assert len(NET) >= 15


@pytest.mark.parametrize("name", ["wgan_gp", "regression"])
def test_no_false_alarm_right_losses_and_right_flows(name: str, tmp_path: Path) -> None:
    outcome = run(name, tmp_path)
    assert outcome.wrong == []
    bare = subprocess.run([sys.executable, SCRIPTS / f"{name}.py"], capture_output=True, text=True, check=True)
    assert float(bare.stdout.split()[-1]) == outcome.figure  # unmodified, and trained to the last digit as alone
