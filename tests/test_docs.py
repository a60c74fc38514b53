"""The documents say what is so: their code runs, their metrics and alerts are those that exist, their promises hold."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flows_models import Implicit, MixtureStack, record_of, square, weight_of_radius
from flows_models import inputs as flow_inputs
from torch import Tensor, nn

import flowscope
from flowscope.corridor import PartedFromGroup
from flowscope.detectors import DETECTORS, NUMBERS, OUTCOME, WIRING, Level
from flowscope.records import split_key
from flowscope.steps.phase import STEP, Action, Event, Phase

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "README.zh.md",
    "CONTRIBUTING.md",
    "docs/index.md",
    "docs/guide.md",
    "docs/moved.md",
    "docs/gallery.md",
    "docs/metrics.md",
    "docs/how-it-works.md",
    "docs/write-your-own.md",
    "docs/troubleshooting.md",
    "docs/alerts.md",
    "docs/panels.md",
    "docs/wrapping.md",
    "docs/which-connection.md",
    "docs/compare-connections.md",
    "docs/claims.md",
    "docs/flows.md",
    "docs/from-the-articles.md",
    "docs/actions.md",
    "docs/run.md",
    "docs/check.md",
    "docs/corridor.md",
    "docs/matrix.md",
    "docs/integrations.md",
    "docs/migration.md",
    "docs/detection.md",
    "docs/rivals.md",
    "docs/scale.md",
    "docs/promises.md",
)
B, T, D, IN, OUT = 3, 5, 8, 4, 7


pytestmark = pytest.mark.usefixtures("strict")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def python_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", read(name), re.MULTILINE | re.DOTALL)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(IN, D), nn.Linear(D, OUT)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.rnn = nn.GRU(IN, D, num_layers=2, batch_first=True) if fused else nn.RNNCell(IN, D)
        self.head = nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return self.head(self.rnn(x)[0])
        states = [x.new_zeros(len(x), D)]
        for t in range(x.shape[1]):
            states.append(self.rnn(x[:, t], states[-1]))
        return self.head(torch.stack(states[1:], 1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(IN, D), nn.ReLU(), nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, OUT))


def normalised() -> nn.Module:
    norm = nn.BatchNorm1d(D)
    return nn.Sequential(nn.Flatten(), nn.Linear(T * IN, D), norm, nn.Linear(D, T * OUT), nn.Unflatten(1, (T, OUT)))


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(B, T, IN, generator=generator), torch.randn(B, T, OUT, generator=generator)) for _ in range(count)
    ]


class DenseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, D)

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.relu(self.linear(torch.cat(features, -1)))


class DenseBlock(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, -1)


class Concatenating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(IN, D)
        self.denseblock1 = DenseBlock({f"denselayer{i}": DenseLayer(D * (i + 1)) for i in range(3)})
        self.head = nn.Linear(4 * D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.denseblock1(self.embed(x)))


# -- code


def test_readme_begins_with_code_and_names_the_two_commands() -> None:
    text = read("README.md")
    head = "\n".join(text.splitlines()[:15])
    assert "flowscope.watch(" in head
    assert "scope.step(" in head
    assert len(python_blocks("README.md")[0].split("\n\n", 1)[1].splitlines()) <= 6
    for command in ("demo", "test"):
        assert f"make {command}" in text
        assert re.search(rf"^{command}:", read("Makefile"), re.MULTILINE)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", read(name)):
        assert target.startswith("https://") or ((ROOT / name).parent / target).exists(), f"{name} links to {target}"
    for path in re.findall(r"`((?:tests|examples|benchmarks|flowscope)/[\w/.-]+\.py)`", read(name)):
        assert (ROOT / path).exists(), f"{name} names {path}"


def test_documented_commands_are_those_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from flowscope.cli import main

    with pytest.raises(SystemExit):
        main(["--help"])
    offered = set(re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE))
    listings = [text for name in DOCUMENTS for text in re.findall(r"^```text\n(.*?)^```", read(name), re.M | re.S)]
    shown = {command for text in listings for command in re.findall(r"^flowscope (\w+)", text, re.M)}
    assert len(shown) >= 4
    assert shown <= offered


# -- metrics and alerts


def documented(name: str, level: str) -> set[str]:
    headings = re.findall(rf"^{level} (`.+)$", read(name), re.MULTILINE)
    return {metric for heading in headings for metric in re.findall(r"`(\w+)`", heading)}


def recorded() -> set[str]:
    """The metric names in the records of a few models, the slow and opt-in ones included."""
    names = {"rank_gap"}  # among ranks only: tests/test_ranks.py
    example = batches()[0][0]
    modes = ("highway", "keel-postln", "dhc")
    wrapped = [flowscope.wrap(Transformer(), mode, example_inputs=example) for mode in modes]
    for model in (
        Transformer(),
        mlp(),
        normalised(),
        Recurrent(fused=True),
        Recurrent(fused=False),
        Concatenating(),
        *wrapped,
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"console": "off", "slow_every": 1, "branch_alignment": True}
        scaler = torch.amp.GradScaler("cpu")
        with flowscope.watch(model, optimizer, scaler=scaler, config=config) as scope:
            stepper(model, optimizer)(batches()[0])
            scope.step(loss=1.0)
        names |= {split_key(key)[0] for key in scope.records[0].metrics}
    names |= waiting() | spoiled() | built_in_forward() | playing() | returning_more() | evaluating() | replaying()
    names |= leaving_out()
    for model in (MixtureStack(), Implicit(weight_of_radius(0.5))):
        names |= {split_key(key)[0] for key in record_of(model, [flow_inputs(1)], square).metrics}
    return names


def waiting() -> set[str]:
    """The metric names of a step in which two optimizers find no gradient and change nothing."""
    model = mlp()
    model.hidden = [torch.nn.Linear(2, 2)]
    first, *others = model.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]
    with flowscope.watch(model, optimizers, config={"console": "off"}) as scope:
        for optimizer in optimizers:
            optimizer.step()
    return {*scope.records[0].metrics}


def spoiled() -> set[str]:
    """The metric names of a step whose input is NaN: which call was the first to be bad."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        x, y = batches()[0]
        stepper(model, optimizer)((x * torch.nan, y))
    return {*scope.records[0].metrics}


