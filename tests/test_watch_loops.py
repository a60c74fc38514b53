"""Training loops of every shape: what is a step, whose gradients it holds, which loss belongs to it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import IN, OUT, Block, D, Stack, close_to, data, keep, loss_of, norms, sgd, truth, watched

import flowscope

pytestmark = pytest.mark.usefixtures("strict")


# -- accumulation


def test_accumulation_over_micro_batches_equals_one_big_batch() -> None:
    model, whole = Stack(), data(batch=6)
    twin = copy.deepcopy(model)
    for net, parts in ((model, (slice(0, 1), slice(1, 3), slice(3, 6))), (twin, (slice(0, 6),))):
        optimizer = sgd(net)
        with watched(net, optimizer) as scope:
            for part in parts:
                batch = whole[0][part], whole[1][part]
                (loss_of(net, batch) * len(batch[0]) / 6).backward()
            optimizer.step()
        net.record = scope.records[0]
    exact = ("grad_norm", "gain", "grad_rms", "act_rms", "cosine_to_input", "token_cosine", "branch_share")
    for name in (*exact, "param_grad_norm"):
        close_to(model.record[name], twin.record[name])
    assert (model.record["backward_calls"] == 3).all()


def test_each_accumulated_step_has_its_own_numbers() -> None:
    model = Stack()
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        for step in range(3):
            expected = norms(*(truth(model, data(10 * step + i, batch=2 + i)) for i in range(3)))
            for i in range(3):
                loss_of(model, data(10 * step + i, batch=2 + i)).backward()
            optimizer.step()
            optimizer.zero_grad()
            close_to(scope.records[step]["grad_norm"], expected)


# -- which loss belongs to which step


def losses_of_run(order: str, *, given: bool, read: bool = False, evaluate: bool = False) -> tuple[Any, Any]:
    model = Stack(2)
    optimizer, expected = sgd(model), []
    scope = watched(model, optimizer if given else None)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, data(step))
        loss.backward()
        expected.append(loss.item())
        if order == "before":
            scope.step(loss=loss)
        optimizer.step()
        if evaluate:
            loss_of(model, data(99))
        if read:
            assert scope.records[-1].step == step
        if order == "after":
            scope.step(loss=loss)
    scope.close()
    assert [r.step for r in scope.records] == [0, 1, 2, 3]
    return [r.loss for r in scope.records], expected


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_loss_is_that_of_its_step(order: str, given: bool) -> None:
    losses, expected = losses_of_run(order, given=given)
    close_to(losses, expected)


@pytest.mark.parametrize(("read", "evaluate"), [(True, False), (False, True), (True, True)])
def test_the_loss_finds_its_step_after_reading_and_after_evaluation(read: bool, evaluate: bool) -> None:
    losses, expected = losses_of_run("after", given=True, read=read, evaluate=evaluate)
    close_to(losses, expected)


class WithLoss(Stack):
    """Trained by a method, as by Lightning: the root's own `__call__` never runs."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.forward(batch[0]), batch[1])


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("called_once", [False, True])
def test_a_loop_that_calls_a_method_of_the_model(order: str, called_once: bool) -> None:
    model = WithLoss(2)
    optimizer, expected = sgd(model), []
    with watched(model, optimizer) as scope:
        if called_once:
            loss_of(model, data(99))  # somebody looks at the output before the training
        for step in range(4):
            optimizer.zero_grad()
            loss = model.loss(data(step))
            loss.backward()
            expected.append(loss.item())
            if order == "before":
                scope.step(loss=loss)
            optimizer.step()
            if order == "after":
                scope.step(loss=loss)
    close_to([r.loss for r in scope.records], expected)


