"""A small decoder and a small convnet, with one knob a fault, and the loop that trains them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import flowscope
from benchmarks.parting.sharded import on_two_ranks, own_part, sharded

VOCABULARY, TOKENS, WIDTH, HEADS, BATCH = 29, 17, 32, 4, 6


@dataclass(frozen=True)
class Knobs:
    """What a program may do otherwise; the defaults are the good run.

    Attributes:
        at: the block that the fault is in.
        since: the step from which on it acts.
        fault: its name, "" for none; the rest says how the run is made.
        kernels: the attention kernels allowed; () for all.
        ranks: processes, each with a part of the batch and of every parameter.
    """

    fault: str = ""
    at: int = 1
    since: int = 0
    depth: int = 4
    dropout: float = 0.1
    checkpointed: str = ""
    compiled: str = ""
    attention: str = "fused"
    dtype: torch.dtype = torch.float32
    optimizer: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)
    undecayed: bool = True
    micro_batches: int = 1
    threads: int = 1
    seed: int = 0
    steps: int = 6
    fused_projections: bool = True
    prefix: str = "blocks"
    kernels: tuple[str, ...] = ()
    ranks: int = 1


class WrongBackward(torch.autograd.Function):
    """The identity, with a gradient that is a little too large: a kernel whose backward is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.01


class Attention(nn.Module):
    def __init__(self, knobs: Knobs, number: int) -> None:
        super().__init__()
        self.knobs, self.here = knobs, number == knobs.at
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        if self.knobs.fused_projections:
            parts = self.qkv(x).chunk(3, -1)
        else:
            pairs = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
            parts = [F.linear(x, weight, bias) for weight, bias in pairs]
        q, k, v = (part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in parts)
        causal = self.fault != "mask lost"
        if self.knobs.attention == "fused":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
            if causal:
                scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))


class Block(nn.Module):
    def __init__(self, knobs: Knobs, number: int) -> None:
        super().__init__()
        self.knobs, self.here = knobs, number == knobs.at
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention(knobs, number)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(knobs.dropout)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "residual order swapped":
            x = self.norm1(x + self.drop(self.attention(x)))
        else:
            x = x + self.drop(self.attention(self.norm1(x)))
        hidden = self.up(self.norm2(x))
        hidden = F.gelu(hidden, approximate="tanh" if self.fault == "wrong kernel" else "none")
        branch = self.drop(self.down(hidden))
        if self.fault == "branch detached":
            branch = branch.detach()
        if self.fault == "branch scaled":
            branch = branch * 1.001
        if self.fault == "wrong backward":
            branch = WrongBackward.apply(branch)
        return x + branch


class Decoder(nn.Module):
    def __init__(self, knobs: Knobs) -> None:
        super().__init__()
        self.knobs = knobs
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.add_module(knobs.prefix, nn.ModuleList(Block(knobs, number) for number in range(knobs.depth)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.1)

    @property
    def stack(self) -> Any:
        return getattr(self, self.knobs.prefix)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.stack:
            if self.knobs.checkpointed and (self.knobs.checkpointed != "one" or block.here):
                keeps = self.knobs.fault != "checkpoint without random state"
                reentrant = self.knobs.checkpointed == "reentrant"
                x = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=keeps)
            else:
                x = block(x)
        return self.head(self.norm(x))


class Net(nn.Module):
    """A residual convnet with batch norms."""

    def __init__(self, knobs: Knobs) -> None:
        super().__init__()
        self.knobs = knobs
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(knobs.depth)
        )
        self.head = nn.Linear(8, 5)

    @property
    def stack(self) -> Any:
        return self.blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def sentences(step: int, knobs: Knobs) -> tuple[Tensor, Tensor]:
    """A batch of tokens that follow one another by a rule with exceptions, and the next of each; -100 is padding."""
    if knobs.fault == "data order" and step >= knobs.since:
        step += 1
    generator = torch.Generator().manual_seed(1000 * knobs.seed + step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    rows = (start + torch.arange(TOKENS + 1) * 3) % VOCABULARY
    noise = torch.rand(rows.shape, generator=generator) < 0.1
    rows = torch.where(noise, torch.randint(VOCABULARY, rows.shape, generator=generator), rows)
    targets = rows[:, 1:].clone()
    targets[:, -5:] = -100
    if knobs.fault == "labels shifted" and step >= knobs.since:
        targets = targets.roll(-1, 1)
    return rows[:, :-1], targets


def pictures(step: int, knobs: Knobs) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * knobs.seed + step)
    return torch.randn(BATCH, 3, 8, 8, generator=generator), torch.randint(5, (BATCH,), generator=generator)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, knobs: Knobs) -> Tensor:
    out = model(x).float()
    if out.dim() == 2:
        return F.cross_entropy(out, y)
    if knobs.fault == "loss mask lost":
        return F.cross_entropy(out.flatten(0, 1), y.flatten().clamp(min=0))
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def optimizer_for(model: nn.Module, knobs: Knobs) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    if knobs.fault == "weight not in the optimizer":
        matrices = [p for p in matrices if p is not model.stack[knobs.at].up.weight]
    groups = [{"params": matrices}, {"params": vectors, **({"weight_decay": 0.0} if knobs.undecayed else {})}]
    if knobs.optimizer == "sgd":
        return torch.optim.SGD(groups, **{"lr": 0.1, "momentum": 0.9, **knobs.options})
    return torch.optim.AdamW(groups, **{"lr": 3e-3, "weight_decay": 0.1, **knobs.options})


