"""What a detector is: a class that looks at one record and says what it finds, as plain numbers.

It counts nothing and silences nobody: the `Ledger` counts, and `DetectorSet` leaves out what an earlier cause explains.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from flowscope.config import WatchConfig
from flowscope.records import Array as Array
from flowscope.records import Record, RunHeader, Severity

Flags = NDArray[np.bool_]
AlertKey = tuple[str, str, str]

SHARE_RELEASE = 0.75
"""A share has no factor of three to fall by: clean means below this much of the limit."""
ANY_FLOW = "*"
"""The flow of an "unseen" finding that means all conditions of its detector."""


class Level(IntEnum):
    """How early a cause lies: detectors are asked in this order, and an outcome yields to all before it."""

    NUMBERS = 0
    """Numbers that are none: nothing else can be judged, or learned from."""
    WIRING = 1
    """What the training code cuts, forgets, or holds twice, whatever the signals look like."""
    SIGNAL = 2
    """What activations, gradients, updates and losses look like: each a fact of its own."""
    OUTCOME = 3
    """What all that comes to: said where nothing before it says why."""


NUMBERS, WIRING, SIGNAL, OUTCOME = Level


@dataclass(frozen=True)
class Finding:
    """What a detector says about one condition at one record.

    Attributes:
        kind, where, severity, value, limit, message, advice, flow: as in `Alert`.
        immediate: raise at the first record (errors beyond doubt), without warm-up.
        records: how many records in a row raise it; None means `WatchConfig.warmup_records`.
        cause: tells apart two conditions of one kind in one flow; an alert stands once per (kind, flow, cause).
        symptom: as in `Detector`, where this one is more of a symptom than its detector's others.
        level: "beyond" the limit; "near" it (not clean: an alert stays, none is raised); "unseen": this record cannot
            tell (the metric is missing), so nothing is counted.
    """

    kind: str
    where: str = ""
    severity: Severity = "warning"
    value: float = math.nan
    limit: float = math.nan
    message: str = ""
    advice: str = ""
    flow: str | None = None
    immediate: bool = False
    records: int | None = None
    cause: str = ""
    level: Literal["beyond", "near", "unseen"] = "beyond"
    symptom: Literal["", "at first", "ever"] = ""

    @property
    def key(self) -> AlertKey:
        """What one standing alert is for."""
        return self.kind, self.flow or "", self.cause


class Detector(ABC):
    """Says what is wrong in a record. Subclass it, set `kind`, write `findings`.

    Attributes:
        kind: the one kind of its alerts.
        level: how early a cause it is. An outcome yields to what stands of earlier levels; wiring and signals are facts
            of their own.
        yields_to: kinds that explain it beside those: while such an alert stands in the same flow (or is found in this
            record), this detector's findings for that flow are left out.
        yields_to_errors: the same for kinds that explain it only where they are errors.
        explains: kinds that yield to it, said on this side.
        symptom: healthy runs show it too: its warnings are notes (info) while the run makes progress, "ever", or only
            while its first losses fall ("at first": what it finds can itself be what makes a loss fall).
        shown_by: the metrics that show its alerts, best first.
        advice: what to do about it, for people.
        extreme: the end of the profile that its message speaks of, where `where` is the block that does most to get
            there.
        begins_with: its `state` at first; each detector has a copy.
        config: the limits of the run.
        state: what it has learned. Numbers, words, arrays, deques of numbers, and dicts of those: saved and loaded with
            the scope's state. Must be bounded.
    """

    kind: ClassVar[str]
    level: ClassVar[Level] = SIGNAL
    yields_to: ClassVar[frozenset[str]] = frozenset()
    yields_to_errors: ClassVar[frozenset[str]] = frozenset()
    explains: ClassVar[frozenset[str]] = frozenset()
    symptom: ClassVar[Literal["", "at first", "ever"]] = ""
    shown_by: ClassVar[tuple[str, ...]] = ()
    advice: ClassVar[str] = ""
    extreme: ClassVar[Literal["", "least", "largest"]] = ""
    begins_with: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: WatchConfig | None = None) -> None:
        self.config = config or WatchConfig()
        self.state: dict[str, Any] = copy.deepcopy(self.begins_with)

    @property
    def name(self) -> str:
        """What its state and its alerts are kept under: its kind; a second detector of a kind has its own."""
        return self.kind

    @property
    def behind(self) -> Mapping[str, Any]:
        """What is to be drawn behind the run (flowscope/backdrop.py): what it is compared with."""
        return {}

    @abstractmethod
    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """The findings of this record; a condition that is not mentioned is clean."""

    def found(
        self,
        where: str,
        value: float,
        limit: float,
        message: str,
        flow: str | None = None,
        *,
        advice: str = "",
        severity: Severity = "warning",
        certain: bool = False,
        immediate: bool = False,
        records: int | None = None,
        cause: str = "",
    ) -> Finding:
        """A condition beyond its limit, as in `Finding`; where it is `certain`, an error at once."""
        severity, immediate = ("error", True) if certain else (severity, immediate)
        numbers, told = (float(value), float(limit)), (message, advice or self.advice)
        return Finding(self.kind, where, severity, *numbers, *told, flow, immediate, records, cause)

    def unseen(self, flow: str | None = None, cause: str = "") -> Finding:
        """This record cannot tell; with `ANY_FLOW` it tells nothing of what this detector looks for."""
        return _silent(self.kind, flow, cause, "unseen")

    def near(self, close: bool | np.bool_, flow: str | None = None, cause: str = "") -> Finding | None:
        """Inside the limit: near it where `close`, else clean (None)."""
        return _silent(self.kind, flow, cause, "near") if close else None

    def state_dict(self) -> dict[str, Any]:
        """What the detector has learned, JSON-ready."""
        return {name: pack(value) for name, value in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; what cannot be read starts anew."""
        for name, value in state.items():
            try:
                self.state[name] = unpack(value, self.state.get(name))
            except (TypeError, ValueError):
                continue


@lru_cache(maxsize=1024)
def _silent(kind: str, flow: str | None, cause: str, level: Literal["near", "unseen"]) -> Finding:
    """A finding that raises nothing. Most records of a healthy run have the same ones: each is made once."""
    return Finding(kind, flow=flow, cause=cause, level=level)


def said(*findings: Finding | None) -> Iterable[Finding]:
    """Those that are none are left out."""
    return (finding for finding in findings if finding is not None)


def pack(value: Any) -> Any:
    """A value of `Detector.state` as JSON, at full precision: arrays and deques are lists, infinities and NaN words."""
    if isinstance(value, Mapping):
        return {key: pack(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple | deque):
        return [pack(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def unpack(value: Any, like: Any = None) -> Any:
    """The inverse of `pack`: a list is an array, or a deque where `like` (the value at the start) is one."""
    if isinstance(value, Mapping):
        known = like if isinstance(like, Mapping) else {}
        return {key: unpack(inner, known.get(key)) for key, inner in value.items()}
    if isinstance(value, list):
        # object -> float64 reads words for numbers that are none, and None
        array = np.asarray(value, dtype=object).astype(np.float64)
        return deque(array.tolist(), like.maxlen) if isinstance(like, deque) else array
    return float(value) if value in ("nan", "inf", "-inf") else value
