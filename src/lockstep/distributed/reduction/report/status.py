"""The status of each rank in a round, and the row of numbers that tells all ranks what their statuses add up to.

The row is summed over the ranks together with the gradients, so it needs no collective of its own, and its length does
not depend on the number of ranks: each rank writes zeros and ones, whose sums tell everything that a usual round has to
know. First comes a one for each parameter of which the rank has a gradient, then a one for each whose gradient came
after its bucket had left, or has no bucket; then the status, whose fields are declared below (:data:`ROW`); then small
buffers (``buffers.py``).

Only where ranks have to be named do they gather their statuses, in a collective of its own (:attr:`Sums.name_ranks`). A
dtype can hold the row if it counts the ranks exactly (``comm/record.py``). To tell one number more, add it to
:class:`Status`, and declare here what it adds up to.

``verdict.py`` has the rules about statuses; ``pass_log.py`` counts what a status says of forwards and passes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from ctypes import memmove, string_at
from enum import Flag, IntEnum, auto
from functools import cache
from operator import attrgetter
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.distributed.comm.record import Field, Fold, Packing, Record, bits_of

MOST_STEPS, UNKNOWN_STEPS = 254, 255
"""The highest number of optimizer steps that a status tells, and the one that says that it is not known."""
_WEIGHT_BITS = 128
_MOST_ENCODED = 8
"""Number of parts of rows that are kept as bytes."""


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
    """How one rank takes part in a round."""

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


_AFTER_COUNTS = Status._fields.index("batch") + 1
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


_WEIGHT_UNIT = 1 << 80  # weights of 2**-27 to 2**47 are exact


def _in_fixed_point(weight: float) -> int | None:
    """Return a weight as a number of units, or None if it is none."""
    if not 0 <= weight < math.inf:
        return None
    numerator, denominator = weight.as_integer_ratio()
    units, rest = divmod(numerator * _WEIGHT_UNIT, denominator)
    return None if rest or units >> _WEIGHT_BITS - 1 else units


def _units(status: Status) -> int | None:
    return _in_fixed_point(status.weight) if status.weighted else 0


def _flag(name: str, is_set: Callable[[Status], Any]) -> Field:
    return Field(name, 1, Fold.SUM, lambda status: int(bool(is_set(status))))


# The three parts are written apart: a part is made anew only where something in it has changed.
_COUNTS = Record(Field("round", 64, Fold.SAME, attrgetter("round")), Field("batch", 64, Fold.SAME, attrgetter("batch")))
_IN_BYTES = Struct(">QQ").pack  # the counts, as they are declared
_DIGESTS = Record(
    Field("numbers", 64, Fold.SAME, attrgetter("numbers"), "with_numbers"),
    Field("values", 64, Fold.SAME, attrgetter("values"), "with_values"),
)
_STEADY = Record(
    _flag("ranks", lambda status: True),
    _flag("padding", lambda status: status.part == Part.PADDING),
    _flag("joined", lambda status: status.part == Part.JOINED),
    _flag("skips", lambda status: status.part == Part.SKIPS),
    _flag("failed", lambda status: status.part == Part.FAILED),
    Field("numbers_of_failed", 20, Fold.WHO, lambda status: status.part == Part.FAILED),
    _flag("stops", attrgetter("stops")),
    _flag("ends", attrgetter("ends")),
    _flag("changed", attrgetter("changed")),
    _flag("weighted", attrgetter("weighted")),
    _flag("without_weight", lambda status: not (status.weighted or status.part in (Part.PADDING, Part.JOINED))),
    _flag("with_pass", attrgetter("called")),
    _flag("with_steps", lambda status: status.steps != UNKNOWN_STEPS),
    _flag("with_odd_weight", lambda status: _units(status) is None),
    _flag("with_numbers", attrgetter("numbers")),
    _flag("with_values", attrgetter("values")),
    Field("called", 8, Fold.SAME, attrgetter("called"), "with_pass"),
    # Forwards gone through are compared only if ranks have left out different numbers of forwards.
    Field("forwards", 32, Fold.SAME, lambda status: status.unused_forwards * (status.called != 0), "with_pass"),
    Field("steps", 8, Fold.SAME, lambda status: status.steps % UNKNOWN_STEPS, "with_steps"),
    Field("weight", _WEIGHT_BITS, Fold.SUM, lambda status: _units(status) or 0),
)
ROW = Record(*_COUNTS.fields, *_DIGESTS.fields, *_STEADY.fields)
"""What a status adds to the row."""


def decode(places: Sequence[float]) -> Sums:
    """Return what all ranks have written together, by place."""
    totals, differing = ROW.decode(places)
    drift = {"numbers", "values"}
    sums = Sums(**totals, differ=not differing <= drift, drift=not drift.isdisjoint(differing))
    return sums._replace(weight=sums.weight / _WEIGHT_UNIT if sums.weighted else 0.0)


class RoundReport(NamedTuple):
    """What all ranks have reported in a round."""

    used: Sequence[bool] | None
    """For each parameter, True if any rank has a gradient; None if all parameters have one."""
    late: Sequence[int] = ()
    """Parameters of which some rank has a late gradient."""
    sums: Sums | None = None
    """What the statuses add up to; None if all are the same, with no consequences besides gradients."""
    statuses: Sequence[Status] = ()
    """The status of each rank, if they have been gathered."""


_ALL_USED = RoundReport(None)


class _Elements:
    """Bits as a tensor of a dtype holds them in its memory: zeros, and ``one`` for each that is set.

    A row is written and compared as bytes: a settled round does so in less time than one operation on a tensor takes.
    """

    def __init__(self, one: int, dtype: torch.dtype) -> None:
        numbers = torch.tensor([0, one], dtype=dtype, device="cpu")
        both = string_at(numbers.data_ptr(), numbers.nbytes)
        self._of_bit = both[: numbers.itemsize], both[numbers.itemsize :]
        self._of_byte = [self.of_bits(bits_of(byte, 8)) for byte in range(256)]

    def of_bits(self, bits: Iterable[int]) -> bytes:
        """Return the elements for bits, each a 0 or a 1."""
        return b"".join(map(self._of_bit.__getitem__, bits))

    def of_bytes(self, packed: bytes) -> bytes:
        """Return the elements for the bits of bytes, the highest first."""
        return b"".join(map(self._of_byte.__getitem__, packed))


_elements = cache(_Elements)


class _Written(NamedTuple):
    """A part of the row that is seldom new, as bytes."""

    own: bytes
    """What this rank writes."""
    alike: bytes
    """The sum if all ranks write the same."""
    report: RoundReport
    """What all ranks know then of its parameters."""


class ReportLayout:
    """The places in the row."""

    def __init__(self, parameters: int, rank: int, world: int, packed_buffers: int, dtype: torch.dtype) -> None:
        """``dtype``: of the row."""
        self._rank = rank
        self._parameters = parameters
        self._late = parameters
        self._status = 2 * parameters
        start = self._status + ROW.size
        self.packed_buffers = slice(start, start + packed_buffers)
        self.numel = self.packed_buffers.stop
        self.has_buffers = packed_buffers > 0
        self._dtype = dtype
        self._own, self._sum = _elements(1, dtype), _elements(world, dtype)
        self._used: dict[bytes, _Written] = {}
        self._steady: dict[tuple[Any, ...], _Written] = {}
        self._facts: tuple[Any, ...] = ()  # the last status but for its counts
        self._behind = self._written(b"")  # what stands behind the counts then
        self._usual: tuple[bytes, RoundReport] | None = None  # the row in the usual case, and what it says

    def write(self, row: Tensor, used: bytearray, late: Sequence[int], status: Status) -> None:
        """Write this rank's row of ``numel`` elements, except the buffers."""
        facts = status[_AFTER_COUNTS:]
        if facts != self._facts:
            self._facts, self._behind = facts, self._written_behind(status)
        counts = _IN_BYTES(*status[:_AFTER_COUNTS])
        with_grads = bytes(used)
        first = self._used.get(with_grads)
        if first is None:
            report = RoundReport([bool(each) for each in used] if 0 in used else None)
            first = _keep(self._used, with_grads, self._written(with_grads + bytes(len(used)), report))
        own = first.own
        if late:
            bits = bytearray(with_grads + bytes(len(used)))
            for index in late:
                bits[self._late + index] = 1
            own = self._own.of_bits(bits)
        own += self._own.of_bytes(counts) + self._behind.own
        alike = first.alike + self._sum.of_bytes(counts) + self._behind.alike
        self._usual = (alike, first.report) if status[_FLAGS] == _USUAL else None
        if row.is_cpu:
            memmove(row.data_ptr(), own, len(own))
        else:
            numbers = torch.frombuffer(bytearray(own), dtype=self._dtype).pin_memory()
            row[: self.packed_buffers.start].copy_(numbers, non_blocking=True)

    def _written_behind(self, status: Status) -> _Written:
        facts = *status[_AFTER_COUNTS:-2], status.numbers > 0, status.values > 0
        steady = self._steady.get(facts)
        if steady is None:
            steady = _keep(self._steady, facts, self._written(_STEADY.encode(status, self._rank)))
        digests = _DIGESTS.number(status, self._rank).to_bytes(_DIGESTS.size // 8, "big")
        return _Written(self._own.of_bytes(digests) + steady.own, self._sum.of_bytes(digests) + steady.alike, _ALL_USED)

    def _written(self, bits: bytes, report: RoundReport = _ALL_USED) -> _Written:
        return _Written(self._own.of_bits(bits), self._sum.of_bits(bits), report)

    def read(self, row: Tensor) -> RoundReport:
        """Return the report in the sum over all ranks."""
        head = row if row.numel() == self.packed_buffers.start else row[: self.packed_buffers.start]
        head = head if head.is_cpu else head.cpu()
        if self._usual is not None:
            alike, report = self._usual
            if string_at(head.data_ptr(), len(alike)) == alike:  # in nearly every round
                return report
        numbers = head.tolist()
        used_by, late_on = numbers[: self._parameters], numbers[self._late : self._status]
        report = RoundReport(
            used=[count > 0 for count in used_by] if 0 in used_by else None,
            late=[index for index, count in enumerate(late_on) if count] if any(late_on) else (),
        )
        sums = decode(numbers[self._status :])
        is_usual = self._usual is not None and not (report.late or sums.name_ranks or sums.padding or sums.joined)
        is_usual = is_usual and not (sums.stops or sums.ends or sums.changed or sums.weighted or sums.drift)
        is_usual = is_usual and sums.with_values in (0, sums.ranks)
        return report if is_usual else report._replace(sums=sums)


def _keep(written: dict[Any, _Written], key: Any, new: _Written) -> _Written:
    if len(written) == _MOST_ENCODED:  # weights, perhaps, which are new in each round
        written.clear()
    written[key] = new
    return new


STATUSES = Packing(Status)
"""Statuses as they are gathered."""
