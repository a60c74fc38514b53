"""How much of a run a page shows: what is beyond is left out, the least important first, and the page says so."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True)
class Room:
    """Bounds of one page.

    Attributes:
        alerts: of a run.
        keys: metrics of a run, and its flows.
        cells: numbers in all profiles together, about 8 bytes each.
        side: rows and columns of a matrix.
        text: characters of a name or message.
    """

    alerts: int = 400
    keys: int = 1000
    cells: int = 360_000
    side: int = 512
    text: int = 2000

    def smaller(self) -> Room:
        """Half of it."""
        return Room(**{name: max(2, bound // 2) for name, bound in asdict(self).items()})

    def cut(self, payload: T) -> T:
        """A payload with its texts cut to the room."""
        cut: Any = payload
        if isinstance(payload, str) and len(payload) > self.text:
            cut = f"{payload[: self.text]}..."
        elif isinstance(payload, dict):
            cut = {name: self.cut(value) for name, value in payload.items()}
        elif isinstance(payload, list | tuple):
            cut = [self.cut(value) for value in payload]
        return cast(T, cut)
