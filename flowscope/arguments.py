"""What `watch` and `Scope.step` were given, checked: each wrong argument is a `FlowscopeError` that names the fix."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.detectors import Detector
from flowscope.errors import FlowscopeError
from flowscope.instruments import Instrument
from flowscope.model.structure import is_scripted
from flowscope.records import Alert
from flowscope.schedule import Schedule
from flowscope.sinks import Sink
from flowscope.sinks.reading import is_run
from flowscope.steps.losses import LateLoss

AlertCallback = Callable[[Alert], Any]


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
    scaler: Any
    instruments: Sequence[Instrument | type[Instrument]]
    detectors: Sequence[Detector | type[Detector]]
    config: WatchConfig


def check_model(model: Any) -> None:
    """Refuse what is no module or has no parameters."""
    if not isinstance(model, nn.Module):
        raise FlowscopeError(f"watch(model): got {type(model).__name__}, expected a torch.nn.Module.")
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
    given = [gates] if isinstance(gates, str) else gates or ()
    fits = isinstance(given, (list, tuple)) and all(isinstance(pattern, str) for pattern in given)
    _expect(fits, "gates", gates, "patterns of module paths, such as ['blocks.*.gate'].")
    return given


def named_sinks(sinks: Iterable[Any]) -> list[tuple[str, Sink]]:
    """Return the sinks with the names under which their faults are reported."""
    if not isinstance(sinks, Iterable):
        raise FlowscopeError(
            f"watch(sinks=...): got {type(sinks).__name__}, expected a list of objects with write(event) and close()."
        )
    named = [(f"sink {type(sink).__name__} {number}", sink) for number, sink in enumerate(sinks)]
    for number, (_, sink) in enumerate(named):
        if isinstance(sink, type) or not isinstance(sink, Sink):
            raise FlowscopeError(
                f"watch(sinks=...): entry {number} is a {type(sink).__name__} ({sink!r:.60}), expected an object with "
                "write(event) and close()."
            )
    return named


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


def step_number(step: Any) -> int | None:
    """Return the step as an int, None where none was given."""
    if step is None:
        return None
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise FlowscopeError(f"scope.step(step=...): got {step!r}, expected a step number, an int >= 0.")
    return int(step)
