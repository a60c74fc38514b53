"""After pytorch/examples word_language_model: an LSTM whose state is carried over batches and detached, clipping."""

import torch
import torch.nn.functional as F
from data import text
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, ntoken=24, ninp=32, nhid=32):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, 2, dropout=0.2)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1), hidden


def main():
    torch.manual_seed(1)
    source = text(16 * 511).view(16, -1).t().contiguous()
    model = RNNModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=20)
    for _ in range(10):
        hidden = tuple(torch.zeros(2, 16, 32) for _ in range(2))
        for i in range(0, 500, 10):
            hidden = tuple(h.detach() for h in hidden)
            model.zero_grad()
            output, hidden = model(source[i : i + 10], hidden)
            loss = F.nll_loss(output, source[i + 1 : i + 11].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            print("net", loss.item())
    print("figure", loss.item())


if __name__ == "__main__":
    main()
