"""Eager, compiled, checkpointed, and both at once give the same loss and gradients; bf16 and autocast run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import wrap_models as models
from torch import Tensor, nn

from flowscope.merging.weaving import WovenBlock
from flowscope.merging.wrapping import connections, wrap


def wrapped(block: Any, mode: str) -> tuple[Any, Tensor]:
    """A wrapped stack whose connections have left their first values, and an input."""
    torch.manual_seed(0)
    model, x = models.Checkpointed(block), models.hidden_states()
    wrap(model, mode, example_inputs=x)
    with torch.no_grad():
        for _, connection in connections(model):
            for parameter in connection.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, x


def run(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    """Loss and gradients of every parameter."""
    model.zero_grad()
    loss = call(x).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("mode", ["keel", "dhc"])
@pytest.mark.parametrize("block", [models.PreNormBlock, models.PostNormBlock])
def test_checkpointing_and_compiling_change_nothing(block: Any, mode: str, reentrant: bool | None) -> None:
    model, x = wrapped(block, mode)
    expected = run(model, model, x)
    model.reentrant = reentrant
    assert all(torch.equal(a, b) for a, b in zip(run(model, model, x), expected, strict=True))
    if reentrant:
        return  # torch compiles no reentrant checkpoint
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(model, compiled, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor_with_checkpoint() -> None:
    model, x = wrapped(models.PreNormBlock, "keel")
    expected = run(model, model, x)
    model.reentrant = False
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(run(model, compiled, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["keel", "dhc"])
def test_mode_fallback_compiles(mode: str) -> None:
    model, x = wrapped(models.FunctionalDropoutBlock, mode)
    model.eval()
    assert not any(m.flowscope_rule.taggable for m in model.modules() if isinstance(m, WovenBlock))
    expected = run(model, model, x)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(model, compiled, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["keel", "dhc", "mhc"])
def test_autocast(mode: str) -> None:
    model, x = wrapped(models.PreNormBlock, mode)
    expected = run(model, model, x)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(model, model, x)
    assert torch.isfinite(got[0])
    torch.testing.assert_close(got[0], expected[0], rtol=5e-2, atol=1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_transformers(reentrant: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, use_cache=False, **sizes)
    model, ids = transformers.LlamaForCausalLM(config).train(), torch.randint(3, 50, (3, 5))
    wrap(model, "dhc")

    def logits(ids: Tensor) -> Tensor:
        return model(input_ids=ids).logits

    expected = run(model, logits, ids)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert all(torch.equal(a, b) for a, b in zip(run(model, logits, ids), expected, strict=True))


def test_model_wrapped_by_structure_compiles_before_its_first_forward() -> None:
    torch.manual_seed(0)
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    expected = model(x)
    wrap(model, "dhc")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(model(x), expected)


def test_model_that_was_compiled_before() -> None:
    torch.manual_seed(0)
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = compiled(x)
    assert wrap(compiled, "dhc", example_inputs=x) is compiled
    torch.testing.assert_close(compiled(x), expected)
    compiled(x).square().sum().backward()
    assert all(any(p.grad is not None for p in c.parameters()) for _, c in connections(compiled))


@pytest.mark.parametrize("mode", ["keel", "shc", "dhc", "mhc", "mhc-lite", "kromhc", "block-attention-residuals"])
def test_export_with_a_dynamic_batch(mode: str) -> None:
    model = nn.Sequential(models.PreNormBlock(), models.PreNormBlock())
    x = models.hidden_states()
    wrap(model, mode, example_inputs=x)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes=({0: batch},), strict=False).module()
    other = torch.randn(7, *x.shape[1:])
    torch.testing.assert_close(exported(other), model(other))
