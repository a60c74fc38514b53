"""After pytorch/examples siamese_network: one encoder runs twice a step, the pair is judged by a small head."""

import torch
from data import patterns
from torch import nn


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32)
        )
        self.fc = nn.Sequential(nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))

    def forward(self, first, second):
        both = torch.cat((self.encoder(first), self.encoder(second)), 1)
        return torch.sigmoid(self.fc(both))


def main():
    torch.manual_seed(1)
    images, labels = patterns(16000, 16, classes=4)
    model = SiameseNetwork()
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for i in range(500):
        rows = slice(32 * i, 32 * i + 16), slice(32 * i + 16, 32 * i + 32)
        first, second = (images[r] for r in rows)
        target = (labels[rows[0]] == labels[rows[1]]).float()
        optimizer.zero_grad()
        loss = criterion(model(first, second).squeeze(), target)
        loss.backward()
        optimizer.step()
        print("net", loss.item())
    print("figure", loss.item())


if __name__ == "__main__":
    main()
