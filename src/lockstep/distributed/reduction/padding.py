"""A batch that a rank runs again because it has run out: its gradients are zeros, its buffers are given back."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lockstep.distributed.reduction.module.buffers import KeptBuffers
from lockstep.distributed.reduction.module.managed_parameters import ManagedParameter


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
