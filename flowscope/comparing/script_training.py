"""One training of `flowscope try`: a script runs to its n-th optimizer step with its model wrapped, and is ended there.

The script is not changed: its model is wrapped at its first forward after an optimizer was made for it, on that
forward's own inputs, and the optimizer gets the connections' parameters. A further seed moves every `torch.manual_seed`
of the script by the same amount, whatever the mode.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowscope.comparing.outcomes import Outcome, telling
from flowscope.scripts import PatchOnImport, after_making, outermost_models, script_of

STRIDE = 7919
"""By so much the k-th seed moves what the script seeds with, k times."""


class Trying:
    """Follows a script to its last step.

    Attributes:
        task: candidate, seed, steps, command, module.
        meter: what is measured; None until the model runs.
        scope: of the wrapped model.
        error: why the model was not wrapped.
    """

    def __init__(
        self, task: dict[str, Any], progress: Callable[[int, float], None], end: Callable[[Outcome], Any]
    ) -> None:
        self.task, self._progress, self._end = task, progress, end
        self.meter: Any = None
        self.scope: Any = None
        self._model: Any = None
        self._optimizer: Any = None
        self._losses: list[float] = []
        self._finder = PatchOnImport(
            {
                "torch.random": self._seeds_imported,
                "numpy.random": lambda module: module.seed(task["seed"]),
                "torch.optim.optimizer": self._optimizers_imported,
            }
        )

    def __enter__(self) -> Trying:
        """Wait for the imports."""
        sys.meta_path.insert(0, self._finder)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing to do: the process ends."""

    def _seeds_imported(self, module: Any) -> None:
        seed, shift = module.manual_seed, STRIDE * self.task["seed"]

        @functools.wraps(seed)
        def shifted(number: int) -> Any:
            return seed(number + shift)

        module.manual_seed = shifted

    def _optimizers_imported(self, module: Any) -> None:
        after_making(module.Optimizer, self._optimizer_made)
        module.register_optimizer_step_post_hook(self._step_ended)

    def _optimizer_made(self, optimizer: Any) -> None:
        from flowscope.instruments.wiring import held_by

        models = outermost_models(held_by(optimizer))
        if self._optimizer is not None or not models:
            return
        self._listen_to_backward()
        self._optimizer = optimizer
        self._model = max(models, key=lambda model: sum(p.numel() for p in model.parameters()))
        self._handle = self._model.register_forward_pre_hook(self._first_forward, with_kwargs=True)

    def _first_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        import torch

        from flowscope.comparing.factories import LOOKS, as_inputs
        from flowscope.comparing.measuring import Meter
        from flowscope.merging.wrapping import wrap
        from flowscope.scope import watch

        if not torch.is_grad_enabled():
            return  # an evaluation before training
        self._handle.remove()
        candidate = self.task["candidate"]
        self.meter = Meter(candidate.label, self.task["seed"], self._progress)
        try:
            if candidate.label != "residual":
                inputs = as_inputs(model, args, kwargs)
                wrap(model, candidate.mode, optimizer=self._optimizer, example_inputs=inputs, **candidate.options)
            every = max(2, self.task["steps"] // LOOKS)
            self.scope = watch(model, self._optimizer, every=every, config={"console": "off"})
            self.scope.automatic = True
            saving = contextlib.ExitStack()
            saving.enter_context(self.meter.saving(model))
            model.register_forward_hook(lambda *call: saving.close(), always_call=True)
        except Exception as error:
            self._end(self.meter.outcome(model, error=f"{type(error).__name__}: {error}"))

    def _listen_to_backward(self) -> None:
        import torch

        backward: Callable[..., Any] = torch.Tensor.backward

        def listening(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if loss.numel() == 1 and not torch.compiler.is_compiling():
                self._losses.append(float(loss.detach()))
            return backward(loss, *args, **kwargs)

        torch.Tensor.backward = listening  # type: ignore[method-assign,assignment]

    def _step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is not self._optimizer or self.meter is None:
            return
        losses, self._losses = self._losses, []
        self.meter.step(sum(losses) / len(losses) if losses else float("nan"))
        if len(self.meter.losses) >= self.task["steps"]:
            self.finish()

    def finish(self, error: str = "") -> None:
        """Hand over what was seen."""
        from flowscope.comparing.measuring import product_of

        if self.meter is None:
            candidate = self.task["candidate"]
            reason = error or "the script made no optimizer for a model that it then ran"
            self._end(Outcome(candidate.label, self.task["seed"], error=reason))
        else:
            product = float("nan") if self.scope is None else product_of(self.scope)
            self._end(self.meter.outcome(self._model, product, error))


def main(path: Path) -> None:
    """Run the script of a task and write the outcome beside it, then end the process where the script is."""
    from flowscope.trials.command import leave

    task = pickle.loads(path.read_bytes())

    def end(outcome: Outcome) -> None:
        path.with_suffix(".outcome").write_bytes(pickle.dumps(outcome))
        leave(0)

    random.seed(task["seed"])
    with Trying(task, telling(path.with_suffix(".progress")), end) as trying:
        try:
            script_of(task["command"], module=task["module"], asked="try")()
        except SystemExit as leaving:
            trying.finish(f"it left with status {leaving.code}" if leaving.code else "")
        except BaseException as error:
            trying.finish(f"{type(error).__name__}: {error}")
        trying.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
