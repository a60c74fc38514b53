"""The adapters of stable-baselines3, fastai, skorch, Keras and MONAI: one step in a record.

Each test runs twice: on a stand-in that makes the calls of the package (`stand_ins/`), and on the package itself where
it is installed. CONTRACTS is what each package was seen to call, and both are held to it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import standing_in
from torch import Tensor, nn

import flowscope
from flowscope.detectors import Detector

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, D, K = 32, 6, 3


Use = Callable[[str], Any]

CONTRACTS = {
    "skorch": [
        "on_train_begin module_ optimizer_",
        "on_batch_end module_ optimizer_ training=True loss y_pred x8",
        "on_train_end module_ optimizer_",
    ],
    "fastai": [
        "before_fit",
        "before_train",
        "after_batch training=True",
        "after_step training=True loss=0",
        "after_batch training=True x2",
        "after_step training=True loss=0",
        "after_batch training=True",
        "after_batch training=False x2",
        "before_train",
        "after_batch training=True",
        "after_step training=True loss=0",
        "after_batch training=True x2",
        "after_step training=True loss=0",
        "after_batch training=True",
        "after_batch training=False x2",
        "after_fit",
        "before_fit",
        "before_train",
        "after_batch training=True",
        "after_fit",
        "before_fit",
        "after_batch training=False x2",
        "after_fit",
    ],
    "keras": [
        "on_train_begin ['hidden0', 'hidden1'] built=True",
        "named_modules 0",
        "variables [['hidden0/kernel', 'hidden0/bias'], ['hidden1/kernel', 'hidden1/bias']] True",
        "on_epoch_begin",
        "on_train_batch_end count=16.0 total=0",
        "on_train_batch_end count=32.0 total=0",
        "on_epoch_begin",
        "on_train_batch_end count=16.0 total=0",
        "on_train_batch_end count=32.0 total=0",
        "on_train_end",
    ],
    "stable_baselines3": [
        "start True delay=1",
        "rollout []",
        "step x5",
        "rollout ['train/policy_loss']",
        "step x5",
        "end",
        "start ['critic', 'actor'] delay=2",
        "rollout []",
        "step",
        "rollout []",
        "step",
        "rollout ['train/critic_loss']",
        "step",
        "end",
    ],
    "monai": [
        "attach network=False",
        "started ['network', 'optimizer', 'scaler'] iteration=0",
        "completed list of 2, loss=True x3",
    ],
}
"""Events in their order, with what is there to read; `xN` behind what came N times in a row."""


@pytest.fixture(params=["stand-in", "real"])
def use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Gives the package, or puts its stand-in where the adapter will import it from."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with contextlib.ExitStack() as held:

        def get(name: str) -> Any:
            if request.param == "real":
                return pytest.importorskip(name)
            held.enter_context(standing_in(name))
            return sys.modules[name]

        yield get


def runs(events: list[str]) -> list[str]:
    """What follows itself, once."""
    counted = [(event, len(list(same))) for event, same in itertools.groupby(events)]
    return [event if count == 1 else f"{event} x{count}" for event, count in counted]


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


def test_skorch(use: Use) -> None:
    skorch = use("skorch")
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
def test_fastai(use: Use, own: bool, accumulated: int) -> None:
    use("fastai")
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
    watched.validate()  # has the events of a fit
    assert len(watcher.scope.records) == steps


def test_keras(use: Use) -> None:
    keras = use("keras")
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


def test_a_bare_watch_of_a_keras_model_finds_its_layers(use: Use) -> None:
    keras = use("keras")
    x, y = data()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh", name=f"hidden{i}") for i in range(3)]
    model = keras.Sequential([keras.Input((D,)), *layers, keras.layers.Dense(K, name="logits")])
    optimizer = torch.optim.SGD([variable.value for variable in model.variables], 0.1)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.as_tensor(x)), torch.as_tensor(y).long().reshape(-1))
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    last = scope.records[-1]
    assert last.loss == pytest.approx(loss.item())
    assert list(last.labels("gradient_product")) == ["hidden0", "hidden1", "hidden2", "logits"]
    norms = dict(zip(last.labels("param_grad_norm"), last["param_grad_norm"], strict=True))
    expected = {variable.value.grad.norm().item() for variable in model.variables}
    assert len(norms) == 8
    assert {round(value, 5) for value in norms.values()} == {round(value, 5) for value in expected}


@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "DQN", "SAC", "TD3"])
def test_stable_baselines3(use: Use, algorithm: str, caplog: pytest.LogCaptureFixture) -> None:
    sb3 = use("stable_baselines3")
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


def test_monai(use: Use) -> None:
    pytest.importorskip("ignite")
    use("monai")
    from monai.data import DataLoader, Dataset
    from monai.engines import SupervisedTrainer

    from flowscope.integrations.monai import FlowscopeHandler

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Tanh()) for _ in range(3)])
    rows = [{"image": torch.randn(1, 8, 8), "label": torch.zeros(1, 8, 8)} for _ in range(8)]
    handler = FlowscopeHandler(every=1)
    trainer = SupervisedTrainer(
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


# -- the contracts


def story_of_skorch(skorch: Any) -> list[str]:
    from skorch.callbacks import Callback

    seen: list[str] = []

    class Spy(Callback):
        def tell(self, event: str, net: Any, *names: str) -> None:
            seen.append(" ".join([event, *(name for name in ("module_", "optimizer_") if hasattr(net, name)), *names]))

        def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **given: Any) -> None:
            self.tell("on_train_begin", net)

        def on_batch_end(self, net: Any, batch: Any = None, training: Any = None, **given: Any) -> None:
            self.tell("on_batch_end", net, f"{training=}", *sorted(given))

        def on_train_end(self, net: Any, X: Any = None, y: Any = None, **given: Any) -> None:
            self.tell("on_train_end", net)

    options = {"criterion": nn.CrossEntropyLoss, "max_epochs": 2, "batch_size": 8, "verbose": 0, "train_split": None}
    skorch.NeuralNetClassifier(net, callbacks=[Spy()], **options).fit(*data())
    return seen


def story_of_fastai(fastai: Any) -> list[str]:
    from fastai.callback.core import Callback, CancelFitException
    from fastai.callback.training import GradientAccumulation
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner

    seen: list[str] = []

    class Spy(Callback):
        def before_fit(self) -> None:
            seen.append("before_fit")

        def before_train(self) -> None:
            seen.append("before_train")

        def after_step(self) -> None:
            seen.append(f"after_step training={self.learn.training} loss={self.learn.loss.dim()}")

        def after_batch(self) -> None:
            seen.append(f"after_batch training={self.learn.training}")
            if seen.count("before_fit") == 2 and self.learn.training:
                raise CancelFitException

        def after_fit(self) -> None:
            seen.append("after_fit")

    rows = list(zip(*map(torch.as_tensor, data()), strict=True))
    loaders = DataLoaders(DataLoader(rows, bs=8, num_workers=0), DataLoader(rows, bs=16, num_workers=0))
    learner = Learner(loaders, net(), loss_func=nn.CrossEntropyLoss(), cbs=[GradientAccumulation(16), Spy()])
    with learner.no_logging(), learner.no_bar():
        learner.fit(2, 1e-2)
        learner.fit(1, 1e-2)
        learner.validate()
    return seen


def story_of_keras(keras: Any) -> list[str]:
    seen: list[str] = []

    class Spy(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            model = self.model
            seen.append(f"on_train_begin {[layer.name for layer in layers(model)]} built={model.built}")
            held = {name for name, _ in model.named_modules()}
            seen.append(f"named_modules {sum(layer.name in held for layer in layers(model))}")
            paths = [[v.path for v in layer.variables] for layer in layers(model)]
            held = [sorted(layer.torch_params.keys()) for layer in layers(model)]
            named = [[path.partition("/")[2] for path in some] for some in paths]
            seen.append(f"variables {named} {held == [*map(sorted, paths)]}")

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append("on_epoch_begin")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            mean = self.model._loss_tracker
            seen.append(f"on_train_batch_end count={float(mean.count.value)} total={mean.total.value.dim()}")

        def on_train_end(self, logs: Any = None) -> None:
            seen.append("on_train_end")

    def layers(model: Any) -> list[Any]:
        return [layer for layer in model._flatten_layers(include_self=False, recursive=False) if layer.variables]

    def loss(truth: Tensor, answer: Tensor) -> Tensor:
        return nn.functional.cross_entropy(answer, truth.long().reshape(-1), reduction="none")

    hidden = [keras.layers.Dense(8, "tanh", name=f"hidden{i}") for i in range(2)]
    model = keras.Sequential([keras.Input((D,)), *hidden])
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss)
    model.fit(*data(), batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=[Spy()])
    return seen


def story_of_stable_baselines3(sb3: Any) -> list[str]:
    from stable_baselines3.common.callbacks import BaseCallback

    seen: list[str] = []

    class Spy(BaseCallback):
        def _on_training_start(self) -> None:
            policy = self.model.policy
            held = [name for name in ("critic", "actor") if hasattr(getattr(policy, name, None), "optimizer")]
            seen.append(f"start {held or hasattr(policy, 'optimizer')} delay={getattr(self.model, 'policy_delay', 1)}")

        def _on_rollout_start(self) -> None:
            known = ("train/loss", "train/policy_loss", "train/critic_loss")
            seen.append(f"rollout {[name for name in known if name in self.logger.name_to_value]}")

        def _on_step(self) -> bool:
            seen.append("step")
            return True

        def _on_training_end(self) -> None:
            seen.append("end")

    for algorithm, environment, steps, more in (
        ("A2C", "CartPole-v1", 10, {}),
        ("TD3", "Pendulum-v1", 3, {"learning_starts": 1}),
    ):
        getattr(sb3, algorithm)("MlpPolicy", environment, seed=0, device="cpu", **more).learn(steps, callback=[Spy()])
    return seen


def story_of_monai(monai: Any) -> list[str]:
    from ignite.engine import Events
    from monai.data import DataLoader, Dataset
    from monai.engines import SupervisedTrainer

    seen: list[str] = []

    class Spy:
        def attach(self, engine: Any) -> None:
            seen.append(f"attach network={hasattr(engine, 'network')}")
            engine.add_event_handler(Events.STARTED, self.started)
            engine.add_event_handler(Events.ITERATION_COMPLETED, self.completed)

        def started(self, engine: Any) -> None:
            there = [name for name in ("network", "optimizer", "scaler") if hasattr(engine, name)]
            seen.append(f"started {there} iteration={engine.state.iteration}")

        def completed(self, engine: Any) -> None:
            output = engine.state.output
            seen.append(f"completed {type(output).__name__} of {len(output)}, loss={'loss' in output[0]}")

    rows = [{"image": torch.randn(1, 4, 4), "label": torch.zeros(1, 4, 4)} for _ in range(6)]
    model = nn.Conv2d(1, 1, 3, padding=1)
    SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=1,
        train_data_loader=DataLoader(Dataset(rows), batch_size=2),
        network=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loss_function=nn.MSELoss(),
        train_handlers=[Spy()],
    ).run()
    return seen


@pytest.mark.parametrize("name", CONTRACTS)
def test_what_the_package_calls_is_what_was_recorded(use: Use, name: str) -> None:
    pytest.importorskip("ignite")
    assert runs(globals()[f"story_of_{name}"](use(name))) == CONTRACTS[name]
