"""What torch tells in no public way: each thing once, so that a new torch is one file to read.

Where nothing else is said, tried on torch 2.9.1, 2.13.0 and 2.14.1 (CPU). Names are bound at import: hooks ask in every
call of a module.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.fx import _symbolic_trace
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

# -- backward ---------------------------------------------------------------------------------------------------------

backward_under_way: Callable[[], int] = torch._C._current_graph_task_id
"""A number of the backward pass that this thread is in, -1 outside of one. Eager only."""


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass (a checkpointed block is recomputed). Eager only."""
    return backward_under_way() != -1


def saves_otherwise() -> bool:
    """Whether hooks stand between a node and the tensors it saves: a checkpoint, an offloader."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call it once when the backward pass under way has ended, after what was asked for before."""
    Variable._execution_engine.queue_callback(call)


def next_backward() -> int:
    """The number that a backward pass begun now gets: they are counted over the process. Makes one, of one number."""
    found: list[int] = []
    with torch.enable_grad():
        one = torch.ones((), requires_grad=True)
        twice = one * 2
    twice.register_hook(lambda gradient: found.append(backward_under_way()))  # type: ignore[no-untyped-call]
    torch.autograd.grad(twice, one)
    return found[0]


def sequence_number(node: Any) -> int:
    """The number of an autograd node; it grows with every node of a thread."""
    return int(node._sequence_nr())


def nodes_below(roots: Iterable[Any], most: float = math.inf) -> Iterator[Any]:
    """The nodes of the graph under some of its nodes, these included, each once; about `most` of them at the most."""
    seen = {id(root): root for root in roots if root is not None}  # kept alive: an id is a node's own only as long
    waiting = list(seen.values())
    while waiting and len(seen) < most:
        node = waiting.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and id(child) not in seen:
                seen[id(child)] = child
                waiting.append(child)


def leaves_below(roots: Iterable[Any], most: float = math.inf) -> list[Tensor]:
    """The leaves that ask for a gradient under some nodes of a graph, each once; see `nodes_below`."""
    found = (getattr(node, "variable", None) for node in nodes_below(roots, most))
    return [leaf for leaf in found if leaf is not None]


def accumulates_into(leaf: Tensor) -> bool:
    """Whether the backward pass under way adds to `leaf.grad`, or was asked for the gradient of just this leaf."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # torch refuses to say for a leaf that autograd.grad was asked for
        return True


def output_shape(node: Any) -> tuple[int, ...]:
    """The shape of what an autograd node's operation returned (its first output); known when all else is freed."""
    found = node._input_metadata
    return tuple(int(size) for size in found[0].shape) if found else ()


def axis_of(node: Any) -> int | None:
    """The one axis along which a node's operation worked, None where it had none; negative where it was given so."""
    axis = getattr(node, "_saved_dim", None)
    if not isinstance(axis, int):
        return None
    return axis if axis < 1 << 63 else axis - (1 << 64)


def batch_statistics_of(node: Any) -> tuple[Tensor, Tensor] | None:
    """The mean and 1 / sqrt(variance + eps) of a batch, [C] each, as the node of a batch norm in training keeps them.

    None where it is no such node (the one of CPUs is known), or hooks stand between it and what it saves.
    """
    if node is None or node.name() != "NativeBatchNormBackward0" or saves_otherwise() or not node._saved_training:
        return None
    return node._saved_result1, node._saved_result2


NOT, MEAN, SUM = range(3)
"""How a loss is reduced to one number, as its node keeps it."""


def reduced_by(node: Any) -> int:
    """How a loss's node reduced its terms; NOT where it does not say."""
    reduction = getattr(node, "_saved_reduction", NOT)
    return reduction if isinstance(reduction, int) else NOT


def begun_from() -> list[Tensor]:
    """What the backward pass under way was called on: the loss. None for `torch.autograd.grad`, whose passes are none.

    The engine's own call is on the stack of the thread that called it: this one, or one that waits for a device's.
    """
    found = _roots(sys._getframe())
    if found is not None:
        return found
    waiting = [roots for frame in sys._current_frames().values() if (roots := _roots(frame)) is not None]
    return waiting[0] if len(waiting) == 1 else []


def _roots(frame: FrameType | None) -> list[Tensor] | None:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_engine_run_backward" and code.co_filename.endswith("graph.py"):
            asked = frame.f_back.f_code.co_name if frame.f_back is not None else ""
            return [*frame.f_locals.get("t_outputs", ())] if asked == "backward" else []
        frame = frame.f_back
    return None


is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Whether this is a stack of gradients that autograd.grad(is_grads_batched=True) sends through at once."""


def is_leaf(tensor: Tensor) -> bool:
    """Whether no operation made it; False of a view of what was changed in place, of which torch refuses to speak."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


is_view: Callable[[Tensor], bool] = Tensor._is_view
"""Whether autograd takes a tensor for a view of another (`x._base`)."""


# -- one thread, and the backward passes it begins ---------------------------------------------------------------------

_MARK = "flowscope: hidden"


