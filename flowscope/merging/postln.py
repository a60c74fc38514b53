"""Post-norm connections with a constant carry weight: `keel-postln` (Keel as published) and `deepnorm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, ConnectionContext, ModeOptions, State, common_dtype
from flowscope.model.sites import BlockSites
from flowscope.sums.site_metrics import ALPHA
from flowscope.sums.statistics import full_precision

_EPS = 1e-6
_PRE_NORM_SITES = 2  # Keel 3.1: the first attention and the first FFN sub-layer stay Pre-LN


class KeelPostLNOptions(ModeOptions):
    """`LN(alpha x + f(LN x))`."""

    alpha: float | None = Field(None, gt=0, description="weight of the carry; None: the number of sub-layers")


class DeepNormOptions(ModeOptions):
    """`LN(alpha x + f)`, branch weights scaled by beta."""

    starting = ("beta",)
    alpha: float | None = Field(None, gt=0, description="weight of the carry; None: from the depth")
    beta: float | None = Field(None, gt=0, description="Xavier gain of the branch weights; None: from the depth")


class KeelPostLNConnection(Connection):
    """`x_{k+1} = LN_outer(alpha x_k + f(LN_inner(x_k)))`; the flow's first two sub-layers `x + f(LN_inner(x))`.

    Keel, Chen & Wei 2026, equation 8 and 3.1; alpha = number of sub-layers of the flow. A block that layers share
    has no Pre-LN sub-layers. New norms are RMS norms with weight 1. The block's own norm takes one of the two places:

    - pre-norm site: it is the inner one; `merge` applies a new outer norm.
    - post-norm site: it is the outer one; new inner norms feed the branches. The branch then sees LN_inner(x) while the
      carry x travels in the state, so `merge` must apply the block's norm itself (`ConnectionContext.outer_norms`) and
      the block's code must skip it: `bypass_outer` is True there. At the first two sub-layers nobody applies it.
    - site without norm: both are new.

    The carry's factor is alpha * gamma / rms(z) at the sites that have an outer norm (gamma: its weight, z: its input,
    alpha x + f) and 1 elsewhere.
    """

    mode = "keel-postln"
    Options = KeelPostLNOptions
    constants = ("alpha",)
    metrics = (ALPHA,)
    warmup = 1.4

    def __init__(self, context: ConnectionContext, options: KeelPostLNOptions) -> None:
        super().__init__(context, options)
        alpha = options.alpha if options.alpha is not None else float(context.total_sites)
        kinds = context.norm_kinds
        # a block that serves several layers cannot tell the first from the others
        shared = context.calls > 1
        self.outer_sites = tuple(shared or self.offset + k >= _PRE_NORM_SITES for k in range(self.sites))
        self.inner_sites = tuple(kind != "pre" for kind in kinds)
        self.alpha = tuple(alpha if outer else 1.0 for outer in self.outer_sites)
        self.bypass_outer = tuple(kind == "post" for kind in kinds)
        for k, kind in enumerate(kinds):
            if kind == "post" and context.outer_norms[k] is None:
                raise FlowscopeError(
                    f"wrap(mode='keel-postln'): site {k} is post-norm and its norm is not a module of the block, so "
                    "it cannot become the outer norm. Use mode='keel' or mode='deepnorm'."
                )
        self.inner = nn.ModuleDict({str(k): _rms_norm(context) for k in range(self.sites) if self.inner_sites[k]})
        self.outer = nn.ModuleDict(
            {str(k): _rms_norm(context) for k in range(self.sites) if self.outer_sites[k] and kinds[k] != "post"}
        )

    def unmade(self) -> str:
        """Say so where all are among a flow's first two sub-layers, whose norm before the branch is the block's own."""
        made = any(self.outer_sites) or any(self.inner_sites)
        return "" if made else f"the first {_PRE_NORM_SITES} sub-layers of a flow stay as they are"

    @classmethod
    def describe(cls, connections: Sequence[Any]) -> str:
        """Say in how many blocks nothing changes."""
        said = [why for c in connections if (why := c.unmade())]
        return f"unchanged in {len(said)} of {len(connections)} blocks: {said[0]}" if said else ""

    def function(self) -> dict[str, Any]:
        """Alpha as it is: where it follows the depth, another depth has another."""
        return {**super().function(), "alpha": [*self.alpha]}

    @classmethod
    def refusal(cls, block: BlockSites) -> str:
        """A projection makes the carry after `begin` has given it to the first inner norm."""
        projected = any(site.kind == "projection" or site.rule.fresh for site in block.traced.sites)
        return "keel-postln has no place for a projection shortcut" if projected else ""

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        """Return what the first branch sees (inner norm where it is ours), and x as the carry."""
        return self._seen(0, x), x

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return what the next branch sees, and the new carry."""
        carry = state if self.inner_sites[site] and isinstance(state, Tensor) else x
        with full_precision(x):
            carry, f = common_dtype(carry, f)
            z = torch.add(f, carry, alpha=self.alpha[site])
            y = self._normed(site, z) if self.outer_sites[site] else z
            seen = self._seen(site + 1, y) if site + 1 < self.sites else y
        return seen, y

    def norm_after(self, site: int) -> nn.Module | None:
        """Return the norm applied after a site, ours or the block's; None at the first two sub-layers."""
        if not self.outer_sites[site]:
            return None
        existing = self.existing_norms[0][site]
        return existing if self.bypass_outer[site] else self.outer[str(site)]

    def _normed(self, site: int, z: Tensor) -> Tensor:
        self.observe(site, "norm_input", z)
        norm = self.norm_after(site)
        assert norm is not None
        if self.bypass_outer[site]:
            y: Tensor = norm(z)
            return y
        return self.features_back(norm(self.features_last(z)))

    def _seen(self, site: int, x: Tensor) -> Tensor:
        if not self.inner_sites[site]:
            return x
        with full_precision(x):
            return self.features_back(self.inner[str(site)](self.features_last(x)))


