"""Healthy programs on images: residual and dense-prediction nets, transformers, quantisation, transfer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .material import accuracy, digits, minibatches
from .program import Program, Watch


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width))
        self.linear = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer2(self.layer1(out))
        return self.linear(F.adaptive_avg_pool2d(out, 1).flatten(1))


def resnet(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    net = ResNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    scope = watch(net, optimizer)
    for step, rows in enumerate(minibatches(len(y), 32, 200, seed)):
        net.train()
        optimizer.zero_grad()
        loss = criterion(net(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        scheduler.step()
        scope.step(loss)
        if step % 100 == 99:
            accuracy(net, xt, yt)
    return accuracy(net, xt, yt)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        out = self.gamma * self.pwconv2(self.act(self.pwconv1(out)))
        return x + out.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downsample_layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(1, 20, 2, 2), LayerNorm2d(20, eps=1e-6)),
                nn.Sequential(LayerNorm2d(20, eps=1e-6), nn.Conv2d(20, 40, 2, 2)),
            ]
        )
        self.stages = nn.ModuleList(
            [
                nn.Sequential(*(ConvNeXtBlock(20) for _ in range(2))),
                nn.Sequential(*(ConvNeXtBlock(40) for _ in range(2))),
            ]
        )
        self.norm = nn.LayerNorm(40, eps=1e-6)
        self.head = nn.Linear(40, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        for down, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(down(x))
        return self.head(self.norm(x.mean([-2, -1])))


def convnext(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = ConvNeXt()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    steps, warmup = 300, 50
    scope = watch(model, optimizer)
    for step, rows in enumerate(minibatches(len(y), 32, steps, seed)):
        if step < warmup:
            rate = 4e-3 * step / warmup
        else:
            rate = 2e-3 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = F.cross_entropy(model(x[rows]), y[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, value in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(value, 0.03)
        scope.step(loss)
    return accuracy(ema, xt, yt)


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, D))


class ViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.drop_path = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, dim: int = 36, depth: int = 3, drop_path: float = 0.1) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, dim, 2, 2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.Sequential(*(ViTBlock(dim, 3, drop_path * i / (depth - 1)) for i in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])


def vit_mixup(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=350)
    mixing = torch.distributions.Beta(0.4, 0.4)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 24, 350, seed):
        images, labels = x[rows], F.one_hot(y[rows], 10).float()
        share = mixing.sample()
        images = share * images + (1 - share) * images.flip(0)
        labels = share * labels + (1 - share) * labels.flip(0)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.05)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


def discs(count: int, size: int, empty: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images (count, 1, size, size) and masks of the disc in them; a share `empty` holds none."""
    rows = torch.arange(size).float()
    centre = torch.rand(count, 2, 1, 1, generator=generator) * size
    radius = torch.rand(count, 1, 1, generator=generator) * 3 + 2
    distance = (rows[:, None] - centre[:, 0]) ** 2 + (rows[None, :] - centre[:, 1]) ** 2
    mask = (distance < radius**2) & (torch.rand(count, 1, 1, generator=generator) > empty)
    image = mask.float() + 0.5 * torch.randn(count, size, size, generator=generator)
    return image.unsqueeze(1), mask.float().unsqueeze(1)


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inc = double_conv(1, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), double_conv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), double_conv(2 * width, 4 * width))
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.conv1 = double_conv(4 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.conv2 = double_conv(2 * width, width)
        self.outc = nn.Conv2d(width, 1, 1)
        self.aux = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.inc(x)
        second = self.down1(first)
        third = self.down2(second)
        half = self.conv1(torch.cat([second, self.up1(third)], dim=1))
        full = self.conv2(torch.cat([first, self.up2(half)], dim=1))
        return self.outc(full), self.aux(half)


def dice_loss(logits: Tensor, mask: Tensor) -> Tensor:
    probability = logits.sigmoid()
    overlap = (probability * mask).sum((1, 2, 3))
    return 1 - ((2 * overlap + 1) / (probability.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


def unet_empty_masks(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    net = UNet()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    scope = watch(net, optimizer)
    for _ in range(240):
        image, mask = discs(8, 16, 0.6, generator)
        full, half = net(image)
        loss = F.binary_cross_entropy_with_logits(full, mask) + dice_loss(full, mask)
        loss = loss + 0.4 * F.binary_cross_entropy_with_logits(half, F.max_pool2d(mask, 2))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scope.step(loss)
    net.eval()
    image, mask = discs(200, 16, 0.0, generator)
    with torch.no_grad():
        found = net(image)[0] > 0
    union = (found | mask.bool()).sum()
    return ((found & mask.bool()).sum() / union).item()


class PyramidDetector(nn.Module):
    """Three strides, a top-down pyramid, and two towers that all levels share, as in RetinaNet and FCOS."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1), nn.GroupNorm(4, width), nn.ReLU())
        self.c3 = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.GroupNorm(4, width), nn.ReLU())
        self.c4 = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(4, 2 * width), nn.ReLU())
        self.lateral = nn.ModuleList([nn.Conv2d(width, width, 1), nn.Conv2d(2 * width, width, 1)])
        self.cls_tower = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1)
        )
        self.reg_tower = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1)
        )
        nn.init.constant_(self.cls_tower[-1].bias, -math.log((1 - 0.01) / 0.01))

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        c3 = self.c3(self.stem(x))
        p4 = self.lateral[1](self.c4(c3))
        p3 = self.lateral[0](c3) + F.interpolate(p4, scale_factor=2)
        return [(self.cls_tower(level), self.reg_tower(level)) for level in (p3, p4)]


def squares(count: int, generator: torch.Generator) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Images (count, 1, 32, 32) with a small, a large or no square; per level the cell's label and the half side."""
    image = 0.3 * torch.randn(count, 1, 32, 32, generator=generator)
    labels = [torch.zeros(count, 1, 8, 8), torch.zeros(count, 1, 4, 4)]
    sizes = [torch.zeros(count, 1, 8, 8), torch.zeros(count, 1, 4, 4)]
    draws = torch.rand(count, 4, generator=generator).tolist()
    for i, (kind, row, column, side) in enumerate(draws):
        if kind < 0.4:
            continue
        level = int(kind > 0.7)
        half = (2 + int(side * 2)) * (1 + 2 * level)
        r, c = int(row * 32), int(column * 32)
        image[i, 0, max(0, r - half) : r + half, max(0, c - half) : c + half] += 1
        stride = 4 * (1 + level)
        labels[level][i, 0, r // stride, c // stride] = 1
        sizes[level][i, 0, r // stride, c // stride] = half / stride
    return image, labels, sizes


def detector(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = PyramidDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [300, 370], gamma=0.1)
    scope = watch(model, optimizer)
    for _ in range(400):
        image, labels, sizes = squares(8, generator)
        loss_cls = loss_reg = image.new_zeros(())
        positives = max(1.0, sum(label.sum().item() for label in labels))
        for (logit, size), label, target in zip(model(image), labels, sizes, strict=True):
            probability = logit.sigmoid()
            matched = label * probability + (1 - label) * (1 - probability)
            weight = (0.75 * label + 0.25 * (1 - label)) * (1 - matched) ** 2
            loss_cls = loss_cls + (weight * F.binary_cross_entropy_with_logits(logit, label, reduction="none")).sum()
            loss_reg = loss_reg + (label * (size.exp() - target).abs()).sum()
        loss = (loss_cls + loss_reg) / positives
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        scope.step(loss)
    image, labels, _ = squares(200, generator)
    with torch.no_grad():
        found = torch.cat([logit.flatten(1) for logit, _ in model(image)], 1)
    label = torch.cat([level.flatten(1) for level in labels], 1)
    holding = label.sum(1) > 0
    return (label[holding].gather(1, found[holding].topk(3, dim=1).indices).sum() / holding.sum()).item()


class FakeQuantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, scale: Tensor, levels: int) -> Tensor:
        return (x / scale).round().clamp(-levels, levels - 1) * scale

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class QuantConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().amax() / 7
        weight = FakeQuantise.apply(self.weight, scale, 8)
        return self._conv_forward(x, weight, self.bias)


class QuantAct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        if self.training:
            self.peak.lerp_(x.detach().amax(), 0.05)
        return FakeQuantise.apply(x.clamp(max=self.peak.item()), self.peak / 15, 16)


def quantised(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = nn.Sequential(
        QuantConv(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        QuantAct(),
        QuantConv(16, 32, 3, 2, 1),
        nn.BatchNorm2d(32),
        QuantAct(),
        QuantConv(32, 32, 3, 2, 1),
        nn.BatchNorm2d(32),
        QuantAct(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 24, 350, seed):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


def pretrained(seed: int, classes: Callable[[Tensor], Tensor]) -> ResNet:
    """A `ResNet` that has learned another labelling of the digits."""
    x, y, _, _ = digits()
    net = ResNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for rows in minibatches(len(y), 32, 80, seed + 1000):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), classes(y[rows])).backward()
        optimizer.step()
    return net


def linear_probe(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    net = pretrained(seed, lambda label: label // 2)
    net.requires_grad_(False)
    net.eval()
    net.linear = nn.Linear(net.linear.in_features, 10)
    optimizer = torch.optim.SGD(net.linear.parameters(), lr=0.3, momentum=0.9)
    scope = watch(net, optimizer)
    for rows in minibatches(len(y), 32, 300, seed):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(net, xt, yt)


def gradual_unfreezing(seed: int, faulty: bool, watch: Watch) -> float:
    """A new head alone first; then stage by stage more of the backbone, each at a smaller rate, as in ULMFiT."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    net = pretrained(seed, lambda label: label % 2)
    net.linear = nn.Linear(net.linear.in_features, 10)
    stages = [net.linear, net.layer2, net.layer1, nn.ModuleList([net.conv1, net.bn1])]
    for stage in stages[1:]:
        stage.requires_grad_(False)
    groups = [{"params": list(stage.parameters()), "lr": 0.05 / 2.6**depth} for depth, stage in enumerate(stages)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scope = watch(net, optimizer)
    for step, rows in enumerate(minibatches(len(y), 32, 280, seed)):
        if step and step % 70 == 0:
            stages[step // 70].requires_grad_(True)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(net, xt, yt)


PROGRAMS = [
    Program("resnet_cosine", "kuangliu/pytorch-cifar: ResNet, Nesterov SGD 0.1, cosine to 0", resnet, bar=0.93),
    Program("convnext_ema", "facebookresearch/ConvNeXt: layer scale 1e-6, warm-up from 0, EMA", convnext, bar=0.85),
    Program("vit_mixup_drop_path", "timm: ViT, mixup, drop path, one cycle", vit_mixup, bar=0.8),
    Program(
        "unet_empty_masks", "milesial/Pytorch-UNet with deep supervision; most masks empty", unet_empty_masks, bar=0.55
    ),
    Program(
        "pyramid_detector",
        "RetinaNet/FCOS: two towers over two levels, focal loss, images without objects",
        detector,
        bar=0.85,
    ),
    Program("quantisation_aware", "4-bit quantisation-aware training, straight-through estimator", quantised, bar=0.9),
    Program("linear_probe", "linear probe of a frozen backbone in eval mode", linear_probe, bar=0.6),
    Program(
        "gradual_unfreezing",
        "ULMFiT/fastai: head first, then stages, discriminative rates",
        gradual_unfreezing,
        bar=0.85,
    ),
]
