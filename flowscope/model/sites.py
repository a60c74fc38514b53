"""The merge sites of a model: where the output of a branch meets the carried x. `find_sites` is the front door.

Found by running the model once (evaluation mode, no gradient, random state and buffers put back) and following each
block's tensors; without inputs, by running each repeated block alone on a hidden state made from its widths.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.model.example_inputs import (
    Call,
    as_call,
    block_calls,
    default_calls,
    describe,
    fresh,
    runnable,
    untouched,
)
from flowscope.model.flows import find_flows
from flowscope.model.hidden_state import feature_axis
from flowscope.model.nested import nested_tensors
from flowscope.model.plan import Listing, display_path
from flowscope.model.survey import further_blocks, holds, inner_blocks, who_adds
from flowscope.model.tracing import (
    ADDS,
    INSIDE,
    TracedBlock,
    TracedSite,
    Traces,
    is_feature_tensor,
    trace_block,
    unwrappable,
)
from flowscope.torch_internals import FunctionMode

ROUNDS = 4
"""So often the search for blocks goes on to the modules around those that add."""


@dataclass(frozen=True)
class Site:
    """One merge site.

    Attributes:
        path: module path of the block.
        index: number of the site in the block, from 0.
        module: module path of what does the add.
        shape: shape of the carried x in the trace.
        kind: "identity" (x + f(x)) or "projection" (g(x) + f(x)).
        norm: "pre" (a norm before the branch), "post" (a norm on the carry after the add) or "none".
        flow: name of the flow the block belongs to.
    """

    path: str
    index: int
    module: str
    shape: tuple[int, ...]
    kind: str
    norm: str
    flow: str


Key = tuple[str, int]
"""A block's path and the number of a carry in it."""


@dataclass(frozen=True)
class BlockSites:
    """A block with its sites; `first` and `last` say where streams would be expanded and reduced.

    `calls` is how often it ran in the trace: more than once where layers share it. A block has several of these where
    several carries pass through it (text and image), or one whose width changes between its sites: `lane` counts them.
    """

    path: str
    flow: str
    traced: TracedBlock
    first: bool = True
    last: bool = True
    calls: int = 1
    lane: int = 0

    @property
    def key(self) -> Key:
        """What tells it from the others."""
        return self.path, self.lane

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the carried x at the first site."""
        return self.traced.sites[0].shape

    @property
    def taggable(self) -> bool:
        """Whether the carry can be tagged on its whole way; else a function mode counts the block's adds."""
        return all(site.rule.touch is not None for site in self.traced.sites)


