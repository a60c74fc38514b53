"""The contract of instruments: own ones beside flowscope's, each switched off alone, none known to the centre."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import Stack, data, loss_of, sgd, watched

import flowscope
from flowscope.instruments import BUILT_IN, Instrument, PointStatistic, Taken
from flowscope.metrics import Metric
from flowscope.observation.sharing import parts_of
from flowscope.sums.payload import Sharing


class LargestInput(Instrument):
    """The largest entry of the model's inputs."""

    name = "largest_input"
    metrics = (Metric("largest_input", "Largest entry the model was given.", rows="model"),)

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def attach(self, view: Any, hooks: Any) -> None:
        hooks.before(view.model, self.fuse, self.look, hooks.switch)

    def look(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.seen.append(args[0].amax())

    def take(self) -> Taken | None:
        seen, self.seen = self.seen, []
        return Taken(self.name, [torch.stack(seen)], self.read) if seen else None

    def drop(self) -> None:
        self.seen = []

    @staticmethod
    def read(out: Any, parts: list[np.ndarray]) -> None:
        out.add("largest_input", np.array([parts[0].max()]), ("",))


def record_of(model: nn.Module, batches: int = 1, **arguments: Any) -> flowscope.Record:
    optimizer = sgd(model)
    with watched(model, optimizer, **arguments) as scope:
        for _ in range(batches):
            loss_of(model, data()).backward()
        optimizer.step()
    return scope.records[0]


@pytest.mark.parametrize("given", [LargestInput, LargestInput(), [LargestInput], iter([LargestInput()])])
def test_one_from_outside_stands_beside_those_of_flowscope(given: Any) -> None:
    record = record_of(Stack(2), batches=2, instruments=given)
    x, _ = data()
    assert record["largest_input"] == x.double().max().item()
    assert record.spec("largest_input").words.startswith("Largest entry")
    assert "grad_norm" in record


@pytest.mark.parametrize("name", [kind.name for kind in (*BUILT_IN, LargestInput)])
def test_each_is_switched_off_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    whole = record_of(Stack(2), instruments=[LargestInput])
    record = record_of(Stack(2), instruments=[LargestInput], config={"instruments": {name: False}})
    # without flows there are no points for the statistics of points
    kinds = (*BUILT_IN, LargestInput)
    off = [kind for kind in kinds if kind.name == name or (name == "flows" and issubclass(kind, PointStatistic))]
    own = {metric.name for kind in off for metric in kind.metrics}
    assert {*record.metrics} == {*whole.metrics} - own


def test_a_fault_in_one_switches_off_that_one(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(LargestInput):
        name = "broken"

        def attach(self, view: Any, hooks: Any) -> None:
            raise RuntimeError("injected")

    with caplog.at_level(logging.ERROR):
        record = record_of(Stack(2), instruments=[Broken, LargestInput])
    assert [message.split(" failed")[0] for message in caplog.messages] == ["flowscope: broken"]
    assert "largest_input" in record


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"instruments": [type("Units", (Instrument,), {"name": "units"})]}, "name 'units' .* is taken"),
        ({"instruments": [LargestInput, LargestInput]}, "name 'largest_input' .* is taken"),
        ({"instruments": [type("Nameless", (Instrument,), {})]}, "name '' .* is missing"),
        ({"instruments": [nn.ReLU]}, "got <class .*ReLU'>, expected subclasses"),
        ({"config": {"instruments": {"unitz": False}}}, "got 'unitz', .* nearest is 'units'"),
    ],
)
def test_what_is_no_instrument_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(flowscope.FlowscopeError, match=message):
        watched(Stack(2), **arguments)


@pytest.mark.parametrize("adds_up", ["table", "vector"])
def test_two_ranks_add_up_what_says_so(adds_up: Any) -> None:
    sharing = Sharing(2, torch.device("cpu"), True, 2, 2.0, first=True, first_rank=0, rank=0)
    mine, other = torch.arange(6.0).view(3, 2), torch.ones(3, 2)
    sums: dict[str, np.ndarray] = {}
    (part,) = parts_of(Taken("x", [mine], lambda out, parts: None, adds_up), sharing, {}, sums)
    (theirs,) = parts_of(Taken("x", [other], lambda out, parts: None, adds_up), sharing, {}, {})
    assert (part.name, part.size, part.fixed) == (theirs.name, theirs.size, adds_up == "table")
    part.scatter((part.gather() + theirs.gather()).numpy())
    assert sums["x"].tolist() == (mine + other).tolist()
    assert parts_of(Taken("x", [mine], lambda out, parts: None), sharing, {}, sums) == []


@pytest.mark.parametrize("module", ["observation", "snapshot", "sharing"])
def test_the_centre_names_no_instrument(module: str) -> None:
    source = (Path(flowscope.__file__).parent / "observation" / f"{module}.py").read_text()
    imported = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.module]
    names = {alias.name for n in imported if n.module.startswith("flowscope.instruments") for alias in n.names}
    assert names <= {"Instrument", "Taken", "instruments_for"}
