"""Each trial finds its fault, at its place, and finds nothing in the healthy twin."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trial_models import (
    Balanced,
    Copying,
    Detaches,
    Language,
    MixesSamples,
    OtherInTraining,
    Outside,
    Sentences,
    Squares,
    Unregistered,
    chain,
    class_loss,
    classifier,
    next_word,
    rows,
    sentences,
    texts,
    transposed,
    word_after_next,
)

import flowscope
import flowscope.testing
from flowscope.trials.bench import Bench, Step
from flowscope.trials.built_in import NAMES
from flowscope.trials.command import Clipping, Listening
from flowscope.trials.layout import other_values
from flowscope.trials.sitting import chosen, run_trials


class Task(NamedTuple):
    """What `flowscope.check` is given."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: list[Any]
    optimizer: torch.optim.Optimizer | None = None


class Case(NamedTuple):
    """A fault with its healthy twin: what finds it, how sure it is, and where; what its sentence says."""

    make: Callable[[bool], Task]
    trial: str
    status: str
    where: str
    says: str


def language(**options: Any) -> Task:
    return Task(Language(**options), next_word, texts())


def classes(model: nn.Module) -> Task:
    return Task(model, class_loss, rows())


def trained(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> Task:
    return Task(model, class_loss, rows(), kind(model.parameters(), **options))


def rounded(faulty: bool) -> Task:
    model = classifier().bfloat16()
    # near 1 the numbers of bf16 are 2^-7 apart: a step of 1e-4 is lost, one of 1 is not
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0).add_(torch.randn(p.shape) * 0.1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4 if faulty else 1.0)
    return Task(model, lambda m, b: F.cross_entropy(m(b[0].bfloat16()).float(), b[1]), rows(), optimizer)


def replaced(faulty: bool) -> Task:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if faulty:
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    return Task(model, class_loss, rows(), optimizer)


def held_twice(faulty: bool) -> Task:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if faulty:
        optimizer.param_groups.append(dict(optimizer.param_groups[0], params=[model[0].bias]))
    return Task(model, class_loss, rows(), optimizer)


def frozen(faulty: bool) -> Task:
    model = classifier().requires_grad_(not faulty)
    loss = lambda m, b: F.cross_entropy(m(b[0].clone().requires_grad_()), b[1])  # noqa: E731
    return Task(model, loss, rows(), torch.optim.SGD(model.parameters(), 0.1))


def shapes(faulty: bool) -> Task:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]) if faulty else model(batch[0]).squeeze(-1), batch[0][:, 0])

    torch.manual_seed(0)
    return Task(nn.Linear(6, 1), loss, rows())


def squashed(faulty: bool) -> Task:
    model = classifier()
    return classes(nn.Sequential(*model, nn.Softmax(-1)) if faulty else model)


def not_a_number(faulty: bool) -> Task:
    batches = rows()
    batches[1][0][3, 2] = float("nan") if faulty else 0.0
    return Task(classifier(), class_loss, batches)


def nothing_to_learn(faulty: bool) -> Task:
    return Task(classifier(), lambda m, b: m(b[0]).mean() * 0 + 1 if faulty else class_loss(m, b), rows(samples=8))


def never_met(faulty: bool) -> Task:
    # 3 x 256 targets of four classes: 192 of each are to be expected
    model = nn.Sequential(nn.Linear(6, 4))
    return Task(model, class_loss, rows(samples=256, classes=3 if faulty else 4))


def balanced(faulty: bool) -> Task:
    return Task(Balanced(faulty), lambda model, batch: model.loss(batch), rows())


class OwnDropout(nn.Module):
    """Keeps each number, or with `whole` each vector, with a probability of 1/2."""

    def __init__(self, scales: bool, whole: bool = False) -> None:
        super().__init__()
        self.factor, self.whole = 2.0 if scales else 1.0, whole

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand_like(x[..., :1] if self.whole else x) < 0.5) * self.factor


