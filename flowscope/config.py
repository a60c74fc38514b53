"""Every setting and every limit of `watch`, checked when it is built. Unknown keys are errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from flowscope.errors import FlowscopeError, nearest

Family = Literal["flow", "depth", "parameters"]
BESIDE = (
    "every",
    "budget",
    "flows",
    "gates",
    "parameters",
    "log_dir",
    "on_alert",
    "sinks",
    "scaler",
    "detectors",
    "reference",
)
"""Arguments of `watch` that are looked for among its settings."""
SETTINGS = "print(flowscope.WatchConfig()) shows every setting, help(flowscope.watch) the arguments beside them."


class WatchConfig(BaseModel):
    """Settings of `watch(config=...)`; each limit names its source, or says "heuristic" where it is ours."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # what is measured
    metrics: tuple[Family, ...] = ("flow", "depth", "parameters")
    instruments: dict[str, bool] = Field(default_factory=dict, description="name: False switches an instrument off")
    slow_every: int = Field(10, ge=0, description="each n-th sampled step also runs the slow probes; 0 never")
    seldom_every: int = Field(
        4, ge=1, description="after the first 10 samples each n-th one also reads attention and activation shape; 1 all"
    )
    exact_steps: int = Field(10, ge=0, description="the first n sampled steps are told to the bit, for bisect; 0 never")
    nudge: bool = Field(False, description="moves the first hidden state by one ulp: a run that shows rounding's size")
    branch_alignment: bool = Field(False, description="Hutchinson estimate of tr(J_f)/D on the slow schedule")
    positions: int = Field(256, ge=2, description="largest B*T whose positions are all used; half above")
    units: int = Field(1024, ge=1, description="units per activation module for dead_fraction; exact when they fit")
    update_samples: int = Field(4096, ge=1, description="largest parameter of which all entries are used; half above")
    desync_every: int = Field(5, ge=0, description="each n-th sampled step compares replicas between ranks; 0 never")
    max_records: int = Field(1000, ge=1, description="how many records scope.records keeps")
    max_alerts: int = Field(1000, ge=1, description="how many alerts scope.alerts keeps")

    # sinks
    console: Literal["auto", "off", "alerts", "records"] = "auto"
    images_every: int = Field(10, ge=0, description="each n-th record writes images to TensorBoard; 0 never")

    # alerts: when
    warmup_records: int = Field(2, ge=1, description="a warning needs its condition on this many records in a row")
    resolve_records: int = Field(3, ge=1, description="an alert is resolved after this many clean records in a row")
    release_factor: float = Field(3.0, ge=1, description="clean means inside the limit by this factor (hysteresis)")
    baseline_records: int = Field(10, ge=3, description="how many first records make a baseline")

    # alerts: limits
    vanishing_product: float = Field(1e-3, gt=0, description="least gradient product (heuristic, formulas: Post-LN)")
    vanishing_gain: float = Field(0.9, gt=0, description="less gain: part of the bad stretch (heuristic)")
    vanishing_time: float = Field(1e-8, gt=0, description="least product in time (heuristic: LSTM, 28 steps: 5e-8)")
    exploding_product: float = Field(1e4, gt=0, description="largest gradient product (heuristic)")
    exploding_growth: float = Field(1e3, gt=0, description="gradient norm over its first steps' median (heuristic)")
    drift: float = Field(1e2, gt=1, description="factor off the model's own first steps that counts (heuristic)")
    token_cosine: float = Field(0.999, gt=0, le=1, description="mean cosine between tokens (heuristic: Post-LN 1.000)")
    collapsed_rank: float = Field(1.3, gt=1, description="rank of collapsed points (heuristic; 1 = one vector)")
    representation_cosine: float = Field(0.9999, gt=0, le=1, description="adjacent cosine (heuristic; baseline-aware)")
    small_update: float = Field(3e-6, gt=0, description="least |dw|/|w| of all weights (heuristic; smdebug 1e-8)")
    unchanged_share: float = Field(0.9, gt=0, lt=1, description="16-bit entries a step leaves as they are (heuristic)")
    large_update: float = Field(1.0, gt=0, description="largest |dw|/|w| of a step (heuristic; smdebug 10)")
    clip_ratio: float = Field(0.01, gt=0, description="least share of the gradient that clipping leaves (heuristic)")
    clipped_update: float = Field(1e-4, gt=0, description="and least |dw|/|w| beside it (TheDeepChecker: 1e-4)")
    carried_gradient: float = Field(0.1, gt=0, description="gradient left over from earlier steps (heuristic)")
    loss_spike: float = Field(2.0, gt=1, description="rise over the window's largest above its median (heuristic)")
    gradient_spike: float = Field(4.0, gt=1, description="total gradient norm over its recent median (heuristic)")
    plateau_drop: float = Field(0.05, gt=0, lt=0.3, description="loss below chance that is progress (TheDeepChecker)")
    plateau_steps: int = Field(120, ge=50, description="steps before a loss is called a plateau (heuristic)")
    norm_gap: float = Field(0.5, gt=0, description="running against batch statistics in batch std (heuristic)")
    gap_steps: int = Field(100, ge=1, description="steps before running statistics are judged (heuristic)")
    rank_gap: float = Field(1e-6, gt=0, description="relative gap of a norm between ranks (heuristic; DDP: 0)")

    ordered_product: float = Field(0.1, gt=0, description="product where samples end alike too (heuristic)")
    sample_cosine: float = Field(0.999, gt=0, le=1, description="mean cosine between samples (heuristic)")
    embedding_cosine: float = Field(0.98, gt=0, le=1, description="the same for compared embeddings (heuristic)")
    faded_code: float = Field(5.0, gt=1, description="fall of an inner code's RMS since the start (heuristic)")
    constant_output: float = Field(1e-5, gt=0, description="share of the output that varies (heuristic)")
    dead_units: float = Field(0.7, gt=0, lt=1, description="units off in a module (DeepDiagnosis: .7; smdebug .5)")
    saturation: float = Field(0.5, gt=0, lt=1, description="values saturated in a module (smdebug, DeepDiagnosis: .5)")
    symmetry: float = Field(1e-5, gt=0, description="spread between the rows of a matrix (heuristic; rounding 1e-7)")
    gate_saturation: float = Field(0.5, gt=0, lt=1, description="share of |logit| > 5 in a gate (heuristic)")
    stream_cosine: float = Field(0.999, gt=0, le=1, description="cosine between streams that had parted (heuristic)")
    stream_unused: float = Field(0.05, gt=0, description="least column sum of a used stream (heuristic; mHC: .4)")
    mixing_gain: float = Field(10.0, gt=1, description="composite gain of streams (heuristic; mHC 1.6, HC 3000)")
    moment_ratio: float = Field(1.5, gt=0, description="Adam's update over its rate (heuristic; steady gradients: 1)")
    headroom: float = Field(8.0, gt=1, description="largest number of a dtype over the largest entry (heuristic)")
    attention_logit: float = Field(
        100.0, gt=0, description="largest attention logit that grew (Kimi K2: QK-Clip at 100)"
    )
    expert_dead: float = Field(0.5, gt=0, lt=1, description="experts without a token (heuristic)")
    expert_violation: float = Field(3.0, gt=0, description="MaxVio (heuristic; balanced .04 to .72)")
    solver_growth: float = Field(4.0, gt=1, description="evaluations over the first records' median (heuristic)")
    solver_residual: float = Field(0.01, gt=0, description="relative residual (heuristic: ten times DEQ's usual 1e-3)")
    mute: tuple[str, ...] = Field((), description="alerts not to be raised: KIND or KIND:WHERE, * matches anything")
    limits: dict[str, float] = Field({}, description="limits of detectors of your own, by their kind")

    @field_validator("mute", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        """One pattern, or several with commas between as the command line gives them."""
        return tuple(part.strip() for part in given.split(",") if part.strip()) if isinstance(given, str) else given

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, build: Callable[[Any], WatchConfig]) -> WatchConfig:
        try:
            return build(data)
        except ValidationError as error:
            wrong = " ".join(_said(told, cls.model_fields) for told in error.errors())
            raise FlowscopeError(f"watch(config=...): {wrong}") from None


def _said(error: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """What pydantic found, as a sentence that says what to write instead."""
    name, given = ".".join(map(str, error["loc"])), f"got {error['input']!r}"
    if error["type"] != "extra_forbidden":
        about = fields.get(str(error["loc"][0])) if error["loc"] else None
        meant = f" It is: {about.description}." if about is not None and about.description else ""
        return f"{name}: {error['msg']} ({given}).{meant}"
    if name in BESIDE:
        return f"there is no setting {name} ({given}): it is an argument, watch({name}={error['input']!r})."
    return f"there is no setting {name} ({given}).{nearest(name, [*fields, *BESIDE])} {SETTINGS}"


def make_config(config: WatchConfig | dict[str, Any] | None) -> WatchConfig:
    """Return a `WatchConfig` from what `watch(config=...)` was given.

    Raises:
        FlowscopeError: an unknown key or a value out of range; the message names the nearest key.
    """
    if config is not None and not isinstance(config, (dict, WatchConfig)):
        raise FlowscopeError(f"watch(config=...): got {type(config).__name__}, expected a dict or WatchConfig.")
    return WatchConfig.model_validate(config or {})
