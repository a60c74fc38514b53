"""Answer the merge adds of one call of a block by its connection, while the block's own code runs.

The carried x enters the block as a `Carry`, a tensor subclass that brings the call's state with it and answers the add;
it is a plain tensor to everything else. No mode, no hook, no write to a module: eager, compiled, checkpointed and both
together are one code path. Where x cannot be tagged (it is a subclass already, or reaches the add through a function
that is no child), a function mode that counts the block's adds takes over (`SiteMode`): it does all but compile and
checkpoint together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, State
from flowscope.model.tracing import ADDS as TENSOR_ADDS
from flowscope.model.tracing import CASTS, INSIDE, SiteRule, adds_nothing, version
from flowscope.torch_internals import FunctionMode, newest_mode, without_newest_mode

ADDS = TENSOR_ADDS | {operator.add, operator.iadd}
"""A strict export shows `x + f` as the operator itself."""
DROPOUTS = tuple(
    getattr(space, name) for space in (functional, torch) for name in dir(space) if name.endswith("dropout")
)
"""What returns its argument as it is in evaluation; whatever else returns it has changed it in place."""


class BlockRule(NamedTuple):
    """How a woven block finds its sites."""

    rules: tuple[SiteRule, ...]
    position: int  # of the carried x among the arguments
    name: str  # and its name
    output: int | str | None  # where it leaves
    child: str  # name under which the connection is registered
    taggable: bool
    deferred: bool  # the connection begins at the first site (a projection makes the carry)
    dims: int  # axes of what comes in, where streams travel; 0: not checked
    path: str

    @property
    def absent(self) -> bool:
        """Whether the carry comes in nowhere: the block's code makes it."""
        return self.position < 0 and not self.name


class BlockCall:
    """The state of one call of a block.

    What changes during the call is in lists: torch.compile forgets attributes that are written after a tensor hook was
    registered, as `watch` does at the sites (torch 2.13, `SideEffectsProxyDict`), but not what is in a list.
    """

    def __init__(self, connection: Connection, rule: BlockRule) -> None:
        self.connection = connection
        self.rule = rule
        self.rules = rule.rules
        self.gradient = torch.is_grad_enabled()
        self.state: list[State] = [None]
        self.shape: torch.Size | None = None
        self.fired = [0]
        self.handed: list[tuple[int, Tensor, int] | None] = [None]

    def meet(self, site: int, state: State, func: Any, left: Tensor, right: Tensor, alpha: Any) -> Tensor:
        """Answer the add at a site."""
        if self.gradient and not torch.is_grad_enabled():
            refuse_reentrant(self.rule.path)
        statement = func is Tensor.add_  # as a statement its result must land in the left operand
        first = left.clone() if statement else left
        x, f = (right, first) if self.rules[site].carry else (first, right)
        if alpha is not None:
            x, f = (x * alpha, f) if self.rules[site].carry else (x, f * alpha)
        if site == 0 and self.rule.deferred:
            x, state = self.connection.begin(x)
        self.refuse_overwritten()
        here = x.shape
        if self.shape is not None and len(here) != len(self.shape):  # the block flattened its positions
            x, f = x.reshape(self.shape), f.reshape(self.shape)
        y, self.state[0] = self.connection.at_site(site, state, x, f)
        self.fired[0] += 1
        self.hand(site + 1, y)
        if y.dim() != len(here):
            y = y.reshape(here)
        return left.copy_(y) if statement else y

    def hand(self, point: int, y: Tensor) -> None:
        """Keep what a connection with streams gives the block's code, to see whether it is changed in place."""
        if self.connection.streams and not torch.compiler.is_compiling():
            self.handed[0] = (point, y, version(y))

    def refuse_overwritten(self) -> None:
        """Raise where what was given was changed in place and the trace had not shown it: streams would not follow."""
        if self.handed[0] is None:
            return
        point, y, number = self.handed[0]
        self.handed[0] = None
        if version(y) != number and not self.connection.overwritten[point]:
            where = f"after merge {point - 1}" if point else "at its entry"
            raise FlowscopeError(
                f"{self.rule.path}: its code changes the carry in place {where}, as it did not in the trace, and the "
                "streams would not follow. Pass example_inputs that take the path you train, or leave the block out "
                "with where=."
            )


