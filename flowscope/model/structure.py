"""Facts about a module read without running it: its children, parameters, widths, role by class and name."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from flowscope.model.zero import whole_shape

Named = tuple[str, nn.Module]

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
CONTAINERS = (nn.ParameterDict, nn.ParameterList)
"""What only holds parameters, and is never called."""
_OF_ONE_LAYER = {"parametrizations", "_torch_params"}
"""Children that hold parameters of a layer itself: torch's and Keras'."""
_WRAPPER_CHILDREN = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_NORM = re.compile(r"norm", re.IGNORECASE)
_ACTIVATION = re.compile(r"(lu\d?|swish|tanh|sigmoid|mish|activation|softplus|softsign|shrink)$", re.IGNORECASE)
_RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.RReLU)
_SMOOTH = (nn.GELU, nn.SiLU, nn.Mish)
_SMOOTH_NAMES = ("gelu", "silu", "swish", "mish")
_PARALLEL = re.compile(
    r"(^|_|\.)(experts?|heads?|classifiers?|codebooks?|quantizers?|embed(ding|der)?s?|embds?|proj(ection|ector)?s?|"
    r"critics?|adapters?|lateral\w*|postprocess\w*|aux\w*|fpn_\w+|pan_\w+|\w*hypernet\w*|mergers?(_list)?)\d*$",
    re.IGNORECASE,
)
_TOWERS = re.compile(r"(^|_)(tower|branch|model|member|estimator|discriminator|net|network)(e?s)?$", re.I)
_PART = re.compile(r"(Attention\w*|MLP|Mlp|FeedForward|FFN|Norm\w*|Embed(ding|der)?s?|Project(ion|or)|Adapter|Head)$")


def join(path: str, name: str) -> str:
    """The path of a child."""
    return f"{path}.{name}" if path else name


def children(module: nn.Module) -> Iterator[Named]:
    """Children in registration order; a module registered twice comes twice (`named_children` drops repeats).

    What `wrap` added is no part of the user's model, and what torch.jit compiled cannot be looked into.
    """
    named = ((name, child) for name, child in module._modules.items() if child is not None)
    return ((name, child) for name, child in named if not (is_ours(child) or is_scripted(child)))


def attribute(holder: Any, name: str, default: Any = None) -> Any:
    """As `getattr`, of a module of the user's: what its own `__getattr__` raises means that it is not there."""
    try:
        return getattr(holder, name)
    except Exception:
        return default


def whole_number(holder: Any, name: str) -> int | None:
    """An attribute that is a whole number, numpy's included (shapes of gym's spaces are); None where it is none."""
    value = attribute(holder, name)
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return int(value) if whole else None


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside compile, FSDP and checkpoint wrappers."""
    return unwrapped("", module)[1]


def unwrapped(path: str, module: nn.Module) -> Named:
    """The module inside compile, FSDP and checkpoint wrappers, with its raw path."""
    for name in () if is_scripted(module) else _WRAPPER_CHILDREN:
        inner = module._modules.get(name)
        if inner is not None:
            return unwrapped(join(path, name), inner)
    return path, module


def size(module: nn.Module) -> int:
    """Number of parameter elements; 0 for lazy parameters, 1 for each that is not a tensor of known shape."""
    return sum(0 if isinstance(p, UninitializedParameter) else math.prod(whole_shape(p)) for p in module.parameters())


def has_parameters(module: nn.Module) -> bool:
    """Whether any parameter, lazy ones included, is inside."""
    return next(module.parameters(), None) is not None


def signature(module: nn.Module) -> tuple[object, ...]:
    """Names and shapes of all parameters: equal for blocks that differ only in values."""
    return tuple(
        (name, None if isinstance(p, UninitializedParameter) else whole_shape(p))
        for name, p in module.named_parameters(remove_duplicate=False)
    )


def required_arguments(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional arguments without default of a module's forward; none where they cannot be read."""
    kind: Any = type(module)
    return _required_arguments(kind)


@functools.lru_cache(maxsize=256)
def _required_arguments(kind: Any) -> tuple[str, ...]:
    try:
        signature = inspect.signature(kind.forward)
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in signature.parameters.values() if p.kind in kinds and p.default is inspect.Parameter.empty]
    return tuple(named[1:])


