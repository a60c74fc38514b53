"""What each module got and returned in the first steps, told to the bit, in the order of the calls. In eager only.

Points are blocks apart: this tells which part of a block is the first to differ. A checkpoint runs its modules again
in backward: whether the random numbers were where they had been is told too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.exact_steps import dense, random_hash
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import floating_tensors, hidden_output, is_compiling
from flowscope.model.plan import display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.fingerprints import COLUMNS, checksums, fingerprints
from flowscope.sums.payload import local
from flowscope.sums.statistics import full_precision, real, wide
from flowscope.torch_internals import in_backward

CALLS = 4096
"""So many calls a step, at most."""


class ExactModules(Instrument):
    """A checksum of the inputs of each call of a module, and the fingerprint of its output."""

    name = "exact_modules"
    families = ()
    metrics = (
        Metric(
            "exact_modules",
            "Of each call of a module in the first steps: a checksum of its inputs, then of its output what "
            "exact_states has of a hidden state. Not in compiled code.",
            rows="modules",
            shape="table",
            drawn=False,
            exact=True,
        ),
        Metric(
            "replay_drew",
            "1 where a checkpoint ran a block again with another state of the random numbers than in the forward.",
            healthy="0",
            rows="modules",
            ranks="first",
            drawn=False,
        ),
    )

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """None where no step is to be told to the bit."""
        return [cls(config.exact_steps)] if config.exact_steps else []

    def __init__(self, steps: int) -> None:
        self._left = steps

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at every module, and at the blocks as they are entered."""
        self._devices, self._switch, self._hooks = view.devices, hooks.switch, hooks
        self._calls: Counter[str] = Counter()
        self._seen: dict[tuple[str, int], Tensor] = {}
        self._drawn: dict[str, list[int]] = defaultdict(list)
        self._replays: dict[str, bool] = {}
        self._handles: dict[str, list[Any]] = defaultdict(list)
        for path, module in view.modules:
            path = display_path(path)
            self._handles[path].append(hooks.after(module, self.fuse, partial(self._after, path), hooks.switch))
        for path in dict.fromkeys(path for flow in view.flows for path in flow.outputs):
            block, path = view.model.get_submodule(path), display_path(path)
            self._handles[path].append(hooks.before(block, self.fuse, partial(self._enters, path), hooks.switch))

    def _looks(self) -> bool:
        return not is_compiling() and self._switch.exact and not self._switch.paused and torch.is_grad_enabled()

    def start_forward(self) -> None:
        """Calls are counted from 0 again."""
        self._calls.clear()

    def _enters(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module, args, kwargs
        if not is_compiling() and self._switch.exact and not self._switch.paused:
            state = random_hash(self._devices)
            if in_backward():
                self._replays[path] = self._replays.get(path, False) or state not in self._drawn[path]
            else:
                self._drawn[path].append(state)

    @torch.no_grad()
    def _look(self, args: Any, kwargs: Any, x: Tensor) -> Tensor:
        inputs = [checksums(t[None] if t.dim() else t.reshape(1, 1)) for t in dense((args, kwargs))]
        total = sum(t.to(x.device) for t in inputs) if inputs else torch.zeros(1, dtype=torch.int64, device=x.device)
        states = real(local(x.detach()))
        with full_precision(x):
            found = fingerprints(states[None] if states.dim() else states.reshape(1, 1))
        return torch.cat([torch.as_tensor(total).to(wide(x.device)), found[0]])

    def _after(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del module
        if not self._looks() or in_backward():
            return
        x = hidden_output(output, next(floating_tensors((args, kwargs)), None))
        key = path, self._calls[path]
        self._calls[path] += 1
        if x is None or (key not in self._seen and len(self._seen) == CALLS):
            return
        found = self._look(args, kwargs, x)
        self._seen[key] = self._seen[key] + found if key in self._seen else found

    def take(self) -> Taken | None:
        """One row a call, in the order in which they returned."""
        seen, replays = self._seen, self._replays
        self._forget()
        self._left -= self._switch.exact
        if self._handles and not self._left:
            self._release({path for path, _ in seen})
        if not seen:
            return None
        called = Counter(path for path, _ in seen)
        labels = [f"{path}#{call}" if called[path] > 1 else path for path, call in seen]
        rows = torch.stack([row.to(next(iter(seen.values())).device) for row in seen.values()])
        return Taken(self.name, [rows], partial(self._read, labels, replays), "vector")

    def _release(self, seen: set[str]) -> None:
        """Take the hooks off these modules: one that looks at nothing costs each call of its module all the same.

        Those that did not run in eager stay on: compiled code without them would be another graph.
        """
        self._hooks.remove(*(handle for path in seen for handle in self._handles[path]))
        self._handles.clear()

    def discard(self) -> None:
        """Forget the step."""
        self._forget()

    def _forget(self) -> None:
        self._seen, self._replays = {}, {}
        self._drawn.clear()

    @staticmethod
    def _read(labels: Sequence[str], replays: Mapping[str, bool], out: RecordBuilder, parts: list[Array]) -> None:
        out.add("exact_modules", parts[0].reshape(len(labels), 1 + COLUMNS), labels)
        if replays:
            out.add("replay_drew", np.array([float(other) for other in replays.values()]), [*replays])
            out.tell({"checkpointed": sorted(replays)})
