"""What ranks tell each other behind the last bucket: exact in every dtype and world size, added up as ranks would."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from lockstep.distributed.reduction.report.status import (
    MOST_STEPS,
    UNKNOWN_STEPS,
    Part,
    Report,
    ReportLayout,
    Status,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_world = pytest.mark.parametrize("world", [1, 2, 3, 64, 512])

FLAGS = ("stops", "ends", "changed", "weighted")
ALL_FLAGS = dict.fromkeys(FLAGS, True)
SOMETHING_ELSE = Status(
    2**64 - 1, 2**64 - 1, Part.FAILED, **ALL_FLAGS, called=15, through=257, unused_forwards=9, steps=3, weight=7.0
)
ODD_WEIGHTS = [0.0, 1.0, 1 / 3, math.pi, 5e-324, 1.7976931348623157e308, 2.0**53 - 1, 123456789.123, -1e-300, math.inf]


def exchange(dtype, said, parameters=3, packed_buffers=0):
    """Return what all ranks read if rank r says `said[r]`: (used, late, status, buffers); and the sum itself."""
    world = len(said)
    layouts = [ReportLayout(parameters, rank, world, packed_buffers, dtype) for rank in range(world)]
    total = None
    for layout, (used, late, status, *load) in zip(layouts, said, strict=True):
        row = torch.full((layout.numel,), math.nan, dtype=dtype)  # as if it had never been written
        layout.write(row, bytearray(parameters), [*range(parameters)], SOMETHING_ELSE)
        layout.write(row, bytearray(used), late, status)
        for values in load:
            row[layout.packed_buffers] = values
        total = row if total is None else total + row
    reports = [layout.read(total) for layout in (*layouts[:1], *layouts[-2:]) for _ in range(2)]
    assert reports == reports[:1] * len(reports)
    return reports[0], total


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

        assert report == Report(expected)  # no status is decoded where all say the same


@every_dtype
@every_world
def test_late_gradients_of_any_rank_are_known_to_all(dtype, world):
    said = [([1, 1, 1], [], Status())] * world
    said[-1] = ([1, 1, 1], [2, 0], Status())
    report, _ = exchange(dtype, said)
    assert report == Report(None, [0, 2], [Status()] * world)

    report, _ = exchange(dtype, [([1, 1, 1], [1], Status())] * world)
    assert report == Report(None, [1], [Status()] * world)


def test_a_module_without_parameters_has_a_report_too():
    report, _ = exchange(torch.float32, [([], [], Status(4))] * 2, parameters=0)

    assert report == Report(None)


# ---------------------------------------------------------------------------------- status


@every_dtype
def test_parts_and_flags_of_each_rank(dtype):
    statuses = [
        Status(1000, 7, part, *flags) for part in Part for flags in itertools.product((False, True), repeat=len(FLAGS))
    ]
    random.Random(0).shuffle(statuses)
    report, _ = exchange(dtype, [([0, 0, 0], [], status) for status in statuses])

    assert report.statuses == statuses


@every_dtype
def test_numbers_arrive_bit_for_bit(dtype):
    numbers = random.Random(1)
    large, small = [0, 1, 15, 255, 256, 257, 2**16, 2**53 + 1, 2**64 - 1], [0, 14, 15, 255, 256, 65536, 2**32 - 1]
    weights = [*ODD_WEIGHTS, *(numbers.expovariate(1e-6) for _ in range(30))]
    statuses = [
        Status(
            numbers.choice(large),
            numbers.choice(large),
            weighted=True,
            called=numbers.randrange(16),
            through=numbers.choice(small),
            unused_forwards=numbers.choice(small),
            steps=numbers.choice([0, 1, MOST_STEPS, UNKNOWN_STEPS]),
            weight=weight,
        )
        for weight in weights
    ]
    report, _ = exchange(dtype, [([1, 1, 1], [], status) for status in statuses])

    assert report.statuses == statuses


@every_dtype
@pytest.mark.parametrize("difference", [1, 15, 240, 256, 2**32])
def test_numbers_that_differ_are_told_apart(dtype, difference):
    for statuses in [[Status(9), Status(9 + difference)], [Status(9, 7), Status(9, 7 + difference)]]:
        assert exchange(dtype, [([1, 1, 1], [], status) for status in statuses])[0].statuses == statuses


@every_dtype
@every_world
def test_ranks_that_say_the_same_are_all_heard_if_it_has_consequences(dtype, world):
    usual = Status(3, 4, called=1, through=2, unused_forwards=1, steps=1)
    for changes in [*({"part": part} for part in Part), *({flag: True} for flag in FLAGS)]:
        status = usual._replace(**changes)
        report, _ = exchange(dtype, [([1, 1, 1], [], status)] * world)
        assert report == Report(None, (), () if status == usual else [status] * world)


@every_dtype
def test_one_rank_among_many_is_heard(dtype):
    said = [([0, 0, 0], [], Status(7))] * 512
    said[300] = ([0, 0, 0], [], Status(7, part=Part.FAILED))
    report, _ = exchange(dtype, said)

    assert [rank for rank, status in enumerate(report.statuses) if status.part == Part.FAILED] == [300]


@every_dtype
@pytest.mark.parametrize("status", [Status(7, 3, called=1), SOMETHING_ELSE], ids=["usual", "unusual"])
def test_a_rank_that_says_nothing_says_what_this_one_does(dtype, status):
    """As on a `fake` backend."""
    for rank in range(4):
        layout = ReportLayout(3, rank, 4, 0, dtype)
        row = torch.empty(layout.numel, dtype=dtype)
        layout.write(row, bytearray([1, 0, 1]), [], status)

        assert layout.read(row) == Report([True, False, True], (), [status] * 4 if status == SOMETHING_ELSE else ())


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
    assert report == Report([False, True, False], [2], [status] * world)


def test_writing_clears_what_the_row_held():
    layout = ReportLayout(2, 1, 2, 3, torch.float32)
    row = torch.full((layout.numel,), 9.0)
    layout.write(row, bytearray([1, 0]), [], Status(5))

    assert row.count_nonzero() == 3  # one parameter, the round and the part
    assert row[layout.packed_buffers].tolist() == [0.0] * 3


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
        assert told(usual(number), usual(number)) == Report(None)
    for number in range(4, 6):
        assert told(usual(number, [1, 0, 1]), usual(number, [1, 0, 1])) == Report(some)
    assert told(usual(6, [1, 0, 1]), usual(6, [0, 0, 1])) == Report(some)
    assert [status.round for status in told(usual(7), usual(8)).statuses] == [7, 8]
    assert told(usual(9), usual(9)) == Report(None)
    assert told(usual(10), ([1, 1, 1], [2], usual(10)[2])).late == [2]
    assert told(usual(11), usual(11, part=Part.FAILED)).statuses[1].part == Part.FAILED
    weighted = usual(12, weighted=True, weight=0.5)
    assert told(weighted, weighted).statuses == [weighted[2]] * 2
    assert told(usual(13), usual(13)) == Report(None)
    assert told(usual(14), usual(14, unused_forwards=1)).statuses[1].unused_forwards == 1
    assert told(usual(15, steps=1), usual(15, steps=1)) == Report(None)
    assert [status.steps for status in told(usual(16, steps=1), usual(16, steps=0)).statuses] == [1, 0]
