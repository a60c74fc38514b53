"""Programs in which nothing, or a part, learns are told with their cause; their healthy counterparts are silent."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flowscope
from flowscope.records import Alert
from flowscope.sinks import read_run

QUIET = {"console": "off"}
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], Tensor]


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def data(size: int = 32) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 6)
    return x, x[:, :3].argmax(1)


def serious(scope: flowscope.Scope) -> list[Alert]:
    return [a for a in scope.alerts if a.state == "raised" and a.severity != "info"]


def told(scope: flowscope.Scope) -> list[tuple[str, str, int]]:
    return [(a.kind, a.severity, a.step) for a in serious(scope)]


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(
    step: Step = usual,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    known: object = "the same",
    steps: int = 14,
    **options: object,
) -> flowscope.Scope:
    """A scope over so many steps; `known` is what `watch` is told of the optimizer."""
    torch.manual_seed(0)
    model = mlp(6, 16, 16, 3) if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    with flowscope.watch(model, optimizer if known == "the same" else known, config=QUIET, **options) as scope:
        for _ in range(steps):
            scope.step(loss=step(model, optimizer, *data()))
    assert not scope._faults.failed
    return scope


# -- nothing moves -----------------------------------------------------------------------------------------------------


def no_backward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(x), y)
    optimizer.step()
    return loss


def set_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x).argmax(1) != y).float().mean().requires_grad_()
    loss.backward()
    optimizer.step()
    return loss


def made_of_a_number(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = torch.tensor(functional.cross_entropy(model(x), y).item(), requires_grad=True)
    loss.backward()
    optimizer.step()
    return loss


def of_another_path(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    scale = torch.ones((), requires_grad=True)
    (scale * functional.cross_entropy(model(x), y).detach()).backward()
    optimizer.step()
    return scale.detach()


def without_graph(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(x)
    (out.requires_grad_() ** 2).mean().backward()
    optimizer.step()
    return out.mean().detach()


def cleared(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    return loss.detach()


def set_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return loss.detach()


def underflow(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    (0 * loss).backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize(
    ("step", "word"),
    [
        (no_backward, "no backward pass ran"),
        (set_by_hand, "leaf"),
        (made_of_a_number, "leaf"),
        (of_another_path, "no path"),
        (without_graph, "without a graph"),
        (cleared, "cleared"),
        (set_to_zero, "cleared"),
        (underflow, "exactly 0"),
    ],
)
def test_no_gradient_at_all_is_an_error_within_three_records_that_names_the_cause(step: Step, word: str) -> None:
    scope = trained(step)
    assert told(scope) == [("no_gradient", "error", 2)]
    assert word in serious(scope)[0].message


@pytest.mark.parametrize(("step", "word"), [(cleared, "zero_grad"), (set_by_hand, "torch.tensor")])
def test_the_advice_is_that_of_the_cause(step: Step, word: str) -> None:
    assert word in serious(trained(step))[0].advice


def test_gradients_that_are_gone_later_are_told_too() -> None:
    calls: list[int] = []

    def later(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return (usual if len(calls) <= 5 else cleared)(model, optimizer, x, y)

    assert told(trained(later)) == [("no_gradient", "error", 7)]


def test_exact_zeros_after_learning_are_a_loss_that_is_met() -> None:
    calls: list[int] = []

    def met(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return (usual if len(calls) <= 5 else underflow)(model, optimizer, x, y)

    assert [a for a in serious(trained(met, steps=60)) if a.kind in ("no_gradient", "update_too_small")] == []


def test_a_loop_that_updates_by_hand_is_silent_and_says_what_is_not_seen() -> None:
    def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        return loss.detach()

    scope = trained(by_hand, known=None)
    assert told(scope) == []
    assert any("without an optimizer" in note for note in scope.records[-1].notes)


@pytest.mark.parametrize("known", ["the same", None])
def test_an_optimizer_of_other_tensors_is_named(known: object) -> None:
    model = mlp(6, 16, 16, 3)
    scope = trained(model=model, optimizer=torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1), known=known)
    kinds = told(scope)
    assert kinds == [("stale_parameters", "error", 0 if known else 2)]


def test_an_optimizer_of_other_tensors_is_named_before_there_is_a_gradient() -> None:
    model = mlp(6, 16, 16, 3)
    scope = trained(no_backward, model=model, optimizer=torch.optim.SGD(mlp(6, 3).parameters(), lr=0.1))
    assert told(scope) == [("stale_parameters", "error", 1)]


def test_an_optimizer_that_never_steps_is_told_of_at_once_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    def forgotten(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step  # noqa: B018
        return loss.detach()

    with caplog.at_level(logging.WARNING, "flowscope"):
        scope = trained(forgotten, steps=3)
    first, last = [r.getMessage() for r in caplog.records]
    assert "after 3 calls" in first
    assert "parentheses" in first
    assert "closed without a record" in last
    assert "parentheses" in scope.summary()


def forgets_the_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step  # noqa: B018
    return loss.detach()


def test_an_optimizer_that_never_steps_is_an_alert_everywhere(tmp_path: Path) -> None:
    heard: list[tuple[int, Alert]] = []
    calls: list[int] = []

    def step(*given: Any) -> Tensor:
        calls.append(1)
        return forgets_the_step(*given)

    scope = trained(step, steps=6, log_dir=tmp_path, on_alert=lambda alert: heard.append((len(calls), alert)))
    assert told(scope) == [("stale_parameters", "error", 0)]
    assert [(call, alert.kind) for call, alert in heard] == [(3, "stale_parameters")]
    assert "stale_parameters" in scope.summary()
    assert read_run(tmp_path).alerts == scope.alerts


def test_two_calls_without_a_step_are_told_when_the_scope_closes() -> None:
    assert told(trained(forgets_the_step, steps=2)) == [("stale_parameters", "error", 0)]


def test_an_alert_without_records_is_resolved_by_steps_and_can_be_muted() -> None:
    calls: list[int] = []

    def late(*given: Any) -> Tensor:
        calls.append(1)
        return (usual if len(calls) > 4 else forgets_the_step)(*given)

    scope = trained(late)
    assert [(a.kind, a.state) for a in scope.alerts] == [("stale_parameters", s) for s in ("raised", "resolved")]
    torch.manual_seed(0)
    model = mlp(6, 16, 16, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with flowscope.watch(model, optimizer, config={**QUIET, "mute": ["stale_parameters"]}) as muted:
        for _ in range(4):
            muted.step(forgets_the_step(model, optimizer, *data()))
    assert muted.alerts == []


def test_two_losses_of_each_micro_batch_are_no_forgotten_step(caplog: pytest.LogCaptureFixture) -> None:
    """As in Lightning's manual optimization: told before each backward, two nets, a step every other batch."""
    torch.manual_seed(0)
    nets = nn.ModuleList([mlp(6, 16, 16, 3), mlp(6, 16, 16, 3)])
    optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
    x, y = data()
    with flowscope.watch(nets, optimizers, config=QUIET) as scope, caplog.at_level(logging.WARNING, "flowscope"):
        for number in range(4):
            for net in nets:
                loss = functional.cross_entropy(net(x), y)
                scope.step(loss=loss.detach())
                loss.backward()
            if number % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    assert told(scope) == []
    assert not [r for r in caplog.records if "no record" in r.getMessage()]
    assert len(scope.records) == 2


