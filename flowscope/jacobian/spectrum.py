"""The spectrum of J = d x_L / d x_0, the product of all Jacobians through the depth of a flow, without forming it.

Axis letters: m = numel of x_L, n = numel of x_0 (T*D for one sample), d = min(m, n) singular values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, LinearOperator, svds
from torch import Tensor, nn
from torch.autograd import forward_ad

from flowscope.errors import FlowscopeError
from flowscope.jacobian.segment import Inputs, Segment, quiet
from flowscope.model.flows import find_flows
from flowscope.model.plan import Flow
from flowscope.records import Array, match_flow

Product = Callable[[Tensor], Tensor]

DENSE_LIMIT = 4096  # largest side of a Jacobian that is also formed: decisions "jacobian_spectrum"
_ROWS = 64  # rows of a dense Jacobian per batched backward


@dataclass(frozen=True, eq=False)
class JacobianSpectrum:
    """Singular values of J = d x_L / d x_0 [m, n] of one flow, for one sample, in eval mode.

    All near 1 is dynamical isometry: every direction of gradient passes (Saxe et al. 2014; Pennington et al. 2017).

    Attributes:
        flow: name of the flow.
        shape: (m, n), entries of x_L and of x_0.
        largest: [k] the k largest singular values, descending (ARPACK on J^T J).
        mean_square: Hutchinson estimate of tr(J^T J) / n, the mean gain of a squared gradient (1 for an isometry).
        mean_square_error: its standard error.
        smallest: the smallest of the min(m, n) singular values; NaN where no dense Jacobian was formed.
        spectrum: [d] all singular values, descending; None where no dense Jacobian was formed.
        note: "" or why something is missing.
    """

    flow: str
    shape: tuple[int, int]
    largest: Array
    mean_square: float
    mean_square_error: float
    smallest: float = math.nan
    spectrum: Array | None = None
    note: str = ""

    def __str__(self) -> str:
        """A few lines for people."""
        values = ", ".join(f"{value:.4g}" for value in self.largest)
        lines = [
            f"Jacobian of {self.flow} [{self.shape[0]}, {self.shape[1]}]",
            f"  largest      {values}",
            f"  smallest     {self.smallest:.4g}",
            f"  mean square  {self.mean_square:.4g} +- {self.mean_square_error:.2g}",
        ]
        return "\n".join(lines + [f"  note: {self.note}"] * bool(self.note))


def jacobian_spectrum(
    model: nn.Module,
    inputs: Inputs,
    flow: str | Flow | None = None,
    k: int = 6,
    *,
    probes: int = 16,
    seed: int = 0,
) -> JacobianSpectrum:
    """Return singular values and the mean square of J = d x_L / d x_0 through the depth of a flow.

    Matrix-free: J v by double backward (forward-mode AD where an operation has no second derivative), J^T u by
    backward, both on one retained graph; the largest by ARPACK (`scipy.sparse.linalg.svds`), the mean square by
    `probes` random sign vectors z: E |J z|^2 / n. The smallest and the whole spectrum come from a dense Jacobian where
    m and n are at most 4,096. Costs one graph of the segment and about 2 (probes + 10 k) backwards, m more where dense.

    The model runs in eval mode on the first sample of `inputs`, in the parameters' precision (fp32 copies of fp16 or
    bf16 ones), with exact attention; modes, RNG and gradients are left as they were.

    Args:
        model: any module whose forward is differentiable.
        inputs: a tensor, a tuple of positional or a dict of keyword arguments of the forward.
        flow: which depth axis (`flowscope.find_flows(model)` lists them); default the first.
        k: how many of the largest singular values.
        probes: random vectors for the mean square, at least 2.
        seed: of the probes and of ARPACK's start; torch's and numpy's global generators are not used.

    Raises:
        FlowscopeError: no such flow, k or probes out of range, no gradient path from x_0 to x_L, or a forward that
            cannot be differentiated.
    """
    chosen = _choose_flow(model, flow)
    if probes < 2 or k < 1:
        raise FlowscopeError(f"jacobian_spectrum: got k={k}, probes={probes}, expected k >= 1 and probes >= 2.")
    with quiet(model):
        segment = Segment(model, inputs, chosen)
        jacobian = _Jacobian(segment)
        m, n = jacobian.shape
        if k > min(m, n) or (k == min(m, n) and not jacobian.affordable):
            raise FlowscopeError(
                f"jacobian_spectrum: got k={k}, but the Jacobian of flow {chosen.name!r} is [{m}, {n}] and has "
                f"{min(m, n)} singular values. Ask for fewer."
            )
        jacobian.choose_forward_product(seed)
        mean, error = _mean_square(jacobian, probes, seed)
        spectrum: Array | None = None
        if jacobian.affordable:
            spectrum = np.linalg.svd(jacobian.dense, compute_uv=False).astype(np.float64)
        largest, note = _largest(jacobian, k, seed, spectrum)
    if spectrum is None:
        note = f"smallest and spectrum: not computed, a side of [{m}, {n}] is over {DENSE_LIMIT}. {note}".strip()
    smallest = math.nan if spectrum is None else float(spectrum[-1])
    return JacobianSpectrum(chosen.name, (m, n), largest, mean, error, smallest, spectrum, note)


class _Jacobian:
    """Products with J on one retained graph. Vectors are flat, in the dtype of x_0."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.x = segment.start.requires_grad_()
        self.y = segment(self.x)
        # `requires_grad` may come from the parameters alone
        if not self.y.requires_grad or self._gradient(torch.zeros_like(self.y), allow_unused=True) is None:
            raise FlowscopeError(
                f"flow {segment.flow.name!r}: x_L does not depend on x_0 through anything differentiable. "
                "Is the state detached, or does a block run under torch.no_grad()?"
            )
        self.shape = (self.y.numel(), self.x.numel())
        self.affordable = max(self.shape) <= DENSE_LIMIT
        self.forward: Product

    def _gradient(self, u: Tensor, **how: bool) -> Any:
        """J^T u in the shape of x_0."""
        return torch.autograd.grad(self.y, self.x, u, retain_graph=True, **how)[0]

    def backward(self, u: Tensor) -> Tensor:
        """J^T u [n]."""
        back: Tensor = self._gradient(u.view_as(self.y).to(self.y.dtype), materialize_grads=True)
        return back.detach().flatten()

    def choose_forward_product(self, seed: int) -> None:
        """Take the first way to J v that runs and is the adjoint of `backward`.

        A custom autograd.Function may lack what a way needs, or answer it with silent zeros.
        """
        generator = torch.Generator().manual_seed(seed)
        n_and_m = reversed(self.shape)
        v, u = (torch.randn(size, generator=generator, dtype=torch.float64).to(self.x) for size in n_and_m)
        back = self.backward(u)
        failed = []
        for product in self._forward_products():
            try:
                ahead = product(v)
            except (RuntimeError, NotImplementedError) as error:
                failed.append(str(error).splitlines()[0])
                continue
            gap = abs(float(u.double() @ ahead.double()) - float(back.double() @ v.double()))
            scale = float(ahead.double().norm() * u.double().norm() + back.double().norm() * v.double().norm())
            # not finite: no comparison is possible, and the result will say so
            if gap <= math.sqrt(torch.finfo(self.x.dtype).eps) * scale or not math.isfinite(gap):
                self.forward = product
                return
            failed.append("a custom backward is not differentiable itself")
        raise FlowscopeError(
            f"flow {self.segment.flow.name!r}: J v is not available ({'; '.join(failed)}), and [{self.shape[0]}, "
            f"{self.shape[1]}] is too large to be formed from J^T u alone. Pass a shorter sequence or a smaller image."
        )

    def _forward_products(self) -> Iterator[Product]:
        with suppress(RuntimeError):
            yield self._double_backward()
        yield self._forward_mode
        if self.affordable:
            dense = torch.from_numpy(self.dense).to(self.x)
            yield lambda v: dense @ v

    def _double_backward(self) -> Product:
        """J v as the derivative of J^T u, which is linear in u, by u."""
        u = torch.zeros_like(self.y, requires_grad=True)
        back = self._gradient(u, create_graph=True, materialize_grads=True)

        def product(v: Tensor) -> Tensor:
            (ahead,) = torch.autograd.grad(back, u, v.view_as(back), retain_graph=True, materialize_grads=True)
            return ahead.detach().flatten()

        return product

    def _forward_mode(self, v: Tensor) -> Tensor:
        with warnings.catch_warnings(), forward_ad.dual_level():
            # torch itself still calls torch.jit.script to load its forward-mode rules
            warnings.simplefilter("ignore", DeprecationWarning)
            y = self.segment(forward_ad.make_dual(self.x.detach(), v.view_as(self.x)))  # type: ignore[no-untyped-call]
            tangent = forward_ad.unpack_dual(y).tangent  # type: ignore[no-untyped-call]
            return torch.zeros_like(y).flatten() if tangent is None else tangent.detach().flatten()

    @cached_property
    def dense(self) -> Array:
        """J [m, n] in fp64, row by row from J^T u."""
        rows = torch.eye(self.shape[0], dtype=self.y.dtype, device=self.y.device)
        dense = torch.cat([self._rows(chunk) for chunk in torch.functional.split(rows, _ROWS)])
        return dense.double().cpu().numpy()

    def _rows(self, chunk: Tensor) -> Tensor:
        u = chunk.view(-1, *self.y.shape)
        try:
            with warnings.catch_warnings():
                # vmap tells of operations it runs in a loop
                warnings.simplefilter("ignore")
                back: Tensor = self._gradient(u, is_grads_batched=True, materialize_grads=True)
            return back.detach().flatten(1)
        except RuntimeError:
            return torch.stack([self.backward(row) for row in chunk])

    def operator(self) -> LinearOperator:
        """J for scipy, in the model's precision: ARPACK's tolerance follows the dtype."""

        def on(product: Product) -> Callable[[Array], Array]:
            return lambda v: product(torch.from_numpy(np.ascontiguousarray(v)).to(self.x).flatten()).cpu().numpy()

        dtype = np.float64 if self.x.dtype == torch.float64 else np.float32
        return LinearOperator(self.shape, matvec=on(self.forward), rmatvec=on(self.backward), dtype=dtype)


