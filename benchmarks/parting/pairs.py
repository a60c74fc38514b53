"""The pairs, and what is to be said of each: step, phase, and the places that are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.parting.programs import Decoder, Knobs, Net


@dataclass(frozen=True)
class Pair:
    """A good run and another.

    Attributes:
        step, phase: where they part; None for a pair that is equal.
        places: module or parameter paths; any of them is right.
        kind: of the model.
        rounding: whether the good run gets a recorded size of rounding.
    """

    name: str
    good: Knobs
    bad: Knobs
    step: int | None = None
    phase: str | None = None
    places: tuple[str, ...] = ()
    kind: Callable[[Knobs], nn.Module] = Decoder
    rounding: bool = True


USUAL = Knobs()


def fault(name: str, step: int, phase: str, places: str, good: Knobs = USUAL, **bad: Any) -> Pair:
    """A pair that differs in one knob, or in the fault of that name."""
    kind = bad.pop("kind", Decoder)
    settings = bad or {"fault": name}
    return Pair(name, good, replace(good, **settings), step, phase, tuple(places.split()), kind)


CHECKPOINTED = Knobs(checkpointed="all")
PLAIN = Knobs(dropout=0.0)
BF16 = Knobs(dtype=torch.bfloat16, dropout=0.0)
FAULTS = (
    fault("checkpoint without random state", 0, "backward", "blocks.3", CHECKPOINTED),
    fault(
        "one checkpoint without random state",
        0,
        "backward",
        "blocks.2",
        replace(CHECKPOINTED, checkpointed="one", at=2),
        fault="checkpoint without random state",
    ),
    fault("another epsilon", 0, "forward", "blocks.2.norm1", Knobs(at=2)),
    fault("mask lost", 0, "forward", "blocks.1.attention"),
    fault("mask lost later", 3, "forward", "blocks.2.attention", Knobs(at=2, since=3), fault="mask lost"),
    fault("loss mask lost", 0, "loss", ""),
    fault("labels shifted", 2, "loss", "", Knobs(since=2)),
    fault("other attention kernel in bf16", 0, "forward", "blocks.0.attention", BF16, attention="explicit"),
    fault("residual order swapped", 0, "forward", "blocks.1"),
    fault(
        "compiled with a wrong kernel",
        0,
        "forward",
        "blocks.2",
        Knobs(at=2),
        fault="wrong kernel",
        compiled="aot_eager",
    ),
    fault(
        "compiled with a wrong backward",
        0,
        "backward",
        "blocks.1",
        Knobs(),
        fault="wrong backward",
        compiled="aot_eager",
    ),
    fault("wrong backward", 0, "backward", "blocks.1"),
    fault("optimizer's beta", 1, "update", "*", Knobs(), options={"betas": (0.9, 0.9)}),
    fault("optimizer's epsilon", 0, "update", "*", Knobs(), options={"eps": 1e-4}),
    fault("decay group", 0, "update", "*norm*.weight", Knobs(options={"weight_decay": 1.0}), undecayed=False),
    fault("dropout off", 0, "forward", "blocks.1.drop"),
    fault("data order", 3, "input", "", Knobs(since=3)),
    fault("another random state", 2, "input", "random*", Knobs(since=2)),
    fault("rate", 4, "update", "*", Knobs(since=4)),
    fault("not divided", 0, "backward", "*", Knobs(micro_batches=2)),
    fault("gradients not zeroed", 2, "backward", "*", Knobs(since=2)),
    fault("clipped", 1, "update", "*", Knobs(since=1)),
    fault("gradient lost", 2, "backward", "blocks.2.up.weight", Knobs(at=2, since=2)),
    fault("weight not in the optimizer", 0, "update", "blocks.1.up.weight"),
    fault("branch detached", 0, "backward", "blocks.1"),
    fault("branch scaled", 2, "forward", "blocks.3", Knobs(at=3, since=2)),
    fault("one weight initialised otherwise", 0, "setup", "blocks.1.up.weight"),
    fault(
        "batch norm in eval",
        3,
        "forward",
        "blocks.1.1",
        Knobs(optimizer="sgd", since=3),
        kind=Net,
        fault="batch norm in eval",
    ),
    fault("autocast", 1, "forward", "blocks.0.attention.qkv blocks.0", Knobs(since=1)),
    fault("FSDP, gradients summed", 0, "backward", "*", PLAIN, fault="gradients summed", ranks=2),
    fault("FSDP, parameter left out", 0, "backward", "blocks.1.up.weight", PLAIN, fault="parameter left out", ranks=2),
    fault("FSDP, no sampler", 0, "input", "", PLAIN, fault="no sampler", ranks=2),
)
"""A place "*" stands for any; one with stars for those it matches."""


def equal(name: str, good: Knobs, kind: Callable[[Knobs], nn.Module] = Decoder, **other: Any) -> Pair:
    """A pair that differs in nothing but the order of sums."""
    return Pair(name, good, replace(good, **other), kind=kind)


EQUAL = (
    *(equal(f"the same program, seed {seed}", Knobs(seed=seed)) for seed in range(6)),
    *(equal(f"the same convnet, seed {seed}", Knobs(seed=seed, optimizer="sgd"), Net) for seed in range(4)),
    *(equal(f"checkpoints, seed {seed}", Knobs(seed=seed), checkpointed="all") for seed in range(4)),
    *(equal(f"reentrant checkpoints, seed {seed}", Knobs(seed=seed), checkpointed="reentrant") for seed in range(4)),
    *(equal(f"two threads, seed {seed}", Knobs(seed=seed), threads=2) for seed in range(4)),
    *(equal(f"compiled by inductor, seed {seed}", replace(PLAIN, seed=seed), compiled="inductor") for seed in range(4)),
    *(equal(f"compiled by aot_eager, seed {seed}", Knobs(seed=seed), compiled="aot_eager") for seed in range(4)),
    *(equal(f"renamed blocks, seed {seed}", Knobs(seed=seed), prefix="layers") for seed in range(4)),
    *(equal(f"micro-batches, seed {seed}", replace(PLAIN, seed=seed), micro_batches=2) for seed in range(4)),
    *(equal(f"foreach off, seed {seed}", Knobs(seed=seed), options={"foreach": False}) for seed in range(3)),
    equal("bf16, seed 0", BF16),
    *(equal(f"bf16 in micro-batches, seed {seed}", replace(BF16, seed=seed), micro_batches=2) for seed in range(2)),
    *(equal(f"attention kernels, seed {seed}", replace(PLAIN, seed=seed), kernels=("MATH",)) for seed in range(4)),
    *(equal(f"FSDP on two ranks, seed {seed}", replace(PLAIN, seed=seed), ranks=2) for seed in range(2)),
)
