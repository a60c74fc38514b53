"""What the graph between loss and output says: classes, shapes, what is squashed twice, which calls are compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flowscope
from flowscope.records import Record

B, D, C = 5, 6, 3
X, OTHER = torch.randn(2, B, D, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(B) % C
TARGETS = torch.linspace(-1, 1, B)

Loss = Callable[[nn.Module], Tensor]


@pytest.fixture(autouse=True)
def _broadcasts_on_purpose() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using a target size")
        yield


def net(width: int, *last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, width), *last)


def seen(model: nn.Module, loss: Loss, steps: int = 2) -> tuple[Record, set[tuple[str, str]]]:
    """The last record, and the kinds and severities of what was raised."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss(model)
            value.backward()
            optimizer.step()
            scope.step(loss=value.detach())
        return scope.records[-1], {(alert.kind, alert.message) for alert in scope.alerts}


def entropy(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(X), LABELS)


def pixels(model: nn.Module) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(X), torch.zeros(B, C), reduction="none")


def binary(model: nn.Module) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(X)[:, 0], LABELS.clamp(max=1).float())


@pytest.mark.parametrize(
    ("model", "loss", "classes"),
    [
        (lambda: net(C), entropy, C),
        (lambda: net(C), lambda m: functional.cross_entropy(m(X), LABELS, label_smoothing=0.1) / 4, C),
        (lambda: net(C, nn.LogSoftmax(-1)), lambda m: functional.nll_loss(m(X), LABELS), C),
        (lambda: net(1), binary, 2),
        # InfoNCE guesses among the samples of the batch, however wide the embedding is
        (lambda: net(C), lambda m: functional.cross_entropy(m(X) @ m(OTHER).T, torch.arange(B)), B),
        (lambda: net(1), lambda m: functional.mse_loss(m(X)[:, 0], TARGETS), None),
        (lambda: net(C), lambda m: functional.cross_entropy(m(X), LABELS, reduction="none").mean(), C),
        # what guessing costs is log C times the terms of the sum
        (lambda: net(C), lambda m: functional.cross_entropy(m(X), LABELS, reduction="sum"), None),
        (lambda: net(C), lambda m: pixels(m).sum(1).mean(), None),
        (lambda: net(C), lambda m: (pixels(m).sum(1) / C).mean(), 2),
        (lambda: net(C), lambda m: pixels(m).sum() / X.numel(), 2),
        (lambda: net(C), lambda m: entropy(m) + functional.cross_entropy(m(OTHER), LABELS), None),  # levels add up
    ],
)
def test_the_classes_a_loss_chooses_among(model: Callable[[], nn.Module], loss: Loss, classes: int | None) -> None:
    found = seen(model(), loss)[0]["loss_classes"].tolist()
    assert found == [classes] if classes is not None else found[0] != found[0]


@pytest.mark.parametrize(
    ("last", "loss", "word"),
    [
        (nn.Softmax(-1), entropy, "a softmax stands before cross_entropy"),
        (nn.Sigmoid(), entropy, "a sigmoid stands before cross_entropy"),
        (nn.Sigmoid(), binary, "before binary_cross_entropy_with_logits"),
        (nn.LogSoftmax(0), lambda m: functional.nll_loss(m(X), LABELS), "another axis than the classes"),
        (nn.LogSoftmax(1), lambda m: functional.nll_loss(m(X), LABELS), ""),
        (nn.LogSoftmax(-1), entropy, ""),  # a log_softmax of log-probabilities changes nothing
        (nn.Tanh(), entropy, ""),
        (nn.Sigmoid(), lambda m: functional.binary_cross_entropy(m(X)[:, 0], LABELS.clamp(max=1).float()), ""),
    ],
)
def test_a_loss_that_is_given_what_it_does_not_take(last: nn.Module, loss: Loss, word: str) -> None:
    told = [message for kind, message in seen(net(C, last), loss)[1] if kind == "loss_plateau"]
    assert len(told) == bool(word)
    assert all(word in message for message in told)


def gathered(model: nn.Module) -> Tensor:
    """The classic of Q-learning: the value of the action taken [B, 1] against targets [B]."""
    return (model(X).gather(1, LABELS[:, None]) - TARGETS).square().mean()


@pytest.mark.parametrize(
    ("width", "loss", "shapes"),
    [
        (1, lambda m: functional.mse_loss(m(X), TARGETS), ("(5, 1)", "(5,)")),
        (1, lambda m: functional.smooth_l1_loss(m(X)[:, 0], TARGETS[:, None]), ("(5,)", "(5, 1)")),
        (1, lambda m: ((m(X) - TARGETS) ** 2).mean(), ("(5, 1)", "(5,)")),
        (1, lambda m: -(m(X)[:, 0] * TARGETS[:, None]).mean(), ("(5,)", "(5, 1)")),
        (C, gathered, ("(5, 1)", "(5,)")),
    ],
)
def test_a_broadcast_to_all_pairs_of_samples_names_both_shapes(width: int, loss: Loss, shapes: tuple[str, str]) -> None:
    ((kind, message),) = seen(net(width), loss)[1]
    one, other = shapes
    assert kind == "constant_output"
    assert f"a tensor of shape {one} to (5, 5): what it is compared with has shape {other}" in message


