"""The failure channel of one rank: what happens to any rank is known on all, at once and by name.

Failures are written to the log, which says which of them was the first, and are told around the ring
(``messenger.py``). Nothing is sent while nothing happens, apart from one look into the log a second, in case the ring
is broken in two places. ``check()`` is a look at an attribute.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lockstep.errors import CommunicationError, InspectionError, PeerFailure
from lockstep.failures.failure import Failure, Kind, peer_failure_in
from lockstep.failures.log import FailureLog
from lockstep.failures.messenger import LOOK_SECONDS, Messenger
from lockstep.failures.progress import Page, Progress, page_of
from lockstep.failures.ring import Connection, Meeting, NeighbourHasEndedError, RankHasNotComeError, ip_for, store_lost
from lockstep.failures.where import OF_A_STEP

GRACE_SECONDS = 1.0
"""How long a rank that has lost its group waits to hear who failed."""
LEFT_SECONDS = 1.0
"""How long a rank waits for one that has left in good order, before that is an error."""
FAREWELL_SECONDS = 2.0
"""How long ranks wait for each other when one has failed, so that each can say why before a launcher ends it."""

START_UP_SECONDS = 2 * LOOK_SECONDS
"""How long a rank that fails before all have met lives on: the store may be its own, and others look into it."""


class FailureChannel:
    """What one rank knows of the failures of the others, and what it tells them of its own.

    Every rank has to make one at the same time. ``global_ranks`` are the numbers by which messages name the ranks.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        global_ranks: Sequence[int],
        progress: Progress,
        host: str,
        timeout: float,
    ) -> None:
        self.rank, self.global_ranks, self.progress = global_ranks[rank], list(global_ranks), progress
        self.failure: Failure | None = None
        """The first failure, if it is another rank's; or this one's, if others have given it up."""
        self.left: dict[int, int] = {}
        """Ranks that have left, in good order or after a failure; and the step after which."""
        self.ended: set[int] = set()
        """Ranks whose process has ended without a word."""
        self._known, self._changed = threading.Event(), threading.Condition()
        try:
            self._log, self._lock = FailureLog(store), threading.Lock()
        except RuntimeError as error:
            raise store_lost(rank, len(global_ranks), error) from error
        self._callbacks: list[Callable[[Failure], object]] = []
        self._handlers: dict[str, Callable[[dict[str, Any]], object]] = {}
        self._left_at = 0.0
        self._process = os.getpid()
        neighbours = self._meet(store, rank, host, timeout)
        self._messenger = Messenger(self.rank, neighbours, self._hear, self._neighbour_has_gone, self._look)
        self._messenger.start()
        _channels.add(self)

    def _meet(self, store: Any, rank: int, host: str, timeout: float) -> list[Connection]:
        """Connect to both neighbours, by their ranks in the ring; name them as messages do."""
        self._pages: dict[int, Page | None] = {}
        if len(self.global_ranks) == 1:
            return []
        meeting = Meeting(store, rank, len(self.global_ranks), ip_for(store), host)
        try:
            neighbours = list(meeting.connect(timeout, self._check_log))
        except NeighbourHasEndedError as error:
            self._settle_alone(Failure(self.global_ranks[error.rank], Kind.ENDED, 0, "start-up"))
            time.sleep(START_UP_SECONDS)
            raise self._start_up_error() from error
        except RankHasNotComeError as error:
            # This rank will end now, and must not be taken for the one that is missing.
            self._settle_alone(Failure(self.global_ranks[error.rank], Kind.ABSENT, 0, "start-up", str(error)))
            raise self._start_up_error() from error
        finally:
            meeting.close()
        for each in neighbours:
            address, each.peer = meeting.addresses[each.peer], self.global_ranks[each.peer]
            if address.host == host:
                with contextlib.suppress(InspectionError):  # it may have ended meanwhile
                    self._pages[each.peer] = page_of(address.pid, self.progress.read().run, each.peer)
        return neighbours

    def enter(self, phase: str) -> None:
        """Note the phase of its step in which this rank is from now on; what the program has named itself stays."""
        if self.progress.current_phase in OF_A_STEP:
            self.progress.current_phase = phase

    @property
    def store(self) -> Any:
        """Where the ranks have met, through a connection of this channel's own, for what takes no time."""
        return self._log.store

    # ------------------------------------------------------------------------------- what is known

    def check(self) -> None:
        """Raise :class:`PeerFailure` if another rank has failed."""
        if self.failure is not None:
            raise self.error()

    def check_waiting(self, ranks: Collection[int], since: float) -> None:
        """As :meth:`check`, for a rank that has waited for others since a moment of ``time.monotonic()``: raises, too,
        if one of them has left for good."""
        self.check()
        if self.left and time.monotonic() > max(since, self._left_at) + LEFT_SECONDS:
            gone = min((rank for rank in self.left if rank in ranks and rank != self.rank), default=None)
            if gone is not None:
                self.report(Failure(gone, Kind.LEFT, self.left[gone], "tear-down"))
                self.check()

    def error(self) -> PeerFailure:
        """What :meth:`check` raises."""
        assert self.failure is not None
        return self.failure.error(self.rank)

    def explain(self, error: BaseException, grace: float = GRACE_SECONDS) -> PeerFailure | None:
        """The failure of another rank from which an error of a group follows, if there is one, or soon will be.

        A rank that has left in good order is one, too: the group has lost it.
        """
        if (known := peer_failure_in(error)) is not None:
            return known
        until = time.monotonic() + grace
        with self._changed:
            while self.failure is None and not self.left and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
        if self.failure is None and self.left and not isinstance(error, PeerFailure):
            gone = min(self.left)
            self.report(Failure(gone, Kind.LEFT, self.left[gone], "tear-down"))
        return self.error() if self.failure is not None else None

    def when_failed(self, callback: Callable[[Failure], object]) -> None:
        """Call when another rank has failed, from the channel's thread; at once if one has failed already."""
        with self._changed:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        callback(self.failure)

    # ----------------------------------------------------------------------------- what others are told

    def report(self, failure: Failure) -> None:
        """Write a failure, this rank's or another's, to the log, and tell everybody."""
        with self._lock:
            self._log.append(failure)
        self.tell("failure", failure=failure.to_json())
        self._learn(failure)

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message around the ring; ranks that have set :meth:`on` for that kind are called with its fields."""
        self._messenger.send(kind, **fields)

    def wait_until_told(self, seconds: float = GRACE_SECONDS) -> None:
        """Return when what this rank has to tell has left, or after some seconds.

        Before anything that may hold the interpreter for long, as a garbage collection does.
        """
        self._messenger.wait_until_sent(seconds)

    def on(self, kind: str, handler: Callable[[dict[str, Any]], object]) -> None:
        """Call a handler with each message of a kind, from the channel's thread."""
        self._handlers[kind] = handler

    # ------------------------------------------------------------------------------------------ the end

    def announce_end(self) -> None:
        """Tell the others that this rank is done, in good order or after a failure."""
        step = self.progress.step
        self.left[self.rank] = step
        self.tell("left", rank=self.rank, step=step)

    def wait_for_others(self, timeout: float) -> bool:
        """Return when all others are done, too, or after some seconds; whether they are.

        If a rank has failed, all wait a moment for each other: a launcher would end the others with the first that
        ends.
        """
        begin = time.monotonic()
        with self._changed:
            while not self._all_are_gone():
                limit = min(timeout, FAREWELL_SECONDS) if self._known.is_set() else timeout
                if (left := begin + limit - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(left, LOOK_SECONDS))
        return True

    def close(self) -> None:
        """End the thread, and close the connections; without :meth:`announce_end` before, that is a death to others."""
        if self._process != os.getpid():
            return
        if self._messenger.close():
            self._close_pages()

    def _all_are_gone(self) -> bool:
        return len(self.left.keys() | self.ended) == len(self.global_ranks)

    # ------------------------------------------------------------------------------ the channel's thread

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "failure":
            self._learn(Failure.from_json(message["failure"]))
        elif kind == "left":
            with self._changed:
                self.left[message["rank"]] = message["step"]
                self._left_at = time.monotonic()
                self._changed.notify_all()
        elif kind in self._handlers:
            self._handlers[kind](message)

    def _neighbour_has_gone(self, rank: int) -> None:
        with self._changed:
            told = rank in self.left or rank in self.ended
            self.ended.add(rank)
            self._changed.notify_all()
        if not told:
            page = self._pages.get(rank)
            snapshot = page.read() if page is not None else None
            step, phase = (snapshot.step, snapshot.phase) if snapshot is not None else (0, "")
            self.report(Failure(rank, Kind.ENDED, step, phase))

    def _look(self) -> None:
        with self._lock:
            entries = self._log.read()
        if entries and not self._known.is_set():
            self._learn(entries[0])

    def _check_log(self) -> None:
        """While the ranks meet: raise if one of them has failed already."""
        entries = self._log.read()
        if entries:
            self.failure = entries[0]
            self._known.set()
            raise self._start_up_error()

    def _learn(self, told: Failure) -> None:
        """Note the first failure: what the log says; if it is lost, what was told."""
        if told.kind is Kind.ENDED:
            with self._changed:
                self.ended.add(told.rank)
                self._changed.notify_all()
        if self._known.is_set():
            return
        with self._lock:
            entries = self._log.read()
        first = entries[0] if entries else told
        with self._changed:
            if self._known.is_set():
                return
            self._known.set()
            if first.rank != self.rank or first.kind is Kind.STALLED:  # others say this of a rank that is alive
                self.failure = first
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        if self.failure is not None:
            self._messenger.send_first()
            for callback in callbacks:
                callback(self.failure)

    def _settle_alone(self, failure: Failure) -> None:
        """Before there is a ring: write down what another rank is found to have done; that is what this one raises."""
        self._log.append(failure)
        self.failure = (self._log.entries or [failure])[0]
        self._known.set()

    def _start_up_error(self) -> CommunicationError | PeerFailure:
        """What to raise where the ranks have not met, after what is known."""
        assert self.failure is not None
        return CommunicationError(self.failure.what) if self.failure.kind is Kind.ABSENT else self.error()

    def close_connections(self) -> None:
        """Close all, as a forked process does with its copies of its parent's."""
        self._messenger.close_connections()
        self._close_pages()

    def _close_pages(self) -> None:
        for page in self._pages.values():
            if page is not None:
                page.close()


_channels: "weakref.WeakSet[FailureChannel]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process, such as one that loads data, must not keep a dead rank's connections open."""
    for channel in list(_channels):
        channel.close_connections()
    _channels.clear()
    watched_groups.clear()


os.register_at_fork(after_in_child=_close_in_child)


# ------------------------------------------------------------------------------------ channels of groups

watched_groups: list[tuple["weakref.ref[Any]", FailureChannel]] = []
"""Groups and their channels: empty where nobody watches, which is all that a step has to look at then."""


def watch_group(group: Any, channel: FailureChannel) -> None:
    """From now on, waits for this group's collectives hear of failures from this channel."""
    watched_groups.append((weakref.ref(group), channel))


def forget(channel: FailureChannel) -> None:
    """Its groups have no channel any more."""
    watched_groups[:] = [(group, each) for group, each in watched_groups if each is not channel and group() is not None]


def channel_of(group: Any, ranks: Sequence[int] = ()) -> FailureChannel | None:
    """The channel of a group, or one that has all its ``ranks`` (of the default group); None if there is none."""
    for watched, channel in watched_groups:
        if watched() is group:
            return channel
    if ranks:
        for _, channel in watched_groups:
            if set(ranks) <= set(channel.global_ranks):
                return channel
    return None