TIMES = ("t", "time", "tau", "ts")
"""What the first argument of a right-hand side f(t, y) is called."""
_STATES = ("z", "z_star", "z_k", "zs", "h", "u")


def is_dynamics(module: nn.Module) -> bool:
    """Whether a module may be the right-hand side of a differential equation: forward(t, y)."""
    names = required_arguments(module)
    return len(names) == 2 and names[0] in TIMES


def is_map(module: nn.Module) -> bool:
    """Whether a module may be iterated to a fixed point: forward(z, x, ...)."""
    names = required_arguments(module)
    return len(names) >= 2 and names[0] in _STATES and not isinstance(module, nn.RNNCellBase)


def is_equilibrium_layer(module: nn.Module) -> bool:
    """A layer of torchdeq."""
    return any(cls.__name__ == "DEQBase" for cls in type(module).__mro__)


def is_time(value: Any) -> bool:
    """Whether an argument is one moment: a number, or a tensor without axes."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.is_floating_point()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def outermost(modules: Iterable[Named], wanted: Callable[[nn.Module], bool]) -> Iterator[Named]:
    """Those of a model's modules that fit, none inside another of them."""
    taken: list[str] = []
    for path, module in modules:
        if not any(not outer or path.startswith(outer + ".") for outer in taken) and wanted(module):
            taken.append(path)
            yield path, module


def is_scripted(module: nn.Module) -> bool:
    """Whether torch.jit compiled this module."""
    return isinstance(module, torch.jit.ScriptModule)


def is_ours(module: nn.Module) -> bool:
    """Whether `wrap` added this module."""
    return bool(getattr(type(module), "is_flowscope_connection", False))


def is_norm(module: nn.Module) -> bool:
    """A normalisation, by class name (every library writes its own)."""
    return not module._modules and bool(_NORM.search(type(module).__name__))


def is_activation(module: nn.Module) -> bool:
    """An elementwise non-linearity (PReLU included, softmax and attention not)."""
    return not module._modules and bool(_ACTIVATION.search(type(module).__name__))


def activation_kind(module: nn.Module) -> str | None:
    """Return "rectifier", "smooth", "sigmoid" or "tanh" for an activation module, None for most others.

    "input" for a layer with weights: a rectifier that is a function call has no module, it is seen at the next input.
    """
    name = type(module).__name__.lower()
    if isinstance(module, _RECTIFIERS) or name.startswith("relu"):
        return "rectifier"
    if isinstance(module, _SMOOTH) or any(part in name for part in _SMOOTH_NAMES):
        return "smooth" if not list(module.parameters(recurse=False)) and not list(module.children()) else None
    if isinstance(module, nn.Sigmoid):
        return "sigmoid"
    if isinstance(module, nn.Tanh):
        return "tanh"
    return "input" if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) else None


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module normalises by the batch in training and by running statistics in evaluation."""
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):  # its statistics are those of single samples
        return False
    kept = module._buffers.get("running_mean"), module._buffers.get("running_var")
    return attribute(module, "track_running_stats", True) and all(isinstance(buffer, Tensor) for buffer in kept)


def is_embedding(module: nn.Module) -> bool:
    """A table looked up by integers."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def is_recurrent(module: nn.Module) -> bool:
    """A layer or cell of torch that is applied along time."""
    return isinstance(module, nn.RNNBase | nn.RNNCellBase)


