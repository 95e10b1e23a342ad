"""The operations of ``comm.py`` for autograd, differentiable twice and more.

Each backward is one of the others, so gradients of any order flow through them:

    Broadcast <-> ReduceAddCoalesced        Scatter <-> Gather

:class:`GradientEdges` is what persistent replicas hang on: it moves nothing forward, and backward it is the sum.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from lockstep.devices import DeviceLike, resolve_destination, resolve_devices, side_stream
from lockstep.errors import GradientError
from lockstep.local import comm

# The engine takes ready nodes in falling order of this number, and a node gets a higher one the later it is made. Nodes
# made once, before every forward, would always come last; with this they sum a bucket as soon as its gradients are
# ready.
FIRST = (1 << 63) - 1

# The passes of the engine that went through what an earlier backward had made under create_graph=True; the last ones,
# since nobody tells when a pass has ended.
_second_order_passes: deque[int] = deque(maxlen=64)


def _made_in_backward() -> bool:
    """Whether the function that is applied now is part of a gradient, which itself is to be differentiated."""
    return bool(torch._C._current_graph_task_id() != -1)


def _note_second_order(ctx: Any) -> None:
    """Remember that the pass under way differentiates a gradient, if ``ctx`` was made in a backward."""
    current = torch._C._current_graph_task_id()
    if ctx.made_in_backward and current not in _second_order_passes:
        _second_order_passes.append(current)


class Broadcast(Function):
    """One copy of every tensor for each device: ``Broadcast.apply(devices, *tensors)``.

    Returns the copies device-major: all tensors for the first device, then all for the second. Outputs of an input that
    needs no gradient are marked non-differentiable. Backward is :class:`ReduceAddCoalesced` onto the inputs' device.
    Communicates one copy a 10 MiB buffer and device, each way. Stands for
    ``torch.nn.parallel._functions.Broadcast``.

    >>> import torch
    >>> weight = torch.ones(2, requires_grad=True)
    >>> first, second = Broadcast.apply(["cpu", "cpu"], weight)
    >>> (first + 2 * second).sum().backward()
    >>> weight.grad
    tensor([3., 3.])
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[DeviceLike], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy."""
        ctx.made_in_backward = _made_in_backward()
        copies = [[t.detach() for t in row] for row in comm.broadcast_coalesced(tensors, devices)]
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(c for row in copies for c, n in zip(row, needed, strict=True) if not n))
        ctx.needed = needed
        ctx.source = tensors[0].device if tensors else None
        return tuple(copy for row in copies for copy in row)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Sum the gradients of the inputs that need one."""
        _note_second_order(ctx)
        wanted = [i for i, needed in enumerate(ctx.needed) if needed]
        rows = range(0, len(grads), len(ctx.needed))
        sums = ReduceAddCoalesced.apply(ctx.source, len(wanted), *(grads[r + i] for r in rows for i in wanted))
        by_index = dict(zip(wanted, sums, strict=True))
        return None, *(by_index.get(i) for i in range(len(ctx.needed)))


