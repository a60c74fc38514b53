"""A `log_dir` that holds another run is left alone; a run that goes on stays in its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from watch_models import Stack

import flowscope
from flowscope.integrations.trainer import TrainerWatch
from flowscope.sinks import read_run

QUIET = {"console": "off"}


def trained(folder: Path, steps: int, state: dict[str, Any] | None = None, **options: Any) -> flowscope.Scope:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flowscope.watch(model, optimizer, log_dir=folder, config=QUIET, **options) as scope:
        if state is not None:
            scope.load_state_dict(state)
        for _ in range(steps):
            one_step(model, optimizer)
    return scope


def one_step(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def steps_in(folder: Path) -> list[int]:
    return [record.step for record in read_run(folder).records]


def test_a_second_and_third_run_get_siblings_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = trained(tmp_path / "a", 4)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    second, third = trained(tmp_path / "a", 3), trained(tmp_path / "a", 2)
    assert first.log_dir == tmp_path / "a"
    assert (second.log_dir, third.log_dir) == (tmp_path / "a-2", tmp_path / "a-3")
    assert [steps_in(tmp_path / name) for name in ("a", "a-2", "a-3")] == [[0, 1, 2, 3], [0, 1, 2], [0, 1]]
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    assert len(list((tmp_path / "a-2").glob("events.out.tfevents.*"))) == 1
    said = [record.message for record in caplog.records if "another run" in record.message]
    assert said == [
        f"flowscope: {tmp_path / 'a'} holds another run; this one is written to {tmp_path / f'a-{n}'}." for n in (2, 3)
    ]


def test_a_relative_folder_stays_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained(Path("runs/a"), 1)
    assert trained(Path("runs/a"), 1).log_dir == Path("runs/a-2")
    assert steps_in(Path("runs/a-2")) == [0]


def test_the_header_stands_before_the_first_record_in_the_sibling(tmp_path: Path) -> None:
    trained(tmp_path / "a", 1)
    trained(tmp_path / "a", 1)
    kinds = [json.loads(line)["type"] for line in (tmp_path / "a-2" / "flowscope.jsonl").read_text().splitlines()]
    assert kinds[0] == "run"
    assert kinds.count("record") == 1
    assert read_run(tmp_path / "a-2").records[0].labels("grad_norm")


def test_loaded_state_makes_it_the_same_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = trained(tmp_path / "a", 4, every=1).state_dict()
    scope = trained(tmp_path / "a", 2, state, every=1)
    assert scope.log_dir == tmp_path / "a"
    assert steps_in(tmp_path / "a") == [0, 1, 2, 3, 4, 5]
    assert not (tmp_path / "a-2").exists()
    assert "another run" not in caplog.text


def test_a_run_whose_first_step_is_a_later_one_goes_on(tmp_path: Path) -> None:
    trained(tmp_path / "a", 3)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flowscope.watch(model, optimizer, log_dir=tmp_path / "a", config=QUIET, every=1) as scope:
        for step in (3, 4):
            one_step(model, optimizer)
            scope.step(loss=1.0, step=step)
    assert steps_in(tmp_path / "a") == [0, 1, 2, 3, 4]


def test_two_models_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    models = [Stack(2), Stack(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    scopes = [
        flowscope.watch(model, optimizer, log_dir=tmp_path / "gan", config=QUIET)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    for _ in range(2):
        for model, optimizer in zip(reversed(models), reversed(optimizers), strict=True):
            one_step(model, optimizer)
    for scope in scopes:
        scope.close()
    assert [scope.log_dir for scope in scopes] == [tmp_path / "gan", tmp_path / "gan-2"]
    assert steps_in(tmp_path / "gan") == steps_in(tmp_path / "gan-2") == [0, 1]


def test_a_folder_in_which_a_run_died_before_its_first_record_is_used(tmp_path: Path) -> None:
    trained(tmp_path / "a", 0)
    trained(tmp_path / "a", 1)
    assert steps_in(tmp_path / "a") == [0]
    assert not (tmp_path / "a-2").exists()


def test_an_unwritable_parent_puts_the_sibling_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "a", 1)
    make = Path.mkdir

    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.parent == tmp_path and path.name != "a":
            raise PermissionError(13, "Permission denied", str(path))
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert trained(tmp_path / "a", 1).log_dir == (tmp_path / "a" / "a-2")
    assert steps_in(tmp_path / "a" / "a-2") == [0]


def fit(watcher: TrainerWatch, steps: int, step: int = 0) -> Path | None:
    """What the callbacks of trainers do with the class they share."""
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watcher._watch(model, optimizer, lambda alert: None, step, config=QUIET) as scope:
        for _ in range(steps):
            one_step(model, optimizer)
    return scope.log_dir


def test_a_callback_that_fits_again_and_a_trainer_that_resumes_stay_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    first = TrainerWatch(log_dir=folder)
    assert [fit(first, 2), fit(first, 3)] == [folder, folder]  # the same callback again
    assert fit(TrainerWatch(log_dir=folder), 1, step=40) == folder  # a checkpoint of step 40, saved without a callback
    assert not (tmp_path / "a-2").exists()
    assert fit(TrainerWatch(log_dir=folder), 1) == tmp_path / "a-2"  # another fit from the start
