"""The depth axis of any model, read from its structure alone: nothing is run, changed or drawn at random.

```python
print(flowscope.find_flows(model))                          # what `watch` would observe
flowscope.watch(model, flows=["encoder.layers"])            # a container's children are the blocks ...
flowscope.watch(model, flows=["net.block*", "head.*"])      # ... or a pattern names the blocks
```

Structure decides in this order: repeated blocks (lists, sequences, numbered attributes) from the outside in, with
stages and dense blocks; recurrent layers; else a block that is alone; else a plain chain of layers. The trace of the
first forward refines it (order, calls of shared blocks, what proves to be no chain). The rules are ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from flowscope.errors import FlowscopeError
from flowscope.model.blocks import Candidate, Search, blocks_of, find_lone_blocks
from flowscope.model.chains import find_chains
from flowscope.model.plan import Flow, FlowPlan, display_path
from flowscope.model.structure import Named, has_parameters, is_layer_sequence

__all__ = ["Flow", "FlowPlan", "display_path", "find_flows"]

_TINY = 0.01  # of the largest flow's parameters: below it, a list of two blocks or of single layers is incidental


def find_flows(model: nn.Module, flows: Sequence[str] | None = None) -> FlowPlan:
    """Return the depth axes of a model: what `watch` would observe.

    Args:
        model: any module; wrapped by DDP, FSDP or torch.compile too.
        flows: module paths to use instead of the discovered ones. A path names a container whose children are the
            blocks; a pattern ("model.layers.*", "block*"; `*` does not cross a dot) names the blocks of one flow.

    Returns:
        The plan; without any flow its `notes` say so, and only parameters are measured.

    Raises:
        FlowscopeError: a path that is no module or holds no layers with parameters, a pattern that matches none.
    """
    if not isinstance(model, nn.Module):
        raise FlowscopeError(f"find_flows(model): got {type(model).__name__}, expected a torch.nn.Module.")
    return plan_flows(tuple(model.named_modules()), flows)


def plan_flows(modules: Sequence[Named], flows: Sequence[str] | None = None) -> FlowPlan:
    """As `find_flows`, of the modules of a model, itself the first of them."""
    model = modules[0][1]
    if flows is not None:
        entries = [flows] if isinstance(flows, str) else list(flows)
        by_path = dict(model.named_modules(remove_duplicate=False))
        chosen = [flow for entry in entries for flow in _chosen(modules, by_path, entry)]
        return FlowPlan(_unique(chosen), () if chosen else (_nothing(model),))
    search = Search(model)
    search.visit("", model)
    found, notes = _ranked(search.candidates)
    notes = [*search.notes, *notes]
    if not found:
        found = find_lone_blocks(model)
        if not found:
            found, more = find_chains(modules, *modules[0])
            notes += more
    elif all(flow.kind == "time" for flow in found):
        notes.append("layers beside the recurrent ones are not taken as a flow; flows= can name them")
    if not found:
        notes.insert(0, _nothing(model))
    return FlowPlan(_unique(found), tuple(notes))


def _nothing(model: nn.Module) -> str:
    return (
        f"no depth axis found in {type(model).__name__}: no two or more repeated blocks, no chain of two or more "
        "layers with weights, no recurrent layer. Only parameter metrics are recorded; flows=['path'] names one."
    )


def _ranked(candidates: list[Candidate]) -> tuple[list[Flow], list[str]]:
    """Main flows in module order, then feature extractors and recurrent layers; incidental lists are only noted."""
    if not candidates:
        return [], []
    largest = max(c.parameters for c in candidates)
    richest = max(c.steps for c in candidates)
    main: list[Candidate] = []
    minor: list[Candidate] = []
    notes = []
    for candidate in candidates:
        poor = candidate.steps <= 2 and 2 * candidate.steps <= richest
        few = max(len(flow.outputs) for flow in candidate.flows) <= 2
        if candidate.parameters < _TINY * largest and (poor or few):
            notes.append(f"{candidate.flows[0].name}: {candidate.flows[0].kind}, too small beside the others")
        else:
            (minor if poor else main).append(candidate)
    if len(main) == 1 and main[0].flows[0].kind == "network":
        main[0].flows[0] = replace(main[0].flows[0], name="network")
    return [flow for candidate in main + minor for flow in candidate.flows], notes


def _unique(flows: list[Flow]) -> tuple[Flow, ...]:
    """Flows with names that differ: a second one of the same name gets "#2"."""
    seen: dict[str, int] = {}
    out = []
    for flow in flows:
        seen[flow.name] = seen.get(flow.name, 0) + 1
        out.append(flow if seen[flow.name] == 1 else replace(flow, name=f"{flow.name}#{seen[flow.name]}"))
    return tuple(out)


def _chosen(modules: Sequence[Named], by_path: dict[str, nn.Module], entry: str) -> list[Flow]:
    """The flow a user's path or pattern names; the raw and the displayed path are both understood."""
    if not isinstance(entry, str):
        raise FlowscopeError(f"flows=: got {entry!r}, expected module paths (str), such as 'model.layers'.")
    if any(mark in entry for mark in "*?["):
        return [_matched(by_path, entry)]
    path = next((p for p in by_path if entry in (p, display_path(p))), None)
    if path is None:
        names = [display_path(p) for p in by_path if p]
        close = difflib.get_close_matches(entry, names, n=3) or [n for n in names if n.endswith(entry)][:3]
        hint = f" Close: {', '.join(close)}." if close else ""
        raise FlowscopeError(
            f"flows=: {entry!r} is no module of {type(modules[0][1]).__name__}.{hint} "
            "print(flowscope.find_flows(model)) shows the discovered ones."
        )
    module = by_path[path]
    if is_layer_sequence(module):
        chains, _ = find_chains(modules, path, module)
        if chains:
            return [replace(flow, name=display_path(path) or "network") for flow in chains[:1]]
    flow = blocks_of(path, module)
    if flow is None:
        raise FlowscopeError(
            f"flows=: {entry!r} ({type(module).__name__}) has no children with parameters, expected a container "
            "of blocks. print(flowscope.find_flows(model)) shows the discovered ones."
        )
    return [flow]


def _matched(by_path: dict[str, nn.Module], pattern: str) -> Flow:
    """The blocks that match a pattern part by part, in module order."""
    wanted = pattern.split(".")
    first: dict[int, str] = {}
    for path, module in by_path.items():
        for name in (path, display_path(path)):
            parts = name.split(".")
            if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)) and has_parameters(module):
                first.setdefault(id(module), path)
    if not first:
        raise FlowscopeError(
            f"flows=: the pattern {pattern!r} matches no module with parameters ('*' does not cross a dot). "
            "print(flowscope.find_flows(model)) shows the discovered flows."
        )
    outputs = tuple(first.values())
    fixed = pattern[: min(pattern.index(mark) for mark in "*?[" if mark in pattern)]
    return Flow(fixed.rstrip("._") or "network", "blocks", outputs, outputs[0])
