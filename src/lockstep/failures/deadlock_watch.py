"""The thread of a rank that finds out whether ranks wait for each other for ever, and reports it to all ranks.

It looks four times a second at what this rank waits for. Once the rank has waited for a second, it tells the others,
and all decide by :class:`~lockstep.failures.deadlock_votes.Votes`. Nothing is sent while ranks wait for less than that.
"""

import queue
import threading
import time
from typing import Any, Protocol

from lockstep.failures.channel import FailureChannel
from lockstep.failures.deadlock import WaitReport, describe, explain, missing
from lockstep.failures.deadlock_votes import Votes
from lockstep.failures.failure import Failure, Kind

LOOK_SECONDS = 0.25
"""Seconds between two looks at what this rank waits for."""
WAIT_SECONDS = 1.0
"""Seconds for which a rank waits before it tells the others."""
CLOSE_SECONDS = 2.0
"""Seconds that :meth:`DeadlockWatch.close` waits for the thread."""


class LookAtWaits(Protocol):
    """Looks at what this rank waits for."""

    def __call__(self) -> tuple[int, WaitReport]:
        """Return the number of the present state, and its report, without waits if the rank does not wait.

        The number stays the same as long as each thread is in the same wait, and nothing has been launched.
        """

    def launched(self) -> dict[str, int]:
        """Return for each group the number of the last collective that this rank has launched."""


class DeadlockWatch:
    """Finds ranks that wait for each other for ever, until :meth:`close`. Every rank of the channel has to make one."""

    def __init__(self, channel: FailureChannel, look: LookAtWaits) -> None:
        self._channel = channel
        self._look = look
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._over = False
        self._votes = Votes(channel.rank, self._state, channel.tell)
        self._told = -1
        for kind in ("waits", "votes", "left"):
            channel.on(kind, self._heard.put)
        self._thread = threading.Thread(target=self._run, name="lockstep deadlocks", daemon=True)
        self._thread.start()

    def close(self) -> dict[str, int]:
        """Stop, and return what this rank has launched, for :meth:`FailureChannel.announce_end`."""
        self._over = True
        self._heard.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)
        return self._look.launched()

    def _run(self) -> None:
        while not self._over and self._channel.failure is None:
            found = self._next()
            if found and min(found) == self._channel.rank:
                time.sleep(LOOK_SECONDS)  # others may have come later, and tell where they wait only now
                self._channel.report(self._failure(self._next() or found))
                return

    def _next(self) -> frozenset[int]:
        """Take the messages that have come, or look at this rank; return the ranks that are stuck."""
        try:
            self._hear(self._heard.get(timeout=LOOK_SECONDS))
            while True:  # with many ranks many come at once
                self._hear(self._heard.get_nowait())
        except queue.Empty:
            pass
        self._tell()
        return self._votes.decide()

    def _hear(self, message: dict[str, Any] | None) -> None:
        if message is not None:
            self._votes.hear(message)

    def _tell(self) -> None:
        """Tell the others what this rank waits for, unless they know."""
        number, report = self._look()
        if number != self._told and report.waits and report.seconds >= WAIT_SECONDS:
            self._told = number
            self._votes.report(number, report)

    def _state(self) -> int | None:
        number, report = self._look()
        return number if report.waits else None

    def _failure(self, found: frozenset[int]) -> Failure:
        """Return what is reported: of a rank that has left, or else of the first that waits."""
        channel, reports = self._channel, self._votes.reports
        lacks = {each for rank in found for wait in reports[rank].waits for each in missing(wait, rank, reports)}
        left = [failure for rank, failure in sorted(channel.left.items()) if rank in lacks - found]
        if left:
            return channel.missed(left[0], describe(found, reports))
        own, what = channel.progress.read(), explain(found, reports)
        return Failure(min(found), Kind.DEADLOCKED, own.step, own.phase, what, in_batches=own.in_batches)
