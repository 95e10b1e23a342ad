"""Digests of the slices of a module's parameters, and of what optimizers keep of them, taken after a step."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from ctypes import c_char
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep._base.devices import is_accelerator
from lockstep._base.digests import slice_digest, text_digest
from lockstep._base.inner_tensors import inner_tensors, is_ordinary

APART = 7
"""The number of rounds from one look to the next: a look takes time of its own, however little it looks at."""
ROUNDS = 256
"""The number of rounds in which all values are looked at once."""
_LOOKS = ROUNDS // APART
_FINEST, _LEAST, _MOST = 1 << 9, 1 << 14, 1 << 22
"""Number of elements of a slice. It grows with the module, as each slice takes some launches on an accelerator, and is
less than usual where there are so few parameters that some looks had none: a look takes as long as its values."""
_SAMPLED = 16
"""Number of bytes of a sample, or of elements where it is a tensor."""


def comparable_state(optimizer: Optimizer, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors that an optimizer keeps of a parameter and that are the same on all ranks.

    Of PyTorch's own optimizers all but single numbers; of others nothing, since it is not known whether each rank is to
    have its own, nor of one whose state is sharded.
    """
    if not type(optimizer).__module__.startswith("torch.optim.") or not isinstance(optimizer.state, dict):
        return []
    state = optimizer.state.get(parameter) or {}
    return [(key, each) for key, each in state.items() if isinstance(each, Tensor) and each.dim()]


_tensor_of = itemgetter(1)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a plain tensor in the order of its memory, without copying them if they are dense."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    for layout, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if tensor.dim() == dims and tensor.is_contiguous(memory_format=layout):
            return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def _is_there(tensor: Tensor) -> bool:
    """Return False if a program has freed the memory of a tensor for a while."""
    return not is_ordinary(tensor) or _has_memory(tensor)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + tensor.nbytes


def _address_on_host(tensor: Tensor) -> int:
    """Return where the elements of a tensor lie one after the other in memory of the host; 0 if they do not."""
    is_dense = tensor.is_cpu and is_ordinary(tensor) and tensor.is_contiguous() and _has_memory(tensor)
    return tensor.data_ptr() if is_dense else 0


@lru_cache(maxsize=64)
def _bytes(count: int) -> Any:
    """Return the class of an array of bytes. To make it takes longer than all else, and ctypes does not keep it."""
    return c_char * count


class Slice(NamedTuple):
    """A part of a parameter, and of what optimizers keep of it."""

    parameter: int
    inner: int
    """The number of the tensor inside of the parameter in which it lies: 0 but for odd classes."""
    start: int
    stop: int


class Table:
    """The parameters of a module, and their slices, in the order in which they are looked at."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self.names = [name for name, _ in named]
        self.tensors = [tensor for _, tensor in named]
        self.ids = frozenset(map(id, self.tensors))
        inner = [inner_tensors(tensor) for tensor in self.tensors]
        sizes = [part.numel() for parts in inner for part in parts]
        fine = sum(sizes) // max(1, _LOOKS - len(sizes)) + 1  # no more slices than looks, if there is room
        size = max(_FINEST, min(_LEAST, fine), min(_MOST, sum(sizes) // ROUNDS))
        self.slices = [
            Slice(number, place, start, start + size)
            for number, parts in enumerate(inner)
            for place, part in enumerate(parts)
            for start in range(0, part.numel(), size)
        ]
        self._at_once = -(-len(self.slices) // _LOOKS) or 1
        self._looks = -(-len(self.slices) // self._at_once) or 1
        self._sampled = next((each for each in reversed(self.tensors) if each.requires_grad and each.numel()), None)
        self._address = 0  # where the sample lies; 0 where it is read otherwise
        self._on_host: Any = None  # the bytes there
        devices = [part.device for parts in inner for part in parts if is_accelerator(part.device)]
        self._accelerator = devices[0] if devices else None
        self.is_on_accelerator = bool(devices)

    def sample(self) -> bytes | Tensor | None:
        """Return a few values of the last parameter that is trained, or on an accelerator a copy of them; None if none
        is, or on a stream that is being captured. What tells whether a program has written to the module: versions
        count neither writes to ``.data`` nor another tensor there."""
        sampled = self._sampled
        # In each step: a view takes ten times as long, and one that is kept would keep memory. Where the memory is
        # another one, or has been freed for a while, so is the address.
        if self._address and sampled is not None and sampled.data_ptr() == self._address:
            taken: bytes = self._on_host.raw
            return taken
        if sampled is None or self.is_captured() or not _is_there(sampled):
            return None
        self._address = _address_on_host(sampled)
        if self._address:
            self._on_host = _bytes(min(sampled.nbytes, _SAMPLED)).from_address(self._address)
            return self.sample()
        return _flat(inner_tensors(sampled)[-1].detach())[:_SAMPLED].clone()

    def is_captured(self) -> bool:
        """Return True if the current stream of the parameters' accelerator is being captured into a graph."""
        if self._accelerator is None:
            return False
        capturing = getattr(torch.get_device_module(self._accelerator.type), "is_current_stream_capturing", None)
        return capturing is not None and capturing()

    def due(self, round_: int) -> range:
        """Return the numbers of the slices to be looked at after a round."""
        if round_ % APART:
            return range(0)
        first = round_ // APART % self._looks * self._at_once
        return range(first, min(first + self._at_once, len(self.slices)))


