"""Detectors of one's own: given to `watch`, judged again by `diagnose`; levels of cause, `Limit` and state."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from detector_records import header, layout, record, told
from torch import nn

import flowscope
from flowscope.config import WatchConfig
from flowscope.detectors import DETECTORS, NUMBERS, OUTCOME, SIGNAL, WIRING, Detector, DetectorSet, Finding, Limit
from flowscope.errors import FlowscopeError, StopTraining
from flowscope.integrations.trainer import with_stop
from flowscope.records import Record, RunHeader
from flowscope.sinks import read_run

NAN = float("nan")


class LargeActivations(Limit):
    """A limit on a metric of each flow."""

    kind, metric, above, per = "large_activations", "act_rms", 0.01, "flow"
    message, advice = "{where} has an RMS of {value:.2g} (limit {limit:.2g}; {count} of {size})", "scale it down"


class HeadNorm(Detector):
    """Learns the first norm of the head's weight."""

    kind = "head_norm"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        norms = record.metrics.get("param_norm")
        if norms is None or np.isnan(norms[-1]):
            yield self.unseen()
            return
        first = self.state.setdefault("first", float(norms[-1]))
        if norms[-1] > 0.5 * first:
            yield Finding(self.kind, "head", "warning", float(norms[-1]), first, "the head is there", "remove it")


def train(steps: int = 4, **options: object) -> flowscope.Scope:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with flowscope.watch(model, optimizer, **{"config": {"console": "off"}, **options}) as scope:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    return scope


def test_one_of_ones_own_reaches_alerts_callbacks_summary_report_state_and_files(tmp_path: Path) -> None:
    heard: list[flowscope.Alert] = []
    own = [LargeActivations, HeadNorm()]
    scope = train(detectors=own, on_alert=heard.append, log_dir=tmp_path)
    expected = [("head_norm", "head", 1, "raised"), ("large_activations", "4", 1, "raised")]
    assert sorted(told(scope.alerts)) == expected
    assert sorted(told(heard)) == expected
    assert "has an RMS of" in scope.summary()
    assert "large_activations" in scope.report(tmp_path / "report.html").read_text()
    state = json.loads(json.dumps(scope.state_dict()))["detectors"]
    assert state["detectors"]["head_norm"]["first"] > 0
    assert {row["owner"] for row in state["ledger"]} == {"head_norm", "large_activations"}
    run = read_run(tmp_path)
    assert sorted(told(run.alerts)) == expected
    assert run.header is not None
    assert run.header.shown_by["large_activations"] == ("act_rms",)


def test_a_scope_that_loads_the_state_neither_warms_up_nor_repeats_an_alert() -> None:
    state = train(detectors=[LargeActivations]).state_dict()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with flowscope.watch(model, optimizer, detectors=LargeActivations, config={"console": "off"}) as scope:
        scope.load_state_dict(state)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    assert scope.alerts == []


def test_its_limit_may_be_set_and_its_kind_may_stop_a_run() -> None:
    config = {"console": "off", "limits": {"large_activations": 1e3}}
    assert train(detectors=[LargeActivations], config=config).alerts == []
    stopped: list[flowscope.Alert] = []
    train(**with_stop({"detectors": [LargeActivations]}, stopped.append, None, "large_activations"))
    assert told(stopped) == [("large_activations", "4", 1, "raised")]
    with pytest.raises(StopTraining):
        train(detectors=[LargeActivations], on_alert=flowscope.actions.Stop(on="large_activations"))


class Symmetric(Limit):
    kind, metric, above = "symmetry", "act_rms", 1.0


class NoKind(Detector):
    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        return ()