def playing() -> set[str]:
    """The metric names of a generator and a critic in one model, where the critic's loss broadcasts [B, 1] and [B]."""
    nets = torch.nn.ModuleDict({"generator": torch.nn.Linear(3, 4), "critic": torch.nn.Linear(4, 1)})
    optimizers = [torch.optim.Adam(nets[name].parameters()) for name in ("critic", "generator")]
    with flowscope.watch(nets, optimizers, config={"console": "off"}) as scope:
        made = nets["generator"](torch.randn(5, 3))
        for inputs, optimizer in zip((made.detach(), made), optimizers, strict=True):
            optimizer.zero_grad()
            (nets["critic"](inputs) - torch.ones(5)).square().mean().backward()
            optimizer.step()
    return {*scope.records[0].metrics}


def evaluating() -> set[str]:
    """The metric names of a step in which the optimizer runs the model several times."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batches()[0][0]).square().mean()
        loss.backward()
        return loss

    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        optimizer.step(closure)
    return {split_key(key)[0] for key in scope.records[0].metrics}


class Coupling(torch.nn.Module):
    """A block that returns the log of its scale beside the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.scale(x)
        return x + scale, scale.relu().log()


class Couplings(torch.nn.Module):
    """Returns what the last of them does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Coupling() for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x, beside = layer(x)
        return x, beside


def returning_more() -> set[str]:
    """The metric names of a model that returns two tensors, and of blocks that do, one of them not finite."""
    model = Couplings()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        torch.cat(model(torch.randn(5, 4))).sum().backward()
        optimizer.step()
    return {split_key(key)[0] for key in scope.records[0].metrics}


class Checkpointed(torch.nn.Module):
    """Runs its blocks again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


def replaying() -> set[str]:
    """The metric names of a model that does."""
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    return {split_key(key)[0] for key in scope.records[0].metrics}


