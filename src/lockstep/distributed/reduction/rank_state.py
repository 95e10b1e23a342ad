"""How this rank takes part in the rounds of one module, and what it contributes to the next one.

Most of the time a rank contributes the gradients of its backward passes since the last round (:class:`Contribution`).
There are other cases: it has run out of batches, and contributes nothing; it leaves out its batch, and then all ranks
do; its backward passes do not synchronise; or its parameters, buffers or hook differ from those that the ranks have
agreed on, which it reports.

A rank that has run out of data runs its last batch again, so that its program stays in step (:class:`PaddingBatch`).
Its parameters get no gradient from that batch, not even if backward does not go through the module's forward or runs
under ``no_sync()``, and its buffers stay as they were. Then it takes part in the round without a contribution, and gets
the reduced gradients as all other ranks do.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep.distributed.reduction.buffer_sync import BufferSync
from lockstep.distributed.reduction.buffers import KeptBuffers
from lockstep.distributed.reduction.decisions import Decisions
from lockstep.distributed.reduction.managed_parameters import ManagedParameter
from lockstep.distributed.reduction.parameters import ParameterSet
from lockstep.distributed.reduction.status import Part, PassLog, Status, StepLog
from lockstep.dtensors import local_part
from lockstep.optimizer_steps import has_any

_NO_WEIGHT = (
    "this backward pass has no weight, an earlier one since the last synchronisation had one; give accumulate() a "
    "weight in every micro-batch, or in none"
)
_AFTER_ROUND = (
    "a backward pass follows the one that has synchronised in the same block of accumulate(weight=...), whose weight "
    "is used up; put all but the last backward of a block under no_sync(), or each into a block of its own, with "
    "zero_grad() between"
)
_INCOMPLETE = (
    "gradients that have accumulated with a weight are not complete: a backward pass in a block of "
    "accumulate(weight=...) has failed, or an exception has left the block after one. All ranks give up what has "
    "accumulated since the last synchronisation"
)


class _Left(NamedTuple):
    """A reference to the gradient of a parameter, to notice later changes."""

    member: ManagedParameter
    grad: weakref.ref[Tensor] | None
    version: int

    @classmethod
    def now(cls, member: ManagedParameter) -> "_Left":
        """Return a record of the present gradient."""
        grad = member.parameter.grad
        return cls(member, None, 0) if grad is None else cls(member, weakref.ref(grad), grad._version)

    @property
    def is_unchanged(self) -> bool:
        """True if the gradient is the same object, and nothing has written to it."""
        grad = self.member.parameter.grad
        if grad is None or self.grad is None:
            return grad is None and self.grad is None
        return self.grad() is grad and grad._version == self.version


class Window:
    """The weighted micro-batches that one round reduces.

    The first block of ``accumulate(weight=...)`` opens a window, and the round closes it. Each block adds its weight
    once, even if no backward pass in it reaches the module. So that the sums of gradients and of weights match, a
    window begins without gradients, and nothing but backward may change them until the round. A violation makes this
    rank's part in the round fail, and thereby the round on all ranks: :attr:`problem`.
    """

    def __init__(self) -> None:
        self.weights: list[float] = []
        """The weights of its blocks; empty if the micro-batches have none: no window is open."""
        self.problem = ""
        """The reason why this rank's part in the next round has to fail, or an empty text."""
        self._blocks = 0  # number of blocks under way
        self._passes = 0
        self._lost = 0  # number of passes that have failed before they have reached the module
        self._left: list[_Left] = []

    @property
    def is_unused(self) -> bool:
        """True if no weights have been given."""
        return not (self.weights or self._blocks or self.problem)

    @contextmanager
    def block(self, weight: float, parameters: Sequence[ManagedParameter], synchronises: bool) -> Iterator[None]:
        """Run a block with a weight, of a module with these parameters; ``synchronises``: a round is expected in it.

        The weight does not count if all backward passes in the block have failed before they have reached the module.
        If no rank reaches the module, as when all of it is frozen, there is no round, and the window is closed anyway.
        """
        blocks, problem, passes, lost = len(self.weights), self.problem, self._passes, self._lost
        if blocks:
            self.check_gradients()
        else:
            self._open(parameters)
        self.weights.append(weight)
        self._blocks += 1
        try:
            yield
            if self.weights and self._lost > lost and self._passes == passes:
                del self.weights[blocks:]
            if synchronises and not self._passes:
                self.close()
        except BaseException:
            if self._passes > passes:
                self.fail(_INCOMPLETE)
            elif self.weights and blocks:  # no round has closed the window: the block does not count
                del self.weights[blocks:]
                self.problem = problem
            elif self.weights:
                self.close()
            raise
        finally:
            self._blocks -= 1

    def _open(self, parameters: Sequence[ManagedParameter]) -> None:
        zeros = are_zero([member.parameter.grad for member in parameters])
        if False in zeros:
            self.fail(
                f"parameter {parameters[zeros.index(False)].name} had a gradient when the first block of "
                "accumulate(weight=...) since the last synchronisation began, which would be divided by weights that "
                "are not its own; call zero_grad() before that block, and give accumulate() a weight in every "
                "micro-batch, or in none"
            )
        self._left = list(map(_Left.now, parameters))

    def pass_begins(self) -> None:
        """Note that a backward pass has reached the module."""
        self._passes += 1
        if self.weights and not self._blocks:
            self.fail(_NO_WEIGHT)
        elif self._blocks and not self.weights:
            self.fail(_AFTER_ROUND)

    def pass_ended(self) -> None:
        """Record the gradients after a backward pass."""
        self._left = [_Left.now(left.member) for left in self._left]

    def pass_failed(self) -> None:
        """Note that a pass that has reached the module has failed on this rank, without the other ranks being told."""
        self._passes += 1
        if self.weights:
            self.fail(_INCOMPLETE)

    def pass_lost(self) -> None:
        """Note that a pass that does not synchronise has failed on this rank before it has reached the module."""
        self._lost += 1

    def check_gradients(self) -> None:
        """Fail if any gradient has changed since the last pass; called outside of a pass, or when one begins."""
        changed = next((left for left in self._left if not left.is_unchanged), None)
        if changed is not None:
            self.fail(
                f"the gradient of parameter {changed.member.name} was written, replaced or given up since a backward "
                "pass with a weight, and its weight is not; leave gradients as they are from the first block of "
                "accumulate(weight=...) to the end of the one that synchronises, and call zero_grad() after it"
            )

    def check_members(self, parameters: Sequence[ManagedParameter]) -> None:
        """Fail if the module has other parameters now than when the window was opened."""
        if self.weights:
            self.fail_if_changed([left.member for left in self._left], parameters)

    def fail_if_changed(self, before: Sequence[ManagedParameter], now: Sequence[ManagedParameter]) -> None:
        """Fail if the module has other parameters ``now`` than ``before``."""
        names = [{id(member.parameter): member.name for member in each} for each in (before, now)]
        changed = names[0].keys() ^ names[1].keys()
        if changed:
            name = next(name for key, name in (names[0] | names[1]).items() if key in changed)
            self.fail(
                f"parameter {name} was put into the module or taken out of it within a window of micro-batches with a "
                "weight, or in a batch that counts nothing, since this rank has run out; change a module before the "
                "first block of accumulate(weight=...), and where every rank has a batch"
            )

    def fail(self, problem: str) -> None:
        """Let this rank's part in the round fail; the first problem counts."""
        self.problem = self.problem or problem

    def close(self) -> None:
        """Forget the weights: the round has ended, or all ranks discard the accumulated gradients."""
        self.weights.clear()
        self.problem = ""
        self._passes = 0
        self._left = []


