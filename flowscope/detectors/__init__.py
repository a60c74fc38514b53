"""From records to alerts. A detector is a class with `findings(record, header)`; `DetectorSet` runs them all.

A new detector is one subclass of `Detector` in the file of its family and one entry in `DETECTORS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowscope.config import WatchConfig
from flowscope.detectors.collapse import ConstantOutput, RankCollapse, RepresentationCollapse, TokenCollapse
from flowscope.detectors.connections import GateSaturation, MixingGain, StreamCollapse
from flowscope.detectors.detector import Detector, Finding, Ledger
from flowscope.detectors.finiteness import SKIPPED, NonFinite
from flowscope.detectors.gradients import ExplodingGradient, VanishingGradient
from flowscope.detectors.losses import LossPlateau, LossSpike
from flowscope.detectors.norms import TrainEvalGap
from flowscope.detectors.ranks import RankDesync
from flowscope.detectors.routing import ExpertCollapse
from flowscope.detectors.solvers import SolverCost, SolverUnconverged
from flowscope.detectors.spikes import GradientSpike
from flowscope.detectors.stepping import GradientAccumulates, StaleParameters
from flowscope.detectors.units import DeadUnits, Saturation, Symmetry
from flowscope.detectors.updates import OverClipped, UpdateTooLarge, UpdateTooSmall
from flowscope.detectors.wiring import NoGradient, ParametersNotOptimized
from flowscope.diagnosis import follows
from flowscope.faults import Faults
from flowscope.records import SERIOUS, Alert, Record, RunHeader

DETECTORS: tuple[type[Detector], ...] = (
    NonFinite,
    RankDesync,
    NoGradient,
    StaleParameters,
    ParametersNotOptimized,
    GradientAccumulates,
    OverClipped,
    Symmetry,
    TokenCollapse,
    DeadUnits,
    Saturation,
    GateSaturation,
    StreamCollapse,
    MixingGain,
    ExpertCollapse,
    SolverUnconverged,
    SolverCost,
    VanishingGradient,
    ExplodingGradient,
    UpdateTooLarge,
    RepresentationCollapse,
    RankCollapse,
    ConstantOutput,
    UpdateTooSmall,
    TrainEvalGap,
    LossSpike,
    GradientSpike,
    LossPlateau,
)
"""In the order they are asked: a cause before what it explains, and gradients before the update they make."""

FINITE = frozenset({NonFinite.kind})
Cause = tuple[str, str | None, str]
"""Kind, flow and severity of a finding that may explain others."""


class DetectorSet:
    """All detectors of a run with the state of their alerts; memory is bounded by the layout, not by the run.

    A non-finite tensor silences everything else while it stands (one cause, one alert), and the other detectors neither
    see nor learn from such a record. A record that GradScaler skipped says nothing, but where its scale has collapsed;
    one flagged "unsampled" holds only the finiteness canary.
    """

    def __init__(self, config: WatchConfig, detectors: Sequence[Detector] | None = None) -> None:
        self.detectors = list(detectors) if detectors is not None else [kind(config) for kind in DETECTORS]
        self.faults = Faults()
        self._ledger = Ledger(config)

    @property
    def standing(self) -> list[Alert]:
        """The alerts that are raised and not resolved."""
        return self._ledger.standing

    def check(self, record: Record, header: RunHeader) -> list[Alert]:
        """Return the alerts newly raised or resolved by this record."""
        skipped = not SKIPPED.isdisjoint(record.flags)
        out: list[Alert] = []
        found: set[Cause] = set()
        silent = skipped or "unsampled" in record.flags
        spoilt = self._spoilt(found)
        for detector in self.detectors:
            finite = detector.kind in FINITE
            if not finite and (silent or spoilt):
                continue
            part = f"detector {detector.name}"
            findings: list[Finding] | None = self.faults.guard(part, _collect, detector, record, header)
            if findings is None:
                continue
            if findings:
                findings = [self._explained(finding, detector, found) for finding in findings]
                serious = (f for f in findings if f.level == "beyond" and f.severity in SERIOUS)
                found |= {(finding.kind, finding.flow, finding.severity) for finding in serious}
            if findings or self._ledger.entries:
                out += self._ledger.update(detector.name, findings, record.step)
            if finite:
                spoilt = self._spoilt(found)
        for n, alert in enumerate(out):
            if alert.state == "raised":
                later = {id(other) for other in out[n:]}
                alert.message += follows(alert, [other for other in self.standing if id(other) not in later])
        return out

    def _spoilt(self, found: set[Cause]) -> bool:
        return any(kind in FINITE for kind, _, _ in found) or self._ledger.stands(FINITE)

    def _explained(self, finding: Finding, detector: Detector, found: set[Cause]) -> Finding:
        """The finding, or "unseen" in its place where another kind explains it.

        What belongs to a flow is explained by findings of that flow and by those of the whole model (flow None); what
        belongs to the whole model by those of any flow. An info explains nothing.
        """
        causes, errors = detector.yields_to, detector.yields_to_errors
        if not (causes or errors) or finding.level != "beyond":
            return finding
        flow = finding.flow
        now = any(
            (kind in causes or (kind in errors and severity == "error")) and (flow is None or other in (flow, None))
            for kind, other, severity in found
        )
        stands = self._ledger.stands
        if now or stands(causes, flow, detector.name) or stands(errors, flow, detector.name, ("error",)):
            return Finding(finding.kind, flow=flow, cause=finding.cause, level="unseen")
        return finding

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready; a set that loads it goes on exactly as this one would."""
        return {
            "ledger": self._ledger.state_dict(),
            "detectors": {detector.name: detector.state_dict() for detector in self.detectors},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; a detector it does not know starts anew."""
        self._ledger.load_state_dict(state["ledger"])
        for detector in self.detectors:
            if detector.name in state["detectors"]:
                detector.load_state_dict(state["detectors"][detector.name])


def _collect(detector: Detector, record: Record, header: RunHeader) -> list[Finding]:
    return list(detector.findings(record, header))


__all__ = ["DETECTORS", "Detector", "DetectorSet", "Finding"]
