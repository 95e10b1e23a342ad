"""Decisions of all ranks that take no collective: stop, leave a batch out, who has run out of batches.

Each rank says in the status of its next round what its own loop is at (``reduction/status.py``). All ranks read the
same report, so all know in the same step. Loops may run inside of one another: a round belongs to the innermost.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import NamedTuple, Protocol

from lockstep.distributed.comm.group_state import Group, shared_object, state_of
from lockstep.errors import OptionError


class LoopVerdict(NamedTuple):
    """The part of a round's verdict that a loop is to know; by default, that all ranks go on."""

    stops: bool = False
    """Some rank asks all to stop after this step."""
    skipped: bool = False
    """Some rank leaves out this batch, so that all do, or none has one."""
    some_end: bool = False
    """Some rank has no batch after this one, or none already."""
    all_end: bool = False
    """No rank has a batch after this one."""
    going_on: Sequence[int] | None = None
    """The ranks that have one; None: all, as far as it matters."""


class HasAborted(Protocol):
    """Has aborted a round, and not heard yet what the other ranks have said in it."""

    def finish_aborted(self) -> None:
        """Tell the :class:`Decisions` of it."""


class _Batch(NamedTuple):
    """What is known of the batch that a loop is at."""

    ends: bool = False
    """This rank has no batch after this one."""
    uneven: bool = False
    """Some rank may have run out of batches."""
    skipped: bool = False
    """All ranks leave out this batch, or none has one."""
    failed: bool = False
    """The round of this batch has failed, and all ranks know."""
    failed_locally: bool = False
    """The last thing that has failed was a micro-batch that does not synchronise."""


class Loop:
    """What is known of one loop: how its batch ends on this rank, and what all ranks have said of theirs."""

    def __init__(self, looks_ahead: bool = False) -> None:
        """``looks_ahead``: some rank does not know how many batches it will have."""
        self.looks_ahead = looks_ahead
        self._batch = _Batch()
        self._said = LoopVerdict()  # in the last round
        self._active: Collection[int] | None = None  # the ranks that have a batch; None: all, as far as is known
        self._active_next: Collection[int] | None = None  # if the loop looks ahead: those that have another one
        self._has_begun = False

    def next_batch(self, ends: bool, uneven: bool, active: Collection[int] | None) -> None:
        """The loop goes on: see :meth:`Decisions.next_batch`."""
        self._batch = _Batch(ends, uneven)
        if self.looks_ahead and self._has_begun:
            self._active = self._active_next
        else:
            self._active = self._active_next = active
        self._has_begun = True

    def update(self, said: LoopVerdict, aborted: bool, is_over: bool) -> None:
        """A report has been read: see :meth:`Decisions.update`; ``is_over``: the loop is at a later batch now."""
        self._said = said
        if self.looks_ahead:
            self._active_next = said.going_on
            if is_over:
                self._active = said.going_on
        if not aborted:
            self._batch = self._batch._replace(skipped=said.skipped, failed=False)

    def note_failure(self) -> None:
        """Note that all ranks know that the round of this batch has failed."""
        self._batch = self._batch._replace(failed=True)

    def note_skipped(self) -> None:
        """Note that all ranks know that this batch is left out."""
        self._batch = self._batch._replace(skipped=True, failed=False)

    def note_local_failure(self) -> None:
        """Note that a micro-batch that does not synchronise has failed."""
        self._batch = self._batch._replace(failed_locally=True)

    def take_local_failure(self) -> bool:
        """Return True if the last thing that has failed was such a micro-batch; asked once."""
        found = self._batch.failed_locally
        self._batch = self._batch._replace(failed_locally=False)
        return found

    def has_batch(self, rank: int) -> bool:
        """Return True if ``rank`` has a batch of its own, as far as all ranks know."""
        return self._active is None or rank in self._active

    @property
    def ends(self) -> bool:
        """True if this rank has no batch after this one."""
        return self._batch.ends

    @property
    def skips(self) -> bool:
        """True if all ranks leave out this batch, or none has one."""
        return self._batch.skipped

    @property
    def has_failed(self) -> bool:
        """True if the round of this batch has failed, and all ranks know."""
        return self._batch.failed

    @property
    def all_end(self) -> bool:
        """True if all ranks have said that they have no batch after the one of the last round."""
        return self._said.all_end

    @property
    def may_be_padding(self) -> bool:
        """True if some rank may have run out of batches."""
        return self._batch.uneven or self._said.some_end

    @property
    def is_default(self) -> bool:
        """True if nothing is known that a report which says nothing would change."""
        batch, said = self._batch, self._said
        return not (batch.skipped or batch.failed or said.some_end or said.all_end)

    @property
    def is_usual(self) -> bool:
        """True if nothing is known but which batch it is, and every rank has this one and another one after it."""
        return self._batch == _USUAL_BATCH and not (self._said.some_end or self._said.all_end)