class NoState(NoKind):
    kind = "no_state"

    def __init__(self, config: WatchConfig) -> None:
        del config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"detectors": [Symmetric]}, "bears the kind 'symmetry'"),
        ({"detectors": [HeadNorm, HeadNorm()]}, "bears the kind 'head_norm'"),
        ({"detectors": [int]}, "got <class 'int'>"),
        ({"detectors": "head_norm"}, "got 'head_norm'"),
        ({"detectors": [NoKind]}, "NoKind: .* no attribute 'kind'"),
        ({"detectors": [NoState]}, "NoState: .* no attribute 'state'"),
        ({"detectors": [type("Neither", (Limit,), {"kind": "k", "metric": "m"})]}, "above=None, below=None"),
        ({"detectors": [type("Typo", (Limit,), {"kind": "k", "metric": "m", "above": 1.0, "message": "{wher}"})]},
         "Typo.message: KeyError"),
        ({"config": {"limits": {"large": 1.0}}}, "limits: got large, expected .*there are none"),
    ],
)  # fmt: skip
def test_what_cannot_be_one_is_refused_before_the_model_is_touched(options: dict, words: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    with pytest.raises(FlowscopeError, match=words):
        flowscope.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    flowscope.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), config={"console": "off"}).close()


def test_a_recorded_run_is_judged_by_it_again(tmp_path: Path) -> None:
    scope = train(detectors=[LargeActivations], log_dir=tmp_path, config={"limits": {"large_activations": 0.02}})
    assert len(scope.alerts) == 1
    limit = "kind, metric, above, per = 'large_activations', 'act_rms', 1.0, 'flow'"
    head = "from flowscope.detectors import Limit\nclass Mine(Limit):\n    "
    (tmp_path / "mine.py").write_text(head + limit)

    def diagnose(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flowscope", "diagnose", str(tmp_path), "--json", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)

    assert diagnose().stdout == ""
    (line,) = diagnose("--detector", "mine:Mine").stdout.splitlines()
    assert (json.loads(line)["kind"], json.loads(line)["limit"]) == ("large_activations", 0.02)
    wrong = diagnose("--detector", "mine:Other")
    assert (wrong.returncode, "expected MODULE:CLASS" in wrong.stderr) == (2, True)


# -- levels of cause ---------------------------------------------------------------------------------------------------


def at(kind: str, level: object, where: str | None = None, severity: str = "warning", **more: object) -> Detector:
    """A detector that always finds its condition, in a flow or in the whole model."""

    class Always(Detector):
        def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
            yield Finding(self.kind, "", severity, 2.0, 1.0, "m", "a", where, immediate=True)  # type: ignore[arg-type]

    return type(kind, (Always,), {"kind": kind, "level": level, **more})()


def alerted(*detectors: Detector) -> list[str]:
    found = DetectorSet(WatchConfig(), [], detectors)
    return [alert.kind for step in range(2) for alert in found.check(Record(step), header(layout("a"), layout("b")))]


def test_an_outcome_yields_to_what_stands_of_earlier_levels_in_its_flow() -> None:
    assert alerted(at("late", OUTCOME, "a"), at("early", SIGNAL, "a")) == ["early"]
    assert alerted(at("late", OUTCOME, "a"), at("early", WIRING, "a")) == ["early"]
    assert alerted(at("late", OUTCOME, "a"), at("early", SIGNAL, "b")) == ["early", "late"]
    assert alerted(at("late", OUTCOME, "a"), at("early", SIGNAL, "a", "info")) == ["early", "late"]
    assert alerted(at("late", OUTCOME, "a"), at("other", OUTCOME, "a")) == ["late", "other"]


def test_the_whole_model_is_explained_by_any_flow_and_a_flow_by_errors_of_the_whole_model() -> None:
    assert alerted(at("late", OUTCOME), at("early", SIGNAL, "b")) == ["early"]
    assert alerted(at("late", OUTCOME, "a"), at("early", WIRING, None, "error")) == ["early"]
    assert alerted(at("late", OUTCOME, "a"), at("early", WIRING, None)) == ["early", "late"]


def test_signals_are_facts_of_their_own_unless_one_side_names_the_other() -> None:
    assert alerted(at("signal", SIGNAL, "a"), at("wire", WIRING, "a", "error")) == ["wire", "signal"]
    assert alerted(at("signal", SIGNAL, "a", yields_to=frozenset({"wire"})), at("wire", WIRING)) == ["wire"]
    assert alerted(at("signal", SIGNAL, "a"), at("wire", WIRING, explains=frozenset({"signal"}))) == ["wire"]
    yields = {"yields_to_errors": frozenset({"wire"})}
    assert alerted(at("signal", SIGNAL, "a", **yields), at("wire", WIRING)) == ["wire", "signal"]
    assert alerted(at("signal", SIGNAL, "a", **yields), at("wire", WIRING, None, "error")) == ["wire"]


def test_numbers_that_are_none_silence_all() -> None:
    assert alerted(at("wire", WIRING), at("signal", SIGNAL), at("bad", NUMBERS, None, "error")) == ["bad"]


def test_a_new_cause_silences_old_outcomes_and_is_asked_after_the_others_of_its_level() -> None:
    detectors = DetectorSet(WatchConfig(), further=[HeadNorm]).detectors
    place = [detector.kind for detector in detectors].index("head_norm")
    assert {detector.level for detector in detectors[:place]} == {NUMBERS, WIRING, SIGNAL}
    assert {detector.level for detector in detectors[place + 1 :]} == {OUTCOME}


OLD = {
    "parameters_not_optimized": "stale_parameters",
    "gradient_accumulates": "stale_parameters parameters_not_optimized",
    "dead_units": "token_collapse",
    "stream_collapse": "token_collapse",
    "solver_cost": "solver_unconverged",
    "vanishing_gradient": "no_gradient symmetry token_collapse! dead_units!",
    "exploding_gradient": "mixing_gain loss_spike update_too_large",
    "representation_collapse": "token_collapse vanishing_gradient symmetry! dead_units!",
    "rank_collapse": "token_collapse vanishing_gradient symmetry! representation_collapse dead_units!",
    "constant_output": "token_collapse vanishing_gradient symmetry! representation_collapse rank_collapse dead_units! "
    "no_gradient!",
    "update_too_small": "stale_parameters over_clipped vanishing_gradient dead_units no_gradient",
    "loss_plateau": "stale_parameters parameters_not_optimized no_gradient gradient_accumulates vanishing_gradient "
    "exploding_gradient update_too_small update_too_large over_clipped dead_units saturation symmetry "
    "representation_collapse token_collapse rank_collapse constant_output",
}
"""What explained what when each detector listed its causes, as errors only where marked; symmetry is always one."""


@pytest.mark.parametrize("effect", OLD)
def test_what_the_lists_of_causes_said_still_holds(effect: str) -> None:
    flow = None if effect in ("constant_output", "update_too_small", "loss_plateau") else "a"
    of_model = {"stale_parameters", "parameters_not_optimized", "symmetry", "over_clipped"}
    by_kind = {kind(WatchConfig()).name: kind for kind in DETECTORS}
    for cause in OLD[effect].split():
        kind, severity = cause.rstrip("!"), "error" if cause.endswith("!") else "warning"
        others = {other.kind: other.level for other in DETECTORS}
        names = [name for name, found in by_kind.items() if found.kind == effect]
        explained = []
        for name in names:
            yields = {key: getattr(by_kind[name], key) for key in ("yields_to", "yields_to_errors")}
            late = at(effect, by_kind[name].level, flow, **yields)
            early = at(kind, others[kind], None if kind in of_model else "a", severity)
            explained.append(alerted(early, late) == [kind])
        assert any(explained), (effect, cause)


# -- Limit -------------------------------------------------------------------------------------------------------------


class Small(Limit):
    kind, metric, below, row, tells = "small", "norm_gap", 0.1, "module", "first"
    from_step, severity = 2, "error"


def gaps(step: int, *values: float) -> Record:
    return record(step, norm_gap=values)


def test_a_limit_warms_up_names_a_row_and_resolves_well_inside() -> None:
    def alerts(series: Iterable[float]) -> list[flowscope.Alert]:
        found, head = DetectorSet(WatchConfig(), [], [Small]), header()
        return [a for step, value in enumerate(series) for a in found.check(gaps(step, 5.0, value, 0.01), head)]

    raised, resolved = alerts([0.05] * 5 + [0.05, 9.0, NAN, 9.0])[0], alerts([0.05] * 6)
    assert told([raised]) == [("small", "module 1", 3, "raised")]  # judged from step 2 on, on two records
    assert (raised.value, raised.limit, raised.severity) == (0.05, 0.1, "error")
    assert raised.message == "module 1 is at 0.05 (limit 0.1; 2 of 3 rows are beyond it)"
    assert len(resolved) == 1


def test_near_and_unseen_rows_keep_an_alert() -> None:
    found, head = DetectorSet(WatchConfig(), [], [Small]), header()
    series = [0.05] * 4 + [0.2] * 5 + [NAN] * 5 + [0.4, NAN, 0.4, 0.4]
    alerts = [a for step, value in enumerate(series) for a in found.check(gaps(step, value), head)]
    assert [(a.step, a.state) for a in alerts] == [(3, "raised"), (17, "resolved")]


def test_a_record_without_units_counts_for_nothing_after_loading_either() -> None:
    def dead(step: int, *values: float) -> Record:
        item = record(step, dead_lasting=values) if values else record(step)
        item.metric_labels = {**item.metric_labels, "dead_lasting": ("encoder.0.relu",)}
        return item

    head, first, second = header(layout("encoder", 3)), DetectorSet(WatchConfig()), DetectorSet(WatchConfig())
    assert first.check(dead(0, 0.8), head) == []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    alerts = [a for item in (dead(1), dead(2), dead(3, 0.8)) for a in second.check(item, head)]
    assert [(a.step, a.since) for a in alerts] == [(3, 0)]


# -- state -------------------------------------------------------------------------------------------------------------


def test_states_of_0_1_load() -> None:
    """The form in which each detector wrote its own state."""
    old = {
        "vanishing_gradient": {"best": {"blocks": [1.0, None, "inf"]}, "last": {}, "zero_start": {"blocks": False}},
        "exploding_gradient": {"first_norms": {"blocks": [1.0, 2.0, 3.0]}, "zero": ["decoder"]},
        "representation_collapse": {"cosines": {"blocks": [[0.5, 0.6], [0.5, 0.7]]}, "to_input": {"blocks": 0.4},
                                    "widest": {"blocks": 0.9}, "sizes": {}, "common": {"blocks": [[0.1], [0.2]]}},
        "loss_spike": {"window": [2.0] * 100, "last": [2.0] * 4, "first": [2.0] * 5, "rates": [0.1], "peak": 0.1,
                       "outside": 0},
        "loss_plateau": {"window": [2.0] * 50, "rate": {"peak": 0.1, "last": None}, "seen": 50},
        "update_too_large": {"largest": None, "course": {}},
        "solver_cost": {"first": [[10.0], [11.0]]},
        "unknown": {"a": 1},
    }  # fmt: skip
    detectors = DetectorSet(WatchConfig())
    detectors.load_state_dict({"ledger": [], "detectors": old})
    states = {detector.name: detector.state for detector in detectors.detectors}
    np.testing.assert_array_equal(states["vanishing_gradient"]["best"]["blocks"], [1.0, NAN, np.inf])
    assert states["representation_collapse"]["cosines"]["blocks"].shape == (2, 2)
    assert states["loss_spike"]["window"].maxlen == 100
    assert len(states["loss_spike"]["window"]) == 100
    rng = np.random.default_rng(0)
    series = [record(s, step_losses=2 + 0.1 * rng.standard_normal(5), solver_nfe=[10.0]) for s in range(30)]
    assert [alert for item in series for alert in detectors.check(item, header())] == []
    assert detectors.faults.failed == {}
