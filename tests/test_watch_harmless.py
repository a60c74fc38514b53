"""`watch` changes nothing, stops nothing, leaves nothing: bitwise runs, injected faults, traces, state, compile."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as torch_optimizer
from watch_models import IN, OUT, B, Block, Checkpointed, D, Stack, T, close_to, data, loss_of, norms, truth, watched

import flowscope
from flowscope.detectors.gradients import VanishingGradient
from flowscope.hooks import flow_observer
from flowscope.instruments import parameters, point_flows, rank, recurrent, units, wiring
from flowscope.observation import observation

EVERYTHING = {"slow_every": 1, "metrics": ("flow", "depth", "parameters")}


# -- bitwise


class Conv(nn.Module):
    """Batch norm, in-place rectifiers and a shared activation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(T, D, 3, padding=1), nn.BatchNorm1d(D), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv1d(D, D, 3, padding=1), nn.BatchNorm1d(D), nn.ReLU(inplace=True), nn.Dropout(0.2))
            for _ in range(3)
        )
        self.out = nn.Conv1d(D, T, 3, padding=1)
        self.head = nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(self.out(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(IN, D, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Torch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.2, batch_first=True)
        self.stem, self.encoder = nn.Linear(IN, D), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x)))


def dropped() -> nn.Module:
    return Block(nn.GELU, 0.2)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "stack": lambda: Stack(3, dropped),
    "checkpoint": lambda: Checkpointed(3, dropped),
    "convolutions": Conv,
    "recurrent": Recurrent,
    "torch transformer": Torch,
    "chain": lambda: nn.Sequential(nn.Linear(IN, D), nn.ReLU(), nn.Dropout(0.2), nn.Linear(D, OUT)),
}


class Run:
    """Three accumulated steps with AdamW, clipping and evaluation; everything that training leaves behind."""

    def __init__(self, make: Callable[[], nn.Module], watch: dict[str, Any] | None, autocast: bool = False) -> None:
        torch.manual_seed(5)
        np.random.seed(5)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.scope = watched(model, optimizer, **watch) if watch is not None else None
        self.losses = []
        for step in range(3):
            optimizer.zero_grad()
            for i in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = loss_of(model, data(2 * step + i))
                loss.backward()
                self.losses.append(loss.detach())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if self.scope is not None:
                self.scope.step(loss=loss)
            model.eval()
            with torch.no_grad():
                self.losses.append(loss_of(model, data(99)))
            model.train()
        self.state = model.state_dict()
        self.grads = [p.grad for p in model.parameters()]
        self.random = torch.get_rng_state(), torch.tensor(np.random.get_state()[1])
        if self.scope is not None:
            self.scope.close()

    def same_as(self, other: Run) -> bool:
        mine = [*self.losses, *self.state.values(), *self.grads, *self.random]
        theirs = [*other.losses, *other.state.values(), *other.grads, *other.random]
        return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bitwise_that_of_the_bare_run(
    kind: str, autocast: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    bare = Run(KINDS[kind], None, autocast)
    assert bare.same_as(Run(KINDS[kind], None, autocast))
    options = {"log_dir": tmp_path} if kind == "stack" else {}
    seen = Run(KINDS[kind], {"config": EVERYTHING, **options}, autocast)
    assert bare.same_as(seen)
    assert len(seen.scope.records) == 3
    values = [v for k, v in seen.scope.records[0].metrics.items() if k.startswith("grad_norm")]
    assert np.isfinite(np.concatenate(values)).any()


def test_the_comparison_notices_one_changed_random_number() -> None:
    def make() -> nn.Module:
        torch.rand(1)
        return Stack(2, dropped)

    assert not Run(lambda: Stack(2, dropped), None).same_as(Run(make, None))


# -- nothing left


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> dict[str, Any]:
    out: dict[str, Any] = {
        "buffers": [n for n, _ in model.named_buffers()],
        "state": list(model.state_dict()),
        "global optimizer hooks": [
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch_optimizer._global_optimizer_post_hooks),
        ],
        "global module hooks": {
            k: len(v)
            for k, v in vars(torch.nn.modules.module).items()
            if k.startswith("_global") and isinstance(v, dict)
        },
        "scaler": sorted(vars(scaler)),
        "threads": sorted(t.name for t in threading.enumerate()),
        "optimizer": {k: len(v) if "hook" in k else None for k, v in vars(optimizer).items()},
        "optimizer class": sorted(vars(type(optimizer))),
    }
    for name, module in model.named_modules():
        out[name] = {k: len(v) if "hook" in k and hasattr(v, "__len__") else None for k, v in vars(module).items()}
    for name, parameter in model.named_parameters():
        held = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
        out[f"parameter {name}"] = [len(h or ()) for h in held], sorted(vars(parameter))
    return out


