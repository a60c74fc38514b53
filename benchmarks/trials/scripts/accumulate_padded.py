"""Fine-tune a small decoder on sentences of differing lengths; `--faulty`: every micro-batch weighs the same.

The healthy loop divides the sum of the losses by the number of targets in all micro-batches.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
PAD, K = 0, 2


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(30, 24, padding_idx=PAD),
            nn.GRU(24, 32, batch_first=True),
            nn.Linear(32, 30),
        )

    def forward(self, input_ids):
        return self.head(self.rnn(self.embed(input_ids))[0])


def sentence_batch(longest):
    ids = (torch.randint(0, 28, (4, 1)) + torch.arange(16)) % 28 + 2
    lengths = torch.randint(longest // 2, longest + 1, (4, 1))
    return torch.where(torch.arange(16) < lengths, ids, PAD)


def loss_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum")


model = Decoder()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
try:
    for _step in range(30):
        micro = [sentence_batch(longest) for longest in (16, 6)][:K]
        total = sum(int((ids[:, 1:] != PAD).sum()) for ids in micro)
        optimizer.zero_grad()
        for ids in micro:
            logits, labels = model(ids[:, :-1]), ids[:, 1:]
            if args.faulty:
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD) / K
            else:
                loss = loss_sum(logits, labels) / total
            loss.backward()
        optimizer.step()
finally:
    torch.save(model.state_dict(), "decoder.pt")
