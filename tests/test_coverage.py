"""What silence covers: the line that says what was judged, what yielded and what is muted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowscope
from flowscope.cli import main
from flowscope.detectors import OUTCOME, Limit
from flowscope.detectors.coverage import Coverage, Mute, Said
from flowscope.errors import FlowscopeError
from flowscope.records import Alert, RunHeader
from flowscope.sinks import MemorySink
from flowscope.views.overview import RunView, facts

pytestmark = pytest.mark.usefixtures("strict")


def chain(depth: int = 3, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), activation())]
    return nn.Sequential(*layers, nn.Linear(8, 2))


def train(model: nn.Module, steps: int = 4, *, loss: bool = True, config: Any = (), **options: Any) -> flowscope.Scope:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    settings = {"console": "off", **dict(config)}
    with flowscope.watch(model, optimizer, every=1, config=settings, **options) as scope:
        for _ in range(steps):
            x = torch.randn(16, 8)
            value = (model(x) - x[:, :2]).square().mean()
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            if loss:
                scope.step(loss=value)
    return scope


def covered(scope: flowscope.Scope) -> str:
    line = scope.summary().splitlines()[-1]
    assert line.startswith("coverage: ")
    return line


def kinds(scope: flowscope.Scope) -> list[str]:
    return [alert.kind for alert in scope.alerts]


def test_what_was_seen_and_what_could_not_be_judged() -> None:
    model = chain()
    model[0].weight.requires_grad_(False)
    line = covered(train(model))
    assert "4 records; loss on all; gradients at 4 of 4 points of network and 7 of 8 parameters" in line
    absent = line.split("as this run has no such numbers: ")[1].split(";")[0]
    assert "rank_desync" in absent  # one process
    assert "gate_saturation" in absent
    assert "vanishing_gradient" not in absent


def test_a_run_without_losses_and_one_without_records() -> None:
    assert "no loss was given" in covered(train(chain(), loss=False))
    assert "nothing was seen" in covered(train(chain(), steps=0))


def test_what_no_other_was_asked_about_is_no_finding_and_unsampled_steps_are_no_records() -> None:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for step in range(24):
            x = torch.randn(16, 8) * (math.nan if step >= 15 else 1.0)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    line = covered(scope)
    assert line.startswith(f"coverage: {len(scope.records)} records")  # 0 to 10 and 20
    assert "while non_finite stands nothing else is judged" in line
    assert "yielded" not in line


def test_a_gradient_that_is_0_or_left_in_what_is_frozen_counts_for_none() -> None:
    model = chain()
    model[0].weight.grad = torch.ones(8, 8)
    model[0].weight.requires_grad_(False)
    model[4].bias.register_hook(lambda gradient: 0 * gradient)
    assert "6 of 8 parameters" in covered(train(model))


def test_a_loss_that_was_judged_and_is_fine_counts_as_judged() -> None:
    line = covered(train(chain(), steps=200))
    assert "loss_plateau" not in line
    assert "loss_spike" not in line


class High(Limit):
    """A cause that a test finds in each record."""

    kind = "high"
    metric = "param_norm"
    above = 0.0
    records = 1


class Low(High):
    """What it explains."""

    kind = "low"
    level = OUTCOME
    row = "parameter"


def test_who_yields_is_named_with_value_limit_and_cause() -> None:
    scope = train(chain(), detectors=[High, Low], config={"limits": {"low": 0.25}})
    assert "low" not in kinds(scope)
    largest = scope.records[-1]["param_norm"].max()
    assert "yielded to high, so without an alert: low at " in covered(scope)
    assert f"({largest:.4g}, above its limit 0.25)" in covered(scope)


def test_a_kind_that_stands_is_not_said_to_be_without_an_alert() -> None:
    seen = Coverage(["high", "low"])
    seen.records = 1
    seen.kept_back(Said("low", "0.weight", 3.0, 1.0), "high")
    stands = Alert("low", "error", "1.weight", 1, 2.0, 1.0, "too high", "lower it")
    assert "yielded to high" in seen.line(RunHeader())
    assert "yielded" not in seen.line(RunHeader(), [stands])


def test_what_is_muted_is_not_raised_explains_nothing_and_stands_in_the_line() -> None:
    scope = train(chain(), detectors=[High, Low], config={"mute": ["high"]})
    assert "high" not in kinds(scope)
    assert "low" in kinds(scope)
    assert "muted: high (last: high" in covered(scope)


def test_a_place_is_muted_alone() -> None:
    place = train(chain(), detectors=[Low]).alerts[0].where
    assert place
    muted = train(chain(), detectors=[Low], config={"mute": f"low:{place[:-1]}?,loss_spike"})
    assert kinds(muted) == []
    assert "muted: loss_spike (nothing found so far)" in covered(muted)
    elsewhere = train(chain(), detectors=[Low], config={"mute": ["low:elsewhere.*", "low:"]})
    assert [alert.where for alert in elsewhere.alerts] == [place]


@pytest.mark.parametrize(
    ("pattern", "kind", "where", "takes"),
    [
        ("no_gradient", "no_gradient", "encoder.0", True),
        ("no_gradient:encoder.*", "no_gradient", "encoder.0", True),
        ("no_gradient:encoder.*", "no_gradient", "decoder.0", False),
        ("no_gradient:encoder.*", "dead_units", "encoder.0", False),
        ("loss_*", "loss_spike", "", True),
        ("no_gradient:", "no_gradient", "encoder", False),
        ("no_gradient:", "no_gradient", "", True),
    ],
)
def test_patterns(pattern: str, kind: str, where: str, takes: bool) -> None:
    assert (Mute([pattern]).takes(kind, where) is not None) == takes


def test_a_pattern_that_names_no_kind_is_refused() -> None:
    with pytest.raises(FlowscopeError, match=r"mute: got lost_spike.*Did you mean 'loss_spike'"):
        train(chain(), config={"mute": ["lost_spike"]})
    with pytest.raises(FlowscopeError, match="mute"):
        train(chain(), config={"mute": 3})


def test_a_profile_below_its_limit_without_an_alert_is_told() -> None:
    deep = chain(12, nn.Sigmoid)
    scope = train(deep, config={"mute": ["vanishing_gradient"]})
    product = scope.records[-1]["gradient_product"]
    place = scope.records[-1].labels("gradient_product")[product.argmin()]
    assert product.min() < 1e-3
    assert f"gradient_product of network at {place} is {product.min():.2g}, below its limit 0.001" in covered(scope)
    told = covered(train(chain(12, nn.Sigmoid)))
    assert "gradient_product" not in told  # an alert speaks of it


def test_numbers_that_are_none_silence_the_rest_and_the_line_says_so() -> None:
    model = chain()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    line = covered(train(model))
    assert "while non_finite stands nothing else is judged" in line
    assert "; 1 of " in line
    assert "gradients at 4 of 4 points of network and 8 of 8 parameters" in line  # they came, though they are NaN


def test_files_commands_and_the_tab_end_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope = train(chain(), steps=12, log_dir=tmp_path, config={"mute": ["loss_spike"]})
    told = covered(scope)
    for command in ("summary", "diagnose"):
        assert main([command, str(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == told
    assert main(["diagnose", str(tmp_path), "--set", "mute=no_gradient:0.*,dead_units"]) == 0
    assert "muted: no_gradient:0.* (nothing found so far); muted: dead_units" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
    assert "muted: loss_spike" in (tmp_path / "report.html").read_text()
    header = flowscope.sinks.read_run(tmp_path).header
    assert header is not None
    assert facts(RunView("run", header))[-1] == told


def test_a_run_says_it_while_it_trains() -> None:
    sink = MemorySink()
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scope = flowscope.watch(model, optimizer, every=1, sinks=[sink], config={"console": "off"})
    for _ in range(12):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    scope.records  # noqa: B018
    assert sink.header is not None
    assert sink.header.coverage.startswith("coverage: 10 records")
    scope.close()
    assert sink.header.coverage.startswith("coverage: 12 records")


# -- off, and what cannot be attached to


def test_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLOWSCOPE_OFF", "1")
    model = chain()
    before = [dict(vars(module)) for module in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    raised: list[Any] = []
    with flowscope.watch(model, optimizer, log_dir=tmp_path / "run", on_alert=raised.append) as scope:
        assert [vars(module) for module in model.modules()] == before
        model(torch.full((2, 8), float("nan"))).sum().backward()
        optimizer.step()
        scope.step(loss=torch.tensor(1.0), step=3)
        scope.pause()
        scope.resume()
        state = {"step": 7, "samples": 5, "detectors": scope.state_dict()["detectors"]}
        scope.load_state_dict(state)
        assert scope.state_dict() == state  # a checkpoint hands it on
    assert (scope.records, scope.alerts, raised, scope.closed) == ([], [], [], True)
    assert "FLOWSCOPE_OFF=1" in scope.summary()
    assert covered(scope)
    assert not (tmp_path / "run").exists()
    assert flowscope.watch(3).records == []  # type: ignore[arg-type]


class Body(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.integrators = nn.ModuleList([None] * 3)  # type: ignore[list-item]
        self.by_name = nn.ModuleDict({"none": None})  # type: ignore[dict-item]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Refusing(Block):
    """Raises what is no AttributeError for each name it does not know."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise RuntimeError(f"there is no {name}") from None


