"""What ranks tell each other in a round besides gradients: one short row of numbers behind the last bucket.

The row is summed over the ranks with the gradients, so that it costs no collective. Each rank writes into places of its
own, or whole numbers so small that their sum is exact, or is at least not zero, in every floating dtype::

    used     one for each parameter    1 where this rank has a gradient to contribute
    late     one for each parameter    1 where a gradient came after its bucket had left, or had no place in the plan
    status   four for each rank        the round's number (its last bits), whether it failed, whether it is weighted;
                                       which backward pass it is in (``passes.py``), 0 if in none of its own,
                                       whether its parameters may have drifted (``drift.py``), and whether it
                                       waits for the report; what it says of its loop (``decisions.py``)
    weight   eight for each rank       the bytes of a float64: what this rank's contribution counts
    digest   nine for each rank        in the rounds in which values are compared: of what there is a digest, and its
                                       bytes (``value_watch.py``)
    buffers  the rest                  small ones (``buffers.py``)
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lockstep.distributed.decisions import IDLE, SKIPS, LoopStatus, batch_code, says_more
from lockstep.distributed.reduction.passes import NOT_HANDED_OUT, Code, check_passes
from lockstep.errors import OptionError, PeerError

_ROUNDS = 15  # status = 16 * (round % 15) + flags + 1 <= 240: exact even in bfloat16
_FAILED, _WEIGHTED, _JOINED, _MODULE_CHANGED = 1, 2, 4, 8
_WAITS, _VALUES_CHANGED = 64, 128  # beside how the module was called, at most 16
_WEIGHT = struct.Struct("<d")
_STATUS = 4
"""Places of each rank's status."""
DIGEST_BYTES = 9
"""Places of each rank's digest."""


@dataclass(slots=True, unsafe_hash=True)  # frozen ones take five times as long to make, in every round
class RankStatus:
    """What one rank says of its round."""

    round: int
    failed: bool = False
    weighted: bool = False
    joined: bool = False
    """Whether the rank has run out of batches and only takes part."""
    module_changed: bool = False
    """Whether its parameters or buffers are not those that were agreed on."""
    values_changed: bool = False
    """Whether its parameters were changed while a gradient was only its own."""
    backward: Code | None = None
    """Which backward pass it is in; None if it has none of its own."""
    loop: int = 0
    """What it says of its loop: an encoded :class:`LoopStatus`."""
    waits: bool = False
    """Whether it waits for the report before it hands out gradients, where another rank may not."""


@dataclass(slots=True)
class Report:
    """What all ranks have said."""

    used: Sequence[bool] | None
    """For each parameter, whether any rank has a gradient; None: all have."""
    late: Sequence[int]
    """Parameters that some rank has a late gradient of."""
    ranks: Sequence[RankStatus]
    """Each rank's status; only this rank's, if all are alike."""
    weights: Sequence[float]
    """What each rank's contribution counts; empty if no rank weighs its own."""
    digests: Sequence[bytes] = ()
    """Each rank's digest of its values, zeros if it has given none; empty if no rank has, or all are alike."""
    is_usual: bool = field(default=False, compare=False, repr=False)
    """Whether all ranks say what this one does, and that has no consequences: gradients are the mean, and no more."""

    @property
    def loops(self) -> list[LoopStatus]:
        """What each rank says of its loop; only this rank's, if all are alike."""
        return [LoopStatus.decode(status.loop) for status in self.ranks]

    @property
    def skips(self) -> bool:
        """Whether any rank leaves out the batch, so that all do."""
        return any(status.loop & SKIPS for status in self.ranks)

    @property
    def idle(self) -> list[bool]:
        """For each rank, whether it has run out of batches and contributes nothing; once, if all are alike."""
        return [bool(status.loop & IDLE) for status in self.ranks]

    @property
    def module_changed(self) -> bool:
        """Whether any rank has other parameters or buffers than were agreed on."""
        return any(status.module_changed for status in self.ranks)

    @property
    def values_changed(self) -> bool:
        """Whether parameters were changed on any rank while a gradient was only that rank's."""
        return any(status.values_changed for status in self.ranks)

    @property
    def all_wait(self) -> bool:
        """Whether all ranks wait for the report, where each may have handed out gradients without it."""
        return all(status.waits for status in self.ranks)

    def uses(self, index: int) -> bool:
        """Whether any rank has a gradient of a parameter."""
        return self.used is None or self.used[index]


