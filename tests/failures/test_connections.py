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
from processes import on_processes, run_processes


def raised_in_collectives(rank, numel, rounds):
    """How collectives end in groups whose connections each rank ends at a moment of its own."""
    numbers, raised = Random(rank.rank), []
    for _ in range(rounds):
        group, connections = dist.new_group(timeout=timedelta(seconds=10)), Connections()
        _find_connections_of_gloo(group, connections)
        end = threading.Timer(numbers.uniform(0.0, 0.001), connections.shut_down)
        values = torch.ones(numel)
        dist.barrier()
        end.start()
        try:
            while True:
                dist.all_reduce(values, group=group)
        except RuntimeError as error:
            raised.append(str(error))
        end.join()
        dist.barrier()
        connections.close()
        dist.destroy_process_group(group)
    return raised


@pytest.mark.parametrize(("numel", "rounds"), [(3, 40), (1_000_000, 10)])
def test_no_send_is_lost_when_connections_end_while_collectives_run(numel, rounds):
    """Gloo forgets a send that fails before it has noticed the end of the connection: it would wait for 10 s."""
    for raised in run_processes(3, raised_in_collectives, numel, rounds):
        assert len(raised) == rounds
        assert [each for each in raised if "Timed out" in each] == []


@on_processes(2)
def test_a_peer_notices_when_the_connections_are_closed(rank):
    """Return what a rank that has not shut anything down hears of one that has, before and after that one has
    closed."""
    group, connections, heard = dist.new_group(timeout=timedelta(seconds=2)), Connections(), []
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
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            heard.append("Timed out" in str(error))
    assert heard == [[], [False]][rank.rank]


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
