"""jacobian_spectrum against dense Jacobians of forwards that the tests write themselves, and against closed forms."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from flowscope.errors import FlowscopeError
from flowscope.hooks.hooks import MASK
from flowscope.jacobian import spectrum as module_under_test
from flowscope.jacobian.spectrum import jacobian_spectrum
from flowscope.model.plan import Flow

B, T, D = 3, 5, 8


def flow_of(*outputs, entry=None, **options):
    return Flow("main", "blocks", outputs, outputs[0] if entry is None else entry or None, **options)


def dense(forward, x):
    """The oracle: torch's own dense Jacobian, [m, n] in fp64."""
    jacobian = torch.autograd.functional.jacobian(forward, x)
    return jacobian.reshape(-1, x.numel()).numpy()


def check(result, expected, rtol=1e-8, k=6):
    sigma = np.linalg.svd(expected, compute_uv=False)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result.largest, sigma[:k], rtol=rtol)
    mean_square = (expected**2).sum() / expected.shape[1]
    assert abs(result.mean_square - mean_square) <= 4 * result.mean_square_error + rtol * mean_square
    if result.spectrum is not None:
        np.testing.assert_allclose(result.spectrum, sigma, rtol=rtol, atol=rtol * sigma[0])
        assert result.smallest == result.spectrum[-1]
    return sigma


@pytest.fixture(params=["dense", "matrix-free"])
def formed(request, monkeypatch):
    """Whether a dense Jacobian is affordable; where not, everything comes from products alone."""
    if request.param == "matrix-free":
        monkeypatch.setattr(module_under_test, "DENSE_LIMIT", 4)
    return request.param == "dense"


@pytest.fixture
def generator():
    torch.manual_seed(11)
    return torch.Generator().manual_seed(12)


class Mlp(nn.Module):
    def __init__(self, widths=(6, 8, 9, 8, 7)):
        super().__init__()
        self.stem = nn.Linear(4, widths[0])
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Dropout(0.5)) for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], 3)
        self.heads = 0

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        self.heads += 1
        return self.head(x)


def mlp_chain(model, x):
    for layer in model.layers:
        x = torch.tanh(x @ layer[0].weight.T + layer[0].bias)
    return x


MLP_FLOW = flow_of(*(f"layers.{i}" for i in range(4)))


def test_mlp_of_changing_width(formed, generator):
    model = Mlp().double()
    x = torch.randn(B, T, 4, generator=generator, dtype=torch.float64)
    got = jacobian_spectrum(model, x, MLP_FLOW)
    start = model.stem(x[:1]).detach()
    check(got, dense(lambda s: mlp_chain(model, s), start))
    assert got.shape == (T * 7, T * 6)
    assert (got.spectrum is not None) == formed
    assert math.isnan(got.smallest) != formed
    assert ("not computed" in got.note) != formed
    assert "Jacobian of main [35, 30]" in str(got)
    assert f"{got.largest[0]:.4g}" in str(got)


def test_without_entry_the_first_output_is_x0(formed, generator):
    model = Mlp().double()
    x = torch.randn(B, T, 4, generator=generator, dtype=torch.float64)
    got = jacobian_spectrum(model, (x,), flow_of("layers.0", "layers.2", entry=""))

    def tail(state):
        for layer in (model.layers[1], model.layers[2]):
            state = torch.tanh(layer[0](state))
        return state

    start = torch.tanh(model.layers[0][0](model.stem(x[:1]))).detach()
    check(got, dense(tail, start))


def test_scaled_orthogonal_chain_by_hand(formed):
    model = nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(4))).double()
    for i, layer in enumerate(model):
        nn.init.orthogonal_(layer.weight, gain=(0.5, 3.0, 0.7, 1.5)[i])
    got = jacobian_spectrum(model, torch.randn(1, T, D).double(), flow_of("0", "3"), k=3)
    product = 0.5 * 3.0 * 0.7 * 1.5
    np.testing.assert_allclose(got.largest, product, rtol=1e-10)
    assert got.mean_square == pytest.approx(product**2, rel=1e-10)
    assert got.mean_square_error < 1e-10
    if formed:
        np.testing.assert_allclose(got.spectrum, product, rtol=1e-10)


