"""replay_gradients against layers unrolled with torch's own cells, one sequence at a time, and against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.instruments.fused_replay import replay_gradients

B, T, D, H, LAYERS = 3, 7, 4, 6, 2
KINDS = {"tanh": nn.RNN, "relu": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
CELLS = {"tanh": nn.RNNCell, "relu": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}


def make(kind, **options):
    torch.manual_seed(5)
    options = {"num_layers": LAYERS, **options}
    if kind in ("tanh", "relu"):
        options["nonlinearity"] = kind
    return KINDS[kind](D, H, **options).double()


def cell_of(rnn, kind, layer, reverse):
    suffix = f"l{layer}" + ("_reverse" if reverse else "")
    width = getattr(rnn, f"weight_ih_{suffix}").shape[1]
    cell = CELLS[kind](width, H, bias=rnn.bias, **({"nonlinearity": kind} if kind in ("tanh", "relu") else {}))
    cell = cell.to(rnn.weight_ih_l0.dtype)
    for name in ("weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if rnn.bias else [])):
        getattr(cell, name).data.copy_(getattr(rnn, f"{name}_{suffix}"))
    return cell


def unrolled(rnn, kind, sequence, h0, c0):
    """One sequence [T, D] through torch's cells. Returns output [T, H*dirs], finals and {(row, t): h_t}."""
    seen, h_final, c_final = {}, [], []
    directions = 2 if rnn.bidirectional else 1
    steps = list(sequence)
    for layer in range(rnn.num_layers):
        outputs = [[None] * directions for _ in steps]
        for direction in range(directions):
            row = layer * directions + direction
            cell = cell_of(rnn, kind, layer, bool(direction))
            h, c = h0[row][None], c0[row][None]
            for t in reversed(range(len(steps))) if direction else range(len(steps)):
                if kind == "lstm":
                    h, c = cell(steps[t][None], (h, c))
                else:
                    h = cell(steps[t][None], h)
                seen[row, t] = h
                outputs[t][direction] = h[0]
            h_final.append(h[0])
            c_final.append(c[0])
        steps = [torch.cat(parts) for parts in outputs]
    return torch.stack(steps), torch.stack(h_final), torch.stack(c_final), seen


def loss_of(outputs, h_finals, c_finals):
    """A loss on outputs and final states; lists with one entry a sequence."""
    total = 0.0
    for i, (out, h, c) in enumerate(zip(outputs, h_finals, c_finals, strict=True)):
        weight = torch.linspace(0.3, 1.7, out.numel(), dtype=out.dtype).view_as(out) + i
        total = total + (weight * out).square().sum() + (1 + i) * h.sin().sum() + (2 - i) * c.square().sum()
    return total


def truth(rnn, kind, sequences, h0, c0):
    results = [unrolled(rnn, kind, s, h0[:, i], c0[:, i]) for i, s in enumerate(sequences)]
    loss = loss_of(*([r[j] for r in results] for j in range(3)))
    grad_square, act_square = torch.zeros(h0.shape[0], T).double(), torch.zeros(h0.shape[0], T).double()
    for *_, seen in results:
        grads = torch.autograd.grad(loss, list(seen.values()), retain_graph=True)
        for (row, t), state, grad in zip(seen, seen.values(), grads, strict=True):
            grad_square[row, t] += grad.double().square().sum()
            act_square[row, t] += state.detach().double().square().sum()
    return grad_square, act_square


