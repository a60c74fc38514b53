"""What `make gallery` runs: twelve sick runs of the labelled corpus, what flowscope says of each, and the cured run.

Writes docs/gallery.md and docs/images/gallery/*.png. A cure changes one thing of the program that was built and nothing
else. A run is cured where the alerts it is here for are gone and it learns better, which is checked.
"""

from __future__ import annotations

import argparse
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import nn

import flowscope
from benchmarks.faults.case import Case, Draw, Program
from benchmarks.faults.catalogue import CASES
from flowscope.records import Alert, Run

PAGE, IMAGES = Path("docs/gallery.md"), Path("docs/images/gallery")
WORD = "cured"


@dataclass(frozen=True)
class Piece:
    """One sick run.

    Attributes:
        case: its id in the corpus.
        metric: what the picture shows.
        cure: what is changed, in words.
        change: the same, done to the program before it runs.
    """

    case: str
    metric: str
    cure: str
    change: Callable[[Program], object]


@dataclass(frozen=True)
class Told:
    """What came of a run: its records and alerts, the mean of its last ten losses, and its quality."""

    run: Run
    loss: float
    quality: float

    def raised(self) -> list[Alert]:
        """The warnings and errors, in order."""
        return [alert for alert in self.run.alerts if alert.state == "raised" and alert.severity != "info"]


def rate(factor: float) -> Callable[[Program], object]:
    """Multiply the learning rate."""

    def change(program: Program) -> None:
        for group in program.optimizer.param_groups:
            group["lr"] *= factor

    return change


def initialised(program: Program) -> None:
    """Xavier's weights and no bias in each linear layer."""
    for module in program.model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.zeros_(module.bias)


def centred(program: Program) -> None:
    """Tanh in the place of each sigmoid, and Xavier's weights."""
    for name, module in program.model.named_children():
        if isinstance(module, nn.Sigmoid):
            setattr(program.model, name, nn.Tanh())
    initialised(program)


def rescaled(program: Program) -> None:
    """The wrong constant is 1."""
    for module in program.model.modules():
        if hasattr(module, "factor"):
            module.factor = 1.0


def held(program: Program) -> None:
    """The parameters that no optimizer holds join it."""
    known = {id(parameter) for group in program.optimizer.param_groups for parameter in group["params"]}
    program.optimizer.add_param_group({"params": [p for p in program.model.parameters() if id(p) not in known]})


def unsoftened(program: Program) -> None:
    """Tanh in the place of each softmax between layers."""
    for name, module in program.model.named_children():
        if isinstance(module, nn.Softmax):
            setattr(program.model, name, nn.Tanh())


def counting(program: Program) -> None:
    """Running statistics that follow the batches."""
    for module in program.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.1


PIECES: tuple[Piece, ...] = (
    Piece("F01", "gradient_product", "tanh with Xavier's initialisation in the place of the sigmoids", centred),
    Piece("F04", "gradient_product", "Xavier's initialisation", initialised),
    Piece("G01", "gain", "the constant is 1", rescaled),
    Piece("F09", "grad_norm", "a hundredth of the learning rate", rate(0.01)),
    Piece("V04", "update_ratio", "a learning rate of 1e-3", rate(1e-3)),
    Piece("F30", "update_ratio", "ten thousand times the learning rate", rate(1e4)),
    Piece("F19", "dead_fraction", "no bias at the start, Xavier's weights", initialised),
    Piece("F21", "saturation", "Xavier's initialisation", initialised),
    Piece("F23", "gradient_product", "Xavier's initialisation", initialised),
    Piece("F06", "gradient_product", "tanh in the place of the softmax", unsoftened),
    Piece("F40", "norm_gap", "momentum 0.1", counting),
    Piece("W05", "param_grad_norm", "`optimizer.add_param_group` with the new head", held),
)


def case_of(piece: Piece) -> Case:
    """The labelled run."""
    return next(case for case in CASES if case.id == piece.case)


