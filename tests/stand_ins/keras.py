"""Keras 3.15.1 on torch: layers are modules in a list of the model's own, and its optimizer is none of torch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Callback:
    model: Any = None

    def set_model(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args: None


class Variable(SimpleNamespace):
    """With `path`, `value` and `trainable`."""


class Layer(nn.Module):
    built = trainable = True

    @property
    def torch_params(self) -> nn.ParameterDict:
        return self._torch_params

    def _flatten_layers(self, include_self: bool = True, recursive: bool = True) -> list[Any]:
        return [self] if include_self else []


class Dense(Layer):
    def __init__(self, units: int, activation: str | None = None, *, name: str = "") -> None:
        super().__init__()
        self.units, self.name = units, name or f"dense_{id(self)}"
        self.activation = torch.tanh if activation == "tanh" else lambda x: x

    def build(self, width: int) -> int:
        scale = (6 / (width + self.units)) ** 0.5
        values = {"kernel": (2 * torch.rand(width, self.units) - 1) * scale, "bias": torch.zeros(self.units)}
        self.variables = [
            Variable(path=f"sequential/{self.name}/{k}", value=nn.Parameter(v), trainable=True)
            for k, v in values.items()
        ]
        self._torch_params = nn.ParameterDict({variable.path: variable.value for variable in self.variables})
        return self.units

    def forward(self, x: Tensor) -> Tensor:
        kernel, bias = (variable.value for variable in self.variables)
        return self.activation(x @ kernel + bias)


class Model(Layer):
    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        shape, *layers = layers
        self._layers = layers
        width = shape[0]
        for layer in layers:
            width = layer.build(width)
        self.variables = [variable for layer in layers for variable in layer.variables]
        self._torch_params = nn.ParameterDict({variable.path: variable.value for variable in self.variables})

    def _flatten_layers(self, include_self: bool = True, recursive: bool = True) -> list[Any]:
        return [self, *self._layers] if include_self else [*self._layers]

    def compile(self, optimizer: Any, loss: Any) -> None:
        self.optimizer = {"adam": 1e-3}.get(optimizer, optimizer)
        self._loss = {"mse": nn.functional.mse_loss}.get(loss, loss)
        self._loss_tracker = SimpleNamespace(total=Variable(), count=Variable())

    def get_weights(self) -> list[Any]:
        return [variable.value.detach().numpy() for variable in self.variables]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer(x)
        return x

    def fit(self, x: Any, y: Any, *, batch_size: int, epochs: int = 1, callbacks: Any, **options: Any) -> None:
        def tell(event: str, *given: Any) -> None:
            for callback in callbacks:
                getattr(callback, event)(*given)

        self.stop_training = False
        for callback in callbacks:
            callback.set_model(self)
        tell("on_train_begin")
        for epoch in range(epochs):
            if self.stop_training:
                break
            self._loss_tracker.total.value = self._loss_tracker.count.value = torch.tensor(0.0)
            tell("on_epoch_begin", epoch)
            for number, at in enumerate(range(0, len(x), batch_size)):
                tell("on_train_batch_begin", number)
                self._step(*(torch.as_tensor(part[at : at + batch_size]) for part in (x, y)))
                tell("on_train_batch_end", number, {})
            tell("on_epoch_end", epoch, {})
        tell("on_train_end", {})

    def _step(self, x: Tensor, y: Tensor) -> None:
        self.zero_grad()
        loss = self._loss(y, self(x)).mean()
        tracker = self._loss_tracker
        tracker.total.value = tracker.total.value + loss.detach() * len(x)
        tracker.count.value = tracker.count.value + len(x)
        loss.backward()
        with torch.no_grad():
            for variable in self.variables:
                variable.value.sub_(variable.value.grad.sign() * self.optimizer)


MODULES: dict[str, dict[str, Any]] = {
    "keras": {
        "Model": Model,
        "Sequential": Model,
        "Input": lambda shape: shape,
        "backend": SimpleNamespace(backend=lambda: "torch"),
        "callbacks": SimpleNamespace(Callback=Callback),
        "layers": SimpleNamespace(Dense=Dense),
        "optimizers": SimpleNamespace(Adam=lambda rate: rate),
        "utils": SimpleNamespace(set_random_seed=torch.manual_seed),
    }
}
