"""The failure channel of one rank: makes its failure known on all ranks, at once and by name.

Failures are written to the log, which decides which of them was the first, and are sent around the ring
(``messenger.py``). Nothing is sent while nothing happens, except for one look into the log a second, in case the ring
is broken in two places. ``check()`` reads one attribute. The thread that reads the ring waits for nothing else: actions
that take longer, such as asking the store or trying other hosts, run on other threads.
"""

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from lockstep._base import network
from lockstep._base.store import BoundedStore, StoreLostError, own_connection
from lockstep._base.telling import telling
from lockstep._base.texts import ranks_in_words
from lockstep.errors import CommunicationError, InspectionError, PeerFailure
from lockstep.failures.answers import AnswersOfRanks
from lockstep.failures.connections import SilentPeers
from lockstep.failures.deadlock import differ
from lockstep.failures.failure import GIVEN_UP, Failure, FailureLog, Kind, peer_failure_in
from lockstep.failures.hosts import REACH_SECONDS, WITNESSES, Hosts, Inquiry
from lockstep.failures.messenger import LOOK_SECONDS, Messenger
from lockstep.failures.progress import PHASES_OF_A_STEP, Page, Progress, page_of
from lockstep.failures.ring import (
    Connection,
    Meeting,
    NotMetError,
    Place,
    ToldError,
    not_come,
    not_met,
    store_lost,
)
from lockstep.failures.stacks import own_stack
from lockstep.failures.whereabouts import Whereabouts

GRACE_SECONDS = 1.0
"""Seconds that a rank that has lost its group waits to hear which rank failed."""
LEFT_SECONDS = 1.0
"""Seconds that a rank waits for one that has left in good order, before that is an error."""
LEFT_EARLY = (
    "if its data has ended earlier, loop over run.batches(loader), which gives equally many to all ranks; if it has "
    "left out a batch that raised an error, leave it out on all ranks by run.skip_on(...); if it has stopped, let all "
    "stop together by run.agree(flag)"
)
UNKNOWN_END = (
    "it may have failed, which its own output tells; an error that leaves `with lockstep.session():` or `with "
    "lockstep.watch():` is shown here"
)
FAREWELL_SECONDS = 2.0
"""Seconds that ranks wait for each other when one has failed, so that each can say why before a launcher ends it."""

LINK_SECONDS = 20.0
"""Seconds that a host may be silent by default: as long as a network switch takes to restart."""
TRY_SECONDS = REACH_SECONDS + 1.0
"""Seconds before that limit at which a silent host is tried: looks are a second apart, and it has one to answer."""
HEARSAY_SECONDS = 0.25
"""Seconds that a rank waits for reports from the ranks that could see the last step of a rank that has ended."""

CALL_SECONDS = 1.0
"""Seconds that ranks whose calls differ wait for what the others tell."""
START_UP_SECONDS = 2 * LOOK_SECONDS
"""Seconds that a rank lives on if it fails before all have met: it may host the store, which others still read."""