def ranking(model: nn.Module) -> Tensor:
    score = model(X)[:, 0]
    return torch.sigmoid(score[:, None] - score[None]).mean()


def energy(model: nn.Module) -> Tensor:
    """Every sample against every target, on purpose."""
    return (model(X)[:, 0][:, None] - TARGETS[None]).abs().mean()


@pytest.mark.parametrize(
    ("width", "loss"),
    [
        (1, lambda m: functional.mse_loss(m(X), TARGETS[:, None])),
        (1, lambda m: (m(X)[:, 0] - TARGETS).square().mean()),
        (1, lambda m: (m(X) - 1.0).square().mean()),
        (1, ranking),
        (1, energy),
        (C, lambda m: (m(X) - TARGETS[:, None]).square().mean()),  # quantiles of one target
        (B, lambda m: (m(X) - TARGETS).square().mean()),
    ],
)
def test_what_is_meant_is_no_broadcast(width: int, loss: Loss) -> None:
    record, told = seen(net(width), loss)
    assert "loss_broadcast" not in record.metrics
    assert told == set()


class OneRow(nn.Module):
    """Answers one row for all samples; `given` says whether they are what it is called with."""

    def __init__(self, given: bool = True) -> None:
        super().__init__()
        self.inner, self.given = net(C), given

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean(0, keepdim=True) if self.given else self.inner(x[:1])


WIDE = torch.linspace(-1, 1, B * C).view(B, C)


