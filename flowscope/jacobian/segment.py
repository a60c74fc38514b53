"""The part of a model between two points as a function x_0 -> x_L that can be called again and again.

The model runs as it is; hooks put the given x_0 in its place and stop the forward at x_L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowscope.errors import FlowscopeError
from flowscope.hooks.hooks import masked
from flowscope.jacobian.state_tensors import first_tensor, replace_first
from flowscope.model.example_inputs import evaluating
from flowscope.model.nested import map_tensors, nested_tensors
from flowscope.model.plan import Flow
from flowscope.torch_internals import compiler_was_imported

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


class _Reached(Exception):  # noqa: N818 - no error: ends the forward where x_L is known
    pass


class Segment:
    """x_0 -> x_L of one flow of a model for one sample. Use inside `quiet(model)`.

    x_0 is the input of the first call of `flow.entry` (the first output of `flow.outputs[0]` where entry is None), x_L
    the output of the last call of `flow.outputs[-1]`. Only what passes through x_0 counts: a later block that reads the
    embeddings directly sees the unchanged ones.

    Attributes:
        start: x_0 as the model computes it, detached.
        end_shape: the shape of x_L.

    Raises:
        FlowscopeError: an end of the flow is not reached, holds no floating tensor, or `inputs` cannot be cut to one
            sample.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, flow: Flow) -> None:
        self.flow = flow
        self._model = model
        self._swap = _single_precision(model)
        args, kwargs = one_sample(model, inputs, self._call)
        self._args, self._kwargs = args, kwargs
        self._begin = model.get_submodule(flow.outputs[0] if flow.entry is None else flow.entry)
        self._end = model.get_submodule(flow.outputs[-1])
        self._calls = 0
        self.start, end = self._trace()
        self.end_shape = end.shape

    def __call__(self, x: Tensor) -> Tensor:
        """Return x_L for `x` in place of x_0; the model behind x_L does not run."""
        begun, calls, found = False, 0, None

        def begin(value: Any) -> Any:
            nonlocal begun
            if begun:
                return value
            begun = True
            # a clone: a block may change its input in place, and x may be a leaf
            return replace_first(value, x.clone())

        def end(_module: nn.Module, _args: Any, output: Any) -> None:
            nonlocal calls, found
            calls += 1
            if calls == self._calls:
                found = first_tensor(output, like=x)
                raise _Reached

        with self._hooks(begin, end), suppress(_Reached):
            self._call(self._args, self._kwargs)
        if found is None:
            raise FlowscopeError(
                f"flow {self.flow.name!r}: {self.flow.outputs[-1]!r} was called {calls} times, expected "
                f"{self._calls} as in the run before: its path changes with every call, so no Jacobian exists."
            )
        return found

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._swap:
            return torch.func.functional_call(self._model, self._swap, _as_single(args), _as_single(kwargs))
        return self._model(*args, **kwargs)

    @contextmanager
    def _hooks(self, begin: Any, end: Any) -> Iterator[None]:
        """Give x_0 to `begin`, which may replace it, and the output of each call of the last block to `end`."""
        if self.flow.entry is None:
            first = self._begin.register_forward_hook(lambda _module, _args, output: begin(output))
        else:
            first = self._begin.register_forward_pre_hook(lambda _module, *given: begin(given), with_kwargs=True)
        # `end` after `begin`: where one module is both ends, its first output is x_0 and its last x_L
        with first, self._end.register_forward_hook(end):
            yield

    def _trace(self) -> tuple[Tensor, Tensor]:
        """Run the whole model once: x_0, x_L and how often the last block is called."""
        starts: list[Any] = []
        ends: list[Any] = []

        def begin(value: Any) -> Any:
            starts.append(first_tensor(value))
            return value

        def end(_module: nn.Module, _args: Any, output: Any) -> None:
            ends.append(first_tensor(output, like=starts[0] if starts else None))

        with torch.no_grad(), self._hooks(begin, end):
            self._call(self._args, self._kwargs)
        self._calls = len(ends)
        for what, path, seen in (
            ("x_0", self.flow.entry or self.flow.outputs[0], starts[:1]),
            ("x_L", self.flow.outputs[-1], ends[-1:]),
        ):
            if not seen or seen[0] is None:
                why = "holds no floating tensor with two axes" if seen else "was not called in the forward of `inputs`"
                raise FlowscopeError(f"flow {self.flow.name!r}: {what} not found: {path!r} {why}.")
        if self._begin is self._end and self.flow.entry is None and len(ends) == 1:
            raise FlowscopeError(
                f"flow {self.flow.name!r} has a single point {self.flow.outputs[-1]!r}: no depth to cross."
            )
        return starts[0].detach().clone(), ends[-1]


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Eval mode, eager, exact attention (SDPBackend.MATH: differentiable twice), autocast off, RNG and modes restored.

    Scopes attached to the model see nothing of what runs inside.
    """
    device = next(chain(model.parameters(), model.buffers(), [torch.empty(0)])).device
    with ExitStack() as stack:
        stack.enter_context(masked())
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if compiler_was_imported():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        yield


def one_sample(model: nn.Module, inputs: Inputs, call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `inputs` as (args, kwargs), cut to the first sample of the batch.

    The batch is axis 0 of the first tensor; axis 1 where a time-major module (batch_first=False) of the model gets it
    so; none where torch's unbatched layout is used. Every tensor of the same length along that axis is cut.

    Raises:
        FlowscopeError: which axis or which tensor to cut cannot be told from the shapes.
    """
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, Mapping)):
        raise FlowscopeError(f"inputs: got {type(inputs).__name__}, expected a tensor, a tuple or a dict of arguments.")
    args: tuple[Any, ...] = () if isinstance(inputs, Mapping) else inputs
    kwargs: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {}
    tensors = [t for t in nested_tensors((args, kwargs)) if t.dim() >= 1]
    if not tensors:
        raise FlowscopeError("inputs: got no tensor, expected at least one with a batch axis.")
    lead = tensors[0]
    axis = _batch_axis(model, lead, lambda: call(args, kwargs))
    size = 1 if axis is None else lead.shape[axis]
    if axis is None or size == 1:
        return args, kwargs
    for other in tensors[1:]:
        if other.shape == (size, size) and lead.dim() >= 2 and lead.shape[1 - axis] == size:
            raise FlowscopeError(
                f"inputs: a tensor of shape {tuple(other.shape)} beside a batch of {size} may be a mask between "
                "positions or hold one row a sample. Pass a batch of one sample: inputs[:1]."
            )

    def cut(tensor: Tensor) -> Tensor:
        return tensor.narrow(axis, 0, 1) if tensor.dim() > axis and tensor.shape[axis] == size else tensor

    return map_tensors(args, cut), map_tensors(kwargs, cut)


