"""From sums to metrics, on the host: pure numpy functions of the rows that hooks deposited.

Axis letters: L depth (blocks), P = L + 1 points. NaN means "not seen".
"""

from __future__ import annotations

import numpy as np

from flowscope.records import Array
from flowscope.sums import statistics as s


def flow_metrics(rows: Array) -> dict[str, Array]:
    """Metrics of the family "flow" from the rows [P, columns] of one flow.

    grad_norm [P] = |dL/dx_l|; grad_rms [P] = grad_norm / sqrt(elements); gain [L] = grad_norm[l-1] / grad_norm[l];
    gradient_product [P] = grad_norm[l] / grad_norm[last point with a gradient that is not zero], NaN behind that;
    act_rms [P];
    nonfinite, nonfinite_grad [P] counts of non-finite entries of x_l and dL/dx_l; nonfinite_call,
    nonfinite_grad_call [P] the first call of the point in the step that had any, missing where none had;
    backward_calls [P].
    Norms run over all sequences, micro-batches and calls of the step.
    """
    with np.errstate(all="ignore"):
        elements = _nan_where_zero(rows[:, s.ELEMENTS])
        backwards = rows[:, s.BACKWARDS]
        grad_square = np.where(backwards > 0, rows[:, s.GRAD_SQUARE], np.nan)
        grad_norm = np.sqrt(grad_square)
        # behind the last point with a gradient (padding in time, an early exit) there is nothing to be a share of
        given = np.flatnonzero(grad_norm > 0)
        end = given[-1] if len(given) else len(grad_norm) - 1
        product = np.where(np.arange(len(grad_norm)) <= end, grad_norm / grad_norm[end], np.nan)
        calls = {"nonfinite_call": s.CALL_BAD, "nonfinite_grad_call": s.GRAD_CALL_BAD}
        first = {name: s.first_of_calls(rows[:, at]) for name, at in calls.items() if bool((rows[:, at] > 0).any())}
        return first | {
            "grad_norm": grad_norm,
            "grad_rms": np.sqrt(grad_square / elements),
            "gain": grad_norm[:-1] / grad_norm[1:],
            "gradient_product": product,
            "act_rms": np.sqrt(rows[:, s.SQUARE] / elements),
            "nonfinite": np.where(rows[:, s.ELEMENTS] > 0, rows[:, s.NONFINITE], np.nan),
            "nonfinite_grad": np.where(backwards > 0, rows[:, s.GRAD_NONFINITE], np.nan),
            "backward_calls": backwards.copy(),
        }


def depth_metrics(rows: Array) -> dict[str, Array]:
    """Metrics of the family "depth" from the rows [P, columns] of one flow.

    cosine, cosine_p05, cosine_p95 [L]: median, 5th and 95th percentile over positions of cos(x_{l-1}, x_l), within 10 %
    of 1 - cos; cosine_to_input [P]: mean over positions of cos(x_0, x_l); token_cosine [P]: mean cosine between two
    different tokens of one sequence; sample_cosine [P]: the same of two samples of a batch, each the mean of its
    positions; branch_share [L] = b / (b + r), b = |x_l - x_{l-1}|, r = |x_{l-1}|.
    """
    histograms = rows[1:, s.HISTOGRAM : s.COLUMNS]
    with np.errstate(all="ignore"):
        low, median, high = histogram_quantiles(histograms, np.array([0.05, 0.5, 0.95]))
        branch, carry = np.sqrt(rows[1:, s.BRANCH_SQUARE]), np.sqrt(rows[1:, s.CARRY_SQUARE])
        return {
            "cosine": 1 - median,
            "cosine_p05": 1 - high,
            "cosine_p95": 1 - low,
            "cosine_to_input": rows[:, s.TO_INPUT] / _nan_where_zero(rows[:, s.TO_INPUT_COUNT]),
            "token_cosine": rows[:, s.TOKEN] / _nan_where_zero(rows[:, s.TOKEN_COUNT]),
            "sample_cosine": rows[:, s.SAMPLE] / _nan_where_zero(rows[:, s.SAMPLE_COUNT]),
            "branch_share": np.where(histograms.sum(1) > 0, branch / (branch + carry), np.nan),
        }


def bucket_middles() -> Array:
    """The geometric middle of each bucket of 1 - cos; bucket 0 stands for 0."""
    middles = 2.0 ** ((np.arange(s.BUCKETS) - 0.5) / s.BUCKETS_PER_OCTAVE - s.OCTAVES_BELOW)
    middles[0] = 0.0
    return np.minimum(middles, 2.0)


_MIDDLES = bucket_middles()


def histogram_quantiles(counts: Array, q: float | Array) -> Array:
    """The q-quantile of 1 - cos of each row of bucket counts [L, BUCKETS]: numpy's linear rule on the bucket middles.

    [L], or [Q, L] for Q quantiles.

    A quarter-octave bucket's middle is within 2^(1/8) - 1 = 9.1 % of every value in it. NaN for an empty row.
    """
    cumulative = np.cumsum(counts, axis=1)
    total = cumulative[:, -1]
    rank = np.multiply.outer(q, np.maximum(total - 1, 0))
    ranks = np.stack([np.floor(rank), np.ceil(rank)])
    # the bucket of the r-th smallest value: how many buckets end at or before it
    low, high = np.minimum((cumulative[None] <= ranks[..., None]).sum(-1), counts.shape[1] - 1)
    fraction = rank - ranks[0]
    return np.where(total > 0, _MIDDLES[low] * (1 - fraction) + _MIDDLES[high] * fraction, np.nan)


def _nan_where_zero(x: Array) -> Array:
    return np.where(x > 0, x, np.nan)
