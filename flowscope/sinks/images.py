"""Heat maps as PNG, drawn with Pillow alone (tensorboard brings it)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from flowscope.sinks.binning import bin_means, shortened

# viridis (Smith and van der Walt, 2015) at 9 equal distances: readable for the colour-blind and in print
_ANCHORS = (
    (68, 1, 84),
    (71, 44, 122),
    (59, 81, 139),
    (44, 113, 142),
    (33, 144, 141),
    (39, 173, 129),
    (92, 200, 99),
    (170, 220, 50),
    (253, 231, 37),
)
_GREY = (176, 176, 176)
_INK = (32, 32, 32)
_FONT_SIZE = 13

# pixels
_PLOT = 384
_LEFT, _TOP, _RIGHT, _BOTTOM = 180, 58, 84, 56
_BAR_GAP, _BAR_WIDTH = 16, 16


@dataclass(frozen=True)
class Axis:
    """One axis of a heat map: its title and the name of each row or column."""

    title: str
    names: Sequence[str]


def heat_map(
    values: NDArray[np.float64], title: str, y: Axis, x: Axis, *, unit: str, log: bool, limits: tuple[float, float]
) -> bytes:
    """Draw a matrix: row 0 at the top, column 0 on the left, NaN in grey.

    Args:
        values: [rows, columns], on a log scale already log10.
        title: the line above.
        y: the rows.
        x: the columns.
        unit: what the colours mean, under the colour bar.
        log: whether the colour bar is labelled with powers of ten.
        limits: the values of the darkest and the brightest colour; values beyond are held at them.

    Returns:
        The bytes of a PNG.
    """
    cells = bin_means(bin_means(values, _PLOT).T, _PLOT).T
    height, width = (max(least, min(_PLOT, 24 * n)) for n, least in zip(cells.shape, (120, 240), strict=True))
    picture = Image.new("RGB", (_LEFT + width + _RIGHT, _TOP + height + _BOTTOM), "white")
    plot = Image.fromarray(_colours(cells, limits)).resize((width, height), Image.Resampling.NEAREST)
    picture.paste(plot, (_LEFT, _TOP))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((_LEFT - 1, _TOP - 1, _LEFT + width, _TOP + height), outline=_INK)
    font = ImageFont.load_default(_FONT_SIZE)
    draw.text((12, 12), title, fill=_INK, font=font)
    _draw_y(draw, font, y, height)
    _draw_x(draw, font, x, width, height)
    _draw_colour_bar(picture, font, (width, height), limits, log, unit)
    if np.isnan(cells).any():
        _draw_grey(draw, font, picture.size)
    out = io.BytesIO()
    picture.save(out, format="PNG")
    return out.getvalue()


Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def _colours(values: NDArray[np.float64], limits: tuple[float, float]) -> NDArray[np.uint8]:
    """[...] -> [..., 3]."""
    low, high = limits
    share = np.clip((values - low) / max(high - low, 1e-12), 0.0, 1.0)
    seen = ~np.isnan(share)
    share = np.where(seen, share, 0.0)
    at = np.linspace(0.0, 1.0, len(_ANCHORS))
    channels = [np.interp(share, at, [anchor[c] for anchor in _ANCHORS]) for c in range(3)]
    colours = np.stack(channels, axis=-1).round()
    return np.where(seen[..., None], colours, np.array(_GREY)).astype(np.uint8)


def _ticks(count: int, most: int) -> list[int]:
    """At most `most` indices below `count`, from 0 in equal distances of 1, 2 or 5 times a power of ten."""
    distance = next(d * 10**e for e in range(10) for d in (1, 2, 5) if count <= most * d * 10**e)
    return list(range(0, count, distance))


def _draw_y(draw: ImageDraw.ImageDraw, font: Font, axis: Axis, height: int) -> None:
    count = len(axis.names)
    for index in _ticks(count, max(2, height // 22)):
        middle = _TOP + (index + 0.5) * height / count
        draw.line((_LEFT - 5, middle, _LEFT - 1, middle), fill=_INK)
        draw.text((_LEFT - 9, middle), shortened(axis.names[index], 25), fill=_INK, font=font, anchor="rm")
    draw.text((12, _TOP + height + 34), axis.title, fill=_INK, font=font, anchor="lm")


def _draw_x(draw: ImageDraw.ImageDraw, font: Font, axis: Axis, width: int, height: int) -> None:
    count = len(axis.names)
    room = max(draw.textlength(name, font=font) for name in axis.names) + 14
    bottom = _TOP + height
    for index in _ticks(count, max(2, int(width // room))):
        middle = _LEFT + (index + 0.5) * width / count
        draw.line((middle, bottom, middle, bottom + 4), fill=_INK)
        draw.text((middle, bottom + 7), axis.names[index], fill=_INK, font=font, anchor="mt")
    draw.text((_LEFT + width / 2, bottom + 34), axis.title, fill=_INK, font=font, anchor="mm")


def _draw_colour_bar(
    picture: Image.Image, font: Font, size: tuple[int, int], limits: tuple[float, float], log: bool, unit: str
) -> None:
    width, height = size
    left = _LEFT + width + _BAR_GAP
    ramp = _colours(np.linspace(limits[1], limits[0], height)[:, None].repeat(_BAR_WIDTH, axis=1), limits)
    picture.paste(Image.fromarray(ramp), (left, _TOP))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((left - 1, _TOP - 1, left + _BAR_WIDTH, _TOP + height), outline=_INK)
    for value in _bar_values(limits, log):
        middle = _TOP + (limits[1] - value) / (limits[1] - limits[0]) * (height - 1)
        draw.line((left + _BAR_WIDTH, middle, left + _BAR_WIDTH + 4, middle), fill=_INK)
        text = f"1e{round(value)}" if log else f"{value:.3g}"
        draw.text((left + _BAR_WIDTH + 8, middle), text, fill=_INK, font=font, anchor="lm")
    draw.text((picture.width - 8, _TOP - 12), unit, fill=_INK, font=font, anchor="rm")


def _bar_values(limits: tuple[float, float], log: bool) -> list[float]:
    low, high = limits
    if not log:
        return [float(v) for v in np.linspace(low, high, 5)]
    decades = np.arange(np.ceil(low - 1e-9), np.floor(high + 1e-9) + 1)
    return [float(v) for v in decades[:: -max(1, -(-len(decades) // 8))]]


def _draw_grey(draw: ImageDraw.ImageDraw, font: Font, size: tuple[int, int]) -> None:
    right, middle = size[0] - 8, size[1] - 22
    draw.text((right, middle), "not seen", fill=_INK, font=font, anchor="rm")
    left = right - draw.textlength("not seen", font=font) - 18
    draw.rectangle((left, middle - 6, left + 12, middle + 6), fill=_GREY, outline=_INK)
