"""Follow one call of one block: which adds join the carried x with what a branch made of it.

Every operation of the call is a node; the set of its ancestors is one integer, a bit per node. An add is a *hit* when
one operand is an ancestor of the other through parameters (identity shortcut), or both come from one ancestor through
parameters (projection shortcut). The *sites* are the hits on the carry's own path, found by walking back from the
block's output, so an add inside a branch (the sum of parallel branches, a shared expert) is never one. A projection is
believed where it changes width or stride, or where a sibling block has an identity shortcut in its place; else it is
the sum of two branches, whose merge with the carry is elsewhere (scaled, in `lerp`, in the loop around the block).
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowscope.model.nested import nested_tensors
from flowscope.torch_internals import FunctionMode

ADDS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_})
JOINS = frozenset({"addcmul", "addcmul_", "addmm", "baddbmm", "lerp", "lerp_"})
CONCATENATIONS = frozenset({"cat", "concat", "concatenate"})
CASTS = frozenset(
    {Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double}
    | {Tensor.contiguous, Tensor.clone, torch.clone, Tensor.view, Tensor.view_as, Tensor.reshape, torch.reshape}
)


REARRANGING = frozenset(
    {"__getitem__", "cat", "concat", "concatenate", "stack", "permute", "transpose", "swapaxes", "movedim", "reshape"}
    | {"view", "flatten", "unflatten", "unsqueeze", "squeeze", "split", "chunk", "narrow", "select", "unbind", "roll"}
    | {"flip", "repeat", "expand"}
)
"""What moves values and changes none, by name: a carry that is only rearranged is still the carry."""
SCALING = frozenset(
    {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__", "add", "add_", "__add__", "__radd__", "__iadd__"}
)
"""What scales or shifts, by name: a carry times a number or a learned vector is still the carry, scaled."""
SUM = "joins two branches, and the carried x is neither: it is merged elsewhere (in the code around the block?)"


INSIDE = "flowscope: inside"
"""The carry of these sites goes on to others in the same block."""


class SiteRule(NamedTuple):
    """How one site is recognised while the block runs."""

    touch: int | None  # ordinal among the adds that touch the tagged carry; None: the carry cannot be tagged there
    visible: int  # ordinal among all adds outside the quiet children
    carry: int  # position of the carry among the operands
    fresh: bool  # the carry is not what came in (a projection): streams begin here


class TracedSite(NamedTuple):
    """One merge site of a traced block."""

    rule: SiteRule
    module: str  # path of the module, inside the block, that does the add
    shape: tuple[int, ...]
    kind: str  # identity | projection
    norm: str  # pre | post | none
    outer_norm: str  # path of the norm module the carry passes after the add; empty without
    normed: bool = False  # whether the branch begins with a norm, whatever comes after the add


class TracedBlock(NamedTuple):
    """What one traced call of a block tells."""

    sites: tuple[TracedSite, ...]
    argument: int | str | None  # where the carried x comes in; None: nowhere, the block's code makes it
    output: int | str | None  # where it goes out; None: the output is the tensor itself; INSIDE: nowhere
    carriers: tuple[tuple[str, bool], ...]  # children on the carry's path, and whether each is a norm
    quiet: tuple[str, ...]  # children without a site that run more than one operation
    reason: str  # why there is no site; empty with sites
    # whether the block's code changes in place what it holds as carry: from its entry on, then after each site
    overwritten: tuple[bool, ...] = ()
    left_out: tuple[str, ...] = ()  # why adds on the carry's path are no sites


class Traces(NamedTuple):
    """A traced call read twice: `believing` takes the sums of two branches on the carry's path for projections.

    One `TracedBlock` for each carry that leaves the block, the one with most sites first; one with the reason where
    there is no site.
    """

    strict: tuple[TracedBlock, ...]
    believing: tuple[TracedBlock, ...]
    missed: tuple[str, ...] = ()  # modules, inside the block, that merge outside branches and off these carries


class Add(NamedTuple):
    """An add of two tensors as it was seen."""

    node: int
    operands: tuple[Tensor, Tensor]
    ancestors: tuple[int, int]
    carry: int | None
    kind: str
    modules: tuple[str, ...]
    result: Tensor
    statement: bool  # x.add_(f): its result may be used under the left operand's name
    version: int  # of the result
    before: dict[int, int]  # the versions of the arguments and of earlier hits just before, by id

    @property
    def own(self) -> int:
        """The add and all it came from."""
        return 1 << self.node | self.ancestors[0] | self.ancestors[1]

    @property
    def carried(self) -> Tensor:
        """The carry among the operands."""
        return self.operands[self.carry or 0]


class Passage(NamedTuple):
    """One call of a module inside the block."""

    name: str
    modules: tuple[str, ...]
    inputs: frozenset[int]
    is_norm: bool


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation, by its class's name."""
    return "norm" in type(module).__name__.lower()


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 where nobody counts (inference mode)."""
    return 0 if tensor.is_inference() else tensor._version


def adds_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an add is 0 + x, as `sum` begins with."""
    return func in ADDS and len(args) > 1 and type(args[1]) is int and not args[1]


