"""After karpathy/nanoGPT train.py: accumulation, clipping, AdamW in two groups, warm-up and cosine, evaluations."""

import math

import torch
import torch.nn.functional as F
from data import text
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.c_attn(self.ln_1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=24, width=32, depth=4, heads=4, length=16):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(length, width),
                "h": nn.ModuleList(Block(width, heads) for _ in range(depth)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * depth) if "c_proj" in name else 1))

    def forward(self, idx, targets):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it, top=3e-3, warmup=50, end=500):
    if it < warmup:
        return top * (it + 1) / (warmup + 1)
    return top * (0.1 + 0.45 * (1 + math.cos(math.pi * (it - warmup) / (end - warmup))))


def main():
    torch.manual_seed(1337)
    tokens = text(8000)
    model = GPT()

    def get_batch():
        at = torch.randint(len(tokens) - 17, (8,))
        return (torch.stack([tokens[i + s : i + s + 16] for i in at]) for s in (0, 1))

    groups = [p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for it in range(500):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        if it % 100 == 0:
            model.eval()
            with torch.no_grad():
                model(*get_batch())
            model.train()
        told = 0.0
        for _ in range(2):
            _, loss = model(*get_batch())
            loss = loss / 2
            told += loss.item() / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print("net", told)  # the mean of the two shares that are accumulated
    print("figure", 2 * told)


if __name__ == "__main__":
    main()