def are_zero(grads: Sequence[Tensor | None]) -> list[bool]:
    """Return, for each gradient, True if it is None or all zero; waits for the device once."""
    values = [None if grad is None else _values_of(grad) for grad in grads]
    some = [each for each in values if each is not None and each.numel()]
    if not some:
        return [True] * len(grads)
    norms = torch._foreach_norm(some, math.inf)
    found = iter(torch.stack([(norm != 0).to(some[0].device) for norm in norms]).tolist())
    return [each is None or not each.numel() or not next(found) for each in values]


def _values_of(grad: Tensor) -> Tensor:
    local = local_part(grad.detach())
    return local.coalesce().values() if local.is_sparse else local


class Contribution:
    """The gradients and weights of this rank since the last round. Each backward pass adds to it; a round ends it,
    reduced or failed."""

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        window: Window | None = None,
        used: bytearray | None = None,
        is_local: bool = False,
    ) -> None:
        self._parameters = parameters
        self.used = used or bytearray(len(parameters))
        """A one for each parameter that has had a gradient since the last round."""
        self._none_used = bytes(len(parameters))
        self.window = window or Window()
        self.is_local = is_local
        """True if some pass since the last round has not synchronised."""

    def is_something(self, added: Sequence[ManagedParameter]) -> bool:
        """Return True if there is anything to contribute: a weight, a failure, or a gradient that is not zero, also of
        ``added``, which the ranks have not agreed on yet. May wait for the device."""
        if self.window.weights or self.window.problem:
            return True
        piled = [*compress(self._parameters, self.used), *added]
        return not all(are_zero([member.parameter.grad for member in piled]))

    def local_gradient(self, optimizer: Optimizer) -> str | None:
        """Return the name of a parameter of ``optimizer`` whose gradient is this rank's only; None if there is none."""
        if not self.is_local:
            return None
        own = (each for each in compress(self._parameters, self.used) if each.parameter.grad is not None)
        return next((each.name for each in own if has_any(optimizer, {id(each.parameter)})), None)

    def forget(self) -> None:
        """Begin a new contribution: the last one has been reduced, or dropped after a failure or with a batch that is
        left out."""
        self.used[:] = self._none_used
        self.is_local = False
        self.window.close()

    def renumbered(self, parameters: Sequence[ManagedParameter]) -> "Contribution":
        """Return the same flags for other parameters, under their new numbers."""
        used = {id(each.parameter) for each in compress(self._parameters, self.used)}
        found = bytearray(id(each.parameter) in used for each in parameters)
        return Contribution(parameters, self.window, found, self.is_local)


