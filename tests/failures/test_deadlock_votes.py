"""Ranks decide together that they wait for each other for ever: random programs, and messages that are late."""

from __future__ import annotations

import random
from collections import deque

import pytest

from deadlock_programs import run_to_the_end, some_program
from lockstep.failures.deadlock_votes import Votes


class Network:
    """Votes of ranks that go on meanwhile. Messages from one rank to another keep their order, and nothing else."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.links = {(one, other): deque() for one in ranks.ranks for other in ranks.ranks if one != other}
        self.found = {}
        self.states = {}
        self.told = {}
        self.votes = {n: Votes(n, lambda n=n: self.number(n), self.sender(n)) for n in ranks.ranks}

    def number(self, rank):
        """The number of a rank's state; a new one for each state, also if it is like an earlier one."""
        state = [(thread.at, thread.waits) for thread in self.ranks.ranks[rank].threads]
        number, before = self.states.get(rank, (0, None))
        if state != before:
            self.states[rank] = number + 1, state
        return self.states[rank][0]

    def sender(self, rank):
        def tell(kind, **fields):
            for (one, _), link in self.links.items():
                if one == rank:
                    link.append({"kind": kind, **fields})

        return tell

    def look(self, rank):
        """What a rank's thread does now and then."""
        report, number = self.ranks.report(rank), self.number(rank)
        if self.told.get(rank) != number and report.waits:
            self.told[rank] = number
            self.votes[rank].report(number, report)
        elif self.told.get(rank) != number and report.has_left:
            self.told[rank] = number
            self.sender(rank)("left", rank=rank, launched=report.launched)
        self.decide(rank)

    def deliver(self, link):
        self.votes[link[1]].hear(self.links[link].popleft())
        self.decide(link[1])

    def decide(self, rank):
        if found := self.votes[rank].decide():
            self.found[rank] = found

    def step(self, rng):
        """A rank goes on, looks, or gets a message."""
        what = rng.random()
        waiting = [link for link, messages in self.links.items() if messages]
        if what < 0.4:
            self.ranks.step(rng)
        elif what < 0.6 or not waiting:
            self.look(rng.choice(list(self.ranks.ranks)))
        else:
            self.deliver(rng.choice(waiting))

    def come_to_rest(self):
        """Deliver everything, and let all look, until nothing new comes of it."""
        for _ in range(4):
            for rank in self.ranks.ranks:
                self.look(rank)
            while waiting := [link for link, messages in self.links.items() if messages]:
                self.deliver(waiting[0])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.around) for seed in (1, 2, 3))])
def test_late_messages_give_no_alarm_and_all_alarms(seed):
    rng = random.Random(seed)
    for _ in range(500):
        ranks = some_program(rng)
        finally_waiting = run_to_the_end(ranks.copy(), rng)
        network = Network(ranks)
        for _ in range(rng.randrange(200)):
            network.step(rng)
            assert all(found <= finally_waiting for found in network.found.values())
        run_to_the_end(ranks, rng)
        network.come_to_rest()
        assert all(found <= finally_waiting for found in network.found.values())
        if ranks.sees_all():
            assert network.found == dict.fromkeys(finally_waiting, finally_waiting)
