"""Teachers, tasks, experts, graphs and sequences: five healthy programs, and seven that go wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import Program, Watch
from .toys import batch, digits


class Listener(nn.Module):
    """Frames (B, T, 10) to log-probabilities (T, B, 9) of eight symbols and the blank."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(10, 32, 3, padding=1)
        self.lstm = nn.LSTM(32, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(64, 9)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.out(self.lstm(h)[0]).log_softmax(2).transpose(0, 1)


def spoken(n: int, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Frames (n, 15, 10) of five symbols in three frames each, and the symbols (n, 5), 1 to 8."""
    y = (torch.randint(8, (n, 1)) + torch.randint(1, 8, (n, 5)).cumsum(1)) % 8
    frames = codes[y].repeat_interleave(3, 1)
    return frames + 0.4 * torch.randn_like(frames), y + 1


def ctc(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model, criterion, codes = Listener(), nn.CTCLoss(blank=0, zero_infinity=True), torch.randn(8, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    lengths, aims = torch.full((24,), 15), torch.full((24,), 5)
    scope = watch(model, optimizer)
    for _ in range(350):
        x, y = spoken(24, codes)
        loss = criterion(model(x), y, lengths, aims)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        x, y = spoken(200, codes)
        said = [row.unique_consecutive() for row in model(x).argmax(2).T]
        return sum(s[s > 0].tolist() == t for s, t in zip(said, y.tolist(), strict=True)) / 200


class Distiller(nn.Module):
    """A frozen teacher and its student."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.eval().requires_grad_(False), student

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            aim = self.teacher(x)
        return self.student(x), aim


def accuracy(model: nn.Module) -> float:
    data = digits()
    model.eval()
    with torch.no_grad():
        return (model(data.test_x).argmax(1) == data.test_y).float().mean().item()


def trained_teacher(width: int = 128) -> nn.Module:
    data = digits()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    teacher = nn.Sequential(*teacher, nn.Linear(width, 10))
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(150):
        rows = torch.randint(len(data.x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(teacher(data.x[rows]), data.y[rows]).backward()
        optimizer.step()
    return teacher


def distillation(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    data = digits()
    student = nn.Sequential(
        *(nn.Conv2d(1, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.BatchNorm2d(24)),
        *(nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(96, 10)),
    )
    net = Distiller(trained_teacher(), student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scope = watch(net, optimizer)
    for _ in range(500):
        net.student.train()
        rows = torch.randint(len(data.x), (48,))
        logits, aim = net(data.x[rows])
        soft = F.kl_div((logits / 4).log_softmax(1), (aim / 4).softmax(1), reduction="batchmean") * 16
        loss = 0.7 * soft + 0.3 * F.cross_entropy(logits, data.y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    return accuracy(student)


class TwoTasks(nn.Module):
    """A shared body, a class and a place, and the log-variances that weigh them (Kendall and others, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU())
        self.digit, self.place = nn.Linear(64, 10), nn.Linear(64, 2)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.digit(h), self.place(h)


def uncertainty_weights(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    data, model = digits(), TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    grid = torch.arange(8.0) / 3.5 - 1
    mass = data.x.sum((1, 2, 3))
    centre = torch.stack([(data.x.sum(2)[:, 0] * grid).sum(1), (data.x.sum(3)[:, 0] * grid).sum(1)], 1) / mass[:, None]
    scope = watch(model, optimizer)
    for _ in range(700):
        rows = torch.randint(len(data.x), (64,))
        digit, place = model(data.x[rows])
        losses = torch.stack([F.cross_entropy(digit, data.y[rows]), F.mse_loss(place, centre[rows])])
        loss = ((-model.log_vars).exp() * losses + 0.5 * model.log_vars).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return (model(data.test_x)[0].argmax(1) == data.test_y).float().mean().item()


class Experts(nn.Module):
    """A sparse layer: each row (B, D) goes to its top k experts."""

    def __init__(self, width: int, experts: int, top: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.top = top

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mixture (B, D), the balance loss of Switch Transformer, and the shares (E,) of the rows."""
        chance = self.router(x).softmax(1)
        weight, chosen = chance.topk(self.top, dim=1)
        if self.top > 1:
            weight = weight / weight.sum(1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, rank = (chosen == i).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, expert(x[row]) * weight[row, rank, None])
        share = F.one_hot(chosen, len(self.experts)).float().sum((0, 1)) / chosen.numel()
        return out, len(self.experts) * (share * chance.mean(0)).sum(), share


class Mixture(nn.Module):
    def __init__(self, depth: int, width: int, experts: int, top: int, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Linear(12, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(Experts(width, experts, top) for _ in range(depth))
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, balance, largest = self.stem(x), torch.zeros(()), torch.zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=True):
            change, loss, share = layer(norm(h))
            h, balance, largest = h + change, balance + loss, torch.maximum(largest, share.max().detach())
        return self.out(h), balance, largest


def mixture_of_experts(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model = Mixture(2, 24, 4, 2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    centres, maps = 2 * torch.randn(6, 12), torch.randn(6, 12, 3) / 3

    def task(n: int) -> tuple[Tensor, Tensor]:
        kind, z = torch.randint(6, (n,)), torch.randn(n, 12)
        return centres[kind] + z, torch.einsum("bi,bij->bj", z, maps[kind])

    scope = watch(model, optimizer)
    for _ in range(400):
        x, y = task(64)
        output, balance, _ = model(x)
        loss = F.mse_loss(output, y) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        x, y = task(2000)
        return 1 - (F.mse_loss(model(x)[0], y) / y.var()).item()


def router_collapse(seed: int, faulty: bool, watch: Watch) -> float:
    """Switch routing without its balance loss, on features with a large common part: one expert takes all."""
    torch.manual_seed(seed)
    model = Mixture(1, 32, 6, 1, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = digits()
    x = data.x.flatten(1) @ (torch.randn(64, 12) / 4) + 3 * torch.randn(12)
    model.norms[0] = nn.RMSNorm(32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    for _ in range(500):
        rows = torch.randint(len(x), (64,))
        output, balance, _ = model(x[rows])
        loss = F.cross_entropy(output, data.y[rows]) + (0.0 if faulty else 0.05) * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return -model(x)[2].item()


def random_graph(n: int, classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """A stochastic block model: the normalised adjacency (n, n), noisy features (n, 16), and the blocks (n,)."""
    y = torch.arange(n) % classes
    chance = torch.where(y[:, None] == y[None], 0.06, 0.01)
    upper = (torch.rand(n, n) < chance).float().triu(1)
    adjacency = upper + upper.T + torch.eye(n)
    scale = adjacency.sum(1).rsqrt()
    features = F.one_hot(y, 16).float() + 0.9 * torch.randn(n, 16)
    return scale[:, None] * adjacency * scale, features, y


class Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2 = nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = F.dropout(F.relu(adjacency @ self.gc1(x)), 0.5, self.training)
        return adjacency @ self.gc2(h)


def graph(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    adjacency, x, y = random_graph(240)
    model = Gcn()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    with watch(model, optimizer) as scope:
        for _ in range(2000):
            model.train()
            loss = F.cross_entropy(model(x, adjacency)[:60], y[:60])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    model.eval()
    with torch.no_grad():
        return (model(x, adjacency)[60:].argmax(1) == y[60:]).float().mean().item()


class DeepGcn(nn.Module):
    """Many rounds of messages; without the initial residual of GCNII all nodes become one."""

    def __init__(self, depth: int, residual: bool) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(16, 32), nn.Linear(32, 4)
        self.convs = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.residual = residual

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = start = F.relu(self.stem(x))
        for conv in self.convs:
            message = adjacency @ h
            if self.residual:
                mixed = 0.8 * message + 0.2 * start
                h = F.relu(0.9 * mixed + 0.1 * conv(mixed))
            else:
                h = F.relu(conv(message))
        return self.out(h)


def oversmoothing(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    adjacency, x, y = random_graph(200)
    model = DeepGcn(20, residual=not faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    scope = watch(model, optimizer)
    for _ in range(300):
        loss = F.cross_entropy(model(x, adjacency)[:80], y[:80])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return (model(x, adjacency)[80:].argmax(1) == y[80:]).float().mean().item()


class Tabular(nn.Module):
    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.bn_in = nn.BatchNorm1d(20, momentum=momentum)
        self.fc1, self.bn1 = nn.Linear(20, 64), nn.BatchNorm1d(64, momentum=momentum)
        self.fc2, self.bn2 = nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=momentum)
        self.out = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.fc1(self.bn_in(x))))
        return self.out(F.relu(self.bn2(self.fc2(h))))


def norm_momentum(seed: int, faulty: bool, watch: Watch) -> float:
    """A table in its own units; Keras' momentum of 0.9999 became 1e-4 here: eval sees other numbers."""
    torch.manual_seed(seed)
    model = Tabular(1e-4 if faulty else 0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mean, std, rule = 20 * torch.randn(20), 10 * torch.rand(20) + 1, torch.randn(20, 3)

    def table(n: int) -> tuple[Tensor, Tensor]:
        z = torch.randn(n, 20)
        return mean + std * z, (z @ rule).argmax(1)

    held_x, held_y = table(500)

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            right = (model(held_x).argmax(1) == held_y).float().mean().item()
        model.train()
        return right

    scope = watch(model, optimizer)
    for step in range(450):
        x, y = table(64)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
        if step % 50 == 49:
            evaluate()
    return evaluate()


class SetAttention(nn.Module):
    """Attention over a set of which only the first `length` members are real."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, absent: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / x.shape[2] ** 0.5
        scores = scores.masked_fill(absent[:, None, :], float("-inf"))
        return self.out(scores.softmax(2) @ self.value(x))


class SetNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 32)
        self.attention1, self.attention2 = SetAttention(32), SetAttention(32)
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor, absent: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.attention1(self.norm1(h), absent)
        h = h + self.attention2(self.norm2(h), absent)
        h = h.masked_fill(absent[:, :, None], 0.0).sum(1) / (~absent).sum(1, keepdim=True).clamp(min=1)
        return self.out(h).squeeze(1)


def masked_row(seed: int, faulty: bool, watch: Watch) -> float:
    """One set in 600 is empty: the softmax over nothing is NaN. The healthy form keeps the first place open."""
    torch.manual_seed(seed)
    model = SetNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def sets(n: int) -> tuple[Tensor, Tensor, Tensor]:
        length = torch.where(torch.rand(n) < 1 / 600, torch.zeros(n, dtype=torch.long), torch.randint(1, 8, (n,)))
        absent = torch.arange(7)[None] >= length[:, None]
        x = torch.randn(n, 7, 4).masked_fill(absent[:, :, None], 0.0)
        y = (x[:, :, 0] * (x[:, :, 1] > 0)).sum(1) / length.clamp(min=1)
        if not faulty:
            absent[:, 0] = False
        return x, absent, y

    scope = watch(model, optimizer)
    for _ in range(450):
        x, absent, y = sets(48)
        loss = F.mse_loss(model(x, absent), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        x, absent, y = sets(1000)
        return 1 - (F.mse_loss(model(x, absent), y) / y.var()).item()


class ListStudent(nn.Module):
    """A residual MLP; `plain` keeps its blocks in a list of Python's, where no optimizer finds them."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(64, 40), nn.Linear(40, 10)
        blocks = [nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 80), nn.GELU(), nn.Linear(80, 40)) for _ in range(4)]
        self.blocks = blocks if plain else nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.flatten(1))
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


def plain_list(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    teacher, x = trained_teacher(64), digits().x
    student = ListStudent(faulty)
    start = student.blocks[0][1].weight.detach().clone()
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3, weight_decay=0.0)
    scope = watch(student, optimizer)
    for _ in range(400):
        images = batch(x, 48)
        with torch.no_grad():
            aim = teacher(images).softmax(1)
        loss = F.cross_entropy(student(images), aim)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    return (student.blocks[0][1].weight - start).abs().mean().item()


def double_softmax(seed: int, faulty: bool, watch: Watch) -> float:
    """Behaviour cloning over 100 actions; the policy ends in a softmax and the loss takes another."""
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(10, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 100))
    if faulty:
        policy.append(nn.Softmax(dim=1))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1, momentum=0.9)
    anchors = torch.randn(100, 10)
    scope = watch(policy, optimizer)

    def demonstrations(n: int) -> tuple[Tensor, Tensor]:
        a = torch.randint(100, (n,))
        return anchors[a] + 0.3 * torch.randn(n, 10), a

    for _ in range(400):
        s, a = demonstrations(64)
        loss = F.cross_entropy(policy(s), a)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        s, a = demonstrations(2000)
        return (policy(s).argmax(1) == a).float().mean().item()


def half_precision(seed: int, faulty: bool, watch: Watch) -> float:
    """Weights in float16 and Adam with its usual eps, which is 0 in float16: 0 / 0 where no gradient came."""
    torch.manual_seed(seed)
    data = digits()
    x = data.x.flatten(1).half()
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8 if faulty else 1e-4)
    scope = watch(model, optimizer)
    for _ in range(350):
        rows = torch.randint(len(x), (64,))
        loss = F.cross_entropy(model(x[rows]).float(), data.y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        logits = model(data.test_x.flatten(1).half())
        return -1.0 if logits.isnan().any() else (logits.argmax(1) == data.test_y).float().mean().item()


PROGRAMS = [
    Program("mix_ctc", "speech tutorials with CTC: blanks first, then symbols", ctc, 0.7),
    Program(
        "mix_distillation",
        "haitongli/knowledge-distillation-pytorch, frozen teacher inside the watch",
        distillation,
        0.9,
    ),
    Program("mix_uncertainty_weights", "yaringal/multi-task-learning-example", uncertainty_weights, 0.9),
    Program("mix_experts_top2", "davidmrau/mixture-of-experts with a balance loss", mixture_of_experts, 0.7),
    Program("mix_graph", "tkipf/pygcn on a random graph, one batch 2,000 times", graph, 0.65),
    Program(
        "mix_router_collapse",
        "switch routing with the auxiliary loss left out",
        router_collapse,
        bar=-0.5,
        low=-0.6,
        fault="without a balance loss nearly all rows go to one expert",
        kinds=frozenset({"expert_collapse"}),
        place=r"router|layers",
        starts=1,
    ),
    Program(
        "mix_oversmoothing",
        "20 layers of Kipf's GCN without residuals",
        oversmoothing,
        bar=0.62,
        low=0.45,
        fault="messages make all nodes the same",
        kinds=frozenset(
            {"representation_collapse", "rank_collapse", "token_collapse", "constant_output", "vanishing_gradient"}
        ),
    ),
    Program(
        "mix_norm_momentum",
        "networks ported from Keras, momentum=0.9999 taken for 1e-4; 'perfect in train(), chance in eval()'",
        norm_momentum,
        bar=0.85,
        low=0.7,
        fault="running statistics never reach those of the data",
        kinds=frozenset({"train_eval_gap"}),
        place=r"bn",
        starts=5,
    ),
    Program(
        "mix_masked_row",
        "attention with -inf masks and an empty sequence once in a while",
        masked_row,
        bar=0.6,
        low=-1.0,
        fault="a row of attention with every key masked is NaN",
        kinds=frozenset({"non_finite"}),
        place=r"attention",
    ),
    Program(
        "mix_plain_list",
        "students with blocks in a Python list",
        plain_list,
        bar=0.001,
        low=0.0,
        fault="four blocks are no part of the module: nobody trains them",
        kinds=frozenset({"parameters_not_optimized"}),
    ),
    Program(
        "mix_double_softmax",
        "behaviour cloning with nn.Softmax before CrossEntropyLoss",
        double_softmax,
        bar=0.8,
        low=0.3,
        fault="a softmax of a softmax: hardly any gradient passes",
        kinds=frozenset({"saturation", "vanishing_gradient", "loss_plateau", "update_too_small"}),
    ),
    Program(
        "mix_half_adam",
        "model.half() with Adam's default eps; NaN after the first step",
        half_precision,
        bar=0.85,
        low=-1.0,
        fault="eps underflows in float16: Adam divides zero by zero",
        kinds=frozenset({"non_finite"}),
    ),
]
