"""What two runs were set up with differently, as their headers say it: one sentence a difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowscope.parting.matching import parameter_pairs, parameters_of, same_shape
from flowscope.records import RunHeader, few

PLAIN = {
    "model": "the model's class",
    "device": "the device",
    "dtype": "the parameters' dtype",
    "autocast": "autocast",
    "threads": "threads",
    "deterministic": "deterministic algorithms",
    "matmul_precision": "the precision of matrix products",
    "attention_kernels": "the attention kernels allowed",
    "processes": "processes",
    "sharded": "how parameters are sharded",
    "traced": "run in compiled code",
    "compiled": "compiled modules",
    "checkpointed": "blocks run again in backward (checkpoints)",
    "wrapped": "connections put in by wrap",
    "frozen": "frozen parameters",
}
"""Entries of the set-up that are compared as they are, by what they are called."""
UNKNOWN = "not recorded: only runs of this version and later say how they were set up"


def differences(a: RunHeader, b: RunHeader) -> list[str]:
    """What differs, most telling first; [] where nothing does. "was" is the first run, "now" the second.

    A run that says nothing of its set-up (recorded by an older version, or without a sampled step) is one sentence.
    """
    if not a.setup or not b.setup:
        return [] if not a.setup and not b.setup else [f"set-up of one of the runs: {UNKNOWN}"]
    return [
        *_parameters(a, b),
        *_weights(a, b),
        *_seeds(a.setup, b.setup),
        *(_changed(words, a.setup.get(key), b.setup.get(key)) for key, words in PLAIN.items() if _differ(a, b, key)),
        *_optimizers(a.setup.get("optimizers", []), b.setup.get("optimizers", [])),
        *_entries("", a.setup.get("packages", {}), b.setup.get("packages", {})),
        *_entries("config ", a.config, b.config),
    ]


def _differ(a: RunHeader, b: RunHeader, key: str) -> bool:
    return bool((a.setup.get(key) or None) != (b.setup.get(key) or None))


def _changed(what: str, before: Any, now: Any) -> str:
    return f"{what}: {_short(before)} -> {_short(now)}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return few([str(item) for item in value]) or "none"
    text = ", ".join(f"{k} {_inner(v)}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    return (text if len(text) <= 120 else text[:117] + "...") if value not in (None, "", {}) else "none"


def _inner(value: Any) -> str:
    return f"({_short(value)})" if isinstance(value, dict) else str(value)


def _entries(prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """What differs of two dicts, key by key."""
    for key in dict.fromkeys((*a, *b)):
        if a.get(key) != b.get(key):
            yield _changed(f"{prefix}{key}", a.get(key), b.get(key))


def _parameters(a: RunHeader, b: RunHeader) -> Iterator[str]:
    first, second = parameters_of(a), parameters_of(b)
    for name in first:
        if name in second and not same_shape(first[name], second[name]):
            yield _changed(f"the shape of {name}", tuple(first[name]), tuple(second[name]))
    pairs = parameter_pairs(first, second)
    renamed = [f"{x} -> {y}" for x, y in pairs if x != y]
    if renamed:
        yield f"parameters of other names: {few(renamed)}"
    for words, names, matched in (
        ("gone", first, {x for x, _ in pairs}),
        ("new", second, {y for _, y in pairs}),
    ):
        if left := [name for name in names if name not in matched and not (name in first and name in second)]:
            yield f"parameters that are {words}: {few(left)}"


def _weights(a: RunHeader, b: RunHeader) -> Iterator[str]:
    if changed := other_weights(a, b):
        yield f"initial weights: {len(changed)} of {len(a.setup['weights'])} differ ({few(changed)})"


def other_weights(a: RunHeader, b: RunHeader) -> list[str]:
    """The parameters of the first run whose hashed entries were others at the start of the second.

    Hashes of shards are not those of the whole: where one run shards and the other does not, none is named.
    """
    first, second = a.setup.get("weights", {}), b.setup.get("weights", {})
    if _differ(a, b, "sharded") or _differ(a, b, "dtype"):
        return []
    pairs = parameter_pairs(parameters_of(a), parameters_of(b))
    return [x for x, y in pairs if x in first and y in second and first[x] != second[y]]


def _seeds(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    first, second = a.get("seeds", {}), b.get("seeds", {})
    if first.get("torch") != second.get("torch"):
        yield _changed("torch's seed", first.get("torch"), second.get("torch"))
    for name, whose in (("numpy", "numpy's"), ("python", "Python's")):
        if first.get(name) != second.get(name):
            yield f"the state of {whose} random numbers"


def _optimizers(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    classes = [[str(optimizer.get("class")) for optimizer in some] for some in (a, b)]
    if classes[0] != classes[1]:
        yield _changed("optimizer", ", ".join(classes[0]), ", ".join(classes[1]))
    groups = [[group for optimizer in some for group in optimizer.get("groups", ())] for some in (a, b)]
    if len(groups[0]) != len(groups[1]):
        yield _changed("groups of the optimizer", len(groups[0]), len(groups[1]))
    for number, (first, second) in enumerate(zip(*groups, strict=False)):
        where = f"group {number}: " if max(map(len, groups)) > 1 else ""
        moved = set(first["parameters"]) ^ set(second["parameters"])
        if moved and len(first["parameters"]) != len(second["parameters"]):
            yield f"{where}the optimizer holds other parameters: {few(sorted(moved))}"
        told = [{key: value for key, value in group.items() if key != "parameters"} for group in (first, second)]
        yield from _entries(f"{where}optimizer's ", *told)
