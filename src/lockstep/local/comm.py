"""Copies and sums among the devices of one process, without autograd.

The coalesced calls move a few large buffers (:mod:`lockstep._base.buckets`) instead of many small tensors. Copies
between accelerators are peer copies on the current streams of both; where peer copies between two devices do not
arrive, they go through the host. Sums are taken in the order of the inputs, so they are bitwise the same from run to
run.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch

from lockstep._base.buckets import DEFAULT_CAP_BYTES, BucketPlan, FlatBucket, TensorSpec, dense_stride, plan_buckets
from lockstep._base.devices import (
    CPU,
    DeviceLike,
    direct_copy_works,
    on_streams,
    resolve_destination,
    resolve_devices,
)
from lockstep.errors import LayoutError, LengthError
from lockstep.local.checks import (
    check_dtype,
    check_same_layout,
    checked_dim,
    common_device,
    gatherable,
    without,
)


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor itself if it is on ``device``, else a copy that the device's current stream waits for."""
    if tensor.device == device:
        return tensor
    if not direct_copy_works(tensor.device, device):
        tensor = tensor.to(CPU)
    return tensor.to(device, non_blocking=device.type != "cpu")


def pack(bucket: FlatBucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new flat tensor that holds the bucket's tensors, which are given in the order of its slots."""
    flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=tensors[0].device)
    torch._foreach_copy_(bucket.views(flat), list(tensors))
    return flat


def unpack(bucket: FlatBucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors inside ``flat``, each with a version counter of its own."""
    return [view.data for view in bucket.views(flat)]


@torch.no_grad()
def broadcast(
    tensor: torch.Tensor,
    devices: Sequence[DeviceLike] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copy a tensor to each device; on its own device it is the same storage.

    Args:
        tensor: of any shape and dtype.
        devices: where copies go. Exclusive with ``out``.
        out: tensors of the same shape and dtype that are filled and returned instead.

    Communicates one copy for each device except the tensor's own. Raises :class:`LayoutError` for ``out`` tensors of
    another shape or dtype. Stands for ``torch.nn.parallel.comm.broadcast``.

    >>> import torch
    >>> broadcast(torch.ones(2), ["cpu", "cpu"])
    (tensor([1., 1.]), tensor([1., 1.]))
    """
    if (devices is None) == (out is None):
        raise LayoutError(
            f"Exactly one of 'devices' and 'out' should be specified, but got devices={devices} and out={out}"
        )
    if devices is not None:
        return tuple(copy_to(tensor, device) for device in resolve_devices(devices))
    assert out is not None
    for index, target in enumerate(out):
        if target.shape != tensor.shape:
            raise LayoutError(
                "Expected all output tensors to have same shape as the source tensor, but output tensor at index "
                f"{index} has shape {tuple(target.shape)}, and the source {tuple(tensor.shape)}"
            )
        check_dtype("output", index, target, tensor, "the source tensor")
        fill(target, tensor)
    return tuple(out)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[DeviceLike], buffer_size: int = DEFAULT_CAP_BYTES
) -> list[list[torch.Tensor]]:
    """Copy many tensors to each device in few flat buffers.

    Args:
        tensors: on one device, of any shapes, dtypes, memory formats; sparse ones are copied one by one.
        devices: where copies go. On the tensors' own device they are the same storage.
        buffer_size: the largest number of bytes in one buffer (a larger tensor is copied alone).

    Returns a list for each device, with the tensors in the order given. Communicates one copy for each buffer and
    device. Stands for ``torch.nn.parallel.comm.broadcast_coalesced``.

    >>> import torch
    >>> [len(copies) for copies in broadcast_coalesced([torch.ones(2), torch.ones(3)], ["cpu", "cpu"])]
    [2, 2]
    """
    targets = resolve_devices(devices)
    source = common_device(tensors, "broadcast_coalesced")
    dense, plan = _plan(tensors, buffer_size)
    copies = [list(tensors) for _ in targets]
    away = [i for i, target in enumerate(targets) if target != source]
    for i in away:
        copies[i] = [t if t.layout == torch.strided else copy_to(t.detach(), targets[i]) for t in tensors]
    for bucket in plan.buckets:
        members = [dense[slot.index] for slot in bucket.slots]
        originals = [tensors[j].detach() for j in members]
        flat = pack(bucket, originals) if len(members) > 1 and away else None
        for i in away:
            arrived = [copy_to(originals[0], targets[i])] if flat is None else unpack(bucket, copy_to(flat, targets[i]))
            for j, copy in zip(members, arrived, strict=True):
                copies[i][j] = copy
    return copies


