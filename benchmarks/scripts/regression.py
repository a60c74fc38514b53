"""After pytorch/examples regression: a lone linear layer fits a polynomial."""

import torch
import torch.nn.functional as F

DEGREE = 4


def batch(weights, bias, size=32):
    x = torch.randn(size, 1)
    x = torch.cat([x**power for power in range(1, DEGREE + 1)], 1)
    return x, x.mm(weights) + bias


def main():
    torch.manual_seed(0)
    weights, bias = torch.randn(DEGREE, 1) * 5, torch.randn(1) * 5
    fc = torch.nn.Linear(DEGREE, 1)
    optimizer = torch.optim.SGD(fc.parameters(), lr=0.05)
    for _ in range(500):
        x, y = batch(weights, bias)
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(fc(x), y)
        loss.backward()
        optimizer.step()
        print("net", loss.item())
    print("figure", loss.item())


if __name__ == "__main__":
    main()
