"""`flowscope run`: the script behaves as it does alone, and what it trains is recorded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import accelerate.test_utils
import numpy as np
import pytest
from two_ranks import LAUNCHER

from flowscope.scripts import without_ours
from flowscope.sinks import read_run

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
import os, sys
assert "torch" not in sys.modules, "a script may set the environment before torch is imported"
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def main():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(13):
        x = torch.randn(8, 6)
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex())
    import pickle
    print(type(pickle.loads(pickle.dumps(net))).__name__, __name__, __file__, sys.argv, sys.path[0])
    if "fail" in sys.argv:
        raise ValueError("asked for")
    return 3

if __name__ == "__main__":
    sys.exit(main())
"""


def python(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def test_the_script_is_what_it_is_alone(script: Path, tmp_path: Path) -> None:
    alone = python("project/train.py", "--lr", "-m", cwd=tmp_path)
    run = ("-m", "flowscope", "run", "--log-dir", "logs", "--every", "5")
    watched = python(*run, "project/train.py", "--lr", "-m", cwd=tmp_path)
    assert (watched.stdout, watched.returncode) == (alone.stdout, 3)
    assert alone.stderr == ""
    assert "blocks (blocks, 5 points)" in watched.stderr
    recorded = read_run(tmp_path / "logs")
    assert [record.step for record in recorded.records] == [*range(11)]
    losses = [float.fromhex(line.split()[1]) for line in alone.stdout.splitlines()[:11]]
    assert [record.loss for record in recorded.records] == pytest.approx(losses, rel=1e-6)
    # the input of the first block is data and gets no gradient
    assert np.isfinite(recorded.records[3]["gradient_product"]).tolist() == [False, True, True, True, True]


def test_as_a_module_and_when_it_fails(script: Path, tmp_path: Path) -> None:
    alone = python("-m", "train", "fail", cwd=script.parent)
    watched = python("-m", "flowscope", "run", "--log-dir", "logs", "-m", "train", "fail", cwd=script.parent)
    assert watched.returncode == alone.returncode == 1
    assert watched.stdout == alone.stdout
    trace = [line for line in alone.stderr.splitlines() if "train.py" in line or "asked for" in line]
    assert [line for line in watched.stderr.splitlines() if "train.py" in line or "asked for" in line] == trace
    assert "launch.py" not in watched.stderr
    assert "the run is in" in watched.stderr


TWO = """
import torch, flowscope
from torch import nn
torch.manual_seed(0)
a, b = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2))
ema = torch.optim.swa_utils.AveragedModel(a)
first, second = torch.optim.SGD(a.parameters(), 0.1), torch.optim.Adam(b.parameters())
mine = flowscope.watch(b, second, config={"console": "off"})
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(3):
    loss = a(torch.randn(7, 4)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(first)
    scaler.update()
    first.zero_grad()
    print(loss.item())
    b(torch.randn(5, 3)).sum().backward()
    second.step()
    second.zero_grad()
print(len(mine.records))
"""


def test_several_models_a_scaler_and_a_watch_of_the_scripts_own(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    result = python("-m", "flowscope", "run", "--log-dir", "logs", "two.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    *losses, mine = result.stdout.splitlines()
    assert mine == "3"  # the script's own watch took the model over
    recorded = read_run(tmp_path / "logs")
    assert [record.loss for record in recorded.records] == pytest.approx([float(loss) for loss in losses], rel=1e-5)
    # the scaler was made after the optimizer: gradients are the true ones all the same
    assert recorded.records[1]["grad_norm"].max() < 10
    assert not recorded.superseded


WHOSE = """
import json, torch
from torch import nn
torch.manual_seed(0)

def net(*widths):
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = net(4, 6, 2), net(4, 6, 1)

    def evaluate(self, x):
        return self.actor(x), self.critic(x)

G, D, agent, small, inside, closed = net(3, 8, 2), net(2, 8, 1), Agent(), net(4, 5, 1), net(4, 7, 1), net(4, 9, 1)
oG, oD = torch.optim.SGD(G.parameters(), 0.01), torch.optim.SGD(D.parameters(), 0.01)
oA, oS = torch.optim.Adam(agent.parameters()), torch.optim.SGD(small.parameters(), 0.01)
each = {p: torch.optim.SGD([p], 0.01) for p in inside.parameters()}
oC = torch.optim.LBFGS(closed.parameters(), max_iter=3)

def step_inside(p):
    each[p].step()
    p.grad = None

for p in each:
    p.register_post_accumulate_grad_hook(step_inside)
told = {name: [] for name in ("G", "D", "agent", "small", "inside", "closed")}
for step in range(4):
    fake = G(torch.randn(16, 3))
    oD.zero_grad(set_to_none=False)
    real_loss, fake_loss = 100 - D(torch.randn(16, 2)).mean(), 90 + D(fake.detach()).mean()
    real_loss.backward()
    fake_loss.backward()
    oD.step()
    oG.zero_grad()
    loss = 1 - D(fake).mean()
    loss.backward()
    oG.step()
    told["D"].append((real_loss.item() + fake_loss.item()) / 2)
    told["G"].append(loss.item())

    actions, value = agent.evaluate(torch.randn(8, 4))
    loss = 7 + actions.square().mean() + value.square().mean()
    oA.zero_grad()
    loss.backward()
    oA.step()
    told["agent"].append(loss.item())

    x = torch.randn(8, 4).requires_grad_()
    slope, = torch.autograd.grad(small(x).sum(), x, create_graph=True)
    loss = 20 + (slope - 1).square().mean()
    loss.backward()
    oS.step()
    oS.zero_grad()
    told["small"].append(loss.item())

    loss = 30 + inside(torch.randn(8, 4)).square().mean()
    loss.backward()
    told["inside"].append(loss.item())

    x = torch.randn(8, 4)

    def closure():
        oC.zero_grad()
        loss = 40 + (closed(x) - 1).square().mean()
        loss.backward()
        told["last"] = loss.item()
        return loss

    oC.step(closure)
    told["closed"].append(told.pop("last"))
print(json.dumps(told))
"""


def test_each_model_has_the_loss_that_its_optimizer_steps_on(tmp_path: Path) -> None:
    """Adversaries, methods instead of calls, a loss of gradients, steps inside backward, closures."""
    (tmp_path / "whose.py").write_text(WHOSE)
    result = python("-m", "flowscope", "run", "--log-dir", "logs", "whose.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    runs = [read_run(file.parent) for file in (tmp_path / "logs").rglob("flowscope.jsonl")]
    # each script's losses are about a number of their own
    found = sorted([record.loss for record in run.records] for run in runs)
    assert found == [pytest.approx(losses, rel=1e-5) for losses in sorted(told.values())]


COMPLEX = """
import torch
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    loss = torch.complex(net(torch.ones(3, 2)), net(torch.ones(3, 2))).square().mean()
    loss.backward(torch.ones_like(loss))
    optimizer.step()
print("done")
"""


def test_a_loss_that_is_no_number_does_not_end_the_script(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(COMPLEX)
    result = python("-m", "flowscope", "run", "--log-dir", "logs", "odd.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


ODD = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
if "none" in sys.argv: sys.stderr = None
net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step(loss, **how):
    optimizer.zero_grad(); loss.backward(**how); optimizer.step(); print(loss.detach())
def plain(): return net(torch.randn(8, 6)).square().mean()
step(plain())
step(torch.complex(plain(), plain()), gradient=torch.tensor(1 + 1j))
nn.Linear(2, 2, device="meta")(torch.zeros(2, 2, device="meta")).sum().backward()
net.scale = nn.Parameter(torch.ones(3)); optimizer.add_param_group({"params": [net.scale]})
step((net(torch.randn(8, 6)) * net.scale).square().mean())
step(plain())
if "close" in sys.argv: sys.stderr.close()
"""


@pytest.mark.parametrize("stderr", ["close", "none"])
def test_odd_losses_joining_parameters_and_no_stderr(tmp_path: Path, stderr: str) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    alone = python("odd.py", stderr, cwd=tmp_path)
    watched = python("-m", "flowscope", "run", "--every", "1", "--log-dir", "log", "odd.py", stderr, cwd=tmp_path)
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout) == (0, alone.stdout)
    assert "Traceback" not in watched.stderr
    losses = [record.loss for record in read_run(tmp_path / "log").records]
    printed = [float(line[7:-1]) for line in alone.stdout.splitlines() if "j" not in line]
    assert losses == [pytest.approx(printed[0], abs=1e-4), None, *(pytest.approx(one, abs=1e-4) for one in printed[1:])]


def test_nothing_to_watch_is_said(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("print('done')")
    result = python("-m", "flowscope", "run", "none.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "done\n")
    assert "nothing was watched" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("missing.py",), "missing.py"), (("-m", "no.such"), "no.such"), ((), "no script"), (("--set", "x=1", "a"), "x")],
)
def test_wrong_calls(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    result = python("-m", "flowscope", "run", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr


def test_ctrl_c_reaches_the_script(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        SCRIPT.replace("range(13)", "range(10**9)").replace(
            "    sys.exit(main())",
            "    try:\n        main()\n    except KeyboardInterrupt:\n        print('saved')\n        sys.exit(7)",
        )
    )
    command = [sys.executable, "-u", "-m", "flowscope", "run", "--log-dir", "logs", "long.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # a shell starts what runs in the background deaf to Ctrl-C, and a child would inherit that
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hears
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it trains
        time.sleep(0.2)
        # now and then an interrupt is lost under load; where is not known yet
        for _ in range(6):
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = child.communicate(timeout=20)
                break
    assert child.returncode == 7, err
    # unbuffered, print writes in pieces: the signal may fall between them, and then the line is not ended
    assert out.endswith(b"saved\n")
    assert b"the run is in" in err


def test_under_torchrun_the_first_rank_writes(tmp_path: Path) -> None:
    lines = SCRIPT.splitlines()
    at = lines.index("def main():")
    lines.insert(at + 1, "    torch.distributed.init_process_group('gloo')")
    body = "\n".join(lines).replace("net = Net()", "net = nn.parallel.DistributedDataParallel(Net())")
    body = body.replace("return 3", "torch.distributed.destroy_process_group(); return 0")
    (tmp_path / "ddp.py").write_text(body)
    result = python(*LAUNCHER, "-m", "flowscope", "run", "--log-dir", "logs", "ddp.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("the run is in") == 1
    recorded = read_run(tmp_path / "logs")
    assert [record.step for record in recorded.records] == [*range(11)]
    assert recorded.header is not None
    assert recorded.header.flows[0].name == "blocks"  # without the wrapper's prefix


def test_a_script_nobody_here_wrote(tmp_path: Path) -> None:
    """Accelerate's own test of itself trains a dozen small models, in several precisions, and checks the results."""
    path = Path(accelerate.test_utils.__file__).parent / "scripts" / "test_script.py"
    result = python("-m", "flowscope", "run", "--log-dir", "logs", path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    found = sorted((tmp_path / "logs").rglob("flowscope.jsonl"))
    assert len(found) > 3
    assert all(json.loads(line)["type"] for line in found[0].read_text().splitlines())
    assert "switched off" not in result.stderr


NAN_AT_THREE = SCRIPT.replace("loss = net(x)", "loss = (float('nan') if step == 3 else 1) * net(x)")


@pytest.mark.parametrize(
    ("ends", "asked", "status"),
    [
        ("return 0", ["--fail-on", "error"], 1),
        ("return 0", ["--fail-on", "vanishing_gradient", "--fail-on", "non_finite"], 1),
        ("return 0", ["--fail-on", "vanishing_gradient"], 0),
        ("return 0", [], 0),
        ("return 3", ["--fail-on", "error"], 3),  # a script that fails keeps its own status
    ],
)
def test_an_alert_fails_a_script_that_is_asked_to(ends: str, asked: list[str], status: int, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(NAN_AT_THREE.replace("return 3", ends))
    done = python("-m", "flowscope", "run", "--log-dir", "run", *asked, path, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert ("status 1, as --fail-on asks: non_finite at step 3" in done.stderr) == (status == 1)


def test_waiting_for_an_alert_that_cannot_come_and_a_folder_that_is_taken_are_told(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = python("-m", "flowscope", "run", "--fail-on", "eror", path, cwd=tmp_path)
    assert done.returncode == 2
    assert "Did you mean 'error'?" in done.stderr
    assert done.stdout == ""
    for _ in range(2):
        done = python("-m", "flowscope", "run", "--log-dir", "a", path, cwd=tmp_path)
        assert done.returncode == 3
    assert f"the run is in {tmp_path / 'a-2'}" in done.stderr
    assert len(read_run(tmp_path / "a").records) == len(read_run(tmp_path / "a-2").records) > 0


def test_a_traceback_shows_the_scripts_frames_and_those_of_what_it_calls() -> None:
    """Ours lie before the script, between it and what it calls, and in the exception that this one came from."""
    script = {"__name__": "__main__"}
    exec("def call(f): f()\ndef fail(): raise KeyError('first')\n", script)
    ours = {**script, "__name__": "flowscope.between"}
    exec(
        "def between():\n    try:\n        call(fail)\n    except KeyError:\n        call(lambda: 1 / 0)\n"
        "def run(): call(between)",
        ours,
    )
    error: BaseException | None = None
    try:
        ours["run"]()
    except ZeroDivisionError as raised:
        error = raised
    assert error is not None
    assert error.__context__ is not None
    without_ours(error)
    shown = [[frame.name for frame in traceback.extract_tb(one.__traceback__)] for one in (error, error.__context__)]
    here = test_a_traceback_shows_the_scripts_frames_and_those_of_what_it_calls.__name__
    assert shown == [[here, "call", "call"], ["call", "fail"]]
