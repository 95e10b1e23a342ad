"""The gradients of a module's parameters, share by share, and their partial sums on this rank.

With a ``reduce_dtype`` each share's gradient is rounded to it, and so is each sum of two of them: wherever the sums are
cut to travel, the bits are the same.

While a step is under way, ``param.grad`` is the gradient of the share under way alone. The gradient from before the
step is set aside, and the step's gradient is added to it.

Of a ``DTensor`` only this rank's part is added: other dimensions of the mesh add their parts themselves.
"""

from collections.abc import Callable, Sequence
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lockstep._base.dtensors import is_dtensor, like_parameter, local_part, matching_gradient
from lockstep.distributed.reduction.buckets.plan import travels_in_half
from lockstep.distributed.reduction.module.selection import check_optimizers
from lockstep.errors import NotReplicableError
from lockstep.shares.share_tree import PartialSums, add_up
from lockstep.shares.spare import SpareMemory

Values = list[Tensor | None]
"""A value for each parameter; None if nothing was added."""


def sum_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype in which values are added: ``reduce_dtype`` for what travels in it, or float32 for half
    precision."""
    if reduce_dtype is not None and travels_in_half(dtype, reduce_dtype):
        return reduce_dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class ShareGradients:
    """Takes each share's gradients from the parameters, and adds them in the tree's order.

    The method ``arrived(number)`` is called whenever a parameter has got a gradient; it raises if none may come now.
    The caller has to keep its object alive.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        arrived: Callable[[int], None],
        spare: SpareMemory,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._reduce_dtype = reduce_dtype
        self._spare = spare
        self._arrived = WeakMethod(arrived)
        self._handles: list[RemovableHandle] = []
        self._largest = max((local_part(parameter).nbytes for parameter in self._parameters), default=0)
        self._before: Values | None = None
        self._last: tuple[int, Values] | None = None
        self.drop_sums()

    def hook(self) -> None:
        """Let hooks of the parameters note gradients."""
        for number, parameter in enumerate(self._parameters):
            self._handles.append(_hook(parameter, number, self._arrived, self._spare))

    def unhook(self) -> None:
        """Remove the hooks of the parameters."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            if not parameter._post_accumulate_grad_hooks:
                # As it was before the first hook.
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    def check_hooks(self) -> None:
        """Raise for users' hooks that would see a share's gradient in place of the step's."""
        registered = list(zip(self.names, self._parameters, strict=True))[::-1]  # they travel in the reverse order
        check_optimizers(lambda: registered)
        for name, parameter in registered:
            if len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > 1:
                raise NotReplicableError(
                    f"parameter {name} has a post-accumulate-grad hook (of an optimizer in backward, say), which would "
                    "run on the gradients of single shares; with shares, do after the step what the hook does"
                )

    def open(self) -> None:
        """Begin a step: set the parameters' gradients aside."""
        self._before = self._take()
        self.drop_sums()

    def enter(self) -> None:
        """Begin a share: free memory for its first gradient, which no hook announces; each gradient does it for the
        next."""
        self._spare.give_back(self._largest)

    def _take(self) -> Values:
        taken = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return taken

    def add(self, share: int, place: Callable[[int, Values], Values] | None = None) -> None:
        """End a share: take its gradients, and add them to the partial sums. ``place(share, values)`` may copy them to
        the memory that they are sent from, and returns the copies."""
        values = self._to_sum(self._take())
        if place is not None:
            placed = place(share, values)
            self._spare.keep(a for a, b in zip(values, placed, strict=True) if a is not b)
            values = placed
        self._sums.add(share, values)

    def add_last(self, share: int) -> None:
        """End the last share of this rank: take its gradients, which are added on their way to other ranks."""
        self._last = share, self._to_sum(self._take())

    def take_terms(self) -> list[list[Values]]:
        """Return the partial sums as they are sent, each as terms. They belong to the caller."""
        last = self._last
        terms = [[values] for _, values in self._sums.sums] if last is None else self._sums.terms_with(*last)
        self.drop_sums()
        return terms

    def terms_with(self, share: int) -> list[list[Values]]:
        """Return the same as :meth:`take_terms` during a share, with its gradients so far, only to be read."""
        return self._sums.terms_with(share, self.now())

    def now(self) -> Values:
        """Return the gradients of the share under way so far."""
        return [
            None if (grad := parameter.grad) is None else local_part(grad.detach()) for parameter in self._parameters
        ]

    def drop(self) -> None:
        """Drop the gradients of the share under way."""
        self._take()

    def total(self, shares: int) -> Values:
        """Return the sum over all shares of the step, if this rank has computed all of them."""
        sums = self._sums.sums
        self.drop_sums()
        return add_up(sums, shares, self._add) or []

    def drop_sums(self) -> None:
        """Drop the partial sums."""
        self._sums: PartialSums[Values] = PartialSums(lambda _, left, __, right: self._add(left, right))
        self._last = None

    @torch.no_grad()
    def _add(self, left: Values, right: Values) -> Values:
        """Return the sum of two partial sums, in the first one's memory if both have a value; the second's is spare."""
        both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
        if both:
            added = [b for _, b in both]
            torch._foreach_add_([a for a, _ in both], added)
            self._spare.keep(added)
        return [b if a is None else a for a, b in zip(left, right, strict=True)]

    def _to_sum(self, gradients: Values) -> Values:
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise NotReplicableError(
                    f"parameter {self.names[number]} has a gradient of layout {gradient.layout}, which shares cannot "
                    "add; use sparse=False"
                )
            detached = local_part(gradient.detach())
            gradients[number] = value = detached.to(sum_dtype(detached.dtype, self._reduce_dtype))
            if value is not detached:
                self._spare.keep([detached])
        return gradients

    @property
    def used(self) -> list[bool]:
        """True for each parameter that got a gradient in one of the ended shares of the step."""
        rows = [values for _, values in self._sums.sums]
        if self._last is not None:
            rows.append(self._last[1])
        return [any(row[number] is not None for row in rows) for number in range(len(self._parameters))]

    def restore_grads(self) -> None:
        """Abort the step: restore the gradients from before it."""
        before, self._before = self._before, None
        if before is not None:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
        self.drop_sums()

    @torch.no_grad()
    def set_grads(self, total: Values, divisor: float) -> None:
        """End the step: set the gradients to the sum over all shares, divided, plus what they were before."""
        assert self._before is not None
        before, self._before = self._before, None
        total = [None if value is None else value.to(sum_dtype(value.dtype)) for value in total]
        present = [value for value in total if value is not None]
        if present and divisor != 1:
            torch._foreach_div_(present, divisor)
        for parameter, value, earlier in zip(self._parameters, total, before, strict=True):
            parameter.grad = earlier if value is None else _gradient(parameter, value, earlier)


