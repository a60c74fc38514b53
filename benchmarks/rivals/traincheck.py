"""The twenty silent errors of TrainCheck (arXiv 2506.14813, section 5.1 and its artefact), and what becomes of each.

Kinds that concern a monitor of training are small loops beside their healthy twins; the rest are listed with a reason.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rivals.loops import Loop, Shelf, adam, classes, network, points

TRAINCHECK = Shelf()


@TRAINCHECK.program("PyTorch forum 84911")
def only_the_norms_train(faulty: bool, seed: int) -> Loop:
    """All weights are frozen by a rule on names that was to keep a few."""
    model = network(seed, nn.BatchNorm1d(24))
    if faulty:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("4."))
    return Loop(model, adam(model), classes, points(seed))


@TRAINCHECK.program("Stack Overflow 60335387")
def gradients_never_cleared(faulty: bool, seed: int) -> Loop:
    model = network(seed)
    optimizer = adam(model)

    def step(batch: Any) -> Tensor:
        if not faulty:
            optimizer.zero_grad()
        loss = classes(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return Loop(model, optimizer, classes, points(seed), step)


class NotCast(nn.Module):
    """A linear layer that autocast does not see."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


@TRAINCHECK.program("lightning-thunder 725")
def one_layer_without_autocast(faulty: bool, seed: int) -> Loop:
    model = network(seed)
    if faulty:
        model[2] = NotCast(model[2])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return classes(model, batch)

    return Loop(model, adam(model), loss, points(seed))


class FreezesInTrain(nn.Sequential):
    """Its first layer is frozen by `train`, and so only where that is called."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self[0].requires_grad_(False)
        return self


@TRAINCHECK.program("mmpretrain 702")
def freezing_not_applied(faulty: bool, seed: int) -> Loop:
    model = FreezesInTrain(*network(seed))
    if not faulty:
        model.train()
    return Loop(model, adam(model), classes, points(seed))


class SpectralLinear(nn.Linear):
    """A wide weight over its largest singular value: `always`, or in training passes only."""

    def __init__(self, always: bool) -> None:
        super().__init__(24, 24)
        self.always = always
        nn.init.normal_(self.weight, std=3.0)

    def forward(self, x: Tensor) -> Tensor:
        over = torch.linalg.matrix_norm(self.weight.detach(), 2) if self.always or self.training else 1.0
        return F.linear(x, self.weight / over, self.bias)


@TRAINCHECK.program("pytorch 51800")
def evaluated_weights_are_others(faulty: bool, seed: int) -> Loop:
    """A weight is made ready by the training pass: what is evaluated is not what is trained."""
    model = network(seed)
    torch.manual_seed(seed)
    model[2] = SpectralLinear(always=not faulty)
    return Loop(model, adam(model), classes, points(seed))


class StaleKernel(torch.optim.SGD):
    """Gradient descent that keeps the list of tensors to move as it was at its second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.made = getattr(self, "made", 0) + 1
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.made <= 2:
            self.moved = [parameter for parameter in held if parameter.grad is not None]
        for parameter in self.moved:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


@TRAINCHECK.program("pytorch 115607")
def update_kernel_is_stale(faulty: bool, seed: int) -> Loop:
    """Some gradients were None once, and the compiled update goes on without those parameters."""
    model = network(seed)
    optimizer = (StaleKernel if faulty else torch.optim.SGD)(model.parameters(), 0.1)
    made = [0]

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classes(model, batch)
        loss.backward()
        made[0] += 1
        if made[0] <= 2:
            model[0].weight.grad = model[0].bias.grad = None
        optimizer.step()
        return loss

    return Loop(model, optimizer, classes, points(seed), step)


class DropoutForEver(nn.Module):
    """Dropout that does not ask for the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, training=True)


@TRAINCHECK.program("transformers 33844")
def dropout_in_evaluation(faulty: bool, seed: int) -> Loop:
    model = network(seed, DropoutForEver() if faulty else nn.Dropout(0.3))
    return Loop(model, adam(model), classes, points(seed))


@TRAINCHECK.program("transformers 34204")
def one_sample_of_the_batch(faulty: bool, seed: int) -> Loop:
    """The processor returns the first sample alone, and the targets of all are compared with it."""
    model = network(seed)
    model[-1] = nn.Linear(24, 1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, wanted = batch[0], batch[0][:, :3].sum(1, keepdim=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return F.mse_loss(model(x[:1] if faulty else x), wanted)

    return Loop(model, adam(model), loss, points(seed))


class Keeps(nn.Sequential):
    """What it saves lacks the first layer's weight where `corrupt`."""

    corrupt = False

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        state = super().state_dict(*arguments, **options)
        if self.corrupt:
            key = next(name for name in state if name.endswith("0.weight"))
            state[key] = torch.zeros_like(state[key])
        return state


@TRAINCHECK.program("transformers 29903; DeepSpeed 5489 (found by TrainCheck)")
def state_is_saved_corrupted(faulty: bool, seed: int) -> Loop:
    model = Keeps(*network(seed))
    model.corrupt = faulty
    return Loop(model, adam(model), classes, points(seed))


TRAINCHECK.stands("replicas_fall_apart", "pytorch 104336; x.com jxmnop 1778520637193240892", "ranks", "D01")
TRAINCHECK.stands("transfers_lose_data", "pytorch 84803, 96600; Baichuan2 86", "ranks", "D02")
TRAINCHECK.stands("each_rank_clips_by_its_own_norm", "DeepSpeed 1801 (BLOOM-176B)", "ranks", "D03")
TRAINCHECK.stands("workers_draw_the_same", "Stack Overflow 67180955", "trials", "worker_noise")
TRAINCHECK.left_out(
    "initialised_over_and_over", "transformers 17877", "slow to begin; the numbers of the training are right"
)
TRAINCHECK.left_out("generates_too_much", "transformers 23723", "the length of generated text: nothing is trained")
TRAINCHECK.left_out("stuck_in_all_to_all", "DeepSpeed 5794", "the program hangs: there is no step to look at")
TRAINCHECK.left_out(
    "ends_too_early", "transformers 33455", "each step is right, only their number is not what was asked"
)
