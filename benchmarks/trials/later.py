"""Faults of public reports, written for the trials as they stood: the first score on them was taken before any fix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.trials.case import Program, case, draws, padded, script, tokens
from benchmarks.trials.vision import ResidualBlock, classify, pictures, sgd

VOCABULARY = 32

script("ema_copied_back", "update", says=r"outside|between|not the optimizer|else|after", least="note")
script("clipped_every_micro_batch", "accumulation", says=r"micro|clip")
script("discriminator_keeps_gradient", "accumulation", says=r"zero_grad|earlier|times|second")
script("left_in_evaluation", "train_eval", says=r"evaluation|eval\b|train\(\)", least="note")


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr)


class Attention(nn.Module):
    """Self-attention written out; `viewed`: heads are put together by a view where they should be transposed."""

    def __init__(self, width: int, heads: int, causal: bool = True, viewed: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.viewed = heads, causal, viewed
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
        if self.causal:
            ahead = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
            scores = scores.masked_fill(ahead, -1e9)
        if bias is not None:
            scores = scores + bias
        out = scores.softmax(-1) @ v
        out = out.reshape(x.shape) if self.viewed else out.transpose(1, 2).reshape(x.shape)
        return self.proj(out)


class Block(nn.Module):
    def __init__(self, width: int, **attention: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, 4, **attention)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), bias)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, viewed: tuple[bool, ...] = (False, False)) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block(32, viewed=one) for one in viewed)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token(m: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@case("causality", where=r"blocks\.1\b")
def heads_viewed_not_transposed(faulty: bool) -> Program:
    """The second block views [B, H, T, D] as [B, T, H D]: what belongs to a later position comes to an earlier one."""
    torch.manual_seed(0)
    model = Decoder((False, faulty))
    return Program(model, next_token, draws(tokens), adamw(model))


class Sinusoids(nn.Module):
    """Fixed encodings of positions, as in the classical tutorial, which has positions first."""

    def __init__(self, width: int, positions_first: bool) -> None:
        super().__init__()
        at = torch.arange(40)[:, None] * torch.exp(torch.arange(0, width, 2) * (-4.0 / width))
        self.register_buffer("pe", torch.stack([at.sin(), at.cos()], -1).flatten(1))
        self.positions_first = positions_first

    def forward(self, x: Tensor) -> Tensor:
        if self.positions_first:
            return x + self.pe[: x.size(0)].unsqueeze(1)
        return x + self.pe[: x.size(1)]


class Classifier(nn.Module):
    def __init__(self, positions_first: bool) -> None:
        super().__init__()
        self.embed, self.pos_encoder = nn.Embedding(VOCABULARY, 32), Sinusoids(32, positions_first)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.encoder(self.pos_encoder(self.embed(ids))).mean(1))


def sentences(g: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = tokens(g, rows=8)
    return ids, ids[:, 0] % 4


@case("samples", where=r"pos_encoder|encoder|^$")
def encoding_added_along_the_batch(faulty: bool) -> Program:
    """Sinusoids for [T, B, D] are added to [B, T, D]: a sample's place in its batch is encoded."""
    torch.manual_seed(0)
    model = Classifier(faulty)
    return Program(model, classify, draws(sentences), adamw(model))


class AttentionPool(nn.Module):
    """Weighs instances of a bag; the softmax is taken over the axis given."""

    def __init__(self, width: int, axis: int) -> None:
        super().__init__()
        self.score, self.axis = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 1)), axis

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x).softmax(self.axis) * x).sum(1)


class Bags(nn.Module):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.encoder, self.pool, self.head = nn.Linear(12, 32), AttentionPool(32, axis), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.encoder(x).relu()))


@case("samples", where=r"pool")
def softmax_over_the_batch(faulty: bool) -> Program:
    """Instances [B, N, D] are weighed by a softmax over samples."""
    torch.manual_seed(0)
    model = Bags(0 if faulty else 1)

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, 9, 12, generator=g)
        return x, (x[:, :, 0].max(1).values > 1.3).long()

    return Program(model, classify, draws(one), adamw(model))


class Masked(nn.Module):
    """An encoder told of padding by a mask [B, T]."""

    def __init__(self, queries: bool) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, 32, padding_idx=0), nn.Embedding(20, 32)
        self.layers = nn.ModuleList(Block(32, causal=False) for _ in range(2))
        self.head, self.queries = nn.Linear(32, 5), queries

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = (1.0 - attention_mask.float()) * -1e9
        bias = hidden[:, None, :, None] if self.queries else hidden[:, None, None, :]
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.size(1)))
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x)


