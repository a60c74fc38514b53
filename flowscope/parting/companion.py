"""`parted_from_reference` against one run: a run under way beside a good one, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from flowscope.config import WatchConfig
from flowscope.corridor.behind import of_run
from flowscope.detectors.detector import Detector, Finding
from flowscope.errors import FlowscopeError
from flowscope.parting.bisection import Search, beside, set_up
from flowscope.parting.looks import Sides, told_to_the_bit
from flowscope.parting.rounding import measured
from flowscope.records import Record, RunHeader
from flowscope.sinks import read_run


class PartedFromRun(Detector):
    """The step differs from that of the good run, beyond rounding: once parted it stays so."""

    kind = "parted_from_reference"
    advice = (
        "look at what was changed since the good run, beginning at this place; where the change is wanted, make a new "
        "good run with it"
    )
    begins_with: ClassVar[dict[str, Any]] = {"parted": None}

    def __init__(self, good: str | Path, config: WatchConfig | None = None) -> None:
        super().__init__(config)
        run = read_run(good)
        if not any(map(told_to_the_bit, run.records)):
            raise FlowscopeError(
                f"reference: got {str(good)!r}, a run of which no step was told to the bit; expected one recorded by "
                "this version with WatchConfig.exact_steps > 0."
            )
        self._header = run.header or RunHeader()
        self._good = {record.step: record for record in run.records}
        self._search = Search(measured(run, list(beside(good))))
        self._behind = of_run(Path(good).name, run)
        self._began = False

    @property
    def name(self) -> str:
        """Beside the detector that compares with a group."""
        return "parted_from_run"

    @property
    def behind(self) -> Mapping[str, Any]:
        """The good run, as a line."""
        return self._behind

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        if self.state["parted"] is None:
            self.state["parted"] = self._parted(record, header)
        if self.state["parted"] is not None:
            where, found, limit, message = self.state["parted"]
            yield self.found(where, found, limit, message, severity="warning", immediate=True)

    def _parted(self, record: Record, header: RunHeader) -> list[Any] | None:
        good = self._good.get(record.step)
        if good is None:
            return None
        sides = Sides((self._header, header), (good, record))
        if not self._began:
            self._began = True
            if (unlike := set_up(sides, self._search.rounding)) is not None:
                return [unlike[0], 0.0, 0.0, f"setup: {unlike[1]}"]
        found = self._search.of_step(sides)
        if found is None:
            return None
        _, phase, where, message, size, limit = found
        return [where, size, limit, f"{phase}: {message}"]
