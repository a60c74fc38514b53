"""However odd a model or a loop is, a watched training is bitwise that of a bare one, and every step has a record."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flowscope
from benchmarks.harm.attack import Outcome, Plan

SAME = "odd models and loops: training bitwise the same"
RECORDED = "odd models and loops: a record a step, no part switched off"
FIRST = {SAME: (79, 79), RECORDED: (79, 71)}
STEPS = 4
SEEDS = 12
"""Each model and loop is tried with so many seeds in a full run."""


class Stack(nn.Module):
    """Residual blocks; a subclass says how one is called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.called(block, x)
        return self.head(x)

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x)


class Checkpointed(Stack):
    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + checkpoint(block, x, use_reentrant=False)


class Twice(Stack):
    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x) + block(x.detach())


class InPlace(Stack):
    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return (block(x) * 1.5).add_(x).mul_(0.5)


class Views(Stack):
    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([row + block(row) for row in x.unbind(0)])


class Inner(Stack):
    """Takes a gradient inside its forward."""

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return x + y + 0.1 * slope


class Random(Stack):
    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(block(x), 0.4, self.training) + 0.01 * torch.randn_like(x)


class Skips(Stack):
    """Calls a block or not, as a random number says."""

    def called(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x) if torch.rand(()) < 0.6 else x


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.abs() * 5).long().clamp(max=19)).mean(-2))


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2][1].weight = self.blocks[0][1].weight


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 6, 2, dropout=0.3, batch_first=True)
        self.cell = nn.GRUCell(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.rnn(x)[0], None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state)


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (Stack, Checkpointed, Twice, InPlace, Views, Inner, Random, Skips, Sparse, Tied, Frozen, Recurrent)
}

Run = Callable[[nn.Module, torch.optim.Optimizer, Callable[..., None]], None]


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, told: Callable[..., None]) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 5)).square().mean()
        loss.backward()
        optimizer.step()
        told(loss)


def _accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, told: Callable[..., None]) -> None:
    for _ in range(STEPS):
        for size in (4, 1, 2):
            loss = model(torch.randn(size, 3, 5)).square().mean()
            loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is None or not p.grad.is_sparse], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        told(loss)


def _evaluating(model: nn.Module, optimizer: torch.optim.Optimizer, told: Callable[..., None]) -> None:
    for _ in range(STEPS):
        model.eval()
        if not isinstance(model, Inner):
            with torch.no_grad():
                model(torch.randn(4, 3, 5))
        model.train()
        optimizer.zero_grad(set_to_none=False)
        loss = model(torch.randn(4, 3, 5)).square().mean()
        loss.backward()
        optimizer.step()
        told(loss)


def _bad_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, told: Callable[..., None]) -> None:
    for scale in (1.0, float("nan"), 1e30, 1e-30):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 3, 5)) * scale).square().mean()
        loss.backward()
        optimizer.step()
        told(loss)


def _failing(model: nn.Module, optimizer: torch.optim.Optimizer, told: Callable[..., None]) -> None:
    """A batch too many axes short, caught by the loop."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        try:
            model(torch.randn(4, 3, 9))
        except (RuntimeError, ValueError, IndexError):
            optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 5)).square().mean()
        loss.backward()
        optimizer.step()
        told(loss)


def _averaged(model: nn.Module, optimizer: torch.optim.Optimizer, told: Callable[..., None]) -> None:
    average = copy.deepcopy(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 5)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        told(loss)
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)


LOOPS: dict[str, Run] = {
    run.__name__.strip("_"): run for run in (_plain, _accumulating, _evaluating, _bad_numbers, _failing, _averaged)
}


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Models and loops, drawn together."""
    for number in range(plan.count(len(MODELS) * len(LOOPS) * SEEDS)):
        model, loop = plan.random.choice(list(MODELS)), plan.random.choice(list(LOOPS))
        seed = plan.random.randrange(10**6)
        case = f"case {number}: {model}, {loop}, seed {seed}"
        try:
            bare, _ = _trained(model, loop, seed, None)
            watched, scope = _trained(model, loop, seed, {"every": 1, "config": {"console": "off", "slow_every": 2}})
        except Exception as error:
            yield Outcome(SAME, case, False, f"{type(error).__name__}: {error}")
            continue
        yield Outcome(SAME, case, _equal(bare, watched))
        steps = [record.step for record in scope.records] if scope else []
        off = "switched off:" in scope.summary() if scope else False
        yield Outcome(RECORDED, case, steps == list(range(STEPS)) and not off, f"steps {steps}")


def _trained(model: str, loop: str, seed: int, options: dict[str, object] | None) -> tuple[list[Tensor], object]:
    """Losses and parameters of a run, and its scope."""
    torch.manual_seed(seed)
    made, losses = MODELS[model](), []
    sparse = any(isinstance(module, nn.Embedding) for module in made.modules())
    optimizer = (torch.optim.SGD if sparse else torch.optim.AdamW)(made.parameters(), lr=0.05)
    scope = flowscope.watch(made, optimizer, **options) if options else None

    def told(loss: Tensor) -> None:
        losses.append(loss.detach().clone())
        if scope:
            scope.step(loss=loss)

    LOOPS[loop](made, optimizer, told)
    if scope:
        scope.close()
    return [*losses, *(tensor.detach() for tensor in made.state_dict().values()), torch.get_rng_state()], scope


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))
