"""The status of each rank in a round, and the row of numbers that tells all ranks what their statuses add up to.

The row is summed over the ranks together with the gradients, so it needs no collective of its own. Its length does not
depend on the number of ranks: each rank writes zeros and ones, and their sums tell everything that a usual round has to
know::

    used      one for each parameter   1 if this rank contributes a gradient
    late      one for each parameter   1 if a gradient came after its bucket had left, or has no bucket
    place     128                      the bits of the numbers of its round and of its batch
    counts    15                       ones in places that count ranks: see :class:`Sums`
    calls     48                       the bits of what it has counted: forwards, steps of optimizers
    weight    128                      the bits of its weight, as a fixed-point number
    failed    20                       the bits of its number if its backward has failed
    drift     128                      the bits of the digests of what optimizers have left: see ``module/drift.py``
    buffers   the rest                 small buffers (``buffers.py``)

All ranks have written the same number if and only if each of its bits adds up to 0 or to the number of ranks. Sums of
weights are exact. Only where ranks have to be named do they gather their statuses, in a collective of its own
(:attr:`Sums.name_ranks`). A dtype can hold the row if it counts the ranks exactly (``comm/sums.py``).

``verdict.py`` has the rules about statuses; ``pass_log.py`` counts what a status says of forwards and passes.
"""

import functools
import itertools
import math
import struct
from collections.abc import Sequence
from ctypes import string_at
from enum import Flag, IntEnum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.distributed.comm.sums import are_alike, bits_of, total_of

MOST_STEPS, UNKNOWN_STEPS = 254, 255
"""The highest number of optimizer steps that a status tells, and the one that says that it is not known."""
_FORMAT = struct.Struct("<QQB4?BIIBdQQ")


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
    """How one rank takes part in a round; fields are packed in this order where statuses are gathered."""

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
    numbers: int = 0
    """A digest of the numbers of the optimizers that have stepped the module's parameters since the last round; 0 if it
    tells none."""
    values: int = 0
    """A digest of values after such a step; 0 if it tells none."""


_FLAGS = slice(Status._fields.index("part"), Status._fields.index("called"))
_USUAL = Status()[_FLAGS]


class Sums(NamedTuple):
    """What the statuses of all ranks add up to: numbers of ranks, and the total of their weights."""

    ranks: int
    """All of them; on a ``fake`` backend, which sums nothing, this one alone."""
    padding: int
    joined: int
    skips: int
    failed: int
    """The four by their :class:`Part`."""
    stops: int
    ends: int
    changed: int
    weighted: int
    """The four by their flags."""
    without_weight: int
    """Those that have not run out, and have no weight."""
    with_pass: int
    """Those with a backward pass of their own."""
    with_steps: int
    """Those that know their number of optimizer steps."""
    with_odd_weight: int
    """Those whose weight is no fixed-point number."""
    with_numbers: int
    """Those that tell numbers of optimizers."""
    with_values: int
    """Those that tell values."""
    differ: bool
    """True if ranks are not in the same round, batch, pass or step, as far as they say; :func:`judge` has the rules."""
    weight: float
    """The total of all weights."""
    numbers_of_failed: int
    """The total of the numbers of the ranks that have failed: the number of the one if there is only one."""
    drift: bool
    """True if ranks have told different numbers of optimizers, or different values."""

    @property
    def name_ranks(self) -> bool:
        """True if the verdict depends on which ranks have said what. Ranks that skip or fail know so in advance."""
        some_without = self.weighted > 0 and self.without_weight > 0
        return self.differ or self.skips > 0 or self.failed > 0 or some_without or self.with_odd_weight > 0


_COUNTS = len(Sums._fields) - 4
_PLACE_BITS = 128  # the round and the batch
_PASS_BITS = 40  # how the pass called the module, and the forwards left out
_STEP_BITS, _WEIGHT_BITS, _RANK_BITS, _DIGEST_BITS = 8, 128, 20, 64
_SIZE = _PLACE_BITS + _COUNTS + _PASS_BITS + _STEP_BITS + _WEIGHT_BITS + _RANK_BITS + 2 * _DIGEST_BITS
_WEIGHT_UNIT = 1 << 80  # weights of 2**-27 to 2**47 are exact


