"""Run the wrapped model as the plain one, and find where the two first differ."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.merging.connection import Connection, ResidualOptions, State
from flowscope.merging.difference import relative, tolerance
from flowscope.merging.interception import BlockRule
from flowscope.merging.weaving import WovenBlock, lanes_of
from flowscope.model.example_inputs import fresh, untouched
from flowscope.model.sites import Trial

Points = list[tuple[str, Tensor]]


def run(trial: Trial) -> Any:
    """Run again what was run in a trial."""
    args, kwargs = fresh(trial.call)
    return trial.module(*args, **kwargs)


def woven_connections(model: nn.Module) -> list[Connection]:
    """Return the connections in module order."""
    return [module for module in model.modules() if isinstance(module, Connection)]


class Rounded(Connection):
    """The plain residual, its result off by a rounding."""

    mode = "rounded"

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return x + f times 1 +- what rounding makes of it here, the sign changing from place to place."""
        y = x + f
        size = torch.finfo(y.dtype).eps * (4 if y.itemsize > 2 else 0.5)  # fp32 connections round several times
        signs = torch.arange(y.numel(), device=y.device).reshape(y.shape).sin().sign().to(y.dtype)
        return torch.addcmul(y, y, signs, value=size), state


@contextlib.contextmanager
def instead(model: nn.Module, rule: type[Connection]) -> Iterator[None]:
    """Answer each merge by another rule inside, one without streams and options."""
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, WovenBlock)]
    kept = [(block, lanes_of(block), dict(block._modules)) for block in blocks]
    try:
        for block, lanes, _ in kept:
            set_rules(block, [own._replace(dims=0, deferred=own.absent) for own, _ in lanes])
            for own, recipe in lanes:
                block._modules[own.child] = rule(recipe.context, ResidualOptions())
        yield
    finally:
        for block, lanes, modules in kept:
            set_rules(block, [own for own, _ in lanes])
            block._modules.update(modules)


def set_rules(block: Any, rules: list[BlockRule]) -> None:
    """Let a woven block find its sites by other rules."""
    first, *more = rules
    vars(block)["flowscope_rule"] = first
    if more:
        recipes = [recipe for _, recipe in block.flowscope_more]
        vars(block)["flowscope_more"] = tuple(zip(more, recipes, strict=True))


def plain_run(model: nn.Module, trial: Trial, rule: type[Connection] = Rounded) -> Any:
    """Return the output of the model with its merges answered by a rule without streams."""
    with untouched(model), instead(model, rule):
        return run(trial)


def first_difference(model: nn.Module, trial: Trial) -> str:
    """Say where the wrapped model first differs from the plain one: at which merge or output of a block."""
    limit = tolerance(model, trial.output) / 10
    with untouched(model):
        with recorded(model) as wrapped, contextlib.suppress(Exception):
            run(trial)
        with instead(model, Connection), recorded(model) as plain:
            run(trial)
    for (label, before), (_, after) in zip(plain, wrapped, strict=False):
        if (change := relative(before, after)) > limit:
            return f"at {label} ({change:.1e})"
    return "after the last merge, in what the model's own code makes of the blocks' outputs"


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[Points]:
    """Keep what every site is given and makes, and what every block returns, as the plain model has it."""
    points: Points = []
    found: list[tuple[str, Any]] = [
        (n, module) for n, module in model.named_modules() if isinstance(module, Connection)
    ]

    def at_site(block: str, connection: Any, site: int, state: State, x: Tensor, f: Tensor) -> Any:
        points.append((f"{block}, merge {site}: the carry that comes to it", x.detach().clone()))
        points.append((f"{block}, merge {site}: the branch", f.detach().clone()))
        y, state = type(connection).at_site(connection, site, state, x, f)
        points.append((f"{block}, merge {site}: what it makes", y.detach().clone()))
        return y, state

    def end(block: str, connection: Any, y: Tensor, state: State) -> Any:
        output = type(connection).end(connection, y, state)
        streams = connection.streams and not connection.last
        seen = connection.features_back(output.mean(-2)) if streams else output
        points.append((f"{block}: what it returns", seen.detach().clone()))
        return output

    for path, connection in found:
        block = path.rpartition(".")[0] or "the model"
        connection.at_site = functools.partial(at_site, block, connection)
        connection.end = functools.partial(end, block, connection)
    try:
        yield points
    finally:
        for _, connection in found:
            vars(connection).pop("at_site", None)
            vars(connection).pop("end", None)