def _gradient(parameter: Tensor, value: Tensor, earlier: Tensor | None) -> Tensor:
    """Return a gradient of the parameter's dtype and layout: the value plus the earlier one, rounded once. That is the
    earlier tensor, with the new values, since the program may read its memory (``reduction/gradients.py``)."""
    if earlier is not None:
        value = value.add_(local_part(earlier.detach()))
        if not earlier.is_sparse:
            local_part(earlier).copy_(value)
            return earlier
    like = torch.empty_like(local_part(parameter))  # has the layout of a gradient, wherever values were added
    if value.dtype != like.dtype or value.stride() != like.stride():
        value = like.copy_(value)
    return like_parameter(value, parameter)


def _hook(
    parameter: Parameter, number: int, arrived: WeakMethod[Callable[[int], None]], spare: SpareMemory
) -> RemovableHandle:
    """Register a hook that calls ``arrived`` as long as its object exists.

    The garbage collector does not see what a hook of this kind refers to: with a strong reference, a hook and its
    parameter would keep each other alive for ever, and with them the process group (test_shares.py,
    test_a_module_that_is_dropped_is_freed_with_its_process_group).
    """
    is_sharded, nbytes = is_dtensor(parameter), local_part(parameter).nbytes

    def hook(parameter: Tensor) -> None:
        if is_sharded:
            _lay_out(parameter)
        spare.give_back(nbytes)
        if (method := arrived()) is not None:
            method(number)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    return handle


def _lay_out(parameter: Tensor) -> None:
    """Redistribute the gradient of a ``DTensor`` like the parameter: partial values that backward left are summed."""
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.grad = like_parameter(matching_gradient(parameter.grad, parameter), parameter)
