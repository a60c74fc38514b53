"""Which metric shows an alert."""

from __future__ import annotations

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
