"""Names and messages are text wherever they appear: no order reaches a terminal, no markup a page.

Modules, classes, runs and detectors of one's own bear drawn names; each is shown by each view.
"""

from __future__ import annotations

import io
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from torch import nn

import flowscope
from benchmarks.harm.attack import Outcome, Plan
from benchmarks.harm.reading import ORDERS, broken, commands, followed
from flowscope.detectors import Detector, Finding
from flowscope.records import Record, RunHeader
from flowscope.sinks import ConsoleSink, read_run
from flowscope.views.report import write_report

TERMINAL = "hostile words: no escape sequence reaches a terminal (summary, console, both views of live, diagnose)"
PAGE = "hostile words: no markup and no line of script in a page"
FIRST = {TERMINAL: (4, 0), PAGE: (56, 56)}
CASES = 100
ORDER_PARTS = [
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\x1b[1A\x1b[2K",
    "\x9b31m",
    "\x9d0;t\x9c",
    "\u202e",
    "\u2066",
    "\b" * 9,
    "\x7f",
]
MARKUP = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "'\"><svg onload=alert(1)>",
    "]]>",
    "<!--",
]
WORDS = ["blocks", "注意", "ünï", "__proto__", "constructor", "${x}", "{{y}}", "%s%n", "x" * 3000, "\\x1b", "a/../b"]


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Runs of drawn names."""
    for number in range(plan.count(CASES)):
        name = _drawn(plan.random)
        with tempfile.TemporaryDirectory() as folder:
            console, summary = _train(Path(folder), name)
            told = {"summary()": summary, "console": console, "live": followed(Path(folder))}
            for view, text in told.items():
                found = ORDERS.search(text)
                yield Outcome(TERMINAL, f"case {number}, {view}", found is None, f"{name!r}: {found and found[0]!r}")
            for command, call in itertools.islice(commands(Path(folder), Path(folder)).items(), 3):
                wrong = broken(command, call)
                yield Outcome(TERMINAL, f"case {number}, {command}", not wrong, wrong)
            yield _page(f"case {number}", Path(folder), name)


def _page(case: str, folder: Path, name: str) -> Outcome:
    page = write_report({name: read_run(folder)}, folder / "r.html", title=name).read_text()
    _, _, rest = page.partition('id="flowscope-data">')
    data, _, after = rest.partition("</script>")
    json.loads(data)
    hostile = [markup for markup in MARKUP if "<" in markup and markup in name and markup in page]
    return Outcome(PAGE, case, not hostile and page.count("<script") == 2 and "</html>" in after, str(hostile))


def _drawn(random: Random) -> str:
    return "".join(random.choice([*ORDER_PARTS, *MARKUP, *WORDS]) for _ in range(random.randrange(1, 5)))


class Echo(Detector):
    """Says the name of the first parameter."""

    kind = "echo"

    def findings(self, record: Record, header: RunHeader) -> list[Finding]:
        where = record.labels("param_norm")[0]
        return [self.found(where, 2.0, 1.0, f"message {where}", advice=f"advice {where}", certain=True)]


def _train(folder: Path, name: str) -> tuple[str, str]:
    """What the console sink wrote, and the summary."""
    torch.manual_seed(0)
    # a module's name has no dot
    named = nn.Sequential()
    named.add_module(name.replace(".", "") or "x", nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)))
    model = nn.Sequential(named, type(name[:200].replace("\0", "") or "x", (nn.Linear,), {})(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = io.StringIO()
    options = {"sinks": [ConsoleSink(stream)], "detectors": [Echo], "config": {"console": "off"}}
    with flowscope.watch(model, optimizer, log_dir=folder, every=1, **options) as scope:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 3)).square().mean()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
        summary = scope.summary()
    return stream.getvalue(), summary
