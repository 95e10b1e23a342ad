"""A rank that makes no progress is found, and named on all ranks, with the place at which it is.

A thread of each rank looks once a second whether the rank has waited for others longer than it should. If so, it asks
all ranks where they are. Who cannot answer - it is stopped, or a call into C code holds its interpreter - is looked at
from outside by a rank of its host, through what was opened when all met. Then it is told which rank is late.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.errors import InspectionError
from lockstep.failures import proc
from lockstep.failures.channel import FailureChannel
from lockstep.failures.deadline import Deadline, StallLimits
from lockstep.failures.failure import Failure
from lockstep.failures.inquiry import Answer, absent, late, stalled, waited_in_vain
from lockstep.failures.places import collective_of
from lockstep.failures.progress import Snapshot
from lockstep.failures.stacks import Thread, ask, own_stack
from lockstep.failures.where import OF_A_STEP

ANSWER_SECONDS = 4.0
"""How long ranks have to answer one that has waited for them in vain."""


class StallWatch:
    """Finds ranks that make no progress, from when it is made to :meth:`close`.

    Every rank of the channel has to make one. ``begun`` says how many collectives this rank has begun on the group that
    is watched, or None. Without ``limits`` it answers others, and finds who is missing when it is asked to.
    """

    def __init__(self, channel: FailureChannel, limits: StallLimits | None, begun: Callable[[], int | None]) -> None:
        self._channel, self._progress, self._begun = channel, channel.progress, begun
        self._limits = limits or StallLimits()
        self._deadline = Deadline(self._limits)
        self._answer_seconds = min(10.0, max(0.5, self._limits.minimum / 6))
        self._others_hold_off = 3 * self._answer_seconds
        self._wait = _Wait()
        self._ask_again = 0.0
        self._answers: dict[int, Answer] = {}
        self._inquiry = ""
        self._inquires = threading.Lock()
        self._changed = threading.Condition()
        self._over = threading.Event()
        channel.on("asked", self._asked)
        channel.on("look", self._asked_to_look)
        channel.on("answer", self._answered)
        self._thread: threading.Thread | None = None
        if limits is not None:
            self._thread = threading.Thread(target=self._run, name="lockstep stalls", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._over.set()
        if self._thread is not None and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._answer_seconds)

    def find_absent(self, error: str) -> Failure | None:
        """The failure of the rank for which this one has waited in vain, until an ``error``; None if nobody knows."""
        with self._progress.waiting("a collective that timed out"):
            answers = self._inquire(ANSWER_SECONDS)
        found = absent(answers)
        return waited_in_vain(found, answers, self._channel.rank, error) if found is not None else None

    # ------------------------------------------------------------------------------------ its thread

    def _run(self) -> None:
        look = min(1.0, self._limits.minimum / 10)
        while not self._over.wait(look) and self._channel.failure is None:
            self._look()

    def _look(self) -> None:
        seen, now = self._progress.read(), time.monotonic()
        begun = self._begun()
        self._deadline.observe(seen.step or begun or 0, now)
        waited = self._wait.seconds(seen, begun, now)
        if waited <= self._deadline.seconds(seen.phase) or now < self._ask_again:
            return
        answers = self._inquire(self._answer_seconds)
        found = late(answers, waited)
        if self._channel.failure is not None or self._over.is_set():
            return
        own = next(each for each in answers if each.rank == self._channel.rank)
        if found is None or found is own or not self._is_too_late(found, waited):
            # If it is this one, another one has to ask and say so. tests/failures/test_stall.py: asks_first
            self._ask_again = time.monotonic() + self._limits.minimum + self._others_hold_off
            return
        self._channel.report(stalled(found, answers, own, waited, self._deadline.explain(found.phase or seen.phase)))

    def _is_too_late(self, found: Answer, waited: float) -> bool:
        if found.compiles or (found.phase and found.phase not in OF_A_STEP):
            return waited > self._limits.patience
        return True

    def _inquire(self, seconds: float) -> list[Answer]:
        """What every rank is doing: what it says itself, or else what a rank of its host sees."""
        with self._inquires:
            own = self._own_answer()
            with self._changed:
                self._inquiry = f"{self._channel.rank} {time.monotonic()}"
                self._answers = {own.rank: own}
            self._channel.tell("asked", inquiry=self._inquiry)
            self._wait_for_answers(seconds / 2)
            if missing := self._missing():
                self._look_at(missing)
                self._channel.tell("look", inquiry=self._inquiry, ranks=missing)
                self._wait_for_answers(seconds / 2)
            silent = self._channel.silent_hosts(self._missing())
            unknown = [
                Answer(rank, self._channel.places[rank].pid, answers=False, silent_host=silent.get(rank, ""))
                for rank in self._missing()
            ]
            with self._changed:
                return [*self._answers.values(), *unknown]

    def _wait_for_answers(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with self._changed:
            while self._missing() and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _missing(self) -> list[int]:
        return [rank for rank in self._channel.global_ranks if rank not in self._answers]

    def _own_answer(self) -> Answer:
        seen, now = self._progress.read(), time.monotonic()
        return Answer.of(seen, own_stack(seen.thread), now, begun=self._begun())

    def _look_at(self, ranks: list[int]) -> None:
        """Answer for ranks of this host that cannot do it themselves."""
        for rank in ranks:
            if rank in self._channel.pages:
                self._note(seen_from_outside(self._channel, rank, self._answer_seconds), self._inquiry)

    # ---------------------------------------------------------------------------- the channel's thread

    def _asked(self, message: dict[str, Any]) -> None:
        """Another rank asks: it will say what it has found, so that this one need not ask, too."""
        self._ask_again = time.monotonic() + self._others_hold_off
        self._channel.tell("answer", inquiry=message["inquiry"], answer=self._own_answer().to_json())

    def _asked_to_look(self, message: dict[str, Any]) -> None:
        """Another rank cannot see those of this host: the first one that can answers for those that cannot."""
        ranks = [rank for rank in message["ranks"] if rank in self._channel.pages]
        able = set(self._channel.ranks_with(self._channel.rank)) - set(message["ranks"])
        if ranks and min(able, default=None) == self._channel.rank:
            threading.Thread(target=self._tell_of, args=(ranks, message["inquiry"]), daemon=True).start()

    def _tell_of(self, ranks: list[int], inquiry: str) -> None:
        for rank in ranks:
            answer = seen_from_outside(self._channel, rank, self._answer_seconds)
            self._channel.tell("answer", inquiry=inquiry, answer=answer.to_json())

    def _answered(self, message: dict[str, Any]) -> None:
        self._note(Answer(**message["answer"]), message["inquiry"])

    def _note(self, answer: Answer, inquiry: str) -> None:
        with self._changed:
            if inquiry == self._inquiry:
                self._answers.setdefault(answer.rank, answer)
                self._changed.notify_all()


class _Wait:
    """For how long this rank has waited in the collective in which it waits now: ours, or the program's own."""

    def __init__(self) -> None:
        self._where: tuple[str, int | None, int] = ("", None, 0)
        self._since = 0.0

    def seconds(self, seen: Snapshot, begun: int | None, now: float) -> float:
        """0 if it does not wait. One of the program's own counts from when it was first seen here."""
        if seen.waits_for:
            return now - seen.waits_since
        thread = own_stack(seen.thread)
        where = (collective_of(thread) if thread is not None else "", begun, seen.step)
        if where != self._where:
            self._where, self._since = where, now
        return now - self._since if where[0] else 0.0


def seen_from_outside(channel: FailureChannel, rank: int, seconds: float) -> Answer:
    """What a rank of this host is doing that does not answer, as far as that can be seen from outside."""
    pid, stopped = channel.places[rank].pid, False
    try:
        seen = channel.pages[rank].read()
        stopped = proc.available() and proc.status_of(pid).stopped
        thread = None if stopped else _thread_of(pid, seen.thread, seconds)
        return Answer.of(seen, thread, time.monotonic(), answers=False, stopped=stopped)
    except InspectionError:  # it has ended
        return Answer(rank, pid, answers=False, stopped=stopped)


def _thread_of(pid: int, ident: int, seconds: float) -> Thread | None:
    try:
        return ask(pid, seconds).of(ident)
    except InspectionError:
        return None
