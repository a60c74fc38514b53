"""Rare loops and shapes: optimizers inside backward or each other, no `.grad`, empty batches, side inputs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import IN, OUT, B, D, Stack, T, close_to, data, keep, loss_of, norms, scaled_step, truth, watched

import flowscope

pytestmark = pytest.mark.usefixtures("strict")


class Sharpness(torch.optim.Optimizer):
    """Two backward passes a step, an inner optimizer that shares the groups (SAM, Lookahead)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.inner.param_groups

    def climb(self) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(0.01 * p.grad)
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_around_an_optimizer_makes_one_step(given: bool) -> None:
    model = Stack(3)
    optimizer = Sharpness(model.parameters())
    with watched(model, optimizer if given else None) as scope:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, data(step)).backward()
            optimizer.climb()
            expected = norms(truth(model, data(step)))
            loss = loss_of(model, data(step))
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
            record = scope.records[-1]
            assert record.step == step
            assert record.loss == pytest.approx(loss.item())
            if step:  # the first step cannot know yet that this loop uses .grad, and that climbing threw it away
                close_to(record["grad_norm"], expected)


def test_optimizers_that_step_inside_backward() -> None:
    model = Stack(3)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    with watched(model) as scope:
        for step in range(4):
            expected = norms(truth(model, data(step)))
            loss = loss_of(model, data(step))
            loss.backward()
            scope.step(loss=loss)
            record = scope.records[-1]
            assert record.step == step
            assert record.loss == pytest.approx(loss.item())
            if step:  # until each optimizer was seen once, nobody knows which is the last
                close_to(record["grad_norm"], expected)
                assert np.isfinite(record["param_grad_norm"]).all()


def test_gradients_that_are_never_in_grad_add_up() -> None:
    model = Stack(3)
    parameters = list(model.parameters())
    with watched(model) as scope:
        for step in range(3):
            expected = norms(truth(model, data(step)), truth(model, data(step + 9)))
            total = [torch.zeros_like(p) for p in parameters]
            for seed in (step, step + 9):
                for t, g in zip(total, torch.autograd.grad(loss_of(model, data(seed)), parameters), strict=True):
                    t += g
            with torch.no_grad():
                for p, g in zip(parameters, total, strict=True):
                    p -= 0.1 * g
            scope.step()
            close_to(scope.records[-1]["grad_norm"], expected)
    assert not scope.alerts


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_that_is_switched_off_scales_nothing(enabled: bool) -> None:
    model = Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    before = sorted(vars(scaler))
    with watched(model, optimizer, scaler=scaler) as scope:
        for step in range(3):
            twin = copy.deepcopy(model)
            loss_of(twin, data(step)).backward()
            expected = norms(truth(model, data(step)))
            scaled_step(model, data(step), scaler, optimizer)
            record = scope.records[-1]
            assert (record.step, record.flags) == (step, ())
            close_to(record["grad_norm"], expected)
            close_to(record["param_grad_norm"], [p.grad.norm() for p in twin.parameters()])
    assert sorted(vars(scaler)) == before


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_are_recorded_as_the_true_ones_and_a_skipped_step_says_so(fused: bool) -> None:
    model, alerts = Stack(3), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watched(model, optimizer, scaler=scaler, on_alert=alerts.append) as scope:
        for step in range(3):
            twin = copy.deepcopy(model)
            loss_of(twin, data(step)).backward()
            expected = norms(truth(model, data(step)))
            loss = scaled_step(model, data(step), scaler, optimizer, overflow="head" if step == 1 else None)
            scope.step(loss=loss)
            record = scope.records[-1]
            assert (record.step, record.flags) == (step, ("skipped",) if step == 1 else ())
            if step == 1:
                assert not {"grad_norm", "param_grad_norm", "update_ratio"} & set(record.metrics)
            else:
                close_to(record["grad_norm"], expected)
                close_to(record["param_grad_norm"], [p.grad.norm() for p in twin.parameters()])
    assert not alerts


