"""What each rank runs whose host is far: a session and a step. It marks what the wires have counted (``wire.py``).

Its arguments are a folder, the backend ("" for what the session chooses), and the address of another host.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn

import lockstep
import lockstep.session.start  # before the first mark: round trips are counted by the time that they take
from hosts.wire import MARK

FOLDER, BACKEND, OTHER = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


def mark(text: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as marks:
        marks.sendto(text.encode(), (OTHER, MARK))


def step(module: nn.Module, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model(torch.ones(16, 64)).sum().backward()
    optimizer.step()


def wait_for_all() -> None:
    """Wait until all ranks have imported what they need: who comes first looks for the others until they are there."""
    (FOLDER / os.environ["RANK"]).touch()
    while not all((FOLDER / str(rank)).exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)


torch.set_num_threads(1)
module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
step(module, module)
wait_for_all()
mark("begin")
with lockstep.session(backend=BACKEND or None, timeout=60.0):
    mark("session")
    model = lockstep.replicate(module)
    mark("replicated")
    step(module, model)
    mark("first step")
