"""A run followed from its file while it trains: the terminal that shows it is not the one that trains.

A training process has other writers on its terminal (prints, warnings, progress bars), so a view that repaints itself
runs in a process of its own and reads `flowscope.jsonl` as it grows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from flowscope.backdrop import LOSS, read
from flowscope.errors import FlowscopeError
from flowscope.records import Event, Record, RunHeader
from flowscope.sinks.console import ConsoleSink, is_terminal, sparklines
from flowscope.sinks.memory import MemorySink
from flowscope.sinks.reading import UNREADABLE, Lines, decode_event, file_of
from flowscope.sinks.stages import Arriving, stages_in
from flowscope.summary import summarize

if TYPE_CHECKING:
    from rich.console import Console

POLL_SECONDS = 1.0
AT_ONCE = 1000
"""Events between two looks at what is shown."""


def follow(
    path: str | os.PathLike[str], *, sleep: Callable[[float], None] = time.sleep, seconds: float = POLL_SECONDS
) -> Iterator[list[Event]]:
    """The events of a run, as they are written: first all there are, then, for ever, those of the last `seconds`.

    Args:
        path: the file, or the folder that holds `flowscope.jsonl`, or those of a pipeline's stages.
        sleep: what waits between two looks.
        seconds: how long.

    Yields:
        The new events, perhaps none. Lines that cannot be understood are left out; a file that became shorter (a run
        that was started anew) is read from its beginning.

    Raises:
        FlowscopeError: there is no such file, or it went away.
    """
    file = file_of(path)
    if not file.is_file() and stages_in(Path(path)):
        yield from _follow_stages(Path(path), sleep, seconds)
    lines, header = Lines(), None
    while True:
        events: list[Event] = []
        try:
            with file.open("rb") as opened:
                if os.fstat(opened.fileno()).st_size < lines.position:
                    lines, header = Lines(), None
                for line in lines.fresh(opened):
                    with suppress(*UNREADABLE):
                        event = decode_event(line, header)
                        header = event if isinstance(event, RunHeader) else header
                        if not (isinstance(event, Record) and "unsampled" in event.flags):
                            events.append(event)
                    if len(events) == AT_ONCE:
                        yield events
                        events = []
        except OSError as error:
            raise FlowscopeError(f"{os.fspath(path)}: cannot be read ({error.strerror}).") from None
        yield events
        sleep(seconds)


def _follow_stages(folder: Path, sleep: Callable[[float], None], seconds: float) -> Iterator[list[Event]]:
    """The same of a pipeline's stages as one run; begun again where a stage writes its first line."""
    while True:
        stages = stages_in(folder)
        ways, arriving = [follow(stage, sleep=lambda _: None) for stage in stages], Arriving(len(stages))
        while stages_in(folder) == stages:
            batches = [next(way) for way in ways]
            yield [known for at, events in enumerate(batches) for event in events for known in arriving.take(at, event)]
            if max(map(len, batches)) < AT_ONCE:
                sleep(seconds)


def show(batches: Iterable[list[Event]], stream: TextIO) -> None:
    """Show a run until the events end: repainted in place on a terminal with rich installed, else a line a record."""
    console = _console(stream)
    if console is None:
        sink = ConsoleSink(stream)
        for event in chain.from_iterable(batches):
            sink.write(event)
        return
    from rich.live import Live
    from rich.text import Text

    view = LiveView()
    # no thread, and nobody else's prints to take care of: this process does nothing else
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        for events in batches:
            for event in events:
                view.write(event)
            live.update(Text(view.text(console.width)), refresh=True)


def _console(stream: TextIO) -> Console | None:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False) if is_terminal(stream) and os.environ.get("TERM") != "dumb" else None


class LiveView(MemorySink):
    """What the live view says, from the last events it was given by `write`."""

    def text(self, columns: int) -> str:
        """The summary, and the losses of the records kept as a sparkline that fits the width, the reference's below."""
        header = self.header or RunHeader()
        lines = [summarize(header, list(self.records), list(self.alerts), {}, "waiting for the first step")]
        losses = {record.step: record.loss for record in self.records if record.loss is not None}
        if losses:
            curves = {"loss": [*losses.values()]}
            backdrop = read(header.behind)
            if backdrop is not None and LOSS in backdrop.curves:
                at = [backdrop.curves[LOSS].at(step)[1] for step in losses]
                curves[backdrop.words] = [float(lines[len(lines) // 2, 0]) for lines in at]
            width, named = min(60, max(8, columns - 30)), max(map(len, curves))
            for (name, values), bars in zip(
                curves.items(), sparklines([*curves.values()], width, log=False), strict=True
            ):
                lines.append(f"  {name:<{named}} {bars} {values[0]:.4g} to {values[-1]:.4g}")
        return "\n".join(lines)