def train(folder: Path, knobs: Knobs, kind: Callable[[Knobs], nn.Module] = Decoder, **watching: Any) -> None:
    """Train as the knobs say, and record it."""
    if knobs.ranks > 1:
        on_two_ranks(_train, folder, knobs, kind, watching)
        return
    kernels = [getattr(SDPBackend, name) for name in knobs.kernels]
    with sdpa_kernel(kernels) if kernels else nullcontext():
        _train(folder, knobs, kind, watching)


def _train(folder: Path, knobs: Knobs, kind: Callable[[Knobs], nn.Module], watching: dict[str, Any]) -> None:
    torch.set_num_threads(knobs.threads)
    torch.manual_seed(knobs.seed)
    model = built(kind, knobs)
    if knobs.ranks > 1:
        sharded(model, knobs.fault, knobs.at)
    optimizer = optimizer_for(model, knobs)
    if knobs.fault == "reseeded":
        torch.manual_seed(100 + knobs.at)
    told = {**watching, "config": {"console": "off", **watching.get("config", {})}}
    with flowscope.watch(model, optimizer, log_dir=folder, **told) as scope:
        if knobs.compiled:
            torch.compiler.reset()
            model.compile(backend=knobs.compiled)
        for step in range(knobs.steps):
            fault = knobs.fault if step >= knobs.since else ""
            for module in model.modules():
                if isinstance(module, (Attention, Block)):
                    module.fault = fault if module.here else ""
            loss = gradients(model, optimizer, step, knobs, fault)
            optimizer.step()
            scope.step(loss=loss)
    torch.set_num_threads(1)


def built(kind: Callable[[Knobs], nn.Module], knobs: Knobs) -> Any:
    """The model, with the faults of its making."""
    model: Any = kind(knobs).to(knobs.dtype)
    if knobs.fault == "one weight initialised otherwise":
        with torch.no_grad():
            model.stack[knobs.at].up.weight.mul_(1.01)
    if knobs.fault == "another epsilon":
        model.stack[knobs.at].norm1.eps = 1e-6
    if knobs.fault == "dropout off":
        model.stack[knobs.at].drop.p = 0.0
    return model


def gradients(model: Any, optimizer: torch.optim.Optimizer, step: int, knobs: Knobs, fault: str) -> Tensor:
    """The loss of a step; its gradients are those that the optimizer will use."""
    before(model, optimizer, fault, knobs)
    if fault != "gradients not zeroed":
        optimizer.zero_grad()
    x, y = (sentences if isinstance(model, Decoder) else pictures)(step, knobs)
    if knobs.ranks > 1:
        x, y = own_part(x, fault), own_part(y, fault)
    total = torch.zeros(())
    for part, target in zip(x.chunk(knobs.micro_batches), y.chunk(knobs.micro_batches), strict=True):
        with torch.autocast("cpu", torch.bfloat16) if fault == "autocast" else nullcontext():
            loss = loss_of(model, part, target, knobs)
        total = total + loss.detach() / knobs.micro_batches
        if fault == "gradients summed":  # as if the ranks' were not averaged
            loss = loss * knobs.ranks
        (loss if fault == "not divided" else loss / knobs.micro_batches).backward()
    if fault == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if fault == "gradient lost":
        model.stack[knobs.at].up.weight.grad = None
    return total


def before(model: Any, optimizer: torch.optim.Optimizer, fault: str, knobs: Knobs) -> None:
    """The faults that act before a step's forward."""
    if fault == "another random state":
        torch.rand(())
    if fault == "batch norm in eval":
        model.stack[knobs.at][1].eval()
    if fault == "rate":
        optimizer.param_groups[0]["lr"] = 1e-3
