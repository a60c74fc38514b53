"""Healthy programs on sequences: decoders, encoders, encoder-decoders, recurrence, memory, adapters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .material import ALPHABET, text, windows
from .program import Program, Watch

V = len(ALPHABET)


class CausalSelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(D, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = CausalSelfAttention(dim, heads)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, dim: int = 32, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, dim),
                "wpe": nn.Embedding(length, dim),
                "h": nn.ModuleList([Block(dim, 4) for _ in range(depth)]),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deep = name.endswith(("c_proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if deep else 0.02)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def sorting(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The sort demo of minGPT with lists of 3 to 6 digits below 3: digits, 3, sorted digits; padding 4, label -100."""
    ids, labels = torch.full((batch, 12), 4), torch.full((batch, 12), -100)
    sizes = torch.randint(3, 7, (batch,), generator=generator).tolist()
    for row, n in enumerate(sizes):
        values = torch.randint(0, 3, (n,), generator=generator)
        both = torch.cat([values, torch.tensor([3]), values.sort().values])
        ids[row, : 2 * n] = both[:-1]
        labels[row, n : 2 * n] = both[n + 1 :]
    return ids, labels


def gpt_sorting(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(5, 12, depth=2)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    scope = watch(model, optimizer)
    for step in range(300):
        sizes = [8, 12] if step % 3 else [18, 2]
        micro = [sorting(size, generator) for size in sizes]
        answered = sum((labels >= 0).sum() for _, labels in micro)
        total = 0.0
        for ids, labels in micro:
            loss = (
                F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
                / answered
            )
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scope.step(total)
    ids, labels = sorting(300, generator)
    with torch.no_grad():
        return (model(ids).argmax(-1) == labels)[labels >= 0].float().mean().item()


class MaskedModel(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.word = nn.Embedding(V + 1, dim)
        self.position = nn.Embedding(32, dim)
        self.norm = nn.LayerNorm(dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.decoder = nn.Linear(dim, V + 1)
        nn.init.normal_(self.word.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.decoder.weight = self.word.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.word(ids) + self.position(torch.arange(ids.shape[1])))
        return self.decoder(self.transform(self.encoder(x)))


def counting(batch: int, generator: torch.Generator) -> Tensor:
    """Rows (batch, 16) that go on through the alphabet by a stride of their own, 1 to 3."""
    start = torch.randint(0, V, (batch, 1), generator=generator)
    return (start + torch.randint(1, 4, (batch, 1), generator=generator) * torch.arange(16)) % V


def masked_language(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = MaskedModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 50, (451 - s) / 400))
    scope = watch(model, optimizer)
    for _ in range(450):
        ids = counting(20, generator)
        chosen = torch.rand(ids.shape, generator=generator) < 0.15
        labels = ids.masked_fill(~chosen, -100)
        hidden = chosen & (torch.rand(ids.shape, generator=generator) < 0.8)
        loss = F.cross_entropy(model(ids.masked_fill(hidden, V)).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        scope.step(loss)
    model.eval()
    ids = counting(200, generator)
    chosen = torch.rand(ids.shape, generator=generator) < 0.15
    with torch.no_grad():
        return (model(ids.masked_fill(chosen, V)).argmax(-1) == ids)[chosen].float().mean().item()


class Seq2Seq(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, dim)
        self.position = nn.Parameter(torch.randn(10, dim) * 0.1)
        self.transformer = nn.Transformer(dim, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(dim, 12)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        src, tgt = (self.embed(ids) * math.sqrt(32) + self.position[: ids.shape[1]] for ids in (source, target))
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.generator(self.transformer(src, tgt, tgt_mask=mask, tgt_is_causal=True))


def reversing(seed: int, faulty: bool, watch: Watch) -> float:
    """The Annotated Transformer's loop: Noam's rate, Adam (0.9, 0.98), label smoothing; the task is to reverse."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    noam = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: 32**-0.5 * min((s + 1) ** -0.5, (s + 1) * 120**-1.5) if s else 32**-0.5 * 120**-1.5
    )
    scope = watch(model, optimizer)
    for _ in range(320):
        source = torch.randint(2, 12, (20, 6), generator=generator)
        target = torch.cat([torch.ones(20, 1, dtype=torch.long), source.flip(1)], dim=1)
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        noam.step()
        optimizer.zero_grad(set_to_none=True)
        scope.step(loss)
    source = torch.randint(2, 12, (200, 6), generator=generator)
    target = torch.cat([torch.ones(200, 1, dtype=torch.long), source.flip(1)], dim=1)
    model.eval()
    with torch.no_grad():
        return (model(source, target[:, :-1]).argmax(-1) == target[:, 1:]).float().mean().item()


class CharLSTM(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(V, dim)
        self.rnn = nn.LSTM(dim, dim, 2, dropout=0.1)
        self.decoder = nn.Linear(dim, V)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
        return self.decoder(self.drop(output)), hidden


def char_lstm(seed: int, faulty: bool, watch: Watch) -> float:
    """pytorch/examples word_language_model: carried state, plain SGD at a high rate, clip 0.25, rate / 4 when stuck."""
    torch.manual_seed(seed)
    data = text()[:32_000].view(16, -1).t()
    model = CharLSTM()
    rate = 20.0
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    best = math.inf
    scope = watch(model, optimizer)
    for _ in range(4):
        hidden = (torch.zeros(2, 16, 48), torch.zeros(2, 16, 48))
        total = 0.0
        for start in range(0, 1980, 20):
            hidden = (hidden[0].detach(), hidden[1].detach())
            model.zero_grad()
            output, hidden = model(data[start : start + 20], hidden)
            loss = F.cross_entropy(output.flatten(0, 1), data[start + 1 : start + 21].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            scope.step(loss)
            total += loss.item()
        if total > best:
            optimizer.param_groups[0]["lr"] /= 4
        best = min(best, total)
    model.eval()
    held = text()[32_000:39_000].view(7, -1).t()
    with torch.no_grad():
        output, _ = model(held[:-1], (torch.zeros(2, 7, 48), torch.zeros(2, 7, 48)))
    return -F.cross_entropy(output.flatten(0, 1), held[1:].flatten()).item()


class MemoryLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_net = nn.Linear(dim, dim, bias=False)
        self.kv_net = nn.Linear(dim, 2 * dim, bias=False)
        self.o_net = nn.Linear(dim, dim, bias=False)
        self.distance = nn.Parameter(torch.zeros(heads, 33))
        self.layer_norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        B, T, D = x.shape
        both = self.layer_norm(torch.cat([memory, x], dim=1))
        M = memory.shape[1]
        q = self.q_net(both[:, M:]).view(B, T, self.heads, -1)
        k, v = self.kv_net(both).view(B, M + T, 2, self.heads, -1).unbind(2)
        lag = torch.arange(M, M + T)[:, None] - torch.arange(M + T)[None]
        score = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(D // self.heads)
        score = score + self.distance[:, lag.clamp(0, 32)]
        score = score.masked_fill(lag < 0, -math.inf)
        x = x + self.o_net(torch.einsum("bhts,bshd->bthd", score.softmax(-1), v).reshape(B, T, D))
        return x + self.ff(x)


class TransformerXL(nn.Module):
    def __init__(self, dim: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.word_emb = nn.Embedding(V, dim)
        self.layers = nn.ModuleList([MemoryLayer(dim, 4) for _ in range(depth)])
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, V))

    def forward(self, ids: Tensor, memories: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x = self.word_emb(ids)
        kept = []
        for layer, memory in zip(self.layers, memories, strict=True):
            kept.append(x.detach())
            x = layer(x, memory)
        return self.out(x), kept


class Lion(torch.optim.Optimizer):
    """Sign of the interpolated momentum (arXiv 2302.06675)."""

    def __init__(self, params: object, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((average * first + p.grad * (1 - first)).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)


def transformer_xl(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    data = text()[:33_280].view(8, -1)
    model = TransformerXL()
    optimizer = Lion(model.parameters(), lr=3e-3, weight_decay=0.1)
    memories = [torch.zeros(8, 16, 32) for _ in model.layers]
    scope = watch(model, optimizer)
    losses = []
    for step in range(320):
        start = step % 250 * 16
        if start == 0:
            memories = [torch.zeros(8, 16, 32) for _ in model.layers]
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (1 - 0.9 * step / 320)
        logits, memories = model(data[:, start : start + 16], memories)
        loss = F.cross_entropy(logits.flatten(0, 1), data[:, start + 1 : start + 17].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        losses.append(loss.item())
    return -sum(losses[-40:]) / 40


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * (x @ self.lora_A.t() @ self.lora_B.t())


def lora(seed: int, faulty: bool, watch: Watch) -> float:
    """A decoder learns the text, is frozen, and adapters of rank 4 learn the same text with its alphabet rotated."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(V, 24, depth=2)
    pretraining = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(150):
        ids = windows(25, 12, generator)
        pretraining.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        pretraining.step()
    model.requires_grad_(False)
    for block in model.transformer["h"]:
        block.attn.c_attn = LoRALinear(block.attn.c_attn)
        block.mlp[0] = LoRALinear(block.mlp[0])
        block.mlp[2] = LoRALinear(block.mlp[2])
    model.lm_head = LoRALinear(model.lm_head, 8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scope = watch(model, optimizer)
    losses = []
    for _ in range(300):
        ids = (windows(25, 12, generator) + 5) % V
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        losses.append(loss.item())
    return -sum(losses[-30:]) / 30


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz towards U V^T, as in modded-nanogpt."""
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    for _ in range(steps):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.t() if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for hidden matrices (KellerJordan/Muon)."""

    def __init__(self, params: object, lr: float = 0.02, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def muon_gpt(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(V, 32, depth=2, tied=True)
    hidden = [p for p in model.transformer["h"].parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is h for h in hidden)]
    optimizers = [Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=3e-3, betas=(0.8, 0.95))]
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (250 - s) / 100 + 0.01)) for opt in optimizers
    ]
    scope = watch(model, optimizers)
    losses = []
    for _ in range(250):
        ids = windows(33, 12, generator)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad(set_to_none=True)
        scope.step(loss)
        losses.append(loss.item())
    return -sum(losses[-30:]) / 30


class DeepEncoder(nn.Module):
    """Pre-LN blocks under activation checkpointing; mean pool over the words that are not padding."""

    def __init__(self, dim: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(V + 1, dim, padding_idx=V)
        self.layers = nn.ModuleList([Block(dim, 4) for _ in range(depth)])
        self.ln = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        real = (ids != V).unsqueeze(-1)
        return self.classifier((self.ln(x) * real).sum(1) / real.sum(1).clamp(min=1))


def checkpointed(seed: int, faulty: bool, watch: Watch) -> float:
    """Which of six letters is most frequent: bf16 autocast, checkpointed blocks, padded rows."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = DeepEncoder()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    hits = []
    for _ in range(160):
        labels = torch.randint(0, 6, (16,), generator=generator)
        ids = torch.randint(2, 8, (16, 12), generator=generator)
        swap = torch.rand(16, 12, generator=generator) < 0.35
        ids = torch.where(swap, labels[:, None] + 2, ids)
        lengths = torch.randint(6, 13, (16, 1), generator=generator)
        ids = ids.masked_fill(torch.arange(12) >= lengths, V)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
            loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        hits.append((logits.argmax(-1) == labels).float().mean().item())
    return sum(hits[-40:]) / 40


class GRUAdder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1]).squeeze(-1)


def curriculum(seed: int, faulty: bool, watch: Watch) -> float:
    """The adding problem; the sequences grow from 6 to 16 steps, one longer at every 100th optimizer step."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GRUAdder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    recent = []
    for step in range(1500):
        length = min(16, 6 + step // 100)
        x = torch.zeros(16, length, 2)
        x[..., 0] = torch.rand(16, length, generator=generator)
        marks = torch.rand(16, length, generator=generator).topk(2, dim=1).indices
        x[..., 1].scatter_(1, marks, 1.0)
        loss = F.mse_loss(model(x), (x[..., 0] * x[..., 1]).sum(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scope.step(loss)
        recent.append(loss.item())
    return -sum(recent[-50:]) / 50


PROGRAMS = [
    Program("gpt_sorting", "minGPT's sort demo: padding, ignored labels, uneven accumulation", gpt_sorting, bar=0.8),
    Program(
        "masked_language",
        "BERT pre-training: 15 % masked, tied decoder, Post-LN, linear decay",
        masked_language,
        bar=0.25,
    ),
    Program("reversing", "The Annotated Transformer: nn.Transformer, Noam rate, label smoothing", reversing, bar=0.5),
    Program("char_lstm", "pytorch/examples word_language_model: tied LSTM, SGD 20, clip 0.25", char_lstm, bar=-1.3),
    Program("transformer_xl", "kimiyoung/transformer-xl: segment memory; Lion", transformer_xl, bar=-1.3),
    Program("lora", "LoRA by hand on a frozen decoder, B from zero", lora, bar=-1.9),
    Program("muon_gpt", "modded-nanogpt: Muon for the matrices, AdamW for the rest", muon_gpt, bar=-1.2),
    Program("checkpointed", "deep encoder, activation checkpointing, bf16 autocast, NAdam", checkpointed, bar=0.6),
    Program("curriculum", "adding problem with a curriculum over length, GRU", curriculum, bar=-0.02),
]
