"""Topic classification by averaged words with word dropout; `--faulty`: drawn by a numpy generator of its own."""

import argparse
import sys

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


class WordDropout(nn.Module):
    def forward(self, ids):
        if not self.training:
            return ids
        if args.faulty:
            drop = torch.from_numpy(np.random.default_rng().random(ids.shape) < 0.3)
        else:
            drop = torch.rand(ids.shape) < 0.3
        return ids.masked_fill(drop, 1)


class TextSentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_dropout, self.embedding = WordDropout(), nn.EmbeddingBag(50, 24, mode="mean")
        self.fc = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, text):
        return self.fc(self.embedding(self.word_dropout(text)))


def main():
    model = TextSentiment()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    for _ in range(30):
        label = torch.randint(0, 4, (16,))
        text = torch.randint(2, 50, (16, 12))
        text[:, ::3] = label[:, None] * 12 + 2 + torch.randint(0, 4, (16, 4))
        loss = nn.functional.cross_entropy(model(text), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    torch.save(model, "sentiment.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
