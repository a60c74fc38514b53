"""What a metric is: what it says, how it is computed, drawn and combined over ranks, as plain words. No torch.

An instrument (or a stranger's class) declares its `Metric`s beside the code that computes them; the header of a run
carries those of its records, so that whoever draws a run reads them there and needs no table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from flowscope.errors import FlowscopeError
from flowscope.validation import as_far_as_it_fits

Scale = Literal["log", "linear"]
Shape = Literal["profile", "matrix", "stack", "table"]
Rows = Literal["points", "blocks", "sites", "modules", "parameters", "model"]
Ranks = Literal["sum", "first", "whole"]

VIEWS = ("Gradient", "Depth", "Attention", "Gates", "Mixing", "Routing", "Parameters", "Finiteness", "Other")
_CHOICES = {"scale": get_args(Scale), "shape": get_args(Shape), "rows": get_args(Rows), "ranks": get_args(Ranks)}
AXES: dict[Shape, int] = {"profile": 1, "matrix": 2, "stack": 3, "table": 2}
"""Of an array in a record."""
_BY_MAGNITUDE = {"norm", "rms", "product", "gain", "ratio"}


@dataclass(frozen=True)
class Metric:
    """The specification of one metric.

    Attributes:
        name: its key in `Record.metrics`, without a flow.
        words: what it says, for someone who sees it for the first time.
        unit: of its values; empty where they are ratios, cosines or counts.
        formula: how a value comes about, with the axis letters of docs/metrics.md.
        healthy: the range of a run that trains well.
        source: the paper with section or equation.
        view: the view of the panels it belongs to, one of `VIEWS`.
        scale: the scale it is drawn on.
        shape: "profile" (a number per row), "matrix" (rows x rows), "stack" (a matrix per row), "table"
            (several numbers per row, never drawn).
        rows: what its rows are: points, blocks or merge sites of a flow; modules, parameter tensors or named numbers
            of the whole model.
        band: the metrics that are its lower and upper quantile.
        bounds: what the values lie between by definition; colours then span all of it.
        fitted: colours span only what is used of the bounds (gates stay close to where they begin).
        limits: the fields of `WatchConfig` that are drawn beside it.
        ranks: how ranks combine it. "sum": from what all ranks deposited; in a flow whose deposits do not add up
            (one through time), the first rank's. "first": always the first rank's. "whole": "sum", but the first
            rank's where parameters are sharded, because it is read from whole matrices.
        of_gradient: a step that the GradScaler skipped does not say it: its gradients were thrown away.
        times_loss_scale: values come multiplied by the loss scale, and are divided by it.
        drawn: False where the rows are none of the model's and change from record to record.
        exact: its values are written with all their digits, for whoever compares two runs to the bit.
        logged: loggers with one curve a name get it unless told otherwise.
        charted: the scale of its chart among TensorBoard's scalars; None for no chart.
        opens: whether its view begins with it.

    Raises:
        FlowscopeError: scale, shape, rows or ranks is none of the known words.
    """

    name: str
    words: str
    unit: str = ""
    formula: str = ""
    healthy: str = ""
    source: str = ""
    view: str = "Other"
    scale: Scale = "linear"
    shape: Shape = "profile"
    rows: Rows = "points"
    band: tuple[str, str] | None = None
    bounds: tuple[float, float] | None = None
    fitted: bool = False
    limits: tuple[str, ...] = ()
    ranks: Ranks = "sum"
    of_gradient: bool = False
    times_loss_scale: bool = False
    drawn: bool = True
    exact: bool = False
    logged: bool = False
    charted: Scale | None = None
    opens: bool = False

    def __post_init__(self) -> None:
        """Check the words that others decide by."""
        for field, known in _CHOICES.items():
            if (given := getattr(self, field)) not in known:
                raise FlowscopeError(f"Metric({self.name!r}, {field}={given!r}): expected one of {', '.join(known)}.")

    @property
    def says(self) -> str:
        """Its words, and what is healthy."""
        return f"{self.words} Healthy: {self.healthy}." if self.healthy else self.words

    @property
    def per_flow(self) -> bool:
        """Whether its rows belong to a flow, and not to the whole model."""
        return self.rows in ("points", "blocks", "sites")

    @property
    def is_log(self) -> bool:
        """Whether it is drawn on a logarithmic scale."""
        return self.scale == "log"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict of what is not left at its default; `from_json` is its inverse."""
        return told_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Metric:
        """Rebuild a metric from `to_json`; what this version does not know of is left out.

        Raises:
            ValueError: it is no JSON object or has no name.
        """
        return as_far_as_it_fits(cls, {"words": "", **data} if isinstance(data, Mapping) else data)


def told_fields(described: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not left at their defaults, JSON-ready where they hold plain words."""
    values = ((field, getattr(described, field.name)) for field in fields(described))
    told = {field.name: value for field, value in values if value != field.default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}


@cache
def told_by_0_1() -> dict[str, Any]:
    """What the headers of flowscope 0.1 leave out: `metrics`, `shown_by` and `extremes` as later headers have them."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "metrics_0_1.json").read_text(encoding="utf-8"))
    return found


@cache
def of_0_1() -> dict[str, Metric]:
    """The metrics of flowscope 0.1, whose runs do not describe theirs."""
    return {data["name"]: Metric.from_json(data) for data in told_by_0_1()["metrics"]}


def described(run: Mapping[str, Metric]) -> Mapping[str, Metric]:
    """What a run (its header, or a record of it) says of its metrics, or what is known of one that says nothing."""
    return run or of_0_1()


def spec_of(key: str, run: Mapping[str, Metric]) -> Metric:
    """The spec of the metric behind a key of `Record.metrics`; of one that nobody described, a guess by its name."""
    name = key.partition("@")[0]
    if (known := described(run).get(name)) is not None:
        return known
    rows: Rows = "parameters" if name.startswith("param_") else "points"
    return Metric(name, "", scale="log" if _BY_MAGNITUDE & set(name.split("_")) else "linear", rows=rows)
