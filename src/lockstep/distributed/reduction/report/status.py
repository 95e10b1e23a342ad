"""The status that each rank reports in a round, and the row of numbers that carries the statuses of all ranks.

The row is summed over the ranks together with the gradients, so it needs no collective of its own. Each rank writes
bytes in places of its own, which every floating dtype of at least 16 bits represents exactly, or ones, whose sum is
only compared with zero::

    used     one for each parameter    1 if this rank contributes a gradient
    late     one for each parameter    1 if a gradient came after its bucket had left, or has no bucket
    status   39 for each rank          the bytes of its :class:`Status`
    buffers  the rest                  small buffers (``buffers.py``)

``verdict.py`` has the rules about statuses; ``pass_log.py`` counts what a status says of forwards and passes.
"""

import struct
from collections.abc import Sequence
from ctypes import string_at
from enum import Flag, IntEnum, auto
from typing import NamedTuple

import torch
from torch import Tensor

MOST_STEPS, UNKNOWN_STEPS = 254, 255
"""The highest number of optimizer steps that a status tells, and the one that says that it is not known."""
_FORMAT = struct.Struct("<QQB4?BIIBd")


class Part(IntEnum):
    """The way in which a rank takes part in a round."""

    FULL = 1
    """With the gradients of its backward passes; not 0, which stands for a rank that writes nothing."""
    PADDING = 2
    """It has run out of batches in ``batches()``, and contributes nothing."""
    JOINED = 3
    """It has run out of batches in ``Join``, and contributes nothing."""
    SKIPS = 4
    """It skips the batch, and so do all ranks."""
    FAILED = 5
    """Its backward has failed."""


class Called(Flag):
    """How the module was called, for the outputs that a backward pass went through."""

    TRAINING = auto()
    EVALUATION = auto()
    OTHERWISE = auto()
    """The pass reached its parameters, but not through outputs of its forward."""
    UNKNOWN = auto()
    """The compiler runs its forward, and does not tell; or the pass reached it through a mean over the ranks, behind
    which the pass of one rank goes through the forward and that of another does not."""


class Status(NamedTuple):
    """How one rank takes part in a round; fields are packed in this order."""

    round: int = 0
    """The number of the round."""
    batch: int = 0
    """The number of the batch in its loop; 0 outside of loops."""
    part: int = Part.FULL
    """A :class:`Part`."""
    stops: bool = False
    """True if it asks all ranks to stop after this step."""
    ends: bool = False
    """True if it has no batch after this one."""
    changed: bool = False
    """True if its parameters, buffers or hooks differ from those agreed on."""
    weighted: bool = False
    """True if its contribution has a weight."""
    called: int = 0
    """How its backward pass called the module, as a :class:`Called`; 0 if it has
    no pass of its own."""
    through: int = 0
    """The number of forwards since the last round that a backward has gone through (:class:`PassLog`)."""
    unused_forwards: int = 0
    """The number of forwards since then that no backward has gone through, or that raised."""
    steps: int = 0
    """The number of steps that optimizers have made on the module's parameters since the last round
    (:class:`StepLog`), at most :data:`MOST_STEPS`; or :data:`UNKNOWN_STEPS`."""
    weight: float = 0.0
    """The weight of its contribution; 0 if it has none."""


_FLAGS = slice(Status._fields.index("part"), Status._fields.index("called"))
_USUAL = Status()[_FLAGS]


class Report(NamedTuple):
    """What all ranks have reported in a round."""

    used: Sequence[bool] | None
    """For each parameter, True if any rank has a gradient; None if all parameters have one."""
    late: Sequence[int] = ()
    """Parameters of which some rank has a late gradient."""
    statuses: Sequence[Status] = ()
    """The status of each rank; empty if all are the same, with no consequences besides gradients."""


