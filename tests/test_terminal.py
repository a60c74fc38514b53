"""What a run's files say reaches a terminal as text, whatever they say: in each view."""

from __future__ import annotations

import io
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from flowscope.actions import Log
from flowscope.cli import main
from flowscope.detectors import Detector, Finding
from flowscope.live import LiveView, follow, show
from flowscope.parting import bisection
from flowscope.records import Alert, FlowLayout, Record, RunHeader
from flowscope.sinks import ConsoleSink, JsonlSink, depth_profile_text
from flowscope.terminal import LONGEST, block, shown, tell
from flowscope.trials import CheckReport, TrialFinding

TITLE = "\x1b]0;owned\x07"
HIDE = "\x1b[1A\x1b[2K"
FORGED = "x\nflowscope: all is well"
ORDERS = [chr(code) for code in (*range(32), *range(127, 160)) if chr(code) != "\n"]


def hostile(name: str) -> str:
    return f"{name}{TITLE}{HIDE}\x9b31m\u202e\r"


FLOWS = (FlowLayout(hostile("flow"), hostile("kind"), (hostile("a"), FORGED), (FORGED,)),)
LABELS = {"gradient_product": (hostile("a"), FORGED), "param_grad_norm": (hostile("w"), "v")}
HEADER = RunHeader(hostile("9"), FLOWS, LABELS, coverage=hostile("coverage:"))
METRICS = {
    "gradient_product": np.array([1e-5, 1.0]),
    "param_grad_norm": np.array([np.nan, 1.0]),
    "param_trainable": np.array([1.0, 1.0]),
}
RECORD = Record(3, 0.5, METRICS, (hostile("flag"),), (hostile("note"),), (FLOWS[0].name,), LABELS)
ALERT = Alert(hostile("kind"), "error", hostile("where"), 3, 1.0, 2.0, hostile("message"), FORGED)


def write_run(folder: Path) -> Path:
    sink = JsonlSink(folder)
    for event in (HEADER, RECORD, ALERT):
        sink.write(event)
    sink.close()
    return folder


def assert_is_text(told: str) -> None:
    assert "owned" in told  # the name is there, as text
    assert not [order for order in (*ORDERS, "\u202e") if order in told]
    assert "\nflowscope: all is well" not in told


def test_shown_writes_out_what_a_terminal_would_obey() -> None:
    assert shown("a\x1b[2Jb") == r"a\x1b[2Jb"
    assert shown("line\nother\r\t\x07\x9b\u202e\ud800") == r"line\nother\r\t\x07\x9b\u202e\ud800"
    plain = "blocks.0 at 3 ▁▂█·, ünï 模型 \\x1b"
    assert shown(plain) == plain
    assert block(["a\nb", "c"]) == "a\\nb\nc"
    assert shown("x" * LONGEST) == "x" * LONGEST
    assert shown("x" * (LONGEST + 7)) == "x" * LONGEST + " ... and 7 characters more"


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(write_run(tmp_path))]) == 0
    assert_is_text(capsys.readouterr().out)


def test_console_sink() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    for event in (HEADER, RECORD, ALERT):
        sink.write(event)
    assert_is_text(stream.getvalue())
    assert len(stream.getvalue().splitlines()) == 3


def test_both_views_of_live(tmp_path: Path) -> None:
    (events,) = itertools.islice(follow(write_run(tmp_path)), 1)
    stream, view = io.StringIO(), LiveView()
    show([events], stream)
    for event in events:
        view.write(event)
    assert_is_text(stream.getvalue())
    assert_is_text(view.text(80))


class Echo(Detector):
    """Says what the record calls its rows."""

    kind = "echo"

    def findings(self, record: Record, header: RunHeader) -> list[Finding]:
        return [self.found(record.labels("param_grad_norm")[0], 2.0, 1.0, hostile("message"), certain=True)]


def test_diagnose(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "echo", sys.modules[__name__])
    assert main(["diagnose", str(write_run(tmp_path)), "--detector", "echo:Echo"]) == 1
    assert_is_text(capsys.readouterr().out)


def test_compare_and_bisect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, model in (("a", "Net"), ("b", hostile("Net"))):
        sink = JsonlSink(tmp_path / name)
        weights = {"parameters": {hostile("w"): [2]}, "weights": {hostile("w"): len(model)}, "model": model}
        sink.write(RunHeader("9", FLOWS, LABELS, setup=weights))
        sink.write(RECORD)
        sink.close()
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", *runs, "-o", str(tmp_path / "page.html")]) == 0
    assert_is_text(capsys.readouterr().out)
    found = type("Found", (), {"phase": None, "__str__": lambda self: hostile("part")})()
    monkeypatch.setattr(bisection, "bisect", lambda *_, **__: found)
    assert main(["bisect", *runs]) == 0
    assert_is_text(capsys.readouterr().out)


def test_names_of_folders_in_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / f"run{TITLE}")
    assert main(["summary", str(tmp_path)]) == 1
    assert_is_text(capsys.readouterr().err)


def test_profiles_side_by_side() -> None:
    assert_is_text(depth_profile_text({hostile("run"): RECORD}))


def test_logged_alerts(caplog: pytest.LogCaptureFixture) -> None:
    Log()(ALERT)
    assert_is_text(caplog.records[0].getMessage())


def test_nobody_is_told_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    tell("words")
    closed = io.StringIO()
    closed.close()
    tell("words", closed)
    monkeypatch.undo()
    tell("two\nlines\x1b")
    assert capsys.readouterr() == ("", "two\nlines\\x1b\n")


def test_what_trials_found_is_text_in_a_terminal() -> None:
    finding = TrialFinding("saving", "fail", hostile("module"), f"{hostile('message')}\n{FORGED}", hostile("advice"))
    told = str(CheckReport((finding,)))
    assert_is_text(told)
    assert len(told.splitlines()) == 4  # head, finding, advice, counts
