"""The small BERT and GPT-2 that are mutated: pretrained here, once, on the standard library, then tuned to a task.

The encoder's task is to tell the package a window is from, judged by accuracy, the decoder's to predict the next byte
of packages it has not read, judged by its loss: the kinds of task and the measures of the operators' own package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rivals import text

FOLDER = Path("runs/rivals")
STEPS, BATCH, RATE = 60, 16, 1e-3
PRETRAINING = 800
WIDTH, DEPTH = 64, 3
SHAPE = {"vocab_size": text.VOCABULARY, "attn_implementation": "eager"}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Student:
    """An architecture with its two tasks.

    Attributes:
        name: "gpt2" or "bert".
        scope: what the operators' package calls it, "decoder" or "encoder".
        build: the model, from whether it is pretrained or tuned.
        pretraining, tuning: a batch, from its size and a generator.
        held_out: a batch for the measure.
        by_accuracy: whether the measure is accuracy; else minus the loss.
    """

    name: str
    scope: str
    build: Callable[[bool], nn.Module]
    pretraining: Callable[[int, torch.Generator], Batch]
    tuning: Callable[[int, torch.Generator], Batch]
    held_out: Callable[[int, torch.Generator], Batch]
    by_accuracy: bool


def decoder(pretraining: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": DEPTH, "n_head": 4, "n_inner": 2 * WIDTH, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**SHAPE, **sizes, bos_token_id=text.CLS, eos_token_id=text.SEP))


def encoder(pretraining: bool) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
    places = {"max_position_embeddings": 64, "pad_token_id": text.PAD, "num_labels": len(text.PACKAGES)}
    config = BertConfig(**SHAPE, **sizes, **places)
    return (BertForMaskedLM if pretraining else BertForSequenceClassification)(config)


STUDENTS = {
    "gpt2": Student(
        "gpt2",
        "decoder",
        decoder,
        text.sequences,
        lambda count, g: text.sequences(count, g, package="tuning"),
        lambda count, g: text.sequences(count, g, held_out=True, package="tuning"),
        by_accuracy=False,
    ),
    "bert": Student(
        "bert",
        "encoder",
        encoder,
        text.masked,
        text.classified,
        lambda count, g: text.classified(count, g, held_out=True),
        by_accuracy=True,
    ),
}


def batches(make: Callable[[int, torch.Generator], Batch], seed: int) -> Iterator[Batch]:
    """Yield batches for ever, each drawn from one generator."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield make(BATCH, generator)


def pretrained(student: Student, root: Path = FOLDER, steps: int = PRETRAINING) -> dict[str, Tensor]:
    """Return the weights after pretraining; made once and kept under `root`."""
    path = root / f"{student.name}.pt"
    if path.exists():
        return torch.load(path, weights_only=True)
    torch.manual_seed(0)
    model = student.build(True)
    optimizer = torch.optim.AdamW(model.parameters(), 3 * RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    stream = batches(student.pretraining, 0)
    for _ in range(steps):
        loss = model(**next(stream)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.state_dict()


def beginner(student: Student, seed: int, root: Path = FOLDER) -> nn.Module:
    """Return the pretrained student with a head drawn by the seed, about to be tuned."""
    taught = pretrained(student, root)  # before the seed: the run that teaches it draws random numbers
    torch.manual_seed(seed)
    model = student.build(False)
    known = {key: value for key, value in taught.items() if key in model.state_dict()}
    model.load_state_dict(known, strict=False)
    return model


def measures(student: Student, model: nn.Module, count: int = 512) -> dict[str, float]:
    """Return accuracy and loss on held-out windows; neither the modes nor the random state are left changed."""
    batch = student.held_out(count, torch.Generator().manual_seed(7))
    training = model.training
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(7)
        answer = model(**batch)
    model.train(training)
    logits, labels = answer.logits, batch["labels"]
    if not student.by_accuracy:
        logits, labels = logits[:, :-1], labels[:, 1:]
    if not math.isfinite(float(answer.loss)) or not bool(torch.isfinite(logits).all()):
        return {"accuracy": math.nan, "loss": math.nan}
    return {"accuracy": float((logits.argmax(-1) == labels).double().mean()), "loss": float(answer.loss)}


def quality(student: Student, seen: dict[str, Any]) -> float:
    """Return the measure that decides harm, larger is better."""
    return seen["accuracy"] if student.by_accuracy else -seen["loss"]
