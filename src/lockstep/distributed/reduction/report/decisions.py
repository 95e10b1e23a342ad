"""Decisions of all ranks without a collective of their own: stop, skip a batch, and which ranks have batches left.

Each rank writes the state of its loop into the status of its next round (``report/status.py``). All ranks read the
same report, so all know in the same step. Loops may be nested; a round belongs to the innermost.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lockstep.distributed.comm.group_state import shared_by_ranks, shared_object, state_of
from lockstep.distributed.comm.groups import Group, is_registered
from lockstep.distributed.reduction.report.verdict import LoopVerdict
from lockstep.errors import OptionError, ShareError

_MANY_LOOKS = 1000
"""More than there are micro-batches in a step, or batches in most evaluations."""


class _Batch(NamedTuple):
    """The state of the current batch of a loop."""

    ends: bool = False
    """True if this rank has no batch after this one."""
    uneven: bool = False
    """True if some rank may have run out of batches."""
    skipped: bool = False
    """True if all ranks skip this batch, or none has one."""
    failed: bool = False
    """True if backward of this batch has failed on some rank, as all ranks know."""
    raised: bool = False
    """True if the round of this batch has ended with an error on all ranks."""


class _Active(NamedTuple):
    """The ranks that have a batch; None: all, as far as known."""

    now: Collection[int] | None
    next: Collection[int] | None
    """Those that have another one, if the loop looks ahead."""


class Loop:
    """The state of one loop: its batch on this rank, and the reports of all ranks."""

    def __init__(self, looks_ahead: bool = False) -> None:
        """``looks_ahead``: some rank does not know its number of batches."""
        self.looks_ahead = looks_ahead
        self.batch = _Batch()
        """The current batch."""
        self.verdict = LoopVerdict()
        """What all ranks have said in the last round."""
        self._active: _Active | None = None  # None before the first batch
        self._ended = 0  # number of ranks of which it is known that they have no batch after the last round's

    def next_batch(self, ends: bool, uneven: bool, active: Collection[int] | None) -> None:
        """Go to the next batch: see :meth:`Decisions.next_batch`."""
        self.batch = _Batch(ends, uneven)
        known = self._active if self.looks_ahead else None
        self._active = _Active(active, active) if known is None else _Active(known.next, known.next)

    def update(self, verdict: LoopVerdict, failed: bool, is_over: bool) -> None:
        """Take over a round's verdict: see :meth:`Decisions.update`; ``is_over``: the loop is at a later batch now."""
        self.verdict = verdict
        if self.looks_ahead and self._active is not None:
            going_on = verdict.going_on if self.needs_names(verdict.ends, verdict.all_end) else self._active.next
            self._active = _Active(going_on if is_over else self._active.now, going_on)
            self._ended = verdict.ends
        if not failed:
            self.note(skipped=verdict.skipped, failed=False, raised=False)

    def needs_names(self, ends: int, all_end: bool) -> bool:
        """Return True if it is to be known which ranks have no batch after this one, now that ``ends`` have none."""
        return self.looks_ahead and ends != self._ended and not all_end

    def note(self, **changes: bool) -> None:
        """Note something of the current batch."""
        self.batch = self.batch._replace(**changes)

    def has_batch(self, rank: int) -> bool:
        """Return True if ``rank`` has a batch of its own, as far as all ranks know."""
        return self._active is None or self._active.now is None or rank in self._active.now


class _StopRequests:
    """Requests to stop, which travel over every group of the same ranks."""

    def __init__(self) -> None:
        self.own: list[Callable[[], object]] = []
        """Those of this rank."""
        self.heard = False
        """True if any rank had asked to stop when the ranks last exchanged that, over any of the groups."""
        self.heard_by: weakref.WeakSet[Decisions] = weakref.WeakSet()
        """The decisions of the groups."""
        self.looks = 0
        """How often the program has looked since that exchange."""


at_padding: "list[Decisions]" = []
"""Those whose rank is at a padding batch, once for each such loop. Mostly empty: then a step looks no further."""


