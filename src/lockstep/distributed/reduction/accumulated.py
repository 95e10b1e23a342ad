"""Gradients that have accumulated on this rank: whether they are still there, and what was there before them.

Nothing tells when gradients are given up: ``zero_grad()`` sets them to None, or to zero in place. So it is looked at
before a backward pass adds to them: at objects and version counters first, at values only if those are other ones.
"""

import math
import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lockstep.distributed.dtensors import local_part
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.errors import OptionError


class AccumulatedGradients:
    """What a backward pass that did not synchronise has left."""

    def __init__(self) -> None:
        self._left: list[ManagedParameter] = []
        self._state: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by identity of the parameter

    def note(self, left: Sequence[ManagedParameter], closely: bool) -> None:
        """A backward pass has ended and left gradients; ``closely``: so that a look finds out whether any has
        changed."""
        self._state = {}
        self._left = list(left)
        if closely:
            for member in self._left:
                grad = member.parameter.grad
                if grad is not None:
                    self._state[id(member.parameter)] = weakref.ref(grad), grad._version

    def are_gone(self, new: Collection[int], present: Collection[int], may_fail: bool) -> bool:
        """Whether all that was left has been given up since.

        The parameters ``new``, by identity, have just got new gradients. Gradients of parameters that are not
        ``present`` in the module any more do not count: ``zero_grad()`` passes them by. Raises :class:`OptionError`,
        if ``may_fail``, where some gradients are gone and others are not, or where that cannot be told.
        """
        left = [member for member in self._left if id(member.parameter) in present]
        if not left:
            return bool(self._left)
        changed = [member for member in left if not self._is_unchanged(member, new)]
        if not changed:
            return False
        others = [member for member in changed if id(member.parameter) not in new]
        zeros = are_zero([member.parameter.grad for member in others])
        gone = [member for member, is_zero in zip(others, zeros, strict=True) if is_zero]
        stays = [member for member in left if id(member.parameter) not in new and member not in gone]
        if self._state:
            written: list[ManagedParameter] = []  # in place, before or with what is new
            for member in (each for each in changed if id(each.parameter) in new):
                before = self._state.get(id(member.parameter))
                is_other = before is None or before[0]() is not member.parameter.grad
                (gone if is_other else written).append(member)
            if written and may_fail and not (stays or gone):
                raise OptionError(
                    f"the gradient of {written[0].name} was changed in place between two backward passes of which at "
                    "least one has a weight, and the second went past the module's forward: whether it still has its "
                    "weight cannot be told; call the module, or set gradients to None"
                )
        if not gone or not stays:
            return bool(gone)
        scaled = len(gone) < len(changed) and all(member.parameter.grad is not None for member in gone)
        if may_fail and not scaled:
            raise OptionError(
                f"the gradient of {gone[0].name} that has accumulated on this rank was given up, that of "
                f"{stays[0].name} was not, and their weight can only go for both; zero the gradients of all parameters "
                "between micro-batches with a weight, or of none"
            )
        return False

    def _is_unchanged(self, member: ManagedParameter, new: Collection[int]) -> bool:
        grad = member.parameter.grad
        before, version = self._state.get(id(member.parameter), (None, 0))
        if before is None or grad is None or before() is not grad:
            return False
        return grad._version == version + (id(member.parameter) in new)


class EarlierGradients:
    """What is there before the first backward pass of those that a round is to reduce."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self.copies: dict[int, Tensor] = {}
        """Of all that were not zero, by identity of the parameter."""

    def note(self, parameters: Sequence[ManagedParameter]) -> None:
        """Remember which tensors are there; :meth:`copy` looks at values, if they are not new by then."""
        grads = _gradients(parameters)
        if len(grads) == 1 and are_zero(list(grads.values()))[0]:
            grads = {}
        self._known = {key: weakref.ref(grad) for key, grad in grads.items()}

    def copy(self, parameters: Sequence[ManagedParameter], new: Collection[int]) -> None:
        """Copy them; the parameters ``new``, by identity, have just got new gradients.

        Raises :class:`OptionError` if one was added to one from before, and the two cannot be told apart.
        """
        grads = _gradients(parameters)
        last = {key: grads.pop(key) for key in new if key in grads}
        zeros = are_zero(list(grads.values()))
        others = [(key, grad) for (key, grad), is_zero in zip(grads.items(), zeros, strict=True) if not is_zero]
        self.copies = {key: grad.detach().clone() for key, grad in others}
        for key, grad in last.items() if others or not grads else ():
            known = self._known.get(key)
            if known is not None and known() is grad:
                name = next(member.name for member in parameters if id(member.parameter) == key)
                raise OptionError(
                    f"{name} has a gradient from before accumulate(weight=...), which has its weight already, and this "
                    "backward has added to it past the module's forward: the two cannot be told apart; call the "
                    "module, or set gradients to None first"
                )

    def drop(self) -> None:
        """They are not needed any more."""
        self.copies = {}


def _gradients(parameters: Sequence[ManagedParameter]) -> dict[int, Tensor]:
    """Those that are there, by identity of the parameter."""
    return {id(m.parameter): m.parameter.grad for m in parameters if m.parameter.grad is not None}


def are_zero(grads: Sequence[Tensor | None]) -> list[bool]:
    """Which of the gradients are None, or zero everywhere; waits for the device once."""
    locals_ = [None if grad is None else local_part(grad.detach()) for grad in grads]
    values = [None if each is None else each.coalesce().values() if each.is_sparse else each for each in locals_]
    some = [each for each in values if each is not None and each.numel()]
    if not some:
        return [True] * len(grads)
    norms = torch._foreach_norm(some, math.inf)
    found = iter(torch.stack([(norm != 0).to(some[0].device) for norm in norms]).tolist())
    return [each is None or not each.numel() or not next(found) for each in values]
