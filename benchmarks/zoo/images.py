"""timm's families, one small model each: a family is a module of timm.models."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.judging import Inputs, Row, judge, run

SIZES = (64, 96, 128, 192, 224, 256, 288, 384)
"""Image sizes, tried in turn until the plain model runs."""
LABELS = 10
HEAVY = 25_000_000
SHALLOW: tuple[dict[str, Any], ...] = ({"depth": 4}, {"depths": (1, 1, 2, 1)}, {"layers": (1, 1, 2, 1)}, {})
"""What is asked of a family whose small model is heavy, in turn."""
SMALL = [
    *("atto", "femto", "pico", "nano", "xxs", "xxtiny", "xx_small", "x_small", "xtiny", "_035", "_050", "lite_tiny"),
    *("tiny", "mini", "_ti_", "_xs", "s050", "_s0", "_m0", "_b0", "_t0", "_f0", "_l0", "dla46", "botnet26"),
    *("resnext26", "resnet10", "resnet14", "resnet18", "48b", "128s", "small", "_s_", "11", "121", "18", "19", "26"),
    *("_t", "_s", "_m", "39", "50", "_224"),
]
"""What a small model has in its name, the smallest first."""


def with_operators() -> None:
    """Let torchvision be imported beside a torch for which its operators are not built; classifiers need none."""
    for name, arguments in (
        ("nms", "Tensor dets, Tensor scores, float iou_threshold"),
        ("qnms", "Tensor dets, Tensor scores, float iou_threshold"),
    ):
        with contextlib.suppress(RuntimeError):  # they are there
            torch.library.define(f"torchvision::{name}", f"({arguments}) -> Tensor")


def smallest(family: str, names: list[str]) -> str:
    """Return the model that sounds smallest of those that bear their family's name, or of all."""
    own = [name for name in names if name.startswith(family[:7])] or names
    return min(own, key=lambda name: next((place for place, part in enumerate(SMALL) if part in name), len(SMALL)))


def images(size: int) -> Inputs:
    """Return what makes two pictures."""

    def make(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed)),), {}

    return make


def build(row: Row) -> tuple[nn.Module, Inputs]:
    """Return a family's model at the smallest image size that it takes."""
    import timm

    options: dict[str, Any] = {}
    fixed = timm.create_model(row.name, num_classes=LABELS)
    if sum(p.numel() for p in fixed.parameters()) > HEAVY:
        for options in SHALLOW:
            with contextlib.suppress(Exception):
                fixed = timm.create_model(row.name, num_classes=LABELS, **options)
                break
    errors: list[str] = []
    for size, sized in itertools.product(SIZES, (True, False)):
        torch.manual_seed(0)
        try:
            model = timm.create_model(row.name, num_classes=LABELS, img_size=size, **options) if sized else fixed
            run(model.eval(), images(size), 0)
            run(model.train(), images(size), 0)
        except Exception as error:
            errors.append(f"{size}: {type(error).__name__}: {error}")
            continue
        row.about = f"({', '.join([str(size), *(f'{name}={value}' for name, value in options.items())])})"
        return model.eval(), images(size)
    raise RuntimeError(errors[-1])


def rows(chosen: list[str]) -> Iterator[tuple[Row, Any]]:
    """Yield a row for each family and what fills it."""
    with_operators()
    import timm

    for family in timm.list_modules():
        if not chosen or family in chosen:
            names = [name for name in timm.list_models(module=family) if not name.startswith("test_")]
            named = [name for name in names if name in chosen]
            row = Row(named[0] if named else smallest(family, names), family)
            yield row, functools.partial(judge, row, functools.partial(build, row), ("dhc", "keel"))


def about() -> str:
    """Return the versions."""
    with_operators()
    import timm

    return f"timm {timm.__version__}"