def _choose_flow(model: nn.Module, flow: str | Flow | None) -> Flow:
    if not isinstance(flow, Flow):
        plan = find_flows(model)
        if not plan:
            raise FlowscopeError(f"jacobian_spectrum: no flow was found in {type(model).__name__}. {plan}".strip())
        names = [candidate.name for candidate in plan]
        flow = plan[0] if flow is None else plan[names.index(match_flow(flow, names))]
    if flow.fused:
        raise FlowscopeError(
            f"flow {flow.name!r} is a fused recurrent layer: its steps are not modules, so it has no points to take "
            "a Jacobian between. The gradient through its time is in the records of `watch`."
        )
    return flow


def _mean_square(jacobian: _Jacobian, probes: int, seed: int) -> tuple[float, float]:
    """Hutchinson: the mean of |J z|^2 / n over random signs z, and its standard error."""
    generator = torch.Generator().manual_seed(seed)
    n = jacobian.shape[1]
    squares = []
    for _ in range(probes):
        z = torch.randint(0, 2, (n,), generator=generator).mul(2).sub(1).to(jacobian.x)
        squares.append(float(jacobian.forward(z).double().square().sum()) / n)
    return float(np.mean(squares)), float(np.std(squares, ddof=1) / math.sqrt(probes))


def _largest(jacobian: _Jacobian, k: int, seed: int, spectrum: Array | None) -> tuple[Array, str]:
    """The k largest by ARPACK; of the dense spectrum where ARPACK has no answer (k = d, J = 0), with a note."""
    if k < min(jacobian.shape):
        start = np.random.default_rng(seed).standard_normal(min(jacobian.shape))
        try:
            values = svds(jacobian.operator(), k=k, which="LM", v0=start, return_singular_vectors=False)
            return np.sort(values.astype(np.float64))[::-1].copy(), ""
        except (ArpackError, ValueError, np.linalg.LinAlgError) as error:
            if spectrum is None:
                return np.full(k, math.nan), f"largest: ARPACK gave no answer ({error})."
    assert spectrum is not None
    return spectrum[:k].copy(), "largest: from the dense Jacobian."
