"""The merge sites of a model: where the output of a branch meets the carried x. `find_sites` is the front door.

Found by running the model once (evaluation mode, no gradient, random state and buffers put back) and following each
block's tensors; without inputs, by running each repeated block alone on a hidden state made from its widths.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flowscope.errors import FlowscopeError
from flowscope.model.example_inputs import (
    Call,
    as_call,
    block_calls,
    default_calls,
    describe,
    evaluating,
    fresh,
    runnable,
)
from flowscope.model.flows import find_flows
from flowscope.model.nested import nested_tensors
from flowscope.model.plan import Listing
from flowscope.model.tracing import TracedBlock, Traces, trace_block


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


@dataclass(frozen=True)
class BlockSites:
    """A block with its sites; `first` and `last` say where streams would be expanded and reduced.

    `calls` is how often it ran in the trace: more than once where layers share it.
    """

    path: str
    flow: str
    traced: TracedBlock
    first: bool = True
    last: bool = True
    calls: int = 1

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
        """All sites in the order they ran."""
        return tuple(
            Site(b.path, i, ".".join(filter(None, (b.path, s.module))), s.shape, s.kind, s.norm, b.flow)
            for b in self.blocks
            for i, s in enumerate(b.traced.sites)
        )

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
        counted = [block.path for block in self.blocks if not block.taggable]
        if counted:
            lines.append(
                f"note: in {len(counted)} blocks ({counted[0]} ...) x reaches an add through a function, no child: "
                "their adds are counted, which excludes compile and checkpoint together."
            )
        if not self.traced:
            lines.append("note: each block was run alone (no example_inputs); checked at the first forward.")
        return lines if lines or self.sites else ["no merge sites"]


@dataclass
class Run:
    """One call of a block in the trace of a model."""

    path: str
    carry_in: Tensor
    carry_out: Tensor


@dataclass
class ModelTrace:
    """What one run of a model told about its blocks."""

    traced: dict[str, Traces] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    # what code outside the blocks looked at, by id, and kept: a freed tensor's id would be given again
    seen_outside: dict[int, Tensor] = field(default_factory=dict)
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
        except FlowscopeError:
            raise
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error} (inputs: {describe(call)})")
        else:
            return read_plan(model, trace, blocks), Trial(run, call, trace.output)
    if errors and example_inputs is not None:
        raise FlowscopeError(
            f"example_inputs: {type(model).__name__} could not be run on them: {errors[0]}. "
            "Pass what its forward takes: a tensor, a tuple of positional or a dict of keyword arguments."
        )
    return plan_alone(model, blocks), None


def candidate_blocks(model: nn.Module, where: Any = None) -> dict[str, str]:
    """Return block path -> flow name: the modules of the flows of repeated blocks, outermost first where they nest."""
    found: dict[str, str] = {}
    flows = sorted(find_flows(model), key=lambda flow: flow.kind == "network")
    for flow in flows:
        if flow.kind in ("blocks", "stage", "network"):
            for path in flow.outputs:
                found.setdefault(path, flow.name)
    patterns = [where] if isinstance(where, str) else list(where or ())
    if patterns:
        found = {p: f for p, f in found.items() if any(fnmatch.fnmatchcase(p, pattern) for pattern in patterns)}
        if not found:
            raise FlowscopeError(f"wrap(where=...): got {patterns}, no block's path matches; see find_sites(model).")
    inside = tuple(f"{path}." for path in found)
    return {path: flow for path, flow in found.items() if not path.startswith(inside)}


class OutsideUse(TorchFunctionMode):
    """Notes which tensors are used while no block runs."""

    def __init__(self, seen: dict[int, Tensor]) -> None:
        super().__init__()
        self.seen = seen
        self.inside = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and getattr(func, "__name__", "") != "__get__":
            self.seen.update({id(x): x for x in nested_tensors((args, kwargs or {}))})
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
        believing = trace.traced.setdefault(path, traced).believing
        if believing.sites:
            trace.seen_outside.update(note_run(trace, path, believing, args, kwargs, output))
        return output

    with untouched(model), outside, contextlib.ExitStack() as stack:
        for path, module in modules.items():
            if "forward" in vars(module):
                replaced = TracedBlock((), 0, None, (), (), "its forward was replaced on the instance")
                trace.traced[path] = Traces(replaced, replaced)
                continue
            module.forward = functools.partial(probe, path, module.forward)
            stack.callback(vars(module).pop, "forward", None)
        args, kwargs = fresh(call)
        trace.output = run(*args, **kwargs)
    trace.seen_outside.update({id(x): x for x in nested_tensors(trace.output)})
    return trace


def note_run(
    trace: ModelTrace, path: str, traced: TracedBlock, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> dict[int, Tensor]:
    """Record a block's call; return what it takes besides the carry, by id."""
    key = traced.argument
    carry_in = kwargs[key] if isinstance(key, str) else args[key]
    carry_out = output if traced.output is None else output[traced.output]
    trace.runs.append(Run(path, carry_in, carry_out))
    others = list(nested_tensors((args, kwargs)))
    del others[next(i for i, x in enumerate(others) if x is carry_in)]  # once: it may come twice, as query and key
    return {id(x): x for x in others}


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode without gradient, and put random state, buffers and modes back."""
    buffers = [
        (module, name, tensor, None if tensor is None or tensor.is_meta else tensor.clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
    ]
    cuda = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=cuda), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a run without gradient, which is not the user's
            yield
    finally:
        with torch.no_grad():
            for module, name, tensor, copy in buffers:
                module._buffers[name] = tensor
                if tensor is not None and copy is not None and not torch.equal(tensor, copy):
                    tensor.copy_(copy)


def settled(traces: dict[str, tuple[Any, Traces]]) -> dict[str, TracedBlock]:
    """Return what to take of each block, {path: (what siblings have in common, its trace read twice)}.

    A sum of two branches is the projection of a block whose siblings have an identity shortcut in its place.
    """
    chosen = {path: both.strict for path, (_, both) in traces.items()}
    for path, (family, both) in traces.items():
        siblings = (other.strict for kind, other in traces.values() if kind == family)
        places = [site.module for site in both.believing.sites]
        if both.believing is not both.strict and any(places == [site.module for site in s.sites] for s in siblings):
            chosen[path] = both.believing
    return chosen


def read_plan(model: nn.Module, trace: ModelTrace, blocks: dict[str, str]) -> SitePlan:
    """Turn a trace into the plan: order of execution, and where streams may travel from block to block.

    They do where the very tensor one block returned is what the next takes, nothing else looks at it, each of the two
    runs once, and the next block's first site is on that tensor (not on a projection of it).
    """
    families = {path: (type(model.get_submodule(path)), blocks[path]) for path in trace.traced}
    traces = settled({path: (families[path], both) for path, both in trace.traced.items()})
    runs = [run for run in trace.runs if traces[run.path].sites]
    count = Counter(run.path for run in runs)
    planned = [BlockSites(path, blocks[path], traces[path], calls=count[path]) for path in count]
    by_path = {block.path: number for number, block in enumerate(planned)}
    for before, after in itertools.pairwise(runs):
        i, j = by_path[before.path], by_path[after.path]
        alone = count[before.path] == count[after.path] == 1
        same = before.carry_out is after.carry_in and id(before.carry_out) not in trace.seen_outside
        if alone and same and can_follow(planned[i], planned[j]):
            planned[i], planned[j] = replace(planned[i], last=False), replace(planned[j], first=False)
    refused = [(path, reason) for path, traced in traces.items() for reason in refusals(traced)]
    refused += [(path, "it did not run") for path in blocks if path not in trace.traced]
    return SitePlan(tuple(planned), tuple(refused) or no_blocks(blocks))


def refusals(traced: TracedBlock) -> tuple[str, ...]:
    """Return why a block, or adds in it, are left alone."""
    return traced.left_out if traced.sites else (traced.reason,)


def can_follow(before: BlockSites, after: BlockSites) -> bool:
    """Whether streams may go from one block to the next."""
    return not after.traced.sites[0].rule.fresh and before.shape == after.shape


def no_blocks(blocks: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Say so where the model has no repeated blocks at all."""
    return () if blocks else (("", "no repeated blocks (see find_flows(model))"),)


