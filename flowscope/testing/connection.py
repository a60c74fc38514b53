"""`check_connection`: whether a rule for merge sites keeps what every rule promises.

Each check is a function of a `Subject`: a rule, its options, and one of three small models (pre-norm, post-norm and
convolutions; fp64). It raises where the promise is broken; its docstring is the promise.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowscope.config import WatchConfig
from flowscope.errors import FlowscopeError
from flowscope.faults import Faults
from flowscope.hooks.hooks import Hooks
from flowscope.instruments import METRICS
from flowscope.instruments.merge_sites import MergeSites
from flowscope.merging.connection import Connection
from flowscope.merging.modes import rule_of
from flowscope.merging.verification import PromiseError
from flowscope.merging.wrapping import connections, unwrap, wrap
from flowscope.records import Array

B, T, D, DEPTH = 3, 5, 8, 3
KEPT, CHANGED = 1e-5, 1e-4
"""Relative differences of the output: below the first it is kept (initial values may be rounded to fp32), above the
second it is not."""


# -- models


class PreNorm(nn.Module):
    """x + f(norm(x)) twice."""

    shape = (T, D)

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, D]."""
        x = x + torch.tanh(self.one(self.norm1(x)))
        y: Tensor = x + torch.tanh(self.two(self.norm2(x)))
        return y


class PostNorm(PreNorm):
    """norm(x + f(x)) twice."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, D]."""
        x = self.norm1(x + torch.tanh(self.one(x)))
        y: Tensor = self.norm2(x + torch.tanh(self.two(x)))
        return y


class Convolutions(nn.Module):
    """x + f(x), features on axis 1."""

    shape = (D, 4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(D, D, 3, padding=1), nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, D, height, width]."""
        y: Tensor = x + self.two(torch.tanh(self.one(x)))
        return y


class Stack(nn.Module):
    """Blocks one behind the other; `reentrant` says how they are checkpointed, None: not at all."""

    reentrant: bool | None = None

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return what x becomes."""
        x = x * self.scale
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Subject(NamedTuple):
    """What a check is about."""

    rule: type[Connection]
    options: dict[str, Any]
    block: type[PreNorm] | type[Convolutions]

    def plain(self, seed: int = 0) -> nn.Module:
        """Return the model before `wrap`, always the same for a seed."""
        torch.manual_seed(seed)
        return Stack(self.block).double()

    def wrapped(self, seed: int = 0) -> nn.Module:
        """Return the model just wrapped."""
        return wrap(self.plain(seed), self.rule, example_inputs=self.batch(), **self.options)

    def trained(self) -> nn.Module:
        """Return the wrapped model off its initial values, where many gradients are 0."""
        model = self.wrapped()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.2)
        return model

    def batch(self, seed: int = 0) -> Tensor:
        """Return a batch, always the same for a seed."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(B, *self.block.shape, generator=generator, dtype=torch.float64)


# -- what checks share


class Strict(Faults):
    """Raises every fault."""

    strict = True


class Seen(NamedTuple):
    """What training passes left: gradients by parameter name, and the sums at the sites [rows, columns]."""

    gradients: dict[str, Tensor]
    sums: Array
    sites: MergeSites


def loss_of(output: Tensor) -> Tensor:
    """Return a number that every entry of the output moves."""
    return (output * torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)).square().mean()


def passes(model: nn.Module, *batches: Tensor) -> Seen:
    """Run a training pass a batch, gradients accumulating, while the sites are observed as `watch` does."""
    hooks = Hooks(Strict())
    hooks.switch.sampling = True
    sites = MergeSites(connections(model), "blocks", WatchConfig())
    sites.attach(None, hooks)
    model.zero_grad()
    try:
        for batch in batches:
            sites.start_forward()
            loss_of(model(batch.clone().requires_grad_())).backward()  # type: ignore[no-untyped-call]
    finally:
        sites.close()
        hooks.close()
    sums = np.zeros((sites.buffer.rows, sites.buffer.columns))
    for part in sites.buffer.take():
        sums[: len(part)] += part.double().cpu().numpy()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Seen(gradients, sums, sites)


def same(got: Any, expected: Any, what: str, rtol: float = 1e-9) -> None:
    """Raise where two tensors, arrays or dicts of tensors differ by more than rounding."""
    torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-12, equal_nan=True, msg=lambda m: f"{what}: {m}")


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float(((a - b).abs().max() / b.abs().max()).detach())


def random_states() -> tuple[Any, ...]:
    """Return the states of torch's, numpy's and Python's generators."""
    return torch.get_rng_state().tolist(), str(np.random.get_state(legacy=False)), random.getstate()


# -- checks


