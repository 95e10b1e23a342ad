"""An actor and a critic learn to balance a pole, each rank in games of its own.

    python examples/programs/actor_critic.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/programs/actor_critic.py  # each rank plays other games

docs/programs.md shows the lines that differ from a program for one process.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import smooth_l1_loss

import lockstep

GAMES, STEPS, DISCOUNT = 32, 16, 0.98


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))


def push(states: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states of carts and poles 0.02 s after a push, and which poles have fallen."""
    speed, angle, turning = states[:, 1:].unbind(1)
    force = torch.where(right.bool(), 10.0, -10.0)
    pushed = (force + 0.05 * turning.square() * angle.sin()) / 1.1
    tipping = (9.8 * angle.sin() - angle.cos() * pushed) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
    moved = pushed - 0.05 * tipping * angle.cos() / 1.1
    states = states + 0.02 * torch.stack([speed, moved, turning, tipping], dim=1)
    return states, (states[:, 0].abs() > 2.4) | (states[:, 2].abs() > 0.21)


def train(run: lockstep.Session, updates: int = 80) -> None:
    torch.manual_seed(0)
    device = run.device
    actor, critic = lockstep.replicate(network(2).to(device)), lockstep.replicate(network(1).to(device))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=5e-3)
    torch.manual_seed(1 + run.rank)
    states, ended = 0.05 * torch.randn(GAMES, 4, device=device), 0
    for update in range(1, updates + 1):
        chosen, values, alive = [], [], []
        for _ in range(STEPS):
            policy = Categorical(logits=actor(states))
            actions = policy.sample()
            chosen.append(policy.log_prob(actions))
            values.append(critic(states).squeeze(1))
            states, fallen = push(states, actions)
            ended += int(fallen.sum())
            alive.append(1.0 - fallen.float())
            states = torch.where(fallen[:, None], 0.05 * torch.randn(GAMES, 4, device=device), states)
        returns, goal = [], critic(states).squeeze(1).detach()
        for going_on in reversed(alive):
            goal = going_on * (1 + DISCOUNT * goal)
            returns.insert(0, goal)
        goals, guesses = torch.stack(returns), torch.stack(values)
        advantages = (goals - guesses).detach()
        loss = smooth_l1_loss(guesses, goals) - (torch.stack(chosen) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 20 == 0:
            games = lockstep.mean(float(ended))
            if run.is_main:
                print(f"update {update}: a game lasts {20 * STEPS * GAMES / games:.3f} steps")
            ended = 0


if __name__ == "__main__":
    with lockstep.session() as run:
        train(run)