_USUAL_BATCH = _Batch()
_may_be_padding, _is_usual = attrgetter("may_be_padding"), attrgetter("is_usual")


class Decisions:
    """What the loops of this rank say to those of the other ranks of a group, and what all have said."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._state = state_of(group)
        self.batch = self._state.batch
        """The number of the batch that the innermost loop is at, counted by ``batches()``."""
        self._loops = [Loop()]  # from the outermost on; the first one is a loop that nobody counts
        self.innermost = self._loops[0]
        """The loop that rounds belong to."""
        self._padding: list[object] = []
        self._share: int | None = None
        self._requests: list[Callable[[], object]] = []
        self._aborted: weakref.WeakSet[HasAborted] = weakref.WeakSet()
        self.skips_next = False
        """The rank leaves out the batch in its next round, with other micro-batches."""
        self._stops = False
        self._skippable: list[tuple[type[BaseException], ...]] = []

    # ------------------------------------------------------------------------------ what this rank says

    @property
    def asks_to_stop(self) -> bool:
        """True if this rank asks all ranks to stop, in its next report."""
        return bool(self._requests) and any(asks() for asks in self._requests)

    def stop_when(self, request: Callable[[], object]) -> None:
        """Ask all ranks to stop from the first report on before which ``request()`` is something: a reason, True."""
        if request not in self._requests:
            self._requests.append(request)

    def hear_requests(self, stops: bool) -> None:
        """Some rank asks all to stop, if ``stops``: all ranks have exchanged that outside of a round, and all know."""
        self._stops = self._stops or stops

    @contextmanager
    def loop(self, looks_ahead: bool) -> Iterator[Loop]:
        """Inside, a loop runs, inside of those that are under way; ``looks_ahead``: some rank does not know how many
        batches it will have. Afterwards what was known of the others counts again.

        Raises :class:`OptionError` inside of a loop of which
        a rank does not know how many batches it will have.
        """
        self._finish_aborted()
        if any(loop.looks_ahead for loop in self._loops):
            raise OptionError(
                "batches(): a loop was begun inside of another one whose loader has no length on some rank. Ranks tell "
                "each other with their gradients when such a loop ends, and can do so for the innermost loop alone; "
                "give the outer loader a length, or go through the inner one without batches(), equally often on all "
                "ranks"
            )
        loop = Loop(looks_ahead)
        self._loops.append(loop)
        self.innermost = loop
        try:
            yield loop
        finally:
            self._loops = [each for each in self._loops if each is not loop]
            self.innermost = self._loops[-1]
            if len(self._loops) == 1:
                self.skips_next = False

    def next_batch(self, loop: Loop, ends: bool, uneven: bool, active: Collection[int] | None) -> None:
        """Note that a loop goes on with its next batch, which ``ends`` its own; ``uneven``: some rank may have run out;
        ``active``: the ranks that have not, if that is known and they are not all."""
        self.batch += 1
        self._state.batch = self.batch
        loop.next_batch(ends, uneven, active)

    @contextmanager
    def padding(self) -> Iterator[None]:
        """Inside, the rank has run out of batches: what it does counts nothing."""
        token = object()
        self._padding.append(token)
        try:
            yield
        finally:
            self._padding.remove(token)

    @contextmanager
    def inside_share(self, share: int) -> Iterator[None]:
        """Inside, the loop computes one share of a batch, as often as this rank has shares."""
        self._share = share
        try:
            yield
        finally:
            self._share = None

    @property
    def share(self) -> int | None:
        """The share that the loop is at, if it goes through the shares of a batch."""
        return self._share

    @property
    def is_padding(self) -> bool:
        """True if the batch that the loop is at counts nothing."""
        return bool(self._padding)

    def skip_in_next_round(self) -> None:
        """Note that the rank leaves out the batch in a round that is still to come, with other micro-batches."""
        self.skips_next = True

    def note_local_failure(self) -> None:
        """Note that a micro-batch that does not synchronise has failed."""
        self.innermost.note_local_failure()

    def take_local_failure(self) -> bool:
        """Return True if the last thing that has failed was such a micro-batch; asked once."""
        return self.innermost.take_local_failure()

    @contextmanager
    def skipping_on(self, errors: tuple[type[BaseException], ...]) -> Iterator[None]:
        """A backward that fails inside with one of ``errors`` leaves out the batch."""
        self._skippable.append(errors)
        try:
            yield
        finally:
            self._skippable.remove(errors)

    def skips_after(self, error: BaseException | None) -> bool:
        """Return True if :meth:`skipping_on` was told that the batch is to be left out after ``error``."""
        return any(isinstance(error, errors) for errors in self._skippable)

    # ------------------------------------------------------------------------------ what all ranks have said

    def update(self, said: LoopVerdict, batch: int, loop: Loop | None = None, aborted: bool = False) -> None:
        """Note that the report of a round has been read, at the batch of that number; ``said`` is what the ranks have
        said in it.

        ``loop`` is the one of its round, which may have ended since; the innermost if None. ``aborted``: of a round
        in which this rank has failed, so that what becomes of the batch is known.
        """
        self._stops = said.stops
        (loop or self.innermost).update(said, aborted, batch != self.batch)

    def note_failure(self, loop: Loop | None = None) -> None:
        """Note that all ranks know that the round of this batch has failed; ``loop`` as in :meth:`update`."""
        (loop or self.innermost).note_failure()
        self.skips_next = False

    def note_skipped(self) -> None:
        """Note that all ranks know that this batch is left out."""
        self.innermost.note_skipped()
        self.skips_next = False

    def round_ended(self) -> None:
        """Note that a backward that synchronises is over."""
        self.skips_next = False

    def note_aborted(self, reader: HasAborted) -> None:
        """Note a round that this rank has aborted, and in which it has not heard yet what the others have said."""
        self._aborted.add(reader)

    def _finish_aborted(self) -> None:
        while self._aborted:
            self._aborted.pop().finish_aborted()

    @property
    def is_default(self) -> bool:
        """True if nothing is known but which batch it is, so that a report that says no more changes nothing."""
        return not self._stops and self.innermost.is_default

    @property
    def is_usual(self) -> bool:
        """True if this rank has nothing to say in its next round but which batch it is at, and nothing is known of the
        others that matters to it."""
        if self._stops or self.skips_next or self._share is not None or self._padding:
            return False
        return all(map(_is_usual, self._loops)) and not (self._requests and self.asks_to_stop)

    @property
    def has_failed(self) -> bool:
        """True if the round of this batch has failed, and all ranks know."""
        return self.innermost.has_failed

    @property
    def may_be_padding(self) -> bool:
        """True if some rank may contribute nothing to the round under way. All ranks know alike."""
        return any(map(_may_be_padding, self._loops))

    @property
    def active(self) -> list[int] | None:
        """The ranks of the group that have a batch of their own, in all loops; None if all have. All ranks know alike,
        when the last report has been read."""
        if not self.may_be_padding:
            return None
        ranks = range(self.group.size())
        return [rank for rank in ranks if all(loop.has_batch(rank) for loop in self._loops)]

    @property
    def should_stop(self) -> bool:
        """True if any rank had asked to stop when the ranks last exchanged that: the same on all of them.

        Waits for the end of a round that this rank has aborted.
        """
        self._finish_aborted()
        return self._stops

    @property
    def skipped(self) -> bool:
        """True if any rank has left out this batch, so that all have, or none has one. Waits as :attr:`should_stop`
        does."""
        self._finish_aborted()
        return self.innermost.skips

    @property
    def all_have_ended(self) -> bool:
        """True if no rank has another batch after the one of the last round. Waits as :attr:`should_stop` does."""
        self._finish_aborted()
        return self.innermost.all_end


def decisions_of(group: Group) -> Decisions:
    """Return the decisions of a group: one in a process, for as long as somebody holds it."""
    return shared_object(Decisions, group)
