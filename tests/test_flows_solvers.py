"""Neural ODEs and equilibrium layers: evaluations, residuals, radii gradients along a trajectory, by other means."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from flows_models import IN, OUT, D, Dynamics, Implicit, Integrated, Map, inputs, record_of, square, weight_of_radius
from torch import Tensor, nn
from torchdeq import get_deq
from torchdiffeq import odeint, odeint_adjoint

import flowscope

EULER = {"method": "euler", "options": {"step_size": 0.2}}
RK4 = {"method": "rk4", "options": {"step_size": 0.25}}


class Counted(Dynamics):
    """Says how often it ran, in the forward and in backward."""

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.runs = getattr(self, "runs", 0) + 1
        return super().forward(t, y)


def counted(model: Integrated) -> Integrated:
    """A copy whose dynamics count their calls themselves."""
    plain = copy.deepcopy(model)
    plain.func.__class__ = Counted
    return plain


# -- differential equations


def euler_by_hand(model: Integrated, y: Tensor) -> list[Tensor]:
    states = [y]
    for k in range(5):
        states.append(states[-1] + 0.2 * model.func(torch.tensor(0.2 * k), states[-1]))
    return states


def rk4_by_hand(model: Integrated, y: Tensor) -> list[Tensor]:
    """Kutta's 3/8 rule, which is what torchdiffeq calls rk4."""
    states, h, f = [y], 0.25, model.func
    for k in range(4):
        y, t = states[-1], torch.tensor(0.25 * k)
        a = f(t, y)
        b = f(t + h / 3, y + h * a / 3)
        c = f(t + 2 * h / 3, y + h * (b - a / 3))
        d = f(t + h, y + h * (a - b + c))
        states.append(y + h * (a + 3 * (b + c) + d) / 8)
    return states


@pytest.mark.parametrize(
    ("by_hand", "options", "evaluations"), [(euler_by_hand, EULER, 5), (rk4_by_hand, RK4, 16)], ids=["euler", "rk4"]
)
def test_fixed_steps_give_the_states_gradients_and_the_evaluations(
    by_hand: Any, options: dict[str, Any], evaluations: int
) -> None:
    torch.manual_seed(0)
    model = Integrated(odeint, **options)
    plain = copy.deepcopy(model)
    batches = inputs(2)
    record = record_of(model, [batches], square)
    squares: Any = 0.0
    for x in batches:
        states = by_hand(plain, plain.embed(x))
        loss = plain.head(states[-1]).square().mean()
        gradients = torch.autograd.grad(loss, states[:-1])
        squares = squares + np.array([g.double().square().sum().item() for g in gradients])
    truth = np.sqrt(squares)
    assert record.labels("grad_norm", "func") == [f"func#{k}" for k in range(len(truth))]
    np.testing.assert_allclose(record["grad_norm", "func"], truth, rtol=1e-4)
    np.testing.assert_allclose(record["gradient_product", "func"], truth / truth[-1], rtol=1e-4)
    assert record["solver_nfe"].tolist() == [evaluations]
    assert record["solver_nfe_backward"].tolist() == [0.0]
    assert math.isnan(record["solver_residual"][0])
    assert record.labels("solver_nfe") == ["func"]


def test_adaptive_steps_are_the_accepted_ones_and_no_stage_is_a_point() -> None:
    torch.manual_seed(0)
    model = Integrated(odeint, rate=9.0, rtol=1e-4, atol=1e-5, options={"first_step": 1.0})
    plain = counted(model)
    (x,) = inputs(1)
    record = record_of(model, [[x]], square)
    accepted: list[Tensor] = []
    rejected: list[float] = []
    plain.func.callback_accept_step = lambda t, y, dt: accepted.append(y)  # type: ignore[assignment]
    plain.func.callback_reject_step = lambda t, y, dt: rejected.append(1.0)  # type: ignore[assignment]
    gradients = torch.autograd.grad(square(plain, x), accepted)
    truth = np.array([g.double().norm().item() for g in gradients])
    assert len(accepted) > 3
    assert rejected
    np.testing.assert_allclose(record["grad_norm", "func"], truth, rtol=1e-4)
    assert record["solver_nfe"].tolist() == [plain.func.runs]
    assert record.flow_names == ("network", "func")
    assert record.labels("gain") == ["head"]  # the dynamics' own layers are no part of the chain
    assert "func: forward(t, y) is taken for a solver's right-hand side" in flowscope.find_flows(model).notes


