"""After pytorch/examples vae: summed binary cross-entropy and KL divergence, so losses of thousands."""

import torch
import torch.nn.functional as F
from data import patterns
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(256, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.fc3, self.fc4 = nn.Linear(8, 64), nn.Linear(64, 256)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 256))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def main():
    torch.manual_seed(1)
    images = patterns(2000, 16)[0].sigmoid()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        for x in images.split(20):
            optimizer.zero_grad()
            out, mu, logvar = model(x)
            fit = F.binary_cross_entropy(out, x.view(-1, 256), reduction="sum")
            loss = fit - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss.backward()
            optimizer.step()
            print("net", loss.item())
    print("figure", loss.item() / 20)


if __name__ == "__main__":
    main()