def test_mean_square_converges_with_its_stated_error(generator):
    model = Mlp().double()
    x = torch.randn(1, T, 4, generator=generator, dtype=torch.float64)
    expected = dense(lambda s: mlp_chain(model, s), model.stem(x).detach())
    exact = (expected**2).sum() / expected.shape[1]
    few = [jacobian_spectrum(model, x, MLP_FLOW, k=1, probes=8, seed=s) for s in range(40)]
    off = np.array([r.mean_square - exact for r in few])
    # the spread over seeds is what each run says of itself, within the noise of 40 draws
    assert 0.7 < off.std() / np.sqrt(np.mean([r.mean_square_error**2 for r in few])) < 1.4
    assert abs(off.mean()) < 4 * off.std() / math.sqrt(len(few))
    again = jacobian_spectrum(model, x, MLP_FLOW, k=1, probes=8, seed=3)
    assert again.mean_square == few[3].mean_square
    assert again.largest.tolist() == few[3].largest.tolist()


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder(formed, generator, batch_first):
    layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.2, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    got = jacobian_spectrum(model, x if batch_first else x.transpose(0, 1), flow_of("layers.0", "layers.1", "layers.2"))
    one = x[:1] if batch_first else x[:1].transpose(0, 1)
    reference = copy.deepcopy(model).eval()
    expected = dense(lambda s: reference.layers[2](reference.layers[1](reference.layers[0](s))), one)
    assert got.shape == (T * D, T * D)
    check(got, expected)


def gpt2():
    config = GPT2Config(n_layer=3, n_head=2, n_embd=D, vocab_size=31, n_positions=16, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    flow = Flow("transformer.h", "blocks", tuple(f"transformer.h.{i}" for i in range(3)), "transformer.h.0")
    return model, flow


def gpt2_forward(model):
    """x_0 -> x_L by the model's own `inputs_embeds`: positions off, final norm off."""
    body = copy.deepcopy(model.transformer).eval()
    body.ln_f = nn.Identity()
    nn.init.zeros_(body.wpe.weight)
    return lambda x: body(inputs_embeds=x).last_hidden_state


def gpt2_start(model, ids):
    return (model.transformer.wte(ids) + model.transformer.wpe(torch.arange(ids.shape[1]))).detach()


def test_gpt2(formed, generator):
    model, flow = gpt2()
    model = model.double().train()
    ids = torch.randint(0, 31, (B, T), generator=generator)
    got = jacobian_spectrum(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}, flow)
    expected = dense(gpt2_forward(model), gpt2_start(model, ids[:1]))
    check(got, expected)
    for name in (None, flow.name, "h"):
        found = jacobian_spectrum(model, ids, name)
        assert found.flow == flow.name
        check(found, expected)
    with pytest.raises(FlowscopeError, match="no flow 'encoder'"):
        jacobian_spectrum(model, ids, "encoder")


def test_llama(formed, generator):
    config = LlamaConfig(
        hidden_size=D, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=31, max_position_embeddings=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    ids = torch.randint(0, 31, (B, T), generator=generator)
    flow = Flow("model.layers", "blocks", tuple(f"model.layers.{i}" for i in range(3)), "model.layers.0")
    body = copy.deepcopy(model.model).eval()
    body.norm = nn.Identity()
    expected = dense(lambda x: body(inputs_embeds=x).last_hidden_state, body.embed_tokens(ids[:1]).detach())
    check(jacobian_spectrum(model, (ids,), flow), expected)


def test_single_and_half_precision(generator):
    model, flow = gpt2()
    ids = torch.randint(0, 31, (B, T), generator=generator)
    expected = dense(gpt2_forward(copy.deepcopy(model).double()), gpt2_start(copy.deepcopy(model).double(), ids[:1]))
    check(jacobian_spectrum(model, ids, flow), expected, rtol=1e-4)
    half = model.to(torch.bfloat16)
    got = jacobian_spectrum(half, ids, flow)
    single = copy.deepcopy(half).float()
    # exact for the rounded weights, in fp32: rounding in the forward would be 1e-2
    expected = dense(gpt2_forward(copy.deepcopy(single).double()), gpt2_start(single.double(), ids[:1]))
    check(got, expected, rtol=1e-4)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


class Residual(nn.Module):
    """A pre-activation block whose in-place ReLU changes its own input where there is no copy."""

    def __init__(self, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 4, 3, stride, 1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, 1, 1)
        self.shortcut = nn.Conv2d(channels, 4, 1, stride)

    def forward(self, x):
        x = torch.relu_(x)
        return self.shortcut(x) + self.conv2(torch.relu_(self.norm(self.conv1(x))))


def test_convolutional_stage(formed, generator):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), Residual(3, stride=2), Residual(4), nn.Flatten(), nn.LazyLinear(5))
    image = torch.randn(B, 2, 8, 7, generator=generator, dtype=torch.float64)
    model = model.double()
    model(image)
    got = jacobian_spectrum(model, image, flow_of("1", "2"))
    assert got.shape == (4 * 3 * 3, 3 * 6 * 5)
    model.eval()
    check(got, dense(lambda s: model[2](model[1](s.clone())), model[0](image[:1]).detach()))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(D, D)

    def forward(self, x):
        x = 2 * x
        for _ in range(4):
            x = x + torch.tanh(self.block(x))
        return x.sum()


