"""Reinforcement learning: healthy agents of seven kinds, and seven that go wrong as people report it."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from .program import Program, Watch
from .toys import CartPole, Catch, Reach, Replay, catch_score, pole_time, reach_score


def explore(values: Tensor, rate: float) -> Tensor:
    """Epsilon-greedy actions (N,) from values (N, A)."""
    chance = torch.rand(len(values)) < rate
    return torch.where(chance, torch.randint(values.shape[1], (len(values),)), values.argmax(1))


def dqn(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    target = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, amsgrad=True)
    memory, world = Replay(4000), Catch(8)
    seen = world.see()
    scope = watch(policy, optimizer)
    for step in range(1600):
        with torch.no_grad():
            action = explore(policy(seen), 0.05 + 0.85 * math.exp(-step / 300))
            then, reward, landed = world.step(action)
        memory.add(seen, action, reward, then, torch.full((8,), float(landed)))
        seen = then
        s, a, r, s2, over = memory.draw(64)
        value = policy(s).gather(1, a[:, None])
        with torch.no_grad():
            goal = r + 0.95 * (1 - over) * target(s2).max(1).values
        loss = F.smooth_l1_loss(value, goal[:, None])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        scope.step(loss=loss)
        if step % 100 == 0:
            target.load_state_dict(policy.state_dict())
    return catch_score(lambda s: policy(s).argmax(1))


class Dueling(nn.Module):
    """A body, a value and an advantage of each action."""

    def __init__(self, inputs: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value, self.advantage = nn.Linear(width, 1), nn.Linear(width, actions)

    def forward(self, s: Tensor) -> Tensor:
        h = self.body(s)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(1, keepdim=True)


class DoubleAgent(nn.Module):
    """The online and the target network of one agent."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Dueling(4, 2)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        for mean, value in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mean.lerp_(value, rate)


def double_dqn(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    agent = DoubleAgent()
    optimizer = torch.optim.Adam(agent.online.parameters(), lr=1e-3)
    memory, world = Replay(6000), CartPole(8)
    s = world.state
    with watch(agent, optimizer) as scope:
        for step in range(1000):
            with torch.no_grad():
                a = explore(agent.online(s), max(0.05, 1 - step / 300))
                s2, r, over = world.step(a)
            memory.add(s, a, r, s2, over.float())
            s = s2
            if step < 20:  # no training before there is something to draw from
                continue
            bs, ba, br, bs2, bover = memory.draw(64)
            best = agent.online(bs2).argmax(1, keepdim=True)
            goal = br + 0.97 * (1 - bover) * agent.target(bs2).gather(1, best).squeeze(1)
            loss = F.smooth_l1_loss(agent.online(bs).gather(1, ba[:, None]).squeeze(1), goal.detach())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.online.parameters(), 10)
            optimizer.step()
            agent.follow(0.01)
            scope.step(loss=loss)
    return pole_time(lambda s: agent.online(s).argmax(1))


