"""The numbers of `watch` against autograd on an unwatched copy whose own forward returns the hidden states.

Two micro-batches of different size a step, part of the model frozen, distinct sizes (B=3 and 2, T=5, D=8 or so).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import flowscope
from flowscope.records import Record
from flowscope.sums import statistics

STATES = Callable[[nn.Module, Tensor], tuple[list[Tensor], Tensor]]


def gpt2() -> nn.Module:
    torch.manual_seed(3)
    config = GPT2Config(n_layer=3, n_embd=24, n_head=2, n_positions=16, vocab_size=40, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    model.transformer.h[1].mlp.requires_grad_(False)
    return model


def gpt2_states(model: nn.Module, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    h = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(ids.shape[1]))
    states = [h]
    for block in model.transformer.h:
        h = block(h)
        h = h[0] if isinstance(h, tuple) else h
        states.append(h)
    logits = model.lm_head(model.transformer.ln_f(h))
    return states, next_token_loss(logits, ids)


def llama() -> nn.Module:
    torch.manual_seed(4)
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=16,
            intermediate_size=36,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=40,
        )
    )
    model.model.layers[2].self_attn.requires_grad_(False)
    return model


def llama_states(model: nn.Module, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    h = model.model.embed_tokens(ids)
    states = [h]
    length = ids.shape[1]
    positions = torch.arange(length)[None]
    rotary = model.model.rotary_emb(h, positions)
    mask = torch.full((length, length), -math.inf).triu(1)[None, None]
    for block in model.model.layers:
        h = block(h, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        h = h[0] if isinstance(h, tuple) else h
        states.append(h)
    return states, next_token_loss(model.lm_head(model.model.norm(h)), ids)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(12, 40)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


def encoder() -> nn.Module:
    torch.manual_seed(5)
    model = Encoder()
    model.encoder.layers[0].linear1.requires_grad_(False)
    return model


def encoder_states(model: nn.Module, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    states = [model.embed(ids)]
    for layer in model.encoder.layers:
        states.append(layer(states[-1]))
    return states, next_token_loss(model.head(states[-1]), ids)


class Basic(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, 1, 1)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Basic(6, 6, 1), Basic(6, 6, 1), Basic(6, 6, 1))
        self.layer2 = nn.Sequential(Basic(6, 10, 2), Basic(10, 10, 1))
        self.fc = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


def resnet() -> nn.Module:
    torch.manual_seed(6)
    return ResNet()


def resnet_states(model: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    h = F.relu(model.conv1(x))
    states = [h]
    for block in [*model.layer1, *model.layer2]:
        h = block(h)
        states.append(h)
        h = h.clone()  # the next block's in-place operations must not touch what autograd.grad is asked for
    return states, model.fc(h.mean((2, 3))).square().mean()


def train_watched(
    model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor], batches: Sequence[Tensor], **options: object
) -> Record:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, every=1, **options) as scope:
        for batch in batches:
            (loss_of(model, batch) / len(batches)).backward()
        optimizer.step()
        (record,) = scope.records
    return record


def oracle(
    model: nn.Module, states_of: STATES, batches: Sequence[Tensor]
) -> tuple[np.ndarray, np.ndarray, list[list[Tensor]]]:
    """grad_norm and act_rms per point over the whole step, and the states [micro-batch][point]."""
    gradients, seen = [], []
    for batch in batches:
        states, loss = states_of(model, batch)
        gradients.append(torch.autograd.grad(loss / len(batches), states, retain_graph=True))
        seen.append([s.detach() for s in states])
    grad_norm = [math.sqrt(sum(float(g[i].double().square().sum()) for g in gradients)) for i in range(len(seen[0]))]
    act_rms = [
        torch.cat([s[i].flatten() for s in seen]).double().square().mean().sqrt().item() for i in range(len(seen[0]))
    ]
    return np.array(grad_norm), np.array(act_rms), seen


IDS = [torch.randint(0, 40, (b, 5), generator=torch.Generator().manual_seed(b)) for b in (3, 2)]
IMAGES = [torch.randn(b, 3, 8, 6, generator=torch.Generator().manual_seed(b)) for b in (3, 2)]
MODELS = {
    "gpt2": (gpt2, gpt2_states, lambda m, ids: next_token_loss(m(input_ids=ids).logits, ids), IDS),
    "llama": (llama, llama_states, lambda m, ids: next_token_loss(m(input_ids=ids).logits, ids), IDS),
    "encoder": (encoder, encoder_states, lambda m, ids: next_token_loss(m(ids), ids), IDS),
    "resnet": (resnet, resnet_states, lambda m, x: m(x).square().mean(), IMAGES),
}


@pytest.mark.parametrize("name", MODELS)
def test_flow_metrics_equal_autograd(name: str) -> None:
    build, states_of, loss_of, batches = MODELS[name]
    model = build()
    grad_norm, act_rms, seen = oracle(copy.deepcopy(model), states_of, batches)
    record = train_watched(model, loss_of, batches)
    elements = np.array([sum(s[i].numel() for s in seen) for i in range(len(grad_norm))])
    np.testing.assert_allclose(record["grad_norm"], grad_norm, rtol=1e-5)
    np.testing.assert_allclose(record["grad_rms"], grad_norm / np.sqrt(elements), rtol=1e-5)
    np.testing.assert_allclose(record["gradient_product"], grad_norm / grad_norm[-1], rtol=1e-5)
    np.testing.assert_allclose(record["gain"], grad_norm[:-1] / grad_norm[1:], rtol=1e-5)
    np.testing.assert_allclose(record["act_rms"], act_rms, rtol=1e-5)
    assert record["backward_calls"].tolist() == [2.0] * len(grad_norm)
    assert len(record.labels("gradient_product")) == len(grad_norm)
    assert record.labels("gain") == record.labels("gradient_product")[1:]


@pytest.mark.parametrize("name", ["gpt2", "llama", "encoder"])
def test_depth_metrics_equal_naive_loops(name: str) -> None:
    build, states_of, loss_of, batches = MODELS[name]
    model = build()
    _, _, seen = oracle(copy.deepcopy(model), states_of, batches)
    record = train_watched(model, loss_of, batches)
    cosine = torch.nn.CosineSimilarity(-1, eps=1e-30)
    for block in range(len(seen[0]) - 1):
        pairs = torch.cat([cosine(s[block].double(), s[block + 1].double()).flatten() for s in seen]).numpy()
        for metric, q in (("cosine", 0.5), ("cosine_p05", 0.05), ("cosine_p95", 0.95)):
            truth = 1 - np.quantile(pairs, q)
            assert abs((1 - record[metric][block]) - truth) <= 0.1 * truth + 1e-6, (metric, block)
        change = math.sqrt(sum(float((s[block + 1] - s[block]).double().square().sum()) for s in seen))
        carry = math.sqrt(sum(float(s[block].double().square().sum()) for s in seen))
        assert record["branch_share"][block] == pytest.approx(change / (change + carry), rel=1e-5)
    for point in range(len(seen[0])):
        to_input = torch.cat([cosine(s[0].double(), s[point].double()).flatten() for s in seen]).mean().item()
        assert record["cosine_to_input"][point] == pytest.approx(to_input, abs=1e-5)
        assert record["token_cosine"][point] == pytest.approx(naive_token_cosine([s[point] for s in seen]), abs=1e-5)


def naive_token_cosine(states: list[Tensor]) -> float:
    means = []
    for sequence in (row for state in states for row in state.double()):
        pairs = [
            F.cosine_similarity(sequence[i], sequence[j], dim=0).item()
            for i in range(len(sequence))
            for j in range(len(sequence))
            if i != j
        ]
        means.append(sum(pairs) / len(pairs))
    return sum(means) / len(means)


def test_convnet_cosines_run_over_the_channel_axis() -> None:
    build, states_of, loss_of, batches = MODELS["resnet"]
    model = build()
    _, _, seen = oracle(copy.deepcopy(model), states_of, batches)
    record = train_watched(model, loss_of, batches)
    pairs = torch.cat([F.cosine_similarity(s[1].double(), s[2].double(), dim=1, eps=1e-30).flatten() for s in seen])
    truth = 1 - np.quantile(pairs[pairs != 0].numpy(), 0.5)
    assert abs(1 - record["cosine", "layer1"][1] - truth) <= 0.1 * truth + 1e-6
    assert record.flow_names == ("network", "layer1", "layer2")
    # the second stage's first block changes the width
    assert math.isnan(record["cosine", "layer2"][0])
    assert not math.isnan(record["cosine", "layer2"][1])
    np.testing.assert_allclose(
        record["gradient_product", "network"][:4] / record["gradient_product", "network"][3],
        record["gradient_product", "layer1"],
    )


def test_slow_metrics_equal_naive() -> None:
    build, states_of, loss_of, batches = MODELS["gpt2"]
    model = build()
    _, _, seen = oracle(copy.deepcopy(model), states_of, batches)
    record = train_watched(model, loss_of, batches[:1])
    states = [s.double() for s in seen[0]]
    for point, state in enumerate(states):
        sigma = torch.linalg.svdvals(state[0])
        p = sigma / sigma.sum()
        assert record["effective_rank"][point] == pytest.approx(math.exp(-float((p * p.log()).sum())), rel=1e-4)
    for i, a in enumerate(states):
        for j, b in enumerate(states):
            truth = F.cosine_similarity(a.flatten(0, 1), b.flatten(0, 1), dim=-1).mean().item()
            assert record["cosine_matrix"][i, j] == pytest.approx(truth, abs=1e-5)


def test_parameters_equal_naive() -> None:
    model = gpt2()
    truth = copy.deepcopy(model)
    for ids in IDS:
        (next_token_loss(truth(input_ids=ids).logits, ids) / 2).backward()
    before = {n: p.detach().clone() for n, p in truth.named_parameters()}
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in truth.named_parameters()}
    torch.optim.AdamW(truth.parameters(), lr=1e-2).step()
    after = dict(truth.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with flowscope.watch(model, optimizer, every=1) as scope:
        for ids in IDS:
            (next_token_loss(model(input_ids=ids).logits, ids) / 2).backward()
        optimizer.step()
        (record,) = scope.records
    names = record.labels("param_norm")
    assert names == list(before)  # the tied head appears once
    for i, name in enumerate(names):
        gradient = gradients[name]
        if gradient is None:
            assert math.isnan(record["param_grad_norm"][i])
            assert record["param_trainable"][i] == 0
            continue
        assert record["param_norm"][i] == pytest.approx(before[name].norm().item(), rel=1e-5)
        assert record["param_grad_norm"][i] == pytest.approx(gradient.double().norm().item(), rel=1e-5)
        norm = before[name].norm().item()
        if norm == 0:
            assert math.isnan(record["update_ratio"][i])
        else:
            change = (after[name].detach() - before[name]).norm().item()
            assert record["update_ratio"][i] == pytest.approx(change / norm, rel=1e-4)


def test_update_ratio_of_a_large_tensor_is_its_sample() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(150, 130), nn.Tanh(), nn.Linear(130, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, every=1) as scope:
        before = model[0].weight.detach().clone()
        model(torch.randn(11, 150)).square().mean().backward()
        optimizer.step()
        (record,) = scope.records
    change = model[0].weight.detach() - before
    ratio = record["update_ratio"][record.labels("update_ratio").index("0.weight")]
    # 2,048 of 19,500 entries: 128 runs of 16, one each 152 entries
    looked_at = [152 * run + k for run in range(128) for k in range(16)]
    sampled = change.flatten()[looked_at].norm() / before.flatten()[looked_at].norm()
    assert ratio == pytest.approx(sampled.item(), rel=1e-4)
    assert ratio == pytest.approx((change.norm() / before.norm()).item(), rel=0.1)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_fused_recurrent_flow_through_time(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(4, 6, batch_first=True)
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    model = Net()
    x = torch.randn(3, 7, 4)
    cell = {nn.RNN: nn.RNNCell, nn.GRU: nn.GRUCell, nn.LSTM: nn.LSTMCell}[kind](4, 6)
    for name, parameter in cell.named_parameters():
        parameter.data.copy_(getattr(model.rnn, f"{name}_l0"))
    states, state = [], None
    for t in range(7):
        state = cell(x[:, t], state)
        states.append(state[0] if isinstance(state, tuple) else state)
    loss = F.linear(states[-1], model.head.weight, model.head.bias).square().mean()
    truth = np.array([g.norm().item() for g in torch.autograd.grad(loss, states)])
    record = train_watched(model, lambda m, batch: m(batch).square().mean(), [x])
    np.testing.assert_allclose(record["grad_norm", "rnn"], truth, rtol=1e-5)
    np.testing.assert_allclose(record["gradient_product", "rnn"], truth / truth[-1], rtol=1e-5)
    rms = np.array([s.detach().square().mean().sqrt().item() for s in states])
    np.testing.assert_allclose(record["act_rms", "rnn"], rms, rtol=1e-5)


def test_dead_fraction_and_saturation_by_hand() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 7), nn.Sigmoid(), nn.Linear(7, 2)
    )
    with torch.no_grad():
        model[0].bias[:3] = -100.0  # three of eight units never switch on
        model[2].bias[:2] = 50.0  # two of six saturate at every position
        model[4].bias[0] = -50.0  # one of seven
    record = train_watched(model, lambda m, x: m(x).square().mean(), [torch.randn(4, 5), torch.randn(3, 5)])
    hidden = dict(zip(record.labels("dead_fraction"), record["dead_fraction"], strict=True))
    assert hidden == {"1": 3 / 8}
    saturated = dict(zip(record.labels("saturation"), record["saturation"], strict=True))
    assert saturated["3"] == pytest.approx(2 / 6, abs=0.1)
    assert saturated["5"] == pytest.approx(1 / 7, abs=1e-6)


def test_a_functional_rectifier_is_seen_at_the_next_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fc3 = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc3(F.gelu(self.fc2(F.relu(self.fc1(x)))))

    torch.manual_seed(2)
    model = Net()
    with torch.no_grad():
        model.fc1.bias[:2] = -100.0
    x = torch.randn(9, 5)
    off = (F.relu(model.fc1(x)) == 0).all(0).float().mean().item()
    record = train_watched(model, lambda m, batch: m(batch).square().mean(), [x])
    # fc3's input comes from a GELU call, which never gives exact zeros
    assert record.labels("dead_fraction") == ["fc2:input"]
    assert record["dead_fraction"].tolist() == [off]
    assert off >= 2 / 8


def test_squares_of_tiny_gradients_do_not_vanish() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    x = torch.randn(3, 5)
    plain = copy.deepcopy(model)
    h = plain[1](plain[0](x))
    (truth,) = torch.autograd.grad(plain[4](plain[3](plain[2](h))).square().mean() * 1e-22, [h])
    record = train_watched(model, lambda m, batch: m(batch).square().mean() * 1e-22, [x])
    assert 0 < record["grad_norm"][0] < 1e-21
    assert record["grad_norm"][0] == pytest.approx(truth.double().norm().item(), rel=1e-5)
    assert record["param_grad_norm"][0] > 0


def test_norms_of_large_tensors_keep_their_digits() -> None:
    # an fp32 norm of two million entries is off by 3e-5
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1500, 1400), nn.Linear(1400, 3))
    truth = model[0].weight.detach().double().norm().item()
    x = torch.randn(7, 1500)
    record = train_watched(model, lambda m, batch: m(batch).square().mean(), [x])
    assert record["param_norm"][0] == pytest.approx(truth, rel=1e-7)


def test_host_and_device_statistics_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    states = [torch.randn(3, 5, 8) * 10.0**k for k in range(-3, 4)]
    states.append(states[0] + 1e-6 * torch.randn(3, 5, 8))
    seen = [statistics.sample_positions(x, -1, 256, sequence=True) for x in states]
    pairs = [(None, seen[0], seen[0]), *((a, b, seen[0]) for a in seen for b in seen)]
    host = [np.asarray(statistics.depth_statistics(*pair)) for pair in pairs]
    heads = [statistics.head(x, 2.0) for x in states]
    monkeypatch.setattr(statistics, "is_host", lambda x: False)
    for pair, row in zip(pairs, host, strict=True):
        np.testing.assert_allclose(np.asarray(statistics.depth_statistics(*pair)), row, rtol=1e-4, atol=1e-4)
    for x, numbers in zip(states, heads, strict=True):
        np.testing.assert_allclose(statistics.head(x, 2.0), numbers, rtol=1e-6)


def test_non_finite_entries_are_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    x = torch.randn(3, 5)
    x[1, 2] = math.nan
    record = train_watched(model, lambda m, batch: m(batch).square().mean(), [x])
    assert record["nonfinite"].tolist() == [6.0, 7.0, 2.0]  # one sample of three
    assert record["canary"].tolist()[:2] == [1.0, 2.0]
    assert np.isinf(record["param_grad_norm"]).all()


def test_update_ratio_of_weights_in_other_layouts() -> None:
    """Transposed, channels-last, sliced and half-precision weights: the change is seen where they really lie."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(90, 70).t())
            self.sliced = nn.Parameter(torch.randn(12, 9)[::2, ::3])
            self.low = nn.Parameter(torch.randn(80, 75).to(torch.bfloat16))
            self.image = nn.Parameter(torch.randn(6, 5, 3, 3).contiguous(memory_format=torch.channels_last))

        def forward(self) -> Tensor:
            return sum(((p.float() - 1) ** 2).sum() for p in self.parameters()) / 100

    torch.manual_seed(0)
    model = Odd()
    before = {name: p.detach().clone().float() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        model().backward()
        optimizer.step()
        (record,) = scope.records
    for name, ratio in zip(record.labels("update_ratio"), record["update_ratio"], strict=True):
        change = dict(model.named_parameters())[name].detach().float() - before[name]
        exact = name in ("sliced", "image")
        assert ratio == pytest.approx((change.norm() / before[name].norm()).item(), rel=1e-4 if exact else 0.1), name
