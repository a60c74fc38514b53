"""Public reports of 2024 to 2026 that no limit on a statistic sees, as small loops beside their healthy twins."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from benchmarks.rivals.loops import (
    CENTRES,
    LanguageModel,
    Loop,
    Shelf,
    adam,
    classes,
    network,
    next_token,
    points,
    walks,
)

REPORTS = Shelf()


@REPORTS.program("transformers 48745, 31673; keras 23038")
def future_is_seen(faulty: bool, seed: int) -> Loop:
    model = LanguageModel(seed, causal=not faulty)
    return Loop(model, adam(model), next_token, walks(seed))


@REPORTS.program("OLMo-core 828; guided-diffusion 167; pytorch 190758")
def replayed_with_another_dropout(faulty: bool, seed: int) -> Loop:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        options = {"use_reentrant": False, "preserve_rng_state": not faulty, "determinism_check": "none"}
        return checkpoint(layer, x, **options)

    model = LanguageModel(seed, dropout=0.3, call=call)
    return Loop(model, adam(model), next_token, walks(seed))


@REPORTS.program("Megatron-LM 1269")
def mask_of_the_loss_shrinks(faulty: bool, seed: int) -> Loop:
    kept, draws = torch.ones(32), torch.Generator().manual_seed(seed)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        drawn = (torch.rand(32, generator=draws) > 0.1).float()
        weight = kept.mul_(drawn) if faulty else kept * drawn
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * weight).sum() / weight.sum().clamp(min=1)

    model = network(seed)
    return Loop(model, adam(model), loss, points(seed))


@REPORTS.program("trl 3857, 3452; ms-swift 4547")
def rewards_without_variance(faulty: bool, seed: int) -> Loop:
    draws = torch.Generator().manual_seed(seed)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch[0][:8].repeat_interleave(4, 0), batch[1][:8].repeat_interleave(4)
        logs = F.log_softmax(model(x), -1)
        chosen = torch.multinomial(logs.exp().detach(), 1, generator=draws)
        reward = torch.ones(8, 4) if faulty else (chosen[:, 0] == y).float().view(8, 4)
        advantage = (reward - reward.mean(1, keepdim=True)).flatten()
        return -(advantage * logs.gather(1, chosen)[:, 0]).mean()

    model = network(seed)
    return Loop(model, adam(model), loss, points(seed))


class Plain(torch.optim.Optimizer):
    """Gradient descent; with `copies` a tensor that is not contiguous is written to in a copy."""

    def __init__(self, parameters: Any, rate: float, copies: bool) -> None:
        super().__init__(parameters, {"lr": rate})
        self.copies = copies

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                target = parameter.data.contiguous() if self.copies else parameter.data
                target.sub_(parameter.grad, alpha=group["lr"])


@REPORTS.program("pytorch 118115, 118117; bitsandbytes 1187")
def update_written_to_a_copy(faulty: bool, seed: int) -> Loop:
    model = network(seed)
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return Loop(model, Plain(model.parameters(), 0.1, faulty), classes, points(seed))


@REPORTS.program("Lightning 20412; EasyR1 57")
def one_batch_for_ever(faulty: bool, seed: int) -> Loop:
    first = next(points(seed))
    model = network(seed)
    return Loop(model, adam(model), classes, iter(lambda: first, None) if faulty else points(seed))


class CarryLoss(torch.autograd.Function):
    """Pass a tensor on, and give a second loss its gradient of one in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


class Experts(nn.Module):
    """Six experts, the best one of each sample; with `balanced` the router is pulled towards equal shares."""

    def __init__(self, balanced: bool) -> None:
        super().__init__()
        self.router, self.balanced = nn.Linear(24, 6, bias=False), balanced
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        weight, best = shares.max(-1)
        balance = 0.5 * (F.one_hot(best, 6).float().mean(0) * shares.mean(0)).sum()
        carried = CarryLoss.apply(weight, balance)
        weight = carried if self.balanced else weight
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return x + weight[:, None] * outputs[torch.arange(len(x)), best]


@REPORTS.program("Automodel 1408; Megatron-LM 1545")
def balance_loss_leads_nowhere(faulty: bool, seed: int) -> Loop:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), Experts(not faulty), Experts(not faulty), nn.Linear(24, 5))
    return Loop(model, adam(model), classes, points(seed))


@REPORTS.program("accelerate 3256; pytorch 149205; accelerate 2665 (found by TrainCheck)")
def optimizer_holds_replaced_tensors(faulty: bool, seed: int) -> Loop:
    model = network(seed)
    held = adam(model)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    return Loop(model, held if faulty else adam(model), classes, points(seed))


@REPORTS.program("torchtune 2254; ao 1124")
def steps_rounded_away(faulty: bool, seed: int) -> Loop:
    kind = torch.bfloat16 if faulty else torch.float32
    model = network(seed).to(kind)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].to(kind)).float(), batch[1])

    return Loop(model, adam(model, 1e-5, weight_decay=0.0), loss, points(seed))


@REPORTS.program("trl 3926; Flow-Factory 56")
def nothing_learns(faulty: bool, seed: int) -> Loop:
    model = network(seed).requires_grad_(not faulty)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return classes(model, (batch[0].clone().requires_grad_(), batch[1]))

    return Loop(model, adam(model), loss, points(seed))


@REPORTS.program("transformers 37766, 37197, 34191", script="accumulate_sum")
def accumulated_without_division(faulty: bool, seed: int) -> Loop:
    model, batches = network(seed), points(seed, rows=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        for part in (batch, next(batches), next(batches), next(batches)):
            loss = classes(model, part)
            (loss if faulty else loss / 4).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return Loop(model, optimizer, classes, batches, step)


@REPORTS.program("transformers 46897, 46895, 47395")
def labels_moved_twice(faulty: bool, seed: int) -> Loop:
    model = LanguageModel(seed)
    return Loop(model, adam(model), lambda m, ids: next_token(m, ids, 2 if faulty else 1), walks(seed))


class Added(nn.Module):
    """A layer of spectral norm one, added."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.spectral_norm(nn.Linear(24, 24))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.inner(x))


@REPORTS.program("miles-credit 394")
def unit_vectors_averaged(faulty: bool, seed: int) -> Loop:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), *(Added() for _ in range(8)), nn.utils.spectral_norm(nn.Linear(24, 5)))
    optimizer, average, made = adam(model, 1e-3), copy.deepcopy(model.state_dict()), [0]

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classes(model, batch)
        loss.backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            vector = name.endswith(("weight_u", "weight_v"))
            average[name].lerp_(value, 1.0 if vector and not faulty else 0.02)
        made[0] += 1
        if made[0] % 20 == 0:
            evaluate(model, average)
        return loss

    return Loop(model, optimizer, classes, points(seed), step)


@torch.no_grad()
def evaluate(model: nn.Module, average: dict[str, Tensor]) -> None:
    """Run the averaged weights in evaluation mode, and put the trained ones back."""
    trained = copy.deepcopy(model.state_dict())
    model.load_state_dict(average)
    model.eval()
    model(CENTRES)
    model.train()
    model.load_state_dict(trained)