@pytest.mark.parametrize("when", ["in the middle", "after an exception", "from a callback", "twice"])
def test_after_close_nothing_is_left(when: str, tmp_path: Path) -> None:
    model = Stack(3)
    model.register_buffer("statistics", torch.zeros(3))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    model.blocks[0].register_forward_hook(lambda m, i, o: None)
    loss_of(model, data()).backward()
    optimizer.step()
    before = fingerprint(model, optimizer, scaler)
    alerts: list[Any] = []

    def on_alert(alert: Any) -> None:
        alerts.append(alert)
        if when == "from a callback":
            scope.close()

    scope = watched(model, optimizer, scaler=scaler, log_dir=tmp_path, on_alert=on_alert)
    assert fingerprint(model, optimizer, scaler) != before
    for step in range(2):
        loss = loss_of(model, data(step)) * (float("nan") if when == "from a callback" else 1.0)
        scaler.scale(loss).backward()
        optimizer.step()
    held = loss_of(model, data(7))  # a graph with our hooks in it
    if when == "after an exception":
        with pytest.raises(KeyError), scope:
            raise KeyError("user")
    assert when != "from a callback" or scope.records is not None
    scope.close()
    scope.close()
    assert fingerprint(model, optimizer, scaler) == before
    held.backward()
    optimizer.step()
    loss_of(model, data(8)).backward()
    assert [r.step for r in scope.records] == ([0] if when == "from a callback" else [0, 1])
    assert bool(alerts) == (when == "from a callback")
    assert "flowscope" in scope.summary()
    flowscope.watch(model, optimizer, config={"console": "off"}).close()
    assert fingerprint(model, optimizer, scaler) == before


# -- faults of ours


class Sink:
    def __init__(self, broken: str) -> None:
        self.broken, self.events = broken, []

    def write(self, event: Any) -> None:
        self.events.append(event)
        if self.broken == "write":
            raise OSError("injected")

    def close(self) -> None:
        self.events.append("closed")
        if self.broken == "close":
            raise OSError("injected")


FAULTS: dict[str, tuple[Any, str, str]] = {
    "forward of a flow": (flow_observer.FlowObserver, "_after", "flow blocks"),
    "entry of a flow": (flow_observer.FlowObserver, "_before", "flow blocks"),
    "backward of a flow": (flow_observer.FlowObserver, "_deposit", "flow blocks"),
    "record of a flow": (point_flows.PointFlows, "_flow", "flow blocks"),
    "slow part of a flow": (rank.Rank, "read", "flow blocks"),
    "forward of units": (units.Units, "_count", "units"),
    "backward of units": (units.UnitProbe, "deposit", "units"),
    "end of units": (units.Units, "take", "units"),
    "weights before": (parameters.Parameters, "before_update", "parameters"),
    "gradients": (parameters.Parameters, "read_gradients", "parameters"),
    "weights after": (parameters.Parameters, "after_update", "parameters"),
    "parameters taken": (parameters.Parameters, "take", "parameters"),
    "parameters known": (wiring, "optimized", "wiring"),
    "a detector": (VanishingGradient, "findings", "detector vanishing_gradient"),
}


