"""The command line, in processes of its own: what it prints, writes and returns; and the live view."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

from flowscope import cli
from flowscope.errors import FlowscopeError
from flowscope.live import LiveView, follow, show
from flowscope.records import Alert, Event, FlowLayout, Record, RunHeader
from flowscope.sinks import JsonlSink, reading
from flowscope.sinks.jsonl import FILE_NAME, encode_event

ROOT = Path(__file__).resolve().parents[1]
POINTS = ("b.0:input", "b.0", "b.1")
HOSTILE = "<img src=x onerror=alert(1)>"
ALERT = Alert("vanishing_gradient", "error", "b.0", 10, 1e-5, 1e-3, "the gradient is lost", "lower the learning rate")


def events(scale: float = 1.0, label: str = "b.0:input") -> list[Event]:
    points = (label, *POINTS[1:])
    header = RunHeader("0.1.0", (FlowLayout("b", "blocks", points, POINTS[1:]),), {"gradient_product": points})
    records = [
        Record(step, 3.0 - step / 10, {"gradient_product": np.array([scale * 1e-5, 1e-2, 1.0])}) for step in (0, 5, 10)
    ]
    return [header, *records, ALERT]


def write_run(folder: Path, scale: float = 1.0, label: str = "b.0:input") -> Path:
    sink = JsonlSink(folder)
    for event in events(scale, label):
        sink.write(event)
    sink.close()
    return folder


def run(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    # torch that cannot be imported: the command must do without
    code = "import sys; sys.modules['torch'] = None; from flowscope.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )


# -- summary


def test_summary(tmp_path: Path) -> None:
    result = run("summary", write_run(tmp_path / "a"))
    assert (result.returncode, result.stderr) == (0, "")
    *lines, covered = result.stdout.splitlines()
    assert covered.startswith("coverage: 3 records; loss on all; ")
    assert lines == [
        "flowscope: 3 records, last at step 10, loss 2",
        "  b (blocks, 3 points): gradient product ▁▅█ least 1e-05 at b.0:input",
        f"  {ALERT}",
    ]


def test_summary_of_a_run_that_gained_a_parameter(tmp_path: Path) -> None:
    missing, early, late = np.nan, {"param_trainable": np.ones(2)}, {"param_trainable": np.ones(3)}
    names, joined = ("first", "second"), ("new", "first", "second")
    sink = JsonlSink(tmp_path)
    sink.write(RunHeader("0.1", labels={"param_grad_norm": names}))
    sink.write(Record(0, 1.0, {"param_grad_norm": np.array([1.0, missing]), **early}))
    sink.write(RunHeader("0.1", labels={"param_grad_norm": joined}))
    sink.write(Record(1, 1.0, {"param_grad_norm": np.array([missing, missing, missing]), **late}))
    sink.close()
    done = run("summary", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "never got a gradient: new, second" in done.stdout


def test_the_module_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flowscope", "summary", str(write_run(tmp_path) / FILE_NAME)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60, check=True)
    assert "least 1e-05 at b.0:input" in result.stdout


def test_summary_where_bars_cannot_be_shown(tmp_path: Path) -> None:
    result = run("summary", write_run(tmp_path), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0
    assert "gradient product ??? least 1e-05" in result.stdout


def test_summary_of_a_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()
    result = run("summary", tmp_path)
    assert result.returncode == 0
    assert "no record yet" in result.stdout


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    write_run(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "flowscope", "summary", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


# -- report, compare


def test_report(tmp_path: Path) -> None:
    write_run(tmp_path / "a", label=HOSTILE)
    result = run("report", "a", "-o", "out/a.html", "--title", f"mine {HOSTILE}", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    page = (tmp_path / "out/a.html").read_text()
    assert result.stdout.startswith(str(Path("out/a.html")))
    assert "<title>mine &lt;img src=x onerror=alert(1)&gt;</title>" in page
    assert "<img src=x" not in page
    assert "vanishing_gradient" in page
    assert "lower the learning rate" in page


def test_report_has_defaults(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    assert run("report", "a", cwd=tmp_path).returncode == 0
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_compare(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run", scale=1e4)
    result = run("compare", a, b, "-o", tmp_path / "c.html")
    assert (result.returncode, result.stderr) == (0, "")
    page = (tmp_path / "c.html").read_text()
    assert "x/run" in page
    assert "y/run" in page


def test_run_names() -> None:
    assert cli.run_names(["/r/a", "/r/b/flowscope.jsonl"]) == ["a", "b"]
    assert cli.run_names(["/r/a/1", "/r/b/1", "/s/b/1"]) == ["r/a/1", "r/b/1", "s/b/1"]
    assert cli.run_names(["/r"]) == ["r"]
    with pytest.raises(FlowscopeError, match="same run"):
        cli.run_names(["/r/a", "/r/../r/a/flowscope.jsonl"])


# -- what goes wrong


def test_a_missing_run(tmp_path: Path) -> None:
    result = run("report", tmp_path / "a", "-o", tmp_path / "r.html")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("flowscope: ")
    assert str(tmp_path / "a") in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "r.html").exists()


def test_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "deep" / "b")
    result = run("summary", tmp_path)
    assert result.returncode == 1
    assert f"Runs below it: {tmp_path / 'a'}, {tmp_path / 'deep' / 'b'}." in result.stderr


@pytest.mark.parametrize("content", [b"\x00\xff" * 50 + b"\n", b'{"type":"other"}\n[1]\n', b"step,loss\n0,1.5\n"])
def test_a_file_of_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    for command in ("summary", "report"):
        result = run(command, tmp_path)
        assert result.returncode == 1
        assert f"none of its {content.count(10)} lines is flowscope's" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_half_written_run_is_read_and_told(tmp_path: Path) -> None:
    file = write_run(tmp_path) / FILE_NAME
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    result = run("summary", tmp_path)
    assert result.returncode == 0
    assert "2 records, last at step 5" in result.stdout
    assert result.stderr == f"flowscope: {tmp_path}: 1 unreadable line(s) left out.\n"


def test_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(encode_event(events()[0]))
    result = run("report", tmp_path)
    assert result.returncode == 1
    assert "no record yet" in result.stderr


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "file").write_text("kept")
    for output in (tmp_path, tmp_path / "file" / "r.html"):
        result = run("report", tmp_path / "a", "-o", output)
        assert (result.returncode, result.stdout) == (1, "")
        assert str(output) in result.stderr
        assert "Traceback" not in result.stderr
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("call", [[], ["report"], ["compare"], ["repotr", "a"], ["summary", "a", "--colour"]])
def test_a_wrong_call_is_2_and_shows_the_usage(call: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(call)
    assert caught.value.code == 2
    assert "usage: flowscope" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from flowscope import __version__

    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"flowscope {__version__}\n"


# -- live


class Clock:
    """Instead of waiting, does the next thing; ends the following when there is none."""

    def __init__(self, *things: object) -> None:
        self.things = list(things)

    def __call__(self, seconds: float) -> None:
        if not self.things:
            raise KeyboardInterrupt
        thing = self.things.pop(0)
        if callable(thing):
            thing()


def collect(path: Path, *things: object) -> list[list[str]]:
    out: list[list[str]] = []
    with suppress(KeyboardInterrupt):
        for batch in follow(path, sleep=Clock(*things)):
            out.append([f"{type(e).__name__} {getattr(e, 'step', '')}".strip() for e in batch])
    return out


def test_follow_gives_what_is_added_by_whole_lines(tmp_path: Path) -> None:
    file = write_run(tmp_path) / FILE_NAME
    line = encode_event(Record(15, 1.5))

    def append(data: bytes) -> object:
        return lambda: file.write_bytes(file.read_bytes() + data)

    first = ["RunHeader", "Record 0", "Record 5", "Record 10", "Alert 10"]
    got = collect(tmp_path, append(line[:9]), append(line[9:]), append(b"nonsense\n"), append(line + line[:5]))
    assert got == [first, [], ["Record 15"], [], ["Record 15"]]
    # a run that is started anew is shorter
    again = [[*first, "Record 15", "Record 15"], ["RunHeader"]]
    assert collect(file, lambda: file.write_bytes(encode_event(events()[0]))) == again
    with pytest.raises(FlowscopeError, match="cannot be read"):
        collect(file, file.unlink)


def test_a_line_that_never_ends_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_run(tmp_path) / FILE_NAME
    line = encode_event(Record(15, 1.5))
    monkeypatch.setattr(reading, "LONGEST", max(map(len, map(encode_event, events()))))

    def append(data: bytes) -> object:
        return lambda: file.write_bytes(file.read_bytes() + data)

    long = b"x" * reading.LONGEST
    first = ["RunHeader", "Record 0", "Record 5", "Record 10", "Alert 10"]
    # each look comes to an end and waits, and what follows the line is seen
    assert collect(tmp_path, append(long), append(long + b"y"), append(b"\n" + line)) == [first, [], [], ["Record 15"]]


def test_records_that_are_followed_carry_their_labels(tmp_path: Path) -> None:
    batch = next(follow(write_run(tmp_path)))
    assert isinstance(batch[1], Record)
    assert batch[1].labels("gradient_product") == list(POINTS)


def test_live_is_a_line_a_record_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    show([events()[:2], [], events()[2:]], stream)
    lines = stream.getvalue().splitlines()
    assert [line[:12] for line in lines[1:4]] == ["step      0 ", "step      5 ", "step     10 "]
    assert lines[4] == str(ALERT)
    assert len(lines) == 5
    assert "\x1b" not in stream.getvalue()


def test_live_text() -> None:
    view = LiveView()
    assert "no record yet" in view.text(80)
    for event in events():
        view.write(event)
    text = view.text(80)
    assert "3 records, last at step 10" in text
    assert str(ALERT) in text
    # 3, 2.5 and 2 on a scale from 0 to 3: 7, 5.8 and 4.7 of seven steps
    assert text.splitlines()[-1] == "  loss █▇▆ 3 to 2"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_live_repaints_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="pip install rich (extra 'rich'): the repainting view is untested without it")
    import pty

    write_run(tmp_path)
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "flowscope", "live", str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "50"}
    # a job in the background of a script inherits SIGINT as ignored, and would never see it
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=follower, stderr=follower, env=environment, preexec_fn=interruptible
    )
    os.close(follower)
    try:
        seen = read_until(leader, "last at step 10")
        with (tmp_path / FILE_NAME).open("ab") as file:
            file.write(encode_event(Record(77, 1.0)))
        seen += read_until(leader, "last at step 77")
    finally:
        process.send_signal(signal.SIGINT)
        rest = read_until(leader, None)
        os.close(leader)
    assert process.wait(60) == 130
    assert "\x1b[1A" in seen, "the cursor goes up again"
    assert (seen + rest).rindex("\x1b[?25h") > (seen + rest).rindex("\x1b[?25l"), "the cursor is shown at the end"
    assert "Traceback" not in seen + rest


def interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_until(descriptor: int, words: str | None, seconds: float = 30) -> str:
    """What a pseudo-terminal says until `words` came (None: until it is closed)."""
    text, end = "", time.monotonic() + seconds
    while time.monotonic() < end and (words is None or words not in text):
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # Linux: the other side is closed
            return text
        if not data:
            return text
        text += data.decode("utf-8", "replace")
    assert words is None or words in text
    return text


def test_the_command_is_installed() -> None:
    # fails where the package was installed before pyproject.toml named the command: pip install -e . again
    (entry,) = entry_points(group="console_scripts", name="flowscope")
    assert entry.load() is cli.main
