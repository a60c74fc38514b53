"""Where two runs part: pairs with one fault each, pairs that are equal, and the numbers behind the answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flowscope
from benchmarks.parting.__main__ import at_place
from benchmarks.parting.pairs import EQUAL, FAULTS, Pair
from benchmarks.parting.programs import Decoder, Knobs, train
from flowscope.cli import main
from flowscope.errors import FlowscopeError
from flowscope.instruments.nudge import moved
from flowscope.parting.distances import distance, update_distance
from flowscope.parting.looks import Look
from flowscope.parting.rounding import FACTOR, Rounding
from flowscope.sinks import read_run
from flowscope.sums.fingerprints import fingerprints, row_fingerprints, signs

SAMPLE = (
    "one checkpoint without random state",
    "another epsilon",
    "labels shifted",
    "data order",
    "compiled with a wrong backward",
    "optimizer's beta",
    "decay group",
    "one weight initialised otherwise",
)
BY_NAME = {pair.name: pair for pair in (*FAULTS, *EQUAL)}


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """Record a run of a benchmark program."""

    def run(name: str, knobs: Knobs, kind: Any = Decoder, **watching: Any) -> Path:
        train(tmp_path / name, knobs, kind, **watching)
        return tmp_path / name

    return run


def recorded(pair: Pair, record: Callable[..., Path]) -> tuple[Path, Path]:
    good = record("good", pair.good, pair.kind)
    record("good/rounding", replace(pair.good, fault=""), pair.kind, config={"nudge": True})
    return good, record("bad", pair.bad, pair.kind)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_told_at_its_step_phase_and_place(name: str, record: Callable[..., Path]) -> None:
    pair = BY_NAME[name]
    found = flowscope.bisect(*recorded(pair, record))
    assert (found.step, found.phase) == (pair.step, pair.phase), found
    assert at_place(pair, found.where), found


@pytest.mark.parametrize(
    "name",
    [
        "the same convnet, seed 1",
        "two threads, seed 3",
        "reentrant checkpoints, seed 0",
        "compiled by aot_eager, seed 0",
        "renamed blocks, seed 0",
        "micro-batches, seed 0",
        "foreach off, seed 0",
    ],
)
def test_equal_runs_part_nowhere(name: str, record: Callable[..., Path]) -> None:
    pair = BY_NAME[name]
    found = flowscope.bisect(*recorded(pair, record))
    assert (found.step, found.phase, found.where) == (None, None, ""), found
    assert found.message.startswith("equal ")
    assert found.compared == pair.good.steps


def test_two_ranks_of_fsdp_beside_one_process(record: Callable[..., Path]) -> None:
    """Half of the batch and of each parameter on each: equal up to rounding; a parameter left out is found."""
    good, same = recorded(BY_NAME["FSDP on two ranks, seed 0"], record)
    found = flowscope.bisect(good, same)
    assert (found.step, found.phase) == (None, None), found
    assert "processes: 1 -> 2" in found.differs
    bad = record("left out", BY_NAME["FSDP, parameter left out"].bad)
    found = flowscope.bisect(good, bad)
    assert (found.step, found.phase, found.where) == (0, "backward", "blocks.1.up.weight"), found


def test_the_message_says_what_it_means(record: Callable[..., Path]) -> None:
    found = flowscope.bisect(*recorded(BY_NAME["one checkpoint without random state"], record))
    assert "the forward is equal to the last bit, the backward is not, first at blocks.2" in found.message
    assert "its replayed forward drew other random numbers" in found.message


def test_without_measured_rounding_it_still_answers(record: Callable[..., Path]) -> None:
    plain = Knobs(dropout=0.0)
    good = record("good", plain)
    same = flowscope.bisect(good, record("compiled", replace(plain, compiled="aot_eager", micro_batches=2)))
    assert same.phase is None
    assert "what rounding is assumed to make" in same.message
    bad = replace(plain, compiled="aot_eager", fault="wrong kernel")
    found = flowscope.bisect(good, record("bad", bad))
    assert (found.step, found.phase, found.where) == (0, "forward", "blocks.1")
    assert found.limit == 300 * 2.0**-23


def test_command_and_its_status(record: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    good, same = record("good", Knobs()), record("same", Knobs())
    bad = record("bad", Knobs(fault="branch scaled", since=1))
    assert main(["bisect", str(good), str(same)]) == 0
    assert capsys.readouterr().out.startswith("equal: equal to the last bit in 6 steps\nnothing differs")
    assert main(["bisect", str(good), str(bad), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["phase"], told["where"]) == (1, "forward", "blocks.1")
    assert told["differs"] == []
    assert main(["bisect", str(good), str(good.parent / "nothing")]) == 2
    old = record("old", Knobs(), config={"exact_steps": 0})
    assert main(["bisect", str(good), str(old)]) == 2
    assert "no step of both was recorded to the bit" in capsys.readouterr().err


def test_runs_without_a_common_step_cannot_be_compared(record: Callable[..., Path]) -> None:
    good = record("good", Knobs(steps=2), every=lambda step: step == 0)
    other = record("other", Knobs(steps=2), every=lambda step: step == 1)
    with pytest.raises(FlowscopeError, match="no sampled step in common"):
        flowscope.bisect(good, other)


def test_another_depth_cannot_be_compared(record: Callable[..., Path]) -> None:
    found = flowscope.bisect(record("a", Knobs()), record("b", Knobs(depth=3)))
    assert (found.step, found.phase, found.where) == (0, "setup", "blocks")
    assert found.message == "blocks has 4 blocks in one run, 3 in the other"


class Wrapped(Decoder):
    """With streams at every merge, whose own parameters stay as they begin: so the output is that of the plain one."""

    def __init__(self, knobs: Knobs) -> None:
        super().__init__(knobs)
        own = {id(parameter) for parameter in self.parameters()}
        flowscope.wrap(self, mode="hyper")
        for parameter in self.parameters():
            parameter.requires_grad_(id(parameter) in own)


def test_a_wrapped_run_is_compared_by_what_is_inside_of_its_blocks(record: Callable[..., Path]) -> None:
    plain = Knobs(dropout=0.0, steps=3)
    good = record("good", plain)
    record("good/rounding", plain, config={"nudge": True})
    same = flowscope.bisect(good, record("wrapped", plain, Wrapped))
    assert (same.step, same.phase) == (None, None), same
    (wrapped,) = (line for line in same.differs if line.startswith("connections put in by wrap: none -> "))
    assert " -> dhc (options HyperOptions(streams=4, " in wrapped
    bad = record("bad", replace(plain, fault="mask lost", at=2, since=1), Wrapped)
    found = flowscope.bisect(good, bad)
    assert (found.step, found.phase, found.where) == (1, "forward", "blocks.2.attention"), found


def test_the_header_names_what_is_compiled_checkpointed_and_wrapped(record: Callable[..., Path]) -> None:
    plain = Knobs(dropout=0.0, steps=1)
    folders = [
        record("plain", plain),
        record("compiled", replace(plain, compiled="aot_eager")),
        record("checkpointed", replace(plain, checkpointed="one")),
        record("wrapped", plain, Wrapped),
    ]
    setups = []
    for folder in folders:
        header = read_run(folder).header
        assert header is not None
        setups.append(header.setup)
    assert [bool(setup["compiled"]) for setup in setups] == [False, True, False, False]
    assert [setup.get("checkpointed", []) for setup in setups] == [[], [], ["blocks.1"], []]
    assert [len(setup["wrapped"]) for setup in setups] == [0, 0, 0, 1]
    ((mode, told),) = setups[3]["wrapped"].items()
    assert (mode, told["blocks"]) == ("dhc", 4)
    assert "streams=4" in told["options"]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
def test_compiled_code_is_told_to_the_bit_in_every_sampled_step_by_two_graphs(record: Callable[..., Path]) -> None:
    torch._dynamo.utils.counters.clear()
    knobs, watching = Knobs(dropout=0.0, steps=8, compiled="aot_eager"), {"config": {"exact_steps": 2}}
    run = read_run(record("a", knobs, every=lambda step: step % 2 == 0, **watching))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert [record.step for record in run.records if "exact_states" in record.metrics] == [0, 2, 4, 6]


def test_runs_of_another_cadence_are_compared_where_both_were_sampled(record: Callable[..., Path]) -> None:
    good = record("good", Knobs())
    seldom = record("seldom", Knobs(), every=lambda step: step % 2 == 0)
    assert (found := flowscope.bisect(good, seldom)).phase is None, found
    assert found.compared == 3
    bad = record("bad", Knobs(fault="branch scaled", since=3), every=lambda step: step % 2 == 0)
    assert flowscope.bisect(good, bad).step == 4


def test_a_seed_counts_only_where_something_is_drawn(record: Callable[..., Path]) -> None:
    plain = Knobs(fault="reseeded", dropout=0.0, at=0)
    assert flowscope.bisect(record("a", plain), record("b", replace(plain, at=1))).phase is None
    drawing = replace(plain, dropout=0.1)
    found = flowscope.bisect(record("c", drawing), record("d", replace(drawing, at=1)))
    assert (found.step, found.phase, found.where) == (0, "setup", "random state")


def test_later_steps_are_compared_by_what_is_written(record: Callable[..., Path]) -> None:
    short = {"exact_steps": 2}
    good = record("good", Knobs(steps=5), config=short)
    found = flowscope.bisect(good, record("bad", Knobs(steps=5, fault="branch scaled", since=3), config=short))
    assert (found.step, found.phase, found.where) == (3, "forward", "blocks.1")
    found = flowscope.bisect(good, record("rate", Knobs(steps=5, fault="wrong backward", since=4, at=2), config=short))
    assert (found.step, found.phase, found.where) == (4, "backward", "blocks.1")
    same = flowscope.bisect(good, record("same", Knobs(steps=5), config=short))
    assert (same.phase, same.compared) == (None, 5)


# -- live ----------------------------------------------------------------------------------------------------------


def test_a_run_under_way_says_where_it_parts(record: Callable[..., Path]) -> None:
    good = record("good", Knobs())
    told: list[Any] = []
    record("bad", Knobs(fault="mask lost", since=2), reference=good, on_alert=told.append)
    (alert,) = [one for one in told if one.kind == "parted_from_reference"]
    assert (alert.step, alert.where, alert.severity) == (2, "blocks.1.attention", "warning")
    assert alert.message.startswith("forward: step 2: the inputs are equal to the last bit")
    told.clear()
    record("same", Knobs(), reference=str(good), on_alert=told.append)
    assert not [one for one in told if one.kind == "parted_from_reference"]


def test_a_run_that_was_not_told_to_the_bit_is_no_reference(record: Callable[..., Path]) -> None:
    old = record("old", Knobs(steps=2), config={"exact_steps": 0})
    with pytest.raises(FlowscopeError, match="no step was told to the bit"):
        record("new", Knobs(), reference=old)


def test_flowscope_run_takes_a_reference_and_measures_rounding(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "flowscope", "run", *arguments, str(script)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        return done.stderr

    run("--log-dir", "good")
    run("--rounding", "good")
    assert read_run(tmp_path / "good" / "rounding").records[0].metrics.keys()
    assert "parted_from_reference" not in run("--log-dir", "same", "--reference", "good")
    script.write_text(SCRIPT.replace("x + block(x)", "x + 1.001 * block(x)"))
    said = run("--log-dir", "bad", "--reference", "good")
    assert "[warning] step 0: parted_from_reference" in said
    assert "forward: step 0" in said


SCRIPT = """
import torch
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    net(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
"""
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


# -- the records ---------------------------------------------------------------------------------------------------


def test_only_the_first_steps_are_told_to_the_bit(record: Callable[..., Path]) -> None:
    run = read_run(record("a", Knobs(steps=5), config={"exact_steps": 3}))
    exact = {"exact_states", "exact_modules", "exact_updated", "random_state", "exact_inputs", "optimizer_options"}
    assert [exact & r.metrics.keys() for r in run.records] == [exact] * 3 + [set()] * 2
    off = read_run(record("b", Knobs(steps=2), config={"exact_steps": 0}))
    assert not any(exact & r.metrics.keys() for r in off.records)


def hooks_after(steps: int, exact: int) -> list[int]:
    """How many hooks each module has after so many steps, of which so many are told to the bit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off", "exact_steps": exact}):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_hooks_of_what_is_over_come_off() -> None:
    never = hooks_after(4, 0)
    during, over = hooks_after(2, 3), hooks_after(3, 3)
    assert all(more > less for more, less in zip(during[1:], never[1:], strict=True))
    assert over[1:] == never[1:]  # the root has two more: its inputs are told to the bit in compiled code always


def test_recorded_numbers_are_those_of_the_tensors(record: Callable[..., Path]) -> None:
    """Against the same step computed with plain autograd."""
    knobs = Knobs(dropout=0.0, steps=1, optimizer="sgd")
    run = read_run(record("a", knobs))
    (told,) = run.records
    torch.manual_seed(knobs.seed)
    model = Decoder(knobs)
    from benchmarks.parting.programs import loss_of, sentences

    x, y = sentences(0, knobs)
    states: list[torch.Tensor] = []
    for block in model.stack:
        block.register_forward_hook(lambda module, args, out: states.append(out))
    model.stack[0].register_forward_pre_hook(lambda module, args: states.append(args[0]))
    loss = loss_of(model, x, y, knobs)
    gradients = torch.autograd.grad(loss, [*states, model.stack[1].up.weight])
    for i, (state, gradient) in enumerate(zip(states, gradients, strict=False)):
        assert np.array_equal(told["exact_states"][i], fingerprints(state.detach()[None])[0].numpy())
        assert np.array_equal(told["exact_gradients"][i], fingerprints(gradient[None])[0].numpy())
    at = told.labels("exact_weights").index("blocks.1.up.weight")
    weight, gradient = model.stack[1].up.weight.detach(), gradients[-1]
    assert np.array_equal(told["exact_weights"][at], row_fingerprints(weight[None], [(0, 0)])[0].numpy())
    assert np.array_equal(told["exact_param_gradients"][at], row_fingerprints(gradient[None], [(0, 0)])[0].numpy())
    after = weight - 0.1 * gradient
    assert np.allclose(told["exact_updated"][at, 1:], row_fingerprints(after[None], [(0, 0)])[0, 1:], rtol=1e-6)
    assert told.labels("exact_modules")[-1] == ""
    assert told["exact_modules"][-1, 1] == fingerprints(model(x).detach()[None])[0, 0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
def test_the_gradient_of_a_view_is_told_with_the_shape_of_the_view(tmp_path: Path) -> None:
    """A Linear of [B, T, D] returns a view of its product [B T, D], whose gradient eager code sees."""
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        stack = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)]
        model = torch.nn.Sequential(*stack, torch.nn.Linear(8, 5))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with flowscope.watch(model, optimizer, log_dir=tmp_path / name, config={"console": "off"}):
            if name == "compiled":
                torch.compiler.reset()
                model.compile(backend="aot_eager")
            x = torch.randn(3, 4, 8)
            torch.nn.functional.cross_entropy(model(x).flatten(0, 1), torch.arange(12) % 5).backward()
            optimizer.step()
    eager, compiled = (read_run(tmp_path / name).records[0] for name in ("eager", "compiled"))
    assert eager.labels("exact_gradients") == compiled.labels("exact_gradients")
    assert "3" in eager.labels("exact_gradients"), "the head is a point"
    np.testing.assert_array_equal(eager["exact_gradients"][:, 0], compiled["exact_gradients"][:, 0])
    assert flowscope.bisect(tmp_path / "eager", tmp_path / "compiled").phase is None


