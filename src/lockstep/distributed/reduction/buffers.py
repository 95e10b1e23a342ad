"""Keeps buffers equal on all ranks by a policy, and sends them with the gradients.

``rank0``: every rank gets rank 0's values. ``mean``: floating and complex buffers get the mean over the ranks, all
others rank 0's values. ``local``: each rank keeps its own.

Buffers are made equal at the end of every backward that synchronises, so the next forward starts from the same values
on all ranks, as with a broadcast before forward. Small ones are packed behind the report (``status.py``), which is
summed: a value from one rank and zeros from all others is exact. A dtype other than the report's is packed as bytes,
one byte for each element. Large buffers take one more collective.

Buffers may be added, removed, or change their shape: the rank that notices says so in its report, and all ranks compare
their buffers at the end of that backward.

A tensor that a graph may have saved for backward is never written: if anything but Python holds a reference to it, the
module gets a new tensor instead.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives, Pending
from lockstep.tensor_state import Layouts

Policy = Literal["rank0", "mean", "local"]
POLICIES: tuple[Policy, ...] = ("rank0", "mean", "local")
_shape_of, _dtype_of, _device_of = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")
_has_graph, _buffers_of = attrgetter("requires_grad"), attrgetter("_buffers")
PACKED_BYTES = 256 * 1024
"""Buffers of at most this size, all together, are packed behind the report."""


class Slot(NamedTuple):
    """A place in a module where a buffer is registered."""

    owner: "ref[Module]"
    key: str


class Buffer:
    """One buffer, perhaps registered in several places."""

    def __init__(self, name: str, slots: Sequence[Slot], tensor: Tensor) -> None:
        self.name = name
        self._slots = slots
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.nbytes = tensor.numel() * tensor.dtype.itemsize

    @property
    def slot(self) -> Slot:
        """The first place in which it is registered."""
        return self._slots[0]

    @property
    def tied(self) -> bool:
        """True if it is registered in several places."""
        return len(self._slots) > 1

    def current(self) -> Tensor | None:
        """Return the tensor registered now; None if there is none, or its shape, dtype or device has changed."""
        owner, key = self._slots[0].owner(), self._slots[0].key
        tensor = owner._buffers.get(key) if owner is not None else None
        if tensor is None or tensor.shape != self.shape or tensor.dtype != self.dtype or tensor.device != self.device:
            return None
        return tensor

    def is_split(self) -> bool:
        """Return True if the places in which it was registered now hold different tensors."""
        return len({id(owner._buffers.get(key)) for slot, key in self._slots if (owner := slot()) is not None}) > 1

    def zeros(self) -> Tensor:
        """Return zeros to be sent if there is no such tensor."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def writable(self) -> Tensor | None:
        """Return the tensor registered now; None if a graph may have saved it, or its elements share memory."""
        tensor = self.current()
        if tensor is None or holders(tensor) > 1 or tensor.requires_grad or tensor.is_inference():
            return None
        return None if has_overlap(tensor) else tensor

    @torch.no_grad()
    def assign(self, value: Tensor) -> None:
        """Set the values of the buffer: in place, unless a graph may have saved it."""
        target, tensor = self.writable(), self.current()
        if target is not None:
            target.copy_(value)
        elif tensor is not None:
            new = torch.empty_like(tensor).copy_(value).requires_grad_(tensor.requires_grad)
            for owner, key in self._slots:
                module = owner()
                if module is not None and module._buffers.get(key) is tensor:
                    module._buffers[key] = new


@torch.no_grad()
def assign_all(buffers: Sequence[Buffer], values: Sequence[Tensor]) -> None:
    """Set the values of many buffers, with one call for all that can be written in place."""
    targets = [buffer.writable() for buffer in buffers]
    pairs = [(target, value) for target, value in zip(targets, values, strict=True) if target is not None]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])
    for buffer, target, value in zip(buffers, targets, values, strict=True):
        if target is None:
            buffer.assign(value)