@pytest.mark.parametrize("entry", ["block", ""])
def test_a_shared_block_counts_from_its_first_to_its_last_call(generator, entry):
    model = Shared().double()
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    got = jacobian_spectrum(model, x, flow_of("block", entry=entry))

    def from_input(state):
        for _ in range(3):
            state = state + torch.tanh(model.block(state))
        return model.block(state)

    def from_output(first):
        # the skip of the first call keeps the model's own x
        state = 2 * x[:1] + torch.tanh(first)
        for _ in range(2):
            state = state + torch.tanh(model.block(state))
        return model.block(state)

    # x_0 is put in place at the block's door only: the residual around the first call is not part of it
    def from_door(state):
        return from_output(model.block(state))

    start = 2 * x[:1]
    expected = dense(from_door, start) if entry else dense(from_output, model.block(start).detach())
    check(got, expected)
    assert not np.allclose(dense(from_input, start), expected)


class Checkpointed(Mlp):
    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.usefixtures("formed")
def test_checkpointed_and_compiled_models(generator):
    model = Checkpointed().double()
    x = torch.randn(B, T, 4, generator=generator, dtype=torch.float64)
    expected = dense(lambda s: mlp_chain(model, s), model.stem(x[:1]).detach())
    check(jacobian_spectrum(model, x, MLP_FLOW), expected)
    compiled = torch.compile(model, backend="aot_eager")
    flow = flow_of(*(f"_orig_mod.layers.{i}" for i in range(4)))
    check(jacobian_spectrum(compiled, x, flow), expected)
    blocks = Mlp().double()
    blocks.load_state_dict(model.state_dict())
    for layer in blocks.layers:
        layer.compile(backend="aot_eager")  # its backward has no second derivative
    check(jacobian_spectrum(blocks, x, MLP_FLOW), expected)


class OnceOnly(torch.autograd.Function):
    """x^2 / 2 with a backward that is not differentiable, and no forward-mode rule."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x / 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class SilentZeros(OnceOnly):
    """As above, but double backward runs and answers zero."""

    @staticmethod
    def backward(ctx, grad):
        return grad.detach() * ctx.saved_tensors[0].detach()


class ForwardRule(OnceOnly):
    """As `OnceOnly` with a rule for forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_forward(x)
        return OnceOnly.forward(ctx, x)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0]


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.mix, self.function = nn.Linear(D, D), function

    def forward(self, x):
        return self.function.apply(self.mix(x))


@pytest.mark.parametrize("function", [OnceOnly, SilentZeros, ForwardRule])
def test_operations_without_second_derivative(generator, monkeypatch, function):
    model = nn.Sequential(Custom(function), Custom(function)).double()
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)

    def forward(state):
        for block in model:
            state = block.mix(state).square() / 2
        return state

    expected = dense(forward, x[:1])
    check(jacobian_spectrum(model, x, flow_of("0", "1")), expected)
    monkeypatch.setattr(module_under_test, "DENSE_LIMIT", 4)
    if function is ForwardRule:
        check(jacobian_spectrum(model, x, flow_of("0", "1")), expected)
    else:
        with pytest.raises(FlowscopeError, match="Pass a shorter sequence"):
            jacobian_spectrum(model, x, flow_of("0", "1"))


def test_everything_is_left_as_it_was(generator):
    model = Mlp()
    model.layers[1].eval()
    model.layers[2][0].bias.requires_grad_(False)
    x = torch.randn(B, T, 4, generator=generator, requires_grad=True)
    model(x).sum().backward()
    modes = [m.training for m in model.modules()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    x_grad, rng, heads = x.grad.clone(), torch.get_rng_state(), model.heads
    numpy_rng = np.random.get_state()[1].copy()
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    with torch.no_grad():
        first = jacobian_spectrum(model, x, MLP_FLOW)
    assert model.heads == heads + 1  # one whole run to count calls; every other stops at x_L
    with pytest.raises(FlowscopeError):
        jacobian_spectrum(model, x, MLP_FLOW, k=1000)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_rng)
    assert torch.equal(x.grad, x_grad)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert torch.backends.mha.get_fastpath_enabled()
    model.requires_grad_(False)
    np.testing.assert_array_equal(jacobian_spectrum(model, x, MLP_FLOW).largest, first.largest)