def injected(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_switches_one_part_off_and_is_reported_once(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FLOWSCOPE_STRICT", raising=False)
    holder, method, part = FAULTS[name]
    bare = Run(KINDS["stack"], None)
    monkeypatch.setattr(holder, method, injected)
    seen = Run(KINDS["stack"], {"config": EVERYTHING})
    assert bare.same_as(seen)
    assert len(errors(caplog)) == 1
    assert part in errors(caplog)[0]
    assert "injected" in errors(caplog)[0]
    assert part in seen.scope.summary()
    last = seen.scope.records[-1]
    assert last.step == 2
    assert ("grad_norm" in last) == (part != "flow blocks")
    assert ("param_grad_norm" in last) == (part != "parameters")
    assert ("dead_fraction" in last) == (part != "units")
    assert last.loss is not None


def test_a_fault_in_the_replay_of_a_recurrent_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bare = Run(KINDS["recurrent"], None)
    monkeypatch.setattr(recurrent, "replay_gradients", injected)
    seen = Run(KINDS["recurrent"], {"config": EVERYTHING})
    assert bare.same_as(seen)
    assert len(errors(caplog)) == 1
    assert "param_grad_norm" in seen.scope.records[-1]


@pytest.mark.parametrize("where", ["__init__", "record"])
def test_a_fault_in_the_snapshot_costs_the_records_only(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bare = Run(KINDS["stack"], None)
    monkeypatch.setattr(observation.Snapshot, where, injected)
    seen = Run(KINDS["stack"], {})
    assert bare.same_as(seen)
    assert len(errors(caplog)) == 1


@pytest.mark.parametrize("broken", ["write", "close"])
def test_a_broken_sink_is_left_out_and_the_others_go_on(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Sink(broken), Sink("")
    seen = Run(KINDS["stack"], {"sinks": [bad, good]})
    assert Run(KINDS["stack"], None).same_as(seen)
    assert len(errors(caplog)) == 1
    assert "Sink 0" in errors(caplog)[0]
    assert sum(isinstance(e, flowscope.Record) for e in good.events) == 3
    assert good.events[-1] == bad.events[-1] == "closed"
    assert len(bad.events) == (2 if broken == "write" else len(good.events))


def test_a_broken_callback_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    alerts: list[Any] = []
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with watched(model, optimizer, on_alert=[injected, alerts.append]) as scope:
        for factor in (float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0):
            optimizer.zero_grad()
            (loss_of(model, data()) * factor).backward()
            for p in model.parameters():
                p.grad.nan_to_num_()
            optimizer.step()
    assert [a.state for a in alerts if a.kind == "non_finite"] == ["raised", "resolved"]
    assert len(errors(caplog)) == 1
    assert "callback 0" in errors(caplog)[0]
    assert [r.step for r in scope.records] == list(range(6))


def test_a_broken_schedule_stops_the_sampling(caplog: pytest.LogCaptureFixture) -> None:
    def schedule(step: int) -> bool:
        return step < 1 or injected()

    seen = Run(KINDS["stack"], {"every": schedule})
    assert Run(KINDS["stack"], None).same_as(seen)
    assert [r.step for r in seen.scope.records] == [0]
    assert len(errors(caplog)) == 1
    assert "schedule" in errors(caplog)[0]


def test_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    monkeypatch.setattr(flow_observer.FlowObserver, "_after", injected)
    with pytest.raises(RuntimeError, match="injected"):
        Run(KINDS["stack"], {})


# -- passes that train nothing


def loss_by_parameters(model: nn.Module, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(torch.func.functional_call(model, parameters, x), y)


def per_sample(model: nn.Module) -> Any:
    gradient = torch.func.grad(lambda p, x, y: loss_by_parameters(model, p, x[None], y[None]))
    return torch.func.vmap(gradient, (None, 0, 0))({k: v.detach() for k, v in model.named_parameters()}, *data())


def fake(model: nn.Module) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(mode.from_tensor(data()[0])).shape


def batched(model: nn.Module) -> Any:
    x = data()[0].requires_grad_()
    return torch.autograd.grad(model(x).sum((1, 2)), x, torch.eye(B), is_grads_batched=True)


def pointwise(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum((1, 2))


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "per-sample gradients": per_sample,
    "vmap": lambda m: torch.func.vmap(lambda x: m(x[None]))(data()[0]),
    "jvp": lambda m: torch.func.jvp(m, (data()[0],), (torch.ones(B, T, IN),)),
    "jacrev": lambda m: torch.func.jacrev(partial(pointwise, m))(data()[0]),
    "jit trace": lambda m: torch.jit.trace(m, data()[0]),
    "fx": lambda m: torch.fx.symbolic_trace(m, concrete_args={"taps": None}),
    "export": lambda m: torch.export.export(m, (data()[0],)),
    "fake tensors": fake,
    "meta": lambda m: m.to("meta")(data()[0].to("meta")),
    "batched gradients": batched,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_and_traces_go_through_and_count_nowhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    torch.manual_seed(0)
    model = Stack(3)
    weights = model.state_dict()
    expected = norms(truth(model, data()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer, config=EVERYTHING) as scope:
        TRANSFORMS[name](model)
        if name == "meta":
            model.to_empty(device="cpu").load_state_dict(weights)
        loss_of(model, data()).backward()
        optimizer.step()
        close_to(scope.records[0]["grad_norm"], expected)
        assert (scope.records[0]["backward_calls"] == 1).all()


# -- state


def train(model: nn.Module, optimizer: Any, scope: Any, steps: range, factor: float = 1.0) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, data(step)) * factor
        loss.backward()
        for p in model.parameters():
            p.grad.nan_to_num_()
        optimizer.step()
        scope.step(loss=1.0)


def test_state_goes_through_json_and_the_resumed_scope_goes_on_as_one() -> None:
    records, alerts = [], []
    for resumed in (False, True):
        torch.manual_seed(2)
        model, seen = Stack(2), []
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scope = watched(model, optimizer, every=3, on_alert=seen.append)
        train(model, optimizer, scope, range(12), float("nan"))
        if resumed:
            state = json.loads(json.dumps(scope.state_dict()))
            scope.close()
            assert state["step"] == 12
            scope = watched(model, optimizer, every=3, on_alert=seen.append)
            scope.load_state_dict(state)
            train(model, optimizer, scope, range(12, 14), float("nan"))
        else:
            train(model, optimizer, scope, range(12, 14), float("nan"))
        train(model, optimizer, scope, range(14, 30))
        scope.close()
        records.append([r.step for r in scope.records if r.step >= 12])
        alerts.append([(a.kind, a.state, a.step) for a in seen])
    assert records[0] == records[1] == [12, 15, 18, 21, 24, 27]
    assert alerts[0] == alerts[1]
    assert [kind for kind, *_ in alerts[0]].count("non_finite") == 2


# -- compiled


@pytest.mark.parametrize("kind", ["stack", "chain", "checkpoint"])
def test_a_compiled_model_is_one_graph_with_the_numbers_of_the_eager_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    torch._dynamo.reset()
    torch.manual_seed(4)
    chain = nn.Sequential(nn.Linear(IN, D), nn.Tanh(), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, OUT))
    model = {"stack": Stack, "checkpoint": Checkpointed}[kind](3) if kind != "chain" else chain
    eager = copy.deepcopy(model)
    records = []
    for net, compiled in ((eager, False), (model, True)):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with watched(net, optimizer, config={"metrics": ("flow", "depth", "parameters")}) as scope:
            call = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
            for step in range(3):
                optimizer.zero_grad()
                for i in range(2):
                    loss_of(call, data(2 * step + i)).backward()
                optimizer.step()
        records.append(scope.records)
    assert len(records[0]) == len(records[1]) == 3
    for plain, traced in zip(*records, strict=True):
        assert (traced["backward_calls"] == 2).all()
        for name in ("gradient_product", "grad_norm", "gain", "act_rms", "param_grad_norm"):
            close_to(traced[name], plain[name])
    torch._dynamo.reset()


def test_a_compiled_model_has_two_graphs_for_sampled_and_other_steps() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        # the root's pre-hook, outside of what is compiled, is a small graph of its own
        graphs.extend([graph] if any("weight" in node.name for node in graph.graph.nodes) else [])
        return graph.forward

    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = norms(truth(model, data()))
    with watched(model, optimizer, every=lambda step: step % 2 == 0) as scope:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(compiled, data(step)).backward()
            optimizer.step()
    assert [r.step for r in scope.records] == [0, 2, 4]
    close_to(scope.records[0]["grad_norm"], expected)
    assert len(graphs) == 2
    torch._dynamo.reset()


# -- disks


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_write_that_fails_costs_one_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """The first write is made by the TensorBoard sink as it opens."""
    write, count = os.write, 0

    def once(handle: int, data: bytes) -> int:
        nonlocal count
        count += 1
        if count == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(os, "write", once)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer, log_dir=tmp_path) as scope:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, data(step)).backward()
            optimizer.step()
        assert [record.step for record in scope.records] == [0, 1, 2]
        off = scope.summary().count("switched off:")
    assert off == 2  # one line of the summary, and the coverage
