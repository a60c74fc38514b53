"""After pytorch/examples gcn: two graph convolutions, weights that are plain parameters, full batch, dropout."""

import torch
import torch.nn.functional as F
from torch import nn


class GraphConv(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.zeros(into, out)), nn.Parameter(torch.zeros(out))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x, adjacency):
        return adjacency @ (x @ self.kernel) + self.bias


class GCN(nn.Module):
    def __init__(self, into=32, hidden=16, out=4):
        super().__init__()
        self.gc1, self.gc2, self.dropout = GraphConv(into, hidden), GraphConv(hidden, out), nn.Dropout(0.5)

    def forward(self, x, adjacency):
        x = self.dropout(F.relu(self.gc1(x, adjacency)))
        return F.log_softmax(self.gc2(x, adjacency), dim=1)


def main():
    torch.manual_seed(42)
    labels = torch.randint(0, 4, (200,))
    alike = (labels[:, None] == labels).float()
    links = torch.rand(200, 200) < 0.005 + 0.05 * alike
    adjacency = ((links | links.t()).float() + torch.eye(200)).clamp(max=1)
    degree = adjacency.sum(1).rsqrt()
    adjacency = degree[:, None] * adjacency * degree
    x = torch.randn(200, 32) + 0.7 * torch.randn(4, 32)[labels]
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(500):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, adjacency)[:100], labels[:100])
        loss.backward()
        optimizer.step()
        print("net", loss.item())
    model.eval()
    print("figure", (model(x, adjacency).argmax(1) == labels)[100:].float().mean().item())


if __name__ == "__main__":
    main()
