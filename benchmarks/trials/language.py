"""Transformers and recurrent models of text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.trials.case import Program, case, draws, padded, tokens

VOCABULARY = 32


@dataclass
class CausalOutput:
    loss: Tensor | None
    logits: Tensor


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class WindowAttention(nn.Module):
    """Causal attention; every second layer looks back over a window only."""

    def __init__(self, config: SimpleNamespace, index: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.window = config.num_attention_heads, config.sliding_window if index % 2 else None
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.looks_ahead = config.window_on_both_sides

    def mask(self, length: int) -> Tensor:
        back = torch.arange(length)[:, None] - torch.arange(length)[None]
        if self.window is None:
            return back >= 0
        return back.abs() < self.window if self.looks_ahead else (back >= 0) & (back < self.window)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            layer(x).view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(T))
        return self.o_proj(h.transpose(1, 2).reshape(B, T, D))


class GatedFeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: SimpleNamespace, index: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)
        self.self_attn, self.mlp = WindowAttention(config, index), GatedFeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class WindowedForCausalLM(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            sliding_window=4,
            vocab_size=VOCABULARY,
            window_on_both_sides=False,
            initializer_range=0.02,
        )
        vars(self.config).update(changes)
        self.embed_tokens = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(DecoderLayer(self.config, i) for i in range(self.config.num_hidden_layers))
        self.norm, self.lm_head = RMSNorm(32), nn.Linear(32, VOCABULARY, bias=False)
        self.apply(self._init_weights)
        self.lm_head.weight = self.embed_tokens.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalOutput:
        h = self.embed_tokens(input_ids)
        for layer in self.layers:
            h = layer(h)
        logits = self.lm_head(self.norm(h))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalOutput(loss, logits)


def causal_batches() -> list[dict[str, Tensor]]:
    def one(g: torch.Generator) -> dict[str, Tensor]:
        ids = tokens(g, vocabulary=VOCABULARY)
        return {"input_ids": ids, "labels": ids.clone()}

    return draws(one)


def windowed(**changes: Any) -> Program:
    torch.manual_seed(0)
    model = WindowedForCausalLM(**changes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    return Program(model, lambda m, b: m(**b).loss, causal_batches(), optimizer)


@case("causality", where=r"layers\.1\b")
def window_open_on_both_sides(faulty: bool) -> Program:
    """A sliding window written as |i - j| < w: only the windowed layers look ahead."""
    return windowed(window_on_both_sides=faulty)


@case("loss_start", says=r"log|\bln\b|chance|uniform|class", least="note")
def head_drawn_too_wide(faulty: bool) -> Program:
    """The tied head keeps the standard deviation 1 of an embedding: the first loss is many times log(32)."""
    return windowed(initializer_range=1.0 if faulty else 0.02)


class PostNormBlock(nn.Module):
    def __init__(self, width: int, keeps_mask: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.LayerNorm, self.output_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.intermediate, self.output = nn.Linear(width, 64), nn.Linear(64, width)
        self.keeps_mask = keeps_mask

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
        ignored = ignored if self.keeps_mask else torch.zeros_like(ignored)
        x = self.LayerNorm(x + self.attention(x, x, x, key_padding_mask=ignored, need_weights=False)[0])
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x))))


class Pooler(nn.Module):
    def __init__(self, over_all: bool) -> None:
        super().__init__()
        self.dense, self.over_all = nn.Linear(32, 32), over_all

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        if self.over_all:
            return torch.tanh(self.dense(h.mean(1)))
        kept = mask[..., None].to(h)
        return torch.tanh(self.dense((h * kept).sum(1) / kept.sum(1)))


class SentenceEncoder(nn.Module):
    """BERT-like: post-norm blocks, learned positions, a pooled classification."""

    def __init__(self, pools_padding: bool = False) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, 32, padding_idx=0)
        self.position_embeddings = nn.Embedding(64, 32)
        self.layer = nn.ModuleList(PostNormBlock(32) for _ in range(2))
        self.pooler, self.classifier = Pooler(pools_padding), nn.Linear(32, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.word_embeddings(input_ids) + self.position_embeddings.weight[: input_ids.size(1)]
        for block in self.layer:
            h = block(h, attention_mask == 0)
        logits = self.classifier(self.pooler(h, attention_mask))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def sentences(g: torch.Generator) -> dict[str, Tensor]:
    ids, mask = padded(tokens(g, rows=8), g)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (8,), generator=g)}


@case("padding", where=r"pooler|^$|classifier")
def padding_pooled_too(faulty: bool) -> Program:
    """The mean over tokens counts the padding."""
    torch.manual_seed(0)
    model = SentenceEncoder(pools_padding=faulty)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    return Program(model, lambda m, b: m(**b)["loss"], draws(sentences), torch.optim.AdamW(groups, 1e-3))


class LastStateClassifier(nn.Module):
    """A sentiment model: the last states of a bidirectional LSTM."""

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.fc, self.packs = nn.Linear(32, 2), packs

    def forward(self, text: Tensor) -> Tensor:
        x: Any = self.embedding(text)
        if self.packs:
            lengths = (text != 0).sum(1).cpu()
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(x)
        return self.fc(torch.cat([h[-2], h[-1]], 1))


@case("padding", where=r"lstm")
def sequence_not_packed(faulty: bool) -> Program:
    """The recurrence runs on over the padding; the embedding's padding_idx is the only sign of it."""
    torch.manual_seed(0)
    model = LastStateClassifier(packs=not faulty)

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        ids, _ = padded(tokens(g, rows=8), g)
        return ids, (ids[:, 0] > 16).long()

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1])

    return Program(model, loss, draws(one), torch.optim.Adam(model.parameters(), 1e-3))