def mark(on: bool) -> None:
    """Mark this thread: a device's thread bears the mark while it runs the backward of one that does."""
    torch._C._stash_obj_in_tls(_MARK, on)


def is_marked() -> bool:
    """Whether this thread, or the one whose backward it runs, is marked."""
    return torch._C._is_key_in_tls(_MARK) and torch._C._get_obj_in_tls(_MARK)


# -- what is being traced ---------------------------------------------------------------------------------------------

HOOKED_INTERMEDIATES = (Path(torch.__file__).parent / "_higher_order_ops" / "register_hook.py").exists()
"""Whether this torch traces a gradient hook on an intermediate tensor (2.13 does). Before, one breaks the graph and the
frame is not compiled at all: there a compiled point deposits its forward sums alone, and gradients are not seen."""

_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY
_functorch_level = torch._C._functorch.peek_interpreter_stack
_jit_trace = torch._C._get_tracing_state
_dispatch_modes, _dispatch_mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_FX: Any = _symbolic_trace
_FX_FLAG = hasattr(_FX, "_is_fx_tracing_flag")


def _fx_is_tracing() -> bool:
    # is_fx_tracing() writes a warning to the log; the flag behind it became a thread's own in torch 2.14
    return bool(_FX._is_fx_tracing_flag if _FX_FLAG else _FX._get_is_fx_tracing())


def exporting() -> bool:
    """Whether what is compiled is an export."""
    # torch 2.9 traces the call as True, whatever is being traced
    return torch.compiler.is_exporting() if HOOKED_INTERMEDIATES else torch.compiler._is_exporting_flag


def no_training_pass() -> bool:
    """Whether the model is only being transformed: torch.func, a jit or fx trace, an export, a run on fake tensors.

    There is no gradient of a loss to see, and statistics of such tensors would raise or leak into what is traced.
    """
    if torch.compiler.is_compiling():
        return exporting()
    return (
        _functorch_level() is not None
        or _jit_trace() is not None
        or (_dispatch_modes() > 0 and (_dispatch_mode(_FAKE) is not None or _dispatch_mode(_PROXY) is not None))
        or _fx_is_tracing()
    )


_OPERATORS: Any = torch.library.Library("flowscope", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATORS.define("unchecked(Tensor(a) x) -> Tensor(a)")


def _unchecked(x: Tensor) -> Tensor:
    with contextlib.suppress(ImportError):  # a torch without it goes on checking
        from torch.fx.experimental.proxy_tensor import _get_proxies

        for proxy in _get_proxies(x):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True
    return x


_OPERATORS.impl("unchecked", _unchecked, "CompositeImplicitAutograd")
unchecked: Callable[[Tensor], Tensor] = torch.ops.flowscope.unchecked.default
"""In traced code, a tensor that backward may find changed since its forward.

A compiled backward keeps what it adds to as if it were to read it, and raises where another backward (of the same model
called twice, of the part behind a graph break) has added to it since. What is only added to has no wrong moment. The
mark is what AOTAutograd has for tensors that an autograd.Function keeps on its `ctx`; the operator itself leaves no
node. Tried on torch 2.13.0.
"""


def run_uncompiled(code: Any) -> None:
    """Let the frames of `code` run as plain Python where dynamo meets them on their own.

    The hooks of the module that is compiled itself are called outside of what is traced: there each would become a
    small graph, and count against the limit of recompilations. Inside a larger compiled frame they are traced as ever.
    """
    dynamo = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))


class FunctionMode(TorchFunctionMode):
    """A function mode whose `__torch_function__` is never compiled on its own.

    Where compiled code breaks off with the mode on the stack, torch 2.13.0 compiles each call of it by itself, and the
    call may then return another value: a list for `Tensor.device`. Inside a larger compiled frame it is traced as ever.
    """

    def __init_subclass__(cls) -> None:
        run_uncompiled(cls.__torch_function__.__code__)


def compiler_was_imported() -> bool:
    """Whether anything may be compiled: the import of the compiler alone takes seconds."""
    return "torch._dynamo" in sys.modules