def test_accumulation_is_no_forgotten_step(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        loss = functional.cross_entropy(model(x), y) / 8
        loss.backward()
        if len(calls) % 8 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    with caplog.at_level(logging.WARNING, "flowscope"):
        scope = trained(accumulate, steps=24)
    assert [r.getMessage() for r in caplog.records] == []
    assert told(scope) == []


def test_without_a_known_optimizer_weights_that_stand_still_are_told_after_eight_records() -> None:
    def forgotten(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    scope = trained(forgotten, known=None)
    assert told(scope) == [("update_too_small", "warning", 7)]
    assert "optimizer.step()" in serious(scope)[0].advice


def test_a_scaler_that_skips_the_first_steps_is_healthy() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=10**6)

    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss * 2.0**12).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    scope = trained(scaled, scaler=scaler, steps=20)
    assert sum("skipped" in record.flags for record in scope.records) >= 4
    assert told(scope) == []


# -- the rate ----------------------------------------------------------------------------------------------------------


def scheduled(rate: Callable[[int], float], steps: int, first: float = 1e-2) -> flowscope.Scope:
    model = mlp(6, 16, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=first)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = usual(model, optimizer, x, y)
        schedule.step()
        return loss

    return trained(step, model=model, optimizer=optimizer, steps=steps)


