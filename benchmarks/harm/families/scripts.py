"""`flowscope run script.py` is a clear glass: the output, the status and the traceback are those of plain Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harm.attack import Outcome, Plan

ROW = "odd scripts under `flowscope run`: output, status and trace as with python"
FIRST = {ROW: (30, 24)}

MODEL = """
import os, signal, sys, threading, tempfile
import torch
from torch import nn
torch.manual_seed(0); torch.set_num_threads(1)
x = torch.randn(4, 8)
def made():
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)], nn.Linear(8, 2))
def train(m, steps=5, loss=lambda y: y.pow(2).mean(), o=None, told=True, **how):
    o = o or torch.optim.SGD(m.parameters(), .1)
    for i in range(steps):
        o.zero_grad(); l = loss(m(x)); l.backward(**how); o.step()
        if told: print(i, "" if l.is_meta else l.detach())
    return o
m = made()
"""
SCRIPTS = {
    "plain": "train(m)",
    "a parameter joins": "o = train(m); m.e = nn.Parameter(torch.ones(2)); o.add_param_group({'params': [m.e]}); "
    "train(m, o=o, loss=lambda y: (y * m.e).pow(2).mean())",
    "a layer joins": "train(m); m.insert(0, nn.Linear(8, 8)); train(m)",
    "layers leave": "train(m); del m[0]; train(m)",
    "scripted block": "m[1] = torch.jit.script(m[1]); train(m)",
    "traced model": "m = torch.jit.trace(m, x); train(m)",
    "status 3": "train(m); sys.exit(3)",
    "status is a text": "train(m); sys.exit('text')",
    "ends at once": "train(m); sys.stdout.flush(); os._exit(4)",
    "exception": "train(m); 1 / 0",
    "exception in backward": "train(m, loss=lambda y: y)",
    "Ctrl-C": "train(m); raise KeyboardInterrupt",
    "SIGTERM": "train(m); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)",
    "stderr closed": "train(m); sys.stderr.close()",
    "stderr closed before": "sys.stderr.close(); train(m)",
    "stderr gone": "train(m); sys.stderr = None",
    "stderr gone before": "sys.stderr = None; train(m)",
    "stdout closed": "train(m); sys.stdout.flush(); os.close(1)",
    "folder removed": "d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d); train(m)",
    "gradient given": "o = train(m); y = m(x); y.backward(torch.ones_like(y)); o.step(); print(y)",
    "complex loss": "train(m, loss=lambda y: torch.complex(y.mean(), y.sum()), gradient=torch.tensor(1 + 0j))",
    "meta loss": "x = x.to('meta'); train(m.to('meta'))",
    "loss of one row": "train(m, loss=lambda y: y.mean().view(1))",
    "loss of a subclass": "class T(torch.Tensor): pass\ntrain(m, loss=lambda y: y.mean().as_subclass(T))",
    "half precision": "x = x.half(); train(m.half(), loss=lambda y: y.sum())",
    "autograd.backward": "o = train(m); y = m(x).mean(); torch.autograd.backward([y]); o.step(); print(y)",
    "threads": "ts = [threading.Thread(target=lambda: train(made(), 30, told=False)) for _ in range(4)]\n"
    "[t.start() for t in ts]; [t.join() for t in ts]; print('done')",
    "forty models": "for _ in range(40): train(nn.Linear(8, 2), 1)",
    "fork": "train(m); sys.stdout.flush(); pid = os.fork()\nif pid == 0: sys.exit(0)\nprint(os.waitpid(pid, 0)[1])",
    "patches backward": "b = torch.Tensor.backward\ntorch.Tensor.backward = lambda s, *a, **k: b(s, *a, **k)\ntrain(m)",
    "hostile object": "class H:\n    __class__ = property(lambda s: 1 / 0)\n"
    "    def __getattr__(s, n): raise RuntimeError(n)\nh = H(); train(m)",
    "unfinished module": "class H(nn.Module):\n    def __init__(s): raise ValueError\nkeep = H.__new__(H); train(m)",
    "hostile module": "class H(nn.Linear):\n    def __getattr__(s, n):\n        if n in ('weight', 'bias'): return "
    "super().__getattr__(n)\n        raise RuntimeError(n)\nm[0] = H(8, 8); train(m)",
    "names that are orders": "m.add_module('a\\x1b[2Jb', nn.Linear(2, 2)); train(m)",
}


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Each script by plain Python, and by `flowscope run`."""
    for name in plan.some(list(SCRIPTS)):
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "train.py"
            script.write_text(MODEL + SCRIPTS[name])
            wrong = _difference(_run(folder, [str(script)]), _run(folder, _watched(folder, script)))
        yield Outcome(ROW, name, not wrong, wrong)


def _watched(folder: str, script: Path) -> list[str]:
    return ["-m", "flowscope", "run", "--every", "1", "--log-dir", f"{folder}/log", str(script)]


def _run(folder: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def _difference(plain: subprocess.CompletedProcess[str], watched: subprocess.CompletedProcess[str]) -> str:
    """How the second differs from the first in what a user or a shell sees; ours is only on stderr."""
    if plain.returncode != watched.returncode:
        return f"status {watched.returncode} in the place of {plain.returncode}: {watched.stderr[-300:]}"
    if plain.stdout != watched.stdout:
        return f"another output: {watched.stdout[-200:]!r} in the place of {plain.stdout[-200:]!r}"
    traces = [_trace(done.stderr) for done in (plain, watched)]
    return "" if traces[0] == traces[1] else f"another traceback: {traces[1]!r} in the place of {traces[0]!r}"


def _trace(text: str) -> str:
    """The last traceback, from its beginning on, without what is ours after it."""
    _, begin, trace = text.rpartition("Traceback (most recent call last):\n")
    lines = trace.splitlines() if begin else []
    last = next((number for number, line in enumerate(lines) if not line.startswith(" ")), len(lines) - 1)
    return "\n".join(lines[: last + 1])
