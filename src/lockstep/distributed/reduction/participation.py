"""How this rank takes part in the rounds of one module.

Most of the time it contributes what its backward passes have left (``contribution.py``). But it may have run out of
batches, and contribute nothing (``idle.py``, ``Join``); it may leave out its batch, which all ranks do then; its passes
may be ones that do not synchronise; and it may have other parameters, buffers or hooks than the ranks have agreed on,
which it has to say.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lockstep.distributed.buffers import KeptBuffers
from lockstep.distributed.reduction.contribution import Contribution, gradients_set_aside
from lockstep.distributed.reduction.idle import IdleBatch, contributing_nothing
from lockstep.distributed.reduction.passes import PassLog
from lockstep.distributed.reduction.setup import Setup
from lockstep.distributed.reduction.status import Part, Status

_NO_PASS = 0, 0, 0


class Participation:
    """What one rank brings to the rounds of a module, and what it says of itself in their reports."""

    def __init__(self, setup: Setup, lock: AbstractContextManager[object]) -> None:
        """``lock`` is held by whoever changes anything here: hooks run in threads of the engine."""
        self.requires_sync = True
        """Whether backward passes that begin from now on synchronise."""
        self.passes = PassLog()
        """What tells this rank's backward passes from those of others."""
        self.contribution = Contribution(setup.parameters, setup.collectives.global_rank)
        """What it contributes to the next round."""
        self.idle_batch: IdleBatch | None = None
        """The batch that counts nothing, if the loop is at one."""
        self.differs = False
        """Whether it has other parameters, buffers or hooks than the ranks have agreed on."""
        self.used_at_last = b""
        """A one for each parameter that had a gradient in the last round that ended well."""
        self.is_static = True
        """True if all such rounds have used the same parameters on this rank."""
        self._setup, self._members, self._lock = setup, setup.members, lock
        self._decisions = setup.scheduler.decisions
        self._in_round = False
        self._skips = False  # it leaves out its batch

    def set_requires_sync(self, required: bool) -> None:
        """Whether backward passes that begin from now on synchronise."""
        self.requires_sync = required

    # ------------------------------------------------------------------------------------- passes and rounds

    def look_for_changes(self) -> None:
        """A backward pass, a batch or a block begins: see whether the module has other parameters than agreed on."""
        changed = self._members.look()
        # A pass may open the round past the forward, and get to that afterwards:
        # test_a_new_buffer_is_noticed_when_backward_first_goes_past_forward.
        found = self._in_round and self.differs
        self.differs = found or (self.requires_sync and changed)
        window = self.contribution.window
        if window.is_open:
            window.look_at_members(self._members.here)
        if self.idle_batch is not None:
            window.fail_if_changed(self.idle_batch.members, self._members.here)

    def begin_pass(self) -> None:
        """A backward pass has reached the module."""
        self.contribution.window.pass_begins()
        self.contribution.drift.look(self.requires_sync)

    def pass_failed(self) -> None:
        """A backward pass has failed on this rank; where it synchronises, what it was to contribute is gone anyway."""
        if self.idle_batch is None:
            self.contribution.window.pass_failed()

    def begin_round(self, expected: bool) -> None:
        """A round opens; ``expected``: its pass was to go through the module, which has been looked at."""
        if not expected:
            self.look_for_changes()
        self.differs = self.differs or self._setup.differs()
        self._in_round = True

    @property
    def is_usual(self) -> bool:
        """True if it contributes what one backward pass has left, and no more."""
        own = self.contribution
        if self.differs or self._skips or self.idle_batch is not None or own.part is not Part.FULL:
            return False
        return own.window.is_unused and own.drift.is_unused

    def renumber(self) -> None:
        """The ranks have agreed on other parameters."""
        self.contribution = self.contribution.renumbered(self._setup.parameters)

    def note_used(self) -> None:
        """A round has ended well."""
        used = self.contribution.used
        if used != self.used_at_last:
            self.is_static = not self.used_at_last
            self.used_at_last = bytes(used)

    def end_round(self, opened: bool) -> None:
        """A backward pass is over that was a round, however that ended, and whether or not it has ``opened`` here.

        After a failure, too, what was to be contributed is gone:
        test_backward_that_fails_on_one_rank_fails_on_all_and_is_forgotten.
        """
        self._in_round = False
        if not opened and self.idle_batch is not None:
            self.idle_batch.undo()
        self.contribution.forget()
        self.passes.end_round()

    def end_pass(self, accumulated: bool) -> None:
        """A backward pass is over that was no round, and has perhaps ``accumulated`` gradients."""
        self._in_round = False
        if self.idle_batch is not None:
            self.idle_batch.undo()
        if accumulated or self.idle_batch is not None:
            self.contribution.window.pass_ended()
        self.passes.end_pass()

    def takes_part(self, accumulates: bool) -> bool:
        """Return True if a backward pass that has gone through the module without a gradient of it is a round all the
        same.

        It is if other ranks may have gradients: a loss that, on this rank, reaches only what is frozen.
        """
        members = self._members
        trained = any(each.parameter.requires_grad for each in (*members.parameters, *members.newcomers))
        return accumulates and self.passes.is_reached and trained

    # ------------------------------------------------------------------------------- what it says of a round

    def describe(self, number: int, passive: bool, failed: bool) -> Status:
        """Return what this rank says of round ``number``; ``passive``: it takes part without a backward pass of its
        own."""
        own, window, loops = self.contribution, self.contribution.window, self._decisions
        part = own.part
        if self._skips or (loops.skips_next and not failed):
            part = Part.SKIPS
        elif failed:
            part = Part.FAILED
        return Status(
            number,
            loops.batch,
            part,
            loops.asks_to_stop,
            loops.innermost.ends,
            self.differs,
            own.drift.suspects,
            window.is_open,
            *(_NO_PASS if passive or self._skips else self.passes.summarize()),
            window.total,
        )

    # ----------------------------------------------------------------- batches that count nothing, or are left out

    @contextmanager
    def contributing_nothing(self, part: Part, counts: Callable[[], bool]) -> Iterator[None]:
        """Inside, this rank contributes nothing; what it was to contribute, it is still to contribute afterwards.

        Parameters have the reduced gradients then, if the round ``counts``, unless its ``part`` is
        :attr:`Part.JOINED`.
        """
        before = self._setup.parameters
        self.look_for_changes()
        parameters = [*before, *self._members.newcomers]
        own = self.contribution
        self.contribution = Contribution(before, self._setup.collectives.global_rank, part)
        try:
            joined = part is Part.JOINED
            with gradients_set_aside(parameters) if joined else contributing_nothing(parameters, counts):
                yield
        finally:
            is_same = self._setup.parameters is before
            self.contribution = own if is_same else own.renumbered(self._setup.parameters)

    @contextmanager
    def leaving_out(self, leaves_out: bool = True) -> Iterator[None]:
        """Inside, this rank has all ranks leave out the batch, if it ``leaves_out``."""
        self._skips = leaves_out
        try:
            yield
        finally:
            self._skips = False

    def begin_idle_batch(self) -> None:
        """The loop is at a batch that counts nothing, until :meth:`end_idle_batch`; or already was."""
        if self.idle_batch is not None:
            return
        self.look_for_changes()
        self.idle_batch = IdleBatch(self._members.here, self.keep_buffers())

    def end_idle_batch(self) -> None:
        """The loop goes on."""
        if self.idle_batch is not None:
            self.idle_batch.end()
        self.idle_batch = None

    def keep_buffers(self) -> KeptBuffers:
        """What the module's buffers are now, to be given back."""
        return self._setup.buffers.keep()

    def drop_gradients(self) -> None:
        """The batch is left out: no parameter has a gradient, and nothing is to be contributed any more."""
        with self._lock:
            self.contribution.forget()
            self._setup.drop_gradients()

    # ----------------------------------------------------------------------------------------- weights

    @contextmanager
    def weighing(self, weight: float) -> Iterator[None]:
        """A block of ``accumulate(weight=...)``; at a batch that counts nothing it is none."""
        if self.idle_batch is not None:
            yield
            return
        self.look_for_changes()
        with self.contribution.window.block(weight, self._members.here, self.requires_sync):
            yield
