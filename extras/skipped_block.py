"""One wrapped block while branches are left out: who decides, what its children are given, what its merges return.

A branch is left out by answering its child modules with placeholders: the first child that is given the carry decides
(its gate depends on the carry alone, so it is known by then), whatever is computed from the answer is a placeholder
too, and the merge hands x on. With rows, the children get the samples that are left. Where a block does anything that a
placeholder cannot stand for, it is run as it is, and says why.

Axis letters: B batch (first axis), D features.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from flowscope.errors import FlowscopeError
from flowscope.merging.gates import GatedConnection
from flowscope.merging.interception import Carry, plain
from flowscope.torch_internals import without_subclasses

logger = logging.getLogger("flowscope")

TOLERANCE = 1e-3
"""Relative difference allowed between a branch of some samples and the same samples of the whole batch."""


class CannotSkipError(Exception):
    """This block cannot leave out what was decided."""


class Decision(NamedTuple):
    """Whether a branch is left out, and for which samples it is computed all the same (None: for none)."""

    skip: bool = False
    rows: Tensor | None = None


@dataclass
class Pass:
    """One run of the block.

    Attributes:
        skip: whether branches are left out in it.
        cache: whether a key-value cache was given.
        forced: what an earlier run decided: branches of some samples are computed for all.
        decided: by site.
        branches: of some samples, by site, where they are still to be compared.
        tally: (site, samples that came by, samples whose branch was left out).
        running: the children that run now, outermost first.
        batch: samples.
        output: of the block.
    """

    skip: bool = False
    cache: bool = False
    forced: dict[int, Decision] | None = None
    decided: dict[int, Decision] = field(default_factory=dict)
    branches: dict[int, Tensor] = field(default_factory=dict)
    tally: list[tuple[int, int, int]] = field(default_factory=list)
    running: list[nn.Module] = field(default_factory=list)
    batch: int = 0
    output: Any = None


@dataclass
class Learned:
    """What is known of a block from its runs so far.

    Attributes:
        shapes: what a child returns, by child and arguments.
        caching: sites whose branch fills a key-value cache.
        around: children inside which a site is met: they are never left out themselves.
        ran: the block ran before; `ran_with_cache`: with a cache.
        compared: a branch of some samples was found to be what it is among all.
    """

    shapes: dict[Any, Any] = field(default_factory=dict)
    caching: set[int] = field(default_factory=set)
    around: set[int] = field(default_factory=set)
    ran: bool = False
    ran_with_cache: bool = False
    compared: bool = False


class Placeholder(Tensor):
    """Stands for a branch that is left out, or holds one that is computed for some samples only."""

    rows: Tensor | None
    site: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Carry) for kind in types):
            return NotImplemented  # the add at the site is the carry's to answer
        found = next(leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Placeholder))
        with without_subclasses():
            result = func(*args, **(kwargs or {}))
            return tree_map(
                lambda leaf: mark(leaf, found.site, found.rows) if isinstance(leaf, Tensor) else leaf, result
            )


def mark(tensor: Tensor, site: int, rows: Tensor | None) -> Placeholder:
    """Return a tensor as a placeholder in the branch of a site."""
    with without_subclasses():
        made = tensor.as_subclass(Placeholder)
    made.rows, made.site = rows, site
    return made


def bare(value: Any) -> Any:
    """Return a tensor without any mark; other values as they are."""
    if isinstance(value, Placeholder):
        with without_subclasses():
            return value.as_subclass(Tensor)
    return plain(value)


class Shape(NamedTuple):
    """Last axis and dtype of what a child returns; a leaf of its own, not a tuple of two."""

    features: int
    dtype: torch.dtype


class SkippedBlock:
    """Stands in for `forward` of a block and its children and for `merge` of its connection.

    Attributes:
        decider: the `GateSkipping` it belongs to, which says what is left out.
        refused: why nothing is left out here; empty while it is.
        met, skipped: per site, samples that came by and samples whose branch was left out.
    """

    def __init__(self, path: str, block: Any, connection: GatedConnection, decider: Any) -> None:
        self.path, self.block, self.connection, self.decider = path, block, connection, decider
        self.met = [0] * connection.sites
        self.skipped = [0] * connection.sites
        self.refused = "" if block.flowscope_rule.taggable else "its carry cannot be followed"
        self.forward, self.merge = block.forward, connection.merge
        self._learned, self._now = Learned(), Pass()

    # -- the block

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, leaving out what its gates say; as it is where that cannot be done."""
        if self.block.training:
            raise FlowscopeError(f"skip_by_gates: {self.path} is in training mode, expected model.eval() before.")
        outer, self.decider.active = self.decider.active, self
        try:
            done = self._run(any(is_cache(value) for value in (*args, *kwargs.values())), args, kwargs)
        finally:
            self.decider.active = outer
        for site, met, skipped in done.tally:
            self.met[site] += met
            self.skipped[site] += skipped
        return done.output

    def _run(self, cache: bool, args: Any, kwargs: Any) -> Pass:
        first, self._learned.ran = not self._learned.ran, True
        if self.refused or self.decider.observing or (cache and not self._learned.ran_with_cache):
            self._learned.ran_with_cache |= cache  # the first call with a cache shows which branches fill it
            return self._pass(args, kwargs, Pass(cache=cache))
        # the first call shows where in the block its sites are
        whole = self._pass(args, kwargs, Pass(cache=cache)) if first else None
        if whole is not None and cache:
            return whole
        try:
            done = self._pass(args, kwargs, Pass(skip=True, cache=cache))
            if not self._learned.compared and done.branches:
                self._compare(self._pass(args, kwargs, Pass(skip=True, cache=cache, forced=done.decided)), done)
        except Exception as error:
            self.refused = str(error) if isinstance(error, CannotSkipError) else f"{type(error).__name__}: {error}"
            logger.warning("skip_by_gates: nothing is left out in %s: %s", self.path, self.refused)
            if cache:
                raise FlowscopeError(
                    f"skip_by_gates: {self.path} cannot leave out branches ({self.refused}), and with a key-value "
                    "cache it cannot be run a second time. Call the model with use_cache=False."
                ) from error
            return whole or self._pass(args, kwargs, Pass())
        return done

    def _pass(self, args: Any, kwargs: Any, run: Pass) -> Pass:
        """Run the block."""
        self._now = run
        run.output = self.forward(*args, **kwargs)
        if any(isinstance(leaf, Placeholder) for leaf in leaves(run.output)):
            raise CannotSkipError("the block returns what its branch computes")
        return run

    def _compare(self, whole: Pass, done: Pass) -> None:
        """Raise where a branch of some samples is not what it is among all samples."""
        for site, part in done.branches.items():
            a, b = whole.branches[site].double(), part.double()
            if a.shape != b.shape or (a - b).abs().max() > TOLERANCE * a.abs().max():
                raise CannotSkipError("its branches mix samples (is the batch the first axis?)")
        self._learned.compared = True

    # -- the children

    def child(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a child of a branch: as it is, for some samples, or with a placeholder."""
        values = (*args, *kwargs.values())
        if self._now.cache and any(is_cache(value) for value in values):
            self._learned.caching.add(len(self._now.tally))
        if self._now.skip and id(module) not in self._learned.around:
            like = next((leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Placeholder)), None)
            carry = next((value for value in values if type(value) is Carry), None)
            if like is None and carry is not None:
                skip, rows = self._decide(carry)
                if skip and (self._now.forced is None or rows is None):
                    like = mark(carry.plain, carry.site, rows)
            if like is not None and like.rows is not None:
                return self._partial(forward, args, kwargs, like.site, like.rows)
            if like is not None:
                return self._hollow(module, forward, args, kwargs, like)
        self._now.running.append(module)
        try:
            return forward(*args, **kwargs)
        finally:
            self._now.running.pop()

    def _decide(self, carry: Carry) -> Decision:
        """What is done about the branch of the site that a carry is on its way to; decided once a call."""
        site, x = carry.site, carry.plain
        if self._now.forced is not None:
            return self._now.forced.get(site, Decision())
        if site not in self._now.decided:
            decision = Decision()
            if site < self.connection.sites and not (self._now.cache and site in self._learned.caching):
                decision = self.decider.decide(self.path, site, lambda: branch_weight(self.connection, site, x))
                if decision.rows is not None and (self._now.cache or x.shape[0] in x.shape[1:]):
                    decision = Decision()  # what belongs to a sample is told by the length of its first axis
                self._now.batch = x.shape[0]
            self._now.decided[site] = decision
        return self._now.decided[site]

    def _hollow(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, like: Placeholder) -> Any:
        """Return zeros of the shapes that the child gives; to know them it is run once."""
        lead = tuple(like.shape[:-1])
        words = tuple((k, v) for k, v in kwargs.items() if v is None or isinstance(v, (bool, int, str)))
        key = (id(module), like.shape[-1], len(lead), words, tuple(value is None for value in args))
        if key not in self._learned.shapes:
            args, kwargs = tree_map(bare, (args, kwargs))
            output = forward(*args, **kwargs)
            tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
            if any(tuple(leaf.shape[:-1]) != lead or not leaf.is_floating_point() for leaf in tensors):
                # attention maps, routes: of no shape that could be told from the carry's, so computed each time
                return tree_map(lambda t: mark(t, like.site, None) if isinstance(t, Tensor) else t, output)
            shape = tree_map(lambda a: Shape(a.shape[-1], a.dtype) if isinstance(a, Tensor) else a, output)
            self._learned.shapes[key] = shape
        return zeros(self._learned.shapes[key], lead, like)

    def _partial(self, forward: Callable[..., Any], args: Any, kwargs: Any, site: int, rows: Tensor) -> Any:
        """Run a child for some samples; what else it is given by sample is cut to them."""
        batch, left = self._now.batch, len(rows)

        def cut(leaf: Any) -> Any:
            whole = not isinstance(leaf, Placeholder)
            leaf = bare(leaf)
            return leaf[rows] if whole and isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch else leaf

        args, kwargs = tree_map(cut, (args, kwargs))
        output = forward(*args, **kwargs)
        if any(not t.dim() or t.shape[0] not in (1, left) for t in leaves(output) if isinstance(t, Tensor)):
            raise CannotSkipError("a child returns a tensor without a sample axis")
        return tree_map(lambda t: mark(t, site, rows) if isinstance(t, Tensor) and t.shape[0] == left else t, output)

    # -- the merge

    def meet(self, site: int, state: Any, x: Tensor, f: Tensor) -> tuple[Tensor, Any]:
        """Merge a site; x as it is for what was left out."""
        batch = x.shape[0]
        self._learned.around.update(map(id, self._now.running))
        if not isinstance(f, Placeholder):
            if self.decider.observing:
                self.decider.observe(self.path, site, branch_weight(self.connection, site, x))
            self._now.tally.append((site, batch, 0))
            rows = self._now.forced[site].rows if self._now.forced is not None and site in self._now.forced else None
            if rows is None:
                return self.merge(site, state, x, f)
            return self._merge_some(site, state, x, f[rows], rows)
        if f.site != site:
            raise CannotSkipError("two sites share a branch")
        rows, part = f.rows, bare(f)
        self._now.tally.append((site, batch, batch if rows is None else batch - len(rows)))
        if rows is None:
            return x, state
        if len(part) != len(rows):
            raise CannotSkipError("its branch mixes samples that are left with those that are not")
        return self._merge_some(site, state, x, part, rows)

    def _merge_some(self, site: int, state: Any, x: Tensor, part: Tensor, rows: Tensor) -> tuple[Tensor, Any]:
        if not self._learned.compared:
            self._now.branches[site] = part
        part, state = self.merge(site, state, x[rows], part)
        y = x.to(part.dtype, copy=True)
        y[rows] = part
        return y, state


def zeros(shapes: Any, lead: tuple[int, ...], like: Placeholder) -> Any:
    """Return what a child returned, made again out of zeros, from its structure with a `Shape` for each tensor."""

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, Shape):
            return leaf
        return mark(torch.zeros(*lead, leaf.features, dtype=leaf.dtype, device=like.device), like.site, None)

    return tree_map(make, shapes, is_leaf=lambda leaf: isinstance(leaf, Shape))


def branch_weight(connection: GatedConnection, site: int, x: Tensor) -> Tensor:
    """Return the weight of the branch at a site, [..., 1 or D]."""
    return connection.branch_weight(site, torch.sigmoid(connection.logit(site, x)))


def leaves(tree: Any) -> list[Any]:
    """Leaves of nested arguments or outputs, those of mappings that torch's trees do not know included."""
    return [
        inner
        for leaf in tree_leaves(tree)
        for inner in (leaves(dict(leaf)) if hasattr(leaf, "items") and not isinstance(leaf, Tensor) else [leaf])
    ]


def is_cache(value: Any) -> bool:
    """Whether an argument is a key-value cache, whose entries a skipped branch would leave out."""
    return hasattr(value, "get_seq_length") or (isinstance(value, tuple) and any(map(is_cache, value)))
