"""How much of a difference is rounding: where none can be, what was measured, and what is assumed where nothing was.

Two runs of one program on one machine add up in one order: there every bit that differs counts. Where their set-ups say
that sums may come in another order (`excuses`), a difference counts only beyond the size of rounding. That is measured
by a run of the good program whose first hidden state was moved by one ulp (`WatchConfig.nudge`), or which was made with
other threads or compiled: what it differs in from the good run is rounding, step by step and place by place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowscope.parting.looks import Look, Phase, Sides, looks, reordered
from flowscope.records import Record, Run, RunHeader

FACTOR = 10.0
"""So many times the measured size counts: it is known from four projections, within a factor of three."""
ASSUMED = 300.0
"""Where nothing was measured: so many ulps in forward and backward at the first step that differs."""
ADAM = 0.02
"""And so much of an update: an entry whose gradient is rounding alone goes either way under Adam."""
GROWTH = 3.0
"""And so many times more with each step."""
OWN = 8.0
"""An update may differ by so many ulps of its own arithmetic and of the weights it is added to."""
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
REORDERS = {
    "device": "another device",
    "dtype": "another dtype",
    "autocast": "another autocast",
    "threads": "another number of threads",
    "deterministic": "other algorithms allowed",
    "matmul_precision": "another precision of matrix products",
    "attention_kernels": "other attention kernels allowed",
    "processes": "another number of processes",
    "sharded": "parameters sharded otherwise",
    "compiled": "compiled",
    "traced": "compiled",
    "wrapped": "blocks wrapped",
    "model": "another class of model",
}
"""Entries of the set-up whose change may change the order of sums."""
LIBRARIES = ("torch", "triton", "transformers", "flash_attn", "xformers", "accelerate")


def excuses(sides: Sides) -> list[str]:
    """Why the bits of two runs need not be equal, from their set-ups; [] where they must be."""
    a, b = (header.setup for header in sides.headers)
    found = [words for key, words in REORDERS.items() if (a.get(key) or None) != (b.get(key) or None)]
    versions = [setup.get("packages", {}) for setup in (a, b)]
    found += [f"another {name}" for name in LIBRARIES if versions[0].get(name) != versions[1].get(name)]
    if list(a.get("parameters", ())) != list(b.get("parameters", ())):
        found.append("other modules")
    if reordered(sides):
        found.append("the batch in other parts")
    if not _repeats(a) or not _repeats(b):
        found.append("sums that come in any order (a GPU without deterministic algorithms)")
    return list(dict.fromkeys(found))


def excuses_of(phase: Phase, sides: Sides) -> list[str]:
    """The same, with what concerns one phase alone."""
    found = excuses(sides)
    a, b = (header.setup for header in sides.headers)
    if phase in ("backward", "update") and (a.get("checkpointed") or None) != (b.get("checkpointed") or None):
        found.append("checkpoints")
    if phase == "update" and a.get("optimizers") != b.get("optimizers"):
        found.append("another optimizer, or other options of it")
    return found


def _repeats(setup: Mapping[str, object]) -> bool:
    """Whether a run made again has the same bits: on a GPU only where that was asked for."""
    return setup.get("device") == "cpu" or bool(setup.get("deterministic"))


@dataclass
class Rounding:
    """The size of rounding by step, phase and place.

    Attributes:
        measured: how many runs it comes from; 0: it is assumed.
        sizes: (step, phase) -> place -> size; of several runs the largest.
        epsilon: of the coarser dtype that either run computes in.
    """

    measured: int = 0
    sizes: dict[tuple[int, Phase], dict[str, float]] = field(default_factory=dict)
    epsilon: float = EPSILON["float32"]

    def limit(self, step: int, look: Look, *, since: int | None) -> float:
        """How large a difference may be.

        Args:
            step: of the records.
            look: at which place.
            since: the step at which bits first differed; None: all before this place was equal to the last bit.
        """
        own = 0.0
        if look.phase == "update":
            # weights are rounded after it, however well the size of the update itself is known
            own = OWN * self.epsilon * (1 + 1 / max(look.size, self.epsilon))
            if since is None:
                return own
        if (known := self._known(step, look.phase, look.where)) is not None:
            if look.phase == "update" and (gradient := self._known(step, "backward", look.where)) is not None:
                # entries of a gradient smaller than its rounding go either way where an optimizer divides by their
                # size: a share of them that is as large as the rounding, and so the root of it in the norm
                own = max(own, gradient**0.5)
            return max(own, known)
        assumed = ADAM if look.phase == "update" else ASSUMED * self.epsilon
        return max(own, min(0.5, float(assumed * GROWTH ** (step - (step if since is None else since)))))

    def _known(self, step: int, phase: Phase, where: str) -> float | None:
        """What was measured there and how far that may be off, None where nothing was."""
        known = self.sizes.get((step, phase), {})
        if not known:
            return None
        typical = float(np.median([*known.values()]))
        return FACTOR * max(known.get(where, typical), typical, self.epsilon / 2)


def measured(good: Run, others: Sequence[Run]) -> Rounding:
    """Return the size of rounding from runs that differ in nothing else."""
    rounding = Rounding(len(others))
    if good.header is None:
        return rounding
    for other in others:
        for record, moved in steps_of(good, other):
            sides = Sides((good.header, other.header or good.header), (record, moved))
            for look in looks(sides):
                if look.phase != "input" and np.isfinite(look.distance):
                    places = rounding.sizes.setdefault((record.step, look.phase), {})
                    places[look.where] = max(places.get(look.where, 0.0), look.distance)
    rounding.sizes = {at: {w: d for w, d in of.items() if d > 0} for at, of in rounding.sizes.items()}
    return rounding


def epsilon_of(headers: Sequence[RunHeader]) -> float:
    """Of the coarsest dtype that the runs compute in."""
    named = [
        word
        for header in headers
        for word in f"{header.setup.get('dtype')}, {header.setup.get('autocast')}".split(", ")
    ]
    return max([EPSILON[word] for word in named if word in EPSILON], default=EPSILON["float32"])


def steps_of(a: Run, b: Run) -> list[tuple[Record, Record]]:
    """The records of the steps that both have."""
    other = {record.step: record for record in b.records}
    return [(record, other[record.step]) for record in a.records if record.step in other]
