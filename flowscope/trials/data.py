"""`data`: batches differ, are finite, of a usable scale, and mixed."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowscope.torch_internals import in_worker
from flowscope.trials.bench import Bench, batch_tensors
from flowscope.trials.trial import Trial, TrialFinding

LARGE = 100.0
"""Features whose standard deviation or mean is beyond this (or below its inverse) train badly without scaling."""
MOST = 0.5
"""A larger share of constant features is told."""
ENOUGH, WIDEST = 20, 256
"""Rows from which a column of a table counts as constant; wider ones are pictures, whose borders are."""
FEW = 4
"""Samples of a batch, at least, that are one and the same by no chance."""
CHANCE = math.log(1e-4)
"""Orders in which shuffled targets come less often than so are told."""


class Data(Trial):
    """Compare the batches with each other, and over the ranks."""

    name = "data"
    proves = "batches are not the same, and hold finite numbers of a usable scale"
    blind = "what is wrong in later batches; a data set that is wrong as a whole"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """A finding for each thing that is odd."""
        batches = [[x.detach() for x in batch_tensors(batch)] for batch in bench.batches]
        found = [*self._same(bench, batches), *self._numbers(batches), *self._sorted(batches), *self._ranks(batches)]
        found += [*self._one_sample(batches), *self._workers(bench), *self._begun_anew(bench)]
        yield from found or [self.passed(f"{len(batches)} batches differ, and hold finite numbers of a usable scale")]

    def _same(self, bench: Bench, batches: list[list[Tensor]]) -> Iterable[TrialFinding]:
        for (n, a), (m, b) in itertools.combinations(enumerate(batches), 2):
            drawn = any(getattr(batch, "draws", False) for batch in bench.batches)  # some of it is made on the way
            if a and not drawn and len(a) == len(b) and all(map(torch.equal, a, b)):
                message = f"batch {m} holds the same numbers as batch {n}"
                yield self.noted("", message, "right for training on one batch; else look at the loader or its cache")
                return

    def _numbers(self, batches: list[list[Tensor]]) -> Iterable[TrialFinding]:
        for position, tensors in enumerate(zip(*batches, strict=False)):
            floating = [x for x in tensors if x.is_floating_point() and x.dim() and x.numel()]
            if not floating or floating[0].numel() < 2:
                continue
            which = f"tensor {position} of the batch {list(floating[0].shape)}"
            if any(not bool(torch.isfinite(x).all()) for x in floating):
                yield self.failed("", f"{which} holds NaN or inf", "look at the rows it comes from; fill or drop them")
                continue
            rows = [x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1) for x in floating]
            if len({r.shape[1] for r in rows}) != 1:
                continue
            whole = torch.cat(rows).double()
            spread, mean = float(whole.std(correction=0)), float(whole.mean().abs())
            if max(spread, mean) > LARGE or 0 < spread < 1 / LARGE:
                message = f"{which} has mean {mean:.3g} and standard deviation {spread:.3g}"
                yield self.noted("", message, "scale features to mean 0 and deviation 1")
            constant = float((whole == whole[:1]).all(0).double().mean())
            if columns := _still_columns(floating[0], whole):
                message = f"{len(columns)} columns of {which} are constant: " + ", ".join(columns[:4])
                yield self.noted("", message, "look at where they are read, filled or clipped")
            elif constant > MOST and whole.shape[0] > 1:
                message = f"{constant:.0%} of the features of {which} never change"
                yield self.noted("", message, "right for borders of images; else look at where features are read")

    def _one_sample(self, batches: list[list[Tensor]]) -> Iterable[TrialFinding]:
        """Inputs that are the same for all samples of a batch, though their targets differ."""
        for batch in batches:
            sizes = {x.shape[0] for x in batch if x.dim() == 1 and not x.is_floating_point()}
            given = [x for x in batch if x.dim() > 1 and x.shape[0] in sizes and x[0].numel() > 1]
            targets = [x for x in batch if x.dim() == 1 and x.shape[0] in sizes and not x.is_floating_point()]
            alike = given and all(x.shape[0] >= FEW and bool((x == x[:1]).all()) for x in given)
            if not alike or all(bool((x == x[0]).all()) for x in targets):
                return
        if batches:
            message = "all samples of a batch are one and the same, and their targets differ"
            yield self.failed("", message, "look how the data set uses the index it is given")

    def _sorted(self, batches: list[list[Tensor]]) -> Iterable[TrialFinding]:
        for position, tensors in enumerate(zip(*batches, strict=False)):
            whole = [x for x in tensors if not x.is_floating_point() and x.dim() == 1 and x.numel()]
            if len(whole) >= 2 and len(whole) == len(batches) and (order := _order(whole)):
                message = f"targets (tensor {position} of the batch) come sorted: {order}"
                yield self.noted("", message, "shuffle the data (DataLoader(shuffle=True))")

    def _ranks(self, batches: list[list[Tensor]]) -> Iterable[TrialFinding]:
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        mine = [hash(tuple(x.double().flatten()[:4096].tolist())) for tensors in batches for x in tensors]
        all_of_them: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, mine)
        if mine and any(other == all_of_them[0] for other in all_of_them[1:]):
            yield self.failed("", "two ranks are given the same batches", "use a DistributedSampler, and set_epoch")

    def _workers(self, bench: Bench) -> Iterable[TrialFinding]:
        for loader in bench.loaders:
            alike = False
            with contextlib.suppress(Exception):  # the user's code, outside of the process it is written for
                alike = getattr(loader, "num_workers", 0) > 1 and _drawn_alike(loader)
            if alike:
                message = f"workers of the loader of {type(loader.dataset).__name__} draw the same augmentations"
                advice = "seed the data set's own generator in worker_init_fn from torch.initial_seed()"
                yield self.failed("", message, advice)

    def _begun_anew(self, bench: Bench) -> Iterable[TrialFinding]:
        """A run that goes on amid an epoch and is given the samples that this epoch had begun with."""
        if bench.resumed is None:
            return
        seen, taken = batch_tensors(bench.resumed.first), len(bench.step.batches) if bench.step is not None else 1
        for loader in bench.loaders:
            anew = False
            with contextlib.suppress(Exception):  # the user's code
                amid = bench.resumed.steps * taken % len(loader) != 0 or bench.resumed.steps == 0
                anew = amid and _begins_with(loader, seen)
            if anew:
                steps = f"after {bench.resumed.steps} steps" if bench.resumed.steps else "with an optimizer's state"
                message = f"the run goes on {steps}, and its first batch is the first of the epoch again"
                advice = "right where an epoch had ended; else save the loader's place, or skip what was seen"
                yield self.noted("", message, advice)


def _begins_with(loader: Any, seen: Sequence[Tensor]) -> bool:
    """Whether a loader whose order nothing draws begins with a batch, all of whose tensors are among those seen."""
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        orders.append(next(iter(loader.batch_sampler)))
    if orders[0] != orders[1]:
        return False
    batch = batch_tensors(loader.collate_fn([loader.dataset[n] for n in orders[0]]))
    known = [x.detach().flatten().to(torch.float64) for x in seen]
    whole = [x.flatten().to(torch.float64) for x in batch if x.numel() > 1]
    return bool(whole) and all(any(x.shape == y.shape and torch.equal(x, y) for y in known) for x in whole)


def _still_columns(x: Tensor, whole: Tensor) -> list[str]:
    """Columns of a table [B, F] that hold one value, such as "2 (3)"; zeros and ones are flags, and may be rare."""
    if x.dim() != 2 or whole.shape[0] < ENOUGH or whole.shape[1] > WIDEST or whole.shape[1] < 2:
        return []
    still = (whole == whole[:1]).all(0) & (whole[0] != 0) & (whole[0] != 1)
    return [f"{n} ({float(whole[0, n]):.4g})" for n in still.nonzero().flatten().tolist()]


def _order(batches: Sequence[Tensor]) -> str:
    """In which order the targets [B] of some batches are, where shuffled ones would hardly ever be; or ""."""
    pooled = torch.cat(list(batches))
    if all(bool((x == x[0]).all()) for x in batches):
        chance = math.lgamma(len(batches) + 1) - _arrangements(pooled)
        return "one class a batch" if chance < CHANCE else ""
    if _rises(pooled) and -_arrangements(pooled) < CHANCE:
        return "in rising order from batch to batch"
    rising = all(map(_rises, batches)) and -sum(map(_arrangements, batches)) < CHANCE
    return "each batch is in rising order" if rising else ""


def _rises(x: Tensor) -> bool:
    return bool((x[1:] >= x[:-1]).all())


def _arrangements(x: Tensor) -> float:
    """The logarithm of in how many orders the values can stand: n! / (n_1! n_2! ...)."""
    counts = torch.unique(x, return_counts=True)[1].tolist()
    return math.lgamma(x.numel() + 1) - sum(math.lgamma(count + 1) for count in counts)


def _drawn_alike(loader: Any) -> bool:
    """Whether two copies of a data set, begun as the loader's workers are, draw the same numbers."""
    import copy
    import random

    import numpy as np

    dataset = loader.dataset

    def drawn(worker: int, count: int) -> list[list[Tensor]]:
        held = copy.deepcopy(dataset)
        seed = 1 + worker
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        with in_worker(worker, loader.num_workers, seed, held):
            if loader.worker_init_fn is not None:
                loader.worker_init_fn(worker)
            return _draws(held, count)

    def _draws(held: Any, count: int) -> list[list[Tensor]]:
        return [[torch.as_tensor(x) for x in _numbers_in(held[0])] for _ in range(count)]

    if not hasattr(dataset, "__getitem__"):
        return False
    (first, again), (other,) = drawn(0, 2), drawn(1, 1)
    varies = any(not torch.equal(a, b) for a, b in zip(first, again, strict=False))
    return varies and all(map(torch.equal, first, other))


def _numbers_in(item: Any) -> list[Any]:
    if isinstance(item, (list, tuple)):
        return [number for one in item for number in _numbers_in(one)]
    return [item] if isinstance(item, Tensor) or type(item).__module__ == "numpy" or isinstance(item, float) else []
