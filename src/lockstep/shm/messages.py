"""PURE: the messages between the ranks of a host, and the error if their collectives are not the same."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache

import torch

from lockstep.errors import AgreementError


class MessageKind(bytes, Enum):
    """What a message is: its first byte."""

    COLLECTIVE = b"C"
    """A collective begins: its :class:`Descriptor`."""
    STEP = b"S"
    """The next step of that collective: the sender has written its part, and has read what it had to before."""
    MEMORY = b"M"
    """There is shared memory to be mapped: its number and size. The next message of this rank is the FILE."""
    FILE = b"F"
    """It brings the file descriptor of that memory along."""
    RETIRED = b"R"
    """Memory that is not needed any more: its numbers."""
    ABORT = b"A"
    """The group has ended for all ranks: why."""
    LEAVE = b"L"
    """This rank has left the group."""


class Kind(IntEnum):
    """The collectives."""

    ALL_REDUCE = 0
    REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    BARRIER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    ADD_IN_ORDER = 9


class Op(IntEnum):
    """How the values of the ranks are reduced."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


_COMMON = struct.Struct("<cBBBiQI")
_PER_RANK = struct.Struct("<qQd")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One collective, as one rank sees it: what must be the same on all."""

    kind: Kind
    dtype: torch.dtype = torch.uint8
    numel: int = 0
    """Elements that a rank contributes, all tensors together (of ``REDUCE_SCATTER``: that a rank receives)."""
    op: Op = Op.SUM
    root: int = 0
    tensors: int = 1

    def pack(self) -> bytes:
        """Make a message of it."""
        return _COMMON.pack(
            MessageKind.COLLECTIVE, self.kind, self.op, _codes()[self.dtype], self.root, self.numel, self.tensors
        )

    @classmethod
    def unpack(cls, message: bytes) -> "Descriptor":
        """Make it of the message that :meth:`pack` made."""
        _, kind, op, dtype, root, numel, tensors = _COMMON.unpack_from(message)
        return cls(Kind(kind), list(_codes())[dtype], numel, Op(op), root, tensors)

    def __str__(self) -> str:
        name = self.kind.name.lower()
        if self.kind is Kind.BARRIER:
            return name
        if self.kind is Kind.ALL_TO_ALL:  # what goes where may differ
            return f"{name}({self.dtype})"
        several = f" in {self.tensors} tensors" if self.tensors != 1 else ""
        details = []
        if self.kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
            details.append(self.op.name)
        if self.kind in (Kind.REDUCE, Kind.GATHER, Kind.BROADCAST, Kind.SCATTER):
            details.append(f"{'to' if self.kind in (Kind.REDUCE, Kind.GATHER) else 'from'} rank {self.root}")
        return f"{name}({', '.join([f'{self.numel} elements{several}', str(self.dtype), *details])})"


@lru_cache(1)
def _codes() -> dict[torch.dtype, int]:
    """A number for every dtype of this PyTorch."""
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    return {dtype: code for code, dtype in enumerate(sorted(dtypes, key=str))}


def with_location(message: bytes, location: tuple[int, int] | None, factor: float = 1.0) -> bytes:
    """Add to a descriptor's message what may differ by rank.

    That is the number of the shared memory and the byte in it at which this rank's tensor begins, and what the tensor
    is multiplied by.
    """
    number, offset = location if location is not None else (-1, 0)
    return message + _PER_RANK.pack(number, offset, factor)


def location_of(message: bytes) -> tuple[int, int] | None:
    """Read where the tensor of the rank that sent a message begins; None if it is not in shared memory."""
    number, offset, _ = _PER_RANK.unpack_from(message, _COMMON.size)
    return (number, offset) if number >= 0 else None


def factor_of(message: bytes) -> float:
    """Read what the tensor of the rank that sent a message is multiplied by."""
    factor: float = _PER_RANK.unpack_from(message, _COMMON.size)[2]
    return factor


def said_by(messages: Sequence[bytes], global_ranks: Sequence[int]) -> dict[str, list[int]]:
    """Put in words what the ranks are about to run, with who says so; one entry if they agree."""
    common = messages[0][: _COMMON.size]
    if all(message.startswith(common) for message in messages):
        return {str(Descriptor.unpack(common)): list(global_ranks)}
    said: dict[str, list[int]] = {}
    for rank, message in zip(global_ranks, messages, strict=True):
        said.setdefault(str(Descriptor.unpack(message)), []).append(rank)
    return said


def compare(messages: Sequence[bytes], global_ranks: Sequence[int]) -> None:
    """Raise :class:`AgreementError`, the same on every rank, unless all are about to run the same collective."""
    common = messages[0][: _COMMON.size]
    if not all(message.startswith(common) for message in messages):
        raise disagreement(said_by(messages, global_ranks))


def disagreement(said: Mapping[str, Sequence[int]]) -> AgreementError:
    """Make the error for ranks that do not say the same."""
    lines = [
        f"rank{'s' if len(by) > 1 else ''} {', '.join(map(str, sorted(by)))}: {what}" for what, by in said.items() if by
    ]
    return AgreementError(
        "the ranks of a shm process group run different collectives, and no data has been moved: "
        f"{'; '.join(lines)}. Every rank has to run the same collectives in the same order, with the same sizes and "
        "dtypes; the group can be used further"
    )
