"""One file per kind of number: where it looks, what it adds up, how ranks combine it, how it becomes a metric.

`BUILT_IN` is the list, in the order of the records; each is switched off by `config={"instruments": {name: False}}`.
`Instrument` and `Taken` are the contract (flowscope/instruments/instrument.py), for instruments from outside too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from flowscope.config import WatchConfig
from flowscope.errors import FlowscopeError
from flowscope.faults import Faults
from flowscope.instruments.activation_shape import ActivationShape
from flowscope.instruments.alignment import BranchAlignment
from flowscope.instruments.attention import Attention
from flowscope.instruments.batch_norm import NormGaps
from flowscope.instruments.evaluations import Evaluations
from flowscope.instruments.exact_modules import ExactModules
from flowscope.instruments.exact_parameters import ExactParameters
from flowscope.instruments.exact_steps import ExactSteps
from flowscope.instruments.gates import Gates
from flowscope.instruments.input_checksum import InputChecksum
from flowscope.instruments.instrument import Instrument, Taken
from flowscope.instruments.kept_updates import KeptUpdates
from flowscope.instruments.made_anew import MadeAnew
from flowscope.instruments.merge_sites import MergeSites
from flowscope.instruments.nudge import Nudge
from flowscope.instruments.objective import Objective
from flowscope.instruments.ode import OdeStates
from flowscope.instruments.optimizer_age import OptimizerAge
from flowscope.instruments.outputs import Outputs
from flowscope.instruments.parameters import Parameters
from flowscope.instruments.point_flows import PointFlows
from flowscope.instruments.point_statistic import PointStatistic
from flowscope.instruments.reach import Reach
from flowscope.instruments.recurrent import RecurrentFlow
from flowscope.instruments.routing import Routing
from flowscope.instruments.set_up import SetUp
from flowscope.instruments.silent_flows import SilentFlows
from flowscope.instruments.solvers import Solvers
from flowscope.instruments.streams import KnownStreams
from flowscope.instruments.units import Units
from flowscope.instruments.unregistered import Unregistered
from flowscope.instruments.weight_spread import WeightSpread
from flowscope.instruments.wiring import Wiring
from flowscope.instruments.zeros import Zeros
from flowscope.metrics import Metric
from flowscope.model.view import ModelView
from flowscope.specs import OTHERS

__all__ = ["BUILT_IN", "METRICS", "Instrument", "PointStatistic", "Taken", "instruments_for", "specs_of"]

BUILT_IN: tuple[type[Instrument], ...] = (
    PointFlows,
    OdeStates,
    RecurrentFlow,
    BranchAlignment,
    Parameters,
    Wiring,
    OptimizerAge,
    Evaluations,
    Reach,
    Unregistered,
    MadeAnew,
    KeptUpdates,
    WeightSpread,
    MergeSites,
    KnownStreams,
    Gates,
    SilentFlows,
    Zeros,
    Units,
    NormGaps,
    Outputs,
    Objective,
    InputChecksum,
    Routing,
    Solvers,
    Attention,
    ActivationShape,
    SetUp,
    ExactSteps,
    ExactModules,
    ExactParameters,
    Nudge,
)


def specs_of(instruments: Iterable[Any]) -> dict[str, Metric]:
    """The metrics that some instruments (or connections) write, by name, in order."""
    return {metric.name: metric for instrument in instruments for metric in instrument.metrics}


METRICS: dict[str, Metric] = {**specs_of(BUILT_IN), **OTHERS}
"""All metrics of flowscope itself."""


def instruments_for(
    view: ModelView,
    config: WatchConfig,
    further: Sequence[Instrument | type[Instrument]] = (),
    faults: Faults | None = None,
) -> list[Instrument]:
    """The instruments that a model asks for, in order; none is attached yet.

    Args:
        view: what is in the model.
        config: which of them are switched off, alone or by family.
        further: instruments from outside, classes or instances; they stand behind the built-in ones.
        faults: an instrument that fails to look through the model is left out.

    Raises:
        FlowscopeError: one from outside is no instrument or bears a name that is taken, or `config.instruments` names
            one that is not there.
    """
    _check_names(config, further)
    chosen: list[Instrument] = []
    enter = (faults or Faults()).enter
    for kind in (*BUILT_IN, *further):
        asked = not kind.families or any(family in config.metrics for family in kind.families)
        if asked and config.instruments.get(kind.name, True):
            if isinstance(kind, Instrument):
                chosen.append(kind)
            else:
                chosen += enter(kind.name, kind.found_in, view, config, otherwise=())
    return chosen


def _check_names(config: WatchConfig, further: Sequence[Instrument | type[Instrument]]) -> None:
    names = {kind.name for kind in BUILT_IN}
    for kind in further:
        if not (isinstance(kind, Instrument) or (isinstance(kind, type) and issubclass(kind, Instrument))):
            raise FlowscopeError(
                f"watch(instruments=...): got {kind!r:.80}, expected subclasses of flowscope.instruments.Instrument, "
                "or instances of them."
            )
        name = getattr(kind, "name", "")
        if not isinstance(name, str) or not name or name in names:
            raise FlowscopeError(
                f"watch(instruments=...): the name {name!r} of {kind!r:.80} is {'taken' if name else 'missing'}, "
                "expected a class attribute `name` that no other instrument bears."
            )
        names.add(name)
        if other := [metric.name for metric in kind.metrics if METRICS.get(metric.name, metric) != metric]:
            raise FlowscopeError(
                f"watch(instruments=...): {name!r} says something else of {', '.join(other)} than flowscope does; "
                "expected metrics with names of its own, or the specs of `flowscope.instruments.METRICS`."
            )
    for name in config.instruments:
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), 1, 0.0)[0]
            raise FlowscopeError(
                f"watch(config={{'instruments': ...}}): got {name!r}, expected names of instruments. The nearest is "
                f"{near!r}; there are {', '.join(sorted(names))}."
            )
