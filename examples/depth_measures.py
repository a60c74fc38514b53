"""Measurements for single claims that are no cell of the study: closed forms, reference values, costs, training advice.

Axis letters: B batch, T tokens, D features, L blocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from byte_lm import VOCABULARY, ByteLM, batches, load_text, train_step
from depth_cells import Cell, build, log_frequencies, variant
from torch import Tensor, nn

import flowscope

QUIET: dict[str, Any] = {"console": "off", "slow_every": 1}


def first_record(model: nn.Module, backward: Callable[[], Tensor], **config: Any) -> flowscope.Record:
    """The record of one forward and backward; nothing is changed by it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with flowscope.watch(model, optimizer, every=1, config={**QUIET, **config}) as scope:
        backward().backward()
        optimizer.step()
        optimizer.zero_grad()
    return scope.records[0]


# -- closed forms


class UnitBlock(nn.Module):
    """One merge whose branch has the carry's size and is at right angles to it, D even."""

    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.kind = norm
        self.norm = nn.RMSNorm(width, eps=0.0)
        self.turn = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            self.turn.weight.copy_(torch.block_diag(*[torch.tensor([[0.0, -1.0], [1.0, 0.0]])] * (width // 2)))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "pre":
            return x + self.turn(self.norm(x))
        return self.norm(x + self.turn(x))


def unit_stack(mode: str, sites: int, width: int = 8) -> float:
    """shortcut_product over `sites` unit merges, as `watch` records it."""
    norm = "pre" if mode == "keel-postln" else "post"
    torch.manual_seed(0)
    model = nn.Sequential(*(UnitBlock(width, norm) for _ in range(sites)))
    x = torch.randn(3, 5, width)
    x = (x / x.square().mean(-1, keepdim=True).sqrt()).requires_grad_()
    flowscope.wrap(model, mode, example_inputs=x.detach())
    record = first_record(model, lambda: model(x).square().sum() + model(x).sum())
    return float(record["shortcut_product"][0])


def unit_form(mode: str, sites: int) -> float:
    """The same by hand.

    A carry of size 1 and a branch of size 1 at right angles: Post-LN divides by sqrt(2) at each merge. Keel's first two
    merges have no outer norm, so the carry reaches the third with size sqrt(3) and is brought back to 1 there.
    """
    if mode == "residual":
        return 2.0 ** (-sites / 2)
    alpha = float(sites)
    return alpha / (3 * alpha**2 + 1) ** 0.5 * (alpha / (alpha**2 + 1) ** 0.5) ** (sites - 3)


def unit_stacks() -> Iterator[tuple[str, int, float, float]]:
    """(mode, merges, measured, closed form)."""
    for mode in ("residual", "keel-postln"):
        for sites in (16, 64, 256, 512):
            yield ("post-norm" if mode == "residual" else mode), sites, unit_stack(mode, sites), unit_form(mode, sites)


# -- reference values of the initial state

CALIBRATED = {
    "Post-LN": ("post", "residual"),
    "Pre-LN": ("pre", "residual"),
    "DeepNorm": ("post", "deepnorm"),
    "Keel": ("pre", "keel-postln"),
}


class Body(nn.Module):
    """The blocks of a decoder on hidden states of their own, with a head: [B, T, D] to [B, T, V]."""

    def __init__(self, norm: Any, depth: int, width: int) -> None:
        super().__init__()
        whole = ByteLM(norm=norm, depth=depth, width=width, heads=4)
        self.blocks, self.final, self.head = whole.blocks, whole.final, whole.head
        for block in self.blocks:
            block.mlp[1] = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def calibration(name: str, blocks: int, seed: int = 0, shared: bool = False) -> dict[str, float]:
    """The initial state of a causal decoder of width 128 with Xavier weights and ReLU on random hidden states.

    The loss is that of random targets, or with `shared` the same random direction at every position.
    """
    width, length = 128, 64
    norm, mode = CALIBRATED[name]
    torch.manual_seed(seed)
    model = Body(norm, blocks, width)
    x = torch.randn(2, length, width, requires_grad=True)
    targets = torch.randint(VOCABULARY, (2 * length,))
    flowscope.wrap(model, mode, example_inputs=x.detach())
    direction = torch.randn(2, 1, VOCABULARY)

    def loss() -> Tensor:
        return (model(x) * direction).sum() if shared else F.cross_entropy(model(x).flatten(0, 1), targets)

    record = first_record(model, loss)
    return {
        "total": float(record["gradient_product"][0]),
        "shortcut": float(record["shortcut_product"][0]),
        "cos last": float(record["cosine"][-1]),
        "cos(0,L)": float(record["cosine_to_input"][-1]),
        "token cos": float(record["token_cosine"][-1]),
        "rank": float(record["effective_rank"][-1]),
    }


def calibration_lines() -> Iterator[str]:
    yield "least and largest of three seeds; effective rank of 64"
    for name in CALIBRATED:
        for blocks in (24, 96):
            found = [calibration(name, blocks, seed) for seed in range(3)]
            ranges = (f"{k} {min(v[k] for v in found):.3g} to {max(v[k] for v in found):.3g}" for k in found[0])
            yield f"{name:<9}{blocks:>3}  {'; '.join(ranges)}"
    totals = [calibration("Post-LN", 24, seed, shared=True)["total"] for seed in range(3)]
    yield f"Post-LN  24  with one gradient shared by all positions: total {min(totals):.3g} to {max(totals):.3g}"


# -- Jacobians


def alignment_lines() -> Iterator[str]:
    """How near the branches' Jacobians are to a multiple of the identity."""
    yield "c = tr(J)/D of single branches (dense Jacobian, 16 positions), and the share of |J| that cI is"
    for name in ("post-ln", "pre-ln"):
        cell = Cell(name, 24, 1)
        model = build(cell)
        for steps in (0, 60):
            if steps:
                train(model, steps)
            found = [branch_alignment(model, block, site) for block in (0, 11, 23) for site in (0, 1)]
            shown = ", ".join(f"{c:+.3f} ({share:.0%})" for c, share in found)
            yield f"{variant(name).label}, {steps:>2} steps, blocks 0, 11, 23, attention and MLP: {shown}"
            data = next(batches(load_text(), 8, cell.length, seed=1))
            record = first_record(model, lambda: lm_loss(model, data), branch_alignment=True)  # noqa: B023
            c = record["branch_alignment"]
            low, middle, high = np.nanquantile(c, (0.0, 0.5, 1.0))
            yield f"  branch_alignment of watch over whole blocks: {low:+.3f} to {high:+.3f}, median {middle:+.3f}"


def branch_alignment(model: Any, number: int, site: int, length: int = 16) -> tuple[float, float]:
    """Return c = tr(J)/D of a branch at the hidden states the model itself makes, and |cI| / |J|."""
    tokens = next(batches(load_text(), 1, length, seed=2))[0]
    block = model.blocks[number]
    with torch.no_grad():
        x = model.embed(tokens) + model.position[:length]
        for before in model.blocks[:number]:
            x = before(x)
        if site == 1:
            y = x + block.attention(block.norm1(x) if block.norm == "pre" else x)
            x = y if block.norm == "pre" else block.norm1(y)
    branch, norm = (block.attention, block.norm1) if site == 0 else (block.mlp, block.norm2)

    def whole(flat: Tensor) -> Tensor:
        h = flat.view_as(x)
        return branch(norm(h) if block.norm == "pre" else h).flatten()

    jacobian = torch.autograd.functional.jacobian(whole, x.flatten())
    c = float(jacobian.trace()) / len(jacobian)
    return c, abs(c) * len(jacobian) ** 0.5 / float(jacobian.norm())


def lm_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def chain_lines() -> Iterator[str]:
    """A plain chain by the norm of its factors; DenseNet's width and cost by depth."""
    yield "plain chain of 64 orthogonal layers times g (no activation): gradient product, closed form g^64"
    for g in (0.9, 1.0, 1.1):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(65)))
        for layer in model:
            nn.init.orthogonal_(layer.weight, gain=g)
        record = first_record(model, lambda: model(torch.randn(7, 16)).square().mean())  # noqa: B023
        yield f"  g = {g}: {record['gradient_product'][0]:.4g}, {g**64:.4g}"
    yield "DenseNet-like stack, growth 12: input width and parameters of the last layer"
    for depth in (8, 32, 128):
        width = 12 * depth
        total = 12 * 12 * depth * (depth + 1) // 2
        yield f"  {depth:>4} layers: width {width}, {12 * width:,} parameters; all layers {total:,}"


# -- costs and advice


def train(model: nn.Module, steps: int, lr: float = 1e-3, length: int = 32) -> None:
    """Plain training, unwatched."""
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=lr), batches(load_text(), length=length)
    for _ in range(steps):
        train_step(model, optimizer, next(data))


