"""Each kind of information flow on a real implementation, against a number known by other means.

Here: a plain chain (dense Jacobian), ResNet, Post-LN, Pre-LN and Mamba (hidden states of transformers' own forward),
highway networks and wrapped carries (closed forms), neural ODEs with constant coefficients. Elsewhere: DenseNet and the
users' own gates (test_watch_gates), DeepNorm and both forms of Keel (test_connections_postln, test_watch_sites),
hyper-connections (test_connections_hyper, _manifold), recurrent layers (test_recurrent, test_flows_recurrent), mixtures
of experts (test_flows_routing), equilibrium layers (test_flows_solvers), 1,024 blocks of every mode (test_deep).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from flows_models import IN, OUT, D, inputs, record_of, square
from torch import Tensor, nn
from torchdiffeq import odeint

import flowscope

WORDS = 30


# -- the plain chain


def test_a_plain_chain_is_the_product_of_its_jacobians() -> None:
    """One sample, so that the gradient at a point is the Jacobian's transpose times the gradient at the end."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)]
    model = nn.Sequential(*layers)
    plain = copy.deepcopy(model).double()
    (x,) = inputs(1, batch=1)
    record = record_of(model, [[x]], square)
    assert record.labels("gradient_product") == ["1", "3", "5", "6"]
    states, ends = [x.double()[0]], (2, 4, 6, 7)
    for start, stop in zip((0, *ends), ends, strict=False):
        states.append(plain[start:stop](states[-1]))
    last = 2 * states[-1].detach() / 3
    for point, end in enumerate(ends):
        jacobian = torch.autograd.functional.jacobian(plain[end:], states[point + 1].detach())
        truth = (jacobian.T @ last).norm() / last.norm() if end < 7 else torch.tensor(1.0)
        assert record["gradient_product"][point] == pytest.approx(truth.item(), rel=1e-5)


# -- residual networks of transformers, by the hidden states their own forward hands out


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=3, n_embd=16, n_head=4, vocab_size=WORDS, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def gpt1() -> nn.Module:
    return transformers.OpenAIGPTLMHeadModel(
        transformers.OpenAIGPTConfig(
            n_layer=3, n_embd=16, n_head=4, vocab_size=WORDS, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=3, state_size=5, vocab_size=WORDS, use_cache=False)
    )


def resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=6, hidden_sizes=[6, 9], depths=[2, 3], layer_type="basic", num_labels=4, num_channels=3
        )
    )


def words(model: nn.Module, x: Tensor, **options: Any) -> Any:
    return model(input_ids=x, labels=x, **options)


def pictures(model: nn.Module, x: Tensor, **options: Any) -> Any:
    return model(pixel_values=x, labels=torch.arange(len(x)) % 4, **options)


@pytest.mark.parametrize(
    ("make", "points"),
    [(gpt1, slice(4)), (gpt2, slice(3)), (mamba, slice(1, 4))],
    ids=["post-norm", "pre-norm", "mamba"],
)
def test_hidden_states_of_language_models(make: Callable[[], nn.Module], points: slice) -> None:
    """`points` are those that transformers hands out: not x_3 of GPT-2 (after the last norm) nor x_0 of Mamba."""
    torch.manual_seed(0)
    model = make().train()
    plain = copy.deepcopy(model)
    batches = [torch.randint(0, WORDS, (3, 7)), torch.randint(0, WORDS, (2, 7))]
    record = record_of(model, [batches], lambda m, x: words(m, x).loss)
    count = len(range(4)[points])
    squares = np.zeros(count)
    for x in batches:
        out = words(plain, x, output_hidden_states=True)
        states = out.hidden_states[:count]
        gradients = torch.autograd.grad(out.loss, states)
        squares += [g.double().square().sum().item() for g in gradients]
    np.testing.assert_allclose(record["grad_norm"][points], np.sqrt(squares), rtol=1e-4)
    assert len(record["grad_norm"]) == 4


