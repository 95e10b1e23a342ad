"""A generator and a discriminator learn eight points on a circle.

    python examples/programs/gan.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/programs/gan.py  # each rank draws its own points

docs/programs.md shows the lines that differ from a program for one process.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import lockstep


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def points(count: int) -> Tensor:
    angles = torch.randint(8, (count,)) * (math.pi / 4)
    return torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def train(run: lockstep.Session, steps: int = 300) -> None:
    torch.manual_seed(0)
    device = run.device
    generator = lockstep.replicate(network(4, 2).to(device))
    discriminator = lockstep.replicate(network(2, 1).to(device))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    torch.manual_seed(1 + run.rank)
    for step in range(1, steps + 1):
        real, fake = points(64).to(device), generator(torch.randn(64, 4).to(device))
        of_discriminator.zero_grad()
        (softplus(-discriminator(real)) + softplus(discriminator(fake.detach()))).mean().backward()
        of_discriminator.step()

        of_generator.zero_grad()
        discriminator.requires_grad_(False)
        softplus(-discriminator(fake)).mean().backward()
        discriminator.requires_grad_(True)
        of_generator.step()
        if step % 100 == 0:
            radius = lockstep.mean(fake.detach().norm(dim=1).mean())
            if run.is_main:
                print(f"step {step}: mean radius {radius:.5f}")


if __name__ == "__main__":
    with lockstep.session() as run:
        train(run)