class FailureChannel:
    """The failures of other ranks that one rank knows, and the reports of its own failure.

    Every rank has to make one at the same time. Messages name the ranks by their numbers in ``global_ranks``; ``host``
    is the same for ranks of one host. A rank has failed if nothing comes from its host for ``link_timeout`` seconds.
    The constructor returns when all ranks are connected, or raises after ``timeout`` seconds.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        global_ranks: Sequence[int],
        progress: Progress,
        host: str,
        timeout: float,
        link_timeout: float = LINK_SECONDS,
    ) -> None:
        self.rank = global_ranks[rank]
        self.global_ranks = list(global_ranks)
        self.progress = progress
        self.link_timeout = link_timeout
        self.failure: Failure | None = None
        """The first failure, if it is another rank's; or this rank's, if the others have given it up."""
        self.left: dict[int, Failure] = {}
        """The ranks that have left, in good order or after a failure, with what is wrong if others still need them."""
        self.ended: set[int] = set()
        """The ranks whose process has ended without a message, or whose host is lost."""
        self.places: dict[int, Place] = {}
        """The processes and addresses of the ranks, as far as they are known."""
        self._here: set[int] = set()  # the ranks that have met their neighbours
        self._gone: set[int] = set()  # ranks of other hosts whose connections to a neighbour have ended
        self.pages: dict[int, Page] = {}
        """The pages of progress of the other ranks of this host."""
        self._known = threading.Event()
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[Failure], object]] = []
        self.hosts = Hosts(self.rank, self.places, self.tell)
        """What this rank can learn about the hosts of the others."""
        self._handlers: dict[str, Callable[[dict[str, Any]], object]] = {}
        self.on("reach", self.hosts.asked)
        self.on("reached", self.hosts.answered)
        self.on("gone", lambda message: self._note_gone(message["rank"]))
        self.answers = AnswersOfRanks(self.rank, self.tell)
        """What this rank knows of where all are."""
        self.on("answer", self.answers.hear)
        self._tries_links = threading.Lock()
        self._silent_peers = SilentPeers()
        self._left_at = 0.0
        self._process = os.getpid()
        deadline = time.monotonic() + timeout
        try:
            store = own_connection(store, timeout)
        except StoreLostError as error:
            raise store_lost(self.rank, len(self.global_ranks), error) from error
        self._log = FailureLog(store)
        with telling(lambda: self._who_has_come(store)):
            self._meet(store, host, timeout, deadline)

    def _meet(self, store: Any, host: str, timeout: float, deadline: float) -> None:
        try:
            neighbours, listener, own = self._meet_neighbours(store, host, timeout)
        except BaseException:
            self._log.close()
            raise
        self.places |= {self.rank: own, **{each.peer: each.place for each in neighbours if each.place is not None}}
        self._here.add(self.rank)
        self._messenger = Messenger(self.rank, neighbours, listener, self._hear, self._neighbour_has_gone, self._look)
        self._messenger.start()
        _channels.add(self)
        self.tell("here", rank=self.rank, place=own)
        self._wait_for_all(store, deadline, timeout)

    def _who_has_come(self, store: Any) -> str:
        with contextlib.closing(BoundedStore(store)) as bounded_store:
            missing = not_come(bounded_store, self.global_ranks)
        come = [rank for rank in self.global_ranks if rank not in missing]
        what = f"{ranks_in_words(missing)} of {len(self.global_ranks)} to come" if missing else "all ranks to connect"
        return f"rank {self.rank} waits for {what}; {ranks_in_words(come)} {'are' if len(come) > 1 else 'is'} here"

    def _meet_neighbours(
        self, store: Any, host: str, timeout: float
    ) -> tuple[Sequence[Connection], socket.socket | None, Place]:
        world = len(self.global_ranks)
        if world == 1:
            return [], None, Place(host, socket.gethostname(), os.getpid(), network.LOOPBACK)
        with contextlib.ExitStack() as stack:
            try:
                meeting_place = stack.enter_context(contextlib.closing(BoundedStore(store, timeout)))
                meeting = Meeting(meeting_place, self.rank, self.global_ranks, host, self.link_timeout)
            except StoreLostError as error:
                raise store_lost(self.rank, world, error) from error
            stack.callback(meeting.close)
            heard: list[Failure] = []

            def check_log() -> None:
                if heard:
                    raise ToldError(heard[0])
                self._log.look(heard.append)  # which may take longer than all else here: do not wait for it

            try:
                return meeting.connect(timeout, check_log)
            except (NotMetError, StoreLostError, ToldError) as error:
                failure = self.failure = self._note_in_log(error)
                self._known.set()
                # The others may still read the log, or connect to this rank. After a time-out theirs is over, too; but
                # the store ends with the first rank, and without it they cannot say who has not come.
                is_first = self.rank == self.global_ranks[0]
                seconds = START_UP_SECONDS if is_first or failure.kind is not Kind.ABSENT else 0.0
                messages = {"kind": "failure", "failure": failure}, {"kind": "left", "failure": self._end()}
                meeting.tell([{**each, "id": [self.rank, 1 + i]} for i, each in enumerate(messages)], seconds)
                raise self._start_up_error() from error

    def _note_in_log(self, error: NotMetError | StoreLostError | ToldError) -> Failure:
        """Return the failure from which the ``error`` of a meeting follows, and write it to the log, unless it was
        told."""
        if isinstance(error, ToldError):
            return error.failure
        if isinstance(error, NotMetError):
            failure = self._log.append(Failure(error.rank, error.kind, 0, "start-up", error.what))
            # With a lost store, another rank than the one that hosts it may have ended just because of that.
            if self._log.first or error.kind is not Kind.ENDED or error.rank == self.global_ranks[0]:
                return failure
        lost = store_lost(self.rank, len(self.global_ranks), error)
        return Failure(self.rank, Kind.ABSENT, 0, "start-up", str(lost))

    def _wait_for_all(self, store: Any, deadline: float, timeout: float) -> None:
        """Return when every rank has sent its place; raise if one fails before that, or does not come."""
        with self._changed:
            while len(self._here) < len(self.global_ranks):
                if self.failure is not None or (left := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
        missing = [rank for rank in self.global_ranks if rank not in self._here]
        if not missing:
            return
        error = None if self.failure is not None else self._not_met(store, timeout)
        if error is not None:
            rank = error.rank if isinstance(error, NotMetError) else self.rank
            self.report(Failure(rank, Kind.ABSENT, 0, "start-up", str(error)))
        self.announce_end()
        self.wait_for_others(START_UP_SECONDS)
        self.close()
        raise self._start_up_error() if self.failure is not None or error is None else error

    def _not_met(self, store: Any, timeout: float) -> CommunicationError:
        """Return the error to raise if others have not met their neighbours within ``timeout`` seconds."""
        with contextlib.closing(BoundedStore(store)) as bounded_store:
            try:
                return not_met(bounded_store, self.rank, self.global_ranks, timeout)
            except StoreLostError as error:
                return store_lost(self.rank, len(self.global_ranks), error)

    def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Mark this rank, inside the block, as waiting for the others in a collective of this library."""
        return self.progress.waiting(what)

    def enter(self, phase: str) -> None:
        """Record the phase of the step that this rank enters; a phase that the program has named itself stays."""
        if self.progress.current_phase in PHASES_OF_A_STEP:
            self.progress.current_phase = phase

    def compare_calls(self, key: str, what: str, ranks: Collection[int]) -> str:
        """Return in words which collectives ``ranks`` were in that have noticed that theirs are not the same.

        Each of them has to call it with the same ``key``, and ``what`` it was in itself. Waits a second for ranks that
        do not, such as those in a collective of the program.
        """
        seen, thread = self.progress.read(), own_stack(threading.get_ident())
        self.answers.give(replace(Whereabouts(self.rank).seen_at(seen, thread, time.monotonic()), waits_for=what), key)
        return differ(self.answers.wait_for(key, ranks, CALL_SECONDS), ranks)

    def part_of_store(self, name: str, seconds: float) -> BoundedStore:
        """Return a part of the store at which the ranks have met, on the channel's connection, whose calls have a limit
        of their own; it ends with the channel."""
        return self._log.bounded_store.part(name, seconds)

    # ------------------------------------------------------------------------------- what is known

    @property
    def knows_failure(self) -> bool:
        """True if a rank has failed, which may be this one."""
        return self._known.is_set()

    def check(self) -> None:
        """Raise :class:`PeerFailure` if another rank has failed."""
        if self.failure is not None:
            raise self.error()

    def check_waiting(self, ranks: Collection[int], since: float) -> None:
        """Do :meth:`check` for a rank that has waited for ``ranks`` since a time of ``time.monotonic()``; also raise if
        one of them has left for good."""
        self.check()
        if self.left and time.monotonic() > max(since, self._left_at) + LEFT_SECONDS:
            gone = min((rank for rank in self.left if rank in ranks and rank != self.rank), default=None)
            if gone is not None:
                self.report(self.missed(self.left[gone]))
                self.check()

    def error(self) -> PeerFailure:
        """Return the error that :meth:`check` raises."""
        assert self.failure is not None
        return self.failure.error(self.rank)

    def explain(self, error: BaseException, grace: float = GRACE_SECONDS) -> PeerFailure | None:
        """Return the failure of another rank from which a group's error follows, if it is known or soon will be.

        A rank that has left in good order counts as well: the group has lost it.
        """
        if (known := peer_failure_in(error)) is not None:
            return known
        until = time.monotonic() + grace
        with self._changed:
            while self.failure is None and not self.left and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
        if self.failure is None and self.left and not isinstance(error, PeerFailure):
            self.report(self.missed(self.left[min(self.left)]))
        return self.error() if self.failure is not None else None

    def when_failed(self, callback: Callable[[Failure], object]) -> None:
        """Call ``callback``, from the channel's thread, when another rank fails; at once if one has failed already."""
        with self._changed:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        callback(self.failure)

    # ----------------------------------------------------------------------------- what others are told

    def report(self, failure: Failure) -> None:
        """Write a failure, this rank's or another's, to the log, and tell all ranks; waits for the store."""
        first = self._log.append(failure)
        earlier = {} if first == failure else {"first": first}
        self.tell("failure", failure=failure, **earlier)
        self._learn(failure, first)

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message around the ring; ranks that have set :meth:`on` for its kind get its fields."""
        self._messenger.send(kind, **fields)

    def wait_until_told(self) -> None:
        """Return when the messages of this rank have been sent, or after a second.

        Call it before anything that may hold the interpreter for long, such as a garbage collection.
        """
        self._messenger.wait_until_sent(GRACE_SECONDS)

    def on(self, kind: str, handler: Callable[[dict[str, Any]], object]) -> None:
        """Call ``handler`` with each message of a kind, from the channel's thread."""
        self._handlers[kind] = handler

    def missed(self, left: Failure, waits: str = "") -> Failure:
        """Return what is wrong if a rank has ``left`` and this one still needs it: how far both have come, and who
        ``waits`` where, if that is known."""
        own = self.progress.read()
        counted = "batches begun" if own.in_batches else "optimizer steps made"
        how_far = f"{counted} are {left.step} on rank {left.rank} and {own.step} on rank {own.rank}, in {own.phase} now"
        what = "; ".join(filter(None, (how_far if left.step or own.step else "", left.what)))
        return replace(left, what="\n".join(filter(None, (what, waits))))

    # ------------------------------------------------------------------------------------------ the end

    def announce_end(self, closed: bool = True) -> None:
        """Tell the others that this rank is done, in good order or after a failure; ``closed``: not because its program
        has ended without closing its session."""
        self.left[self.rank] = left = self._end(closed)
        self.tell("left", failure=left)

    def _end(self, closed: bool = True) -> Failure:
        kind, why = (Kind.LEFT, LEFT_EARLY) if closed else (Kind.UNCLOSED, UNKNOWN_END)
        progress = self.progress
        return Failure(self.rank, kind, progress.step, "tear-down", why, in_batches=progress.in_batches)

    def wait_for_others(self, timeout: float) -> bool:
        """Return True when all others are done, too; False if they are not after ``timeout`` seconds.

        If a rank has failed, all wait a moment for each other: a launcher would end the others as soon as the first one
        ends.
        """
        begin = time.monotonic()
        with self._changed:
            while not self._all_are_gone():
                limit = min(timeout, FAREWELL_SECONDS) if self._known.is_set() else timeout
                if (left := begin + limit - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(left, LOOK_SECONDS))
            has_died = not self.ended <= self.left.keys()
        if has_died:  # it may not be known yet that this is a failure
            self._known.wait(GRACE_SECONDS)
        return True

    def close(self) -> None:
        """End the thread and close the connections; without :meth:`announce_end` before, others take it for a death."""
        if self._process != os.getpid():
            return
        if self._messenger.close():
            # They refer to the group, whose threads and connections would last until the garbage collector runs.
            self._callbacks, self._handlers = [], {}
        self._log.close()

    def _all_are_gone(self) -> bool:
        world = len(self.global_ranks)
        return len(self.left) + len(self.ended) >= world and len(self.left.keys() | self.ended) == world

    # ------------------------------------------------------------------------------ the channel's thread

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "failure":
            failure = Failure.of_fields(message["failure"])
            self._learn(failure, Failure.of_fields(message["first"]) if "first" in message else failure)
        elif kind == "here":
            self._note_place(message["rank"], Place(**message["place"]))
        elif kind == "left":
            with self._changed:
                left = Failure.of_fields(message["failure"])
                self.left[left.rank] = left
                self._left_at = time.monotonic()
                if len(self.left) == 1 or self._all_are_gone():  # nobody waits for those between
                    self._changed.notify_all()
        if kind in self._handlers:
            self._handlers[kind](message)

    def _note_place(self, rank: int, place: Place) -> None:
        """Record a rank's place, and open its page of progress while it is alive and can be asked."""
        if place.host == self.places[self.rank].host:
            with contextlib.suppress(InspectionError):  # it may have ended meanwhile
                page = page_of(place.pid, self.progress.read().run, rank)
                if page is not None:
                    self.pages[rank] = page
        with self._changed:
            self.places[rank] = place
            self._here.add(rank)
            if len(self._here) == len(self.global_ranks):
                self._changed.notify_all()

    def _neighbour_has_gone(self, connection: Connection) -> None:
        rank = connection.peer
        with self._changed:
            is_known = rank in self.left or rank in self.ended
            self.ended.add(rank)
            self._changed.notify_all()
        if not is_known:
            threading.Thread(
                target=self._tell_of_loss, args=(rank, connection.loss), name="lockstep loss", daemon=True
            ).start()

    def _tell_of_loss(self, rank: int, loss: OSError | None) -> None:
        """Report a neighbour whose connection has ended."""
        place, page = self.places[rank], self.pages.get(rank)
        lost = f"rank {self.rank} has lost the connection to {place.name}"
        ended = Failure(rank, Kind.ENDED, *((None, "") if rank in self._here else (0, "start-up")))
        if page is not None:
            seen = page.read()
            self.report(Failure(rank, Kind.ENDED, seen.step, seen.phase, in_batches=seen.in_batches))
        elif place.host == self.places[self.rank].host:
            self.report(ended)
        elif loss is not None:
            self._report_lost(self.hosts.inquire(rank, self._silence(rank, f" ({os.strerror(loss.errno or 0)})")))
        # Ranks that give up a silent host reset the connection, which may arrive.
        elif not (found := self.hosts.inquire(rank, lost, tries=True)).answers:
            self._report_lost(found)
        else:
            self.tell("gone", rank=rank)
            self._note_gone(rank)
            on_host = self.hosts.ranks_with(rank)
            if len(on_host) > 1:
                self._known.wait(HEARSAY_SECONDS)
            if len(on_host) > 1 and self.ended.issuperset(on_host):
                ended = replace(ended, rank=on_host[0])
                what = f"like all of its host, {place.name} ({ranks_in_words(on_host)})"
            else:
                what = f"on another host, {place.name}"
            self.report(replace(ended, what=f"{what}, while rank {self.rank} was {self.progress.read().where}"))

    def _note_gone(self, rank: int) -> None:
        """Note that a process on another host has ended; all of that host have if both of its ends in the ring have:
        else one would have told that it is there."""
        ring, on_host = self.global_ranks, self.hosts.ranks_with(rank)
        ends = {each for i, each in enumerate(ring) if not {ring[i - 1], ring[(i + 1) % len(ring)]} <= {*on_host}}
        with self._changed:
            self._gone.add(rank)
            self.ended.update(on_host if ends.intersection(on_host) <= self._gone else [rank])
            self._changed.notify_all()

    def look_for_lost_links(self) -> None:
        """Look whether a host acknowledges nothing; if it does not answer either, after ``link_timeout`` seconds report
        it. A rank that waits calls it once a second.

        The ring notices only the loss of its own connections; this finds those of process groups, whose time-outs are
        long. Does not wait: a host is tried on another thread, so early that the time for that is part of the limit.
        """
        limit = max(self.link_timeout - TRY_SECONDS, self.link_timeout / 2)
        ranks = self.hosts.at(self._silent_peers.find(limit))[:WITNESSES]
        if ranks and self._tries_links.acquire(blocking=False):
            threading.Thread(target=self._try_links, args=(ranks,), name="lockstep loss", daemon=True).start()

    def _try_links(self, ranks: list[int]) -> None:
        try:
            for rank in sorted(ranks):
                found = self.hosts.inquire(rank, self._silence(rank), tries=True)
                if self._known.is_set():
                    return
                if not found.answers:
                    self._report_lost(found)
                    return
        finally:
            self._tries_links.release()

    def _silence(self, rank: int, gist: str = "") -> str:
        return f"rank {self.rank} has heard nothing from {self.places[rank].name} for {self.link_timeout:g} s{gist}"

    def _report_lost(self, found: Inquiry) -> None:
        if found.is_cut_off:  # nobody elsewhere will say that it is done: do not wait for them at the end
            with self._changed:
                self.ended.update({*self.global_ranks} - {*self.hosts.ranks_with(self.rank)})
        self.report(found.failure)

    def _look(self) -> None:
        if not self._known.is_set():
            self._log.look(lambda first: self._learn(first, first))

    def _learn(self, told: Failure, first: Failure) -> None:
        """Record a failure that this rank was told of, and the first one, from which all others may follow."""
        with self._changed:
            if told.kind is Kind.ENDED:
                self.ended.add(told.rank)
            elif told.kind is Kind.UNREACHABLE:
                self.ended.update(self.hosts.ranks_with(told.rank))
            self._changed.notify_all()
            if self._known.is_set():
                return
            self._known.set()
            if first.rank != self.rank or first.kind in GIVEN_UP:  # these kinds may be reported of a rank that is alive
                self.failure = first
            callbacks, self._callbacks = self._callbacks, []
        if self.failure is not None:
            self._messenger.send_first()
            for callback in callbacks:
                callback(self.failure)

    def _start_up_error(self) -> CommunicationError | PeerFailure:
        """Return the error to raise, from what is known, where the ranks have not met."""
        assert self.failure is not None
        return CommunicationError(self.failure.what) if self.failure.kind is Kind.ABSENT else self.error()

    def close_connections(self) -> None:
        """Close all connections, as a forked process does with its copies of its parent's."""
        self._messenger.close_connections()


_channels: "weakref.WeakSet[FailureChannel]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked process, such as a data loader's: it must not keep a dead rank's open."""
    for channel in list(_channels):
        channel.close_connections()
    _channels.clear()


os.register_at_fork(after_in_child=_close_in_child)