@case("padding", where=r"layers\.0\b")
def mask_on_the_queries(faulty: bool) -> Program:
    """The mask is broadcast over keys: rows of padding are masked, and everyone attends to it."""
    torch.manual_seed(0)
    model = Masked(faulty)

    def one(g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        ids, mask = padded(tokens(g), g)
        return ids, mask, (ids % 5).masked_fill(mask == 0, -100)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0], batch[1]).flatten(0, 1), batch[2].flatten())

    return Program(model, loss, draws(one), adamw(model))


@case("targets", "padding", "labels", says=r"padd", least="note")
def padding_counts_in_the_loss(faulty: bool) -> Program:
    """The labels of padding are its own token, not -100: most of what is learnt is to pad."""
    torch.manual_seed(0)
    model = Decoder()
    model.embed = nn.Embedding(VOCABULARY, 32, padding_idx=0)

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        ids, mask = padded(tokens(g, rows=6), g)
        return ids, ids if faulty else ids.masked_fill(mask == 0, -100)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0])[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten())

    return Program(model, loss, draws(one), adamw(model))


@case("loss_start", says=r"sum|axis|dim|over")
def log_softmax_over_time(faulty: bool) -> Program:
    """The head's log_softmax runs over positions, not over classes, before nll_loss."""
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(VOCABULARY, 24), nn.GRU(24, 32, batch_first=True)
            self.out = nn.Linear(32, 6)

        def forward(self, ids: Tensor) -> Tensor:
            return F.log_softmax(self.out(self.rnn(self.embed(ids))[0]), dim=1 if faulty else 2)

    model = Tagger()

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = tokens(g)
        return ids, ids % 6

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.nll_loss(m(batch[0]).flatten(0, 1), batch[1].flatten())

    return Program(model, loss, draws(one), adamw(model))


@case("labels", says=r"order|transpos|another|other|sample")
def targets_flattened_in_another_order(faulty: bool) -> Program:
    """Logits are flattened from [B, T, V], targets from [T, B]: each is compared with another sample's token."""
    torch.manual_seed(0)
    model = Decoder()

    def loss(m: nn.Module, ids: Tensor) -> Tensor:
        targets = ids[:, 1:]
        return F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), (targets.t() if faulty else targets).flatten())

    return Program(model, loss, draws(tokens), adamw(model))


class Trunk(nn.Module):
    """A bounded feature; `through_data`: it is bounded behind autograd's back."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.through_data = nn.Linear(10, 32), nn.Linear(32, 1), through_data

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.through_data:
            x.data.clamp_(-0.3, 0.3)
        else:
            x = x.clamp(-0.3, 0.3)
        return self.fc2(x).squeeze(-1)


def regress(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(m(batch[0]), batch[1])


@case("gradient", where=r"fc1|^$", least="note")
def clamped_through_data(faulty: bool) -> Program:
    """`x.data.clamp_()`: values are clamped, gradients pass as if they were not."""
    torch.manual_seed(0)
    model = Trunk(faulty)

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 10, generator=g)
        return x, (x[:, 0] * x[:, 1]).tanh()

    return Program(model, regress, draws(one), torch.optim.Adam(model.parameters(), 1e-3))


class Normaliser:
    """Running mean and variance of observations, an object of its own as in many agents."""

    def __init__(self, width: int) -> None:
        self.mean, self.var, self.count = torch.zeros(width), torch.ones(width), torch.tensor(1e-4)

    def update(self, x: Tensor) -> None:
        total = self.count + len(x)
        delta = x.mean(0) - self.mean
        spread = self.var * self.count + x.var(0, correction=0) * len(x) + delta**2 * self.count * len(x) / total
        self.mean, self.var, self.count = self.mean + delta * len(x) / total, spread / total, total


class SavedNormaliser(Normaliser, nn.Module):
    """The same as buffers."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        for name, value in (("mean", torch.zeros(width)), ("var", torch.ones(width)), ("count", torch.tensor(1e-4))):
            self.register_buffer(name, value)


class Agent(nn.Module):
    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.obs_rms = (SavedNormaliser if kept else Normaliser)(6)
        self.policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.obs_rms.update(x)
        return self.policy((x - self.obs_rms.mean) / (self.obs_rms.var + 1e-8).sqrt())


