"""What `watch` and `Scope.step` were given, checked: each wrong argument is a `FlowscopeError` that names the fix."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.detectors import Detector, check_asked
from flowscope.errors import FlowscopeError, nearest
from flowscope.instruments import Instrument
from flowscope.model.structure import is_scripted
from flowscope.records import Alert
from flowscope.schedule import Schedule
from flowscope.sinks import BackgroundSink, Sink
from flowscope.sinks.reading import is_run
from flowscope.steps.losses import LateLoss

AlertCallback = Callable[[Alert], Any]
Call = TypeVar("Call", bound=Callable[..., Any])


@dataclass(frozen=True)
class WatchArguments:
    """What `watch` was given besides the model, checked: its arguments by their names there, as they are used.

    The optimizer and the scaler are checked where they are taken up.
    """

    optimizer: Any
    log_dir: str | Path | None
    schedule: Schedule
    callbacks: Sequence[AlertCallback]
    sinks: Sequence[tuple[str, Sink]]
    flows: Sequence[str] | None
    gates: Sequence[str]
    parameters: Sequence[str]
    scaler: Any
    instruments: Sequence[Instrument | type[Instrument]]
    detectors: Sequence[Detector | type[Detector]]
    config: WatchConfig


def check_model(model: Any) -> None:
    """Refuse what is no module or has no parameters."""
    if not isinstance(model, nn.Module):
        swapped = " The model comes first: watch(model, optimizer)." if hasattr(model, "param_groups") else ""
        raise FlowscopeError(
            f"watch(model): got {type(model).__name__}, expected a torch.nn.Module: the model itself, neither a "
            f"function nor its state_dict.{swapped}"
        )
    if is_scripted(model):
        raise FlowscopeError("watch(model): got a module compiled by torch.jit, expected it as it was before.")
    if next(model.parameters(), None) is None:
        raise FlowscopeError(
            f"watch(model): {type(model).__name__} has no parameters, so there is nothing to train or observe. "
            "Watch the module that holds them, after its layers are built."
        )


def folder(log_dir: Any) -> str | Path | None:
    """Return `log_dir`, the path of a folder or None."""
    _expect(log_dir is None or isinstance(log_dir, (str, Path)), "log_dir", log_dir, "the path of a folder.")
    return log_dir  # type: ignore[no-any-return]


def _expect(fits: bool, argument: str, given: Any, wanted: str) -> None:
    """Refuse what does not fit."""
    if not fits:
        raise FlowscopeError(f"watch({argument}=...): got {type(given).__name__} ({given!r}), expected {wanted}")


def listed(given: Any) -> list[Any]:
    """Return what may be given alone, in an iterable or not at all (`on_alert`, `stop_on`) as a list."""
    several = isinstance(given, Iterable) and not callable(given) and not isinstance(given, str)
    return list(given) if several else [] if given is None else [given]


def alert_callbacks(on_alert: Any) -> list[AlertCallback]:
    """Return `on_alert` as a list of callables."""
    given = listed(on_alert)
    wanted = "a callable that takes an Alert, or a list of them; on_alert=print prints them."
    for callback in given:
        _expect(callable(callback), "on_alert", callback, wanted)
    return given


def flow_paths(flows: Any) -> Sequence[str] | None:
    """Return `flows` as `find_flows` takes it."""
    wanted = (
        "a list of module paths, such as ['encoder.layers']; print(flowscope.find_flows(model)) shows the discovered "
        "ones."
    )
    _expect(flows is None or isinstance(flows, (str, list, tuple)), "flows", flows, wanted)
    return flows  # type: ignore[no-any-return]


def gate_patterns(gates: Any) -> Sequence[str]:
    """Return `gates` as a list of patterns."""
    return _patterns("gates", gates, "patterns of module paths, such as ['blocks.*.gate'].")


def parameter_patterns(parameters: Any) -> Sequence[str]:
    """Return `parameters` as a list of patterns, none for all parameters."""
    wanted = "patterns of names of parameters, such as ['blocks.*'] or ['!embed.*'] (all but those)."
    return _patterns("parameters", parameters, wanted)


def _patterns(argument: str, given: Any, wanted: str) -> Sequence[str]:
    listed = [given] if isinstance(given, str) else given or ()
    fits = isinstance(listed, (list, tuple)) and all(isinstance(pattern, str) for pattern in listed)
    _expect(fits, argument, given, wanted)
    return listed


HABITS = {
    "log": 'watch(parameters=[...]) chooses parameters, config={"metrics": ("flow", "depth", "parameters")} families',
    "log_freq": "it is every=: watch(every=10) samples each tenth step",
    "log_graph": "flowscope records no graph; print(scope.flows) shows what is watched",
    "idx": "each watch is a scope of its own, with its own log_dir",
    "criterion": "give the loss to scope.step(loss=loss)",
}
"""Arguments of `wandb.watch` -> what to do here."""


def spelled(function: Call) -> Call:
    """The same function, whose unknown keyword arguments are a `FlowscopeError` that names the right ones."""
    names = [*inspect.signature(function).parameters]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_names(kwargs, names)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def check_names(given: Iterable[str], names: Sequence[str]) -> None:
    """Refuse keyword arguments that `watch` does not take."""
    for name in given:
        if name not in names:
            if name in HABITS:
                hint = f" That is wandb.watch's; here: {HABITS[name]}."
            elif name in WatchConfig.model_fields:
                hint = f" It is a setting: watch(config={{{name!r}: ...}})."
            else:
                hint = nearest(name, names)
            raise FlowscopeError(
                f"watch({name}=...): there is no such argument.{hint} help(flowscope.watch) lists all."
            )


def named_sinks(sinks: Iterable[Any]) -> list[tuple[str, Sink]]:
    """Return the sinks with the names under which their faults are reported."""
    if not isinstance(sinks, Iterable):
        raise FlowscopeError(
            f"watch(sinks=...): got {type(sinks).__name__}, expected a list of objects with write(event) and close()."
        )
    named = [(f"sink {type(sink).__name__} {number}", sink) for number, sink in enumerate(sinks)]
    for number, (_, sink) in enumerate(named):
        if isinstance(sink, type) or not isinstance(sink, Sink):
            got = f"the class {sink.__name__}" if isinstance(sink, type) else f"a {type(sink).__name__} ({sink!r:.60})"
            make = f" Make one: {sink.__name__}(...)." if isinstance(sink, type) else ""
            raise FlowscopeError(
                f"watch(sinks=...): entry {number} is {got}, expected an object with write(event) and close().{make}"
            )
    waits = [bool(getattr(sink, "waits_for_server", False)) for _, sink in named]
    return [(fuse, BackgroundSink(sink) if wait else sink) for (fuse, sink), wait in zip(named, waits, strict=True)]


def stop_kinds(stop_on: Any, detectors: Any = (), reference: Any = None) -> list[str]:
    """Return `stop_on` as a list of alert kinds and severities; kinds of detectors from outside are known."""
    given = listed(stop_on)
    check_asked(f"stop_on={stop_on!r}", given, _own_kinds(detectors, reference))
    return given


def check_actions(callbacks: Iterable[Any], detectors: Any, reference: Any) -> None:
    """Refuse an action (flowscope.actions) that waits for a kind of alert that nothing raises."""
    for callback in callbacks:
        if isinstance(on := getattr(callback, "on", None), frozenset):
            asked = f"{type(callback).__name__}(on={', '.join(map(str, sorted(on)))})"
            check_asked(asked, on, _own_kinds(detectors, reference))


def _own_kinds(detectors: Any, reference: Any) -> list[str]:
    kinds = [kind for kind in (getattr(detector, "kind", None) for detector in listed(detectors)) if kind]
    return [*kinds, *["parted_from_reference"] * (reference is not None)]


def own_detectors(detectors: Any) -> Sequence[Detector | type[Detector]]:
    """Return the detectors, classes and instances, as a list."""
    given = listed(detectors)
    for detector in given:
        if not isinstance(detector, Detector) and not (isinstance(detector, type) and issubclass(detector, Detector)):
            raise FlowscopeError(
                f"watch(detectors=...): got {detector!r}, expected subclasses of flowscope.detectors.Detector (or "
                ".Limit), or instances of them."
            )
    return given


def reference_detectors(reference: Any) -> Sequence[Detector]:
    """Return what compares the run with its reference, nothing without one."""
    if reference is None:
        return ()
    wanted = "a good run, a folder of good runs, or a golden profile."
    _expect(isinstance(reference, (str, Path)), "reference", reference, wanted)
    # they read the runs: only where there is a reference
    if is_run(reference):
        from flowscope.parting.companion import PartedFromRun

        return (PartedFromRun(reference),)
    from flowscope.corridor import live

    return (live(reference),)


def loss_value(loss: Any) -> LateLoss | float | None:
    """Return the loss as a number, or as one on its way from its device; never synchronises.

    None where there is none to read: of a tensor on the meta device.
    """
    if loss is None or isinstance(loss, float):
        return loss
    if isinstance(loss, int):
        return float(loss) if abs(loss) < sys.float_info.max else math.copysign(math.inf, loss > 0 or -1)
    if isinstance(loss, np.ndarray | np.generic) and not np.iscomplexobj(loss):
        return float(loss.mean())
    if not isinstance(loss, Tensor):
        raise FlowscopeError(f"scope.step(loss=...): got {type(loss).__name__}, expected a scalar tensor or a number.")
    value: Tensor = loss.detach()
    if value.is_meta:
        return None
    if value.is_complex():
        raise FlowscopeError(
            "scope.step(loss=...): got a complex tensor, expected a real one: loss.abs() or loss.real."
        )
    if value.device.type == "cpu":
        return float(value.float().mean() if value.dim() else value)
    return LateLoss(value.float().mean())


def of_several(loss: Any) -> str | None:
    """What is to be said where the loss is many numbers; None where it is one."""
    if not isinstance(loss, Tensor | np.ndarray) or not loss.ndim or math.prod(loss.shape) == 1:
        return None
    return (
        f"scope.step(loss=...): got a {type(loss).__name__} of several numbers, expected one: records show "
        "their mean, which is another loss than yours where backward saw a sum or weights. Pass the number that "
        "backward is called on, e.g. scope.step(loss=loss.mean())"
    )


def step_number(step: Any) -> int | None:
    """Return the step as an int, None where none was given."""
    if step is None:
        return None
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise FlowscopeError(f"scope.step(step=...): got {step!r}, expected a step number, an int >= 0.")
    return int(step)
