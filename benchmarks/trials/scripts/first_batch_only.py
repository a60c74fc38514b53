"""Train an image classifier; `--faulty`: the loop asks the loader for its first batch each time."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


class DepthwiseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 2, 1)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.BatchNorm2d(16), nn.Hardswish(), nn.Conv2d(16, 16, 1)
                )
                for _ in range(2)
            )
        )
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


labels = torch.randint(0, 4, (320,))
images = torch.randn(320, 1, 8, 8) + labels[:, None, None, None] * torch.linspace(-1, 1, 8)
loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=not args.faulty)
model = DepthwiseNet()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
iterator = iter(loader)
for _step in range(20):
    x, y = next(iter(loader)) if args.faulty else next(iterator)
    loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "net.pth")
