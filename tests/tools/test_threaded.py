"""Ranks as threads: they meet, fail, are counted and are gone afterwards as `threaded` promises."""

from __future__ import annotations

import contextlib
import gc
import inspect
import queue
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.distributed import ProcessGroupShm
from programs.ranks import on_ranks
from threaded import Collective, Rank, count_collectives, run_ranks


def total(rank: Rank) -> float:
    value = torch.tensor([float(rank.rank + 1)])
    dist.all_reduce(value, group=rank.group)
    return value.item()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_by_rank_and_collectives_reach_every_rank(world):
    results = run_ranks(world, lambda rank, *rest: (rank.rank, rank.world, total(rank), *rest), "a", 1)

    assert results == [(r, world, world * (world + 1) / 2, "a", 1) for r in range(world)]
    assert not dist.is_initialized()


def test_ranks_run_side_by_side():
    meeting = threading.Barrier(3, timeout=60)

    assert sorted(run_ranks(3, lambda rank: meeting.wait())) == [0, 1, 2]


def test_threads_start_with_the_defaults_of_a_process():
    def settings(rank: Rank) -> tuple:
        return torch.is_grad_enabled(), torch.get_default_device().type, torch.is_autocast_enabled("cpu")

    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu"):
        assert run_ranks(2, settings) == [(True, "cpu", False)] * 2


def test_backward_runs_on_each_rank():
    def gradient(rank: Rank) -> float:
        x = torch.tensor(float(rank.rank), requires_grad=True)
        (x * x).backward()
        return x.grad.item()

    assert run_ranks(2, gradient) == [0.0, 2.0]


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_test_of_ranks_runs_on_each_and_fails_where_one_does(failing):
    seen: queue.SimpleQueue = queue.SimpleQueue()

    @on_ranks(2, "hosts")
    def each(rank, failing):
        seen.put(isinstance(rank.group, ProcessGroupShm))
        assert rank.rank != failing

    assert [*inspect.signature(each).parameters] == ["hosts", "failing"]  # what pytest gives it
    with contextlib.nullcontext() if failing is None else pytest.raises(AssertionError):
        each(hosts="aa", failing=failing)
    assert (seen.get(), seen.get(), seen.empty()) == (True, True, True)


@pytest.mark.parametrize("said", [None, "a batch", "a bad one", "a bad batch"])
def test_ranks_that_are_to_end_with_an_error_have_to(said):
    @on_ranks(2, raises=ValueError, says=("a bad", "batch"))
    def each(rank):
        if rank.rank == 0 or said is not None:
            raise ValueError(said if rank.rank else "a bad batch")

    with contextlib.nullcontext() if said == "a bad batch" else pytest.raises(AssertionError):
        each()


# ------------------------------------------------------------------------------------ accelerators


def test_each_rank_has_an_accelerator(sim):
    def places(rank: Rank) -> list[torch.device]:
        return [rank.device, torch.ones(1).device, torch.empty(1, device="sim").device]

    assert run_ranks(2, places, device="sim") == [[torch.device("sim", rank)] * 3 for rank in range(2)]
    assert torch.ones(1).is_cpu


def test_sums_arrive_when_they_are_waited_for(sim):
    def summed(rank: Rank) -> list[object]:
        value = torch.full((2,), rank.rank + 1.0)
        work = dist.all_reduce(value, group=rank.group, async_op=True)
        early = value.isnan().all().item()
        work.wait()
        return [early, value.tolist(), value.device]

    assert run_ranks(2, summed, device="sim") == [[True, [3.0, 3.0], torch.device("sim", r)] for r in range(2)]


def test_futures_of_collectives_hold_tensors_of_the_accelerator(sim):
    def doubled(rank: Rank) -> list[object]:
        value = torch.tensor([rank.rank + 1, 5])
        work = dist.broadcast(value, group_src=1, group=rank.group, async_op=True)
        result = work.get_future().then(lambda done: done.value()[0] * 2).wait()
        return [result.tolist(), value.tolist(), result.device]

    assert run_ranks(2, doubled, device="sim") == [[[4, 10], [2, 5], torch.device("sim", r)] for r in range(2)]


