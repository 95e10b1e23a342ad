"""What one rank contributes to a round: the gradients of its passes since the last one, and their weights."""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep._base.dtensors import local_part
from lockstep._base.optimizer_steps import has_any
from lockstep.distributed.reduction.module.managed_parameters import ManagedParameter

_NO_WEIGHT = (
    "this backward pass has no weight, an earlier one since the last synchronisation had one; give accumulate() a "
    "weight in every micro-batch, or in none"
)


_INSIDE = (
    "this module is replicated by itself inside of one whose block of accumulate() has a weight, and has none, so its "
    "gradients would not be divided by that; put the same backward into a block of accumulate() of this module, too"
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


class Contribution:
    """The gradients and weights of this rank since the last round. Each backward pass adds to it; a round ends it,
    reduced or failed.

    The first block of ``accumulate(weight=...)`` opens a *window* of micro-batches with weights, and the round closes
    it. Each block adds its weight once, even if no backward pass in it reaches the module. So that the sums of
    gradients and of weights match, a window begins without gradients, and nothing but backward may change them until
    the round. A violation makes this rank's part in the round fail, and thereby the round on all ranks:
    :attr:`problem`.
    """

    def __init__(self, parameters: Sequence[ManagedParameter]) -> None:
        self._parameters = parameters
        self.used = bytearray(len(parameters))
        """A one for each parameter that has had a gradient since the last round."""
        self.is_local = False
        """True if some pass since the last round has not synchronised."""
        self.weights: list[float] = []
        """The weights of its blocks; empty if the micro-batches have none: no window is open."""
        self.problem = ""
        """The reason why this rank's part in the next round has to fail, or an empty text."""
        self.needs_weight = False
        """True inside of a block with a weight of a module around this one."""
        self._blocks = 0  # number of blocks under way
        self._passes = 0
        self._lost = 0  # number of passes that have failed without reaching the module
        self._thread = 0  # in which a block is under way
        self._left: list[_Left] = []

    @property
    def awaits_block(self) -> bool:
        """True between the blocks of a window."""
        return bool(self.weights) and not self._blocks

    def is_something(self, added: Sequence[ManagedParameter]) -> bool:
        """Return True if there is anything to contribute: a weight, a failure, or a gradient that is not zero, also of
        ``added``, which the ranks have not agreed on yet. May wait for the device."""
        if self.weights or self.problem:
            return True
        piled = [*compress(self._parameters, self.used), *added]
        return not all(are_zero([member.parameter.grad for member in piled]))

    def local_gradient(self, optimizer: Optimizer) -> str | None:
        """Return the name of a parameter of ``optimizer`` whose gradient is this rank's only; None if there is none."""
        if not self.is_local:
            return None
        # The optimizer is asked first: other threads may write gradients that are not its own.
        own = (each for each in compress(self._parameters, self.used) if has_any(optimizer, {id(each.parameter)}))
        return next((each.name for each in own if each.parameter.grad is not None), None)

    def renumber(self, parameters: Sequence[ManagedParameter]) -> None:
        """Go on with other ``parameters``: the same ones count as used, under their new numbers."""
        used = {id(each.parameter) for each in compress(self._parameters, self.used)}
        self._parameters = parameters
        self.used = bytearray(id(each.parameter) in used for each in parameters)

    def forget(self) -> None:
        """Begin a new contribution: the last one has been reduced, or dropped after a failure or with a batch that is
        left out."""
        self.used[:] = bytes(len(self.used))
        self.is_local = False
        self._passes = 0
        if self._left or self.weights or self.problem:
            self._close()

    # ------------------------------------------------------------------------------------------ weights

    @contextmanager
    def block(self, weight: float, parameters: Sequence[ManagedParameter], synchronises: bool) -> Iterator[None]:
        """Run a block with a weight, of a module with these parameters; ``synchronises``: a round is expected in it.

        The weight does not count if a backward pass in the block has failed, and none has reached the module.
        If no rank reaches the module, as when all of it is frozen, there is no round, and the window is closed anyway.
        """
        # What is right to do at the end depends on what has happened inside, not on how the block was left.
        blocks, problem, passes, lost = len(self.weights), self.problem, self._passes, self._lost
        if blocks:
            self.check_gradients()
        else:
            self._open(parameters)
        self.weights.append(weight)
        self._blocks += 1
        self._thread = get_ident()
        try:
            yield
            if self.weights and self._lost > lost and self._passes == passes:
                del self.weights[blocks:]
            if synchronises and not self._passes:
                self._close()
        except BaseException:
            if self._passes > passes:
                self.fail(_INCOMPLETE)
            elif self.weights and blocks:  # no round has closed the window: the block does not count
                del self.weights[blocks:]
                self.problem = problem
            elif self.weights:
                self._close()
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

    def add(self, came: Sequence[int], of: int) -> None:
        """Add a backward pass that has reached the module.

        ``came``: the numbers of the parameters whose gradients it has brought; ``of``: the number of all parameters,
        with those that the ranks have not agreed on yet, whose numbers are the highest.
        """
        used = self.used
        if len(came) == len(used) == of:
            used[:] = b"\1" * of
        else:
            for number in came:
                if number < len(used):
                    used[number] = 1
        self._passes += 1
        if self.needs_weight and not self._blocks:
            self.fail(_INSIDE)
        elif self.weights and not self._blocks:
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
        """Note that a pass has failed on this rank without reaching the module, and the other ranks are not told.

        All passes of the process are told: one of another thread is not of the block.
        """
        self._lost += self._thread == get_ident()

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
            self.check_same_members([left.member for left in self._left], parameters)

    def check_same_members(self, before: Sequence[ManagedParameter], now: Sequence[ManagedParameter]) -> None:
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

    def _close(self) -> None:
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
