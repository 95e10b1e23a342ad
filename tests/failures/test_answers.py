"""A rank decides that ranks wait for each other for ever: random programs, and messages that are late."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import asdict, replace

import pytest

from deadlock_programs import run_to_the_end, some_program
from lockstep.failures.answers import AnswersOfRanks
from lockstep.failures.whereabouts import Wait, Whereabouts


class Network:
    """Answers of ranks that go on meanwhile. Messages from one rank to another keep their order, and nothing else."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.links = {(one, other): deque() for one in ranks.ranks for other in ranks.ranks if one != other}
        self.found = {}
        self.states = {}
        self.told = {}
        self.answers = {n: AnswersOfRanks(n, self.sender(n)) for n in ranks.ranks}

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

    def own(self, rank):
        return replace(self.ranks.report(rank), number=self.number(rank))

    def look(self, rank):
        """What a rank's thread does now and then."""
        own = self.own(rank)
        if self.told.get(rank) != own.number and (own.waits or own.has_left):
            self.told[rank] = own.number
            self.answers[rank].give(own)
        self.decide(rank)

    def deliver(self, link):
        message, rank = self.links[link].popleft(), link[1]
        if message["kind"] == "asked":
            self.answers[rank].give(self.own(rank), message["inquiry"])
        else:
            self.answers[rank].hear({**message, "answer": asdict(message["answer"])})
        self.decide(rank)

    def decide(self, rank):
        if found := self.answers[rank].stuck(lambda: self.own(rank)):
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
            assert network.found.get(min(finally_waiting, default=0), frozenset()) == finally_waiting


def test_the_first_answer_to_an_inquiry_counts_and_those_to_other_ranks_are_not_kept():
    told = []
    answers = AnswersOfRanks(0, lambda kind, **fields: told.append(kind))
    inquiry = answers.ask()
    for step, asked in enumerate([inquiry, inquiry, "asked by rank 1, 0", "a key", ""]):
        answers.note(Whereabouts(1, step=step, number=step), asked)
    found = [answers.wait_for(asked, [], 0).get(1) for asked in (inquiry, "asked by rank 1, 0", "a key", "")]
    assert [each and each.step for each in found] == [0, None, 3, None]
    assert answers.last[1].step == 4
    answers.note(Whereabouts(1, step=5), "a key")  # of a rank whose threads were not looked at
    assert answers.last[1].step == 4
    assert told == ["asked"]


def test_ranks_are_stuck_once_all_of_them_have_answered_twice_with_the_same_number():
    told = []
    answers = AnswersOfRanks(0, lambda kind, inquiry, **fields: told.append(inquiry))

    def at(rank, number):
        own, other = ("a", "b") if rank == 0 else ("b", "a")
        waits = (Wait(own, 1, "all_reduce", (0, 1)),)
        return Whereabouts(rank, number=number, waits=waits, launched={own: 1, other: 0})

    def found():
        return answers.stuck(lambda: at(0, 1))

    answers.note(at(0, 1))
    answers.note(at(1, 1))
    assert not found()
    answers.note(at(1, 2), told[-1])  # it has gone on meanwhile, and waits again
    assert not found()
    answers.note(at(1, 2), told[-1])
    assert found() == {0, 1}
    assert len(told) == 2
