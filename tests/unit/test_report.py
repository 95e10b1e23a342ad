"""What ranks tell each other behind the last bucket: exact in every dtype and world size, added up as ranks would."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch

from lockstep.distributed.decisions import LoopStatus
from lockstep.distributed.reduction.passes import MOST, Called, PassSummary
from lockstep.distributed.reduction.report import RankStatus, ReportLayout, check_ranks, mean_factor, round_code
from lockstep.errors import OptionError, PeerError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_world = pytest.mark.parametrize("world", [1, 2, 3, 64, 512])

EVERYTHING = RankStatus(0)
SOMETHING_ELSE = RankStatus(3, True, True, True, True, True, (17, 33), 77, True)
FLAGS = [field.name for field in dataclasses.fields(RankStatus) if field.type is bool]
ROUNDS = next(number for number in range(1, 1000) if round_code(number) == 0)


def exchange(dtype, said, parameters=3, packed_buffers=0, digests=()):
    """What all ranks read if rank r says `said[r]`: (used, late, status, weight, buffers); and the sum itself."""
    world = len(said)
    layouts = [ReportLayout(parameters, rank, world, packed_buffers) for rank in range(world)]
    total = None
    digests = digests or [None] * world
    for layout, (used, late, status, weight, *load), digest in zip(layouts, said, digests, strict=True):
        row = torch.full((layout.numel,), math.nan, dtype=dtype)  # as if it had never been written
        other = torch.full((9,), 3, dtype=torch.uint8)
        layout.write(row, bytearray(parameters), [*range(parameters)], SOMETHING_ELSE, 7.0, other)
        layout.write(row, bytearray(used), late, status, weight, digest)
        for values in load:
            row[layout.packed_buffers] = values
        total = row if total is None else total + row
    reports = {str(ReportLayout(parameters, rank, world, packed_buffers).read(total)) for rank in (0, world - 1)}
    reports |= {str(layout.read(total)) for layout in layouts[-2:] for _ in range(2)}  # by those who have written, too
    assert len(reports) == 1
    report = ReportLayout(parameters, 0, world, packed_buffers).read(total)
    statuses = [dataclasses.replace(status, round=round_code(status.round)) for _, _, status, *_ in said]
    assert list(report.ranks) == (statuses[:1] if len(set(statuses)) == 1 else statuses)  # once, if all say the same
    return report, total


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
        report, _ = exchange(dtype, [(used, [], EVERYTHING, 0.0) for used in said])

        assert report.used == expected
        assert [report.uses(i) for i in range(3)] == (expected or [True] * 3)
        assert report.late == []
        assert report.weights == []


@every_dtype
@every_world
def test_late_gradients_of_any_rank_are_known_to_all(dtype, world):
    said = [([1, 1, 1], [], EVERYTHING, 0.0)] * world
    said[-1] = ([1, 1, 1], [2, 0], EVERYTHING, 0.0)
    report, _ = exchange(dtype, said)
    assert report.late == [0, 2]
    assert report.used is None

    report, _ = exchange(dtype, [([1, 1, 1], [1], EVERYTHING, 0.0)] * world)
    assert report.late == [1]


def test_a_module_without_parameters_has_a_report_too():
    report, _ = exchange(torch.float32, [([], [], RankStatus(4), 0.0)] * 2, parameters=0)

    assert (report.used, report.late) == (None, [])


# ---------------------------------------------------------------------------------- status


@every_dtype
def test_rounds_and_flags_of_each_rank(dtype):
    statuses = [
        RankStatus(code, **dict(zip(FLAGS, flags, strict=True)))
        for code in range(ROUNDS)
        for flags in itertools.product((False, True), repeat=len(FLAGS))
    ]
    random.shuffle(statuses)
    report, _ = exchange(dtype, [([0, 0, 0], [], status, 1.0) for status in statuses])

    assert list(report.ranks) == statuses


@every_dtype
def test_one_rank_among_many_is_heard(dtype):
    said = [([0, 0, 0], [], RankStatus(7), 0.0)] * 512
    said[300] = ([0, 0, 0], [], RankStatus(7, failed=True), 0.0)
    report, _ = exchange(dtype, said)

    assert [rank for rank, status in enumerate(report.ranks) if status.failed] == [300]


def test_round_numbers_go_round():
    assert [round_code(number) for number in range(2 * ROUNDS + 1)] == [*range(ROUNDS), *range(ROUNDS), 0]
    exchange(torch.bfloat16, [([1, 1, 1], [], RankStatus(number), 0.0) for number in (ROUNDS - 1, ROUNDS, 1000)])


def told(number, rank, *statuses, global_ranks=()):
    report, _ = exchange(torch.float32, [([1, 1, 1], [], status, 0.0) for status in statuses])
    check_ranks(report, number, rank, global_ranks or range(len(statuses)))


def test_ranks_in_one_round_that_did_not_fail_are_in_order():
    told(1000, 0, *[RankStatus(1000, joined=joined) for joined in (False, True, False)])


@pytest.mark.parametrize(
    ("number", "other", "words"),
    [
        (7, 8, "rank 2 is in its synchronised backward number 7, but rank 1 is 1 ahead"),
        (7, 5, "rank 2 is in its synchronised backward number 7, but rank 1 is 2 behind"),
        (ROUNDS, ROUNDS - 1, "but rank 1 is 1 behind"),
        (1000, 1003, "but rank 1 is 3 ahead"),
    ],
)
def test_another_round_is_an_error_that_says_how_far(number, other, words):
    with pytest.raises(PeerError, match=words):
        told(number, 2, RankStatus(number), RankStatus(other), RankStatus(number))


def test_ranks_are_named_as_those_of_the_default_group():
    with pytest.raises(PeerError, match="rank 7 is in its synchronised backward number 5, but rank 9 is 1 ahead"):
        told(5, 0, RankStatus(5), RankStatus(6), global_ranks=[7, 9])


def test_a_rank_that_failed_is_named_whatever_its_round():
    with pytest.raises(PeerError, match="rank 0: backward failed on rank 2 in round 5; that rank's own error says why"):
        told(5, 0, RankStatus(5), RankStatus(5), RankStatus(4, failed=True))


# ---------------------------------------------------------------------------------- the same backward pass

TRAINING, EVALUATION, OTHERWISE, UNKNOWN = Called


def through(called, forwards=1, left_out=0, **status):
    return RankStatus(5, backward=PassSummary(called, forwards, left_out).encode(), **status)


@every_dtype
def test_what_each_rank_says_of_its_pass(dtype):
    combinations = [Called(value) for value in range(1, 16)]
    statuses = [
        through(called, forwards, left_out)
        for called in combinations
        for forwards in (0, 1, MOST)
        for left_out in (0, 1, MOST)
    ]
    random.Random(1).shuffle(statuses)
    report, _ = exchange(dtype, [([0, 0, 0], [], status, 1.0) for status in statuses])

    assert list(report.ranks) == statuses


def test_numbers_beyond_those_that_are_counted_are_all_alike():
    assert {PassSummary(TRAINING, n, n).encode() for n in range(MOST, 3 * MOST)} == {(2, 16 * MOST + MOST + 1)}


@pytest.mark.parametrize(
    "statuses",
    [
        [through(OTHERWISE)] * 2,
        [through(TRAINING), through(TRAINING | EVALUATION)],
        [through(TRAINING), through(UNKNOWN), through(EVALUATION | UNKNOWN)],
        [through(TRAINING), RankStatus(5)],  # in no backward pass of its own
        [through(TRAINING, 1), through(TRAINING, 7)],  # sequences of different lengths
        [through(TRAINING, 1, 1), through(TRAINING, 2, 0)],  # a term of the loss that was left out
        [through(TRAINING, MOST, 1), through(TRAINING, MOST, 0)],
        [through(OTHERWISE, 0, 1), through(OTHERWISE, 0, 0)],
        [through(TRAINING, 1, 1, weighted=True), through(TRAINING, 1, 0, weighted=True)],
    ],
    ids=str,
)
def test_ranks_that_may_be_in_the_same_pass(statuses):
    told(5, 0, *statuses)


@pytest.mark.parametrize(
    ("mine", "other", "words"),
    [
        (OTHERWISE, TRAINING, r"on rank 0 it went through no output of the module's forward \(a submodule, another"),
        (TRAINING, EVALUATION, "on rank 0 it went through the module's forward in training mode, on rank 2 through"),
        (TRAINING | EVALUATION, OTHERWISE, "forward in training and evaluation mode, on rank 2 through no output"),
    ],
    ids=str,
)
def test_ranks_that_called_the_module_in_different_ways_are_told(mine, other, words):
    for rank in range(3):
        with pytest.raises(PeerError, match=f"rank {rank}: ranks 0 and 2 are not in the same backward.*{words}"):
            told(5, rank, through(mine), RankStatus(5), through(other))


def test_ranks_that_left_out_a_forward_are_told():
    with pytest.raises(PeerError, match="since the one before, rank 0 has left out no forwards, rank 1 1 forward "):
        told(5, 1, through(TRAINING), through(TRAINING, 1, 1))
    with pytest.raises(PeerError, match=f"rank 0 has left out {MOST} forwards or more, rank 1 2 forwards "):
        told(5, 1, through(TRAINING, 1, MOST), through(TRAINING, 1, 2))


# ---------------------------------------------------------------------------------- the loop, and digests


@every_dtype
def test_what_each_rank_says_of_its_loop(dtype):
    loops = [LoopStatus(n, *flags) for n in range(15) for flags in itertools.product((False, True), repeat=4)]
    random.Random(2).shuffle(loops)
    said = [([0, 0, 0], [], RankStatus(5, loop=loop.encode()), 0.0) for loop in loops]
    report, _ = exchange(dtype, said)

    assert report.loops == loops
    assert LoopStatus(15).encode() == LoopStatus(0).encode()


def at_batches(*numbers, failed=False):
    return [RankStatus(5, failed and n == numbers[0], loop=LoopStatus(n).encode()) for n in numbers]


def test_ranks_at_different_batches_are_told():
    told(5, 0, *at_batches(7, 7, 7))
    with pytest.raises(PeerError, match=r"rank 0: rank 4 is 2 ahead of this rank in the batches of its loop, in rou"):
        told(5, 0, *at_batches(14, 14, 16), global_ranks=[0, 2, 4])
    with pytest.raises(PeerError, match="rank 1: rank 0 is 1 behind this rank"):
        told(5, 1, *at_batches(0, 1, 0))
    with pytest.raises(PeerError, match="backward failed on rank 0"):
        told(5, 1, *at_batches(0, 1, failed=True))


@every_dtype
def test_digests_are_told_apart(dtype):
    numbers = random.Random(3)
    digests = [torch.tensor([numbers.randrange(256) for _ in range(9)], dtype=torch.uint8) for _ in range(3)]
    said = [([1, 1, 1], [], RankStatus(5, loop=16), 0.0)] * 3
    report, _ = exchange(dtype, said, digests=digests)
    assert report.digests == [bytes(digest.tolist()) for digest in digests]
    assert exchange(dtype, said, digests=[digests[0], digests[0], None])[0].digests[2] == bytes(9)
    assert exchange(dtype, said, digests=[digests[1]] * 3)[0].digests == ()
    assert exchange(dtype, said)[0].digests == ()


# ---------------------------------------------------------------------------------- weights

ODD_WEIGHTS = [0.0, 1.0, 1 / 3, math.pi, 5e-324, 1.7976931348623157e308, 2.0**53 - 1, 123456789.123, 1e-300, 4096.0]


@every_dtype
@every_world
def test_weights_arrive_bit_for_bit(dtype, world):
    numbers = random.Random(world)
    weights = [*ODD_WEIGHTS, *(numbers.expovariate(1e-6) for _ in range(world))][:world]
    numbers.shuffle(weights)
    report, _ = exchange(dtype, [([1, 1, 1], [], RankStatus(3, weighted=True), weight) for weight in weights])

    assert report.weights == weights


@every_dtype
def test_a_rank_without_a_weight_counts_as_zero_and_says_so(dtype):
    said = [([1, 1, 1], [], RankStatus(0, weighted=rank != 1), 7.25 + rank) for rank in range(3)]
    report, _ = exchange(dtype, said)

    assert report.weights == [7.25, 0.0, 9.25]
    assert [status.weighted for status in report.ranks] == [True, False, True]


JOINED = RankStatus(2, joined=True)
IS_IDLE = RankStatus(2, loop=LoopStatus(idle=True).encode())


def factor(divisor, *given):
    """Of ranks that give a weight, none, or have run out."""
    statuses = [each if each in (JOINED, IS_IDLE) else RankStatus(2, weighted=each is not None) for each in given]
    weights = [each if isinstance(each, int) else 0 for each in given]
    said = [([1, 1, 1], [], status, weight) for status, weight in zip(statuses, weights, strict=True)]
    return mean_factor(exchange(torch.float32, said)[0], divisor, 2, range(len(said)))


def test_weights_turn_a_mean_over_ranks_into_one_over_what_is_counted():
    assert factor(2.0, None, None) == 1.0
    assert factor(2.0, 3, 5) == 0.25
    assert factor(3.0, 4, JOINED, 2) == 0.5  # one that has run out counts nothing
    assert factor(3.0, 4, IS_IDLE, 2) == 0.5
    assert factor(3.0, None, IS_IDLE, None) == 1.5  # and a mean over all into one over the others
    assert factor(3.0, IS_IDLE, IS_IDLE, IS_IDLE) == 1.0
    assert factor(2.0, 0, 0) == 0.0
    with pytest.raises(OptionError, match="rank 1 gave no weight in round 2, others did"):
        factor(3.0, 1, None, 1)


# ---------------------------------------------------------------------------------- packed_buffers


@every_dtype
@every_world
def test_cargo_of_one_rank_arrives_and_touches_nothing_else(dtype, world):
    load = torch.arange(256).to(dtype)  # bytes
    nothing = torch.zeros(256, dtype=dtype)
    said = [([0, 1, 0], [2], RankStatus(30, True, True, True), 0.1, nothing)] * world
    said[world // 2] = ([0, 1, 0], [2], RankStatus(30, True, True, True), 0.1, load)
    report, row = exchange(dtype, said, packed_buffers=256)
    layout = ReportLayout(3, 0, world, 256)

    assert torch.equal(row[layout.packed_buffers], load)
    assert layout.packed_buffers.stop == layout.numel == len(row)
    assert report.used == [False, True, False]
    assert report.late == [2]
    assert report.weights == [0.1] * world


def test_writing_clears_what_the_row_held():
    layout = ReportLayout(2, 1, 2, 3)
    row = torch.full((layout.numel,), 9.0)
    layout.write(row, bytearray([1, 0]), [], RankStatus(5), 0.0)

    assert row.count_nonzero() == 2  # one parameter and the status
    assert row[layout.packed_buffers].tolist() == [0.0] * 3


@every_dtype
def test_who_says_the_same_round_after_round_notices_who_does_not(dtype):
    layouts = [ReportLayout(3, rank, 2, 0) for rank in range(2)]
    rows = torch.empty(2, layouts[0].numel, dtype=dtype)

    def told(*said):
        for layout, row, (used, late, status, weight) in zip(layouts, rows, said, strict=True):
            layout.write(row, bytearray(used), late, status, weight)
        total = rows.sum(0).to(dtype)
        reports = [layout.read(total) for layout in layouts]
        assert reports[0] == reports[1] == ReportLayout(3, 0, 2, 0).read(total)
        return reports[0]

    def usual(number, used=(1, 1, 1)):
        return used, [], RankStatus(number, backward=(2, 18)), 0.0

    for number in range(1, 4):
        assert told(usual(number), usual(number)).used is None
    for number in range(4, 6):
        assert told(usual(number, [1, 0, 1]), usual(number, [1, 0, 1])).used == [True, False, True]
    assert told(usual(6, [1, 0, 1]), usual(6, [0, 0, 1])).used == [True, False, True]
    assert [status.round for status in told(usual(7), usual(8)).ranks] == [7, 8]
    assert told(usual(9), (*usual(9)[:3], 0.0)).used is None
    assert told(usual(10), ([1, 1, 1], [2], *usual(10)[2:])).late == [2]
    assert told(usual(11), ([1, 1, 1], [], RankStatus(11, failed=True), 0.0)).ranks[1].failed
    weighted = [1, 1, 1], [], RankStatus(12, weighted=True), 0.5
    assert told(weighted, weighted).weights == [0.5, 0.5]
    assert told(usual(13), usual(13)).weights == []
    assert told(usual(14), ([1, 1, 1], [], RankStatus(14, backward=(3, 18)), 0.0)).ranks[1].backward == (3, 18)
