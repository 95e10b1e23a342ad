"""Hosts find each other whatever their own names stand for, as distributions and clusters ship them."""

from __future__ import annotations

import pytest

from hosts.network import NAMES
from hosts.trials import Plan, events_of, run

pytestmark = pytest.mark.hosts


def trains(tmp_path, names, backend, **options):
    """All ranks of two hosts train to the end, and have the same weights then."""
    told = run(Plan((2, 1), "none", 0, backend, **options.pop("plan", {})), tmp_path, names, **options)
    assert [each.type for each in told] == ["", "", ""], told
    assert len({each.digest for each in told}) == 1
    assert told[0].digest


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("names", NAMES)
def test_a_session_meets_at_an_address(names, backend, tmp_path):
    trains(tmp_path, names, backend)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("names", [names for names in NAMES if names != "none"])
def test_a_session_meets_at_a_name(names, backend, tmp_path):
    trains(tmp_path, names, backend, master="node0")


@pytest.mark.parametrize("names", ["good", "debian", "ipv6"])
def test_a_session_under_torchrun(names, tmp_path):
    trains(tmp_path, names, "shm", plan={"launcher": "torchrun"}, master="node0" if names != "ipv6" else "")


def test_a_launcher_that_gives_a_loopback_address_to_other_hosts_is_told_what_to_do(tmp_path):
    """A host whose own name is 127.0.0.1 is called localhost by torchrun, on all hosts."""
    plan = Plan((1, 1), "none", 0, launcher="torchrun", timeout=10.0)
    told = run(plan, tmp_path, "loopback", master="node0")
    assert [each.type for each in told] == ["CommunicationError"] * 2, told
    assert "localhost is a loopback address here: if the store is on another host, give that" in told[1].message


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_interface_that_the_user_has_chosen_is_used(backend, tmp_path):
    trains(tmp_path, "debian", backend, master="node0", environment={"GLOO_SOCKET_IFNAME": "eth0"})


@pytest.mark.parametrize("names", NAMES)
def test_a_group_of_shm_without_a_session(names, tmp_path):
    trains(tmp_path, names, "shm", plan={"how": "replicate"})


def test_an_interface_that_leads_nowhere_is_named(tmp_path):
    told = run(Plan((1, 1), "none", 0, timeout=10.0), tmp_path, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert "set GLOO_SOCKET_IFNAME on each host to the interface" in told[0].message + told[1].message


@pytest.mark.parametrize(
    ("master", "said"),
    [
        ("nosuchhost", "MASTER_ADDR=nosuchhost cannot be resolved"),
        ("10.77.0.99", "nobody answers at MASTER_ADDR=10.77.0.99, MASTER_PORT=29511 yet"),
    ],
)
def test_a_wrong_address_is_told_at_once(master, said, tmp_path):
    told = run(Plan((1, 1), "none", 0, timeout=12.0), tmp_path, master=master)
    assert [each.type for each in told] == ["CommunicationError"] * 2, told
    log = (tmp_path / "1.log").read_text()
    assert said in log.partition("Traceback")[0]
    for rank in range(2):
        start, end = events_of(tmp_path, rank)
        assert end["at"] - start["at"] < 12.0 + 8.0
