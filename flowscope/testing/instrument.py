"""`check_instrument`: whether an instrument keeps what every instrument promises.

Each check is a function of a class (or instance) of `Instrument`; it raises where the promise is broken, and its
docstring is the promise. The model is a small pre-norm stack in fp64.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel

from flowscope.errors import FlowscopeError
from flowscope.instruments import Instrument
from flowscope.metrics import Metric
from flowscope.records import Record, split_key
from flowscope.scope import watch
from flowscope.testing.connection import D, PreNorm, Stack, T, random_states, same

B = 8
KEPT = 32
"""Steps after which what an instrument remembers of the latest positions no longer changes."""
Kind = type[Instrument] | Instrument
Step = Sequence[Tensor]


def model_of(seed: int = 0) -> Stack:
    """Return the model, always the same for a seed."""
    torch.manual_seed(seed)
    return Stack(PreNorm).double()


def batch(seed: int = 0, size: int = B) -> Tensor:
    """Return [B, T, D], always the same for a seed."""
    return torch.randn(size, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(output: Tensor) -> Tensor:
    """Return a mean over the samples that every feature moves in its own way."""
    return (output * torch.linspace(0.5, 1.5, output.shape[-1], dtype=output.dtype)).square().mean()


def train(
    kinds: Sequence[Kind],
    steps: Sequence[Step],
    model: nn.Module | None = None,
    *,
    rate: float = 0.0,
    forward: Callable[[Tensor], Tensor] | None = None,
    between: Callable[[nn.Module], None] = lambda model: None,
) -> list[Record]:
    """Train on micro-batches (a list a step) and return a record a step.

    Args:
        kinds: the instruments from outside.
        steps: the micro-batches of each step.
        model: a fresh one by default.
        rate: of plain SGD.
        forward: what the loop calls in the place of the model.
        between: called with the model after each backward pass.
    """
    net = model_of() if model is None else model
    runs = net if forward is None else forward  # a compiled model has no truth value
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    fresh = [copy.deepcopy(kind) if isinstance(kind, Instrument) else kind for kind in kinds]
    with watch(net, optimizer, every=1, instruments=fresh, config={"console": "off", "slow_every": 1}) as scope:
        for micro_batches in steps:
            optimizer.zero_grad()
            for x in micro_batches:
                loss_of(runs(x)).backward()  # type: ignore[no-untyped-call]
                between(net)
            optimizer.step()
        return scope.records


def written(kind: Kind, record: Record, *, added_up: bool = False) -> dict[str, Any]:
    """Return what an instrument wrote into a record; with `added_up` only what all micro-batches and ranks add to."""
    names = {metric.name for metric in kind.metrics if not added_up or metric.ranks != "first"}
    return {key: values for key, values in record.metrics.items() if split_key(key)[0] in names}


def equal(kind: Kind, got: Record, expected: Record, what: str, rtol: float = 1e-9, *, added_up: bool = False) -> None:
    """Raise where two records differ in what an instrument wrote."""
    ours, theirs = (written(kind, record, added_up=added_up) for record in (got, expected))
    assert ours.keys() == theirs.keys(), f"{what}: got {sorted(ours)}, expected {sorted(theirs)}"
    for key, values in ours.items():
        same(torch.from_numpy(values), torch.from_numpy(theirs[key]), f"{key}, {what}", rtol)


# -- checks


def check_described(kind: Kind) -> None:
    """It has a name of its own, and every metric that it writes is declared, with words, and has a label a row."""
    assert isinstance(getattr(kind, "name", None), str), "it has no `name`"
    assert kind.name, "its `name` is empty"
    declared = getattr(kind, "metrics", ())
    assert declared, "its `metrics` are empty"
    assert all(isinstance(metric, Metric) for metric in declared), f"its `metrics` are no Metrics: {declared!r:.80}"
    silent = [metric.name for metric in declared if not metric.words]
    assert not silent, f"{', '.join(silent)}: a metric needs `words` that say what it means"
    plain, record = train([], [[batch()]])[0], train([kind], [[batch()]])[0]
    further = record.metrics.keys() - plain.metrics.keys()
    unknown = {key for key in further if split_key(key)[0] not in {metric.name for metric in declared}}
    assert not unknown, f"it writes {sorted(unknown)}, which its `metrics` do not declare"
    assert written(kind, record), f"it writes none of {[metric.name for metric in declared]}"
    for key, values in written(kind, record).items():
        labels = record.metric_labels.get(key, ())
        assert len(labels) == len(values), f"{key} has {len(values)} rows and {len(labels)} labels"
        assert record.spec(key) in declared, f"the run's header says something else of {key}"


def check_harmless(kind: Kind) -> None:
    """Training with it ends in the same weights to the last bit, and no random number is drawn."""
    weights = []
    for kinds in ([], [kind]):
        model = model_of()
        torch.manual_seed(3)
        before = random_states()
        train(kinds, [[batch(1)], [batch(2)]], model, rate=0.1)
        assert random_states() == before, "it draws random numbers"
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*weights), "the trained weights differ from those of a run without it"


def check_steps(kind: Kind) -> None:
    """A step's numbers are those of that step: weights and batch the same, the numbers are the same."""
    records = train([kind], [[batch(1)]] * KEPT + [[batch(2)], *[[batch(1)]] * KEPT])
    equal(kind, records[-1], records[KEPT - 1], "the same step again")


