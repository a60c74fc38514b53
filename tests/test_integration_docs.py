"""The code of docs/integrations.md runs, and its tables name what exists."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from stand_ins import STAND_INS, standing_in
from test_huggingface import data as token_rows
from test_huggingface import make_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments
from watch_models import IN, OUT, B, Stack, T

import flowscope
from flowscope.detectors import DETECTORS

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
NAMES = [re.search(r"flowscope\.integrations(?: import |\.)(\w+)", block)[1] for block in BLOCKS]  # type: ignore[index]


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Stack()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def rows(count: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count * B, T, IN, generator=generator), torch.randn(count * B, T, OUT, generator=generator)
    )


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "FLOWSCOPE_STRICT": "1",
        "ACCELERATE_USE_CPU": "true",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "KERAS_BACKEND": "torch",
    }.items():
        monkeypatch.setenv(name, value)
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(scope: flowscope.Scope) -> None:
        for inputs, targets in DataLoader(rows(), batch_size=B):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)

    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=4,
        per_device_train_batch_size=3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    yield {
        "flowscope": flowscope,
        "model": model,
        "optimizer": optimizer,
        "train": train,
        "loader": DataLoader(rows(), batch_size=B),
        "loss_function": nn.functional.mse_loss,
        "module": Lit(),
        "settings": {**quiet, "enable_model_summary": False},
        "arguments": arguments,
        "dataset": token_rows(),
    }
    # both keep something in the process: a service, the state of the first accelerator
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.teardown()
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        for kind in (accelerate.AcceleratorState, accelerate.GradientState, accelerate.PartialState):
            kind._reset_state()


MISSING = """
import importlib, sys
packages = {"huggingface": "transformers", "prometheus": "prometheus_client"}
sys.modules["pytorch_lightning"] = None  # Lightning's other name
for name in sys.argv[1:]:
    sys.modules[packages.get(name, name)] = None  # as if not installed
    try:
        importlib.import_module(f"flowscope.integrations.{name}")
    except Exception as error:
        print(name, type(error).__name__, f"flowscope[{name}]" in str(error))
"""


def test_a_missing_package_is_an_error_that_names_the_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MISSING, *NAMES], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == [f"{name} FlowscopeError True" for name in NAMES], done.stderr


def test_every_adapter_has_a_block() -> None:
    shared = {"__init__", "trainer", "model_loss", "tried_steps"}
    adapters = {p.stem for p in (ROOT / "integrations").glob("*.py")} - shared
    assert sorted(NAMES) == sorted(adapters)
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for name in adapters:
        assert f"`flowscope[{name}]`" in TEXT
        assert name in extras


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def further_data() -> dict[str, Any]:
    pairs = list(rows(4))[:8]
    return {
        "pairs": pairs,
        "images": [{"image": x, "label": y} for x, y in pairs],
        "Module": Net,
        "features": torch.randn(8, 6).numpy(),
        "labels": torch.randint(0, 3, (8,)).numpy(),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_blocks_run(name: str, space: dict[str, Any]) -> None:
    if name == "huggingface":
        space["model"] = make_model()
    if name in STAND_INS:
        space |= {"torch": torch, "loader": None, **further_data()}
    stands_in = name in STAND_INS and find_spec(name) is None
    with standing_in(name) if stands_in else contextlib.nullcontext():
        exec(compile(BLOCKS[NAMES.index(name)], f"docs/integrations.md, {name}", "exec"), space)
    scope = space["scope"] if "scope" in space else space["watcher"].scope
    assert scope.closed
    if name == "stable_baselines3":
        assert scope.records
        return
    assert len(scope.records) == (2 if name == "accelerate" else 4)
    assert None not in [record.loss for record in scope.records]


def test_the_migration_page_names_what_exists() -> None:
    text = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    kinds = {detector.kind for detector in DETECTORS}
    rules = text.split("## SageMaker")[1].split("## Composer")[0]
    named = {
        kind for row in rules.splitlines() if row.startswith("|") for kind in re.findall(r"`(\w+)`", row.split("|")[2])
    }
    assert named - {"stop_on"} <= kinds
    assert len(named) > 10
    for key in ("vanishing_product", "dead_units", "saturation", "small_update", "large_update"):
        default = flowscope.WatchConfig.model_fields[key].default
        stated = re.search(rf"`{key}` ([\d.e-]+)", rules)
        assert stated is not None, key
        assert float(stated[1]) == default, key
