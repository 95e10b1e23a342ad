"""A rank that makes no progress is found, and named on all ranks, with the place at which it is.

A thread of each rank looks once a second whether the rank has waited for others longer than it should. If so, it asks
all ranks where they are. Who cannot answer - it is stopped, or a call into C code holds its interpreter - is looked at
from outside, by its process's number, if it is on the same host. Then it is told which rank is late.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.errors import InspectionError
from lockstep.failures import proc
from lockstep.failures.channel import FailureChannel
from lockstep.failures.deadline import Deadline, StallLimits
from lockstep.failures.inquiry import Answer, late, stalled
from lockstep.failures.places import collective_of
from lockstep.failures.progress import Snapshot, page_of
from lockstep.failures.stacks import Thread, ask, own_stack
from lockstep.failures.where import OF_A_STEP


class StallWatch:
    """Finds ranks that make no progress, from when it is made to :meth:`close`.

    Every rank of the channel has to make one. ``store`` is one in which no other keys are; ``begun`` says how many
    collectives this rank has begun on the group that is watched, or None.
    """

    def __init__(
        self, channel: FailureChannel, store: Any, host: str, limits: StallLimits, begun: Callable[[], int | None]
    ) -> None:
        self._channel, self._progress, self._begun = channel, channel.progress, begun
        self._limits, self._deadline = limits, Deadline(limits)
        self._processes = _Processes(store, channel.rank, host)
        self._answer_seconds = min(10.0, max(0.5, limits.minimum / 6))
        self._others_hold_off = 3 * self._answer_seconds
        self._wait = _Wait()
        self._ask_again = 0.0
        self._answers: dict[int, Answer] = {}
        self._inquiry = ""
        self._changed = threading.Condition()
        self._over = threading.Event()
        channel.on("asked", self._asked)
        channel.on("answer", self._answered)
        self._thread = threading.Thread(target=self._run, name="lockstep stalls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._answer_seconds)

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
        answers = self._inquire(now)
        found = late(answers, waited)
        if self._channel.failure is not None or self._over.is_set():
            return
        own = next(each for each in answers if each.rank == self._channel.rank)
        if found is None or found is own or not self._is_too_late(found, waited):
            # If it is this one, another one has to ask and say so. tests/failures/test_stall.py: asks_first
            self._ask_again = time.monotonic() + self._limits.minimum + self._others_hold_off
            return
        self._channel.report(stalled(found, answers, own, waited, self._deadline.explain(found.phase)))

    def _is_too_late(self, found: Answer, waited: float) -> bool:
        if found.compiles or found.phase not in OF_A_STEP:
            return waited > self._limits.patience
        return True

    def _inquire(self, now: float) -> list[Answer]:
        """What every rank is doing."""
        own = self._own_answer()
        with self._changed:
            self._inquiry = f"{self._channel.rank} {now}"
            self._answers = {own.rank: own}
        self._channel.tell("asked", inquiry=self._inquiry)
        until = time.monotonic() + self._answer_seconds
        stopped: dict[int, Answer] = {}
        with self._changed:
            while (missing := self._missing() - stopped.keys()) and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.2))
                stopped |= {rank: Answer(rank, stopped=True) for rank in missing if self._processes.stopped(rank)}
            missing = self._missing()
            answers = list(self._answers.values())
        run = self._progress.read().run
        return answers + [self._processes.look_at(rank, run, self._answer_seconds) for rank in sorted(missing)]

    def _missing(self) -> set[int]:
        return set(self._channel.global_ranks) - self._answers.keys()

    def _own_answer(self) -> Answer:
        seen, now = self._progress.read(), time.monotonic()
        return Answer.of(seen, own_stack(seen.thread), now, begun=self._begun())

    # ---------------------------------------------------------------------------- the channel's thread

    def _asked(self, message: dict[str, Any]) -> None:
        """Another rank asks: it will say what it has found, so that this one need not ask, too."""
        self._ask_again = time.monotonic() + self._others_hold_off
        self._channel.tell("answer", inquiry=message["inquiry"], answer=self._own_answer().to_json())

    def _answered(self, message: dict[str, Any]) -> None:
        answer = Answer(**message["answer"])
        with self._changed:
            if message["inquiry"] == self._inquiry:
                self._answers[answer.rank] = answer
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


class _Processes:
    """The processes of all ranks, as far as they are on this host."""

    def __init__(self, store: Any, rank: int, host: str) -> None:
        self._host = host
        store.set(f"process {rank}", json.dumps([host, os.getpid()]))
        self._store = store

    def stopped(self, rank: int) -> bool:
        """Whether a rank is known to be stopped."""
        pid = self._pid(rank)
        with contextlib.suppress(InspectionError):
            return pid > 0 and proc.available() and proc.status_of(pid).stopped
        return False

    def look_at(self, rank: int, run: str, seconds: float) -> Answer:
        """What a rank is doing that does not answer, as far as that can be seen from outside."""
        pid = self._pid(rank)
        nothing = Answer(rank, pid, answers=False, stopped=self.stopped(rank))
        if not pid or not proc.available():
            return nothing
        try:
            page = page_of(pid, run, rank)
            if page is None:
                return nothing
            with page:
                seen = page.read()
            return Answer.of(
                seen, _thread_of(pid, seen.thread, seconds), time.monotonic(), answers=False, stopped=nothing.stopped
            )
        except InspectionError:  # it has ended
            return nothing

    def _pid(self, rank: int) -> int:
        """0 if the rank is on another host, or nobody knows."""
        with contextlib.suppress(RuntimeError):  # the store is lost
            if self._store.check([f"process {rank}"]):
                host, pid = json.loads(self._store.get(f"process {rank}"))
                return int(pid) if host == self._host else 0
        return 0


def _thread_of(pid: int, ident: int, seconds: float) -> Thread | None:
    try:
        return ask(pid, seconds).of(ident)
    except InspectionError:
        return None
