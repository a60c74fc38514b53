"""Deep residual decoders and the connections that `wrap` gives them: what no published corpus of faults has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import flowscope
from benchmarks.faults.case import Catalogue, Draw, Loss, Program, names, plain_step, scheduled
from benchmarks.faults.data import markov
from benchmarks.faults.models import Decoder, word_loss

case = Catalogue("deep transformers")
BLIND = ("token_collapse", "vanishing_gradient", "rank_collapse", "representation_collapse")
BLOCKS = names("embed", "blocks", "final")


def decoder(
    draw: Draw,
    model: nn.Module,
    lr: float,
    steps: int,
    batch: int = 16,
    lag: int = 1,
    loss: Loss = word_loss,
    before: Callable[[int], None] | None = None,
    **known,
) -> Program:
    """AdamW, the Markov chain's words."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    step = plain_step(model, optimizer, markov(batch, 16, draw.seed, lag), loss, before=before)
    return Program(model, optimizer, step, steps, **known)


def stuck(bar: float = 2.3):
    """The loss stays where the last word tells nothing (2.5 without, 1.3 with it)."""
    return lambda shown: None if not shown.last_loss < bar else f"loss {shown.last_loss:.2f}"


def learned(bar: float = 1.9):
    return lambda shown: None if shown.last_loss < bar else f"loss {shown.last_loss:.2f}"


@case("T01", "Post-LN, 24 blocks, no warm-up", *BLIND)
def post_ln(draw: Draw) -> Program:
    model = Decoder("post", draw.pick("depth", 24, 20, 28), draw.pick("width", 32, 48))
    return decoder(draw, model, draw.factor("lr", 2e-3, 1.3), 60, shows=stuck(), place=BLOCKS)


@case("T02", "Post-LN with keel gates that start at +2", *BLIND)
def post_ln_gate(draw: Draw) -> Program:
    model = Decoder("post", draw.pick("depth", 24, 20, 28), draw.pick("width", 32, 48))
    flowscope.wrap(model, mode="keel", init_bias=draw.pick("bias", 2.0, 1.5, 3.0))
    return decoder(draw, model, draw.factor("lr", 2e-3, 1.3), 60, shows=stuck(), place=BLOCKS)


@case("T03", "Pre-LN, a rate a hundred times too high", *BLIND, "update_too_large", "exploding_gradient")
def pre_ln_collapse(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 12, 10, 16), draw.pick("width", 32, 48))
    return decoder(draw, model, draw.factor("lr", 0.3, 1.3), 100, shows=stuck(), place=r".*")


@case("T04", "words drowned in a common offset of the embedding", *BLIND)
def common_offset(draw: Draw) -> Program:
    model = Decoder("post", draw.pick("depth", 12, 10, 16), draw.pick("width", 32, 48))
    with torch.no_grad():
        model.position.add_(draw.factor("offset", 300.0, 1.5) * torch.randn(model.position.shape[1]))
    return decoder(draw, model, draw.factor("lr", 1e-3, 1.3), 80, shows=stuck(), place=BLOCKS)


class Scaled(nn.Module):
    """A branch times a constant."""

    def __init__(self, module: nn.Module, factor: float) -> None:
        super().__init__()
        self.module, self.factor = module, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) * self.factor


@case("T05", "one block's branches at a wrong, large gain", "exploding_gradient", "update_too_large", "non_finite")
def loud_block(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 12, 10, 14))
    bad, gain = draw.pick("block", 5, 3, 7), draw.factor("gain", 1e5, 2)
    block = model.blocks[bad]
    block.attention, block.mlp = Scaled(block.attention, gain), Scaled(block.mlp, gain)
    place = names(rf"blocks\.{bad}")
    return decoder(draw, model, draw.factor("lr", 1e-3, 1.5), 80, lag=2, shows=stuck(2.2), place=place)