@pytest.mark.parametrize(
    "loss",
    [
        lambda m: functional.mse_loss(m(X), WIDE),
        lambda m: (m(X) - WIDE).square().mean(),
        lambda m: (WIDE - m(X)).abs().mean(),
        lambda m: functional.smooth_l1_loss(m(X).view(1, C), WIDE),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_one_row_for_all_samples_is_told(loss: Loss, given: bool) -> None:
    record, told = seen(OneRow(given), loss)
    assert record["loss_broadcast"].tolist() == [1, C, B, C]
    assert [kind for kind, _ in told] == ["constant_output"]
    assert f"given {B} samples and answers one row" in next(iter(told))[1]
    assert f"from (1, {C}, ...) to ({B}, {C}, ...)" in next(iter(told))[1]


@pytest.mark.parametrize(
    "loss",
    [
        lambda m: functional.mse_loss(m(X), WIDE[:1]),  # a set of points has one target
        lambda m: functional.mse_loss(m(X[:1]), WIDE),  # one sample was given
        lambda m: (m(X).expand(B, C) - WIDE).square().mean(),  # on purpose
    ],
)
def test_one_row_that_is_meant_is_none(loss: Loss) -> None:
    record, told = seen(OneRow(), loss)
    assert "loss_broadcast" not in record.metrics
    assert told == set()


def twins(model: nn.Module) -> Tensor:
    return functional.mse_loss(model(X), model(OTHER))


def distilled(model: nn.Module) -> Tensor:
    """SimSiam: each call against the other's detached result, by direction."""
    first, second = model(X), model(OTHER)
    return -sum(functional.cosine_similarity(a, b.detach()).mean() for a, b in ((first, second), (second, first)))


@pytest.mark.parametrize(
    ("width", "loss", "compares"),
    [
        (C, twins, 1),
        (C, distilled, 1),
        (C, lambda m: functional.cross_entropy(m(X) @ m(OTHER).T, torch.arange(B)), 1),
        (C, lambda m: functional.cross_entropy((z := torch.cat([m(X), m(OTHER)])) @ z.T, torch.arange(2 * B)), 1),
        (C, entropy, 0),
        (1, lambda m: functional.softplus(-m(X)).mean() + functional.softplus(m(OTHER)).mean(), 0),  # a critic
        (C, lambda m: functional.mse_loss(m(X), X[:, :C]) + functional.mse_loss(m(OTHER), X[:, :C]), 0),
    ],
)
def test_calls_are_compared_where_their_results_meet_in_one_loss(width: int, loss: Loss, compares: int) -> None:
    assert seen(net(width), loss)[0]["loss_compares"].tolist() == [compares]


class Twins(nn.Module):
    """Both views in one forward, which returns the embeddings, or the loss of them."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.encoder, self.inside = net(C), inside

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        both = self.encoder(x), self.encoder(y)
        return functional.mse_loss(*both) if self.inside else both


def test_what_one_forward_returns_may_be_compared_and_a_loss_of_the_models_own_cannot_tell() -> None:
    def outside(model: nn.Module) -> Tensor:
        return functional.mse_loss(*model(X, OTHER))

    assert seen(Twins(inside=False), outside)[0]["loss_compares"].tolist() == [1]
    own = seen(Twins(inside=True), lambda m: m(X, OTHER))[0]["loss_compares"]
    assert own[0] != own[0]


def test_a_model_that_computes_its_own_loss_shows_its_classes() -> None:
    class Own(nn.Module):
        def __init__(self, *, logits: bool) -> None:
            super().__init__()
            self.net, self.logits = net(C), logits

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = self.net(x)
            loss = {"loss": functional.cross_entropy(out, LABELS)}
            return {**loss, "logits": out} if self.logits else loss

    for logits in (True, False):
        assert seen(Own(logits=logits), lambda m: m(X)["loss"])[0]["loss_classes"].tolist() == [C]


def test_micro_batches_and_an_agents_own_calls_are_not_compared() -> None:
    model = net(C)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(2):
            model(OTHER).argmax()  # acting, without no_grad
            for x in (X, OTHER):
                functional.mse_loss(functional.normalize(model(x)), X[:, :C]).backward()
            optimizer.step()
        assert scope.records[-1]["loss_compares"].tolist() == [0]


@pytest.mark.parametrize("players", ["one scope", "two scopes", "one loss"])
def test_a_second_loss_for_another_optimizer_is_known(players: str) -> None:
    torch.manual_seed(0)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made, self.judged = nn.Linear(2, D), net(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.judged(x)  # type: ignore[no-any-return]

    pair = Pair()
    first, second = (torch.optim.SGD(part.parameters(), 0.01) for part in (pair.judged, pair.made))
    watched, optimizers = (pair.judged, first) if players == "two scopes" else (pair, [first, second])
    with flowscope.watch(watched, optimizers, config={"console": "off"}) as scope:
        for _ in range(4):
            fake = pair.made(torch.randn(B, 2))
            loss = pair.judged(fake.detach()).mean() if players != "one loss" else pair.judged(fake).mean()
            loss.backward()
            first.step()
            if players != "one loss":
                (-pair.judged(fake)).mean().backward()
            second.step()
            first.zero_grad()
            second.zero_grad()
        said = ["other_losses" in record.metrics for record in scope.records]
    assert any(said) == (players != "one loss")


@pytest.mark.parametrize(
    ("how", "judged"), [("critic", True), ("frozen", False), ("own", False), ("beside", False), ("scaled", True)]
)
def test_a_loss_that_another_optimizers_net_answers_is_a_players(how: str, judged: bool) -> None:
    """Watched alone: the critic learns, stands still, is in the same optimizer, or the loss has a term past it."""
    torch.manual_seed(0)
    made, critic = nn.Sequential(nn.Linear(D, C), nn.Tanh()), nn.Sequential(nn.Linear(C, 4), nn.ReLU(), nn.Linear(4, 1))
    scale = nn.Parameter(torch.ones(C))
    own = torch.optim.SGD([*made.parameters(), *(critic.parameters() if how == "own" else ())], 0.01)
    other = torch.optim.SGD([scale] if how == "scaled" else critic.parameters(), 0.01)
    with flowscope.watch(made, own, config={"console": "off"}) as scope:
        for _ in range(4):
            if how in ("critic", "beside", "scaled"):
                other.zero_grad()
                (critic(OTHER[:, :C]) * scale.sum()).mean().backward()
                other.step()
            own.zero_grad()
            loss = -critic(made(X) * scale).mean() + (made(X).square().mean() if how == "beside" else 0)
            loss.backward()
            own.step()
        last = scope.records[-1]
    assert ("other_losses" in last) is judged
    assert (last.labels("trained_through") == [""] if "trained_through" in last else False) is judged


class Parts(nn.Module):
    """A body with two heads, an actor and a critic: called by parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = net(8), nn.Linear(8, 1), nn.Linear(8, 1)
        self.actor, self.other = net(C), net(1)


@pytest.mark.parametrize(
    ("loss", "several"),
    [
        (lambda m: functional.cross_entropy(m.actor(X), LABELS) + m.other(OTHER).square().mean(), True),
        (lambda m: (m.actor(X) + m.other(OTHER).square()).mean(), False),  # one answer of two nets
        (lambda m: m.one(m.body(X)).mean() + m.two(m.body(X)).square().mean(), False),  # two tasks
        (lambda m: m.other(X).mean() + m.other(OTHER).mean(), False),
        (lambda m: (m.body(X) @ net(8)(OTHER).detach().T).mean(), False),
    ],
)
def test_a_sum_of_what_several_nets_cost_is_no_measure_of_one(loss: Loss, several: bool) -> None:
    assert ("other_losses" in seen(Parts(), loss)[0]) is several


def test_an_inner_gradient_is_no_loss() -> None:
    """torch.autograd.grad asks for a gradient; the loss is what backward is called on."""

    def penalised(model: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return functional.cross_entropy(model(X), LABELS) + gradient.square().sum()

    assert seen(net(C), penalised)[0]["loss_classes"].tolist() == [C]