def test_an_empty_shard_adds_nothing() -> None:
    assert not row_fingerprints(torch.zeros(1, 0, 3), [(9, 0)]).any()


def test_shards_of_rows_add_up_to_the_whole() -> None:
    w = torch.randn(9, 4, 3)
    whole = row_fingerprints(w[None], [(0, 0)])
    assert torch.allclose(
        row_fingerprints(w[None, :5], [(0, 0)]) + row_fingerprints(w[None, 5:], [(5, 0)]), whole, rtol=1e-12
    )
    flat = w.flatten(1)[None]
    columns = row_fingerprints(flat[..., :7], [(0, 0)]) + row_fingerprints(flat[..., 7:], [(0, 7)])
    assert torch.allclose(columns[:, 1:], whole[:, 1:], rtol=1e-12)
    r, q = signs(12, w), signs(9, w)
    expected = [sum(q[i, k] * float(w[i].flatten().double() @ r[:, k]) for i in range(9)) for k in range(4)]
    assert np.allclose(whole[0, 2:], expected, rtol=1e-12)


# -- distances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-7, 1e-3, 0.3])
def test_distance_is_about_the_relative_size_of_the_difference(size: float) -> None:
    """Four projections: within a factor of four in all of 40 draws."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        x = torch.randn(6, 5, 8, generator=generator, dtype=torch.float64)
        noise = torch.randn(6, 5, 8, generator=generator, dtype=torch.float64)
        y = x + noise * (size * x.norm() / noise.norm())
        found = distance(*(fingerprints(z[None])[0].numpy() for z in (x, y)))
        assert size / 4 < found < 4 * size
        assert distance(fingerprints(x[None])[0].numpy(), fingerprints(x[None])[0].numpy()) == 0


def test_distance_sees_what_sums_to_zero_over_the_samples() -> None:
    x = torch.randn(6, 8, dtype=torch.float64)
    x = x - x.mean(0)
    y = x * torch.linspace(0.5, 1.5, 8, dtype=torch.float64)
    y = y * (x.norm() / y.norm())
    assert distance(*(fingerprints(z[None])[0].numpy() for z in (x, y))) > 0.02


def test_distance_of_what_is_not_finite() -> None:
    x = torch.randn(2, 3)
    y = x.clone()
    y[0, 0] = float("nan")
    a, b = (fingerprints(z[None])[0].numpy() for z in (x, y))
    assert distance(a, b) == np.inf
    assert distance(b, b) == 0


def test_update_distance_is_that_of_the_changes() -> None:
    w, change = torch.randn(7, 5), torch.randn(7, 5)
    rows = [row_fingerprints((w + k * change)[None], [(0, 0)])[0].numpy() for k in (0.0, 0.01, 0.011)]
    assert update_distance((rows[0], rows[1]), (rows[0], rows[2])) == pytest.approx(1 / 11, rel=1e-3)
    assert update_distance((rows[0], rows[1]), (rows[0], rows[1])) == 0


# -- rounding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_nudge_is_one_ulp_either_way(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(500), torch.zeros(1)]).to(dtype).requires_grad_()
    y = moved(x)
    above, below = (torch.nextafter(x.detach().double(), torch.full((501,), end).double()) for end in (9.0, -9.0))
    if dtype == torch.float64:
        assert bool(((y == above) | (y == below)).all())
    assert (y != x).all()
    assert (y - x).abs().max() <= torch.finfo(dtype).eps * 4
    assert 150 < int((y > x).sum()) < 350
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_an_update_is_known_no_better_than_its_weights_and_its_gradient() -> None:
    sizes = {(3, "update"): {"w": 1e-7}, (3, "backward"): {"w": 1e-8}}
    rounding = Rounding(1, sizes)  # of one run in fp32: one ulp is 1.2e-7
    small = Look("update", "w", 1.0, size=1e-3, kind="parameters")
    large = Look("update", "w", 1.0, size=np.inf, kind="parameters")
    # weights that are a thousand times larger than the update are rounded to 1.2e-4 of it
    assert rounding.limit(3, small, since=0) == pytest.approx(8 * 1.2e-4, rel=0.01)
    assert rounding.limit(3, small, since=None) == rounding.limit(3, small, since=0)
    # half an ulp is the least that is known of a gradient; its root is the share of entries that go either way
    assert rounding.limit(3, large, since=0) == pytest.approx((10 * 2.0**-24) ** 0.5)
    assert rounding.limit(3, large, since=None) == pytest.approx(8 * 2.0**-23)


def test_nudged_runs_differ_by_rounding_alone(record: Callable[..., Path]) -> None:
    good = record("good", Knobs())
    moved_run = record("moved", Knobs(), config={"nudge": True})
    found = flowscope.bisect(good, moved_run)
    assert (found.step, found.phase) == (0, "forward")
    assert found.limit == 0
    assert found.distance < 1e-6
    again = flowscope.bisect(good, moved_run, rounding=[moved_run])
    assert again.phase == "forward", "what was measured is no excuse where set-ups are equal"
    assert FACTOR == 10
