"""Keeps buffers equal on all ranks by a policy, and sends them with the gradients.

``rank0``: every rank gets rank 0's values. ``mean``: plain buffers of a floating or complex dtype in which PyTorch can
add get the mean over the ranks, all others rank 0's values. ``local``: each rank keeps its own.

Buffers are made equal at the end of every backward that synchronises, so the next forward starts from the same values
on all ranks, as with a broadcast before forward. Small ones are packed behind the report (``status.py``), which is
summed: a value from one rank and zeros from all others is exact. A dtype other than the report's is packed as bytes,
one byte for each element. Large buffers take one more collective.

Buffers may be added, removed, or change their shape: the rank that notices says so in its report, and all ranks compare
their buffers at the end of that backward.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep._base.run_all import RunAll
from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives, Pending
from lockstep.distributed.reduction.module.buffers import Buffer, BufferGroup, BufferSet, KeptBuffers

Policy = Literal["rank0", "mean", "local"]
POLICIES: tuple[Policy, ...] = ("rank0", "mean", "local")
PACKED_BYTES = 256 * 1024
"""Buffers of at most this size, all together, are packed behind the report."""


class _Packed(NamedTuple):
    """Buffers of one dtype and device, packed one after the other."""

    group: BufferGroup
    place: slice
    as_bytes: bool
    averaged: bool


class BufferSync:
    """Sends the buffers of one module by one policy; methods that move values run without grad mode."""

    def __init__(self, scan: Callable[[], BufferSet], policy: Policy, collectives: Collectives) -> None:
        self.policy = policy
        self._active: Sequence[int] = range(collectives.world)  # the ranks that have batches left
        self._scan = scan
        self._collectives = collectives
        self._set: BufferSet | None = None if policy == "local" else scan()
        self._packed: Sequence[_Packed] = ()  # behind a report
        self._large: Sequence[Buffer] = ()  # those with collectives of their own
        self._flats: list[tuple[Tensor, list[list[Buffer]]]] = []  # joined, but not sent yet
        self._sent: list[tuple[Pending, Tensor, list[list[Buffer]]]] = []

    @property
    def source(self) -> int:
        """The rank that sends its values to the others: the first that has batches left."""
        return self._active[0]

    def set_active(self, ranks: Sequence[int] | None) -> None:
        """Use the values of the first of ``ranks``, or the mean over them, from now on; None or empty: all ranks."""
        self._active = ranks or range(self._collectives.world)

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers that are sent."""
        return [] if self._set is None else self._set.buffers

    def versions(self) -> list[int]:
        """Return a number for each buffer that is sent, which changes when code writes into it."""
        present = [each.current() for each in self.buffers]
        return [each._version for each in present if each is not None and not each.is_inference()]

    def keep(self) -> KeptBuffers:
        """Return a copy of the module's buffers, under any policy."""
        return KeptBuffers(self._scan().buffers)

    def changed(self) -> bool:
        """Return True if the module has other buffers now; nothing is sent then until :meth:`renew`.

        Code of a tensor's class may run, and fail on this rank alone, where nobody could be told yet. That counts as a
        change, so that the round opens and tells of it (test_a_buffer_that_fails_at_any_look_at_it_is_told).
        """
        try:
            return self._set is not None and self._set.changed()
        except Exception:
            return True

    def renew(self) -> None:
        """Take the module's present buffers, compare them with the other ranks', and make them equal.

        Does nothing if each rank keeps its own.
        """
        if self.policy == "local":
            return
        steps, lines, found, flats = RunAll(), list[Line](), self._set, self._flats
        with steps:
            found = self._scan()
            lines = [Line(f"buffer {buffer.name}", buffer.describe()) for buffer in found.buffers]
            flats = self._put_together(found.buffers)
        with steps:
            check_same_on_all_ranks(lines, self._collectives, error=steps.problem)
        steps.end()
        self._set, self._flats = found, flats
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
            exact = buffer.travels_as == dtype or (averaged and torch.promote_types(buffer.dtype, dtype) == dtype)
            room -= buffer.shape.numel() if exact else buffer.nbytes
            if (averaged and not exact) or room < 0:
                large.append(buffer)
            else:
                groups.setdefault((buffer.travels_as, buffer.device, not exact, averaged), []).append(buffer)
        start = 0
        for (_, _, as_bytes, averaged), buffers in groups.items():
            end = start + sum(b.nbytes if as_bytes else b.shape.numel() for b in buffers)
            packed.append(_Packed(BufferGroup(buffers), slice(start, end), as_bytes, averaged))
            start = end
        self._packed, self._large = packed, large
        return start

    @property
    def _is_source(self) -> bool:
        return self._collectives.rank == self.source

    @property
    def _is_active(self) -> bool:
        return self._collectives.rank in self._active

    def _averaged(self, buffer: Buffer) -> bool:
        return self.policy == "mean" and buffer.can_be_averaged

    def write(self, packed_buffers: Tensor) -> None:
        """Write this rank's part into the cleared end of a report."""
        for packed in self._packed:
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
        for packed in self._packed:
            if packed.averaged or not self._is_source:
                packed.group.assign_row(packed_buffers[packed.place], packed.as_bytes)

    def prepare_large(self, zeros: bool = False) -> bool:
        """Join the buffers that are not packed, before the report is sent, which can then tell of an error; return True
        if there are any.

        ``zeros``: this rank has failed, perhaps here or while it sent them: as zeros, if they have not been joined.
        """
        if self._large and not (zeros and self._flats):
            self._flats = self._put_together(self._large, zeros)
        return bool(self._large)

    def send_large(self) -> None:
        """Start to send them: one collective for each device, or for each dtype if values are averaged."""
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
            groups.setdefault((buffer.device, kind), {}).setdefault(buffer.travels_as, []).append(buffer)
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
        while self._sent:
            pending, _, _ = self._sent.pop(0)
            pending.wait()

    def finish_large(self) -> None:
        """Wait for the large buffers, and assign them."""
        while self._sent:
            pending, flat, alike = self._sent.pop(0)
            pending.wait()
            if self._averaged(alike[0][0]):
                BufferGroup(alike[0]).assign(flat)
            elif not self._is_source:
                pieces = flat.split([sum(buffer.nbytes for buffer in each) for each in alike])
                for each, piece in zip(alike, pieces, strict=True):
                    BufferGroup(each).assign(piece.clone().view(each[0].travels_as))