@dataclass(frozen=True, repr=False)
class SitePlan(Listing[Site]):
    """What `wrap` would act on, printable.

    Attributes:
        blocks: the blocks with sites in the order they ran.
        refused: (module path, reason) of what cannot be wrapped.
        traced: True when the whole model was run, False when each block was run alone.
    """

    blocks: tuple[BlockSites, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    traced: bool = True

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """All sites in the order they ran, those of one carry after those of another."""
        numbers = {path: itertools.count() for path in self.paths}
        return tuple(
            Site(b.path, next(numbers[b.path]), ".".join(filter(None, (b.path, s.module))), *rest, b.flow)
            for b in self.blocks
            for s in b.traced.sites
            for rest in [(s.shape, s.kind, s.norm)]
        )

    @property
    def paths(self) -> list[str]:
        """Of the blocks, each once."""
        return list(dict.fromkeys(block.path for block in self.blocks))

    @property
    def items(self) -> tuple[Site, ...]:
        """The sites."""
        return self.sites

    def tables(self) -> dict[str, list[tuple[str, ...]]]:
        """One a flow."""
        found: dict[str, list[tuple[str, ...]]] = {}
        for site in self.sites:
            cells = (site.path, str(site.index), "x".join(map(str, site.shape)), site.kind, site.norm, site.module)
            found.setdefault(site.flow, []).append(cells)
        head = ("block", "site", "shape", "kind", "norm", "add in")
        return {f"flow {flow}: {len(rows)} sites": [head, *rows] for flow, rows in found.items()}

    def remarks(self) -> list[str]:
        """What cannot be wrapped and why, and how the rest was found."""
        lines = [f"not wrapped: {path or 'the model'}: {reason}" for path, reason in self.refused]
        counted = list(dict.fromkeys(block.path for block in self.blocks if not block.taggable))
        if counted:
            lines.append(
                f"note: in {len(counted)} blocks ({counted[0]} ...) x reaches an add through a function, no child: "
                "their adds are counted, which excludes compile and checkpoint together."
            )
        if not self.traced:
            lines.append("note: each block was run alone (no example_inputs); checked at the first forward.")
        return lines if lines or self.sites else ["no merge sites"]


Lanes = list[BlockSites]
"""The sites on one carry of a block, in parts of one width."""


@dataclass
class Run:
    """One carry in one call of a block in the trace of a model; None comes from nowhere outside."""

    path: str
    place: int | str | None
    carry_in: Tensor | None
    carry_out: Tensor


@dataclass
class ModelTrace:
    """What one run of a model told about its blocks."""

    traced: dict[str, Traces] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    # what code outside the blocks looked at, by id, and kept: a freed tensor's id would be given again
    seen_outside: dict[int, Tensor] = field(default_factory=dict)
    adds_outside: bool = False
    output: Any = None


def find_sites(model: nn.Module, example_inputs: Any = None) -> SitePlan:
    """Return the merge sites `wrap` would act on, without changing anything.

    Args:
        model: any module with repeated blocks.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments; without it transformers'
            `dummy_inputs`, else each block alone on a hidden state made from its widths.

    Raises:
        FlowscopeError: the model cannot be run on the example inputs, or is wrapped already.
    """
    if any("flowscope_rule" in vars(module) for module in model.modules()):
        raise FlowscopeError("find_sites: the model is wrapped already; call flowscope.unwrap(model) first.")
    return plan_sites(uncompiled(model), example_inputs)[0]


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper; any other as it is."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


@dataclass(frozen=True)
class Trial:
    """One run of a model: what was run (the model, or the one transformers model inside it), how, and its output."""

    module: nn.Module
    call: Call
    output: Any


def plan_sites(model: nn.Module, example_inputs: Any = None, where: Any = None) -> tuple[SitePlan, Trial | None]:
    """Return the plan and the run it comes from (None: blocks alone)."""
    blocks = candidate_blocks(model, where)
    run = model if example_inputs is not None else runnable(model)
    calls = default_calls(run) if example_inputs is None else [as_call(example_inputs)]
    errors: list[str] = []
    for call in calls:
        try:
            trace = trace_model(model, blocks, call, run)
            trace, blocks = reach_on(model, trace, blocks, call, run, where)
            trace, blocks = reach_in(model, trace, blocks, call, run)
        except FlowscopeError:
            raise
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error} (inputs: {describe(call)})")
        else:
            refuse_unmatched(where, blocks)
            return read_plan(model, trace, blocks), Trial(run, call, trace.output)
    if errors and example_inputs is not None:
        raise FlowscopeError(
            f"example_inputs: {type(model).__name__} could not be run on them: {errors[0]}. "
            "Pass what its forward takes: a tensor, a tuple of positional or a dict of keyword arguments."
        )
    refuse_unmatched(where, blocks)
    return plan_alone(model, blocks), None


def refuse_unmatched(where: Any, blocks: dict[str, str]) -> None:
    """Raise where patterns name no block."""
    if where and not blocks:
        raise FlowscopeError(f"wrap(where=...): got {where!r}, no block's path matches; see find_sites(model).")


def reach_on(
    model: nn.Module, trace: ModelTrace, blocks: dict[str, str], call: Call, run: nn.Module, where: Any
) -> tuple[ModelTrace, dict[str, str]]:
    """Return a trace with further blocks, where some of those found by structure have no site, or others add.

    That may be the module whose loop adds what its children return, a block inside of one, or another class's.
    """
    if blocks and not trace.adds_outside and all(wraps(trace, path) for path in blocks):
        return trace, blocks
    adds = who_adds(model, run, call)
    tried = set(blocks)
    for _ in range(ROUNDS):
        found = {path: flow for path, flow in blocks.items() if wraps(trace, path)}
        more = further_blocks(model, adds, list(found), tried)
        more = [path for path in more if matches(path, where)]
        if not more:
            break
        tried.update(more)
        flows = {path: display_path(path.rpartition(".")[0] or path) or "network" for path in more}
        again = trace_model(model, {**found, **flows}, call, run)
        gained = {path: flow for path, flow in flows.items() if wraps(again, path)}
        if gained:
            kept = {path: flow for path, flow in blocks.items() if not holds(list(gained), path)}
            blocks = {**kept, **gained}
            again.traced |= {path: trace.traced[path] for path in kept if path in trace.traced and path not in found}
            trace = again
    return trace, blocks


