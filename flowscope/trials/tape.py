"""What a script does between the outputs of its models and backward, as a tape that can be played again.

The tape holds calls of whole models (to be made anew) and calls of torch's functions between them, as far as they lead
to the loss. Tensors that came from neither are constants, copied when they are first used, and so is what was computed
without gradient: texts that a model wrote before it is trained on them, a teacher's answers. Numbers that left torch
(`.item()`) are constants too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.errors import CannotJudgeError
from flowscope.model.nested import map_tensors, nested_tensors
from flowscope.torch_internals import newest_mode
from flowscope.trials.criteria import Listener
from flowscope.trials.recomputation import DRAWS

LONGEST = 20_000
"""Events between two backward passes; a longer tape is thrown away."""
MOST = 20_000
"""Forward passes with gradient before a step: a script that makes more never will (a long rollout makes thousands)."""
_SILENT = frozenset(
    {"backward", "__get__", "__set__", "requires_grad_", "item", "tolist", "register_hook", "retain_grad"}
)


@dataclass
class Event:
    """One call: of a model (`module`) or of a torch function (`function`).

    Attributes:
        call: the module or function.
        args: its positional arguments; tensors made on the tape stand as they were.
        kwargs: likewise, by name.
        made: the tensors it returned, in order.
    """

    call: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor]

    @property
    def name(self) -> str:
        """Of the function; "" of a model."""
        return str(getattr(self.call, "__name__", ""))

    @property
    def writes(self) -> Tensor | None:
        """The tensor that it changes in place; None where it changes none."""
        inside = self.name == "__setitem__" or (self.name.endswith("_") and not self.name.endswith("__"))
        return self.args[0] if inside and self.args and isinstance(self.args[0], Tensor) else None


class Recorded:
    """What led to one backward pass; stands for a batch.

    Attributes:
        events: the calls in order.
        constants: copies of the tensors that came from elsewhere, by the number of the original.
        loss: the value that backward was called on, without the scaler's scale.
        chance: torch's random state (CPU) when the first call began.
        nets: the modules that are called; what is kept of a batch (`put_back`) keeps them, too.
    """

    def __init__(
        self, events: list[Event], constants: dict[int, Tensor], loss: Tensor, scale: float, chance: Tensor
    ) -> None:
        self.events, self.constants, self.chance = events, constants, chance
        self.nets = [*{id(event.call): event.call for event in events if isinstance(event.call, nn.Module)}.values()]
        self._loss, self._scaling = loss, scale
        self.loss = float(loss.detach()) / scale

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn between the calls of models: inputs may be made of them."""
        return any(word in event.name for event in self.events for word in DRAWS)

    @property
    def tensors(self) -> list[Tensor]:
        """The constants, the inputs of models among them."""
        return [*self.constants.values()]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Recorded:
        """The same with other constants."""
        out = copy.copy(self)
        out.constants = {key: change(x) for key, x in self.constants.items()}
        return out

    def calls_of(self, model: nn.Module) -> list[Event]:
        """The calls of one model, or of its parts where these were called in its place."""
        parts = {id(module) for module in model.modules()}
        return [event for event in self.events if id(event.call) in parts]

    @property
    def program(self) -> tuple[Any, ...]:
        """What was called, in order: equal for the micro-batches of one loss."""
        return tuple(id(event.call) if isinstance(event.call, nn.Module) else event.name for event in self.events)

    def play(self, replaced: Callable[[Any], Any] = lambda call: call) -> Tensor:
        """Make all calls again; returns the loss, without the scaler's scale.

        Args:
            replaced: what to call in the place of something on the tape.

        Raises:
            CannotJudgeError: the loss does not come from the tape.
        """
        # calls may write into their arguments
        values = {key: x.clone() for key, x in self.constants.items()}

        def current(x: Tensor) -> Tensor:
            return values.get(id(x), x)

        for event in self.events:
            args, kwargs = map_tensors(event.args, current), map_tensors(event.kwargs, current)
            made = nested_tensors(replaced(event.call)(*args, **kwargs))
            values.update({id(old): new for old, new in zip(event.made, made, strict=False)})
        if id(self._loss) not in values:
            raise CannotJudgeError("the loss was not made by torch functions from the model's outputs")
        return values[id(self._loss)] / self._scaling