def test_inputs_of_collectives_stay_as_they_are(sim):
    def passed_on(rank: Rank) -> list[object]:
        value = torch.tensor([rank.rank + 1.0])
        everybodys = torch.cat(rank.gather(value)).tolist()
        if rank.rank == 0:
            rank.group.send([value], 1, 0).wait()
        else:
            rank.group.recv([received := torch.zeros(1)], 0, 0).wait()
            value += 10 * received
        return [everybodys, value.tolist()]

    assert run_ranks(2, passed_on, device="sim") == [[[1.0, 2.0], [1.0]], [[1.0, 2.0], [12.0]]]


# ----------------------------------------------------------------------------------------- helpers


def test_random_numbers_differ_from_rank_to_rank_and_repeat():
    def numbers(rank: Rank) -> float:
        return torch.rand((), generator=rank.generator(1)).item()

    first = run_ranks(4, numbers)

    assert len(set(first)) == 4
    assert run_ranks(4, numbers) == first


def test_what_ranks_make_with_one_seed_is_the_same_and_the_global_numbers_stay():
    def same(rank: Rank) -> tuple[bool, bool]:
        def weights(seed: int) -> torch.Tensor:
            return rank.make(lambda: torch.nn.Linear(20, 20), seed).weight

        return rank.all_equal(weights(3)), rank.all_equal(weights(rank.rank))

    before = torch.get_rng_state()

    assert run_ranks(4, same) == [(True, False)] * 4
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_gather_gives_every_rank_all_tensors_bit_for_bit(dtype):
    def gather(rank: Rank) -> list[torch.Tensor]:
        return rank.gather((torch.arange(6).reshape(2, 3) + rank.rank).to(dtype).t())

    expected = [(torch.arange(6).reshape(2, 3) + rank).to(dtype).t() for rank in range(3)]

    for parts in run_ranks(3, gather):
        assert all(torch.equal(part, other) for part, other in zip(parts, expected, strict=True))
        assert [part.dtype for part in parts] == [dtype] * 3


def test_gather_takes_scalars_empty_tensors_and_what_requires_a_gradient():
    def shapes(rank: Rank) -> list:
        values = torch.tensor(1.0, requires_grad=True), torch.empty(0, 3)
        return [[tuple(part.shape) for part in rank.gather(value)] for value in values]

    assert run_ranks(2, shapes) == [[[(), ()], [(0, 3), (0, 3)]]] * 2


def test_all_equal_compares_bits():
    def compare(rank: Rank) -> list[bool]:
        zero = torch.tensor([-0.0 if rank.rank == 2 else 0.0])
        return [rank.all_equal(torch.tensor(float("nan"))), rank.all_equal(zero)]

    assert run_ranks(3, compare) == [[True, False]] * 3


# ------------------------------------------------------------------------------------------ errors


