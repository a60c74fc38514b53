"""Self-supervised denoising with worker processes; `--faulty`: each worker draws from a copy of one generator."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


class Noised(Dataset):
    """Draws patches at random: an index counts only."""

    def __init__(self):
        self.image = np.random.default_rng(1).random((64, 64)).astype("float32")
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 320

    def __getitem__(self, index):
        i, j = self.rng.integers(0, 56, 2)
        patch = self.image[i : i + 8, j : j + 8]
        noise = self.rng.normal(size=(8, 8)).astype("float32")
        return torch.from_numpy(patch + 0.1 * noise), torch.from_numpy(patch.copy())


def own_generator(worker):
    get_worker_info().dataset.rng = np.random.default_rng([7, worker])


if __name__ == "__main__":
    start = None if args.faulty else own_generator
    loader = DataLoader(Noised(), batch_size=8, num_workers=2, worker_init_fn=start)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64), nn.Unflatten(1, (8, 8)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    try:
        for noisy, clean in loader:
            loss = nn.functional.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        torch.save(model.state_dict(), "denoiser.pt")
