"""After pytorch/examples reinforcement_learning/actor_critic: one net with two heads, losses of both summed."""

import torch
import torch.nn.functional as F
from data import CartPole
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.action_head, self.value_head = nn.Linear(4, 64), nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def main():
    torch.manual_seed(543)
    env, model, running = CartPole(), Policy(), 10.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(500):
        state, over, taken, rewards = env.reset(), False, [], []
        while not over and len(rewards) < 30:
            chances, value = model(state)
            chances = Categorical(chances)
            action = chances.sample()
            taken.append((chances.log_prob(action), value))
            state, reward, over = env.step(int(action))
            rewards.append(reward)
        running = 0.05 * len(rewards) + 0.95 * running
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        policy_losses = [-log * (target - value.item()) for (log, value), target in zip(taken, returns)]
        value_losses = [F.smooth_l1_loss(value, target.view(1)) for (_, value), target in zip(taken, returns)]
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        print("net", loss.item())
    print("figure", running)


if __name__ == "__main__":
    main()