def test_micro_batches_of_a_loop_that_calls_a_method_of_the_model() -> None:
    model = WithLoss(2)
    optimizer, expected = sgd(model), []
    with watched(model, optimizer) as scope:
        for step in range(3):
            losses = []
            for i in range(2):
                loss = model.loss(data(2 * step + i))
                loss.backward()
                if i == 1:
                    optimizer.step()
                    optimizer.zero_grad()
                scope.step(loss=loss)  # the first of them before the step, the second after it
                losses.append(loss.item())
            expected.append(np.mean(losses))
    close_to([r.loss for r in scope.records], expected)


def test_several_losses_of_a_step_are_averaged() -> None:
    model = Stack(2)
    optimizer, expected = sgd(model), []
    with watched(model, optimizer) as scope:
        for step in range(3):
            optimizer.zero_grad()
            losses = []
            for i in range(2):
                loss = loss_of(model, data(2 * step + i))
                loss.backward()
                scope.step(loss=loss)
                losses.append(loss.item())
            optimizer.step()
            expected.append(np.mean(losses))
    close_to([r.loss for r in scope.records], expected)


def test_a_step_without_loss_has_none_and_numbers_of_every_kind_are_taken() -> None:
    model = Stack(2)
    optimizer = sgd(model)
    given = (None, 2.0, torch.tensor([1.0, 3.0]), np.float32(2.5), torch.tensor(4, dtype=torch.int64))
    with watched(model, optimizer) as scope:
        for step, loss in enumerate(given):
            loss_of(model, data(step)).backward()
            optimizer.step()
            scope.step(loss=loss)
    assert [r.loss for r in scope.records] == [None, 2.0, 2.0, 2.5, 4.0]


# -- step numbers


def test_step_numbers_are_those_given_and_go_on_from_there() -> None:
    model = Stack(2)
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        for step in range(5):
            loss_of(model, data()).backward()
            optimizer.step()
            if step == 1:
                scope.step(loss=1.0, step=100)
            if step == 3:
                assert scope.records[-1].step == 102
                scope.step(step=200)
    assert [r.step for r in scope.records] == [0, 100, 101, 200, 201]


def test_a_number_given_before_the_optimizer_steps_is_that_of_the_step_under_way() -> None:
    model = Stack(2)
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, data(step))
            loss.backward()
            scope.step(loss=loss, step=50 + step)
            optimizer.step()
    assert [r.step for r in scope.records] == [50, 51, 52]
    assert all(np.isfinite(r["grad_norm"]).all() for r in scope.records)


# -- optimizers


