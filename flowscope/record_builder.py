"""Collects the metrics of one record under their keys, with the labels of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowscope.records import Array, FlowLayout, Record, metric_key


class RecordBuilder:
    """Collects the metrics of a record under their keys."""

    def __init__(self, step: int) -> None:
        self.layouts: list[FlowLayout] = []
        self.setup: dict[str, Any] = {}
        """What the run's header is to say of how the run is set up."""
        self._record = Record(step)
        self._labels: dict[str, tuple[str, ...]] = {}
        self._flow: str | None = None

    def flow(self, layout: FlowLayout) -> None:
        """What is added from here on belongs to this flow."""
        self._flow = layout.name if self.layouts else None
        self.layouts.append(layout)

    def within(self, flow: str) -> None:
        """What is added from here on belongs to this flow, which was added before."""
        self._flow = None if self.layouts and self.layouts[0].name == flow else flow

    def entries(self, key: str) -> tuple[tuple[str, ...], Array]:
        """The labels and values of a metric that was added; none where it was not."""
        return self._labels.get(key, ()), self._record.metrics.get(key, np.zeros(0))

    def keys(self) -> set[str]:
        """Of the metrics that were added."""
        return set(self._labels)

    def family(self) -> None:
        """What is added from here on belongs to no flow."""
        self._flow = None

    def add(self, name: str, values: Array, labels: Sequence[str]) -> None:
        """Add one metric with the paths of its entries."""
        key = metric_key(name, self._flow)
        self._record.metrics[key] = np.asarray(values, dtype=np.float64)
        self._labels[key] = tuple(labels)

    def along(self, metrics: Mapping[str, Array], labels: Sequence[str]) -> None:
        """Add metrics of a flow, those of its points with their labels, those between points with all but the first."""
        for name, values in metrics.items():
            self.add(name, values, labels if len(values) == len(labels) else labels[1:])

    def tell(self, setup: Mapping[str, Any]) -> None:
        """Say in the run's header how the run is set up; JSON-ready."""
        self.setup |= setup

    def note(self, sentence: str) -> None:
        """Add a sentence on what could not be measured."""
        if sentence and sentence not in self._record.notes:
            self._record.notes = (*self._record.notes, sentence)

    def finish(self) -> Record:
        """The record."""
        self._record.metric_labels = self._labels
        self._record.flow_names = tuple(layout.name for layout in self.layouts)
        return self._record
