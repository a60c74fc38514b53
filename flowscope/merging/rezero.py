"""`rezero`: branches that begin at zero (Bachlechner et al. 2020, arXiv 2003.04887)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from flowscope.merging.connection import Connection, ConnectionContext, ModeOptions, State
from flowscope.merging.observed import Mean
from flowscope.metrics import Metric

BRANCH_SCALE = Metric(
    "branch_scale",
    "What the branch is multiplied by at each merge. One that stays near 0 is a layer that does nothing yet.",
    formula="a",
    healthy="away from 0 after the first hundreds of steps (heuristic)",
    source="arXiv 2003.04887",
    view="Gates",
    rows="sites",
)


class ReZeroOptions(ModeOptions):
    """`x + a f`."""

    starting = ("init",)
    init: float = Field(0.0, description="first value of a")


class ReZeroConnection(Connection):
    """`x_{k+1} = x_k + a_k f(x_k)`, one learned number a merge, 0 at the start (equation 1).

    At the start the whole flow is the identity, so the gradient reaches every depth unchanged, and only the numbers
    learn in the first step. It replaces norms: a model that has them keeps them.
    """

    mode = "rezero"
    Options = ReZeroOptions
    observed: ClassVar = {"branch_scale": Mean}
    metrics = (BRANCH_SCALE,)

    def __init__(self, context: ConnectionContext, options: ReZeroOptions) -> None:
        super().__init__(context, options)
        self.scale = nn.ParameterList(context.parameter(1, value=options.init) for _ in range(self.sites))

    def keeps_output(self) -> bool:
        """With `init=1`."""
        return bool(self.options.init == 1)

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return `x + a f`."""
        scale: Tensor = self.observe(site, "branch_scale", self.scale[site])
        return x + f * scale.to(f.dtype), state