def expansion_lines(width: int = 128, depth: int = 12, rounds: int = 12) -> Iterator[str]:
    """Parameters, time and memory of dhc by its number of streams."""
    models: dict[str, nn.Module] = {}
    for streams in (0, 1, 2, 4, 6, 8):
        torch.manual_seed(0)
        model: nn.Module = ByteLM(depth=depth, width=width, length=64)
        if streams:
            flowscope.wrap(model, "dhc", streams=streams, example_inputs=torch.zeros(2, 64, dtype=torch.long))
        models[f"{streams} streams" if streams else "plain"] = model
    batch = next(batches(load_text(), 8, 64))
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 2):
        for name, model in models.items():
            started = time.process_time()
            lm_loss(model, batch).backward()
            times[name].append(time.process_time() - started)
            model.zero_grad()
    yield f"dhc, {depth} blocks, D={width}, B=8, T=64, forward and backward, median of {rounds} interleaved rounds"
    blocks = sum(p.numel() for p in models["plain"].blocks.parameters())  # type: ignore[union-attr]
    saved = {name: saved_bytes(model, batch) for name, model in models.items()}
    for name, model in models.items():
        ratios = [a / b for a, b in zip(times[name][2:], times["plain"][2:], strict=True)]
        added = sum(p.numel() for _, c in flowscope.connections(model) for p in c.parameters())
        took, kept = statistics.median(ratios), saved[name] / saved["plain"]
        share = f"{added:,} parameters ({added / blocks:.2%} of the blocks)"
        yield f"  {name:<10} +{share}, time x {took:.2f}, kept for backward x {kept:.2f}"


