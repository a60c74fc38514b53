"""Optimizers, losses and data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.trials.case import Program, case, draws, tokens
from benchmarks.trials.vision import ResidualBlock, classify, pictures


class SignOptimizer(torch.optim.Optimizer):
    """Lion; with `copies` it makes tensors contiguous first, and so writes to a copy of a transposed weight."""

    def __init__(self, params: Any, lr: float, copies: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.copies = copies

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                update = average.mul(0.9).add(p.grad, alpha=0.1).sign_()
                target = p.data.contiguous() if self.copies else p.data
                target.add_(update, alpha=-group["lr"])
                average.mul_(0.99).add_(p.grad, alpha=0.01)


class TwoTowers(nn.Module):
    """A retrieval model; the item tower's projection is kept transposed, as converted checkpoints are."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.item = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.item_proj = nn.Linear(32, 16)
        self.item_proj.weight = nn.Parameter((torch.randn(32, 16) * 0.15).t())
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, u: Tensor, i: Tensor) -> Tensor:
        a, b = F.normalize(self.user(u), dim=-1), F.normalize(self.item_proj(self.item(i)), dim=-1)
        return self.logit_scale.exp() * a @ b.T


@case("update", where=r"item_proj")
def optimizer_writes_to_a_copy(faulty: bool) -> Program:
    """One transposed weight never moves."""
    torch.manual_seed(0)
    model = TwoTowers()

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        u = torch.randn(12, 16, generator=g)
        return u, u.flip(1) + 0.1 * torch.randn(12, 16, generator=g)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores, right = m(*batch), torch.arange(len(batch[0]))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2

    return Program(model, loss, draws(one), SignOptimizer(model.parameters(), 1e-3, faulty))


class PatchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.randn(1, 5, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.encoder(x)[:, 0])


@case("update", where=r"patch|pos_embed|cls_token")
def groups_leave_parameters_out(faulty: bool) -> Program:
    """Groups by dimension: what has 2 is decayed, what has 1 is not, and the rest is in neither."""
    torch.manual_seed(0)
    model = PatchTransformer()
    decayed = [p for p in model.parameters() if (p.ndim == 2 if faulty else p.ndim >= 2)]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    return Program(model, classify, draws(pictures), torch.optim.AdamW(groups, 1e-3))


@case("update", where=r"norm|bias|^$", says=r"decay", least="note")
def norms_and_biases_decayed(faulty: bool) -> Program:
    """One group: norm gains and biases decay with the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), ResidualBlock(16), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(16, 4))
    if faulty:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    else:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, 1e-3)
    return Program(model, classify, draws(pictures), optimizer)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.conv, self.out = nn.Embedding(32, 24), nn.Conv1d(24, 24, 3, padding=1), nn.Linear(24, 5)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.conv(self.emb(ids).transpose(1, 2)).transpose(1, 2)
        return self.out(F.relu(h))


@case("update", says=r"round|bfloat16|bf16|precision")
def small_steps_in_bf16(faulty: bool) -> Program:
    """Pure bf16 weights and a rate of 2e-6: adding the step changes nothing."""
    torch.manual_seed(0)
    model = Tagger().bfloat16() if faulty else Tagger()

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = tokens(g, rows=8)
        return ids, ids % 5

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0]).float().flatten(0, 1), batch[1].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), 2e-6 if faulty else 2e-3, weight_decay=0.0)
    return Program(model, loss, draws(one), optimizer)


class MessagePassing(nn.Module):
    """A graph network that returns one energy a graph, (B, 1)."""

    def __init__(self, squeezes: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 24)
        self.message = nn.ModuleList(nn.Linear(48, 24) for _ in range(2))
        self.readout, self.squeezes = nn.Linear(24, 1), squeezes

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        h = self.embed(nodes)
        for layer in self.message:
            h = h + torch.tanh(layer(torch.cat([h, adjacency @ h / adjacency.sum(-1, keepdim=True)], -1)))
        energy = self.readout(h.mean(1))
        return energy.squeeze(-1) if self.squeezes else energy


@case("loss_start", says=r"broadcast|shape")
def targets_broadcast(faulty: bool) -> Program:
    """(B, 1) against (B,): the squared error is taken over all pairs."""
    torch.manual_seed(0)
    model = MessagePassing(squeezes=not faulty)

    def one(g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        nodes = torch.randn(10, 6, 4, generator=g)
        adjacency = (torch.rand(10, 6, 6, generator=g) < 0.4).float() + torch.eye(6)
        return nodes, adjacency, nodes[..., 0].mean(1) * 2 + nodes[..., 1].abs().mean(1)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return ((m(batch[0], batch[1]) - batch[2]) ** 2).mean()

    return Program(model, loss, draws(one), torch.optim.Adam(model.parameters(), 1e-3))


class FeatureTransformer(nn.Module):
    """Tabular: every feature is a token."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(features, 16)), nn.Parameter(torch.zeros(features, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x[..., None] * self.scale + self.shift
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(self.norm(h).mean(1))


@case("data", says=r"constant|same value|do(es)? not vary", least="note")
def features_lost_in_preparation(faulty: bool) -> Program:
    """Two columns are clipped to a range in which they never lie: they are constant in every batch."""
    torch.manual_seed(0)
    model = FeatureTransformer()

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(24, 8, generator=g)
        y = (x[:, 2] > 0).long() + (x[:, 5] > 0).long()
        if faulty:
            x[:, [2, 5]] = (x[:, [2, 5]] + 20).clamp(-3, 3)
        return x, y

    return Program(model, classify, draws(one), torch.optim.Adam(model.parameters(), 1e-3))


@case("data", says=r"sort|one class|single class|classes|class ", least="note")
def classes_sorted(faulty: bool) -> Program:
    """The data stand in order of their class and are not shuffled: a batch holds one class."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1), nn.ELU(), nn.Conv2d(12, 12, 3, 2, 1), nn.ELU(), nn.Flatten())
    model.append(nn.Linear(48, 4))
    g = torch.Generator().manual_seed(1)
    x, y = pictures(g, rows=64)
    order = y.argsort(stable=True) if faulty else torch.randperm(64, generator=g)
    batches = [(x[i], y[i]) for i in order.split(8)[:4]]
    return Program(model, classify, batches, torch.optim.Adam(model.parameters(), 1e-3))
