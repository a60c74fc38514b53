"""`saving`: what is saved and loaded again gives the same output."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.errors import CannotJudgeError
from flowscope.scripts import outermost_models
from flowscope.torch_internals import leaves_below
from flowscope.trials.bench import Bench, batch_tensors
from flowscope.trials.layout import first_that_differs
from flowscope.trials.trial import Trial, TrialFinding

DEEPEST = 4
"""Containers within each other that are looked into."""


class Saving(Trial):
    """Save the state, draw every tensor that the loss depends on anew, load; then look what did not come back."""

    name = "saving"
    proves = "state_dict holds all that the loss depends on"
    blind = "the state of the optimizer, the scheduler and the loader"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """A finding for leaves that are not saved, one for state that changes in training and is not."""
        model, call = bench.model, bench.calls()[0]
        leaves = self._kept_leaves(bench)
        others = _of_other_nets(model, leaves)
        leaves = [leaf for leaf in leaves if id(leaf) not in others]
        before = bench.look(call)
        if first_that_differs(before[-1:], bench.look(call)[-1:], _whole) is not None:
            raise CannotJudgeError("the same input gives different outputs in evaluation mode (see determinism)")
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        saved.seek(0)
        state = [*model.parameters(), *(b for n, b in _persistent(model))]
        held = {id(t): t for t in [*leaves, *state] if t.is_floating_point() and t.dtype not in _INDEXED}
        values = {key: t.detach().clone() for key, t in held.items()}
        with torch.no_grad():
            draw = torch.Generator().manual_seed(3)
            for t in held.values():
                t.copy_(torch.randn(t.shape, generator=draw).to(t) + 3)
        loaded = torch.load(saved, weights_only=False)
        model.load_state_dict(loaded)
        lost = [t for key, t in held.items() if not torch.equal(t.detach(), values[key])]
        if lost:
            yield self._lost(model, lost)
            return
        after = bench.look(call)
        if first_that_differs(before[-1:], after[-1:], _whole) is not None:
            first = first_that_differs(before, after, _whole)
            where = first.path if first is not None else ""
            message = f"saved and loaded again, the model gives another output, first at {where or 'the model'}"
            yield self.failed(where, message, "look there for weights that are tied, or changed by load_state_dict")
            return
        changed = self._changes(bench)
        if changed:
            message = f"{changed[0]} changes in training and is not in state_dict"
            yield self.failed(
                changed[0], message, "register_buffer it with persistent=True, or it begins anew on a resume"
            )
            return
        said = f"; {len(others)} tensors of the loss are parameters of other nets" if others else ""
        yield self.passed(f"saved, drawn anew and loaded, the model gives the same output{said}")

    def _lost(self, model: nn.Module, lost: list[Tensor]) -> TrialFinding:
        ids, count = {id(t) for t in lost}, len(lost)
        named = itertools.chain(model.named_parameters(), model.named_buffers(), _plain(model))
        where, first = next(((path, t) for path, t in named if id(t) in ids), ("", lost[0]))
        if not where:
            message = f"the loss depends on {count} tensors outside the model, first one of {list(first.shape)}"
            return self.noted("", message, "save them yourself, or make them parameters of a module")
        message = f"{count} tensors that the loss depends on are not in state_dict, first {where} {list(first.shape)}"
        if where in dict(model.named_parameters()):
            advice = "look at what leaves it out: a filter on keys, a hook, a state_dict of one's own"
            return self.failed(where, message, advice)
        advice = "register them: nn.ModuleList for layers in lists, nn.Parameter or register_buffer for tensors"
        return self.failed(where, message, advice)

    @staticmethod
    def _kept_leaves(bench: Bench) -> list[Tensor]:
        """The leaves of the loss's graph that live longer than one pass."""
        with bench.alike():
            first = leaves_below([bench.loss(bench.batches[0]).grad_fn])
            again = {id(leaf) for leaf in leaves_below([bench.loss(bench.batches[0]).grad_fn])}
        given = {id(x) for batch in bench.batches for x in batch_tensors(batch)}
        return [leaf for leaf in first if id(leaf) in again and id(leaf) not in given]

    @staticmethod
    def _changes(bench: Bench) -> list[str]:
        """Tensors outside of state_dict that a training pass changes and an evaluation reads."""
        unsaved = dict(_unsaved(bench.model))
        before = {name: t.detach().clone() for name, t in unsaved.items()}
        bench.gradients(bench.batches[0])
        now = dict(_unsaved(bench.model))
        changed = [n for n, t in now.items() if n in before and t.shape == before[n].shape]
        changed = [n for n in changed if not torch.equal(now[n], before[n])]
        return changed if changed and _reads(bench, [now[n] for n in changed], [before[n] for n in changed]) else []


def _of_other_nets(model: nn.Module, leaves: list[Tensor]) -> set[int]:
    """The ids of those leaves that are parameters of nets which the model holds nowhere: a critic, a teacher.

    They are in the state of that net. A single layer that stands outside is none.
    """
    own = {id(t) for _, t in itertools.chain(model.named_parameters(), _plain(model))}
    strangers = {id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in own}
    nets = [net for net in outermost_models(strangers) if any(True for _ in net.children())] if strangers else []
    return strangers & {id(p) for net in nets if net is not model for p in net.parameters()}


def _reads(bench: Bench, now: list[Tensor], before: list[Tensor]) -> bool:
    """Whether an evaluation differs with the values of before: what is kept to be looked at is no state."""
    with_new = bench.look(bench.calls()[0])
    with torch.no_grad():
        for tensor, value in zip(now, before, strict=True):
            tensor.detach().copy_(value)
    return first_that_differs(with_new[-1:], bench.look(bench.calls()[0])[-1:], _whole) is not None


def _whole(x: Tensor) -> Tensor:
    return x


_INDEXED = (torch.float8_e4m3fn, torch.float8_e5m2)


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = model.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _unsaved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are not persistent, and floating-point tensors in plain attributes that are not learned, by path."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set and buffer.is_floating_point():
                yield f"{path}.{name}".lstrip("."), buffer
    yield from ((path, t) for path, t in _plain(model) if t.is_floating_point() and not t.requires_grad)


def _plain(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in plain attributes of modules, also in lists, dicts and modules there, by path."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors(f"{path}.{name}".lstrip("."), value, DEEPEST)


def _tensors(path: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        yield from ((f"{path}.{name}", t) for name, t in (*value.named_parameters(), *value.named_buffers()))
    elif isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.flags.writeable:
        yield path, torch.from_numpy(value)
    elif isinstance(getattr(value, "__dict__", None), dict) and depth == DEEPEST and not isinstance(value, type):
        for name, item in vars(value).items():
            yield from _tensors(f"{path}.{name}", item, 0)
    elif depth and isinstance(value, (list, tuple, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from _tensors(f"{path}[{key!r}]", item, depth - 1)
