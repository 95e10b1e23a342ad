"""The status that each rank says in a round, and the row of numbers in which the statuses of all ranks travel.

The row is summed over the ranks with the gradients, so that it costs no collective. Each rank writes bytes into places
of its own, which every floating dtype of at least 16 bits holds exactly, or ones whose sum is not zero::

    used     one for each parameter    1 where this rank has a gradient to contribute
    late     one for each parameter    1 where a gradient came after its bucket had left, or had no place in the plan
    status   39 for each rank          the bytes of its :class:`Status`
    digest   nine for each rank        in the rounds in which values are compared: of what there is a digest, and its
                                       bytes (``values.py``)
    buffers  the rest                  small ones (``buffers.py``)

The rules are in ``verdict.py``.
"""

import struct
from collections.abc import Sequence
from ctypes import string_at
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

DIGEST_BYTES = 9
"""Places of each rank's digest."""
_FORMAT = struct.Struct("<QQB5?BIId")


class Part(IntEnum):
    """How a rank takes part in a round."""

    FULL = 1
    """With what its backward passes have left; never 0, which is a rank that says nothing."""
    PADDING = 2
    """It has run out of batches, in ``batches()``, and contributes nothing."""
    JOINED = 3
    """The same in ``Join``."""
    SKIPS = 4
    """It leaves out the batch, so that all do."""
    FAILED = 5
    """Its backward has failed."""


class Status(NamedTuple):
    """Says how one rank takes part, once in each round; fields are packed in this order."""

    round: int = 0
    """The number of its round."""
    batch: int = 0
    """The number of the batch that its loop is at; 0 if nobody counts them."""
    part: int = Part.FULL
    """How it takes part: a :class:`Part`."""
    stops: bool = False
    """It asks all ranks to stop after this step."""
    ends: bool = False
    """It has no batch after this one."""
    changed: bool = False
    """Its parameters, buffers or hooks are not those that were agreed on."""
    drifted: bool = False
    """Its parameters were changed while a gradient was only its own (``drift.py``)."""
    weighted: bool = False
    """Its contribution has a weight."""
    called: int = 0
    """How the module was called in its backward pass: a :class:`~lockstep.distributed.reduction.passes.Called`; 0 if it
    has no pass of its own."""
    through: int = 0
    """Forwards since the last round that a backward has gone through (``passes.py``)."""
    unused_forwards: int = 0
    """Forwards since then that none has gone through, or that raised."""
    weight: float = 0.0
    """The weight of its contribution, if it has one."""


_FLAGS = slice(Status._fields.index("part"), Status._fields.index("called"))
_USUAL = Status()[_FLAGS]


class Report(NamedTuple):
    """All that ranks have said in a round."""

    used: Sequence[bool] | None
    """For each parameter, True if any rank has a gradient; None: all have."""
    late: Sequence[int] = ()
    """Parameters that some rank has a late gradient of."""
    statuses: Sequence[Status] = ()
    """Each rank's; empty if all say the same, and nothing follows from it but gradients."""
    digests: Sequence[bytes] = ()
    """Each rank's digest of its values, zeros if it has given none; empty if no rank has, or all are alike."""


