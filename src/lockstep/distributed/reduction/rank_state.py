"""How this rank takes part in the rounds of one module, and what it contributes to the next one.

Most of the time a rank contributes the gradients of its backward passes since the last round (:class:`Contribution`).
There are other cases: it has run out of batches, and contributes nothing; it leaves out its batch, and then all ranks
do; its backward passes do not synchronise; or its parameters, buffers or hook differ from those that the ranks have
agreed on, which it reports.

A rank that has run out of data runs its last batch again, so that its program stays in step (:class:`PaddingBatch`).
What its parameters have accumulated is set aside while a pass of that batch runs, and put back at its end, also if
backward does not go through the module's forward or runs under ``no_sync()``; so are its buffers. Then it takes part in
the round without a contribution, and gets the reduced gradients as all other ranks do.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.distributed.reduction.contribution import Contribution
from lockstep.distributed.reduction.module.buffer_sync import BufferSync
from lockstep.distributed.reduction.module.buffers import KeptBuffers
from lockstep.distributed.reduction.module.drift import DriftWatch
from lockstep.distributed.reduction.module.managed_parameters import ManagedParameter
from lockstep.distributed.reduction.module.parameters import ParameterSet
from lockstep.distributed.reduction.report.decisions import Decisions
from lockstep.distributed.reduction.report.pass_log import PassLog, StepLog
from lockstep.distributed.reduction.report.status import UNKNOWN_STEPS, Part, Status


class PaddingBatch(NamedTuple):
    """A batch that a rank runs again because it has run out."""

    members: Sequence[ManagedParameter]
    """The parameters of the module when the batch begins, which must not change in it."""
    buffers: KeptBuffers
    """What the module has got from the last round, which it gets back after each pass of the batch."""


class RankState:
    """What one rank contributes to the rounds of a module, and the status that it reports in them."""

    def __init__(
        self,
        members: ParameterSet,
        buffers: BufferSync,
        drift: DriftWatch,
        decisions: Decisions,
        global_rank: int,
        lock: AbstractContextManager[object],
    ) -> None:
        """``lock`` is held by whoever changes anything here: hooks run in threads of the engine."""
        self.requires_sync = True
        """True if backward passes that begin from now on synchronise."""
        self.passes = PassLog()
        """What tells this rank's backward passes from those of others."""
        self.steps = StepLog()
        """How many steps optimizers have made since the last round."""
        self.contribution = Contribution(members.parameters)
        """What it contributes to the next round."""
        self.padding_batch: PaddingBatch | None = None
        """The batch that counts nothing, if the loop is at one."""
        self.used_at_last = b""
        """A one for each parameter that had a gradient in the last round that ended well."""
        self._members = members
        self._buffers = buffers
        self._drift = drift
        self._decisions = decisions
        self._global_rank = global_rank
        self._lock = lock

    @property
    def has_accumulated(self) -> bool:
        """True if micro-batches have accumulated that a later round is to reduce."""
        return self.contribution.is_local or self.contribution.awaits_block

    def set_requires_sync(self, required: bool) -> None:
        """Choose whether backward passes that begin from now on synchronise."""
        self.requires_sync = required

    # ------------------------------------------------------------------------------------- passes and rounds

    def look_for_changes(self) -> bool:
        """Return True if the module has other parameters than agreed on, when a backward pass, a batch or a block
        begins."""
        changed = self._members.look_for_changes()
        if self.contribution.weights:
            self.contribution.check_members(self._members.here)
        if self.padding_batch is not None:
            self.contribution.check_same_members(self.padding_batch.members, self._members.here)
        return changed

    def accumulate(self, came: Sequence[int], of: int) -> None:
        """Add a backward pass that does not synchronise: see :meth:`Contribution.add`."""
        self.contribution.add(came, of)
        self.contribution.is_local = True
        self._drift.note_local_pass()

    def pass_failed(self) -> None:
        """Note that a backward pass has failed on this rank. If it synchronises, its contribution is dropped anyway."""
        if self.padding_batch is None:
            self.contribution.pass_failed()

    def warn_of_local_gradients(self, optimizer: Optimizer) -> None:
        """Warn that an optimizer uses a gradient that is this rank's only, unless the program may have summed it."""
        name = self.contribution.local_gradient(optimizer)
        if name is not None and self._drift.note_local_step():
            warnings.warn(
                f"rank {self._global_rank}: {type(optimizer).__name__}.step() uses the gradient of parameter {name} "
                "of this rank alone, so the replicas drift apart. The last backward before optimizer.step() must not "
                "be under no_sync(), accumulate(last=False) or set_requires_gradient_sync(False)",
                stacklevel=6,
            )

    def renumber(self) -> None:
        """Note that the ranks have agreed on other parameters."""
        self.contribution.renumber(self._members.parameters)

    def end_round(self, opened: bool, applied: bool, knows_steps: bool) -> None:
        """Note that a backward pass with a round is over, whether or not the round has ``opened`` on this rank.

        ``applied``: the round has ended well; ``knows_steps``: optimizers make as many steps from now on as on all
        ranks that do the same.

        The contribution is dropped after a failure, too:
        test_backward_that_fails_on_one_rank_fails_on_all_and_is_forgotten.
        """
        if not opened and self.padding_batch is not None:
            self.padding_batch.buffers.give_back()
        if applied and self.contribution.used != self.used_at_last:
            self.used_at_last = bytes(self.contribution.used)
        self.contribution.forget()
        self.passes.end_round()
        self.steps.end_round(known=knows_steps)

    def end_pass(self, accumulated: bool) -> None:
        """Note that a backward pass without a round is over, and whether it has ``accumulated`` gradients."""
        if self.padding_batch is not None:
            self.padding_batch.buffers.give_back()
        if accumulated or self.padding_batch is not None:
            self.contribution.pass_ended()

    # ------------------------------------------------------------------------------- what it says of a round

    def status(self, number: int, part: Part, called: int | None, differs: bool) -> Status:
        """Return this rank's status for round ``number``, in which it takes that part.

        ``called``: how the pass has called the module, as a :class:`Called`; None if there is no pass. ``differs``: the
        rank has other parameters, buffers or another hook than the ranks have agreed on.
        """
        loops, weights = self._decisions, self.contribution.weights
        if called is None or part is Part.SKIPS:
            called = through = unused_forwards = 0
        else:
            called, through, unused_forwards = self.passes.summarize(called)
        if loops.skips_next and part is not Part.FAILED:
            part = Part.SKIPS
        batch = loops.batch
        if batch:  # batches are compared, so that a forward beside them is none that was skipped
            unused_forwards = 0
        stops, ends = loops.asks_to_stop(), loops.innermost.batch.ends
        self._drift.has_missed_steps |= part is Part.JOINED
        drift = self._drift.tell(number, known=self.steps.count != UNKNOWN_STEPS)
        return Status(
            round=number,
            batch=batch,
            part=part,
            stops=stops,
            ends=ends,
            changed=differs,
            weighted=bool(weights),
            called=called,
            through=through,
            unused_forwards=unused_forwards,
            steps=self.steps.count,
            weight=sum(weights) if weights else 0.0,
            numbers=drift.numbers,
            values=drift.values,
        )

    # ----------------------------------------------------------------- batches that count nothing, or are left out

    @contextmanager
    def set_aside(self, restores: Callable[[Parameter], bool]) -> Iterator[None]:
        """Let this rank contribute nothing inside the block; what it has accumulated is kept for a later round.

        After the block the parameters for which ``restores`` returns True have the gradients of before.
        """
        before = self._members.parameters
        self.look_for_changes()
        parameters = [each.parameter for each in (*before, *self._members.added)]
        grads = [each.grad for each in parameters]
        kept, self.contribution = self.contribution, Contribution(before)
        for each in parameters:
            each.grad = None
        try:
            yield
        finally:
            self.contribution = kept
            if self._members.parameters is not before:
                kept.renumber(self._members.parameters)
            for each, grad in zip(parameters, grads, strict=True):
                if restores(each):
                    each.grad = grad

    def begin_padding_batch(self) -> None:
        """Begin a batch that counts nothing, until :meth:`end_padding_batch`, unless one has begun."""
        if self.padding_batch is not None:
            return
        self.look_for_changes()
        self.padding_batch = PaddingBatch(self._members.here, self._buffers.keep())

    def keep_padding(self) -> None:
        """Note that the rank has taken part in a round, after which the module has other buffers."""
        if self.padding_batch is not None:
            self.padding_batch = self.padding_batch._replace(buffers=self._buffers.keep())

    def end_padding_batch(self) -> None:
        """End the batch: the loop goes on."""
        if self.padding_batch is not None:
            self.padding_batch.buffers.give_back()
        self.padding_batch = None

    def drop_gradients(self) -> None:
        """Drop all gradients and the contribution: the batch is left out."""
        with self._lock:
            self.contribution.forget()
            self._members.drop_gradients()

    # ----------------------------------------------------------------------------------------- weights

    @contextmanager
    def weighing(self, weight: float) -> Iterator[None]:
        """Run a block of ``accumulate(weight=...)``; at a padding batch it does nothing."""
        if self.padding_batch is not None:
            yield
            return
        self.look_for_changes()
        with self.contribution.block(weight, self._members.here, self.requires_sync):
            yield