def frames_compiled() -> int:
    """Grows with everything that torch.compile traces in this process, the same code for another model included."""
    return sum(getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", {}).values())


_BEFORE_COMPILING: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def before_compiling(listener: Any, method: str) -> bool:
    """Call this method of `listener`, which is not kept alive, before anything is traced; whether that is possible."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None:
        return False
    if _compiling not in handler.start_callbacks:
        handler.register_start_callback(_compiling)
    _BEFORE_COMPILING[listener] = method
    return True


def _compiling(told: Any) -> None:
    for listener, method in [*_BEFORE_COMPILING.items()]:
        with contextlib.suppress(Exception):  # what this raised would end the compilation
            getattr(listener, method)()


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled by itself (`module.compile()`), or is what torch.compile returned."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


# -- function modes and subclasses ------------------------------------------------------------------------------------

without_subclasses = torch._C.DisableTorchFunctionSubclass
"""Context in which tensor subclasses are plain tensors."""
without_newest_mode = _pop_mode_temporarily
"""Context in which the newest function mode is off."""


def newest_mode() -> Any:
    """The function mode entered last, None outside of any."""
    depth = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(depth - 1) if depth else None


# -- many tensors ------------------------------------------------------------------------------------------------------

foreach_norm = torch._foreach_norm
"""The norm of each tensor, in one pass over all."""


def log_softmax_backward(grad: Tensor, output: Tensor, axis: int) -> Tensor:
    """The gradient of what a log softmax along an axis was given, from those of its output: one pass, as torch's own.

    grad - exp(output) * sum(grad along the axis).
    """
    result: Tensor = torch.ops.aten._log_softmax_backward_data(grad, output, axis, grad.dtype)
    return result


# -- calls on the stack, by the names torch gives their functions -----------------------------------------------------


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_on_stack(function: str, file: str) -> bool:
    codes = (frame.f_code for frame in _callers())
    return any(code.co_name == function and code.co_filename.endswith(file) for code in codes)


def in_compiled_call() -> bool:
    """Whether what runs was called through torch.compile; tried on torch 2.13.0."""
    return compiler_was_imported() and _is_on_stack("compile_wrapper", "eval_frame.py")


def in_reentrant_checkpoint() -> bool:
    """Whether a reentrant checkpoint runs a backward pass of its own on the stack."""
    return _is_on_stack("backward", "checkpoint.py")


def steps_on_stack(optimizer: Any) -> int:
    """How many calls of this optimizer's hooked step ("wrapper") are on the stack."""
    return sum(frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer for frame in _callers())


def steps_alone() -> bool:
    """Whether no optimizer can be stepping: this is the only thread, and no hooked step ("wrapper") is on its stack."""
    return len(sys._current_frames()) == 1 and not _is_on_stack("wrapper", "optimizer.py")


def scale_of_caller() -> Any:
    """The scale of the GradScaler that is making the optimizer step, None where none is.

    A scaler that `watch` was not given leaves no other trace, and its unscaling would look like clipping.
    """
    frame: FrameType | None = sys._getframe()
    for _ in range(20):  # no generator: asked in every sampled step
        if frame is None:
            break
        if frame.f_code.co_name == "step" and isinstance(scaler := frame.f_locals.get("self"), torch.amp.GradScaler):
            return scale_of(scaler)
        frame = frame.f_back
    return None


# -- what a GradScaler holds ------------------------------------------------------------------------------------------


def scale_of(scaler: Any) -> Any:
    """The scale of a GradScaler (a tensor copied on its device, or a number), without waiting for the device."""
    scale = getattr(scaler, "_scale", None)  # a disabled scaler has none
    return scale.detach().clone() if scale is not None else float(scaler.get_scale())


def found_by(scaler: Any) -> dict[int, list[Tensor]]:
    """By optimizer (its id), what a GradScaler found in its gradients since the last update: inf where above 0."""
    states = getattr(scaler, "_per_optimizer_states", None) or {}
    return {key: list(state.get("found_inf_per_device", {}).values()) for key, state in states.items()}


def has_unscaled(scaler: Any) -> bool:
    """Whether a GradScaler has unscaled the gradients of an optimizer that has not stepped since."""
    states = getattr(scaler, "_per_optimizer_states", None) or {}
    return any(getattr(state.get("stage"), "name", "") == "UNSCALED" for state in states.values())


# -- many processes ---------------------------------------------------------------------------------------------------


def is_joined(wrapper: nn.Module | None) -> bool:
    """Whether a DDP module is inside torch's `Join`: ranks may run out of batches one by one."""
    return bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))


def world_size() -> int:
    """How many processes torch.distributed runs, 1 without it."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sequence_of(group: Any) -> int:
    """How many collectives of a process group this rank has entered; -1 where the backend does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return -1


def shard_start(parameter: Any) -> tuple[int, int]:
    """The numbers of the first row and column of a tensor that this rank holds."""
    if (placements := getattr(parameter, "placements", None)) is None:
        return 0, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
    return tuple([*map(int, offset), 0, 0][:2]) if len(offset) <= 2 else (int(offset[0]), 0)  # type: ignore[return-value]


def fsdp_states(model: nn.Module) -> list[Any]:
    """What FSDP2 keeps of the parameters it shards together, of each module that shards any."""
    from torch.distributed.fsdp import FSDPModule

    found = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    return [state for state in found if state is not None]


def is_flattened(parameter: object) -> bool:
    """Whether this is what a rank holds of a parameter that FullyShardedDataParallel (FSDP1) flattened and cut."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


@contextlib.contextmanager
def in_worker(number: int, workers: int, seed: int, dataset: Any) -> Iterator[None]:
    """`torch.utils.data.get_worker_info()` says so within, as in a worker process of a DataLoader."""
    from torch.utils.data._utils import worker

    before = worker._worker_info
    worker._worker_info = worker.WorkerInfo(id=number, num_workers=workers, seed=seed, dataset=dataset)
    try:
        yield
    finally:
        worker._worker_info = before
