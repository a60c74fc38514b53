"""After pytorch/examples mnist: a convnet with dropout, log-softmax and nll_loss, Adadelta, StepLR, test passes."""

import torch
import torch.nn.functional as F
from data import patterns
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(16 * 12 * 12, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def main():
    torch.manual_seed(1)
    images, labels = patterns(1600)
    unseen = patterns(200, seed=2)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(5):
        model.train()
        for x, y in zip(images.split(16), labels.split(16)):
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
            print("net", loss.item())
        model.eval()
        with torch.no_grad():
            right = (model(unseen[0]).argmax(1) == unseen[1]).float().mean()
        scheduler.step()
    print("figure", right.item())


if __name__ == "__main__":
    main()
