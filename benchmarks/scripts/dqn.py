"""After vwxyzjn/cleanrl dqn.py: a replay buffer, a target net that is copied every 100 steps, acting under no_grad."""

import random

import torch
import torch.nn.functional as F
from data import CartPole
from torch import nn


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        return self.network(x)


def main():
    torch.manual_seed(1)
    random.seed(1)
    env, q_network, target_network = CartPole(), QNetwork(), QNetwork()
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-3)
    target_network.load_state_dict(q_network.state_dict())
    buffer, state, lengths = [], env.reset(), []
    for step in range(1500):
        if random.random() < max(0.05, 1 - step / 800):
            action = random.randrange(2)
        else:
            with torch.no_grad():
                action = int(q_network(state).argmax())
        following, reward, over = env.step(action)
        buffer.append((state, action, following, reward, float(over)))
        if over:
            lengths.append(env.steps)
        state = env.reset() if over else following
        if step < 500 or step % 2:
            continue
        states, actions, followings, rewards, overs = zip(*random.sample(buffer, 64))
        with torch.no_grad():
            best = target_network(torch.stack(followings)).max(dim=1).values
            target = torch.tensor(rewards) + 0.99 * best * (1 - torch.tensor(overs))
        old = q_network(torch.stack(states)).gather(1, torch.tensor(actions).unsqueeze(1)).squeeze()
        loss = F.mse_loss(target, old)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("net", loss.item())
        if step % 200 == 0:
            target_network.load_state_dict(q_network.state_dict())
    print("figure", sum(lengths[-5:]) / 5)


if __name__ == "__main__":
    main()
