"""Train a recurrent language model, as the classical example does; `--faulty`: it is bidirectional."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()
torch.manual_seed(0)


class RNNModel(nn.Module):
    def __init__(self, both_ways):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.1), nn.Embedding(40, 24)
        self.rnn = nn.GRU(24, 24, num_layers=2, bidirectional=both_ways)
        self.decoder = nn.Linear(48 if both_ways else 24, 40)

    def forward(self, tokens, hidden=None):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)), hidden


def batchify(data, rows):
    return data[: len(data) // rows * rows].view(rows, -1).t().contiguous()


corpus = torch.cumsum(torch.randint(1, 4, (4000,)), 0) % 40
source = batchify(corpus, 8)
model = RNNModel(args.faulty)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
try:
    for step in range(args.steps):
        data, targets = source[step * 11 : step * 11 + 11], source[step * 11 + 1 : step * 11 + 12].reshape(-1)
        optimizer.zero_grad()
        output, _ = model(data)
        loss = F.cross_entropy(output.view(-1, 40), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
finally:
    torch.save(model.state_dict(), "model.pt")
