"""What a model that is to be wrapped has already: data parallelism, streams of its own (refused), adapters (warned)."""

from __future__ import annotations

from torch import nn

from flowscope.errors import FlowscopeError
from flowscope.model.hyper_connections import find_hyper_connections

_PARALLEL = {
    "DistributedDataParallel": "DistributedDataParallel (DDP)",
    "FullyShardedDataParallel": "FullyShardedDataParallel (FSDP)",
    "FSDPModule": "fully_shard (FSDP2)",
    "DeepSpeedEngine": "a DeepSpeed engine",
}


def refuse_parallel(model: nn.Module) -> None:
    """Raise where data parallelism was set up before: it would not know the new parameters, and ranks drift apart.

    By the names of classes, so that nothing of torch.distributed is imported. DDP that holds the model from outside
    cannot be seen from here.
    """
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _PARALLEL:
                _refuse(_PARALLEL[kind.__name__])
    if any(kind.__name__ == "DTensor" for p in model.parameters() for kind in type(p).__mro__):
        _refuse("sharding: its parameters are DTensors")


def refuse_own_streams(model: nn.Module) -> None:
    """Raise where the model has hyper-connections of its own: what they carry on is no residual add."""
    found = find_hyper_connections(model.named_modules())
    if found:
        raise FlowscopeError(
            f"wrap: the model has hyper-connections of its own ({found[0].path}, {len(found)} in all), and merges its "
            "branches by these. flowscope.watch(model) records them as they are; nothing was changed."
        )


def _refuse(what: str) -> None:
    raise FlowscopeError(
        f"wrap: the model is under {what} already, which would not synchronise the connections' parameters. The order "
        "is: flowscope.wrap(model), then DistributedDataParallel(model) or fully_shard(...), then the optimizer."
    )


def adapter_notice(model: nn.Module) -> str:
    """Return what to do where the model holds PEFT's adapters; "" elsewhere."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if not kinds & {"PeftModel", "BaseTunerLayer"}:
        return ""
    return (
        "the model has adapters already, and their save_pretrained leaves the connections out: wrap before "
        'get_peft_model and name them, modules_to_save=["connection"]'
    )
