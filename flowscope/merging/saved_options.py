"""What a checkpoint says of a connection besides its parameters: the options that decide its function.

They travel as the module's extra state, one uint8 tensor of JSON, padded to a multiple of 256 so that it keeps its size
where a loader asks for equal shapes (distributed checkpoints). A tensor, since safetensors takes nothing else; no
buffer, since DDP would broadcast it in every forward and `to_empty` would forget it.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from flowscope.errors import FlowscopeError

_UNIT = 256


def encode(options: dict[str, Any]) -> Tensor:
    """Return options as a uint8 tensor."""
    text = json.dumps(options, sort_keys=True).encode()
    return torch.frombuffer(bytearray(text.ljust(-(-len(text) // _UNIT) * _UNIT)), dtype=torch.uint8)


def decode(state: Any) -> dict[str, Any] | None:
    """Return the options in a tensor (floats where an average was taken over checkpoints), None where it holds none."""
    try:
        options = json.loads(bytes(state.detach().cpu().double().round().to(torch.uint8).tolist()))
    except (AttributeError, ValueError):
        return None
    return options if isinstance(options, dict) else None


def refuse_other(path: str, saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise where a checkpoint's connection computes something else at the same parameters.

    Raises:
        FlowscopeError: names the options that differ (only the mode where that does).
    """
    names = ["mode"] if saved.get("mode") != own["mode"] else [n for n in own if n in saved and saved[n] != own[n]]
    if not names or saved == own:
        return
    was, now = (", ".join(f"{name}={options.get(name)!r}" for name in names) for options in (saved, own))
    raise FlowscopeError(
        f"load_state_dict: {path} was saved with {was}, this model is wrapped with {now}: at the same parameters it "
        f"would compute something else. Wrap the model as it was saved: {was}."
    )
