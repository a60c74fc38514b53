"""From sums at merge sites to metrics, on the host: gates, composite mixing, the carry's product (numpy only).

Axis letters: K merge sites of a flow in depth order, S streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from flowscope.metrics import Metric
from flowscope.records import Array
from flowscope.sums import site_statistics as s

SHARE = (0.0, 1.0)

_gate = partial(Metric, view="Gates", rows="sites")
_mix = partial(Metric, view="Mixing", rows="sites")

GATES = (
    _gate(
        "gate_mean",
        "Mean gate t by depth (band 5 to 95 %): the weight of the branch at each site.",
        formula="mean of t = sigmoid(z)",
        band=("gate_p05", "gate_p95"),
        bounds=SHARE,
        fitted=True,
        logged=True,
        opens=True,
    ),
    _gate("gate_p05", "The 5 % quantile of gate.", bounds=SHARE, fitted=True),
    _gate("gate_p95", "The 95 % quantile of gate.", bounds=SHARE, fitted=True),
    _gate("gate_std", "Spread of the gate within a site."),
    _gate(
        "gate_saturation",
        "Share of gate values that are stuck open or shut.",
        formula="share of |z| > 5",
        healthy="under 0.5",
        bounds=SHARE,
    ),
)
ALPHA = _gate("alpha", "Constant weight of the carry.", source="arXiv 2601.19895, 2203.00555")
MIXING = (
    Metric(
        "shortcut_product",
        "What the carry path alone keeps from here to the end.",
        formula="product of the carry's factors from site k on",
        healthy="about 1",
        source="arXiv 2601.19895, eq. 14-19",
        view="Gradient",
        scale="log",
        rows="sites",
    ),
    _mix(
        "mix_gain_backward",
        "Composite gain of the mixing from here to the end.",
        formula="largest |column sum| of H_{K-1} ... H_k",
        healthy="about 1",
        source="arXiv 2512.24880",
        scale="log",
        opens=True,
    ),
    _mix(
        "mix_gain_forward",
        "Composite gain of the mixing from the start to here.",
        formula="largest |row sum| of H_k ... H_0",
        healthy="about 1",
        source="arXiv 2512.24880",
        scale="log",
    ),
    _mix("mix_gain_backward_norm", "The backward gain with absolute values: a true norm.", scale="log"),
    _mix("mix_gain_forward_norm", "The forward gain with absolute values: a true norm.", scale="log"),
    _mix("mix_colsum_min", "Least column sum of the composite mixing: near 0 a stream is lost."),
    _mix(
        "mix_identity_distance",
        "Distance of the mixing from the identity. At 0 throughout it is not learned.",
        formula="‖H_k - I‖_F",
        source="arXiv 2606.03483",
    ),
    _mix(
        "mix_matrix",
        "How the streams are mixed at each site: rows are output streams. Bright on the diagonal keeps them apart.",
        formula="H_k",
        shape="stack",
    ),
    _mix(
        "stream_cosine", "Cosine between streams. At 1 throughout, one stream is paid for several times.", bounds=SHARE
    ),
    _mix(
        "dominant_stream",
        "The largest stream's share of the signal: 1 / S where all carry alike, near 1 where one does the work.",
        formula="max_s ‖h_s‖² / sum_s ‖h_s‖²",
        source="arXiv 2606.03483",
        bounds=SHARE,
    ),
    _mix(
        "dominant_stream_grad",
        "The largest stream's share of the gradient.",
        formula="max_s ‖dL/dh_s‖² / sum_s ‖dL/dh_s‖²",
        source="arXiv 2606.03483",
        bounds=SHARE,
        of_gradient=True,
    ),
    _mix("branch_weight", "Weight with which a branch is written to the streams."),
)


def gate_metrics(rows: Array) -> dict[str, Array]:
    """gate_mean, gate_std, gate_p05, gate_p95 of t = sigmoid(logit), gate_saturation (share of |logit| > 5), each [K].

    Quantiles are those of the logit's buckets (width 0.5, interpolated): within .125 of t where t is steepest. They
    are kept within what mean and deviation allow (Cantelli: mean - std sqrt((1 - q) / q) to mean +
    std sqrt(q / (1 - q))), so those of a constant gate are exact.
    """
    names = ("gate_mean", "gate_std", "gate_p05", "gate_p95", "gate_saturation")
    out = {name: np.full(len(rows), np.nan) for name in names}
    for k, row in enumerate(rows):
        if not row[0] > 0:
            continue
        count, total, square, saturated = row[:4]
        mean = total / count
        std = np.sqrt(max(0.0, square / count - mean * mean))
        out["gate_mean"][k], out["gate_std"][k] = mean, std
        out["gate_saturation"][k] = saturated / count
        for name, q in (("gate_p05", 0.05), ("gate_p95", 0.95)):
            t = 1.0 / (1.0 + np.exp(-_bucket_quantile(row[5 : s.GATE_COLUMNS], q)))
            out[name][k] = np.clip(t, mean - std * np.sqrt((1 - q) / q), mean + std * np.sqrt(q / (1 - q)))
    return out


def _bucket_quantile(counts: Array, q: float) -> float:
    width = 2 * s.LOGIT_RANGE / s.LOGIT_BUCKETS
    cumulative = np.cumsum(counts)
    if not cumulative[-1] > 0:
        return float("nan")
    rank = q * cumulative[-1]
    bucket = int(np.searchsorted(cumulative, rank, side="left"))
    inside = (rank - (cumulative[bucket] - counts[bucket])) / counts[bucket]
    return float(-s.LOGIT_RANGE + width * (bucket + inside))


def highway_factor(row: Array) -> float:
    """The carry's factor of a highway gate, from `gate_sums`: exp(mean log(1 - t))."""
    return float(np.exp(row[4] / row[0])) if row[0] > 0 else float("nan")