class Carry(Tensor):
    """The carried x on its way to site number `site`; a snapshot, so a replay inside the block meets the same state."""

    plain: Tensor
    call: BlockCall
    site: int
    state: State
    touched: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ADDS and len(args) > 1 and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            for operand in args[:2]:
                if type(operand) is Carry and operand.site < len(operand.call.rules):
                    call = operand.call
                    if operand.touched == call.rules[operand.site].touch:
                        alpha = kwargs.get("alpha") if kwargs else None
                        y = call.meet(operand.site, operand.state, func, plain(args[0]), plain(args[1]), alpha)
                        return tag(y, call, operand.site + 1, call.state[0])
                    operand.touched += 1  # an add that is no site (x + positions)
        elif (func in CASTS or adds_nothing(func, args)) and type(args[0]) is Carry:
            carry = args[0]
            y = func(carry.plain, *[plain(a) for a in args[1:]], **(kwargs or {}))
            return tag(y, carry.call, carry.site, carry.state, carry.touched)
        if kwargs:
            output = func(*[plain(a) for a in args], **{name: plain(a) for name, a in kwargs.items()})
        else:
            output = func(*[plain(a) for a in args])
        if not args or type(args[0]) is not Carry or output is not args[0].plain:
            return output
        passed_on = any(func is dropout for dropout in DROPOUTS) and not (kwargs and kwargs.get("inplace"))
        return output if passed_on else args[0]


def tag(x: Tensor, call: BlockCall, site: int, state: State, touched: int = 0) -> Carry:
    """Return x as the carry of a call on its way to a site."""
    carry = x.as_subclass(Carry)
    carry.plain = x
    carry.call = call
    carry.site = site
    carry.state = state
    carry.touched = touched
    return carry


def plain(value: Any) -> Any:
    """Return a value without tags: the very tensors that were tagged."""
    kind = type(value)
    if kind is Carry:
        return value.plain
    if kind is tuple or kind is list:
        return kind([plain(item) for item in value])
    return value


def refuse_reentrant(path: str) -> None:
    """Raise: a site was met under no_grad in a call with gradient, as in the first pass of a reentrant checkpoint."""
    raise FlowscopeError(
        f"{path}: reentrant checkpointing (or no_grad) around a merge inside a wrapped block would lose its gradient: "
        "use checkpoint(..., use_reentrant=False), or checkpoint the whole block."
    )