def is_feature_tensor(value: Any) -> bool:
    """Whether a value could be a hidden state: a floating tensor with at least two axes."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


class Ancestry:
    """From which operations each tensor came: a set of nodes is one integer, a bit a node; the first are the inputs.

    Attributes:
        count: how many nodes there are.
        parametrised: those that read a parameter.
        normalising: those of a normalisation.
        rearranging: those that move values and change none.
        scaling: those that scale or shift.
    """

    def __init__(self, inputs: Collection[Tensor]) -> None:
        self.alive = {id(x): x for x in inputs}  # a freed tensor's id would be given again
        self.sets = {id(x): 1 << node for node, x in enumerate(inputs)}
        self.origins: dict[int, int] = {}  # the id of what a cast or copy was made from
        self.count = len(inputs)
        self.parametrised = self.normalising = self.rearranging = self.scaling = 0

    def of(self, tensor: Any) -> int:
        """Return the nodes a tensor came from; 0 where it came from no input and no operation."""
        return self.sets.get(id(tensor), 0)

    def origin_of(self, tensor: Tensor) -> int:
        """Return the id of a tensor, or of what it is a cast or copy of."""
        return self.origins.get(id(tensor), id(tensor))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep tensors alive."""
        self.alive.update({id(x): x for x in tensors})

    def remember(self, tensor: Tensor, nodes: int, inputs: Iterable[Tensor]) -> None:
        """Set what a tensor came from and keep it and the inputs alive."""
        self.sets[id(tensor)] = nodes
        self.keep((*inputs, tensor))


def unwrappable(reason: str) -> TracedBlock:
    """Return what is known of a block without sites."""
    return TracedBlock((), None, None, (), (), reason)


class Meetings:
    """The adds of a call, and which of them may be merges.

    Attributes:
        nodes: where each tensor came from.
        held: what may be the carry, with its version then: the arguments, then what each hit made.
        adds: all adds of two tensors in order.
        roots: of each hit's result, by id: the id of the carry that came in.
        last_hit: id of the newest hit's result.
    """

    def __init__(self, nodes: Ancestry, arguments: Collection[Tensor]) -> None:
        self.nodes = nodes
        self.held = [(x, version(x)) for x in arguments]
        self.adds: list[Add] = []
        self.roots: dict[int, int] = {}
        self.last_hit = 0

    def versions(self) -> dict[int, int]:
        """Return the versions of what may be the carry, by id."""
        return {id(x): version(x) for x, _ in self.held}

    def note(
        self, operands: tuple[Tensor, Tensor], place: tuple[str, ...], result: Tensor, statement: bool, before: Any
    ) -> None:
        """Record an add with its kind."""
        a, b = operands
        left, right = self.nodes.of(a), self.nodes.of(b)
        carry, kind = self.kind(a, b, left, right)
        number = version(result)
        self.adds.append(
            Add(self.nodes.count, (a, b), (left, right), carry, kind, place, result, statement, number, before)
        )
        if carry is not None:
            self.last_hit = id(result)
            came = self.nodes.origin_of((a, b)[carry])
            self.roots[id(result)] = self.roots.get(came, came)
            self.held.append((result, number))

    def kind(self, a: Tensor, b: Tensor, left: int, right: int) -> tuple[int | None, str]:
        """Return the position of the carry in `a + b` (None: no merge) and the kind of shortcut."""
        if a.shape != b.shape or not is_feature_tensor(a) or not left & right:
            return None, ""
        left_own, right_own = left & ~right & self.nodes.parametrised, right & ~left & self.nodes.parametrised
        one, other = (self.roots.get(self.nodes.origin_of(x)) for x in (a, b))
        if one is not None and one == other:
            return 0, "projection"  # both hold the carry
        if right_own and (is_ancestor(left, right) or self.nodes.origin_of(a) == self.last_hit):
            return 0, "identity"
        if left_own and (is_ancestor(right, left) or self.nodes.origin_of(b) == self.last_hit):
            return 1, "identity"
        if right_own and not left & ~right & ~self.nodes.rearranging:
            return 0, "identity"
        if left_own and not right & ~left & ~self.nodes.rearranging:
            return 1, "identity"
        if right_own & ~self.nodes.scaling and self.is_scaled(left & ~right):
            return 0, "projection"
        if left_own & ~self.nodes.scaling and self.is_scaled(right & ~left):
            return 1, "projection"
        if left_own and right_own:
            return int(left_own.bit_count() > right_own.bit_count()), "projection"
        return None, ""

    def is_scaled(self, own: int) -> bool:
        """Whether operations do no more than scale, shift and rearrange."""
        return not own & ~self.nodes.scaling & ~self.nodes.rearranging


