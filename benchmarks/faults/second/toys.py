"""Data and little worlds for the programs: nothing is downloaded, everything follows from the seed."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Digits(NamedTuple):
    """Images (N, 1, 8, 8) in 0 to 1 and labels (N,): 1,437 to train on, 360 to test."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@functools.cache
def digits() -> Digits:
    """Scikit-learn's hand-written digits in a fixed order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
    y = torch.tensor(data.target)[order]
    return Digits(x[:1437], y[:1437], x[1437:], y[1437:])


def batch(x: Tensor, size: int) -> Tensor:
    """Rows of x drawn with replacement."""
    return x[torch.randint(len(x), (size,))]


def augment(x: Tensor) -> Tensor:
    """Another view of images (B, 1, 8, 8): moved by up to one pixel each way, other contrast, noise, holes."""
    B = len(x)
    theta = torch.zeros(B, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1
    theta[:, :, :2] += 0.12 * torch.randn(B, 2, 2)
    theta[:, :, 2] = 0.25 * (2 * torch.rand(B, 2) - 1)
    moved = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
    contrast = 0.7 + 0.6 * torch.rand(B, 1, 1, 1)
    return (moved * contrast + 0.08 * torch.randn_like(x)) * (torch.rand_like(x) > 0.1)


def knn_accuracy(features: Tensor, y: Tensor, test_features: Tensor, test_y: Tensor) -> float:
    """Accuracy of five nearest neighbours by cosine."""
    similarity = F.normalize(test_features, dim=1) @ F.normalize(features, dim=1).T
    votes = y[similarity.topk(5, dim=1).indices]
    return (votes.mode(dim=1).values == test_y).float().mean().item()


def energy_distance(a: Tensor, b: Tensor) -> float:
    """How far two samples (N, ...) and (M, ...) are apart: 2 E|a - b| - E|a - a'| - E|b - b'|; 0: the same."""
    a, b = a.flatten(1), b.flatten(1)
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def ring(n: int, std: float = 0.1) -> Tensor:
    """(n, 2) points from eight Gaussians on a circle of radius 2."""
    angle = torch.randint(8, (n,)) * (2 * math.pi / 8)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + std * torch.randn(n, 2)


def moons(n: int) -> Tensor:
    """(n, 2) points of two half circles, standardised roughly."""
    angle, upper = math.pi * torch.rand(n), torch.rand(n) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos()) - 0.5
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin()) - 0.25
    return torch.stack([x / 0.87, y / 0.5], 1) + 0.05 * torch.randn(n, 2)


def swiss_roll(n: int) -> Tensor:
    """(n, 2) points of a spiral within about 2 of the origin."""
    t = 1.5 * math.pi * (1 + 2 * torch.rand(n))
    return torch.stack([t * t.cos(), t * t.sin()], 1) / 7 + 0.03 * torch.randn(n, 2)


class CartPole:
    """The classic pole on a cart, N at once, each begun again when it falls or after 200 steps."""

    def __init__(self, n: int) -> None:
        self.state = 0.1 * torch.rand(n, 4) - 0.05
        self.age = torch.zeros(n)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Actions (N,) of 0 or 1 to the next states (N, 4), rewards (N,), and which fell (N,)."""
        x, v, angle, spin = self.state.unbind(1)
        force = 20.0 * action.float() - 10.0
        temp = (force + 0.05 * spin**2 * angle.sin()) / 1.1
        spin_rate = (9.8 * angle.sin() - angle.cos() * temp) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        rate = temp - 0.05 * spin_rate * angle.cos() / 1.1
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * rate, angle + 0.02 * spin, spin + 0.02 * spin_rate], 1)
        self.age += 1
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)
        over = fell | (self.age >= 200)
        fresh = 0.1 * torch.rand_like(self.state) - 0.05
        self.state = torch.where(over[:, None], fresh, self.state)
        self.age = torch.where(over, torch.zeros_like(self.age), self.age)
        return self.state, torch.ones(len(x)), over


