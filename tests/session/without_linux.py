"""A program that trains where the names are missing that Python has on Linux alone; started as a rank, or alone."""

import fcntl
import os
import socket

for module, beginnings in {
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_"),
    os: ("memfd_create", "MFD_", "eventfd", "EFD_", "sched_getaffinity", "sched_setaffinity", "pidfd_open", "P_PIDFD"),
    socket: ("SO_PEERCRED", "SCM_CREDENTIALS"),
}.items():
    for name in dir(module):
        if name.startswith(beginnings):
            delattr(module, name)

import torch  # noqa: E402

import lockstep  # noqa: E402


def train() -> None:
    with lockstep.session(device="cpu", backend="gloo") as run:
        model = lockstep.replicate(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in run.batches([torch.ones(1, 2)] * (2 + run.rank)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        lockstep.check_in_sync(model)
        print(f"rank {run.rank} of {run.world_size} has made {run.step} steps\n", end="")  # written at once


if __name__ == "__main__":
    if "RANK" not in os.environ:
        assert lockstep.DataParallel(torch.nn.Linear(2, 1), ["cpu", "cpu"])(torch.ones(4, 2)).shape == (4, 1)
    train()
