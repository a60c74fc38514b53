"""`compare_connections` and `flowscope try`: fair trainings, a table, a recommendation beyond chance."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compared_models
import numpy as np
import pytest
import torch
from compared_models import batches, factory, loss, sgd

import flowscope
from flowscope.comparing.outcomes import Outcome
from flowscope.comparing.verdict import ConnectionComparison
from flowscope.comparing.workers import Bar
from flowscope.errors import FlowscopeError

STEPS = 5


def here(**more: Any) -> ConnectionComparison:
    """Compare in this process: a lambda cannot be sent to another."""
    given = {"loss": loss, "modes": ["keel"], "steps": STEPS, "seeds": 1, "optimizer": sgd, **more}
    return flowscope.compare_connections(lambda: compared_models.Model(), batches(), **given)


def by_hand(seed: int, prepare: Callable[[torch.nn.Module], Any] = lambda model: None) -> list[float]:
    """The losses of a training written out."""
    torch.manual_seed(seed)
    model = factory()
    prepare(model)
    model.train()
    optimizer = sgd(model)
    torch.manual_seed(seed)
    losses = []
    for step in range(STEPS):
        value = loss(model, batches()[step % 3])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_trainings_are_those_of_a_loop_by_hand_with_the_same_seeds_and_batches() -> None:
    found = here(seeds=[4, 9], modes=[("keel", {"preserve": True}), "dhc"])
    assert found.labels == ["residual", "keel preserve=True", "dhc"]
    assert found.seeds == [4, 9]
    for outcome in found.of("residual"):
        assert list(outcome.losses) == by_hand(outcome.seed)
    for outcome in found.of("keel preserve=True"):
        wrapped = by_hand(
            outcome.seed, lambda m: flowscope.wrap(m, "keel", example_inputs=(batches()[0][0],), preserve=True)
        )
        assert list(outcome.losses) == wrapped
    plain, *_ = found.of("residual")
    kept, *_ = found.of("keel preserve=True")
    assert kept.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)
    assert kept.losses[-1] != plain.losses[-1]


def test_what_is_measured() -> None:
    found = here(modes=["dhc"], steps=6)
    plain, wrapped = found.rows
    assert plain.parameters == sum(p.numel() for p in factory().parameters())
    assert wrapped.parameters > plain.parameters
    assert wrapped.saved_bytes > plain.saved_bytes > 4 * 4 * 5 * 8 * 3  # the carry of each block, and more
    assert all(row.step_seconds > 0 and row.gradient_product > 0 for row in (plain, wrapped))
    assert str(found).splitlines()[1].split() == (
        ["mode", "loss", "gain", "gradient", "product", "step", "kept", "for", "backward", "parameters"]
    )
    assert "one seed says nothing of chance" in str(found)


def test_own_processes_give_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    found = flowscope.compare_connections(
        factory, batches(), loss=loss, modes="keel", steps=STEPS, seeds=1, optimizer=sgd
    )
    assert "in this process" not in capsys.readouterr().err
    assert list(found.of("residual")[0].losses) == pytest.approx(by_hand(0), rel=1e-6)
    assert [outcome.error for outcome in found.outcomes] == ["", ""]
    here()
    assert "the trainings run in this process" in capsys.readouterr().err


def test_an_interrupted_comparison_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[int] = []

    def counting(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            made.append(1)
            if len(made) == 7:
                raise KeyboardInterrupt
        return loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        here(loss=counting, folder=tmp_path, modes=["keel", "dhc"])
    assert "1 of 3 trainings ended" in capsys.readouterr().err
    found = here(loss=counting, folder=tmp_path, modes=["keel", "dhc"])
    assert len(made) == 7 + 2 * STEPS  # the first training is not made again
    assert found.labels == ["residual", "keel", "dhc"]
    assert list(found.of("residual")[0].losses) == by_hand(0)
    here(loss=counting, folder=tmp_path, modes=["keel", "dhc"], steps=STEPS + 1)
    assert len(made) == 7 + 2 * STEPS + 3 * (STEPS + 1)  # other trainings than those


def test_a_training_that_fails_is_a_row() -> None:
    found = here(modes=["deepnorm", "keel"])
    _, failed, _ = found.rows
    assert "expected post-norm sites" in failed.error
    assert math.isnan(failed.loss)
    assert "deepnorm: FlowscopeError" in str(found)


def outcomes(table: dict[str, list[float]], times: dict[str, float] | None = None) -> ConnectionComparison:
    """A comparison with these losses by seed."""
    return ConnectionComparison(
        tuple(
            Outcome(label, seed, (value,) * 10, 1.0, (times or {}).get(label, 1.0), 1.0, 1)
            for label, values in table.items()
            for seed, value in enumerate(values)
        ),
        10,
    )


@pytest.mark.parametrize(
    ("table", "times", "recommended", "reason"),
    [
        ({"residual": [2.0, 2.1, 1.9], "keel": [1.8, 1.91, 1.69]}, {}, "keel", "lower by 0.2 "),
        ({"residual": [2.0, 2.1, 1.9], "keel": [1.8, 2.2, 1.7]}, {}, "residual", "beyond chance over 3 seeds"),
        ({"residual": [2.0, 2.1], "keel": [1.9, 1.95]}, {}, "residual", "beyond chance"),  # two seeds: 12.7 errors
        ({"residual": [2.0], "keel": [1.0]}, {}, "residual", "keel is ahead by 1: pass seeds=3"),
        (
            {"residual": [2.0, 2.1, 1.9], "keel": [1.8, 1.91, 1.7], "mhc": [1.79, 1.905, 1.69]},
            {"mhc": 3.0},
            "keel",
            "mhc is no better beyond chance and slower",
        ),
        ({"residual": [math.nan] * 3, "keel": [1.8, 1.9, 1.7]}, {}, "keel", "did not end with a finite loss"),
        ({"residual": [math.nan] * 3, "keel": [math.nan] * 3}, {}, "residual", "no training ended"),
        ({"residual": [2.0, 2.1, 1.9], "keel": [math.nan, 1.0, 1.0]}, {}, "residual", "beyond chance"),
        ({"residual": [2.0] * 3, "keel": [1.999] * 3}, {}, "residual", "beyond chance"),  # sure, and too little
    ],
)
def test_what_is_recommended(table: Any, times: Any, recommended: str, reason: str) -> None:
    found = outcomes(table, times)
    assert (found.recommended, reason in found.reason) == (recommended, True), found.reason


def test_the_spread_over_seeds_is_students() -> None:
    from scipy import stats

    plain, keel = [2.0, 2.1, 1.9], [1.8, 1.95, 1.68]
    row = outcomes({"residual": plain, "keel": keel}).rows[1]
    interval = stats.ttest_rel(plain, keel).confidence_interval(0.95)
    assert row.gain - row.gain_error == pytest.approx(interval.low)
    assert row.gain + row.gain_error == pytest.approx(interval.high)
    assert row.spread == pytest.approx(np.std(keel, ddof=1))


def test_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = here().plot(tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 5000
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["residual", "keel"]


def test_the_line_of_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = Bar(4, 10, show=True)
    bar.done = 1
    bar.draw("keel", 2, 5, 1.25)
    line = capsys.readouterr().err
    assert "2/4 keel, seed 2: step 5, loss 1.25" in line
    assert line.count("#") == 9  # 1.5 of 4 trainings, 24 wide


def test_wrong_arguments() -> None:
    for more, words in (
        ({"modes": ["nope"]}, "expected one of residual"),
        ({"modes": ["residual"]}, "expected one other than 'residual'"),
        ({"modes": [("keel", {"streams": 2})]}, "unknown option 'streams'"),
        ({"steps": 0}, "expected at least one of each"),
        ({"seeds": []}, "expected at least one of each"),
    ):
        with pytest.raises(FlowscopeError, match=words):
            here(**more)
    with pytest.raises(FlowscopeError, match="got no batch"):
        flowscope.compare_connections(factory, iter([]), loss=loss)


SCRIPT = """
import sys
import torch
from compared_models import factory, batches, loss, sgd
torch.manual_seed(5)
model = factory()
optimizer = sgd(model)
print("the script's own output")
for epoch in range(10):
    for batch in batches():
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
open(sys.argv[1], "w").write("it went to its end")
"""


def test_a_script_is_tried(tmp_path: Path) -> None:
    script, end = tmp_path / "train.py", tmp_path / "end"
    script.write_text(SCRIPT)
    tests = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "flowscope", "try", "--modes", "dhc", "--steps", "4", "--seeds", "1"]
    command += ["--folder", str(tmp_path / "out"), str(script), str(end)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not end.exists()
    assert "the script's own output" not in done.stdout
    assert done.stdout.startswith("4 steps, seeds 0;")
    assert "recommended: residual" in done.stdout
    torch.manual_seed(5)
    model = factory()
    optimizer, losses = sgd(model), []
    for step in range(4):
        value = loss(model, batches()[step % 3])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    found = Outcome(**json.loads((tmp_path / "out" / "residual-0.json").read_text())["outcome"])
    assert list(found.losses) == pytest.approx(losses, rel=1e-6)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert again.stdout == done.stdout  # times too: nothing was trained again
