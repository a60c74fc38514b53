"""Does a fixed set of runs give the numbers of an earlier commit: `python benchmarks/same_numbers.py REVISION`.

Both trees run this file's programs in processes of their own; metrics, losses, labels, flags, notes, alerts and the
trained weights are compared to the last bit. Metrics and alert kinds that the earlier commit did not have are listed.

Axis letters: B batch, T positions, D features.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flowscope

ROOT = Path(__file__).resolve().parents[1]
B, T, D, IN, OUT = 4, 6, 16, 8, 5
Batch = tuple[Tensor, Tensor]
Loop = Callable[[Any, Any, Iterator[Batch], Any], Tensor | None]


# -- models


class PreNorm(nn.Module):
    def __init__(self, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), activation(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.mlp(x))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        for number, expert in enumerate(self.experts):
            x = x + expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return x


class Stack(nn.Module):
    """`loops`: the first block is run that often, the others not at all."""

    def __init__(
        self, block: Callable[[], nn.Module] = PreNorm, depth: int = 4, reentrant: bool | None = None, loops: int = 0
    ) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(IN, D), nn.Linear(D, OUT)
        self.blocks = nn.ModuleList(block() for _ in range(1 if loops else depth))
        self.reentrant, self.loops = reentrant, loops

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in list(self.blocks) * max(1, self.loops):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, IN, IN, IN, IN)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3)))


class Recurrent(nn.Module):
    """A fused recurrent layer of this name, or a cell that is called step by step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        fused = {} if kind.endswith("Cell") else {"num_layers": 2, "batch_first": True}
        self.layer: Any = getattr(nn, kind)(IN, 2 * D, **fused)
        self.head = nn.Linear(2 * D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.RNNBase):
            return self.head(self.layer(x)[0][:, -1])
        state = (x.new_zeros(len(x), 2 * D),) * 2
        for t in range(x.shape[1]):
            state = self.layer(x[:, t], state)
        return self.head(state[0])


def wrapped(mode: str, block: Callable[[], nn.Module] = PreNorm) -> nn.Module:
    return flowscope.wrap(Stack(block), mode, example_inputs=torch.randn(2, T, IN))


def frozen() -> nn.Module:
    model = Stack()
    model.blocks[0].requires_grad_(False)
    return model


# -- loops


def loss_of(model: nn.Module, batches: Iterator[Batch]) -> Tensor:
    x, y = next(batches)
    return nn.functional.cross_entropy(model(x), y)


def plain(micro_batches: int = 1, clip: float = 0.0, spoil: int = -1) -> Loop:
    """`spoil`: the forward at which the loss becomes NaN."""

    def step(model: nn.Module, optimizer: Any, batches: Iterator[Batch], scope: Any) -> Tensor:
        optimizer.zero_grad()
        for _ in range(micro_batches):
            loss = loss_of(model, batches) / micro_batches
            (loss * (float("nan") if scope.forwards == spoil else 1.0)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return step


def sam(model: nn.Module, optimizer: Any, batches: Iterator[Batch], scope: Any) -> Tensor:
    x, y = next(batches)
    nn.functional.cross_entropy(model(x), y).backward()
    shifts = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        torch._foreach_add_([*model.parameters()], shifts)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        torch._foreach_sub_([*model.parameters()], shifts)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def closure(model: nn.Module, optimizer: Any, batches: Iterator[Batch], scope: Any) -> Tensor:
    batch = next(batches)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, iter([batch]))
        loss.backward()
        return loss

    return optimizer.step(evaluate).detach()


def thrown_away(model: nn.Module, optimizer: Any, batches: Iterator[Batch], scope: Any) -> Tensor:
    """A backward whose gradients are dropped, as after an exception."""
    loss_of(model, batches).backward()
    return plain()(model, optimizer, batches, scope) or torch.zeros(())


# -- runs


def batches_of(shape: tuple[int, ...]) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(*shape, generator=generator), torch.randint(0, OUT, shape[:1], generator=generator)