class Decisions:
    """The state of this rank's loops over one group, as it tells the other ranks, and what they have told."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._state = state_of(group)
        self._loops = [Loop()]  # from the outermost; the first stands for code outside of batches()
        self.innermost = self._loops[0]
        """The loop that rounds belong to."""
        self.shares: list[int] = []
        """The shares of a batch that the rank is in."""
        self._requests = shared_by_ranks(_StopRequests, group)
        self._requests.heard_by.add(self)
        self._stops = False
        self._unfinished: list[weakref.WeakMethod[Any]] = []
        self.skips_next = False
        """True if the rank skips the batch in its next round, which has other micro-batches as well."""
        self._skippable: list[tuple[type[BaseException], ...]] = []

    # ------------------------------------------------------------------------------ what this rank says

    @property
    def batch(self) -> int:
        """The number of the batch that the innermost loop is at, counted by ``batches()``; 0 outside of loops."""
        return self._state.batch if len(self._loops) > 1 else 0

    def asks_to_stop(self) -> bool:
        """Return True if the report that is made now asks all ranks to stop."""
        requests = self._requests
        requests.looks = 0
        return bool(requests.own) and any(asks() for asks in requests.own)

    def stop_when(self, request: Callable[[], object]) -> None:
        """Ask all ranks to stop as soon as ``request()`` returns a true value, such as a reason, before a report."""
        if request not in self._requests.own:
            self._requests.own.append(request)

    def hear_requests(self, stops: bool) -> None:
        """Some rank asks all to stop, if ``stops``: all ranks have exchanged that outside of a round, and all know."""
        self._stops = self._stops or stops
        self._requests.heard |= stops

    @contextmanager
    def loop(self, looks_ahead: bool) -> Iterator[Loop]:
        """Run a loop, inside of those under way; ``looks_ahead``: some rank does not know its number of batches.

        Raises :class:`OptionError` inside of a loop that looks ahead.
        """
        self._finish_rounds()
        if self.innermost.batch.raised and len(self._loops) > 1:
            self._end(self.innermost)  # an error has left it, and something still refers to its generator
        if any(loop.looks_ahead for loop in self._loops):
            raise OptionError(
                "batches(): a loop was begun inside of another one whose loader has no length on some rank. Ranks tell "
                "each other with their gradients when such a loop ends, and can do so for the innermost loop alone; "
                "give the outer loader a length, or go through the inner one without batches(), equally often on all "
                "ranks"
            )
        loop = Loop(looks_ahead)
        self._state.begin_loop()
        self._loops.append(loop)
        self.innermost = loop
        try:
            yield loop
        finally:
            self._end(loop)

    def _end(self, loop: Loop) -> None:
        if loop in self._loops:
            self._loops.remove(loop)
        self.innermost = self._loops[-1]
        if len(self._loops) == 1:
            self.skips_next = False

    def next_batch(self, loop: Loop, ends: bool, uneven: bool, active: Collection[int] | None) -> None:
        """Go to the next batch of a loop.

        ``ends``: it is this rank's last; ``uneven``: some rank may have run out; ``active``: the ranks that have not,
        or None if unknown or all.
        """
        self._state.next_batch()
        loop.next_batch(ends, uneven, active)

    @contextmanager
    def padding(self) -> Iterator[None]:
        """Run code as a rank that has run out of batches: it contributes nothing."""
        at_padding.append(self)
        try:
            yield
        finally:
            at_padding.remove(self)

    @contextmanager
    def inside_share(self, share: int) -> Iterator[None]:
        """Run one share of a batch in a loop that goes through this rank's shares."""
        self.shares.append(share)
        try:
            yield
        finally:
            self.shares.pop()

    def check_outside_share(self, global_rank: int) -> None:
        """Raise :class:`ShareError` inside of a share, of which another rank may have more or fewer."""
        if self.shares:
            raise ShareError(
                f"rank {global_rank}: a backward pass in share {self.shares[-1]} of a batch has "
                "reached a module that is replicated without shares over the same process group, and would synchronise "
                "it once for each share, of which ranks have different numbers; replicate it with as many shares, too, "
                "run its backward after the loop over the batch's shares, or its forward under torch.no_grad()"
            )

    @property
    def is_padding(self) -> bool:
        """True if the rank contributes nothing with the current batch."""
        return self in at_padding

    @property
    def counts_nothing(self) -> bool:
        """True if the rank is at a padding batch of a loop over this group or, where there is no loop over it, over any
        other: what it tells the ranks of this one counts nothing, as those of one host that normalise together."""
        return self.is_padding or self.pads_elsewhere

    @property
    def pads_elsewhere(self) -> bool:
        """True if the rank is in no loop over this group, and at a padding batch of one over another."""
        if self.batch or not is_registered(self.group):
            return False
        return any(each is not self and is_registered(each.group) for each in at_padding)

    def skip_in_next_round(self) -> None:
        """Skip the batch in the next round, which has other micro-batches as well."""
        self.skips_next = True

    @contextmanager
    def skipping_on(self, errors: tuple[type[BaseException], ...]) -> Iterator[None]:
        """Skip the batch if a backward inside fails with one of ``errors``."""
        self._skippable.append(errors)
        try:
            yield
        finally:
            self._skippable.remove(errors)

    def skips_after(self, error: BaseException | None) -> bool:
        """Return True if ``error`` is one of those of :meth:`skipping_on`, so that the batch is skipped."""
        return any(isinstance(error, errors) for errors in self._skippable)

    # ------------------------------------------------------------------------------ what all ranks have said

    def update(self, verdict: LoopVerdict, batch: int, loop: Loop | None = None, failed: bool = False) -> None:
        """Take over the verdict of a round at batch number ``batch``.

        ``loop``: the loop of the round, which may have ended; None: the innermost. ``failed``: this rank has failed in
        the round, and knows the state of the batch already.
        """
        self._stops = verdict.stops
        # The report of a round in which this rank has failed is read late: another group's may have told since.
        self._requests.heard = verdict.stops or (failed and self._requests.heard)
        (loop or self.innermost).update(verdict, failed, batch != self.batch)

    def note_failure(self, *, at_backward: bool = True) -> None:
        """Note that the round of this batch ends with an error on all ranks, because of a failed backward or not."""
        self.innermost.note(failed=self.innermost.batch.failed or at_backward, raised=True)
        self.skips_next = False

    def note_new_step(self) -> None:
        """Note that the last round was that of an earlier step, which only ``batches()`` knows otherwise."""
        if self.innermost.batch.skipped:
            self.innermost.note(skipped=False)
        if len(self._loops) == 1 and self.innermost.batch.raised:
            self.innermost.note(failed=False, raised=False)

    def note_skipped(self) -> None:
        """Note that this batch is skipped, as all ranks know."""
        self.innermost.note(skipped=True, failed=False, raised=False)
        self.skips_next = False

    def finish_later(self, finish: Callable[[], object]) -> None:
        """Note a round in which this rank has failed; ``finish``: a method that reads its report, and updates this."""
        method = weakref.WeakMethod(finish)
        if method not in self._unfinished:
            self._unfinished.append(method)

    def _finish_rounds(self) -> None:
        while self._unfinished:
            finish = self._unfinished.pop()()
            if finish is not None:
                finish()

    @property
    def is_default(self) -> bool:
        """True if a report without news would change nothing in this state."""
        batch, verdict = self.innermost.batch, self.innermost.verdict
        return not (self._stops or batch.skipped or batch.failed or batch.raised or verdict.some_end or verdict.all_end)

    @property
    def has_failed(self) -> bool:
        """True if the round of this batch has failed, as all ranks know."""
        return self.innermost.batch.failed

    @property
    def active(self) -> list[int] | None:
        """The group ranks that have a batch in all loops; None if all have. The same on all ranks after each report."""
        for loop in self._loops:
            if loop.batch.uneven or loop.verdict.some_end:  # some rank may have run out of batches
                break
        else:
            return None
        ranks = range(self.group.size())
        return [rank for rank in ranks if all(loop.has_batch(rank) for loop in self._loops)]

    @property
    def should_stop(self) -> bool:
        """True if any rank had asked to stop when the ranks last exchanged that: the same on all of them.

        Waits for the end of a round in which this rank has failed.
        """
        requests = self._requests
        for each in list(requests.heard_by):
            each._finish_rounds()
        requests.looks += 1
        if requests.looks == _MANY_LOOKS and not requests.heard and self.group.size() > 1:
            warnings.warn(
                f"should_stop has been read {_MANY_LOOKS} times since the ranks of its group have last exchanged "
                "anything, and becomes true only when they do. If the modules are replicated over other ranks (one "
                "dimension of a mesh, for example), call lockstep.loop.agree(False) in each step",
                stacklevel=3,
            )
        return requests.heard

    @property
    def skipped(self) -> bool:
        """True if all ranks have skipped this batch, or none has one; waits as :attr:`should_stop` does."""
        self._finish_rounds()
        return self.innermost.batch.skipped

    @property
    def all_have_ended(self) -> bool:
        """True if no rank has a batch after the one of the last round; waits as :attr:`should_stop` does."""
        self._finish_rounds()
        return self.innermost.verdict.all_end


def decisions_of(group: Group) -> Decisions:
    """Return the decisions of a group: one object in a process, as long as it is referred to."""
    return shared_object(Decisions, group)
