"""Gradients that have accumulated on this rank: whether they are still there, and what was there before them.

Nothing tells when gradients are given up: ``zero_grad()`` of an optimizer sets them to None, or to zero in place. So
they are looked at when a backward pass begins, before it adds to any. Objects and version counters tell which cannot
have changed; values tell of the others. A counter that has grown says little: gradients that are views of one tensor,
as those of a bucket are, share one. And a gradient that is zero, or has no elements, may have been so before.
"""

import math
import weakref
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.dtensors import local_part


class Found(NamedTuple):
    """What a look at gradients that had accumulated has found."""

    are_gone: bool
    """Whether all of them have been given up."""
    problem: str = ""
    """Why the look is no answer: some are gone and others are not, or it cannot be told."""


class AccumulatedGradients:
    """What a backward pass that did not synchronise has left."""

    def __init__(self) -> None:
        self._left: list[ManagedParameter] = []
        self._closely = False
        self._state: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by identity of the parameter
        self._had_values: bool | Tensor = True  # whether any was not zero; on accelerators a tensor, not waited for

    def note(self, left: Sequence[ManagedParameter], closely: bool) -> None:
        """A backward pass has ended and left gradients; ``closely``: so that a look finds out whether any has
        changed."""
        self._left, self._closely = list(left), False
        self._state, self._had_values = {}, True
        if closely:
            self.note_closely()

    def note_closely(self) -> None:
        """What is there now is what was left."""
        grads = _gradients(self._left)
        self._closely = True
        self._state = {key: (weakref.ref(grad), grad._version) for key, grad in grads.items()}
        self._had_values = _have_values(list(grads.values()))

    def are_zero(self) -> bool:
        """Whether nothing is left: all are None, or zero."""
        return all(are_zero([member.parameter.grad for member in self._left]))

    def look(self, present: Collection[int]) -> Found:
        """Whether all that was left has been given up since.

        Gradients of parameters that are not ``present`` in the module any more do not count: ``zero_grad()`` passes
        them by.
        """
        left = [member for member in self._left if id(member.parameter) in present]
        if not left:
            return Found(bool(self._left))
        grads = [member.parameter.grad for member in left]
        changed = [not self._is_unchanged(member) for member in left]
        if True not in changed:
            return Found(self._are_written_unnoticed(grads))
        zeros = iter(are_zero([grad for grad, is_changed in zip(grads, changed, strict=True) if is_changed]))
        is_zero = [is_changed and next(zeros) for is_changed in changed]
        gone = [
            m
            for m, grad, zero in zip(left, grads, is_zero, strict=True)
            if grad is None or (zero and _values_of(grad).numel())
        ]
        stays = [member for member, zero in zip(left, is_zero, strict=True) if not zero]
        if not stays:
            return self._all_zero(grads, left[0].name)
        if not gone:
            return Found(False)
        is_scaled = any(c and not z for c, z in zip(changed, is_zero, strict=True))
        if is_scaled and all(member.parameter.grad is not None for member in gone):
            return Found(False)  # all were, and those had been zero before
        return Found(
            False,
            f"the gradient of {gone[0].name} that has accumulated on this rank was given up, that of {stays[0].name} "
            "was not, and their weight can only go for both; zero the gradients of all parameters between "
            "micro-batches with a weight, or of none",
        )

    def _all_zero(self, grads: Sequence[Tensor | None], name: str) -> Found:
        """None of them has a value any more: they are gone, unless they had none before."""
        if not self._closely or bool(self._had_values) or any(grad is None for grad in grads):
            return Found(True)
        return Found(
            False,
            f"the gradient of {name} and all others that had accumulated on this rank were zero, and were written in "
            "place since: whether they were given up, and their weight with them, cannot be told; call zero_grad() of "
            "the module, or set gradients to None",
        )

    def _is_unchanged(self, member: ManagedParameter) -> bool:
        grad = member.parameter.grad
        before, version = self._state.get(id(member.parameter), (None, 0))
        return before is not None and grad is not None and before() is grad and grad._version == version

    def _are_written_unnoticed(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether all were set to zero through ``grad.data``, which no counter tells; if looking means no waiting."""
        return self._had_values is True and _have_values(grads) is False


class EarlierGradients:
    """What is there before the first backward pass of those that a round is to reduce."""

    def __init__(self) -> None:
        self.copies: dict[int, Tensor] = {}
        """Of all that were not zero, by identity of the parameter."""

    def copy(self, parameters: Sequence[ManagedParameter]) -> None:
        """Copy them, before the pass adds to any."""
        grads = _gradients(parameters)
        zeros = are_zero(list(grads.values()))
        others = [(key, grad) for (key, grad), is_zero in zip(grads.items(), zeros, strict=True) if not is_zero]
        self.copies = {key: grad.detach().clone() for key, grad in others}

    def drop(self) -> None:
        """They are not needed any more."""
        self.copies = {}


def _gradients(parameters: Sequence[ManagedParameter]) -> dict[int, Tensor]:
    """Those that are there, by identity of the parameter."""
    return {id(m.parameter): m.parameter.grad for m in parameters if m.parameter.grad is not None}


def are_zero(grads: Sequence[Tensor | None]) -> list[bool]:
    """Which of the gradients are None, or zero everywhere; waits for the device once."""
    values = [None if grad is None else _values_of(grad) for grad in grads]
    some = [each for each in values if each is not None and each.numel()]
    if not some:
        return [True] * len(grads)
    found = iter(_are_not_zero(some).tolist())
    return [each is None or not each.numel() or not next(found) for each in values]


def _have_values(grads: Sequence[Tensor | None]) -> bool | Tensor:
    """Whether any is not zero everywhere; on accelerators as a tensor, for which nobody has waited."""
    values = [_values_of(grad) for grad in grads if grad is not None]
    some = sorted((each for each in values if each.numel()), key=Tensor.numel)
    if all(each.is_cpu for each in some):
        return any(bool(each.any()) for each in some)  # the first one tells, mostly
    return _are_not_zero(some).any()


def _values_of(grad: Tensor) -> Tensor:
    local = local_part(grad.detach())
    return local.coalesce().values() if local.is_sparse else local


def _are_not_zero(values: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(values, math.inf)
    return torch.stack([(norm != 0).to(values[0].device) for norm in norms])