class ReportLayout:
    """Where everything stands in the row."""

    def __init__(self, parameters: int, rank: int, world: int, packed_buffers: int, dtype: torch.dtype) -> None:
        """``dtype`` is that of the row."""
        self._parameters, self._rank, self._world = parameters, rank, world
        self._late = parameters
        self._status = 2 * parameters
        self._digest = self._status + _FORMAT.size * world
        start = self._digest + DIGEST_BYTES * world
        self.packed_buffers = slice(start, start + packed_buffers)
        self.numel, self.has_buffers = self.packed_buffers.stop, packed_buffers > 0
        self._said = Status()
        self._head = bytearray(self.packed_buffers.start)
        self._numbers = torch.frombuffer(self._head, dtype=torch.uint8)
        self._own_status = self._status + _FORMAT.size * rank
        own = self._digest + DIGEST_BYTES * rank
        self._own_digest = slice(own, own + DIGEST_BYTES)
        self._has_late = False
        statuses = slice(self._status, self._digest)
        self._alike = _UnanimousRow(self._numbers, dtype, parameters, statuses, rank, world)

    def write(
        self, row: Tensor, used: bytearray, late: Sequence[int], status: Status, digest: Tensor | None = None
    ) -> None:
        """Fill this rank's places of a row of ``numel`` elements, and clear all others.

        ``digest``: :data:`DIGEST_BYTES` bytes, on the row's device, if values are compared in this round.
        """
        head = self._head
        if self._has_late:
            head[self._late : self._status] = bytes(self._parameters)
        self._has_late = bool(late)
        head[: self._parameters] = used
        for index in late:
            head[self._late + index] = 1
        _FORMAT.pack_into(head, self._own_status, *status)
        self._said = status
        numbers = self._numbers if row.is_cpu else self._numbers.pin_memory()  # a copy: this one is written again
        (row[: self.packed_buffers.start] if self.has_buffers else row).copy_(numbers, non_blocking=True)
        if digest is not None:
            row[self._own_digest] = digest.to(row.dtype)
        if self.has_buffers:
            row[self.packed_buffers].zero_()

    def read(self, row: Tensor) -> Report:
        """Return what the sum over all ranks says.

        A rank that says nothing at all, as on a ``fake`` backend, is taken to say what this one does.
        """
        head = row if row.numel() == self.packed_buffers.start else row[: self.packed_buffers.start]
        head = head if head.is_cpu else head.cpu()
        alike = self._alike.report(head, self._head) if self._said[_FLAGS] == _USUAL else None
        return self._read_each(head) if alike is None else alike

    def _read_each(self, head: Tensor) -> Report:
        said = (head[: self._status] != 0).tolist()
        used, late = said[: self._parameters], said[self._parameters :]
        statuses = self._split(head[self._status : self._digest])
        silent = [rank for rank, each in enumerate(statuses) if not any(each)]
        if silent:
            statuses = self._split(head[self._status : self._digest], silent)
        digests = self._split(head[self._digest :], silent)
        report = Report(
            used=None if all(used) else used,
            late=[index for index, is_late in enumerate(late) if is_late] if True in late else (),
            digests=digests if len(digests) > 1 else (),
        )
        decoded = list(map(Status._make, map(_FORMAT.unpack, statuses)))
        if len(decoded) == 1 and decoded[0][_FLAGS] == _USUAL and not (report.late or report.digests):
            return report
        return report._replace(statuses=decoded * (self._world // len(decoded)))

    def _split(self, places: Tensor, silent: Sequence[int] = ()) -> list[bytes]:
        """Return the bytes that each rank has written into places of its own, or these once, if all have written the
        same; the ``silent`` ones are taken to have written what this one has."""
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
    """The sum over ranks that all say the same, as nearly always: comparing with it takes one operation.

    ``numbers`` are those that this rank writes, in a row of ``dtype``; ``status`` is where the statuses of all ranks
    stand.
    """

    def __init__(
        self, numbers: Tensor, dtype: torch.dtype, parameters: int, status: slice, rank: int, world: int
    ) -> None:
        self._used_places, self._world = numbers[:parameters], world
        self._own = numbers[status][_FORMAT.size * rank : _FORMAT.size * (rank + 1)]
        with torch.inference_mode(False):
            self._sum = torch.zeros(numbers.numel(), dtype=dtype, device="cpu")
        self._statuses = self._sum[status].view(world, _FORMAT.size)
        self._known: tuple[bytearray | None, Report] = None, Report(None)
        """The bytes that say which parameters were used, as :attr:`_sum` has them, and the report that it is, if this
        rank's status has no consequences."""

    def report(self, head: Tensor, written: bytearray) -> Report | None:
        """Return the report if ``head`` is that sum, else None; ``written`` are the bytes of the numbers."""
        used = written[: self._used_places.numel()]
        if used != self._known[0]:
            self._known = used, Report(None if 0 not in used else [bool(each) for each in used])
            self._sum[: len(used)].copy_(self._used_places).mul_(self._world)
        self._statuses.copy_(self._own)
        return self._known[1] if torch.equal(head, self._sum) else None
