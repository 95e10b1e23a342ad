"""Writes, sends and reads the reports of the ranks."""

import torch
from torch import Tensor

from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.record import counts_exactly
from lockstep.distributed.reduction.module.buffer_sync import BufferSync
from lockstep.distributed.reduction.report.status import STATUSES, Part, ReportLayout, RoundReport, Status

_OWN_DTYPE = torch.float32


class ReportTransport:
    """Writes, sends and reads the reports of one module, as long as its buckets stay the same.

    On the CPU a report follows the gradients of the last bucket, or travels on its own if that bucket cannot carry it.
    On an accelerator the statuses, which only the host knows, go over the group's companion, so that the
    end of backward waits for the other hosts but never for the device; only small buffers follow the last bucket there.
    """

    def __init__(
        self,
        parameters: int,
        collectives: Collectives,
        buffers: BufferSync,
        behind: torch.dtype | None,
        device: torch.device,
    ) -> None:
        """Lay out the report: on ``device``, behind gradients of dtype ``behind``, or on its own if that is None or
        cannot count the ranks."""
        if behind is not None and not counts_exactly(behind, collectives.world):
            behind = None
        dtype = behind or _OWN_DTYPE
        packed = buffers.plan_packing(dtype)
        self._collectives = collectives
        self._buffers = buffers
        self.splits = device.type != "cpu" and collectives.device.type == "cpu"
        """True if small buffers follow the last bucket, and the statuses travel on their own."""
        self.has_buffers = packed > 0
        row_dtype = _OWN_DTYPE if self.splits else dtype
        in_row = 0 if self.splits else packed
        self._layout = ReportLayout(parameters, collectives.rank, collectives.world, in_row, row_dtype)
        self.read = self._layout.read
        self._packed = slice(0, packed) if self.splits else self._layout.packed_buffers
        self.numel = (packed if self.splits else self._layout.numel) if behind is not None else 0
        """The number of elements that follow the gradients of the last bucket."""
        travels_alone = self.splits or behind is None
        row_device = torch.device("cpu") if self.splits else device
        self.own_row = torch.zeros(self._layout.numel, dtype=row_dtype, device=row_device) if travels_alone else None
        """The part of the report that travels on its own at the end of the round, or None."""
        own_buffers = self.splits and behind is None and self.has_buffers
        self.own_buffers = torch.zeros(packed, dtype=dtype, device=device) if own_buffers else None
        """Small buffers, if they travel on their own, before :attr:`own_row`."""

    def write(self, row: Tensor, used: bytearray, late: list[int], status: Status) -> None:
        """Write this rank's report, and its buffers if they are in the same row."""
        self._layout.write(row, used, late, status)
        if self._layout.has_buffers:
            self.write_buffers(row[self._packed], status)

    def write_buffers(self, place: Tensor, status: Status) -> None:
        """Write this rank's small buffers; zeros if its status says that the module has changed."""
        place.zero_()
        if not status.changed:
            try:
                self._buffers.write(place)
            except Exception:
                if status.part not in (Part.FAILED, Part.SKIPS):
                    raise  # this rank's part fails, and the others are told; a failed or skipped batch sends zeros

    def read_earlier(self, row: Tensor) -> RoundReport | None:
        """Return the reports of a round before; None if this rank sent none in it, or with another layout."""
        return self.read(row) if row.numel() == self._layout.numel else None

    def take_buffers(self, row: Tensor) -> None:
        """Assign the small buffers received in ``row``, the one behind the last bucket, or in :attr:`own_buffers`."""
        place = row if self.own_buffers is None else self.own_buffers
        self._buffers.read(place[self._packed])


_LINGER_SECONDS = 0.1


class GatheredStatuses:
    """An all-gather of statuses under way."""

    def __init__(self, collectives: Collectives, status: Status, what: str) -> None:
        own, device = STATUSES.pack(status), collectives.device
        self._all = torch.zeros(STATUSES.size * collectives.world, dtype=torch.uint8, device=device)
        self._pending = collectives.all_gather_flat(self._all, own.to(device), what)

    def linger(self) -> None:
        """Wait a moment, whether the other ranks come or not, so that what this rank has begun to send leaves it."""
        if self._all.is_cpu:
            self._pending.linger(_LINGER_SECONDS)

    def wait(self) -> list[Status]:
        """Return the status of each rank."""
        self._pending.wait()
        return STATUSES.unpack(self._all.cpu())
