"""The operations of ``comm.py`` for autograd, differentiable twice and more.

Each backward is one of these functions, so gradients of any order flow through them:

    Broadcast <-> ReduceAddCoalesced        Scatter <-> Gather

:class:`GradientEdges` connects persistent replicas to the network: forward moves nothing, backward sums gradients.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import Function

from lockstep._base.devices import (
    CPU,
    DeviceLike,
    current_streams,
    on_streams,
    resolve_destination,
    resolve_devices,
    side_stream,
)
from lockstep.errors import GradientError
from lockstep.local import comm

# The engine runs the ready node with the highest sequence number first, and later nodes have higher numbers. Nodes
# that are made once, before every forward, would always run last. With this number they sum a bucket as soon as its
# gradients are ready.
FIRST = (1 << 63) - 1

# The engine's passes that went through nodes made by an earlier backward under create_graph=True; only the last ones
# are kept, as nothing tells when a pass has ended.
_second_order_passes: deque[int] = deque(maxlen=64)


def _made_in_backward() -> bool:
    """Return True if the function being applied is part of a gradient computation that is differentiated itself."""
    return bool(torch._C._current_graph_task_id() != -1)


def _note_second_order(ctx: Any) -> None:
    """Record that the current backward pass differentiates a gradient, if ``ctx`` was made in a backward."""
    current = torch._C._current_graph_task_id()
    if ctx.made_in_backward and current not in _second_order_passes:
        _second_order_passes.append(current)


class _BackwardStreams:
    """The streams on which a node works in backward if it works on several devices: those that are current in forward.

    Autograd knows one stream of a node: that of the first of its outputs on an accelerator. This stream waits for all
    gradients, and later nodes wait for it alone. On other devices the threads of backward have the default streams as
    current ones, whichever streams the replicas use.
    """

    def __init__(self, devices: Iterable[torch.device], source: torch.device | None) -> None:
        places = dict.fromkeys(devices if source is None else (*devices, source))
        places.pop(CPU, None)
        streams = current_streams(places) if len(places) > 1 else []
        self._known = streams[0].device if streams else None
        self._others = streams[1:]
        self._source = [stream for stream in self._others if stream.device == source]

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Let what backward queues come after all gradients; and the nodes that follow after work on the source."""
        if self._known is None:
            yield
            return
        known = torch.accelerator.current_stream(self._known)
        with on_streams(self._others):
            for stream in self._others:
                stream.wait_stream(known)
            yield
            for stream in self._source:
                known.wait_stream(stream)


class Broadcast(Function):
    """Copy every tensor to each device: ``Broadcast.apply(devices, *tensors)``.

    Returns the copies device-major: all tensors for the first device, then all for the second. The outputs for an input
    that needs no gradient are marked non-differentiable. Backward is :class:`ReduceAddCoalesced` onto the inputs'
    device. Communicates one copy for each 10 MiB buffer and device, each way. Stands for
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
        """Copy the tensors to the devices."""
        ctx.made_in_backward = _made_in_backward()
        copies = [[t.detach() for t in row] for row in comm.broadcast_coalesced(tensors, devices)]
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(c for row in copies for c, n in zip(row, needed, strict=True) if not n))
        ctx.needed = needed
        ctx.source = tensors[0].device if tensors else None
        ctx.streams = _BackwardStreams((row[0].device for row in copies if row), ctx.source)
        return tuple(copy for row in copies for copy in row)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Sum the gradients of the inputs that need one onto their device."""
        _note_second_order(ctx)
        wanted = [i for i, needed in enumerate(ctx.needed) if needed]
        rows = range(0, len(grads), len(ctx.needed))
        with ctx.streams.in_order():
            sums = ReduceAddCoalesced.apply(ctx.source, len(wanted), *(grads[r + i] for r in rows for i in wanted))
        by_index = dict(zip(wanted, sums, strict=True))
        return None, *(by_index.get(i) for i in range(len(ctx.needed)))