@case("T06", "gates closed from the start", "gate_saturation")
def closed_gates(draw: Draw) -> Program:
    model = Decoder(draw.pick("norm", "pre", "post"), draw.pick("depth", 8, 6, 10))
    mode = draw.pick("mode", "keel", "highway")
    flowscope.wrap(model, mode=mode, init_bias=-draw.factor("bias", 12.0, 1.3))
    return decoder(draw, model, draw.factor("lr", 1e-3, 1.5), 60, place=names("blocks"))


@case("T07", "gates of most blocks closed", "gate_saturation")
def closed_blocks(draw: Draw) -> Program:
    depth = draw.pick("depth", 8, 6, 10)
    model = Decoder(draw.pick("norm", "pre", "post"), depth)
    flowscope.wrap(model, mode="keel")
    first, bias = draw.pick("first", 2, 1), draw.factor("bias", 14.0, 1.2)
    with torch.no_grad():
        for block in model.blocks[first:]:
            for name, parameter in block.named_parameters():
                if name.endswith(("gates.0.bias", "gates.1.bias")):
                    parameter.fill_(-bias)
    return decoder(draw, model, draw.factor("lr", 1e-3, 1.5), 60, place=names(rf"blocks\.{first}"))


def hyper_sites(model: nn.Module):
    """The static matrices [n + 2, n] of every site: read, residual, write."""
    return [p for name, p in model.named_parameters() if name.endswith("static")]


@case("T08", "hyper-connections in which one stream takes all", "stream_collapse", "mixing_gain")
def one_stream(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 8, 6, 10))
    flowscope.wrap(model, mode=draw.pick("mode", "dhc", "shc"), streams=draw.pick("streams", 4, 3))
    chosen = draw.pick("stream", 0, 1, 2)
    with torch.no_grad():
        for static in hyper_sites(model):
            static[1:-1].zero_()
            static[1:-1, chosen] = 1.0  # every stream goes on as a copy of this one
    return decoder(draw, model, draw.factor("lr", 5e-4, 1.5), 60, place=names("blocks"))


@case("T09", "hyper-connections that start to average their streams", "stream_collapse", "mixing_gain")
def copied_streams(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 8, 6, 10))
    flowscope.wrap(model, mode=draw.pick("mode", "dhc", "shc"), streams=draw.pick("streams", 4, 3))
    with torch.no_grad():
        for k, static in enumerate(hyper_sites(model)):
            static[-1].zero_()
            static[-1, k % static.shape[1]] = 1.0  # each branch writes to the stream it reads: they part
    at = draw.step("step", 33, 21, 48)
    program = decoder(draw, model, draw.factor("lr", 5e-4, 1.5), 90, first=at, place=names("blocks"))
    plain = program.step

    def step(k: int) -> torch.Tensor:
        if k == at:
            with torch.no_grad():
                for static in hyper_sites(model):
                    static.copy_(torch.full_like(static, 1 / static.shape[1]))
                    static[-1] = 1.0
        return plain(k)

    program.step = step
    return program


def mixing(draw: Draw, change: Callable[[torch.Tensor, float], torch.Tensor]) -> Program:
    """Pre-LN with hyper-connections whose matrices of the carried streams are changed by a factor over the depth."""
    depth = draw.pick("depth", 12, 10, 14)
    model = Decoder("pre", depth)
    flowscope.wrap(model, mode=draw.pick("mode", "shc", "dhc"), streams=draw.pick("streams", 4, 3))
    total = draw.factor("total", 3e4, 3)
    with torch.no_grad():
        for static in hyper_sites(model):
            change(static[1:-1], total ** (1 / (2 * depth)))
    return decoder(draw, model, draw.factor("lr", 1e-3, 1.5), 60, place=names("blocks"))


@case("T10", "unconstrained mixing that amplifies with depth", "mixing_gain", "exploding_gradient")
def amplifying(draw: Draw) -> Program:
    return mixing(draw, torch.Tensor.mul_)


@case("T11", "mixing that loses the carried state", "mixing_gain", "vanishing_gradient")
def forgetting(draw: Draw) -> Program:
    return mixing(draw, torch.Tensor.div_)


