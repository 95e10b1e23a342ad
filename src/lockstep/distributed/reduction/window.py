"""The window of micro-batches that a round ends, and their weights.

``accumulate(weight=...)`` opens a window with its first block, and the round ends it. Each block adds its weight once,
whether or not a backward pass in it reaches the module. So that the sum of gradients and the sum of weights belong
together, a window begins without gradients, and what accumulates in it stays as it is until the round. Whatever breaks
that makes this rank's part in the round fail, and with it everybody's: :attr:`Window.problem`.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.distributed.reduction.parameters import ManagedParameter
from lockstep.dtensors import local_part

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
    """The gradient of a parameter, as it was left."""

    member: ManagedParameter
    grad: weakref.ref[Tensor] | None
    version: int

    @classmethod
    def now(cls, member: ManagedParameter) -> "_Left":
        """As it is now."""
        grad = member.parameter.grad
        return cls(member, None, 0) if grad is None else cls(member, weakref.ref(grad), grad._version)

    @property
    def is_unchanged(self) -> bool:
        """True if the gradient is the same object, and has not been written."""
        grad = self.member.parameter.grad
        if grad is None or self.grad is None:
            return grad is None and self.grad is None
        return self.grad() is grad and grad._version == self.version


class Window:
    """The micro-batches since the last round."""

    def __init__(self) -> None:
        self.is_open = False
        """True if they have weights."""
        self.total = 0.0
        """The sum of the weights."""
        self.problem = ""
        """Why this rank's part in the round that ends the window has to fail, if so."""
        self._blocks = 0  # under way
        self._passes = 0
        self._left: list[_Left] = []

    @property
    def is_unused(self) -> bool:
        """True if no weights are given."""
        return not (self.is_open or self._blocks or self.problem)

    @contextmanager
    def block(self, weight: float, parameters: Sequence[ManagedParameter], synchronises: bool) -> Iterator[None]:
        """A block with a weight, of a module that has these parameters; ``synchronises``: it is to have a round.

        Where no rank comes to the module, as if all of it is frozen, it has none, and no window stays open.
        """
        was_open, before, passes = self.is_open, (self.total, self.problem), self._passes
        if was_open:
            self.check_gradients()
        else:
            self._open(parameters)
        self.total += weight
        self._blocks += 1
        try:
            yield
            if synchronises and not self._passes:
                self.close()
        except BaseException:
            if self._passes > passes:
                self.fail(_INCOMPLETE)
            elif self.is_open and was_open:  # the round has not ended it: the block counts as none
                self.total, self.problem = before
            elif self.is_open:
                self.close()
            raise
        finally:
            self._blocks -= 1

    def _open(self, parameters: Sequence[ManagedParameter]) -> None:
        self.is_open = True
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
        if self.is_open and not self._blocks:
            self.fail(_NO_WEIGHT)
        elif self._blocks and not self.is_open:
            self.fail(_AFTER_ROUND)

    def pass_ended(self) -> None:
        """Note that it has ended, and the gradients are what is to be reduced."""
        self._left = [_Left.now(left.member) for left in self._left]

    def pass_failed(self) -> None:
        """Note that a backward pass has reached the module, and failed on this rank, which the others have not been
        told."""
        self._passes += 1
        if self.is_open:
            self.fail(_INCOMPLETE)

    def check_gradients(self) -> None:
        """No backward pass is under way, or it has added to no gradient yet: see whether all are as they were left."""
        changed = next((left for left in self._left if not left.is_unchanged), None)
        if changed is not None:
            self.fail(
                f"the gradient of parameter {changed.member.name} was written, replaced or given up since a backward "
                "pass with a weight, and its weight is not; leave gradients as they are from the first block of "
                "accumulate(weight=...) to the end of the one that synchronises, and call zero_grad() after it"
            )

    def check_members(self, parameters: Sequence[ManagedParameter]) -> None:
        """Note that the module has these parameters now."""
        if self.is_open:
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
        """Let this rank's part in the round fail."""
        self.problem = self.problem or problem

    def close(self) -> None:
        """Note that the round has ended, or what has accumulated is given up on all ranks."""
        self.is_open, self.total, self.problem = False, 0.0, ""
        self._passes = 0
        self._left = []


def are_zero(grads: Sequence[Tensor | None]) -> list[bool]:
    """Return which of the gradients are None, or zero everywhere; waits for the device once."""
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
