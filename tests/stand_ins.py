"""Small stand-ins for trainers that are not installed: what their documents promise, and as much as the pages use.

A stand-in trains: its optimizer steps, its events come in the package's order. What the real packages do is tested by
`tests/test_adapters.py` where they are installed, which `make stacks` sees to.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def monai() -> dict[str, dict[str, Any]]:
    class SupervisedTrainer(Engine):
        """An Ignite engine whose output is a list with a dict for each sample, its loss inside."""

        def __init__(
            self, device: Any, max_epochs: int, train_data_loader: Any, network: nn.Module, optimizer: Any,
            loss_function: Any, train_handlers: Iterable[Any],
        ) -> None:  # fmt: skip
            super().__init__(self._iteration)
            self.loader, self.epochs, self.scaler = train_data_loader, max_epochs, None
            self.network, self.optimizer, self.loss_function = network, optimizer, loss_function
            for handler in train_handlers:
                handler.attach(self)

        def _iteration(self, engine: Engine, batch: Any) -> Any:
            self.optimizer.zero_grad()
            loss = self.loss_function(self.network(batch["image"]), batch["label"])
            loss.backward()
            self.optimizer.step()
            return [{"image": image, "loss": loss.item()} for image in batch["image"]]

        def run(self) -> None:  # type: ignore[override]
            super().run(self.loader, max_epochs=self.epochs)

    return {
        "monai": {},
        "monai.data": {"DataLoader": DataLoader, "Dataset": list},
        "monai.engines": {"SupervisedTrainer": SupervisedTrainer},
    }


def stable_baselines3() -> dict[str, dict[str, Any]]:
    class BaseCallback:
        def init_callback(self, model: Any) -> None:
            self.model, self.logger = model, model.logger

    class PPO:
        """Acts for `n_steps`, then trains twice on what it saw; logs the loss of its last training."""

        def __init__(self, policy: str, environment: str, n_steps: int) -> None:
            self.n_steps, self.logger = n_steps, SimpleNamespace(name_to_value={})
            self.policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
            self.policy.optimizer = torch.optim.Adam(self.policy.parameters())  # type: ignore[assignment]

        def learn(self, steps: int, callback: Any) -> None:
            callback.init_callback(self)
            callback._on_training_start()
            for _ in range(steps // self.n_steps):
                callback._on_rollout_start()
                for _ in range(self.n_steps):
                    with torch.no_grad():
                        self.policy(torch.randn(1, 4))
                    if not callback._on_step():
                        return
                for _ in range(2):
                    loss = self.policy(torch.randn(16, 4)).square().mean()
                    self.policy.optimizer.zero_grad()  # type: ignore[union-attr, operator]
                    loss.backward()
                    self.policy.optimizer.step()  # type: ignore[union-attr, operator]
                self.logger.name_to_value["train/loss"] = loss.item()
            callback._on_training_end()

    return {
        "stable_baselines3": {"PPO": PPO},
        "stable_baselines3.common": {},
        "stable_baselines3.common.callbacks": {"BaseCallback": BaseCallback},
    }


def fastai() -> dict[str, dict[str, Any]]:
    class Callback:
        run = True

        def __getattr__(self, event: str) -> Callable[[], None]:
            if event.startswith(("before_", "after_")):
                return lambda: None
            raise AttributeError(event)

    class CancelFitException(Exception):  # noqa: N818 (as it is called there)
        pass

    class Learner:
        """Its optimizer is none of torch's."""

        def __init__(self, loaders: Any, model: nn.Module, loss_func: Any, cbs: Any) -> None:
            self.loaders, self.model, self.loss_func, self.callback = loaders, model, loss_func, cbs
            cbs.learn, self.training = self, True

        def no_bar(self) -> Any:
            return contextlib.nullcontext()

        no_logging = no_bar

        def fit(self, epochs: int) -> None:
            self.callback.before_fit()
            with contextlib.suppress(CancelFitException):
                for x, y in [batch for _ in range(epochs) for batch in self.loaders[0]]:
                    self.loss = self.loss_func(self.model(x), y)
                    self.loss.backward()
                    self._step()
                    self.callback.after_step()
                    self.model.zero_grad()
                    self.callback.after_batch()
            self.callback.after_fit()

        @torch.no_grad()
        def _step(self) -> None:
            for parameter in self.model.parameters():
                parameter -= 0.01 * parameter.grad

    def loader(pairs: Any, bs: int, num_workers: int) -> Any:
        return DataLoader(pairs, batch_size=bs, num_workers=num_workers)

    return {
        "fastai": {},
        "fastai.callback": {},
        "fastai.callback.core": {"Callback": Callback, "CancelFitException": CancelFitException},
        "fastai.data": {},
        "fastai.data.core": {"DataLoaders": lambda *loaders: loaders},
        "fastai.data.load": {"DataLoader": loader},
        "fastai.learner": {"Learner": Learner},
    }


