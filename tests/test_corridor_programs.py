"""A sample of `make corridor`: seeds of one program, changes of it, and the same live."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flowscope
from benchmarks.corridor.__main__ import PARTS, Pair, count_of, write
from benchmarks.corridor.programs import BUILDERS, STEPS, train
from benchmarks.corridor.runs import folder_of, kept
from flowscope.corridor import Corridor, opened
from flowscope.errors import FlowscopeError
from flowscope.sinks import Run, read_run

GOOD = 5
ROOT = str(Path(__file__).resolve().parents[1])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of five good runs."""
    folder = tmp_path_factory.mktemp("good")
    for seed in range(GOOD):
        train("layers", seed, folder / f"seed{seed}")
    return folder


@pytest.fixture(scope="module")
def corridor(good: Path) -> Corridor:
    return opened(good)


def test_another_seed_gives_no_warning(corridor: Corridor, tmp_path: Path) -> None:
    for seed in (40, 41):
        train("layers", seed, tmp_path / str(seed))
        departure = corridor.judge(read_run(tmp_path / str(seed)).records)
        assert departure is None or not departure.certain


@pytest.mark.parametrize(
    ("change", "step", "where", "metric"),
    [
        ("one layer / 4", 0, "4.weight", "param_norm"),
        ("sigmoid for ReLU", 0, "1", "output_spread"),
        ("labels shuffled", 15, "", "act_rms"),
    ],
)
def test_a_harmful_change_is_a_warning_with_its_place(
    corridor: Corridor, tmp_path: Path, change: str, step: int, where: str, metric: str
) -> None:
    train("layers", 40, tmp_path / "run", change)
    departure = corridor.judge(read_run(tmp_path / "run").records)
    assert departure is not None
    assert departure.certain
    assert abs(departure.step - step) <= 15  # the step depends on the seeds a little
    assert metric in {one.metric for one in departure.beyond}
    if where:
        assert departure.where == where


def test_live_it_is_the_alert_of_the_finished_run(good: Path, corridor: Corridor) -> None:
    torch.manual_seed(40)
    made = BUILDERS["layers"](40, "rate x3")
    alerts: list[flowscope.Alert] = []
    with flowscope.watch(made.model, made.optimizer, every=5, on_alert=alerts.append, reference=good) as scope:
        for k in range(STEPS):
            scope.step(loss=made.step(k))
        departure = corridor.judge(scope.records)
    assert departure is not None
    (alert,) = [one for one in alerts if one.kind == "parted_from_reference" and one.severity == "warning"]
    assert (alert.step, alert.where) == (departure.step, departure.where)
    assert "0.05 -> 0.15" in alert.message  # the rate of the optimizer's group, from the set-up


SCRIPT = """
import os
import torch
from torch import nn

torch.manual_seed(SEED)
os.chdir(FOLDER)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
with torch.no_grad():
    model[2].weight.mul_(SCALE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    loss = nn.functional.cross_entropy(model(torch.randn(32, 8)), torch.randint(3, (32,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script_run_beside_a_group_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def run(name: str, seed: int, scale: float, *arguments: str) -> Run:
        text = SCRIPT.replace("SEED", str(seed)).replace("SCALE", str(scale)).replace("FOLDER", "'elsewhere'")
        (tmp_path / "train.py").write_text(text)
        command = [sys.executable, "-m", "flowscope", "run", "--log-dir", name, *arguments, "train.py"]
        subprocess.run(command, check=True, capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": ROOT})
        return read_run(next((tmp_path / name).rglob("flowscope.jsonl")))

    for seed in range(3):
        run(f"good/{seed}", seed, 1.0)
    alerts = run("bad", 9, 20.0, "--reference", "good").alerts
    (told,) = [alert for alert in alerts if alert.kind == "parted_from_reference" and alert.state == "raised"]
    assert (told.step, told.where) == (0, "2.weight")


@pytest.mark.parametrize("reference", [3, "no/such/folder"])
def test_what_is_no_run_and_no_group_is_refused(reference: object) -> None:
    with pytest.raises(FlowscopeError, match="reference"):
        flowscope.watch(torch.nn.Linear(2, 1), reference=reference)


def test_runs_are_kept_and_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def note(program: str, seed: int, folder: Path, change: str) -> None:
        trained.append((program, seed, change))
        folder.mkdir(parents=True)
        (folder / "flowscope.jsonl").write_text("")

    monkeypatch.setattr("benchmarks.corridor.runs.train", note)
    paths = {kept("layers", 3, "rate / 10", tmp_path) for _ in range(2)}
    assert paths == {folder_of("layers", 3, "rate / 10", tmp_path)}
    assert trained == [("layers", 3, "rate / 10")]


def test_a_part_of_the_page_is_written_and_the_rest_left(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text((Path(ROOT) / "docs" / "corridor.md").read_text(encoding="utf-8"), encoding="utf-8")
    for name in PARTS:
        write(page, name, f"the {name}")
    told = page.read_text(encoding="utf-8")
    assert told.index("\n\nthe good\n\n<!-- end of good -->") < told.index("\n\nthe changes\n\n<!-- end of changes -->")
    assert "## What it does not tell" in told


def test_words_are_counted() -> None:
    assert list(count_of([Pair("a", 5, None), Pair("a", 5, None)])) == ["2 silent"]
