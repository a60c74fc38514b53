"""effective_rank and cosine_matrix against closed forms and naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flowscope.sums.matrices import cosine_matrix, effective_rank_of_gram


def effective_rank(x: torch.Tensor) -> float:
    """By either Gram matrix, which have the same eigenvalues."""
    x = x.double()
    by_rows, by_columns = effective_rank_of_gram(x @ x.T), effective_rank_of_gram(x.T @ x)
    assert by_rows == pytest.approx(by_columns, rel=1e-9, nan_ok=True)
    return by_rows


def orthonormal(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    square = torch.randn(max(rows, columns), max(rows, columns), generator=generator, dtype=torch.float64)
    return torch.linalg.qr(square)[0][:rows, :columns]


@pytest.mark.parametrize(("n", "d"), [(5, 8), (8, 5), (64, 16)])
def test_isotropic_rank_is_the_smaller_side(n, d):
    # rows (or columns) of an orthogonal matrix: all singular values are 1
    x = orthonormal(n, d) if n < d else orthonormal(d, n).T
    assert effective_rank(7.0 * x) == pytest.approx(min(n, d), rel=1e-9)


def test_rank_of_one_and_of_two_equal_directions():
    u = torch.arange(1.0, 6.0)
    v = torch.tensor([2.0, -1.0, 0.5, 3.0, 1.0, 1.0, -2.0, 0.25])
    assert effective_rank(torch.outer(u, v)) == pytest.approx(1.0, abs=1e-9)
    two = torch.zeros(5, 8)
    two[0, 1], two[3, 6] = 3.0, -3.0
    assert effective_rank(two) == pytest.approx(2.0, abs=1e-9)


def test_rank_of_known_singular_values():
    # p = 1/2, 1/4, 1/4: entropy = (ln 2)/2 + 2 (ln 4)/4 = 1.5 ln 2
    x = orthonormal(5, 5) @ torch.diag(torch.tensor([4.0, 2.0, 2.0, 0.0, 0.0]).double()) @ orthonormal(5, 8)
    assert effective_rank(x) == pytest.approx(2**1.5, rel=1e-9)


def test_rank_is_by_singular_values_of_the_uncentred_matrix():
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)) + 2.0
    sigma = np.linalg.svd(x.double().numpy(), compute_uv=False)
    p = sigma / sigma.sum()
    assert effective_rank(x) == pytest.approx(math.exp(-sum(q * math.log(q) for q in p)), rel=1e-9)


@pytest.mark.parametrize("scale", [1e-150, 1e150])  # whose squares are at the ends of fp64
def test_rank_survives_extreme_scales(scale):
    assert effective_rank(scale * orthonormal(5, 8)) == pytest.approx(5.0, rel=1e-9)


def test_rank_of_nothing_and_of_non_finite():
    assert effective_rank(torch.zeros(5, 8)) == 0.0
    for bad in (math.nan, math.inf):
        x = torch.ones(5, 8)
        x[2, 3] = bad
        assert math.isnan(effective_rank(x))


def naive_cosines(x: torch.Tensor) -> np.ndarray:
    p, n, _ = x.shape
    out = np.full((p, p), np.nan)
    for a in range(p):
        for b in range(p):
            values = []
            for i in range(n):
                u, v = x[a, i].double().numpy(), x[b, i].double().numpy()
                if np.isfinite(u).all() and np.isfinite(v).all() and u.any() and v.any():
                    values.append(float(u @ v / math.sqrt(u @ u) / math.sqrt(v @ v)))
            if values:
                out[a, b] = sum(values) / len(values)
    return out


def test_cosine_matrix_is_the_naive_loop():
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    got = cosine_matrix(x)
    assert got.shape == (4, 4)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, naive_cosines(x), rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.diag(got), 1.0, rtol=0, atol=1e-12)


def test_cosine_matrix_by_hand():
    a = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    b = torch.tensor([[5.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    # positions: 1, 0, -1 -> 0 in the mean; a with -2 a: -1
    got = cosine_matrix(torch.stack([a, b, -2 * a]))
    np.testing.assert_allclose(got, [[1, 0, -1], [0, 1, 0], [-1, 0, 1]], rtol=0, atol=1e-15)


def test_cosine_matrix_leaves_out_zero_and_non_finite_positions():
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(2))
    x[0, 1] = 0.0
    x[1, 2, 3] = math.inf
    x[1, 4, 0] = math.nan
    np.testing.assert_allclose(cosine_matrix(x), naive_cosines(x), rtol=0, atol=1e-12)
    x[2] = 0.0
    got = cosine_matrix(x)
    assert np.isnan(got[2]).all()
    assert np.isfinite(got[:2, :2]).all()


def test_cosine_matrix_survives_extreme_scales():
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    factors = torch.tensor([1e-300, 1e300, 1.0], dtype=torch.float64)
    np.testing.assert_allclose(cosine_matrix(x * factors[:, None, None]), naive_cosines(x), rtol=0, atol=1e-12)
