"""What each metric means in one line, how it is drawn, and which metric shows an alert (more in docs/metrics.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from flowscope.records import split_key

Scale = Literal["log", "linear"]
Shape = Literal["profile", "matrix", "stack"]


@dataclass(frozen=True)
class Metric:
    """How a metric is presented.

    Attributes:
        view: the view it belongs to, one of `VIEWS`.
        words: what it says and what is healthy, for someone who sees it for the first time.
        scale: the scale it starts on.
        shape: "profile" (a number per row), "matrix" (rows x rows), "stack" (a matrix per row).
        band: the metrics that are its lower and upper quantile.
        bounds: what the values lie between by definition; colours then span all of it.
        fitted: colours span only what is used of the bounds (gates stay close to where they begin).
        limits: the fields of `WatchConfig` that are drawn beside it.
        per_flow: False where the rows are the whole model's.
    """

    view: str
    words: str
    scale: Scale = "linear"
    shape: Shape = "profile"
    band: tuple[str, str] | None = None
    bounds: tuple[float, float] | None = None
    fitted: bool = False
    limits: tuple[str, ...] = ()
    per_flow: bool = True


VIEWS = ("Gradient", "Depth", "Gates", "Mixing", "Routing", "Parameters", "Finiteness", "Other")

_MEANINGS: dict[str, tuple[str, str, Scale]] = {
    "gradient_product": (
        "Gradient",
        "Share of the last point's gradient that arrives at each depth. Healthy: 0.1 to 10; alert under 0.001 (in time "
        "1e-8).",
        "log",
    ),
    "gain": ("Gradient", "What one block does to the gradient that passes back through it. Healthy: about 1.", "log"),
    "grad_norm": ("Gradient", "Norm of the gradient at each depth. Compare along depth, not between models.", "log"),
    "grad_rms": ("Gradient", "Gradient norm per entry: comparable between points of different size.", "log"),
    "group_grad_norm": (
        "Gradient",
        "Gradient of each layer's new features over all their uses (features are concatenated).",
        "log",
    ),
    "shortcut_product": ("Gradient", "What the carry path alone keeps from here to the end. Healthy: about 1.", "log"),
    "act_rms": (
        "Depth",
        "Size of the hidden state. Growing slowly with depth is normal in Pre-LN; jumps are not.",
        "log",
    ),
    "cosine": (
        "Depth",
        "Cosine between a block's input and output (median; band 5 to 95 %). At 1 the block changes nothing.",
        "linear",
    ),
    "width": ("Depth", "Number of new features of each layer.", "linear"),
    "cosine_to_input": (
        "Depth",
        "Cosine between the input of the stack and each depth. Low is what depth is for.",
        "linear",
    ),
    "token_cosine": (
        "Depth",
        "Mean cosine between different tokens of a sequence. At 1 all tokens are one vector: alert over 0.999.",
        "linear",
    ),
    "sample_cosine": (
        "Depth",
        "Mean cosine between different samples of a batch. At 1 all samples are one vector.",
        "linear",
    ),
    "branch_share": ("Depth", "Size of a block's change beside what it was given.", "linear"),
    "branch_alignment": ("Depth", "Mean diagonal of the branch's Jacobian, estimated.", "linear"),
    "effective_rank": ("Depth", "How many directions the tokens of a sequence use. At 1 they are one vector.", "log"),
    "dead_fraction": ("Depth", "Share of units that are off for the whole batch. Healthy: under 0.1.", "linear"),
    "dead_lasting": (
        "Depth",
        "Share of units off at each of the last 32 positions or more. Healthy: under 0.4; alert over 0.7.",
        "linear",
    ),
    "saturation": ("Depth", "Share of values in the flat tails of tanh or sigmoid. Healthy: under 0.5.", "linear"),
    "output_spread": (
        "Depth",
        "Share of the output that differs between samples. Near 0 the model answers the same to everything.",
        "log",
    ),
    "output_width": ("Depth", "Values the model answers with for each thing it is asked (classes, words).", "linear"),
    "route_entropy": ("Routing", "How undecided a router is, in units of log(experts). 1: all equal.", "linear"),
    "route_max_violation": (
        "Routing",
        "Tokens of the fullest expert over the mean, less 1. Healthy: under 1; alert over 3.",
        "linear",
    ),
    "route_dead": ("Routing", "Share of experts without a token. Healthy: 0; alert over 0.5.", "linear"),
    "route_load": ("Routing", "Tokens an expert gets in a step, mean. Under 4 the others say little.", "log"),
    "solver_nfe": (
        "Routing",
        "Function evaluations a forward. Healthy: steady; alert at 4 times its start.",
        "linear",
    ),
    "solver_nfe_backward": ("Routing", "Function evaluations a backward (adjoint method).", "linear"),
    "solver_residual": (
        "Routing",
        "How far the solution is from a fixed point. Healthy: about 0.001; alert over 0.01.",
        "log",
    ),
    "jacobian_radius": ("Routing", "Spectral radius of the iterated map. Healthy: under 1.", "linear"),
    "norm_gap": (
        "Depth",
        "Distance of BatchNorm's running statistics from those of the batches. Healthy: under 1 after 100 updates.",
        "linear",
    ),
    "gate_mean": ("Gates", "Mean gate t by depth (band 5 to 95 %): the weight of the branch at each site.", "linear"),
    "gate_std": ("Gates", "Spread of the gate within a site.", "linear"),
    "gate_saturation": ("Gates", "Share of gate values that are stuck open or shut. Healthy: under 0.5.", "linear"),
    "alpha": ("Gates", "Constant weight of the carry.", "linear"),
    "connection_grad_norm": (
        "Gates",
        "Gradient of a connection's own parameters. Healthy: above 0 after some steps.",
        "log",
    ),
    "connection_grad_norm_generators": ("Gates", "The same for what generates dynamic coefficients.", "log"),
    "mix_gain_backward": ("Mixing", "Composite gain of the mixing from here to the end. Healthy: about 1.", "log"),
    "mix_gain_forward": ("Mixing", "Composite gain of the mixing from the start to here. Healthy: about 1.", "log"),
    "mix_gain_backward_norm": ("Mixing", "The backward gain with absolute values: a true norm.", "log"),
    "mix_gain_forward_norm": ("Mixing", "The forward gain with absolute values: a true norm.", "log"),
    "mix_colsum_min": ("Mixing", "Least column sum of the composite mixing: near 0 a stream is lost.", "linear"),
    "mix_identity_distance": (
        "Mixing",
        "Distance of the mixing from the identity. At 0 throughout it is not learned.",
        "linear",
    ),
    "stream_cosine": (
        "Mixing",
        "Cosine between streams. At 1 throughout, one stream is paid for several times.",
        "linear",
    ),
    "branch_weight": ("Mixing", "Weight with which a branch is written to the streams.", "linear"),
    "update_ratio": ("Parameters", "How far one step moves each parameter. Rule of thumb: about 0.001.", "log"),
    "param_grad_norm": ("Parameters", "Gradient the optimizer consumes. Grey: none arrived.", "log"),
    "param_grad_norm_raw": ("Parameters", "Gradient as backward left it, before clipping.", "log"),
    "grad_carried": (
        "Parameters",
        "What .grad held of earlier steps, over what this step used. Healthy: 0 (zero_grad was called).",
        "linear",
    ),
    "clip_ratio": ("Parameters", "Gradient norm after clipping over before. 1: not clipped.", "log"),
    "param_norm": ("Parameters", "Norm of each parameter.", "log"),
    "weight_spread": (
        "Parameters",
        "Relative spread between the rows (units) of a matrix. At 0 all units are one. Grey: zeros or frozen.",
        "log",
    ),
    "param_unchanged": (
        "Parameters",
        "Share of entries that the step left as they were. At 1 nothing moved; high in bf16: updates are rounded away.",
        "linear",
    ),
    "rank_gap": ("Parameters", "How far ranks differ in a replicated parameter's norm. Healthy: 0.", "log"),
    "param_lr": ("Parameters", "Learning rate of the group that holds the parameter. Grey: none.", "log"),
    "loss_scale": ("Finiteness", "Scale of the GradScaler in this step's backward.", "log"),
    "param_trainable": ("Parameters", "1 where the parameter asks for a gradient.", "linear"),
    "param_optimized": ("Parameters", "1 where an optimizer holds the parameter.", "linear"),
    "param_is_norm": ("Parameters", "1 where the parameter belongs to a normalisation layer.", "linear"),
    "param_epsilon": ("Parameters", "Machine epsilon of the parameter's numbers.", "log"),
    "nonfinite": ("Finiteness", "Count of inf and NaN in the activation. Healthy: 0.", "linear"),
    "nonfinite_grad": ("Finiteness", "Count of inf and NaN in the gradient. Healthy: 0.", "linear"),
    "canary": (
        "Finiteness",
        "Count of inf and NaN at the ends of the model, looked at on every step. Healthy: 0.",
        "linear",
    ),
    "backward_calls": ("Finiteness", "Gradients that arrived in the step.", "linear"),
    "forward_calls": ("Finiteness", "Forward calls in the step.", "linear"),
    "tracked_calls": ("Finiteness", "Forward calls whose output asked for a gradient.", "linear"),
}

_BANDS = {"cosine": ("cosine_p05", "cosine_p95"), "gate_mean": ("gate_p05", "gate_p95")}
_LIMITS = {
    "gradient_product": ("vanishing_product", "exploding_product"),
    "token_cosine": ("token_cosine",),
    "route_dead": ("expert_dead",),
    "route_max_violation": ("expert_violation",),
    "solver_residual": ("solver_residual",),
}
_SHARES = {
    "dead_fraction",
    "dead_lasting",
    "saturation",
    "gate_mean",
    "gate_saturation",
    "param_trainable",
    "param_optimized",
    "param_unchanged",
    "route_dead",
    "route_entropy",
}
_OF_THE_MODEL = {
    "canary",
    "clip_ratio",
    "connection_grad_norm",
    "connection_grad_norm_generators",
    "dead_fraction",
    "dead_lasting",
    "grad_carried",
    "norm_gap",
    "jacobian_radius",
    "output_spread",
    "route_dead",
    "route_entropy",
    "route_load",
    "route_max_violation",
    "saturation",
    "solver_nfe",
    "solver_nfe_backward",
    "solver_residual",
    "update_ratio",
    "weight_spread",
}


def _bounds(name: str) -> tuple[float, float] | None:
    # a cosine below 0 widens the scale to -1 in the browser
    return (0.0, 1.0) if name in _SHARES or "cosine" in name else None


METRICS: dict[str, Metric] = {
    "cosine_matrix": Metric("Depth", "Cosine of each pair of depths.", shape="matrix"),
    "mix_matrix": Metric("Mixing", "How the streams are mixed at each site.", shape="stack"),
    **{
        name: Metric(
            *meaning,
            band=_BANDS.get(name),
            bounds=_bounds(name),
            fitted=name == "gate_mean",
            limits=_LIMITS.get(name, ()),
            per_flow=name not in _OF_THE_MODEL and not name.startswith("param_"),
        )
        for name, meaning in _MEANINGS.items()
    },
}

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "vanishing_gradient": ("gradient_product", "gain"),
    "exploding_gradient": ("gradient_product", "gain", "grad_norm"),
    "token_collapse": ("token_cosine",),
    "representation_collapse": ("cosine", "effective_rank"),
    "rank_collapse": ("effective_rank",),
    "non_finite": ("nonfinite", "nonfinite_grad", "canary", "param_grad_norm"),
    "no_gradient": ("backward_calls", "param_grad_norm"),
    "parameters_not_optimized": ("param_optimized",),
    "stale_parameters": ("param_optimized",),
    "dead_units": ("dead_fraction",),
    "saturation": ("saturation",),
    "gate_saturation": ("gate_saturation", "gate_mean"),
    "stream_collapse": ("stream_cosine",),
    "mixing_gain": ("mix_gain_backward", "mix_gain_forward"),
    "expert_collapse": ("route_dead", "route_max_violation", "route_entropy"),
    "solver_cost": ("solver_nfe",),
    "solver_unconverged": ("solver_residual", "jacobian_radius"),
    "update_too_small": ("update_ratio",),
    "update_too_large": ("update_ratio",),
    "loss_plateau": (),
    "loss_spike": (),
    "gradient_accumulates": ("grad_carried",),
    "constant_output": ("output_spread", "sample_cosine"),
    "over_clipped": ("clip_ratio", "param_grad_norm_raw"),
    "rank_desync": (),
    "symmetry": ("weight_spread",),
    "train_eval_gap": ("norm_gap",),
}
"""Alert kind -> the metrics that show it, best first."""

EXTREME = {"vanishing_gradient": "least", "exploding_gradient": "largest"}
"""Alert kind -> the end of the profile that its message speaks of; `where` is the block that does most to get there."""

_BY_MAGNITUDE = {"norm", "rms", "product", "gain", "ratio"}


def describe(metric: str) -> Metric:
    """How a metric is presented; a metric that is not listed is a profile of the view "Other"."""
    known = METRICS.get(metric)
    if known:
        return known
    parts = metric.rsplit("_", 1)
    if len(parts) == 2 and parts[1] in {"p05", "p95"} and (parts[0] in METRICS or f"{parts[0]}_mean" in METRICS):
        whole = METRICS.get(parts[0]) or METRICS[f"{parts[0]}_mean"]
        return Metric(
            whole.view,
            f"The {int(parts[1][1:])} % quantile of {parts[0]}.",
            whole.scale,
            bounds=whole.bounds,
            fitted=whole.fitted,
        )
    scale: Scale = "log" if _BY_MAGNITUDE & set(metric.split("_")) else "linear"
    return Metric("Other", "", scale, per_flow=not metric.startswith("param_"))


def present(key: str, rows: int, first_flow: str) -> dict[str, Any]:
    """What the browser is told of the metric behind a key of `Record.metrics` with `rows` rows."""
    metric, flow = split_key(key)
    return {"key": key, "metric": metric, "flow": flow or first_flow, "rows": rows, **asdict(describe(metric))}