def reach_in(
    model: nn.Module, trace: ModelTrace, blocks: dict[str, str], call: Call, run: nn.Module
) -> tuple[ModelTrace, dict[str, str]]:
    """Return a trace with the modules that merge inside of blocks in place of these, where that finds more merges."""
    inside: dict[str, dict[str, str]] = {}
    for path in blocks:
        if wraps(trace, path):
            sites = [site.module for carry in trace.traced[path].strict for site in carry.sites]
            names = inner_blocks(sites, trace.traced[path].missed)
            paths = [f"{path}.{name}" if path else name for name in names]
            inside[path] = {at: display_path(at.rpartition(".")[0]) or "network" for at in paths}
    further = {at: flow for found in inside.values() for at, flow in found.items()}
    if not further:
        return trace, blocks
    again = trace_model(model, further, call, run)
    for path, found in inside.items():
        if count_sites(again, found) <= count_sites(trace, [path]):
            further = {at: flow for at, flow in further.items() if at not in found}
    if not further:
        return trace, blocks
    outside = {path: flow for path, flow in blocks.items() if not any(holds([path], at) for at in further)}
    blocks = {**outside, **further}
    return trace_model(model, blocks, call, run), blocks


def count_sites(trace: ModelTrace, paths: Iterable[str]) -> int:
    """Return how many sites some blocks have."""
    traced = [trace.traced[path].strict for path in paths if path in trace.traced]
    return sum(len(carry.sites) for carries in traced for carry in carries)


def wraps(trace: ModelTrace, path: str) -> bool:
    """Whether a block has sites."""
    return path in trace.traced and bool(trace.traced[path].strict[0].sites)


def matches(path: str, where: Any) -> bool:
    """Whether a block's path is among those asked for."""
    patterns = [where] if isinstance(where, str) else list(where or ())
    return not patterns or any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def candidate_blocks(model: nn.Module, where: Any = None) -> dict[str, str]:
    """Return block path -> flow name: the modules of the flows of repeated blocks, outermost first where they nest."""
    found: dict[str, str] = {}
    flows = sorted(find_flows(model), key=lambda flow: flow.kind == "network")
    for flow in flows:
        if flow.kind in ("blocks", "stage", "network"):
            for path in flow.outputs:
                found.setdefault(path, flow.name)
    if where:
        found = {path: flow for path, flow in found.items() if matches(path, where)}
    inside = tuple(f"{path}." for path in found)
    return {path: flow for path, flow in found.items() if not path.startswith(inside)}


class OutsideUse(FunctionMode):
    """Notes which tensors are used while no block runs, and whether two that could be carry and branch are added."""

    def __init__(self, seen: dict[int, Tensor]) -> None:
        super().__init__()
        self.seen = seen
        self.inside = 0
        self.adds = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and getattr(func, "__name__", "") != "__get__":
            self.seen.update({id(x): x for x in nested_tensors((args, kwargs or {}))})
            two: Sequence[Any] = args[:2] if func in ADDS else ()
            self.adds |= len(two) == 2 and all(map(is_feature_tensor, two)) and two[0].shape == two[1].shape
        return func(*args, **(kwargs or {}))


