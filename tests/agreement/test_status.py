"""What ranks tell each other behind the last bucket: exact in every dtype that counts them, added up as ranks would."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch

from agreement.sums import sums_of
from lockstep.distributed.comm.record import counts_exactly
from lockstep.distributed.reduction.report.status import (
    MOST_STEPS,
    ROW,
    STATUSES,
    UNKNOWN_STEPS,
    Part,
    ReportLayout,
    RoundReport,
    Status,
    Sums,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_world = pytest.mark.parametrize("world", [1, 2, 3, 64, 256])

FLAGS = ("stops", "ends", "changed", "weighted")
SOMETHING_ELSE = Status(
    2**64 - 1,
    2**64 - 1,
    Part.FAILED,
    True,
    True,
    True,
    True,
    called=15,
    through=257,
    unused_forwards=9,
    steps=3,
    weight=7.0,
    numbers=2**64 - 1,
    values=1,
)
ODD_WEIGHTS = [5e-324, 1.7976931348623157e308, -1.0, math.inf, math.nan, 2.0**48, 2.0**-28 / 3]
WEIGHTS = [0.0, 1.0, 1 / 3, math.pi, 2.0**47 - 1, 123456789.123, 2.0**-27, 1e-7]


def exchange(dtype, said, parameters=3, packed_buffers=0):
    """Return what all ranks read if rank r says `said[r]`: (used, late, status, buffers); and the sum itself."""
    world = len(said)
    assert counts_exactly(dtype, world)
    layouts = [ReportLayout(parameters, rank, world, packed_buffers, dtype) for rank in range(world)]
    total = None
    for layout, (used, late, status, *load) in zip(layouts, said, strict=True):
        row = torch.full((layout.numel,), math.nan, dtype=dtype)  # as if it had never been written
        if layout in (layouts[0], layouts[-1]):
            layout.write(row, bytearray(parameters), [*range(parameters)], SOMETHING_ELSE)
        layout.write(row, bytearray(used), late, status)
        for values in load:
            row[layout.packed_buffers] = values
        total = row if total is None else total + row
    reports = [layout.read(total) for layout in (*layouts[:1], *layouts[-2:]) for _ in range(2)]
    assert reports == reports[:1] * len(reports)
    return reports[0], total


def report_of(dtype, statuses):
    """Return what all ranks read if each uses every parameter, and has this status."""
    return exchange(dtype, [([1, 1, 1], [], status) for status in statuses])[0]


# ---------------------------------------------------------------------------------- used and late


@every_dtype
@every_world
def test_who_uses_what(dtype, world):
    nobody, last, all_of_them = [0, 0, 0], [0, 0, 1], [1, 1, 1]
    for said, expected in [
        ([nobody] * world, [False] * 3),
        ([nobody] * (world - 1) + [last], [False, False, True]),
        ([all_of_them] * world, None),
        ([last] * world, [False, False, True]),
        ([[1, 1, 0]] + [last] * (world - 1), None if world > 1 else [True, True, False]),
    ]:
        report, _ = exchange(dtype, [(used, [], Status(0, through=1)) for used in said])
        assert report == RoundReport(expected)  # no status is decoded where all say the same


@every_dtype
@every_world
def test_late_gradients_of_any_rank_are_known_to_all(dtype, world):
    said = [([1, 1, 1], [], Status())] * world
    said[-1] = ([1, 1, 1], [2, 0], Status())
    report, _ = exchange(dtype, said)
    assert report == RoundReport(None, [0, 2], sums_of([Status()] * world))

    report, _ = exchange(dtype, [([1, 1, 1], [1], Status())] * world)
    assert report == RoundReport(None, [1], sums_of([Status()] * world))


def test_a_module_without_parameters_has_a_report_too():
    report, _ = exchange(torch.float32, [([], [], Status(4))] * 2, parameters=0)
    assert report == RoundReport(None)


# ---------------------------------------------------------------------------------- status


def counted(statuses, **differ):
    """Return the sums of statuses, counted one by one."""
    known = [each for each in statuses if each.steps != UNKNOWN_STEPS]
    weights = [each.weight for each in statuses if each.weighted]
    odd = [each for each in weights if each in ODD_WEIGHTS or math.isnan(each)]
    return Sums(
        len(statuses),
        *(
            [each.part for each in statuses].count(part)
            for part in (Part.PADDING, Part.JOINED, Part.SKIPS, Part.FAILED)
        ),
        *(sum(getattr(each, flag) for each in statuses) for flag in FLAGS),
        without_weight=sum(not each.weighted and each.part not in (Part.PADDING, Part.JOINED) for each in statuses),
        with_pass=sum(each.called != 0 for each in statuses),
        with_steps=len(known),
        with_odd_weight=len(odd),
        with_numbers=sum(each.numbers > 0 for each in statuses),
        with_values=sum(each.values > 0 for each in statuses),
        weight=float(sum(Fraction(each) for each in weights if each not in odd)) if not odd else 0.0,
        numbers_of_failed=sum(rank for rank, each in enumerate(statuses) if each.part == Part.FAILED),
        **{"differ": False, "drift": False, **differ},
    )


@every_dtype
def test_parts_and_flags_are_counted(dtype):
    statuses = [
        Status(1000, 7, part, *flags) for part in Part for flags in itertools.product((False, True), repeat=len(FLAGS))
    ]
    random.Random(0).shuffle(statuses)
    report, _ = exchange(dtype, [([0, 0, 0], [], status) for status in statuses])
    assert report == RoundReport([False] * 3, (), counted(statuses))


@every_dtype
def test_weights_are_summed_exactly(dtype):
    numbers = random.Random(1)
    for weights in (WEIGHTS, [numbers.expovariate(1e-4) for _ in range(100)], [float(n) for n in range(200)]):
        statuses = [Status(3, weighted=True, called=1, weight=weight) for weight in weights]
        report = report_of(dtype, statuses)
        assert report.sums == counted(statuses)
        assert report.sums.weight == math.fsum(weights)
        assert not report.sums.name_ranks


@pytest.mark.parametrize("weight", ODD_WEIGHTS)
def test_weights_that_cannot_be_summed_are_gathered(weight):
    sums = sums_of([Status(weighted=True, weight=weight), Status(weighted=True, weight=1.0)])
    assert sums.with_odd_weight == 1
    assert sums.name_ranks


@every_dtype
@pytest.mark.parametrize("field", ["round", "batch", "called", "unused_forwards", "steps"])
def test_numbers_that_differ_are_told_apart(dtype, field):
    usual = Status(9, 7, called=5, unused_forwards=6, steps=9)
    bits = {"round": 64, "batch": 64, "called": 4, "unused_forwards": 32, "steps": 7}[field]
    for bit in range(bits):
        other = usual._replace(**{field: getattr(usual, field) ^ 1 << bit})
        for statuses in ([usual, other], [other] + [usual] * 7):
            report = report_of(dtype, statuses)
            assert report.sums == counted(statuses, differ=True)
            assert report.sums.name_ranks


@every_dtype
@pytest.mark.parametrize("field", ["numbers", "values"])
def test_digests_of_what_optimizers_left_are_told_apart(dtype, field):
    usual = Status(9, 7, called=5, numbers=2**63 + 1, values=2**40 + 1)
    for bit in range(64):
        other = usual._replace(**{field: getattr(usual, field) ^ 1 << bit})
        if getattr(other, field):
            for statuses in ([usual, other], [other] + [usual] * 7):
                report = report_of(dtype, statuses)
                assert report.sums == counted(statuses, drift=True)
                assert not report.sums.name_ranks


@every_dtype
def test_ranks_that_tell_no_digest_differ_from_nobody_and_are_counted(dtype):
    usual = Status(9, 7, called=5, numbers=3, values=5)
    for silent in (usual._replace(numbers=0), usual._replace(values=0)):
        statuses = [usual, silent, usual]
        report = report_of(dtype, statuses)
        assert report == RoundReport(None) if silent.values else report.sums == counted(statuses)


def test_ranks_without_a_pass_or_a_number_of_steps_differ_from_nobody():
    usual, passive = Status(9, called=1, unused_forwards=3, steps=2), Status(9, called=0, steps=UNKNOWN_STEPS)
    assert not sums_of([usual, passive, usual]).differ
    assert sums_of([usual, passive, usual._replace(steps=MOST_STEPS)]).differ


def test_how_many_forwards_backward_went_through_may_differ():
    assert report_of(torch.float32, [Status(9, called=1, through=n) for n in (1, 7)]) == RoundReport(None)


@every_dtype
@every_world
def test_ranks_that_say_the_same_are_all_heard_if_it_has_consequences(dtype, world):
    usual = Status(3, 4, called=1, through=2, unused_forwards=1, steps=1)
    for changes in [*({"part": part} for part in Part), *({flag: True} for flag in FLAGS)]:
        status = usual._replace(**changes)
        report = report_of(dtype, [status] * world)
        assert report == RoundReport(None, (), None if status == usual else counted([status] * world))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_rank_among_many_is_heard(dtype):
    said = [([0, 0, 0], [], Status(7))] * 5000
    for unusual in (Status(7, part=Part.FAILED), Status(8), Status(7, called=1)):
        said[300] = ([0, 0, 0], [], unusual)
        layout = ReportLayout(3, 300, len(said), 0, dtype)
        row = torch.zeros(layout.numel, dtype=dtype)
        for used, late, status in said[:301:300]:
            own = torch.empty_like(row)
            layout.write(own, bytearray(used), late, status)
            row += own * (len(said) - 1 if status == said[0][2] else 1)
        sums = layout.read(row).sums
        assert sums is None or (sums.ranks, sums.failed, sums.differ) == (5000, unusual.part == 5, unusual.round == 8)


def test_the_row_does_not_grow_with_the_world():
    sizes = {ReportLayout(0, 0, world, 0, torch.float32).numel for world in (1, 64, 8192, 65536)}
    assert len(sizes) == 1
    assert 4 * sizes.pop() <= 2048


@every_dtype
def test_a_dtype_holds_the_row_of_as_many_ranks_as_it_counts(dtype):
    most = {torch.bfloat16: 256, torch.float16: 2048, torch.float32: 2**24, torch.float64: 2**53}[dtype]
    assert counts_exactly(dtype, most)
    assert not counts_exactly(dtype, 2 * most)
    ones = torch.tensor(float(most - 1), dtype=dtype) + 1
    assert ones == most
    assert ones + 1 == ones


@every_dtype
@pytest.mark.parametrize("status", [Status(7, 3, called=1), SOMETHING_ELSE], ids=["usual", "unusual"])
def test_a_row_that_is_not_summed_is_that_of_one_rank(dtype, status):
    """As on a `fake` backend."""
    layout = ReportLayout(3, 0, 4, 0, dtype)
    row = torch.empty(layout.numel, dtype=dtype)
    layout.write(row, bytearray([1, 0, 1]), [], status)

    sums = counted([status]) if status == SOMETHING_ELSE else None
    assert layout.read(row) == RoundReport([True, False, True], (), sums)


def test_gathered_statuses_are_those_that_were_written():
    numbers = random.Random(1)
    large, small = [0, 1, 255, 2**53 + 1, 2**64 - 1], [0, 255, 256, 2**32 - 1]
    statuses = [
        Status(
            numbers.choice(large),
            numbers.choice(large),
            numbers.choice(list(Part)),
            *(numbers.random() < 0.5 for _ in FLAGS),
            called=numbers.randrange(16),
            through=numbers.choice(small),
            unused_forwards=numbers.choice(small),
            steps=numbers.choice([0, 1, MOST_STEPS, UNKNOWN_STEPS]),
            weight=weight,
            numbers=numbers.choice([0, 2**64 - 1]),
            values=numbers.getrandbits(64),
        )
        for weight in (*WEIGHTS, *ODD_WEIGHTS)
        if not math.isnan(weight)
    ]
    gathered = torch.cat([STATUSES.pack(status) for status in statuses])
    assert STATUSES.unpack(gathered) == statuses


# ---------------------------------------------------------------------------------- packed_buffers


@every_dtype
@every_world
def test_cargo_of_one_rank_arrives_and_touches_nothing_else(dtype, world):
    load = torch.arange(256).to(dtype)  # bytes
    nothing = torch.zeros(256, dtype=dtype)
    status = Status(30, weighted=True, weight=0.1)
    said = [([0, 1, 0], [2], status, nothing)] * world
    said[world // 2] = ([0, 1, 0], [2], status, load)
    report, row = exchange(dtype, said, packed_buffers=256)
    layout = ReportLayout(3, 0, world, 256, dtype)

    assert torch.equal(row[layout.packed_buffers], load)
    assert layout.packed_buffers.stop == layout.numel == len(row)
    assert report == RoundReport([False, True, False], [2], counted([status] * world))


def test_writing_clears_what_the_row_held():
    layout = ReportLayout(2, 1, 2, 3, torch.float32)
    row = torch.full((layout.numel,), 9.0)
    layout.write(row, bytearray([1, 0]), [], Status(5))

    told = 1 + sum(ROW.encode(Status(5), 1))  # one parameter, and the status
    assert row[: layout.packed_buffers.start].count_nonzero() == told
    assert row[layout.packed_buffers].tolist() == [9.0] * 3  # who writes buffers clears their places


@every_dtype
def test_who_says_the_same_round_after_round_notices_who_does_not(dtype):
    layouts = [ReportLayout(3, rank, 2, 0, dtype) for rank in range(2)]
    rows = torch.empty(2, layouts[0].numel, dtype=dtype)

    def told(*said):
        for layout, row, (used, late, status) in zip(layouts, rows, said, strict=True):
            layout.write(row, bytearray(used), late, status)
        total = rows.sum(0).to(dtype)
        first, second = (layout.read(total) for layout in layouts)
        assert first == second
        return first

    def usual(number, used=(1, 1, 1), **status):
        return used, [], Status(number, called=1, through=1, **status)

    some = [True, False, True]
    for number in range(1, 4):
        assert told(usual(number), usual(number)) == RoundReport(None)
    for number in range(4, 6):
        assert told(usual(number, [1, 0, 1]), usual(number, [1, 0, 1])) == RoundReport(some)
    assert told(usual(6, [1, 0, 1]), usual(6, [0, 0, 1])) == RoundReport(some)
    assert told(usual(7), usual(8)).sums.differ
    assert told(usual(9), usual(9)) == RoundReport(None)
    assert told(usual(10), ([1, 1, 1], [2], usual(10)[2])).late == [2]
    assert told(usual(11), usual(11, part=Part.FAILED)).sums.failed == 1
    weighted = usual(12, weighted=True, weight=0.5)
    assert told(weighted, weighted).sums.weight == 1.0
    assert told(usual(13), usual(13)) == RoundReport(None)
    assert told(usual(14), usual(14, unused_forwards=1)).sums.differ
    assert told(usual(15, steps=1), usual(15, steps=1)) == RoundReport(None)
    assert told(usual(16, steps=1), usual(16, steps=0)).sums.differ
