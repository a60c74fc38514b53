"""stable-baselines3 2.9.2: acting and `train()` in turns; callbacks hear of the acting alone, and read the logger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HIDDEN, ROWS = 4, 16, 32


class BaseCallback:
    def __init__(self) -> None:
        self.model: Any = None

    @property
    def logger(self) -> Any:
        return self.model.logger


def mlp(out: int, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, out)
    )


class Extractor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy_net, self.value_net = (
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(2)
        )


class ActorCriticPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp_extractor = Extractor()
        self.action_net, self.value_net = nn.Linear(HIDDEN, 2), nn.Linear(HIDDEN, 1)
        self.optimizer = torch.optim.Adam(self.parameters(), 3e-4)

    def evaluate_actions(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.mlp_extractor
        return self.action_net(inner.policy_net(x)), self.value_net(inner.value_net(x))


class Net(nn.Module):
    def __init__(self, **nets: nn.Module) -> None:
        super().__init__()
        for name, net in nets.items():
            self.add_module(name, net)


class Policy(nn.Module):
    """Of DQN, SAC or TD3."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "DQN":
            self.q_net, self.q_net_target = Net(q_net=mlp(2)), Net(q_net=mlp(2))
            self.optimizer = torch.optim.Adam(self.q_net.parameters(), 1e-3)
            return
        self.actor = Net(mu=mlp(1)) if kind == "TD3" else Net(latent_pi=mlp(HIDDEN)[:4], mu=nn.Linear(HIDDEN, 1))
        self.actor.optimizer = torch.optim.Adam(self.actor.parameters(), 3e-4)
        self.critic, self.critic_target = (Net(qf0=mlp(1, WIDTH + 1), qf1=mlp(1, WIDTH + 1)) for _ in range(2))
        self.critic.optimizer = torch.optim.Adam(self.critic.parameters(), 3e-4)


class Algorithm:
    policy_delay, on_policy, acts = 1, False, 1

    def __init__(self, policy: str, environment: str, *, seed: int = 0, device: str = "cpu", **more: Any) -> None:
        torch.manual_seed(seed)
        self.policy = self.make()
        self.logger, self.updates = SimpleNamespace(name_to_value={}), 0
        self.wait = more.get("learning_starts", 0)

    def make(self) -> nn.Module:
        return Policy(type(self).__name__)

    def learn(self, steps: int, callback: Any) -> Any:
        callback = callback if isinstance(callback, list) else [callback]
        for one in callback:
            one.model = self
            one._on_training_start()
        done, goes_on = 0, True
        while done < steps and goes_on:
            for one in callback:
                one._on_rollout_start()
            for _ in range(self.acts):
                done += 1
                told = [one._on_step() for one in callback]
                goes_on = all(told)
            if done > self.wait and goes_on:
                self.train()
        for one in callback:
            one._on_training_end()
        return self

    def update(self, optimizer: Any, loss: Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss)

    def train(self) -> None:
        self.updates += 1
        x, policy = torch.randn(ROWS, WIDTH), self.policy
        if isinstance(self, DQN):
            with torch.no_grad():
                aim = policy.q_net_target.q_net(x).amax(1)
            answer = policy.q_net.q_net(x)[:, 0]
            self.logger.name_to_value["train/loss"] = self.update(
                policy.optimizer, (answer - aim - x[:, 0]).square().mean()
            )
            return
        actor, critic = policy.actor, policy.critic
        joint = torch.cat([x, torch.rand(ROWS, 1)], 1)
        loss = sum((net(joint) - x[:, :1]).square().mean() for net in (critic.qf0, critic.qf1))
        self.logger.name_to_value["train/critic_loss"] = self.update(critic.optimizer, loss)
        if self.updates % self.policy_delay == 0:
            inner = actor.mu(actor.latent_pi(x)) if hasattr(actor, "latent_pi") else actor.mu(x)
            self.update(actor.optimizer, -critic.qf0(torch.cat([x, inner.tanh()], 1)).mean())


class PPO(Algorithm):
    acts = 64
    repeats, logs = 2, "train/loss"

    def make(self) -> nn.Module:
        return ActorCriticPolicy()

    def train(self) -> None:
        for _ in range(self.repeats):
            x = torch.randn(ROWS, WIDTH)
            logits, value = self.policy.evaluate_actions(x)
            gain = torch.log_softmax(logits, 1)[:, 0] * x[:, 1]
            loss = (value[:, 0] - x[:, 0]).square().mean() - gain.mean()
            self.logger.name_to_value[self.logs] = self.update(self.policy.optimizer, loss)


class A2C(PPO):
    acts, repeats, logs = 5, 1, "train/policy_loss"


class DQN(Algorithm):
    acts = 4


class SAC(Algorithm):
    pass


class TD3(Algorithm):
    policy_delay = 2


MODULES: dict[str, dict[str, Any]] = {
    "stable_baselines3": {kind.__name__: kind for kind in (PPO, A2C, DQN, SAC, TD3)},
    "stable_baselines3.common.callbacks": {"BaseCallback": BaseCallback},
}
