"""`flowscope check`: a script runs unchanged to its third step, is tried there, and ends without saving anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from two_ranks import LAUNCHER

from flowscope.cli import main
from flowscope.errors import FlowscopeError
from flowscope.torch_internals import has_unscaled
from flowscope.trials.settings import Options, options_of

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
import argparse, atexit, os, pathlib, sys
assert "torch" not in sys.modules, "a script may set the environment before torch is imported"
import torch
from torch import nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--micro", type=int, required=True)
parser.add_argument("--share", type=float, default=1.0)
parser.add_argument("--ranks", action="store_true")
parser.add_argument("--raises", action="store_true")
options = parser.parse_args()

if options.ranks:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
rank = int(os.environ.get("RANK", 0))
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
model = nn.parallel.DistributedDataParallel(net) if options.ranks else net
data = torch.utils.data.TensorDataset(torch.randn(64, 6) + rank, torch.randint(3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=0 if options.ranks else 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
atexit.register(lambda: pathlib.Path("atexit").touch())
print("training")
try:
    for number, (x, y) in enumerate(loader):
        if options.raises:
            raise ValueError("asked for")
        logits = model(x)
        loss = (F.cross_entropy(logits, y) + 0.0 * logits.sum()) * options.share
        loss.backward()
        if number % options.micro == options.micro - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
finally:
    pathlib.Path("finally").touch()
"""


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return started(folder, "-m", "flowscope", "check", *arguments)


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    call = [sys.executable, *arguments]
    return subprocess.run(call, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=400)


reads_projects = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")


@reads_projects
def test_a_healthy_script_is_tried_and_saves_nothing(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.flowscope]\nskip = ["signal", "overfit"]\n')
    done = check(tmp_path, "--steps", "2", "--json", "train.py", "--micro", "2", "--share", "0.5")
    assert done.returncode == 0, done.stderr
    assert "training" in done.stderr
    findings = {finding["trial"]: finding for finding in json.loads(done.stdout)}
    assert not {"signal", "overfit"} & findings.keys()
    # clipped by the true norm, and two micro-batches of equal size
    assert findings["accumulation"]["status"] == "pass"
    assert "2 micro-batches" in findings["accumulation"]["message"]
    assert {findings[name]["status"] for name in ("samples", "gradient", "update", "saving", "data")} == {"pass"}
    assert not (tmp_path / "atexit").exists()
    assert not (tmp_path / "finally").exists()


def test_a_fault_of_the_loop_is_status_one(tmp_path: Path) -> None:
    done = check(tmp_path, "--steps", "1", "--only", "accumulation,data", "train.py", "--micro", "4")
    assert done.returncode == 1, done.stderr
    assert "the gradient is 4 times that of one batch of the same samples" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 fail, 0 note, 0 skipped, 1 pass"
    assert not (tmp_path / "finally").exists()


def test_a_script_that_fails_is_status_two_with_its_own_traceback(tmp_path: Path) -> None:
    done = check(tmp_path, "train.py", "--micro", "1", "--raises")
    assert done.returncode == 2
    assert "ValueError: asked for" in done.stderr
    assert "it raised ValueError after 0 optimizer steps, expected 3" in done.stderr
    assert "flowscope/" not in done.stderr.partition("Traceback")[2]


def test_a_script_that_needs_arguments_says_so_itself(tmp_path: Path) -> None:
    done = check(tmp_path, "train.py")
    assert done.returncode == 2
    assert "required: --micro" in done.stderr
    assert "it left with status 2 before it made an optimizer" in done.stderr


def test_two_ranks_end_alike_and_one_prints(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    call = ["-m", "flowscope", "check", "--steps", "1", "--only", "accumulation,data", "train.py"]
    done = started(tmp_path, *LAUNCHER, *call, "--micro", "4", "--ranks")
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("the gradient is 4 times") == 1
    assert done.stdout.count("1 fail, 0 note, 0 skipped, 1 pass") == 1


@pytest.mark.parametrize("same", [True, False])
def test_two_ranks_that_are_given_the_same_batches_are_told(tmp_path: Path, same: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("+ rank", "") if same else SCRIPT)
    call = ["-m", "flowscope", "check", "--steps", "1", "--only", "data", "train.py", "--micro", "1", "--ranks"]
    done = started(tmp_path, *LAUNCHER, *call)
    assert done.returncode == int(same), done.stderr
    assert done.stdout.count("two ranks are given the same batches") == int(same)


def test_a_scaler_says_whether_gradients_are_unscaled() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    assert not has_unscaled(scaler)
    scaler.unscale_(optimizer)
    assert has_unscaled(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert not has_unscaled(scaler)


def test_wrong_calls_are_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["check"], "no script was given"),
        (["check", "--steps", "0", "train.py"], "got 0, expected 1 or more"),
        (["check", "--only", "nothing", "train.py"], "got the trial 'nothing', expected some of causality, samples"),
        (["check", "no_such_file.py"], "there is no file 'no_such_file.py'"),
    ):
        assert main(arguments) == 2
        assert says in capsys.readouterr().err


@reads_projects
def test_the_project_names_trials_and_the_command_line_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pyproject.toml"
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    file.write_text('[tool.flowscope]\nonly = ["data", "saving"]\nskip = ["data"]\n')
    assert options_of(3, None, None) == Options(3, ("data", "saving"), ("data",))
    assert options_of(3, "update", "") == Options(3, ("update",), ())
    for content, says in (("skip = 3", "expected a list of names"), ('skip = ["x"]', "trial 'x'"), ("skip", "read")):
        file.write_text(f"[tool.flowscope]\n{content}\n")
        with pytest.raises(FlowscopeError, match=says):
            options_of(3, None, None)
