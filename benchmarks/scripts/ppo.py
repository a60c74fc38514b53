"""After vwxyzjn/cleanrl ppo.py: an agent that is only called through methods, annealed rate, clipped surrogate."""

import numpy as np
import torch
from data import CartPole
from torch import nn
from torch.distributions import Categorical


def layer_init(layer, std=np.sqrt(2), bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        into = np.array((4,)).prod()  # gym's shapes are numpy's

        def tower(out, std):
            layers = layer_init(nn.Linear(into, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()
            return nn.Sequential(*layers, layer_init(nn.Linear(64, out), std))

        self.critic, self.actor = tower(1, 1.0), tower(2, 0.01)

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        chances = Categorical(logits=self.actor(x))
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action), chances.entropy(), self.critic(x)


def main():
    torch.manual_seed(1)
    envs = [CartPole(seed) for seed in range(4)]
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    state, lengths, updates = torch.stack([env.reset() for env in envs]), [], 32
    done = torch.zeros(4)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = (1 - update / updates) * 2.5e-4
        taken = []
        for _ in range(32):
            with torch.no_grad():
                action, log, _, value = agent.get_action_and_value(state)
            after = [env.step(int(a)) for env, a in zip(envs, action)]
            lengths += [env.steps for env, (_, _, over) in zip(envs, after) if over]
            taken.append((state, action, log, value.flatten(), torch.tensor([r for _, r, _ in after]), done))
            done = torch.tensor([float(over) for *_, over in after])
            state = torch.stack([env.reset() if over else s for env, (s, _, over) in zip(envs, after)])
        states, actions, logs, values, rewards, dones = (torch.stack(column) for column in zip(*taken))
        with torch.no_grad():
            following = agent.get_value(state).flatten()
        advantages, last, alive = torch.zeros_like(rewards), 0.0, 1 - done
        for t in reversed(range(32)):
            last = rewards[t] + 0.99 * following * alive - values[t] + 0.99 * 0.95 * alive * last
            advantages[t], following, alive = last, values[t], 1 - dones[t]
        returns = advantages + values
        flat = [z.flatten(0, 1) for z in (states, actions, logs, advantages, returns)]
        for _ in range(4):
            for rows in torch.randperm(128).split(32):
                s, a, old, advantage, target = (z[rows] for z in flat)
                _, new, entropy, value = agent.get_action_and_value(s, a)
                ratio = (new - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                pg_loss = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
                v_loss = 0.5 * ((value.flatten() - target) ** 2).mean()
                loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                print("net", loss.item())
    print("figure", sum(lengths[-10:]) / 10)


if __name__ == "__main__":
    main()
