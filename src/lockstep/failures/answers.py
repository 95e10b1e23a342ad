"""The answers of all ranks to the question where they are, as far as one rank has got them.

A rank tells all others its whereabouts when one of them asks, when it has waited for a second, when its call is not
that of the others, and when it leaves. What follows from that is decided without a channel: who is late (``stall.py``),
who waits for ever, and which calls differ (``deadlock.py``).

An answer is true when it is given; when it arrives, its rank may have gone on. So if ranks are stuck according to the
answers, the first of them asks all once more. They are stuck if all of them answer with the same numbers again.

Why no alarm is false: when the question was put, the first answers had come, and the second ones were still to be
given. So at this moment all ranks of the set were in the waits that they have told, had launched what they have told,
and had no other thread that could launch anything. The first of them to go on would need a rank that had not launched
the collective at this moment. That rank has left, or belongs to the set, and would have had to go on before: so none
goes on. A set that is stuck stays stuck; therefore it does not matter how late the answers arrive. Why none is missed:
the last answers of ranks that wait for ever reach all. (test_answers.py tries both, with messages that are late.)
"""

import threading
from collections.abc import Callable, Collection
from itertools import count
from typing import Any

from lockstep.failures.deadlock import could_be_stuck, stuck
from lockstep.failures.whereabouts import Whereabouts

_KEPT = 16  # inquiries of this rank, and keys of calls that differ
_ASKED = "asked by rank"


class AnswersOfRanks:
    """What one rank knows of where all are; any thread may use it."""

    def __init__(self, rank: int, tell: Callable[..., object]) -> None:
        """``tell`` sends a message to all other ranks."""
        self._rank = rank
        self._tell = tell
        self._changed = threading.Condition()
        self._to: dict[str, dict[int, Whereabouts]] = {}
        self._inquiries = count()
        self._asked_about: dict[int, int | None] = {}
        self._inquiry = ""
        self.last: dict[int, Whereabouts] = {}
        """The last answer of each rank that says what its threads wait for."""

    def ask(self) -> str:
        """Ask all other ranks where they are; return the name of the inquiry."""
        inquiry = f"{_ASKED} {self._rank}, {next(self._inquiries)}"
        with self._changed:
            self._to[inquiry] = {}
        self._tell("asked", inquiry=inquiry, ranks=[])
        return inquiry

    def give(self, answer: Whereabouts, inquiry: str = "") -> None:
        """Tell all ranks where one is: this one, or one of its host that cannot do it itself."""
        self._tell("answer", inquiry=inquiry, answer=answer)
        self.note(answer, inquiry)

    def hear(self, message: dict[str, Any]) -> None:
        """Take what another rank tells."""
        self.note(Whereabouts.of_fields(message["answer"]), message["inquiry"])

    def note(self, answer: Whereabouts, inquiry: str = "") -> None:
        """Keep an answer: the first one of each rank to an inquiry, unless another rank has asked, and the last one."""
        with self._changed:
            if inquiry in self._to or (inquiry and not inquiry.startswith(_ASKED)):
                self._to.setdefault(inquiry, {}).setdefault(answer.rank, answer)
            if answer.number is not None:
                self.last[answer.rank] = answer
            while len(self._to) > _KEPT:
                del self._to[next(iter(self._to))]
            self._changed.notify_all()

    def wait_for(self, inquiry: str, ranks: Collection[int], seconds: float) -> dict[int, Whereabouts]:
        """Return the answers to an inquiry, when all ``ranks`` have given theirs, or after some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._to.get(inquiry, {}).keys() >= {*ranks}, seconds)
            return dict(self._to.get(inquiry, {}))

    def stuck(self, own: Callable[[], Whereabouts], seconds: float = 0.0) -> frozenset[int]:
        """Return the ranks that wait for ever, if this one is the first of them, and they have answered twice.

        ``own`` returns where this rank is now. Waits some seconds for answers, if there are new ones to ask for.
        """
        last = dict(self.last)
        if not could_be_stuck(self._rank, last) or own().number != last[self._rank].number:
            return frozenset()
        found = stuck(last)
        if min(found, default=None) != self._rank:
            return frozenset()
        numbers = {rank: last[rank].number for rank in found}
        if numbers != self._asked_about:
            self._asked_about, self._inquiry = numbers, self.ask()
            self.note(own(), self._inquiry)
        again = self.wait_for(self._inquiry, found, seconds)
        same = (rank in again and again[rank].number == number for rank, number in numbers.items())
        return found if all(same) else frozenset()