class Tape:
    """Records the calls of some models and what torch computes from them, until a backward pass.

    Args:
        scale: the GradScaler's scale, asked at each backward.
        tired: called when models have run so often that no step is to be expected any more.

    Attributes:
        recorded: what led to each backward pass since the last step.
        passes: how often models have run with gradient since then.
    """

    def __init__(self, scale: Callable[[], float] = lambda: 1.0, tired: Callable[[], None] = lambda: None) -> None:
        self.recorded: list[Recorded] = []
        self.passes = 0
        self._scaling, self._tired = scale, tired
        self._followed: list[tuple[nn.Module, list[Any]]] = []
        self._inside = 0
        self._events: list[Event] = []
        self._known: dict[int, Tensor] = {}
        self._constants: dict[int, Tensor] = {}
        self._views: dict[int, Event] = {}
        self._chance: Tensor | None = None
        self._listener: Listener | None = None

    def follow(self, model: nn.Module) -> None:
        """Record the calls of a model, too, and of its parts where they are not made by the model."""
        if any(known is model for known, _ in self._followed):
            return
        handles: list[Any] = []
        self._followed.append((model, handles))
        for part in model.modules():
            if not isinstance(part, torch.jit.ScriptModule):
                handles.append(part.register_forward_pre_hook(self._before, with_kwargs=True))
                handles.append(part.register_forward_hook(self._after, with_kwargs=True, always_call=True))

    def close(self) -> None:
        """Listen no more."""
        self._silence()
        for _, handles in self._followed:
            for handle in handles:
                handle.remove()

    def backward(self, loss: Tensor, *, keeps_graph: bool = False) -> None:
        """A backward pass begins: what was heard so far led to it, and to the next one where the graph is kept."""
        if self._events and loss.numel() == 1 and id(loss) in self._known:
            chance = self._chance if self._chance is not None else torch.get_rng_state()
            events = leading_to(loss, self._events)
            used = {id(x) for event in events for x in nested_tensors((event.args, event.kwargs))}
            constants = {key: x for key, x in self._constants.items() if key in used}
            self.recorded.append(Recorded(events, constants, loss, self._scaling(), chance))
        if not keeps_graph:
            self.drop()

    def taken(self) -> list[Recorded]:
        """What was recorded for a step that begins now; nothing is left."""
        taken, self.recorded, self.passes = self.recorded, [], 0
        self.drop()
        return taken

    def drop(self) -> None:
        """Forget what was heard since the last backward pass."""
        self._silence()
        self._events, self._known, self._constants, self._views, self._chance = [], {}, {}, {}, None

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._inside == 0:
            self._silence()
            self.passes += torch.is_grad_enabled()
            if self.passes > MOST:
                self._tired()
            if self._chance is None:
                self._chance = torch.get_rng_state()
        self._inside += 1

    def _after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._inside -= 1
        if self._inside == 0 and output is not None:
            if torch.is_grad_enabled():
                self._note(Event(model, args, dict(kwargs), [*nested_tensors(output)]))
            self._listen()

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = Listener(self._heard)
            self._listener.__enter__()  # type: ignore[no-untyped-call]

    def _silence(self) -> None:
        # modes end in the order of a stack: where the script has entered one since, ours stays on, and hears nothing
        if self._listener is not None and newest_mode() is self._listener:
            self._listener.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._listener = None

    def _heard(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        event = Event(func, args, dict(kwargs), [*nested_tensors(result)])
        written = event.writes
        if self._inside or event.name in _SILENT or (not event.made and written is None):
            return
        if self._chance is None:
            return  # what comes before the first model is a constant: it drew before our state was kept
        if written is not None:
            others = nested_tensors((event.args[1:], event.kwargs))
            # what is written to a tensor from elsewhere stands in the copy that is taken when it is first used
            used = self._on_tape(written) or self._know_view(written)
            if used or (torch.is_grad_enabled() and any(id(x) in self._known for x in others)):
                self._note(event)
        elif torch.is_grad_enabled():
            self._note(event)
        elif (base := _base(event)) is not None and (self._on_tape(base) or id(base) in self._views):
            self._views[id(event.made[0])] = event

    def _on_tape(self, x: Tensor) -> bool:
        return id(x) in self._known or id(x) in self._constants

    def _know_view(self, x: Tensor) -> bool:
        """Note how a part that is written to was taken, without gradient, of a tensor on the tape; False: of none."""
        event = self._views.get(id(x))
        if event is not None and (base := _base(event)) is not None:
            self._know_view(base)
            self._note(event)
        return event is not None

    def _note(self, event: Event) -> None:
        if len(self._events) >= LONGEST:
            return
        for x in nested_tensors((event.args, event.kwargs)):
            if id(x) not in self._known and id(x) not in self._constants and not _lives(x):
                # the original is held by the event's arguments, so no other tensor gets its number
                self._constants[id(x)] = x.detach().clone()
        self._known.update({id(x): x for x in event.made})
        self._events.append(event)


def leading_to(loss: Tensor, events: list[Event]) -> list[Event]:
    """The events that a loss hangs on, in order: what is made of them only for a log is left out."""
    needed, memory, kept = {id(loss)}, {_memory(loss)}, []
    for event in reversed(events):
        written = event.writes
        draws = any(word in event.name for word in DRAWS)
        # who writes to a part (a row) of a tensor writes to the tensor
        reaches = not needed.isdisjoint(map(id, event.made)) or (written is not None and _memory(written) in memory)
        if draws or isinstance(event.call, nn.Module) or reaches:
            given = nested_tensors((event.args, event.kwargs))
            for x in given:
                needed.add(id(x))
                memory.add(_memory(x))
            kept.append(event)
    return kept[::-1]


def _memory(x: Tensor) -> int:
    """Which memory a tensor lies in: equal for a tensor and its parts while they live."""
    plain = x.layout is torch.strided and not x.is_meta and x.numel() > 0
    return x.untyped_storage().data_ptr() if plain and type(x) in (Tensor, nn.Parameter) else id(x)


def _base(event: Event) -> Tensor | None:
    """The tensor of which a call returns a part, or another view; None where it returns something new."""
    first = event.args[0] if event.args else None
    if not isinstance(first, Tensor) or len(event.made) != 1 or event.made[0] is first:
        return None
    return first if _memory(first) == _memory(event.made[0]) else None


def _lives(x: Tensor) -> bool:
    """Whether a tensor is one that training changes (a parameter), to be read as it then is."""
    return isinstance(x, nn.Parameter) or (x.is_leaf and x.requires_grad)