class Pairs(nn.Module):
    """Scores of each row against each row of the batch [B, B]."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.left, self.right = classifier(MixesSamples(mixes)), classifier()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) @ self.right(x).t()


def paired(faulty: bool) -> Task:
    return Task(Pairs(faulty), lambda m, b: F.cross_entropy(m(b[0]), torch.arange(len(b[0]))), rows())


class Attends(nn.Module):
    """Attention over vectors [B, T, 6], averaged over positions."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def positions_first(faulty: bool) -> Task:
    batches = [(torch.randn(8, 5, 6), labels) for _, labels in rows(samples=8)]
    return Task(Attends(batch_first=not faulty), class_loss, batches)


class Convolution(nn.Module):
    """Logits [B, classes, T] of tokens [B, T]."""

    def __init__(self, left: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.left = nn.Embedding(20, 8), left
        self.mix, self.head = nn.Conv1d(8, 8, 3), nn.Conv1d(8, 20, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(F.pad(self.words(tokens).transpose(1, 2), (self.left, 2 - self.left))))


class Recurrent(nn.Module):
    """Logits [T, B, classes] of tokens [T, B]."""

    def __init__(self, both_ways: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.rnn = nn.Embedding(20, 8), nn.GRU(8, 8, bidirectional=both_ways)
        self.head = nn.Linear(16 if both_ways else 8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(tokens))[0])


def flattened(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1])


def recurrent(faulty: bool) -> Task:
    # positions first, the targets flattened: [T, B] against [T B]
    batches = [(text[:-1].clone(), text[1:].reshape(-1)) for text in (text.t().contiguous() for text in texts())]
    return Task(Recurrent(both_ways=faulty), flattened, batches)


def convolution(faulty: bool) -> Task:
    # 3 positions: all three to the left, or one to the right
    return Task(Convolution(1 if faulty else 2), lambda m, x: F.cross_entropy(m(x[:, :-1]), x[:, 1:]), texts())


def own_word(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).transpose(1, 2), tokens)


