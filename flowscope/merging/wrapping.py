"""`wrap`: put a connection at every merge site of an unmodified model, in place; and the way back.

```python
model = flowscope.wrap(model, mode="dhc", streams=4, example_inputs=batch)
flowscope.connections(model)                  # [("layers.0.connection", Connection), ...]
model = flowscope.unwrap(model)
```
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import nn

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, ModeOptions
from flowscope.merging.first_forward import BlockRan, FirstForward, remove_hooks
from flowscope.merging.idle import freeze_idle, thaw_idle
from flowscope.merging.modes import Rule, parse_options, rule_of
from flowscope.merging.placement import block_rule, contexts, servable, stretches, without
from flowscope.merging.stream_outputs import HOOKS, attach_hooks
from flowscope.merging.surroundings import adapter_notice, refuse_own_streams, refuse_parallel
from flowscope.merging.verification import BlockError, check_run
from flowscope.merging.weaving import Notice, Recipe, WovenBlock, lanes_of, unweave, weave
from flowscope.model.sites import Key, SitePlan, Trial, plan_sites, uncompiled

logger = logging.getLogger("flowscope")


def wrap(
    model: nn.Module,
    mode: str | Rule = "keel",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    example_inputs: Any = None,
    where: str | list[str] | tuple[str, ...] | None = None,
    **options: Any,
) -> nn.Module:
    """Replace the residual merges of a model by connections, in place; returns the model.

    Every block gets one child module (`connection`); no module moves, no parameter changes its name, a checkpoint
    saved before loads strictly. Logs once what it did.

    Args:
        model: any module with repeated residual blocks.
        mode: a name of `MODES` (hyphen or underscore), or a subclass of `Connection` of your own.
        optimizer: an existing optimizer gets the new parameters as groups (make its scheduler after that).
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments for one run of the model; without
            it transformers' `dummy_inputs` (also of the one transformers model inside), else each block is run alone
            and checked at the first forward.
        where: patterns of block paths to include; `*` matches anything.
        **options: the mode's own (`Connection.Options`).

    Raises:
        FlowscopeError: an unknown mode or option, a model already wrapped or without residual merges, inputs it cannot
            be run on, no block this mode can serve, a promise that is not kept (see docs/wrapping.md), a model that is
            under DDP or FSDP already, or one with hyper-connections of its own. The model is then as it was.
    """
    rule = rule_of(mode)
    settings = parse_options(rule, **options)
    if not isinstance(model, nn.Module):
        raise FlowscopeError(f"wrap(model): got {type(model).__name__}, expected a torch.nn.Module.")
    inner = uncompiled(model)
    if is_wrapped(inner):
        raise FlowscopeError("wrap: the model is wrapped already; call flowscope.unwrap(model) first.")
    refuse_parallel(inner)
    refuse_own_streams(inner)
    plan, trial = plan_sites(inner, example_inputs, where)
    plan = servable(plan, rule)
    if not plan.blocks:
        reasons = "; ".join(f"{path or 'the model'}: {reason}" for path, reason in plan.refused[:5])
        raise FlowscopeError(
            f"wrap: no residual merge found in {type(inner).__name__}, nothing was changed. {reasons}. "
            "wrap needs blocks that add their input to their output (x + f(x)); flowscope.watch(model) works without "
            "them, and flowscope.find_sites(model, example_inputs) shows what was looked at."
        )
    plan, change = put_in(inner, plan, trial, rule, settings)
    try:
        idle = freeze_idle(connection for _, connection in connections(inner))
        extend_optimizer(inner, optimizer)
    except BaseException:
        take_out(inner)
        raise
    for path, connection in connections(inner):
        connection.prepare(inner.get_submodule(path.rpartition(".")[0]))
    report(inner, plan, optimizer, change, idle)
    return model


def put_in(
    model: nn.Module, plan: SitePlan, trial: Trial | None, rule: Rule, settings: ModeOptions
) -> tuple[SitePlan, float | None]:
    """Put the connections of a plan in, check them, and leave single blocks out that cannot run with them.

    Returns:
        The plan as carried out, and by how much the output moved (None: not known without a trial).
    """
    while True:
        try:
            weave_plan(model, plan, rule, settings)
            refuse_unmade(model)
            if trial is not None:
                return plan, check_run(model, plan, trial)
            FirstForward.attach(model, plan.paths)
            return plan, None
        except BlockError as fault:
            take_out(model)
            plan = without(plan, {block.key: fault.reason for block in plan.blocks if block.path == fault.path})
            if not plan.blocks:
                raise
        except BaseException:
            take_out(model)
            raise


def refuse_unmade(model: nn.Module) -> None:
    """Raise where a mode would leave every site as it was."""
    reasons = [connection.unmade() for _, connection in connections(model)]
    if all(reasons):
        mode = connections(model)[0][1].mode
        raise FlowscopeError(
            f"wrap(mode={mode!r}): nothing would change at {len(reasons)} of {len(reasons)} blocks: {reasons[0]}, and "
            "no flow of this model is longer (flowscope.find_sites(model, example_inputs) shows the flows). "
            "Use another mode, such as 'keel'."
        )


def take_out(model: nn.Module) -> None:
    """Undo all that `wrap` did to a model's modules."""
    unweave(model)
    thaw_idle(model)
    remove_hooks(model, *HOOKS, FirstForward, BlockRan)


