"""The store at which the ranks meet."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import lockstep
from lockstep._base import telling
from lockstep.errors import CommunicationError
from lockstep.failures import ring
from lockstep.session import meeting
from lockstep.session.environment import Environment
from processes import be_launched, held_port, run_processes


@pytest.fixture
def port():
    with held_port() as port:
        yield port


def of_two(rank, port, address="127.0.0.1", **more):
    return Environment(rank=rank, world_size=2, address=address, port=port, **more)


def store_of(environment):
    return meeting._connect(environment, timedelta(seconds=40))


def test_pytorchs_attempts_to_connect_end_with_the_time_out(port, monkeypatch):
    """Where nobody listens, PyTorch tries for twice as long as it is told, on a thread that nothing can end."""
    asked = []

    def store(*args, timeout, **options):
        asked.append(timeout)
        return dist.TCPStore(*args, timeout=timeout, **options)

    monkeypatch.setattr(meeting, "TCPStore", store)
    made = store_of(of_two(0, port))
    assert asked == [timedelta(seconds=20)]
    assert made.timeout == timedelta(seconds=40)


def listens_everywhere(port):
    """Whether somebody listens at this port of every address."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    at = [local for _, local, _, state, *_ in lines if state == "0A" and local.endswith(f":{port:04X}")]
    assert at
    return any(not int(local.partition(":")[0], 16) for local in at)


@pytest.mark.parametrize(
    ("address", "on_host", "everywhere"), [("127.0.0.1", 0, False), ("localhost", 2, False), ("localhost", 1, True)]
)
def test_the_store_listens_on_loopback_if_all_ranks_are_there(address, on_host, everywhere):
    store = store_of(of_two(0, 0, address, local_world_size=on_host))
    assert listens_everywhere(store.port) == everywhere
    store.set("key", "value")
    assert store_of(of_two(1, store.port, address)).get("key") == b"value"


def test_two_sessions_of_a_process_share_a_store():
    store = store_of(of_two(0, 0))
    store.set("key", "value")
    assert store_of(of_two(0, store.port)).get("key") == b"value"


def test_a_port_at_which_somebody_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CommunicationError, match=rf"rank 0 .* 127.0.0.1:{port}: .*already in use.* as MASTER_PORT"):
            meeting._store(of_two(0, port), 10.0)


def test_a_rank_that_waits_for_the_store_names_it(port, monkeypatch, caplog):
    monkeypatch.setattr(telling, "FIRST_SECONDS", 0.1)
    with pytest.raises(CommunicationError, match="rank 0 of 2, at whose store"):
        meeting._wait_for_store(of_two(1, port), 0.5)
    (told,) = caplog.messages
    at = f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}"
    assert told.startswith(f"rank 1 waits for rank 0 of 2 to come: nobody answers at {at}")


def first_gives_up_first(rank, port):
    """Rank 1 never comes; rank 0, which hosts the store, gives up before rank 2 does."""
    dist.destroy_process_group()
    if rank.rank == 1:
        return
    be_launched(rank, port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    ring.LOOK_SECONDS = 0.05 if rank.rank == 0 else 1.0  # the other one looks after rank 0 has given up
    with lockstep.session(timeout=3.0 if rank.rank == 0 else 20.0):
        pass


def test_a_rank_that_never_comes_is_named_although_the_store_ends_with_rank_0(port):
    first, _, last = run_processes(3, first_gives_up_first, port, errors=True)
    for each in (first, last):
        assert str(each.error).startswith("rank 1 of 3 did not come within 3 s"), each
