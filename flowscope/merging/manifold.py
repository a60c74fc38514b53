"""`mhc`: hyper-connections on the manifold of doubly stochastic matrices (DeepSeek, arXiv 2512.24880).

Axis letters: M = all of B and T flattened, S streams (n of them), D features. Matrices for the projection are kept as
[S, S, M]: positions innermost, so that every reduction over streams is a vectorised sum of S rows.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from flowscope.merging.connection import ConnectionContext, ModeOptions
from flowscope.merging.projection import project_normalised
from flowscope.merging.streams import Coefficients, StreamConnection, StreamOptions
from flowscope.torch_internals import exporting, log_softmax_backward

_EPS = 1e-20  # the paper's
_HOT = 0.94  # first read of its own stream; the others share the rest (a uniform read is a saddle: nothing learns)


class ManifoldOptions(StreamOptions):
    """Manifold-constrained hyper-connections."""

    starting = ("init_diagonal",)
    iterations: int = Field(20, ge=1, description="Sinkhorn iterations")
    init_diagonal: float = Field(2.0, description="first logit of the diagonal of the residual mapping (others 0)")


def sinkhorn(logits: Tensor, iterations: int = 20) -> Tensor:
    """Return the (nearly) doubly stochastic projection of exp(logits): columns first, rows last.

    M_0 = exp(logits); M_t = rows(columns(M_{t-1})) (2512.24880, equation 9), in the log domain, fp32 (fp64 stays). Row
    sums are exact, all error of the finite iteration sits in the column sums. Differentiable in both modes and twice;
    only `logits` is kept for backward, which recomputes the iterates.

    Args:
        logits: [..., S, S]; row i = output stream i.
        iterations: t_max.
    """
    dtype = logits.dtype
    inner = logits if dtype in (torch.float32, torch.float64) else logits.float()
    return _project(inner.movedim((-2, -1), (0, 1)), iterations).movedim((0, 1), (-2, -1)).to(dtype)


def _project(logits: Tensor, iterations: int) -> Tensor:
    """`sinkhorn` on [S, S, ...].

    Compiled it is one operator: traced, its 40 half steps a site take most of the compiler's time. An export gets the
    steps, so that what it writes needs no flowscope.
    """
    if torch.compiler.is_compiling() and not exporting():
        whole: Tensor = _operator(logits, iterations)
        return whole
    rule = _TracedProjection if torch.compiler.is_compiling() else _Projection
    result: Tensor = rule.apply(logits, iterations)  # type: ignore[no-untyped-call]
    return result


def _forward(logits: Tensor, iterations: int) -> Tensor:
    log_m = logits
    for step in range(2 * iterations):
        log_m = log_m.log_softmax(step % 2)
    return log_m.exp_()


def _backward(grad: Tensor, logits: Tensor, iterations: int) -> Tensor:
    steps = _iterates(logits, iterations)
    grad = grad.contiguous() * steps[-1].exp()
    for step in range(2 * iterations - 1, -1, -1):
        grad = log_softmax_backward(grad, steps[step], step % 2)
    return grad


def _iterates(logits: Tensor, iterations: int) -> list[Tensor]:
    """Return the log matrices after every half step: columns (axis 0 sums to 1), rows (axis 1), columns, ..."""
    log_m, steps = logits, []
    for step in range(2 * iterations):
        log_m = log_m.log_softmax(step % 2)
        steps.append(log_m)
    return steps


class _TracedProjection(torch.autograd.Function):
    """The projection without a forward-mode rule: dynamo traces no Function that has one."""

    @staticmethod
    def forward(logits: Tensor, iterations: int) -> Tensor:
        return _forward(logits, iterations)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        logits, ctx.iterations = inputs
        ctx.save_for_backward(logits)
        ctx.save_for_forward(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return _backward(grad, logits, ctx.iterations), None


class _Projection(_TracedProjection):
    """The projection with forward-mode AD and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (logits,) = ctx.saved_tensors
        log_m = logits
        for step in range(2 * ctx.iterations):
            log_m = log_m.log_softmax(step % 2)
            tangent = tangent - (log_m.exp() * tangent).sum(step % 2, keepdim=True)
        result: Tensor = log_m.exp() * tangent
        return result


_operator = torch.library.custom_op(
    "flowscope::sinkhorn", _forward, mutates_args=(), schema="(Tensor logits, int iterations) -> Tensor"
)
_backward_operator = torch.library.custom_op(
    "flowscope::sinkhorn_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor logits, int iterations) -> Tensor",
)
_operator.register_fake(lambda logits, iterations: torch.empty_like(logits))
_backward_operator.register_fake(lambda grad, logits, iterations: torch.empty_like(logits))


