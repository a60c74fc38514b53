"""Metrics whose kinds of numbers are no instruments yet, and those of the run itself. Axis letters: docs/metrics.md."""

from __future__ import annotations

from functools import partial

from flowscope.metrics import Metric

SHARE = (0.0, 1.0)
# a cosine below 0 widens the scale to -1 in the browser
COSINE = (0.0, 1.0)

_gradient = partial(Metric, view="Gradient", scale="log", of_gradient=True)
_count = partial(Metric, view="Finiteness", unit="count")

GRADIENT_FLOW = (
    _gradient(
        "gradient_product",
        "Share of the last point's gradient that arrives at each depth.",
        formula="‖dL/dx_l‖ / ‖dL/dx_L‖",
        healthy="0.1 to 10; alert under 0.001 (in time 1e-8)",
        limits=("vanishing_product", "exploding_product"),
        logged=True,
        charted="log",
        opens=True,
    ),
    _gradient(
        "gain",
        "What one block does to the gradient that passes back through it.",
        formula="‖dL/dx_{l-1}‖ / ‖dL/dx_l‖",
        healthy="about 1",
        rows="blocks",
        logged=True,
        charted="linear",
    ),
    _gradient(
        "grad_norm",
        "Norm of the gradient at each depth. Compare along depth, not between models.",
        formula="‖dL/dx_l‖",
        unit="loss / activation",
        times_loss_scale=True,
    ),
    _gradient(
        "grad_rms",
        "Gradient norm per entry: comparable between points of different size.",
        formula="‖dL/dx_l‖ / sqrt(entries of x_l)",
        unit="loss / activation",
        times_loss_scale=True,
    ),
    Metric(
        "act_rms",
        "Size of the hidden state. Growing slowly with depth is normal in Pre-LN; jumps are not.",
        formula="sqrt(mean x_l²)",
        unit="activation",
        source="arXiv 2002.04745",
        view="Depth",
        scale="log",
        logged=True,
        charted="linear",
    ),
    _count(
        "nonfinite",
        "Count of inf and NaN in the activation.",
        formula="entries of x_l that are inf or NaN",
        healthy="0",
        opens=True,
    ),
    _count(
        "nonfinite_grad",
        "Count of inf and NaN in the gradient.",
        formula="entries of dL/dx_l that are inf or NaN",
        healthy="0",
        of_gradient=True,
    ),
    _count("backward_calls", "Gradients that arrived in the step."),
    _count("forward_calls", "Forward calls in the step."),
    _count("tracked_calls", "Forward calls whose output asked for a gradient."),
    _gradient(
        "group_grad_norm",
        "Gradient of each layer's new features over all their uses (features are concatenated).",
        formula="‖dL/dF_l‖",
        unit="loss / activation",
        times_loss_scale=True,
    ),
    Metric("width", "Number of new features of each layer.", unit="features", view="Depth"),
)

_depth = partial(Metric, view="Depth", bounds=COSINE)

COSINES = (
    _depth(
        "cosine",
        "Cosine between a block's input and output (median; band 5 to 95 %). At 1 the block changes nothing.",
        formula="median over positions of cos(x_{l-1}, x_l)",
        rows="blocks",
        band=("cosine_p05", "cosine_p95"),
        logged=True,
        charted="linear",
        opens=True,
    ),
    _depth("cosine_p05", "The 5 % quantile of cosine.", rows="blocks"),
    _depth("cosine_p95", "The 95 % quantile of cosine.", rows="blocks"),
    _depth(
        "cosine_to_input",
        "Cosine between the input of the stack and each depth. Low is what depth is for.",
        formula="mean over positions of cos(x_0, x_l)",
    ),
    _depth(
        "token_cosine",
        "Mean cosine between different tokens of a sequence. At 1 all tokens are one vector: alert over 0.999.",
        formula="(‖sum_t u_t‖² - T) / (T (T - 1)) for unit vectors u_t",
        source="arXiv 2103.03404",
        limits=("token_cosine",),
        logged=True,
        charted="linear",
    ),
    _depth(
        "sample_cosine",
        "Mean cosine between different samples of a batch. At 1 all samples are one vector.",
        formula="as token_cosine, over the mean of each sample's positions",
        source="arXiv 1611.01232",
    ),
    _depth(
        "branch_share",
        "Size of a block's change beside what it was given.",
        formula="b / (b + r), b = ‖x_l - x_{l-1}‖, r = ‖x_{l-1}‖",
        rows="blocks",
        bounds=None,
    ),
)

DIRECTIONS = (
    Metric(
        "effective_rank",
        "How many directions the tokens of a sequence use. At 1 they are one vector.",
        formula="exp(-sum p log p), p = singular values / their sum",
        unit="directions",
        source="arXiv 2210.02885",
        view="Depth",
        scale="log",
        ranks="first",
    ),
    Metric(
        "cosine_matrix",
        "Cosine of each pair of depths. Bright squares on the diagonal are stretches of blocks that change nothing.",
        formula="mean over positions of cos(x_i, x_j)",
        view="Depth",
        shape="matrix",
        bounds=COSINE,
        ranks="first",
    ),
)

ALIGNMENT = (
    Metric(
        "branch_alignment",
        "Mean diagonal of the branch's Jacobian, estimated.",
        formula="vᵀ(dy/dx)v / vᵀv - 1, v of random signs",
        view="Depth",
        rows="blocks",
        ranks="first",
    ),
)

RUN = (
    Metric(
        "rank_gap",
        "How far ranks differ in a replicated parameter's norm.",
        formula="(max - min) / max over ranks of ‖w‖",
        healthy="0",
        view="Parameters",
        scale="log",
        rows="parameters",
    ),
    Metric(
        "loss_scale", "Scale of the GradScaler in this step's backward.", view="Finiteness", scale="log", rows="model"
    ),
    _count(
        "canary",
        "Count of inf and NaN at the ends of the model, looked at on every step.",
        healthy="0",
        rows="model",
    ),
    Metric("step_losses", "Mean loss of each step since the record before.", unit="loss", rows="model", drawn=False),
)

OTHERS = {metric.name: metric for group in (GRADIENT_FLOW, COSINES, DIRECTIONS, ALIGNMENT, RUN) for metric in group}
