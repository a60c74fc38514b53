"""From a place that is named to the component of a transformer it belongs to.

The operators' package knows twelve components. Four of them (mask, score, kernel, variant) are one place, the attention
between its projections and its output: `attention` here, for every tool alike. The first rule that fits a path decides:

    output_* metrics, the loss    output         first to part: what lies behind the last block, whatever its path
    lm_head, classifier, pooler   output
    position, wpe                 positional
    norm, ln_                     layernorm
    embed, wte                    embedding
    query, key, value, c_attn     qkv
    attn, attention               attention
    mlp, intermediate, fc, ffn, output.dense     ffn
    what enters the first block   embedding
    a block as a whole            residual       the sum behind its branches
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from benchmarks.rivals.mutants import Mutant

PLACES = (
    (r"lm_head|classifier|pooler|\bscore\b|\bhead\b", "output"),
    (r"position|wpe", "positional"),
    (r"norm|\bln_", "layernorm"),
    (r"embed|wte", "embedding"),
    (r"query|key|value|c_attn|[qkv]_proj|in_proj", "qkv"),
    (r"attn|attention", "attention"),
    (r"mlp|intermediate|\bffn|feed_forward|c_fc|\bfc\d|output\.(dense|dropout)|\boutput$", "ffn"),
    (r"\.0:input$", "embedding"),
    (r"(\bh|layer|layers|blocks)\.\d+(:input)?$", "residual"),
)
MODULE = "()"
"""Behind the path of a module, so that it is no parameter's."""
INSIDE_ATTENTION = ("masking", "decoder_masking", "score", "kernel", "variant", "kv_cache")


def component(where: str, metric: str = "", phase: str = "") -> str:
    """Return the component of a place, empty where it belongs to none."""
    if phase == "loss" or metric == "loss" or metric.startswith("output"):
        return "output"
    for pattern, name in PLACES:
        if re.search(pattern, where.lower()):
            return name
    return ""


def labelled(declared: str) -> str:
    """Return what the operators' package says it mutates, in our eight."""
    return "attention" if declared in INSIDE_ATTENTION else declared


def written(mutant: Mutant, model: nn.Module) -> set[str]:
    """Return the components of the parameters and modules that a mutation in fact changes."""
    before = state(model)
    with mutant.injector(model):
        after = state(model)
        changed = [name for name, value in after.items() if differs(before.get(name), value)]
    return {component(name.removesuffix(MODULE)) for name in changed} - {""}


def state(model: nn.Module) -> dict[str, Any]:
    """Return what a mutation may change: weights, whether they learn, forwards, epsilons, kinds of modules."""
    weights = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    modules = {
        name: (type(module).__name__, vars(module).get("forward"), getattr(module, "eps", None))
        for name, module in model.named_modules()
    }
    return {**{name + MODULE: value for name, value in modules.items() if name}, **weights}


def differs(before: Any, after: Any) -> bool:
    """Whether one entry of `state` is another."""
    if before is None or not isinstance(after[0], Tensor):
        return before != after
    return before[1] != after[1] or not bool((before[0] == after[0]).all())