@torch.no_grad()
def reduce_add(inputs: Sequence[torch.Tensor], destination: DeviceLike | None = None) -> torch.Tensor:
    """Sum tensors of one shape and dtype from several devices, in their order, onto one.

    Args:
        inputs: at least one tensor; dense, or all sparse.
        destination: the device of the sum; None is the current one, ``-1`` and ``"cpu"`` the CPU.

    Communicates one copy for each input on another device. Raises :class:`LayoutError` for inputs that differ in shape
    or dtype. Stands for ``torch.nn.parallel.comm.reduce_add``.

    >>> import torch
    >>> reduce_add([torch.ones(2), torch.ones(2)], "cpu")
    tensor([2., 2.])
    """
    if not inputs:
        raise LengthError("reduce_add expects at least one tensor, got none")
    target = resolve_destination(destination, inputs)
    check_same_layout(inputs, "reduce_add")
    total = copy_to(inputs[0].detach(), target)
    for count, tensor in enumerate(inputs[1:], start=1):
        term = copy_to(tensor.detach(), target)
        # add neither into inputs[0], nor into a sparse tensor, whose in-place sum would be uncoalesced twice over
        total = total + term if count == 1 or total.layout != torch.strided else total.add_(term)
    return total


@torch.no_grad()
def reduce_add_coalesced(
    inputs: Sequence[Sequence[torch.Tensor]],
    destination: DeviceLike | None = None,
    buffer_size: int = DEFAULT_CAP_BYTES,
) -> tuple[torch.Tensor, ...]:
    """Sum many tensors from several devices, in few flat buffers.

    Args:
        inputs: for each device the list of its tensors. All lists have the same length, shapes and dtypes.
        destination: the device of the sums; None is the current one, ``-1`` and ``"cpu"`` the CPU.
        buffer_size: the largest number of bytes in one buffer.

    Returns new tensors, with version counters of their own. Communicates one copy for each buffer and device.

    Stands for ``torch.nn.parallel.comm.reduce_add_coalesced``.

    >>> import torch
    >>> reduce_add_coalesced([[torch.ones(2)], [torch.ones(2)]], "cpu")
    (tensor([2., 2.]),)
    """
    if not inputs:
        raise LengthError("reduce_add_coalesced expects the tensors of at least one device, got none")
    for index, tensors in enumerate(inputs):
        if len(tensors) != len(inputs[0]):
            raise LengthError(
                f"reduce_add_coalesced expects as many tensors from each device: input 0 has {len(inputs[0])}, "
                f"input {index} has {len(tensors)}"
            )
        common_device(tensors, f"reduce_add_coalesced, in input {index},")
    target = resolve_destination(destination, [t for tensors in inputs for t in tensors])
    columns = [_alike([t.detach() for t in column]) for column in zip(*inputs, strict=True)]
    for column in columns:
        check_same_layout(column, "reduce_add_coalesced")
    detached = [list(row) for row in zip(*columns, strict=True)] or [[]]
    dense, plan = _plan(detached[0], buffer_size)
    sums: list[torch.Tensor] = list(detached[0])
    for index in set(range(len(sums))).difference(dense):
        sums[index] = reduce_add([tensors[index] for tensors in detached], target).clone()
    for bucket in plan.buckets:
        members = [dense[slot.index] for slot in bucket.slots]
        total = _sum_bucket(bucket, [[tensors[j] for j in members] for tensors in detached], target)
        for j, tensor in zip(members, total, strict=True):
            sums[j] = tensor
    return tuple(sums)


