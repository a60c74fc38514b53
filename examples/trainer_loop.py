"""flowscope in the Trainer of transformers: one callback.

A small GPT-2, eight layers, on the byte-level text of byte_lm.py; about ten seconds. With `mode` its residual adds are
replaced before the Trainer makes the optimizer. The training ends itself where it cannot recover.

    python examples/trainer_loop.py
    python examples/trainer_loop.py keel
"""

from __future__ import annotations

import sys

import torch
from byte_lm import VOCABULARY, batches, load_text
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from flowscope.integrations.huggingface import FlowscopeCallback


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **shape))


def main(mode: str | None = None, steps: int = 60, log_dir: str = "runs/trainer_loop") -> FlowscopeCallback:
    watcher = FlowscopeCallback(mode=mode, log_dir=log_dir, on_alert=print, stop_on=["vanishing_gradient", "error"])
    arguments = TrainingArguments(
        output_dir=f"{log_dir}/trainer",
        max_steps=steps,
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        logging_steps=20,
        disable_tqdm=True,
    )
    data = batches(load_text(), batch=1)
    rows = [{"input_ids": tokens[0], "labels": tokens[0]} for tokens, _ in (next(data) for _ in range(16 * steps))]
    Trainer(model=build(), args=arguments, train_dataset=rows, callbacks=[watcher]).train()
    print(watcher.scope.summary())
    return watcher


if __name__ == "__main__":
    main(*sys.argv[1:2])
