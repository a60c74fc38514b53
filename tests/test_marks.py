"""What ends a step: calls of `scope.step` without a known optimizer, optimizers in any order, optimizers of no kind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowscope

B, D = 4, 6


def net(into: int = D, out: int = 3) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(into if not i else D, D), nn.Tanh()) for i in range(3)), nn.Linear(D, out)
    )


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="flowscope"):
        yield caplog


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(torch.randn(B, D)), torch.randint(0, 3, (B,)))


@pytest.mark.parametrize("micro", [1, 2, 5])
def test_micro_batches_told_one_by_one_are_one_step(micro: int) -> None:
    torch.manual_seed(0)
    model, alerts, losses = net(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with flowscope.watch(model, every=1, on_alert=alerts.append) as scope:
        for i in range(4 * micro):
            loss = loss_of(model)
            (loss / micro).backward()
            losses.append(loss.item())
            if (i + 1) % micro == 0:
                optimizer.step()
                optimizer.zero_grad()
            scope.step(loss=loss)
        records = scope.records
    assert [record.step for record in records] == [0, 1, 2, 3]
    means = [sum(losses[k * micro : (k + 1) * micro]) / micro for k in range(4)]
    assert [record.loss for record in records] == pytest.approx(means)
    assert not [alert for alert in alerts if alert.severity == "error"]


@pytest.mark.parametrize("cleared", ["none after", "none before", "zero after", "zero before"])
@pytest.mark.parametrize("hidden", [False, True])
def test_each_call_ends_a_step_where_the_optimizer_is_none_of_torchs(cleared: str, hidden: bool) -> None:
    torch.manual_seed(0)
    model, losses = net(), []

    def clear() -> None:
        for p in model.parameters():
            if cleared.startswith("none"):
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    with flowscope.watch(model, every=1) as scope:
        for _ in range(6):
            if cleared.endswith("before"):
                clear()
            loss = loss_of(model)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    (p.data if hidden else p).sub_(p.grad, alpha=0.1)
            if cleared.endswith("after"):
                clear()
            scope.step(loss=loss)
            losses.append(loss.item())
        records = scope.records
    assert [record.loss for record in records] == pytest.approx(losses)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = net(3, 1), net(4, 1)

    def q(self, state: Tensor, action: Tensor) -> Tensor:
        return self.critic(torch.cat([state, action], 1))


@pytest.mark.parametrize("given", ["actor, critic", "critic, actor", ""])
def test_optimizers_in_any_order_show_both_nets(given: str, said: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    agent = Agent()
    known = {"actor": torch.optim.Adam(agent.actor.parameters()), "critic": torch.optim.Adam(agent.critic.parameters())}
    alpha = torch.zeros(1, requires_grad=True)
    other = torch.optim.Adam([alpha])
    with flowscope.watch(agent, [known[name] for name in given.split(", ") if name] or None, every=1) as scope:
        for _ in range(8):
            state = torch.randn(B, 3)
            action = agent.actor(state)
            step(other, (alpha * action.detach().mean()).sum())
            step(known["critic"], (agent.q(state, action.detach()) + 1).square().mean())
            step(known["actor"], -agent.q(state, action).mean())
        records = scope.records
    assert 7 <= len(records) <= 9
    for record in records[2:]:
        shown = [values for key, values in record.metrics.items() if key.startswith("gradient_product")]
        assert len(shown) == 2
        assert all((values == values).all() for values in shown)
    assert not [entry for entry in said.records if "torch.compile" in entry.getMessage()]


@pytest.mark.parametrize("given", ["actor, critic", ""])
def test_a_delayed_actor_leaves_a_record_a_critics_step(given: str, said: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    agent, alerts = Agent(), []
    known: dict[str, Any] = {
        "actor": torch.optim.Adam(agent.actor.parameters()),
        "critic": torch.optim.Adam(agent.critic.parameters()),
    }
    optimizers = [known[name] for name in given.split(", ") if name] or None
    with flowscope.watch(agent, optimizers, every=1, on_alert=alerts.append) as scope:
        for i in range(12):
            state = torch.randn(B, 3)
            step(known["critic"], (agent.q(state, agent.actor(state).detach()) + 1).square().mean())
            if i % 2:
                step(known["actor"], -agent.q(state, agent.actor(state)).mean())
        assert len(scope.records) == 12
    assert not said.records
    assert not [alert for alert in alerts if "actor" in alert.where]


def test_a_loop_in_which_no_step_ends_is_told_while_it_runs(said: pytest.LogCaptureFixture) -> None:
    model = net()
    with flowscope.watch(model):
        for _ in range(40):
            loss_of(model).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
        (told,) = said.records
        assert "scope.step()" in told.getMessage()


def test_a_model_made_anew_after_watch_is_told(said: pytest.LogCaptureFixture) -> None:
    watched, trained = net(), net()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    with flowscope.watch(watched, torch.optim.SGD(watched.parameters(), 0.1)):
        for _ in range(3):
            step(optimizer, loss_of(trained))
    assert "never ran" in said.records[-1].getMessage()


def test_first_steps_that_move_nothing_on_purpose_are_no_stale_parameters() -> None:
    class Rectified(torch.optim.SGD):
        """Its first steps only look, as those of a rectified variance."""

        made = 0

        def step(self, closure: Any = None) -> None:
            self.made += 1
            self.param_groups[0]["k"] = self.made
            if self.made > 6:
                super().step()

    torch.manual_seed(0)
    model, alerts = net(), []
    optimizer = Rectified(model.parameters(), 0.1)
    with flowscope.watch(model, optimizer, every=1, on_alert=alerts.append):
        for _ in range(20):
            step(optimizer, loss_of(model))
    assert "stale_parameters" not in {alert.kind for alert in alerts}


def test_parameters_of_which_a_copy_is_stepped_are_unseen_and_no_stale_parameters() -> None:
    """As DeepSpeed's ZeRO 1 does it: marks on the parameters, flat copies in the optimizer, written back later."""
    torch.manual_seed(0)
    model, alerts = net(), []
    for p in model.parameters():
        p._hp_mapping = None
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(copies, 1e-2)
    with flowscope.watch(model, optimizer, every=1, on_alert=alerts.append) as scope:
        for _ in range(6):
            loss = loss_of(model)
            loss.backward()
            for p, copy in zip(model.parameters(), copies, strict=True):
                copy.grad, p.grad = p.grad, None
            optimizer.step()
            with torch.no_grad():
                for p, copy in zip(model.parameters(), copies, strict=True):
                    p.data.copy_(copy)
            scope.step(loss=loss)
        record = scope.records[-1]
    assert (record["update_ratio"] != record["update_ratio"]).all()
    assert any("ZeRO" in note for note in record.notes)
    assert (record["gradient_product"][1:] > 0).all()
    assert not [alert for alert in alerts if alert.severity != "info"]