def check_output(subject: Subject) -> None:
    """The output is finite, and of the shape and dtype that it had."""
    x = subject.batch()
    plain, output = subject.plain()(x), subject.trained()(x)
    assert (output.shape, output.dtype) == (plain.shape, plain.dtype), (
        f"the output is {output.dtype} {list(output.shape)}, that of the plain model {plain.dtype} {list(plain.shape)}"
    )
    assert output.isfinite().all(), "the output is not finite"


def check_keeps_output(subject: Subject) -> None:
    """`keeps_output` is true, whichever it says."""
    x, model = subject.batch(), subject.wrapped()
    gap = distance(model(x), subject.plain()(x))
    kept = all(connection.keeps_output() for _, connection in connections(model))
    assert gap < KEPT if kept else gap > CHANGED, (
        f"keeps_output() says {kept}, and the output changed by {gap:.1e} of its largest value"
    )


def check_random_state(subject: Subject) -> None:
    """Neither wrapping nor a training pass draws a random number."""
    model, x = subject.plain(), subject.batch()
    before = random_states()
    wrap(model, subject.rule, example_inputs=x, **subject.options)
    assert random_states() == before or subject.rule.left_behind, "wrap draws random numbers"
    before = random_states()
    passes(model, x)
    assert random_states() == before, "a training pass draws random numbers"


def check_shown(subject: Subject) -> None:
    """What is declared in `observed` is shown at every site, nothing else is, and the carry's factor is a number."""
    seen = passes(subject.trained(), subject.batch())
    table = {name: seen.sites.rows_of(name, seen.sums) for name in seen.sites.sums}
    for k, (connection, site) in enumerate(seen.sites.owners):
        for name in connection.shown_at(site):
            assert table[name][k].any(), f"{name!r} of {seen.sites.labels[k]} got no sums: is its gradient never used?"
    for name, (values, labels) in seen.sites.metrics_of(seen.sums).items():
        assert len(values) == len(labels), f"metric {name} has {len(values)} values at {len(labels)} sites"
        assert name != "shortcut_product" or np.isfinite(values).all(), f"carry_factor gives {values}"
        described = name in METRICS or name in {metric.name for metric in subject.rule.metrics}
        assert described, f"nothing says what metric {name} is: describe it in `metrics`"


def check_gradients(subject: Subject) -> None:
    """Every parameter of a connection gets its gradient; that of the second block is checked by finite differences."""
    model, x = subject.trained(), subject.batch()
    gradients = passes(model, x).gradients
    for number, (path, connection) in enumerate(connections(model)):
        for name, parameter in connection.named_parameters():
            gradient = gradients.get(f"{path}.{name}")
            assert gradient is not None, f"no gradient reaches {path}.{name}"
            assert gradient.any(), f"the gradient of {path}.{name} is 0"
            if number != 1:
                continue
            with torch.no_grad():
                ends = [loss_of(model(x)).item() for _ in shifted(parameter, 1e-6)]
            slope = (ends[0] - ends[1]) / 2e-6
            error = abs(slope - float(gradient.sum()))
            assert error < 1e-6 + 1e-4 * abs(slope), (
                f"the gradient of {path}.{name} sums to {float(gradient.sum()):.6g}, finite differences say {slope:.6g}"
            )


def shifted(parameter: Tensor, step: float) -> Iterator[None]:
    """Move all entries of a parameter up by a step, then down by one, then back."""
    for shift in (step, -2 * step):
        parameter += shift
        yield
    parameter += step


def check_accumulation(subject: Subject) -> None:
    """Two micro-batches leave the gradients that each leaves alone, added up: no call remembers another."""
    first, second = subject.batch(1), subject.batch(2)
    alone = [passes(subject.trained(), batch) for batch in (first, second)]
    both = passes(subject.trained(), first, second)
    for name, gradient in both.gradients.items():
        same(gradient, alone[0].gradients[name] + alone[1].gradients[name], f"accumulated gradient of {name}")


def check_two_ranks(subject: Subject) -> None:
    """Ranks begin with the same values, and what they sum up adds up to what one rank sums up of both batches."""
    other = subject.plain()
    torch.rand(7)  # a rank may have drawn numbers before
    random.random()
    wrap(other, subject.rule, example_inputs=subject.batch(), **subject.options)
    for (name, ours), theirs in zip(subject.wrapped().state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs) or subject.rule.left_behind, f"{name} begins with other values on another rank"
    ranks, model = [subject.trained(), subject.trained()], subject.trained()
    sums = [passes(rank, subject.batch(seed)).sums for rank, seed in zip(ranks, (1, 2), strict=True)]
    same(sums[0] + sums[1], passes(model, subject.batch(1), subject.batch(2)).sums, "sums of two ranks")


