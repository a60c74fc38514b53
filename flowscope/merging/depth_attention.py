"""`attention-residuals`: each branch reads all earlier ones by attention over depth (arXiv 2603.15031).

Axis letters: B batch, T positions, D features, S sources (x, then a sum of branch outputs each), M = all of B and T.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import ConnectionContext, ModeOptions, State, common_dtype
from flowscope.merging.observed import BranchInput, Mean
from flowscope.merging.streams import StreamConnection
from flowscope.metrics import Metric
from flowscope.model.sites import BlockSites
from flowscope.sums.statistics import full_precision

_EPS = 1e-6


class AttentionOptions(ModeOptions):
    """Nothing to choose."""


class DepthRead(nn.Module):
    """The read of one sub-layer: softmax over the sources v_i of w . RMSNorm(v_i); w = 0 at the start, a plain mean."""

    def __init__(self, context: ConnectionContext) -> None:
        super().__init__()
        self.query = context.parameter(context.features)
        self.norm = nn.RMSNorm(context.features, eps=_EPS, dtype=context.dtype, device=context.device)

    def forward(self, sources: Tensor) -> tuple[Tensor, Tensor]:
        """Return the read [M, D] of sources [M, S, D], and the weights [M, S]."""
        logits = self.norm(sources.to(self.query.dtype)) @ self.query
        weights = torch.softmax(logits, -1).to(sources.dtype)
        return torch.bmm(weights.unsqueeze(1), sources).squeeze(1), weights


class AttentionResidualsConnection(StreamConnection):
    """`h_l = sum_i a_i v_i`, a = softmax_i(w_l . RMSNorm(v_i)), v_0 = x, v_i = f_i(h_i) (section 3).

    A sub-layer and a norm's weight of D parameters each; one more read makes the output of the last block. What travels
    between the blocks are all sources so far, padded: memory and time grow with the square of the depth, see
    `block-attention-residuals`. At the start each read is the mean of what the plain model sums, which is the same
    behind a norm. For pre-norm blocks whose code leaves the carry alone between its merges.
    """

    mode = "attention-residuals"
    Options: ClassVar[Any] = AttentionOptions
    observed: ClassVar = {
        "residual_mix": None,
        "write": None,
        "streams": None,
        "branch_input": BranchInput,
        "input_share": Mean,
    }
    metrics = (
        Metric(
            "input_share",
            "Share of the flow's own input in what each branch reads. 1 / sources at the start.",
            formula="a_0",
            source="arXiv 2603.15031",
            view="Gates",
            rows="sites",
        ),
    )

    def __init__(self, context: ConnectionContext, options: Any) -> None:
        self.size = self.sites_a_source(context, options)
        super().__init__(context, options, self.source_of(context.between - 1) + 1, "sum")
        self.behind = context.behind
        reads = [site for site in range(self.sites) if self.sources_at(site) > 1]  # one source needs no choice
        self.read = nn.ModuleDict({str(site): DepthRead(context) for site in reads})
        self.output = DepthRead(context) if self.last else None

    @classmethod
    def refusal(cls, block: BlockSites) -> str:
        """It is a rule for pre-norm blocks."""
        other = any(site.norm == "post" for site in block.traced.sites)
        return f"{cls.mode} wants a norm before each branch" if other else super().refusal(block)

    @staticmethod
    def sites_a_source(context: ConnectionContext, options: Any) -> int:
        """Return how many branch outputs are summed to a source."""
        return 1

    def function(self) -> dict[str, Any]:
        """The size of a block as it is, from the depth or chosen."""
        return {**super().function(), "block_size": self.size}

    def keeps_output(self) -> bool:
        """A mean stands for the sum."""
        return False

    def source_of(self, number: int) -> int:
        """Return the source that the output of a sub-layer is added to, counted from where streams begin."""
        return number // self.size + 1

    def sources_at(self, site: int) -> int:
        """Return how many sources a site reads; that under way is empty until its first branch."""
        number = self.behind + site
        return self.source_of(number) + (number % self.size > 0)

    def expand(self, x: Tensor) -> Tensor:
        """Return x and, in the places of what comes, zeros."""
        rest = x.new_zeros(*x.shape[:-1], self.streams - 1, self.features)
        return torch.cat([x.unsqueeze(-2), rest], -2)

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Add the branch to its source; return the read of the next site."""
        assert isinstance(state, tuple)
        sources, given = state
        if x is not given:
            raise FlowscopeError(
                f"wrap(mode={self.mode!r}), sub-layer {self.behind + site}: the block's code changes the carry before "
                "this merge, and there is no sum that could follow. Leave the block out with where=, or use mode='dhc'."
            )
        with full_precision(x):
            f = self.features_last(f)
            self._check(f, f.shape[-1:], (self.features,))
            sources, f = common_dtype(sources, f)
            place = self.source_of(self.behind + site)
            own = sources[:, place : place + 1] + f.reshape(-1, 1, self.features)
            sources = torch.cat([sources[:, :place], own, sources[:, place + 1 :]], 1)
            if site + 1 < self.sites:
                return self._read(site + 1, sources, f.shape[:-1])
            streams = sources.view(*f.shape[:-1], self.streams, self.features)
            return self._handed(site + 1, self.features_back(self._after(site, streams))), (streams, f)

    def end(self, y: Tensor, state: State) -> Tensor:
        """Return the sources, or at the last block what the block's code made of their last read."""
        assert isinstance(state, tuple)
        streams = state[0]
        return y if self.last else streams if self.stretch is None else self.stretch.leaves(streams)

    def _read(self, site: int, streams: Tensor, shape: torch.Size) -> tuple[Tensor, State]:
        """Return the read of a site, and the sources [M, S, D] with it."""
        count = self.sources_at(site)
        if count > 1:
            h, weights = self.read[str(site)](streams[:, :count])
        else:
            h, weights = streams[:, 0], torch.ones_like(streams[:, :1, 0])
        given = self.features_back(h.view(*shape, self.features))
        if self.observer is not None:
            self.observe(site, "branch_input", given)
            self.observe(site, "input_share", weights[:, 0], through=h)
        return self._handed(site, given), (streams, given)

    def _after(self, site: int, streams: Tensor) -> Tensor:
        """What the block's code gets after its last merge: at the last block the read of all sources."""
        if self.output is None:
            return streams.select(-2, 0)  # `end` drops it
        read: Tensor = self.output(streams.flatten(0, -3))[0]
        return read.view(*streams.shape[:-2], self.features)