def _in_fixed_point(weight: float) -> int | None:
    """Return a weight as a number of units, or None if it is none."""
    if not 0 <= weight < math.inf:
        return None
    numerator, denominator = weight.as_integer_ratio()
    units, rest = divmod(numerator * _WEIGHT_UNIT, denominator)
    return None if rest or units >> _WEIGHT_BITS - 1 else units


def encode(status: Status, rank: int) -> bytes:
    """Return what a rank adds to the row."""
    *rest, numbers, values = status[2:]
    rest += numbers > 0, values > 0
    place = bits_of(status.round << 64 | status.batch, _PLACE_BITS)
    return place + _encode_rest(tuple(rest), rank) + _encode_drift(numbers << _DIGEST_BITS | values)


@functools.lru_cache(maxsize=64)
def _encode_drift(digests: int) -> bytes:
    return bits_of(digests, 2 * _DIGEST_BITS)


@functools.lru_cache(maxsize=64)  # it is the same in most rounds
def _encode_rest(rest: tuple[Any, ...], rank: int) -> bytes:
    """Return the counts, and the bits of the numbers that are no place, of a status without its round and batch, and
    with flags in place of its digests."""
    said = Status(0, 0, *rest)
    has_pass, knows_steps = said.called != 0, said.steps != UNKNOWN_STEPS
    has_run_out = said.part in (Part.PADDING, Part.JOINED)
    units = _in_fixed_point(said.weight) if said.weighted else 0
    counts = bytes(
        (
            True,
            said.part == Part.PADDING,
            said.part == Part.JOINED,
            said.part == Part.SKIPS,
            said.part == Part.FAILED,
            said.stops,
            said.ends,
            said.changed,
            said.weighted,
            not (said.weighted or has_run_out),
            has_pass,
            knows_steps,
            units is None,
            said.numbers,
            said.values,
        )
    )
    # Forwards gone through are compared only if ranks have left out different numbers of forwards.
    calls = (said.called << 32 | said.unused_forwards if has_pass else 0) << 8 | (said.steps if knows_steps else 0)
    failed = rank if said.part == Part.FAILED else 0
    return (
        counts
        + bits_of(calls, _PASS_BITS + _STEP_BITS)
        + bits_of(units or 0, _WEIGHT_BITS)
        + bits_of(failed, _RANK_BITS)
    )


def decode(places: Sequence[float]) -> Sums:
    """Return what all ranks have written together, by place."""
    rest = iter(places)
    sizes = _PLACE_BITS, _COUNTS, _PASS_BITS, _STEP_BITS, _WEIGHT_BITS, _RANK_BITS, _DIGEST_BITS, _DIGEST_BITS
    place, counts, passes, steps, weights, failed, numbers, values = (
        list(itertools.islice(rest, size)) for size in sizes
    )
    told = Sums._make((*map(int, counts), False, 0.0, 0, False))
    alike = are_alike(place, told.ranks) and are_alike(passes, told.with_pass) and are_alike(steps, told.with_steps)
    weight = total_of(weights) / _WEIGHT_UNIT if told.weighted else 0.0
    drift = not (are_alike(numbers, told.with_numbers) and are_alike(values, told.with_values))
    failed_ranks = total_of(failed) if told.failed else 0
    return told._replace(differ=not alike, weight=weight, numbers_of_failed=failed_ranks, drift=drift)


def sums_of(statuses: Sequence[Status]) -> Sums:
    """Return what statuses add up to, as the row would."""
    return decode([sum(column) for column in zip(*map(encode, statuses, itertools.count()), strict=False)])


