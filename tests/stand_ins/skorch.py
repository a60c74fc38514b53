"""skorch 1.4.0: `fit` makes module and optimizer, then tells; the optimizer steps by a closure."""

from __future__ import annotations

from typing import Any

import torch


class Callback:
    """Events that a net tells of; each takes the net and keywords."""

    def initialize(self) -> Callback:
        return self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class NeuralNetClassifier:
    def __init__(self, module: Any, *, criterion: Any, callbacks: Any = (), lr: float = 0.01, **options: Any) -> None:
        self.module, self.criterion, self.callbacks, self.lr = module, criterion, callbacks, lr
        self.max_epochs, self.batch_size = options["max_epochs"], options["batch_size"]

    def set_params(self, **options: Any) -> NeuralNetClassifier:
        return self

    def notify(self, name: str, **given: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, **given)

    def fit(self, X: Any, y: Any) -> NeuralNetClassifier:
        self.module_ = self.module()
        self.optimizer_ = torch.optim.SGD(self.module_.parameters(), lr=self.lr)
        self.history: list[dict[str, Any]] = []
        for callback in self.callbacks:
            callback.initialize()
        self.notify("on_train_begin", X=X, y=y)
        try:
            for _ in range(self.max_epochs):
                self._epoch(torch.as_tensor(X), torch.as_tensor(y))
        except KeyboardInterrupt:
            pass
        self.notify("on_train_end", X=X, y=y)
        return self

    def _epoch(self, X: Any, y: Any) -> None:
        self.history.append({"batches": []})
        self.notify("on_epoch_begin", dataset_train=X, dataset_valid=None)
        for at in range(0, len(X), self.batch_size):
            batch = X[at : at + self.batch_size], y[at : at + self.batch_size]
            self.notify("on_batch_begin", batch=batch, training=True)
            step: dict[str, Any] = {}

            def closure(batch: Any = batch, step: dict[str, Any] = step) -> Any:
                self.optimizer_.zero_grad()
                step["y_pred"] = self.module_(batch[0])
                step["loss"] = self.criterion()(step["y_pred"], batch[1])
                step["loss"].backward()
                return step["loss"]

            self.optimizer_.step(closure)
            self.history[-1]["batches"].append({"train_loss": float(step["loss"])})
            self.notify("on_batch_end", batch=batch, training=True, **step)
        self.notify("on_epoch_end", dataset_train=X, dataset_valid=None)


MODULES = {"skorch": {"NeuralNetClassifier": NeuralNetClassifier}, "skorch.callbacks": {"Callback": Callback}}