def seen(piece: Piece, *, cured: bool) -> Told:
    """Train it once, as it is or cured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        program = case_of(piece).build(Draw(0))
        if cured:
            piece.change(program)
        losses = []
        watching = {**program.watch, "config": {**program.watch.get("config", {}), "console": "off"}}
        with flowscope.watch(program.model, program.optimizer, **watching) as scope:
            for step in range(program.steps):
                loss = program.step(step)
                scope.step(loss=loss)
                losses.append(float(loss))
        quality = program.quality() if program.quality is not None else -losses[-1]
    last = losses[-10:]
    return Told(scope.run, sum(last) / len(last), quality)


def picture(piece: Piece, sick: Told, cured: Told, file: Path) -> None:
    """Both maps beside each other, on their own scales."""
    maps = []
    for told in (sick, cured):
        have = piece.metric if any(piece.metric in record for record in told.run.records) else "grad_norm"
        data = io.BytesIO()
        flowscope.plot.heat_map(told.run, have).savefig(data, format="png", dpi=80)
        maps.append(Image.open(data).convert("RGB"))
    whole = Image.new("RGB", (sum(one.width for one in maps), max(one.height for one in maps) + 22), "white")
    left = 0
    for words, one in zip(("as it was", WORD), maps, strict=True):
        whole.paste(one, (left, 22))
        ImageDraw.Draw(whole).text((left + 8, 4), words, fill="black", font_size=14)
        left += one.width
    file.parent.mkdir(parents=True, exist_ok=True)
    whole.quantize(256).save(file, optimize=True)


def is_cured(piece: Piece, sick: Told, cured: Told) -> bool:
    """Whether the alerts it is here for are gone, and it learns better."""
    kinds = {*case_of(piece).kinds}
    left = {alert.kind for alert in cured.raised()} & kinds
    # a run that ended in NaN has no quality at all
    better = not cured.quality <= sick.quality and cured.quality == cured.quality
    return bool({alert.kind for alert in sick.raised()} & kinds) and not left and better


def section(piece: Piece, sick: Told, cured: Told) -> str:
    """Its part of the page."""
    case = case_of(piece)
    kinds = {*case.kinds}
    first = next(alert for alert in sick.raised() if alert.kind in kinds)
    also = list(dict.fromkeys(alert.kind for alert in cured.raised()))
    after = "no warning" if not also else f"raised: {', '.join(f'`{kind}`' for kind in also)}"
    return "\n".join(
        [
            f"## {case.title.capitalize()}",
            "",
            f"![{piece.metric} of {case.id}, as it was and cured](images/gallery/{piece.case}.png)",
            "",
            f"**What it says**, at step {first.step}: `{first.kind}`"
            + (f" at `{first.where}`" if first.where else "")
            + f": {first.message}.",
            "",
            f"**What it advises**: {first.advice}.",
            "",
            f"**The cure**: {piece.cure}. The quality goes from {sick.quality:.3g} to {cured.quality:.3g}, the loss of "
            f"the last ten steps from {sick.loss:.3g} to {cured.loss:.3g}; {after}.",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="ids of pieces (default: all)")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args(argv)
    parts = []
    for piece in PIECES:
        if arguments.only and piece.case not in arguments.only:
            continue
        sick, cured = (seen(piece, cured=cured) for cured in (False, True))
        good = is_cured(piece, sick, cured)
        print(
            piece.case,
            [a.kind for a in sick.raised()],
            "->",
            [a.kind for a in cured.raised()],
            sick.quality,
            cured.quality,
        )
        if not good:
            raise SystemExit(f"{piece.case} is not cured by: {piece.cure}")
        picture(piece, sick, cured, arguments.images / f"{piece.case}.png")
        parts.append(section(piece, sick, cured))
    head = [
        "# Gallery",
        "",
        "Twelve sick runs of the labelled corpus ([detection.md](detection.md)): the picture, what flowscope says, and "
        "the same run with one thing changed. Made by `make gallery`; each map is on its own scale, input on top. "
        "The Post-LN stack and its cure are the picture of the README.",
        "",
    ]
    arguments.page.write_text("\n".join([*head, *parts]).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
