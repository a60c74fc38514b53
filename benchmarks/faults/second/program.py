"""A program of the corpus: a small training loop as people write it, with its fault, if any, and its proof.

A program trains by itself and gives its own final figure (an accuracy, minus a loss, a return), larger is better. The
label is proven without any monitor: a healthy run's figure is at least `bar`, a faulty one's at most `low`. Where the
figure does not show the fault (a part that never trained), `fact` says what is wrong with the wiring.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Watch = Callable[..., Any]
"""What a program calls, as a user calls `flowscope.watch`: `scope = watch(model, optimizer)`, `scope.step(loss)`."""

KINDS = frozenset(
    {
        "no_gradient",
        "parameters_not_optimized",
        "stale_parameters",
        "update_too_small",
        "update_too_large",
        "non_finite",
        "vanishing_gradient",
        "exploding_gradient",
        "gradient_spike",
        "loss_spike",
        "loss_plateau",
        "constant_output",
        "representation_collapse",
        "rank_collapse",
        "token_collapse",
        "dead_units",
        "saturation",
        "symmetry",
        "over_clipped",
        "gradient_accumulates",
        "train_eval_gap",
        "expert_collapse",
        "stream_collapse",
        "mixing_gain",
        "gate_saturation",
        "solver_cost",
        "solver_unconverged",
        "rank_desync",
        "attention_logits",
        "activation_headroom",
        "stale_moment",
    }
)


@dataclass(frozen=True)
class Program:
    """One program and what is true of it.

    Attributes:
        id: its name, unique in the corpus.
        source: which public code, report or paper it has its shape from, in words.
        train: called with (seed, faulty, watch); runs the training, gives its final figure. Deterministic by seed.
        bar: a healthy run's figure is at least this.
        low: a faulty run's figure is at most this; None: no faulty form, or `fact` is the proof.
        fault: what is wrong, in words; "": only a healthy form.
        kinds: the kinds of alert that name the fault.
        place: regular expression over module names, the right place; "": none is asked for.
        starts: the optimizer step at which the fault can first show.
        fact: why a faulty run is faulty though its figure does not show it.
    """

    id: str
    source: str
    train: Callable[[int, bool, Watch], float]
    bar: float
    low: float | None = None
    fault: str = ""
    kinds: frozenset[str] = frozenset()
    place: str = ""
    starts: int = 0
    fact: str = ""

    def __post_init__(self) -> None:
        if unknown := set(self.kinds) - KINDS:
            raise ValueError(f"{self.id}: no such kinds of alert: {sorted(unknown)}")
        if bool(self.fault) != bool(self.kinds) or bool(self.fault) != (self.low is not None or bool(self.fact)):
            raise ValueError(f"{self.id}: a fault has kinds and a proof (low or fact); a healthy program has none")
        re.compile(self.place)

    def holds(self, faulty: bool, figure: float) -> bool:
        """Whether a run without a monitor bears out the label; a figure that is no number is the lowest of all."""
        figure = -math.inf if math.isnan(figure) else figure
        if not faulty:
            return figure >= self.bar
        return self.low is None or figure <= self.low


class NoScope:
    """Stands in for a scope and does nothing: labels are proven with it."""

    def step(self, *_args: Any, **_kwargs: Any) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> NoScope:
        return self

    def __exit__(self, *_error: object) -> None: ...


def no_watch(*_args: Any, **_kwargs: Any) -> NoScope:
    """The stand-in for `flowscope.watch`."""
    return NoScope()