def trace_model(model: nn.Module, blocks: dict[str, str], call: Call, run: nn.Module) -> ModelTrace:
    """Run the model (or the part of it named by `run`) once; trace the first call of each block; change nothing."""
    trace = ModelTrace()
    outside = OutsideUse(trace.seen_outside)
    modules = {path: model.get_submodule(path) for path in blocks}

    def probe(path: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        outside.inside += 1
        try:
            if path in trace.traced:
                output, traced = forward(*args, **kwargs), trace.traced[path]
            else:
                output, traced = trace_block(modules[path], forward, args, kwargs)
        finally:
            outside.inside -= 1
        note_run(trace, path, trace.traced.setdefault(path, traced).believing, args, kwargs, output)
        return output

    with untouched(model), outside, contextlib.ExitStack() as stack:
        for path, module in modules.items():
            if "forward" in vars(module):
                replaced = unwrappable("its forward was replaced on the instance")
                trace.traced[path] = Traces((replaced,), (replaced,))
                continue
            module.forward = functools.partial(probe, path, module.forward)
            stack.callback(vars(module).pop, "forward", None)
        args, kwargs = fresh(call)
        trace.output = run(*args, **kwargs)
    trace.seen_outside.update({id(x): x for x in nested_tensors(trace.output)})
    trace.adds_outside = outside.adds
    return trace


def note_run(
    trace: ModelTrace, path: str, carries: tuple[TracedBlock, ...], args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Record a block's call, and what it takes besides its carries."""
    others = list(nested_tensors((args, kwargs)))
    for traced in carries:
        if not traced.sites:
            return
        key = traced.argument
        carry_in = None if key is None else kwargs[key] if isinstance(key, str) else args[key]
        trace.runs.append(
            Run(path, traced.output, carry_in, output if traced.output is None else output[traced.output])
        )
        if carry_in is not None:  # once: it may come twice, as query and key
            del others[next(i for i, x in enumerate(others) if x is carry_in)]
    trace.seen_outside.update({id(x): x for x in others})


def settled(traces: dict[str, tuple[Any, Traces]]) -> dict[str, tuple[TracedBlock, ...]]:
    """Return what to take of each block, {path: (what siblings have in common, its trace read twice)}.

    A sum of two branches is the projection of a block whose siblings have an identity shortcut in its place.
    """

    def places(carries: tuple[TracedBlock, ...]) -> list[list[str]]:
        return [[site.module for site in carry.sites] for carry in carries]

    chosen = {path: both.strict for path, (_, both) in traces.items()}
    for path, (family, both) in traces.items():
        alike = [other.strict for kind, other in traces.values() if kind == family]
        siblings = [places(carries) for carries in alike if all(s.kind == "identity" for c in carries for s in c.sites)]
        if both.believing is not both.strict and places(both.believing) in siblings:
            chosen[path] = both.believing
    return chosen


def without_final_norm(traced: TracedBlock) -> TracedBlock:
    """Return the sites of a block that is one of its kind: behind pre-norm sites its last norm is the model's own."""
    *others, last = traced.sites
    if not (last.norm == "post" and last.normed and others and all(site.norm == "pre" for site in others)):
        return traced
    return traced._replace(sites=(*others, last._replace(norm="pre", outer_norm="")))


def lanes(path: str, flow: str, block: nn.Module, carries: tuple[TracedBlock, ...], calls: int) -> list[Lanes]:
    """Return a block's sites by carry, each in parts where its width changes on the way."""
    numbers = itertools.count()
    return [
        [BlockSites(path, flow, part, calls=calls, lane=next(numbers)) for part in of_one_width(block, traced)]
        for traced in carries
        if traced.sites
    ]


def of_one_width(block: nn.Module, traced: TracedBlock) -> list[TracedBlock]:
    """Return the consecutive sites of one width, feature axis and number of positions, each as a carry of its own."""

    def width(site: TracedSite) -> tuple[int, int, int]:
        axis = feature_axis(block, site.shape)
        return axis, site.shape[axis], math.prod(site.shape)

    parts: list[TracedBlock] = []
    start = 0
    for _, group in itertools.groupby(traced.sites, width):
        sites = tuple(group)
        end = start + len(sites)
        changed = traced.overwritten[start : end + 1]
        if start:
            first = sites[0]._replace(rule=sites[0].rule._replace(touch=None, fresh=True))
            part = traced._replace(sites=(first, *sites[1:]), argument=None, overwritten=changed, left_out=())
        else:
            part = traced._replace(sites=sites, overwritten=changed)
        parts.append(part if end == len(traced.sites) else part._replace(output=INSIDE))
        start = end
    return parts


def read_plan(model: nn.Module, trace: ModelTrace, blocks: dict[str, str]) -> SitePlan:
    """Turn a trace into the plan: order of execution, and where streams may travel from block to block.

    They do where the very tensor one block returned is what the next takes, nothing else looks at it, each of the two
    runs once, and the next block's first site is on that tensor (not on a projection of it).
    """
    families = {path: (type(model.get_submodule(path)), blocks[path]) for path in trace.traced}
    traces = settled({path: (families[path], both) for path, both in trace.traced.items()})
    kinds = Counter(families.values())
    traces |= {
        path: tuple(without_final_norm(carry) for carry in carries)
        for path, carries in traces.items()
        if carries[0].sites and kinds[families[path]] == 1
    }
    calls = Counter((run.path, run.place) for run in trace.runs)
    parts: dict[tuple[str, Any], Lanes] = {}
    for path in dict.fromkeys(run.path for run in trace.runs):
        found = lanes(
            path,
            blocks[path],
            model.get_submodule(path),
            traces[path],
            max(calls[path, c.output] for c in traces[path]),
        )
        parts |= {(path, carry[-1].traced.output): carry for carry in found}
    for place in unread(trace, list(parts)):
        del parts[place]
    follows: dict[Key, Key] = {}
    newest: dict[int, Run] = {}
    for run in trace.runs:
        if (there := (run.path, run.place)) in parts:
            before = newest.get(id(run.carry_in))
            if before is not None and id(run.carry_in) not in trace.seen_outside:
                here = (before.path, before.place)
                one, two = parts[here][-1], parts[there][0]
                if calls[here] == calls[there] == 1 and can_follow(one, two):
                    follows[one.key] = two.key
            newest[id(run.carry_out)] = run
    ordered = in_order([block for carry in parts.values() for block in carry], follows)
    refused = [(path, reason) for path, carries in traces.items() for reason in refusals(carries)]
    refused += [(path, "it did not run") for path in blocks if path not in trace.traced]
    return SitePlan(tuple(ordered), tuple(refused) or no_blocks(blocks))


def unread(trace: ModelTrace, places: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the second carries that nothing reads after the block: no gradient would come back to their merges."""
    read = {id(run.carry_in) for run in trace.runs}
    out = {(run.path, run.place): run.carry_out for run in trace.runs}
    later = [place for number, place in enumerate(places) if place[0] in {path for path, _ in places[:number]}]
    return [place for place in later if id(out[place]) not in read and id(out[place]) not in trace.seen_outside]


def in_order(blocks: list[BlockSites], follows: dict[Key, Key]) -> list[BlockSites]:
    """Return the blocks, those behind one another that streams travel through, as `follows` says.

    Such are of one flow; a second carry of the same blocks is a flow of its own.
    """
    by_key = {block.key: block for block in blocks}
    followers = set(follows.values())
    ordered: list[BlockSites] = []
    for start, block in by_key.items():
        if start in followers:
            continue
        flow = block.flow if not block.lane else f"{block.flow}#{block.lane + 1}"
        key: Key | None = start
        while key is not None:
            after = follows.get(key)
            ordered.append(replace(by_key[key], flow=flow, first=key == start, last=after is None))
            key = after
    return ordered


def refusals(carries: tuple[TracedBlock, ...]) -> list[str]:
    """Return why a block, or adds in it, are left alone."""
    return [reason for traced in carries for reason in (traced.left_out if traced.sites else (traced.reason,))]


def can_follow(before: BlockSites, after: BlockSites) -> bool:
    """Whether streams may go from one block to the next."""
    outside = before.traced.output != INSIDE
    return outside and not after.traced.sites[0].rule.fresh and before.shape == after.shape


def no_blocks(blocks: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Say so where the model has no repeated blocks at all."""
    return () if blocks else (("", "no repeated blocks (see find_flows(model))"),)


def plan_alone(model: nn.Module, blocks: dict[str, str]) -> SitePlan:
    """Trace each block alone on a made-up hidden state; blocks of a flow are taken to follow each other."""
    planned: list[BlockSites] = []
    with untouched(model):
        modules = {path: model.get_submodule(path) for path in blocks}
        traces = settled({p: ((type(m), blocks[p]), trace_alone(m)) for p, m in modules.items()})
    for path, carries in traces.items():
        if carries[0].sites:  # of several carries the first: which follows which is known from a run alone
            (found,) = lanes(path, blocks[path], modules[path], carries[:1], 1)
            if planned and planned[-1].flow == found[0].flow and can_follow(planned[-1], found[0]):
                planned[-1], found[0] = replace(planned[-1], last=False), replace(found[0], first=False)
            planned += found
    refused = [(path, reason) for path, carries in traces.items() for reason in refusals(carries)]
    return SitePlan(tuple(planned), tuple(refused) or no_blocks(blocks), traced=False)


def trace_alone(block: nn.Module) -> Traces:
    """Return the trace of a block on the first made-up input it takes; with the reason where there is none."""
    reason = "its forward was replaced on the instance"
    if "forward" not in vars(block):
        reason = "it cannot be run alone: pass example_inputs"
        for args, kwargs in block_calls(block):
            with contextlib.suppress(Exception):
                return trace_block(block, block.forward, args, kwargs)[1]
    return Traces(nothing := (unwrappable(reason),), nothing)
