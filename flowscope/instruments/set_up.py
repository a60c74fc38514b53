"""How a run is set up: what two runs are compared by before their numbers are. Told once, in the run's header.

It is read when the first sampled step has ended: by then the model is where it trains (moved, sharded, compiled), its
optimizers are known, and the weights before their first change have been hashed.
"""

from __future__ import annotations

import hashlib
import platform
import random
import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.model.hidden_state import is_compiling
from flowscope.model.plan import display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.records import strict_json
from flowscope.sums.fingerprints import checksums, stacked
from flowscope.sums.payload import local
from flowscope.torch_internals import is_compiled

ENTRIES = 4096
"""So many evenly spaced entries of a parameter are hashed, at most."""
DIGITS = 17


class SetUp(Instrument):
    """Versions, device, dtype, seeds, flags, optimizers, parameters and their initial values, wrapping, world."""

    name = "set_up"
    families = ()

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """The seeds are those of now; nothing is drawn."""
        self._view, self._hooks = view, hooks
        self._seeds = seeds()
        self._weights: tuple[list[str], list[Tensor]] | None = None
        self._autocast = ""
        self._told = False
        hooks.before(view.model, self.fuse, self._forward, hooks.switch)

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module, args, kwargs
        if not (is_compiling() or self._told):  # what is asked in compiled code makes another graph when it changes
            self._autocast = autocast()

    def before_update(self, *, updating: bool) -> None:
        """The weights are still those that the run began with."""
        del updating
        if not self._told and self._weights is None:
            self._weights = weight_hashes(self._view)

    def take(self) -> Taken | None:
        """The hashes on their way to the host; once."""
        if self._told or self._weights is None:
            return None
        self._told = True
        (names, hashes), self._weights = self._weights, None
        told = {
            "packages": packages(),
            "seeds": self._seeds,
            "autocast": self._autocast,
            **flags(),
            **of_model(self._view),
            "optimizers": [of_optimizer(optimizer, self._view) for optimizer in self._hooks.optimizers()],
        }
        return Taken(self.name, hashes, partial(self._read, names, told))

    @staticmethod
    def _read(names: list[str], told: dict[str, Any], out: RecordBuilder, parts: list[Array]) -> None:
        hashes = (int(number) for part in parts for number in part)
        out.tell({**told, "weights": dict(zip(names, hashes, strict=True))})


def weight_hashes(view: ModelView) -> tuple[list[str], list[Tensor]]:
    """Return names, and [G] tensors that together have a checksum a name: of at most `ENTRIES` of its entries."""
    now = [
        (name, p) for name, p in zip(view.parameters.names, view.parameters.current(), strict=False) if p is not None
    ]
    parts = [_spaced(local(p.detach())) for _, p in now]
    groups = stacked(parts)
    return [now[i][0] for group, _ in groups for i in group], [checksums(x).double() for _, x in groups]


def _spaced(x: Tensor) -> Tensor:
    flat = x.flatten()
    return flat[:: max(1, -(-flat.numel() // ENTRIES))].contiguous()


def packages() -> dict[str, str]:
    """The versions of all that is imported and says its own, and of Python."""
    found = {name: vars(module).get("__version__") for name, module in list(sys.modules.items()) if "." not in name}
    named = {name: version for name, version in sorted(found.items()) if isinstance(version, str) and name[0] != "_"}
    return {"python": platform.python_version(), **named}


def seeds() -> dict[str, Any]:
    """Torch's seed, and hashes of the states of numpy's and Python's generators."""
    numpy = np.random.get_state(legacy=False)["state"]["key"].tobytes()
    python = repr(random.getstate()).encode()
    return {"torch": torch.initial_seed(), "numpy": short_hash(numpy), "python": short_hash(python)}


def short_hash(data: bytes) -> int:
    """36 bits of data, as a number that fp64 holds."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 28


def autocast() -> str:
    """The dtype of the autocast region we are in, "" outside of one."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return _word(torch.get_autocast_dtype(device))
    return ""


def flags() -> dict[str, Any]:
    """What else decides in which order numbers are added up."""
    kernels = torch.backends.cuda
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "attention_kernels": {
            name: getattr(kernels, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math")
        },
        "processes": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
    }


def of_model(view: ModelView) -> dict[str, Any]:
    """Where its parameters are, of which kind and shape, and what is around them."""
    now = [
        (name, p) for name, p in zip(view.parameters.names, view.parameters.current(), strict=False) if p is not None
    ]
    return {
        "model": type(view.model).__name__,
        "device": ", ".join(sorted({device_name(p.device) for _, p in now})),
        "dtype": ", ".join(sorted({_word(p.dtype) for _, p in now})),
        "parameters": {name: list(p.shape) for name, p in now},
        "frozen": [name for name, p in now if not p.requires_grad],
        "sharded": sorted({str(p.placements) for _, p in now if hasattr(p, "placements")}),
        "compiled": [display_path(path) for path, module in view.modules if is_compiled(module)],
        "wrapped": wrapping(view),
    }


def device_name(device: torch.device) -> str:
    """The kind of device, and which one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def wrapping(view: ModelView) -> dict[str, Any]:
    """The mode of the connections that `wrap` put in, their options, and how many blocks have one; {} without any."""
    counted = Counter(
        (str(getattr(rule, "mode", type(rule).__name__)), repr(getattr(rule, "options", "")))
        for _, rule in view.connections
    )
    return {mode: {"options": options, "blocks": count} for (mode, options), count in counted.items()}


def of_optimizer(optimizer: Any, view: ModelView) -> dict[str, Any]:
    """Its class, and of each group the parameters and options."""
    names = {id(p): name for name, p in zip(view.parameters.names, view.parameters.current(), strict=False)}
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {"parameters": [names.get(id(p), "?") for p in group["params"]], **_plain(group)}
            for group in optimizer.param_groups
        ],
    }


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group; a tensor on a device is not waited for."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    told = {k: "on the device" if isinstance(v, Tensor) and not v.is_cpu else v for k, v in options.items()}
    return {key: strict_json(value, DIGITS) for key, value in told.items()}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
