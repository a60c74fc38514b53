"""The rule at the merge sites of one block: its interface, and the plain residual that shares it.

A rule is one class in one file; it answers for all that the package asks of it (the methods and class attributes of
`Connection`), and `wrap(model, mode=TheRule)` takes it as it takes a built-in one. The least:

    class ScaledBranch(Connection):
        mode = "scaled-branch"
        observed = {"scale": Mean}                    # what `watch` records of it

        class Options(ModeOptions):
            starting = ("init",)                      # where the parameters start: not compared at loading
            init: float = 1e-4

        def __init__(self, context, options):
            super().__init__(context, options)
            scales = [context.parameter(self.features, value=options.init) for _ in range(self.sites)]
            self.scale = nn.ParameterList(scales)

        def keeps_output(self):
            return self.options.init == 1

        def merge(self, site, state, x, f):
            f = self.features_last(f) * self.observe(site, "scale", self.scale[site])
            return x + self.features_back(f), state

`flowscope.testing.check_connection(ScaledBranch)` says whether it keeps every promise.

A `Connection` serves one call of a block's forward. The weaving calls, in this order:

    x, state = connection.begin(x)                    # at block entry
    x, state = connection.at_site(0, state, x, f)     # instead of the block's own x + f, site by site: `merge`
    y = connection.end(y, state)                      # at block exit

Everything is functional: what a call must remember is in `state` (None, a tensor, or a tuple of tensors), so the same
code serves eager, checkpointed and compiled runs. What the weaving must know besides:

- `merge(site, ...)` gets as `x` what the block's code held as carry at that add, and returns what it holds next. Pass
  and hand on the tensors themselves (no view, no copy) where you can: a connection with streams tells by identity
  whether the block's code changed the carry in between (a post-norm, a ReLU after the add, a projection) and then
  gives the same change to all its streams. A copy costs time, not correctness.
- `bypass_outer[site]`: the norm that the block's code applies to what `merge(site)` returned must be skipped (act as
  identity), because the connection has applied it already, or because it is not to be applied at all. Only
  `keel-postln` on post-norm blocks sets it; it needs the modules themselves in `ConnectionContext.outer_norms` and
  calls them with a plain tensor. They stay where they are in the block: the connection holds a reference, not a child.
- With streams, what travels between the blocks is [B, T..., S, D] (S streams, features last whatever the model's
  feature axis is), from the `end` of the first block to the `begin` of the last.

Axis letters: B batch, T positions (any number of axes), D features, S streams, M = all of B and T flattened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.merging.observed import NormInput, SiteSums
from flowscope.merging.saved_options import decode, encode, refuse_other
from flowscope.metrics import Metric
from flowscope.model.sites import BlockSites
from flowscope.sums.site_metrics import norm_factor

logger = logging.getLogger("flowscope")

State = Tensor | tuple[Tensor, ...] | None
NormKind = Literal["pre", "post", "none"]


class ModeOptions(BaseModel):
    """Options of one rule; unknown names are errors.

    Attributes:
        starting: those that say where the parameters start and no more. The others decide the function at given
            parameters: they are saved with a checkpoint and compared where it is loaded.
    """

    starting: ClassVar[tuple[str, ...]] = ()
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names that are taken."""
        return [*cls.model_fields]


class ResidualOptions(ModeOptions):
    """`x + f`: nothing to choose."""


@dataclass(frozen=True)
class ConnectionContext:
    """Where a block's connection stands in its flow.

    Attributes:
        features: D, the width of the carry.
        sites: merge sites in this block.
        block: index of this block in the flow, `blocks` in all; a shared block counts at each of its calls.
        first: the block at which streams are expanded.
        last: the block at which streams are reduced.
        calls: how often the block runs in one forward: more than once where layers share it.
        offset: index in the flow of this block's first site (the sub-layer index k of the papers).
        total_sites: sites in the whole flow; 0 means `blocks * sites`.
        behind: sites before this block since streams were expanded.
        between: sites from there to where they are reduced; 0 means those of this block.
        feature_axis: -1, or 1 in convnets.
        norm_kinds: per site, where the block's own norm is: before the branch, after the add, or nowhere.
        outer_norms: per site, the block's own norm after the add (post-norm sites), else None.
        overwritten: whether the block's code changes in place what it is given as carry: at its entry, then after each
            site.
        role: the side of an encoder-decoder this flow is (`deepnorm`).
        other_blocks: blocks on the other side of an encoder-decoder, 0 without one (`deepnorm`).
    """

    features: int
    sites: int
    block: int = 0
    blocks: int = 1
    first: bool = True
    last: bool = True
    offset: int = 0
    total_sites: int = 0
    behind: int = 0
    between: int = 0
    feature_axis: int = -1
    norm_kinds: tuple[NormKind, ...] = ()
    outer_norms: tuple[nn.Module | None, ...] = ()
    overwritten: tuple[bool, ...] = ()
    role: Literal["encoder", "decoder"] = "decoder"
    other_blocks: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    calls: int = 1

    def __post_init__(self) -> None:
        """Fill in what follows from the rest; refuse what contradicts it."""
        if self.features < 1 or self.sites < 1:
            raise FlowscopeError(f"connection: got features={self.features}, sites={self.sites}, expected at least 1.")
        for name, fill in (("norm_kinds", "pre"), ("outer_norms", None)):
            values = getattr(self, name) or (fill,) * self.sites
            if len(values) != self.sites:
                raise FlowscopeError(
                    f"connection: got {len(values)} {name}, expected one for each of {self.sites} sites."
                )
            object.__setattr__(self, name, tuple(values))
        if not self.overwritten:
            object.__setattr__(self, "overwritten", (False,) * (self.sites + 1))
        if not self.between:
            object.__setattr__(self, "between", self.sites)
        if not self.total_sites:
            object.__setattr__(self, "total_sites", self.blocks * self.sites)

    def parameter(self, *shape: int, value: float = 0.0) -> nn.Parameter:
        """Return a parameter filled with a value, of the block's dtype and on its device."""
        place: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return nn.Parameter(torch.full(shape, value, **place))