class ReduceAddCoalesced(Function):
    """Sum many tensors onto one device: ``ReduceAddCoalesced.apply(destination, num_inputs, *tensors)``.

    ``tensors`` are device-major, ``num_inputs`` for each device; the sums are taken in that order. Backward is
    :class:`Broadcast`. Communicates one copy a 10 MiB buffer and device, each way. Stands for
    ``torch.nn.parallel._functions.ReduceAddCoalesced``.

    >>> import torch
    >>> ReduceAddCoalesced.apply("cpu", 1, torch.ones(2), torch.ones(2))
    (tensor([2., 2.]),)
    """

    @staticmethod
    def forward(ctx: Any, destination: DeviceLike, num_inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sum."""
        ctx.made_in_backward = _made_in_backward()
        rows = [tensors[i : i + num_inputs] for i in range(0, len(tensors), num_inputs)]
        ctx.devices = [row[0].device for row in rows]
        return comm.reduce_add_coalesced(rows, destination)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Give every summand the gradient of the sum."""
        _note_second_order(ctx)
        return None, None, *Broadcast.apply(ctx.devices, *grads)


class Gather(Function):
    """Concatenate along a dimension onto one device: ``Gather.apply(target_device, dim, *tensors)``.

    Inputs without dimensions become a vector. Backward is :class:`Scatter` with the inputs' own sizes and devices.
    Communicates one copy an input, each way. Stands for ``torch.nn.parallel._functions.Gather``.

    >>> import torch
    >>> Gather.apply("cpu", 0, torch.zeros(1), torch.ones(2))
    tensor([0., 1., 1.])
    """

    @staticmethod
    def forward(ctx: Any, target_device: DeviceLike, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Concatenate."""
        ctx.made_in_backward = _made_in_backward()
        gathered = comm.gather(tensors, dim, target_device)
        ctx.scalars = tensors[0].dim() == 0
        ctx.dim = 0 if ctx.scalars else dim
        ctx.devices = [t.device for t in tensors]
        ctx.sizes = [1 if ctx.scalars else t.shape[dim] for t in tensors]
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Give every input its part of the gradient."""
        _note_second_order(ctx)
        parts = Scatter.apply(ctx.devices, ctx.sizes, ctx.dim, grad)
        return None, None, *((part[0] for part in parts) if ctx.scalars else parts)


class Scatter(Function):
    """Split along a dimension over devices: ``Scatter.apply(devices, chunk_sizes, dim, tensor)``.

    ``chunk_sizes`` None splits evenly. Copies from the CPU to an accelerator run on a side stream of that device, which
    its current stream then waits for. Chunks of an input that needs a gradient may be written in place. Backward is
    :class:`Gather` to the input's device. Communicates one copy a chunk, each way. Stands for
    ``torch.nn.parallel._functions.Scatter``.

    >>> import torch
    >>> Scatter.apply(["cpu", "cpu"], None, 0, torch.arange(3))
    (tensor([0, 1]), tensor([2]))
    """

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[DeviceLike],
        chunk_sizes: Sequence[int] | None,
        dim: int,
        tensor: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Split."""
        ctx.dim, ctx.source, ctx.made_in_backward = dim, tensor.device, _made_in_backward()
        targets = resolve_devices(devices)
        if tensor.device.type != "cpu":
            return _apart(comm.scatter(tensor, targets, chunk_sizes, dim), tensor)
        streams = [side_stream(target) for target in targets]
        chunks = comm.scatter(tensor, targets, chunk_sizes, dim, streams)
        for chunk, stream in zip(chunks, streams, strict=False):
            if stream is not None:
                current = torch.accelerator.current_stream(chunk.device)
                current.wait_stream(stream)
                chunk.record_stream(current)
        return _apart(chunks, tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Put the gradients of the chunks together."""
        _note_second_order(ctx)
        return None, None, None, Gather.apply(ctx.source, ctx.dim, *grads)


def _apart(chunks: Sequence[torch.Tensor], tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The chunks, none in the memory of a tensor that needs a gradient.

    Autograd lets nobody write to one of several views in place, as the first layer of a replica may.
    """
    if not tensor.requires_grad:
        return tuple(chunks)
    memory = tensor.untyped_storage().data_ptr()
    return tuple(c.clone() if c.untyped_storage().data_ptr() == memory else c for c in chunks)


class ReduceAdd(Function):
    """Sum onto one device, as a step of backward: ``ReduceAdd.apply(destination, *tensors)``.

    It has no gradient of its own, so it refuses inputs that need one (:class:`~lockstep.errors.GradientError`), and
    inputs that differ in shape or dtype (:class:`~lockstep.errors.LayoutError`, with both). Stands for the C++
    ``torch::nn::ReduceAdd``.

    >>> import torch
    >>> ReduceAdd.apply("cpu", torch.ones(2), torch.ones(2))
    tensor([2., 2.])
    """

    @staticmethod
    def forward(ctx: Any, destination: DeviceLike, *tensors: torch.Tensor) -> torch.Tensor:
        """Sum."""
        needing = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        if needing:
            raise GradientError(
                f"Backward is not implemented for ReduceAdd, but input {needing[0]} requires a gradient. "
                "Use ReduceAddCoalesced, which is differentiable, or detach the inputs."
            )
        return comm.reduce_add(tensors, resolve_destination(destination, tensors))


class GradientEdges(Function):
    """Make copies that exist already differentiable copies: ``GradientEdges.apply(copies, groups, *tensors)``.

    ``copies`` hold for each replica one copy of every tensor, replica-major, and are returned as they are, now with a
    gradient that is summed, in the order of the replicas, into the tensor's. Nothing is saved for backward, so one call
    serves any number of backwards. A tensor whose every copy got no gradient gets none, as on one device; only in a
    pass that differentiates a gradient (a gradient penalty) it is zero if another of its group got one, as PyTorch's
    suite has it (``groups`` has a number for each tensor; replicas group by module). Stands for the C++
    ``replicate_grad_edges``.
    """

    @staticmethod
    def forward(
        ctx: Any, copies: Sequence[torch.Tensor], groups: Sequence[int], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the copies."""
        ctx.set_materialize_grads(False)
        ctx.groups = tuple(groups)
        ctx.shapes = [(t.shape, t.dtype) for t in tensors]
        ctx.source = tensors[0].device
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Sum what came, tensors that every replica has a gradient for together."""
        count = len(ctx.groups)
        columns = [[g for g in grads[i::count] if g is not None] for i in range(count)]
        sums: list[torch.Tensor | None] = [_alone(column, ctx.source) for column in columns]
        replicas = len(grads) // count
        whole = [i for i, c in enumerate(columns) if len(c) == replicas and sums[i] is None]
        for together in (whole, *([i] for i, c in enumerate(columns) if c and len(c) < replicas)):
            todo = [i for i in together if sums[i] is None]
            if todo:
                rows = zip(*(columns[i] for i in todo), strict=True)
                total = ReduceAddCoalesced.apply(ctx.source, len(todo), *(g for row in rows for g in row))
                for i, tensor in zip(todo, total, strict=True):
                    sums[i] = tensor
        if torch._C._current_graph_task_id() in _second_order_passes:
            touched = {group for group, total in zip(ctx.groups, sums, strict=True) if total is not None}
            for i, (shape, dtype) in enumerate(ctx.shapes):
                if sums[i] is None and ctx.groups[i] in touched:
                    sums[i] = torch.zeros(shape, dtype=dtype, device=ctx.source)
        return None, None, *sums


def _alone(column: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """The one gradient there is, if it lies where it is wanted: nothing to sum, nothing to move."""
    return column[0] if len(column) == 1 and column[0].device == device else None


def link(
    copies: Sequence[torch.Tensor], groups: Sequence[int], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """:class:`GradientEdges` that the engine serves before everything else that is ready."""
    with torch.inference_mode(False), torch.enable_grad():
        linked: tuple[torch.Tensor, ...] = GradientEdges.apply(copies, groups, *tensors)
    node: Any = linked[0].grad_fn
    node._set_sequence_nr(FIRST)
    return linked
