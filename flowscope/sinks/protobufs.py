"""TensorBoard's wire format: pure functions that make one `Summary.Value` each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalars
from tensorboard.plugins.image import metadata as images
from tensorboard.plugins.scalar import metadata as scalars
from tensorboard.plugins.text import metadata as texts
from tensorboard.util.tensor_util import make_tensor_proto

PLUGIN_NAME = "flowscope"
CONTENT_VERSION = 1

Value = Any  # a summary_pb2.Summary.Value: tensorboard ships no types


def profile(tag: str, values: NDArray[np.float64], content: Mapping[str, Any]) -> Value:
    """A whole profile as a float tensor for the plugin `flowscope`; `content` (JSON) says what its rows are."""
    return _plugin_value(tag, make_tensor_proto(compact(values)), content)


def strings(tag: str, values: Sequence[str], content: Mapping[str, Any]) -> Value:
    """Strings as a tensor [n] for the plugin `flowscope`."""
    return _plugin_value(tag, make_tensor_proto([value.encode() for value in values]), content)


def _plugin_value(tag: str, tensor: Any, content: Mapping[str, Any]) -> Value:
    data = summary_pb2.SummaryMetadata.PluginData(
        plugin_name=PLUGIN_NAME, content=json.dumps({"version": CONTENT_VERSION, **content}).encode()
    )
    metadata = summary_pb2.SummaryMetadata(plugin_data=data)
    return _value(tag, tensor, metadata, summary_pb2.DATA_CLASS_TENSOR)


def compact(values: NDArray[np.float64]) -> NDArray[np.floating[Any]]:
    """The values in float32 where it holds them, else unchanged: a gradient of 1e-60 must not be read as none."""
    with np.errstate(over="ignore", under="ignore"):
        small = values.astype(np.float32)
    tiny = np.finfo(np.float32).tiny
    lost = np.isfinite(values) & (~np.isfinite(small) | ((np.abs(values) < tiny) & (values != 0)))
    return values if lost.any() else small


def scalar(tag: str, number: float) -> Value:
    """One number for the dashboards Scalars, Time Series and Custom Scalars (float32, as TensorBoard keeps it)."""
    with np.errstate(over="ignore"):
        tensor = make_tensor_proto(np.float32(number))
    return _value(tag, tensor, scalars.create_summary_metadata("", ""), summary_pb2.DATA_CLASS_SCALAR)


def text(tag: str, markdown: str) -> Value:
    """Markdown for the dashboard Text."""
    metadata = texts.create_summary_metadata("", "")
    # a tensor [n] would be shown as a table of n rows around it
    return _value(tag, make_tensor_proto(markdown.encode()), metadata, summary_pb2.DATA_CLASS_TENSOR)


def image(tag: str, png: bytes, description: str) -> Value:
    """A PNG for the dashboard Images."""
    # the width and height are bytes 16 to 24 of a PNG (its IHDR chunk)
    size = [str(int.from_bytes(png[at : at + 4], "big")).encode() for at in (16, 20)]
    metadata = images.create_summary_metadata("", description, converted_to_tensor=True)
    return _value(tag, make_tensor_proto([*size, png]), metadata, summary_pb2.DATA_CLASS_BLOB_SEQUENCE)


def layout(categories: Mapping[str, Mapping[str, Sequence[str]]]) -> Value:
    """The layout of the dashboard Custom Scalars.

    Args:
        categories: title of a category -> title of a chart -> its tags: three of them, `(value, lower, upper)`, are a
            line with a band; any other number are lines.
    """
    found = [
        layout_pb2.Category(title=category, chart=[_chart(title, tags) for title, tags in charts.items()])
        for category, charts in categories.items()
    ]
    tensor = make_tensor_proto(layout_pb2.Layout(version=0, category=found).SerializeToString())
    metadata = custom_scalars.create_summary_metadata()
    return _value(custom_scalars.CONFIG_SUMMARY_TAG, tensor, metadata, summary_pb2.DATA_CLASS_TENSOR)


def _chart(title: str, tags: Sequence[str]) -> Any:
    if len(tags) != 3:
        lines = layout_pb2.MultilineChartContent(tag=[f"^{re.escape(tag)}$" for tag in tags])
        return layout_pb2.Chart(title=title, multiline=lines)
    value, lower, upper = tags
    band = layout_pb2.MarginChartContent.Series(value=value, lower=lower, upper=upper)
    return layout_pb2.Chart(title=title, margin=layout_pb2.MarginChartContent(series=[band]))


def _value(tag: str, tensor: Any, metadata: Any, data_class: int) -> Value:
    # without a data class neither of TensorBoard's two loaders shows the series
    metadata.data_class = data_class
    return summary_pb2.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)