@pytest.mark.parametrize("block", [Block, Refusing])
def test_odd_models_are_watched(block: type[nn.Module]) -> None:
    model = Body(block)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    assert [flow.outputs for flow in scope.flows] == [("layers.0", "layers.1", "layers.2")]
    assert len(scope.records) == 1


class Agent(nn.Module):
    def __init__(self, size: Any) -> None:
        super().__init__()
        self.critic, self.actor = (
            nn.Sequential(nn.Linear(size, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, out))
            for out in (1, 2)
        )


def test_widths_may_be_numpys_integers() -> None:
    import numpy as np

    plain, odd = (flowscope.find_flows(Agent(size)) for size in (4, np.array((4,)).prod()))
    assert [flow.name for flow in plain] == ["critic", "actor"]
    assert odd == plain


@pytest.mark.parametrize("step", ["_bind", "_attach"])
def test_a_model_that_cannot_be_attached_to_trains_on_unwatched(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FLOWSCOPE_STRICT")

    def fails(*_: Any) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(flowscope.Scope, step, fails)
    model = chain()
    hooks: list[Sequence[Any]] = [[*vars(module)["_forward_hooks"]] for module in model.modules()]
    scope = train(model)
    assert scope.records == []
    assert "watching Sequential" in scope.summary()
    assert covered(scope)
    assert [[*vars(module)["_forward_hooks"]] for module in model.modules()] == hooks
    assert sum("watching Sequential failed" in line.message for line in caplog.records) == 1
    monkeypatch.undo()
    assert len(train(model).records) == 4  # nothing is left that says it is watched already
