"""`parted_from_reference` against a group: raised at the step at which a run under way leaves the corridor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from flowscope.config import WatchConfig
from flowscope.corridor import golden
from flowscope.corridor.behind import of_stacks
from flowscope.corridor.departure import RATE
from flowscope.corridor.group import Corridor, read_group, runs_below
from flowscope.detectors.detector import Detector, Finding
from flowscope.errors import FlowscopeError
from flowscope.parting.differences import differences
from flowscope.records import Record, RunHeader, Severity, few
from flowscope.sinks.jsonl import FILE_NAME


class PartedFromGroup(Detector):
    """A metric lies farther from the good runs than any of them did: a warning where that is certain, else a note."""

    kind = "parted_from_reference"
    advice = (
        "compare what was changed since the good runs, beginning at this place and metric; where the change is wanted, "
        "make a new group of runs with it"
    )
    begins_with: ClassVar[dict[str, Any]] = {"beyond": {}, "recent": None, "number": None}

    def __init__(self, corridor: Corridor, config: WatchConfig | None = None) -> None:
        super().__init__(config)
        self.corridor = corridor

    @property
    def name(self) -> str:
        """Beside the detector that compares with one run."""
        return "parted_from_group"

    @property
    def behind(self) -> Mapping[str, Any]:
        """The good runs, as a band."""
        return of_stacks(Path(self.corridor.name).name, [*self.corridor.stacks.values()])

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run; once parted it stays so."""
        follower = self.corridor.follow(self.state)
        follower.look(record)
        departure = follower.departure
        if departure is None:
            return
        first = departure.beyond[0]
        differ = "".join(f"; {difference}" for difference in changes(self.corridor.header, header))
        message = f"the run {departure} ({first.times:.2g} times as far as any of them goes; {departure.odds}){differ}"
        severity: Severity = "warning" if departure.certain else "info"
        chance = min(departure.chance, departure.certified)
        yield self.found(departure.where, chance, RATE, message, severity=severity, immediate=True)


def changes(good: RunHeader, header: RunHeader) -> list[str]:
    """What is otherwise in the set-up of a run than in what all good runs share, one sentence each."""
    if good.setup and header.setup:
        shared = {name: value for name, value in header.setup.items() if name in good.setup}
        return differences(replace(good, config={}), replace(header, setup=shared, config={}))
    names = dict.fromkeys((*good.environment, *header.environment))
    versions = {name: (good.environment.get(name, "none"), header.environment.get(name, "none")) for name in names}
    return [f"{name}: {before} -> {now}" for name, (before, now) in versions.items() if before != now]


def stale(good: RunHeader, header: RunHeader) -> str:
    """A sentence where good runs were made with other versions of packages than a run; "" where with the same."""
    before, now = ({**one.environment, **one.setup.get("packages", {})} for one in (good, header))
    other = [
        f"{name} {version}, now {now[name]}" for name, version in before.items() if now.get(name, version) != version
    ]
    if not other:
        return ""
    return f"stale: the good runs were made with {few(other)}; make them anew where the new version is meant to stay"


def is_group(reference: str | Path) -> bool:
    """Whether a reference is a group: a golden profile, its name, or a folder with several runs below it."""
    return profile_at(reference) is not None or len(runs_below(reference)) > 1


def profile_at(reference: str | Path) -> Path | None:
    """The file of a golden profile, given as it is or by its name."""
    given = Path(reference)
    if given.suffix == golden.SUFFIX and given.is_file():
        return given
    named = Path(golden.FOLDER) / f"{given}{golden.SUFFIX}"
    return named if given.name == str(given) and not given.is_dir() and named.is_file() else None


def place_of(reference: str | Path) -> Path:
    """The folder of the runs, or the file of the profile, as an absolute path.

    Raises:
        FlowscopeError: it is neither.
    """
    profile = profile_at(reference)
    if profile is not None:
        return profile.absolute()
    if Path(reference).is_dir() and (runs_below(reference) or not (Path(reference) / FILE_NAME).is_file()):
        return Path(reference).absolute()
    if Path(reference).exists():
        raise FlowscopeError(
            f"reference: got {str(reference)!r}, which is one run; expected a folder with three runs or more, or a "
            "golden profile. flowscope bisect GOOD BAD compares two runs."
        )
    known = ", ".join(profile.name for profile in golden.listed()) or "none"
    raise FlowscopeError(
        f"reference: got {str(reference)!r}, expected a folder of good runs, the file of a golden profile, or the "
        f"name of one in {golden.FOLDER}/ (there: {known}); flowscope golden add makes one."
    )


def opened(reference: str | Path) -> Corridor:
    """The corridor of a folder of runs or of a golden profile.

    Raises:
        FlowscopeError: it is neither, or the runs are too few or have nothing in common.
    """
    place = place_of(reference)
    return read_group(place) if place.is_dir() else golden.load(place)


def live(reference: str | Path, config: WatchConfig | None = None) -> PartedFromGroup:
    """The detector for a run under way; raises as `opened` does."""
    return PartedFromGroup(opened(reference), config)
