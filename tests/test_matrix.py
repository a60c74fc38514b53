"""Loops times what flowscope does in them: gradient products equal autograd's on an unwatched copy (docs/matrix.md).

The products are read from the first record, so each row trains one or two steps. Tolerance: 1e-5, in bf16 2e-2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_model import BATCH, DEPTH, MODES, Decoder, batch, make, truth
from torch.utils.data import DataLoader, Dataset
from two_ranks import torchrun

import flowscope
from flowscope.records import Record

ROOT = Path(__file__).resolve().parents[1]
LABELS = ["blocks.0:input", *(f"blocks.{n}" for n in range(DEPTH))]


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    yield
    torch._dynamo.reset()


def first_record(model: torch.nn.Module, step: Callable[[Any], None], **options: Any) -> Record:
    """Watch two steps; the first one's record."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with flowscope.watch(model, optimizer, config={"console": "off"}, **options) as scope:
        for _ in range(2):
            step(optimizer)
            optimizer.zero_grad()
        return scope.records[0]


def plain(model: Decoder) -> Record:
    def step(optimizer: torch.optim.Optimizer) -> None:
        model(**batch())["loss"].backward()
        optimizer.step()

    return first_record(model, step)


def compiled(model: Decoder) -> Record:
    def step(optimizer: torch.optim.Optimizer) -> None:
        fast(**batch())["loss"].backward()
        optimizer.step()

    # inductor takes minutes here and has tests of its own (test_compile.py, test_wrap_compile.py)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    return first_record(model, step)


def checkpointed(model: Decoder) -> Record:
    model.recompute = True
    return plain(model)


def autocast_bf16(model: Decoder) -> Record:
    def step(optimizer: torch.optim.Optimizer) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch())["loss"]
        loss.backward()
        optimizer.step()

    return first_record(model, step)


def grad_scaler(model: Decoder) -> Record:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(optimizer: torch.optim.Optimizer) -> None:
        scaler.scale(model(**batch())["loss"]).backward()
        scaler.step(optimizer)
        scaler.update()

    return first_record(model, step, scaler=scaler)


def accumulation(model: Decoder) -> Record:
    def step(optimizer: torch.optim.Optimizer) -> None:
        for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
            (model(**{name: ids[half] for name, ids in batch().items()})["loss"] / 2).backward()
        optimizer.step()

    return first_record(model, step)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The batch, a few times over."""

    def __len__(self) -> int:
        return 2 * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: ids[index % BATCH] for name, ids in batch().items()}


def lightning_loop(model: Decoder, folder: Path) -> Record:
    from lightning.pytorch import LightningModule, Trainer

    from flowscope.integrations.lightning import FlowscopeCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, rows: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            return self.model(**rows)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    watcher = FlowscopeCallback(config={"console": "off"})
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(max_steps=2, accelerator="cpu", callbacks=[watcher], default_root_dir=folder, **quiet)
    trainer.fit(Module(), DataLoader(Rows(), batch_size=BATCH, num_workers=0))
    assert watcher.scope is not None
    return watcher.scope.records[0]


def transformers_trainer(model: Decoder, folder: Path) -> Record:
    from transformers import Trainer, TrainingArguments

    from flowscope.integrations.huggingface import FlowscopeCallback

    watcher = FlowscopeCallback(config={"console": "off"})
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=2,
        learning_rate=0.1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
    )
    Trainer(model, arguments, train_dataset=Rows(), callbacks=[watcher]).train()
    assert watcher.scope is not None
    return watcher.scope.records[0]


IN_PROCESS: dict[str, Callable[[Decoder], Record]] = {
    "plain": plain,
    "compiled": compiled,
    "checkpointed": checkpointed,
    "autocast bf16": autocast_bf16,
    "GradScaler": grad_scaler,
    "accumulation": accumulation,
}
TRAINERS: dict[str, Callable[[Decoder, Path], Record]] = {
    "Lightning": lightning_loop,
    "Trainer": transformers_trainer,
}
RANKS = {"DDP": "ddp", "FSDP2": "fsdp2"}


def agree(product: Any, mode: str | None, tolerance: float) -> None:
    assert list(product) == pytest.approx(truth(mode), rel=tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", IN_PROCESS)
def test_loops_of_ones_own(loop: str, mode: str | None) -> None:
    record = IN_PROCESS[loop](make(mode))
    assert record.labels("gradient_product") == LABELS
    agree(record["gradient_product"], mode, 2e-2 if "bf16" in loop else 1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers(trainer: str, mode: str | None, tmp_path: Path) -> None:
    record = TRAINERS[trainer](make(mode), tmp_path)
    assert [label.removeprefix("model.") for label in record.labels("gradient_product")] == LABELS
    agree(record["gradient_product"], mode, 1e-5)


@pytest.mark.parametrize("strategy", RANKS)
def test_two_ranks(strategy: str) -> None:
    """Two processes, half of the batch each: the numbers of the whole batch in one process."""
    printed = torchrun("matrix_ranks.py", RANKS[strategy], limit=300)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [row["mode"] for row in rows] == [*MODES]
    for row in rows:
        assert row["labels"] == LABELS
        agree(row["product"], row["mode"], 1e-5)


def test_the_documented_matrix_is_the_tested_one() -> None:
    text = (ROOT / "docs" / "matrix.md").read_text()
    rows = re.findall(r"^\| ([A-Za-z].*?) \|", text, re.MULTILINE)
    assert rows[1:] == [*IN_PROCESS, *RANKS, *TRAINERS]
    assert re.findall(r"^\| loop \| (.*) \|$", text, re.MULTILINE) == ["watch | watch + `keel` | watch + `dhc`"]
