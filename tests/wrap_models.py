"""Small models whose merge sites are known by reading them. Sizes are distinct: B=3, T=5, D=8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

B, T, D = 3, 5, 8


class PreNormBlock(nn.Module):
    """Layer-scale and drop-path between branch and add."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mix, self.up, self.down = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.scale = nn.Parameter(torch.full((D,), 0.7))
        self.drop = nn.Dropout(0.0)

    def branches(self, x: Tensor, site: int) -> Tensor:
        """The branch output of each site."""
        if site == 0:
            return self.drop(self.scale * self.mix(self.norm1(x)))
        return self.down(functional.gelu(self.up(self.norm2(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branches(x, 0)
        return self.branches(x, 1) + x


class PostNormBlock(nn.Module):
    """LN(x + f(x)) twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mix, self.mlp = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.mix(x))
        return self.norm2(x + torch.tanh(self.mlp(x)))


class ParallelBlock(nn.Module):
    """(a + b) + x is one site: the sum of the branches is no merge."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.a(h) + self.b(h) + x


class ChainedBlock(nn.Module):
    """(x + a) + b are two sites, though b does not depend on x + a."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.a(h) + self.b(h)


class StatementBlock(nn.Module):
    """An add of positions that is no site, an in-place statement, `torch.add` with alpha."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.linspace(-1, 1, T * D).reshape(1, T, D).repeat(B, 1, 1))
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x + self.position)
        h.add_(x)
        return torch.add(h, self.b(h), alpha=0.5)


class FunctionalDropoutBlock(nn.Module):
    """The carry passes through a function that is no child."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x + self.a(x), 0.5, self.training)
        return x + self.b(x)


class FlatteningBlock(nn.Module):
    """Flattens the positions for its second branch, as OPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        shape = x.shape
        x = x.reshape(-1, x.size(-1))
        residual = x
        return (residual + self.b(self.norm(x))).view(shape)


class FlatteningPostNormBlock(PostNormBlock):
    """Flattens the positions between norm and second branch, and adds them back before the last norm, as OPT-350m."""

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = self.norm1(x + self.mix(x)).reshape(-1, x.size(-1))
        return self.norm2((x + torch.tanh(self.mlp(x))).view(shape))


class NormWithScale(nn.LayerNorm):
    """A norm that returns a pair, as I-BERT's."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return super().forward(x), 1.0


class TupleNormBlock(nn.Module):
    """The carry passes through a child that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = NormWithScale(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.norm(x + self.a(x))
        return x + self.b(x)


class SequentialBlock(nn.Sequential):
    """Iterates over its own children."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class BasicBlock(nn.Module):
    """A residual block of a convnet: in-place add, in-place ReLU, projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ConvNet(nn.Module):
    """Two stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
        self.layer2 = nn.Sequential(BasicBlock(4, 6, 2), BasicBlock(6, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class AddcmulBlock(nn.Module):
    """The add is fused with the layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(D, D), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, self.scale, self.a(x))


class Stack(nn.Module):
    """A stem, blocks one behind the other, and a head."""

    def __init__(self, block: Any, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(D, D)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(D, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Checkpointed(Stack):
    """A stack whose blocks can be checkpointed: `reentrant` None (not), True or False."""

    reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def hidden_states() -> Tensor:
    """A [B, T, D] input."""
    return torch.randn(B, T, D)


def inputs(count: int = 4) -> list[Tensor]:
    """The same [B, T, D] inputs every time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, T, D, generator=generator) for _ in range(count)]


def sequential_block() -> nn.Module:
    """A block that is a Sequential."""
    return SequentialBlock(nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh())


class Branches(nn.Module):
    """What the blocks below share: two branches behind one norm, whose sum is no merge."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def branches(self, x: Tensor) -> Tensor:
        """The sum of both."""
        h = self.norm(x)
        return self.a(h) + self.b(h)


class LoopAddsBlock(Branches):
    """Its carry is added by the code around it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.branches(x)


class ScaledCarryBlock(Branches):
    """Its carry is scaled."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul(0.9).add_(self.branches(x))


class LerpBlock(Branches):
    """Its carry meets the branch in a lerp."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.branches(x), 0.5)


class TwoHalvesBlock(Branches):
    """Two sums that both hold x are added, as in a graph layer with attention beside; then a merge as usual."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.a(x)) + (x + self.b(x))
        return x + self.b(self.norm(x))


class SumOnlyBlock(Branches):
    """As a projection shortcut in front, and identity shortcuts in its siblings."""

    def __init__(self, projects: bool = False) -> None:
        super().__init__()
        self.shortcut = nn.Linear(D, D) if projects else None

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.shortcut is None else self.shortcut(x)) + self.b(self.a(self.norm(x)))


class SumFunctionBlock(Branches):
    """Adds by `sum`."""

    def forward(self, x: Tensor) -> Tensor:
        return sum([x, self.a(self.norm(x))])
