"""A host that is lost with its memory, while torchrun trains on several: the snapshot is skipped by name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hosts.network import Hosts
from session.test_restarts import PROGRAM, launch

pytestmark = pytest.mark.hosts

OWN_MEMORY = ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
"""Each host has memory of its own, which is gone with its last process."""


def torchrun(hosts, host, folder, kill, log):
    where = f"{hosts.address(0)}:29400"
    command = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    command += ["--rdzv-id", "train", "--rdzv-endpoint", where, "--local-addr", hosts.address(host)]
    command += ["--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"]
    program = [sys.executable, "-m", "torch.distributed.run", *command, str(PROGRAM), str(folder), str(kill), "host"]
    return hosts.start(host, [*OWN_MEMORY, *program], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, log)


def test_a_host_is_lost_with_its_memory_and_comes_back(tmp_path):
    _, [wanted] = launch(tmp_path / "undisturbed", 1, [])
    logs = [tmp_path / f"{name}.log" for name in ("first", "second", "third")]
    with Hosts(2) as hosts:
        first = torchrun(hosts, 0, tmp_path / "run", 7, logs[0])
        second = torchrun(hosts, 1, tmp_path / "run", 7, logs[1])
        second.wait(150)
        third = torchrun(hosts, 1, tmp_path / "run", 7, logs[2])
        try:
            assert first.wait(150) == 0
            third.wait(100)
        finally:
            told = "".join(log.read_text() for log in logs)
            print(told)
    # Each host has the snapshots of its own ranks alone, and nothing is on the disk.
    assert {int(step) for step in re.findall(r"from step (\d+)", told)} == {0}
    assert "skipped memory/save-000006-step-00000006: rank 1 (host node1): it is not in this" in told
    assert re.findall(r"fingerprint (\w+) after step (\d+)", told)[0] == wanted
    assert not list(Path("/dev/shm").glob("lockstep-*/run-*"))
