"""Gradients of exactly 0: of what a step left out they are meant, those that a mask or a cut leaves are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flowscope
from flowscope.instruments.zeros import leads

STEPS = 40
Loss = Callable[["Net", int, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A trunk [6 -> 16], a head [16 -> 3], and what lies beside it."""

    def __init__(self, side: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Linear(16, 3)
        self.side, self.token = side, nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x) + self.token)


def alerts(
    side: nn.Module,
    loss_of: Loss,
    steps: int = STEPS,
    decay: float = 0.0,
    told: list[flowscope.Alert] | None = None,
) -> list[tuple[str, str, int]]:
    """What is more than a note; all of them go into `told`."""
    torch.manual_seed(0)
    model = Net(side)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=decay)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        for step in range(steps):
            x = torch.randn(32, 6)
            loss = loss_of(model, step, x, x[:, :3].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    assert not scope._faults.failed
    if told is not None:
        told += scope.alerts
    return [(a.kind, a.where, a.step) for a in scope.alerts if a.severity != "info"]


def main(model: Net, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def nothing_given(model: Net, step: int, x: Tensor, y: Tensor) -> Tensor:
    """An expert that gets no rows."""
    return main(model, x, y) + 0 * model.side(x[:0]).sum()


def left_out(model: Net, step: int, x: Tensor, y: Tensor) -> Tensor:
    """What a step leaves out has a gradient all the same."""
    return main(model, x, y) + 0 * sum(p.sum() for p in model.side.parameters())


def token_left_out(model: Net, step: int, x: Tensor, y: Tensor) -> Tensor:
    """A parameter that lies in a module which does run."""
    out = model.head(model.trunk(x)) + 0.0 * model.token.sum()
    return functional.cross_entropy(out, y) + model.side(x).square().mean()


def late(model: Net, step: int, x: Tensor, y: Tensor) -> Tensor:
    """An auxiliary loss that is switched on after three quarters of the run."""
    weight = 0.3 if step > 30 else 0.0
    return main(model, x, y) + weight * functional.mse_loss(model.side(x), x)


def late_on_one_trunk(model: Net, step: int, x: Tensor, y: Tensor) -> Tensor:
    """The same beside the head, in a loss that is scaled."""
    weight = 0.3 if step > 30 else 0.0
    return (main(model, x, y) + weight * model.side(model.trunk(x)[:, :6]).square().mean()) * 0.25


def sometimes(model: Net, step: int, x: Tensor, y: Tensor) -> Tensor:
    """It ran without a part in the loss before it is left out."""
    return late(model, 0, x, y) if step < 5 else nothing_given(model, step, x, y)


SIDES: dict[str, Callable[[], nn.Module]] = {
    "small": lambda: nn.Linear(6, 6),
    "large": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), *(nn.Linear(6, 6) for _ in range(4))),
}


@pytest.mark.parametrize(("side", "decay"), [("small", 0.1), ("large", 0.0)])
@pytest.mark.parametrize("loss_of", [nothing_given, left_out, token_left_out, late, late_on_one_trunk, sometimes])
def test_zeros_that_are_meant_are_silent(loss_of: Loss, side: str, decay: float) -> None:
    assert alerts(SIDES[side](), loss_of, decay=decay) == []


def masked(model: Net, step: int, x: Tensor, y: Tensor) -> Tensor:
    """No sample is ever a positive one."""
    return main(model, x, y) + 2.0 * ((model.side(x) - x).abs() * (x > 99)).sum() / 32


def cut(model: Net, step: int, x: Tensor, y: Tensor) -> Tensor:
    """What should teach the side was computed without a graph; only a term of weight 0 leads to it."""
    logits = model.side(x)
    with torch.no_grad():
        chosen = functional.cross_entropy(model.side(x), y)
    return -chosen + main(model, x, y) - 0 * torch.distributions.Categorical(logits=logits).entropy().mean()