class Look:
    """The digests of some slices after the step that followed a round."""

    def __init__(self, table: Table, round_: int, whole: bool) -> None:
        self.round = round_
        self.whole = whole
        self.numbers = range(len(table.slices)) if whole else table.due(round_)
        self._table = table
        self._found: dict[int, list[Any]] = {}  # tensors of one number, or numbers on the host
        self._numbers: list[Tensor] = []
        self._arriving: tuple[Tensor, torch.Event] | None = None

    def concerns(self, stepped: AbstractSet[int]) -> bool:
        """Return True if an optimizer that has ``stepped`` these parameters has some whose slices are due, or nothing
        has been looked at yet."""
        if not self._found:
            return bool(self.numbers)
        slices, tensors = self._table.slices, self._table.tensors
        return any(id(tensors[slices[number].parameter]) in stepped for number in self.numbers)

    def take(
        self, optimizers: Sequence[Optimizer], stepped: AbstractSet[int], numbers: Sequence[Tensor], state: bool
    ) -> None:
        """Take the digests of all slices; again only those of parameters that have just been ``stepped``."""
        table = self._table
        for number in self.numbers:
            piece = table.slices[number]
            parameter = table.tensors[piece.parameter]
            if number not in self._found or id(parameter) in stepped:
                tensors = [parameter]
                for each in optimizers if state else ():
                    tensors += map(_tensor_of, comparable_state(each, parameter))
                self._found[number] = _digests(tensors, piece, on_host=not table.is_on_accelerator)
        self._numbers = [slice_digest(each.detach().reshape(1)) for each in numbers]
        if table.is_on_accelerator:
            self._send()

    def _send(self) -> None:
        digests = [each for found in self._found.values() for each in found] + self._numbers
        if digests:
            device = next((each.device for each in digests if not each.is_cpu), digests[0].device)
            together = torch.stack([each.to(device, non_blocking=True) for each in digests])
            arrived = torch.empty(len(digests), dtype=torch.int64, device="cpu", pin_memory=True)
            arrived.copy_(together, non_blocking=True)
            self._arriving = arrived, torch.accelerator.current_stream(device).record_event()

    def digest(self) -> int | None:
        """Return the digest of all; None if it has not arrived on the host yet, and 0 if nothing was looked at."""
        if self._arriving is not None:
            return told(self._arriving[0].tolist()) if self._arriving[1].query() else None
        found = [int(each) for digests in self._found.values() for each in digests]
        return (found[0] % (1 << 64) or 1) if len(found) == 1 else told(found) if found else 0


def in_bytes(sample: bytes | Tensor | None) -> bytes | None:
    """Return a sample to be compared."""
    return bytes(sample.view(torch.uint8).tolist())[:_SAMPLED] if isinstance(sample, Tensor) else sample


def told(value: object) -> int:
    """Return a number of 64 bits, never 0, that is the same for the same value."""
    return text_digest(repr(value), bits=64) or 1


def _digests(tensors: Sequence[Tensor], piece: Slice, *, on_host: bool) -> list[Any]:
    """Return digests of a slice of tensors: of a parameter, and of others, which have its shape or belong to it;
    ``on_host``: all are on the CPU."""
    shape, numel, digest, digests = tensors[0].shape, tensors[0].numel(), 0, list[Any]()
    start, count = piece.start, min(piece.stop, numel) - piece.start
    is_small = on_host and count <= _LEAST  # an operation on a tensor would take longer than its values
    for tensor in tensors:
        is_alike = tensor.shape == shape
        if is_small and is_alike and (address := _address_on_host(tensor)):
            size = tensor.itemsize
            digest = crc32(_bytes(count * size).from_address(address + start * size), digest)
            continue
        if not _is_there(tensor):
            continue
        parts = inner_tensors(tensor.detach())
        if is_alike and piece.inner < len(parts):
            digests.append(slice_digest(_flat(parts[piece.inner])[start : piece.stop]))
        elif not (piece.inner or start):  # of another shape, such as the row and column factors of Adafactor
            digests += [slice_digest(each) for part in parts for each in _flat(part).split(piece.stop)]
    return [*digests, digest] if on_host else digests