def test_a_scope_on_a_part_and_one_on_the_whole() -> None:
    model = Stack(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = norms(truth(model, data()))
    with watched(model, optimizer) as whole, watched(model.blocks, optimizer) as part:
        loss_of(model, data()).backward()
        optimizer.step()
    close_to(whole.records[0]["grad_norm"], expected)
    close_to(part.records[0]["grad_norm"], expected)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.own(x) + self.other(memory.mean(1, keepdim=True))


class Decoder(nn.Module):
    """Frozen embeddings beside an encoder that learns: x_0 carries no gradient, the memory does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.table = nn.Linear(IN, D), nn.Embedding(T, D)
        self.layers, self.head = nn.ModuleList(Cross() for _ in range(3)), nn.Linear(D, OUT)

    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        memory = self.encoder(x)
        h = keep(taps, self.table(torch.arange(T).expand(len(x), T)))
        for layer in self.layers:
            h = keep(taps, layer(h, memory))
        return self.head(h)


@pytest.mark.parametrize("frozen", [False, True])
def test_x0_is_the_hidden_state_and_not_what_comes_beside_it(frozen: bool) -> None:
    model = Decoder()
    model.table.requires_grad_(not frozen)
    twin, taps = copy.deepcopy(model), []
    loss = loss_of(twin, data(), taps)
    expected = norms(torch.autograd.grad(loss, taps[frozen:]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with watched(model, optimizer) as scope:
        loss_of(model, data()).backward()
        optimizer.step()
    record = scope.records[0]
    close_to(record["grad_norm"][frozen:], expected)
    assert np.isnan(record["grad_norm"][:frozen]).all()
    close_to(record["act_rms"], [t.detach().double().square().mean().sqrt() for t in taps])


@pytest.mark.parametrize("shape", [(0, T), (B, 0)])
def test_an_empty_batch_is_not_seen_and_the_next_one_is(shape: tuple[int, int]) -> None:
    model = Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        model(torch.randn(*shape, IN)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = norms(truth(model, data()))
        loss_of(model, data()).backward()
        optimizer.step()
    assert np.isnan(scope.records[0]["grad_norm"]).all()
    close_to(scope.records[1]["grad_norm"], expected)


@pytest.mark.parametrize("batch", [1, B])
def test_a_single_token_has_no_token_cosine_and_an_unbatched_vector_is_one_position(batch: int) -> None:
    model = Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        model(torch.randn(batch, 1, IN)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        x, taps = torch.randn(IN), []
        expected = torch.autograd.grad(copy.deepcopy(model)(x, taps).square().sum(), taps)
        model(x).square().sum().backward()
        optimizer.step()
    assert np.isnan(scope.records[0]["token_cosine"]).all()
    assert np.isfinite(scope.records[0]["cosine"]).all()
    # a vector has less than two axes: no hidden input is found for x_0
    close_to(scope.records[1]["grad_norm"][1:], norms(expected)[1:])


def test_the_summary_names_what_was_never_called() -> None:
    class Direct(Stack):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return block.forward(x) if block is self.blocks[1] else block(x)

    model = Direct(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        loss_of(model, data()).backward()
        optimizer.step()
    assert "never called" in scope.summary()
    line = next(line for line in scope.summary().splitlines() if "never called" in line)
    assert line.endswith(": blocks.1")
    assert np.isnan(scope.records[0]["grad_norm"][2])


def test_steps_without_a_backward_and_batches_skipped_on_a_nan_loss() -> None:
    model, alerts = Stack(2), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer, on_alert=alerts.append) as scope:
        optimizer.step()
        for step, factor in enumerate((1.0, float("nan"), 1.0)):
            optimizer.zero_grad()
            expected = norms(truth(model, data(step)))
            loss = loss_of(model, data(step)) * factor
            if torch.isfinite(loss):
                loss.backward()
                optimizer.step()
            scope.step(loss=loss)
    assert [r.step for r in scope.records] == [0, 1, 2]
    assert np.isnan(scope.records[0]["grad_norm"]).all()
    close_to(scope.records[2]["grad_norm"], expected)
    assert [a.kind for a in alerts] == ["non_finite"]  # the loss of the skipped batch is reported all the same


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Twice(1), Twice(2), Twice(1)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Twice(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, stride, 1), nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


def test_states_of_other_sizes_have_no_cosine_even_where_as_many_positions_are_sampled() -> None:
    torch.manual_seed(0)
    model = Strided()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        # 16 * 256 and 16 * 64 positions: of both, 128 are sampled
        model(torch.randn(16, 8, 16, 16)).sum().backward()
        optimizer.step()
    record = scope.records[0]
    for metric in ("cosine", "cosine_p05", "cosine_p95", "branch_share"):
        np.testing.assert_array_equal(np.isnan(record[metric]), [False, True, False])
    np.testing.assert_array_equal(np.isnan(record["cosine_to_input"]), [False, False, True, True])
    assert "cosine_matrix" not in record
    assert np.isfinite(record["gradient_product"][1:]).all()


@pytest.mark.parametrize("widths", [(8, 8), (8, 6)])
def test_one_rectifier_in_two_places_has_the_units_of_both(widths: tuple[int, int]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()
            self.first, self.second = nn.Linear(5, widths[0]), nn.Linear(widths[0], widths[1])
            self.head = nn.Linear(widths[1], 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.relu(self.second(self.relu(self.first(x)))))

    model = Net()
    with torch.no_grad():
        model.first.bias.fill_(-100.0)  # the first place is dead, the second is not
        model.second.bias.fill_(3.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for rows in (3, 4):
            model(torch.randn(rows, 5)).sum().backward()
        optimizer.step()
    record = scope.records[0]
    assert record.labels("dead_fraction") == ["relu"]
    assert record["dead_fraction"][0] == widths[0] / sum(widths)


def test_a_rectifier_in_a_loop_is_on_where_it_was_ever_on() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.inside, self.head = nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.ones(3, 6)
            for t in range(20):
                state = self.relu(self.inside(state) + 100.0 * (torch.arange(6) == t % 6) - 50.0)
            return self.head(state + x)

    model = Loop()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
    assert scope.records[0]["dead_fraction"].tolist() == [0.0]


def test_layers_with_complex_inputs_are_no_rectified_ones() -> None:
    layers = [nn.Linear(6, 6, dtype=torch.complex64) for _ in range(3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        model(torch.randn(4, 6, dtype=torch.complex64)).abs().sum().backward()
        optimizer.step()
    assert np.isfinite(scope.records[0]["grad_norm"]).all()
    assert "dead_fraction" not in scope.records[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_evaluation_on_nested_tensors_leaves_the_probes_alive() -> None:
    """nn.TransformerEncoder packs padded batches into nested tensors where no gradient is asked for."""
    layer = nn.TransformerEncoderLayer(D, 2, 12, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[:, -2:] = True
    x = torch.randn(B, T, D)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(2):
            model.train()
            model(x, src_key_padding_mask=padding).square().mean().backward()
            model.eval()
            with torch.no_grad():
                seen = model(x, src_key_padding_mask=padding)
            optimizer.step()
    assert seen.shape[1] == T - 2 or bool((seen[:, -2:] == 0).all())  # the fast path was taken
    for record in scope.records:
        assert record["backward_calls"].tolist() == [0, 1, 1, 1]
        assert np.isfinite(record["grad_norm"][1:]).all()


def test_a_model_on_jagged_tensors_trains_and_is_not_seen() -> None:
    net = nn.Sequential(*Stack(2).blocks)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with flowscope.watch(net, optimizer, config={"console": "off"}) as scope:
        ragged = torch.nested.nested_tensor([torch.randn(4, D), torch.randn(6, D)], layout=torch.jagged)
        net(ragged).values().square().mean().backward()
        optimizer.step()
    assert np.isnan(scope.records[0]["grad_norm"]).all()
    assert np.isfinite(scope.records[0]["param_grad_norm"]).all()


def test_padding_that_is_exactly_zero_is_no_token() -> None:
    class Padded(Stack):
        def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
            h = keep(taps, self.embed(x) * mask)
            for block in self.blocks:
                h = keep(taps, block(h))
            return self.head(h)

    mask = torch.ones(B, T, 1)
    mask[0, 3:] = mask[1, 1:] = 0.0  # three tokens, one token (no pair), all five
    model = Padded(3)
    states: list[Tensor] = []
    x = data()[0]
    copy.deepcopy(model)(x, states)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watched(model, optimizer) as scope:
        model(x).sum().backward()
        optimizer.step()
    first = torch.nn.functional.normalize(states[0].detach().double(), dim=-1)
    pairs = [first[b, :n] @ first[b, :n].T for b, n in ((0, 3), (2, T))]
    wanted = np.mean([float((p.sum() - p.trace()) / p.numel() * len(p) / (len(p) - 1)) for p in pairs])
    assert scope.records[0]["token_cosine"][0] == pytest.approx(wanted, abs=1e-6)
    assert np.isfinite(scope.records[0]["token_cosine"]).all()
