"""What discovery answers: a `Flow` is one depth axis, a `FlowPlan` all of a model's, printable for people."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

Item = TypeVar("Item")

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_torch_params"})
_OUTERMOST = _WRAPPERS | {"module", "_module", "_forward_module"}
"""These wrap whole models only: inside of one, a child may bear such a name."""


def display_path(path: str) -> str:
    """Return a module path as people know it: without what DDP, FSDP, torch.compile and checkpoint wrappers insert.

    `module` (DDP, DataParallel, DeepSpeed), `_module` (Opacus) and `_forward_module` (Fabric) are taken away at the
    head only: a model may have a child of that name.
    """
    parts = path.split(".")
    while parts and parts[0] in _OUTERMOST:
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


@dataclass(frozen=True)
class Flow:
    """One chain of hidden states x_0 ... x_L of equal meaning along depth.

    Attributes:
        name: display path of the container ("transformer.h"), or "network".
        kind: "blocks", "stage", "network" (all stages), "chain", "concat" (DenseNet) or "time" (recurrent).
        outputs: raw paths (for `model.get_submodule`) of the modules whose outputs are the points, in depth order. A
            shared module is listed once; the trace of a forward counts its calls.
        entry: raw path of the module whose input is x_0; None where x_0 is the output of `outputs[0]`.
        fused: kind "time" only: an nn.RNN, GRU or LSTM, whose steps are not modules.
    """

    name: str
    kind: str
    outputs: tuple[str, ...]
    entry: str | None = None
    fused: bool = False


class Listing(Sequence[Item]):
    """What answers as the sequence of its `items`."""

    @property
    @abstractmethod
    def items(self) -> tuple[Item, ...]:
        """What there is, in order."""

    @abstractmethod
    def tables(self) -> dict[str, list[tuple[str, ...]]]:
        """Caption -> the lines of a table, its head first."""

    @abstractmethod
    def remarks(self) -> list[str]:
        """What stands below the tables."""

    def __str__(self) -> str:
        """The tables, then the remarks."""
        lines: list[str] = []
        for caption, rows in self.tables().items():
            lines += [caption, *(f"  {line}" for line in aligned(rows))] if caption else aligned(rows)
        return "\n".join([*lines, *self.remarks()])

    def __repr__(self) -> str:
        """The same: what a prompt or a cell shows is for people."""
        return str(self)

    def _repr_html_(self) -> str:
        from flowscope.notebook import tables_html

        return tables_html(self.tables(), self.remarks())

    def __len__(self) -> int:
        """How many."""
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        """The one at an index."""
        return self.items[index]


@dataclass(frozen=True, repr=False)
class FlowPlan(Listing[Flow]):
    """The flows `watch` would act on, the main one first, and notes on what was not taken and why."""

    flows: tuple[Flow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def items(self) -> tuple[Flow, ...]:
        """The flows, main one first."""
        return self.flows

    def tables(self) -> dict[str, list[tuple[str, ...]]]:
        """One: name, kind, number of modules, first and last path."""
        rows = [
            (f.name, f.kind, str(len(f.outputs)), display_path(f.outputs[0]), display_path(f.outputs[-1]))
            for f in self.flows
        ]
        return {"": [("flow", "kind", "modules", "first", "last"), *rows]} if rows else {}

    def remarks(self) -> list[str]:
        """The notes."""
        return [f"note: {note}" for note in self.notes]
