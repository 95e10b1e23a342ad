"""PURE: the messages between the ranks of a host, and the error if their collectives are not the same."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from operator import itemgetter

import torch

from lockstep._base.texts import ranks_in_words
from lockstep.errors import AgreementError


class MessageKind(bytes, Enum):
    """The kind of a message: its first byte."""

    COLLECTIVE = b"C"
    """A collective begins; the message is its :class:`Descriptor`."""
    STEP = b"S"
    """The next step of the collective: the sender has written its part and has read everything from the step before."""
    MEMORY = b"M"
    """Map this shared memory, given by number and size. The next message of the rank is FILE."""
    FILE = b"F"
    """Carries the file descriptor of the memory announced by the MEMORY message before it."""
    RETIRED = b"R"
    """Unmap these pieces of shared memory, given by number."""
    ABORT = b"A"
    """The group has ended for all ranks; the message says why."""
    LEAVE = b"L"
    """This rank has left the group."""


class CollectiveKind(IntEnum):
    """The collectives, by number."""

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
    """The reductions, by number."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


_COMMON = struct.Struct("<cBBBBiQI")
_COMMON_PART = itemgetter(slice(_COMMON.size))
_PER_RANK = struct.Struct("<qQd")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One collective as one rank describes it: the fields that must be the same on all ranks."""

    kind: CollectiveKind
    dtype: torch.dtype = torch.uint8
    numel: int = 0
    """Number of elements that a rank contributes, over all tensors (for ``REDUCE_SCATTER``: that a rank receives)."""
    op: Op = Op.SUM
    root: int = 0
    tensors: int = 1
    rounded_to: torch.dtype | None = None
    """The dtype to which values are rounded, if it is another one."""

    def pack(self) -> bytes:
        """Return the descriptor as a message."""
        dtype, rounded_to = _codes()[self.dtype], _codes()[self.rounded_to or self.dtype]
        return _COMMON.pack(
            MessageKind.COLLECTIVE, self.kind, self.op, dtype, rounded_to, self.root, self.numel, self.tensors
        )

    @classmethod
    def unpack(cls, message: bytes) -> "Descriptor":
        """Rebuild a descriptor from the message that :meth:`pack` returned."""
        _, kind, op, dtype, rounded_to, root, numel, tensors = _COMMON.unpack_from(message)
        dtypes = list(_codes())
        rounds = None if rounded_to == dtype else dtypes[rounded_to]
        return cls(CollectiveKind(kind), dtypes[dtype], numel, Op(op), root, tensors, rounds)

    def __str__(self) -> str:
        name = self.kind.name.lower()
        if self.kind is CollectiveKind.BARRIER:
            return name
        if self.kind is CollectiveKind.ALL_TO_ALL:  # what goes where may differ
            return f"{name}({self.dtype})"
        several = f" in {self.tensors} tensors" if self.tensors != 1 else ""
        details = [] if self.rounded_to is None else [f"rounded to {self.rounded_to}"]
        if self.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE, CollectiveKind.REDUCE_SCATTER):
            details.append(self.op.name)
        if self.kind in (
            CollectiveKind.REDUCE,
            CollectiveKind.GATHER,
            CollectiveKind.BROADCAST,
            CollectiveKind.SCATTER,
        ):
            details.append(
                f"{'to' if self.kind in (CollectiveKind.REDUCE, CollectiveKind.GATHER) else 'from'} rank {self.root}"
            )
        return f"{name}({', '.join([f'{self.numel} elements{several}', str(self.dtype), *details])})"


@lru_cache(1)
def _codes() -> dict[torch.dtype, int]:
    """Return a number for every dtype of this version of PyTorch."""
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    return {dtype: code for code, dtype in enumerate(sorted(dtypes, key=str))}


def with_location(message: bytes, location: tuple[int, int] | None, factor: float = 1.0) -> bytes:
    """Append to a descriptor's message the values that may differ by rank.

    These are the number of the shared memory, the byte in it at which this rank's tensor begins, and the factor by
    which the tensor is multiplied.
    """
    number, offset = location if location is not None else (-1, 0)
    return message + _PER_RANK.pack(number, offset, factor)


def location_of(message: bytes) -> tuple[int, int] | None:
    """Return where the tensor of the sending rank begins; None if it is not in shared memory."""
    number, offset, _ = _PER_RANK.unpack_from(message, _COMMON.size)
    return (number, offset) if number >= 0 else None


def factor_of(message: bytes) -> float:
    """Return the factor by which the tensor of the sending rank is multiplied."""
    factor: float = _PER_RANK.unpack_from(message, _COMMON.size)[2]
    return factor


def said_by(messages: Sequence[bytes], global_ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return the collectives that the ranks are about to run, in words, with their ranks; one entry if all agree."""
    common = messages[0][: _COMMON.size]
    if all(message.startswith(common) for message in messages):
        return {str(Descriptor.unpack(common)): list(global_ranks)}
    collectives: dict[str, list[int]] = {}
    for rank, message in zip(global_ranks, messages, strict=True):
        collectives.setdefault(str(Descriptor.unpack(message)), []).append(rank)
    return collectives


def compare(messages: Sequence[bytes], global_ranks: Sequence[int]) -> None:
    """Raise :class:`AgreementError`, the same on every rank, unless all are about to run the same collective."""
    if len({*map(_COMMON_PART, messages)}) > 1:
        raise disagreement(said_by(messages, global_ranks))


def disagreement(said: Mapping[str, Sequence[int]]) -> AgreementError:
    """Return the error for ranks that are about to run different collectives."""
    lines = [f"{ranks_in_words(by)}: {what}" for what, by in said.items() if by]
    return AgreementError(
        "the ranks run different collectives, and no data has been moved: "
        f"{'; '.join(lines)}. Every rank has to run the same collectives in the same order, with the same sizes and "
        "dtypes; the group can be used further"
    )
