"""flowscope in Lightning: one callback. Here it also ends the run that cannot recover."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from byte_lm import ByteLM, batches, load_text
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from flowscope.integrations.lightning import FlowscopeCallback


class Bytes(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self):
        return batches(load_text())


class LitByteLM(pl.LightningModule):
    def __init__(self, norm: str = "post") -> None:
        super().__init__()
        self.model = ByteLM(norm=norm)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 60, log_dir: str | None = "runs/lightning_loop") -> pl.Trainer:
    pl.seed_everything(0)
    watcher = FlowscopeCallback(log_dir=log_dir, on_alert=print, stop_on=["vanishing_gradient", "non_finite"])
    trainer = pl.Trainer(
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[watcher],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitByteLM(), DataLoader(Bytes(), batch_size=None))
    return trainer


if __name__ == "__main__":
    main()
