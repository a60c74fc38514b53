"""Small models and losses for the trials, each with a switch for one fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, LENGTH = 20, 8, 8


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.project, self.causal = nn.Linear(WIDTH, 3 * WIDTH), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Block(nn.Module):
    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(causal)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed(x)


class Language(nn.Module):
    """A decoder; `keep_random_state` None is without checkpoints."""

    def __init__(self, causal: bool = True, dropout: float = 0.0, keep_random_state: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(causal, dropout) for _ in range(2))
        self.head, self.keep = nn.Linear(WIDTH, WORDS), keep_random_state

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            if self.keep is None:
                x = block(x)
            else:
                again = {"preserve_rng_state": self.keep, "determinism_check": "none"}
                x = checkpoint(block, x, use_reentrant=False, **again)
        return self.head(x)


def texts(count: int = 3, samples: int = 4) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (samples, LENGTH), generator=draw) for _ in range(count)]


def next_word(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


def word_after_next(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-2]).transpose(1, 2), tokens[:, 2:])


def classifier(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), *extra, nn.Linear(12, 3))


def rows(count: int = 3, samples: int = 32, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [
        (torch.randn(samples, 6, generator=draw), torch.randint(classes, (samples,), generator=draw))
        for _ in range(count)
    ]


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class MixesSamples(nn.Module):
    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.axis = 0 if faulty else -1

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(self.axis)


class Pool(nn.Module):
    """The mean over the words of a sentence; faulty: over its padding, too."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        weight = torch.ones_like(real) if self.faulty else real
        return (x * weight).sum(1) / weight.sum(1)


class Sentences(nn.Module):
    def __init__(self, faulty: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.pool = nn.Embedding(WORDS, WIDTH, padding_idx=0), Pool(faulty)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.pool(self.words(tokens), (tokens != 0).float().unsqueeze(-1)))


def sentences() -> list[tuple[Tensor, Tensor]]:
    batches = []
    for tokens, (_, labels) in zip(texts(), rows(samples=4), strict=True):
        tokens = tokens.clamp(min=1)
        tokens[:, 5:] = 0
        batches.append((tokens, labels))
    return batches


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor * ctx.saved_tensors[0], None


class Squares(nn.Module):
    """x²; faulty: its backward says x, not 2 x."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.factor = 1.0 if faulty else 2.0

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x, self.factor)


class Detaches(nn.Module):
    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() if self.faulty else x


class Balanced(nn.Module):
    """Computes a further term of the loss from its router; faulty: nobody adds it."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head, self.faulty = nn.Linear(6, 4), nn.Linear(6, 3), faulty
        self.term = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        self.term = (share.mean(0) ** 2).sum()
        return self.head(x) * share.amax(-1, keepdim=True)

    def loss(self, batch: Any) -> Tensor:
        value = class_loss(self, batch)
        return value if self.faulty else value + self.term


class Copying(torch.optim.SGD):
    """SGD that writes to a contiguous copy of each weight: one that is transposed never moves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.contiguous().sub_(group["lr"] * p.grad)


def transposed() -> nn.Sequential:
    model = classifier()
    model[0].weight = nn.Parameter(torch.randn(6, 12, generator=torch.Generator().manual_seed(3)).t())
    return model


class Outside(nn.Module):
    """Adds a number that comes from elsewhere and is another one each time."""

    def __init__(self, source: Iterator[int], faulty: bool) -> None:
        super().__init__()
        self.draw = (lambda: next(source)) if faulty else (lambda: 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.draw()


class OtherInTraining(nn.Module):
    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.faulty and self.training else x


class Unregistered(nn.Module):
    """Layers in a plain list are not in state_dict, and the optimizer does not see them."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.Linear(6, 3)]
        self.layers = layers if faulty else nn.ModuleList(layers)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


def chain(layer: type[nn.Module], depth: int, gain: float) -> nn.Sequential:
    """Layers of orthogonal weights times `gain`: they scale a gradient by that times the activation's slope."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(6, 6)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, layer()]
    return nn.Sequential(*layers, nn.Linear(6, 3))
