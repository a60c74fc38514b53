"""The story of several alerts, and a recorded run judged again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from detector_records import play, record, slope
from torch import nn

import flowscope
from flowscope.cli import main
from flowscope.config import WatchConfig
from flowscope.detectors import Detector, DetectorSet, Finding
from flowscope.detectors import replay as judging
from flowscope.detectors.replay import replay
from flowscope.diagnosis import LISTED, diagnose, follows, incidents, story
from flowscope.records import Alert, Record, RunHeader
from flowscope.sinks import read_run
from flowscope.sinks.jsonl import encode_event

ROOT = Path(__file__).resolve().parents[1]


def alert(kind: str, step: int, since: int | None = None, **changes: object) -> Alert:
    own = {"severity": "error", "where": f"blocks.{step}", "state": "raised", "flow": None, "advice": f"mend {kind}"}
    fields = {**own, **changes}
    return Alert(kind, step=step, since=since, value=1.0, limit=2.0, message="it is so", **fields)  # type: ignore[arg-type]


LATE = alert("loss_plateau", 30, since=29)
FIRST = alert("token_collapse", 40, since=4)
NOTE = alert("no_gradient", 2, severity="info")


def test_the_order_is_that_in_which_conditions_began() -> None:
    assert story([LATE, FIRST, NOTE]) == (
        "first: no_gradient at blocks.2 (step 2); then: token_collapse at blocks.40 (step 4); "
        "then: loss_plateau at blocks.30 (step 29)"
    )
    assert story([LATE, NOTE]) == "first: no_gradient at blocks.2 (step 2); then: loss_plateau at blocks.30 (step 29)"
    after = alert("no_gradient", 31, severity="info")
    wanted = alert("no_gradient", 0, severity="info", advice="nothing to do if they are meant to be")
    assert story([LATE, after, wanted]) is None  # what came later, or is only described, explains nothing
    assert follows(LATE, [FIRST, LATE]) == "; first: token_collapse at blocks.40 (step 4)"
    assert follows(LATE, [FIRST, LATE, NOTE]) == "; first: no_gradient at blocks.2 (step 2)"
    assert follows(FIRST, [FIRST, LATE]) == ""
    assert follows(NOTE, [FIRST]) == ""


def test_resolved_alerts_close_their_own_incident() -> None:
    other = alert("token_collapse", 41, flow="encoder")
    closed = alert("token_collapse", 40, since=4, state="resolved")
    again = alert("token_collapse", 40, since=50)
    assert [incident.resolved for incident in incidents([FIRST, other, closed, again])] == [40, None, None]


def test_diagnosis_text() -> None:
    assert diagnose([]) == "no alert stands"
    assert diagnose([FIRST, alert("token_collapse", 40, state="resolved")]) == "no alert stands (1 resolved)"
    assert diagnose([LATE]) == str(LATE)
    lines = diagnose([LATE, FIRST]).splitlines()
    assert lines[0].startswith("diagnosis: first: token_collapse")
    assert lines[1:3] == [str(FIRST), "  then loss_plateau at blocks.30 (step 29): it is so"]
    assert lines[3] == "begin with token_collapse at blocks.40 (step 4)"


def test_of_very_many_alerts_the_most_serious_are_told() -> None:
    notes = [alert(f"note{number}", number, severity="info") for number in range(5000)]
    error = alert("non_finite", 4000, severity="error")
    lines = diagnose([*notes[:4000], error, *notes[4000:]]).splitlines()
    assert "  then non_finite at blocks.4000 (step 4000): it is so" in lines
    # infos up to its step may have caused it: the first is told in full; those after it stand beside
    assert f"  ... and {4000 + 1 - LISTED} more" in lines
    assert f"  ... and {999 - LISTED} more" in lines
    assert len(lines) == 2 + (LISTED + 1) + (LISTED + 1) + 1


class Counts(Detector):
    kind = "counts"

    def findings(self, record: Record, header: RunHeader) -> list[Finding]:
        self.state.setdefault("steps", []).append(record.step)
        return []


def test_of_very_many_records_each_nth_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judging, "JUDGED", 5)
    own = Counts()
    replay(RunHeader(), [Record(step) for step in range(12, -1, -1)], WatchConfig(), [own])
    assert own.state["steps"] == [0, 3, 6, 9, 12]
    assert [judging.stride(count) for count in (0, 1, 5, 6, 10, 11)] == [1, 1, 1, 2, 2, 3]
    (tmp_path / "flowscope.jsonl").write_bytes(b"".join(encode_event(Record(step)) for step in range(13)))
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "13 records, steps 0 to 12; one of 3 is judged" in capsys.readouterr().out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.inner(x))


def train(
    model: nn.Module, scope: flowscope.Scope, optimizer: torch.optim.Optimizer, steps: int, bad: int = -1
) -> None:
    for step in range(steps):
        x = torch.randn(4, 6)
        x[0, 0] = float("nan") if step == bad else 0.5
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss.detach())
    scope.close()


def deep_sigmoid(folder: Path, steps: int, bad: int = -1) -> flowscope.Scope:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(9)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = flowscope.watch(model, optimizer, log_dir=folder, config={"console": "off"})
    train(model, scope, optimizer, steps, bad)
    return scope


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['torch'] = None; from flowscope.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, "diagnose", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


def test_a_replay_says_what_the_run_said(tmp_path: Path) -> None:
    scope = deep_sigmoid(tmp_path, 13)
    run = read_run(tmp_path)
    assert run.header is not None
    alerts, detectors = replay(run.header, [*run.records, *run.unsampled], WatchConfig(console="off"))
    live = [(a.kind, a.where, a.step, a.severity, a.state) for a in scope.alerts]
    assert live
    assert [(a.kind, a.where, a.step, a.severity, a.state) for a in alerts] == live
    assert "vanishing_gradient" in {a.kind for a in detectors.standing}


def test_diagnose_exit_status_and_limits(tmp_path: Path) -> None:
    deep_sigmoid(tmp_path / "lost", 13)
    result = command(tmp_path / "lost")
    assert (result.returncode, result.stderr) == (1, "")
    assert "vanishing_gradient" in result.stdout

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scope = flowscope.watch(model, optimizer, log_dir=tmp_path / "fine", config={"console": "off"})
    train(model, scope, optimizer, 13)
    assert command(tmp_path / "fine").returncode == 0
    # the product of any chain is below a limit of 1000 somewhere: the last point's is 1
    other = command(tmp_path / "fine", "--json", "--set", "vanishing_product=1000")
    assert other.returncode == 1, other.stdout + other.stderr
    assert "vanishing_gradient" in {json.loads(line)["kind"] for line in other.stdout.splitlines()}


@pytest.mark.parametrize("wrong", [["--set", "vanishing=1"], ["--set", "drift"], ["--set", "drift=x"], []])
def test_diagnose_wrong_calls(tmp_path: Path, wrong: list[str]) -> None:
    if wrong:
        deep_sigmoid(tmp_path, 2)
    result = command(tmp_path, *wrong)
    assert (result.returncode, result.stdout) == (2, "")
    assert (wrong[-1].partition("=")[0] if wrong else "flowscope.jsonl") in result.stderr


def test_a_bad_step_between_samples_is_judged_again_too(tmp_path: Path) -> None:
    scope = deep_sigmoid(tmp_path, 25, bad=15)
    live = [a for a in scope.alerts if a.kind == "non_finite"]
    assert [a.step for a in live] == [15]
    run = read_run(tmp_path)
    # weights are NaN ever after: one line between two sampled records, not one a step; the bad loss asks for step 16
    assert [r.step for r in run.records][10:] == [10, 16, 20]
    assert [r.step for r in run.unsampled] == [15, 17, 21]
    assert not {r.step for r in run.records} & {r.step for r in run.unsampled}
    assert run.header is not None
    alerts, _ = replay(run.header, [*run.records, *run.unsampled], WatchConfig())
    assert [(a.step, a.message) for a in alerts if a.kind == "non_finite"] == [(a.step, a.message) for a in live]


def test_the_message_of_a_later_alert_names_the_first() -> None:
    lost = [record(step, {**slope(1e-9), "token_cosine": [0.1] * 7}) for step in range(3)]
    bad = record(3, slope(1e-9), canary=(0, 1, 0, 0), loss=float("nan"))
    found = play([*lost, bad])
    assert [a.kind for a in found][:2] == ["vanishing_gradient", "non_finite"]
    assert "first:" not in found[0].message
    assert found[1].message.endswith(f"; first: vanishing_gradient at {found[0].where} (step 0)")


def test_of_two_alerts_of_one_record_only_the_later_names_the_other() -> None:
    config = WatchConfig()

    class At(Detector):
        def __init__(self, kind: str) -> None:
            super().__init__(config)
            self.kind = kind  # type: ignore[misc]

        def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
            yield Finding(self.kind, "", "error", 2.0, 1.0, f"{self.kind} is beyond", "", immediate=True)

    detectors = DetectorSet(config, [At("cause"), At("effect")])
    first, second = detectors.check(Record(step=5, metrics={}), RunHeader("0", (), {}))
    assert first.message == "cause is beyond"
    assert second.message == "effect is beyond; first: cause (step 5)"