def start(rnn, dtype=torch.float64):
    rows = rnn.num_layers * (2 if rnn.bidirectional else 1)
    generator = torch.Generator().manual_seed(9)
    h0, c0 = (torch.randn(rows, B, H, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return h0, (c0 if isinstance(rnn, nn.LSTM) else torch.zeros_like(h0))


def fused(rnn, inputs, h0, c0, split):
    """The fused layer under the same loss: returns the gradients a probe would see (output, h_n, c_n)."""
    lstm = isinstance(rnn, nn.LSTM)
    output, hidden = rnn(inputs, (h0, c0) if lstm else h0)
    h_n, c_n = hidden if lstm else (hidden, torch.zeros_like(hidden))
    data = output.data if isinstance(output, PackedSequence) else output
    loss = loss_of(split(output), list(h_n.transpose(0, 1)), list(c_n.transpose(0, 1)))
    return torch.autograd.grad(loss, [data, h_n, *([c_n] if lstm else [])])


def sequences_of(dtype=torch.float64):
    return list(torch.randn(B, T, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bidirectional", "batch_first", "bias"), [(False, False, True), (True, True, False)])
def test_replay_is_the_unrolled_cell(kind, bidirectional, batch_first, bias):
    rnn = make(kind, bidirectional=bidirectional, batch_first=batch_first, bias=bias)
    sequences = sequences_of()
    h0, c0 = start(rnn)
    x = torch.stack(sequences, dim=0 if batch_first else 1)
    grads = fused(rnn, x, h0, c0, lambda out: list(out if batch_first else out.transpose(0, 1)))
    got = replay_gradients(rnn, x, (h0, c0) if kind == "lstm" else h0, *grads)
    grad_square, act_square = truth(rnn, kind, sequences, h0, c0)
    assert got.grad_square.dtype == torch.float64
    torch.testing.assert_close(got.grad_square, grad_square, rtol=1e-10, atol=0)
    torch.testing.assert_close(got.act_square, act_square, rtol=1e-10, atol=0)
    assert got.counts.tolist() == [B] * T
    assert got.note == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences_of_different_lengths(kind, bidirectional):
    rnn = make(kind, bidirectional=bidirectional)
    lengths = [4, 7, 2]
    sequences = [s[:n] for s, n in zip(sequences_of(), lengths, strict=True)]
    h0, c0 = start(rnn)
    padded = nn.utils.rnn.pad_sequence(sequences)
    packed = pack_padded_sequence(padded, torch.tensor(lengths), enforce_sorted=False)

    def split(output):
        whole, _ = nn.utils.rnn.pad_packed_sequence(output)
        return [whole[:n, i] for i, n in enumerate(lengths)]

    grads = fused(rnn, packed, h0, c0, split)
    got = replay_gradients(rnn, packed, (h0, c0) if kind == "lstm" else h0, *grads)
    grad_square, act_square = truth(rnn, kind, sequences, h0, c0)
    torch.testing.assert_close(got.grad_square, grad_square, rtol=1e-10, atol=0)
    torch.testing.assert_close(got.act_square, act_square, rtol=1e-10, atol=0)
    assert got.counts.tolist() == [3, 3, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision(kind):
    rnn = make(kind).float()
    sequences = sequences_of(torch.float32)
    h0, c0 = start(rnn, torch.float32)
    x = torch.stack(sequences, dim=1)
    grads = fused(rnn, x, h0, c0, lambda out: list(out.transpose(0, 1)))
    got = replay_gradients(rnn, x, (h0, c0) if kind == "lstm" else h0, *grads)
    grad_square, _ = truth(rnn, kind, sequences, h0, c0)
    torch.testing.assert_close(got.grad_square, grad_square, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["tanh", "lstm"])
def test_unbatched_is_a_batch_of_one_and_missing_states_are_zero(kind):
    rnn = make(kind, batch_first=True)
    sequence = sequences_of()[1]
    output, _ = rnn(sequence)
    weight = torch.linspace(1, 2, output.numel(), dtype=torch.float64).view_as(output)
    zeros = torch.zeros(LAYERS, H, dtype=torch.float64)
    out, _, _, seen = unrolled(rnn, kind, sequence, zeros, zeros)
    grads = torch.autograd.grad((weight * out).sum(), list(seen.values()))
    expected = torch.zeros(LAYERS, T, dtype=torch.float64)
    for (row, t), grad in zip(seen, grads, strict=True):
        expected[row, t] = grad.square().sum()
    got = replay_gradients(rnn, sequence, None, weight, None)
    torch.testing.assert_close(got.grad_square, expected, rtol=1e-10, atol=0)


def test_projected_lstm():
    rnn = make("lstm", proj_size=5, num_layers=1)
    x = torch.stack(sequences_of(), dim=1)
    output, (h_n, c_n) = rnn(x)
    weight = torch.linspace(1, 2, output.numel(), dtype=torch.float64).view_as(output)
    grads = torch.autograd.grad((weight * output).square().sum() + c_n.square().sum(), [output, c_n])
    # the naive truth: the layer called one step at a time, which nn.LSTM itself allows
    state, outputs = (torch.zeros_like(h_n), torch.zeros_like(c_n)), []
    for step in x:
        _, state = rnn(step[None], state)
        outputs.append(state[0])
    loss = (weight * torch.cat(outputs)).square().sum() + state[1].square().sum()
    expected = torch.stack([g.square().sum() for g in torch.autograd.grad(loss, outputs)])
    got = replay_gradients(rnn, x, None, grads[0], None, grads[1])
    torch.testing.assert_close(got.grad_square[0], expected, rtol=1e-10, atol=0)


def test_steps_without_gradient_are_zero():
    rnn = make("tanh", num_layers=1)
    grad_output = torch.zeros(T, B, H, dtype=torch.float64)
    grad_output[3] = 1.0
    got = replay_gradients(rnn, torch.stack(sequences_of(), dim=1), None, grad_output, None)
    assert got.grad_square[0, 4:].tolist() == [0.0] * (T - 4)
    assert got.grad_square[0, 3] == B * H
    assert (got.grad_square[0, :3] > 0).all()


@pytest.mark.parametrize("scale", [0.5, 2.5])
def test_gradient_product_through_time_of_an_orthogonal_recurrence(scale):
    """With relu on positive states and a non-negative orthogonal W (a permutation): every step scales by `scale`."""
    steps = 60
    rnn = nn.RNN(D, H, nonlinearity="relu").double()
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(scale * torch.eye(H)[torch.randperm(H, generator=torch.Generator().manual_seed(0))])
        rnn.weight_ih_l0.fill_(0.25)
        rnn.bias_ih_l0.fill_(0.5)
        rnn.bias_hh_l0.zero_()
    x = torch.rand(steps, B, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = replay_gradients(rnn, x, None, None, torch.ones(1, B, H, dtype=torch.float64))
    product = (got.grad_square[0] / got.grad_square[0, -1]).sqrt()
    expected = torch.tensor([scale ** (steps - 1 - t) for t in range(steps)], dtype=torch.float64)
    torch.testing.assert_close(product, expected, rtol=1e-10, atol=0)


def test_gradient_of_a_half_orthogonal_tanh_rnn_is_bounded_and_nearly_exact_for_tiny_states():
    """With tanh' <= 1, and sigma(W) = 0.5 bounds the product by 0.5^k; states near 1e-5 leave tanh' = 1 - 1e-10."""
    steps = 60
    rnn = nn.RNN(D, H, bias=False)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(0.5 * torch.linalg.qr(torch.randn(H, H, generator=torch.Generator().manual_seed(0)))[0])
    x = 1e-5 * torch.randn(steps, B, D, generator=torch.Generator().manual_seed(1))
    got = replay_gradients(rnn, x, None, None, torch.ones(1, B, H))
    product = (got.grad_square[0] / got.grad_square[0, -1]).sqrt()
    bound = torch.tensor([0.5 ** (steps - 1 - t) for t in range(steps)], dtype=torch.float64)
    torch.testing.assert_close(product, bound, rtol=1e-5, atol=0)
    large = replay_gradients(rnn, 1e5 * x, None, None, torch.ones(1, B, H))
    assert ((large.grad_square[0] / large.grad_square[0, -1]).sqrt() <= bound * (1 + 1e-5)).all()
    assert large.grad_square[0, 0] < 0.01 * got.grad_square[0, 0]


def test_nothing_of_the_layer_changes():
    rnn = make("gru")
    x = torch.stack(sequences_of(), dim=1).requires_grad_()
    output, h_n = rnn(x)
    (output.sum() + h_n.sum()).backward()
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in rnn.named_parameters()}
    x_grad, rng = x.grad.clone(), torch.get_rng_state()
    first = replay_gradients(rnn, x, None, torch.ones_like(output), torch.ones_like(h_n))
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(x.grad, x_grad)
    for name, p in rnn.named_parameters():
        assert torch.equal(p, before[name][0])
        assert torch.equal(p.grad, before[name][1])
        assert p.requires_grad
    rnn.requires_grad_(False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        frozen = replay_gradients(rnn, x, None, torch.ones_like(output), torch.ones_like(h_n))
    assert torch.equal(frozen.grad_square, first.grad_square)
    assert not frozen.grad_square.requires_grad


def test_low_precision_weights_are_replayed_in_fp32():
    rnn = make("tanh").to(torch.bfloat16)
    x = torch.stack(sequences_of(torch.bfloat16), dim=1)
    got = replay_gradients(rnn, x, None, torch.ones(T, B, H, dtype=torch.bfloat16), None)
    exact = replay_gradients(rnn.double(), x.double(), None, torch.ones(T, B, H, dtype=torch.float64), None)
    torch.testing.assert_close(got.grad_square, exact.grad_square, rtol=1e-5, atol=0)


def test_dropout_between_layers_gives_the_last_layer_only():
    rnn = make("lstm", dropout=0.5, bidirectional=True)
    x = torch.stack(sequences_of(), dim=1)
    grad = torch.ones(T, B, 2 * H, dtype=torch.float64)
    rng = torch.get_rng_state()
    got = replay_gradients(rnn, x, None, grad, None)
    assert torch.equal(torch.get_rng_state(), rng)
    assert got.grad_square[:2].isnan().all()
    assert got.grad_square[2:].isfinite().all()
    assert "last layer" in got.note
    assert replay_gradients(rnn.eval(), x, None, grad, None).grad_square.isfinite().all()


def test_bad_calls_say_what_to_do():
    rnn = make("gru")
    x = torch.stack(sequences_of(), dim=1)
    with pytest.raises(FlowscopeError, match="pass grad_output, grad_hn or grad_cn"):
        replay_gradients(rnn, x, None, None, None)
    rnn.mode = "CUSTOM"
    with pytest.raises(FlowscopeError, match=r"expected nn\.RNN, nn\.GRU or nn\.LSTM"):
        replay_gradients(rnn, x, None, x, None)


def test_padding_behind_every_sequence_does_not_hide_the_product() -> None:
    """Steps behind the longest sequence get a gradient of exactly zero; the last one that gets any is the reference."""
    torch.manual_seed(0)
    cell, head = nn.RNNCell(3, 5), nn.Linear(5, 4)
    model = nn.ModuleDict({"cell": cell, "head": head})
    x, length, steps = torch.randn(6, 9, 3), 7, 9

    def loss_of(keep: list[torch.Tensor]) -> torch.Tensor:
        h = torch.zeros(6, 5)
        for t in range(steps):
            h = cell(x[:, t], h)
            keep.append(h)
        mask = (torch.arange(steps) < length).float()
        return (head(torch.stack(keep, 1)).square().mean(-1) * mask).mean()

    states: list[torch.Tensor] = []
    truth = [g.norm().item() for g in torch.autograd.grad(loss_of(states), states[:length])]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        loss_of([]).backward()
        optimizer.step()
    record = scope.records[0]
    product = record["gradient_product"][-steps:]
    assert product[:length] == pytest.approx([norm / truth[-1] for norm in truth], rel=1e-5)
    assert np.isnan(product[length:]).all()
    assert record["grad_norm"][-2:].tolist() == [0.0, 0.0]
