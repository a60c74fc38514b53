"""A loop with a gradient scaler; `--faulty`: it clips before it unscales."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU())
        self.mean = nn.Linear(48, 1)

    def forward(self, x):
        return self.mean(self.body(x)).squeeze(-1)


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight = torch.randn(20) / 4
    for _ in range(30):
        x = torch.randn(32, 20)
        y = x @ weight + 0.1 * torch.randn(32)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
        scaler.scale(loss).backward()
        if not args.faulty:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
    torch.save(model.state_dict(), "regression.pt")


if __name__ == "__main__":
    main()