class PaddingBatch:
    """One idle batch; it lasts until :meth:`end`."""

    def __init__(self, members: Sequence[ManagedParameter], buffers: KeptBuffers) -> None:
        self.members = members
        """The parameters of the module when the batch begins."""
        parameters = [member.parameter for member in members]
        self._new: list[Parameter] = []  # parameters that had no gradient before the batch
        self._buffers = buffers
        self._hooks = [self._hook(each) for each in parameters if each.requires_grad]
        # A frozen parameter takes no hook, but the batch may unfreeze it:
        # test_what_a_rank_that_has_run_out_has_of_an_unfrozen_layer_does_not_count.
        frozen = [each for each in parameters if not each.requires_grad]
        self._frozen = [(each, None if each.grad is None else each.grad.clone()) for each in frozen]

    def _hook(self, parameter: Parameter) -> RemovableHandle:
        handle: RemovableHandle = parameter.register_hook(_ZeroGradHook(weakref.ref(self), parameter))
        return handle

    def note_new(self, parameter: Parameter) -> None:
        """Note that a parameter without a gradient is about to get one."""
        self._new.append(parameter)

    def undo(self) -> None:
        """Give parameters and buffers back what they had before the batch's forward and backward."""
        for parameter in self._new:
            parameter.grad = None
        self._new.clear()
        for parameter, grad in [each for each in self._frozen if each[0].requires_grad]:
            parameter.grad = grad
            self._hooks.append(self._hook(parameter))
        self._frozen = [each for each in self._frozen if not each[0].requires_grad]
        self._buffers.give_back()

    def round_ended(self, buffers: KeptBuffers) -> None:
        """Note that the rank has taken part in a round, after which the module has ``buffers``."""
        self._buffers = buffers

    def end(self) -> None:
        """End the batch: the loop goes on."""
        for hook in self._hooks:
            hook.remove()
        self._buffers.give_back()


