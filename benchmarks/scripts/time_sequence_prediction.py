"""After pytorch/examples time_sequence_prediction: LSTM cells in a loop, double precision, LBFGS with a closure."""

import torch
from torch import nn


class Sequence(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.hidden = hidden
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, hidden), nn.LSTMCell(hidden, hidden), nn.Linear(hidden, 1)

    def forward(self, x):
        outputs = []
        h1, c1, h2, c2 = (torch.zeros(len(x), self.hidden, dtype=torch.double) for _ in range(4))
        for value in x.split(1, dim=1):
            h1, c1 = self.lstm1(value, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def main():
    torch.manual_seed(0)
    starts = torch.randint(-40, 40, (8, 1))
    waves = torch.sin((torch.arange(13) + starts) / 2).double()
    seq, criterion = Sequence().double(), nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.3, max_iter=2)
    last = []
    for _ in range(100):

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(waves[:, :-1]), waves[:, 1:])
            last.append(loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        print("net", last[-1])
    print("figure", last[-1])


if __name__ == "__main__":
    main()
