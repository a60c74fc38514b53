"""`flowscope check train.py`: an unmodified script runs to its third optimizer step; the trials work on what is there.

Then the process ends at once, so that nothing that the script would do at its end (saving a checkpoint) is done.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flowscope.scripts import (
    PatchOnImport,
    after_making,
    first_rank,
    hear_backward,
    outermost_models,
    script_of,
    tell_of,
)
from flowscope.terminal import shown, tell
from flowscope.trials.findings import CheckReport
from flowscope.trials.settings import Options

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flowscope.trials.bench import Bench, Resumed
    from flowscope.trials.between_steps import BetweenSteps
    from flowscope.trials.tape import Recorded, Tape
    from flowscope.trials.trial import TrialFinding

RIGHT, FAILED, UNJUDGED = 0, 1, 2
NEWEST = 2
"""Steps that are held beside an optimizer's first one and the one under way: three batches at least."""


@dataclass
class Clipping:
    """What was done to gradients between backward and the optimizer's step."""

    clipped: bool = False
    norm: float | None = None
    while_scaled: bool = False
    after: int = 0


@dataclass
class Trained:
    """One optimizer of the script.

    Attributes:
        optimizer: itself.
        models: the outermost models that hold its parameters.
        steps: the batches of its first step and of the newest ones.
        made: how many steps there were.
        before: how many steps its state told of when it began, and the ids of the parameters it had state of.
    """

    optimizer: Any
    models: list[nn.Module]
    steps: list[list[Recorded]] = field(default_factory=list)
    made: int = 0
    before: tuple[int, set[int]] = (0, set())