class BlockTrace(FunctionMode):
    """Records the operations of one call of `block`; a `Reading` turns them into a `TracedBlock`."""

    def __init__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], most: int | None = None
    ) -> None:
        super().__init__()
        self.most = most
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        self.arguments: dict[int | str, Tensor] = {key: x for key, x in given.items() if is_feature_tensor(x)}
        self.nodes = Ancestry(self.arguments.values())
        self.meetings = Meetings(self.nodes, self.arguments.values())
        self.joined: set[str] = set()
        self.passages: dict[int, list[Passage]] = {}
        self.operations: Counter[tuple[str, ...]] = Counter()
        self.modules: list[str] = []
        self.norm_depth = 0
        self.parameters = {id(p) for p in block.parameters()}
        self.handles: list[Any] = []
        for name, module in list(block.named_modules())[1:]:
            enter, leave = functools.partial(self.enter, name), functools.partial(self.leave, name)
            self.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(leave, with_kwargs=True))

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module of the block begins."""
        self.modules.append(name)
        self.norm_depth += is_norm(module)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Note that a module of the block ended; a module that passes its input on returns an alias of it."""
        inputs = list(nested_tensors((args, kwargs)))
        if isinstance(output, Tensor) and any(output is x for x in inputs):
            output = self.alias(output)  # dropout, drop-path, identity: told apart from their input
        outputs = list(nested_tensors(output))
        self.modules.pop()
        self.norm_depth -= is_norm(module)
        self.nodes.keep((*inputs, *outputs))
        passage = Passage(name, tuple(self.modules), frozenset(map(id, inputs)), is_norm(module))
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            self.passages.setdefault(id(first), []).append(passage)
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, nodes = kwargs or {}, self.nodes
        if self.most is not None and nodes.count > self.most:
            return func(*args, **kwargs)
        inputs = list(nested_tensors((args, kwargs)))
        name = getattr(func, "__name__", "")
        masks = [nodes.of(x) for x in inputs]
        if name.endswith(("_as", "_like")):  # of the other it takes the shape alone
            masks = masks[:1] if name.endswith("_as") else []
        before = self.meetings.versions() if func in ADDS else {}
        output = func(*args, **kwargs)
        outputs = list(nested_tensors(output))
        if not outputs or name in ("__get__", "__set__"):
            return output
        if "dropout" in name and output is inputs[0] and not kwargs.get("inplace"):
            return self.alias(output)  # in evaluation it is its input: told apart as above
        if func in CASTS or adds_nothing(func, args):
            return self.pass_on(inputs[0], output)
        self.operations[tuple(self.modules)] += 1
        bit = 1 << nodes.count
        if func in ADDS and len(args) > 1 and all(isinstance(x, Tensor) for x in args[:2]):
            self.meetings.note((args[0], args[1]), tuple(self.modules), output, func is Tensor.add_, before)
        elif name in JOINS | CONCATENATIONS or ("add" in name and "norm" in name):
            self.joined.add(name)
        nodes.parametrised |= bit if any(id(x) in self.parameters for x in inputs) else 0
        nodes.normalising |= bit if self.norm_depth or "norm" in name else 0
        nodes.rearranging |= bit if name in REARRANGING else 0
        nodes.scaling |= bit if name in SCALING else 0
        mask = functools.reduce(operator.or_, masks, bit)
        for x in outputs:
            nodes.remember(x, mask, inputs)
        nodes.count += 1
        return output

    def pass_on(self, came: Tensor, output: Tensor) -> Tensor:
        """Return a cast, copy or view, at its origin's node; that of a parameter is one (layer scale of channels)."""
        if output is not came:
            self.nodes.origins[id(output)] = self.nodes.origin_of(came)
        self.nodes.remember(output, self.nodes.of(came), [came])
        if id(came) in self.parameters:
            self.parameters.add(id(output))
        return output

    def alias(self, tensor: Tensor) -> Tensor:
        """Return another object for the same tensor, at the same node."""
        other = tensor.view_as(tensor)
        self.nodes.remember(other, self.nodes.of(tensor), [tensor])
        return other


