"""Connections of Gloo that are ended under it: whoever waits raises at once, and nothing waits for a time-out."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from datetime import timedelta
from random import Random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep.failures import connections
from lockstep.failures.connections import Connections, SilentPeers
from lockstep.session.watch import _find_connections_of_gloo
from processes import on_processes


@pytest.mark.parametrize(("numel", "rounds"), [(3, 40), (1_000_000, 10)])
@on_processes(3)
def test_no_send_is_lost_when_connections_end_while_collectives_run(rank, numel, rounds):
    """Each rank ends its connections at a moment of its own. Gloo forgets a send that fails before it has noticed the
    end of the connection: it would wait for 10 s."""
    numbers = Random(rank.rank)
    for _ in range(rounds):
        group, connections = dist.new_group(timeout=timedelta(seconds=10)), Connections()
        _find_connections_of_gloo(group, connections)
        end = threading.Timer(numbers.uniform(0.0, 0.001), connections.shut_down)
        values = torch.ones(numel)
        dist.barrier()
        end.start()
        with pytest.raises(RuntimeError) as raised:
            while True:
                dist.all_reduce(values, group=group)
        assert "Timed out" not in str(raised.value)
        end.join()
        dist.barrier()
        connections.close()
        dist.destroy_process_group(group)


@on_processes(2)
def test_a_peer_notices_when_the_connections_are_closed(rank):
    """What a rank that has not shut anything down hears of one that has, after that one has closed."""
    group, connections = dist.new_group(timeout=timedelta(seconds=20)), Connections()
    _find_connections_of_gloo(group, connections)
    dist.barrier()
    if rank.rank == 0:
        connections.shut_down()
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        connections.close()
        dist.barrier()
    else:
        dist.barrier()
        dist.barrier()
        with pytest.raises(RuntimeError) as heard:
            dist.all_reduce(torch.ones(1), group=group)
        assert "Timed out" not in str(heard.value)


def test_a_peer_that_has_acknowledged_everything_is_not_silent():
    """Hosts that fall silent are in tests/hosts."""
    with socket.create_server(("127.0.0.2", 0)) as listener, socket.create_connection(listener.getsockname()) as busy:
        busy.sendall(b"x")
        listener.accept()[0].close()
        peers = SilentPeers()
        assert "127.0.0.2" not in peers.find(0.01) | peers.find(0.01)


def test_a_peer_that_is_heard_and_acknowledges_nothing_is_silent(monkeypatch):
    """As where only what this host sends is lost."""
    looks = [(100.0, 5, False), (115.0, 5, False), (116.0, 6, False), (135.0, 6, False), (136.0, 6, True)]
    times, info, peers = iter([time for time, *_ in looks]), bytearray(136), SilentPeers()
    struct.pack_into("=I", info, 24, 1)
    with socket.create_server(("127.0.0.2", 0)) as listener, socket.create_connection(listener.getsockname()) as busy:
        monkeypatch.setattr(connections, "_tcp_connections", lambda: [((1, "socket:[1]"), busy, bytes(info))])
        monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: next(times)))
        for _, acknowledged, silent in looks:
            struct.pack_into("=Q", info, 120, acknowledged)
            assert peers.find(20.0) == ({"127.0.0.2"} if silent else set())
