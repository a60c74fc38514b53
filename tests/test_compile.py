"""Compiled training: the numbers of the eager run, two graphs, no break; and what cannot be seen there is said.

Axis letters: B batch, T tokens, D features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from watch_models import AddsToItsInput, B, Block, D, Stack, close_to, data, loss_of, norms, sgd, truth, watched

import flowscope
from flowscope.hooks import compiled as probes_compiled

PLAIN = ("grad_norm", "grad_rms", "gain", "gradient_product", "act_rms", "backward_calls", "nonfinite_grad")
BESIDE = ("param_norm", "param_grad_norm", "update_ratio", "cosine", "token_cosine", "branch_share", "canary")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class Backend:
    """Counts the graphs that it is given."""

    def __init__(self, name: str) -> None:
        self._compile = lookup_backend(name)
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return self._compile(graph, inputs)


def train(
    model: nn.Module, forward: Callable[..., Tensor], steps: int = 4, batches: tuple[int, ...] = (B,), **options: Any
) -> list[flowscope.Record]:
    """Two micro-batches a step; `forward(batch)` gives the loss."""
    optimizer = sgd(model)
    with watched(model, optimizer, **options) as scope:
        for step in range(steps):
            optimizer.zero_grad()
            for i in range(2):
                forward(data(2 * step + i, batches[step % len(batches)])).backward()
            optimizer.step()
        assert not scope.alerts
    return scope.records


def compiled(model: nn.Module, how: str, backend: Any, **options: Any) -> Callable[[Any], Tensor]:
    options = {"backend": backend, "fullgraph": True, **options}
    if how == "method":
        model.compile(**options)
    elif how == "blocks":
        for block in model.blocks:
            block.compile(**options)
    elif how == "loss":
        return torch.compile(lambda batch: loss_of(model, batch), **options)
    call = torch.compile(model, **options) if how == "function" else model
    return lambda batch: loss_of(call, batch)


def same(eager: list[flowscope.Record], traced: list[flowscope.Record], metrics: tuple[str, ...]) -> None:
    assert [r.step for r in eager] == [r.step for r in traced]
    for plain, record in zip(eager, traced, strict=True):
        for name in metrics:
            np.testing.assert_allclose(record[name], plain[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("how", "backend"),
    [("method", "aot_eager"), ("function", "aot_eager"), ("loss", "aot_eager"), ("method", "inductor")],
)
def test_two_graphs_no_break_and_the_numbers_of_the_eager_run(how: str, backend: str) -> None:
    model, counted = Stack(3), Backend(backend)
    twin = copy.deepcopy(model)
    every = lambda step: step % 2 == 0  # noqa: E731
    eager = train(twin, lambda batch: loss_of(twin, batch), every=every)
    traced = train(model, compiled(model, how, counted), every=every)
    same(eager, traced, PLAIN + BESIDE)
    assert len(counted.graphs) == 2
    assert not counters["graph_break"]
    assert any("units and slow metrics are not measured" in note for note in traced[0].notes)
    assert np.isnan(traced[0]["forward_calls"]).all()  # not counted, which is not zero


def test_a_second_batch_size_is_seen_as_well() -> None:
    model, counted, sizes = Stack(2), Backend("aot_eager"), (B, B + 1, B + 3)
    twin = copy.deepcopy(model)
    eager = train(twin, lambda batch: loss_of(twin, batch), steps=3, batches=sizes)
    traced = train(model, compiled(model, "method", counted), steps=3, batches=sizes)
    same(eager, traced, PLAIN)
    assert len(counted.graphs) == 2  # the first shape, then any


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, of a block's input, watched or not
def test_blocks_compiled_one_by_one_say_everything_but_their_inner_units() -> None:
    model, counted = Stack(12), Backend("aot_eager")  # more blocks than dynamo's limit of recompilations
    twin = copy.deepcopy(model)
    every = lambda step: step % 2 == 0  # noqa: E731
    eager = train(twin, lambda batch: loss_of(twin, batch), every=every)
    traced = train(model, compiled(model, "blocks", counted), every=every)
    names = set(eager[0].metrics) - {"saturation", "dead_fraction", "dead_lasting", "step_losses"}
    names.remove("exact_modules")  # of what runs in Python
    assert {"effective_rank", "cosine_to_input", "forward_calls"} <= names
    for name in sorted(names & set(traced[0].metrics)):
        np.testing.assert_allclose(traced[0][name], eager[0][name], rtol=2e-5, atol=1e-6, err_msg=name)
    assert not names - set(traced[0].metrics)
    assert not counters["graph_break"]
    assert len(counted.graphs) <= 4  # shared by all blocks


def test_a_compiled_optimizer_step_ends_the_step() -> None:
    model = Stack(2)
    twin = copy.deepcopy(model)
    records = []
    for net, wrap in ((twin, False), (model, True)):
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        with watched(net, optimizer) as scope:
            step = torch.compile(optimizer.step, backend="aot_eager") if wrap else optimizer.step
            for k in range(2):
                optimizer.zero_grad()
                loss_of(net, data(k)).backward()
                step()
        records.append(scope.records)
    same(*records, ("param_grad_norm", "update_ratio", "grad_norm"))


def test_the_buffers_stay_where_they_are_and_no_graph_waits_for_a_value() -> None:
    """What CUDA graphs ask for: static addresses, no host reads (checked here on what is compiled for the CPU)."""
    model, counted = Stack(2), Backend("aot_eager")
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        forward = compiled(model, "method", counted)
        observation = scope._driver.observation
        flows = next(i for i in observation.instruments if i.name == "flows")
        held = [flows.buffer, observation.hooks.canary.buffer]
        before = [t.data_ptr() for buffer in held for t in buffer._tensors.values()]
        for step in range(3):
            optimizer.zero_grad()
            forward(data(step)).backward()
            optimizer.step()
        assert before == [t.data_ptr() for buffer in held for t in buffer._tensors.values()]
        assert len(before) == 2
    called = [str(n.target) for g in counted.graphs for m in g.modules() for n in m.graph.nodes if "call" in n.op]
    assert any("add_" in name for name in called)
    assert not [name for name in called if name in ("item", "tolist", "cpu", "numpy")]


# -- too late


@pytest.mark.parametrize("before", ["this model", "another of its class"])
def test_attached_after_the_first_compiled_call_is_said_and_not_counted_as_zero(
    before: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Stack(3)
    first = model if before == "this model" else Stack(3)
    forward = compiled(first, "method", "aot_eager")
    forward(data()).backward()
    if first is not model:
        forward = compiled(model, "method", "aot_eager")
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        for step in range(3):
            optimizer.zero_grad()
            if step == 2:
                torch.compiler.reset()  # what the warning says
                expected = norms(truth(model, data(step)))
            forward(data(step)).backward()
            optimizer.step()
        assert not scope.alerts
    unseen, seen = scope.records[0], scope.records[2]
    for name in ("grad_norm", "act_rms", "gradient_product", "cosine"):
        assert np.isnan(unseen[name]).all(), name
    assert (unseen["param_grad_norm"] > 0).all()
    told = [r.message for r in caplog.records if "no hook fired" in r.message]
    assert len(told) == 1
    assert "torch.compiler.reset()" in told[0]
    assert any("no hook fired in flow blocks" in note for note in unseen.notes)
    close_to(seen["grad_norm"], expected)
    assert not any("no hook fired" in note for note in seen.notes)


def test_a_second_scope_on_a_compiled_model_is_not_fooled_by_the_first_ones_graphs() -> None:
    model = Stack(2)
    forward = compiled(model, "method", "aot_eager")
    for seed in range(2):
        (record,) = train(model, forward, steps=1)
        assert (record["backward_calls"] == 2).all(), seed
    other = Stack(2)
    expected = norms(truth(other, data(0)), truth(other, data(1)))
    (record,) = train(other, compiled(other, "method", "aot_eager"), steps=1)
    close_to(record["grad_norm"], expected)


def test_blocks_called_past_their_hooks_are_named() -> None:
    class Past(Stack):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return block.forward(x)

    model = Past(2)
    (record,) = train(model, lambda batch: loss_of(model, batch), steps=1)
    assert any("block.forward(x)" in note for note in record.notes)


# -- what compiled code hides


class Shared(Stack):
    """Two blocks, three times each."""

    def forward(self, x: Tensor, taps: Any = None) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def test_blocks_called_three_times_are_a_row_each_that_says_so() -> None:
    model = Shared(2)
    twin = copy.deepcopy(model)
    (eager,) = train(twin, lambda batch: loss_of(twin, batch), steps=1)
    (traced,) = train(model, compiled(model, "method", "aot_eager"), steps=1)
    assert traced.labels("grad_norm")[1:] == ["blocks.0 x3", "blocks.1 x3"]
    for i, label in enumerate(["blocks.0", "blocks.1"]):
        calls = [eager["grad_norm"][eager.labels("grad_norm").index(f"{label}#{call}")] for call in range(3)]
        np.testing.assert_allclose(traced["grad_norm"][1 + i], np.linalg.norm(calls), rtol=1e-5)


def test_blocks_that_change_their_input_in_place_are_not_seen_rather_than_wrong() -> None:
    model = Stack(3, AddsToItsInput)
    twin = copy.deepcopy(model)
    (eager,) = train(twin, lambda batch: loss_of(twin, batch), steps=1)
    (traced,) = train(model, compiled(model, "method", "aot_eager"), steps=1)
    assert not np.isnan(eager["grad_norm"]).any()
    assert np.isnan(traced["grad_norm"][:-1]).all()
    for name in ("grad_norm", "act_rms"):
        close_to(traced[name][-1], eager[name][-1])
    close_to(traced["act_rms"][1:], eager["act_rms"][1:])
    assert np.isnan(traced["cosine"]).all()
    assert any("in place" in note and "blocks.0, blocks.1" in note for note in traced.notes)


class ReluAfter(Stack):
    """The block's output is overwritten."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu_(block(x), 0.3)