def skorch() -> dict[str, dict[str, Any]]:
    class Callback:
        def initialize(self) -> None: ...

    class NeuralNetClassifier:
        """`fit` makes module and optimizer, then tells its callbacks."""

        def __init__(self, module: Any, **options: Any) -> None:
            self.module = module
            self.set_params(**options)

        def set_params(self, **options: Any) -> Any:
            vars(self).update(options)
            return self

        def fit(self, X: Any, y: Any) -> None:
            self.module_ = self.module()
            self.optimizer_ = torch.optim.SGD(self.module_.parameters(), lr=0.01)
            loss_function = self.criterion()  # type: ignore[attr-defined]
            self._tell("on_train_begin", X, y)
            rows = DataLoader(TensorDataset(torch.as_tensor(X), torch.as_tensor(y)), batch_size=self.batch_size)  # type: ignore[attr-defined]
            for batch in [batch for _ in range(self.max_epochs) for batch in rows]:  # type: ignore[attr-defined]
                self.optimizer_.zero_grad()
                loss = loss_function(self.module_(batch[0]), batch[1])
                loss.backward()
                self.optimizer_.step()
                self._tell("on_batch_end", batch=batch, training=True, loss=loss)
            self._tell("on_train_end", X, y)

        def _tell(self, event: str, *values: Any, **more: Any) -> None:
            for callback in self.callbacks:  # type: ignore[attr-defined]
                getattr(callback, event)(self, *values, **more)

    return {"skorch": {"NeuralNetClassifier": NeuralNetClassifier}, "skorch.callbacks": {"Callback": Callback}}


class Dense(nn.Module):
    def __init__(self, units: int, activation: str | None = None) -> None:
        super().__init__()
        self.inner, self.name = nn.LazyLinear(units), f"dense_{id(self)}"
        self.activation = {"tanh": torch.tanh, None: lambda x: x}[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.inner(x))  # type: ignore[no-any-return, operator]


class Model:
    """Keeps its layers in a list, and of the losses of an epoch their sum and weight."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = [layer for layer in layers if isinstance(layer, Dense)]
        self(torch.zeros(1, *layers[0]))
        zeros = [SimpleNamespace(value=torch.zeros(())) for _ in range(2)]
        self._loss_tracker = SimpleNamespace(total=zeros[0], count=zeros[1])

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer(x)
        return x

    def _flatten_layers(self, include_self: bool, recursive: bool) -> list[Any]:
        return self._layers

    def compile(self, optimizer: str, loss: str) -> None:
        assert (optimizer, loss) == ("adam", "mse")
        self.optimizer = torch.optim.Adam([p for layer in self._layers for p in layer.parameters()])

    def fit(self, x: Tensor, y: Tensor, batch_size: int, verbose: int, callbacks: list[Any]) -> None:
        def tell(event: str, *values: Any) -> None:
            for callback in callbacks:
                getattr(callback, event)(*values)

        tell("set_model", self)
        tell("on_train_begin")
        tell("on_epoch_begin", 0)
        for batch, rows in enumerate(torch.arange(len(x)).split(batch_size)):
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self(x[rows]), y[rows])
            loss.backward()
            self.optimizer.step()
            self._loss_tracker.total.value += loss.detach() * len(rows)
            self._loss_tracker.count.value += len(rows)
            tell("on_train_batch_end", batch)
        tell("on_train_end")


def keras() -> dict[str, dict[str, Any]]:
    class Callback:
        def set_model(self, model: Any) -> None:
            self.model = model

    return {
        "keras": {
            "Sequential": Model,
            "Model": Model,
            "Input": lambda shape: shape,
            "backend": SimpleNamespace(backend=lambda: "torch"),
            "layers": SimpleNamespace(Dense=Dense),
            "callbacks": SimpleNamespace(Callback=Callback),
        }
    }


STAND_INS = {made.__name__: made for made in (monai, stable_baselines3, fastai, skorch, keras)}
"""Name of the package -> its modules, and what is in them."""


@contextlib.contextmanager
def standing_in(package: str) -> Iterator[None]:
    """Within it the package's stand-in is imported in its place, and flowscope's adapter for it anew."""
    with pytest.MonkeyPatch.context() as patch:
        for name, held in STAND_INS[package]().items():
            module = ModuleType(name)
            vars(module).update(held)
            patch.setitem(sys.modules, name, module)
        adapter = f"flowscope.integrations.{package}"
        patch.delitem(sys.modules, adapter, raising=False)
        yield
        sys.modules.pop(adapter, None)