class Special(Exception):
    """An error with a constructor of its own, which could not be made again from its message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_that_every_rank_raises_is_raised_as_it_is():
    def fail(rank: Rank) -> None:
        raise Special(3, 4)

    with pytest.raises(Special, match=r"^3 and 4\n") as caught:
        run_ranks(3, fail)

    (note,) = caught.value.__notes__
    assert note.count("Special") == 2


def test_the_error_that_comes_first_is_raised_and_not_what_follows_from_it():
    first: queue.Queue[threading.Thread] = queue.Queue()

    def fail_in_turn(rank: Rank) -> None:
        if rank.rank == 1:
            first.put(threading.current_thread())
            raise Special(1, 1)
        first.get(timeout=60).join(60)
        raise RuntimeError("my peer is gone")

    with pytest.raises(Special, match="raised by rank 1 of 2; rank 0: RuntimeError"):
        run_ranks(2, fail_in_turn)


def test_errors_stand_in_their_ranks_place():
    def fail(rank: Rank) -> str:
        if rank.rank == 1:
            raise KeyError("lost")
        return "fine"

    zero, one, two = run_ranks(3, fail, errors=True)

    assert (zero, two) == ("fine", "fine")
    assert isinstance(one, KeyError)
    assert not hasattr(one, "__notes__")


def test_a_rank_left_alone_in_a_collective_gets_its_groups_timeout():
    def leave(rank: Rank) -> float:
        if rank.rank == 1:
            raise Special(1, 1)
        return total(rank)

    alone, error = run_ranks(2, leave, group_timeout=0.5, errors=True)

    assert isinstance(error, Special)
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        raise alone


def test_skipping_on_a_rank_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_ranks(2, lambda rank: pytest.skip("not here"))


def test_a_rank_that_hangs_is_reported_with_its_place():
    release, started = threading.Event(), threading.Event()
    hanging: list[threading.Thread] = []

    def hang_here(rank: Rank) -> None:
        if rank.rank == 1:
            started.wait(60)
            raise Special(5, 6)
        hanging.append(threading.current_thread())
        started.set()
        release.wait(60)

    try:
        with pytest.raises(TimeoutError, match=r"(?s)rank 0 is at:.*in hang_here.*rank 1 failed:.*5 and 6"):
            run_ranks(2, hang_here, timeout=1)
    finally:
        release.set()
    for thread in hanging:
        thread.join(10)
        assert not thread.is_alive()


# ------------------------------------------------------------------------------------------- leaks


def gloo_threads() -> int:
    """How many of this process's threads are Gloo's, which Python does not know."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            count += "gloo" in task.joinpath("comm").read_text()
    return count


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_threads_and_sockets_are_gone_after_a_run():
    ends_at: list[weakref.ref] = []

    def cycle(rank: Rank) -> float:
        module = torch.nn.Linear(1, 1)
        module.cycle = [module, rank.group]  # the collector's work
        ends_at.append(weakref.ref(rank.group))
        return total(rank)

    def fail(rank: Rank) -> None:
        cycle(rank)
        raise Special(7, 8)

    gc.collect()
    before, threads = descriptors(), gloo_threads()
    gc.disable()
    try:
        for _ in range(3):
            run_ranks(4, cycle)
            kept = run_ranks(4, fail, errors=True)
    finally:
        gc.enable()

    assert len(kept) == 4
    assert len(ends_at) == 24
    assert not any(end() for end in ends_at)
    assert descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    deadline = time.monotonic() + 10
    while gloo_threads() > threads and time.monotonic() < deadline:  # they end a little later
        time.sleep(0.01)
    assert gloo_threads() <= threads


# ---------------------------------------------------------------------------------------- counting


def test_collectives_are_counted_for_each_rank():
    def counted(rank: Rank) -> list[Collective]:
        two = torch.ones(2, 3)
        with count_collectives(rank) as seen:
            dist.all_reduce(two, group=rank.group)
            dist.all_reduce(two.double(), group=rank.group, async_op=True).wait()
            if rank.rank == 0:
                assert len(seen) == 2  # it grows as they are issued
            dist.broadcast(torch.ones(4, dtype=torch.int32), group=rank.group, group_src=1)
            dist.all_gather([torch.empty(5), torch.empty(5)], torch.ones(5), group=rank.group)
            rank.group.allreduce([torch.ones(7)]).wait()
            rank.group.barrier().wait()  # dist.barrier warns about a group of this kind
        dist.all_reduce(two, group=rank.group)
        return seen

    expected = [
        ("all_reduce", 6, torch.float32),
        ("all_reduce", 6, torch.float64),
        ("broadcast", 4, torch.int32),
        ("all_gather", 5, torch.float32),
        ("all_reduce", 7, torch.float32),
        ("barrier", 0, None),
    ]
    assert run_ranks(2, counted) == [expected] * 2


def test_counting_on_one_rank_leaves_the_others_out():
    def counted(rank: Rank) -> int:
        if rank.rank == 1:
            with count_collectives(rank) as seen:
                total(rank)
            return len(seen)
        total(rank)
        return 0

    assert run_ranks(3, counted) == [0, 1, 0]


def test_collectives_of_other_threads_on_a_ranks_group_are_counted():
    def counted(rank: Rank) -> int:
        with count_collectives(rank) as seen:
            helper = threading.Thread(target=total, args=(rank,))
            helper.start()
            helper.join()
        return len(seen)

    assert run_ranks(2, counted) == [1, 1]


def test_counting_puts_everything_back():
    classes = dist.ProcessGroupGloo.__mro__[1], dist.ProcessGroup
    before = [dict(vars(cls)) for cls in classes]

    def fail(rank: Rank) -> None:
        with count_collectives(rank):
            assert [dict(vars(cls)) for cls in classes] != before
            raise Special(9, 9)

    run_ranks(2, fail, errors=True)

    assert [dict(vars(cls)) for cls in classes] == before