class Picture(nn.Module):
    """Logits [B, 3, H, W] of pictures of one channel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def a_class_ignored(faulty: bool) -> Task:
    draw = torch.Generator().manual_seed(4)
    masks = [torch.randint(3, (4, 5, 5), generator=draw) for _ in range(3)]
    loss = lambda m, mask: F.cross_entropy(  # noqa: E731
        m(mask[:, None].float()), mask, ignore_index=0 if faulty else 255
    )
    return Task(Picture(), loss, masks)


class Forgets(nn.Linear):
    """Its state has no bias, and loading forgives that."""

    def __init__(self, forgets: bool) -> None:
        super().__init__(6, 3)
        self.forgets = forgets

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.forgets:
            del destination[prefix + "bias"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict({prefix + "bias": self.bias.detach(), **state_dict}, prefix, *args)


def column_filled(faulty: bool) -> Task:
    batches = rows()
    for features, _ in batches if faulty else ():
        features[:, 4] = 2.5
    return Task(classifier(), class_loss, batches)


def in_order(faulty: bool) -> Task:
    batches = rows(samples=8)
    labels = torch.cat([labels for _, labels in batches])
    # 24 labels of three classes: 24! / (8!)^3 orders are some 10^10
    parts = (labels.sort().values if faulty else labels).split(8)
    return Task(classifier(), class_loss, [(x, y) for (x, _), y in zip(batches, parts, strict=True)])


def silent_units(faulty: bool) -> Task:
    model = classifier()
    with torch.no_grad():
        model[0].bias.fill_(-100.0 if faulty else 0.0)
    return classes(model)


class DrawsTokens(nn.Module):
    """Returns other tokens in each call, whatever the seed: whole numbers only."""

    def __init__(self, count: Any, draws: bool) -> None:
        super().__init__()
        self.words, self.place, self.count = (
            nn.Embedding(20, 20),
            nn.Identity(),
            count if draws else itertools.repeat(0),
        )
        self.place.register_forward_hook(lambda module, args, tokens: (tokens + next(self.count)) % 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(self.place(tokens)).transpose(1, 2)


CASES = {
    "future_in_a_convolution_with_positions_last": Case(convolution, "causality", "fail", "mix", "moved by one"),
    "future_with_flattened_targets": Case(recurrent, "causality", "fail", "rnn", "moved by one"),
    "own_word_in_a_causal_model": Case(
        lambda faulty: Task(Language(), own_word if faulty else next_word, texts(samples=8)),
        "labels",
        "fail",
        "",
        "its own token",
    ),
    # a third of 3 x 4 x 25 targets are of class 0
    "a_class_is_ignored": Case(a_class_ignored, "targets", "fail", "", "class 0 of 3 never counts"),
    "parameter_left_out_of_the_state": Case(
        lambda faulty: classes(nn.Sequential(Forgets(faulty))), "saving", "fail", "0.bias", "not in state_dict"
    ),
    "column_filled": Case(column_filled, "data", "note", "", "constant: 4 (2.5)"),
    "classes_in_order": Case(in_order, "data", "note", "", "sorted: in rising order from batch to batch"),
    "silent_units": Case(silent_units, "signal", "note", "1", "100% of the units of 1"),
    "tokens_drawn_anew": Case(
        lambda faulty: Task(
            DrawsTokens(itertools.count(), faulty), lambda m, x: F.cross_entropy(m(x), x), [torch.arange(20).view(4, 5)]
        ),
        "determinism",
        "note",
        "place",
        "first at place",
    ),
    "dropout_not_scaled": Case(
        lambda faulty: classes(classifier(OwnDropout(scales=not faulty))), "train_eval", "fail", "2", "on average 0."
    ),
    "vectors_dropped_whole_not_scaled": Case(
        lambda faulty: classes(classifier(OwnDropout(not faulty, whole=True))), "train_eval", "note", "2", "average 0."
    ),
    "samples_mixed_in_a_product_of_pairs": Case(paired, "samples", "fail", "left.2", "change with the other one"),
    "layer_takes_positions_first_and_is_given_samples_first": Case(
        positions_first, "samples", "fail", "attention", "change with the other one"
    ),
    "no_causal_mask": Case(
        lambda faulty: language(causal=not faulty), "causality", "fail", "blocks.0.attention", "its targets are"
    ),
    "softmax_over_samples": Case(
        lambda faulty: classes(classifier(MixesSamples(faulty))), "samples", "fail", "2", "change with the other one"
    ),
    "padding_in_a_mean": Case(
        lambda faulty: Task(Sentences(faulty), class_loss, sentences()), "padding", "fail", "pool", "padding_idx"
    ),
    "wrong_backward": Case(
        lambda faulty: classes(classifier(Squares(faulty))), "gradient", "fail", "2", "the backward of Square"
    ),
    "detached": Case(lambda faulty: classes(classifier(Detaches(faulty))), "gradient", "fail", "0", "its gradient"),
    "balance_loss_thrown_away": Case(balanced, "loss_path", "fail", "", "no loss uses it"),
    "update_lost_for_one_weight": Case(
        lambda faulty: trained(transposed(), Copying if faulty else torch.optim.SGD, lr=0.1),
        "update",
        "fail",
        "0.weight",
        "did not move",
    ),
    "pure_bf16_small_rate": Case(rounded, "update", "fail", "0.weight", "rounded away in bfloat16"),
    "optimizer_before_parameters": Case(replaced, "update", "fail", "2.weight", "in no optimizer"),
    "held_twice": Case(held_twice, "update", "fail", "0.bias", "held twice"),
    "everything_frozen": Case(frozen, "update", "fail", "", "trainable"),
    "checkpoint_without_random_state": Case(
        lambda faulty: language(dropout=0.5, keep_random_state=not faulty),
        "recomputation",
        "fail",
        "blocks.0",
        "replay",
    ),
    "state_outside": Case(
        lambda faulty: classes(classifier(Outside(itertools.count(), faulty))), "determinism", "note", "2", "another"
    ),
    "shapes_broadcast": Case(shapes, "loss_start", "fail", "", "[32, 1] against [32]"),
    "two_softmaxes": Case(squashed, "loss_start", "fail", "", "squashed twice"),
    "labels_shifted_twice": Case(
        lambda faulty: Task(Language(), word_after_next if faulty else next_word, texts(samples=8)),
        "labels",
        "fail",
        "",
        "token 2 ahead",
    ),
    "class_never_met": Case(never_met, "targets", "fail", "", "1 of 4 classes are never met in 768 targets: 3"),
    "same_batch_for_ever": Case(
        lambda faulty: Task(classifier(), class_loss, rows()[:1] * 3 if faulty else rows()),
        "data",
        "note",
        "",
        "batch 1",
    ),
    "not_a_number": Case(not_a_number, "data", "fail", "", "NaN"),
    "other_in_training": Case(
        lambda faulty: classes(classifier(OtherInTraining(faulty))), "train_eval", "fail", "2", "in training"
    ),
    "layers_in_a_list": Case(
        lambda faulty: classes(Unregistered(faulty)), "saving", "fail", "layers[0].weight", "not in state_dict"
    ),
    "nothing_to_learn": Case(nothing_to_learn, "overfit", "note", "0", "still 1"),
    # a sigmoid's slope is 1/4 at most: 4^-8 = 1.5e-5 or less, and 1 where weights keep lengths
    "sigmoids": Case(
        lambda faulty: classes(chain(nn.Sigmoid if faulty else nn.Identity, 8, 1.0)),
        "signal",
        "note",
        "",
        "vanish",
    ),
}


def found(task: Task, trial: str) -> list[flowscope.trials.TrialFinding]:
    return list(flowscope.check(*task[:3], optimizer=task.optimizer, only=[trial]).findings)


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_found_at_its_place_and_its_twin_is_right(name: str) -> None:
    case = CASES[name]
    bad = [finding for finding in found(case.make(True), case.trial) if finding.status in ("fail", "note")]
    assert (bad[0].status, bad[0].where) == (case.status, case.where)
    assert case.says in bad[0].message
    assert bad[0].advice
    assert [finding.status for finding in found(case.make(False), case.trial)] == ["pass"]


@pytest.mark.parametrize("model", ["language", "classes"])
def test_nothing_fails_on_a_healthy_model(model: str) -> None:
    task = language() if model == "language" else trained(classifier(nn.BatchNorm1d(12), nn.Dropout(0.5)), lr=0.1)
    report = flowscope.check(*task[:3], optimizer=task.optimizer)
    assert report.ok
    assert report.status == 0
    assert {finding.trial for finding in report.findings} == {trial.name for trial in chosen()}
    assert not [f for f in report.findings if "could not be run" in f.message]


def test_each_trial_has_a_file_and_a_row_in_the_documents() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "check.md").read_text()
    assert re.findall(r"^\| `(\w+)`", text, re.MULTILINE) == [trial.name for trial in chosen()] == [*NAMES]


def test_dropout_in_torchs_own_attention_is_no_difference_between_the_modes() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    task = Task(layer, lambda m, x: m(x).square().mean(), [torch.randn(4, 5, 8)])
    assert [finding.status for finding in found(task, "train_eval")] == ["pass"]


class Scan(nn.Module):
    """Multiplies [B, 6, 1] by [6, B] on its way, and updates a buffer that it then reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.average += 0.1 * y.mean(0)
        return (y[..., None] * x.t()).mean((1, 2)) + (y - self.average).mean(-1)


