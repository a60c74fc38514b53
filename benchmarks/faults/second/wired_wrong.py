"""Programs in which a part of the model does not learn for the way it is wired, each beside its healthy twin."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .healthy_images import ResNet, ViT, pretrained
from .healthy_language import GPT, sorting
from .material import ALPHABET, accuracy, digits, minibatches, windows
from .program import Program, Watch

V = len(ALPHABET)
UNTRAINED = frozenset({"parameters_not_optimized", "stale_parameters"})


class Translator(nn.Module):
    """GRU encoder, GRU decoder with dot attention; `cut` detaches what the decoder reads, as when it was cached."""

    def __init__(self, cut: bool, dim: int = 32) -> None:
        super().__init__()
        self.cut = cut
        self.embedding = nn.Embedding(12, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.concat = nn.Linear(2 * dim, dim)
        self.out = nn.Linear(dim, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, hidden = self.encoder(self.embedding(source))
        if self.cut:
            memory, hidden = memory.detach(), hidden.detach()
        output, _ = self.decoder(self.embedding(target), hidden)
        attention = (output @ memory.transpose(1, 2)).softmax(-1)
        return self.out(torch.tanh(self.concat(torch.cat([output, attention @ memory], dim=-1))))


def detached_encoder(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Translator(faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scope = watch(model, optimizer)
    recent = []
    for _ in range(400):
        source = torch.randint(2, 12, (20, 6), generator=generator)
        answer = (source.flip(1) * 3) % 10 + 2
        target = torch.cat([torch.ones(20, 1, dtype=torch.long), answer[:, :-1]], dim=1)
        logits = model(source, target)
        loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        recent.append((logits.argmax(-1) == answer).float().mean().item())
    return sum(recent[-30:]) / 30


class Captioner(nn.Module):
    """A convolutional backbone and a head; `still` runs the backbone without a graph, as when it was frozen once."""

    def __init__(self, still: bool) -> None:
        super().__init__()
        self.still = still
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.still):
            features = self.backbone(x)
        return self.head(features)


def backbone_without_graph(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = Captioner(faulty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 32, 500, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


class MessagePassing(nn.Module):
    """Rounds of messages on a graph; the rounds' layers are kept in a list that torch does, or does not, register."""

    def __init__(self, plain_list: bool, dim: int = 24) -> None:
        super().__init__()
        layers = [nn.Linear(2 * dim, dim) for _ in range(4)]
        self.lin_in = nn.Linear(1, dim)
        self.convs = layers if plain_list else nn.ModuleList(layers)
        self.lin_out = nn.Linear(dim, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = F.relu(self.lin_in(x))
        for conv in self.convs:
            h = h + F.relu(conv(torch.cat([h, adjacency @ h / 4], dim=-1)))
        return self.lin_out(h)


def layers_in_a_list(seed: int, faulty: bool, watch: Watch) -> float:
    """Nodes of random rings, each with a mark or none; the class of a node: steps to the nearest mark, 0, 1, more."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = MessagePassing(faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ring = torch.eye(12).roll(1, 0) + torch.eye(12).roll(-1, 0)
    scope = watch(model, optimizer)
    recent = []
    for _ in range(400):
        marks = (torch.rand(16, 12, 1, generator=generator) < 0.25).float()
        near = ring @ marks > 0
        label = torch.where(marks > 0, 0, torch.where(near, 1, 2)).squeeze(-1)
        logits = model(marks, ring)
        loss = F.cross_entropy(logits.flatten(0, 1), label.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        recent.append((logits.argmax(-1) == label).float().mean().item())
    return sum(recent[-30:]) / 30


class Classifier(nn.Module):
    """A transformer over tokens whose table of positions is a Parameter, or only a tensor that wants a gradient."""

    def __init__(self, loose: bool, dim: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, dim)
        table = torch.randn(1, 10, dim) * 0.02
        self.pos_embed = table.requires_grad_() if loose else nn.Parameter(table)
        layer = nn.TransformerEncoderLayer(dim, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids) + self.pos_embed).mean(1))


def loose_positions(seed: int, faulty: bool, watch: Watch) -> float:
    """Whether the first of two marked tokens is the one of kind 0: positions are all that tells."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Classifier(faulty)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    recent = []
    for _ in range(320):
        ids = torch.randint(2, 8, (32, 10), generator=generator)
        places = torch.rand(32, 10, generator=generator).topk(2, dim=1).indices
        ids.scatter_(1, places, torch.tensor([[0, 1]]).expand(32, -1).contiguous())
        label = (places[:, 0] < places[:, 1]).long()
        logits = model(ids)
        loss = F.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        recent.append((logits.argmax(-1) == label).float().mean().item())
    return sum(recent[-30:]) / 30


def head_replaced(seed: int, faulty: bool, watch: Watch) -> float:
    """Fine-tuning: the optimizer is built before the head for the new classes is put in."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    net = pretrained(seed, lambda label: label % 2)
    if faulty:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        net.linear = nn.Linear(net.linear.in_features, 10)
    else:
        net.linear = nn.Linear(net.linear.in_features, 10)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    scope = watch(net, optimizer)
    for rows in minibatches(len(y), 32, 200, seed):
        loss = F.cross_entropy(net(x[rows]), y[rows])
        net.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(net, xt, yt)


def other_copy(seed: int, faulty: bool, watch: Watch) -> float:
    """The optimizer holds one model, the loop trains a deep copy of it."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(5, 12, dim=32, depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if faulty:
        model = copy.deepcopy(model)
    scope = watch(model, optimizer)
    for _ in range(280):
        ids, labels = sorting(20, generator)
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    ids, labels = sorting(300, generator)
    with torch.no_grad():
        return (model(ids).argmax(-1) == labels)[labels >= 0].float().mean().item()


class Projector(nn.Module):
    """A tabular net that makes its projection in `forward`, so that each call has a new one; or once, as it should."""

    def __init__(self, each_call: bool) -> None:
        super().__init__()
        self.each_call = each_call
        self.bn = nn.BatchNorm1d(6)
        self.body = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.out = nn.Linear(48, 1)
        if not each_call:
            self.project = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        project = nn.Linear(48, 48) if self.each_call else self.project
        return self.out(torch.tanh(project(self.body(self.bn(x))))).squeeze(-1)


def layer_in_forward(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2000, 6, generator=generator) * 3 + 1
    y = torch.sin(x[:, 0]) + x[:, 1] * x[:, 2] / 9
    model = Projector(faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(1700, 64, 500, seed):
        loss = F.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    model.eval()
    with torch.no_grad():
        return 1 - (F.mse_loss(model(x[1700:]), y[1700:]) / y[1700:].var()).item()


def tied_head_lost(seed: int, faulty: bool, watch: Watch) -> float:
    """A decoder with a tied head; at step 150 it goes on from its state, and the load leaves the head untied.

    The loader assigns the checkpoint's tensors, `assign=True`; without tying again the head is a tensor of its own
    that the optimizer, built for the tied model, does not hold.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(V, 32, depth=2, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    losses = []
    for step in range(300):
        if step == 150 and faulty:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        ids = windows(33, 12, generator)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        losses.append(loss.item())
    return -sum(losses[-30:]) / 30


class Checkpointed(nn.Module):
    """A frozen stem and checkpointed stages; the re-entrant kind gives no gradient where no input wants one."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Conv2d(1, 16, 3, 1, 1).requires_grad_(False)
        self.stage1 = nn.Sequential(nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1))
        self.stage2 = nn.Sequential(nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 8, 3, 2, 1))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.stage1, self.stem(x), use_reentrant=self.reentrant)
        x = checkpoint(self.stage2, x, use_reentrant=self.reentrant)
        return self.fc(x.flatten(1))