def _setup(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    logits, ctx.iterations = inputs
    ctx.save_for_backward(logits)


def _of_operator(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _backward_operator(grad, *ctx.saved_tensors, ctx.iterations), None


_operator.register_autograd(_of_operator, setup_context=_setup)


class ManifoldSite(nn.Module):
    """Coefficients of one site: phi [2n+R, nD] (`generator`), b [2n+R] (`static`), a [3] (`scale`).

    Rows: n of the read, n of the write, R = n*n of the residual mapping (i*n + j: from stream j to stream i).

    Attributes:
        streams: n.
    """

    def __init__(self, context: ConnectionContext, options: Any, index: int) -> None:
        super().__init__()
        n = self.streams = options.streams
        static = torch.cat([_first_read(n, index), torch.zeros(n), self.first_mixing(options)])
        self.generator = context.parameter(len(static), n * context.features)
        self.static = nn.Parameter(static.to(dtype=context.dtype, device=context.device))
        self.scale = context.parameter(3, value=0.01)

    def first_mixing(self, options: Any) -> Tensor:
        """Return [R] the first logits of the residual mapping, and keep of the options what `mixing` needs."""
        self.iterations = options.iterations
        first: Tensor = options.init_diagonal * torch.eye(self.streams)
        return first.flatten()

    def mixing(self, logits: Tensor) -> Tensor:
        """Return the residual mappings [S, S, M] (rows: output stream) of the logits [R, M]."""
        return _project(logits.view(self.streams, self.streams, -1), self.iterations)

    def forward(self, h: Tensor) -> Coefficients:
        """Return read, residual and write of every position from the streams h [M, S, D].

        v = vec(h) / rms(vec(h)) enters only through v phi, so the product with phi is divided instead. Where h is zero
        (a pixel after a ReLU), so is v, and no gradient passes: it would be multiplied by 1/sqrt(eps) = 1e10.
        """
        n = self.streams
        flat = h.reshape(h.shape[0], -1)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        phi, static, scale = (p.to(flat.dtype) for p in (self.generator, self.static, self.scale))
        logits = project_normalised(flat, phi, _EPS, centred=False)
        logits = logits * (torch.linalg.vector_norm(flat.detach(), dim=-1) > 0)
        sizes = [n, n, len(static) - 2 * n]
        read, write, residual = torch.split_with_sizes(logits, sizes)
        b_read, b_write, b_residual = torch.split_with_sizes(static.unsqueeze(-1), sizes)
        read = torch.sigmoid(b_read + scale[0] * read)
        write = 2.0 * torch.sigmoid(b_write + scale[1] * write)
        residual = self.mixing(b_residual + scale[2] * residual)
        # Positions outermost and in memory order: bmm falls back to one matrix at a time on other strides.
        rows = torch.cat([read.unsqueeze(0), residual, write.unsqueeze(0)]).permute(2, 0, 1).contiguous()
        read, residual, write = torch.split_with_sizes(rows, [1, n, 1], dim=1)
        return read, residual, write.transpose(1, 2)


def _first_read(n: int, index: int) -> Tensor:
    """Logits of a read that is near one-hot at stream `index` mod n and sums to 1."""
    if n == 1:
        return torch.tensor([17.0])  # sigmoid is 1 to 4e-8: a single stream is read as it is
    read = torch.full((n,), math.log((1 - _HOT) / (n - 1) / (1 - (1 - _HOT) / (n - 1))))
    read[index % n] = math.log(_HOT / (1 - _HOT))
    return read


class ManifoldConnection(StreamConnection):
    """`x_{k+1} = Hres x_k + Hpost^T f(Hpre x_k)`, streams x [S, D] of every position (equations 3, 7, 8).

    Hpre = sigmoid, Hpost = 2 sigmoid, Hres = Sinkhorn of a*(v phi) + b, v = RMSNorm of all streams together; in fp32.
    Starts equal to the original: Hpost = 1, Hres = Sinkhorn(init_diagonal * I), read near one-hot (.94) at stream k mod
    n with sum 1. `shortcut_product` follows the product of Hres ("residual_mix").
    """

    mode = "mhc"
    Options: ClassVar[type[ModeOptions]] = ManifoldOptions
    Site: ClassVar[type[ManifoldSite]] = ManifoldSite
    traps: ClassVar = {
        "post": "mhc on post-norm blocks did not learn where the plain post-norm model does not (measured at 24 "
        "blocks); keel or dhc does"
    }
    warmup = 1.5

    def __init__(self, context: ConnectionContext, options: Any) -> None:
        super().__init__(context, options, options.streams, "mean")
        self.site = nn.ModuleList(self.Site(context, options, self.offset + k) for k in range(context.sites))