def check_checkpointing(subject: Subject) -> None:
    """Checkpointed blocks, reentrant or not, give the same gradients and sums."""
    expected = passes(subject.trained(), subject.batch())
    for reentrant in (False, True):
        model: Any = subject.trained()
        model.reentrant = reentrant
        seen = passes(model, subject.batch())
        same(seen.gradients, expected.gradients, f"gradients of a checkpoint (use_reentrant={reentrant})")
        same(seen.sums, expected.sums, f"sums of a checkpoint (use_reentrant={reentrant})")


def check_no_grad(subject: Subject) -> None:
    """Without gradient, and in eval mode, the output is the same."""
    model, x = subject.trained(), subject.batch()
    expected = model(x).detach()
    with torch.no_grad():
        same(model(x), expected, "output under no_grad")
        same(model.eval()(x), expected, "output in eval mode")


def check_copies(subject: Subject) -> None:
    """Copies, pickles and state dicts hold all that the connection is; a state dict from before `wrap` loads too."""
    model, x = subject.trained(), subject.batch()
    expected = model(x).detach()
    same(copy.deepcopy(model)(x), expected, "output of a deepcopy")
    same(pickle.loads(pickle.dumps(model))(x), expected, "output of a pickled model")
    kept = io.BytesIO()
    torch.save(model.state_dict(), kept)
    other = subject.wrapped(seed=5)
    other.load_state_dict(torch.load(io.BytesIO(kept.getvalue())))
    same(other(x), expected, "output with the loaded state_dict")
    other.load_state_dict(subject.plain().state_dict())


def check_unwrap(subject: Subject) -> None:
    """`unwrap` gives the plain model back, and it can be wrapped again."""
    plain, model, x = subject.plain(), subject.wrapped(), subject.batch()
    unwrap(model)
    assert [*map(type, model.modules())] == [*map(type, plain.modules())], "other modules are left"
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert not hooks, f"hooks are left: {hooks}"
    assert model.state_dict().keys() == plain.state_dict().keys(), "other parameters are left"
    if not subject.rule.left_behind:
        same(dict(model.state_dict()), dict(plain.state_dict()), "parameters after unwrap (left_behind says nothing)")
        same(model(x), plain(x), "output after unwrap")
    wrap(model, subject.rule, example_inputs=x, **subject.options)


def check_compile(subject: Subject) -> None:
    """Compiled, the model gives the same output and gradients."""
    model, x = subject.trained(), subject.batch()
    expected, output = passes(model, x), model(x).detach()
    torch.compiler.reset()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own, where it traces an autograd.Function
        compiled = torch.compile(model, backend="aot_eager")(x.clone().requires_grad_())
    loss_of(compiled).backward()  # type: ignore[no-untyped-call]
    torch.compiler.reset()
    same(compiled, output, "compiled output", rtol=1e-6)
    for name, parameter in model.named_parameters():
        if name in expected.gradients:
            same(parameter.grad, expected.gradients[name], f"compiled gradient of {name}", rtol=1e-6)


CHECKS: tuple[Callable[[Subject], None], ...] = (
    check_output,
    check_keeps_output,
    check_shown,
    check_random_state,
    check_two_ranks,
    check_accumulation,
    check_checkpointing,
    check_no_grad,
    check_gradients,
    check_copies,
    check_unwrap,
    check_compile,
)


def check_connection(rule: type[Connection] | str, **options: Any) -> None:
    """Check on small models that a rule for `wrap` keeps every promise; takes seconds.

    Args:
        rule: a subclass of `Connection`, or the name of one; found by its module and name (pickle does).
        **options: as for `wrap`.

    Raises:
        AssertionError: a broken promise; the message names the check, the model, what was expected and got.
        FlowscopeError: no rule, a name that is taken, an option it does not have.
    """
    rule = rule_of(rule)
    state = torch.get_rng_state()
    try:
        subjects = [Subject(rule, options, block) for block in (PreNorm, PostNorm, Convolutions)]
        served = [subject for subject in subjects if not refused(subject)]
        assert served, f"check_connection({rule.__name__}): it refuses every model"
        for subject in served:
            for check in CHECKS:
                if check is not check_compile or subject is served[0]:
                    run_check(check, subject)
    finally:
        torch.set_rng_state(state)


def refused(subject: Subject) -> bool:
    """Whether the rule says that it cannot serve this model; one it cannot run, or changes unannounced, is none."""
    try:
        subject.wrapped()
    except FlowscopeError as error:
        return error.__cause__ is None and not isinstance(error, PromiseError)
    return False


def run_check(check: Callable[[Subject], None], subject: Subject) -> None:
    """Run a check; what it raises names the rule, the model and the promise."""
    try:
        check(subject)
    except Exception as error:
        place = f"check_connection({subject.rule.__name__}), {check.__name__} on {subject.block.__name__}"
        promise = (check.__doc__ or "").splitlines()[0]
        raise AssertionError(f"{place}: {type(error).__name__}: {error}\nPromised: {promise}") from error
