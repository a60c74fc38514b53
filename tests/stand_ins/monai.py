"""MONAI 1.6.1's SupervisedTrainer, an engine of Ignite: handlers are attached before it has a network."""

from __future__ import annotations

from typing import Any

from ignite.engine import Engine
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):  # type: ignore[type-arg]
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at: int) -> Any:
        return self.data[at]


class SupervisedTrainer(Engine):
    def __init__(self, *, max_epochs: int, train_data_loader: Any, train_handlers: Any, **given: Any) -> None:
        super().__init__(type(self)._iteration)
        self.loader, self.epochs, self.scaler = train_data_loader, max_epochs, None
        for handler in train_handlers:
            handler.attach(self)
        self.network, self.optimizer, self.loss_function = (
            given[name] for name in ("network", "optimizer", "loss_function")
        )

    def _iteration(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        self.optimizer.zero_grad()
        answer = self.network(batch["image"])
        loss = self.loss_function(answer, batch["label"])
        loss.backward()
        self.optimizer.step()
        return [{"image": x, "pred": y, "loss": loss.item()} for x, y in zip(batch["image"], answer, strict=True)]

    def run(self) -> None:
        super().run(self.loader, max_epochs=self.epochs)


MODULES: dict[str, dict[str, Any]] = {
    "monai": {},
    "monai.engines": {"SupervisedTrainer": SupervisedTrainer},
    "monai.data": {"DataLoader": DataLoader, "Dataset": Rows},
}