def orthogonal(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """Separate actor and critic of CleanRL's ppo.py."""

    def __init__(self, inputs: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            *(orthogonal(inputs, width), nn.Tanh(), orthogonal(width, width), nn.Tanh(), orthogonal(width, 1, 1.0))
        )
        self.actor = nn.Sequential(
            *(
                orthogonal(inputs, width),
                nn.Tanh(),
                orthogonal(width, width),
                nn.Tanh(),
                orthogonal(width, actions, 0.01),
            )
        )


class Rollout(NamedTuple):
    """T steps of N worlds: states (T, N, D), actions, log-probabilities, rewards, ends and values (T, N)."""

    states: Tensor
    actions: Tensor
    chances: Tensor
    rewards: Tensor
    ends: Tensor
    values: Tensor


@torch.no_grad()
def roll(agent: ActorCritic, world: CartPole, T: int) -> tuple[Rollout, Tensor]:
    """A rollout and the value of the states it ends in."""
    rows = []
    for _ in range(T):
        s = world.state
        policy = Categorical(logits=agent.actor(s))
        a = policy.sample()
        value = agent.critic(s).squeeze(1)
        _, r, over = world.step(a)
        rows.append((s, a, policy.log_prob(a), r, over.float(), value))
    return Rollout(*(torch.stack(column) for column in zip(*rows, strict=True))), agent.critic(world.state).squeeze(1)


def generalised_advantage(roll: Rollout, last: Tensor, discount: float = 0.98, decay: float = 0.95) -> Tensor:
    advantage, ahead, total = torch.zeros_like(roll.values), last, torch.zeros_like(last)
    for t in reversed(range(len(roll.values))):
        alive = 1 - roll.ends[t]
        total = roll.rewards[t] + discount * ahead * alive - roll.values[t] + discount * decay * alive * total
        advantage[t], ahead = total, roll.values[t]
    return advantage


def ppo(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    agent, world = ActorCritic(4, 2), CartPole(8)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    scope = watch(agent, optimizer)
    rounds = 35
    for turn in range(rounds):
        optimizer.param_groups[0]["lr"] = 2.5e-3 * (1 - turn / rounds)
        data, last = roll(agent, world, 32)
        advantages = generalised_advantage(data, last)
        goals = (advantages + data.values).flatten()
        s, a, chance = data.states.flatten(0, 1), data.actions.flatten(), data.chances.flatten()
        for _ in range(4):
            for rows in torch.randperm(len(a)).chunk(4):
                policy = Categorical(logits=agent.actor(s[rows]))
                ratio = (policy.log_prob(a[rows]) - chance[rows]).exp()
                gain = advantages.flatten()[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                loss_policy = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
                loss_value = 0.5 * (agent.critic(s[rows]).squeeze(1) - goals[rows]).square().mean()
                loss = loss_policy + 0.5 * loss_value - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                scope.step(loss=loss)
    return pole_time(lambda s: agent.actor(s).argmax(1))


class Shared(nn.Module):
    """One body with an actor's and a critic's head."""

    def __init__(self, inputs: int, actions: int, width: int = 64, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), act(), nn.Linear(width, width), act())
        self.actor, self.critic = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, s: Tensor) -> tuple[Categorical, Tensor]:
        h = self.body(s)
        return Categorical(logits=self.actor(h)), self.critic(h).squeeze(1)


def actor_critic(
    seed: int, watch: Watch, *, steps: int = 350, scale: float = 1.0, entropy: float = 0.01, clip: float = 0.5
) -> float:
    """Advantage actor-critic on Catch, an update each ball, with the settings of ikostrikov's repository."""
    torch.manual_seed(seed)
    net, world = Shared(16, 3), Catch(16)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3, eps=1e-5, alpha=0.99)
    scope = watch(net, optimizer)
    for _ in range(steps):
        chances, values, rewards, entropies, landed = [], [], [], [], False
        while not landed:
            policy, value = net(world.see())
            a = policy.sample()
            _, r, landed = world.step(a)
            chances.append(policy.log_prob(a))
            values.append(value)
            rewards.append(scale * r)
            entropies.append(policy.entropy())
        returns, total = [], torch.zeros(16)
        for r in reversed(rewards):
            total = r + 0.95 * total
            returns.insert(0, total)
        advantage = torch.stack(returns) - torch.stack(values)
        loss_policy = -(advantage.detach() * torch.stack(chances)).mean()
        loss = loss_policy + 0.5 * advantage.square().mean() - entropy * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scope.step(loss=loss)
    return catch_score(lambda s: net(s)[0].logits.argmax(1))


def a2c(seed: int, faulty: bool, watch: Watch) -> float:
    return actor_critic(seed, watch)


def reward_scale(seed: int, faulty: bool, watch: Watch) -> float:
    """Rewards in raw units of a million: the value's gradient leaves nothing of the policy's after clipping."""
    return actor_critic(seed, watch, steps=300, scale=1e6 if faulty else 1.0)