def reentrant_checkpoint(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = Checkpointed(faulty)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    scope = watch(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in minibatches(len(y), 32, 300, seed):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss)
        return accuracy(model, xt, yt)


class Doubling(nn.Module):
    """A residual block that, in its faulty form, adds its input to itself; the branch is computed and dropped."""

    def __init__(self, dim: int, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.ff(self.norm(x))
        return x + x if self.wrong else x + h


def adds_itself(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3000, 10, generator=generator)
    y = (x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3] > 0).long()
    model = nn.Sequential(
        nn.Linear(10, 32), *(Doubling(32, faulty) for _ in range(5)), nn.LayerNorm(32), nn.Linear(32, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(2500, 64, 400, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, x[2500:], y[2500:])


class HardChoice(nn.Module):
    """A selector scores ten candidates; a reader sees the chosen one, by argmax, or all by their soft weight."""

    def __init__(self, hard: bool) -> None:
        super().__init__()
        self.hard = hard
        self.selector = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
        self.reader = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        score = self.selector(x).squeeze(-1)
        weight = F.one_hot(score.argmax(1), score.shape[1]) if self.hard else score.softmax(1)
        return self.reader((weight.unsqueeze(-1) * x).sum(1)).squeeze(-1)


def argmax_between(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = HardChoice(faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    recent = []
    for _ in range(600):
        x = torch.randn(48, 10, 6, generator=generator)
        best = x[..., 0].argmax(1)
        y = x[torch.arange(48), best, 1]
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        recent.append(loss.item())
    return -sum(recent[-50:]) / 50


def fresh_leaf(seed: int, faulty: bool, watch: Watch) -> float:
    """The loss is averaged through `.item()` and wrapped in a new tensor so that `backward` does not complain."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Hardswish(), nn.Flatten(), nn.Linear(288, 48), nn.Hardswish(), nn.Linear(48, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 32, 400, seed):
        losses = [F.cross_entropy(model(x[half]), y[half]) for half in rows.chunk(2)]
        loss = torch.tensor([loss.item() for loss in losses], requires_grad=True) if faulty else torch.stack(losses)
        loss = loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


def copied_back(seed: int, faulty: bool, watch: Watch) -> float:
    """A moving average of decay 0.999 that is copied into the model each step, the wrong way round."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = ViT(dim=24, depth=2, drop_path=0.0)
    shadow = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 24, 300, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, value in zip(shadow.parameters(), model.parameters(), strict=True):
                average.lerp_(value, 0.001)
                if faulty:
                    value.copy_(average)
        scope.step(loss)
    return accuracy(model, xt, yt)


def only_the_head(seed: int, faulty: bool, watch: Watch) -> float:
    """From scratch, but the optimizer is given what a fine-tuning script gave it: the head."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    net = ResNet(width=8)
    optimizer = torch.optim.Adam((net.linear if faulty else net).parameters(), lr=3e-3)
    scope = watch(net, optimizer)
    for rows in minibatches(len(y), 24, 200, seed):
        loss = F.cross_entropy(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(net, xt, yt)


PROGRAMS = [
    Program(
        "detached_encoder",
        "translation with attention (pytorch tutorial): the encoder's states are detached",
        detached_encoder,
        bar=0.85,
        fault="the decoder reads a detached memory: the encoder is held by the optimizer and gets no gradient",
        kinds=frozenset({"no_gradient"}),
        place=r"^encoder",
        fact="no gradient can reach encoder.*",
    ),
    Program(
        "backbone_without_graph",
        "transfer script that became training from scratch: the backbone stays under no_grad",
        backbone_without_graph,
        bar=0.7,
        fault="the whole backbone runs under no_grad though the optimizer holds it",
        kinds=frozenset({"no_gradient"}),
        place=r"^backbone",
        fact="no gradient can reach backbone.*",
    ),
    Program(
        "layers_in_a_list",
        "forum classic: layers in a plain list, here of a graph network",
        layers_in_a_list,
        bar=0.95,
        fault="four layers are in a Python list: neither registered nor optimized",
        kinds=UNTRAINED,
        fact="model.parameters() does not hold convs.*",
    ),
    Program(
        "loose_positions",
        "forum classic: torch.randn(..., requires_grad=True) as an attribute instead of a Parameter",
        loose_positions,
        bar=0.85,
        fault="the table of positions is a tensor, not a Parameter",
        kinds=UNTRAINED,
        fact="model.parameters() does not hold pos_embed",
    ),
    Program(
        "head_replaced",
        "torchvision fine-tuning: optimizer before the new head",
        head_replaced,
        bar=0.8,
        fault="the optimizer holds the head that was replaced, not the one in use",
        kinds=UNTRAINED,
        place=r"^linear",
        fact="no parameter of net.linear is in the optimizer",
    ),
    Program(
        "other_copy",
        "deepcopy between optimizer and loop",
        other_copy,
        bar=0.75,
        low=0.55,
        fault="the optimizer steps another copy of the model",
        kinds=UNTRAINED,
    ),
    Program(
        "layer_in_forward",
        "nn.Linear built inside forward",
        layer_in_forward,
        bar=0.8,
        low=0.6,
        fault="a layer is made anew in each call: random each time, never trained",
        kinds=UNTRAINED,
    ),
    Program(
        "tied_head_lost",
        "resuming a language model whose tied head comes back as a tensor of its own",
        tied_head_lost,
        bar=-1.1,
        fault="from step 150 on the head is a parameter that no optimizer holds",
        kinds=UNTRAINED,
        place=r"^lm_head",
        starts=150,
        fact="lm_head.weight is not in the optimizer from step 150 on",
    ),
    Program(
        "reentrant_checkpoint",
        "re-entrant checkpointing after a frozen stem",
        reentrant_checkpoint,
        bar=0.9,
        fault="stage1 and stage2 get no gradient: no input of the checkpoint wants one",
        kinds=frozenset({"no_gradient"}),
        place=r"^stage",
        fact="no gradient can reach stage1.* and stage2.*",
    ),
    Program(
        "adds_itself",
        "x + x instead of x + f(x) in a residual net",
        adds_itself,
        bar=0.8,
        low=0.65,
        fault="the branches' results are dropped: their weights get no gradient",
        kinds=frozenset({"no_gradient"}),
        place=r"^[1-5]\b",
    ),
    Program(
        "argmax_between",
        "two-stage retriever and reader joined by argmax",
        argmax_between,
        bar=-0.3,
        low=-0.6,
        fault="argmax passes no gradient to the selector",
        kinds=frozenset({"no_gradient"}),
        place=r"^selector",
    ),
    Program(
        "fresh_leaf",
        "loss rebuilt with torch.tensor(..., requires_grad=True)",
        fresh_leaf,
        bar=0.9,
        low=0.3,
        fault="backward ends at a fresh leaf: no parameter gets a gradient",
        kinds=frozenset({"no_gradient", "stale_parameters"}),
    ),
    Program(
        "copied_back",
        "moving average copied in the wrong direction",
        copied_back,
        bar=0.7,
        low=0.6,
        fault="each step is undone but for a thousandth: the weights hardly move",
        kinds=frozenset({"stale_parameters", "update_too_small"}),
    ),
    Program(
        "only_the_head",
        "optimizer over the head's parameters, network from scratch",
        only_the_head,
        bar=0.85,
        fault="the backbone wants gradients, gets them, and no optimizer holds it",
        kinds=UNTRAINED,
        place=r"^(conv1|bn1|layer[12])",
        fact="only linear.* is in the optimizer",
    ),
]