class BufferGroup:
    """Buffers handled together: one by one, hundreds of them would take longer than their values."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self._owners = [buffer.slot.owner for buffer in buffers]
        self._keys = [buffer.slot.key for buffer in buffers]
        self._shapes = [b.shape for b in buffers]
        self._dtypes = [b.dtype for b in buffers]
        self._devices = [b.device for b in buffers]
        self._numels = [shape.numel() for shape in self._shapes]
        self.dtype = self._dtypes[0] if buffers else torch.uint8
        """The dtype of all of them, if they are moved together."""
        self._is_flat = [len(shape) == 1 for shape in self._shapes]
        self._are_alike = len(set(self._shapes)) == 1  # then one operation moves all of them
        self._known: list[Any] = []  # the tensors of the last look, of which nothing was missing
        self._layouts: Layouts | None = None

    def current(self) -> Sequence[Tensor | None]:
        """Return :meth:`Buffer.current` of each."""
        return self._all_there() or [buffer.current() for buffer in self.buffers]

    def _all_there(self) -> list[Tensor] | None:
        """Return the tensors registered now; None if one is missing, or has another shape, dtype or device.

        The list is the same object as the last time if nothing has changed since.
        """
        try:
            registries = map(_buffers_of, map(operator.call, self._owners))
            tensors: list[Any] = list(map(dict.get, registries, self._keys))
            layouts = self._layouts
            if layouts is not None and all(map(operator.is_, tensors, self._known)) and not layouts.changed():
                return self._known
            alike = list(map(_shape_of, tensors)) == self._shapes and list(map(_dtype_of, tensors)) == self._dtypes
            if not alike or list(map(_device_of, tensors)) != self._devices:
                return None
        except AttributeError:  # None instead of a module or a tensor
            return None
        self._known = tensors
        self._layouts = Layouts(tensors)
        return tensors

    def joined(self, zeros: bool = False) -> Tensor:
        """Return the values, of one dtype and device, one after the other; zeros for a missing tensor, or for all."""
        tensors = None if zeros else self._all_there()
        if tensors is None:
            found = [None if zeros else buffer.current() for buffer in self.buffers]
            tensors = [b.zeros() if t is None else t for b, t in zip(self.buffers, found, strict=True)]
        if self._are_alike:
            return torch.stack(tensors).view(-1)
        return torch.cat([t if flat else t.reshape(-1) for t, flat in zip(tensors, self._is_flat, strict=True)])

    def assign(self, values: Tensor) -> None:
        """Set the values from those that :meth:`joined` has returned on another rank."""
        pieces = self._split(values)
        targets = self._all_there()
        if targets is None or not _are_writable(targets):
            for buffer, piece in zip(self.buffers, pieces, strict=True):
                buffer.assign(piece)
        elif targets:
            torch._foreach_copy_(targets, pieces)

    def _split(self, values: Tensor) -> list[Tensor] | tuple[Tensor, ...]:
        if self._are_alike:
            return values.view(len(self.buffers), *self._shapes[0]).unbind()
        return [
            piece if flat else piece.view(shape)
            for piece, flat, shape in zip(values.split(self._numels), self._is_flat, self._shapes, strict=True)
        ]


class BufferSet:
    """The buffers of a module by their first names, without those of ``skipped`` modules and ``ignored`` names.

    Refers to modules weakly, or through their dictionaries, which do not lead back to the module.
    """

    def __init__(self, module: Module, skipped: Collection[Module], ignored: Collection[str]) -> None:
        places: dict[int, tuple[str, Tensor, list[Slot]]] = {}
        self._registries: list[dict[str, Any]] = []
        self._empty: list[dict[str, Any]] = []
        self._vacant: list[tuple[dict[str, Any], str]] = []
        for prefix, owner in module.named_modules():
            if owner in skipped:
                continue
            (self._registries if owner._buffers else self._empty).append(owner._buffers)
            for key, tensor in owner._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is None:
                    self._vacant.append((owner._buffers, key))
                elif name not in ignored:
                    places.setdefault(id(tensor), (name, tensor, []))[2].append(Slot(ref(owner), key))
        self._sizes = list(map(len, self._registries))
        self.buffers = [Buffer(name, slots, tensor) for name, tensor, slots in places.values()]
        self._group = BufferGroup(self.buffers)
        self._tied = [buffer for buffer in self.buffers if buffer.tied]
        self._distinct: Sequence[Tensor | None] = ()  # tensors of which no two are the same

    def changed(self) -> bool:
        """Return True if buffers have been registered, removed, tied, untied, or changed in shape, dtype or device.

        Submodules are compared by :class:`lockstep.distributed.reduction.parameters.SlotSnapshot`.
        """
        if any(self._empty) or list(map(len, self._registries)) != self._sizes:
            return True
        if not (self.buffers or self._vacant):
            return False
        now = self._group.current()
        if now is not self._distinct:
            if any(map(operator.is_, now, repeat(None))) or len(set(map(id, now))) != len(now):
                return True
            self._distinct = now
        return any(registry.get(key) is not None for registry, key in self._vacant) or any(
            buffer.is_split() for buffer in self._tied
        )


class KeptBuffers:
    """Copies of the values of buffers, to be restored later."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        now = [(buffer, buffer.current()) for buffer in buffers]
        self._values = [(buffer, tensor.detach().clone()) for buffer, tensor in now if tensor is not None]

    def give_back(self) -> None:
        """Restore the values."""
        for buffer, value in self._values:
            buffer.assign(value)


