"""Convolutions, vision transformers and generative models of images and sound."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.trials.case import Program, case, draws

CLASSES = 4


def pictures(g: torch.Generator, rows: int = 8, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return (B, 3, H, W) and the class: the quarter that is brightest."""
    x = torch.randn(rows, 3, size, size, generator=g)
    y = torch.randint(0, CLASSES, (rows,), generator=g)
    half = size // 2
    for i, quarter in enumerate(y.tolist()):
        top, left = half * (quarter // 2), half * (quarter % 2)
        x[i, :, top : top + half, left : left + half] += 1.0
    return x, y


def classify(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(m(batch[0]), batch[1])


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


class CausalConvolution(nn.Module):
    def __init__(self, width: int, dilation: int, same: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, dilation=dilation)
        self.res = nn.Conv1d(width, width, 1)
        self.reach, self.same = 2 * dilation, same

    def forward(self, x: Tensor) -> Tensor:
        pad = (self.reach // 2, self.reach // 2) if self.same else (self.reach, 0)
        a, b = self.conv(F.pad(x, pad)).chunk(2, 1)
        return x + self.res(torch.tanh(a) * torch.sigmoid(b))


class WaveNet(nn.Module):
    """Dilated causal convolutions over quantised sound."""

    def __init__(self, same_at: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.stack = nn.ModuleList(CausalConvolution(16, 2**i, i == same_at) for i in range(3))
        self.post = nn.Sequential(nn.ReLU(), nn.Conv1d(16, 32, 1))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes).transpose(1, 2)
        for layer in self.stack:
            x = layer(x)
        return self.post(x)


@case("causality", where=r"stack\.2\b")
def convolution_padded_on_both_sides(faulty: bool) -> Program:
    """The last of three causal convolutions is padded as 'same'."""
    torch.manual_seed(0)
    model = WaveNet(2 if faulty else None)

    def one(g: torch.Generator) -> Tensor:
        t = torch.arange(20) * 0.4
        wave = torch.sin(t + 6 * torch.rand(4, 1, generator=g)) + 0.3 * torch.randn(4, 20, generator=g)
        return ((wave.clamp(-1.9, 1.9) + 2) * 8).long()

    def loss(m: nn.Module, codes: Tensor) -> Tensor:
        return F.cross_entropy(m(codes[:, :-1]), codes[:, 1:])

    return Program(model, loss, draws(one), torch.optim.Adam(model.parameters(), 1e-3))


class WindowMixer(nn.Module):
    """Swin-like attention in windows of 2 by 2 patches; the way back may lose track of the samples."""

    def __init__(self, width: int, mixes: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.mixes = nn.Linear(width, 3 * width), nn.Linear(width, width), mixes

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, D = x.shape
        windows = x.view(B, H // 2, 2, W // 2, 2, D).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, D)
        q, k, v = self.qkv(windows).chunk(3, -1)
        out = self.proj(F.scaled_dot_product_attention(q, k, v))
        if self.mixes:
            return out.view(H // 2, W // 2, B, 2, 2, D).permute(2, 0, 3, 1, 4, 5).reshape(B, H, W, D)
        return out.view(B, H // 2, W // 2, 2, 2, D).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, D)


class WindowBlock(nn.Module):
    def __init__(self, width: int, mixes: bool = False) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), WindowMixer(width, mixes), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class WindowTransformer(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 2, 2)
        self.stages = nn.ModuleList(nn.Sequential(WindowBlock(16), WindowBlock(16, mixes and i == 0)) for i in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x).mean((1, 2)))


@case("samples", where=r"stages\.0\.1\.attn")
def windows_put_back_in_another_order(faulty: bool) -> Program:
    """Windows of one sample are put back into another: only the second block of stage 0."""
    torch.manual_seed(0)
    model = WindowTransformer(mixes=faulty)
    return Program(model, classify, draws(pictures), torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0))


class HandGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.wrong = wrong
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(1.702 * x)
        slope = s + (x if ctx.wrong else 1.702 * x) * s * (1 - s)
        return g * slope, None


class QuickGELU(nn.Module):
    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        return HandGELU.apply(x, self.wrong)


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int, wrong: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token = nn.Sequential(nn.Linear(patches, 16), nn.GELU(), nn.Linear(16, patches))
        self.channel = nn.Sequential(nn.Linear(width, 48), QuickGELU(wrong), nn.Linear(48, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, wrong_at: int | None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 2, 2)
        self.blocks = nn.Sequential(*(MixerBlock(16, 24, i == wrong_at) for i in range(3)))
        self.head = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


@case("gradient", where=r"blocks\.1\b")
def factor_forgotten_in_a_backward(faulty: bool) -> Program:
    """A hand-written activation of block 1 forgets the chain rule's 1.702."""
    torch.manual_seed(0)
    model = Mixer(1 if faulty else None)
    return Program(model, classify, draws(pictures), torch.optim.Adam(model.parameters(), 1e-3))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, cut: bool) -> None:
        super().__init__()
        self.reduce, self.expand, self.cut = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1), cut

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.expand(F.relu(self.reduce(pooled.data if self.cut else pooled))))


class ResidualBlock(nn.Module):
    def __init__(self, width: int, cut: bool = False, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.se = SqueezeExcite(width, cut)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.se(self.bn2(self.conv2(h))))


class ResidualNet(nn.Module):
    def __init__(self, cut_at: int | None = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layer1 = nn.Sequential(*(ResidualBlock(16, i == cut_at) for i in range(2)))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer1(self.stem(x)).mean((2, 3)))


@case("gradient", where=r"layer1\.1", least="note")
def gate_reads_data(faulty: bool) -> Program:
    """Squeeze-and-excitation of one block reads `.data`: the gate's gradient ends there."""
    torch.manual_seed(0)
    model = ResidualNet(1 if faulty else None)
    return Program(model, classify, draws(pictures), sgd(model))


class FreshDepth(nn.Module):
    """Stochastic depth; its draws come from a generator seeded by the machine in every forward."""

    def __init__(self, block: nn.Module, fresh: bool) -> None:
        super().__init__()
        self.block, self.fresh = block, fresh

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.block(x)
        generator = None
        if self.fresh:
            generator = torch.Generator()
            generator.seed()
        keep = (torch.rand(len(x), 1, 1, 1, generator=generator) < 0.8).to(x) / 0.8
        return x + keep * (self.block(x) - x)


class StochasticNet(nn.Module):
    def __init__(self, fresh: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.features = nn.Sequential(FreshDepth(ConvNeXtBlock(16), False), FreshDepth(ConvNeXtBlock(16), fresh))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(self.stem(x)).mean((2, 3)))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LayerNorm(width)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.pwconv2(F.gelu(self.pwconv1(h)))).permute(0, 3, 1, 2)


@case("determinism", where=r"features\.1\b", least="note")
def drawn_from_a_fresh_generator(faulty: bool) -> Program:
    """No seed controls which blocks are skipped."""
    torch.manual_seed(0)
    model = StochasticNet(fresh=faulty)
    return Program(model, classify, draws(pictures), torch.optim.Adam(model.parameters(), 1e-3))


class PlainClassifier(nn.Module):
    def __init__(self, softmax: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        logits = self.classifier(self.features(x))
        return F.softmax(logits, dim=1) if self.softmax else logits


@case("loss_start", says=r"softmax|probabilit")
def softmax_before_cross_entropy(faulty: bool) -> Program:
    """The model returns probabilities and the loss takes their softmax again."""
    torch.manual_seed(0)
    model = PlainClassifier(softmax=faulty)
    return Program(model, classify, draws(pictures), torch.optim.Adam(model.parameters(), 1e-3))


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        return self.out(torch.cat([a, self.up(self.down2(a))], 1))


@case("targets", says=r"\b0\b")
def background_ignored(faulty: bool) -> Program:
    """A segmentation whose ignore_index is a true class."""
    torch.manual_seed(0)
    model = SmallUNet()

    def one(g: torch.Generator) -> dict[str, Tensor]:
        mask = torch.randint(0, 5, (4, 4, 4), generator=g).repeat_interleave(2, 1).repeat_interleave(2, 2)
        image = torch.randn(4, 3, 8, 8, generator=g) + mask[:, None] * torch.tensor([0.5, -0.3, 0.2])[:, None, None]
        return {"image": image, "mask": mask}

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(m(b["image"]), b["mask"], ignore_index=0 if faulty else 255)

    return Program(model, loss, draws(one), torch.optim.Adam(model.parameters(), 1e-3))


class OwnDropout(nn.Module):
    def __init__(self, p: float, scales: bool) -> None:
        super().__init__()
        self.p, self.scales = p, scales

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = (torch.rand_like(x) > self.p).to(x)
        return x * kept / (1 - self.p) if self.scales else x * kept


class StandardisedConvolution(nn.Conv2d):
    """Weight standardisation; it may be left out in evaluation, where someone meant to save time."""

    def __init__(self, *args: Any, always: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        if self.training or self.always:
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class StandardisedNet(nn.Module):
    def __init__(self, always: bool) -> None:
        super().__init__()
        self.conv1 = StandardisedConvolution(3, 16, 3, padding=1)
        self.gn1 = nn.GroupNorm(4, 16)
        self.conv2 = StandardisedConvolution(16, 16, 3, padding=1, always=always)
        self.scale = nn.Parameter(torch.full((16, 1, 1), 0.1))
        self.drop, self.fc = nn.Dropout(0.1), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.gn1(self.conv1(x)))
        x = F.relu(self.conv2(x) * self.scale)
        return self.fc(self.drop(x.mean((2, 3))))


@case("train_eval", where=r"conv2")
def weights_standardised_in_training_only(faulty: bool) -> Program:
    """The second convolution uses other weights in evaluation."""
    torch.manual_seed(0)
    model = StandardisedNet(always=not faulty)
    return Program(model, classify, draws(pictures), sgd(model))


class ProbabilityMLP(nn.Module):
    def __init__(self, scales: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(192, 48), nn.Linear(48, 48), nn.Linear(48, CLASSES)
        self.drop1, self.drop2 = OwnDropout(0.2, True), OwnDropout(0.5, scales)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(F.relu(self.fc1(x.flatten(1))))
        return self.fc3(self.drop2(F.relu(self.fc2(x))))


@case("train_eval", where=r"drop2")
def dropout_not_scaled(faulty: bool) -> Program:
    """A dropout of one's own, p 0.5, without division by 0.5: evaluation sees activations twice as large."""
    torch.manual_seed(0)
    model = ProbabilityMLP(scales=not faulty)
    return Program(model, classify, draws(pictures), torch.optim.Adam(model.parameters(), 1e-3))


class Quantiser(nn.Module):
    """A codebook learnt by moving averages, straight-through."""

    def __init__(self, saved: bool, codes: int = 8, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("embed", torch.randn(codes, width), persistent=saved)
        self.register_buffer("cluster_size", torch.ones(codes), persistent=saved)
        self.register_buffer("embed_avg", self.embed.clone(), persistent=saved)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.size(1))
        chosen = torch.cdist(flat.detach(), self.embed).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, len(self.embed)).to(flat)
                self.cluster_size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.embed_avg.mul_(0.9).add_(hot.T @ flat, alpha=0.1)
                self.embed.copy_(self.embed_avg / self.cluster_size.clamp(min=0.01)[:, None])
        q = self.embed[chosen].view(len(z), z.size(2), z.size(3), -1).permute(0, 3, 1, 2)
        return z + (q - z).detach(), F.mse_loss(z, q.detach())


class QuantisedAutoencoder(nn.Module):
    def __init__(self, saved: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))
        self.quantize = Quantiser(saved)
        self.decoder = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, commitment = self.quantize(self.encoder(x))
        return self.decoder(q), commitment


@case("saving", where=r"quantize")
def codebook_not_saved(faulty: bool) -> Program:
    """The moving averages of the codebook are buffers with persistent=False."""
    torch.manual_seed(0)
    model = QuantisedAutoencoder(saved=not faulty)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        y, commitment = m(x)
        return F.mse_loss(y, x) + 0.25 * commitment

    def one(g: torch.Generator) -> Tensor:
        return pictures(g)[0]

    return Program(model, loss, draws(one), torch.optim.Adam(model.parameters(), 1e-3))


class ScaledLinear(nn.Module):
    """A linear map with learnt gains; saving may keep the weight only (a hook that filters keys)."""

    def __init__(self, inputs: int, outputs: int, drops: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))
        self.gain = nn.Parameter(torch.ones(outputs))
        self.drops = drops

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.drops:
            del destination[prefix + "gain"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.drops:
            state_dict = {**state_dict, prefix + "gain": self.gain.detach()}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * self.gain


class DenoisingNet(nn.Module):
    """A small diffusion model of vectors with the time embedded."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 32), nn.SiLU())
        self.inp, self.mid, self.out = nn.Linear(12, 32), ScaledLinear(32, 32, drops), nn.Linear(32, 12)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * 2.0 ** torch.arange(4)
        h = self.inp(x) + self.time(torch.cat([angles.sin(), angles.cos()], 1))
        return self.out(F.silu(self.mid(self.norm(h))) + h)


@case("saving", where=r"mid")
def gains_left_out_of_the_state(faulty: bool) -> Program:
    """A filter on the state's keys drops one learnt tensor, and loading forgives it."""
    torch.manual_seed(0)
    model = DenoisingNet(drops=faulty)

    def one(g: torch.Generator) -> Tensor:
        angle = 6.3 * torch.rand(16, 1, generator=g)
        return torch.sin(angle + torch.arange(12) * 0.5)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        t, noise = torch.rand(len(x)), torch.randn_like(x)
        noisy = (1 - t)[:, None] * x + t[:, None] * noise
        return F.mse_loss(m(noisy, t), noise - x)

    return Program(model, loss, draws(one), torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0))