def scanned(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0][:, 0])


def test_what_a_forward_broadcasts_is_no_loss() -> None:
    assert [f.status for f in found(Task(Scan(), scanned, rows()), "loss_start")] == ["pass"]


def test_the_mean_of_a_dropout_that_does_not_scale_is_the_share_it_keeps() -> None:
    torch.manual_seed(0)
    finding = found(classes(nn.Sequential(OwnDropout(scales=False), nn.Linear(6, 3))), "train_eval")[0]
    # 64 draws of 192 numbers: its standard error is below 1 / sqrt(64 * 192 / 3)
    assert float(re.findall(r"average ([\d.]+) times", finding.message)[0]) == pytest.approx(0.5, abs=0.06)


class Drops(nn.Module):
    """Drops by a function of torch, in evaluation too unless it is told the mode."""

    def __init__(self, attention: bool, told: bool) -> None:
        super().__init__()
        self.linear, self.attention, self.told = nn.Linear(6, 6), attention, told

    def forward(self, x: Tensor) -> Tensor:
        x, training = self.linear(x), self.training or not self.told
        if not self.attention:
            return F.dropout(x, 0.5, training)
        q = x.view(-1, 2, 3)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2 if training else 0.0).flatten(1)


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_dropout_that_goes_on_in_evaluation_is_a_fail(attention: bool, told: bool) -> None:
    task = classes(nn.Sequential(nn.Linear(6, 6), Drops(attention, told), nn.Linear(6, 3)))
    (finding,) = found(task, "train_eval")
    assert (finding.status, finding.where) == (("pass", "") if told else ("fail", "1"))
    assert told or "drops values in evaluation mode, too" in finding.message


