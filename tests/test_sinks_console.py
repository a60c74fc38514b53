"""The console sink, sparklines and side-by-side profiles."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, FlowLayout, Record, RunHeader
from flowscope.sinks import ConsoleSink, depth_profile_text, sparkline
from flowscope.sinks.binning import bin_means, log10
from flowscope.sinks.console import is_terminal, record_line


def make_record(product: list[float] | np.ndarray, **others: np.ndarray) -> Record:
    labels = {"gradient_product": tuple(f"layers.{i}" for i in range(len(product)))}
    metrics = {"gradient_product": np.asarray(product, dtype=float), **others}
    return Record(20, 2.3456, metrics, flow_names=("layers",), metric_labels=labels)


ALERT = Alert("dead_units", "warning", "layers.2", 20, 0.99, 0.9, "99 % of units are dead", "lower the learning rate")


def test_what_followed_another_alert_is_folded_below_it() -> None:
    later = replace(
        ALERT, kind="loss_spike", where="", message="the loss rose; first: dead_units at layers.2 (step 18)"
    )
    out = io.StringIO()
    sink = ConsoleSink(out)
    for alert in (ALERT, later, replace(later, state="resolved")):
        sink.write(alert)
    assert out.getvalue().splitlines() == [
        "[warning] step 20: dead_units at layers.2: 99 % of units are dead -> lower the learning rate",
        "    then [warning] step 20: loss_spike: the loss rose",
        "[warning] step 20: loss_spike resolved",
    ]


def test_sparkline_by_hand() -> None:
    # eight decades on eight levels
    assert sparkline([10.0**k for k in range(-7, 1)]) == "▁▂▃▄▅▆▇█"
    # linear from 0: 0.5 of seven steps is 3.5, rounded half to even to level 4
    assert sparkline([0.0, 0.5, 1.0], log=False) == "▁▅█"
    # linear with negative values starts at the smallest: 1/2 -> level 4, 1/7 * 7 -> level 1
    assert sparkline([-1.0, 0.0, 1.0], log=False) == "▁▅█"
    assert sparkline([0.0, 1.0, 7.0], log=False) == "▁▂█"
    # less than a decade is drawn on one: 0.3 decades below the top of 7 steps is 7 - 2.1 = 4.9 -> level 5
    assert sparkline([10**-0.3, 1.0]) == "▆█"
    assert sparkline([1.0, 1.0, 1.0]) == "███"
    assert sparkline([np.nan, 0.0, 1e-3, 1.0, np.inf, -1.0]) == "·▁▁██·"
    assert sparkline([np.nan, np.nan, np.nan]) == "···"
    assert sparkline([0.0, 0.0, 0.0]) == "▁▁▁"
    assert sparkline([]) == ""
    assert sparkline([10.0**k for k in range(-7, 1)], ascii_only=True) == "_.-=+*%#"


def test_sparkline_bins_depth() -> None:
    # pairs: geometric means 1e-7 ... 1e0 of (2x, x/2); NaN is left out
    pairs = np.array([[2 * 10.0**k, 10.0**k / 2] for k in range(-7, 1)])
    assert sparkline(pairs.reshape(-1), width=8) == "▁▂▃▄▅▆▇█"
    pairs[:, 1] = np.nan
    pairs[:, 0] /= 2
    pairs[3] = np.nan
    assert sparkline(pairs.reshape(-1), width=8) == "▁▂▃·▅▆▇█"
    assert len(sparkline(np.ones(1025))) == 40
    assert len(sparkline(np.ones(41))) == 40
    assert len(sparkline(np.ones(39))) == 39


def test_bin_means_against_array_split() -> None:
    values = np.random.default_rng(0).standard_normal((23, 3))
    values[5] = np.nan
    edges = [23 * i // 7 for i in range(1, 7)]
    want = [np.nanmean(part, axis=0) for part in np.split(values, edges)]
    np.testing.assert_allclose(bin_means(values, 7), want)
    assert bin_means(values, 23) is values


def test_log10_has_no_warnings() -> None:
    got = log10([[100.0, 0.0], [-1.0, np.nan]])
    np.testing.assert_array_equal(got, [[2.0, -np.inf], [np.nan, np.nan]])


def test_a_record_is_one_line() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    deep = 10.0 ** np.linspace(-12.3, 0, 1025)
    sink.write(make_record(deep, cosine_matrix=np.ones((128, 128)), gain=np.ones(1024)))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0] == ("step     20  loss     2.346  log10 least product -12.3 at layers.0  " + sparkline(deep))
    for record in (Record(3), Record(3, float("nan"), {"gain": np.ones(3)}, ("skipped",)), make_record([np.nan] * 4)):
        before = len(stream.getvalue().splitlines())
        sink.write(record)
        assert len(stream.getvalue().splitlines()) == before + 1
    assert "[skipped]" in stream.getvalue()
    assert "not seen" in stream.getvalue()


def test_alerts_in_full_and_records_only_where_asked() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, records=False)
    header = RunHeader("0.1", (FlowLayout("layers", "blocks", ("a", "b", "c"), ("b", "c")),), {})
    for event in (header, make_record([1.0, 1.0, 1.0]), ALERT):
        sink.write(event)
    assert stream.getvalue() == f"{ALERT}\n"
    for part in ("warning", "dead_units", "layers.2", "99 % of units are dead", "lower the learning rate"):
        assert part in stream.getvalue()
    stream = io.StringIO()
    ConsoleSink(stream).write(header)
    assert stream.getvalue().startswith("flowscope 0.1: layers (2 blocks)")


def test_a_stream_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    sink = ConsoleSink(io.TextIOWrapper(raw, encoding="ascii"))
    sink.write(make_record([1e-7, np.nan, 1.0]))
    sink.write(Alert("vanishing_gradient", "error", "блок", 1, 0.0, 0.0, "≤ limit", "advice"))
    text = raw.getvalue().decode("ascii")
    assert "  _ #\n" in text
    assert "????: ? limit -> advice" in text


def test_default_stream_is_the_stdout_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink()
    sink.write(ALERT)
    assert capsys.readouterr().out == f"{ALERT}\n"
    sink.close()
    sink.write(ALERT)
    assert capsys.readouterr().out == ""


def test_without_stdout_it_is_silent_until_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = ConsoleSink()
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", None)
        sink.write(ALERT)
    assert capsys.readouterr() == ("", "")
    sink.write(ALERT)
    assert capsys.readouterr() == (f"{ALERT}\n", "")


def test_profiles_side_by_side_by_hand() -> None:
    records = {"post": make_record([1e-4, 1e-2, 1.0]), "pre": make_record([1.0, np.nan, 0.0])}
    # one scale of four decades and 12 characters: 0, 2 and 4 decades are a trace, 6 and 12 characters
    assert depth_profile_text(records, "gradient_product").split("\n") == [
        "gradient_product (input first; bars: log10 -4 to 0)",
        "depth  post                  pre",
        "    0    0.0001 ▏                   1 ████████████",
        "    1      0.01 ██████              -",
        "    2         1 ████████████        0 ▏",
    ]
    ascii_text = depth_profile_text(records, "gradient_product", ascii_only=True)
    assert ascii_text.isascii()
    assert "1      0.01 ######" in ascii_text


def test_profiles_linear_metrics() -> None:
    records = {"a": make_record([1.0, 1.0], cosine=np.array([0.5, 1.0]))}
    lines = depth_profile_text(records, "cosine").split("\n")
    assert lines[0] == "cosine (input first; bars: 0 to 1)"
    assert [line.count("█") for line in lines[2:]] == [6, 12]


def test_deep_profiles_keep_both_ends_and_few_rows() -> None:
    deep, shallow = 10.0 ** np.linspace(-8, 0, 1025), np.array([3.0, 2.0, 1.0])
    lines = depth_profile_text({"deep": make_record(deep), "shallow": make_record(shallow)}, "gradient_product").split(
        "\n"
    )
    assert len(lines) == 2 + 14
    assert lines[2].split()[:2] == ["0", "1e-08"]
    assert lines[2].split()[3] == "3"
    assert lines[-1].split()[:2] == ["1024", "1"]
    assert lines[-1].split()[3] == "1"


def test_profiles_refuse_what_they_cannot_show() -> None:
    with pytest.raises(FlowscopeError, match="no records"):
        depth_profile_text({}, "gain")
    with pytest.raises(FlowscopeError, match="no metric 'gain'"):
        depth_profile_text({"a": make_record([1.0, 2.0])}, "gain")
    matrix = make_record([1.0, 2.0], cosine_matrix=np.ones((2, 2)))
    with pytest.raises(FlowscopeError, match=r"shape \(2, 2\)"):
        depth_profile_text({"a": matrix}, "cosine_matrix")


class Terminal(io.StringIO):
    """A terminal that keeps what was written."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def test_a_terminal_gets_colours_that_fit_it(terminal: Terminal) -> None:
    pytest.importorskip("rich", reason="pip install rich (extra 'rich'): coloured lines are untested without it")
    sink = ConsoleSink(terminal)
    sink.write(make_record(10.0 ** np.linspace(-12.3, 0, 1025)))
    sink.write(ALERT)
    sink.write(replace(ALERT, state="resolved"))
    record, raised, resolved = terminal.getvalue().splitlines()
    # 100 columns less the one left free, the words (14 + 2 + 14 + 2 + 38 + 2 before the sparkline) and no flag
    assert len(record) == 99
    assert record.startswith("step     20  loss     2.346  log10 least product -12.3 at layers.0  ▁")
    assert raised == f"\x1b[33m{ALERT}\x1b[0m", "yellow for a warning, in one line however long"
    assert resolved == f"\x1b[32m{replace(ALERT, state='resolved')}\x1b[0m"