def test_a_rate_of_zero_from_the_start_is_named_at_the_third_record() -> None:
    scope = scheduled(lambda step: step // 1000, 14)
    assert told(scope) == [("update_too_small", "warning", 2)]
    assert "exactly 0" in serious(scope)[0].message


@pytest.mark.parametrize(
    "rate",
    [
        lambda step: min(1.0, step / 20),  # a warm-up from 0
        lambda step: 0.5 + 0.5 * np.cos(np.pi * step / 200),  # a cosine to 0
        lambda step: 0.5 + 0.5 * np.cos(np.pi * (step % 40) / 40),  # restarts
        lambda step: float(step < 100),  # exactly 0 after learning
    ],
)
def test_rates_that_come_from_zero_or_go_there_after_learning_are_silent(rate: Callable[[int], float]) -> None:
    assert told(scheduled(rate, 200)) == []


def test_a_decay_by_batch_instead_of_epoch_is_told_while_the_loss_is_where_it_began() -> None:
    scope = scheduled(lambda step: 0.8**step, 60, first=1e-3)
    (alert,) = serious(scope)
    assert (alert.kind, alert.where) == ("update_too_small", "")
    assert "scheduler.step()" in alert.advice
    # the sum of .8^k is 5 full steps; below a hundredth of the peak from step 21 on, and 20 more
    assert "5 full steps" in alert.message
    assert 41 <= alert.step <= 50  # records come each tenth step, and where the rate has fallen far within eight


def test_a_group_of_rate_zero_beside_others_is_information() -> None:
    model = mlp(6, 16, 16, 3)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": [*model[2:].parameters()]}]
    scope = trained(model=model, optimizer=torch.optim.Adam(groups, lr=1e-2))
    assert told(scope) == []
    assert [(a.kind, a.where, a.step) for a in scope.alerts] == [("update_too_small", "0", 2)]


# -- to the last digit -------------------------------------------------------------------------------------------------


def test_a_parameter_that_its_optimizer_steps_past_is_named() -> None:
    class Forgetful(torch.optim.SGD):
        """Writes to a copy of the third parameter."""

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            third = self.param_groups[0]["params"][2]
            kept = third.detach().clone()
            super().step(closure)
            third.data.copy_(kept)

    model = mlp(6, 16, 16, 3)
    scope = trained(model=model, optimizer=Forgetful(model.parameters(), lr=0.1))
    assert told(scope) == [("update_too_small", "warning", 7)]
    assert serious(scope)[0].where == "2"
    assert "2.weight" in serious(scope)[0].message


def test_decay_alone_is_told_at_the_tenth_step() -> None:
    model = mlp(6, 16, 16, 3)
    model[2].weight.register_hook(lambda gradient: 0 * gradient)
    scope = trained(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    assert told(scope) == [("no_gradient", "warning", 9)]
    assert "decay alone" in serious(scope)[0].message


class Branch(nn.Module):
    """A residual branch whose result counts `share` times; `low` is a product of two factors."""

    def __init__(self, share: float, low: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.share = nn.Linear(6, 6), nn.Linear(6, 3), share
        self.branch = nn.Sequential(nn.Linear(6, 2, bias=not low), nn.Linear(2, 6, bias=not low))
        if low:
            nn.init.zeros_(self.branch[1].weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.share * self.branch(x))


@pytest.mark.parametrize(
    ("share", "low", "expected"),
    [(0.0, False, [("no_gradient", "warning", 9)]), (1e-3, False, []), (1.0, True, [])],
    ids=["times 0", "small", "one factor starts at 0"],
)
def test_a_branch_that_is_exactly_0_is_told_at_the_tenth_record(share: float, low: bool, expected: object) -> None:
    scope = trained(model=Branch(share, low), steps=30)
    assert told(scope) == expected
    assert [a.where for a in serious(scope)] == ["branch.0"] * len(serious(scope))
    assert all("4 of the 8" in a.message and "never moved" in a.message for a in serious(scope))


class Answers(nn.Module):
    """Ends in a norm over a single feature, which gives its bias alone, or in a head that begins at 0."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.inner = mlp(6, 16, 16)
        self.end = nn.Sequential(nn.Linear(16, 1), nn.LayerNorm(1)) if end == "norm" else nn.Linear(16, 1)
        if end == "head":
            nn.init.zeros_(self.end.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.inner(x))


@pytest.mark.parametrize(("end", "expected"), [("norm", [("constant_output", "warning", 9)]), ("head", [])])
def test_answers_that_differ_in_no_digit_are_told_at_the_tenth_record_that_shows_them(end: str, expected: list) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x)[:, 0] - 3 - x[:, 0]).square().mean()  # its mean is learned at once: the loss falls
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    alerts = [alert for alert in told(trained(step, model=Answers(end), steps=40)) if alert[0] == "constant_output"]
    assert alerts == expected


def test_an_actor_whose_loss_is_0_in_all_digits_is_an_error() -> None:
    """More than half of what the optimizer holds; a weight of 0 has a hundred records to be raised."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = model["critic"](x).square().mean() + 0.0 * model["actor"](x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    scope = trained(step, steps=102, every=1, model=nn.ModuleDict({"actor": mlp(6, 16, 3), "critic": mlp(6, 1)}))
    assert told(scope) == [("no_gradient", "error", 99)]
    assert serious(scope)[0].where == "actor.0"


def test_a_bias_that_cancels_out_of_the_loss_is_healthy() -> None:
    """A critic's last bias: its loss is a difference of two of its answers."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x + 1).sum() - model(x).sum()) / 32 + 0.1 * (model(x) - model(x.flip(0))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    scope = trained(step, model=mlp(6, 16, 1), steps=30)
    assert any(r.metrics["param_grad_norm"][-1] == 0 for r in scope.records)
    assert "no_gradient" not in [a.kind for a in serious(scope)]


def test_still_is_exact_for_small_tensors_and_for_large_ones_whose_samples_say_so() -> None:
    """An embedding of which a batch uses one row outside of the sampled entries, one that gets an exact zero."""
    used, unused = nn.EmbeddingBag(20_000, 8), nn.Linear(90, 70)
    model = nn.ModuleDict({"used": used, "unused": unused, "head": nn.Linear(8, 3)})

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        before = used.weight.detach().clone()
        out = model["head"](model["used"](torch.tensor([[17]])))
        loss = out.square().sum() + 0 * model["unused"](torch.ones(1, 90)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert not torch.equal(before, used.weight)
        return loss.detach()

    scope = trained(step, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    first, second = scope.records[0], scope.records[1]
    still = dict(zip(second.labels("param_still"), second["param_still"], strict=True))
    assert second["param_unchanged"][0] == 1  # the sampled rows did not move
    assert still == {"used.weight": 0, "unused.weight": 1, "unused.bias": 1, "head.weight": 0, "head.bias": 0}
    in_first = dict(zip(first.labels("param_still"), first["param_still"], strict=True))
    assert np.isnan(in_first["unused.weight"])  # 6,300 entries: looked at whole only once in doubt
    assert in_first["unused.bias"] == 1


# -- a part without gradient -------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Encoder and head; how the first is called."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.encoder, self.head, self.how = nn.Sequential(*mlp(6, 16, 16), nn.ReLU()), nn.Linear(16, 3), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                return self.head(self.encoder(x))
        if self.how == "checkpoint":
            return self.head(checkpoint(self.encoder, x, use_reentrant=True))
        return self.head(self.encoder(x).detach())


def under_no_grad(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = model.encoder(x)
    return model.head(hidden)


@pytest.mark.parametrize("how", ["checkpoint", "detach"])
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_more_than_half_without_gradient_is_an_error_by_the_tenth_step(how: str) -> None:
    scope = trained(model=Two(how))
    ((kind, severity, step),) = told(scope)
    assert (kind, severity) == ("no_gradient", "error")
    assert step <= 9
    assert serious(scope)[0].where.startswith("encoder")


@pytest.mark.parametrize("how", ["checkpoint", "detach"])
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_what_the_optimizer_does_not_hold_may_be_cut(how: str) -> None:
    model = Two(how)
    assert told(trained(model=model, optimizer=torch.optim.Adam(model.head.parameters(), lr=1e-2))) == []


class Codes(nn.Module):
    """A codebook behind a straight-through estimator, with or without a loss of its own."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        self.encode, self.codebook, self.decode = nn.Linear(6, 8), nn.Embedding(5, 8), nn.Linear(8, 3)
        self.learns = learns

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x)
        code = self.codebook(torch.cdist(hidden, self.codebook.weight).argmin(1))
        passed = hidden + (code - hidden).detach()
        return self.decode(passed) + (0.1 * (code - hidden.detach()).square().mean() if self.learns else 0)


@pytest.mark.parametrize("learns", [False, True])
def test_a_codebook_without_gradient_is_a_warning_at_the_tenth_step(learns: bool) -> None:
    scope = trained(model=Codes(learns=learns))
    assert told(scope) == ([] if learns else [("no_gradient", "warning", 9)])
    assert [a.where for a in serious(scope)] == ([] if learns else ["codebook"])


def test_gradients_set_to_none_but_for_the_last_bias_are_named_as_lost() -> None:
    def only_the_last(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for parameter in [*model.parameters()][:-1]:
            parameter.grad = None
        optimizer.step()
        return loss.detach()

    assert told(trained(only_the_last)) == [("no_gradient", "error", 9)]


@pytest.mark.parametrize("until", [15, 99])
def test_a_few_gradients_that_the_loop_takes_away_by_name_are_a_note(until: int) -> None:
    """Prototypes are left alone for the first steps (SwAV)."""
    count = 0

    def first_left_alone(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if count <= until:
            next(model.parameters()).grad = None
        optimizer.step()
        return loss.detach()

    scope = trained(first_left_alone, steps=40)
    assert told(scope) == []
    (note,) = [a for a in scope.alerts if a.kind == "no_gradient" and "backward left there" in a.message][:1]
    assert (note.severity, note.step) == ("info", 9)
    assert ("param_waiting" in scope.records[-1]) == (until == 99)


class Heads(nn.Module):
    """Heads of which the loss uses one in turn, all of them run or that one alone."""

    def __init__(self, count: int, *, all_run: bool) -> None:
        super().__init__()
        self.body, self.heads = mlp(6, 16, 16), nn.ModuleList(nn.Linear(16, 3) for _ in range(count))
        self.all_run, self.turn = all_run, -1

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        hidden, number = self.body(x), self.turn % len(self.heads)
        if self.all_run:
            return [head(hidden) for head in self.heads][number]
        return self.heads[number](hidden)


@pytest.mark.parametrize(("count", "all_run"), [(6, True), (14, True), (20, False)])
def test_heads_used_in_turn_are_healthy(count: int, all_run: bool) -> None:
    assert told(trained(model=Heads(count, all_run=all_run), steps=18, every=1)) == []


def test_a_module_that_never_runs_stays_information() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.spare = mlp(6, 16, 3), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    scope = trained(model=Spare(), steps=30)
    assert told(scope) == []
    assert [(a.kind, a.where) for a in scope.alerts] == [("no_gradient", "spare")]


def test_an_average_of_the_weights_that_runs_each_step_is_healthy() -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6, 16, 3)
            self.target = copy.deepcopy(self.net)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                aim = self.target(x)
            return self.net(x) + 0 * aim

    model = Averaged()
    scope = trained(model=model, optimizer=torch.optim.Adam(model.net.parameters(), lr=1e-2), steps=30)
    assert [a.kind for a in scope.alerts] == []


def test_all_parameters_frozen_under_an_optimizer_is_a_warning() -> None:
    model = mlp(6, 16, 3).requires_grad_(False)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(x), y)
        optimizer.step()
        return loss

    assert told(trained(step, model=model)) == [("no_gradient", "warning", 1)]


# -- two backward passes a step ----------------------------------------------------------------------------------------


def adversaries(first: str, *, cut: bool = False, given: bool = True, every: int = 10) -> flowscope.Scope:
    """A generator and its critic in one watch; the critic learns first, whatever `watch` is told."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": mlp(4, 16, 16, 2), "d": mlp(2, 16, 16, 1)})
    of_g, of_d = (torch.optim.Adam(model[name].parameters(), lr=1e-3) for name in "gd")
    listed = [of_d, of_g] if first == "d" else [of_g, of_d]
    one, none = torch.ones(32, 1), torch.zeros(32, 1)
    loss_of = functional.binary_cross_entropy_with_logits
    with flowscope.watch(model, listed if given else None, every=every, config=QUIET) as scope:
        for _ in range(34):
            made = model["g"](torch.randn(32, 4))
            of_d.zero_grad()
            (loss_of(model["d"](torch.randn(32, 2)), one) + loss_of(model["d"](made.detach()), none)).backward()
            of_d.step()
            of_g.zero_grad()
            loss_of(model["d"](made.detach() if cut else made), one).backward()
            of_g.step()
    return scope


@pytest.mark.parametrize(("first", "given"), [("d", True), ("g", True), ("d", False)])
@pytest.mark.parametrize("every", [10, 7])
def test_a_critic_that_does_not_train_the_generator_is_no_cut(first: str, given: bool, every: int) -> None:
    assert [a.kind for a in adversaries(first, given=given, every=every).alerts if a.kind == "no_gradient"] == []


@pytest.mark.parametrize(("first", "given"), [("d", True), ("g", True), ("d", False)])
def test_a_generator_cut_from_its_own_loss_is(first: str, given: bool) -> None:
    (alert,) = [a for a in serious(adversaries(first, cut=True, given=given)) if a.kind == "no_gradient"]
    assert alert.where.startswith("g.")
    assert alert.step <= 2


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("delay", "order"), [(1, "qa"), (2, "qa"), (2, "aq")])
def test_a_delayed_actor_is_judged_on_the_steps_of_its_own_optimizer(delay: int, order: str, cut: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"actor": mlp(4, 16, 16, 2), "critic": mlp(6, 16, 16, 1)})
    temperature = nn.Parameter(torch.zeros(()))
    model.register_parameter("temperature", temperature)
    of_a, of_q = (torch.optim.Adam(model[name].parameters(), lr=1e-3) for name in ("actor", "critic"))
    of_t = torch.optim.Adam([temperature], lr=1e-3)
    listed = [of_q, of_a, of_t] if order == "qa" else [of_a, of_t, of_q]
    with flowscope.watch(model, listed, config=QUIET) as scope:
        for number in range(60):
            state, action = torch.randn(32, 4), torch.rand(32, 2)
            with torch.no_grad():
                aim = 0.9 * model["critic"](torch.cat([state, model["actor"](state)], 1)) - action.square().sum(1, True)
            of_q.zero_grad()
            (model["critic"](torch.cat([state, action], 1)) - aim).square().mean().backward()
            of_q.step()
            if number % delay == delay - 1:
                chosen = model["actor"](state)
                chosen = chosen.detach() if cut else chosen
                of_a.zero_grad()
                (-model["critic"](torch.cat([state, chosen], 1))).mean().backward()
                of_a.step()
                of_t.zero_grad()
                (temperature * chosen.detach().mean()).backward()
                of_t.step()
    places = [a.where.partition(".")[0] for a in serious(scope) if a.kind == "no_gradient"]
    assert places == (["actor"] if cut else [])


@pytest.mark.parametrize(("name", "severity"), [("pooler", "info"), ("side", "warning")])
def test_a_pooler_whose_answer_is_left_over_is_a_note(name: str, severity: str) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(6, 16, 16), nn.Linear(16, 3)
            self.add_module(name, nn.ModuleDict({"dense": nn.Linear(16, 16)}))

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            self.get_submodule(name)["dense"](h)
            return self.head(h)

    found = [(a.severity, a.where) for a in trained(model=Body()).alerts if "in any of its" in a.message]
    assert found == [(severity, f"{name}.dense")]


def test_modules_that_are_asked_to_tell_may_be_compiled() -> None:
    """A hook that comes after the first graph is traced into the next one, and does nothing there."""

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.side, self.spare = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + self.side(x).detach()

    model = Spare()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, config=QUIET) as scope:
        for _ in range(12):  # the eleventh step is the first of the graph without samples
            usual(compiled, optimizer, *data())
    assert len(scope.records) == 11
    assert not scope._faults.failed
    # the backward of the graph comes to what was detached, not to what never ran
    assert [(a.kind, a.where, a.step) for a in serious(scope)] == [("no_gradient", "side", 9)]


# -- tensors that are no longer the model's, or never were -------------------------------------------------------------


class Tied(nn.Module):
    """Its head is its embedding [V, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


@pytest.mark.parametrize("lost", [True, False])
def test_a_head_that_is_no_longer_tied_is_in_no_optimizer(lost: bool) -> None:
    model, steps = Tied(), itertools.count()

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        if next(steps) == 5:
            fresh = nn.Parameter(model.embedding.weight.detach().clone())
            model.head.weight = fresh if lost else model.embedding.weight
        return usual(net, optimizer, y, (y + 1) % 6)

    scope = trained(step, model=model)
    expected = [("parameters_not_optimized", "head")] if lost else []
    assert [(a.kind, a.where) for a in serious(scope)] == expected
    names = scope.records[-1].metric_labels["param_norm"]
    assert list(names) == ["embedding.weight", *(["head.weight"] if lost else [])]


class Builds(nn.Module):
    """A layer that is built in forward, one that lies outside of the model (a teacher's), or one of its own."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(6, 8), nn.Linear(8, 3), middle
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = {"built": lambda: nn.Linear(8, 8), "outside": lambda: OUTSIDE, "own": lambda: self.own}[self.middle]()
        return self.last(torch.tanh(made(self.first(x))))


OUTSIDE = nn.Linear(8, 8)


@pytest.mark.parametrize("middle", ["built", "outside", "own"])
def test_a_layer_that_is_built_in_forward_is_told(middle: str) -> None:
    model = Builds(middle)
    optimizer = torch.optim.Adam([*model.first.parameters(), *model.last.parameters(), *model.own.parameters()], 1e-2)
    alerts = [a for a in serious(trained(model=model, optimizer=optimizer, steps=8)) if a.kind != "no_gradient"]
    expected = [("parameters_not_optimized", 2, 2.0)] if middle == "built" else []
    assert [(a.kind, a.step, a.value) for a in alerts] == expected
    assert all("8 x 8, 8" in a.message for a in alerts)


@pytest.mark.parametrize("size", [512, 8])  # a loss that is known well, and one that only stays at guessing
@pytest.mark.parametrize(("rate", "expected"), [(1e-6, ["update_too_small"]), (1e-2, [])])
def test_a_rate_that_is_far_too_low_is_told_once_the_loss_shows_it(rate: float, expected: list[str], size: int) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return usual(model, optimizer, *data(size))

    model = mlp(6, 16, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    alerts = serious(trained(step, model=model, optimizer=optimizer, steps=172))
    assert [a.kind for a in alerts] == expected
    # by hand: Adam moves an entry by the rate at most, and entries of a layer of 6 or 16 inputs are about .2
    assert all(1e-6 < a.value < 1e-5 and a.limit == 1e-4 for a in alerts)


@pytest.mark.parametrize(("left", "kept", "alerts"), [(0.01, 0.01, 1), (0.5, 0.5, 0), (1.0, 1.0, 0)])
def test_steps_that_are_undone_are_told(left: float, kept: float, alerts: int) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        before = [p.detach().clone() for p in model.parameters()]
        loss = usual(model, optimizer, x, y)
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old.lerp(parameter, left))
        return loss

    scope = trained(step)
    assert [(a.kind, a.severity, a.step) for a in serious(scope)] == [("stale_parameters", "error", 5)] * alerts
    measured = [r.metrics["update_kept"][0] for r in scope.records if "update_kept" in r.metrics]
    # steps 0 to 10 are sampled: each but the first has one before it
    assert measured == pytest.approx([kept] * 10, rel=1e-2)


class ByHand(nn.Module):
    """Four experts [6 -> 3], of which a gate of one's own calls one a sample, as `use` says of the step."""

    def __init__(self, use: Callable[[int], list[int]]) -> None:
        super().__init__()
        self.experts, self.use, self.step = nn.ModuleList(nn.Linear(6, 3) for _ in range(4)), use, 0

    def forward(self, x: Tensor) -> Tensor:
        used, self.step = self.use(self.step), self.step + 1
        out = x.new_zeros(len(x), 3)
        for row, i in enumerate(used):
            out[row :: len(used)] = self.experts[i](x[row :: len(used)])
        return out


@pytest.mark.parametrize(
    ("use", "place"),
    [
        (lambda step: [0, 1, 2, 3] if step < 15 else [1, 2], "experts"),
        (lambda step: [0, 1, 2, 3], None),
        (lambda step: [0, 1, 2, 3] if step % 5 == 0 else [1, 2], None),
        (lambda step: [min(step // 15, 3)], None),
    ],
)
def test_experts_of_a_router_by_hand_that_fall_out_of_use_are_told(
    use: Callable[[int], list[int]], place: str | None
) -> None:
    scope = trained(model=ByHand(use), steps=60, every=1)
    found = [(a.kind, a.where, a.step, a.value) for a in serious(scope) if a.kind == "expert_collapse"]
    assert found == ([("expert_collapse", place, 34, 0.5)] if place else [])


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_outputs_that_the_loss_draws_to_one_point_are_told(sign: float) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        square = (z[:, None] - z[None]).square().sum(-1)
        same = (y[:, None] == y[None]).float()
        # with the margin's sign turned, pairs of different classes are pulled too
        apart = functional.relu(sign * (1.0 - square)) + (sign < 0) * square
        loss = (same * square + (1 - same) * apart).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    scope = trained(step, model=mlp(6, 16, 4), steps=150)
    assert [a.kind for a in serious(scope)] == (["constant_output"] if sign < 0 else [])
    first, last = (scope.records[i].metrics["output_deviation"][0] for i in (0, -1))
    assert (last < 0.25 * first) == (sign < 0)
