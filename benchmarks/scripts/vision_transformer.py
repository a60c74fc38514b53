"""After pytorch/examples vision_transformer: patches, a class token, pre-norm blocks, AdamW."""

import torch
import torch.nn.functional as F
from data import patterns
from torch import nn


class EncoderBlock(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.fc1, self.fc2, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class VisionTransformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.token, self.position = (
            nn.Parameter(torch.randn(1, 1, width)),
            nn.Parameter(torch.randn(1, 17, width) * 0.02),
        )
        self.encoders = nn.Sequential(*(EncoderBlock(width) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.position
        return self.head(self.norm(self.encoders(x))[:, 0])


def main():
    torch.manual_seed(0)
    images, labels = patterns(4000, 16)
    model, criterion = VisionTransformer(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for x, y in zip(images.split(16), labels.split(16)):
            optimizer.zero_grad()
            output = model(x)
            loss = criterion(output, y)
            loss.backward()
            optimizer.step()
            print("net", loss.item())
    print("figure", (output.argmax(1) == y).float().mean().item())


if __name__ == "__main__":
    main()
