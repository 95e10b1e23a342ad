"""Hosts that are far from each other: how many round trips a start takes, one after the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hosts.network import Hosts
from hosts.trials import PORT

pytestmark = pytest.mark.hosts

PROGRAM = str(Path(__file__).with_name("first_step.py"))
DELAY = 0.05  # seconds to the other host: longer than a rank sleeps between two looks
LIMIT = 120.0  # seconds, on a machine that does other things, too

# From the beginning of the session to the end of the first step; they may only become less. Before ranks saved round
# trips, they were 66, 80 and 55.
ROUND_TRIPS = {((1, 1), ""): 33, ((2, 2), ""): 37, ((1, 1), "gloo"): 38}


@pytest.mark.parametrize(("ranks", "backend"), ROUND_TRIPS)
def test_round_trips_until_the_first_step(ranks, backend, tmp_path):
    if not Path("/dev/net/tun").exists():
        pytest.skip("needs /dev/net/tun")
    with Hosts(len(ranks), delay=DELAY) as hosts:
        started = []
        for host, count in enumerate(ranks):
            for local_rank in range(count):
                rank = sum(ranks[:host]) + local_rank
                variables = {
                    "RANK": rank,
                    "WORLD_SIZE": sum(ranks),
                    "LOCAL_RANK": local_rank,
                    "LOCAL_WORLD_SIZE": count,
                }
                variables |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": PORT}
                environment = {name: str(value) for name, value in variables.items()}
                environment["PYTHONPATH"] = str(Path(__file__).parents[1])
                log = tmp_path / f"{rank}.log"
                command = [sys.executable, PROGRAM, str(tmp_path), backend, hosts.address(1 - host)]
                started.append((hosts.start(host, command, environment, log), log))
        for process, log in started:
            assert process.wait(LIMIT) == 0, log.read_text()
        trips = hosts.trips()
    counted = {name: (count - trips["begin"]) / 2 for name, count in trips.items()}
    print(counted)
    assert counted["first step"] <= ROUND_TRIPS[ranks, backend], counted