def test_without_an_optimizer_scope_step_marks_manual_updates() -> None:
    model = Stack()
    scope = watched(model)
    for step in range(3):
        expected = norms(truth(model, data(step)))
        before = [p.detach().clone() for p in model.parameters()]
        loss = loss_of(model, data(step))
        loss.backward()
        grads = [p.grad.norm() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        scope.step(loss=loss)
        for p in model.parameters():
            p.grad = None
        record = scope.records[step]
        close_to(record["grad_norm"], expected)
        close_to(record["param_grad_norm"], grads)
        change = [(p.detach() - b).norm() / b.norm() for p, b in zip(model.parameters(), before, strict=True)]
        norm_bias = np.array([float(b.norm()) for b in before]) == 0
        close_to(record["update_ratio"][~norm_bias], np.array(change)[~norm_bias], rtol=1e-4)
        assert record.loss == pytest.approx(loss.item())
    scope.close()


def test_an_optimizer_that_is_none_of_torch_is_refused_and_its_steps_are_marked_by_hand() -> None:
    class Mine:
        def __init__(self, parameters: Any) -> None:
            self.parameters = list(parameters)

        def step(self) -> None:
            with torch.no_grad():
                for p in self.parameters:
                    p.sub_(0.1 * p.grad)

    model = Stack()
    mine = Mine(model.parameters())
    with pytest.raises(flowscope.FlowscopeError, match=r"scope\.step\(\)"):
        watched(model, mine)
    with watched(model) as scope:
        expected = norms(truth(model, data()))
        loss_of(model, data()).backward()
        mine.step()
        scope.step()
    close_to(scope.records[0]["grad_norm"], expected)


@pytest.mark.parametrize("given", [True, False])
def test_two_optimizers_on_one_model_are_one_step(given: bool) -> None:
    model = Stack()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    first, second = torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(vectors, lr=0.01)
    alerts: list[Any] = []
    scope = watched(model, [first, second] if given else None, on_alert=alerts.append)
    for step in range(3):
        expected = norms(truth(model, data(step)))
        before = [p.detach().clone() for p in model.parameters()]
        loss = loss_of(model, data(step))
        loss.backward()
        grads = [float(p.grad.norm()) for p in model.parameters()]
        first.step()
        second.step()
        scope.step(loss=loss)
        first.zero_grad()
        second.zero_grad()
        record = scope.records[-1]
        assert record.step == step
        close_to(record["grad_norm"], expected)
        close_to(record["param_grad_norm"], grads)
        assert (record["param_optimized"] == 1).all()
        change = [float((p.detach() - b).norm() / b.norm()) for p, b in zip(model.parameters(), before, strict=True)]
        for i, (p, ratio) in enumerate(zip(model.parameters(), change, strict=True)):
            if not given and step == 0 and p.dim() != 2:
                assert np.isnan(record["update_ratio"][i])  # its optimizer was not known yet
            elif before[i].norm() > 0:
                close_to(record["update_ratio"][i], ratio, rtol=1e-4)
    scope.close()
    assert not [a for a in alerts if a.kind == "parameters_not_optimized"]


@pytest.mark.parametrize("two", [False, True])
def test_a_given_optimizer_made_anew_takes_the_place_of_the_old_one(two: bool) -> None:
    """Made again in mid-training (a new phase, other dtypes): without it the records would just end."""
    model = Stack()
    parts = [list(model.blocks.parameters()), [*model.embed.parameters(), *model.head.parameters()]]
    groups = parts if two else [parts[0] + parts[1]]
    optimizers = [torch.optim.SGD(group, 0.1) for group in groups]
    with watched(model, list(optimizers)) as scope:
        for step in range(4):
            if step == 2:
                optimizers[0] = torch.optim.AdamW(groups[0], 1e-3)
            model.zero_grad()
            expected = norms(truth(model, data(step)))
            loss_of(model, data(step)).backward()
            for optimizer in optimizers:
                optimizer.step()
            close_to(scope.records[-1]["grad_norm"], expected)
            # norm biases are zero before the first step
            assert np.isnan(scope.records[-1]["update_ratio"]).sum() == (4 if step == 0 else 0)
    assert [record.step for record in scope.records] == [0, 1, 2, 3]
    assert (scope.records[3]["param_optimized"] == 1).all()


def test_an_optimizer_made_anew_takes_the_place_of_the_old_one() -> None:
    model = Stack(2)
    with watched(model) as scope:
        for step in range(4):
            optimizer = sgd(model)
            loss_of(model, data(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(scope.optimizers) == 1
    assert [r.step for r in scope.records] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["lbfgs", "adamw"])
def test_closures(kind: str) -> None:
    model, batch = Stack(3), data()
    make = {"lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), "adamw": torch.optim.AdamW}[kind]
    optimizer = make(model.parameters())
    with watched(model, optimizer) as scope:
        for step in range(2):
            gradients: list[list[Tensor]] = []
            before = [p.detach().clone() for p in model.parameters()]

            def closure(gradients: list[Any] = gradients) -> Tensor:
                optimizer.zero_grad()
                gradients.append(truth(model, batch))
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            scope.step(loss=loss)
            record = scope.records[step]
            assert len(gradients) == (3 if kind == "lbfgs" else 1)
            evaluations = record["step_evaluations"].tolist() if "step_evaluations" in record else None
            assert evaluations == ([3.0] if kind == "lbfgs" else None)
            assert (record["backward_calls"] == len(gradients)).all()
            close_to(record["grad_norm"], norms(*gradients), rtol=2e-5)
            close_to(record["param_grad_norm"], [float(p.grad.norm()) for p in model.parameters()])
            for i, (p, b) in enumerate(zip(model.parameters(), before, strict=True)):
                if b.norm() > 0:
                    close_to(record["update_ratio"][i], (p.detach() - b).norm() / b.norm(), rtol=1e-4)


def test_a_fused_recurrent_layer_is_replayed_when_the_step_has_a_closure() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(IN, D, batch_first=True), nn.Linear(D, OUT)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0])

    records = []
    for closed in (False, True):
        torch.manual_seed(3)
        model = Net()
        optimizer = sgd(model)

        def closure(model: nn.Module = model) -> Tensor:
            loss = loss_of(model, data())
            loss.backward()
            return loss

        with watched(model, optimizer) as scope:
            if closed:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        records.append(scope.records[0])
    assert np.isfinite(records[0]["grad_norm"]).all()
    close_to(records[1]["grad_norm"], records[0]["grad_norm"])


# -- several models


class Critic(Stack):
    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        return super().forward(x, taps).mean((1, 2))


class Maker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.out = nn.Linear(IN, D), nn.ModuleList(Block() for _ in range(3)), nn.Linear(D, IN)

    def forward(self, z: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        x = keep(taps, self.stem(z))
        for block in self.blocks:
            x = keep(taps, block(x))
        return self.out(x)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_gan_counts_each_networks_gradients_in_its_own_step(reuse: bool) -> None:
    maker, critic = Maker(), Critic(3)
    of_maker, of_critic = torch.optim.Adam(maker.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
    with watched(maker, of_maker) as scope_m, watched(critic, of_critic) as scope_c:
        for step in range(3):
            real, z = data(step)[0], data(50 + step)[0]
            fake = maker(z)
            twin, taps = copy.deepcopy(critic), [[], []]
            loss = nn.functional.softplus(-twin(real, taps[0])).mean()
            loss = loss + nn.functional.softplus(twin(fake.detach(), taps[1])).mean()
            expected = [torch.autograd.grad(loss, t, retain_graph=True) for t in taps]
            of_critic.zero_grad()
            nn.functional.softplus(-critic(real)).mean().backward()
            nn.functional.softplus(critic(fake.detach())).mean().backward()
            of_critic.step()
            close_to(scope_c.records[step]["grad_norm"], norms(*expected))
            assert (scope_c.records[step]["backward_calls"] == 2).all()
            own: list[Tensor] = []
            judge = copy.deepcopy(critic)
            made = copy.deepcopy(maker)(z, own)
            of_maker.zero_grad()
            fake = fake if reuse else maker(z)
            wanted = torch.autograd.grad(nn.functional.softplus(-judge(made)).mean(), own)
            nn.functional.softplus(-critic(fake)).mean().backward()
            of_maker.step()
            close_to(scope_m.records[step]["grad_norm"], norms(wanted), rtol=2e-5)
            assert (scope_m.records[step]["backward_calls"] == 1).all()
    assert len(scope_c.records) == len(scope_m.records) == 3


def test_two_models_with_one_loss_and_an_optimizer_each() -> None:
    maker, critic = Maker(), Critic(3)
    of_maker, of_critic = sgd(maker), sgd(critic)
    with watched(maker, of_maker) as scope_m, watched(critic, of_critic) as scope_c:
        for step in range(3):
            taps: list[list[Tensor]] = [[], []]
            loss = copy.deepcopy(critic)(copy.deepcopy(maker)(data(step)[0], taps[0]), taps[1]).square().mean()
            expected = [torch.autograd.grad(loss, t, retain_graph=True) for t in taps]
            of_maker.zero_grad()
            of_critic.zero_grad()
            critic(maker(data(step)[0])).square().mean().backward()
            of_maker.step()
            of_critic.step()
            close_to(scope_m.records[step]["grad_norm"], norms(expected[0]))
            close_to(scope_c.records[step]["grad_norm"], norms(expected[1]))
