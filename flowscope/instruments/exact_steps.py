"""The first sampled steps are told to the bit: which steps these are, what went into them, and what was drawn.

Two runs of one program on one machine are equal to the last bit, so what differs first is what went wrong
(`flowscope.bisect`). It costs several passes over each hidden state and parameter, so it ends after
`WatchConfig.exact_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken, table_rows
from flowscope.instruments.set_up import short_hash
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.model.nested import nested_tensors
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.fingerprints import checksums, ordered_checksums
from flowscope.sums.payload import local
from flowscope.sums.statistics import real, wide

MOMENTS = "forward", "output", "update"
"""When the random state is read: the first forward of the step begins, its last one has ended, the optimizer begins."""
INPUTS = "samples", "in order", "entries", "tensors"


class ExactSteps(Instrument):
    """What went into a step: a checksum of the model's inputs, of the random state, the options of the optimizers."""

    name = "exact_steps"
    families = ()
    metrics = (
        Metric(
            "exact_inputs",
            "Checksums of the model's inputs in the first steps: whatever the order of the samples, and with it.",
            rows="model",
            drawn=False,
            exact=True,
        ),
        Metric(
            "random_state",
            "Hash of the state of torch's random numbers in the first steps: as the forward begins, as it has ended, "
            "as the optimizer begins.",
            rows="model",
            ranks="first",
            drawn=False,
            exact=True,
        ),
        Metric(
            "optimizer_options",
            "The options of the optimizers' groups in the first steps, as numbers.",
            rows="model",
            ranks="first",
            drawn=False,
            exact=True,
        ),
    )

    buffer: DepositBuffer

    def __init__(self) -> None:
        self.buffer = DepositBuffer(len(INPUTS))
        self.buffer.new_row()
        self._states: dict[str, int] = {}

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at what the root gets, and when it returns."""
        self._view, self._hooks, self._switch = view, hooks, hooks.switch
        hooks.before(view.model, self.fuse, self._before, hooks.switch)
        hooks.after(view.model, self.fuse, self._after, hooks.switch)

    def begin_step(self) -> None:
        """Nothing was drawn yet."""
        self._states.clear()

    def _looks(self) -> bool:
        return not self._switch.paused and torch.is_grad_enabled() and (is_compiling() or self._switch.exact)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        if self._looks():
            for x in dense((args, kwargs)):
                self._add(x)
            if not is_compiling():
                self._states.setdefault("forward", random_hash(self._view.devices))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del module, args, kwargs, output
        if not is_compiling() and self._looks():
            self._states["output"] = random_hash(self._view.devices)

    def _add(self, x: Tensor) -> None:
        with torch.no_grad():
            stack = x[None] if x.dim() else x.reshape(1, 1)
            found = checksums(stack)
            counts = torch.full_like(found, x.numel()), torch.ones_like(found)
            sums = torch.cat([found, ordered_checksums(stack), *counts])
        self.buffer.add(0, 0, sums.to(wide(x.device)))

    def before_update(self, *, updating: bool) -> None:
        """Backward may have drawn too: checkpoints do."""
        if self._switch.exact:
            self._states["update"] = random_hash(self._view.devices)

    def take(self) -> Taken | None:
        """The inputs' checksums, with what lies on the host."""
        if self.buffer.empty() and not self._switch.exact:
            return None
        rows = self.buffer.take()
        options = dict(options_of(self._hooks.optimizers())) if self._switch.exact else {}
        return Taken(self.name, rows, partial(self._read, dict(self._states), options), "table")

    @staticmethod
    def _read(states: dict[str, int], options: dict[str, float], out: RecordBuilder, parts: list[Array]) -> None:
        if (inputs := table_rows(parts, len(INPUTS), 1)).any():
            out.add("exact_inputs", inputs[0], INPUTS)
        if states:
            out.add("random_state", np.array([states.get(moment, np.nan) for moment in MOMENTS]), MOMENTS)
        if options:
            out.add("optimizer_options", np.array([*options.values()]), [*options])


def dense(value: Any) -> Iterator[Tensor]:
    """This rank's parts of the dense tensors among nested ones, real."""
    for tensor in nested_tensors(value):
        if tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.numel() == 0):
            yield real(local(tensor.detach()))


def random_hash(devices: set[torch.device]) -> int:
    """Of the state of torch's generators on the host and on these devices; the generators' states lie on the host."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device) for device in sorted(devices, key=str) if device.type == "cuda"]
    return short_hash(b"".join(state.numpy().tobytes() for state in states))


def options_of(optimizers: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """(name, number) of each option of each group that is one, or several; of those on a device none is waited for."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                several = value if isinstance(value, (tuple, list)) else [value]
                for at, one in enumerate(several):
                    name = f"group {number}: {key}" if len(several) == 1 else f"group {number}: {key}[{at}]"
                    yield from ((name, float(plain)) for plain in _number(one))


def _number(value: Any) -> Iterator[float]:
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_cpu:
        yield value.item()
    elif isinstance(value, (int, float)):  # of an option that is on or off too
        yield value