@pytest.mark.parametrize("hidden", [False, True])
def test_an_operation_in_place_behind_a_point(hidden: bool) -> None:
    """The sum of a residual block is a tensor of its own; a Linear's output is a view, and its hook falls silent."""
    model = ReluAfter(2, (lambda: nn.Sequential(nn.Linear(D, D))) if hidden else Block)
    twin = copy.deepcopy(model)
    (eager,) = train(twin, lambda batch: loss_of(twin, batch), steps=1, flows=["blocks"])
    (traced,) = train(model, compiled(model, "method", "aot_eager"), steps=1, flows=["blocks"])
    if hidden:
        assert np.isnan(traced["grad_norm"][1:]).all()
        assert any("in place" in note for note in traced.notes)
    else:
        close_to(traced["grad_norm"], eager["grad_norm"])


# -- a torch that cannot trace gradient hooks


def test_without_traced_gradient_hooks_the_compilation_is_kept_and_forward_metrics_are_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, counted = Stack(3), Backend("aot_eager")
    twin = copy.deepcopy(model)
    eager = train(twin, lambda batch: loss_of(twin, batch))
    monkeypatch.setattr(probes_compiled, "HOOKED_INTERMEDIATES", False)
    traced = train(model, compiled(model, "method", counted))
    same(eager, traced, ("act_rms", "cosine", "branch_share", "token_cosine", "param_grad_norm", "update_ratio"))
    assert len(counted.graphs) == 1
    assert not counters["graph_break"]
    for record in traced:
        assert np.isnan(record["grad_norm"]).all()
        assert any("activation gradients are not seen" in note for note in record.notes)
    assert sum("activation gradients are not seen" in r.message for r in caplog.records) == 1
    assert len(traced) == 4


class Halves(Stack):
    """A stack with a graph break in its middle: two compiled backwards add to the same rows."""

    def forward(self, x: Tensor, taps: Any = None) -> Tensor:
        if taps is not None:
            return super().forward(x, taps)
        x = self.blocks[0](self.embed(x))
        torch._dynamo.graph_break()
        return self.head(self.blocks[1](x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, of what a graph break hands on
@pytest.mark.parametrize(
    ("net", "order", "first"),
    [(Stack, (1, 0), 0), (Halves, (0, 1), 1)],  # the steps before the first are not sampled
)
def test_two_forwards_before_their_backwards(net: type[Stack], order: tuple[int, int], first: int) -> None:
    model = net(2)
    expected = norms(truth(model, data(0)), truth(model, data(1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with watched(model, optimizer, every=lambda step: step >= first) as scope:
        forward = torch.compile(model, backend="aot_eager")
        for _ in range(first + 1):
            optimizer.zero_grad()
            both = [loss_of(forward, data(k)) for k in (0, 1)]
            for k in order:
                both[k].backward()
            optimizer.step()
    close_to(scope.records[-1]["grad_norm"], expected)
