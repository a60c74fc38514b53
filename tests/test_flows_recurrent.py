"""LSTM and GRU beside highway gates: the gate that keeps the state, against the layer's own arithmetic step by step."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from flows_models import IN, OUT, inputs, record_of, square
from torch import Tensor, nn

H, T = 6, 9


class Reader(nn.Module):
    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(H * (2 if rnn.bidirectional else 1), OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def keeping(cell: str, rnn: Any, x: Tensor, suffix: str) -> Tensor:
    """[T, B, H] logits of the forget gate (rows H to 2H of an LSTM) or update gate (the same rows of a GRU)."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    w_ih, w_hh, b_ih, b_hh = (getattr(rnn, f"{name}_{suffix}") for name in names)
    one = (nn.LSTMCell if cell == "LSTM" else nn.GRUCell)(x.shape[-1], H)
    with torch.no_grad():
        for name, value in zip(names, (w_ih, w_hh, b_ih, b_hh), strict=True):
            getattr(one, name).copy_(value)
    state: Any = (torch.zeros(len(x), H), torch.zeros(len(x), H)) if cell == "LSTM" else torch.zeros(len(x), H)
    logits = []
    steps = range(T - 1, -1, -1) if suffix.endswith("reverse") else range(T)
    for t in steps:
        h = state[0] if cell == "LSTM" else state
        part = slice(H, 2 * H)
        logits.append(x[:, t] @ w_ih[part].T + b_ih[part] + h @ w_hh[part].T + b_hh[part])
        state = one(x[:, t], state)
    return torch.stack(logits).detach()


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_gate_that_keeps_the_state(cell: str, bidirectional: bool) -> None:
    torch.manual_seed(0)
    rnn = getattr(nn, cell)(IN, H, batch_first=True, bidirectional=bidirectional)
    with torch.no_grad():
        for name, value in rnn.named_parameters():
            if name.startswith("bias_ih"):
                value[H : 2 * H] += torch.linspace(0.5, 7.0, H)  # some units keep their state for good
    model = Reader(rnn)
    plain = copy.deepcopy(model)
    (x,) = inputs(1, tokens=(T,))
    record = record_of(model, [[x]], square)
    word = {"LSTM": "forget", "GRU": "update"}[cell]
    rows = {"rnn.l0": "l0", "rnn.l0_reverse": "l0_reverse"} if bidirectional else {"rnn": "l0"}
    for flow, suffix in rows.items():
        logits = keeping(cell, plain.rnn, x, suffix).double()
        t = logits.sigmoid()
        assert record.labels("gate_mean", flow) == [f"{flow}#{word}"]
        assert record["gate_mean", flow][0] == pytest.approx(t.mean().item(), rel=1e-5)
        assert record["gate_std", flow][0] == pytest.approx(t.std(unbiased=False).item(), rel=1e-4)
        assert record["gate_saturation", flow][0] == pytest.approx((logits.abs() > 5).double().mean().item())
        assert record["gate_saturation", flow][0] > 0
        assert len(record["grad_norm", flow]) == T


def test_a_plain_recurrent_layer_has_no_gate() -> None:
    torch.manual_seed(0)
    record = record_of(Reader(nn.RNN(IN, H, batch_first=True)), [inputs(1, tokens=(T,))], square)
    assert len(record["grad_norm", "rnn"]) == T
    assert not any(name.startswith("gate_") for name in record.metrics)


def test_layers_below_dropout_are_not_seen() -> None:
    torch.manual_seed(0)
    rnn = nn.LSTM(IN, H, num_layers=2, dropout=0.4, batch_first=True)
    record = record_of(Reader(rnn), [inputs(1, tokens=(T,))], square)
    assert np.isnan(record["gate_mean", "rnn.l0"]).all()
    assert 0.3 < record["gate_mean", "rnn.l1"][0] < 0.7