def _alike(column: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the summands of one tensor, all dense if sparse and dense ones are mixed."""
    if len({tensor.layout for tensor in column}) == 1:
        return column
    return [tensor.to_dense() for tensor in column]


def _sum_bucket(
    bucket: FlatBucket, columns: Sequence[Sequence[torch.Tensor]], target: torch.device
) -> list[torch.Tensor]:
    """Return the sums of one bucket's tensors: add those on the target in place, the rest as flat buffers."""
    if all(tensors[0].device == target for tensors in columns) and len(columns) > 1:
        totals = list(torch._foreach_add(list(columns[0]), list(columns[1])))
        for tensors in columns[2:]:
            torch._foreach_add_(totals, list(tensors))
        return totals
    flat = copy_to(pack(bucket, columns[0]), target)
    views = bucket.views(flat)
    for tensors in columns[1:]:
        if tensors[0].device == target:
            torch._foreach_add_(views, list(tensors))
        else:
            flat.add_(copy_to(pack(bucket, tensors), target))
    return unpack(bucket, flat)


@torch.no_grad()
def scatter(
    tensor: torch.Tensor,
    devices: Sequence[DeviceLike] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[torch.Stream | None] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Split a tensor along ``dim`` and give each device one chunk; the chunk for the tensor's own device is a view.

    Args:
        tensor: with at least one dimension.
        devices: where the chunks go. Exclusive with ``out``.
        chunk_sizes: rows for each device, which sum to the size of ``dim``; None splits evenly (sizes differ by at most
            one, the larger first; fewer rows than devices give fewer chunks).
        dim: the dimension that is split; may be negative.
        streams: for each device the stream on which its copy runs, or None for the current one. The caller makes later
            work wait for them.
        out: tensors that are filled and returned instead; their sizes along ``dim`` say how to split.

    Communicates one copy for each chunk. Stands for ``torch.nn.parallel.comm.scatter``.

    >>> import torch
    >>> scatter(torch.arange(5), ["cpu", "cpu"])
    (tensor([0, 1, 2]), tensor([3, 4]))
    """
    tensor = tensor.detach()
    dim = checked_dim(tensor, dim)
    if out is not None:
        return _scatter_out(tensor, devices, chunk_sizes, dim, out)
    if devices is None or len(devices) == 0:
        raise LengthError("Expected at least one device to scatter to")
    targets = resolve_devices(devices)
    size = tensor.shape[dim]
    if chunk_sizes is None:
        chunk_sizes = even_split(size, len(targets))
    elif len(chunk_sizes) != len(targets):
        raise LengthError(
            "Expected devices and chunk_sizes to be of same length, but got "
            f"len(devices) = {len(targets)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    if sum(chunk_sizes) != size or min(chunk_sizes) < 0:
        raise LayoutError(
            f"Expected chunk_sizes of at least 0 that sum to {size}, the size of dim {dim} of a tensor of shape "
            f"{tuple(tensor.shape)}, but got {tuple(chunk_sizes)}, which sum to {sum(chunk_sizes)}"
        )
    if streams is not None and len(streams) != len(targets):
        raise LengthError(f"expected one stream for each of {len(targets)} devices, got {len(streams)}")
    chunks = tensor.split_with_sizes(list(chunk_sizes), dim)
    copies = []
    for chunk, target, stream in zip(chunks, targets, streams or [None] * len(targets), strict=False):
        with nullcontext() if stream is None or chunk.device == target else on_streams([stream]):
            copies.append(copy_to(chunk, target))
    return tuple(copies)


def even_split(size: int, parts: int) -> list[int]:
    """Return sizes that differ by at most one, the larger first, none of them 0 (except for a single one of 0 rows)."""
    used = max(1, min(size, parts))
    return [size // used + (i < size % used) for i in range(used)]


def _scatter_out(
    tensor: torch.Tensor,
    devices: Sequence[DeviceLike] | None,
    chunk_sizes: Sequence[int] | None,
    dim: int,
    out: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    if devices is not None:
        raise LayoutError(f"'devices' must not be specified when 'out' is specified, but got devices={devices}")
    if chunk_sizes is not None:
        raise LayoutError(f"'chunk_sizes' must not be specified when 'out' is, but got chunk_sizes={chunk_sizes}")
    if not out:
        raise LengthError("Expected at least one output tensor to scatter to")
    for index, target in enumerate(out):
        if target.dim() != tensor.dim() or without(target, dim) != without(tensor, dim):
            raise LayoutError(
                f"Output tensor at index {index} has incorrect shape: {tuple(target.shape)} cannot be a chunk along "
                f"dim {dim} of {tuple(tensor.shape)}"
            )
        check_dtype("output", index, target, tensor, "the source tensor")
    sizes = [target.shape[dim] for target in out]
    if sum(sizes) != tensor.shape[dim]:
        raise LayoutError(
            f"Total size for output tensors along scatter dim {dim} does not match: expected {tensor.shape[dim]}, "
            f"got {sum(sizes)}"
        )
    for target, chunk in zip(out, tensor.split_with_sizes(sizes, dim), strict=True):
        fill(target, chunk)
    return tuple(out)


@torch.no_grad()
def gather(
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    destination: DeviceLike | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Concatenate tensors from several devices along ``dim`` onto one.

    Args:
        tensors: of one dtype and of the same sizes except along ``dim``. Tensors without dimensions become a vector.
        dim: the dimension along which the tensors are concatenated; may be negative.
        destination: the device of the result; None is the current one, ``-1`` and ``"cpu"`` the CPU.
        out: a tensor that is filled and returned instead. Exclusive with ``destination``.

    Communicates one copy for each tensor on another device. Stands for ``torch.nn.parallel.comm.gather``.

    >>> import torch
    >>> gather([torch.zeros(1), torch.ones(2)], destination="cpu")
    tensor([0., 1., 1.])
    """
    if not tensors:
        raise LengthError("Expected at least one tensor to gather from")
    if out is not None and destination is not None:
        raise LayoutError(f"'destination' must not be specified when 'out' is specified, but got {destination}")
    tensors, dim = gatherable([t.detach() for t in tensors], dim)
    first = tensors[0]
    shape = [*first.shape]
    shape[dim] = sum(t.shape[dim] for t in tensors)
    if out is None:
        target = resolve_destination(destination, tensors)
        if first.layout != torch.strided:
            return torch.cat([copy_to(t, target) for t in tensors], dim)
        result = torch.empty(shape, dtype=first.dtype, device=target, memory_format=_memory_format(first))
    else:
        if list(out.shape) != shape:
            raise LayoutError(f"Expected out to have shape {tuple(shape)}, but got {tuple(out.shape)}")
        check_dtype("output", 0, out, first, "the tensors to gather")
        result = out
    pieces = result.detach().split_with_sizes([t.shape[dim] for t in tensors], dim)
    for piece, tensor in zip(pieces, tensors, strict=True):
        fill(piece, tensor)
    return result


def _memory_format(tensor: torch.Tensor) -> torch.memory_format:
    if not tensor.is_contiguous():
        for layout, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if tensor.dim() == dims and tensor.is_contiguous(memory_format=layout):
                return layout
    return torch.contiguous_format


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write ``source`` into ``target``, which may be on another device; the device's current stream waits for it."""
    if direct_copy_works(source.device, target.device):
        target.copy_(source, non_blocking=target.device.type != "cpu")
    else:
        target.copy_(source.to(CPU))


def fill_all(targets: Sequence[torch.Tensor], source: torch.Tensor) -> None:
    """Write ``source`` into each of ``targets``, on other devices, as a tree of copies.

    In each round every accelerator that has the values sends them to one that has not, so that eight devices take three
    rounds, and not seven copies one after the other through the connection of the first.
    """
    waiting, having = deque(targets), [source]
    while waiting:
        for origin in tuple(having)[: len(waiting)]:
            target = waiting.popleft()
            fill(target, origin)
            if target.device != CPU:
                having.append(target)


def _plan(tensors: Sequence[torch.Tensor], buffer_size: int) -> tuple[list[int], BucketPlan]:
    """Return the indices of the dense tensors, and the buckets for them."""
    dense = [i for i, t in enumerate(tensors) if t.layout == torch.strided]
    layouts = tuple((tensors[i].shape, tensors[i].stride(), tensors[i].dtype, tensors[i].device) for i in dense)
    return dense, _plan_for(layouts, buffer_size)


@lru_cache(maxsize=256)
def _plan_for(
    layouts: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...], buffer_size: int
) -> BucketPlan:
    """Plan buckets once for each set of layouts: training makes the same transfers at every step."""
    specs = [TensorSpec("", tuple(s), dense_stride(s, t), dtype, device) for s, t, dtype, device in layouts]
    return plan_buckets(specs, buffer_size)
