"""Statistics of the parameters around an optimizer step: norms, gradient norms, and the true change of the weights.

`param_grad_norm` is what the optimizer consumes (unscaled, reduced, after clipping). `update_ratio` is |dw| / |w| over
up to `update_samples` fixed, evenly spaced entries of each tensor before and after the step: exact for smaller tensors,
and no copy of the weights is held. `param_unchanged` is the share of these entries that the step left as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.carried_gradients import CarriedGradients
from flowscope.instruments.checksums import Checksums
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.instruments.parameter_table import ParameterTable, Row, owned_by
from flowscope.instruments.raw_gradients import RawGradients, entries
from flowscope.instruments.weight_samples import WeightSamples
from flowscope.instruments.wiring import held_by
from flowscope.metrics import Metric
from flowscope.model.view import ModelView
from flowscope.model.zero import is_elsewhere, steps_as_copy
from flowscope.record_builder import RecordBuilder
from flowscope.records import few
from flowscope.sums.payload import Part, Sharing, local
from flowscope.sums.vector_norms import Number, norms
from flowscope.torch_internals import is_flattened

SAMPLE_BUDGET = 1 << 22


_parameter = partial(Metric, view="Parameters", rows="parameters")


COPIES = (
    "DeepSpeed's ZeRO steps flat copies of the parameters and keeps their gradients elsewhere: the update and the "
    "gradient of single parameters are not seen (that is not zero), gradients at the points are"
)


class Parameters(Instrument):
    """All floating-point parameters of a model, tied ones once, under their first name."""

    name = "parameters"
    metrics = (
        _parameter(
            "update_ratio",
            "How far one step moves each parameter. Rule of thumb: about 0.001.",
            formula="‖Δw‖ / ‖w‖",
            scale="log",
            of_gradient=True,
            logged=True,
            charted="linear",
            opens=True,
        ),
        _parameter(
            "update_rms",
            "How far one step moves an entry of each parameter. Compare with the learning rate: Adam's first step is 1 "
            "of it, later ones 0.2 to 0.4; Muon's 0.2 where it is scaled to that, else 1 / sqrt(the longer side).",
            formula="sqrt(mean Δw²)",
            unit="weight",
            source="arXiv 2502.16982, section 2.2",
            scale="log",
            of_gradient=True,
        ),
        _parameter(
            "param_grad_norm",
            "Gradient the optimizer consumes. Grey: none arrived.",
            formula="‖dL/dw‖ after clipping",
            unit="loss / weight",
            scale="log",
            of_gradient=True,
            logged=True,
        ),
        _parameter(
            "param_grad_norm_raw",
            "Gradient as backward left it, before clipping.",
            formula="‖dL/dw‖ before clipping",
            unit="loss / weight",
            scale="log",
            of_gradient=True,
        ),
        _parameter("param_norm", "Norm of each parameter.", formula="‖w‖", unit="weight", scale="log"),
        _parameter(
            "param_unchanged",
            "Share of entries that the step left as they were. At 1 nothing moved; high in bf16: updates are rounded "
            "away.",
            bounds=(0.0, 1.0),
            of_gradient=True,
        ),
        _parameter(
            "param_still",
            "1 where the step left every entry exactly as it was.",
            healthy="0 (the metric is left out where nothing stood still)",
            of_gradient=True,
            drawn=False,
        ),
        _parameter(
            "clip_ratio",
            "Gradient norm after clipping over before. 1: not clipped.",
            formula="sqrt(sum param_grad_norm²) / sqrt(sum param_grad_norm_raw²)",
            scale="log",
            rows="model",
            of_gradient=True,
            logged=True,
        ),
        _parameter(
            "gradient_scale",
            "What gradients were multiplied by in backward (GradScaler).",
            rows="model",
            of_gradient=True,
            drawn=False,
        ),
        _parameter(
            "grad_carried",
            "What .grad held of earlier steps, over what this step used.",
            healthy="0 (zero_grad was called)",
            rows="model",
            of_gradient=True,
        ),
    )

    def __init__(self, update_samples: int) -> None:
        self._update_samples = update_samples
        self._stepping: dict[int, Tensor] | None = None
        self._norms: dict[int, Number] = {}
        self._gradients: dict[int, Number] = {}
        self._updates: dict[int, tuple[Number, Number, Number]] = {}
        self._checksums, self._same = Checksums(), dict[int, Number]()

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One."""
        return [cls(config.update_samples)]

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Plan the samples; look at the gradients of a few parameters when they arrive."""
        self._parameters, self._faults = view.parameters, hooks.faults
        share = SAMPLE_BUDGET // max(1, len(view.parameters.names))
        self._samples = WeightSamples(max(1, min(self._update_samples, share)))
        self._raw = RawGradients(view.parameters, hooks)
        self._carried = CarriedGradients(hooks)

    def begin_step(self) -> None:
        """Follow parameters that were replaced."""
        now = self._parameters.follow()
        self._faults.guard(RawGradients.FUSE, self._raw.follow, now)
        self._faults.guard(CarriedGradients.FUSE, self._carried.follow, now)

    def scaled_by(self, scale: Tensor | float | None) -> None:
        """The loss scale of this step's backward."""
        self._raw.scale = scale

    @torch.no_grad()
    def before_update(self, *, updating: bool) -> None:
        """Take the weights' norms and samples."""
        live = self._live()
        self._stepping = live if updating else None
        self._norms = self._samples.take_before(live)
        self._checksums.take_before(live)
        large = [i for i in live if i not in self._norms]
        self._norms.update(zip(large, norms([live[i] for i in large]), strict=True))

    def _live(self) -> dict[int, Tensor]:
        live = {i: p for i, p in enumerate(self._parameters.current()) if p is not None and p.requires_grad}
        whole = all(type(p) is nn.Parameter for p in live.values())
        return live if whole else {i: local(p) for i, p in live.items()}

    @torch.no_grad()
    def read_gradients(self, only: set[int] | None = None, scale: Tensor | None = None) -> None:
        """Take the gradients' norms.

        Args:
            only: ids of the parameters to read now (one optimizer's); None reads all that were not read yet.
            scale: what the gradients are still multiplied by (fused optimizers unscale them inside their step).
        """
        found: dict[int, Tensor] = {}
        held: dict[int, Tensor] = {}
        for i, parameter in enumerate(self._parameters.current()):
            if parameter is None or (gradient := parameter.grad) is None or i in self._gradients:
                continue
            if only is None or id(parameter) in only:
                held[i] = gradient
                plain = type(gradient) is Tensor and not gradient.is_sparse
                found[i] = gradient if plain else entries(local_gradient(parameter))
        self._raw.compare(held)
        values = norms(list(found.values()))
        if scale is not None:
            factor = scale.item() if scale.device.type == "cpu" else scale
            values = [value / factor for value in values]
        self._gradients.update(zip(found, values, strict=True))

    @torch.no_grad()
    def after_update(self) -> None:
        """Compare the samples with the weights as they are now: the change per tensor."""
        held = self._stepping
        same = held is not None and all(type(p) is nn.Parameter for p in held.values())
        now = held if held is not None and same else self._live()
        self._updates, self._same = self._samples.changes(now), self._checksums.same(now)

    def take(self) -> Taken:
        """The numbers that are still on devices, and the loss scale."""
        triples: Sequence[Sequence[Number]] = [*zip(*self._updates.values(), strict=True)] or [(), (), ()]
        change, before, unchanged = (dict(zip(self._updates, numbers, strict=True)) for numbers in triples)
        found: Mapping[Row, Mapping[int, Number]] = {
            Row.NORM: self._norms,
            Row.GRADIENT: self._gradients,
            Row.CHANGE: change,
            Row.BEFORE: before,
            Row.UNCHANGED: unchanged,
            Row.RAW: self._raw.norms,
            Row.UNTOUCHED: self._raw.untouched,
            Row.CARRIED: self._carried.norms,
            Row.SAMPLED: self._samples.roots(self._updates),
            Row.SAME: self._same | {i: unchanged[i] for i in self._samples.whole if i in unchanged},
        }
        table = ParameterTable(len(self._parameters.names), found)
        scale = self._raw.scale
        scale = scale if isinstance(scale, Tensor) else torch.tensor(scale or 1.0, dtype=torch.float64)
        self._forget()
        return Taken(
            self.name,
            [*table.tensors, scale.reshape(1)],
            partial(self._read, table),
            partial(self._parts, table),
            joined=partial(self._joined, table),
            replicas=table.norms,
        )

    def replicated(self) -> NDArray[np.bool_]:
        """The parameters of which every rank holds all."""
        now = self._parameters.current()
        whole = [all(p.is_replicate() for p in getattr(held, "placements", ())) for held in now]
        return np.array(whole, dtype=bool) & [not is_flattened(held) for held in now]

    def update_failed(self) -> None:
        """What the optimizer was about to use is read again."""
        self.drop()

    def drop(self) -> None:
        """Forget what was read for a step that did not happen."""
        self._forget()
        self._samples.drop()

    def _forget(self) -> None:
        self._stepping = None
        self._norms, self._gradients, self._updates, self._same = {}, {}, {}, {}
        self._raw.drop()
        self._carried.drop()

    def _joined(self, table: ParameterTable, optimizer: Any) -> None:
        held = held_by(optimizer)
        late = [i for i, p in enumerate(self._parameters.current()) if id(p) in held]
        table.not_updated += late

    def _parts(self, table: ParameterTable, sharing: Sharing, agreed: Mapping[str, int]) -> list[Part]:
        del agreed
        now = self._parameters.current()
        # of hundreds of plain parameters each further look would be felt
        sizes = np.array([0 if p is None else (p if type(p) is nn.Parameter else local(p)).numel() for p in now], float)
        return [table.part(self.name, sharing, owned_by(now, sharing), sizes)]

    def _read(self, table: ParameterTable, out: RecordBuilder, parts: list[Array]) -> None:
        *numbers, scale = parts
        table.read(numbers)
        # parameters found since this step stand behind its own
        names = self._parameters.names[: table.count]
        if late := self._parameters.added:
            out.note(f"came after watch, so their activations are not watched: {few(late)}")
        metrics = table.metrics(float(scale[0]))
        unmoved = np.flatnonzero(metrics["param_unchanged"] == 1)
        self._checksums.doubt({*unmoved.tolist()}.difference(self._samples.whole) if unmoved.size else ())
        if not (metrics["param_still"] == 1).any():
            del metrics["param_still"]
        self._hide_copies(metrics, out)
        self._raw.judge(metrics["param_grad_norm_raw"], metrics["param_grad_norm"])
        if scale[0] != 1:
            metrics["gradient_scale"] = scale
        for name, values in metrics.items():
            out.add(name, values, names if len(values) == len(names) else ("",))

    def _hide_copies(self, metrics: dict[str, Array], out: RecordBuilder) -> None:
        """What is written back after the optimizer's step shows no update in it: that is not zero."""
        now = self._parameters.current()
        copied = np.array([p is not None and steps_as_copy(p) for p in now], dtype=bool)
        if copied.any():
            out.note(COPIES)
            elsewhere = np.array([is_elsewhere(p) for p in now], dtype=bool)
            hidden = dict.fromkeys(("update_ratio", "update_rms", "param_unchanged", "param_still"), copied)
            for name, those in (hidden | {"param_norm": elsewhere}).items():
                if name in metrics:
                    metrics[name] = np.where(those[: len(metrics[name])], np.nan, metrics[name])


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, divided over the ranks as the parameter is."""
    gradient = parameter.grad
    assert gradient is not None
    placements = getattr(parameter, "placements", None)
    if placements is not None and getattr(gradient, "placements", placements) != placements:
        # tensor parallel gradients may still be partial sums: a collective of the step's own place, as in the optimizer
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return local(gradient)
