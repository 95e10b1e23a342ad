"""The report of a round, where it travels: written, sent, and read in time.

It rides behind the gradients of the last bucket, or on its own if that bucket cannot carry it. On the CPU it is read
at once. On an accelerator reading means waiting, so it is read at once only if this rank has anything unusual to know
or to say; else before the next step of an optimizer (``unread_reports.py``), or when the next round opens. Until then
the buffers that have come with it are not assigned.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.distributed.buffers import BufferSync
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.decisions import SKIPS
from lockstep.distributed.reduction.report import RankStatus, Report, ReportLayout

_OWN_DTYPE = torch.float32


class ReportTransport:
    """Writes and reads the reports of one module."""

    def __init__(self, parameters: int, collectives: Collectives, buffers: BufferSync) -> None:
        self._parameters, self._collectives, self._buffers = parameters, collectives, buffers
        self._deferred: DeferredRow | None = None
        self._packed_buffers: Tensor | None = None
        self.is_unread = False
        """Whether nothing of the last report has been read."""

    def lay_out(self, behind: torch.dtype | None, device: torch.device) -> None:
        """Decide where everything stands, behind gradients of dtype ``behind``, or on its own if None."""
        dtype = behind or _OWN_DTYPE
        world, rank = self._collectives.world, self._collectives.rank
        self._layout = ReportLayout(self._parameters, rank, world, self._buffers.plan_packing(dtype))
        self.row_device = device
        """Where the row lies."""
        self.own_row = torch.zeros(self.numel, dtype=dtype, device=device) if behind is None else None
        """The row that travels on its own."""

    @property
    def device(self) -> torch.device:
        """Where the row of a module without parameters lies."""
        return self._collectives.device

    @property
    def numel(self) -> int:
        """Elements of a row."""
        return self._layout.numel

    def write(
        self,
        row: Tensor,
        used: bytearray,
        late: list[int],
        status: RankStatus,
        weight: float,
        digest: Tensor | None = None,
    ) -> None:
        """What this rank has to say, and its buffers."""
        self._layout.write(row, used, late, status, weight, digest)
        if self._layout.has_buffers and not status.module_changed:
            try:
                self._buffers.write(row[self._layout.packed_buffers])
            except Exception:
                if not (status.failed or status.loop & SKIPS):
                    raise  # then this rank's part has failed, perhaps for this, and the others are told

    def read(self, row: Tensor, may_defer: Callable[[], bool]) -> Report:
        """What all ranks have said; an empty report, if reading takes waiting and nothing unusual is to be expected
        (``may_defer``): see :meth:`look`."""
        head = row[: self._layout.packed_buffers.start] if self._layout.has_buffers else row
        if head.is_cpu:
            return self._layout.read(head)
        self._deferred = DeferredRow(head)
        if may_defer():
            self.is_unread, self._packed_buffers = True, row[self._layout.packed_buffers].clone()
            return Report(used=None, late=[], ranks=[], weights=[])
        return self._layout.read(self._deferred.result())

    def read_abandoned(self, row: Tensor | None) -> Report | None:
        """What the ranks have said in a round that was abandoned here, if its report has been sent as it is laid out
        now."""
        if row is None or row.numel() != self._layout.numel:
            return None
        head = row[: self._layout.packed_buffers.start]
        return self._layout.read(head if head.is_cpu else DeferredRow(head).result())

    def look(self) -> Report | None:
        """A report that was not waited for; None if it has been looked at, and :meth:`note_looked_at` called."""
        if not self.is_unread or self._deferred is None:
            return None
        return self._layout.read(self._deferred.result())

    def note_looked_at(self) -> None:
        """What has to be done at once because of a report that was not waited for has been done."""
        self.is_unread, self._packed_buffers = False, None

    def read_deferred(self) -> Report | None:
        """The whole of a report, once more, when the next round opens; None on the CPU."""
        deferred, self._deferred = self._deferred, None
        return None if deferred is None else self._layout.read(deferred.result())

    def drop_deferred(self) -> None:
        """Read no report later that has been read now."""
        self._deferred = None
        self.note_looked_at()

    def take_buffers(self, row: Tensor | None = None) -> None:
        """Assign the buffers that a row has brought; by default that of the report that has been looked at."""
        if not self._layout.has_buffers:
            return
        packed_buffers = self._packed_buffers if row is None else row[self._layout.packed_buffers]
        if packed_buffers is not None:
            self._buffers.read(packed_buffers)


class DeferredRow:
    """A row of numbers on an accelerator, on its way to the host without anybody waiting for it."""

    def __init__(self, row: Tensor) -> None:
        self._host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        self._host.copy_(row, non_blocking=True)
        self._copied = torch.Event(row.device)
        self._copied.record()

    def result(self) -> Tensor:
        """The values, on the host; waits for the copy alone, not for what the accelerator was given since."""
        self._copied.synchronize()
        return self._host
