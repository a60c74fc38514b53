"""Parameter groups, warm-up, clipping."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import ConnectionContext
from flowscope.merging.modes import make_connection
from flowscope.merging.training import clip_grad_norm_, param_groups, warmup_steps

D = 8


class Model(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, D)
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 11)
        self.head.weight = self.embedding.weight  # tied
        self.connection = make_connection(mode, ConnectionContext(D, 2))
        self.frozen = nn.Linear(D, D).requires_grad_(False)


@pytest.mark.parametrize(
    ("mode", "decayed", "kept"),
    [
        ("keel", 2 * D, 2),
        ("dhc", 2 * 6 * D, 2 * (24 + 2)),
        ("mhc", 2 * 24 * 4 * D, 2 * (24 + 3)),
        ("shc", 0, 48),
        ("residual", 0, 0),
    ],
)
def test_every_trainable_parameter_is_in_one_group(mode, decayed, kept):
    model = Model(mode)
    groups = param_groups(model, 1e-3, weight_decay=0.2, connection_lr_scale=1.5, base_lr_scale=0.8)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted({id(p) for p in model.parameters() if p.requires_grad})
    by_name = {group["name"]: group for group in groups}
    sizes = {name: sum(p.numel() for p in group["params"]) for name, group in by_name.items()}
    expected = {"base": 11 * D, "base_no_decay": 2 * D + 11, "connection": decayed, "connection_no_decay": kept}
    assert sizes == {name: size for name, size in expected.items() if size}
    for name, group in by_name.items():
        assert group["lr"] == pytest.approx(1.5e-3 if name.startswith("connection") else 0.8e-3)
        assert group["weight_decay"] == (0.0 if name.endswith("no_decay") else 0.2)
    torch.optim.AdamW(groups).step()


def test_bad_rates_are_refused():
    with pytest.raises(FlowscopeError, match="connection_lr_scale"):
        param_groups(Model("keel"), 1e-3, connection_lr_scale=-1.0)
    with pytest.raises(FlowscopeError, match="requires_grad"):
        param_groups(Model("residual").requires_grad_(False), 1e-3)


def test_warmup_is_30_to_50_percent_longer():
    assert [warmup_steps(1000, m) for m in ("residual", "shc", "keel", "hyper", "mhc")] == [
        1000,
        1300,
        1400,
        1500,
        1500,
    ]
    assert warmup_steps(0, "dhc") == 0
    assert warmup_steps(3, "keel") == 5  # 4.2, rounded up
    with pytest.raises(FlowscopeError, match="residual, keel"):
        warmup_steps(10, "kel")


def norm(tensors):
    return sum(t.double().square().sum().item() for t in tensors) ** 0.5


def with_gradients(model, generators, rest):
    ids = {id(p) for _, p in model.connection.generator_parameters()}
    dynamic = [p for p in model.parameters() if p.requires_grad and id(p) in ids]
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
    for parameters, size in ((dynamic, generators), (others, rest)):
        for p in parameters:
            p.grad = torch.randn_like(p)
        scale = size / norm(p.grad for p in parameters)
        for p in parameters:
            p.grad *= scale
    return dynamic, others


@pytest.mark.parametrize(
    ("generators", "rest", "dynamic_after", "rest_after"),
    [
        (3.0, 4.0, 0.6, 0.8),  # 5 in all: everything by 5, the generators are then under .7
        (4.0, 3.0, 0.7, 0.6),  # the generators' .8 is clipped further
        (0.9, 0.1, 0.7, 0.1),  # the total is fine, the generators are not
        (0.3, 0.4, 0.3, 0.4),  # nothing to do
    ],
)
def test_generators_are_clipped_more_strictly(generators, rest, dynamic_after, rest_after):
    model = Model("dhc")
    dynamic, others = with_gradients(model, generators, rest)
    total = clip_grad_norm_(model, 1.0)
    assert total.item() == pytest.approx((generators**2 + rest**2) ** 0.5, rel=1e-5)
    assert norm(p.grad for p in dynamic) == pytest.approx(dynamic_after, rel=1e-4)
    assert norm(p.grad for p in others) == pytest.approx(rest_after, rel=1e-4)


def test_without_connections_it_is_torchs_clipping():
    ours, theirs = nn.Linear(D, 3), nn.Linear(D, 3)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        p.grad = torch.randn_like(p) * 9
        q.grad = p.grad.clone()
    torch.testing.assert_close(clip_grad_norm_(ours, 0.5), nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    with pytest.raises(FlowscopeError, match="max_norm=0"):
        clip_grad_norm_(ours, 0)
