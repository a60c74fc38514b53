"""Give a block its connection, in place: the block and some of its children change class, no module moves.

Names, hooks, parameters, state_dict, isinstance, deepcopy and pickle survive. Children without a site get the plain
tensor, so nothing is intercepted inside them; those on the carry's own path (post-norm, dropout) hand a tagged tensor
on. How the adds are answered: `interception`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, ConnectionContext, ModeOptions
from flowscope.merging.interception import BlockRule, run_block, run_child
from flowscope.merging.modes import Rule, make_connection
from flowscope.model.sites import BlockSites

logger = logging.getLogger("flowscope")


@dataclass
class Notice:
    """Whether something was said already; shared by the connections of one `wrap`."""

    said: bool = False  # that a checkpoint has no connections
    without_options: bool = False  # that it has them, without their options


@dataclass
class Recipe:
    """How a block's connection was made, to make it again with its initial values."""

    mode: str | Rule
    context: ConnectionContext
    options: ModeOptions
    seed: int
    notice: Notice

    def make(self) -> Connection:
        """Return the connection as it is at the start; the random state stays as it is."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return make_connection(self.mode, self.context, self.options)


class Woven:
    """Marks the classes made here.

    Attributes:
        flowscope_run: what is called instead of the original forward, as `run(module, forward, args, kwargs)`.
    """

    flowscope_run: Any


Lane = tuple[BlockRule, Recipe]
"""How one carry of a block finds its sites, and how its connection was made."""


class WovenBlock(Woven):
    """A block with merge sites: its forward is the original's between `begin` and `end` of the connection."""

    flowscope_run = staticmethod(run_block)
    flowscope_rule: BlockRule
    flowscope_recipe: Recipe
    flowscope_more: tuple[Lane, ...] = ()  # of further carries

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        absent = {rule.child: recipe for rule, recipe in lanes_of(self) if not has_keys(state_dict, prefix, rule.child)}
        for child, recipe in absent.items():
            fill_absent(state_dict, prefix, child, recipe)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class WovenSequence(WovenBlock):
    """A woven `nn.Sequential`: what it runs in order does not include the connection."""

    def __iter__(self) -> Iterator[nn.Module]:
        modules: dict[str, nn.Module] = vars(self)["_modules"]
        own = {rule.child for rule, _ in lanes_of(self)}
        return iter([module for name, module in modules.items() if name not in own])

    def __len__(self) -> int:
        return len(vars(self)["_modules"]) - len(lanes_of(self))


class WovenChild(Woven):
    """A child of a woven block that holds no site: it gets the plain tensor, out of sight of the mode."""

    flowscope_run = staticmethod(run_child)
    flowscope_carries: str  # "" | "carry" | "norm": what it returns is the carry


def lanes_of(block: WovenBlock) -> tuple[Lane, ...]:
    """Return a woven block's carries."""
    return ((block.flowscope_rule, block.flowscope_recipe), *block.flowscope_more)


def has_keys(state_dict: dict[str, Any], prefix: str, child: str) -> bool:
    """Whether a checkpoint has a block's connection, or nothing of the block at all."""
    own = f"{prefix}{child}."
    return any(key.startswith(own) for key in state_dict) or not any(key.startswith(prefix) for key in state_dict)


class WovenInstance(WovenChild):
    """Such a child whose forward was chosen on the instance (`self.forward = self.fast` in its `__init__`)."""

    flowscope_forward: Any


def own_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call what stood on the instance as forward."""
    return module.flowscope_forward(*args, **kwargs)


def fill_absent(state_dict: dict[str, Any], prefix: str, child: str, recipe: Recipe) -> None:
    """Add a connection's initial values to a checkpoint that has the block but was saved before wrapping."""
    values = recipe.make().state_dict()
    state_dict.update({f"{prefix}{child}.{name}": value for name, value in values.items()})
    if values and not recipe.notice.said:
        recipe.notice.said = True
        logger.warning("the checkpoint was saved before wrap: its connections start from their initial values")


@functools.cache
def woven_class(mixin: Any, base: Any) -> type:
    """Return the class of a woven module: `base` under its own name, with `mixin` in front."""
    run, original = mixin.flowscope_run, base.forward
    called = own_forward if mixin is WovenInstance else original

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, called, args, kwargs)

    def reduce_ex(self: Any, protocol: int) -> Any:
        return remake, (mixin, base), *object.__reduce_ex__(self, protocol)[2:]

    members = {"forward": forward, "__reduce_ex__": reduce_ex}
    members |= {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (mixin, base), members)


def remake(mixin: type, base: type) -> Any:
    """Make an empty module of a woven class (for pickle and deepcopy, which cannot find it by name)."""
    made: Any = woven_class(mixin, base)
    return made.__new__(made)


def change_class(module: nn.Module, mixin: type, path: str) -> None:
    """Put a module into its woven class.

    Raises:
        FlowscopeError: its `forward` was replaced on the instance, which would hide the woven one.
    """
    if "forward" in vars(module):
        raise FlowscopeError(
            f"wrap: {path}.forward was replaced on the instance ({type(module).__name__}); wrap the model before that."
        )
    kind: Any = type(module)
    module.__class__ = woven_class(mixin, kind)


def original_class(module: nn.Module) -> type:
    """Return the class a woven module had."""
    return next(c for c in type(module).__mro__ if not issubclass(c, Woven))


def weave(model: nn.Module, block: BlockSites, rule: BlockRule, recipe: Recipe) -> Connection:
    """Give a block a connection, and return it."""
    module, connection = model.get_submodule(block.path), recipe.make()
    carriers = dict(block.traced.carriers)
    for name in sorted({*carriers, *block.traced.quiet}):
        child = module.get_submodule(name)
        kind = "" if name not in carriers else "norm" if carriers[name] else "carry"
        if not isinstance(child, Woven):
            chosen = vars(child).pop("forward", None)
            change_class(child, WovenChild if chosen is None else WovenInstance, f"{block.path}.{name}")
            vars(child)["flowscope_carries"] = kind
            if chosen is not None:
                vars(child)["flowscope_forward"] = chosen
        elif isinstance(child, WovenChild):
            vars(child)["flowscope_carries"] = kind or child.flowscope_carries
    if isinstance(module, WovenBlock):
        vars(module)["flowscope_more"] = (*module.flowscope_more, (rule, recipe))
    else:
        change_class(module, WovenSequence if isinstance(module, nn.Sequential) else WovenBlock, block.path)
        vars(module).update(flowscope_rule=rule, flowscope_recipe=recipe)
    vars(connection)["notice"] = recipe.notice
    module.add_module(rule.child, connection)
    return connection


def unweave(model: nn.Module) -> None:
    """Take every connection and every woven class away again."""
    for module in list(model.modules()):
        if isinstance(module, WovenBlock):
            for rule, _ in lanes_of(module):
                del module._modules[rule.child]
        if isinstance(module, WovenInstance):
            vars(module)["forward"] = vars(module).pop("flowscope_forward")
        if isinstance(module, Woven):
            for name in (
                "flowscope_rule",
                "flowscope_carries",
                "flowscope_recipe",
                "flowscope_more",
                "flowscope_stretches",
            ):
                vars(module).pop(name, None)
            module.__class__ = original_class(module)
