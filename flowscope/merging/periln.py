"""`peri-ln`: a norm on both sides of each branch (Kim et al. 2025, arXiv 2502.02732)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from flowscope.merging.connection import Connection, ConnectionContext, ModeOptions, State, common_dtype
from flowscope.model.sites import BlockSites
from flowscope.sums.statistics import full_precision


class PeriLNOptions(ModeOptions):
    """`x + LN(f(LN x))`."""

    starting = ("init",)
    init: float = Field(1.0, description="first weight of the norms behind the branches")


class PeriLNConnection(Connection):
    """`x_{k+1} = x_k + LN_out(f(LN_in(x_k)))` (section 3): the block's own norm, and a new RMS norm after the branch.

    What a branch adds has the size of its norm's weight, so the variance of the hidden state grows at most with depth
    where Pre-LN's may grow exponentially, and no branch's gradient explodes with its output. For pre-norm blocks only:
    one without a norm before its branch has nothing to be peri of.
    """

    mode = "peri-ln"
    Options = PeriLNOptions

    def __init__(self, context: ConnectionContext, options: PeriLNOptions) -> None:
        super().__init__(context, options)
        self.outer = nn.ModuleList(_norm(context, options.init) for _ in range(self.sites))

    @classmethod
    def refusal(cls, block: BlockSites) -> str:
        """It is a rule for pre-norm blocks."""
        other = any(site.norm != "pre" for site in block.traced.sites)
        return "peri-ln wants a norm before each branch" if other else ""

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return `x + LN_out(f)`."""
        with full_precision(x):
            x, f = common_dtype(x, f)
            return x + self.features_back(self.outer[site](self.features_last(f))), state


def _norm(context: ConnectionContext, weight: float) -> nn.Module:
    norm = nn.RMSNorm(context.features, eps=1e-6, dtype=context.dtype, device=context.device)
    nn.init.constant_(norm.weight, weight)
    return norm