class PlainConvolutions(nn.Module):
    """A deep plain convolutional net (He initialisation)."""

    def __init__(self, biased_at: int | None) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(5):
            conv = nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.constant_(conv.bias, -12.0 if i == biased_at else 0.0)
            layers += [conv, nn.ReLU()]
        self.trunk, self.fc = nn.Sequential(*layers), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.trunk(x).mean((2, 3)))


@case("signal", where=r"trunk\.(4|5)\b", least="note")
def units_dead_at_the_start(faulty: bool) -> Program:
    """The third convolution starts with biases of -12: hardly a unit ever fires."""
    torch.manual_seed(0)
    model = PlainConvolutions(2 if faulty else None)
    return Program(model, classify, draws(pictures), torch.optim.Adam(model.parameters(), 1e-3))


class DeepTanh(nn.Module):
    """Twelve layers of tanh, drawn by Glorot or with the standard deviation 1."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(24, 32)
        self.hidden = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))
        for layer in self.hidden:
            if wide:
                nn.init.normal_(layer.weight, std=1.5)
            else:
                nn.init.xavier_normal_(layer.weight, gain=5 / 3)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inp(x))
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.out(x)


@case("signal", where=r"hidden|^$", least="note")
def weights_drawn_far_too_wide(faulty: bool) -> Program:
    """Chaotic and saturated: the gradient grows or dies by a constant factor a layer."""
    torch.manual_seed(0)
    model = DeepTanh(wide=faulty)

    def one(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 24, generator=g)
        return x, x[:, :4].argmax(1)

    return Program(model, classify, draws(one), sgd(model))
