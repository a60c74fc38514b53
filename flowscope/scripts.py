"""Running a user's script as plain Python would, and listening to what it imports and makes."""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowscope.errors import FlowscopeError
from flowscope.faults import raise_interrupt
from flowscope.terminal import tell

if TYPE_CHECKING:
    from torch import Tensor, nn


def script_of(command: Sequence[str], *, module: bool, asked: str = "run") -> Callable[[], None]:
    """A script or module, ready to be run as `python script.py args...` or `python -m module args...` would.

    Args:
        command: the script's path or the module's name, and its arguments.
        module: whether `command[0]` is a module's name.
        asked: the name of the command, for errors.

    Returns:
        A function that runs it.

    Raises:
        FlowscopeError: there is no such script.
    """
    code, main, first_path = (_load_module if module else _load_script)(command[0], asked)
    sys.argv = [(main.__file__ if module else None) or command[0], *command[1:]]
    if sys.path:
        sys.path[0] = first_path
    sys.modules["__main__"] = main
    return functools.partial(_begin, code, vars(main))


def _begin(code: types.CodeType, names: dict[str, Any]) -> None:
    exec(code, names)


BEGIN = _begin.__code__
"""Of the frame behind which a script's own begin."""


def tell_of(error: BaseException) -> None:
    """Show an exception of the script, without our frames."""
    without_ours(error)
    sys.excepthook(type(error), error, error.__traceback__)


def tell_at_end() -> None:
    """Let Python itself show what ends this process, without our frames, and set the status."""
    show = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        del trace
        without_ours(error)
        show(kind, error, error.__traceback__)

    sys.excepthook = shown


def without_ours(error: BaseException) -> None:
    """Take our frames out of the traceback of an exception, and out of those of the exceptions it came from."""
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        if (one := chain.pop()) is None or id(one) in seen:
            continue
        seen.add(id(one))
        kept: list[types.TracebackType] = []
        trace = one.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if code is BEGIN:
                kept.clear()
            elif not trace.tb_frame.f_globals.get("__name__", "").startswith("flowscope."):
                kept.append(trace)
            else:  # Python shows no frames of its import, unless others are among them
                while kept and kept[-1].tb_frame.f_code.co_filename.startswith("<frozen importlib"):
                    kept.pop()
            trace = trace.tb_next
        for held in reversed(kept):
            trace = types.TracebackType(trace, held.tb_frame, held.tb_lasti, held.tb_lineno)
        one.__traceback__ = trace
        chain += one.__cause__, one.__context__


class PatchOnImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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


def after_making(made: Any, call: Callable[[Any], None]) -> None:
    """Let `call(self)` follow the constructor of a class; a fault of it is told and never raised."""
    original = made.__init__

    @functools.wraps(original)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            call(self)
        except Exception as error:
            raise_interrupt(error)
            tell(f"flowscope: attaching failed, the script goes on: {type(error).__name__}: {error}")

    made.__init__ = constructed


def hear_backward(begins: Callable[[Tensor, bool], bool], ended: Callable[[], None] = lambda: None) -> None:
    """Let `begins(loss, keeps_graph)` come before each backward pass of one loss, and `ended()` after it.

    Passes within passes (a reentrant checkpoint) and those of compiled code are left alone; so is one of which `begins`
    returns False.
    """
    import torch

    from flowscope.torch_internals import in_backward

    backward: Callable[..., Any] = torch.autograd.backward  # `loss.backward` calls it, too

    @functools.wraps(backward)
    def listening(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        several = isinstance(tensors, (list, tuple))
        loss = tensors[0] if several and len(tensors) == 1 else tensors
        if not isinstance(loss, torch.Tensor) or torch.compiler.is_compiling() or in_backward():
            return backward(tensors, *args, **kwargs)
        given = dict(zip(("grad_tensors", "retain_graph", "create_graph"), args, strict=False)) | kwargs
        if not begins(loss, bool(given.get("retain_graph") or given.get("create_graph"))):
            return backward(tensors, *args, **kwargs)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            ended()

    torch.autograd.backward = listening


def outermost_models(held: set[int]) -> list[nn.Module]:
    """The outermost modules alive that own one of these parameters."""
    from torch import nn

    # type() instead of isinstance: lazy proxies answer the latter by importing or raising
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    outermost = [module for module in modules if id(module) not in inner and "_parameters" in vars(module)]
    return [module for module in outermost if any(id(p) in held for p in module.parameters())]


def first_rank() -> bool:
    """Whether this process speaks for all ranks."""
    return int(os.environ.get("RANK", "0") or 0) == 0


def _load_script(path: str, asked: str) -> tuple[types.CodeType, types.ModuleType, str]:
    file = Path(path)
    if file.is_dir():
        file = file / "__main__.py"
    if not file.is_file():
        raise FlowscopeError(
            f"flowscope {asked}: there is no file {path!r}; expected a Python script, or -m and a module."
        )
    file = file.absolute()
    main = _main_module(str(file))
    return compile(file.read_bytes(), str(file), "exec"), main, str(file.resolve().parent)


def _load_module(name: str, asked: str) -> tuple[types.CodeType, types.ModuleType, str]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ImportError:
        spec = None
    finally:
        sys.path.pop(0)
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if spec is None or code is None:
        raise FlowscopeError(
            f"flowscope {asked} -m: there is no module {name!r} that can be run; expected what python -m runs."
        )
    main = _main_module(spec.origin)
    main.__spec__, main.__package__, main.__loader__ = spec, spec.parent, spec.loader
    return code, main, str(Path.cwd())


def _main_module(file: str | None) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__file__ = file
    vars(main)["__builtins__"] = __builtins__
    return main