def forgotten(model: Net, step: int, x: Tensor, y: Tensor) -> Tensor:
    return late(model, 0, x, y)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("loss_of", "side", "place", "step"),
    [(masked, "small", "side", 9), (cut, "large", "side.0", 9), (forgotten, "large", "side.0", 99)],
)
def test_zeros_that_are_not_meant_are_told(loss_of: Loss, side: str, place: str, step: int, decay: float) -> None:
    assert alerts(SIDES[side](), loss_of, steps=step + 3, decay=decay) == [("no_gradient", place, step)]


def test_a_term_that_is_switched_off_for_good_is_a_note() -> None:
    told: list[flowscope.Alert] = []
    assert alerts(SIDES["small"](), forgotten, steps=103, told=told) == []
    assert [(a.kind, a.severity, a.where, a.step) for a in told] == [("no_gradient", "info", "side", 9)]
    assert "switched on later" in told[0].advice


@pytest.mark.parametrize("begins", [30, 1000])
def test_a_discriminator_that_joins_late_is_silent(begins: int) -> None:
    torch.manual_seed(0)
    nets = nn.ModuleDict({"g": nn.Linear(4, 6), "d": nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))})
    of_g, of_d = (torch.optim.Adam(nets[name].parameters(), 1e-3) for name in ("g", "d"))
    with flowscope.watch(nets, [of_g, of_d], every=1, config={"console": "off"}) as scope:
        for step in range(60):
            x = torch.randn(32, 6)
            weight = float(step >= begins)
            made = nets["g"](x[:, :4])
            loss = (made - x).square().mean() - weight * 0.1 * nets["d"](made).mean()
            of_g.zero_grad()
            loss.backward()
            of_g.step()
            real, fake = nets["d"](x), nets["d"](made.detach())
            hinge = functional.relu(1 - real).mean() + functional.relu(1 + fake).mean()
            of_d.zero_grad()
            (weight * 0.5 * hinge).backward()
            of_d.step()
            scope.step(loss=loss)
    assert [(a.kind, a.where, a.step) for a in scope.alerts if a.severity != "info"] == []


def test_how_a_loss_leads_to_its_leaves() -> None:
    a, b, c = (torch.ones(3, requires_grad=True) for _ in range(3))
    ids = {id(a): "a", id(b): "b", id(c): "c"}

    def led(loss: Tensor, *asked: Tensor) -> tuple[str, str, bool]:
        found = leads([loss.grad_fn], [*map(id, asked)], [id(a)])
        free, weighted = ("".join(sorted(ids[i] for i in kept)) for kept in found[:2])
        return free, weighted, found.bare

    none, two = torch.zeros(()), torch.tensor(2.0)
    assert led(a.sum() + 0 * b.sum(), b) == ("", "b", False)
    assert led(a.sum() + b.sum() / 2, b) == ("b", "", False)
    # another way that is not weighted, and a weight that cannot be 0 as it lies above what learns too
    assert led(a.sum() + 0 * b.sum() + (b * a).sum(), b) == ("b", "", False)
    assert led((a.sum() + b.sum()) * two, b) == ("b", "", False)
    assert led((a.sum() + 0 * (a * b).sum()) * two, b) == ("", "b", False)
    # a gate makes zeros of its own, unless another leaf shows that the weight is 0
    assert led(a.sum() + two * b.relu().sum(), b) == ("b", "", False)
    assert led(a.sum() + two * (b * none.expand(3)).sum(), b) == ("b", "", False)
    assert led(a.sum() + none * (b.relu() + c).sum(), b, c) == ("", "bc", False)
    # several losses in one tensor
    weights = torch.tensor([1.0, 0.0])
    for stacked in (torch.dot(torch.stack([a.sum(), b.sum()]), weights), (torch.stack([a.sum(), b.sum()]) * two).sum()):
        assert led(stacked, b) == ("", "b", False)
    assert led(torch.dot(torch.stack([a.sum(), b.relu().sum()]), weights), b) == ("b", "", False)
    # the whole loss
    assert led(-(none * b.relu().sum()) / 2, b) == ("", "b", False)
    # a term without graph, and a number that is none
    assert led(two + a.sum() + 0 * b.sum(), b) == ("", "b", True)
    assert led(2 - a.sum() + 0 * b.sum(), b) == ("", "b", False)
    assert led(0 + a.sum() + 0 * b.sum(), b) == ("", "b", False)
