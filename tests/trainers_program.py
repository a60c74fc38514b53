"""What two ranks do in tests/test_trainer_ranks.py: `trainers_program.py FOLDER`, started by torch's own launcher.

Each scenario trains the same model for three steps, each rank on its own half of the batch, and writes what it saw.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from watch_models import Stack, data

import flowscope
from flowscope.integrations import accelerate as flowscope_accelerate
from flowscope.integrations import huggingface
from flowscope.integrations import lightning as flowscope_lightning

RANK = int(os.environ.get("RANK", "0"))
SAMPLES, STEPS, LR, CLIP = 6, 3, 0.05, 0.05


def batches(nan_at: int | None = None, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    out = [data(seed, batch=SAMPLES) for seed in range(steps)]
    if nan_at is not None:
        out[nan_at][0][SAMPLES - 1, 0, 0] = float("nan")  # in the second rank's half
    return out


def half(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    mine = slice(RANK * SAMPLES // 2, (RANK + 1) * SAMPLES // 2)
    return batch[0][mine], batch[1][mine]


def build() -> Stack:
    torch.manual_seed(0)
    return Stack()


def told(scope: flowscope.Scope | None, steps: int) -> dict[str, Any]:
    assert scope is not None
    records = scope.records
    return {
        "steps": steps,
        "alerts": [(a.kind, a.step) for a in scope.alerts],
        "losses": [r.loss for r in records],
        "labels": records[0].labels("param_grad_norm"),
        **{
            name: [r[name].tolist() for r in records]
            for name in ("grad_norm", "param_grad_norm", "param_grad_norm_raw")
            if name in records[0]
        },
    }


class Lit(pl.LightningModule):
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.model, self.sharded = build(), sharded

    def configure_model(self) -> None:
        if self.sharded:
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def with_lightning(strategy: Any, data: list[Any], sharded: bool = False, **options: Any) -> dict[str, Any]:
    watcher = flowscope_lightning.FlowscopeCallback(every=1, **options)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[watcher],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **({} if sharded else {"gradient_clip_val": CLIP}),
    )
    trainer.fit(Lit(sharded), DataLoader([half(batch) for batch in data], batch_size=None))
    return told(watcher.scope, trainer.global_step)


class WithLoss(nn.Module):
    """Stack, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.model(x), labels)}


def with_transformers(folder: Path) -> dict[str, Any]:
    rows = [{"x": x, "labels": y} for inputs, targets in batches() for x, y in zip(inputs, targets, strict=True)]
    watcher = huggingface.FlowscopeCallback(every=1)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES // 2,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(WithLoss(), arguments, train_dataset=rows, callbacks=[watcher])
    trainer.train()
    return told(watcher.scope, trainer.state.global_step)


def with_accelerate(nan_at: int | None = None) -> dict[str, Any]:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    steps = 0
    with flowscope_accelerate.watch(accelerator, model, optimizer, every=1, stop_on="non_finite") as scope:
        for batch in batches(nan_at, steps=8 if nan_at else STEPS):
            inputs, targets = half(batch)
            loss = nn.functional.mse_loss(model(inputs), targets)
            scope.step(loss=loss)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if accelerator.check_trigger():
                break
    return told(scope, steps)


def main(folder: Path) -> None:
    stop = {"stop_on": "non_finite"}
    scenarios: dict[str, Callable[[], dict[str, Any]]] = {
        "lightning ddp": lambda: with_lightning(DDPStrategy(process_group_backend="gloo"), batches()),
        "lightning fsdp2": lambda: with_lightning(ModelParallelStrategy(2, 1), batches(), sharded=True),
        "lightning stop": lambda: with_lightning(DDPStrategy(process_group_backend="gloo"), batches(2, 8), **stop),
        "transformers ddp": lambda: with_transformers(folder),
        "accelerate ddp": with_accelerate,
        "accelerate stop": lambda: with_accelerate(2),
    }
    results = {name: scenario() for name, scenario in scenarios.items()}
    (folder / f"rank{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
