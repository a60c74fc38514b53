"""The standard library as text, byte by byte: what the students read. Axis letters: N windows, T positions."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

CLS, SEP, PAD, MASK = 256, 257, 258, 259
VOCABULARY, LENGTH, BLOCK = 260, 32, 512
PACKAGES = ("asyncio", "encodings", "html", "pydoc_data")
"""Code, tables, names and prose: the classes of the encoder's task, and what the decoder is tuned on; pretraining reads
the top-level modules."""


@cache
def modules(package: str = "") -> Tensor:
    """Return the bytes of a package's modules in the order of their names, joined; of the top level without one."""
    folder = Path(os.__file__).parent / package
    return torch.frombuffer(
        bytearray(b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))), dtype=torch.uint8
    )


def windows(text: Tensor, count: int, generator: torch.Generator, held_out: bool) -> Tensor:
    """Return (N, T) windows at random places: of each tenth block of the text where held out, else of the others."""
    blocks = torch.arange(len(text) // BLOCK)
    blocks = blocks[(blocks % 10 == 9) == held_out]
    starts = blocks[torch.randint(len(blocks), (count,), generator=generator)] * BLOCK
    starts = starts + torch.randint(BLOCK - LENGTH, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(LENGTH)].long()


def sequences(count: int, generator: torch.Generator, held_out: bool = False, package: str = "") -> dict[str, Tensor]:
    """Return a batch for the decoder: `input_ids`, `attention_mask` and `labels`, each (N, T)."""
    texts = [modules(package)] if package == "" else [modules(name) for name in PACKAGES]
    ids = torch.cat([windows(text, -(-count // len(texts)), generator, held_out) for text in texts])[:count]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def sentences(ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return windows as an encoder reads them: a start, an end, and padding after lengths of half to full."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (len(ids), 1), generator=generator)
    places = torch.arange(LENGTH)
    ids = ids.clone()
    ids[:, 0] = CLS
    ids = ids.masked_fill(places == lengths - 1, SEP).masked_fill(places >= lengths, PAD)
    return {"input_ids": ids, "attention_mask": (places < lengths).long()}


def classified(count: int, generator: torch.Generator, held_out: bool = False) -> dict[str, Tensor]:
    """Return a batch for the encoder's task: which package the window is from; `labels` (N,)."""
    labels = torch.randint(len(PACKAGES), (count,), generator=generator)
    drawn = [windows(modules(name), count, generator, held_out) for name in PACKAGES]
    ids = torch.stack(drawn)[labels, torch.arange(count)]
    return {**sentences(ids, generator), "labels": labels}


def masked(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a batch for the encoder's pretraining: 15 % of the bytes are masked, the others' labels are ignored."""
    batch = sentences(windows(modules(), count, generator, False), generator)
    chosen = (torch.rand(count, LENGTH, generator=generator) < 0.15) & (batch["input_ids"] < CLS)
    batch["labels"] = batch["input_ids"].masked_fill(~chosen, -100)
    batch["input_ids"] = batch["input_ids"].masked_fill(chosen, MASK)
    return batch