@case("saving", where=r"obs_rms|^$", says=r"obs_rms|attribute|state|save")
def observation_statistics_not_saved(faulty: bool) -> Program:
    """The normaliser of observations is no part of any state."""
    torch.manual_seed(0)
    model = Agent(not faulty)

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 3 + 2 * torch.randn(16, 6, generator=g)
        return x, (x[:, 0] > x[:, 1]).long() + (x[:, 2] > 4).long()

    batches = draws(one)
    for x, _ in batches[:2]:  # some steps were made
        model(x)
    return Program(model, classify, batches, torch.optim.Adam(model.parameters(), 3e-4))


class Remembering(nn.Module):
    """Attention with a cache of keys; `keeps`: also in training, from batch to batch."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(24, 24) for _ in range(3))
        self.keeps, self.past = keeps, None

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.key(x), self.value(x)
        if self.past is not None:
            k, v = torch.cat([self.past[0], k], 1), torch.cat([self.past[1], v], 1)
        if self.keeps:
            self.past = (k.detach()[:, -30:], v.detach()[:, -30:])
        earlier = k.size(1) - x.size(1)
        ahead = torch.ones(x.size(1), k.size(1), dtype=torch.bool).triu(1 + earlier)
        scores = (self.query(x) @ k.transpose(1, 2) / 24**0.5).masked_fill(ahead, -1e9)
        return scores.softmax(-1) @ v


class Cached(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.embed, self.attn, self.head = nn.Embedding(VOCABULARY, 24), Remembering(keeps), nn.Linear(24, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.attn(x))


@case("determinism", where=r"attn", least="note")
def cache_kept_between_batches(faulty: bool) -> Program:
    """Keys of the last batch stay in the cache: this batch attends to them."""
    torch.manual_seed(0)
    model = Cached(faulty)
    return Program(model, next_token, draws(tokens), adamw(model))


class Reentrant(nn.Module):
    """Frozen embedding, checkpointed blocks; `prepared`: the embedded input is told to require a gradient."""

    def __init__(self, prepared: bool) -> None:
        super().__init__()
        self.embed, self.prepared = nn.Embedding(VOCABULARY, 32).requires_grad_(False), prepared
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.prepared:
            x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@case("update", "gradient", "recomputation", where=r"blocks\.")
def checkpoint_without_a_graph(faulty: bool) -> Program:
    """A reentrant checkpoint whose input needs no gradient: the blocks get none."""
    torch.manual_seed(0)
    model = Reentrant(not faulty)
    return Program(model, next_token, draws(tokens), adamw(model))


class Checkpointed(nn.Module):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 16, 3, padding=1), ResidualBlock(16)
        self.norm, self.at = nn.BatchNorm2d(16), at
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.at == "norm":
            x = checkpoint(lambda y: self.norm(y).relu(), x, use_reentrant=False)
        else:
            x = checkpoint(lambda y: y.relu(), self.norm(x), use_reentrant=False)
        return self.head(x)


@case("recomputation", where=r"norm", least="note")
def batch_counted_twice_by_a_checkpoint(faulty: bool) -> Program:
    """A BatchNorm inside a checkpoint: its running statistics move twice a step."""
    torch.manual_seed(0)
    model = Checkpointed("norm" if faulty else "relu")
    return Program(model, classify, draws(pictures), sgd(model))


@case("data", says=r"scale|range|small|spread|deviation", least="note")
def divided_by_255_twice(faulty: bool) -> Program:
    """Pixels between 0 and 1 are divided by 255 once more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    model.append(nn.Linear(256, 4))

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = pictures(g)
        x = x.sub(x.min()).div(x.max() - x.min())
        return x / 255 if faulty else x, y

    return Program(model, classify, draws(one), sgd(model))


@case("update", says=r"rate|lr", least="note")
def warm_up_divided_as_integers(faulty: bool) -> Program:
    """`step // warmup`: the learning rate is exactly 0 for the whole warm-up."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = adamw(model)
    warmup = 100
    rise = (lambda step: (step + 1) // warmup) if faulty else (lambda step: (step + 1) / warmup)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rise)
    for ids in draws(tokens, 3, seed=2):
        next_token(model, ids).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return Program(model, next_token, draws(tokens), optimizer)