class Reinforce(nn.Module):
    """The policy of pytorch/examples, with dropout, and a value beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.affine1, self.dropout, self.affine2 = nn.Linear(16, 96), nn.Dropout(0.3), nn.Linear(96, 3)
        self.baseline = nn.Linear(16, 1)

    def forward(self, s: Tensor) -> Tensor:
        return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(s)))), dim=1)


def reinforce(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    net, world = Reinforce(), Catch(12)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    with watch(net, optimizer) as scope:
        for _ in range(500):
            seen, chances, landed = [], [], False
            while not landed:
                s = world.see()
                policy = Categorical(net(s))
                a = policy.sample()
                _, reward, landed = world.step(a)
                seen.append(s)
                chances.append(policy.log_prob(a))
            length = len(seen)
            returns = torch.stack([0.95 ** (length - 1 - t) * reward for t in range(length)])
            baseline = net.baseline(torch.stack(seen)).squeeze(2)
            advantage = returns - baseline.detach()
            loss = -(torch.stack(chances) * advantage).sum(0).mean() + F.mse_loss(baseline, returns)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    net.eval()
    return catch_score(lambda s: net(s).argmax(1))


def q_net(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


class SoftAgent(nn.Module):
    """Actor, two critics with targets, and the temperature of soft actor-critic."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mean, self.log_std = nn.Linear(64, 2), nn.Linear(64, 2)
        self.q1, self.q2 = q_net(), q_net()
        self.q1_target = copy.deepcopy(self.q1).requires_grad_(False)
        self.q2_target = copy.deepcopy(self.q2).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    def act(self, s: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(s)
        log_std = -5 + 0.5 * 7 * (torch.tanh(self.log_std(h)) + 1)
        normal = Normal(self.mean(h), log_std.exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        return action, (normal.log_prob(raw) - (1 - action.square() + 1e-6).log()).sum(1)

    def least(self, s: Tensor, a: Tensor, target: bool = False) -> Tensor:
        x = torch.cat([s, a], 1)
        pair = (self.q1_target, self.q2_target) if target else (self.q1, self.q2)
        return torch.min(pair[0](x), pair[1](x)).squeeze(1)

    @torch.no_grad()
    def follow(self, rate: float = 0.02) -> None:
        for target, source in ((self.q1_target, self.q1), (self.q2_target, self.q2)):
            for mean, value in zip(target.parameters(), source.parameters(), strict=True):
                mean.lerp_(value, rate)


def sac(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    agent, world, memory = SoftAgent(), Reach(8), Replay(4000)
    optimizer_q = torch.optim.Adam([*agent.q1.parameters(), *agent.q2.parameters()], lr=1e-3)
    actor = [*agent.trunk.parameters(), *agent.mean.parameters(), *agent.log_std.parameters()]
    optimizer_a = torch.optim.Adam(actor, lr=1e-3)
    optimizer_alpha = torch.optim.Adam([agent.log_alpha], lr=1e-3)
    scope = watch(agent, [optimizer_q, optimizer_a, optimizer_alpha])
    for step in range(450):
        s = world.see()
        with torch.no_grad():
            a = agent.act(s)[0] if step > 50 else 2 * torch.rand(8, 2) - 1
        s2, r, _ = world.step(a)
        memory.add(s, a, r, s2)
        bs, ba, br, bs2 = memory.draw(64)
        with torch.no_grad():
            a2, chance = agent.act(bs2)
            goal = br + 0.9 * (agent.least(bs2, a2, target=True) - agent.log_alpha.exp() * chance)
        x = torch.cat([bs, ba], 1)
        loss_q = F.mse_loss(agent.q1(x).squeeze(1), goal) + F.mse_loss(agent.q2(x).squeeze(1), goal)
        optimizer_q.zero_grad()
        loss_q.backward()
        optimizer_q.step()
        action, chance = agent.act(bs)
        loss_a = (agent.log_alpha.exp().detach() * chance - agent.least(bs, action)).mean()
        optimizer_a.zero_grad()
        loss_a.backward()
        optimizer_a.step()
        loss_alpha = (-agent.log_alpha.exp() * (chance.detach() - 2)).mean()
        optimizer_alpha.zero_grad()
        loss_alpha.backward()
        optimizer_alpha.step()
        agent.follow()
        scope.step(loss=loss_q)
    return reach_score(lambda s: torch.tanh(agent.mean(agent.trunk(s))))


class Actor(nn.Module):
    """A deterministic policy with a bounded answer."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.l1, self.l2, self.l3 = nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 2)

    def forward(self, s: Tensor) -> Tensor:
        return torch.tanh(self.l3(F.relu(self.l2(F.relu(self.l1(s * self.scale))))))


class Twins(nn.Module):
    """The two critics of TD3."""

    def __init__(self) -> None:
        super().__init__()
        self.q1, self.q2 = q_net(), q_net()

    def forward(self, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([s, a], 1)
        return self.q1(x), self.q2(x)


def td3(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    actor, critic, world, memory = Actor(), Twins(), Reach(8), Replay(4000)
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    optimizer_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
    optimizer_q = torch.optim.Adam(critic.parameters(), lr=1e-3)
    scope_a, scope_q = watch(actor, optimizer_a), watch(critic, optimizer_q)
    for step in range(700):
        s = world.see()
        with torch.no_grad():
            a = (actor(s) + 0.3 * torch.randn(8, 2)).clamp(-1, 1)
        s2, r, _ = world.step(a)
        memory.add(s, a, r, s2)
        bs, ba, br, bs2 = memory.draw(64)
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(ba)).clamp(-0.5, 0.5)
            a2 = (actor_target(bs2) + noise).clamp(-1, 1)
            goal = br[:, None] + 0.9 * torch.min(*critic_target(bs2, a2))
        q1, q2 = critic(bs, ba)
        loss_q = F.mse_loss(q1, goal) + F.mse_loss(q2, goal)
        optimizer_q.zero_grad()
        loss_q.backward()
        optimizer_q.step()
        scope_q.step(loss=loss_q)
        if step % 2:
            continue
        loss_a = -critic(bs, actor(bs))[0].mean()
        optimizer_a.zero_grad()
        loss_a.backward()
        optimizer_a.step()
        scope_a.step(loss=loss_a)
        with torch.no_grad():
            for target, source in ((actor_target, actor), (critic_target, critic)):
                for mean, value in zip(target.parameters(), source.parameters(), strict=True):
                    mean.lerp_(value, 0.02)
    return reach_score(actor)


def actor_without_gradient(seed: int, faulty: bool, watch: Watch) -> float:
    """The log-probabilities are those of the rollout, which ran under no_grad; the value loss trains on."""
    torch.manual_seed(seed)
    agent, world = ActorCritic(4, 2, 48), CartPole(16)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    scope = watch(agent, optimizer)
    for _ in range(200):
        data, last = roll(agent, world, 16)
        advantages = generalised_advantage(data, last)
        goals = advantages + data.values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        policy = Categorical(logits=agent.actor(data.states)) if not faulty else None
        chances = policy.log_prob(data.actions) if policy else data.chances
        loss_value = F.smooth_l1_loss(agent.critic(data.states).squeeze(2), goals)
        loss = -(chances * advantages).mean() + 0.5 * loss_value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    return pole_time(lambda s: Categorical(logits=agent.actor(s)).sample())


def bootstrap_diverges(seed: int, faulty: bool, watch: Watch) -> float:
    """Fitted Q-learning on stored transitions; the faulty form chases its own values and never ends an episode."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 128), nn.ELU(), nn.Linear(128, 128), nn.ELU(), nn.Linear(128, 2))
    target = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    world, rows = CartPole(32), []
    for _ in range(60):
        s, a = world.state, torch.randint(2, (32,))
        s2, r, over = world.step(a)
        rows.append((s, a, r, s2, over.float()))
    memory = Replay(10_000)
    memory.add(*(torch.cat(column) for column in zip(*rows, strict=True)))
    scale = torch.tensor([1.0, 1.0, 5.0, 1.0])
    scope = watch(net, optimizer)
    for step in range(600):
        s, a, r, s2, over = memory.draw(64)
        if step % 20 == 0:
            target.load_state_dict(net.state_dict())
        ahead = net(s2 * scale) if faulty else target(s2 * scale).detach()
        goal = r + (1.05 if faulty else 0.9 * (1 - over)) * ahead.max(1).values.detach()
        loss = (net(s * scale).gather(1, a[:, None]).squeeze(1) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return -net(memory.rows[0] * scale).abs().max().item()


def entropy_sign(seed: int, faulty: bool, watch: Watch) -> float:
    """A policy over 8 arms that depend on the context; the entropy is punished where it should be rewarded."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(12, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    truth = torch.randn(12, 8)
    scope = watch(net, optimizer)
    for _ in range(500):
        s = torch.randn(64, 12)
        policy = Categorical(logits=net(s))
        a = policy.sample()
        reward = (a == (s @ truth).argmax(1)).float()
        loss_policy = -(policy.log_prob(a) * (reward - reward.mean())).mean()
        bonus = 0.5 if faulty else 0.01
        loss = loss_policy + bonus * policy.entropy().mean() * (1 if faulty else -1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    s = torch.randn(2000, 12)
    return (net(s).argmax(1) == (s @ truth).argmax(1)).float().mean().item()


def actor_saturated(seed: int, faulty: bool, watch: Watch) -> float:
    """A deterministic actor (DDPG) that is fed positions in millimetres: its tanh is flat from the first step."""
    torch.manual_seed(seed)
    agent = nn.ModuleDict({"actor": Actor(1000.0 if faulty else 1.0), "critic": q_net(96)})
    actor, critic = agent["actor"], agent["critic"]
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    optimizer_a = torch.optim.Adam(actor.parameters(), lr=5e-4)
    optimizer_q = torch.optim.Adam(critic.parameters(), lr=1e-3, weight_decay=1e-4)
    world, memory = Reach(8), Replay(3000)
    scope = watch(agent, [optimizer_q, optimizer_a])
    for _ in range(500):
        s = world.see()
        with torch.no_grad():
            a = (actor(s) + 0.3 * torch.randn(8, 2)).clamp(-1, 1)
        s2, r, _ = world.step(a)
        memory.add(s, a, r, s2)
        bs, ba, br, bs2 = memory.draw(48)
        with torch.no_grad():
            goal = br[:, None] + 0.9 * critic_target(torch.cat([bs2, actor_target(bs2)], 1))
        loss_q = F.mse_loss(critic(torch.cat([bs, ba], 1)), goal)
        optimizer_q.zero_grad()
        loss_q.backward()
        optimizer_q.step()
        loss_a = -critic(torch.cat([bs, actor(bs)], 1)).mean()
        optimizer_a.zero_grad()
        loss_a.backward()
        optimizer_a.step()
        scope.step(loss=loss_q)
        with torch.no_grad():
            for target, source in ((actor_target, actor), (critic_target, critic)):
                for mean, value in zip(target.parameters(), source.parameters(), strict=True):
                    mean.lerp_(value, 0.02)
    return reach_score(actor)


class ValueNet(nn.Module):
    """A value of what the last four moments looked like."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 32, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.gru(x)[0][:, -1]))


def critic_broadcast(seed: int, faulty: bool, watch: Watch) -> float:
    """Values (B, 1) minus returns (B,): every value is compared with every return, and the best answer is the mean."""
    torch.manual_seed(seed)
    net = ValueNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    x = torch.randn(1500, 4, 3)
    returns = (x.sum(1) * torch.tensor([1.0, -0.7, 0.4])).sum(1) * torch.linspace(0.5, 1, 1500).mean()
    x_test, test = x[1000:], returns[1000:]
    scope = watch(net, optimizer)
    for _ in range(500):
        rows = torch.randint(1000, (64,))
        value = net(x[rows])
        if not faulty:
            value = value.squeeze(1)
        loss = (value - returns[rows]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return 1 - ((net(x_test).squeeze(1) - test).square().mean() / test.var()).item()


def tiny_clip(seed: int, faulty: bool, watch: Watch) -> float:
    """A policy gradient with plain SGD; the norm is clipped at 1e-6 (a default of another unit)."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scope = watch(net, optimizer)
    for _ in range(400):
        world, chances, landed = Catch(24), [], False
        while not landed:
            policy = Categorical(logits=net(world.see()))
            a = policy.sample()
            _, reward, landed = world.step(a)
            chances.append(policy.log_prob(a))
        loss = -(torch.stack(chances).mean(0) * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-6 if faulty else 1.0)
        optimizer.step()
        scope.step(loss=loss)
    return catch_score(lambda s: net(s).argmax(1))


PROGRAMS = [
    Program("rl_dqn_hard_target", "the DQN tutorial of PyTorch", dqn, 0.7),
    Program("rl_double_dqn_soft_target", "dueling double DQN, target inside the watched agent", double_dqn, 80),
    Program("rl_ppo", "ppo.py of CleanRL: annealed rate, clipped at 0.5", ppo, 100),
    Program("rl_a2c", "ikostrikov/pytorch-a2c-ppo-acktr-gail", a2c, 0.5),
    Program("rl_reinforce_baseline", "reinforce.py of pytorch/examples with a learned baseline", reinforce, 0.5),
    Program("rl_sac_alpha", "sac_continuous_action.py of CleanRL with a learned temperature", sac, -0.35),
    Program("rl_td3_delayed", "sfujim/TD3, actor and critics in two watches", td3, -0.35),
    Program(
        "rl_actor_without_gradient",
        "actor-critic scripts that store log_prob during a rollout under no_grad",
        actor_without_gradient,
        bar=80,
        low=40,
        fault="the policy loss is built from log-probabilities without a graph",
        kinds=frozenset({"no_gradient", "stale_parameters"}),
        place=r"^actor",
    ),
    Program(
        "rl_reward_scale",
        "ikostrikov's A2C on an environment whose rewards are raw amounts of money",
        reward_scale,
        bar=0.5,
        low=0.2,
        fault="rewards of 1e6: the value's gradient is all that clipping leaves",
        kinds=frozenset({"over_clipped", "exploding_gradient"}),
    ),
    Program(
        "rl_bootstrap_diverges",
        "fitted Q-learning without a target network, ends of episodes ignored, discount above 1",
        bootstrap_diverges,
        bar=-50,
        low=-500,
        fault="values grow without bound",
        kinds=frozenset({"non_finite", "exploding_gradient", "gradient_spike", "loss_spike", "update_too_large"}),
        starts=5,
    ),
    Program(
        "rl_entropy_sign",
        "policy gradient with `loss + beta * entropy`",
        entropy_sign,
        bar=0.65,
        low=0.5,
        fault="entropy is minimised: the policy is certain before it knows anything, and learns no more",
        kinds=frozenset({"vanishing_gradient", "update_too_small", "saturation", "constant_output", "loss_plateau"}),
        starts=10,
    ),
    Program(
        "rl_actor_saturated",
        "DDPG reports of actions stuck at -1 and 1 where observations are not normalised",
        actor_saturated,
        bar=-0.35,
        low=-0.6,
        fault="unscaled observations saturate the actor's tanh",
        kinds=frozenset({"saturation", "vanishing_gradient", "no_gradient"}),
        place=r"actor",
    ),
    Program(
        "rl_critic_broadcast",
        "critic losses with values (B, 1) and returns (B,)",
        critic_broadcast,
        bar=0.7,
        low=0.2,
        fault="the loss broadcasts to (B, B)",
        kinds=frozenset({"constant_output", "representation_collapse"}),
    ),
    Program(
        "rl_tiny_clip",
        "REINFORCE with SGD and max_grad_norm=1e-6",
        tiny_clip,
        bar=0.1,
        low=-0.2,
        fault="the gradient is clipped to nothing",
        kinds=frozenset({"over_clipped", "update_too_small"}),
    ),
]