def common_dtype(x: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and f in the dtype that `x + f` would have."""
    if x.dtype == f.dtype:
        return x, f
    dtype = torch.promote_types(x.dtype, f.dtype)
    return x.to(dtype), f.to(dtype)


class Connection(nn.Module):
    """The plain residual `x + f`, and the interface of every other rule (see the module's docstring).

    Attributes:
        mode: the rule's name; `aliases` are accepted for it.
        Options: what `wrap(mode=..., **options)` takes.
        observed: {name: how it is summed} for what the rule shows by `observe` at each of its sites, added to what its
            base declares; None takes a declaration of the base away. What is shown without being declared is an error.
        constants: names of attributes with a number a site that are recorded as they are.
        metrics: what its constants say, and what it records under other names of its own; a `Mean` that none of them
            describes is added.
        expands: whether what travels between the blocks has an axis of streams.
        warmup: the articles' advice on how many times longer the warm-up is.
        left_behind: what `unwrap` does not undo; "" for nothing.
        traps: {where the block's norm is: what was measured there}, said by `wrap` as a warning.
        sites: merge sites of the block.
        overwritten: whether the block's code changes in place what `begin` and then each `merge` gave it.
        bypass_outer: per site, whether the block's own norm after the add must be skipped.
        alpha: per site, the constant weight of the carry.
        streams: number of streams S that travel between blocks; 0: x itself travels.
        observer: called as `observer(site, name, tensor, through)` for what `observe` is given; `name` is None once all
            of a site has been shown.
    """

    mode: ClassVar[str] = "residual"
    aliases: ClassVar[tuple[str, ...]] = ()
    Options: ClassVar[type[ModeOptions]] = ResidualOptions
    observed: ClassVar[Mapping[str, type[SiteSums] | None]] = {"norm_input": NormInput}
    constants: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[tuple[Metric, ...]] = ()
    expands: ClassVar[bool] = False
    warmup: ClassVar[float] = 1.0
    left_behind: ClassVar[str] = ""
    traps: ClassVar[Mapping[str, str]] = {}

    is_flowscope_connection = True
    streams: int = 0
    overwritten: tuple[bool, ...] = ()
    notice: Any = None  # `weaving.Notice`: whether something was said already
    observer: Callable[..., None] | None = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        declared = {**super(cls, cls).observed, **cls.observed}  # type: ignore[misc]
        cls.observed = {name: sums for name, sums in declared.items() if sums is not None}
        described = {metric.name for metric in cls.metrics}
        more_metrics = (metric for name, sums in declared.items() if sums is not None for metric in sums.specs(name))
        cls.metrics = (*cls.metrics, *(metric for metric in more_metrics if metric.name not in described))

    def __init__(self, context: ConnectionContext, options: Any) -> None:
        super().__init__()
        self.options = options
        self.features = context.features
        self.sites = context.sites
        self.first = context.first
        self.last = context.last
        self.offset = context.offset
        self.axis = context.feature_axis
        self.norm_kinds = context.norm_kinds
        self.overwritten = context.overwritten
        self.bypass_outer: tuple[bool, ...] = (False,) * context.sites
        self.alpha: tuple[float, ...] = (1.0,) * context.sites
        # A tuple in a tuple: the norms stay children of the block, under their own names.
        self.existing_norms = (context.outer_norms,)

    # -- what a rule says of itself

    @classmethod
    def refusal(cls, block: BlockSites) -> str:
        """Return why the rule cannot serve a block; "" where it can."""
        return ""

    def prepare(self, block: nn.Module) -> None:
        """Change the block's own weights as the rule asks, once it is in its place."""

    def keeps_output(self) -> bool:
        """Whether the wrapped model computes at first what the plain one did; not, unless a rule says so."""
        return type(self).merge is Connection.merge

    def unmade(self) -> str:
        """Return why no site of this block becomes another than it was; "" where one does."""
        return ""

    def function(self) -> dict[str, Any]:
        """Return what decides the function at given parameters, by name: saved and compared (JSON values)."""
        chosen = self.options.model_dump(mode="json", exclude={*self.options.starting})
        return {"mode": self.mode, **chosen}

    @classmethod
    def describe(cls, connections: Sequence[Any]) -> str:
        """Return what the log of `wrap` says of the connections besides their number; "" for nothing."""
        return ""

    def norm_after(self, site: int) -> nn.Module | None:
        """Return the norm that what `merge` made at a site goes through next, None where there is none."""
        return self.existing_norms[0][site]

    def carry_factor(self, site: int, sums: Mapping[str, NDArray[np.float64]]) -> float | None:
        """Return what the carry is multiplied by at a site, NaN where unseen; `shortcut_product` is their product.

        Here alpha, times gamma / rms(z) where a norm follows, z the norm's input. None: the carry has several streams.

        Args:
            site: number in the block.
            sums: of what was shown there in the step, by name; all 0 where it was not.
        """
        if self.norm_after(site) is not None:
            return norm_factor(sums["norm_input"], self.alpha[site])
        return 1.0 if self.norm_kinds[site] == "post" else self.alpha[site]  # a norm that is no module is not known

    def shown_at(self, site: int) -> list[str]:
        """Return the names of what is shown at a site: all that is declared, "norm_input" only where a norm follows."""
        return [name for name in self.observed if name != "norm_input" or self.norm_after(site) is not None]

    # -- one call of the block

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        """Return what the block's own code sees as x, and the state to carry."""
        return x, None

    def at_site(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Merge, and show what the block's own norm is given next."""
        y, state = self.merge(site, state, x, f)
        if self.observer is not None:
            if self.norm_kinds[site] == "post" and not self.bypass_outer[site] and "norm_input" in self.shown_at(site):
                self.observe(site, "norm_input", y)
            self.observer(site, None, y, None)
        return y, state

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return what the block's code sees instead of `x + f` at this site, and the new state."""
        return x + f, state

    def end(self, y: Tensor, state: State) -> Tensor:
        """Return what travels to the next block, from what the block's code returned."""
        return y

    def observe(self, site: int, name: str, tensor: Tensor, through: Tensor | None = None) -> Tensor:
        """Show a tensor to the observer, if there is one, and return it; it is counted when its gradient arrives.

        Args:
            site: number in the block.
            name: one of `observed`.
            tensor: shown.
            through: another tensor of the same call whose gradient is waited for instead (eager code only), where none
                need reach the shown one itself.
        """
        if self.observer is not None:
            self.observer(site, name, tensor, through)
        return tensor

    # -- parameters and axes

    def generator_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and parameter of what generates input-dependent coefficients: decayed, clipped more strictly."""
        return ((name, p) for name, p in self.named_parameters() if name.rsplit(".", 1)[-1] == "generator")

    def static_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and parameter of the rest (static coefficients, scales, gate biases, norms): never decayed."""
        return ((name, p) for name, p in self.named_parameters() if name.rsplit(".", 1)[-1] != "generator")

    def get_extra_state(self) -> Tensor:
        """Return what decides the function, for a checkpoint."""
        return encode(self.function())

    def set_extra_state(self, state: Any) -> None:
        """Nothing: it was compared before anything was loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = f"{prefix}_extra_state"
        saved = decode(state_dict.get(key))
        if saved is not None:
            refuse_other(prefix.rstrip("."), saved, self.function())
        elif any(name.startswith(prefix) for name in state_dict):  # saved by an earlier version
            state_dict[key] = self.get_extra_state()
            if self.notice is not None and not self.notice.without_options:
                self.notice.without_options = True
                logger.warning("the checkpoint holds no options of its connections: whether they agree is not known")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def features_last(self, x: Tensor) -> Tensor:
        """Return x with its feature axis last."""
        return x if self.axis in (-1, x.dim() - 1) else x.movedim(self.axis, -1)

    def features_back(self, x: Tensor) -> Tensor:
        """Undo `features_last`."""
        return x if self.axis in (-1, x.dim() - 1) else x.movedim(-1, self.axis)

    def extra_repr(self) -> str:
        """Show mode, width and place."""
        return f"mode={self.mode}, features={self.features}, sites={self.sites}, offset={self.offset}"