def plan_alone(model: nn.Module, blocks: dict[str, str]) -> SitePlan:
    """Trace each block alone on a made-up hidden state; blocks of a flow are taken to follow each other."""
    planned: list[BlockSites] = []
    with untouched(model):
        modules = {path: model.get_submodule(path) for path in blocks}
        traces = settled({p: ((type(m), blocks[p]), trace_alone(m)) for p, m in modules.items()})
    for path, traced in traces.items():
        if traced.sites:
            block = BlockSites(path, blocks[path], traced)
            if planned and planned[-1].flow == block.flow and can_follow(planned[-1], block):
                planned[-1], block = replace(planned[-1], last=False), replace(block, first=False)
            planned.append(block)
    refused = [(path, reason) for path, traced in traces.items() for reason in refusals(traced)]
    return SitePlan(tuple(planned), tuple(refused) or no_blocks(blocks), traced=False)


def trace_alone(block: nn.Module) -> Traces:
    """Return the trace of a block on the first made-up input it takes; with the reason where there is none."""
    reason = "its forward was replaced on the instance"
    if "forward" not in vars(block):
        reason = "it cannot be run alone: pass example_inputs"
        for args, kwargs in block_calls(block):
            with contextlib.suppress(Exception):
                return trace_block(block, block.forward, args, kwargs)[1]
    return Traces(nothing := TracedBlock((), 0, None, (), (), reason), nothing)