def test_a_narrow_terminal_keeps_a_sparkline(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert record_line(make_record(np.ones(64)), columns=20).endswith("  " + "█" * 8)
    ConsoleSink(terminal).write(make_record(np.ones(64)))
    assert len(terminal.getvalue().splitlines()) == 1


def test_a_terminal_without_rich_or_colours_gets_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "rich.console", None)  # what an import finds where rich is not installed
        ConsoleSink(terminal).write(ALERT)
    monkeypatch.setenv("TERM", "dumb")
    ConsoleSink(terminal).write(ALERT)
    assert terminal.getvalue() == f"{ALERT}\n{ALERT}\n"


def test_a_log_file_gets_plain_lines_and_no_control_characters() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink.write(make_record(10.0 ** np.linspace(-3, 0, 9)))
    sink.write(replace(ALERT, where="a\rb\nc"))
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert "\r" not in text
    assert "\x1b" not in text
    assert "at a b c: " in text


def test_above_a_live_progress_bar(terminal: Terminal) -> None:
    tqdm = pytest.importorskip("tqdm", reason="pip install tqdm: the company of progress bars is untested without it")
    file, bars = io.StringIO(), io.StringIO()
    on_terminal, in_file = ConsoleSink(terminal), ConsoleSink(file)
    with tqdm.tqdm(total=3, file=terminal, mininterval=0, miniters=1) as bar:
        shown = len(terminal.getvalue())
        on_terminal.write(make_record(np.ones(4)))
        assert terminal.getvalue()[shown:] == "", "records keep silent beside a bar on a terminal"
        in_file.write(make_record(np.ones(4)))
        on_terminal.write(ALERT)
        bar.update()
    text = terminal.getvalue()[shown:]
    before, line, after = text.partition(re.search(r"(\x1b\[33m)?\[warning\][^\n]*\n", text)[0])
    assert before.startswith("\r")
    assert before.strip() == "", "the bar was wiped before the alert"
    assert str(ALERT) in line
    assert "\r" not in line
    assert "0/3" in after, "the bar stands again below it"
    assert file.getvalue() == record_line(make_record(np.ones(4))) + "\n", "a log file has a line a record all the same"
    on_terminal.write(make_record(np.ones(4)))
    assert "step     20" in terminal.getvalue()[shown:], "after the bar, records are printed again"
    with tqdm.tqdm(total=3, file=bars, disable=True):
        on_terminal.write(make_record(np.ones(4)))
    assert terminal.getvalue().count("step     20") == 2, "a disabled bar is no company"
    assert bars.getvalue() == ""


def test_tqdm_is_not_imported_for_the_question() -> None:
    code = """
import sys
from flowscope.records import Record
from flowscope.sinks import ConsoleSink
ConsoleSink().write(Record(3))
assert "tqdm" not in sys.modules and "rich" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "step      3  loss         -\n"


def test_a_stream_that_is_closed_is_no_terminal() -> None:
    stream = Terminal()
    stream.close()
    assert not is_terminal(io.TextIOWrapper(io.BytesIO()))
    assert not is_terminal(object())
    with pytest.raises(ValueError, match="closed"):
        ConsoleSink(stream).write(ALERT)
