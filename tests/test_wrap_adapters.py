"""The recipe for PEFT: wrap, then `get_peft_model` with the connections named; adapters carry them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import flowscope

peft = pytest.importorskip("peft")

IDS = torch.arange(16).reshape(2, 8) % 50


def llama() -> Any:
    """A tiny Llama."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
        )
    )


@pytest.mark.parametrize("mode", ["keel", "dhc", "mhc", "peri-ln"])
@pytest.mark.filterwarnings("ignore")
def test_adapters_carry_trained_connections(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama()
    base = copy.deepcopy(model.state_dict())
    flowscope.wrap(model, mode, example_inputs={"input_ids": IDS})
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["connection"], r=2)
    adapted = peft.get_peft_model(model, settings)
    trained = {n: p.detach().clone() for n, p in adapted.named_parameters() if p.requires_grad and "connection" in n}
    assert trained
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 0.5)
    for _ in range(3):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert any(not torch.equal(p, trained[n]) for n, p in adapted.named_parameters() if n in trained)
    adapted.save_pretrained(tmp_path)
    fresh = llama()
    fresh.load_state_dict(base)
    flowscope.wrap(fresh, mode, example_inputs={"input_ids": IDS})
    before = fresh.eval()(input_ids=IDS).logits
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path)
    expected = adapted.eval()(input_ids=IDS).logits
    torch.testing.assert_close(loaded.eval()(input_ids=IDS).logits, expected)
    assert not torch.allclose(before, expected)
