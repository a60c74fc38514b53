"""Wrap a transformers model and train it beside its original: the same loop, one line more.

A small Llama, eight layers, on the byte-level text of byte_lm.py. `dhc` keeps the output at the start, so both begin at
the same loss; what the connections have learned is printed at the end.

    python examples/wrap_transformers.py            about twenty seconds
    python examples/wrap_transformers.py mhc        another mode of flowscope.wrap
"""

from __future__ import annotations

import sys

import torch
from byte_lm import VOCABULARY, batches, load_text
from transformers import LlamaConfig, LlamaForCausalLM

import flowscope

STEPS = 40


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, steps: int) -> flowscope.Scope:
    """A plain loop; `param_groups` also serves a model without connections."""
    optimizer = torch.optim.AdamW(flowscope.param_groups(model, lr=1e-3), betas=(0.9, 0.95))
    data = batches(load_text())
    with flowscope.watch(model, optimizer, every=5) as scope:
        for _ in range(steps):
            tokens, _ = next(data)
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            flowscope.clip_grad_norm_(model, 1.0)
            optimizer.step()
            scope.step(loss=loss)
    return scope


def main(mode: str = "dhc", steps: int = STEPS) -> dict[str, flowscope.Scope]:
    model = flowscope.wrap(build(), mode=mode)
    print(f"{len(flowscope.find_sites(build()))} merge sites, wrapped with mode={mode!r}")
    scopes = {"original": train(build(), steps), mode: train(model, steps)}
    print(f"\n{'step':<6}" + "".join(f"{name:>12}" for name in scopes) + "     (loss)")
    for records in zip(*(scope.records for scope in scopes.values()), strict=True):
        print(f"{records[0].step:<6}" + "".join(f"{record.loss:>12.3f}" for record in records))
    print()
    for name, scope in scopes.items():
        product, alerts = scope.records[-1]["gradient_product"][0], [alert.kind for alert in scope.alerts]
        print(f"{name:<10} gradient product {product:.2f}, alerts: {', '.join(alerts) or 'none'}")
    record = scopes[mode].records[-1]
    for metric in ("mix_gain_backward", "mix_identity_distance", "stream_cosine", "gate_mean", "shortcut_product"):
        if metric in record.metrics:
            print(f"{metric:<22}" + " ".join(f"{value:.3f}" for value in record[metric]))
    return scopes


if __name__ == "__main__":
    main(*sys.argv[1:2])