@case("T12", "Pre-LN whose embedding is scaled in place at every step: blocks add nothing", "representation_collapse")
def drowned(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 8, 6, 10))
    program = decoder(draw, model, draw.factor("lr", 1e-3, 1.2), 120, lag=2, shows=stuck(2.2), place=names("blocks"))
    factor, plain = draw.factor("factor", 1.1, 1.03), program.step

    def step(k: int) -> torch.Tensor:
        loss = plain(k)
        with torch.no_grad():
            model.embed.weight.mul_(factor)
        return loss

    program.step = step
    return program


def growing(draw: Draw, *, norm: bool, **known) -> Program:
    """Query and key weights of one block grow at every step; with `norm`, queries and keys have length 1."""
    model = Decoder("pre", draw.pick("depth", 4, 3, 6))
    bad, gain = draw.pick("block", 1, 0, 2), draw.factor("gain", 1.15, 1.03)
    for block in model.blocks if norm else ():
        block.attention.qkv = Unit(block.attention.qkv)
    weight = model.blocks[bad].attention.qkv
    weight = weight.module.weight if norm else weight.weight

    def before(k: int) -> None:
        with torch.no_grad():
            weight[: 2 * weight.shape[1]].mul_(gain)

    place = names(rf"blocks\.{bad}")
    return decoder(draw, model, draw.factor("lr", 1e-3, 1.3), 60, before=before, place=place, **known)