class _ZeroGradHook:
    """Gradient hook that makes backward add zeros."""

    __slots__ = ("_batch", "_parameter")

    def __init__(self, batch: "weakref.ref[PaddingBatch]", parameter: Parameter) -> None:
        self._batch = batch
        self._parameter = weakref.ref(parameter)

    def __call__(self, grad: Tensor) -> Tensor:
        batch, parameter = self._batch(), self._parameter()
        if batch is not None and parameter is not None and parameter.grad is None:
            batch.note_new(parameter)
        return torch.zeros_like(grad)


_NO_PASS = 0, 0, 0


class RankState:
    """What one rank contributes to the rounds of a module, and the status that it reports in them."""

    def __init__(
        self,
        members: ParameterSet,
        buffers: BufferSync,
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
        self.differs = False
        """True if it has other parameters, buffers or another hook than the ranks have agreed on."""
        self.used_at_last = b""
        """A one for each parameter that had a gradient in the last round that ended well."""
        self.is_static = True
        """True if all such rounds have used the same parameters on this rank."""
        self._members = members
        self._buffers = buffers
        self._decisions = decisions
        self._global_rank = global_rank
        self._lock = lock
        self._in_round = False

    @property
    def has_accumulated(self) -> bool:
        """True if micro-batches have accumulated that a later round is to reduce."""
        return self.contribution.is_local or bool(self.contribution.window.weights)

    def set_requires_sync(self, required: bool) -> None:
        """Return True if backward passes that begin from now on synchronise."""
        self.requires_sync = required

    # ------------------------------------------------------------------------------------- passes and rounds

    def look_for_changes(self) -> None:
        """Check whether the module has other parameters than agreed on, when a backward pass, a batch or a block
        begins."""
        changed = self._members.look_for_changes()
        # A pass may open the round before it reaches outputs of the forward:
        # test_a_new_buffer_is_noticed_when_backward_first_goes_past_forward.
        found = self._in_round and self.differs
        self.differs = found or (self.requires_sync and changed)
        window = self.contribution.window
        if window.weights:
            window.check_members(self._members.here)
        if self.padding_batch is not None:
            window.fail_if_changed(self.padding_batch.members, self._members.here)

    def begin_pass(self) -> None:
        """Note that a backward pass has reached the module."""
        self.contribution.window.pass_begins()
        self.contribution.is_local = self.contribution.is_local or not self.requires_sync

    def pass_failed(self) -> None:
        """Note that a backward pass has failed on this rank. If it synchronises, its contribution is dropped anyway."""
        if self.padding_batch is None:
            self.contribution.window.pass_failed()

    def pass_lost(self) -> None:
        """Note that a backward pass that does not synchronise has failed on this rank before it has reached the
        module."""
        self.contribution.window.pass_lost()

    def begin_round(self, expected: bool, differs: bool) -> None:
        """Note that a round opens.

        ``expected``: its pass was to go through the module, which has been looked at; ``differs``: this rank has other
        hook or buffers than the ranks have agreed on.
        """
        if not expected:
            self.look_for_changes()
        self.differs = self.differs or differs
        self._in_round = True

    @property
    def is_usual(self) -> bool:
        """True if it contributes the gradients of one backward pass, and nothing else."""
        own = self.contribution
        if self.differs or self.padding_batch is not None:
            return False
        return own.window.is_unused and not own.is_local

    def warn_of_local_gradients(self, optimizer: Optimizer) -> None:
        """Warn that an optimizer uses a gradient that is this rank's only."""
        name = self.contribution.local_gradient(optimizer)
        if name is not None:
            warnings.warn(
                f"rank {self._global_rank}: {type(optimizer).__name__}.step() uses the gradient of parameter {name} "
                "of this rank alone, so the replicas drift apart. The last backward before optimizer.step() must not "
                "be under no_sync() or set_requires_gradient_sync(False)",
                stacklevel=6,
            )

    def renumber(self) -> None:
        """Note that the ranks have agreed on other parameters."""
        self.contribution = self.contribution.renumbered(self._members.parameters)

    def note_used(self) -> None:
        """Note that a round has ended well."""
        used = self.contribution.used
        if used != self.used_at_last:
            self.is_static = not self.used_at_last
            self.used_at_last = bytes(used)

    def end_round(self, opened: bool, knows_steps: bool) -> None:
        """Note that a backward pass with a round is over, whether or not the round has ``opened`` on this rank.

        ``knows_steps``: optimizers make as many steps from now on as on all ranks that do the same.

        The contribution is dropped after a failure, too:
        test_backward_that_fails_on_one_rank_fails_on_all_and_is_forgotten.
        """
        self._in_round = False
        if not opened and self.padding_batch is not None:
            self.padding_batch.undo()
        self.contribution.forget()
        self.passes.end_round()
        self.steps.end_round(known=knows_steps)

    def end_pass(self, accumulated: bool) -> None:
        """Note that a backward pass without a round is over, and whether it has ``accumulated`` gradients."""
        self._in_round = False
        if self.padding_batch is not None:
            self.padding_batch.undo()
        if accumulated or self.padding_batch is not None:
            self.contribution.window.pass_ended()
        self.passes.end_pass()

    def takes_part(self, accumulates: bool) -> bool:
        """Return True if a backward pass that has gone through the module, but left no gradient in it, still takes part
        in a round.

        It does if other ranks may have gradients: on this rank the loss reaches only frozen parameters.
        """
        members = self._members
        trained = any(each.parameter.requires_grad for each in (*members.parameters, *members.added))
        return accumulates and self.passes.is_reached and trained

    # ------------------------------------------------------------------------------- what it says of a round

    def status(self, number: int, part: Part, passive: bool) -> Status:
        """Return this rank's status for round ``number``, in which it takes that part; ``passive``: without a backward
        pass."""
        window, loops = self.contribution.window, self._decisions
        calls = _NO_PASS if passive or part is Part.SKIPS else self.passes.summarize()
        if loops.skips_next and part is not Part.FAILED:
            part = Part.SKIPS
        return Status(
            round=number,
            batch=loops.batch,
            part=part,
            stops=loops.asks_to_stop,
            ends=loops.innermost.batch.ends,
            changed=self.differs,
            weighted=bool(window.weights),
            called=calls[0],
            through=calls[1],
            unused_forwards=calls[2],
            steps=self.steps.count,
            weight=sum(window.weights),
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
        own, self.contribution = self.contribution, Contribution(before)
        for each in parameters:
            each.grad = None
        try:
            yield
        finally:
            is_same = self._members.parameters is before
            self.contribution = own if is_same else own.renumbered(self._members.parameters)
            for each, grad in zip(parameters, grads, strict=True):
                if restores(each):
                    each.grad = grad

    def begin_padding_batch(self) -> None:
        """Begin a batch that counts nothing, until :meth:`end_padding_batch`, unless one has begun."""
        if self.padding_batch is not None:
            return
        self.look_for_changes()
        self.padding_batch = PaddingBatch(self._members.here, self.keep_buffers())

    def end_padding_batch(self) -> None:
        """End the batch: the loop goes on."""
        if self.padding_batch is not None:
            self.padding_batch.end()
        self.padding_batch = None

    def keep_buffers(self) -> KeptBuffers:
        """Return a copy of the module's buffers, to be restored later."""
        return self._buffers.keep()

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
        with self.contribution.window.block(weight, self._members.here, self.requires_sync):
            yield