class SiteMode(FunctionMode):
    """Answers the adds of the carries of one block's call by their number among the adds that the block's code does."""

    def __init__(self, calls: list[BlockCall]) -> None:
        super().__init__()
        self.calls = calls
        self.seen = [0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ADDS and len(args) > 1 and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            self.seen[0] += 1
            for call in self.calls:
                site = call.fired[0]
                if site < len(call.rules) and self.seen[0] - 1 == call.rules[site].visible:
                    alpha = kwargs.get("alpha") if kwargs else None
                    return call.meet(site, call.state[0], func, args[0], args[1], alpha)
        return func(*args, **(kwargs or {}))


def run_block(block: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a woven block's own forward with its merge adds answered by its connections, one a carry."""
    rules: list[BlockRule] = [block.flowscope_rule, *[rule for rule, _ in block.flowscope_more]]
    calls: list[BlockCall] = []
    begun: list[tuple[BlockRule, BlockCall, Tensor]] = []
    for rule in rules:
        call = BlockCall(block._modules[rule.child], rule)
        calls.append(call)
        if not rule.absent:
            begun.append((rule, call, begin(rule, call, args, kwargs)))
    tagged = all(rule.taggable for rule in rules) and all(type(x) is Tensor for _, _, x in begun)
    for rule, call, x in begun:
        carried = tag(x, call, 0, call.state[0]) if tagged else x
        if rule.name in kwargs:
            kwargs = {**kwargs, rule.name: carried}
        else:
            args = (*args[: rule.position], carried, *args[rule.position + 1 :])
    if tagged:
        output = forward(block, *args, **kwargs)
    else:
        with SiteMode(calls):
            output = forward(block, *args, **kwargs)
    for call in calls:
        if call.fired[0] != len(call.rules):
            refuse_missed(call.rule, call)
        output = leave(output, call.rule.output, call)
    return output


def begin(rule: BlockRule, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return what a block's own code gets as carry."""
    x = kwargs[rule.name] if rule.name in kwargs else args[rule.position]
    if not isinstance(x, Tensor):
        refuse_kind(rule, x)
    connection = call.connection
    if x.is_nested or (rule.dims and x.dim() not in (rule.dims, rule.dims - (not connection.first))):
        refuse_shape(rule, x)
    if not rule.deferred:
        x, call.state[0] = connection.begin(x)
        call.shape = None if rule.rules[0].fresh else x.shape
        call.hand(0, x)
    return cast(Tensor, x)


def leave(output: Any, place: int | str | None, call: BlockCall) -> Any:
    """Return a block's output without tags, its carry as the connection hands it on."""
    call.refuse_overwritten()
    if place == INSIDE:
        return plain(output) if isinstance(output, Tensor) else output
    if place is None or isinstance(output, Tensor):  # some blocks return a tuple only when asked for more
        return call.connection.end(plain(output), call.state[0])
    if isinstance(output, dict):
        for key in output:
            output[key] = plain(output[key])
        output[place] = call.connection.end(output[place], call.state[0])
        return output
    items = [plain(item) for item in output]
    items[place] = call.connection.end(items[place], call.state[0])  # type: ignore[index]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def refuse_missed(rule: BlockRule, call: BlockCall) -> None:
    """Raise: a promised site did not fire."""
    raise FlowscopeError(
        f"{rule.path}: {call.fired[0]} of {len(rule.rules)} merge sites fired in this forward; the block adds "
        "elsewhere than in the trace (another path for training, other arguments, a fused kernel). Pass "
        "example_inputs that take the path you train, or leave the block out with where=."
    )


def refuse_kind(rule: BlockRule, x: Any) -> None:
    """Raise: what came in is no tensor."""
    raise FlowscopeError(
        f"{rule.path}: got {type(x).__name__} where the carried x was expected, a tensor. Pass example_inputs to wrap, "
        "or leave the block out with where=."
    )


def refuse_shape(rule: BlockRule, x: Tensor) -> None:
    """Raise: what came in is not what the connection carries."""
    if x.is_nested:
        raise FlowscopeError(f"{rule.path}: got a nested tensor; build the encoder with enable_nested_tensor=False.")
    raise FlowscopeError(
        f"{rule.path}: got {x.dim()} axes {list(x.shape)}, expected {rule.dims}: streams were not reduced before this "
        "block, or code between the blocks changed x. Pass example_inputs, or wrap fewer blocks with where=."
    )


def run_child(child: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a woven child's own forward on plain tensors; tag what it returns where that is the carry."""
    carries: str = child.flowscope_carries
    mode = newest_mode()
    if type(mode) is SiteMode:
        if carries == "norm" and any(bypassed(call, call.fired[0], child) for call in mode.calls):
            return args[0] if args else next(iter(kwargs.values()))
        with without_newest_mode():
            return forward(child, *args, **kwargs)
    carry = None
    if carries:
        carry = next((a for a in (*args, *kwargs.values()) if type(a) is Carry), None)
        if carry is not None and carries == "norm" and bypassed(carry.call, carry.site, child):
            return carry
    if kwargs:
        kwargs = {name: plain(value) for name, value in kwargs.items()}
    output = forward(child, *[plain(a) for a in args], **kwargs)
    if carry is not None and type(output) is Tensor:
        return tag(output, carry.call, carry.site, carry.state)
    if carry is not None and type(output) is tuple and type(output[0]) is Tensor:
        return (tag(output[0], carry.call, carry.site, carry.state), *output[1:])
    return output


def bypassed(call: BlockCall, site: int, norm: Any) -> bool:
    """Whether a norm is that between the site before and this one, and to be skipped."""
    connection = call.connection
    return site > 0 and connection.bypass_outer[site - 1] and connection.existing_norms[0][site - 1] is norm
