"""Every piece of code that the documents show is run by a test, and every command with what it is said to be given."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import compared_models
import pytest
import torch
from test_docs import DOCUMENTS, Transformer, batches, own_blocks, python_blocks, read, stepper
from torch import nn

import flowscope
from flowscope.cli import _parser, main
from flowscope.sinks.reading import is_run

ROOT = Path(__file__).resolve().parents[1]
PAGES = (*DOCUMENTS, *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
RUN_BY = {
    "docs/integrations.md": "test_integration_docs.py",
    "docs/which-connection.md": "test_conversion.py",
    "docs/write-your-own.md": "test_docs.py",
}
"""Pages whose code needs more than a model and its loop, and the test that runs it."""
HERE = [name for name in dict.fromkeys(PAGES) if python_blocks(name) and name not in RUN_BY]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shown(name: str) -> list[tuple[str, str]]:
    """The language and the text of each block that is fenced."""
    return FENCE.findall(read(name))


def trained(folder: Path, seed: int = 0, dropout: float = 0.1) -> None:
    """A run as `watch` leaves it."""
    torch.manual_seed(seed)
    model = Transformer()
    for block in model.blocks:
        block.mlp[-1].p = dropout  # type: ignore[index, union-attr, assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_step = stepper(model, optimizer)
    with flowscope.watch(model, optimizer, log_dir=folder, config={"console": "off"}) as scope:
        for batch in batches(6):
            scope.step(loss=train_step(batch))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some runs, one of them with another dropout."""
    folder = tmp_path_factory.mktemp("written") / "runs"
    for seed, name in enumerate(("a", "b", "c", "new", "good")):
        trained(folder / name, seed % 4)
    trained(folder / "bad", dropout=0.2)
    return folder


@pytest.fixture
def workplace(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_group_of_good_runs(workplace: Path) -> None:
    """What a page on groups calls `runs/good`."""
    shutil.rmtree(workplace / "runs/good")
    for name in "abc":
        shutil.copytree(workplace / "runs" / name, workplace / "runs/good" / name)


def a_program_that_sends_mail(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = workplace / "mail"
    program.write_text(f"#!/bin/sh\necho $@ > {workplace}/sent\ncat >> {workplace}/sent\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(workplace), prepend=os.pathsep)


@pytest.mark.parametrize("name", HERE)
def test_python_blocks_run(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    space: dict[str, Any] = {
        "flowscope": flowscope,
        "model": model,
        "optimizer": optimizer,
        "loader": batches(),
        "calibration": [inputs for inputs, _ in batches()],
        "train_step": stepper(model, optimizer),
        "inputs": batches()[0][0],
        "loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    }
    blocks = python_blocks(name)
    posted: list[Any] = []
    if name == "docs/actions.md":
        a_program_that_sends_mail(tmp_path, monkeypatch)
        monkeypatch.setattr("flowscope.digest.post", lambda url, body, *_: posted.append((url, json.loads(body))))
    if name == "docs/corridor.md":
        a_group_of_good_runs(request.getfixturevalue("workplace"))
    if name == "docs/compare-connections.md":
        monkeypatch.setitem(sys.modules, "my_project", in_this_process())
        blocks = [block.replace("steps=300", "steps=3") for block in blocks]
    with alone() if name == "docs/scale.md" else contextlib.nullcontext():
        for number, block in enumerate(blocks):
            exec(compile(block, f"{name}, python block {number}", "exec"), space)
        if "scope" in space:
            space["scope"].close()
    if name == "docs/guide.md":
        assert len(space["run"].records) == len(space["losses"]) == 3
        assert None not in space["losses"]
        assert len(space["least"].values) == 3
    if name == "docs/actions.md":
        assert [(url, *body) for url, body in posted] == [
            ("https://hooks.example/T0", "text", "run"), ("https://hooks.slack.com/...", "text", "blocks")
        ]  # fmt: skip
        assert (tmp_path / "sent").read_text().startswith("-s flowscope: run: 3 steps in ")
    if name == "docs/migration.md":
        told: dict[str, float] = {}
        model(batches()[0][0]).sum().backward()
        model.log_dict = told.update  # type: ignore[assignment]
        space["on_before_optimizer_step"](model, optimizer)
        assert told.keys() >= {"grad_2.0_norm_total"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def in_this_process() -> ModuleType:
    """A project whose model no other process can import."""
    project = ModuleType("my_project")
    project.make_model = lambda: compared_models.Model()  # type: ignore[attr-defined]
    project.batches, project.loss = compared_models.batches(), compared_models.loss  # type: ignore[attr-defined]
    return project


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_no_page_shows_code_that_no_test_runs() -> None:
    for name, test in RUN_BY.items():
        assert name in (ROOT / "tests" / test).read_text()
    for name in PAGES:
        for language, text in shown(name):
            if language != "python":
                assert not is_code(text), f"{name}: this is Python, so call it that:\n{text}"


def is_code(text: str) -> bool:
    """Whether Python reads it, and something is called or defined in it."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call | ast.FunctionDef | ast.ClassDef) for node in ast.walk(tree))


# -- commands

READS = ("summary", "runs", "report", "compare", "bisect", "export", "diagnose", "golden")
"""Commands that end by themselves and train nothing; of the others it is read how they are called."""


def commands() -> list[tuple[str, str]]:
    """Page and line of each command that is shown, once a page."""
    lines = [(name, line) for name in PAGES for _, text in shown(name) for line in text.splitlines()]
    return [*dict.fromkeys((name, line.partition("  ")[0].strip()) for name, line in lines)]


@pytest.mark.parametrize("name", sorted({name for name, line in commands() if line.startswith("flowscope ")}))
def test_commands_are_called_as_shown(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "checks.py").write_text("\n".join(own_blocks()[0]))
    monkeypatch.syspath_prepend(workplace)
    for page, line in commands():
        if page != name or not line.startswith("flowscope "):
            continue
        words = shlex.split(line, comments=True)[1:]
        if words[:2] == ["golden", "check"] and is_run("runs/good"):
            a_group_of_good_runs(workplace)
        parsed = _parser().parse_args(words)
        assert getattr(parsed, "script", None) != []
        if words[0] in READS:
            assert main(words) in (0, 1), line  # bisect, diagnose: what was found
            assert "flowscope:" not in capsys.readouterr().err, line


def test_targets_modules_and_options_of_other_commands_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = 0
    for name, line in commands():
        words = line.split("#")[0].split()
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), (name, line)
        elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks"):
            place = ROOT / words[2].replace(".", "/")
            files = [*place.glob("*.py"), place.with_suffix(".py")]
            text = "\n".join(file.read_text() for file in files if file.exists())
            assert text, (name, line)
            for option in re.findall(r"--[\w-]+", line):
                assert f'"{option}"' in text, (name, line)
        else:
            continue
        found += 1
    assert found > 5