def check_accumulation(kind: Kind) -> None:
    """All micro-batches of a step count alike: their order does not matter."""
    first, second = batch(1), batch(2)
    both, turned = (train([kind], [step])[0] for step in ([first, second], [second, first]))
    equal(kind, both, turned, "micro-batches the other way round", added_up=True)


def check_checkpointing(kind: Kind) -> None:
    """Checkpointed blocks, reentrant or not, give the same numbers."""
    expected = train([kind], [[batch()]])[0]
    for reentrant in (False, True):
        model = model_of()
        model.reentrant = reentrant
        record = train([kind], [[batch().requires_grad_()]], model)[0]
        equal(kind, record, expected, f"checkpointed (use_reentrant={reentrant})")


def check_no_grad(kind: Kind) -> None:
    """A forward pass without gradient does not count."""

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(batch(7) * 3)

    equal(kind, train([kind], [[batch()]], between=evaluate)[0], train([kind], [[batch()]])[0], "evaluated in between")


def check_compile(kind: Kind) -> None:
    """A compiled model stays one graph while sampled, that reads nothing on the host, with the same numbers or none."""
    expected, model = train([kind], [[batch()]] * 2), model_of()
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own
        compiled = torch.compile(model, backend=keep, fullgraph=True)
        records = train([kind], [[batch()]] * 2, model, forward=compiled)
    torch.compiler.reset()
    assert len(graphs) == 1, f"the same step was compiled {len(graphs)} times"
    reads = [node for node in graphs[0].nodes if node.target in ("item", "tolist", "cpu")]
    assert not reads, f"the graph reads on the host: {reads}"
    seen, eager = written(kind, records[-1]), written(kind, expected[-1])
    for key in seen.keys() & eager.keys():
        if not np.isnan(seen[key]).all() and seen[key].shape == eager[key].shape:
            same(torch.from_numpy(seen[key]), torch.from_numpy(eager[key]), f"{key}, compiled", 1e-6)


def check_copies(kind: Kind) -> None:
    """A watched model can be copied and pickled, before and after a step."""
    model = model_of()
    train([kind], [[batch()]], model, between=lambda watched: pickle.loads(pickle.dumps(copy.deepcopy(watched))))


def check_two_ranks(kind: Kind) -> None:
    """Two ranks with half a batch each show what one process shows of the whole batch."""
    expected = train([kind], [[batch()]] * 2)[-1]
    code = f"import {__name__} as checks, sys; checks.one_rank(int(sys.argv[1]), sys.argv[2])"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kind.pickle").write_bytes(pickle.dumps(kind))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ranks = [
            subprocess.Popen([sys.executable, "-c", code, str(rank), folder], env=environment, stderr=subprocess.PIPE)
            for rank in range(2)
        ]
        said = [rank.communicate()[1].decode(errors="replace") for rank in ranks]
        for rank, process in enumerate(ranks):
            assert process.returncode == 0, f"rank {rank} of two ended with status {process.returncode}: {said[rank]}"
            record = torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            equal(kind, record, expected, f"as rank {rank} of two", 1e-6, added_up=True)


def one_rank(rank: int, folder: str) -> None:
    """Train on this rank's half, and leave the last record in the folder."""
    kind = pickle.loads((Path(folder) / "kind.pickle").read_bytes())
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    try:
        model = DistributedDataParallel(model_of())
        record = train([kind], [[batch().chunk(2)[rank]]] * 2, model)[-1]
        assert "local" not in record.flags, f"the ranks did not add up: {record.notes}"
        torch.save(record, Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


CHECKS: tuple[Callable[[Kind], None], ...] = (
    check_described,
    check_harmless,
    check_steps,
    check_accumulation,
    check_no_grad,
    check_checkpointing,
    check_copies,
    check_compile,
    check_two_ranks,
)


def check_instrument(kind: Kind) -> None:
    """Check on a small model that an instrument for `watch(instruments=[...])` keeps every promise; takes seconds.

    Args:
        kind: a subclass of `Instrument` (as `PointStatistic`), or an instance of one. Two processes of their own find
            it by its module and name, as pickle does: not in `__main__`.

    Raises:
        AssertionError: a broken promise; the message names the check, what was expected and got.
        FlowscopeError: no instrument.
    """
    if not (isinstance(kind, Instrument) or (isinstance(kind, type) and issubclass(kind, Instrument))):
        raise FlowscopeError(f"check_instrument(kind): got {kind!r:.80}, expected a subclass of Instrument.")
    name = getattr(kind, "__name__", type(kind).__name__)
    state, strict = torch.get_rng_state(), os.environ.get("FLOWSCOPE_STRICT")
    os.environ["FLOWSCOPE_STRICT"] = "1"
    try:
        for check in CHECKS:
            try:
                check(kind)
            except Exception as error:
                promise = (check.__doc__ or "").splitlines()[0]
                raise AssertionError(
                    f"check_instrument({name}), {check.__name__}: {type(error).__name__}: {error}\nPromised: {promise}"
                ) from error
    finally:
        torch.set_rng_state(state)
        os.environ.pop("FLOWSCOPE_STRICT")
        if strict is not None:
            os.environ["FLOWSCOPE_STRICT"] = strict
