"""The thread of a rank that asks all ranks where they are, and reports the one that is late, or those that are stuck.

It looks four times a second at what this rank waits for. Once the rank has waited for a second, it tells the others. It
asks all of them if ranks have told that they wait for each other, or if it has waited for longer than the limit. For a
rank that cannot answer - it is stopped, or a call into C code holds its interpreter - a rank of its host answers, which
sees it from outside, through the page opened when all met. Nothing is sent while ranks wait for less than a second.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.errors import InspectionError
from lockstep.failures import proc
from lockstep.failures.channel import FailureChannel
from lockstep.failures.deadlock import describe, explain, missing
from lockstep.failures.failure import Failure, Kind
from lockstep.failures.progress import PHASES_OF_A_STEP
from lockstep.failures.stacks import ask, own_stack
from lockstep.failures.stall import Deadline, StallLimits, absent, late, stalled
from lockstep.failures.whereabouts import Whereabouts, collective_of

LOOK_SECONDS = 0.25
"""Seconds between two looks at what this rank waits for."""
WAIT_SECONDS = 1.0
"""Seconds for which a rank waits before it tells the others, and between two looks at whether it waits for too long."""
ANSWER_SECONDS = 4.0
"""Seconds that ranks have to answer one that has waited for them in vain."""
CLOSE_SECONDS = 2.0
"""Seconds that :meth:`Inquirer.close` waits for the thread."""


class Inquirer:
    """Finds ranks that make no progress, and ranks that wait for each other for ever, until :meth:`close`.

    Every rank of the channel has to make one. ``look`` returns what the threads of this rank wait for, without waits if
    it does not wait; if it is called with True, what the rank has launched when it ends. Without ``limits`` no rank is
    late, but one that is missing is found by :meth:`find_absent`.
    """

    def __init__(
        self, channel: FailureChannel, limits: StallLimits | None, look: Callable[[bool], Whereabouts]
    ) -> None:
        self._channel = channel
        self._answers = channel.answers
        self._look = look
        self._limits = limits or StallLimits(minimum=math.inf)
        self._deadline = Deadline(self._limits, time.monotonic())
        self._begun_before = look(False).begun or 0
        self._answer_seconds = min(10.0, max(0.5, self._limits.minimum / 6))
        self._others_hold_off = 3 * self._answer_seconds
        self._waits_in: tuple[str, int | None, int] = ("", None, 0)
        self._waits_since = 0.0
        self._next_look = self._ask_again = 0.0
        self._told: int | None = None
        self._ended: Whereabouts | None = None
        self._telling = threading.Lock()  # so that the last answer that others get is the newest
        self._wake = threading.Event()
        self._over = False
        channel.on("asked", self._asked)
        channel.on("answer", self._answered)
        self._thread = threading.Thread(target=self._run, name="lockstep inquiry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and tell the others that this rank launches nothing more; call it when the channel has told its end."""
        self._over = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)
        self._ended = self._look(True)
        self._tell()

    def find_absent(self, error: str) -> Failure | None:
        """Return the failure of the rank for which this one waited until an ``error``; None if it is not found."""
        with self._channel.progress.waiting("a collective that timed out"):
            answers = self._inquire(ANSWER_SECONDS)
        found = absent(answers)
        return self._stalled(found, answers, f"for it in vain ({error})") if found is not None else None

    # ------------------------------------------------------------------------------------ its thread

    def _run(self) -> None:
        look_again = min(WAIT_SECONDS, self._limits.minimum / 10)
        while not self._over and self._channel.failure is None:
            self._wake.wait(min(LOOK_SECONDS, look_again))
            self._wake.clear()
            own = self._look(False)
            if own.number != self._told and own.seconds >= WAIT_SECONDS:
                self._told = own.number
                self._tell()
            failure = self._find_stuck()
            if failure is None and (now := time.monotonic()) >= self._next_look:
                self._next_look = now + look_again
                failure = self._find_late(own.begun, now)
            if failure is not None and not self._over and self._channel.failure is None:
                self._channel.report(failure)
                return

    def _find_stuck(self) -> Failure | None:
        """Return what to report of ranks that wait for ever: of one that has left, or else of the first that waits."""
        found = self._answers.stuck(self._own)
        if not found:
            return None
        time.sleep(LOOK_SECONDS)  # others may have come later, and tell where they wait only now
        found = self._answers.stuck(self._own, LOOK_SECONDS) or found
        channel, answers = self._channel, dict(self._answers.last)
        lacks = {each for rank in found for wait in answers[rank].waits for each in missing(wait, rank, answers)}
        left = [failure for rank, failure in sorted(channel.left.items()) if rank in lacks - found]
        if left:
            return channel.missed(left[0], describe(found, answers))
        own, what = channel.progress.read(), explain(found, answers)
        return Failure(min(found), Kind.DEADLOCKED, own.step, own.phase, what, in_batches=own.in_batches)

    def _find_late(self, begun: int | None, now: float) -> Failure | None:
        """Return what to report of a rank for which this one has waited for too long."""
        channel, phase = self._channel, self._channel.progress.current_phase
        self._deadline.observe(channel.progress.steps_made or (begun or 0) - self._begun_before, now)
        waited = self._waited(begun, now)
        if waited:
            channel.look_for_lost_links()
        if waited <= self._deadline.limit(phase)[0] or now < self._ask_again:
            return None
        answers = self._inquire(self._answer_seconds)
        found = late(answers, waited)
        if found is None or found.rank == channel.rank or not self._is_too_late(found, waited):
            # If this rank is the late one, another rank has to ask and report it. tests/failures/test_stall.py:
            # asks_first
            self._ask_again = time.monotonic() + self._limits.minimum + self._others_hold_off
            return None
        _, limit = self._deadline.limit(found.phase or phase)
        return self._stalled(found, answers, f"{waited:.0f} s for it, longer than the limit ({limit})")

    def _waited(self, begun: int | None, now: float) -> float:
        """Return the seconds that this rank has waited in its present collective, 0 if it does not wait.

        A collective of the program counts from when it was first seen here.
        """
        seen = self._channel.progress.read()
        if seen.waits_for:
            return now - seen.waits_since
        thread = own_stack(seen.thread)
        waits_in = (collective_of(thread) if thread is not None else "", begun, seen.step)
        if waits_in != self._waits_in:
            self._waits_in = waits_in
            self._waits_since = now
        return now - self._waits_since if waits_in[0] else 0.0

    def _is_too_late(self, found: Whereabouts, waited: float) -> bool:
        if found.compiles or (found.phase and found.phase not in PHASES_OF_A_STEP):
            return waited > self._limits.patience
        return True

    def _stalled(self, found: Whereabouts, answers: list[Whereabouts], waited: str) -> Failure:
        if not found.answers:
            found = replace(found, silent_host=self._channel.hosts.silent([found.rank]).get(found.rank, ""))
        return stalled(found, answers, f"rank {self._channel.rank} has waited {waited}")

    # ---------------------------------------------------------------------------- questions and answers

    def _own(self) -> Whereabouts:
        """Return where this rank is. Waits of less than a second are nobody's business."""
        seen, own = self._channel.progress.read(), self._ended or self._look(False)
        waits = own.waits if own.seconds >= WAIT_SECONDS else ()
        return replace(own, waits=waits).seen_at(seen, own_stack(seen.thread), time.monotonic())

    def _tell(self, inquiry: str = "") -> None:
        with self._telling:
            self._answers.give(self._own(), inquiry)

    def _inquire(self, seconds: float) -> list[Whereabouts]:
        """Ask all ranks where they are; for those that do not answer, ask ranks of their hosts."""
        channel, ranks = self._channel, self._channel.global_ranks
        inquiry = self._answers.ask()
        self._answers.note(self._own(), inquiry)
        answers = self._answers.wait_for(inquiry, ranks, seconds / 2)
        if silent := [rank for rank in ranks if rank not in answers]:
            channel.tell("asked", inquiry=inquiry, ranks=silent)
            self._look_at(silent, inquiry)
            answers = self._answers.wait_for(inquiry, ranks, seconds / 2)
        return [answers.get(rank) or Whereabouts(rank, channel.places[rank].pid, answers=False) for rank in ranks]

    def _look_at(self, ranks: list[int], inquiry: str) -> None:
        """Answer for ranks of this host that cannot do it themselves."""
        for rank in ranks:
            if rank in self._channel.pages:
                self._answers.give(seen_from_outside(self._channel, rank, self._answer_seconds), inquiry)

    def _asked(self, message: dict[str, Any]) -> None:
        """Answer another rank; it will report what it finds, so this rank need not ask for a while.

        If it asks for ranks that do not answer, the first rank of their host that can do it looks at them.
        """
        inquiry, silent = message["inquiry"], message["ranks"]
        if not silent:
            self._ask_again = time.monotonic() + self._others_hold_off
            self._tell(inquiry)
            return
        able = {*self._channel.hosts.ranks_with(self._channel.rank)}.difference(silent)
        if min(able, default=None) == self._channel.rank:
            threading.Thread(target=self._look_at, args=(silent, inquiry), daemon=True).start()

    def _answered(self, message: dict[str, Any]) -> None:
        self._answers.hear(message)
        self._wake.set()


def seen_from_outside(channel: FailureChannel, rank: int, seconds: float) -> Whereabouts:
    """Return where a rank of this host is that does not answer, as far as it is visible from outside."""
    pid = channel.places[rank].pid
    found, thread = Whereabouts(rank, pid, answers=False), None
    with contextlib.suppress(InspectionError):  # it has ended
        seen = channel.pages[rank].read()
        found = replace(found, stopped=proc.available() and proc.status_of(pid).stopped)
        if not found.stopped:
            with contextlib.suppress(InspectionError):
                thread = ask(pid, seconds).of(seen.thread)
        return found.seen_at(seen, thread, time.monotonic())
    return found