class Noisy(Mlp):
    def forward(self, x):
        self.masked = MASK.on
        return super().forward(x + 0 * torch.rand_like(x))


def test_what_the_caller_has_switched_on_changes_nothing():
    model = Noisy()
    x = torch.randn(B, T, 4)
    plain = jacobian_spectrum(model, x, MLP_FLOW)
    rng = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = jacobian_spectrum(model, x, MLP_FLOW)
    np.testing.assert_array_equal(cast.spectrum, plain.spectrum)
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.masked  # attached scopes saw nothing
    assert not MASK.on


def test_padded_encoder_that_would_turn_to_nested_tensors(generator):
    layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).double()
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0, 3:] = True
    arguments = {"src": x, "src_key_padding_mask": padding}
    got = jacobian_spectrum(model, arguments, flow_of("layers.0", "layers.1", entry=""))
    layers = copy.deepcopy(model.layers).eval()
    # differentiated: the layers themselves have no fast path then
    start = layers[0](x[:1].clone().requires_grad_(), src_key_padding_mask=padding[:1]).detach()
    check(got, dense(lambda s: layers[1](s, src_key_padding_mask=padding[:1]), start))


def test_zero_jacobian_and_k_equal_to_the_rank():
    model = nn.Sequential(*(nn.Linear(D, D) for _ in range(3))).double()
    x = torch.randn(1, D).double()
    got = jacobian_spectrum(model, x, flow_of("0", "2"), k=D)
    expected = np.linalg.svd((model[2].weight @ model[1].weight @ model[0].weight).detach().numpy(), compute_uv=False)
    np.testing.assert_allclose(got.largest, expected, rtol=1e-10)
    nn.init.zeros_(model[1].weight)
    got = jacobian_spectrum(model, x, flow_of("0", "2"), k=2)
    assert got.largest.tolist() == [0.0, 0.0]
    assert got.mean_square == 0.0


class Detaching(Mlp):
    def forward(self, x):
        x = self.layers[0](self.stem(x)).detach()
        return self.layers[1](x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 31}, "has 30 singular values. Ask for fewer"),
        ({"k": 0}, "expected k >= 1"),
        ({"probes": 1}, "probes >= 2"),
        ({"flow": flow_of("layers.0", fused=True)}, "fused"),
        ({"flow": flow_of("layers.0", "unused")}, "'unused' was not called"),
        ({"flow": flow_of("layers.0", entry="")}, "single point"),
        ({"inputs": [1.0]}, "got list, expected a tensor"),
        ({"inputs": (3.0,)}, "got no tensor"),
    ],
)
def test_bad_calls_say_what_to_do(options, message):
    model = Mlp().double()
    model.unused = nn.Linear(4, 4)
    arguments = {"inputs": torch.randn(B, T, 4).double(), "flow": MLP_FLOW, **options}
    with pytest.raises(FlowscopeError, match=message):
        jacobian_spectrum(model, **arguments)


def test_a_model_without_flow():
    with pytest.raises(FlowscopeError, match="no flow was found in Flatten"):
        jacobian_spectrum(nn.Flatten(), torch.randn(B, T, D))


def test_a_detached_state_is_named():
    with pytest.raises(FlowscopeError, match="detached"):
        jacobian_spectrum(Detaching(), torch.randn(B, T, 4), flow_of("layers.0", "layers.1"))


def test_which_axis_is_the_batch():
    layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    flow = flow_of("layers.0", "layers.1")
    x = torch.randn(T, B, D).double()
    alone = jacobian_spectrum(model, x[:, :1], flow)
    assert alone.shape == (T * D, T * D)
    np.testing.assert_allclose(jacobian_spectrum(model, x, flow).largest, alone.largest, rtol=1e-10)
    # torch's unbatched layout [T, D] has no batch to cut
    np.testing.assert_allclose(jacobian_spectrum(model, x[:, 0], flow).largest, alone.largest, rtol=1e-10)
    # a wrapper that gets [B, T, D] and turns it round
    turned = Turned(model)
    inner = flow_of("encoder.layers.0", "encoder.layers.1")
    np.testing.assert_allclose(jacobian_spectrum(turned, x.transpose(0, 1), inner).largest, alone.largest, rtol=1e-10)
    with pytest.raises(FlowscopeError, match="cannot be told apart"):
        jacobian_spectrum(model, torch.randn(T, T, D).double(), flow)
    batch_first = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    with pytest.raises(FlowscopeError, match="mask between positions"):
        jacobian_spectrum(batch_first, (torch.randn(T, T, D), torch.zeros(T, T)), flow)


class Turned(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        return self.encoder(x.transpose(0, 1)).transpose(0, 1)