class ReduceAddCoalesced(Function):
    """Sum many tensors onto one device: ``ReduceAddCoalesced.apply(destination, num_inputs, *tensors)``.

    ``tensors`` are device-major, ``num_inputs`` for each device; the sums are taken in that order. Backward is
    :class:`Broadcast`. Communicates one copy for each 10 MiB buffer and device, each way. Stands for
    ``torch.nn.parallel._functions.ReduceAddCoalesced``.

    >>> import torch
    >>> ReduceAddCoalesced.apply("cpu", 1, torch.ones(2), torch.ones(2))
    (tensor([2., 2.]),)
    """

    @staticmethod
    def forward(ctx: Any, destination: DeviceLike, num_inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sum the tensors of all devices."""
        ctx.made_in_backward = _made_in_backward()
        rows = [tensors[i : i + num_inputs] for i in range(0, len(tensors), num_inputs)]
        ctx.devices = [row[0].device for row in rows]
        return comm.reduce_add_coalesced(rows, destination)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Copy the gradient of each sum to its summands."""
        _note_second_order(ctx)
        return None, None, *Broadcast.apply(ctx.devices, *grads)


class Gather(Function):
    """Concatenate along a dimension onto one device: ``Gather.apply(target_device, dim, *tensors)``.

    Inputs without dimensions are gathered into a vector. Backward is :class:`Scatter` with the inputs' own sizes and
    devices. Communicates one copy for each input, each way. Stands for ``torch.nn.parallel._functions.Gather``.

    >>> import torch
    >>> Gather.apply("cpu", 0, torch.zeros(1), torch.ones(2))
    tensor([0., 1., 1.])
    """

    @staticmethod
    def forward(ctx: Any, target_device: DeviceLike, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors."""
        ctx.made_in_backward = _made_in_backward()
        gathered = comm.gather(tensors, dim, target_device)
        ctx.scalars = tensors[0].dim() == 0
        ctx.dim = 0 if ctx.scalars else dim
        ctx.devices = [t.device for t in tensors]
        ctx.sizes = [1 if ctx.scalars else t.shape[dim] for t in tensors]
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Split the gradient into one part for each input."""
        _note_second_order(ctx)
        parts = Scatter.apply(ctx.devices, ctx.sizes, ctx.dim, grad)
        return None, None, *((part[0] for part in parts) if ctx.scalars else parts)


class Scatter(Function):
    """Split along a dimension over devices: ``Scatter.apply(devices, chunk_sizes, dim, tensor)``.

    ``chunk_sizes`` None splits evenly. Copies from the CPU to an accelerator run on a side stream of that device, which
    its current stream then waits for. Chunks of an input that needs a gradient may be written in place. Backward is
    :class:`Gather` to the input's device. Communicates one copy for each chunk, each way. Stands for
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
        """Split the tensor."""
        ctx.dim, ctx.source, ctx.made_in_backward = dim, tensor.device, _made_in_backward()
        targets = resolve_devices(devices)
        ctx.streams = _BackwardStreams(targets, tensor.device)
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
        """Concatenate the gradients of the chunks."""
        _note_second_order(ctx)
        with ctx.streams.in_order():
            return None, None, None, Gather.apply(ctx.source, ctx.dim, *grads)


def _apart(chunks: Sequence[torch.Tensor], tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the chunks, with copies of those that share memory with a tensor that needs a gradient.

    Autograd forbids in-place writes to one of several views, which the first layer of a replica may make.
    """
    if not tensor.requires_grad:
        return tuple(chunks)
    memory = tensor.untyped_storage().data_ptr()
    return tuple(c.clone() if c.untyped_storage().data_ptr() == memory else c for c in chunks)


class ReduceAdd(Function):
    """Sum onto one device, as a step of a backward: ``ReduceAdd.apply(destination, *tensors)``.

    It has no gradient of its own, so it refuses inputs that need one (:class:`~lockstep.errors.GradientError`), and
    inputs that differ in shape or dtype (:class:`~lockstep.errors.LayoutError`, with both). Stands for the C++
    ``torch::nn::ReduceAdd``.

    >>> import torch
    >>> ReduceAdd.apply("cpu", torch.ones(2), torch.ones(2))
    tensor([2., 2.])
    """

    @staticmethod
    def forward(ctx: Any, destination: DeviceLike, *tensors: torch.Tensor) -> torch.Tensor:
        """Sum the tensors."""
        needing = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        if needing:
            raise GradientError(
                f"Backward is not implemented for ReduceAdd, but input {needing[0]} requires a gradient. "
                "Use ReduceAddCoalesced, which is differentiable, or detach the inputs."
            )
        return comm.reduce_add(tensors, resolve_destination(destination, tensors))


class GradientEdges(Function):
    """Make existing copies differentiable: ``GradientEdges.apply(copies, groups, *tensors)``.

    ``copies`` are replica-major: for each replica, one copy of every tensor. They are returned as they are, but their
    gradients are now summed, in replica order, into the gradient of the tensor. The first output is an empty tensor on
    the device of ``tensors``, so that autograd runs the sums in that device's thread, on its stream
    (:class:`_BackwardStreams`). Nothing is saved for backward, so one call serves any number of backwards. A tensor
    gets no gradient if none of its copies got one, as on one device. Only a pass that differentiates a gradient (a
    gradient penalty) gives it zeros if another tensor of its group got a gradient, as PyTorch's test suite expects
    (``groups`` has a number for each tensor; replicas group by module). Communicates, in backward, one copy for each
    10 MiB buffer and device.
    Stands for the C++ ``replicate_grad_edges``.
    """

    @staticmethod
    def forward(
        ctx: Any, copies: Sequence[torch.Tensor], groups: Sequence[int], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the copies, now differentiable."""
        ctx.set_materialize_grads(False)
        ctx.groups = tuple(groups)
        ctx.shapes = [(t.shape, t.dtype) for t in tensors]
        ctx.source = tensors[0].device
        ctx.streams = _BackwardStreams((ctx.source, *(c.device for c in copies)), ctx.source)
        return torch.empty(0, dtype=tensors[0].dtype, device=ctx.source), *copies

    @staticmethod
    def backward(ctx: Any, _: None, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Sum the gradients that arrived; tensors for which every replica has one are summed together."""
        with ctx.streams.in_order():
            return None, None, *GradientEdges._sums(ctx, grads)

    @staticmethod
    def _sums(ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
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
        return sums


def _alone(column: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return the only gradient of a column if it is on the wanted device: nothing to sum, nothing to move."""
    return column[0] if len(column) == 1 and column[0].device == device else None


def link(
    copies: Sequence[torch.Tensor], groups: Sequence[int], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Apply :class:`GradientEdges`, with a node that the engine runs before everything else that is ready."""
    with torch.inference_mode(False), torch.enable_grad():
        first, *linked = GradientEdges.apply(copies, groups, *tensors)
    first.grad_fn._set_sequence_nr(FIRST)
    return tuple(linked)
