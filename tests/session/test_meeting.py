"""The store at which the ranks meet."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from lockstep.session import meeting
from lockstep.session.environment import Environment


def test_pytorchs_attempts_to_connect_end_with_the_time_out(monkeypatch):
    """Where nobody listens, PyTorch tries for twice as long as it is told, on a thread that nothing can end."""
    asked = []

    def store(*args, timeout, **options):
        asked.append(timeout)
        return dist.TCPStore(*args, timeout=timeout, **options)

    monkeypatch.setattr(meeting, "TCPStore", store)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = Environment(rank=0, world_size=2, address="127.0.0.1", port=port)
    made = meeting._connect(environment, timedelta(seconds=40))
    assert asked == [timedelta(seconds=20)]
    assert made.timeout == timedelta(seconds=40)
