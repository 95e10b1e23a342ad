"""How this rank takes part in the rounds of one module.

Most of the time it contributes what its backward passes have left (``contribution.py``). But it may have run out of
batches, and contribute nothing (``idle.py``, ``Join``); it may leave out its batch, which all ranks do then; its passes
may be ones that do not synchronise; and it may have other parameters, buffers or hooks than the ranks have agreed on,
which it has to say.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.distributed.buffers import KeptBuffers
from lockstep.distributed.reduction.contribution import Contribution, gradients_set_aside
from lockstep.distributed.reduction.engine import BackwardPass, current_pass
from lockstep.distributed.reduction.idle import IdleBatch, contributing_nothing
from lockstep.distributed.reduction.outcome import Outcome
from lockstep.distributed.reduction.passes import PassLog
from lockstep.distributed.reduction.round import Round
from lockstep.distributed.reduction.setup import Setup
from lockstep.distributed.reduction.status import Part, Status
from lockstep.distributed.reduction.weights import give_up_after_next_step
from lockstep.errors import OptionError

_NO_PASS = 0, 0, 0


class Participation:
    """What one rank brings to the rounds of a module, and what it says of itself in their reports."""

    def __init__(self, setup: Setup, outcome: Outcome, lock: AbstractContextManager[object]) -> None:
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
        self._setup, self._members, self._outcome, self._lock = setup, setup.members, outcome, lock
        self._decisions = setup.scheduler.decisions
        self._looked_in: BackwardPass | None = None  # of the gradients there, when it began
        self._in_round = False
        self._skips = False  # it leaves out its batch

    def set_requires_sync(self, required: bool) -> None:
        """Whether backward passes that begin from now on synchronise."""
        self.requires_sync = required

    # ------------------------------------------------------------------------------------- passes and rounds

    def look_for_changes(self) -> None:
        """A backward pass is about to reach the module: see whether it has other parameters than were agreed on."""
        known = bool(self._members.newcomers)
        changed = self._members.look()
        # A pass may open the round past the forward, and get to that afterwards:
        # test_a_new_buffer_is_noticed_when_backward_first_goes_past_forward.
        found = self._in_round and self.differs
        self.differs = found or (self.requires_sync and changed)
        if changed or known:
            self._watch_weights(self.contribution)

    def _watch_weights(self, contribution: Contribution) -> None:
        members = self._members
        contribution.weights.watch(members.parameters, members.newcomers)

    def pass_begins(self, this: BackwardPass) -> None:
        """A backward pass begins, and has added to no gradient yet."""
        if self._looked_in is None or self._looked_in.over:  # else it is begun by a hook of that one
            self._looked_in = this
            self.contribution.weights.look(idle=self.idle_batch is not None)

    def _has_looked(self) -> bool:
        """Whether the pass under way was known when it began."""
        this = current_pass()
        while this is not None and this is not self._looked_in:
            this = this.outer
        return this is not None

    def begin_pass(self, expected: bool) -> None:
        """A backward pass has reached the module, through its forward if that was ``expected``; raises, on this rank
        alone, as :meth:`Weights.use` does, or if nobody has looked at what was there before it."""
        weights = self.contribution.weights
        if weights.concerned and not expected and not self._has_looked():
            raise OptionError(
                "a backward pass goes past the module's forward in another thread than the one that has called "
                "accumulate(weight=...), or was begun by C++: which gradients had a weight before it cannot be told; "
                "call the module, or backward() in that thread"
            )
        weights.use()
        self.contribution.drift.look(self.requires_sync)

    def begin_round(self, expected: bool) -> None:
        """A round opens; ``expected``: its pass was to go through the module, which has been looked at."""
        if not expected:
            self.look_for_changes()
        self.differs = self.differs or self._setup.differs()
        self._in_round = True

    def end_pass(self, ended: Round | None, accumulated: bool, failed: bool) -> None:
        """A backward pass is over that was the round ``ended``, or has ``accumulated`` gradients, or neither;
        ``failed`` if all ranks know that its round has failed.

        After a failure no rank has a gradient: what is left differs by rank (``test_after_a_failed_backward.py``).
        """
        self._in_round = False
        if failed or (ended is not None and not ended.is_copied_out):
            self._setup.drop_gradients()
        if ended is not None:
            # After a failure, too, what was to be contributed is gone:
            # test_backward_that_fails_on_one_rank_fails_on_all_and_is_forgotten.
            self.contribution.forget()
        elif self.idle_batch is not None:
            self.idle_batch.undo()
            self.contribution.weights.note_closely()
        elif accumulated:
            self.contribution.accumulate()
        if failed or ended is not None:
            self.passes.end_round()
        self.passes.end_pass()

    def newcomer_arrived(self, parameter: Parameter) -> None:
        """A parameter that the ranks have not agreed on has got a gradient."""
        if self.idle_batch is None:
            self.contribution.weights.newcomer_arrived(parameter)
        else:
            self.idle_batch.newcomer_arrived(parameter)

    def takes_part(self, accumulates: bool) -> bool:
        """Return True if a backward pass that has gone through the module without a gradient of it is a round all the
        same.

        It is if other ranks may have gradients: a loss that, on this rank, reaches only what is frozen.
        """
        members = self._members
        trained = any(each.parameter.requires_grad for each in (*members.parameters, *members.newcomers))
        return accumulates and self.passes.is_reached and trained

    # ------------------------------------------------------------------------------- what it says of a round

    def describe(self, passive: bool, number: int, failed: bool) -> Status:
        """Return what this rank says of round ``number``; ``passive``: it takes part without a backward pass of its
        own."""
        own, weights, loops = self.contribution, self.contribution.weights, self._decisions
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
            weights.given,
            weights.given and bool(weights.earlier.copies),
            *(_NO_PASS if passive or self._skips else self.passes.summarize()),
            weights.total,
        )

    # ----------------------------------------------------------------- batches that count nothing, or are left out

    @contextmanager
    def contributing_nothing(self, part: Part) -> Iterator[None]:
        """Inside, this rank contributes nothing; what it was to contribute, it is still to contribute afterwards.

        Parameters have the reduced gradients then, unless its ``part`` is :attr:`Part.JOINED`.
        """
        before = self._setup.parameters
        self.look_for_changes()
        parameters = [*before, *self._members.newcomers]
        own = self.contribution
        self.contribution = Contribution(before, self._setup.collectives.global_rank, part)
        try:
            counts = lambda: not self._outcome.has_failed  # noqa: E731
            joined = part is Part.JOINED
            with gradients_set_aside(parameters) if joined else contributing_nothing(parameters, counts):
                yield
        finally:
            self.contribution = own
            if self._setup.parameters is not before:  # the ranks have agreed on others meanwhile
                own.renumber(before, self._setup.parameters)
            self._watch_weights(own)

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
        parameters = [member.parameter for member in (*self._setup.parameters, *self._members.newcomers)]
        self.idle_batch = IdleBatch(parameters, self.keep_buffers())
        self.contribution.weights.look(idle=True)
        self.contribution.weights.note_closely()

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
            self.contribution.leave_out()
            self._setup.drop_gradients()

    # ----------------------------------------------------------------------------------------- weights

    def announce(self, weight: float | None) -> None:
        """What the loss of the next backward passes counts, on top of what has been counted since the last round."""
        if self.idle_batch is not None:
            return
        if weight is not None:
            # What new parameters get has a weight, too:
            # test_what_a_new_parameter_has_had_before_is_not_mixed_up_past_the_module.
            self.look_for_changes()
        self.contribution.weights.announce(weight)

    def count_without_gradient(self) -> None:
        """A ``backward()`` has ended, perhaps without a gradient of the module: its loss counts all the same."""
        with self._lock:
            if self.contribution.weights.use_without_gradient():
                give_up_after_next_step(self)

    def gradients_zeroed(self) -> None:
        """``zero_grad()`` of the module has given up what had accumulated, and weights that came with no gradient."""
        with self._lock:
            self.contribution.weights.gradients_zeroed()

    def give_up_without_gradients(self) -> None:
        """The batch has been given up, as gradients show, where there are any."""
        with self._lock:
            self.contribution.weights.give_up_without_gradients()

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer uses the gradients of the module."""
        return self._members.has_parameter_of(optimizer)
