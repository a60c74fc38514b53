"""The adapters of stable-baselines3, fastai, skorch, Keras and MONAI: the real package trains, one step in a record.

Each test is skipped where its package is not installed; `make stacks` runs them in an environment of their own each.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flowscope.detectors import Detector

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, D, K = 32, 6, 3


def data() -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(ROWS, D)).astype("float32"), generator.integers(0, K, ROWS)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, K))


def no_warning(scope: Any) -> bool:
    return not [alert for alert in scope.alerts if alert.severity != "info"]


def products(scope: Any) -> list[Any]:
    record = scope.records[-1]
    return [values for key, values in record.metrics.items() if key.startswith("gradient_product")]


def test_skorch() -> None:
    skorch = pytest.importorskip("skorch")
    from flowscope.integrations.skorch import FlowscopeCallback

    x, y = data()

    def fitted(**more: Any) -> Any:
        torch.manual_seed(0)
        options = {"criterion": nn.CrossEntropyLoss, "max_epochs": 3, "batch_size": 8, "verbose": 0, **more}
        return skorch.NeuralNetClassifier(net, train_split=None, **options).fit(x, y)

    watcher = FlowscopeCallback(every=1)
    bare, watched = fitted(), fitted(callbacks=[watcher])
    for p, q in zip(bare.module_.parameters(), watched.module_.parameters(), strict=True):
        assert torch.equal(p, q)
    records = watcher.scope.records
    assert [record.step for record in records] == list(range(12))
    losses = [batch["train_loss"] for epoch in watched.history for batch in epoch["batches"]]
    assert [record.loss for record in records] == pytest.approx(losses)
    assert pickle.loads(pickle.dumps(watcher)).scope is None
    stopped = fitted(
        callbacks=[FlowscopeCallback(every=1, on_alert=lambda a: None, detectors=[Always], stop_on="error")]
    )
    assert len(stopped.history) == 1


class Always(Detector):
    kind = "always"

    def findings(self, record: Any, header: Any) -> Any:
        yield self.found("", 1.0, 0.0, "always", severity="error", records=1)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_fastai(own: bool, accumulated: int) -> None:
    pytest.importorskip("fastai")
    from fastai.callback.training import GradientAccumulation
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.optimizer import Adam, OptimWrapper

    from flowscope.integrations.fastai import FlowscopeCallback

    x, y = map(torch.as_tensor, data())
    rows = list(zip(x, y, strict=True))
    loaders = DataLoaders(DataLoader(rows, bs=4, shuffle=False, num_workers=0), DataLoader(rows, bs=4, num_workers=0))

    def fitted(*more: Any) -> Any:
        torch.manual_seed(0)
        chosen = Adam if own else functools.partial(OptimWrapper, opt=torch.optim.Adam)
        callbacks = [*([GradientAccumulation(8)] if accumulated > 1 else []), *more]
        learner = Learner(loaders, net(), loss_func=nn.CrossEntropyLoss(), opt_func=chosen, cbs=callbacks)
        with learner.no_logging(), learner.no_bar():
            learner.fit(2, 1e-2)
        return learner

    watcher = FlowscopeCallback(every=1)
    bare, watched = fitted(), fitted(watcher)
    for p, q in zip(bare.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(p, q)
    steps = 16 // accumulated
    assert [record.step for record in watcher.scope.records] == list(range(steps))
    assert all(record.loss is not None for record in watcher.scope.records)
    assert no_warning(watcher.scope)


def test_keras() -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    from flowscope.integrations.keras import FlowscopeCallback

    x, y = data()
    seen: list[float] = []

    def loss(truth: Tensor, answer: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(answer, truth.long().reshape(-1), reduction="none")
        if answer.requires_grad:
            seen.append(float(value.mean()))
        return value

    def fitted(*callbacks: Any) -> Any:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, "tanh", name=f"hidden{i}") for i in range(3)]
        model = keras.Sequential([keras.Input((D,)), *layers, keras.layers.Dense(K, name="logits")])
        model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))
        return model

    watcher = FlowscopeCallback(every=1)
    bare = fitted()
    seen.clear()
    watched = fitted(watcher)
    for p, q in zip(bare.get_weights(), watched.get_weights(), strict=True):
        np.testing.assert_array_equal(p, q)
    records = watcher.scope.records
    assert [record.step for record in records] == list(range(8))
    assert [record.loss for record in records] == pytest.approx(seen, rel=1e-5)
    assert list(records[-1].labels("gradient_product")) == ["hidden0", "hidden1", "hidden2", "logits"]
    assert np.isfinite(products(watcher.scope)[0]).all()
    assert (records[-1]["update_ratio"] > 0).all()
    assert no_warning(watcher.scope)


@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "DQN", "SAC", "TD3"])
def test_stable_baselines3(algorithm: str, caplog: pytest.LogCaptureFixture) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from flowscope.integrations.stable_baselines3 import FlowscopeCallback

    environment = "Pendulum-v1" if algorithm in ("SAC", "TD3") else "CartPole-v1"
    more: dict[str, Any] = {"PPO": {"n_steps": 64, "n_epochs": 2}, "A2C": {}}.get(algorithm, {"learning_starts": 20})
    steps = {"PPO": 256, "A2C": 200}.get(algorithm, 80)

    def learned(*callbacks: Any) -> Any:
        model = getattr(sb3, algorithm)("MlpPolicy", environment, seed=0, device="cpu", **more)
        return model.learn(steps, callback=list(callbacks))

    watcher = FlowscopeCallback(every=1)
    with caplog.at_level(logging.WARNING, "flowscope"):
        bare, watched = learned(), learned(watcher)
    for p, q in zip(bare.policy.parameters(), watched.policy.parameters(), strict=True):
        assert torch.equal(p, q)
    assert watcher.scope.records
    assert any(record.loss is not None for record in watcher.scope.records)
    assert any(np.isfinite(product).all() for product in products(watcher.scope))
    assert no_warning(watcher.scope)
    assert not caplog.records
    assert "no finite gradient" not in watcher.scope.summary()


def test_monai() -> None:
    pytest.importorskip("ignite")
    engines = pytest.importorskip("monai.engines")
    from monai.data import DataLoader, Dataset

    from flowscope.integrations.monai import FlowscopeHandler

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Tanh()) for _ in range(3)])
    rows = [{"image": torch.randn(1, 8, 8), "label": torch.zeros(1, 8, 8)} for _ in range(8)]
    handler = FlowscopeHandler(every=1)
    trainer = engines.SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=3,
        train_data_loader=DataLoader(Dataset(rows), batch_size=4),
        network=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loss_function=nn.MSELoss(),
        train_handlers=[handler],
    )
    trainer.run()
    assert [record.step for record in handler.scope.records] == list(range(6))
    assert all(record.loss is not None for record in handler.scope.records)
    assert no_warning(handler.scope)