def test_the_stages_of_a_resnet() -> None:
    torch.manual_seed(0)
    model = resnet().train()
    plain = copy.deepcopy(model)
    x = torch.randn(5, 3, 32, 32)
    record = record_of(model, [[x]], lambda m, x: pictures(m, x).loss)
    out = pictures(plain, x, output_hidden_states=True)
    truth = [g.double().norm().item() for g in torch.autograd.grad(out.loss, out.hidden_states)]
    # the embedder's output is the first stage's input, the stages' outputs are their last blocks'
    network = record["grad_norm"]
    assert len(network) == 6
    np.testing.assert_allclose(network[[0, 2, 5]], truth, rtol=1e-4)
    first, second = (record[("grad_norm", name)] for name in record.flow_names[1:])
    np.testing.assert_allclose(network, [*first, *second[1:]], rtol=1e-6)


# -- carries in closed form


class Highway(nn.Module):
    """Srivastava et al. (2015), one layer: t * H(x) + (1 - t) * x with H and t of this layer's own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.transform, self.gate, self.sigmoid = nn.Linear(D, D), nn.Linear(D, D), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        t = self.sigmoid(self.gate(x))
        return t * torch.tanh(self.transform(x)) + (1 - t) * x


class Deep(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], depth: int = 6) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Linear(IN, D),
            nn.ModuleList(block() for _ in range(depth)),
            nn.Linear(D, OUT),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("bias", [-3.0, 2.0])
def test_a_highway_network_whose_transforms_are_zero_carries_one_minus_t(bias: float) -> None:
    torch.manual_seed(0)
    model = Deep(Highway)
    with torch.no_grad():
        for block in model.blocks:
            for linear in (block.transform, block.gate):
                linear.weight.zero_()
                linear.bias.zero_()
            block.gate.bias.fill_(bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with flowscope.watch(model, optimizer, gates=["*.sigmoid"], config={"console": "off"}) as scope:
        square(model, inputs(1)[0]).backward()
        optimizer.step()
        (record,) = scope.records
    t = 1 / (1 + math.exp(-bias))
    np.testing.assert_allclose(record["gradient_product"], [(1 - t) ** (6 - k) for k in range(7)], rtol=1e-5)
    np.testing.assert_allclose(record["gate_mean", "gates"], [t] * 6, rtol=1e-5)


class Branch(nn.Module):
    """x + f(norm(x)) with f = 0: what remains is the carry."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


@pytest.mark.parametrize(
    ("mode", "carry"),
    [
        ("residual", 1.0),
        ("keel", 1.0),
        ("highway", 1 - 1 / (1 + math.exp(2))),
        ("shc", 1.0),
        ("dhc", 1.0),
        ("mhc", 1.0),
    ],
)
def test_what_a_wrapped_carry_keeps_where_the_branch_is_zero(mode: str, carry: float) -> None:
    torch.manual_seed(0)
    model = flowscope.wrap(Deep(Branch), mode, example_inputs=inputs(1)[0])
    record = record_of(model, [inputs(1)], square)
    np.testing.assert_allclose(record["shortcut_product"], [carry ** (6 - k) for k in range(6)], rtol=1e-4)
    if mode in ("residual", "keel", "highway"):  # streams have several carries, which the gradient at all of them joins
        np.testing.assert_allclose(record["gradient_product"], [carry ** (6 - k) for k in range(7)], rtol=1e-5)


# -- continuous flow in closed form


class Decay(nn.Module):
    """dy/dt = rate * y."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(rate))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.rate * y


class Continuous(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.embed, self.func, self.head = nn.Linear(IN, D), Decay(rate), nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.tensor([0.0, 2.0])
        return self.head(odeint(self.func, self.embed(x), times, method="euler", options={"step_size": 0.25})[-1])


@pytest.mark.parametrize("rate", [-1.2, 0.7])
def test_eulers_method_on_a_linear_equation(rate: float) -> None:
    record = record_of(Continuous(rate), [inputs(1)], square)
    factor = 1 + 0.25 * rate
    np.testing.assert_allclose(record["gradient_product", "func"], [factor ** (7 - k) for k in range(8)], rtol=1e-4)
    np.testing.assert_allclose(record["gain", "func"], [factor] * 7, rtol=1e-4)
    assert record["solver_nfe"].tolist() == [8.0]