class ReportLayout:
    """The places in the row."""

    def __init__(self, parameters: int, rank: int, world: int, packed_buffers: int, dtype: torch.dtype) -> None:
        """``dtype``: of the row."""
        self._parameters = parameters
        self._rank = rank
        self._world = world
        self._late = parameters
        self._none_late = bytes(parameters)
        self._status = 2 * parameters
        start = self._status + _FORMAT.size * world
        self.packed_buffers = slice(start, start + packed_buffers)
        self.numel = self.packed_buffers.stop
        self.has_buffers = packed_buffers > 0
        self._said = Status()
        self._head = bytearray(self.packed_buffers.start)
        self._numbers = torch.frombuffer(self._head, dtype=torch.uint8)
        self._own_status = self._status + _FORMAT.size * rank
        self._alike = _UnanimousRow(self._numbers, dtype, parameters, slice(self._status, start), rank, world)

    def write(self, row: Tensor, used: bytearray, late: Sequence[int], status: Status) -> None:
        """Write this rank's places of a row of ``numel`` elements, and clear all others."""
        head = self._head
        head[: self._parameters] = used
        head[self._late : self._status] = self._none_late
        for index in late:
            head[self._late + index] = 1
        _FORMAT.pack_into(head, self._own_status, *status)
        self._said = status
        numbers = self._numbers if row.is_cpu else self._numbers.pin_memory()  # a copy: this one is written again
        (row[: self.packed_buffers.start] if self.has_buffers else row).copy_(numbers, non_blocking=True)
        if self.has_buffers:
            row[self.packed_buffers].zero_()

    def read(self, row: Tensor) -> Report:
        """Return the report in the sum over all ranks.

        The status of a rank that has written nothing, as on a ``fake`` backend, counts as equal to this rank's.
        """
        head = row if row.numel() == self.packed_buffers.start else row[: self.packed_buffers.start]
        head = head if head.is_cpu else head.cpu()
        alike = self._alike.report(head, self._head) if self._said[_FLAGS] == _USUAL else None
        return self._read_each(head) if alike is None else alike

    def _read_each(self, head: Tensor) -> Report:
        said = (head[: self._status] != 0).tolist()
        used, late = said[: self._parameters], said[self._parameters :]
        statuses = self._split(head[self._status :])
        silent = [rank for rank, each in enumerate(statuses) if not any(each)]
        if silent:
            statuses = self._split(head[self._status :], silent)
        report = Report(
            used=None if all(used) else used,
            late=[index for index, is_late in enumerate(late) if is_late] if True in late else (),
        )
        decoded = list(map(Status._make, map(_FORMAT.unpack, statuses)))
        if len(decoded) == 1 and decoded[0][_FLAGS] == _USUAL and not report.late:
            return report
        return report._replace(statuses=decoded * (self._world // len(decoded)))

    def _split(self, places: Tensor, silent: Sequence[int] = ()) -> list[bytes]:
        """Return the bytes of each rank, or only one entry if all are equal; those of ``silent`` ranks count as equal
        to this rank's."""
        numbers = places.to(torch.uint8)
        raw, size = string_at(numbers.data_ptr(), numbers.numel()), numbers.numel() // self._world
        own = raw[size * self._rank : size * (self._rank + 1)]
        if raw == own * self._world:
            return [own]
        told = [raw[place : place + size] for place in range(0, len(raw), size)]
        for rank in silent:
            told[rank] = own
        return told if told.count(own) < self._world else [own]


class _UnanimousRow:
    """The expected sum if all ranks say the same, the usual case: one operation compares with it.

    ``numbers``: what this rank writes, in a row of ``dtype``; ``status``: the places of all statuses.
    """

    def __init__(
        self, numbers: Tensor, dtype: torch.dtype, parameters: int, status: slice, rank: int, world: int
    ) -> None:
        self._used_places = numbers[:parameters]
        self._world = world
        self._own = numbers[status][_FORMAT.size * rank : _FORMAT.size * (rank + 1)]
        with torch.inference_mode(False):
            self._sum = torch.zeros(numbers.numel(), dtype=dtype, device="cpu")
        self._statuses = self._sum[status].view(world, _FORMAT.size)
        self._known: tuple[bytearray | None, Report] = None, Report(None)
        """The bytes of the used parameters in :attr:`_sum`, and the report that it stands for if this rank's status has
        no consequences."""

    def report(self, head: Tensor, written: bytearray) -> Report | None:
        """Return the report if ``head`` equals the sum, else None; ``written``: the bytes of the numbers."""
        used = written[: self._used_places.numel()]
        if used != self._known[0]:
            self._known = used, Report(None if 0 not in used else [bool(each) for each in used])
            self._sum[: len(used)].copy_(self._used_places).mul_(self._world)
        self._statuses.copy_(self._own)
        return self._known[1] if torch.equal(head, self._sum) else None