def _rms_norm(context: ConnectionContext) -> nn.Module:
    return nn.RMSNorm(context.features, eps=_EPS, dtype=context.dtype, device=context.device)


class DeepNormConnection(Connection):
    """`alpha x + f`, which the block's own post-norm then normalises (DeepNet, Wang et al. 2022).

    On pre-norm blocks, or without norms, this is refused: `keel-postln` is the rule that converts those.
    The block's branch weights are drawn anew (`deepnorm_init_`). The carry's factor is alpha * gamma / rms(z), with
    z = alpha x + f.
    """

    mode = "deepnorm"
    Options = DeepNormOptions
    constants = ("alpha",)
    metrics = (ALPHA,)
    left_behind = "the branch weights deepnorm re-initialised stay as they are now"

    def __init__(self, context: ConnectionContext, options: DeepNormOptions) -> None:
        super().__init__(context, options)
        if any(kind != "post" for kind in context.norm_kinds):
            raise FlowscopeError(
                f"wrap(mode='deepnorm'): block {context.block} has norms {context.norm_kinds}, expected "
                "post-norm sites (LN(x + f)). For pre-norm blocks use mode='keel-postln'."
            )
        if context.role == "encoder":
            side = deepnorm_constants(context.blocks, context.other_blocks).encoder
        else:
            side = deepnorm_constants(context.other_blocks, context.blocks).decoder
        assert side is not None
        alpha = options.alpha if options.alpha is not None else side.alpha
        self.beta = options.beta if options.beta is not None else side.beta
        self.alpha = (alpha,) * self.sites

    def function(self) -> dict[str, Any]:
        """Alpha as it is, from the depth or chosen."""
        return {**super().function(), "alpha": [*self.alpha]}

    def prepare(self, block: nn.Module) -> None:
        """Draw the branch weights with gain beta."""
        deepnorm_init_(block, self.beta)

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return `alpha x + f`."""
        return torch.add(f, x, alpha=self.alpha[site]), state


class DeepNormSide(NamedTuple):
    """alpha (carry weight) and beta (Xavier gain) of one stack."""

    alpha: float
    beta: float


class DeepNormConstants(NamedTuple):
    """The constants of both stacks; None for a stack that is not there."""

    encoder: DeepNormSide | None
    decoder: DeepNormSide | None


def deepnorm_constants(encoder_layers: int, decoder_layers: int) -> DeepNormConstants:
    """Return DeepNorm's constants for N encoder and M decoder blocks (0: no such stack).

    DeepNet (Wang et al. 2022), table 1: one stack of N: alpha (2N)^(1/4), beta (8N)^(-1/4). Both: encoder
    .81 (N^4 M)^(1/16) and .87 (N^4 M)^(-1/16); decoder (3M)^(1/4) and (12M)^(-1/4). torchscale 0.3.0 has 1.15 = 1/.87
    in place of .87 for the encoder's beta, apparently inverted.

    Raises:
        FlowscopeError: both are 0, or one is negative.
    """
    n, m = encoder_layers, decoder_layers
    if n < 0 or m < 0 or n + m == 0:
        raise FlowscopeError(
            f"deepnorm_constants: got {n} encoder and {m} decoder blocks, expected at least one block."
        )
    if n and m:
        mixed = (n**4 * m) ** (1 / 16)
        return DeepNormConstants(
            DeepNormSide(0.81 * mixed, 0.87 / mixed), DeepNormSide((3 * m) ** 0.25, (12 * m) ** -0.25)
        )
    side = DeepNormSide((2 * (n + m)) ** 0.25, (8 * (n + m)) ** -0.25)
    return DeepNormConstants(side if n else None, side if m else None)


_QUERY_KEY = {"q", "k", "query", "key", "q_proj", "k_proj", "q_lin", "k_lin", "wq", "wk", "to_q", "to_k"}
_PACKED = {"c_attn", "qkv", "query_key_value", "qkv_proj", "wqkv", "in_proj"}


def deepnorm_weights(block: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Return (name, weight [out, in], is_branch) of a block's linear layers, as DeepNorm initialises them.

    `is_branch` is True for fc1, fc2, v_proj, out_proj and their namesakes (all but query and key): Xavier with gain
    beta; False for query and key: gain 1. The three equal parts of packed projections (`in_proj_weight`, `c_attn`,
    `qkv`) are returned one by one, as views.
    """
    found: list[tuple[str, Tensor, bool]] = []
    for path, module in block.named_modules():
        leaf, weight = path.rsplit(".", 1)[-1].lower(), getattr(module, "weight", None)
        if isinstance(module, nn.MultiheadAttention):
            found += _attention_weights(path, module)
            continue
        if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        matrix = weight.detach()
        matrix = matrix.t() if type(module).__name__ == "Conv1D" else matrix
        name = f"{path}.weight".lstrip(".")
        if leaf in _PACKED and matrix.shape[0] % 3 == 0:
            found += _thirds(name, matrix)
        else:
            found.append((name, matrix, leaf not in _QUERY_KEY))
    return found