def is_atom(module: nn.Module) -> bool:
    """A layer, not a composition: no children, or such that only implement one layer (attention, LoRA, weight norm)."""
    inner = unwrap(module)
    if isinstance(inner, nn.MultiheadAttention) or is_recurrent(inner) or is_scripted(inner):
        return True
    if "base_layer" in inner._modules:
        return True
    return not isinstance(inner, LISTS) and not inner._modules.keys() - _OF_ONE_LAYER


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: not a bare list, dict or nn.Module that only holds others."""
    return type(unwrap(module)).forward is not nn.Module.forward


def is_step(module: nn.Module) -> bool:
    """A layer with weights that makes new features: no normalisation, activation or embedding."""
    inner = unwrap(module)
    if (
        not is_atom(inner)
        or is_norm(inner)
        or is_activation(inner)
        or is_embedding(inner)
        or isinstance(inner, CONTAINERS)
    ):
        return False
    return any(isinstance(p, UninitializedParameter) or len(whole_shape(p)) >= 2 for p in inner.parameters())


def steps_inside(module: nn.Module) -> int:
    """How many layers with weights are inside (a module counts once however often it is registered)."""
    return sum(is_step(m) for m in module.modules())


def is_plain_sequential(module: nn.Module) -> bool:
    """A Sequential that only runs its children in order (torchvision's ConvNormActivation is one)."""
    inner = unwrap(module)
    return isinstance(inner, nn.Sequential) and type(inner).forward is nn.Sequential.forward


def is_layer_sequence(module: nn.Module) -> bool:
    """A plain Sequential, nested or not, of layers only."""
    inner = unwrap(module)
    return is_plain_sequential(inner) and all(is_atom(c) or is_layer_sequence(c) for _, c in children(inner))


def is_block(module: nn.Module) -> bool:
    """What may stand between two points: a composition with weights, or a user's own layer with raw weights."""
    inner = unwrap(module)
    if not has_parameters(inner) or is_norm(inner):
        return False
    if is_atom(inner):
        return is_step(inner) and not type(inner).__module__.startswith("torch.") and "base_layer" not in inner._modules
    return True


def is_parallel(name: str, module: nn.Module | None = None) -> bool:
    """By name: side by side (experts, heads, codebooks, projections), not one behind the other."""
    return not isinstance(module, nn.Sequential) and bool(_PARALLEL.search(name))


def is_towers(name: str, module: nn.Module | None = None) -> bool:
    """By name: independent networks side by side, each with a depth of its own; a list needs a plural ("models")."""
    if module is None:
        return bool(_TOWERS.search(name))
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and name.endswith("s") and bool(_TOWERS.search(name))


def is_part(module: nn.Module) -> bool:
    """By class name: part of a block (attention, MLP, norm), not a whole one."""
    return bool(_PART.search(type(unwrap(module)).__name__))


def widths(module: nn.Module) -> tuple[int, int]:
    """Features in and out of a layer with weights; 0 where unknown."""
    inner = unwrap(module)
    inner = inner._modules.get("base_layer") or inner
    for a, b in (("in_features", "out_features"), ("in_channels", "out_channels")):
        into, out = whole_number(inner, a), whole_number(inner, b)
        if into is not None and out is not None:
            return into, out
    return 0, 0


def _last_word(name: str) -> str:
    words = re.findall(r"[A-Z][a-z0-9]+|[A-Z]+(?![a-z])", name)
    return words[-1] if words else name


def _related(a: type, b: type) -> bool:
    if a is b:
        return True
    plain = {nn.Module, *LISTS}
    bases = [c for c in a.__mro__ if issubclass(c, nn.Module) and c not in plain]
    if any(issubclass(b, c) for c in bases):
        return True
    word = _last_word(a.__name__)
    return word == _last_word(b.__name__) and word in {"Block", "Layer", "Cell", "Stage", "Bottleneck", "Residual"}


def family(items: list[Named], *, ordered: bool) -> list[Named]:
    """The blocks among items that stand behind each other; empty where no two are alike.

    Alike are the most frequent class and what is related to it. What lies between two of them belongs to the depth
    axis too (a downsampling step, a hybrid's other layer). At the ends of a sequence (`ordered`: it may hold a stem and
    a head) foreign modules are left out, in a plain list they are kept.
    """
    blocks = [(path, module) for path, module in items if is_block(module)]
    if not blocks:
        return []
    common, _ = Counter(type(unwrap(m)) for _, m in blocks).most_common(1)[0]
    alike = [i for i, (_, m) in enumerate(blocks) if _related(common, type(unwrap(m)))]
    if len(alike) < 2:
        return []
    if ordered:
        return blocks[alike[0] : alike[-1] + 1]
    return blocks if 2 * len(alike) >= len(blocks) else [blocks[i] for i in alike]
