"""What `flowscope check` sees of a loop besides its batches: changes between steps, and what a run before left."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_check_command import started
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from trial_models import class_loss, classifier, rows

from flowscope.errors import CannotJudgeError
from flowscope.trials.bench import Bench, Resumed, Step
from flowscope.trials.between_steps import BetweenSteps, steps_before
from flowscope.trials.sitting import chosen, run_trials
from flowscope.trials.tape import Tape


def told(bench: Bench, trial: str) -> list[tuple[str, str, str]]:
    return [(f.status, f.where, f.message) for f in run_trials(bench, chosen(only=[trial])).findings]


def test_what_is_left_of_a_step_is_what_it_is_by_hand() -> None:
    weight, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight, other], 1.0)
    between = BetweenSteps()

    def step() -> None:
        between.begins(optimizer)
        optimizer.step()
        between.ended(optimizer)

    weight.grad, other.grad = torch.tensor([-4.0, 0.0, 0.0, 0.0]), -torch.ones(3)
    step()  # to (4, 0, 0, 0)
    step()  # nothing came between
    assert between.kept == {}
    with torch.no_grad():
        weight.copy_(torch.tensor([4.0, 3.0, 0.0, 0.0]))  # after the second step it was (8, 0, 0, 0), before it (4, ..)
    step()
    assert between.kept == {id(weight): pytest.approx(3 / 4)}


def test_an_optimizers_state_tells_of_the_steps_before() -> None:
    model = classifier()
    optimizer = torch.optim.Adam([*model.parameters()])
    assert steps_before(optimizer) == (0, set())
    for _ in range(2):
        class_loss(model[:1], (rows()[0][0], rows()[0][1])).backward()
        optimizer.step()
    assert steps_before(optimizer) == (2, {id(model[0].weight), id(model[0].bias)})


def resumed(model: nn.Module, loader: Any, steps: int, first: Any) -> Bench:
    names = frozenset(name for name, _ in model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = Step(rows()[:1], {})
    return Bench(model, rows(), class_loss, [optimizer], step, [loader], Resumed(steps, names, first))


@pytest.mark.parametrize(
    ("steps", "shuffle", "place", "notes"),
    [(13, False, 0, True), (12, False, 0, False), (13, True, 0, False), (13, False, 1, False), (0, False, 0, True)],
    ids=["amid an epoch", "at its end", "in a drawn order", "elsewhere", "unknown"],
)
def test_a_run_that_goes_on_with_the_first_batch_again_is_noted(
    steps: int, shuffle: bool, place: int, notes: bool
) -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=shuffle)  # six batches
    first = tuple(x[8 * place : 8 * place + 8].clone() for x in data.tensors)
    found = [
        message for status, _, message in told(resumed(classifier(), loader, steps, first), "data") if status == "note"
    ]
    assert ["first of the epoch again" in message for message in found] == [True] * notes


@pytest.mark.parametrize("frozen", [False, True])
def test_more_that_is_trainable_than_the_checkpoint_had_trained_is_noted(frozen: bool) -> None:
    model = classifier()
    head = frozenset(name for name, _ in model.named_parameters() if name.startswith("2."))
    if frozen:
        model[0].requires_grad_(False)
    bench = Bench(model, rows(), class_loss, [torch.optim.SGD(model.parameters(), 0.1)], resumed=Resumed(7, head, None))
    total, held = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model[2].parameters())
    found = [one for one in told(bench, "update") if "of the checkpoint" in one[2]]
    if frozen:
        assert found == []
    else:
        ((status, where, message),) = found
        assert (status, where) == ("note", "0.weight")
        assert f"{total} numbers are trainable, {total / held:.3g} times those of the checkpoint ({held})" in message


RESUMES = """
import argparse, torch
from torch import Tensor, nn
parser = argparse.ArgumentParser()
parser.add_argument("--skip", action="store_true")
parser.add_argument("--partly", action="store_true")
options = parser.parse_args()
torch.manual_seed(0)
base, head = nn.Linear(6, 200), nn.Linear(200, 3)
model = nn.Sequential(base, nn.Tanh(), head)
data = torch.utils.data.TensorDataset(torch.randn(80, 6), torch.randint(3, (80,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
if options.partly:
    model.load_state_dict({"2." + name: value for name, value in head.state_dict().items()}, strict=False)
else:
    state = {n: {"step": torch.tensor(4.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.ones_like(p)}
             for n, p in enumerate(model.parameters())}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
for number, (x, y) in enumerate(loader):
    if options.skip and number < 4:
        continue
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("options", [[], ["--skip"], ["--partly"]], ids=["anew", "skipped", "partly"])
def test_a_script_that_resumes_is_known_by_what_it_loads(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "train.py").write_text(RESUMES)
    done = started(tmp_path, "-m", "flowscope", "check", "--json", "--only", "data,update", "train.py", *options)
    assert done.returncode == 0, done.stderr
    notes = [one["message"] for one in json.loads(done.stdout) if one["status"] == "note"]
    anew = [message for message in notes if "goes on after 4 steps, and its first batch" in message]
    more = [
        message
        for message in notes
        if "2003 numbers are trainable, 3.32 times those of the checkpoint (603)" in message
    ]
    assert (len(anew), len(more)) == {(): (1, 0), ("--skip",): (0, 0), ("--partly",): (0, 1)}[tuple(options)]


def test_a_script_that_never_steps_is_ended_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import torch
from torch import Tensor, nn
from flowscope.trials import tape
tape.MOST = 50
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    model(torch.randn(4, 3)).sum().backward()
"""
    )
    done = started(tmp_path, "-m", "flowscope", "check", "train.py")
    assert done.returncode == 2
    assert "train.py: it ran its models 50 times without a step and was ended after 0 optimizer steps" in done.stderr


@pytest.mark.parametrize("after", [1, 3])
def test_clipping_before_the_last_micro_batch_is_told(after: int) -> None:
    model, batches = classifier(), rows()
    step = Step(batches, {}, clipped=True, norm=1.0, clipped_after=after)
    ((_, _, message),) = told(Bench(model, batches, lambda m, b: class_loss(m, b) / 3, step=step), "accumulation")
    assert ("clipped after 1 of 3 micro-batches" in message) == (after == 1)


@pytest.mark.parametrize("viewed", [True, False])
def test_logits_that_are_viewed_instead_of_transposed_are_told(viewed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    batches = [(torch.randn(4, 5, 6), torch.randint(3, (4, 5))) for _ in range(3)]

    def loss(m: nn.Module, batch: Any) -> Tensor:
        logits = m(batch[0])
        return F.cross_entropy(logits.view(4, 3, 5) if viewed else logits.transpose(1, 2), batch[1])

    ((status, _, message),) = told(Bench(model, batches, loss), "loss_start")
    assert status == ("fail" if viewed else "pass")
    assert ("were viewed as [4, 3, 5]" in message) == viewed


class Actor(nn.Module):
    """Trained through a method, never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = classifier()

    def act(self, x: Tensor) -> Tensor:
        return self.policy(x)


def recorded(loss: Any, *models: nn.Module) -> Any:
    """What a tape holds of a loss that is computed from models."""
    tape = Tape()
    for model in models:
        tape.follow(model)
    try:
        tape.backward(loss())
        (one,) = tape.recorded
    finally:
        tape.close()
    return one


def test_a_tape_holds_what_leads_to_the_loss_and_keeps_what_was_drawn_without_gradient() -> None:
    model, (x, y) = classifier(), rows()[0]
    said: list[Tensor] = []

    def loss() -> Tensor:
        with torch.no_grad():
            drawn = torch.multinomial(model(x).softmax(1), 1).squeeze(1)
        each = F.cross_entropy(model(x), drawn, reduction="none")
        weights = torch.ones(len(y))
        weights[0] = 0.0
        value = (each * weights).mean()
        said.append(torch.exp(value))  # for a log
        said.append(value)
        return value

    one = recorded(loss, model)
    names = [event.name for event in one.events]
    assert "multinomial" not in names
    assert "exp" not in names
    assert "__setitem__" in names
    assert len(one.calls_of(model)) == 1
    for _ in range(2):  # what is written into is a copy
        assert torch.equal(one.play(), said[1])
    with torch.no_grad():
        model[2].bias += torch.tensor([1.0, 0.0, -1.0])
    assert not torch.equal(one.play(), said[1])


@pytest.mark.parametrize("graph", [True, False])
def test_what_is_written_to_a_part_of_a_tensor_is_on_the_tape(graph: bool) -> None:
    """Rows that are filled into a padded batch, one after the other, behind a first call of the model (GRPO)."""
    model, (x, y) = classifier(), rows()[0]
    given = x.clone()

    def loss() -> Tensor:
        first = model(x).sum()
        padded = torch.zeros(2, *x.shape)
        padded[1].add_(1.0)  # a constant that is on the tape as soon as it is used
        given.mul_(2.0)
        with torch.set_grad_enabled(graph):
            for n in range(len(x)):
                padded[0][n][:] = given[n]
            padded.select(0, 1).mul_(3.0)
        return F.cross_entropy(model(padded[0] + padded[1]), y) + 0 * first

    one = recorded(loss, model)
    told = F.cross_entropy(model(2 * x + 3.0), y)
    for _ in range(2):
        assert torch.allclose(one.play(), told)
    assert one.loss == pytest.approx(told.item())


@pytest.mark.parametrize("off", [1.0, 1.001, 2.0])
def test_a_loss_that_is_not_what_was_recorded_is_none(off: float) -> None:
    model, (x, y) = classifier(), rows()[0]
    one = recorded(lambda: F.cross_entropy(model(x), y), model)
    bench, seen = Bench(model, [one], lambda m, batch: batch.play()), one.loss
    one.loss *= off
    bench.compare(one)
    assert bench.repeatable == (off == 1.0)
    if off < 2.0:
        assert float(bench.loss(one).detach()) == pytest.approx(seen)
    else:
        with pytest.raises(CannotJudgeError, match="what was recorded gives a loss of"):
            bench.loss(one)


def test_what_is_drawn_between_passes_is_not_the_same_batch() -> None:
    """Inputs that are made of drawn numbers behind a first call are no constants of the tape."""
    model, (x, y) = classifier(), rows()[0]

    def loss(drawn: bool) -> Tensor:
        first = model(x)
        return F.cross_entropy(model(torch.rand(32, 6) if drawn else 2 * x), y) + first.mean()

    for drawn in (True, False):
        batches = [recorded(lambda drawn=drawn: loss(drawn), model) for _ in range(2)]
        same = [f for f in told(Bench(model, batches, lambda m, one: one.play()), "data") if "same numbers" in f[2]]
        assert bool(same) != drawn


def test_a_model_that_is_trained_through_its_parts_is_seen() -> None:
    agent, (x, y) = Actor(), rows()[0]
    one = recorded(lambda: F.cross_entropy(agent.act(x), y), agent)
    (call,) = one.calls_of(agent)
    assert call.call is agent.policy


def test_micro_batches_are_those_of_one_program() -> None:
    model, (x, y) = classifier(), rows()[0]
    first = recorded(lambda: F.cross_entropy(model(x), y), model)
    again = recorded(lambda: F.cross_entropy(model(2 * x), y), model)
    other = recorded(lambda: F.cross_entropy(model(x), y) + model(x).square().mean(), model)
    assert first.program == again.program
    assert first.program != other.program


@pytest.mark.parametrize("terms", [True, False])
def test_losses_over_true_and_made_up_samples_are_two_terms(terms: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    x = torch.randn(8, 6)
    batches = [(x, torch.ones(8, 1)), (-x, torch.zeros(8, 1) if terms else torch.ones(8, 1))]

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(m(batch[0]), batch[1])

    sum(loss(model, batch) for batch in batches).backward()
    step = Step(batches, {name: p.grad.clone() for name, p in model.named_parameters()})
    ((status, _, message),) = told(Bench(model, batches, loss, step=step), "accumulation")
    assert (status, "2 times" in message) == (("pass", False) if terms else ("fail", True))


@pytest.mark.parametrize("alike", [True, False])
def test_two_losses_of_one_pass_that_keep_its_graph_are_played_whole(alike: bool) -> None:
    model, (x, y) = classifier(), rows()[0]
    head = nn.Linear(3, 2)
    tape = Tape()
    tape.follow(model)
    tape.follow(head)
    z = model(x)
    first = F.cross_entropy(z, y)
    tape.backward(first, keeps_graph=True)
    first.backward(retain_graph=True)
    second = F.cross_entropy(z, y.flip(0)) if alike else head(z).square().mean()
    tape.backward(second)
    second.backward()
    tape.close()
    given = {name: p.grad.clone() for name, p in model.named_parameters()}
    bench = Bench(model, tape.recorded, lambda m, batch: batch.play(), step=Step(tape.recorded, given))
    ((status, _, message),) = told(bench, "accumulation")
    assert (status, "2 micro-batches" in message) == ("pass", True), message


@pytest.mark.parametrize("moved", [True, False])
def test_a_step_whose_weights_change_between_its_passes_is_not_judged(moved: bool) -> None:
    """Sharpness-aware minimisation steps with the gradient of the second pass, taken elsewhere."""
    model, (x, y) = classifier(), rows()[0]
    passes = [recorded(lambda: F.cross_entropy(model(x), y) / 2, model)]
    with torch.no_grad():
        model[0].weight.add_(0.1 if moved else 0.0)
    loss = F.cross_entropy(model(x), y) / 2
    passes.append(recorded(lambda: F.cross_entropy(model(x), y) / 2, model))
    loss.backward()
    with torch.no_grad():
        model[0].weight.sub_(0.1 if moved else 0.0)
    given = {name: p.grad.clone() for name, p in model.named_parameters()}
    bench = Bench(model, passes, lambda m, batch: batch.play(), step=Step(passes, given))
    ((status, _, message),) = told(bench, "accumulation")
    assert (status, ("do not repeat" if moved else "last of 2") in message) == ("skipped" if moved else "fail", True)


CLOSURE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
model.compile(backend="eager")
optimizer = torch.optim.{optimizer}(model.parameters(), 0.1)
for _ in range(5):

    def closure():
        {zero}
        loss = nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,)))
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)
"""


@pytest.mark.parametrize(
    ("optimizer", "zero", "status", "says"),
    [
        ("LBFGS", "optimizer.zero_grad()", 0, "that of its 1 micro-batches"),
        ("SGD", "optimizer.zero_grad()", 0, "that of its 1 micro-batches"),
        ("SGD", "pass", 1, "times that of the step's batches"),
    ],
)
def test_a_closure_is_judged_when_it_has_run_and_a_compiled_model_as_it_is_written(
    tmp_path: Path, optimizer: str, zero: str, status: int, says: str
) -> None:
    (tmp_path / "train.py").write_text(CLOSURE.format(optimizer=optimizer, zero=zero))
    done = started(tmp_path, "-m", "flowscope", "check", "--only", "accumulation", "train.py")
    assert done.returncode == status, done.stdout + done.stderr
    assert says in done.stdout


def test_where_no_loss_is_seen_that_is_said(tmp_path: Path) -> None:
    backward = "torch.autograd.backward(loss)"
    script = CLOSURE.format(optimizer="SGD", zero="pass").replace(
        backward, "torch.autograd.grad(loss, model[0].weight)"
    )
    (tmp_path / "train.py").write_text(script)
    done = started(tmp_path, "-m", "flowscope", "check", "train.py")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no loss was seen: backward was called on none" in done.stderr


class TwoAnswers(torch.autograd.Function):
    """x^2, and |x| without a gradient: for a log."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * x, x.abs()

    @classmethod
    def backward(cls, ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return TwoAnswers.factor * x * first


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, x: Tensor) -> Tensor:
        return TwoAnswers.apply(self.inner(x))[0]


@pytest.mark.parametrize(("factor", "status"), [(2.0, "note"), (3.0, "fail")])
def test_an_output_without_gradient_does_not_condemn_a_hand_written_backward(
    factor: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoAnswers, "factor", factor)
    torch.manual_seed(0)
    found = told(Bench(Answers(), rows(), class_loss), "gradient")
    assert found[0][0] == status
    assert "TwoAnswers" in found[0][2]


@pytest.mark.parametrize("same", [True, False])
def test_the_loss_in_another_unit_is_no_term_thrown_away(same: bool) -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier()

        def forward(self, batch: Any) -> Tensor:
            each = F.cross_entropy(self.inner(batch[0]), batch[1], reduction="none")
            self.penalty = each.mean() if same else self.inner(batch[0]).square().mean()
            return each.sum() / 4

    ((status, _, _),) = told(Bench(Told(), rows(), lambda m, b: m(b)), "loss_path")
    assert status == ("pass" if same else "fail")


class Elsewhere(TorchFunctionMode):
    """A mode that a script has entered since the tape began to listen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [True, False])
def test_noise_that_is_drawn_before_a_model_is_called_is_what_it_was(inside: bool) -> None:
    """The second pass of a critic, over noise drawn between two backward passes; the tape may hear that or not."""
    net, (x, y) = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), rows()[0]
    tape = Tape()
    tape.follow(net)
    try:
        first = F.cross_entropy(net(x), y)
        with Elsewhere() if inside else contextlib.nullcontext():
            tape.backward(first)
        second = F.cross_entropy(net(torch.randn(32, 6)), y)
        tape.backward(second)
    finally:
        tape.close()
    bench = Bench(net, tape.recorded, lambda m, batch: batch.play())
    assert [bench.again(one) for one in tape.recorded] == [first.item(), second.item()]


@pytest.mark.parametrize("old", [True, False], ids=["hook", "parametrization"])
@pytest.mark.parametrize("kind", ["averaged", "copied", "summed from 0"])
@pytest.mark.parametrize("as_module", [True, False], ids=["module", "state"])
def test_a_mean_of_the_vectors_of_a_spectral_norm_is_told(old: bool, kind: str, as_module: bool) -> None:
    torch.manual_seed(0)
    norm = torch.nn.utils.spectral_norm if old else torch.nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(nn.Linear(6, 16), norm(nn.Linear(16, 12)), nn.Tanh(), nn.Linear(12, 3))
    names = [name for name, _ in model.named_buffers()]
    average = copy.deepcopy(model) if as_module else {name: x.clone() for name, x in model.state_dict().items()}
    held = average.state_dict() if as_module else average
    for name in names:
        other = F.normalize(torch.randn(model.state_dict()[name].shape), dim=0)
        if kind == "summed from 0":
            held[name].copy_(0.1 * other)
        else:
            held[name].lerp_(other, 0.5 if kind == "averaged" else 1.0)
    (found,) = told(Bench(model, rows(), class_loss), "train_eval")
    if kind == "averaged":
        length = held[names[0]].norm().item()
        assert found[:2] == ("fail", "1")
        assert f"{names[0]} with length {length:.4g}" in found[2]
    else:
        assert found[0] == "pass"


def test_tensors_of_another_net_are_saved_with_that() -> None:
    """A generator's loss goes through a critic; a single layer that stands outside of the model is told."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    critic, alone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(6, 1)
    for judge, status, says in ((critic, "pass", "4 tensors of the loss are"), (alone, "note", "2 tensors outside")):
        bench = Bench(maker, rows(), lambda m, batch, judge=judge: -judge(m(batch[0])).mean())
        (found,) = told(bench, "saving")
        assert found[0] == status
        assert says in found[2]


def test_a_second_net_that_a_loss_goes_through_is_put_back() -> None:
    """Each pass of a critic moves the vectors of its spectral norm, and adds to its gradients."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    norm = torch.nn.utils.parametrizations.spectral_norm
    critic = nn.Sequential(norm(nn.Linear(6, 16)), nn.LeakyReLU(0.1), norm(nn.Linear(16, 1)))
    batches = [recorded(lambda x=x: -critic(maker(x)).mean(), maker, critic) for x, _ in rows()]
    F.relu(1 - critic(rows()[0][0])).mean().backward()
    before = {name: x.clone() for name, x in critic.state_dict().items()}
    gradients = [p.grad.clone() for p in critic.parameters()]
    bench = Bench(maker, batches, lambda m, batch: batch.play(), [torch.optim.Adam(maker.parameters())])
    bench.compare(batches[0])
    report = run_trials(bench, chosen())
    assert {f.status for f in report.findings if f.trial in ("determinism", "saving")} == {"pass"}
    assert all(torch.equal(x, before[name]) for name, x in critic.state_dict().items())
    assert all(map(torch.equal, gradients, [p.grad for p in critic.parameters()]))


class Masked(nn.Module):
    """Covers some of its inputs at random: in training, or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.inner, self.head, self.always = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 3), always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or self.training:
            x = x * (torch.rand(1, 6) > 0.5)
        return self.head(self.inner(x))


@pytest.mark.parametrize("always", [True, False])
def test_random_numbers_are_placed_where_they_are_drawn(always: bool) -> None:
    torch.manual_seed(0)
    for model, where, name in (
        (Masked(always), "", "the model's own forward"),
        (nn.Sequential(Masked(always), nn.Linear(3, 3)), "0", "0"),
    ):
        (found,) = told(Bench(model, rows(), class_loss), "train_eval")
        assert found[:2] == ("note", where)
        mode = "in training and in evaluation" if always else "in training"
        assert found[2] == f"{name} draws random numbers {mode} that are no dropout"


def test_the_points_of_a_recurrent_layer_are_time_steps() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    batch = torch.randn(8, 30, 4), torch.randint(3, (8,))
    (found,) = told(Bench(Last(), [batch], class_loss), "signal")
    assert found[:2] == ("note", "lstm")
    assert found[2].endswith("over 30 time steps of lstm")
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()) for _ in range(8)), nn.Linear(6, 3))
    assert any(" layers" in message for _, _, message in told(Bench(chain, rows(), class_loss), "signal"))
