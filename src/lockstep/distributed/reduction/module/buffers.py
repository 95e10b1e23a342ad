"""The buffers of a module: their values, and changes of which there are.

A tensor that a graph may have saved for backward is never written: if anything but Python holds a reference to it, the
module gets a new tensor instead.
"""

import operator
from collections.abc import Collection, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from lockstep._base.devices import is_accelerator
from lockstep._base.inner_tensors import as_bytes, bits, describe, inner_tensors, inner_tensors_of
from lockstep._base.tensor_state import Layouts

_shape_of, _dtype_of, _device_of = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")
_buffers_of = attrgetter("_buffers")


_Pieces = list[Tensor] | tuple[Tensor, ...]
_ADDED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


class Slot(NamedTuple):
    """A place in a module where a buffer is registered."""

    owner: "ref[Module]"
    key: str


class Buffer:
    """One buffer, perhaps registered in several places."""

    def __init__(self, name: str, slots: Sequence[Slot], tensor: Tensor) -> None:
        self.name = name
        self.slots = slots
        """The places in which it is registered."""
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        inner = inner_tensors_of(f"buffer {name}", tensor)
        self._made_of = describe(tensor)
        self.nbytes = sum(each.nbytes for each in inner)
        self.is_plain = not self._made_of
        """True if its values are those of one tensor in memory, which groups of buffers move together."""
        self.travels_as = inner[0].dtype if self.is_plain else torch.uint8
        """The dtype as which values are sent: bytes if they lie in several inner tensors."""
        self.can_be_averaged = self.is_plain and tensor.dtype in _ADDED
        """True if a mean over ranks can be taken. One in 8 bits, or of inner tensors, would mean nothing."""

    def current(self) -> Tensor | None:
        """Return the tensor registered now; None if there is none, or its shape, dtype, device or class has changed."""
        owner, key = self.slots[0].owner(), self.slots[0].key
        tensor = owner._buffers.get(key) if owner is not None else None
        if tensor is None or tensor.shape != self.shape or tensor.dtype != self.dtype or tensor.device != self.device:
            return None
        return tensor if describe(tensor) == self._made_of else None

    def inner(self) -> list[Tensor] | None:
        """Return the tensors in which its values lie now; None if :meth:`current` is."""
        tensor = self.current()
        return None if tensor is None else inner_tensors(tensor)

    def copy(self) -> list[Tensor] | None:
        """Return copies of its values, for :meth:`assign`; None if :meth:`current` is."""
        inner = self.inner()
        return None if inner is None else [each.clone() for each in inner]

    def is_split(self) -> bool:
        """Return True if the places in which it was registered now hold different tensors."""
        return len({id(owner._buffers.get(key)) for slot, key in self.slots if (owner := slot()) is not None}) > 1

    def describe(self) -> str:
        """Return the properties that must be the same on all ranks."""
        text = f"{str(self.dtype).removeprefix('torch.')} of shape {tuple(self.shape)}"
        if is_accelerator(self.device):
            text += f", on {self.device.type}"
        return f"{text}, {self._made_of}" if self._made_of else text

    def zeros(self) -> Tensor:
        """Return zeros to be sent if there is no such tensor."""
        shape = self.shape if self.is_plain else (self.nbytes,)
        return torch.zeros(shape, dtype=self.travels_as, device=self.device)

    def sent(self) -> Tensor:
        """Return its values as one tensor to be sent; zeros if :meth:`current` is None."""
        inner = self.inner()
        if inner is None:
            return self.zeros()
        return inner[0] if self.is_plain else torch.cat([*map(as_bytes, inner), self.zeros()[:0]])

    def take(self, sent: Tensor) -> None:
        """Set the values of the buffer to those that :meth:`sent` has returned on another rank."""
        inner = self.inner()
        if inner is not None and not self.is_plain:
            pairs = zip(inner, sent.split([each.nbytes for each in inner]), strict=True)
            self.assign(*(piece.clone().view(each.dtype).view(each.shape) for each, piece in pairs))
        else:
            self.assign(sent)

    def writable(self) -> list[Tensor] | None:
        """Return the tensors in which its values lie; None if a graph may have saved them, or elements share memory."""
        tensor = self.current()
        if tensor is None or holders(tensor) > 1 or tensor.requires_grad or tensor.is_inference():
            return None
        inner = inner_tensors(tensor)
        return None if any(map(has_overlap, inner)) else inner

    @torch.no_grad()
    def assign(self, *values: Tensor) -> None:
        """Set the values of :meth:`inner`: in place, unless a graph may have saved them."""
        targets, tensor = self.writable(), self.current()
        if targets is not None:
            write(targets, *values)
        elif tensor is not None:
            new = torch.empty_like(tensor) if self.is_plain else tensor.detach().clone()
            write(inner_tensors(new), *values)
            new.requires_grad_(tensor.requires_grad)
            for owner, key in self.slots:
                module = owner()
                if module is not None and module._buffers.get(key) is tensor:
                    module._buffers[key] = new