def test_the_adjoint_methods_evaluations_in_backward_are_apart() -> None:
    torch.manual_seed(0)
    model = Integrated(odeint_adjoint, rtol=1e-3, atol=1e-4)
    plain = counted(model)
    batches = inputs(2)
    record = record_of(model, [batches], square)
    forward = backward = 0
    for x in batches:
        plain.func.runs = 0  # type: ignore[assignment]
        loss = square(plain, x)
        forward += plain.func.runs
        loss.backward()
        backward += plain.func.runs
    assert record["solver_nfe"].tolist() == [forward / 2]
    assert record["solver_nfe_backward"].tolist() == [(backward - forward) / 2]
    assert backward > forward > 0
    assert "func" not in record.flow_names  # the states are in no graph


def test_evaluation_between_training_forwards_is_not_counted() -> None:
    model = Integrated(odeint, **EULER)
    x, other = inputs(2)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        loss = square(model, x)
        with torch.no_grad():
            model(other)
        return loss

    assert record_of(model, [[x]], call)["solver_nfe"].tolist() == [5.0]


class TimeConditioned(nn.Module):
    """forward(t, x) with a time for each sample: a denoiser, no differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(IN + 1, D), nn.Linear(D, OUT)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.cat([x, t], -1))))


def test_a_time_for_each_sample_is_no_solver() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = TimeConditioned()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.ones(len(x), 1), x)

    record = record_of(Wrapper(), [inputs(1)], square)
    assert "solver_nfe" not in record.metrics
    assert record.labels("grad_norm") == ["net.first", "net.second"]


def test_one_evaluation_is_no_solver() -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Dynamics()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(0.5, torch.cat([x, x[:, :2]], -1))

    class Moment(Dynamics):
        def forward(self, t: float, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(torch.tensor(t), y)

    model = Only()
    model.net = Moment()
    record = record_of(model, [inputs(1)], square)
    assert "solver_nfe" not in record.metrics
    assert record.labels("grad_norm") == ["net.net.1", "net.net.2"]


class Augmented(nn.Module):
    """A state of two parts, as continuous normalising flows have: y, and the integral of its square."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(D, D)

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.net(state[0])), state[0].square().sum(-1, keepdim=True)


class AugmentedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.func, self.head = nn.Linear(IN, D), Augmented(), nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        start = (self.embed(x), x.new_zeros(len(x), 1))
        y, cost = odeint(self.func, start, torch.tensor([0.0, 1.0]), **EULER)
        return self.head(y[-1]) + cost[-1]


def test_a_state_of_several_parts_is_one_state() -> None:
    torch.manual_seed(0)
    model = AugmentedModel()
    plain = copy.deepcopy(model)
    (x,) = inputs(1)
    record = record_of(model, [[x]], square)
    states = [(plain.embed(x), torch.zeros(len(x), 1, requires_grad=True))]
    for k in range(5):
        y, cost = states[-1]
        dy, dcost = plain.func(torch.tensor(0.2 * k), (y, cost))
        states.append((y + 0.2 * dy, cost + 0.2 * dcost))
    loss = (plain.head(states[-1][0]) + states[-1][1]).square().mean()
    truth = [math.hypot(*(g.norm().item() for g in torch.autograd.grad(loss, s, retain_graph=True))) for s in states]
    np.testing.assert_allclose(record["grad_norm", "func"], truth[:5], rtol=1e-4)


# -- fixed points