def has_overlap(tensor: Tensor) -> bool:
    """Return True if elements of a tensor may share memory, as in an expanded one, which cannot be written."""
    if tensor.is_contiguous():
        return False
    reach = 0  # offset of the last element in the dimensions so far, in the order of their strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def holders(tensor: Any) -> int:
    """Return the number of references to a tensor from C++, such as graphs that have saved it; Python's count as
    one."""
    return int(tensor._use_count())


class _Packed(NamedTuple):
    """Buffers of one dtype and device, packed one after the other."""

    group: BufferGroup
    place: slice
    as_bytes: bool
    averaged: bool


class _Packing(NamedTuple):
    """The buffers of a module by the way in which they travel."""

    packed: Sequence[_Packed]
    """Those packed behind a report."""
    large: Sequence[Buffer]
    """Those with collectives of their own."""


class BufferSync:
    """Sends the buffers of one module by one policy; methods that move values run without grad mode."""

    def __init__(self, scan: Callable[[], BufferSet], policy: Policy, collectives: Collectives) -> None:
        self.policy = policy
        self._active: Sequence[int] = range(collectives.world)  # the ranks that have batches left
        self._scan = scan
        self._collectives = collectives
        self._set: BufferSet | None = None if policy == "local" else scan()
        self._packing = _Packing((), ())
        self.has_large = False
        """True if there are buffers that are not packed."""
        self._flats: list[tuple[Tensor, list[list[Buffer]]]] = []  # joined, but not sent yet
        self._sent: list[tuple[Pending, Tensor, list[list[Buffer]]]] = []
        self._left = False
        self.are_equal = False
        """True if the last round has made the buffers equal on all ranks."""

    @property
    def source(self) -> int:
        """The rank that sends its values to the others: the first that has batches left."""
        return self._active[0]

    def set_active(self, ranks: Sequence[int] | None) -> None:
        """Use the values of the first of ``ranks``, or the mean over them, from now on; None or empty: all ranks."""
        self._active = ranks or range(self._collectives.world)

    def leave(self) -> None:
        """Stop assigning buffers, since something else makes them equal; they are still sent."""
        self._left = True
        self.are_equal = False

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers that are sent."""
        return [] if self._set is None else self._set.buffers

    def keep(self) -> KeptBuffers:
        """Return a copy of the module's buffers, under any policy."""
        return KeptBuffers(self._scan().buffers)

    def changed(self) -> bool:
        """Return True if the module has other buffers now; nothing is sent then until :meth:`renew`."""
        return self._set is not None and self._set.changed()

    def renew(self) -> None:
        """Take the module's present buffers, compare them with the other ranks', and make them equal.

        Does nothing if each rank keeps its own.
        """
        if self.policy == "local":
            return
        found = self._scan()
        check_same_on_all_ranks([describe_buffer(buffer) for buffer in found.buffers], self._collectives)
        self._set = found
        self._flats = self._put_together(self.buffers)
        self.send_large()
        self.finish_large()

    def plan_packing(self, dtype: torch.dtype) -> int:
        """Choose the buffers to pack behind a report of that dtype; return the number of elements that they take."""
        packed: list[_Packed] = []
        large: list[Buffer] = []
        groups: dict[tuple[torch.dtype, torch.device, bool, bool], list[Buffer]] = {}
        room = PACKED_BYTES // dtype.itemsize
        for buffer in sorted(self.buffers, key=lambda b: b.nbytes):
            averaged = self._averaged(buffer)
            exact = buffer.dtype == dtype or (averaged and torch.promote_types(buffer.dtype, dtype) == dtype)
            room -= buffer.shape.numel() if exact else buffer.nbytes
            if (averaged and not exact) or room < 0:
                large.append(buffer)
            else:
                groups.setdefault((buffer.dtype, buffer.device, not exact, averaged), []).append(buffer)
        start = 0
        for (_, _, as_bytes, averaged), buffers in groups.items():
            end = start + sum(b.nbytes if as_bytes else b.shape.numel() for b in buffers)
            packed.append(_Packed(BufferGroup(buffers), slice(start, end), as_bytes, averaged))
            start = end
        self._packing = _Packing(packed, large)
        self.has_large = bool(large)
        return start

    @property
    def _is_source(self) -> bool:
        return self._collectives.rank == self.source

    @property
    def _is_active(self) -> bool:
        return self._collectives.rank in self._active

    def _averaged(self, buffer: Buffer) -> bool:
        return self.policy == "mean" and (buffer.dtype.is_floating_point or buffer.dtype.is_complex)

    def write(self, packed_buffers: Tensor) -> None:
        """Write this rank's part into the cleared end of a report."""
        for packed in self._packing.packed:
            if self._is_active if packed.averaged else self._is_source:
                values = packed.group.joined()
                packed_buffers[packed.place].copy_(values.view(torch.uint8) if packed.as_bytes else values)
                if packed.averaged:
                    packed_buffers[packed.place] /= len(self._active)
            elif not packed.as_bytes:
                # Under a sum, 0.0 would turn a -0.0 of the source into 0.0: test_values_of_rank_0_arrive_bit_for_bit.
                packed_buffers[packed.place] = -0.0

    def read(self, packed_buffers: Tensor) -> None:
        """Assign the values in the summed end of a report."""
        if self._left:
            return
        for packed in self._packing.packed:
            if packed.averaged or not self._is_source:
                values = packed_buffers[packed.place]
                if packed.as_bytes:
                    values = values.to(torch.uint8).view(packed.group.dtype)
                packed.group.assign(values)

    def prepare_large(self) -> None:
        """Join the buffers that are not packed, before the report is sent, which can then tell of an error."""
        self._flats = self._put_together(self._packing.large) if self.has_large else []

    def send_large(self, failed: bool = False) -> None:
        """Start to send them: one collective for each device, or for each dtype if values are averaged.

        ``failed``: the round has failed on this rank, perhaps here; send the rest, as zeros if nothing has been joined.
        """
        if failed and not self._flats:
            self._flats = self._put_together(self._packing.large, zeros=True)
        for flat, alike in self._flats[len(self._sent) :]:
            if self._averaged(alike[0][0]):
                pending = self._collectives.all_reduce(flat, "buffers")
            else:
                pending = self._collectives.broadcast(flat, "buffers", self.source)
            self._sent.append((pending, flat, alike))
        self._flats = []

    @torch.no_grad()
    def _put_together(self, buffers: Sequence[Buffer], zeros: bool = False) -> list[tuple[Tensor, list[list[Buffer]]]]:
        groups: dict[tuple[torch.device, torch.dtype | None], dict[torch.dtype, list[Buffer]]] = {}
        for buffer in buffers:
            kind = buffer.dtype if self._averaged(buffer) else None
            groups.setdefault((buffer.device, kind), {}).setdefault(buffer.dtype, []).append(buffer)
        flats: list[tuple[Tensor, list[list[Buffer]]]] = []
        for (_, averaged), by_dtype in groups.items():
            alike = list(by_dtype.values())
            if averaged is not None:
                flat = BufferGroup(alike[0]).joined(zeros or not self._is_active).div_(len(self._active))
            else:
                flat = torch.cat([BufferGroup(each).joined(zeros).view(torch.uint8) for each in alike])
            flats.append((flat, alike))
        return flats

    def drop_large(self) -> None:
        """Wait for the large buffers, and discard them: the round has failed on some rank."""
        self.are_equal = False
        sent, self._sent = self._sent, []
        for pending, _, _ in sent:
            pending.wait()

    def finish_large(self) -> None:
        """Wait for the large buffers, and assign them."""
        self.are_equal = not (self._left or self.policy == "local")
        if self._left:
            self.drop_large()
        sent, self._sent = self._sent, []
        for pending, flat, alike in sent:
            pending.wait()
            if self._averaged(alike[0][0]):
                BufferGroup(alike[0]).assign(flat)
            elif not self._is_source:
                pieces = flat.split([sum(buffer.nbytes for buffer in each) for each in alike])
                for each, piece in zip(alike, pieces, strict=True):
                    BufferGroup(each).assign(piece.clone().view(each[0].dtype))


def describe_buffer(buffer: Buffer) -> Line:
    """Return the properties of a buffer that must be the same on all ranks."""
    kind = str(buffer.dtype).removeprefix("torch.")
    return Line(f"buffer {buffer.name}", f"{kind} of shape {tuple(buffer.shape)}")


def _are_writable(tensors: Sequence[Tensor]) -> bool:
    """Return True if all tensors can be written in place, as in :meth:`Buffer.writable`."""
    return not (
        max(map(holders, tensors), default=1) > 1
        or any(map(_has_graph, tensors))
        or any(map(Tensor.is_inference, tensors))
        or (not all(map(Tensor.is_contiguous, tensors)) and any(map(has_overlap, tensors)))
    )