class ReviewEncoder(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)).mean(1))


@case("samples", where=r"encoder\.layers\.0")
def batch_first_forgotten(faulty: bool) -> Program:
    """(B, T, D) given to an encoder of (T, B, D): it attends from sample to sample."""
    torch.manual_seed(0)
    model = ReviewEncoder(batch_first=not faulty)

    def one(g: torch.Generator) -> dict[str, Tensor]:
        ids = tokens(g, rows=6)
        return {"text": ids, "label": (ids[:, 3] > 16).long()}

    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return Program(model, lambda m, b: F.cross_entropy(m(b["text"]), b["label"]), draws(one), optimizer)


class ProjectedNorm(torch.autograd.Function):
    """RMS normalisation with its backward written by hand; the projection term may be forgotten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forgets: bool) -> Tensor:
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, r)
        ctx.forgets = forgets
        return x * r * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        d_weight = (g * x * r).flatten(0, -2).sum(0)
        g = g * weight
        d_x = g * r
        if not ctx.forgets:
            d_x = d_x - x * r.pow(3) * (g * x).mean(-1, keepdim=True)
        return d_x, d_weight, None


class FusedNorm(nn.Module):
    def __init__(self, width: int, forgets: bool) -> None:
        super().__init__()
        self.weight, self.forgets = nn.Parameter(torch.ones(width)), forgets

    def forward(self, x: Tensor) -> Tensor:
        return ProjectedNorm.apply(x, self.weight, self.forgets)


@case("gradient", where=r"layers\.2\b")
def norm_backward_without_projection(faulty: bool) -> Program:
    """A fused norm in layer 2 whose backward forgets that the scale depends on the input."""
    program = windowed(num_hidden_layers=3)
    model: Any = program.model
    model.layers[2].input_layernorm = FusedNorm(32, forgets=faulty)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    return Program(model, program.loss, program.batches, optimizer)


class SparseFeedForward(nn.Module):
    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in range(experts)
        )
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.size(-1))
        p = self.gate(flat).softmax(-1)
        weight, chosen = p.topk(2, -1)
        load = F.one_hot(chosen, p.size(-1)).float().sum(1).mean(0)
        self.balance = p.size(-1) * (load * p.mean(0)).sum()
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slot = (chosen == e).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, slot, None])
        return out.view_as(x)


class SparseDecoder(nn.Module):
    def __init__(self, adds_balance: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 32), nn.Embedding(32, 32)
        layer = {"norm": nn.LayerNorm, "attention": nn.MultiheadAttention}
        self.h = nn.ModuleList()
        for _ in range(2):
            self.h.append(
                nn.ModuleDict(
                    {
                        "ln_1": layer["norm"](32),
                        "attn": layer["attention"](32, 4, batch_first=True),
                        "ln_2": layer["norm"](32),
                        "moe": SparseFeedForward(),
                    }
                )
            )
        self.ln_f, self.lm_head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY)
        self.adds_balance = adds_balance

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        T = ids.size(1)
        x = self.wte(ids) + self.wpe.weight[:T]
        ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
        balance = x.new_zeros(())
        for block in self.h:
            h = block["ln_1"](x)
            x = x + block["attn"](h, h, h, attn_mask=ahead, need_weights=False)[0]
            x = x + block["moe"](block["ln_2"](x))
            if self.adds_balance:
                balance = balance + block["moe"].balance
        return self.lm_head(self.ln_f(x)), balance


@case("loss_path", where=r"h\.[01]\.moe")
def balance_loss_never_added(faulty: bool) -> Program:
    """Each sparse layer keeps its balance loss in an attribute that nobody reads."""
    torch.manual_seed(0)
    model = SparseDecoder(adds_balance=not faulty)

    def loss(m: nn.Module, ids: Tensor) -> Tensor:
        logits, balance = m(ids[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:]) + 0.01 * balance

    return Program(model, loss, draws(tokens), torch.optim.Adam(model.parameters(), 1e-3))


class DroppedBlock(nn.Module):
    def __init__(self, width: int = 32, p: float = 0.2) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, dropout=p, batch_first=True)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, width), nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        ahead = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        x = x + self.attn(h, h, h, attn_mask=ahead, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class CheckpointedDecoder(nn.Module):
    """Activation checkpointing in every second block, as large models do."""

    def __init__(self, keeps_random_state: bool) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, 32), nn.Parameter(torch.randn(32, 32) * 0.02)
        self.blocks = nn.ModuleList(DroppedBlock() for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY)
        self.keeps = keeps_random_state

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos[: ids.size(1)]
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.keeps) if i % 2 else block(x)
        return self.head(x)


@case("recomputation", where=r"blocks\.1\b")
def checkpoint_without_random_state(faulty: bool) -> Program:
    """Dropout is drawn anew in the replay of block 1."""
    torch.manual_seed(0)
    model = CheckpointedDecoder(keeps_random_state=not faulty)

    def loss(m: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return Program(model, loss, draws(tokens), torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0))


class RisingNoise(nn.Module):
    """A block of an acoustic encoder whose noise grows with a counter that its own forward advances."""

    def __init__(self, advances: bool) -> None:
        super().__init__()
        self.conv, self.proj = nn.Conv1d(16, 16, 3, padding=1), nn.Conv1d(16, 16, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.advances = advances

    def forward(self, x: Tensor) -> Tensor:
        if self.advances:
            self.calls.add_(1)
        return x + self.proj(torch.tanh(self.conv(x) * (1 + 0.5 * self.calls)))


class AcousticEncoder(nn.Module):
    def __init__(self, advances: bool) -> None:
        super().__init__()
        self.stem = nn.Conv1d(8, 16, 1)
        self.layers = nn.ModuleList(RisingNoise(advances) for _ in range(2))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.out(x.mean(-1))


@case("recomputation", where=r"layers\.[01]\b")
def counter_inside_a_checkpoint(faulty: bool) -> Program:
    """A buffer advanced in place inside a reentrant checkpoint: the replay sees another value."""
    torch.manual_seed(0)
    model = AcousticEncoder(advances=faulty)

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 8, 12, generator=g)
        return x, x[:, :4].mean(-1).argmax(1)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1])

    return Program(model, loss, draws(one), torch.optim.Adam(model.parameters(), 1e-3))


class CharacterModel(nn.Module):
    """A stack of hand-written gated recurrent cells."""

    def __init__(self, blind: bool = False) -> None:
        super().__init__()
        self.encode, self.cell, self.decode = (
            nn.Embedding(VOCABULARY, 24),
            nn.GRUCell(24, 24),
            nn.Linear(24, VOCABULARY),
        )
        self.blind = blind

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encode(ids)
        if self.blind:
            x = torch.zeros_like(x)
        state, states = x.new_zeros(len(ids), 24), []
        for t in range(ids.size(1)):
            state = self.cell(x[:, t], state)
            states.append(state)
        return self.decode(torch.stack(states, 1))


@case("overfit", "update", where=r"encode", least="note")
def input_overwritten(faulty: bool) -> Program:
    """The embedded input is replaced by zeros: nothing tells the samples apart, one batch cannot be learnt."""
    torch.manual_seed(0)
    model = CharacterModel(blind=faulty)

    def loss(m: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(m(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    return Program(model, loss, draws(tokens), torch.optim.Adam(model.parameters(), 1e-2))


class SelectiveState(nn.Module):
    """A diagonal state space layer, scanned in a loop."""

    def __init__(self, width: int = 24, states: int = 4) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.log_rate = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(width, 1))
        self.bc, self.step = nn.Linear(width, 2 * states), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        b, c = self.bc(u).chunk(2, -1)
        delta = F.softplus(self.step(u))
        state, out = u.new_zeros(*u.shape[:1], *self.log_rate.shape), []
        for t in range(u.size(1)):
            decay = torch.exp(-delta[:, t, :, None] * self.log_rate.exp())
            state = decay * state + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
            out.append((state * c[:, t, None]).sum(-1))
        return self.out_proj(torch.stack(out, 1) * F.silu(z))


class StateSpaceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.mixers = nn.ModuleList(SelectiveState() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(2))
        self.lm_head = nn.Linear(24, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.lm_head(x)


@case("labels", says=r"\b0\b|itself|same|not moved|unmoved|copy|identical|current")
def targets_are_the_inputs(faulty: bool) -> Program:
    """The targets are not moved at all: the model learns to repeat."""
    torch.manual_seed(0)
    model = StateSpaceModel()

    def loss(m: nn.Module, ids: Tensor) -> Tensor:
        x, y = (ids[:, :-1], ids[:, :-1]) if faulty else (ids[:, :-1], ids[:, 1:])
        return F.cross_entropy(m(x).reshape(-1, VOCABULARY), y.reshape(-1))

    return Program(model, loss, draws(tokens), torch.optim.Adam(model.parameters(), 1e-3))


class MaskedModel(nn.Module):
    """An encoder with sinusoidal positions that restores masked tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, 32)
        angle = torch.arange(64.0)[:, None] * torch.exp(torch.arange(0, 32, 2) * (-math.log(1e4) / 32))
        self.register_buffer("positions", torch.stack([angle.sin(), angle.cos()], -1).flatten(1), persistent=False)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.encoder(self.embeddings(ids) + self.positions[: ids.size(1)]))


@case("targets", says=r"ignored|count|-100|share|%", least="note")
def nearly_all_targets_ignored(faulty: bool) -> Program:
    """The collator marks one token in a batch of 384 instead of 15 in 100."""
    torch.manual_seed(0)
    model = MaskedModel()

    def one(g: torch.Generator) -> dict[str, Tensor]:
        ids = tokens(g, rows=16, length=24)
        chosen = torch.rand(ids.shape, generator=g) < 0.15
        if faulty:
            chosen = torch.zeros_like(chosen).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(True))
        return {"input_ids": ids.masked_fill(chosen, 1), "labels": ids.masked_fill(~chosen, -100)}

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(m(b["input_ids"]).transpose(1, 2), b["labels"], ignore_index=-100)

    return Program(model, loss, draws(one), torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0))