@torch.no_grad()
def pole_time(policy: object, n: int = 32) -> float:
    """Mean number of steps (at most 200) that `policy`, states (N, 4) to actions (N,), keeps the pole up."""
    world, alive, total = CartPole(n), torch.ones(n, dtype=torch.bool), torch.zeros(n)
    for _ in range(200):
        total += alive
        _, _, over = world.step(policy(world.state))  # type: ignore[operator]
        alive &= ~over
        if not alive.any():
            break
    return total.mean().item()


class Catch:
    """A ball falls through 6 rows and 5 columns; a paddle below moves left, not, or right; N at once, in step."""

    ROWS, COLUMNS = 6, 5

    def __init__(self, n: int) -> None:
        self.n = n
        self.reset()

    def reset(self) -> None:
        self.row = 0
        self.ball = torch.randint(self.COLUMNS, (self.n,))
        self.paddle = torch.randint(self.COLUMNS, (self.n,))

    def see(self) -> Tensor:
        """(N, 11 + 5): the ball's row and column, and the paddle's column, as one-hot parts."""
        row = F.one_hot(torch.full((self.n,), self.row), self.ROWS)
        return torch.cat([row, F.one_hot(self.ball, 5), F.one_hot(self.paddle, 5)], 1).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Actions (N,) of 0 to 2 to what is seen next, rewards (N,) of -1, 0 or 1, and whether the ball has landed."""
        self.paddle = (self.paddle + action - 1).clamp(0, self.COLUMNS - 1)
        self.row += 1
        landed = self.row == self.ROWS - 1
        reward = torch.where(self.ball == self.paddle, 1.0, -1.0) if landed else torch.zeros(self.n)
        if landed:
            self.reset()
        return self.see(), reward, landed


@torch.no_grad()
def catch_score(policy: object, n: int = 400) -> float:
    """Mean reward, -1 to 1, of one ball each; `policy` takes what is seen (N, 16) to actions (N,)."""
    world, landed, reward = Catch(n), False, torch.zeros(n)
    while not landed:
        _, reward, landed = world.step(policy(world.see()))  # type: ignore[operator]
    return reward.mean().item()


class Reach:
    """A point in the plane is pushed towards a goal; states (N, 4), actions (N, 2) in -1 to 1, 15 steps."""

    STEPS = 15

    def __init__(self, n: int) -> None:
        self.n = n
        self.reset()

    def reset(self) -> None:
        self.time = 0
        self.point, self.goal = 2 * torch.rand(self.n, 2) - 1, 2 * torch.rand(self.n, 2) - 1

    def see(self) -> Tensor:
        return torch.cat([self.point, self.goal], 1)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, bool]:
        """The next states, rewards (minus the distance) and whether time is over."""
        self.point = (self.point + 0.2 * action).clamp(-1.5, 1.5)
        reward = -(self.point - self.goal).norm(dim=1)
        self.time += 1
        over = self.time == self.STEPS
        if over:
            self.reset()
        return self.see(), reward, over


@torch.no_grad()
def reach_score(policy: object, n: int = 200) -> float:
    """Minus the mean distance to the goal at the end; without a policy about -1."""
    world = Reach(n)
    for _ in range(Reach.STEPS - 1):
        world.step(policy(world.see()))  # type: ignore[operator]
    return -(world.point - world.goal).norm(dim=1).mean().item()


class Replay:
    """The last `size` rows of several tensors, drawn from at random."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: tuple[Tensor, ...] = ()

    def add(self, *rows: Tensor) -> None:
        kept = self.rows or tuple(row[:0] for row in rows)
        self.rows = tuple(torch.cat([old, row])[-self.size :] for old, row in zip(kept, rows, strict=True))

    def draw(self, n: int) -> tuple[Tensor, ...]:
        chosen = torch.randint(len(self.rows[0]), (n,))
        return tuple(row[chosen] for row in self.rows)