def train(
    make: Callable[[], nn.Module],
    loop: Loop | None = None,
    steps: int = 12,
    shape: tuple[int, ...] = (B, T, IN),
    optimizer: Callable[..., Any] = lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    backend: str = "",
    every: int = 2,
    **config: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = make()
    own, batches, step = optimizer(model.parameters()), batches_of(shape), loop or plain()
    runs = torch.compile(model, backend=backend) if backend else model
    with flowscope.watch(model, own, every=every, config={"console": "off", **config}) as scope:
        for _ in range(steps):
            scope.step(loss=step(runs, own, batches, scope))
        records, alerts = scope.records, [str(alert) for alert in scope.alerts]
    weights = b"".join(p.detach().double().numpy().tobytes() for p in model.parameters())
    told = [
        {
            "step": r.step,
            "loss": repr(r.loss),
            "flags": tuple(r.flags),
            "notes": tuple(r.notes),
            "flows": tuple(r.flow_names),
            "metrics": {
                key: (values.tobytes(), tuple(r.metric_labels.get(key, ()))) for key, values in r.metrics.items()
            },
        }
        for r in records
    ]
    return {"records": told, "alerts": alerts, "weights": hashlib.sha256(weights).hexdigest()}


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "pre-norm": lambda: train(Stack),
    "post-norm, 8 blocks": lambda: train(lambda: Stack(PostNorm, 8)),
    "ReLU": lambda: train(lambda: Stack(lambda: PreNorm(nn.ReLU))),
    "every step": lambda: train(Stack, every=1),
    "branch alignment": lambda: train(Stack, every=1, branch_alignment=True),
    "accumulation": lambda: train(Stack, plain(micro_batches=3)),
    "checkpoint": lambda: train(lambda: Stack(reentrant=False)),
    "checkpoint, reentrant": lambda: train(lambda: Stack(reentrant=True)),
    "one block in a loop": lambda: train(lambda: Stack(loops=3)),
    "convolutions": lambda: train(Images, shape=(B, 3, 9, 9)),
    "mixture of experts": lambda: train(lambda: Stack(Mixture, 2)),
    "SAM": lambda: train(Stack, sam),
    "clipping": lambda: train(Stack, plain(clip=0.1)),
    "gradients thrown away": lambda: train(Stack, thrown_away),
    "closure": lambda: train(Stack, closure, 6, optimizer=lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3)),
    "diverging": lambda: train(Stack, optimizer=lambda p: torch.optim.SGD(p, 10.0, momentum=0.9)),
    "NaN": lambda: train(Stack, plain(spoil=8), every=1),
    "frozen": lambda: train(frozen),
    "compiled": lambda: train(lambda: Stack(depth=3), backend="aot_eager", steps=6),
    **{kind: lambda kind=kind: train(lambda: Recurrent(kind)) for kind in ("RNN", "LSTM", "GRU", "LSTMCell")},
    **{
        f"{mode}, {block.__name__}": lambda mode=mode, block=block: train(
            lambda: wrapped(mode, block), every=1, steps=8
        )
        for block, modes in (
            (PreNorm, ("residual", "keel", "highway", "shc", "dhc", "mhc")),
            (PostNorm, ("keel", "keel-postln", "deepnorm")),
        )
        for mode in modes
    },
}


# -- comparison


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """What of the old run is another now; metrics and alert kinds that are new do not count."""
    if old["weights"] != new["weights"]:
        yield "the trained weights"
    yield from (f"alert lost: {alert}" for alert in old["alerts"] if alert not in new["alerts"])
    if len(old["records"]) != len(new["records"]):
        yield f"{len(old['records'])} records, now {len(new['records'])}"
    for before, now in zip(old["records"], new["records"], strict=False):
        for key in ("step", "loss", "flags", "notes", "flows"):
            if before[key] != now[key]:
                yield f"step {before['step']}: {key} {before[key]!r}, now {now[key]!r}"
        for key, value in before["metrics"].items():
            if value != now["metrics"].get(key):
                yield f"step {before['step']}: {key}"


def results_of(tree: Path) -> dict[str, Any]:
    """Run this file's programs on the package of a tree, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "results.pickle"
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-W", "ignore", __file__, "--save", str(kept)], check=True, env=environment)
        return dict(pickle.loads(kept.read_bytes()))


def compare(revision: str) -> int:
    """Print what differs from an earlier commit; returns the number of runs that do."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), revision], cwd=ROOT, check=True)
        try:
            old, new = results_of(tree), results_of(ROOT)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    changed = 0
    for name in RUNS:
        found = list(differences(old[name], new[name]))
        changed += bool(found)
        sys.stdout.write(f"{name}: {'; '.join(found[:5]) or 'the same to the last bit'}\n")
    sys.stdout.write(f"{len(RUNS) - changed} of {len(RUNS)} runs are the same.\n")
    return changed


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD~1")
    parser.add_argument("--save", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.save:
        return compare(given.revision)
    torch.set_num_threads(1)
    Path(given.save).write_bytes(pickle.dumps({name: run() for name, run in RUNS.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