class Scaled(nn.Module):
    """A weight times its own mean size, with its gradient or without (XNOR-Net), or rounded to it; "" drops it."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6)), use

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.abs().mean()
        self.told = size.detach() * 2
        rounded = (self.weight / self.told).round() * self.told if self.use == "rounded" else self.weight
        used = {"gradient": size, "value": size.detach() + 1.0}.get(self.use, 1.0)
        return F.linear(x, self.weight.tanh() * used + (rounded - self.weight).detach())


class Keeps(nn.Module):
    """Keeps a number with its graph under a name; "" throws it away."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(6, 6), name

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.name:
            setattr(self, self.name, x.square().mean())
        else:
            x.square().mean()
        return x


@pytest.mark.parametrize(("name", "status"), [("size", "note"), ("balance_loss", "fail"), ("", "fail")])
def test_a_number_that_is_kept_may_be_for_a_log_unless_it_is_called_a_term(name: str, status: str) -> None:
    (finding,) = found(classes(nn.Sequential(Keeps(name), nn.Linear(6, 3))), "loss_path")
    assert (finding.status, finding.where) == (status, "0")


@pytest.mark.parametrize(("name", "status"), [("loss", "note"), ("aux_loss", "fail")])
def test_a_loss_that_a_model_returns_and_its_trainer_does_not_use_is_a_note(name: str, status: str) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.inner(x)
            return {"logits": logits, name: logits.logsumexp(-1).mean()}

    loss = lambda m, batch: F.cross_entropy(m(batch[0])["logits"], batch[1])  # noqa: E731
    (finding,) = found(Task(Returns(), loss, rows()), "loss_path")
    assert finding.status == status


@pytest.mark.parametrize("each", ["sample", "batch", "never"])
def test_batches_of_one_sample_whose_targets_differ_are_a_fail(each: str) -> None:
    """A data set that ignores the index it is given."""
    batches = [(x if each == "never" else x[:1].expand_as(x), y) for x, y in rows()]
    if each == "sample":
        batches = [(batches[0][0], y) for _, y in batches]
    statuses = [f.status for f in found(Task(classifier(), class_loss, batches), "data")]
    assert ("fail" in statuses) == (each != "never")