class ReportLayout:
    """Where everything stands in the row."""

    def __init__(self, parameters: int, rank: int, world: int, packed_buffers: int) -> None:
        self._parameters, self._rank, self._world = parameters, rank, world
        self._late = parameters
        self._status = 2 * parameters
        self._weight = self._status + _STATUS * world
        self._digest = self._weight + _WEIGHT.size * world
        start = self._digest + DIGEST_BYTES * world
        self.packed_buffers = slice(start, start + packed_buffers)
        self.numel, self.has_buffers = self.packed_buffers.stop, packed_buffers > 0
        self._head = bytearray(self.packed_buffers.start)
        """What this rank has written last."""
        self._numbers = torch.frombuffer(self._head, dtype=torch.uint8)
        own = self._digest + DIGEST_BYTES * rank
        self._own_digest = slice(own, own + DIGEST_BYTES)
        self._is_clean = True  # nothing but what is used, and a status without a flag
        self._alike = _RowOfAlikes(self._numbers, parameters, slice(self._status, self._weight), rank, world)
        self._said: RankStatus | None = None

    def write(
        self,
        row: Tensor,
        used: bytearray,
        late: Sequence[int],
        status: RankStatus,
        weight: float,
        digest: Tensor | None = None,
    ) -> None:
        """Fill this rank's places of a row of ``numel`` elements, and clear all others.

        ``digest``: :data:`DIGEST_BYTES` bytes, on the row's device, if values are compared in this round.
        """
        head = self._head
        if not self._is_clean:
            head[:] = bytes(len(head))
        head[: self._parameters] = used
        for index in late:
            head[self._late + index] = 1
        flags = status.failed * _FAILED + status.weighted * _WEIGHTED + status.joined * _JOINED
        flags += status.module_changed * _MODULE_CHANGED
        place = self._status + _STATUS * self._rank
        head[place] = 16 * round_code(status.round) + flags + 1
        head[place + 1], head[place + 2] = status.backward or (0, 0)
        head[place + 1] += status.values_changed * _VALUES_CHANGED + status.waits * _WAITS
        head[place + 3] = status.loop
        if status.weighted:
            _WEIGHT.pack_into(head, self._weight + _WEIGHT.size * self._rank, weight)
        self._is_clean = not (late or flags or status.values_changed or status.waits or digest is not None)
        self._said = status if status.round < _ROUNDS else replace(status, round=round_code(status.round))
        numbers = self._numbers if row.is_cpu else self._numbers.pin_memory()  # a copy: this one is written again
        (row[: self.packed_buffers.start] if self.has_buffers else row).copy_(numbers, non_blocking=True)
        if digest is not None:
            row[self._own_digest] = digest.to(row.dtype)
        if self.has_buffers:
            row[self.packed_buffers].zero_()

    def read(self, row: Tensor) -> Report:
        """What the sum over all ranks says. A rank that says nothing at all, as on a ``fake`` backend, agrees."""
        head = row if row.numel() == self.packed_buffers.start else row[: self.packed_buffers.start]
        head = head if head.is_cpu else head.cpu()
        if self._said is not None and self._is_clean and self._alike.is_in(head, self._head):
            said = self._said
            return Report(used=self._alike.used, late=[], ranks=[said], weights=[], is_usual=not says_more(said.loop))
        return self._read_each(head)

    def _read_each(self, head: Tensor) -> Report:
        said = (head[: self._status] != 0).tolist()
        used, late = said[: self._parameters], said[self._parameters :]
        numbers = head[self._status : self._weight].tolist()
        begin, end = _STATUS * self._rank, _STATUS * (self._rank + 1)
        own = numbers[begin:end]
        ranks = [_status(own)]
        if numbers != own * self._world and (any(numbers[:begin]) or any(numbers[end:])):
            entries = (numbers[place : place + _STATUS] for place in range(0, len(numbers), _STATUS))
            ranks = [_status(entry if entry[0] else own) for entry in entries]
        weights: list[float] = []
        if any(status.weighted for status in ranks):
            raw = bytes(int(byte) for byte in head[self._weight : self._digest].tolist())
            weights = [weight for (weight,) in _WEIGHT.iter_unpack(raw)]
        return Report(
            used=None if all(used) else used,
            late=[index for index, is_late in enumerate(late) if is_late] if True in late else [],
            ranks=ranks,
            weights=weights,
            digests=self._read_digests(head, numbers[::_STATUS]),
        )

    def _read_digests(self, head: Tensor, said: Sequence[float]) -> Sequence[bytes]:
        """Each rank's digest, if there are different ones; a rank that has ``said`` nothing has this one's."""
        all_of_them = head[self._digest :].view(self._world, DIGEST_BYTES)
        own = all_of_them[self._rank]
        if torch.equal(all_of_them, own.expand_as(all_of_them)):
            return ()
        digests = (each if speaks else own for each, speaks in zip(all_of_them, said, strict=True))
        found = [bytes(map(int, each.tolist())) for each in digests]
        return found if len(set(found)) > 1 else ()