def _batch_axis(model: nn.Module, lead: Tensor, run: Callable[[], Any]) -> int | None:
    """The batch axis of the first input, told by what the first sequence module (one with `batch_first`) gets."""
    modules = [m for m in model.modules() if isinstance(getattr(m, "batch_first", None), bool)]
    seen: list[tuple[nn.Module, torch.Size]] = []

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        state = first_tensor((args, kwargs))
        if state is not None:
            seen.append((module, state.shape))
        raise _Reached

    if modules:
        with ExitStack() as stack, torch.no_grad(), suppress(_Reached):
            for module in modules:
                stack.enter_context(module.register_forward_pre_hook(see, with_kwargs=True))
            run()
    if not seen:
        return 0
    module, shape = seen[0]
    if len(shape) == 2:
        return None if shape[0] == lead.shape[0] else 0
    if module.batch_first or lead.dim() < 2:
        return 0
    time, batch = shape[:2]
    if time == batch == lead.shape[0] and time > 1:
        raise FlowscopeError(f"inputs: {time} positions and {batch} samples cannot be told apart. Pass one sample.")
    return int(batch != lead.shape[0] and time == lead.shape[0])


def _single_precision(model: nn.Module) -> dict[str, Tensor]:
    """fp32 copies of all parameters and buffers where one is of lower precision, else nothing."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    if not any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors.values()):
        return {}
    return {name: _as_single(t.detach()) for name, t in tensors.items()}


def _as_single(value: Any) -> Any:
    return map_tensors(value, lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t)
