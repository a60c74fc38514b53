"""`flowscope.check`: all trials one after the other, everything put back after each."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from flowscope.errors import CannotJudgeError, FlowscopeError
from flowscope.trials.bench import Bench, Loss
from flowscope.trials.built_in import built_in
from flowscope.trials.findings import CheckReport
from flowscope.trials.kept import put_back
from flowscope.trials.trial import Trial, TrialFinding

BATCHES = 3
"""So many batches suffice."""


def check(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    optimizer: Any = None,
    trials: Sequence[Trial | type[Trial]] | None = None,
    only: Collection[str] | None = None,
    skip: Collection[str] | None = None,
) -> CheckReport:
    """Try a model on a few batches: does it see the future, mix samples, lose gradient, write wrong updates ...

    Weights, buffers, gradients, optimizer state, random state and modes are bitwise as before afterwards.

    Args:
        model: the model.
        loss: `loss(model, batch)` returns the training loss, one number.
        batches: an iterable; the first three are used.
        optimizer: the one that trains the model, or a list of them; without it what needs one is skipped.
        trials: further trials of one's own, classes or instances of `flowscope.trials.Trial`.
        only: names of the trials to run; None is all.
        skip: names of those to leave out.

    Returns:
        The findings; `.ok` where nothing failed.

    Raises:
        FlowscopeError: `model` is no module, there is no batch, or a name is unknown.
    """
    if not isinstance(model, nn.Module):
        raise FlowscopeError(f"check(model=...): got {type(model).__name__}, expected a torch.nn.Module.")
    if not callable(loss):
        raise FlowscopeError(f"check(loss=...): got {type(loss).__name__}, expected loss(model, batch) -> Tensor.")
    taken = list(itertools.islice(iter(batches), BATCHES))
    if not taken:
        raise FlowscopeError("check(batches=...): got no batch, expected at least one; three suffice.")
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    bench = Bench(model, taken, loss, optimizers)
    return run_trials(bench, chosen(trials or (), only, skip))


def chosen(
    further: Sequence[Trial | type[Trial]] = (),
    only: Collection[str] | None = None,
    skip: Collection[str] | None = None,
) -> list[Trial]:
    """The trials to run.

    Raises:
        FlowscopeError: a name is unknown or borne twice, or one of `further` is no trial.
    """
    made = [trial() if isinstance(trial, type) else trial for trial in (*built_in(), *further)]
    for trial in made:
        if not isinstance(trial, Trial):
            raise FlowscopeError(f"check(trials=...): got {type(trial).__name__}, expected a flowscope.trials.Trial.")
    names = [trial.name for trial in made]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FlowscopeError(f"check(trials=...): the name {twice[0]!r} is borne twice, expected one of its own.")
    if unknown := sorted({*(only or ()), *(skip or ())} - set(names)):
        raise FlowscopeError(f"check: got the trial {unknown[0]!r}, expected some of {', '.join(names)}.")
    return [t for t in made if (not only or t.name in only) and t.name not in (skip or ())]


def run_trials(
    bench: Bench, trials: Sequence[Trial], progress: Callable[[int, int, str], None] = lambda number, count, name: None
) -> CheckReport:
    """Run the trials, each from the same state; a fault of one is told and ends only that one.

    Args:
        bench: what they work on.
        trials: in the order they run.
        progress: called before each with its number from 0, how many there are, and its name.
    """
    found: list[TrialFinding] = []
    for number, trial in enumerate(trials):
        progress(number, len(trials), trial.name)
        found += _run(bench, trial)
    return CheckReport(tuple(found))


def _run(bench: Bench, trial: Trial) -> list[TrialFinding]:
    with put_back(bench.model, list(bench.optimizers), bench.held), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.enable_grad():
                found = list(trial.findings(bench.cut() if trial.cut else bench))
            return found or [trial.skipped("it found nothing to judge")]
        except CannotJudgeError as reason:
            return [trial.skipped(str(reason))]
        except Exception as error:
            return [trial.skipped(f"it could not be run: {type(error).__name__}: {error}")]