def write(targets: Sequence[Tensor], *values: Tensor) -> None:
    """Write values to as many tensors."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


@torch.no_grad()
def assign_all(buffers: Sequence[Buffer], values: Sequence[Sequence[Tensor]]) -> None:
    """Set the values of many buffers, with one call for all that can be written in place."""
    targets = [buffer.writable() for buffer in buffers]
    pairs = [pair for to, each in zip(targets, values, strict=True) if to for pair in zip(to, each, strict=True)]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])
    for buffer, target, value in zip(buffers, targets, values, strict=True):
        if target is None:
            buffer.assign(*value)


class BufferGroup:
    """Buffers handled together: one by one, hundreds of them would take longer than their values."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self._owners = [buffer.slots[0].owner for buffer in buffers]
        self._keys = [buffer.slots[0].key for buffer in buffers]
        self._shapes = [b.shape for b in buffers]
        self._dtypes = [b.dtype for b in buffers]
        self._devices = [b.device for b in buffers]
        self._numels = [shape.numel() for shape in self._shapes]
        self.travels_as = buffers[0].travels_as if buffers else torch.uint8
        """The dtype as which all of them are sent, if they are moved together."""
        self._are_plain = all(buffer.is_plain for buffer in buffers)
        self._are_sent_as_bits = any(buffer.travels_as != buffer.dtype for buffer in buffers)
        self._is_flat = [len(shape) == 1 for shape in self._shapes]
        self._are_alike = len(set(self._shapes)) == 1  # then one operation moves all of them
        self._known: tuple[list[Any], Layouts] | None = None  # the tensors of the last look at which all were there
        self._may_write = False  # whether these can be written in place, as long as no graph has saved them
        self._kept: tuple[Tensor, _Pieces] | None = None  # memory, and its pieces for all buffers

    def current(self) -> Sequence[Tensor | None]:
        """Return :meth:`Buffer.current` of each."""
        return self._all_there() or [buffer.current() for buffer in self.buffers]

    def _all_there(self) -> list[Tensor] | None:
        """Return the tensors registered now; None if one is missing, has another shape, dtype or device, or is not
        plain.

        The list is the same object as the last time if nothing has changed since.
        """
        if not self._are_plain:
            return None
        try:
            registries = map(_buffers_of, map(operator.call, self._owners))
            tensors: list[Any] = list(map(dict.get, registries, self._keys))
            if self._known is not None:
                known, layouts = self._known
                if all(map(operator.is_, tensors, known)) and not layouts.changed():
                    return known
            alike = list(map(_shape_of, tensors)) == self._shapes and list(map(_dtype_of, tensors)) == self._dtypes
            if not alike or list(map(_device_of, tensors)) != self._devices or any(map(describe, tensors)):
                return None
        except AttributeError:  # None instead of a module or a tensor
            return None
        self._known, self._may_write = (tensors, Layouts(tensors)), not any(map(_is_fixed, tensors))
        return tensors

    def joined(self, zeros: bool = False) -> Tensor:
        """Return the values, of one dtype and device, one after the other; zeros for a missing tensor, or for all."""
        tensors = None if zeros else self._all_there()
        if tensors is None:
            tensors = [buffer.zeros() if zeros else buffer.sent() for buffer in self.buffers]
        elif self._are_sent_as_bits:
            tensors = list(map(bits, tensors))
        if not self._are_plain:
            return torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self._are_alike:
            return torch.stack(tensors).view(-1)
        return torch.cat([t if flat else t.reshape(-1) for t, flat in zip(tensors, self._is_flat, strict=True)])

    def assign(self, values: Tensor) -> None:
        """Set the values from those that :meth:`joined` has returned on another rank."""
        self._assign(self._split(values))

    def assign_row(self, row: Tensor, as_bytes: bool) -> None:
        """Set the values as :meth:`assign` does from those in a row, one element for each, or one for each byte."""
        if self._kept is None:  # in each round, to make the pieces takes longer than to copy them
            kept = torch.empty(row.numel(), dtype=torch.uint8 if as_bytes else self.travels_as, device=row.device)
            self._kept = kept, self._split(kept.view(self.travels_as))
        kept, pieces = self._kept
        kept.copy_(row)
        self._assign(pieces)

    def _assign(self, pieces: _Pieces) -> None:
        targets = self._all_there()
        if targets is None or not self._may_write or max(map(holders, targets), default=1) > 1:
            for buffer, piece in zip(self.buffers, pieces, strict=True):
                buffer.take(piece)
        elif targets:
            torch._foreach_copy_(list(map(bits, targets)) if self._are_sent_as_bits else targets, pieces)

    def _split(self, values: Tensor) -> _Pieces:
        if not self._are_plain:
            return list(values.split([buffer.nbytes for buffer in self.buffers]))
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
        self._tied = [buffer for buffer in self.buffers if len(buffer.slots) > 1]
        self._distinct: Sequence[Tensor | None] = ()  # tensors of which no two are the same

    def changed(self) -> bool:
        """Return True if buffers have been registered, removed, tied, untied, or changed in shape, dtype or device.

        Submodules are compared by :class:`lockstep.distributed.reduction.module.parameters.SlotSnapshot`.
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
        now = [(buffer, buffer.copy()) for buffer in buffers]
        self._values = [(buffer, values) for buffer, values in now if values is not None]

    def give_back(self) -> None:
        """Restore the values."""
        for buffer, values in self._values:
            buffer.assign(*values)


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


def _is_fixed(tensor: Tensor) -> bool:
    """Return True if a tensor can never be written in place: see :meth:`Buffer.writable`."""
    return tensor.requires_grad or tensor.is_inference() or has_overlap(tensor)
