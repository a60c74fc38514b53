"""Small programs that train, bare or watched, and all that a training leaves behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

B, T, IN, D, OUT = 3, 5, 6, 8, 4
QUIET = {"console": "off", "slow_every": 1}


class Block(nn.Module):
    """Attention and an MLP with dropout, each with a norm before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), nn.MultiheadAttention(D, 2, batch_first=True, dropout=0.1)
        self.mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] of [B, T, D]."""
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Experts(nn.Module):
    """A router over three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] of [B, T, D]."""
        top, index = self.router(x).softmax(-1).topk(2, -1)
        shares = [(top * (index == i)).sum(-1, keepdim=True) for i in range(3)]
        return x + sum(share * expert(x) for share, expert in zip(shares, self.experts, strict=True))


class Gated(nn.Module):
    """A gate beside a rectified branch, batch norm behind."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.gate = nn.Sequential(nn.Linear(D, D), nn.ReLU()), nn.Sequential(nn.Linear(D, D), nn.Sigmoid())
        self.norm = nn.BatchNorm1d(T)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] of [B, T, D]."""
        return self.norm(x + self.gate(x) * self.branch(x))


class Stack(nn.Module):
    """Blocks of one kind between two projections."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 2) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(IN, D), nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, OUT] of [B, T, IN]."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mixed(nn.Module):
    """Blocks, experts, gates, a recurrent layer, one that is iterated, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(IN, D)
        self.parts = nn.ModuleList([nn.ModuleList(kind() for _ in range(2)) for kind in (Block, Experts, Gated)])
        self.rnn, self.cell = nn.GRU(D, D, 2, batch_first=True), nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.frozen, self.head = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, OUT] of [B, T, IN]."""
        x = self.stem(x)
        for blocks in self.parts:
            for block in blocks:
                x = block(x)
        x = self.frozen(self.rnn(x)[0])
        z = torch.zeros_like(x)
        for _ in range(3):
            z = self.cell(z + x)
        return self.head(z)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs [B, T, IN] and classes [B, T]."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(B, T, IN, generator=generator), torch.randint(0, OUT, (B, T), generator=generator)


def loss_of(model: nn.Module, number: int) -> Tensor:
    """The cross entropy of one batch."""
    x, y = batch(number)
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def tensors_in(held: Any) -> list[Tensor]:
    """All tensors of nested dicts and lists, in order."""
    if isinstance(held, Tensor):
        return [held]
    inner = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else ()
    return [tensor for value in inner for tensor in tensors_in(value)]


def left_behind(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> list[Tensor]:
    """Losses, weights, gradients, the optimizer's state, the random numbers to come."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    randoms = [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))]
    states = tensors_in(list(optimizer.state_dict()["state"].values()))
    return [t.clone() for t in (*losses, *model.state_dict().values(), *grads, *states, *randoms)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two trainings left the same bits."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many hooks are on a model, its parameters and its optimizer, and how many function modes are on."""
    held = [vars(owner).items() for owner in (*model.modules(), optimizer)]
    own = sum(len(hooks) for items in held for name, hooks in items if "hook" in name and hasattr(hooks, "__len__"))
    on_parameters = sum(
        len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()
    )
    return own + on_parameters + torch._C._len_torch_function_stack()


class Said(logging.Handler):
    """What flowscope says within, instead of the console."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage())
        if record.levelno >= logging.ERROR:
            self.errors.append(record.getMessage())


@contextmanager
def listening() -> Iterator[Said]:
    """Keep what flowscope says."""
    said, logger = Said(), logging.getLogger("flowscope")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(said)
    try:
        yield said
    finally:
        logger.removeHandler(said)
        logger.propagate = propagate


def in_threads(*calls: Callable[[], object]) -> list[BaseException]:
    """Run calls at once, each in a thread of its own; returns what they raised."""
    raised: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised
