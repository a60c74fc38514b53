"""A shared trunk with an actor and a critic; `--faulty`: the critic's optimizer also holds the trunk and the actor."""

import argparse

import torch
import torch.nn as nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.actor = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
        self.critic = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, state):
        h = self.trunk(state)
        return self.actor(h), self.critic(h).squeeze(-1)


net = ActorCritic()
own = [*net.trunk.parameters(), *net.actor.parameters()]
actor_optimizer = torch.optim.Adam(own, 3e-4)
critic_optimizer = torch.optim.Adam(net.parameters() if args.faulty else net.critic.parameters(), 1e-3)
try:
    for _episode in range(30):
        state = torch.randn(32, 6)
        logits, value = net(state)
        policy = Categorical(logits=logits)
        action = policy.sample()
        reward = (action == state[:, :3].argmax(1)).float()
        advantage = reward - value.detach()
        loss = -(policy.log_prob(action) * advantage).mean() - 0.01 * policy.entropy().mean()
        loss = loss + 0.5 * (value - reward).pow(2).mean()
        actor_optimizer.zero_grad()
        critic_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()
        critic_optimizer.step()
finally:
    torch.save(net.state_dict(), "actor_critic.pth")