def unwrap(model: nn.Module) -> nn.Module:
    """Take the connections away, in place; returns the model, every class and name as before `wrap`.

    Exact where the mode keeps the output at the start and the connections are untrained; otherwise logs what is lost.

    Raises:
        FlowscopeError: the model is not wrapped.
    """
    inner = uncompiled(model)
    blocks = [module for module in inner.modules() if isinstance(module, WovenBlock)]
    if not blocks:
        raise FlowscopeError(
            "unwrap: the model is not wrapped, expected one that flowscope.wrap(model) was called with; "
            "flowscope.is_wrapped(model) tells."
        )
    found = [connection for _, connection in connections(inner)]
    trained = [block for block in blocks if is_trained(block)]
    lost = sum(p.numel() for c in found for p in c.parameters())
    take_out(inner)
    if found[0].left_behind:
        logger.warning("unwrap: %s", found[0].left_behind)
    if trained or not all(connection.keeps_output() for connection in found):
        why = f"{len(trained)} connections were trained" if trained else f"{found[0].mode} does not keep the output"
        logger.warning("unwrap: %s; the model now computes x + f, %d connection parameters are lost", why, lost)
    return model


def is_wrapped(model: nn.Module) -> bool:
    """Return whether `wrap` put connections into the model."""
    return any(isinstance(module, WovenBlock) for module in model.modules())


def connections(model: nn.Module) -> list[tuple[str, Connection]]:
    """Return (module path, connection) of every wrapped block, in module order."""
    return [(path, module) for path, module in model.named_modules() if isinstance(module, Connection)]


def weave_plan(model: nn.Module, plan: SitePlan, rule: Rule, settings: ModeOptions) -> None:
    """Make the connections of a plan, put them in, and hook what else would see their streams."""
    notice, seed = Notice(), torch.initial_seed()
    made: dict[Key, Connection] = {}
    for number, (block, context) in enumerate(contexts(model, plan)):
        recipe = Recipe(rule, context, settings, (seed + number) % 2**63, notice)
        made[block.key] = weave(model, block, block_rule(model, block, rule.expands), recipe)
    if rule.expands:
        attach_hooks(model, [(blocks, [made[block.key] for block in blocks]) for blocks in stretches(plan)])


def extend_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Give the connections' parameters to an optimizer: generators as its first group, the rest without decay."""
    if optimizer is None:
        return
    if not hasattr(optimizer, "param_groups"):
        raise FlowscopeError(f"wrap(optimizer=...): got {type(optimizer).__name__}, expected a torch.optim.Optimizer.")
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise FlowscopeError("wrap(optimizer=...): the optimizer holds no parameter of this model.")
    first = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
    undecayed = {**first, **dict.fromkeys(first.keys() & {"weight_decay"}, 0.0)}
    found = connections(model)
    generators = [(f"{path}.{n}", p) for path, c in found for n, p in c.generator_parameters()]
    static = [(f"{path}.{n}", p) for path, c in found for n, p in c.static_parameters()]
    by_name = "param_names" in optimizer.param_groups[0]
    for group, named in ((first, generators), (undecayed, static)):
        if named:
            optimizer.add_param_group({**group, "params": named if by_name else [p for _, p in named]})


def is_trained(block: WovenBlock) -> bool:
    """Return whether a block's connection differs from its initial values."""
    for rule, recipe in lanes_of(block):
        now, start = cast(nn.Module, block).get_submodule(rule.child).state_dict(), recipe.make().state_dict()
        if any(not torch.equal(value, start[key].to(value)) for key, value in now.items()):
            return True
    return False


def report(
    model: nn.Module, plan: SitePlan, optimizer: torch.optim.Optimizer | None, change: float | None, idle: int
) -> None:
    """Log once what `wrap` did."""
    found = [connection for _, connection in connections(model)]
    added = sum(p.numel() for c in found for p in c.parameters())
    kept = "kept" if all(connection.keeps_output() for connection in found) else "not kept"
    described = found[0].describe(found)
    unknown = (
        "no example inputs: compared at the first forward" if kept == "kept" else "no example inputs: not measured"
    )
    measured = unknown if change is None else f"it moved by {change:.1e} relative"
    parts = [
        f"wrap(mode={found[0].mode!r}): {len(plan)} sites in {len(plan.paths)} blocks, {added:,} parameters added",
        f"output at the start {kept} ({measured})",
        *([f"{idle} norms of the model are unused and frozen"] if idle else []),
        *([described] if described else []),
        "the optimizer has the new parameters"
        if optimizer is not None
        else "an optimizer made before this does not have the new parameters (optimizer=...)",
        "flowscope.watch(model) records them",
        *(
            said
            for kind, said in vars(type(found[0])).get("traps", {}).items()
            if any(kind in c.norm_kinds for c in found)
        ),
        *filter(None, [adapter_notice(model)]),
    ]
    if plan.refused:
        path, reason = plan.refused[0]
        parts.insert(1, f"{len(plan.refused)} blocks or adds not wrapped (see find_sites), such as {path}: {reason}")
    logger.warning("; ".join(parts))
