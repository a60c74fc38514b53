"""benchmarks/gpu_check.py without a GPU: it says so, and what can run on the CPU does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)


def test_without_a_gpu_it_says_so() -> None:
    assert not torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    result = run()
    assert result.returncode == 2
    assert "no GPU" in result.stdout


def test_checks_run_on_the_cpu() -> None:
    result = run("--device", "cpu", "--only", "ddp,fsdp,syncs")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["pass", "pass", "----"]
    assert "a sum of 1 MiB arrived" in lines[1]


def test_an_unknown_check_is_refused() -> None:
    result = run("--device", "cpu", "--only", "dpp")
    assert result.returncode == 2
    assert "dpp" in result.stdout


@pytest.mark.parametrize("name", ["autograd", "syncs", "scaler", "graphs", "streams", "ddp", "fsdp", "overhead"])
def test_every_check_is_described(name: str) -> None:
    head = SCRIPT.read_text().split('"""')[1]
    assert name in head
