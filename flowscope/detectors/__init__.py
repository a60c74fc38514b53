"""From records to alerts. A detector is a class with `findings(record, header)`; `DetectorSet` runs them all.

    Limit       the commonest detector, the worst row of one metric against one limit, as a declaration
    Detector    any other: writes its own findings
    Finding     what it says about one condition at one record
    NUMBERS, WIRING, SIGNAL, OUTCOME
                levels of cause: what is found later is explained by what stands earlier

A new built-in is one such class in the file of its family and one entry in `DETECTORS`; one of your own goes to
`flowscope.watch(..., detectors=[MyDetector])`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from flowscope.config import WatchConfig
from flowscope.detectors.activations import ActivationHeadroom
from flowscope.detectors.attention import AttentionLogits
from flowscope.detectors.batch_norm import TrainEvalGap
from flowscope.detectors.broadcast import BroadcastLoss
from flowscope.detectors.collapse import ConstantOutput, RankCollapse, RepresentationCollapse, TokenCollapse
from flowscope.detectors.connections import GateSaturation, MixingGain, StreamCollapse
from flowscope.detectors.coverage import Coverage, Mute, Said
from flowscope.detectors.detector import NUMBERS, OUTCOME, SIGNAL, WIRING, Detector, Finding, Level
from flowscope.detectors.drawn import DrawnTogether
from flowscope.detectors.faded import FadedOutputs
from flowscope.detectors.finiteness import SKIPPED, NonFinite
from flowscope.detectors.fixed import FixedOutput
from flowscope.detectors.gradients import ExplodingGradient, StarvedPlayer, VanishingGradient
from flowscope.detectors.ledger import Cause, Ledger
from flowscope.detectors.limit import Limit
from flowscope.detectors.losses import LossSpike
from flowscope.detectors.lost_signal import NoSignal
from flowscope.detectors.moments import StaleMoment
from flowscope.detectors.outgrown import UpdateGrowth
from flowscope.detectors.plateau import LossMisfit, LossPlateau, TooSlow
from flowscope.detectors.progress import Progress
from flowscope.detectors.ranks import RankDesync
from flowscope.detectors.routing import ExpertCollapse, UnusedExperts
from flowscope.detectors.same_batch import SameBatch
from flowscope.detectors.solvers import SolverCost, SolverUnconverged
from flowscope.detectors.spikes import GradientSpike
from flowscope.detectors.stepping import GradientAccumulates, StaleParameters
from flowscope.detectors.units import DeadUnits, Saturation, Symmetry
from flowscope.detectors.unmoved import Unmoved
from flowscope.detectors.unreached import Unreached
from flowscope.detectors.updates import OverClipped, UpdateTooLarge, UpdateTooSmall
from flowscope.detectors.wiring import NoGradient, ParametersNotOptimized
from flowscope.diagnosis import follows
from flowscope.errors import FlowscopeError, nearest
from flowscope.faults import Faults
from flowscope.records import SERIOUS, Alert, Record, RunHeader, Severity

DETECTORS: tuple[type[Detector], ...] = (
    NonFinite,
    NoGradient,
    StaleParameters,
    Unreached,
    ParametersNotOptimized,
    GradientAccumulates,
    OverClipped,
    BroadcastLoss,
    FixedOutput,
    LossMisfit,
    Symmetry,
    SameBatch,
    RankDesync,
    TokenCollapse,
    DeadUnits,
    Saturation,
    GateSaturation,
    StreamCollapse,
    MixingGain,
    ExpertCollapse,
    UnusedExperts,
    SolverUnconverged,
    SolverCost,
    AttentionLogits,
    ActivationHeadroom,
    VanishingGradient,
    StarvedPlayer,
    ExplodingGradient,
    UpdateTooLarge,
    StaleMoment,
    UpdateGrowth,
    TrainEvalGap,
    LossSpike,
    GradientSpike,
    RepresentationCollapse,
    FadedOutputs,
    RankCollapse,
    ConstantOutput,
    DrawnTogether,
    Unmoved,
    UpdateTooSmall,
    NoSignal,
    TooSlow,
    LossPlateau,
)
"""In the order they are asked: by level, and in a level a cause before what it explains."""
UNSEEN = frozenset({"unseen"})


class DetectorSet:
    """All detectors of a run with the state of their alerts; memory is bounded by the layout, not by the run.

    What earlier causes explain is left out (one cause, one alert):

    - While a finding about numbers stands, nobody else is asked, or learns from such records.
    - An outcome yields to the warnings and errors of earlier levels.
    - Wiring and signals are facts of their own; what explains one is named (`Detector.yields_to`, `.explains`).
    - A symptom of a run that makes progress is a note (`Detector.symptom`, `Progress`).

    A record that GradScaler skipped says nothing, but where its scale has collapsed; one flagged "unsampled" holds only
    the finiteness canary: of such records only detectors of numbers are asked.

    Args:
        config: the limits.
        detectors: instead of the built-in ones.
        further: classes or instances of one's own, each asked after the others of its level.
        faults: of the scope; a fault in one detector switches off that one.

    Raises:
        FlowscopeError: one of one's own cannot be built, or its kind is borne by another.
    """

    def __init__(
        self,
        config: WatchConfig,
        detectors: Sequence[Detector] | None = None,
        further: Iterable[Detector | type[Detector]] = (),
        faults: Faults | None = None,
    ) -> None:
        self.faults = faults or Faults()
        built = (self.faults.guard(f"detector {kind.kind}", kind, config) for kind in DETECTORS)
        given = [one for one in built if one is not None] if detectors is None else list(detectors)
        own = [_built(detector, config) for detector in further]
        _check_kinds(own, {detector.kind for detector in given}, config)
        self.detectors = sorted([*given, *own], key=lambda detector: detector.level)
        self._ledger = Ledger(config)
        self._progress = Progress()
        self._by_name = {detector.name: detector for detector in self.detectors}
        self.coverage = Coverage([detector.kind for detector in self.detectors], config.mute)

    @property
    def shown_by(self) -> dict[str, tuple[str, ...]]:
        """The metrics that show each kind; of several detectors of a kind those of all, as they are asked."""
        shown: dict[str, tuple[str, ...]] = {}
        for detector in self.detectors:
            shown[detector.kind] = tuple(dict.fromkeys((*shown.get(detector.kind, ()), *detector.shown_by)))
        return shown

    @property
    def standing(self) -> list[Alert]:
        """The alerts that are raised and not resolved."""
        return self._ledger.standing

    def covered(self, header: RunHeader) -> str:
        """The line on what the silence of these detectors covers (`flowscope.detectors.coverage`)."""
        return self.coverage.line(header, self.standing, self.faults.failed)

    def check(self, record: Record, header: RunHeader) -> list[Alert]:
        """Return the alerts newly raised or resolved by this record."""
        self.faults.attempt("coverage", self.coverage.begin, record)
        self.faults.attempt("progress", self._progress.look, record)
        silent = not SKIPPED.isdisjoint(record.flags) or "unsampled" in record.flags
        out: list[Alert] = []
        found: set[Cause] = set()
        spoilt = self._spoilt(found)
        for detector in self.detectors:
            of_numbers = detector.level == NUMBERS
            if not of_numbers and (silent or spoilt):
                if spoilt:
                    self.coverage.spoilt = spoilt
                continue
            out += self.faults.guard(f"detector {detector.name}", self._ask, detector, record, header, found) or []
            if of_numbers:
                spoilt = self._spoilt(found)
        self.faults.attempt("causes of alerts", self._tell_causes, out)
        return out

    def _tell_causes(self, out: Sequence[Alert]) -> None:
        for n, alert in enumerate(out):
            if alert.state == "raised":
                later = {id(other) for other in out[n:]}
                alert.message += follows(alert, [other for other in self.standing if id(other) not in later])

    def _ask(self, detector: Detector, record: Record, header: RunHeader, found: set[Cause]) -> list[Alert]:
        """The alerts of one detector; what is serious of its findings is added to `found`."""
        findings = self._noted(detector, list(detector.findings(record, header)), record)
        findings = self._progress.judge(findings, detector)
        levels = {finding.level for finding in findings}
        if "beyond" in levels:
            findings = [self._explained(finding, detector, found) for finding in findings]
            serious = (f for f in findings if f.level == "beyond" and f.severity in SERIOUS)
            found |= {Cause(detector.name, finding.kind, finding.flow, finding.severity) for finding in serious}
        if self._ledger.entries or not levels <= UNSEEN:  # else there is nothing to count
            return self._ledger.update(detector.name, findings, record.step)
        return []

    def tell(self, finding: Finding, step: int) -> list[Alert]:
        """The alerts of what is known where no record can come; it stands until records come without it."""
        if self.coverage.mutes(_said(finding)):
            return []
        owner = next(detector.name for detector in self.detectors if detector.kind == finding.kind)
        return self._ledger.update(owner, [finding], step)

    def _noted(self, detector: Detector, findings: list[Finding], record: Record) -> list[Finding]:
        """The findings that are not muted; what the detector could tell is noted."""
        told = any(finding.level != "unseen" for finding in findings) if findings else None
        self.coverage.heard(detector.kind, detector.shown_by, record, told=told)
        if not self.coverage.mute.patterns:
            return findings
        return [f for f in findings if f.level != "beyond" or not self.coverage.mutes(_said(f))]

    def _spoilt(self, found: set[Cause]) -> str:
        """The kind of a finding about numbers that stands, "" where there is none."""
        causes = (*found, *self._ledger.causes())
        return next((cause.kind for cause in causes if self._level(cause) == NUMBERS), "")

    def _level(self, cause: Cause) -> Level:
        """How early a cause is; one whose detector is not there any more explains nothing."""
        owner = self._by_name.get(cause.owner)
        return OUTCOME if owner is None else owner.level

    def _explained(self, finding: Finding, detector: Detector, found: set[Cause]) -> Finding:
        """The finding, or "unseen" in its place where an earlier cause explains it."""
        if finding.level != "beyond":
            return finding
        causes = (*found, *self._ledger.causes(detector.name))
        cause = next((cause for cause in causes if self._explains(cause, detector, finding.flow)), None)
        if cause is None:
            return finding
        self.coverage.kept_back(_said(finding), cause.kind)
        return detector.unseen(finding.flow, finding.cause)

    def _explains(self, cause: Cause, detector: Detector, flow: str | None) -> bool:
        """Whether a cause explains what a detector finds in this flow (None: in the whole model).

        Findings of any flow explain the whole model, and an error of the whole model explains every flow; a warning of
        the whole model explains a flow only where one of the two detectors names the other. An info explains nothing.
        """
        error, owner = cause.severity == "error", self._by_name.get(cause.owner)
        named = cause.kind in detector.yields_to or (owner is not None and detector.kind in owner.explains)
        if named or (error and cause.kind in detector.yields_to_errors):
            return flow is None or cause.flow in (flow, None)
        if not self._level(cause) < detector.level == OUTCOME:
            return False
        return flow is None or cause.flow == flow or (error and cause.flow is None)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready; a set that loads it goes on exactly as this one would, but for a detector whose state fails."""
        attempt = self.faults.attempt
        states = [(one.name, attempt(f"state of detector {one.name}", one.state_dict)) for one in self.detectors]
        return {
            "ledger": attempt("state of alerts", self._ledger.state_dict, otherwise=[]),
            "progress": attempt("state of progress", self._progress.state_dict, otherwise={}),
            "detectors": {name: state for name, state in states if state is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; a detector it does not know starts anew."""
        self._ledger.load_state_dict(state.get("ledger", ()))
        self._progress.load_state_dict(state.get("progress", {}))
        held = state.get("detectors", {})
        for detector in self.detectors:
            if detector.name in held:
                detector.load_state_dict(held[detector.name])


def _built(detector: Detector | type[Detector], config: WatchConfig) -> Detector:
    """One of one's own, with the limits of the run."""
    name = detector.__name__ if isinstance(detector, type) else type(detector).__name__
    try:
        made = detector(config) if isinstance(detector, type) else detector
        made.config, state, kind = config, made.state, made.kind
    except (TypeError, AttributeError) as error:
        raise FlowscopeError(
            f"watch(detectors=...): {name}: {error}; expected a class with `kind` and `findings` whose __init__, if it "
            "has one, takes a WatchConfig and hands it to super().__init__, or an instance of such a class."
        ) from None
    if not isinstance(kind, str) or not isinstance(state, dict):
        got = f"kind={kind!r} and state={state!r:.40}"
        raise FlowscopeError(f"watch(detectors=...): {name}: got {got}, expected a string and a dict.")
    return made


def _check_kinds(own: Sequence[Detector], taken: set[str], config: WatchConfig) -> None:
    """Each kind is borne by one detector, and limits are set for those that are there."""
    for detector in own:
        if detector.kind in taken:
            raise FlowscopeError(
                f"watch(detectors=...): {type(detector).__name__}: another detector bears the kind {detector.kind!r}, "
                "expected one of its own."
            )
        taken.add(detector.kind)
    kinds = [detector.kind for detector in own]
    if unknown := Mute(config.mute).unknown(taken):
        near = nearest(unknown[0].partition(":")[0], sorted(taken)) or f" They are: {', '.join(sorted(taken))}."
        raise FlowscopeError(
            f"watch(config=...): mute: got {', '.join(unknown)}, expected KIND or KIND:WHERE of kinds of alerts.{near}"
        )
    if unknown := sorted(set(config.limits) - set(kinds)):
        raise FlowscopeError(
            f"watch(config=...): limits: got {', '.join(unknown)}, expected kinds of detectors of your own "
            f"({', '.join(kinds) or 'there are none'})."
        )


def check_asked(asked: str, given: Iterable[Any], own: Sequence[str] = ()) -> None:
    """Refuse kinds and severities that no alert has: whoever waits for one would wait in silence.

    Args:
        asked: where they were given, for the message.
        given: the kinds and severities.
        own: the kinds of detectors from outside.

    Raises:
        FlowscopeError: one is unknown.
    """
    known = [*get_args(Severity), *dict.fromkeys([detector.kind for detector in DETECTORS]), *own]
    for kind in given:
        if kind not in known:
            near = nearest(str(kind), known) or f" Known: {', '.join(known)}."
            raise FlowscopeError(
                f"{asked}: no alert is of kind or severity {kind!r}, so nothing would ever happen.{near}"
            )


def _said(finding: Finding) -> Said:
    return Said(finding.kind, finding.where, finding.value, finding.limit)


__all__ = [
    "DETECTORS",
    "NUMBERS",
    "OUTCOME",
    "SIGNAL",
    "WIRING",
    "Detector",
    "DetectorSet",
    "Finding",
    "Level",
    "Limit",
    "check_asked",
]
