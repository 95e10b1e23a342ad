"""Random programs of several ranks, and what becomes of them: a model of collectives, to compare decisions with.

Each rank has one or two threads, each thread a list of what it does: compute, launch a collective on a group without
waiting, launch one and wait for it, or do so in a way that nobody sees.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from lockstep.failures.whereabouts import Wait, Whereabouts


@dataclass(slots=True)
class Thread:
    todo: list[tuple]
    at: int = 0
    waits: tuple | None = None
    """(group, number, visible) that it is waiting for."""


@dataclass(slots=True)
class Rank:
    threads: list[Thread]
    launched: dict[str, int] = field(default_factory=dict)

    @property
    def is_done(self):
        return all(each.at == len(each.todo) and each.waits is None for each in self.threads)


class Ranks:
    """All ranks at one moment."""

    def __init__(self, groups, ranks):
        self.groups, self.ranks = groups, ranks

    def copy(self):
        ranks = {
            number: Rank([replace(thread) for thread in rank.threads], dict(rank.launched))
            for number, rank in self.ranks.items()
        }
        return Ranks(self.groups, ranks)

    def is_over(self, group, number):
        """Return True if all ranks of the group have launched a collective."""
        return all(self.ranks[member].launched[group] >= number for member in self.groups[group])

    def able(self):
        """The threads that can take a step."""
        return [
            (rank, thread)
            for rank in self.ranks.values()
            for thread in rank.threads
            if (thread.waits is None and thread.at < len(thread.todo))
            or (thread.waits is not None and self.is_over(*thread.waits[:2]))
        ]

    def step(self, rng):
        """Let one thread that can take a step take it; False if there is none."""
        able = self.able()
        if not able:
            return False
        rank, thread = rng.choice(able)
        if thread.waits is not None:
            thread.waits = None
            return True
        kind, group = thread.todo[thread.at]
        thread.at += 1
        if kind != "compute":
            rank.launched[group] += 1
            if kind != "launch":
                thread.waits = (group, rank.launched[group], kind == "wait")
        return True

    def waiting(self):
        """The ranks that wait for what is not over, in all of their threads that are not done."""
        return {number for number, rank in self.ranks.items() if not rank.is_done and self._waits(rank)}

    def sees_all(self):
        """Return True if all waits are seen."""
        return all(each.waits is None or each.waits[2] for rank in self.ranks.values() for each in rank.threads)

    def _waits(self, rank):
        live = [each for each in rank.threads if each.at < len(each.todo) or each.waits is not None]
        return all(each.waits is not None and not self.is_over(*each.waits[:2]) for each in live)

    def report(self, number):
        """Return what a rank can say: nothing of its waits while one of its threads could launch something."""
        rank = self.ranks[number]
        if rank.is_done:
            return Whereabouts(number, number=0, launched=dict(rank.launched), has_left=True)
        live = [each for each in rank.threads if each.at < len(each.todo) or each.waits is not None]
        if not all(each.waits is not None and each.waits[2] for each in live):
            return Whereabouts(number, number=0)
        waits = [Wait(g, n, "all_reduce", tuple(self.groups[g])) for g, n, _ in (each.waits for each in live)]
        return Whereabouts(number, number=0, waits=(*waits,), launched=dict(rank.launched), seconds=1.0)

    def reports(self):
        return {number: self.report(number) for number in self.ranks}


def run_to_the_end(ranks, rng):
    """Let all go on until none can, and return those that wait for ever."""
    while ranks.step(rng):
        pass
    return ranks.waiting()


def some_program(rng: random.Random):
    """2 to 4 ranks, up to 3 groups, and a program that is the same on all ranks, or has a mistake on some."""
    world = rng.randint(2, 4)
    groups = {f"g{n}": sorted(rng.sample(range(world), rng.randint(2, world))) for n in range(rng.randint(1, 3))}
    kinds, names = ["wait", "wait", "wait", "launch", "compute", "wait unseen"], list(groups)
    common = [(rng.choice(kinds), rng.choice(names)) for _ in range(rng.randint(1, 7))]
    has_mistakes = rng.random() < 0.6
    ranks = {}
    for number in range(world):
        todo = [(kind, g) for kind, g in common if number in groups[g]]
        if has_mistakes and rng.random() < 0.5 and todo:
            _make_a_mistake(todo, rng)
        threads = [todo]
        if rng.random() < 0.15:  # a second thread, with a group of its own
            own = rng.choice(names)
            threads = [[each for each in todo if each[1] != own], [each for each in todo if each[1] == own]]
        launched = {g: 0 for g, members in groups.items() if number in members}
        ranks[number] = Rank([Thread(each) for each in threads], launched)
    return Ranks(groups, ranks)


def _make_a_mistake(todo, rng):
    """Leave out a step of one rank, or exchange two."""
    at, other = rng.randrange(len(todo)), rng.randrange(len(todo))
    if rng.random() < 0.5:
        del todo[at]
    else:
        todo[at], todo[other] = todo[other], todo[at]
