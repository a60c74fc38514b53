"""After pytorch/examples reinforcement_learning/reinforce: one step an episode, normalised returns."""

import torch
import torch.nn.functional as F
from data import CartPole
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.dropout, self.affine2 = nn.Linear(4, 64), nn.Dropout(p=0.3), nn.Linear(64, 2)

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=1)


def main():
    torch.manual_seed(543)
    env, policy, running = CartPole(), Policy(), 10.0
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(500):
        state, over, logs, rewards = env.reset(), False, [], []
        while not over and len(rewards) < 30:
            chances = Categorical(policy(state.unsqueeze(0)))
            action = chances.sample()
            logs.append(chances.log_prob(action))
            state, reward, over = env.step(int(action))
            rewards.append(reward)
        running = 0.05 * len(rewards) + 0.95 * running
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        optimizer.zero_grad()
        loss = torch.cat([-log * value for log, value in zip(logs, returns)]).sum()
        loss.backward()
        optimizer.step()
        print("net", loss.item())
    print("figure", running)


if __name__ == "__main__":
    main()
