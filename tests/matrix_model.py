"""The model, the batch and the truth of tests/test_matrix.py; importable by the processes it launches."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flowscope

BATCH, TOKENS, WIDTH, HEADS, VOCABULARY, DEPTH = 4, 5, 12, 3, 11, 3
MODES: tuple[str | None, ...] = (None, "keel", "dhc")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A Pre-LN decoder whose forward can hand out the hidden states it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.recompute = False

    def forward(self, input_ids: Tensor, labels: Tensor, keep: list[Tensor] | None = None) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            if keep is not None:
                keep.append(x)
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        if keep is not None:
            keep.append(x)
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def make(mode: str | None) -> Decoder:
    """The model, wrapped with `mode`; the new parameters are moved off their start, or gates would be constants."""
    torch.manual_seed(3)
    model = Decoder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    if mode is not None:
        flowscope.wrap(model, mode=mode, example_inputs=batch())
        with torch.no_grad():
            for _, connection in flowscope.connections(model):
                for parameter in connection.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def truth(mode: str | None) -> list[float]:
    """|dL/dx_l| / |dL/dx_L| by torch.autograd.grad on what the model's own forward hands out; unwatched, fp64."""
    model = copy.deepcopy(make(mode)).double()
    keep: list[Tensor] = []
    loss = model(**batch(), keep=keep)["loss"]
    norms = [gradient.norm().item() for gradient in torch.autograd.grad(loss, keep)]
    return [norm / norms[-1] for norm in norms]
