"""The parameters, their gradients as the optimizer uses them, and what it made of them, told to the bit.

Axis letters: N parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.instruments.parameter_table import owned_by
from flowscope.instruments.parameters import local_gradient
from flowscope.metrics import Metric
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.fingerprints import ROW, row_fingerprints, stacked
from flowscope.sums.payload import Part, Sharing, flat, from_host, local
from flowscope.torch_internals import shard_start

KINDS = "exact_weights", "exact_param_gradients", "exact_updated"
WORDS = (
    "Of each parameter before the update in the first steps: a checksum of every bit, the sum of squares, projections.",
    "The same of the gradient that the optimizer uses.",
    "The same of each parameter after the update.",
)


class ExactParameters(Instrument):
    """Fingerprints of weights and gradients around the update."""

    name = "exact_parameters"
    families = ()
    metrics = tuple(
        Metric(
            kind, words, formula="checksum, ‖w‖², <r_k, w>", rows="parameters", shape="table", drawn=False, exact=True
        )
        for kind, words in zip(KINDS, WORDS, strict=True)
    )

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """None where no step is to be told to the bit."""
        return [cls()] if config.exact_steps else []

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Nothing of the model is called."""
        self._parameters, self._switch = view.parameters, hooks.switch
        self._sums: Array | None = None
        """Those of all ranks, until the record is made."""
        self.drop()

    def _live(self) -> dict[int, Tensor]:
        return {i: p for i, p in enumerate(self._parameters.current()) if p is not None}

    @torch.no_grad()
    def _look(self, kind: str, tensors: Mapping[int, Tensor], starts: Mapping[int, tuple[int, int]]) -> None:
        numbers = [*tensors]
        found = self._found[kind]
        for group, x in stacked([tensors[i] for i in numbers]):
            rows = row_fingerprints(x, [starts[numbers[at]] for at in group])
            found.update(zip((numbers[at] for at in group), rows, strict=True))

    def _weights(self, kind: str) -> None:
        live = self._live()
        self._look(kind, {i: local(p.detach()) for i, p in live.items()}, {i: shard_start(p) for i, p in live.items()})

    def before_update(self, *, updating: bool) -> None:
        """The weights that the step began with."""
        if self._switch.exact:
            self._weights("exact_weights")

    def read_gradients(self, only: set[int] | None = None, scale: Tensor | None = None) -> None:
        """What an optimizer is about to use."""
        if not self._switch.exact:
            return
        held = self._found["exact_param_gradients"]
        found = {
            i: p
            for i, p in self._live().items()
            if p.grad is not None and i not in held and (only is None or id(p) in only) and not p.grad.is_sparse
        }
        starts = {i: shard_start(p) for i, p in found.items()}
        self._look("exact_param_gradients", {i: local_gradient(p).detach() for i, p in found.items()}, starts)
        if scale is not None:  # a fused optimizer divides inside its step
            divisor = torch.stack([scale.new_ones(()), scale**2, *[scale] * (ROW - 2)]).reshape(-1)
            held.update({i: held[i] / divisor.to(held[i]) for i in found})

    def after_update(self) -> None:
        """What it made of the weights."""
        if self._switch.exact:
            self._weights("exact_updated")

    def take(self) -> Taken | None:
        """[kinds, N, ROW] on the device of the first parameter; rows that were not seen are zero."""
        found, names = self._found, list(self._parameters.names)
        self.drop()
        seen = [(kind, i, row) for kind, rows in enumerate(found.values()) for i, row in rows.items()]
        if not seen:
            return None
        device = seen[0][2].device
        table = torch.zeros(len(KINDS), len(names), ROW, dtype=seen[0][2].dtype, device=device)
        kinds, numbers = torch.tensor([at[:2] for at in seen]).T
        table[kinds, numbers] = torch.stack([row.to(device) for *_, row in seen])
        return Taken(self.name, [table], partial(self._read, names), partial(self._parts, table))

    def drop(self) -> None:
        """Forget the step."""
        self._found: dict[str, dict[int, Tensor]] = {kind: {} for kind in KINDS}

    def update_failed(self) -> None:
        """It begins again."""
        self.drop()

    def _parts(self, table: Tensor, sharing: Sharing, agreed: Mapping[str, int]) -> list[Part]:
        """Of what several ranks hold, the first one's; shards add up."""
        del agreed
        owned = owned_by(self._parameters.current(), sharing)[: table.shape[1], None]

        def gather() -> Tensor:
            mine = from_host(np.broadcast_to(owned, table.shape).astype(np.float64), sharing.device)
            return flat([table], sharing.device) * mine

        def scatter(sums: Array) -> None:
            self._sums = sums.reshape(table.shape)

        return [Part(f"{self.name} {table.shape[1]}", table.numel(), gather, scatter, fixed=False)]

    def _read(self, names: Sequence[str], out: RecordBuilder, parts: list[Array]) -> None:
        table, self._sums = self._sums if self._sums is not None else parts[0], None
        table = np.where(table.any(-1, keepdims=True), table, np.nan)
        for kind, rows in zip(KINDS, table, strict=True):
            if np.isfinite(rows).any():
                out.add(kind, rows, names)
