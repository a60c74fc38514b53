"""`layer-scale`: branches that begin small, feature by feature (Touvron et al. 2021, arXiv 2103.17239)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from flowscope.merging.connection import Connection, ConnectionContext, ModeOptions, State
from flowscope.merging.observed import Mean
from flowscope.merging.rezero import BRANCH_SCALE

_BY_DEPTH = ((18, 0.1), (24, 1e-5))  # section 2: up to so many blocks, such a first value
_DEEPER = 1e-6


class LayerScaleOptions(ModeOptions):
    """`x + diag(a) f`."""

    starting = ("init",)
    init: float | None = Field(None, description="first value of a; None: .1 to 18 blocks, 1e-5 to 24, then 1e-6")


class LayerScaleConnection(Connection):
    """`x_{k+1} = x_k + diag(a_k) f(x_k)`, one learned number a feature and merge (section 2).

    At the start the flow is nearly the identity, and each feature of a branch grows at its own pace. Unlike `rezero`
    the branches learn from the first step.
    """

    mode = "layer-scale"
    Options = LayerScaleOptions
    observed: ClassVar = {"branch_scale": Mean}
    metrics = (BRANCH_SCALE,)

    def __init__(self, context: ConnectionContext, options: LayerScaleOptions) -> None:
        super().__init__(context, options)
        self.init = next((value for most, value in _BY_DEPTH if context.blocks <= most), _DEEPER)
        self.init = self.init if options.init is None else options.init
        self.scale = nn.ParameterList(context.parameter(self.features, value=self.init) for _ in range(self.sites))

    def keeps_output(self) -> bool:
        """With `init=1`."""
        return self.init == 1

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return `x + diag(a) f`."""
        scale: Tensor = self.observe(site, "branch_scale", self.scale[site])
        return x + self.features_back(self.features_last(f) * scale.to(f.dtype)), state
