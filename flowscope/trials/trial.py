"""What a trial is: it changes something on purpose, looks at what follows, and so learns a fact that no limit can tell.

A trial of one's own is a subclass of `Trial` with a name and `findings`; it goes to `flowscope.check(trials=[...])`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from flowscope.trials.bench import Bench

Status = Literal["pass", "fail", "note", "skipped"]


@dataclass(frozen=True)
class TrialFinding:
    """What one trial found.

    Attributes:
        trial: its name.
        status: "pass" (held), "fail" (a fault for certain), "note" (may be meant), "skipped" (could not be judged).
        where: the module or parameter it is about; "" for the whole model.
        message: what was seen, in one sentence.
        advice: the next thing to do; "" where nothing is wrong.
    """

    trial: str
    status: Status
    where: str
    message: str
    advice: str = ""


class Trial(ABC):
    """One experiment on a model. What it changes is put back bitwise by the one who runs it.

    Attributes:
        name: of the trial, one word.
        proves: what a pass proves, in one sentence.
        blind: what it cannot prove.
        cut: whether it runs so many passes that large batches are cut for it.
    """

    name: ClassVar[str]
    proves: ClassVar[str] = ""
    blind: ClassVar[str] = ""
    cut: ClassVar[bool] = False

    @abstractmethod
    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """Run the experiment; yields what it found, at least one finding.

        Args:
            bench: the model and what trains it.

        Raises:
            CannotJudgeError: something it needs is not there.
        """

    def passed(self, message: str, where: str = "") -> TrialFinding:
        """It held."""
        return TrialFinding(self.name, "pass", where, message)

    def failed(self, where: str, message: str, advice: str) -> TrialFinding:
        """A fault, for certain."""
        return TrialFinding(self.name, "fail", where, message, advice)

    def noted(self, where: str, message: str, advice: str = "") -> TrialFinding:
        """Something that may be meant."""
        return TrialFinding(self.name, "note", where, message, advice)

    def skipped(self, reason: str) -> TrialFinding:
        """It could not judge."""
        return TrialFinding(self.name, "skipped", "", reason)