class _RowOfAlikes:
    """The sum over ranks that all say what this one does, as nearly always: comparing with it takes one operation.

    ``numbers`` are what this rank writes; ``status`` is where the statuses of all ranks stand.
    """

    def __init__(self, numbers: Tensor, parameters: int, status: slice, rank: int, world: int) -> None:
        self._numbers, self._parameters, self._status, self._world = numbers, parameters, status, world
        self._own = numbers[status][_STATUS * rank : _STATUS * (rank + 1)]
        self._sum: Tensor | None = None
        self._used = b""
        self.used: Sequence[bool] | None = None
        """What all have used: None for every parameter."""

    def is_in(self, head: Tensor, written: bytearray) -> bool:
        """Whether ``head`` is that sum; ``written`` are the bytes of the numbers."""
        used = written[: self._parameters]
        if self._sum is None or self._sum.dtype != head.dtype:
            with torch.inference_mode(False):
                self._sum = torch.zeros(head.numel(), dtype=head.dtype, device="cpu")
            self._statuses = self._sum[self._status].view(self._world, _STATUS)
            self._used = b""
        if used != self._used:
            self._used = bytes(used)
            self.used = None if 0 not in used else [bool(each) for each in used]
            self._sum[: self._parameters].copy_(self._numbers[: self._parameters]).mul_(self._world)
        self._statuses.copy_(self._own)
        return torch.equal(head, self._sum)


def _status(entry: Sequence[float]) -> RankStatus:
    code, called, forwards, loop = map(int, entry)
    number, flags = divmod(code - 1, 16)
    failed, weighted, joined, module = (bool(flags & flag) for flag in (_FAILED, _WEIGHTED, _JOINED, _MODULE_CHANGED))
    values, called = divmod(called, _VALUES_CHANGED)
    waits, called = divmod(called, _WAITS)
    backward = (called, forwards) if called else None
    return RankStatus(number, failed, weighted, joined, module, bool(values), backward, loop, bool(waits))


def round_code(number: int) -> int:
    """The part of a round's number that fits into a status."""
    return number % _ROUNDS


def check_ranks(report: Report, number: int, rank: int, global_ranks: Sequence[int], advice: str = "") -> None:
    """Raise :class:`PeerError` if a rank failed, or is not in round ``number`` as this one, or not in the same
    backward pass; messages name each rank by its number in ``global_ranks``.

    ``advice``: what to do, if the report was not waited for, and parameters have got the gradients of its round.
    """
    me = global_ranks[rank]
    if failed := [other for other, status in zip(global_ranks, report.ranks, strict=False) if status.failed]:
        raise PeerError(
            f"rank {me}: backward failed on rank {failed[0]} in round {number}; that rank's own error says why. "
            f"{advice or NOT_HANDED_OUT}"
        )
    mine = round_code(number)
    for other, status in zip(global_ranks, report.ranks, strict=False):  # one status, if all are alike
        if status.round != mine:
            ahead, behind = round_code(status.round - mine), round_code(mine - status.round)
            distance = f"{ahead} ahead" if ahead <= behind else f"{behind} behind"
            raise PeerError(
                f"rank {me} is in its synchronised backward number {number}, but rank {other} is {distance}: ranks "
                "have not run the same number of them, and gradients of different steps would be mixed. Let every "
                "rank run backward for every batch, or use join()"
            )
    _check_batches(report, number, rank, global_ranks, advice)
    weighted = any(status.weighted for status in report.ranks)
    if len(report.ranks) > 1:
        passes = {other: status.backward for other, status in zip(global_ranks, report.ranks, strict=True)}
        check_passes(passes, not weighted, number, me, advice)


def _check_batches(report: Report, number: int, rank: int, global_ranks: Sequence[int], advice: str) -> None:
    """Raise :class:`PeerError` if the ranks are not at the same batch."""
    if len(report.ranks) < 2:
        return
    batches = [loop.batch for loop in report.loops]
    if len(set(batches)) == 1:
        return
    first = next(other for other, batch in enumerate(batches) if batch != batches[rank])
    ahead, behind = batch_code(batches[first] - batches[rank]), batch_code(batches[rank] - batches[first])
    distance = f"{ahead} ahead of" if ahead <= behind else f"{behind} behind"
    raise PeerError(
        f"rank {global_ranks[rank]}: rank {global_ranks[first]} is {distance} this rank in the batches of its loop, in "
        f"round {number}: a rank has gone on with its next batch without a backward that synchronises for the last "
        "one (an error that it has caught, `continue`), and gradients of different batches would be mixed. "
        f"{advice or NOT_HANDED_OUT}. Let the rank that leaves out a batch call skip_batch(), and all iterate over "
        "lockstep.batches()"
    )


def mean_factor(report: Report, divisor: float, number: int, global_ranks: Sequence[int]) -> float:
    """What turns a mean over ``divisor`` ranks into one over weights, where they were given, or over the ranks that
    have batches.

    Raises :class:`OptionError`, which names the rank by its number in ``global_ranks``, if one has given none.
    """
    if len(report.ranks) < 2 and not report.weights:
        return 1.0
    idle = report.idle
    if not report.weights:
        active = len(idle) - sum(idle)
        return divisor / active if 0 < active < len(idle) else 1.0
    ranks = zip(global_ranks, report.ranks, idle, strict=False)
    if unweighted := [rank for rank, status, is_idle in ranks if not (status.weighted or status.joined or is_idle)]:
        raise OptionError(
            f"rank {unweighted[0]} gave no weight in round {number}, others did; give one on every rank, 0 where "
            "there is nothing to count"
        )
    total = sum(report.weights)
    return divisor / total if total else 0.0