def built_in_forward() -> set[str]:
    """The metric names of a model that makes a layer in each forward."""
    model = mlp()
    model.register_forward_pre_hook(
        lambda module, args: (torch.nn.Linear(args[0].shape[-1], args[0].shape[-1])(*args),)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(3):
            model(torch.randn(4, next(model.parameters()).shape[1])).sum().backward()
            optimizer.step()
    return {*scope.records[-1].metrics}


def leaving_out() -> set[str]:
    """The metric names of a loss that multiplies what one layer returns by 0."""
    model = torch.nn.ModuleList([torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(6):
            optimizer.zero_grad()
            first, second = (layer(torch.randn(5, 3)).square().mean() for layer in model)
            (first + 0 * second).backward()
            optimizer.step()
    return {*scope.records[-1].metrics}


def test_documented_metrics_are_those_recorded() -> None:
    assert recorded() == documented("docs/metrics.md", "###")


def test_every_alert_kind_has_a_section_and_every_limit_is_a_field() -> None:
    sections = set(re.findall(r"^## (\w+)$", read("docs/alerts.md"), re.MULTILINE))
    assert {*(detector.kind for detector in DETECTORS), PartedFromGroup.kind} == sections
    fields = set(flowscope.WatchConfig.model_fields)
    shown = {
        key for block in python_blocks("docs/guide.md") for key in re.findall(r'^\s+"(\w+)": ', block, re.MULTILINE)
    }
    assert shown
    assert shown <= fields


@pytest.mark.parametrize(("word", "level"), [("Numbers", NUMBERS), ("Wiring", WIRING), ("outcome", OUTCOME)])
def test_the_kinds_of_a_level_are_named(word: str, level: Level) -> None:
    named = re.search(rf"\*{word}\* \((.+?)\)", read("docs/alerts.md"))
    assert named is not None
    kinds = {detector.kind for detector in DETECTORS if detector.level is level}
    assert set(re.findall(r"`(\w+)`", named.group(1))) == kinds


# -- how it works


WORKS = "docs/how-it-works.md"
PACKAGE = ROOT / "flowscope"


def section(name: str, heading: str) -> str:
    return read(name).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def names_in(path: Path) -> set[str]:
    """The classes and functions of a file, and `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            inside = node.body if isinstance(node, ast.ClassDef) else []
            methods = (inner.name for inner in inside if isinstance(inner, ast.FunctionDef))
            found |= {node.name, *(f"{node.name}.{method}" for method in methods)}
    return found


@pytest.mark.parametrize(("heading", "count"), [("The way of a tensor", 10), ("The way of a loss", 6)])
def test_each_sentence_of_a_way_names_what_is_in_its_file(heading: str, count: int) -> None:
    sentences = re.findall(r"^\d+\. (.+)$", section(WORKS, heading), re.MULTILINE)
    assert len(sentences) == count
    for sentence in sentences:
        assert sentence.count(". ") == 0
        told = re.findall(r"((?:`[\w.]+`(?: and |, )?)+) in `([\w/]+\.py)`", sentence)
        assert told, sentence
        for names, path in told:
            assert set(re.findall(r"`([\w.]+)`", names)) <= names_in(PACKAGE / path), sentence


def test_what_is_named_as_a_file_is_one() -> None:
    for path in re.findall(r"`(\w[\w/]*(?:\.py|/))`", read(WORKS)):
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path
    for names, path in re.findall(r"((?:`[\w.]+`(?: and |, )?)+) in `([\w/]+\.py)`", read(WORKS)):
        assert set(re.findall(r"`([\w.]+)`", names)) <= names_in(PACKAGE / path), (names, path)


def test_all_of_the_package_is_on_the_map() -> None:
    told = re.findall(r"`(\w[\w/]*(?:\.py|/))`", section(WORKS, "Map of the package"))
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")}
    assert {path for path in files if not path.startswith(tuple(told))} == {"_version.py"}


def test_the_table_of_steps_is_that_of_the_code() -> None:
    told = {}
    for event, phases, to, actions in re.findall(
        r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.*?) ?\|$", section(WORKS, "The way of a step"), re.MULTILINE
    ):
        for phase in [p.name for p in Phase] if phases == "any" else re.findall(r"\w+", phases):
            after = phase if to == "the same" else to.strip("`")
            told[Phase[phase], Event[event]] = (Phase[after], tuple(Action[a] for a in re.findall(r"\w+", actions)))
    for (phase, event), does in STEP.items():
        assert told.get((phase, event), (phase, ())) == does, (phase, event)


# -- write your own


OWN = "docs/write-your-own.md"
"""Its classes stand in a module `own`: the first block is its imports, each block with a class is part of it."""


def own_blocks() -> tuple[list[str], list[str]]:
    """The blocks that are the module, and those that use it."""
    first, *blocks = python_blocks(OWN)
    classes = [block for block in blocks if block.startswith("class ")]
    return [first, *classes], [block for block in blocks if block not in classes]


def test_classes_of_ones_own_keep_their_promises_and_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, blocks = own_blocks()
    (tmp_path / "own.py").write_text("\n\n".join(module), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    space: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": batches()}
    space["train_step"] = stepper(model, optimizer)
    for number, block in enumerate(blocks):
        exec(compile(block, f"{OWN}, python block {number}", "exec"), space)
    called = re.findall(r"^(check_\w+)\(own\.(\w+)", "\n".join(blocks), re.MULTILINE)
    assert {check for check, _ in called} == {"check_instrument", "check_detector", "check_connection"}
    assert all(hasattr(sys.modules["own"], name) for _, name in called)
    shown = capsys.readouterr().out
    assert "'blocks.0:input'" in shown
    assert "Third moment over the second" in shown
    assert len((tmp_path / "least.csv").read_text().splitlines()) == 3
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    sys.modules.pop("own")


def test_the_three_commonest_are_classes_of_twelve_lines() -> None:
    lines = {block.split("(")[0].split()[1]: len([line for line in block.splitlines() if line.strip()])
             for block in own_blocks()[0][1:]}  # fmt: skip
    assert {name: count for name, count in lines.items() if count > 12}.keys() <= {"OutputSize"}
    assert {"Skewness", "Lopsided", "HeadGrows", "ScaledBranch"} <= lines.keys()
