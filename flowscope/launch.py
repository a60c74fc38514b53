"""`flowscope run train.py`: an unmodified script runs as it would alone, and its models are watched.

Nothing of torch is imported before the script imports it: scripts set environment variables first. When the script does
import it, two constructors are wrapped in this process: that of every optimizer, which tells which parameters will be
trained (a model is watched from there on, before its first compiled call), and that of GradScaler. Backward passes
tell the loss. Processes that the script spawns itself are not followed; under torchrun each rank is launched anew:

    flowscope run train.py --epochs 3
    flowscope run -m package.train
    torchrun --nproc-per-node 2 -m flowscope run train.py
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowscope.errors import FlowscopeError
from flowscope.faults import is_off, raise_interrupt
from flowscope.scripts import (
    PatchOnImport,
    after_making,
    first_rank,
    hear_backward,
    outermost_models,
    script_of,
    tell_at_end,
    tell_of,
)
from flowscope.sinks import ConsoleSink
from flowscope.terminal import tell

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flowscope.records import Alert
    from flowscope.scope import Scope
    from flowscope.steps.backward_losses import BackwardLosses


NOTHING_WATCHED = (
    "nothing was watched: no optimizer was made for the parameters of a model in this process. "
    "(Processes that the script spawns itself are not followed; use torchrun -m flowscope run.)"
)


class Launch:
    """The scopes of one script: attached when an optimizer is made, closed and summarised when the script ends."""

    def __init__(self, log_dir: Path, options: dict[str, Any]) -> None:
        self._log_dir, self._options = log_dir, options
        self.scopes: list[Scope] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._scalers: list[weakref.ref[Any]] = []
        self._told: list[BackwardLosses] = []
        self._failed: set[str] = set()
        self._finder = PatchOnImport(
            {
                "torch.optim.optimizer": lambda module: after_making(module.Optimizer, self._optimizer_made),
                "torch.amp.grad_scaler": lambda module: after_making(module.GradScaler, self._scaler_made),
            }
        )

    def __enter__(self) -> Launch:
        """Wait for the imports."""
        sys.meta_path.insert(0, self._finder)
        return self

    def raised(self, kinds: Collection[str]) -> Alert | None:
        """The first alert of these kinds or severities that was raised."""
        alerts = [alert for scope in self.scopes for alert in scope.alerts if alert.state == "raised"]
        return next((alert for alert in alerts if {alert.kind, alert.severity} & {*kinds}), None)

    def __exit__(self, *exc_info: object) -> None:
        """Close the scopes and print their summaries to stderr; the script's stdout stays its own."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        writes = first_rank()
        for number, scope in enumerate(self.scopes):
            summary = self._guard(f"the summary of model {number + 1}", scope.summary)
            self._guard(f"the end of model {number + 1}", scope.close)
            if writes and summary is not None:
                tell(f"\n{summary}")
        folder = next((scope.log_dir for scope in self.scopes if scope.log_dir is not None), self._log_dir)
        last = f"the run is in {folder}; look at it with: tensorboard --logdir {folder}"
        if writes:
            tell(f"flowscope: {last if self.scopes else NOTHING_WATCHED}")

    # -- what the script constructs ------------------------------------------------------------------------------------

    def _optimizer_made(self, optimizer: Any) -> None:
        from flowscope.instruments.wiring import held_by

        for model in outermost_models(held_by(optimizer)):
            if not any(known() is model for known in self._models):
                self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        import flowscope

        self._models.append(weakref.ref(model))
        folder = self._log_dir
        if self.scopes:
            folder = (self.scopes[0].log_dir or folder) / f"{type(model).__name__}-{len(self.scopes) + 1}"
        live = [scaler for known in self._scalers if (scaler := known()) is not None]
        try:
            scope = flowscope.watch(
                model,
                log_dir=folder,
                scaler=live[-1] if live else None,
                # the script's stdout stays its own, also where it has no stderr
                sinks=[] if sys.stderr is None else [ConsoleSink(sys.stderr, records=False)],
                **self._options,
            )
        except FlowscopeError as error:
            tell(f"flowscope: {type(model).__name__} is not watched: {error}")
            return
        scope.automatic = True
        self.scopes.append(scope)
        if (told := scope.losses_of_backward()) is not None:
            self._told.append(told)
        if len(self.scopes) == 1:
            hear_backward(self._backward_begins, self._backward_ended)

    def _scaler_made(self, scaler: Any) -> None:
        self._scalers.append(weakref.ref(scaler))
        for scope in self.scopes:
            scope.use_scaler(scaler)

    # -- losses --------------------------------------------------------------------------------------------------------

    def _backward_begins(self, loss: Tensor, keeps_graph: bool) -> bool:
        del keeps_graph
        if not self._guard("the loss", _has_value, loss):
            return False
        self._guard("the loss", self._tell_loss, loss)
        return True

    def _backward_ended(self) -> None:
        for told in self._told:
            self._guard("the loss", told.ended)

    def _tell_loss(self, loss: Tensor) -> None:
        from flowscope.arguments import loss_value

        value = loss.detach()
        scales = [getattr(known(), "_scale", None) for known in self._scalers]
        used = [scale for scale in scales if scale is not None]
        number = loss_value(value / used[-1].to(value.device) if used else value)
        if number is not None:
            for told in self._told:
                told.begins(number)

    def _guard(self, fuse: str, call: Callable[..., Any], *args: Any) -> Any:
        """A fault of ours is told once and never raised."""
        if fuse in self._failed:
            return None
        try:
            return call(*args)
        except Exception as error:
            raise_interrupt(error)
            self._failed.add(fuse)
            tell(f"flowscope: {fuse} is not seen any more, the script goes on: {type(error).__name__}: {error}")
            return None


def _has_value(loss: Tensor) -> bool:
    """Whether a loss is one real number; a complex one, or one of a model without values, is no point of a curve."""
    return loss.numel() == 1 and not loss.is_complex() and not loss.is_meta


# -- the script ------------------------------------------------------------------------------------------------------


def run_script(
    command: Sequence[str], log_dir: Path, *, module: bool, options: dict[str, Any], fail_on: Sequence[str] = ()
) -> int:
    """Run a script or module as `python script.py args...` or `python -m module args...` would; watch its models.

    Args:
        command: the script's path or the module's name, and its arguments.
        log_dir: where the run is written.
        module: whether `command[0]` is a module's name.
        options: further arguments of `flowscope.watch`.
        fail_on: kinds and severities of alerts after which a script that ends with 0 did not succeed.

    Returns:
        The exit status: 1 where such an alert was raised, else 0.

    Raises:
        FlowscopeError: there is no such script.
        SystemExit: the script's own, where it is not 0, or status 1 after an exception (shown without our frames).
    """
    script = script_of(command, module=module)
    launch = None if is_off() else Launch(log_dir, options)
    with launch or contextlib.nullcontext():
        try:
            script()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except KeyboardInterrupt:
            tell_at_end()
            raise
        except BaseException as error:
            tell_of(error)
            raise SystemExit(1) from None
    if launch is None or (alert := launch.raised(fail_on)) is None:
        return 0
    tell(f"flowscope: status 1, as --fail-on asks: {alert.kind} at step {alert.step}")
    return 1
