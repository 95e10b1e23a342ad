"""Which host, or which network between two, is down: a few other hosts are asked, however many there are."""

from __future__ import annotations

import errno
import os
import socket
import threading

import pytest

from lockstep.failures import hosts
from lockstep.failures.hosts import Hosts, Reach, reach
from lockstep.failures.ring import Place

OWN, LOST = 0, 9  # ranks


def place(host, rank):
    """Two ranks on each host: the first one listens where others reach it."""
    return Place(
        f"host {host}", f"node{host}", 1000 + rank, "127.0.0.1" if rank % 2 else f"10.0.{host >> 8}.{host & 255}", 1
    )


class Ring:
    """The hosts as rank 0 knows them; what it asks is answered at once, or not at all."""

    def __init__(self, monkeypatch, count, silent, reaching=()):
        places = {rank: place(rank // 2, rank) for rank in range(2 * count)}
        self.hosts = Hosts(OWN, places, self.tell)
        self.tried, self.asked = [], []
        self._silent = {place.ip for place in places.values() if place.name in silent}
        self._reaching = {rank for rank, place in places.items() if place.name in reaching}
        self._answering = {rank for rank, place in places.items() if place.name not in silent}
        monkeypatch.setattr(hosts, "reach", self.reach)
        monkeypatch.setattr(hosts, "ANSWER_SECONDS", 0.01)

    def reach(self, doors, seconds):
        self.tried += doors
        return [Reach.SILENT if ip in self._silent else Reach.ANSWERS for ip, _ in doors]

    def tell(self, kind, inquiry, of, ranks):
        assert (kind, of) == ("reach", LOST)
        self.asked += ranks
        for rank in self._answering.intersection(ranks):
            self.hosts.answered({"inquiry": inquiry, "rank": rank, "answers": rank in self._reaching})
            self.hosts.answered({"inquiry": "an earlier one", "rank": rank, "answers": True})


CASES = {
    # hosts; those that are silent here; those that reach node4; what is said
    "one of two, or the network": (2, [], [], None),
    "a host": (8, ["node4"], [], "still answer node0, so that node4 or its network is down"),
    "the network between two": (8, ["node4"], ["node1", "node3", "node5"], "so that the network between node0 and"),
    "the network, as one has seen": (8, ["node4"], ["node3"], "node3 still reaches both, so that the network between"),
    "this host": (6, ["node1", "node2", "node3", "node4", "node5"], [], "do not answer either: node0 is cut off"),
    "one part of the hosts": (6, ["node3", "node4", "node5"], [], "so that node4, node3, or the network to"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_a_host_that_is_lost(case, monkeypatch):
    count, silent, reaching, words = CASES[case]
    if words is None:
        ring = Ring(monkeypatch, 5, [], [])
        ring.hosts._places = {rank: each for rank, each in ring.hosts._places.items() if rank < 2 or rank in (8, LOST)}
        words = ": node4, node0, or the network between them is down"
    else:
        ring = Ring(monkeypatch, count, silent, reaching)
    failure = ring.hosts.inquire(LOST, "rank 0 has heard nothing").failure
    assert failure.rank == LOST - 1
    assert failure.what.startswith("rank 0 has heard nothing, where ranks 8, 9 are")
    assert words in failure.what


@pytest.mark.parametrize("count", [6, 2000])
def test_a_constant_number_of_hosts_is_tried_and_asked(count, monkeypatch):
    ring = Ring(monkeypatch, count, ["node4"])
    ring.hosts.inquire(LOST, "rank 0 has heard nothing")
    assert len(ring.tried) == len(ring.asked) == hosts.WITNESSES
    assert len(set(ring.asked)) == hosts.WITNESSES
    assert not {0, 1, 8, 9}.intersection(ring.asked)
    assert all(ip.startswith("10.") for ip, _ in ring.tried)  # where ranks listen that others reach


def test_one_rank_of_each_other_host_that_has_an_address(monkeypatch):
    addresses = ["10.0.0.0", "10.0.0.2", "10.0.0.4", "127.0.0.1"]
    assert Ring(monkeypatch, 6, []).hosts.at(addresses) == [4, 8]


ALL = [f"node{number}" for number in range(1, 8)]


@pytest.mark.parametrize(
    ("silent", "reaching", "tries", "waits"),
    [
        (["node4"], ["node1"], False, 1),  # it reaches the host: no other answer would change that
        (["node4"], ["node3"], True, 2),
        (["node4"], [], False, 3),
        ([], [], True, 0),  # the host answers
        (ALL, [], False, 0),  # this host is cut off: no answer can come
    ],
)
def test_how_many_answers_are_waited_for(silent, reaching, tries, waits, monkeypatch):
    ring, answers, waited = Ring(monkeypatch, 8, silent, reaching), [], []
    monkeypatch.setattr(hosts, "ANSWER_SECONDS", 30)

    def tell(kind, inquiry, of, ranks):
        answers.extend({"inquiry": inquiry, "rank": rank, "answers": rank in ring._reaching} for rank in ranks)

    def wait(seconds):
        waited.append(seconds)
        ring.hosts.answered(answers.pop(0))

    ring.hosts._tell, ring.hosts._changed.wait = tell, wait
    ring.hosts.inquire(LOST, "rank 0 has heard nothing", tries=tries)
    assert len(waited) == waits


@pytest.mark.parametrize("silent", [[], ["node4"], ["node1", "node2", "node3", "node4", "node5"]])
def test_a_host_that_may_be_there_is_tried_while_others_are_asked(silent, monkeypatch):
    ring, attempts = Ring(monkeypatch, 6, silent), []
    monkeypatch.setattr(hosts, "reach", lambda *args: [attempts.append(ring.asked[:]), ring.reach(*args)][1])
    found = ring.hosts.inquire(LOST, "rank 0 has heard nothing", tries=True)
    assert found.answers == (not silent)
    assert found.is_cut_off == (len(silent) == 5)
    assert len(ring.tried) == hosts.WITNESSES + 1
    assert attempts == [ring.asked]  # one attempt, after others were asked


def test_who_is_asked_tries_the_host_and_who_is_not_does_nothing(monkeypatch):
    told, said = threading.Event(), []
    ring = Ring(monkeypatch, 8, ["node4"])
    ring.hosts._tell = lambda kind, **fields: (said.append((kind, fields)), told.set())
    ring.hosts.asked({"ranks": [2, 6], "of": LOST, "inquiry": "3 0"})
    assert not ring.tried
    ring.hosts.asked({"ranks": [2, OWN], "of": LOST, "inquiry": "3 0"})
    assert told.wait(30)
    assert said == [("reached", {"inquiry": "3 0", "rank": OWN, "answers": False})]


def test_a_process_without_descriptors_says_what_the_others_tell_it(monkeypatch):
    def none(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", none)
        assert reach([("127.0.0.1", 1)], 1.0) == [Reach.UNKNOWN]
    ring = Ring(monkeypatch, 8, ["node4"], ["node3"])
    monkeypatch.setattr(hosts, "reach", lambda doors, _: [Reach.UNKNOWN] * len(doors))
    assert "node3 still reaches both" in ring.hosts.inquire(LOST, "rank 0 has heard nothing").failure.what


def test_a_door_answers_refuses_or_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        doors = [listener.getsockname(), closed.getsockname(), ("::1:0:0:1", 9)]  # no route leads to the last
        assert reach(doors, 1.0) == [Reach.ANSWERS, Reach.REFUSES, Reach.SILENT]
