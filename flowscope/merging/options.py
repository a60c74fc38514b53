"""The options of every mode of `wrap`, checked when they are given. Needs no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flowscope.errors import FlowscopeError


class ModeOptions(BaseModel):
    """Options of one mode; unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ResidualOptions(ModeOptions):
    """`x + f`: nothing to choose."""


class KeelOptions(ModeOptions):
    """`x + t*f`, t = sigmoid(W x + b)."""

    init_bias: float | Literal["auto"] = Field(
        "auto", description="+2 on pre-norm sites, -2 elsewhere; a number is obeyed"
    )
    gate: Literal["token", "feature"] = Field("token", description="one gate a position, or one a feature")
    share_gate: Literal["site", "block"] = Field("site", description="one gate a site, or one for the block's sites")
    preserve: bool = Field(False, description="divide t by its first value, so that the output is kept at the start")


class HighwayOptions(ModeOptions):
    """`t*f + (1 - t)*x`, t = sigmoid(W x + b)."""

    init_bias: float = Field(-2.0, description="negative starts toward carry (Srivastava et al. 2015)")
    gate: Literal["token", "feature"] = "feature"


class KeelPostLNOptions(ModeOptions):
    """`LN(alpha x + f(LN x))`."""

    alpha: float | None = Field(None, gt=0, description="weight of the carry; None: the number of sub-layers")


class DeepNormOptions(ModeOptions):
    """`LN(alpha x + f)`, branch weights scaled by beta."""

    alpha: float | None = Field(None, gt=0, description="weight of the carry; None: from the depth")
    beta: float | None = Field(None, gt=0, description="Xavier gain of the branch weights; None: from the depth")


class StaticHyperOptions(ModeOptions):
    """Static hyper-connections."""

    streams: int = Field(4, ge=1, description="number of residual streams n (`expansion_rate` is accepted too)")
    init: Literal["prenorm", "ramp", "alternate", "mixed", "sparse"] = "prenorm"
    reduce: Literal["mean", "sum"] = "mean"
    output_scale: bool = Field(False, description="start the write at 1/sqrt(n)")

    @model_validator(mode="before")
    @classmethod
    def _expansion_rate(cls, values: Any) -> Any:
        if isinstance(values, dict) and "expansion_rate" in values:
            if "streams" in values:
                raise ValueError("streams and expansion_rate are the same option: give one")
            values = dict(values)
            values["streams"] = values.pop("expansion_rate")
        return values


class HyperOptions(StaticHyperOptions):
    """Dynamic hyper-connections."""

    dynamic_scale_init: float = Field(0.01, description="first value of the scales s of the dynamic part")
    tanh: bool = True
    separate_scales: bool = Field(False, description="own scales for read, residual and write; else s_alpha and s_beta")
    norm: Literal["layer", "layer_affine", "rms", "none"] = Field("layer", description="norm before the generator")


class ManifoldOptions(ModeOptions):
    """Manifold-constrained hyper-connections."""

    streams: int = Field(4, ge=1, description="number of residual streams n")
    iterations: int = Field(20, ge=1, description="Sinkhorn iterations")
    init_diagonal: float = Field(2.0, description="first logit of the diagonal of the residual mapping (others 0)")

    _expansion_rate = StaticHyperOptions._expansion_rate


MODES: dict[str, type[ModeOptions]] = {
    "residual": ResidualOptions,
    "keel": KeelOptions,
    "keel-postln": KeelPostLNOptions,
    "highway": HighwayOptions,
    "shc": StaticHyperOptions,
    "dhc": HyperOptions,
    "mhc": ManifoldOptions,
    "deepnorm": DeepNormOptions,
}
"""Every mode with its options, in the order of the documentation."""

_ALIASES = {"hyper": "dhc", "hc": "dhc", "hyper-connections": "dhc"}


def mode_name(mode: str) -> str:
    """Return the canonical name of a mode: case, underscores and aliases (`hyper`, `hc`) resolved.

    Raises:
        FlowscopeError: no such mode; the message lists the modes.
    """
    name = mode.strip().lower().replace("_", "-") if isinstance(mode, str) else mode
    name = _ALIASES.get(name, name) if isinstance(name, str) else name
    if name not in MODES:
        raise FlowscopeError(f"wrap(mode=...): got {mode!r}, expected one of {', '.join(MODES)}.")
    return str(name)


def _names(model: type[ModeOptions]) -> list[str]:
    streams = ["expansion_rate"] if "streams" in model.model_fields else []
    return [*model.model_fields, *streams]


def parse_options(mode: str, **options: Any) -> ModeOptions:
    """Return the checked options of `mode`, defaults filled in.

    Raises:
        FlowscopeError: an unknown mode (lists the modes), an option the mode does not have (lists its own and says
            which mode has it), or a value out of range.
    """
    name = mode_name(mode)
    model = MODES[name]
    known = _names(model)
    for option in options:
        if option not in known:
            owners = [other for other, spec in MODES.items() if option in _names(spec)]
            hint = f" {option} is an option of mode {', '.join(owners)}." if owners else ""
            own = ", ".join(known) or "none"
            raise FlowscopeError(f"wrap(mode={name!r}): unknown option {option!r}. Options of {name}: {own}.{hint}")
    try:
        return model(**options)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise FlowscopeError(f"wrap(mode={name!r}): {wrong}. Options of {name}: {', '.join(known)}.") from None
