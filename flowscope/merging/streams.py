"""What all hyper-connections share: n residual streams that travel through a block.

Axis letters: B batch, T positions (any number of axes), D features, S streams (n), M = all of B and T flattened.
The streams are [B, T..., S, D] between blocks and [M, S, D] inside; coefficients are per position (M = 1 when static):
read [M, 1, S], residual [M, S (to), S (from)], write [M, S, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, ConnectionContext, ModeOptions, State, common_dtype
from flowscope.merging.observed import BranchInput, ResidualMix, Streams, Write
from flowscope.model.sites import BlockSites
from flowscope.sums.statistics import full_precision

Coefficients = tuple[Tensor, Tensor, Tensor]


class StreamOptions(ModeOptions):
    """Options of every rule with streams."""

    streams: int = Field(4, ge=1, description="number of residual streams n (`expansion_rate` is accepted too)")
    streams_init: Literal["equal", "distinct"] = Field(
        "equal", description="every stream begins as x, or as x times learned numbers of its own, one a feature"
    )

    @model_validator(mode="before")
    @classmethod
    def _expansion_rate(cls, values: Any) -> Any:  # pickles of 0.1 name it
        if isinstance(values, dict) and "expansion_rate" in values:
            if "streams" in values:
                raise ValueError("streams and expansion_rate are the same option: give one")
            values = dict(values)
            values["streams"] = values.pop("expansion_rate")
        return values

    @classmethod
    def names(cls) -> list[str]:
        """Return the names that are taken."""
        return [*super().names(), "expansion_rate"]


def distinct_streams(streams: int, features: int) -> Tensor:
    """Return what x is multiplied by at first, [S, D]: .6 and Xavier's uniform noise, by torch's random state.

    Equal streams may change places without a change of the output: what breaks that is left to chance, and one stream
    comes to do the work (arXiv 2606.03483; the values are those of its authors' code).
    """
    bound = math.sqrt(6.0 / (streams + features))
    return 0.6 + bound * (2.0 * torch.rand(streams, features, device="cpu") - 1.0)


class StreamConnection(Connection):
    """Read, branch, write on S streams: `h' = residual h + write f(read h)`.

    The first block of the flow expands (every stream is x, or x times `stream_scale` where they are to begin distinct),
    the last reduces by mean or sum; a block that gets no streams, because the first did not run, expands as that would
    (where they leave the flow early: `stream_outputs`).

    Whatever the block's code does to the carry between or after the merges (the norm of a post-norm block, a ReLU after
    the add) is applied to the one tensor it sees, and the change is then given to all streams: equal streams stay
    equal, so the output is kept at the start on post-norm blocks too.

    The state is (residual h [M, S, D], residual, write, what the block's code was given); after the last site
    (streams, what it was given). Observed: "streams" [B, T..., S, D] before the site, "branch_input" (the read h0),
    "residual_mix" [M, S, S] (rows = output stream), "write" [M, S, 1]; M = 1 for static coefficients.
    """

    observed: ClassVar = {
        "residual_mix": ResidualMix,
        "write": Write,
        "streams": Streams,
        "branch_input": BranchInput,
        "norm_input": None,
    }
    expands = True
    stretch: Any = None  # `stream_outputs.Stretch`: the blocks that streams travel through, where there are several
    site: nn.ModuleList

    def __init__(
        self, context: ConnectionContext, options: ModeOptions, streams: int, reduce: Literal["mean", "sum"]
    ) -> None:
        super().__init__(context, options)
        self.streams = streams
        self.reduction = reduce
        if getattr(options, "streams_init", "equal") == "distinct" and context.first:
            scale = distinct_streams(streams, context.features)
            self.stream_scale = nn.Parameter(scale.to(dtype=context.dtype, device=context.device))

    def keeps_output(self) -> bool:
        """Where the streams begin equal."""
        return getattr(self.options, "streams_init", "equal") == "equal"

    @classmethod
    def refusal(cls, block: BlockSites) -> str:
        """Streams have one width."""
        other = any(math.prod(site.shape) != math.prod(block.shape) for site in block.traced.sites)
        return "the stream width changes between its sites" if other else ""

    def carry_factor(self, site: int, sums: Mapping[str, NDArray[np.float64]]) -> None:
        """None: "residual_mix" says it."""

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        """Expand at the first block; return the read of the first site and the state."""
        if self.stretch is not None:
            self.stretch.arrives()
        with full_precision(x):
            if self.first or (self.stretch is not None and x.dim() < self.stretch.axes):
                x = self.features_last(x)
                self._check(x, x.shape[-1:], (self.features,))
                first = self if self.first or self.stretch.start is None else self.stretch.start
                streams = first.expand(x)
            else:
                self._check(x, x.shape[-2:], (self.streams, self.features))
                streams = x
            return self._read(0, streams.reshape(-1, self.streams, self.features), streams.shape[:-2])

    def expand(self, x: Tensor) -> Tensor:
        """Return the first streams [B, T..., S, D] of x [B, T..., D]."""
        scale = getattr(self, "stream_scale", None)
        if scale is not None:
            scaled: Tensor = x.unsqueeze(-2) * scale.to(x.dtype)
            return scaled
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, self.features).contiguous()

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Write the branch into the streams; return the read of the next site (after the last one: see `end`)."""
        assert isinstance(state, tuple)
        mixed, residual, write, given = state
        with full_precision(x):
            if x is not given:  # all streams change by the same: residual (h + change) = mixed + row sums * change
                change = self._change(x, given).reshape(-1, 1, self.features)
                mixed = torch.addcmul(mixed, residual.sum(-1, keepdim=True), change)
            f = self.features_last(f)
            self._check(f, f.shape[-1:], (self.features,))
            mixed, f = common_dtype(mixed, f)
            # an fp32 branch under autocast widens bf16 streams: the write follows
            write = write.to(mixed.dtype)
            write = write.expand(mixed.shape[0], -1, -1)  # without asking for its length, which export would fix
            streams = mixed.baddbmm_(write, f.reshape(-1, 1, self.features))  # nothing else holds what was mixed
            if site + 1 < self.sites:
                return self._read(site + 1, streams, f.shape[:-1])
            streams = streams.view(*f.shape[:-1], self.streams, self.features)
            given = self.features_back(self._after(site, streams))
            return self._handed(site + 1, given), (streams, given)

    def end(self, y: Tensor, state: State) -> Tensor:
        """Return the streams, or at the last block what the block's code made of their reduction."""
        if self.last:
            return y
        assert isinstance(state, tuple)
        streams, given = state
        with full_precision(y):
            streams = streams if y is given else streams + self._change(y, given)
        return streams if self.stretch is None else self.stretch.leaves(streams)

    def _read(self, site: int, streams: Tensor, shape: torch.Size) -> tuple[Tensor, State]:
        """Return the read of a site and the state, from streams [M, S, D] and the `shape` [B, T...]."""
        if self.observer is not None:  # it may hook the gradient of what it sees: show what the graph goes through
            streams = streams.view(*shape, self.streams, self.features)
            self.observe(site, "streams", streams)
            streams = streams.view(-1, self.streams, self.features)
        h, mixed, (_, residual, write) = self._mix(site, streams)
        given = self.features_back(h.view(*shape, self.features))
        if self.observer is not None:
            self.observe(site, "branch_input", given)
            # made in one node with what they mix, the matrices get no gradient of their own
            self.observe(site, "residual_mix", residual, through=mixed)
            self.observe(site, "write", write)
        return self._handed(site, given), (mixed, residual, write, given)

    def _handed(self, point: int, given: Tensor) -> Tensor:
        """Return what the block's code gets at its entry (0) or after a site: a copy where it changes that in place."""
        return given.clone() if self.overwritten and self.overwritten[point] else given

    def _mix(self, site: int, h: Tensor) -> tuple[Tensor, Tensor, Coefficients]:
        """Return read h [M, 1, D], residual h [M, S, D] and the coefficients of the streams h [M, S, D]."""
        read, residual, write = (c.to(h.dtype) for c in self.site[site](h))
        m = h.shape[0]
        return torch.bmm(read.expand(m, -1, -1), h), torch.bmm(residual.expand(m, -1, -1), h), (read, residual, write)

    def _after(self, site: int, streams: Tensor) -> Tensor:
        """What the block's code gets after its last merge."""
        if self.last:
            return streams.mean(-2) if self.reduction == "mean" else streams.sum(-2)
        # A pre-norm block returns it as it is, and `end` drops it: a view costs nothing.
        return streams.select(-2, 0) if self.norm_kinds[site] == "pre" else streams.mean(-2)

    def _change(self, now: Tensor, given: Tensor) -> Tensor:
        """Return what the block's code added to the tensor it was given, [B, T..., 1, D]."""
        change = self.features_last(now) - self.features_last(given)
        self._check(change, change.shape[-1:], (self.features,))
        return change.unsqueeze(-2)

    def _check(self, x: Tensor, got: torch.Size, expected: tuple[int, ...]) -> None:
        if tuple(got) != expected:
            raise FlowscopeError(
                f"wrap(mode={self.mode!r}), sub-layers {self.offset} to {self.offset + self.sites - 1}: got a "
                f"tensor of shape {tuple(x.shape)}, expected it to end in {expected} (streams, features). "
                "The stream width must not change inside a flow: leave such blocks out with where=..., or use "
                "mode='keel'."
            )
