"""`compare_connections`: the same model, data and seeds with one connection after the other."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.comparing.factories import Recipe, train
from flowscope.comparing.outcomes import Candidate, Outcome, Store
from flowscope.comparing.verdict import BASE, ConnectionComparison
from flowscope.comparing.workers import ended, in_process, run_all
from flowscope.errors import FlowscopeError
from flowscope.merging.modes import parse_options, rule_of
from flowscope.terminal import tell


def compare_connections(
    factory: Callable[[], nn.Module],
    batches: Iterable[Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor],
    modes: Sequence[Any] = ("keel", "dhc", "mhc"),
    steps: int = 300,
    seeds: int | Sequence[int] = 3,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> ConnectionComparison:
    """Train the same model with one connection after the other and say which helps.

    The plain model (`residual`) is always the base line. Each training is seeded alike, sees the same batches in the
    same order, and runs in a process of its own, one at a time; in this one where `factory`, `batches`, `loss` or
    `optimizer` cannot be sent to another (a lambda, a function of the script itself).

    Args:
        factory: returns a new model, on its device; called after seeding.
        batches: an iterable, cycled; of an iterator, or a loader, the first `steps` are kept.
        loss: `loss(model, batch)` returns one number with a gradient.
        modes: names or classes as `wrap` takes them; with options as a pair `("keel", {"init_bias": -2})`.
        steps: of each training.
        seeds: a list, or how many (0, 1, ...). With one, nothing is recommended: one seed says nothing of chance.
        optimizer: `optimizer(model)`, called on the wrapped model; None is AdamW at 1e-3 on `param_groups`.
        folder: keeps each training's outcome; the same call takes what is there and goes on. It cannot see that the
            code of the factory or the batches' values changed: then take another folder.
        progress: whether a terminal shows a line that says how far it is.

    Returns:
        A comparison: print it for the table (loss with its spread over seeds, gain over `residual` seed by seed,
        gradient product, time of a step, bytes kept for backward, parameters) and the recommendation; `.plot(path)`.

    Raises:
        FlowscopeError: a wrong argument. A training that fails is a row with its error.
        KeyboardInterrupt: interrupted; what ended is in `folder`.
    """
    candidates = candidates_of(modes)
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if steps < 1 or not numbers:
        raise FlowscopeError(f"compare_connections: got steps={steps}, seeds={seeds}, expected at least one of each.")
    held = list(batches) if isinstance(batches, Sequence) else list(itertools.islice(batches, steps))
    if not held:
        raise FlowscopeError("compare_connections(batches=...): got no batch, expected an iterable of batches.")
    recipe = Recipe(factory, held, loss, optimizer, steps)
    about = {"steps": steps, "batches": len(held), "factory": name_of(factory), "optimizer": name_of(optimizer)}
    store = Store(None if folder is None else Path(folder), about)
    outcomes = run_all(candidates, numbers, steps, trainer_of(recipe, candidates), store, progress=progress)
    order = {candidate.label: number for number, candidate in enumerate(candidates)}
    return ConnectionComparison(tuple(sorted(outcomes, key=lambda o: (order[o.label], o.seed))), steps)


def candidates_of(modes: Sequence[Any]) -> list[Candidate]:
    """Return what is to be tried, the base line first; options are checked before anything is trained.

    Raises:
        FlowscopeError: an unknown mode or option, or none.
    """
    found = {BASE: Candidate(BASE, {})}
    for entry in [modes] if isinstance(modes, str) else modes:
        mode, options = entry if isinstance(entry, tuple) else (entry, {})
        rule = rule_of(mode)
        parse_options(rule, **options)
        candidate = Candidate(rule.mode if isinstance(mode, str) else mode, dict(options))
        found.setdefault(candidate.label, candidate)
    if len(found) < 2:
        raise FlowscopeError(f"compare_connections(modes=...): got {modes!r}, expected one other than {BASE!r}.")
    return list(found.values())


def trainer_of(recipe: Recipe, candidates: Sequence[Candidate]) -> Any:
    """Return what makes one training: in a process of its own where all of it can be sent there."""
    try:
        held = pickle.dumps((recipe, list(candidates)))
        reason = "they are of the script itself (__main__)" if b"__main__" in held else ""
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        tell(
            f"flowscope: the trainings run in this process: model, loss or batches cannot be sent to another ({reason})"
        )
        return lambda candidate, seed, progress: train(recipe, candidate, seed, progress)

    def elsewhere(candidate: Candidate, seed: int, progress: Any) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="flowscope-") as place:
            task = Path(place) / "task.pickle"
            inside = pickle.dumps((recipe, candidate, seed, torch.get_num_threads()))
            task.write_bytes(pickle.dumps((sys.path, inside)))
            process = in_process(
                ["-m", "flowscope.comparing.factories", str(task)], task.with_suffix(".progress"), progress
            )
            try:
                outcome: Outcome = pickle.loads(task.with_suffix(".outcome").read_bytes())
            except OSError:
                return Outcome(candidate.label, seed, error=ended(process))
            return outcome

    return elsewhere


def name_of(function: Any) -> str:
    """Return what tells a function from another as far as can be known: where it is defined, and its code."""
    code = getattr(function, "__code__", None)
    body = "" if code is None else hashlib.sha1(code.co_code + repr(code.co_names).encode()).hexdigest()[:8]
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)} {body}"
