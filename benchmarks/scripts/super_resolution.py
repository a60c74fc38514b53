"""After pytorch/examples super_resolution: a sub-pixel convnet, orthogonal weights, mean squared error."""

import torch
import torch.nn.functional as F
from data import patterns
from torch import nn


class Net(nn.Module):
    def __init__(self, upscale=2):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5, 1, 2), nn.Conv2d(32, 32, 3, 1, 1)
        self.conv3, self.conv4 = nn.Conv2d(32, 16, 3, 1, 1), nn.Conv2d(16, upscale**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale)
        for conv in (self.conv1, self.conv2, self.conv3):
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.conv4.weight)

    def forward(self, x):
        x = self.relu(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))
        return self.pixel_shuffle(self.conv4(x))


def main():
    torch.manual_seed(123)
    images = F.avg_pool2d(patterns(800, 32)[0], 2)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        for y in images.split(8):
            optimizer.zero_grad()
            loss = F.mse_loss(model(F.avg_pool2d(y, 2)), y)
            loss.backward()
            optimizer.step()
            print("net", loss.item())
    print("figure", loss.item())


if __name__ == "__main__":
    main()
