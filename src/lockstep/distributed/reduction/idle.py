"""Batches that count nothing: a rank that has run out of data runs them, so that its program stays in step.

Its loop runs forward and backward as those of the other ranks do. Parameters get no gradient of it, also where
backward goes past the module's forward or under ``no_sync()``, and buffers are what they were. Then the rank takes part
in the round without a contribution, and has the reduced gradients as all others have.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lockstep.distributed.buffers import KeptBuffers
from lockstep.distributed.reduction.parameter import ManagedParameter


class IdleBatch:
    """One such batch, from :meth:`__init__` to :meth:`end`."""

    def __init__(self, members: Sequence[ManagedParameter], buffers: KeptBuffers) -> None:
        self.members = members
        """The parameters that the module has in it."""
        parameters = [member.parameter for member in members]
        self._new: list[Parameter] = []  # those that had no gradient before
        self._buffers = buffers
        self._hooks = [self._hook(each) for each in parameters if each.requires_grad]
        # No hook can be put on them, and the batch may unfreeze them:
        # test_what_a_rank_that_has_run_out_has_of_an_unfrozen_layer_does_not_count.
        frozen = [each for each in parameters if not each.requires_grad]
        self._frozen = [(each, None if each.grad is None else each.grad.clone()) for each in frozen]

    def _hook(self, parameter: Parameter) -> RemovableHandle:
        handle: RemovableHandle = parameter.register_hook(_Nothing(weakref.ref(self), parameter))
        return handle

    def note_new(self, parameter: Parameter) -> None:
        """A parameter without a gradient is about to get one."""
        self._new.append(parameter)

    def undo(self) -> None:
        """Parameters and buffers are as if no backward pass and no forward had been."""
        for parameter in self._new:
            parameter.grad = None
        self._new.clear()
        for parameter, grad in [each for each in self._frozen if each[0].requires_grad]:
            parameter.grad = grad
            self._hooks.append(self._hook(parameter))
        self._frozen = [each for each in self._frozen if not each[0].requires_grad]
        self._buffers.give_back()

    def round_ended(self, buffers: KeptBuffers) -> None:
        """The rank has taken part in a round, and has ``buffers`` since."""
        self._buffers = buffers

    def end(self) -> None:
        """The loop goes on."""
        for hook in self._hooks:
            hook.remove()
        self._buffers.give_back()


class _Nothing:
    """The hook of a parameter: backward adds zeros to its gradient."""

    __slots__ = ("_batch", "_parameter")

    def __init__(self, batch: "weakref.ref[IdleBatch]", parameter: Parameter) -> None:
        self._batch, self._parameter = batch, weakref.ref(parameter)

    def __call__(self, grad: Tensor) -> Tensor:
        batch, parameter = self._batch(), self._parameter()
        if batch is not None and parameter is not None and parameter.grad is None:
            batch.note_new(parameter)
        return torch.zeros_like(grad)


@contextmanager
def contributing_nothing(parameters: Sequence[ManagedParameter], counts: Callable[[], bool]) -> Iterator[None]:
    """Parameters have no gradient when a round begins inside; those that it gives none have what they had, if it
    ``counts``."""
    had = [member.parameter.grad for member in parameters]
    for member in parameters:
        member.parameter.grad = None
    yield
    for member, grad in zip(parameters, had, strict=True):
        if counts() and member.parameter.grad is None:
            member.parameter.grad = grad