def test_residual_evaluations_and_radius_of_an_implicit_layer() -> None:
    torch.manual_seed(0)
    model = Implicit(weight_of_radius(0.8))
    plain = copy.deepcopy(model)
    batches = inputs(2)
    record = record_of(model, [batches], square)
    residuals = []
    for x in batches:
        z = plain.solve(x)
        image = plain.f(z, x)
        residuals.append(((image - z).double().norm() / image.double().norm()).item())
    assert record.labels("solver_residual") == ["f"]
    assert record["solver_residual"][0] == pytest.approx(sum(residuals) / 2, rel=1e-4)
    assert record["solver_nfe"].tolist() == [10.0]
    # the radius is the last call's: the largest of the samples' dense Jacobians
    radii = []
    for z, x in zip(plain.solve(batches[1]), batches[1], strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda z, x=x: plain.f(z, x), z)
        radii.append(torch.linalg.eigvals(jacobian).abs().max().item())
    assert record["jacobian_radius"][0] == pytest.approx(max(radii), rel=0.03)


@pytest.mark.parametrize("radius", [0.5, 1.3])
def test_the_radius_of_a_linear_map_is_that_of_its_matrix(radius: float) -> None:
    model = Implicit(weight_of_radius(radius), iterations=3, act=lambda x: x)
    record = record_of(model, [inputs(1)], square)
    assert record["jacobian_radius"][0] == pytest.approx(radius, rel=0.01)  # its norm is above 2


def test_the_radius_of_a_rotation_is_the_modulus_of_its_eigenvalues() -> None:
    cos, sin = 0.9 * math.cos(1.0), 0.9 * math.sin(1.0)
    weight = torch.block_diag(*[torch.tensor([[cos, -sin], [sin, cos]])] * 2)
    record = record_of(Implicit(weight, act=lambda x: x), [inputs(1)], square)
    assert record["jacobian_radius"][0] == pytest.approx(0.9, rel=0.01)


class OneStep(Implicit):
    """As torch compiles it: z asks for no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.f(self.solve(x), x))


def test_without_a_gradient_at_z_or_with_batch_norm_the_radius_is_not_seen() -> None:
    class Normed(Map):
        def __init__(self, weight: Tensor) -> None:
            super().__init__(weight)
            self.norm = nn.BatchNorm1d(len(weight))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return self.norm(super().forward(z, x))

    normed = Implicit(weight_of_radius(0.5))
    normed.f = Normed(weight_of_radius(0.5))
    for model in (OneStep(weight_of_radius(0.5)), normed):
        record = record_of(model, [inputs(1)], square)
        assert math.isnan(record["jacobian_radius"][0])
        assert record["solver_residual"][0] > 0


def test_a_decoder_of_latents_is_no_fixed_point() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = Map(torch.eye(D))

        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(self.f(x.new_zeros(len(x), D), x))
            return self.f(self.f(z, x), x)  # unrolled with its gradient: nothing rests on a fixed point

    assert "solver_residual" not in record_of(Decoder(), [inputs(1)], square).metrics


def test_a_recurrence_whose_first_steps_have_no_gradient_is_no_fixed_point() -> None:
    class BurnIn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = Map(torch.eye(D))

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(len(x), D)
            with torch.no_grad():
                for t in range(4):
                    h = self.f(h, x[:, t] + 1)
            for t in range(4, 7):
                h = self.f(h, x[:, t] + 1)
            return h

    assert "solver_residual" not in record_of(BurnIn(), [inputs(1, tokens=(7,))], square).metrics


class Equilibrium(nn.Module):
    """A layer of torchdeq around a map."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.f, self.head = Map(weight_of_radius(0.6)), nn.Linear(D, OUT)
        self.deq = get_deq(f_solver="fixed_point_iter", f_max_iter=30, f_tol=1e-3, **options)

    def forward(self, x: Tensor, told: list[Any] | None = None) -> Tensor:
        z, info = self.deq(lambda z: self.f(z, x), x.new_zeros(len(x), D))
        if told is not None:
            told.append(info)
        return self.head(z[-1])