def saved_bytes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    """Bytes that autograd keeps between forward and backward, each storage once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = lm_loss(model, batch)
        total = sum(kept.values())
        del loss
    return total


ADVICE: dict[str, dict[str, Any]] = {
    "as the plain model": {},
    "rate 25 % lower": {"rate": 0.75},
    "connections 1.3 x": {"connections": 1.3},
    "warm-up 20 steps": {"warmup": 20},
    "warm-up 28 steps (+40 %)": {"warmup": 28},
    "clip 1.3": {"clip": 1.3},
    "generators' clip 0.7": {"dynamic": 0.7},
    "all of it": {"rate": 0.75, "connections": 1.3, "warmup": 28, "clip": 1.3, "dynamic": 0.7},
}


def advice_gain(
    seed: int,
    lr: float,
    *,
    rate: float = 1.0,
    connections: float = 1.0,
    warmup: int = 0,
    clip: float = 1.0,
    dynamic: float | None = None,
    depth: int = 12,
    steps: int = 120,
) -> float:
    """Nats gained over byte frequencies in the last 20 steps by dhc, trained as told."""
    model = build(Cell("dhc", depth, steps, seed=seed))
    groups = flowscope.param_groups(model, lr, weight_decay=0.01, connection_lr_scale=connections, base_lr_scale=rate)
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)))
    data, known, gained = batches(load_text(), seed=seed), log_frequencies(), []
    for _ in range(steps):
        batch = next(data)
        optimizer.zero_grad()
        loss = lm_loss(model, batch)
        loss.backward()
        if dynamic is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        else:
            flowscope.clip_grad_norm_(model, clip, dynamic_scale=dynamic)
        optimizer.step()
        schedule.step()
        gained.append(-known[batch[1]].mean().item() - loss.item())
    return float(np.mean(gained[-20:]))


def advice_lines() -> Iterator[str]:
    lr = 3e-3
    yield f"dhc, 12 blocks, 120 steps, rate {lr:g}: nats gained over byte frequencies, two seeds"
    for name, options in ADVICE.items():
        values = [advice_gain(seed, lr, **options) for seed in (0, 1)]
        yield f"  {name:<26}{values[0]:+.3f} {values[1]:+.3f}"


def skipping_lines() -> Iterator[str]:
    """Loss, share and time by threshold after some training; width 128, where a branch costs something."""
    data = batches(load_text(), 16, 64, seed=1)
    held = [next(data) for _ in range(6)]
    tokens = [batch[0] for batch in held]
    model, means = trained_gates("highway", tokens)
    yield f"highway -2 on Post-LN, 12 blocks of width 128 after 200 steps; mean gates {means[0]:.3f} to {means[-1]:.3f}"
    yield from skipped(model, means, held, "block", loader=tokens)
    yield "per sample, token gates:"
    model, means = trained_gates("keel", tokens)
    yield f"keel -2 on Post-LN; mean gates {means[0]:.3f} to {means[-1]:.3f}"
    yield from skipped(model, means, held, "sample")


def trained_gates(mode: str, tokens: list[Tensor]) -> tuple[nn.Module, np.ndarray]:
    """A Post-LN decoder wrapped and trained for 200 steps, and its mean gates by site, least first."""
    torch.manual_seed(0)
    model = ByteLM(norm="post", depth=12, width=128, length=64)
    flowscope.wrap(model, mode, example_inputs=torch.zeros(2, 64, dtype=torch.long))
    train(model, 200, length=64)
    return model, np.sort(flowscope.gate_profile(model, tokens).by_site())


def skipped(
    model: nn.Module, means: np.ndarray, held: list[tuple[Tensor, Tensor]], per: Literal["block", "sample"], **more: Any
) -> Iterator[str]:
    """What leaving out a tenth, a quarter and half of the sites costs."""
    for share in (0.1, 0.25, 0.5):
        skipping = flowscope.skip_by_gates(model, float(np.quantile(means, share)), per=per, **more)
        yield f"per {per}: {skipping.report(held, lm_loss)}".split("\n  left out")[0]
