"""One training of a model that a factory makes; run as a program of its own where that can be pickled."""

from __future__ import annotations

import inspect
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.comparing.measuring import Meter, product_of
from flowscope.comparing.outcomes import Candidate, Outcome, telling
from flowscope.merging.training import param_groups
from flowscope.merging.wrapping import wrap
from flowscope.model.example_inputs import untouched
from flowscope.scope import watch

RATE = 1e-3
LOOKS = 10
"""So often a training is looked at for its gradient product."""


@dataclass(frozen=True)
class Recipe:
    """What all trainings have in common.

    Attributes:
        factory: makes the model.
        batches: cycled.
        loss: `loss(model, batch)`, one number.
        optimizer: `optimizer(model)`; None is AdamW at 1e-3 on `param_groups`.
        steps: of each training.
    """

    factory: Callable[[], nn.Module]
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None
    steps: int


class FirstCall(Exception):  # noqa: N818 - no error: it ends a run that has told what it should
    """The arguments of a model's first call."""


def train(recipe: Recipe, candidate: Candidate, seed: int, progress: Callable[[int, float], None]) -> Outcome:
    """Train one model and return what it came to; what the model or the loss raises is told in the outcome."""
    model, meter = None, Meter(candidate.label, seed, progress)
    try:
        seed_all(seed)
        model = recipe.factory()
        if candidate.label != "residual":
            wrap(model, candidate.mode, example_inputs=inputs_of(model, recipe), **candidate.options)
        model.train()
        optimizer = default_optimizer(model) if recipe.optimizer is None else recipe.optimizer(model)
        seed_all(seed)  # the same dropout for all
        every = max(2, recipe.steps // LOOKS)
        with watch(model, optimizer, every=every, config={"console": "off"}) as scope:
            for batch in itertools.islice(itertools.cycle(recipe.batches), recipe.steps):
                optimizer.zero_grad()
                with meter.saving(model):
                    loss = recipe.loss(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                meter.step(float(loss.detach()))
            return meter.outcome(model, product_of(scope))
    except Exception as error:
        return meter.outcome(model, error=f"{type(error).__name__}: {error}")


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with the groups that connections ask for."""
    return torch.optim.AdamW(param_groups(model, RATE))


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def inputs_of(model: nn.Module, recipe: Recipe) -> Any:
    """Return the arguments with which the loss calls the model on the first batch, as `wrap` takes them."""

    def told(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise FirstCall(args, kwargs)

    handle = model.register_forward_pre_hook(told, with_kwargs=True)
    try:
        with untouched(model):
            recipe.loss(model, recipe.batches[0])
    except FirstCall as call:
        return as_inputs(model, *call.args)
    finally:
        handle.remove()
    return None  # it calls a part of the model


def as_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a call as `example_inputs`: positional arguments alone, or all by name."""
    if not kwargs:
        return args
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments) if args else kwargs


def main(task: Path) -> None:
    """Train what a file holds and write the outcome beside it; `task.progress` says how far it is."""
    paths, held = pickle.loads(task.read_bytes())
    sys.path[:] = paths
    recipe, candidate, seed, threads = pickle.loads(held)
    torch.set_num_threads(threads)
    progress = telling(task.with_suffix(".progress"))
    outcome = train(recipe, candidate, seed, progress)
    task.with_suffix(".outcome").write_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
