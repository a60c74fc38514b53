"""One callback for the algorithms of stable-baselines3.

model = stable_baselines3.PPO("MlpPolicy", "CartPole-v1")
model.learn(10_000, callback=FlowscopeCallback(log_dir="runs/ppo"))
"""

from __future__ import annotations

from typing import Any

from flowscope.errors import FlowscopeError
from flowscope.integrations.trainer import BareWatch

try:
    from stable_baselines3.common.callbacks import BaseCallback
except ImportError as error:
    raise FlowscopeError(
        "flowscope.integrations.stable_baselines3 needs stable-baselines3, which is not installed: "
        'pip install "flowscope[stable_baselines3]".'
    ) from error

LOSSES = ("train/loss", "train/critic_loss", "train/policy_loss", "train/policy_gradient_loss")
"""The first of these that the algorithm logs is the loss."""


class FlowscopeCallback(BareWatch, BaseCallback):
    """Watches the policy that `learn` trains, with its optimizers in the order they step.

    A record is one step of the last optimizer: PPO's and A2C's only one, the actor's of SAC and the critic's of TD3,
    whose actor is delayed. The loss is what the algorithm logs of its latest `train()`. Target networks get no
    gradient, and no line says so.

    Args:
        **options: those of `flowscope.watch`, and `stop_on`.
    """

    def __init__(self, **options: Any) -> None:
        BaseCallback.__init__(self)
        BareWatch.__init__(self, **options)

    def _on_training_start(self) -> None:
        policy = self.model.policy
        parts = (getattr(policy, name, None) for name in ("critic", "actor"))
        optimizers = [found for part in parts if (found := getattr(part, "optimizer", None)) is not None]
        if getattr(self.model, "policy_delay", 1) > 1:
            optimizers.reverse()
        self._begin(policy, optimizers or policy.optimizer)

    def _on_rollout_start(self) -> None:
        logged = self.logger.name_to_value
        loss = next((logged[name] for name in LOSSES if name in logged), None)
        if loss is not None and self.scope is not None:
            self.scope.step(loss=float(loss))

    def _on_step(self) -> bool:
        return not self._stop_asked

    def _on_training_end(self) -> None:
        self._end()