@pytest.mark.parametrize("options", [{"ift": True}, {"grad": 2}], ids=["implicit", "phantom"])
def test_torchdeqs_statistics_are_read(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Equilibrium(**options)
    plain = copy.deepcopy(model)
    (x,) = inputs(1)
    record = record_of(model, [[x]], square)
    told: list[Any] = []
    plain(x, told)
    at = record.labels("solver_nfe").index("deq")
    assert record["solver_nfe"][at] == pytest.approx(told[0]["nstep"].mean().item())
    assert record["solver_residual"][at] == pytest.approx(told[0]["rel_lowest"].mean().item(), rel=1e-4)
    assert told[0]["nstep"].mean() > 3


# -- layers that say it themselves


class Reporting(nn.Module):
    def __init__(self, names: tuple[str, str], values: tuple[Any, Any]) -> None:
        super().__init__()
        self.linear, self.names, self.values = nn.Linear(IN, OUT), names, values

    def forward(self, x: Tensor) -> Tensor:
        for name, value in zip(self.names, self.values, strict=True):
            setattr(self, name, value)
        return self.linear(x)


def test_a_layer_that_leaves_its_numbers_on_itself_is_read() -> None:
    model = nn.Sequential(
        Reporting(("solver_nfe", "solver_residual"), (12, torch.tensor(0.25))),
        nn.Linear(OUT, IN),
        Reporting(("iterations", "residual"), (7, 0.125)),
    )
    record = record_of(model, [inputs(1), inputs(1)], square)
    assert record.labels("solver_nfe") == ["0", "2"]
    assert record["solver_nfe"].tolist() == [12.0, 7.0]
    assert record["solver_residual"].tolist() == [0.25, 0.125]
    assert np.isnan(record["jacobian_radius"]).all()


@pytest.mark.parametrize("values", [(5, True), (5, 1), ("many", 0.5), (5, None)])
def test_settings_of_those_names_are_no_solver(values: tuple[Any, Any]) -> None:
    model = nn.Sequential(Reporting(("iterations", "residual"), values), nn.Linear(OUT, IN))
    assert "solver_nfe" not in record_of(model, [inputs(1)], square).metrics


# -- promises


@pytest.mark.parametrize(
    "make",
    [lambda: Implicit(weight_of_radius(0.7)), lambda: Integrated(odeint, **RK4), lambda: Equilibrium(ift=True)],
    ids=["implicit", "ode", "torchdeq"],
)
def test_watching_solvers_changes_nothing_and_leaves_nothing(make: Any) -> None:
    torch.manual_seed(0)
    bare = make()
    watched = copy.deepcopy(bare)
    state = torch.get_rng_state()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.05)
    for x in inputs(4):
        square(bare, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    record_of(watched, [[x] for x in inputs(4)], square)
    for name, value in bare.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    assert torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())


class Unrolled(nn.Module):
    """Euler's method in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.func, self.head = nn.Linear(IN, D), Dynamics(), nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for k in range(3):
            y = y + 0.25 * self.func(torch.full((), 0.25 * k), y)
        return self.head(y)


@pytest.mark.parametrize("make", [lambda: OneStep(weight_of_radius(0.7)), Unrolled], ids=["implicit", "ode"])
def test_compiled_solvers_break_no_graph_and_are_not_seen(make: Any) -> None:
    torch.manual_seed(0)
    bare = make()
    watched = copy.deepcopy(bare)
    (x,) = inputs(1)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.05)
    try:
        torch.compile(bare, fullgraph=True, backend="aot_eager")(x).square().mean().backward()
        optimizer.step()
        torch.compiler.reset()
        record = record_of(
            watched,
            [[x]],
            lambda model, x: torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().mean(),
        )
    finally:
        torch.compiler.reset()
    assert "solver_nfe" not in record.metrics
    for name, value in bare.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name


def test_stiff_dynamics_are_told() -> None:
    torch.manual_seed(0)
    model = Integrated(odeint, rtol=1e-5, atol=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        for k, x in enumerate(inputs(20)):
            if k == 14:
                model.func.rate = 60.0
            square(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    raised = [alert for alert in scope.alerts if alert.kind == "solver_cost"]
    assert [(alert.where, alert.step) for alert in raised] == [("func", 15)]  # two records in a row
    assert not any(alert.kind == "vanishing_gradient" and alert.step < 14 for alert in scope.alerts)