class Listening:
    """Follows a script up to the step at which the trials are made.

    Attributes:
        options: what was asked for.
        trained: the script's optimizers so far.
        clipping: what was done to the gradients of the step under way.
        between: what changed the weights outside of steps; None until an optimizer is made.
        loaded: the ids of the parameters that a checkpoint of a part of a model held.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.trained: list[Trained] = []
        self._tape: Tape | None = None
        self._scalers: list[Any] = []
        self.clipping = Clipping()
        self.between: BetweenSteps | None = None
        self.loaded: set[int] = set()
        self._judging = False
        self._finder = PatchOnImport(
            {
                "torch.optim.optimizer": self._optimizers_imported,
                "torch.amp.grad_scaler": lambda module: after_making(module.GradScaler, self._scalers.append),
                "torch.nn.utils.clip_grad": self._clipping_imported,
                "torch.nn.modules.module": self._modules_imported,
                "torch._dynamo": _never_compile,
            }
        )

    def __enter__(self) -> Listening:
        """Wait for the imports."""
        sys.meta_path.insert(0, self._finder)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing to do: the process ends."""

    @property
    def seen(self) -> int:
        """How many steps the busiest optimizer has made."""
        return max((one.made for one in self.trained), default=0)

    # -- what the script imports and makes -----------------------------------------------------------------------------

    def _optimizers_imported(self, module: Any) -> None:
        after_making(module.Optimizer, self._optimizer_made)
        module.register_optimizer_step_pre_hook(self._step_begins)
        module.register_optimizer_step_post_hook(self._step_ended)

    def _optimizer_made(self, optimizer: Any) -> None:
        from flowscope.instruments.wiring import held_by
        from flowscope.trials.between_steps import BetweenSteps
        from flowscope.trials.tape import Tape

        if self._judging:
            return
        if self._tape is None:
            self._tape, self.between = Tape(self._scaling, self._never_steps), BetweenSteps()
            hear_backward(self._backward_begins)
        models = outermost_models(held_by(optimizer))
        self.trained.append(Trained(optimizer, models))
        for model in models:
            self._tape.follow(model)

    def _clipping_imported(self, module: Any) -> None:
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            original = getattr(module, name)

            @functools.wraps(original)
            def clipping(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                scaled = self._scaling() != 1 and not self._unscaled()
                result = original(*args, **kwargs)
                norm = float(result) if result is not None and not scaled else None
                heard = 0 if self._tape is None else len(self._tape.recorded)
                self.clipping = Clipping(True, norm, scaled, self.clipping.after or heard)
                return result

            # where torch was imported before us, torch.nn.utils holds the name, too
            for holder in (module, sys.modules.get("torch.nn.utils")):
                if getattr(holder, name, None) is original:
                    setattr(holder, name, clipping)

    def _modules_imported(self, module: Any) -> None:
        load = module.Module.load_state_dict

        @functools.wraps(load)
        def loading(self_: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            result = load(self_, state_dict, *args, **kwargs)
            named = dict(self_.named_parameters())
            held = {id(p) for name, p in named.items() if name in state_dict}
            self.loaded = held if len(held) < len(named) else set()
            return result

        module.Module.load_state_dict = loading

    def _scaling(self) -> float:
        from flowscope.torch_internals import scale_of

        return float(scale_of(self._scalers[-1])) if self._scalers else 1.0

    def _unscaled(self) -> bool:
        from flowscope.torch_internals import has_unscaled

        return any(map(has_unscaled, self._scalers))

    def _backward_begins(self, loss: Tensor, keeps_graph: bool) -> bool:
        if self._tape is not None and not self._judging:
            self._tape.backward(loss, keeps_graph=keeps_graph)
        return True

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        one = next((one for one in self.trained if one.optimizer is optimizer), None)
        if one is None or self._judging:
            return None
        given = [*args, *kwargs.values()]
        closure = next((value for value in given if callable(value)), None)
        if closure is None:
            self._step_is_whole(one)
            return None
        return _with_closure(args, kwargs, closure, lambda: self._step_is_whole(one))

    def _step_is_whole(self, one: Trained) -> None:
        """The optimizer has all that it steps with: it is about to step, or its closure has run for the first time."""
        from flowscope.trials.between_steps import steps_before

        if self._tape is None or self.between is None:
            return
        if not one.steps:
            one.before = steps_before(one.optimizer)
        one.steps = [*one.steps[:1], *one.steps[1:][-NEWEST:], self._tape.taken()]
        one.made += 1
        self.between.begins(one.optimizer)
        if one.made >= self.options.steps:
            self._tape.close()
            self._judging = True  # trials make optimizers and step, too
            end(judged(self, one), self.options)
        self.clipping = Clipping()

    def _never_steps(self) -> None:
        from flowscope.trials.tape import MOST

        reason = f"it ran its models {MOST} times without a step and was ended"
        tell(_unjudged(Path(sys.argv[0]).name, self, reason))
        leave(UNJUDGED)

    def _step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._tape is not None and self.between is not None and not self._judging:
            self._tape.taken()  # what a closure was evaluated for further
            self.between.ended(optimizer)


def _never_compile(dynamo: Any) -> None:
    """Let compiled models run as plain Python: hooks and the tape see what is in them."""
    if hasattr(dynamo, "set_stance"):
        dynamo.set_stance("force_eager")


def _with_closure(args: Any, kwargs: Any, closure: Callable[[], Any], first: Callable[[], None]) -> Any:
    """The arguments of a step with a closure that calls `first` when it has run for the first time."""
    waiting = [first]

    @functools.wraps(closure)
    def heard(*given: Any, **named: Any) -> Any:
        result = closure(*given, **named)
        if waiting:
            waiting.pop()()
        return result

    def changed(value: Any) -> Any:
        return heard if value is closure else value

    return tuple(map(changed, args)), {key: changed(value) for key, value in kwargs.items()}


def judged(listening: Listening, last: Trained) -> CheckReport:
    """What the trials found; nothing where a fault of ours is in the way, which is told."""
    try:
        return judge(listening, last)
    except KeyboardInterrupt:
        leave(130)  # a script may save where it is interrupted
    except Exception as error:
        tell(f"flowscope check: cannot judge: {type(error).__name__}: {error}")
        return CheckReport(())


def judge(listening: Listening, last: Trained) -> CheckReport:
    """All trials on each model of the script."""
    from flowscope.trials.sitting import chosen, run_trials

    options = listening.options
    trials = chosen((), options.only or None, options.skip or None)
    findings: list[TrialFinding] = []
    models = {id(model): model for one in listening.trained for model in one.models}
    for model in models.values():
        bench = bench_of(listening, last, model)
        name = f"{type(model).__name__}: " if len(models) > 1 else ""
        if bench is not None:
            report = run_trials(bench, trials, _progress(name))
            findings += [replace(finding, message=name + finding.message) for finding in report.findings]
    if not findings:
        tell("flowscope check: no loss was seen: backward was called on none that torch made of what a model returned.")
    return CheckReport(tuple(findings))


def _progress(head: str) -> Callable[[int, int, str], None]:
    def show(number: int, count: int, name: str) -> None:
        _on_one_line(shown(f"flowscope check: [{'#' * number}{'.' * (count - number)}] {head}{name}"))

    return show


def _on_one_line(text: str) -> None:
    """Show on the terminal what the next such text replaces; "" takes it away."""
    if first_rank() and sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def bench_of(listening: Listening, last: Trained, model: nn.Module) -> Bench | None:
    """What was seen of one model, ready for trials; None where none of its optimizers has stepped yet."""
    from flowscope.trials.bench import Bench, Step

    owners = [one for one in listening.trained if any(held is model for held in one.models)]
    inner = _unwrapped(model)
    batches = [r for one in owners for step in one.steps[::-1] for r in step if r.calls_of(model)]
    if not batches:
        return None
    step = None
    if last in owners:
        names = {n: p.grad.detach().clone() for n, p in inner.named_parameters() if p.grad is not None}
        clipping, alone = listening.clipping, len(listening.trained) == 1
        kept = listening.between.kept if listening.between is not None else {}
        step = Step(
            last.steps[-1],
            names,
            clipping.clipped,
            clipping.norm,
            clipping.while_scaled,
            clipping.after if clipping.clipped and alone else None,
            {n: kept[id(p)] for n, p in inner.named_parameters() if id(p) in kept},
        )
    bench = Bench(
        inner,
        batches[:3],
        lambda current, recorded: recorded.play(lambda call: current if call is model else call),
        [one.optimizer for one in owners],
        step,
        _loaders(),
        _resumed(listening, owners, inner),
    )
    if step is not None and batches[0] in step.batches:  # of earlier steps the weights were others
        bench.compare(batches[0])
    return bench


def _resumed(listening: Listening, owners: Sequence[Trained], model: nn.Module) -> Resumed | None:
    """What of a run before is known: the optimizers' states, else a checkpoint that held a part of the model."""
    from flowscope.trials.bench import Resumed

    with_state = set().union(*(one.before[1] for one in owners))
    trained = with_state or listening.loaded
    names = frozenset(name for name, p in model.named_parameters() if id(p) in trained)
    first = next((recorded for one in owners for step in one.steps for recorded in step), None)
    return Resumed(max(one.before[0] for one in owners), names, first) if names else None


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model without what synchronises ranks, or compiles it."""
    inner: nn.Module = getattr(model, "module", model) if "Parallel" in type(model).__name__ else model
    inner = getattr(inner, "_orig_mod", inner)
    return inner if inner is model else _unwrapped(inner)


def _loaders() -> list[Any]:
    from torch.utils.data import DataLoader

    return [found for found in gc.get_objects() if type(found) is DataLoader]


# -- the end ----------------------------------------------------------------------------------------------------------


def end(report: CheckReport, options: Options) -> NoReturn:
    """Print the report and leave the process, without anything that the script does at its end."""
    status = UNJUDGED
    try:
        status = _of_all_ranks(report.status)
        _on_one_line("")
        if first_rank() and sys.__stdout__ is not None:
            sys.__stdout__.reconfigure(errors="replace")
            print(report.json() if options.json else report, file=sys.__stdout__)
    finally:
        leave(status)


def _of_all_ranks(status: int) -> int:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return status
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, status)
    return FAILED if FAILED in found else max(found)


def leave(status: int) -> NoReturn:
    """End the process: workers stopped, output flushed, no `finally` and no `atexit` of the script."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]
    os._exit(status)


def check_script(command: Sequence[str], options: Options, *, module: bool = False) -> NoReturn:
    """Run a script or module to its third step, and try what it trains.

    Args:
        command: the script's path or the module's name, and its arguments.
        options: which trials, and how they are shown.
        module: whether `command[0]` is a module's name.

    Raises:
        FlowscopeError: there is no such script.
    """
    script = script_of(command, module=module, asked="check")
    if options.json:
        sys.stdout = sys.stderr  # the script may print
    with Listening(options) as listening:
        reason = "it ended"
        try:
            script()
        except SystemExit as leaving:
            reason = f"it left with status {leaving.code}"
        except KeyboardInterrupt:
            leave(130)
        except BaseException as error:
            tell_of(error)
            reason = f"it raised {type(error).__name__}"
        tell(_unjudged(Path(command[0]).name, listening, reason))
        leave(UNJUDGED)


def _unjudged(name: str, listening: Listening, reason: str) -> str:
    steps, wanted = listening.seen, listening.options.steps
    if not listening.trained:
        told = f"flowscope check: {name}: {reason} before it made an optimizer for a model; expected a training script."
        return f"{told} (Processes that it spawns are not followed: torchrun -m flowscope check.)"
    advice = f"; try --steps {steps}" if steps else ": expected one that trains"
    return f"flowscope check: {name}: {reason} after {steps} optimizer steps, expected {wanted}{advice}."
