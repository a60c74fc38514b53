"""`shc` and `dhc`: static and dynamic hyper-connections (Zhu et al., ICLR 2025)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from flowscope.merging.connection import ConnectionContext
from flowscope.merging.mixing import EPS, read_and_mix
from flowscope.merging.projection import project_normalised
from flowscope.merging.streams import Coefficients, StreamConnection, StreamOptions


class StaticHyperOptions(StreamOptions):
    """Static hyper-connections."""

    starting: ClassVar[tuple[str, ...]] = ("init", "output_scale")
    init: Literal["prenorm", "ramp", "alternate", "mixed", "sparse"] = "prenorm"
    reduce: Literal["mean", "sum"] = "mean"
    output_scale: bool = Field(False, description="start the write at 1/sqrt(n)")


class HyperOptions(StaticHyperOptions):
    """Dynamic hyper-connections."""

    starting: ClassVar[tuple[str, ...]] = (*StaticHyperOptions.starting, "dynamic_scale_init")
    dynamic_scale_init: float = Field(0.01, description="first value of the scales s of the dynamic part")
    tanh: bool = True
    separate_scales: bool = Field(False, description="own scales for read, residual and write; else s_alpha and s_beta")
    norm: Literal["layer", "layer_affine", "rms", "none"] = Field("layer", description="norm before the generator")


class StaticSite(nn.Module):
    """Static coefficients of one site as one matrix [n + 2, n], columns = source stream.

    Row 0 is the read A_m, rows 1..n are A_r transposed (row i = output stream i), row n + 1 is the write B.
    """

    def __init__(self, context: ConnectionContext, options: StaticHyperOptions, index: int) -> None:
        super().__init__()
        self.streams = options.streams
        static = _initial(options.init, options.streams, index, options.output_scale)
        self.static = nn.Parameter(static.to(dtype=context.dtype, device=context.device))

    def forward(self, h: Tensor) -> Coefficients:
        """Return read [1, 1, S], residual [1, S, S], write [1, S, 1]."""
        read, residual, write = torch.split_with_sizes(self.static, [1, self.streams, 1])
        return read.unsqueeze(0), residual.unsqueeze(0), write.t().unsqueeze(0)


class DynamicSite(StaticSite):
    """Static coefficients plus s * tanh(norm(h) W), W = `generator` [n + 2, D], rows as in `static`.

    Every stream j generates its own column: B_j, A_m,j and A_r[j, :] depend on stream j only (equations 10-13).
    """

    def __init__(self, context: ConnectionContext, options: HyperOptions, index: int) -> None:
        super().__init__(context, options, index)
        self.tanh, self.norm, self.separate = options.tanh, options.norm, options.separate_scales
        count, d = (3 if options.separate_scales else 2), context.features
        self.generator = context.parameter(options.streams + 2, d)
        self.scale = context.parameter(count, value=options.dynamic_scale_init)
        if options.norm == "layer_affine":
            self.norm_weight = context.parameter(d, value=1.0)
            self.norm_bias = context.parameter(d)

    def forward(self, h: Tensor) -> Coefficients:
        """Return read [M, 1, S], residual [M, S, S], write [M, S, 1] from the streams h [M, S, D]."""
        n, m = self.streams, h.shape[0]
        logits = self.logits(h.reshape(m * n, -1))
        dynamic = (torch.tanh(logits) if self.tanh else logits).view(n + 2, m, n)
        coefficients = torch.addcmul(self.static.to(h.dtype).unsqueeze(1), self._scales(h.dtype), dynamic)
        # Positions outermost and in memory order: bmm falls back to one matrix at a time on other strides.
        coefficients = coefficients.transpose(0, 1).contiguous()
        read, residual, write = torch.split_with_sizes(coefficients, [1, n, 1], dim=1)
        return read, residual, write.transpose(1, 2)

    def mix(self, h: Tensor) -> tuple[Tensor, Tensor, Coefficients]:
        """Return read h [M, 1, D], residual h [M, S, D] and the coefficients, in one pass (eager, without affine)."""
        generator, static, scale = (p.to(h.dtype) for p in (self.generator, self.static, self.scale))
        h0, mixed, mix, write = read_and_mix(h, generator, static, scale, self.norm == "layer", self.tanh)
        read, residual = torch.split_with_sizes(mix, [1, self.streams], dim=1)
        return h0, mixed, (read, residual, write)

    def logits(self, rows: Tensor) -> Tensor:
        """Return norm(h) W of every stream: rows [M*S, D] -> [n + 2, M*S]."""
        weight = self.generator.to(rows.dtype)
        if self.norm == "none":
            return weight @ rows.t()
        if self.norm != "layer_affine":
            return project_normalised(rows, weight, EPS, self.norm == "layer")
        bias = weight @ self.norm_bias.to(rows.dtype)
        scaled = weight * self.norm_weight.to(rows.dtype)
        return project_normalised(rows, scaled, EPS, True) + bias.unsqueeze(-1)

    def _scales(self, dtype: torch.dtype) -> Tensor:
        """Return the scale of every row, [n + 2, 1, 1]: (s_alpha, s_beta) or (s_m, s_r, s_beta)."""
        scale, n = self.scale.to(dtype), self.streams
        sizes = (1, n, 1) if self.separate else (n + 1, 1)
        parts = [s.expand(size) for s, size in zip(scale.unbind(), sizes, strict=True)]
        return torch.cat(parts).view(n + 2, 1, 1)


def _initial(name: str, n: int, index: int, output_scale: bool) -> Tensor:
    """Return the first static matrix [n + 2, n] of sub-layer `index`.

    "prenorm" is the paper's equation 14: read e_{index mod n}, residual I, write 1; it keeps the output. The others are
    those of the hyper-connection article, per stream k: "ramp" read 1 - k/n, residual k/n; "alternate" read
    (k mod 2) + 1, residual (k + 1) mod 2; "mixed" read .5 + .5 (k mod 2), residual .5 - .25 (k mod 3); "sparse" read .1
    times a unit vector, residual uniform(0, .2), drawn from a generator seeded by `index`: the global one is not used.
    """
    k = torch.arange(n, dtype=torch.get_default_dtype())
    if name == "sparse":
        generator = torch.Generator().manual_seed(index)
        read = torch.linalg.qr(torch.randn(n, n, generator=generator))[0][0] * 0.1
        residual = torch.rand(n, n, generator=generator) * 0.2
    else:
        read, diagonal = {
            "prenorm": (torch.eye(n)[index % n], torch.ones(n)),
            "ramp": (1 - k / n, k / n),
            "alternate": (k % 2 + 1, (k + 1) % 2),
            "mixed": (0.5 + 0.5 * (k % 2), 0.5 - 0.25 * (k % 3)),
        }[name]
        residual = diagonal.diag()
    write = torch.full((1, n), n**-0.5 if output_scale else 1.0)
    return torch.cat([read.unsqueeze(0), residual, write])


class StaticHyperConnection(StreamConnection):
    """`h' = A_r^T h + B^T f(A_m^T h)` with learnable matrices that do not depend on the input (equations 2-5).

    n(n + 2) parameters a site. With `init="prenorm"` the output is kept at the start. `output_scale` starts the write
    at 1/sqrt(n), which is what dividing the branches' output weights by sqrt(n) would do, without touching them.
    `shortcut_product` follows the product of A_r^T ("residual_mix", rows = output stream).
    """

    mode = "shc"
    Options = StaticHyperOptions
    options: StaticHyperOptions
    warmup = 1.3

    def __init__(self, context: ConnectionContext, options: StaticHyperOptions) -> None:
        super().__init__(context, options, options.streams, options.reduce)
        build = DynamicSite if isinstance(options, HyperOptions) else StaticSite
        self.site = nn.ModuleList(build(context, options, self.offset + k) for k in range(self.sites))  # type: ignore[arg-type]

    def keeps_output(self) -> bool:
        """Where streams are read one by one, mixed by I, written with 1 and averaged."""
        options = self.options
        kept = options.init == "prenorm" and options.reduce == "mean" and not options.output_scale
        return kept and super().keeps_output()


class HyperConnection(StaticHyperConnection):
    """Dynamic hyper-connections: the coefficients are static ones plus s * tanh(norm(h) W) (equations 10-13).

    d(n + 2) + n(n + 2) + 2 parameters a site (394,048 for OLMo-1B with 4 streams). W = 0 at the start.
    """

    mode = "dhc"
    aliases = ("hyper", "hc", "hyper-connections")
    Options = HyperOptions
    warmup = 1.5

    def _mix(self, site: int, h: Tensor) -> tuple[Tensor, Tensor, Coefficients]:
        module = self.site[site]
        assert isinstance(module, DynamicSite)
        if module.norm in ("none", "layer_affine") or torch.compiler.is_compiling():
            return super()._mix(site, h)
        return module.mix(h)
