"""`flowscope run train.py`: an unmodified script runs as it would alone, and its models are watched.

Nothing of torch is imported before the script imports it: scripts set environment variables first. When the script does
import it, two constructors are wrapped in this process: that of every optimizer, which tells which parameters will be
trained (a model is watched from there on, before its first compiled call), and that of GradScaler. `Tensor.backward`
tells the loss. Processes that the script spawns itself are not followed; under torchrun each rank is launched anew:

    flowscope run train.py --epochs 3
    flowscope run -m package.train
    torchrun --nproc-per-node 2 -m flowscope run train.py
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.util
import os
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowscope.errors import FlowscopeError
from flowscope.sinks import ConsoleSink

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flowscope.scope import Scope


class Launch:
    """The scopes of one script: attached when an optimizer is made, closed and summarised when the script ends."""

    def __init__(self, log_dir: Path, options: dict[str, Any]) -> None:
        self._log_dir, self._options = log_dir, options
        self.scopes: list[Scope] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._scalers: list[weakref.ref[Any]] = []
        self._forwards: dict[int, int] = {}
        self._finder = _PatchOnImport(
            {
                "torch.optim.optimizer": lambda module: _after_making(module.Optimizer, self._optimizer_made),
                "torch.amp.grad_scaler": lambda module: _after_making(module.GradScaler, self._scaler_made),
            }
        )

    def __enter__(self) -> Launch:
        """Wait for the imports."""
        sys.meta_path.insert(0, self._finder)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the scopes and print their summaries to stderr; the script's stdout stays its own."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for scope in self.scopes:
            summary = scope.summary()
            scope.close()
            if _first_rank():
                print(f"\n{summary}", file=sys.stderr)
        if _first_rank():
            print(self._last_words(), file=sys.stderr)

    def _last_words(self) -> str:
        if not self.scopes:
            return (
                "flowscope: nothing was watched: no optimizer was made for the parameters of a model in this process. "
                "(Processes that the script spawns itself are not followed; use torchrun -m flowscope run.)"
            )
        return f"flowscope: the run is in {self._log_dir}; look at it with: tensorboard --logdir {self._log_dir}"

    # -- what the script constructs ------------------------------------------------------------------------------------

    def _optimizer_made(self, optimizer: Any) -> None:
        from flowscope.instruments.wiring import held_by

        for model in _roots(held_by(optimizer)):
            if not any(known() is model for known in self._models):
                self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        import flowscope

        self._models.append(weakref.ref(model))
        folder = self._log_dir
        if self.scopes:
            folder = folder / f"{type(model).__name__}-{len(self.scopes) + 1}"
        live = [scaler for known in self._scalers if (scaler := known()) is not None]
        try:
            scope = flowscope.watch(
                model,
                log_dir=folder,
                scaler=live[-1] if live else None,
                # the script's stdout stays its own
                sinks=[ConsoleSink(sys.stderr, records=False)],
                **self._options,
            )
        except FlowscopeError as error:
            print(f"flowscope: {type(model).__name__} is not watched: {error}", file=sys.stderr)
            return
        scope.automatic = True
        self.scopes.append(scope)
        if len(self.scopes) == 1:
            self._listen_to_losses()

    def _scaler_made(self, scaler: Any) -> None:
        self._scalers.append(weakref.ref(scaler))
        for scope in self.scopes:
            scope.use_scaler(scaler)

    # -- losses --------------------------------------------------------------------------------------------------------

    def _listen_to_losses(self) -> None:
        import torch

        backward: Callable[..., Any] = torch.Tensor.backward

        @functools.wraps(backward)
        def listening(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and loss.numel() == 1:
                self._take_loss(loss)
            return backward(loss, *args, **kwargs)

        torch.Tensor.backward = listening  # type: ignore[method-assign,assignment]

    def _take_loss(self, loss: Tensor) -> None:
        value = loss.detach()
        scales = [getattr(known(), "_scale", None) for known in self._scalers]
        used = [scale for scale in scales if scale is not None]
        if used:
            value = value / used[-1].to(value.device)
        for number, scope in enumerate(self.scopes):
            # of several models the loss belongs to those that ran since their last one
            forwards = scope.forwards
            if forwards != self._forwards.get(number, 0):
                self._forwards[number] = forwards
                scope.give_loss(value)


class _PatchOnImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls a function with a module right after the script's own import has executed it."""

    def __init__(self, patches: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self._patches = dict(patches)
        for name in list(patches):
            if name in sys.modules:
                self._patches.pop(name)(sys.modules[name])

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, with a loader that patches after executing."""
        if fullname not in self._patches:
            return None
        patch = self._patches.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _after_making(made: Any, call: Callable[[Any], None]) -> None:
    """Let `call(self)` follow the constructor of a class; a fault of it is told and never raised."""
    original = made.__init__

    @functools.wraps(original)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            call(self)
        except Exception as error:
            print(f"flowscope: attaching failed, the script goes on: {type(error).__name__}: {error}", file=sys.stderr)

    made.__init__ = constructed


def _roots(held: set[int]) -> list[nn.Module]:
    """The outermost modules alive that own one of these parameters."""
    from torch import nn

    # type() instead of isinstance: lazy proxies answer the latter by importing or raising
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    outermost = [module for module in modules if id(module) not in inner and "_parameters" in vars(module)]
    return [module for module in outermost if any(id(p) in held for p in module.parameters())]


def _first_rank() -> bool:
    return int(os.environ.get("RANK", "0") or 0) == 0


# -- the script ------------------------------------------------------------------------------------------------------


def run_script(command: Sequence[str], log_dir: Path, *, module: bool, options: dict[str, Any]) -> None:
    """Run a script or module as `python script.py args...` or `python -m module args...` would; watch its models.

    Args:
        command: the script's path or the module's name, and its arguments.
        log_dir: where the run is written.
        module: whether `command[0]` is a module's name.
        options: further arguments of `flowscope.watch`.

    Raises:
        FlowscopeError: there is no such script.
        SystemExit: the script's own, or status 1 after an exception (shown without our frames).
    """
    code, main, first_path = (_load_module if module else _load_script)(command[0])
    sys.argv = [(main.__file__ if module else None) or command[0], *command[1:]]
    if sys.path:
        sys.path[0] = first_path
    sys.modules["__main__"] = main
    with Launch(log_dir, options):
        try:
            exec(code, vars(main))
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            raise SystemExit(1) from None


def _load_script(path: str) -> tuple[types.CodeType, types.ModuleType, str]:
    file = Path(path)
    if file.is_dir():
        file = file / "__main__.py"
    if not file.is_file():
        raise FlowscopeError(f"flowscope run: there is no file {path!r}; expected a Python script, or -m and a module.")
    file = file.absolute()
    main = _main_module(str(file))
    return compile(file.read_bytes(), str(file), "exec"), main, str(file.resolve().parent)


def _load_module(name: str) -> tuple[types.CodeType, types.ModuleType, str]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ImportError:
        spec = None
    finally:
        sys.path.pop(0)
    code = (
        spec.loader.get_code(spec.name)
        if spec is not None and isinstance(spec.loader, importlib.abc.InspectLoader)
        else None
    )
    if spec is None or code is None:
        raise FlowscopeError(
            f"flowscope run -m: there is no module {name!r} that can be run; expected what python -m runs."
        )
    main = _main_module(spec.origin)
    main.__spec__, main.__package__, main.__loader__ = spec, spec.parent, spec.loader
    return code, main, str(Path.cwd())


def _main_module(file: str | None) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__file__ = file
    vars(main)["__builtins__"] = __builtins__
    return main