class Report(NamedTuple):
    """What all ranks have reported in a round."""

    used: Sequence[bool] | None
    """For each parameter, True if any rank has a gradient; None if all parameters have one."""
    late: Sequence[int] = ()
    """Parameters of which some rank has a late gradient."""
    sums: Sums | None = None
    """What the statuses add up to; None if all are the same, with no consequences besides gradients."""
    statuses: Sequence[Status] = ()
    """The status of each rank, if they have been gathered."""


class ReportLayout:
    """The places in the row."""

    def __init__(self, parameters: int, rank: int, world: int, packed_buffers: int, dtype: torch.dtype) -> None:
        """``dtype``: of the row."""
        self._rank = rank
        self._parameters = parameters
        self._late = parameters
        self._none_late = bytes(parameters)
        self._status = 2 * parameters
        start = self._status + _SIZE
        self.packed_buffers = slice(start, start + packed_buffers)
        self.numel = self.packed_buffers.stop
        self.has_buffers = packed_buffers > 0
        self._is_usual = False
        self._head = bytearray(start)
        self._numbers = torch.frombuffer(self._head, dtype=torch.uint8)
        with torch.inference_mode(False):
            self._alike = torch.zeros(start, dtype=dtype, device="cpu")
            self._ranks = torch.tensor(world, dtype=dtype, device="cpu")  # a multiplication by a float takes longer
        self._known: tuple[bytearray | None, Report] = None, Report(None)

    def write(self, row: Tensor, used: bytearray, late: Sequence[int], status: Status) -> None:
        """Write this rank's row of ``numel`` elements, and zeros in the places of the buffers."""
        head = self._head
        head[: self._parameters] = used
        head[self._late : self._status] = self._none_late
        for index in late:
            head[self._late + index] = 1
        head[self._status :] = encode(status, self._rank)
        self._is_usual = not late and status[_FLAGS] == _USUAL
        if self._is_usual:  # the sum if all ranks say the same
            torch.mul(self._numbers, self._ranks, out=self._alike)
        numbers = self._numbers if row.is_cpu else self._numbers.pin_memory()  # a copy: this one is written again
        (row[: self.packed_buffers.start] if self.has_buffers else row).copy_(numbers, non_blocking=True)
        if self.has_buffers:
            row[self.packed_buffers].zero_()

    def read(self, row: Tensor) -> Report:
        """Return the report in the sum over all ranks."""
        head = row if row.numel() == self.packed_buffers.start else row[: self.packed_buffers.start]
        head = head if head.is_cpu else head.cpu()
        if self._is_usual and torch.equal(head, self._alike):  # the usual case, in which one comparison is enough
            used = self._head[: self._parameters]
            if used != self._known[0]:
                self._known = used, Report(None if 0 not in used else [bool(each) for each in used])
            return self._known[1]
        said = head.tolist()
        used_by, late_on = said[: self._parameters], said[self._late : self._status]
        report = Report(
            used=[count > 0 for count in used_by] if 0 in used_by else None,
            late=[index for index, count in enumerate(late_on) if count] if any(late_on) else (),
        )
        sums = decode(said[self._status :])
        is_usual = self._is_usual and not (report.late or sums.name_ranks or sums.padding or sums.joined)
        is_usual = is_usual and not (sums.stops or sums.ends or sums.changed or sums.weighted or sums.drift)
        is_usual = is_usual and sums.with_values in (0, sums.ranks)
        return report if is_usual else report._replace(sums=sums)


def write_status(place: Tensor, status: Status) -> None:
    """Write a status into a tensor of :data:`STATUS_BYTES` bytes, to be gathered."""
    place.copy_(torch.frombuffer(bytearray(_FORMAT.pack(*status)), dtype=torch.uint8))


def read_statuses(gathered: Tensor) -> list[Status]:
    """Return the statuses of all ranks."""
    return [Status._make(each) for each in _FORMAT.iter_unpack(string_at(gathered.data_ptr(), gathered.numel()))]


STATUS_BYTES = _FORMAT.size