@pytest.mark.parametrize(
    ("use", "status"), [("gradient", "pass"), ("value", "pass"), ("rounded", "pass"), ("", "fail")]
)
def test_a_number_that_is_used_without_its_gradient_is_no_term_thrown_away(use: str, status: str) -> None:
    (finding,) = found(classes(nn.Sequential(Scaled(use), nn.Linear(6, 3))), "loss_path")
    assert finding.status == status


def test_a_unit_at_exactly_zero_is_no_stop_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    nn.init.zeros_(model[0].bias)
    batches = [(torch.cat([x[:8], torch.zeros(8, 6)]), y[:16]) for x, y in rows()]
    (finding,) = found(Task(model, class_loss, batches), "gradient")
    assert finding.status == "pass"
    assert "1 are not smooth there" in finding.message


def test_a_buffer_that_is_read_as_it_is_updated_is_a_note() -> None:
    (finding,) = found(Task(nn.Sequential(Scan()), scanned, rows()), "train_eval")
    assert (finding.status, finding.where) == ("note", "0")
    assert "the pass changes buffers that it reads" in finding.message


class Noised(torch.utils.data.Dataset):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(3, generator=self.draw)


def own_generator(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info.id == worker
    info.dataset.draw = torch.Generator().manual_seed(info.seed)


@pytest.mark.parametrize(("begin", "status"), [(None, "fail"), (own_generator, "pass")])
def test_workers_are_judged_as_their_loader_begins_them(begin: Any, status: str) -> None:
    loader = torch.utils.data.DataLoader(Noised(), num_workers=2, worker_init_fn=begin)
    bench = Bench(classifier(), rows(), class_loss, loaders=[loader])
    assert [f.status for f in run_trials(bench, chosen(only=["data"])).findings] == [status]
    assert torch.utils.data.get_worker_info() is None


def test_clipping_is_seen_also_where_torch_was_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    module, package = SimpleNamespace(), SimpleNamespace()
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        function = lambda norm: norm  # noqa: E731
        setattr(module, name, function)
        setattr(package, name, function)
    monkeypatch.setitem(sys.modules, "torch.nn.utils", package)
    listening = SimpleNamespace(_scaling=lambda: 8.0, _unscaled=lambda: False, _tape=None, clipping=Clipping())
    Listening._clipping_imported(listening, module)
    package.clip_grad_norm_(3.0)
    assert (listening.clipping.clipped, listening.clipping.while_scaled) == (True, True)


# -- accumulation: what a loop was seen to do -------------------------------------------------------------------------


def stepped(weights: list[float], sizes: list[int]) -> str:
    """What `accumulation` says of a step of micro-batches of `sizes` samples, their mean losses times `weights`."""
    model = classifier()
    batches = [rows(1, size)[0] for size in sizes]
    factors = {id(batch): weight for batch, weight in zip(batches, weights, strict=True)}
    loss = lambda m, batch: class_loss(m, batch) * factors[id(batch)]  # noqa: E731
    sum(loss(model, batch) for batch in batches).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    bench = Bench(model, batches, loss, step=Step(batches, gradients))
    (finding,) = run_trials(bench, chosen(only=["accumulation"])).findings
    return f"{finding.status}: {finding.message}"


def test_a_gradient_that_is_the_last_micro_batchs_alone_is_told() -> None:
    model, batches = classifier(), rows(3)
    loss = lambda m, batch: class_loss(m, batch) / 3  # noqa: E731
    loss(model, batches[-1]).backward()
    last = {name: p.grad.clone() for name, p in model.named_parameters()}
    bench = Bench(model, batches, loss, step=Step(batches, last))
    (finding,) = run_trials(bench, chosen(only=["accumulation"])).findings
    assert finding.status == "fail"
    assert "the last of 3 micro-batches alone" in finding.message


def test_what_a_masked_language_model_leaves_out_is_usual() -> None:
    # 15 % and 5 % of 400 targets count
    for share, notes in ((15, 0), (5, 1)):
        targets = torch.arange(400).view(4, 100) % 20
        targets = targets.masked_fill(torch.arange(400).view(4, 100) % 100 >= share, -100)
        loss = lambda m, x, y=targets: F.cross_entropy(m(x).transpose(1, 2), y)  # noqa: E731
        task = Task(nn.Embedding(20, 20), loss, [torch.arange(400).view(4, 100) % 20])
        told = [f.message for f in found(task, "targets") if "ignored" in f.message]
        assert len(told) == notes


@pytest.mark.parametrize(
    ("weights", "sizes", "says"),
    [
        ([0.25] * 4, [8] * 4, "pass"),
        ([1.0] * 4, [8] * 4, "fail: the gradient is 4 times"),
        ([1 / 16] * 4, [8] * 4, "fail: the gradient is 1/4 of"),
        ([0.75, 0.25], [24, 8], "pass"),
        ([0.45, 0.45], [8, 8], "note: the gradient is 0.9 times"),
        ([0.6, 0.2], [8, 8], "fail: micro-batches weigh 0.6, 0.2, their samples 0.5, 0.5"),
        ([0.5, 0.5], [24, 8], "fail: micro-batches of 8 to 24 targets weigh the same, 0.5"),
    ],
)
def test_micro_batches_weigh_as_their_samples_do(weights: list[float], sizes: list[int], says: str) -> None:
    assert stepped(weights, sizes).startswith(says)


def test_what_an_earlier_step_left_in_the_gradient_is_told() -> None:
    model, batch = classifier(), rows(1)[0]
    class_loss(model, batch).backward()
    left = {name: 3 * p.grad for name, p in model.named_parameters()}
    bench = Bench(model, [batch], class_loss, step=Step([batch], left))
    (finding,) = run_trials(bench, chosen(only=["accumulation"])).findings
    assert (finding.status, "3 times" in finding.message) == ("fail", True)


# -- what trials are given --------------------------------------------------------------------------------------------


def test_other_values_are_such_as_occur_and_never_the_same() -> None:
    x = torch.tensor([[3, 5, -100], [9, 9, 3]])
    other = other_values(x, torch.Generator().manual_seed(0))
    assert not (other == x).any()
    assert set(other.flatten().tolist()) <= {3, 5, 9, -100}
    alone = torch.full((2, 2), 4)
    assert torch.equal(other_values(alone, torch.Generator().manual_seed(0)), alone)


def test_large_batches_are_cut_for_what_needs_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    # one product [32, 6] x [6, 12] and one [32, 12] x [12, 3]: 2 * 32 * (72 + 36) operations
    bench = Bench(classifier(), rows(), class_loss)
    assert bench.flops == 2 * 32 * (72 + 36)
    assert bench.cut() is bench
    monkeypatch.setattr("flowscope.trials.bench.DEAR", bench.flops / 4)
    assert [x.shape[0] for x in bench.cut().batches[0]] == [8, 8]
    monkeypatch.setattr("flowscope.trials.bench.DEAR", 1)
    assert [x.shape[0] for x in bench.cut().batches[0]] == [2, 2]


@pytest.mark.parametrize("dear", [True, False])
def test_one_batch_is_learned_in_fewer_steps_where_a_pass_is_dear(dear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    task, passes = nothing_to_learn(True), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        passes.append(1)
        return task.loss(model, batch)

    if dear:
        monkeypatch.setattr("flowscope.trials.overfit.AFFORDED", 1.0)
    (finding,) = found(task._replace(loss=loss), "overfit")
    assert finding.status == "note"
    assert ("more than 15 steps take too long here" in finding.message) == dear
    assert len(passes) == 1 + 2 * (15 if dear else 50)  # one for what a pass costs, then at each of two rates


def test_a_loss_that_calls_a_part_of_the_model_is_tried_at_that_part() -> None:
    model = nn.ModuleDict({"large": classifier(MixesSamples(True)), "small": nn.Linear(3, 3)})
    loss = lambda m, batch: F.cross_entropy(m["small"](m["large"](batch[0])), batch[1])  # noqa: E731
    finding = found(Task(model, loss, rows()), "samples")[0]
    assert (finding.status, finding.where) == ("fail", "large.2")


# -- calls, errors, a trial of one's own ------------------------------------------------------------------------------


class Named(flowscope.trials.Trial):
    """Parameters must have a gradient of at least `least`."""

    name = "large_gradient"

    def findings(self, bench: Bench) -> Any:
        norms = {name: float(g.norm()) for name, g in bench.gradients(bench.batches[0]).items()}
        name = min(norms, key=norms.__getitem__)
        yield self.failed(name, "its gradient is small", "none") if norms[name] < 1e9 else self.passed("large")


def test_a_trial_of_ones_own_runs_with_the_others_and_alone() -> None:
    report = flowscope.check(classifier(), class_loss, rows(), trials=[Named], only=["large_gradient", "data"])
    assert [(f.trial, f.status) for f in report.findings] == [("data", "pass"), ("large_gradient", "fail")]
    assert not report.ok
    assert report.status == 1


class Broken(Named):
    """Raises."""

    name = "broken"

    def findings(self, bench: Bench) -> Any:
        raise ValueError("odd")


def test_a_fault_of_a_trial_ends_only_that_one() -> None:
    report = flowscope.check(classifier(), class_loss, rows(), trials=[Broken()], only=["broken", "data"])
    assert [(f.trial, f.status) for f in report.findings] == [("data", "pass"), ("broken", "skipped")]
    assert "ValueError: odd" in report.findings[1].message
    assert report.status == 0


def test_a_report_prints_what_failed_first_and_is_a_table_in_a_notebook() -> None:
    task = classes(classifier(MixesSamples(True)))
    report = flowscope.check(*task[:3], only=["samples", "data"])
    lines = str(report).splitlines()
    assert lines[0].split()[:2] == ["trial", "verdict"]
    assert lines[1].startswith("samples  fail")
    assert lines[2].startswith("    next: ")
    assert lines[-1] == "1 fail, 0 note, 0 skipped, 1 pass"
    assert "<td><b>fail</b></td><td><code>2</code></td>" in report._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": 3}, "check(model=...): got int"),
        ({"loss": None}, "check(loss=...): got NoneType"),
        ({"batches": []}, "got no batch"),
        ({"only": ["nothing"]}, "got the trial 'nothing', expected some of causality"),
        ({"skip": ["nothing"]}, "got the trial 'nothing'"),
        ({"trials": [object]}, "got object, expected a flowscope.trials.Trial"),
        ({"trials": [Named, Named]}, "'large_gradient' is borne twice"),
    ],
)
def test_a_wrong_call_says_what_was_expected(arguments: dict[str, Any], says: str) -> None:
    given = {"model": classifier(), "loss": class_loss, "batches": rows(), **arguments}
    with pytest.raises(flowscope.FlowscopeError, match="check") as error:
        flowscope.check(**given)
    assert says in str(error.value)


def test_without_a_loss_that_is_one_number_all_is_skipped_with_the_reason() -> None:
    report = flowscope.check(classifier(), lambda m, batch: 1.5, rows(), only=["gradient", "overfit", "samples"])
    assert [f.status for f in report.findings] == ["skipped"] * 3
    assert all("the loss is float" in f.message for f in report.findings)
    assert report.status == 2


def test_assert_trains_is_silent_or_raises_the_report() -> None:
    assert flowscope.testing.assert_trains(classifier(), class_loss, rows(), only=["samples"]).ok
    bad = classifier(MixesSamples(True))
    with pytest.raises(AssertionError, match=r"Sequential does not train as it should:\ntrial.*\nsamples  fail"):
        flowscope.testing.assert_trains(bad, class_loss, rows(), only=["samples"])
    with pytest.raises(AssertionError, match="skipped"):
        flowscope.testing.assert_trains(bad, class_loss, rows(), only=["accumulation"])
