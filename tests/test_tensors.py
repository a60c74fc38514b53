"""first_tensor and replace_first over what modules really take and return."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import NamedTuple

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from flowscope.jacobian.state_tensors import first_tensor, replace_first
from flowscope.model.nested import map_tensors, nested_tensors

IDS = torch.arange(15).view(3, 5)
VECTOR = torch.zeros(5)
X = torch.zeros(3, 5, 8)
Y = torch.ones(3, 4, 5, 5)
NEW = torch.full((3, 5, 8), 2.0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    length: int
    hidden: torch.Tensor


class Named(NamedTuple):
    mask: torch.Tensor
    hidden: torch.Tensor


def test_the_first_floating_tensor_with_two_axes():
    assert first_tensor(X) is X
    assert first_tensor(((IDS, VECTOR, None, X), {"other": Y})) is X
    assert first_tensor(((), {"mask": Y, "hidden": X})) is Y
    assert first_tensor([{"a": [IDS]}, Named(IDS, X)]) is X
    assert first_tensor(BaseModelOutputWithPast(last_hidden_state=X, past_key_values=DynamicCache())) is X
    assert first_tensor(Frozen(5, X)) is X
    for nothing in (None, 3.0, "x", IDS, VECTOR, DynamicCache(), Frozen):
        assert first_tensor(nothing) is None


def test_the_shape_of_the_input_is_preferred():
    assert first_tensor((Y, X), like=NEW) is X
    assert first_tensor((Y, X), like=torch.zeros(2, 2)) is Y
    assert first_tensor((torch.zeros(3, 5, 8, dtype=torch.long), Y), like=NEW) is Y


def test_replace_first_rebuilds_and_leaves_the_original_alone():
    value = ((IDS, X), {"memory": X, "bias": Y})
    got = replace_first(value, NEW)
    assert got[0][0] is IDS
    assert got[0][1] is NEW
    assert got[1]["memory"] is NEW  # the same tensor object is the same hidden state
    assert got[1]["bias"] is Y
    assert value[0][1] is X
    assert value[1]["memory"] is X
    assert replace_first((Y, [X]), NEW, like=X)[1][0] is NEW
    nothing = (IDS, None)
    assert replace_first(nothing, NEW) is nothing


def test_replace_first_keeps_types():
    named = replace_first(Named(IDS, X), NEW)
    assert type(named) is Named
    assert named.hidden is NEW
    frozen = Frozen(5, X)
    assert replace_first(frozen, NEW) == Frozen(5, NEW)
    assert frozen.hidden is X
    cache = DynamicCache()
    output = BaseModelOutputWithPast(last_hidden_state=X, past_key_values=cache)
    got = replace_first(output, NEW)
    assert type(got) is BaseModelOutputWithPast
    assert got.last_hidden_state is NEW
    assert got[0] is NEW
    assert got["past_key_values"] is cache
    assert output.last_hidden_state is X


def test_tensors_come_in_order_from_whatever_holds_them():
    a, b, c, d, e = (torch.full((2,), float(i)) for i in range(5))
    value = ([a, (b, None, 3.0)], {"x": c, "text": "t"}, UserDict(y=Named(IDS, d)), Frozen(5, e), Frozen)
    assert [id(x) for x in nested_tensors(value)] == [id(x) for x in (a, b, c, IDS, d, e)]
    assert list(nested_tensors(a)) == [a]
    changed = map_tensors(value, lambda x: x + 1 if x is b else x)
    assert changed[0][1][0].tolist() == [2.0, 2.0]
    assert all(part is held for part, held in zip(changed[1:], value[1:], strict=True))