def norm_factor(row: Array, alpha: float) -> float:
    """The carry's factor at a norm, from `norm_sums`: alpha * gamma / rms(z), the geometric mean over positions."""
    return float(alpha * np.exp(row[1] / row[0])) if row[0] > 0 else float("nan")


def shortcut_product(factors: Sequence[float]) -> Array:
    """[K]: at site k the product of the carry's factors from k to the flow's end."""
    product: Array = np.cumprod(np.asarray(factors, dtype=np.float64)[::-1])[::-1].copy()
    return product


def dominant_stream(signal: Array, gradient: Array) -> dict[str, Array]:
    """dominant_stream, dominant_stream_grad: the largest of the sums of squares [K, S], over their total, each [K].

    NaN where there is one stream only, or nothing.
    """
    names = {"dominant_stream": signal, "dominant_stream_grad": gradient}
    with np.errstate(invalid="ignore"):
        shares = {name: squares.max(1) / squares.sum(1) for name, squares in names.items()}
    return {name: share if signal.shape[1] > 1 else np.full_like(share, np.nan) for name, share in shares.items()}


def mixing_metrics(matrices: Array, starts: Sequence[int] = (0,)) -> dict[str, Array]:
    """Metrics of the residual mappings H_k [K, S, S] (rows = output stream; means over positions), each [K].

    Composites run from where the streams are expanded (one of `starts`) to where they are reduced. With
    F_k = H_k ... H_0 (what the input becomes) and G_k = H_{K-1} ... H_k (what reaches the output):
    mix_gain_forward = max_i |sum_j F_k[i, j]|, mix_gain_backward = max_j |sum_i G_k[i, j]| (2512.24880, literally);
    *_norm with the absolute value inside the sum (the true infinity norm); mix_colsum_min = min_j sum_i G_k[i, j];
    mix_identity_distance = |H_k - I|_F; shortcut_product = (1^T G_k 1) / S, what is left of a carry that all streams
    share, times those of the stretches of streams behind.
    """
    count, streams = matrices.shape[0], matrices.shape[-1]
    gains = ("mix_gain_forward", "mix_gain_forward_norm", "mix_gain_backward", "mix_gain_backward_norm")
    out = {name: np.full(count, np.nan) for name in (*gains, "mix_colsum_min", "shortcut_product")}
    composite = np.eye(streams)
    for k in range(count):
        composite = matrices[k] @ (np.eye(streams) if k in starts else composite)
        out["mix_gain_forward"][k] = np.abs(composite.sum(1)).max()
        out["mix_gain_forward_norm"][k] = np.abs(composite).sum(1).max()
    composite, beyond = np.eye(streams), 1.0
    for k in reversed(range(count)):
        if k + 1 in starts:
            composite, beyond = np.eye(streams), out["shortcut_product"][k + 1]
        composite = composite @ matrices[k]
        out["mix_gain_backward"][k] = np.abs(composite.sum(0)).max()
        out["mix_gain_backward_norm"][k] = np.abs(composite).sum(0).max()
        out["mix_colsum_min"][k] = composite.sum(0).min()
        out["shortcut_product"][k] = composite.sum() / streams * beyond
    out["mix_identity_distance"] = np.linalg.norm(matrices - np.eye(streams), axis=(1, 2))
    return out
