"""`Limit`: the commonest detector, the worst row of one metric against one limit, as a declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors.detector import ANY_FLOW, Array, Detector, Finding, Flags, said
from flowscope.detectors.rows import FlowGroups, each_flow, label_of, labels_of
from flowscope.errors import FlowscopeError
from flowscope.records import Record, RunHeader, Severity


class Rows(NamedTuple):
    """The values of a metric that are judged together, NaN where a row was not seen; None: this record has none."""

    values: Array | None
    label: Callable[[int], str]
    flow: str | None = None


@dataclass(frozen=True)
class Beyond:
    """Values of which some are beyond the limit, and the row to tell of."""

    record: Record
    values: Array
    flags: Flags
    row: int
    limit: float

    @property
    def value(self) -> float:
        """That of the row."""
        return float(self.values[self.row])

    @property
    def count(self) -> int:
        """How many rows are beyond the limit."""
        return int(self.flags.sum())


class Limit(Detector):
    """The worst row of one metric against one limit.

    Attributes:
        metric: its name in `Record.metrics`.
        above, below: the limit, of which one is given: a number (`config={"limits": {kind: number}}` changes it), or
            the field of `WatchConfig` that holds it. Beyond it is wrong.
        per: which rows are judged together: all ("model"), those of each flow ("flow"), or those of the modules that
            lie in each flow ("module").
        row: what a row is, for one without a label; empty where the metric is one number of the whole model.
        tells: of which row an alert tells: the "worst", or the "first" beyond the limit.
        severity, records: as in `Finding`; 1 record raises at once.
        from_step: earlier steps are not judged; a number or a field of `WatchConfig`.
        release: how much of the limit is clean again, for shares; None: `WatchConfig.release_factor`.
        message: for people. It knows {where}, {label} (the row's), {value}, {limit}, {count} (rows
            beyond), {size} (rows), {more}.
    """

    metric: ClassVar[str]
    above: ClassVar[float | str | None] = None
    below: ClassVar[float | str | None] = None
    per: ClassVar[Literal["model", "flow", "module"]] = "model"
    row: ClassVar[str] = "row"
    tells: ClassVar[Literal["worst", "first"]] = "worst"
    severity: ClassVar[Severity] = "warning"
    records: ClassVar[int | str | None] = None
    from_step: ClassVar[int | str] = 0
    release: ClassVar[float | None] = None
    message: ClassVar[str] = "{where} is at {value:.3g} (limit {limit:.3g}; {count} of {size} rows are beyond it)"

    def __init__(self, config: WatchConfig | None = None) -> None:
        super().__init__(config)
        self._groups = FlowGroups()
        if (self.above is None) == (self.below is None) or not getattr(self, "metric", ""):
            raise FlowscopeError(
                f"{type(self).__name__}: got metric={getattr(self, 'metric', '')!r}, above={self.above}, "
                f"below={self.below}, expected a metric and one of above and below."
            )
        try:
            self._told("", "", 0.0, 0.0, 0, 0, "")
        except (KeyError, IndexError, ValueError) as error:
            raise FlowscopeError(
                f"{type(self).__name__}.message: {error!r} in {self.message!r}, expected only {{where}}, {{label}}, "
                "{value}, {limit}, {count}, {size} and {more} in braces."
            ) from None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.shown_by and hasattr(cls, "metric"):
            cls.shown_by = (cls.metric,)

    @property
    def limit(self) -> float:
        """The limit in force."""
        given = self.above if self.below is None else self.below
        return float(self.config.limits.get(self.kind, self._number(given)))

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding at most for rows that are judged together."""
        return said(*(self._judged(record, rows) for rows in self._rows(record, header)))

    # -- what a subclass may say of its own ---------------------------------------------------------------------------

    def measured(self, record: Record) -> tuple[str, Array | None]:
        """The metric of this record and its values; NaN in what is not judged."""
        return self.metric, record.metrics.get(self.metric)

    def place(self, label: str) -> str:
        """The alert's `where` for a row of this label."""
        return label

    def certain(self, beyond: Beyond) -> bool:
        """Whether it is an error at once, whatever `severity` and `records` say."""
        del beyond
        return False

    def more(self, beyond: Beyond) -> str:
        """What the message adds at {more}."""
        del beyond
        return ""

    def judged(self, values: Array, inner: Flags) -> Array:
        """The values of the modules of one flow that are judged; `inner` are those on the depth axis, its end apart."""
        del inner
        return values

    def worst(self, values: Array, flags: Flags) -> int:
        """The row to tell of; `flags` are those beyond the limit."""
        if self.tells == "first":
            return int(np.argmax(flags))
        return int(np.nanargmax(values) if self.below is None else np.nanargmin(values))

    # -- the ladder ---------------------------------------------------------------------------------------------------

    def _rows(self, record: Record, header: RunHeader) -> Iterator[Rows]:
        metric, values = self.measured(record)
        if self.per == "flow":
            for view in each_flow(record, header):
                yield Rows(view.get(metric), partial(view.row, metric), view.layout.name)
        elif self.per == "model":
            label = partial(label_of, record, header, metric, what=self.row) if self.row else lambda row: ""
            yield Rows(values, label)
        else:
            yield from self._split(record, header, metric, values)

    def _split(self, record: Record, header: RunHeader, metric: str, values: Array | None) -> Iterator[Rows]:
        labels = labels_of(record, header, metric)
        if values is None or values.size != len(labels):
            yield Rows(None, str, ANY_FLOW)
            return
        for group in self._groups.of(labels, header):
            yield Rows(self.judged(values[group.rows], group.inner), group.names.__getitem__, group.flow)

    def _judged(self, record: Record, rows: Rows) -> Finding | None:
        values = rows.values
        if values is None or values.size == 0:
            return self.unseen(rows.flow)
        # of most records the worst value says all; NaN where no row was seen
        worst = (np.fmax if self.below is None else np.fmin).reduce(values)
        if np.isnan(worst):
            return self.unseen(rows.flow)
        if record.step < self._number(self.from_step):
            return None
        limit = self.limit
        if not self._beyond(worst, limit):
            return self.near(bool(self._beyond(worst, self._released(limit))), rows.flow)
        flags = self._beyond(values, limit)
        beyond = Beyond(record, values, flags, self.worst(values, flags), limit)
        return self._finding(beyond, rows.label(beyond.row), rows.flow)

    def _beyond(self, values: Array, limit: float) -> Flags:
        return values > limit if self.below is None else values < limit

    def _released(self, limit: float) -> float:
        if self.release is not None:
            return limit * self.release if self.below is None else limit / self.release
        return limit / self.config.release_factor if self.below is None else limit * self.config.release_factor

    def _finding(self, beyond: Beyond, label: str, flow: str | None) -> Finding:
        where, certain, (value, limit) = self.place(label), self.certain(beyond), (beyond.value, beyond.limit)
        message = self._told(where, label, value, limit, beyond.count, beyond.values.size, self.more(beyond))
        records = None if self.records is None else int(self._number(self.records))
        return self.found(where, value, limit, message, flow, severity=self.severity, certain=certain, records=records)

    def _told(self, where: str, label: str, value: float, limit: float, count: int, size: int, more: str) -> str:
        return self.message.format(
            where=where, label=label, value=value, limit=limit, count=count, size=size, more=more
        )

    def _number(self, given: float | str | None) -> float:
        """A number, or that of a field of the configuration."""
        return getattr(self.config, given) if isinstance(given, str) else given or 0