class Unit(nn.Module):
    """A projection to queries, keys and values whose queries and keys are divided by their length (QK-norm)."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.module(x).chunk(3, -1)
        return torch.cat([3 * nn.functional.normalize(q, dim=-1), 3 * nn.functional.normalize(k, dim=-1), v], -1)


@case("T13", "query and key weights that grow: attention logits without end", "attention_logits")
def logits_grow(draw: Draw) -> Program:
    return growing(draw, norm=False)


healthy = Catalogue("controls: transformers", healthy=True)


def wrapped(name: str, title: str, norm: str, mode: str, depth: int, lr: float = 2e-3, bar: float = 2.0, **options):
    """Registers a healthy decoder under a connection."""

    @healthy(name, title)
    def build(draw: Draw) -> Program:
        model = Decoder(norm, draw.pick("depth", depth, depth - 2, depth + 4), draw.pick("width", 32, 48))
        flowscope.wrap(model, mode=mode, **options)
        return decoder(draw, model, draw.factor("lr", lr, 1.4), 80, shows=learned(bar))

    return build


wrapped("T91", "DeepNorm, 24 blocks", "post", "deepnorm", 24)
wrapped("T92", "Keel as published, 24 blocks", "post", "keel-postln", 24)
wrapped("T93", "Post-LN with keel gates that start toward carry", "post", "keel", 16)
wrapped("T94", "Pre-LN with keel gates", "pre", "keel", 8)
wrapped("T95", "dynamic hyper-connections", "pre", "dhc", 8)
wrapped("T96", "manifold-constrained hyper-connections", "pre", "mhc", 6)


@healthy("T97", "Pre-LN, 24 blocks")
def pre_ln(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 24, 20, 28), draw.pick("width", 32, 48))
    return decoder(draw, model, draw.factor("lr", 1e-3, 1.4), 80, shows=learned(2.1))


@healthy("H09", "small Pre-LN decoder")
def small(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 3, 2, 4), draw.pick("width", 32, 48))
    return decoder(draw, model, draw.factor("lr", 2e-3, 1.5), 200, 32, shows=learned(1.8))


@healthy("T98", "a lag that only attention can bridge")
def lagged(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 4, 3, 5), draw.pick("width", 32, 48))
    return decoder(draw, model, draw.factor("lr", 2e-3, 1.3), 150, 32, lag=2)


@healthy("T99", "weight-shared blocks")
def shared(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 6, 4, 8), shared=True)
    return decoder(draw, model, draw.factor("lr", 1e-3, 1.4), 100, shows=learned(2.1))


@healthy("T81", "tied embedding and head")
def tied(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 6, 4, 8), tied=True)
    return decoder(draw, model, draw.factor("lr", 2e-3, 1.4), 100, shows=learned(2.0))


class LayerScale(nn.Module):
    """A branch scaled by a small learned vector."""

    def __init__(self, module: nn.Module, width: int, start: float) -> None:
        super().__init__()
        self.module, self.scale = module, nn.Parameter(torch.full((width,), start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) * self.scale


@healthy("T82", "LayerScale at 1e-4 and at 0 (ReZero)")
def layer_scale(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 12, 8, 16))
    start = draw.pick("start", 1e-4, 0.0, 1e-2)
    for block in model.blocks:
        block.attention, block.mlp = LayerScale(block.attention, 32, start), LayerScale(block.mlp, 32, start)
    return decoder(draw, model, draw.factor("lr", 2e-3, 1.4), 100, shows=learned(2.0))


@healthy("T83", "head that starts at zero")
def zero_head(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 6, 4, 8))
    nn.init.zeros_(model.head.weight)
    return decoder(draw, model, draw.factor("lr", 2e-3, 1.4), 100, shows=learned(2.0))


class Adapter(nn.Module):
    """A frozen layer and a low-rank change of it: W x + B A x, B = 0 at the start."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def pretrain(model: nn.Module, draw: Draw, steps: int = 60) -> None:
    """Some steps on another chain's words."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = plain_step(model, optimizer, markov(32, 16, draw.seed + 50, lag=2), word_loss)
    for k in range(steps):
        step(k)
    model.zero_grad()


@healthy("T84", "low-rank adapters in a frozen decoder")
def adapters(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 4, 3, 6))
    pretrain(model, draw)
    model.requires_grad_(False)
    rank = draw.pick("rank", 4, 2, 8)
    for block in model.blocks:
        block.attention.qkv = Adapter(block.attention.qkv, rank)
        block.mlp[0] = Adapter(block.mlp[0], rank)
    model.head = Adapter(model.head, rank)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=draw.factor("lr", 5e-3, 1.4))
    step = plain_step(model, optimizer, markov(32, 16, draw.seed), word_loss)
    return Program(model, optimizer, step, 150, shows=learned(2.3))


@healthy("T85", "fine-tuning with a frozen body")
def frozen_body(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 4, 3, 6))
    pretrain(model, draw)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=draw.factor("lr", 1e-2, 1.4))
    step = plain_step(model, optimizer, markov(32, 16, draw.seed), word_loss)
    return Program(model, optimizer, step, 150, shows=learned(2.2))


@healthy("T86", "Post-LN, 6 blocks, warm-up and cosine decay")
def post_ln_warmed(draw: Draw) -> Program:
    model = Decoder("post", draw.pick("depth", 6, 4, 8))
    return scheduled(draw, decoder(draw, model, draw.factor("lr", 1e-3, 1.4), 160, shows=learned(2.1)))


@healthy("T87", "large batch")
def large_batch(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 3, 2, 4))
    return decoder(draw, model, draw.factor("lr", 3e-3, 1.4), 80, 128, shows=learned(2.0))


@healthy("T88", "tiny loss scale, Adam")
def tiny_loss(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 6, 4, 8))
    scale = draw.factor("scale", 1e-6, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 2e-3, 1.4), eps=1e-16)
    step = plain_step(model, optimizer, markov(16, 16, draw.seed), lambda m, b: scale * word_loss(m, b))
    shows = lambda shown: None if shown.last_loss < 1.9 * scale else f"loss {shown.last_loss / scale:.2f}"  # noqa: E731
    return Program(model, optimizer, step, 150, shows=shows)


@healthy("T89", "clipped to 1, warm-up, gradient accumulation")
def accumulated(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 4, 3, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 2e-3, 1.4))
    data = markov(16, 16, draw.seed)
    parts = draw.pick("parts", 4, 2, 3)

    def step(k: int) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(parts):
            loss = word_loss(model, next(data)) / parts
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return scheduled(draw, Program(model, optimizer, step, 150, shows=learned(2.0)))


@healthy("T79", "query and key weights that grow, behind QK-norm")
def logits_held(draw: Draw) -> Program:
    return growing(draw, norm=True)