def _attention_weights(path: str, module: nn.MultiheadAttention) -> list[tuple[str, Tensor, bool]]:
    if module.in_proj_weight is not None:
        return _thirds(f"{path}.in_proj_weight".lstrip("."), module.in_proj_weight.detach())
    names = [(f"{part}_proj_weight", part == "v") for part in "qkv"]
    return [(f"{path}.{name}".lstrip("."), getattr(module, name).detach(), branch) for name, branch in names]


def _thirds(name: str, matrix: Tensor) -> list[tuple[str, Tensor, bool]]:
    query, key, value = matrix.chunk(3, dim=0)
    return [(f"{name}[q]", query, False), (f"{name}[k]", key, False), (f"{name}[v]", value, True)]


@torch.no_grad()
def deepnorm_init_(block: nn.Module, beta: float, generator: torch.Generator | None = None) -> list[str]:
    """Re-initialise a block's linear weights in place as DeepNorm asks; return the names that got gain beta.

    Xavier normal with gain beta for fc1, fc2, v_proj, out_proj and with gain 1 for query and key (DeepNet, figure 2).
    What the weights were is lost, so this is for training from scratch. Shared weights are drawn once.

    Raises:
        FlowscopeError: the block has no such weight.
    """
    weights = deepnorm_weights(block)
    if not any(branch for _, _, branch in weights):
        raise FlowscopeError(f"deepnorm: {type(block).__name__} has no linear branch weight to scale by beta.")
    seen: set[int] = set()
    for _, weight, branch in weights:
        if weight.data_ptr() not in seen or weight.is_meta:
            nn.init.xavier_normal_(weight, gain=beta if branch else 1.0, generator=generator)
            seen.add(weight.data_ptr())
    return [name for name, _, branch in weights if branch]
