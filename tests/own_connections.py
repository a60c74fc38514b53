"""Connections from outside the package: one that keeps every promise, and for each promise some that break it."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowscope.merging.connection import Connection, ModeOptions
from flowscope.merging.observed import Mean


class ScaledBranch(Connection):
    mode = "scaled-branch"
    observed: ClassVar = {"scale": Mean}

    class Options(ModeOptions):
        init: float = 1e-4

    def __init__(self, context, options):
        super().__init__(context, options)
        self.scale = nn.ParameterList(context.parameter(self.features, value=options.init) for _ in range(self.sites))

    def keeps_output(self):
        return self.options.init == 1

    def merge(self, site, state, x, f):
        return x + self.features_back(self.features_last(f) * self.observe(site, "scale", self.scale[site])), state


class NotFinite(ScaledBranch):
    def merge(self, site, state, x, f):
        y, state = super().merge(site, state, x, f)
        return y * float("nan"), state


class OtherDtype(ScaledBranch):
    def merge(self, site, state, x, f):
        y, state = super().merge(site, state, x, f)
        return y.float(), state


class LastAxisOnly(ScaledBranch):
    def merge(self, site, state, x, f):
        self.observe(site, "scale", self.scale[site])
        return x + f * self.scale[site], state


class ClaimsToKeep(ScaledBranch):
    def keeps_output(self):
        return True


class DeniesToKeep(ScaledBranch):
    def keeps_output(self):
        return False


class DrawsAtWrap(ScaledBranch):
    def __init__(self, context, options):
        super().__init__(context, options)
        random.random()


class DrawsInForward(ScaledBranch):
    def merge(self, site, state, x, f):
        return super().merge(site, state, x, f + 0 * torch.rand_like(f))


class NeverShows(Connection):
    mode = "never-shows"
    observed: ClassVar = {"weight": Mean}


class ShowsMore(ScaledBranch):
    def merge(self, site, state, x, f):
        self.observe(site, "branch", f)
        return super().merge(site, state, x, f)


class NoFactor(ScaledBranch):
    def carry_factor(self, site, sums):
        return float("nan")


class OneValue(Mean):
    def values(self, rows):
        return {self.name: rows[:2, 1].repeat(9)}


class MisshapenMetric(ScaledBranch):
    observed: ClassVar = {"scale": OneValue}


class Halved(Mean):
    def values(self, rows):
        return {"half_scale": rows[:, 1] / rows[:, 0] / 2}


class WithoutWords(ScaledBranch):
    observed: ClassVar = {"scale": Halved}


class BeginsAnyhow(ScaledBranch):
    def __init__(self, context, options):
        super().__init__(context, options)
        generator = torch.Generator()
        generator.seed()
        with torch.no_grad():
            self.scale[0].copy_(torch.rand(self.features, generator=generator))


class Counting(Mean):
    calls = 0

    def sums(self, k: int, x: Tensor) -> Any:
        self.calls += 1
        return super().sums(k, x) * self.calls


class SumsRemember(ScaledBranch):
    observed: ClassVar = {"scale": Counting}


class Remembers(ScaledBranch):
    before = None

    def merge(self, site, state, x, f):
        y, state = super().merge(site, state, x, f)
        if site == 0:
            y = y if self.before is None else y + 0.1 * (x.detach() - self.before)
            self.before = x.detach()
        return y, state


class OtherInRecomputation(ScaledBranch):
    def merge(self, site, state, x, f):
        return super().merge(site, state, x, f if torch._C._current_graph_task_id() == -1 else 2 * f)


class OtherInEval(ScaledBranch):
    def merge(self, site, state, x, f):
        return super().merge(site, state, x, f if self.training else 2 * f)


class UnusedParameter(ScaledBranch):
    def __init__(self, context, options):
        super().__init__(context, options)
        self.more = context.parameter(3)


class ZeroGradient(UnusedParameter):
    def merge(self, site, state, x, f):
        return super().merge(site, state, x + 0 * self.more.sum(), f)


class DoubleGradient(ScaledBranch):
    def merge(self, site, state, x, f):
        y, state = super().merge(site, state, x, f)
        return y + y - y.detach(), state


class NoPickle(ScaledBranch):
    def __init__(self, context, options):
        super().__init__(context, options)
        self.bend = lambda x: x


class OutsideStateDict(ScaledBranch):
    def __init__(self, context, options):
        super().__init__(context, options)
        self.shift = torch.randn(1).item()

    def merge(self, site, state, x, f):
        return super().merge(site, state, x + self.shift, f)


class ChangesTheBlock(ScaledBranch):
    def prepare(self, block):
        with torch.no_grad():
            block.one.weight.mul_(2)


class LeavesAHook(ScaledBranch):
    def prepare(self, block):
        block.register_forward_hook(print_nothing)


def print_nothing(module, args, output):
    return None


class OtherCompiled(ScaledBranch):
    def merge(self, site, state, x, f):
        return super().merge(site, state, x, 2 * f if torch.compiler.is_compiling() else f)


class RefusesAll(ScaledBranch):
    @classmethod
    def refusal(cls, block):
        return "not this one"


BROKEN: list[tuple[type[Connection], dict[str, Any], str]] = [
    (NotFinite, {}, r"check_output on PreNorm: .*not finite"),
    (OtherDtype, {}, r"check_output on PreNorm: .*could not be run"),
    (LastAxisOnly, {}, r"check_output on Convolutions: .*could not be run"),
    (ClaimsToKeep, {}, r"on PreNorm: PromiseError: .*promises to keep the output, but on these inputs it moved by"),
    (DeniesToKeep, {"init": 1.0}, r"check_keeps_output on PreNorm: .*says False, and the output changed by 0"),
    (DrawsAtWrap, {}, r"check_random_state on PreNorm: .*wrap draws"),
    (DrawsInForward, {}, r"check_random_state on PreNorm: .*training pass draws"),
    (NeverShows, {}, r"check_shown on PreNorm: .*declares weight in `observed` and does not show it at blocks.0#0"),
    (ShowsMore, {}, r"ShowsMore shows 'branch' at blocks.0#0 and does not declare it"),
    (NoFactor, {}, r"check_shown on PreNorm: .*carry_factor gives \[nan"),
    (MisshapenMetric, {}, r"check_shown on PreNorm: .*metric scale has 18 values at 6 sites"),
    (WithoutWords, {}, r"check_shown on PreNorm: .*nothing says what metric half_scale is"),
    (BeginsAnyhow, {}, r"check_two_ranks on PreNorm: .*connection.scale.0 begins with other values"),
    (SumsRemember, {}, r"check_two_ranks on PreNorm: .*sums of two ranks"),
    (Remembers, {}, r"check_accumulation on PreNorm: .*accumulated gradient of"),
    (OtherInRecomputation, {}, r"check_checkpointing on PreNorm: .*gradients of a checkpoint"),
    (OtherInEval, {}, r"check_no_grad on PreNorm: .*output in eval mode"),
    (UnusedParameter, {}, r"check_gradients on PreNorm: .*no gradient reaches blocks.0.connection.more"),
    (ZeroGradient, {}, r"check_gradients on PreNorm: .*the gradient of blocks.0.connection.more is 0"),
    (DoubleGradient, {}, r"check_gradients on PreNorm: .*finite differences say"),
    (NoPickle, {}, r"check_copies on PreNorm: .*lambda"),
    (OutsideStateDict, {}, r"check_copies on PreNorm: .*output with the loaded state_dict"),
    (ChangesTheBlock, {}, r"check_unwrap on PreNorm: .*left_behind says nothing"),
    (LeavesAHook, {}, r"check_unwrap on PreNorm: .*hooks are left"),
    (OtherCompiled, {}, r"check_compile on PreNorm: .*compiled output"),
    (RefusesAll, {}, r"refuses every model"),
]