class Reading:
    """What the trace of a call says of its sites.

    Attributes:
        believing: whether every sum of two branches on the carry's path is taken for a projection.
        sums: those that were not, on the path from an output back.
        taken: the nodes of the hits that are sites.
    """

    def __init__(self, trace: BlockTrace, believing: bool = False) -> None:
        self.trace, self.believing = trace, believing
        self.nodes, self.meetings, self.arguments = trace.nodes, trace.meetings, trace.arguments
        self.sums: list[Add] = []
        self.taken: set[int] = set()

    def read(self, output: Any) -> tuple[TracedBlock, ...]:
        """Return the sites of the traced call that returned `output`, by the carry they are on."""
        chains = self.find_chains(output)
        if not chains:
            return (unwrappable(self.explain()),)
        self.taken = {add.node for _, chain in chains for add in chain}
        own = {name for _, chain in chains for add in chain for name in add.modules}
        outer = functools.partial(outermost_outside, own)
        work: Counter[str] = Counter()
        for modules, count in self.trace.operations.items():
            work[outer(modules)] += count
        quiet = {name for name, count in work.items() if name and count > 1}
        visible = [add for add in self.meetings.adds if outer(add.modules) not in quiet]
        left_out = tuple(dict.fromkeys(f"{self.name_of(add)} {SUM}" for add in self.sums))
        found: list[TracedBlock] = []
        for place, chain in chains:
            argument = self.argument_of(chain[0])
            if argument in [other.argument for other in found if argument is not None]:
                left_out = (*left_out, "a second output made from the same carry is left as it is")
                continue
            final = output if place is None else output[place]
            entry = None if argument is None else self.arguments[argument]
            sites, carriers = self.read_sites(chain, visible, own, entry, final)
            changed, passed_by = self.overwritten(entry, chain), tuple(sorted(carriers.items()))
            found.append(TracedBlock(sites, argument, place, passed_by, tuple(sorted(quiet)), "", changed))
        return (found[0]._replace(left_out=left_out), *found[1:])

    def missed(self) -> tuple[str, ...]:
        """Return the modules of the identity merges that are no sites, those inside another one's branch left out."""
        hits = [add for add in self.meetings.adds if add.kind == "identity"]
        ways = [(add.ancestors[1 - (add.carry or 0)] & ~add.ancestors[add.carry or 0], add.carried) for add in hits]
        return tuple(
            add.modules[-1] if add.modules else ""
            for add in hits
            if add.node not in self.taken
            and not any(branch >> add.node & 1 and is_ancestor(self.nodes.of(x), add.own) for branch, x in ways)
        )

    def overwritten(self, entry: Tensor | None, chain: list[Add]) -> tuple[bool, ...]:
        """Return whether what the block held as carry was changed in place: the entry, then what each site made."""
        at = chain[0].carried if entry is None else entry
        held = [next((taken for taken in self.meetings.held if taken[0] is at), (at, version(at)))]
        held += [(add.result, add.version) for add in chain]
        later = [*(add.before for add in chain), self.meetings.versions()]
        return tuple(then.get(id(x), number) != number for (x, number), then in zip(held, later, strict=True))

    def find_chains(self, output: Any) -> list[tuple[int | str | None, list[Add]]]:
        """Return where carries leave the block, and the hits on their paths in order; the longest first."""
        if isinstance(output, Tensor):
            items: Any = [(None, output)]
        else:
            items = output.items() if isinstance(output, dict) else enumerate(output) if output is not None else ()
        chains = [(place, self.chain_to(item)) for place, item in items if is_feature_tensor(item)]
        found: list[tuple[int | str | None, list[Add]]] = []
        taken: set[int] = set()
        for place, chain in sorted(chains, key=lambda one: -len(one[1])):
            nodes = {add.node for add in chain}
            if chain and not nodes & taken:
                found.append((place, chain))
                taken |= nodes
        return found

    def chain_to(self, tensor: Tensor) -> list[Add]:
        """Walk back from a tensor along the carry: newest hit, then the newest hit its carry comes from, and so on."""
        chain: list[Add] = []
        reach = self.nodes.of(tensor)
        for add in reversed(self.meetings.adds):
            if add.carry is None or not reach >> add.node & 1:
                continue
            after = reach & ~add.own & self.nodes.parametrised & ~self.nodes.normalising
            if add.kind == "projection" and after and not (chain and chain[-1].kind == "projection"):
                continue  # weights follow: a sum inside a branch or a projection
            if add.kind == "projection" and not (self.believing or self.is_shortcut(add)):
                self.sums.append(add)
                left, right = add.ancestors
                # a long skip: on along the later; else what both branches read may still hold the carry
                reach = right if is_ancestor(left, right) else left if is_ancestor(right, left) else left & right
                continue
            chain.append(add)
            reach = add.ancestors[add.carry]
        return chain[::-1]

    def is_shortcut(self, add: Add) -> bool:
        """Whether the carry cannot be added as it is (another width or stride than what came in), or is but scaled."""
        carry = add.carry or 0
        own, branch = add.ancestors[carry] & ~add.ancestors[1 - carry], add.ancestors[1 - carry] & ~add.ancestors[carry]
        if self.meetings.is_scaled(own) and branch & self.nodes.parametrised & ~self.nodes.scaling:
            return True
        got = add.result.shape
        for came in (x.shape for x in self.arguments.values()):
            flattened = len(got) != len(came) and got.numel() == came.numel()
            if flattened or sorted(got) == sorted(came):
                return False
        return bool(self.arguments)

    def name_of(self, add: Add) -> str:
        """Return where an add is done, as it stands in a reason."""
        return f"an add in {add.modules[-1]}" if add.modules else "an add of its own"

    def argument_of(self, first: Add) -> int | str | None:
        """Return the argument the first site's carry comes from; None where the block's code makes it."""
        for key, x in self.arguments.items():
            if x is first.carried:
                return key
        mask = first.ancestors[first.carry or 0]
        return next((key for node, key in enumerate(self.arguments) if mask >> node & 1), None)

    def read_sites(
        self, chain: list[Add], visible: list[Add], own: set[str], entry: Tensor | None, final: Tensor
    ) -> tuple[tuple[TracedSite, ...], dict[str, bool]]:
        """Return the sites in order and the children the carry passes through between them."""
        carriers: dict[str, bool] = {}
        sites: list[TracedSite] = []
        reached = [*(add.carried for add in chain[1:]), final]
        start = 0
        into = None if entry is None else self.passages_between(entry, chain[0].carried, own)
        carriers.update({passage.name: passage.is_norm for passage in into or ()})
        for index, (add, following) in enumerate(zip(chain, reached, strict=True)):
            at = visible.index(add)
            origin = self.nodes.origin_of(add.carried)
            touch = sum(origin in map(self.nodes.origin_of, other.operands) for other in visible[start:at])
            fresh = index == 0 and (entry is None or origin != id(entry))
            rule = SiteRule(None if into is None else touch, at, add.carry or 0, fresh)
            into = None if add.statement else self.passages_between(add.result, following, own)
            carriers.update({passage.name: passage.is_norm for passage in into or ()})
            outer = next((passage.name for passage in into or () if passage.is_norm), "")
            normed = self.is_normed(add, chain[: index + 1])
            norm = "post" if self.is_normed_after(add, following) else "pre" if normed else "none"
            module = add.modules[-1] if add.modules else ""
            sites.append(TracedSite(rule, module, tuple(add.carried.shape), add.kind, norm, outer, normed))
            start = at + 1
        return tuple(sites), carriers

    def passages_between(self, start: Tensor, end: Tensor, own: set[str], depth: int = 4) -> list[Passage] | None:
        """Return the children through which `start` became `end`; empty where they are one, None where none did."""
        if start is end or self.nodes.origin_of(end) == id(start):
            return []
        # by its origin: a norm, then a reshape
        ended = self.trace.passages.get(id(end)) or self.trace.passages.get(self.nodes.origin_of(end)) or []
        for passage in ended if depth else ():
            if passage.name in own or any(name not in own for name in passage.modules):
                continue
            # the inputs that descend from the block's
            for tensor in (self.nodes.alive[key] for key in passage.inputs if self.nodes.sets.get(key)):
                before = self.passages_between(start, tensor, own, depth - 1)
                if before is not None:
                    return [*before, passage]
        return None

    def is_normed(self, add: Add, chain: list[Add]) -> bool:
        """Whether a norm reads the carry before the branch."""
        branch = add.ancestors[1 - (add.carry or 0)]
        carries = [earlier.ancestors[earlier.carry or 0] for earlier in chain]
        read = next((mask for mask in reversed(carries) if is_ancestor(mask, branch)), carries[-1])
        branch &= ~read  # from the newest carry the branch reads: with (x + a) + b that of a
        first_weight, first_norm = (lowest(branch & of) for of in (self.nodes.parametrised, self.nodes.normalising))
        return bool(first_norm and (not first_weight or first_norm <= first_weight))

    def is_normed_after(self, add: Add, reached: Tensor) -> bool:
        """Whether a norm lies on the carry after the add."""
        return reached is not add.result and bool(self.nodes.of(reached) & ~add.own & self.nodes.normalising)

    def is_changed_carry(self, add: Add) -> bool:
        """Whether one operand is the block's input after operations without weights, the other a branch."""
        entry, weights = (1 << len(self.arguments)) - 1, self.nodes.parametrised & ~self.nodes.normalising
        for mask, other in (add.ancestors, add.ancestors[::-1]):
            if mask & entry & other and not mask & weights and other & weights:
                return add.operands[0].shape == add.operands[1].shape
        return False

    def explain(self) -> str:
        """Say why the traced call has no site."""
        if any(self.is_changed_carry(add) for add in self.meetings.adds):
            return "no residual add of the carried x itself: it is changed on its way to the add"
        joins = sorted(self.trace.joined - CONCATENATIONS) or sorted(() if self.sums else self.trace.joined)
        if joins:
            return f"no residual add: the tensors meet in {', '.join(joins)}"
        if self.sums:
            return f"no residual add: {self.name_of(self.sums[0])} {SUM}"
        if self.meetings.adds:
            return "no residual add: none of its adds joins an input with what a branch made of it"
        return "no residual add: no tensors are added in it"


def is_ancestor(older: int, newer: int) -> bool:
    """Whether the newest operation in one set of ancestors is in the other."""
    return bool(older and newer >> older.bit_length() - 1 & 1)


def lowest(mask: int) -> int:
    """Return the lowest bit of a set of operations: the first that ran."""
    return mask & -mask


def outermost_outside(own: set[str], modules: tuple[str, ...]) -> str:
    """Return the first module on a stack that holds no site; empty where all do."""
    return next((name for name in modules if name not in own), "")


def trace_block(
    block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Traces]:
    """Run a block once and return its output with what the run tells."""
    with BlockTrace(block, args, kwargs) as trace:
        output = forward(*args, **kwargs)
    reading = Reading(trace)
    strict = reading.read(output)
    believing = Reading(trace, believing=True).read(output) if reading.sums else strict
    return output, Traces(strict, believing, reading.missed() if strict[0].sites else ())
