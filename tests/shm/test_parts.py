"""The parts of `shm` groups by themselves: descriptors, arithmetic, layouts, shares, memory, works, connections."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import select
import socket
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep._base.network import host_identity
from lockstep.errors import AgreementError, CommunicationError, OptionError
from lockstep.shm import arguments, arithmetic, messages, one_host, peers, staging
from lockstep.shm.messages import CollectiveKind, Descriptor, MessageKind, Op
from lockstep.shm.peers import LONGEST, Peers
from lockstep.shm.rendezvous import meet
from lockstep.shm.staging import PAGE_BYTES, StagingPool
from lockstep.shm.works import ShmWork, WorkQueue
from processes import in_child

DTYPES = list(messages._codes())
STEP = MessageKind.STEP


def together(*functions):
    """Return what the functions return, each called in a thread of its own."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(20) for future in [pool.submit(function) for function in functions]]


def error_of(function, *args):
    try:
        function(*args)
    except CommunicationError as error:
        return str(error)
    return None


# --------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("kind", CollectiveKind)
def test_a_descriptor_is_the_same_after_its_journey(kind):
    for op, dtype, numel in itertools.product(Op, DTYPES, [0, 1, 2**40]):
        said = Descriptor(kind, dtype, numel, op, root=numel % 7, tensors=1 + numel % 1000)
        assert Descriptor.unpack(said.pack()) == said
        assert Descriptor.unpack(messages.with_location(said.pack(), (3, 5))) == said
        assert len(said.pack()) < LONGEST


def test_every_field_of_a_descriptor_matters_to_the_comparison_and_its_place_does_not():
    usual = Descriptor(CollectiveKind.REDUCE, torch.float32, 6, Op.MAX, 1, 2)
    changes = {"kind": CollectiveKind.ALL_REDUCE, "dtype": torch.float64, "numel": 7, "op": Op.MIN, "root": 0}
    others = [
        dataclasses.replace(usual, **{name: value})
        for name, value in {**changes, "tensors": 3, "rounded_to": torch.half}.items()
    ]
    message = usual.pack()
    messages.compare(
        [message, messages.with_location(message, (1, 64)), messages.with_location(message, None)], [4, 5, 6]
    )
    for other in others:
        for place in range(3):
            said = [message] * 3
            said[place] = other.pack()
            with pytest.raises(AgreementError):
                messages.compare(said, [4, 5, 6])


def test_the_place_of_a_tensor_travels_with_the_message():
    message = Descriptor(CollectiveKind.ALL_REDUCE).pack()
    for place in [None, (0, 0), (7, 2**50)]:
        assert messages.location_of(messages.with_location(message, place)) == place


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (Descriptor(CollectiveKind.BARRIER), "barrier"),
        (
            Descriptor(CollectiveKind.ALL_REDUCE, torch.bfloat16, 5, Op.AVG),
            "all_reduce(5 elements, torch.bfloat16, AVG)",
        ),
        (
            Descriptor(CollectiveKind.ALL_REDUCE, torch.int8, 5, tensors=3),
            "all_reduce(5 elements in 3 tensors, torch.int8, SUM)",
        ),
        (Descriptor(CollectiveKind.REDUCE, torch.int8, 5, Op.BOR, 2), "reduce(5 elements, torch.int8, BOR, to rank 2)"),
        (Descriptor(CollectiveKind.BROADCAST, torch.bool, 0, root=3), "broadcast(0 elements, torch.bool, from rank 3)"),
        (Descriptor(CollectiveKind.ALL_GATHER, torch.cfloat, 1), "all_gather(1 elements, torch.complex64)"),
        (
            Descriptor(CollectiveKind.REDUCE_SCATTER, torch.half, 9, Op.MIN),
            "reduce_scatter(9 elements, torch.float16, MIN)",
        ),
    ],
)
def test_a_descriptor_in_words(said, text):
    assert str(said) == text


def test_a_disagreement_names_each_rank_with_what_it_said():
    a, b = (Descriptor(CollectiveKind.ALL_GATHER, numel=n).pack() for n in (3, 4))
    assert messages.said_by([a, a], [2, 9]) == {"all_gather(3 elements, torch.uint8)": [2, 9]}
    said = messages.said_by([a, b, a], [9, 5, 2])
    text = str(messages.disagreement(said))
    assert "ranks 2, 9: all_gather(3 elements, torch.uint8); rank 5: all_gather(4 elements, torch.uint8)." in text


# ---------------------------------------------------------------------------------------- arithmetic


def sources(dtype, ranks, numel=33):
    draw = torch.Generator().manual_seed(ranks)
    if dtype.is_complex or dtype.is_floating_point:
        wide = torch.randn(ranks, numel, generator=draw, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        return list(wide.to(dtype))
    return list(torch.randint(0, 100, (ranks, numel), generator=draw).to(dtype))


def reference(op, xs):
    """In rank order; half precision of more than two in float32, rounded at the end."""
    function = arithmetic._FUNCTIONS[op]
    half = xs[0].dtype in (torch.float16, torch.bfloat16) and op in (Op.SUM, Op.AVG, Op.PRODUCT)
    total = xs[0].float() if half and len(xs) > 2 else xs[0]
    for x in xs[1:]:
        total = function(total, x)
    return (total / len(xs) if op is Op.AVG else total).to(xs[0].dtype)


def possible(op, dtype):
    try:
        arithmetic.check(op, dtype)
    except OptionError:
        return False
    return True


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_reductions_are_in_rank_order_wherever_their_result_goes(ranks):
    dtypes = [torch.bool, torch.int16, torch.int64, torch.half, torch.bfloat16, torch.float, torch.double, torch.cfloat]
    for dtype, op in itertools.product(dtypes, Op):
        if not possible(op, dtype):
            continue
        expected = reference(op, sources(dtype, ranks))
        for place in [None, *range(ranks)]:  # in a tensor of its own, or in one of the sources
            xs = sources(dtype, ranks)
            out = torch.empty_like(expected) if place is None else xs[place]
            arithmetic.TensorReduction(op, dtype)(xs, out)
            assert torch.equal(out, expected), (dtype, op, place)
            for left, x in zip(xs, sources(dtype, ranks), strict=True):
                assert left is out or torch.equal(left, x)


# ------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.arange(6.0).view(2, 3)],
        lambda: [torch.arange(12.0)[3:9]],
        lambda: [torch.arange(6.0).view(2, 3).t()],
        lambda: [torch.arange(12.0)[::2]],
        lambda: [torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)],
        lambda: [torch.arange(2.0), torch.arange(6.0).view(2, 3).t(), torch.empty(0), torch.tensor(5.0)],
        lambda: [torch.tensor([1 + 2j, 3 - 1j]).conj()],
        lambda: [torch.tensor([1 + 2j, 3 - 1j]).conj().imag],
        lambda: [torch.ones(3, requires_grad=True)],
        lambda: [torch.tensor(3.0)],
        lambda: [torch.empty(0, 3)],
    ],
)
def test_tensors_of_any_layout_are_moved_in_order_and_given_back(make):
    tensors = make()
    versions = [tensor._version for tensor in tensors]
    whole = arguments.flatten(tensors)
    assert whole.dim() == 1
    assert whole.is_contiguous()
    assert not whole.is_conj()
    assert torch.equal(whole, torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))
    doubled = whole * 2
    whole.copy_(doubled)
    arguments.unflatten(whole, tensors)
    for tensor, before in zip(tensors, make(), strict=True):
        assert torch.equal(tensor, before * 2)
    assert [tensor._version for tensor in tensors] == versions  # behind autograd's back


def test_one_tensor_without_gaps_is_not_copied():
    x = torch.arange(12.0)[3:9].view(2, 3)
    assert arguments.flatten([x]).data_ptr() == x.data_ptr()
    assert arguments.flatten([x.t()]).data_ptr() != x.data_ptr()


# -------------------------------------------------------------------------------------------- shards


def test_shards_cover_every_element_once_and_begin_on_cache_lines():
    class Shards(one_host.OneHost):
        def __init__(self, size):
            self.size = size

    for size, itemsize in itertools.product([1, 2, 3, 7, 16], [1, 2, 4, 8, 16]):
        like = torch.empty(
            0, dtype=[torch.int8, torch.half, torch.float, torch.double, torch.cdouble][itemsize.bit_length() - 1]
        )
        room = staging._result_bytes(size) // itemsize
        for numel in [0, 1, 2, 15, 16, 17, 63, 64, 65, 1000, 12345, staging.CHUNK_BYTES // itemsize]:
            ends = 10
            for rank in range(size):
                begin, end = Shards(size)._shard(rank, 10, 10 + numel, like)
                assert begin == ends
                assert begin == 10 + numel or (begin - 10) * itemsize % staging.ALIGNMENT == 0
                assert end - begin <= room
                ends = end
            assert ends == 10 + numel


def test_chunks_and_blocks_follow_each_other():
    assert list(one_host.chunks(0, 4)) == []
    assert list(one_host.chunks(8, 4)) == [(0, 4), (4, 8)]
    assert list(one_host.chunks(9, 4)) == [(0, 4), (4, 8), (8, 9)]
    size = one_host.BLOCK_BYTES // 4
    assert list(one_host.blocks(5, 6 + size, 4)) == [(5, 5 + size), (5 + size, 6 + size)]
    assert list(one_host.blocks(5, 5, 4)) == []


# -------------------------------------------------------------------------------------------- memory


class Told:
    """Stands for the other ranks: what they have been told of memory."""

    reason = None

    def __init__(self):
        self.sent, self.retired = [], []

    def send_memory(self, number, size, fd):
        assert os.fstat(fd).st_size == size
        self.sent.append(number)

    def retire_memory(self, numbers):
        self.retired += numbers


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def pool(told):
    return StagingPool(told, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128, torch.bool])
def test_allocated_memory_is_aligned_and_as_large_as_asked_for(pool, dtype):
    for numel in [0, 1, 1000, 4097]:
        x = pool.allocate(numel, dtype)
        assert (x.shape, x.dtype) == ((numel,), dtype)
        assert numel == 0 or x.data_ptr() % PAGE_BYTES == 0
        x.fill_(1)
        assert x.count_nonzero() == numel


def test_memory_is_told_of_once_and_found_by_its_byte(pool, told):
    x, y = pool.allocate(100, torch.float32), pool.allocate(100, torch.float64)
    assert pool.locate(torch.ones(3)) is None
    assert told.sent == []
    assert pool.locate(y[7:20]) == (2, 56)
    assert pool.locate(x) == (1, 0)
    assert pool.locate(x.view(10, 10)[3]) == (1, 120)
    assert pool.locate(x.view(torch.int16)[5:]) == (1, 10)
    assert told.sent == [2, 1]


def test_memory_is_used_again_for_the_same_size_and_withdrawn_for_another(pool, told):
    x = pool.allocate(1000, torch.float32)
    other = pool.allocate(1000, torch.float32)
    assert [pool.locate(x), pool.locate(other)] == [(1, 0), (2, 0)]
    address = x.data_ptr()
    del x
    again = pool.allocate(500, torch.float64)
    assert again.data_ptr() == address
    assert pool.locate(again) == (1, 0)
    del again
    pool.announce_freed()
    assert told.retired == []
    large = pool.allocate(2000, torch.float32)
    assert pool.locate(large) == (3, 0)
    pool.announce_freed()
    assert told.retired == [1]
    assert told.sent == [1, 2, 3]
    fresh = pool.allocate(1000, torch.float32)
    assert pool.locate(fresh) == (4, 0)


def test_memory_that_nobody_was_told_of_is_not_withdrawn(pool, told):
    pool.allocate(1000, torch.float32)
    pool.allocate(2000, torch.float32)
    pool.announce_freed()
    assert (told.sent, told.retired) == ([], [])


def test_memory_is_kept_as_long_as_a_view_lives_and_no_longer(pool):
    x = pool.allocate(1000, torch.float32)
    view = x[10:20].view(2, 5).t()
    view.fill_(3)
    address = x.data_ptr()
    del x
    other = pool.allocate(1000, torch.float32)
    assert other.data_ptr() != address
    assert pool.locate(view) == (1, 40)
    assert view.sum() == 30
    together(lambda held=[view]: held.clear())
    del view
    gc.collect()
    assert pool.allocate(1000, torch.float32).data_ptr() == address


def test_memory_in_a_cycle_goes_when_the_collector_looks(pool):
    cycle = [pool.allocate(1000, torch.float32)]
    address = cycle[0].data_ptr()
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.allocate(1000, torch.float32).data_ptr() == address


def test_threads_that_allocate_and_drop_never_share_memory(pool, told):
    def work(seed):
        draw = torch.Generator().manual_seed(seed)
        kept = []
        for _ in range(300):
            numel = int(torch.randint(1, 4, (), generator=draw)) * 1024
            x = pool.allocate(numel, torch.float32).fill_(seed)
            kept.append(x)
            kept = kept[-3:]
            assert all(bool((each == seed).all()) for each in kept)
        return kept

    kept = [x for held in together(*(lambda seed=seed: work(seed) for seed in range(4))) for x in held]
    assert len({pool.locate(x)[0] for x in kept}) == len(kept)


def test_memory_leaves_no_descriptor_open(told):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    pool = StagingPool(told, 1)
    for numel in [1, 2000, 4000]:
        pool.locate(pool.allocate(numel, torch.float32))
    pool.allocate(6000, torch.float32)
    del pool
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# --------------------------------------------------------------------------------------------- works


@pytest.fixture
def queue():
    queue = WorkQueue("test")
    yield queue
    queue.close_and_wait()


def begin(queue, function, background=True, outputs=()):
    return queue.add(ShmWork(queue, function, list(outputs)), background)


def test_works_run_in_order_in_the_thread_that_waits(queue):
    ran = []

    def run(i):
        ran.append((i, queue.is_waited_for(), threading.get_ident()))

    works = [begin(queue, lambda i=i: run(i), False) for i in range(3)]
    assert works[1].wait()
    assert ran == [(i, True, threading.get_ident()) for i in range(2)]
    assert not works[2].done
    works[2].wait()
    works[0].wait()
    assert [each[0] for each in ran] == [0, 1, 2]
    assert all(work.is_success() for work in works)


def test_works_begun_in_the_background_run_while_nobody_waits(queue):
    done = threading.Event()
    ran = []
    work = begin(queue, lambda: (ran.append((queue.is_waited_for(), threading.get_ident())), done.set()))
    assert done.wait(10)
    work.wait()
    assert ran[0][0] is False
    assert ran[0][1] != threading.get_ident()


def test_one_work_runs_at_a_time_however_many_wait(queue):
    at_work, ran = threading.Lock(), []

    def run():
        assert at_work.acquire(blocking=False)
        ran.append(len(ran))
        at_work.release()

    works = [begin(queue, run, i % 3 == 0) for i in range(60)]
    together(*(lambda i=i: [work.wait() for work in works[i::4]] for i in range(4)))
    assert ran == list(range(60))
    assert all(work.is_success() for work in works)


def test_a_wait_with_a_timeout_ends_and_the_work_goes_on(queue):
    gate = threading.Event()
    work = begin(queue, lambda: gate.wait(10), False)
    with pytest.raises(CommunicationError, match=r"not over after 0\.05 s; it goes on"):
        work.wait(timedelta(seconds=0.05))
    assert not work.is_completed()
    gate.set()
    assert work.wait(timedelta(seconds=10))


@pytest.mark.parametrize("background", [True, False])
def test_futures_complete_with_the_outputs_without_anybody_waiting(queue, background):
    x = torch.ones(2)
    work = begin(queue, lambda: x.add_(1), background, [x])
    future = work.get_future()
    assert work.get_future() is future
    assert future.then(lambda done: done.value()[0].sum().item()).wait() == 4
    assert work.result() == [x]
    late = begin(queue, lambda: None, False, [x])
    late.wait()
    assert late.get_future().done()


def test_callbacks_may_begin_collectives_and_wait_for_them(queue):
    ran = []

    def next_one(depth):
        def callback(_):
            work = begin(queue, lambda: ran.append(depth), depth % 2 == 0)
            if depth < 4:
                return work.get_future().then(next_one(depth + 1)).wait()
            work.wait()
            return depth

        return callback

    assert begin(queue, lambda: None).get_future().then(next_one(0)).wait() == 4
    assert ran == [0, 1, 2, 3, 4]


def fail(error):
    raise error


def test_errors_go_to_whoever_waits_and_to_the_future_and_the_next_work_runs(queue):
    own = AgreementError("as it is")
    works = [begin(queue, lambda: fail(own), False), begin(queue, lambda: fail(ValueError("strange")), False)]
    last = begin(queue, lambda: None, False)
    futures = [work.get_future() for work in works]
    assert last.wait()
    with pytest.raises(AgreementError, match="as it is"):
        works[0].wait()
    with pytest.raises(CommunicationError, match="ValueError: strange") as caught:
        works[1].wait()
    assert isinstance(caught.value.__cause__, ValueError)
    for work, future in zip(works, futures, strict=True):
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception() is not None
        with pytest.raises(Exception, match=r"as it is|strange"):
            future.wait()


def test_an_interrupt_reaches_the_program_and_the_queue_goes_on(queue):
    work = begin(queue, lambda: fail(KeyboardInterrupt()), False)
    after = begin(queue, lambda: None, False)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    with pytest.raises(CommunicationError, match="KeyboardInterrupt"):
        work.wait()
    assert after.wait()


def test_a_closed_queue_runs_what_was_begun_and_takes_nothing_more():
    before = threading.active_count()
    queue = WorkQueue("closing")
    ran = []
    begin(queue, lambda: ran.append("in the background")).wait()
    begin(queue, lambda: ran.append("last"), False)
    queue.close_and_wait()
    assert ran == ["in the background", "last"]
    assert threading.active_count() == before
    with pytest.raises(CommunicationError, match="destroyed"):
        begin(queue, lambda: None)
    queue.close_and_wait()


def test_a_queue_that_is_closed_while_a_collective_runs_leaves_none_behind():
    """What nobody runs any more would keep its group, and who waits for its future, for ever."""
    queue, runs, may_end = WorkQueue("closing"), threading.Event(), threading.Event()
    first = begin(queue, lambda: runs.set() or may_end.wait(30), False)
    others = [begin(queue, lambda: None, False) for _ in range(2)]
    program = threading.Thread(target=first.wait)
    program.start()
    assert runs.wait(30)
    queue.close_and_wait()
    may_end.set()
    program.join(30)
    assert [work.done for work in others] == [True, True]


# --------------------------------------------------------------------------------------- connections


@pytest.fixture
def connect():
    """A function n -> the ends of n ranks, called 10, 11, ..., connected with each other."""
    made = []

    def make(size, check_elsewhere=None):
        sockets = [{} for _ in range(size)]
        for a, b in itertools.combinations(range(size), 2):
            sockets[a][b], sockets[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ranks = range(10, 10 + size)
        made.extend(Peers(ranks, i, sockets[i], check_elsewhere=check_elsewhere) for i in range(size))
        return made[-size:]

    yield make
    for each in made:
        each.close()


def die(peers):
    """What a process that dies leaves: closed connections."""
    for each in peers._sockets.values():
        each.close()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_exchange_gives_everybody_every_message_by_place(connect, size):
    ranks = connect(size)
    for turn in range(20):
        results = together(
            *(lambda each=each, t=turn: each.exchange(STEP + b"%d %d" % (each.local_rank, t), 10) for each in ranks)
        )
        assert results == [[STEP + b"%d %d" % (place, turn) for place in range(size)]] * size


def test_messages_of_a_rank_that_was_quick_wait_for_their_turn(connect):
    a, b = connect(2)
    a.send(STEP + b"1")
    a.send(STEP + b"2")
    assert b.exchange(STEP, 10)[0] == STEP + b"1"
    assert b.exchange(STEP, 10)[0] == STEP + b"2"


def test_a_rank_that_looks_for_messages_lets_others_have_its_core(connect, monkeypatch):
    """Those that it waits for may need it: here the message comes when the core is given away."""
    a, b = connect(2)
    a._spins = True
    monkeypatch.setattr(peers, "PATIENT_SPIN_SECONDS", 10.0)
    monkeypatch.setattr(peers.os, "sched_yield", lambda: b.send(STEP))
    assert a.exchange(STEP, 10) == [STEP, STEP]


def test_a_rank_that_left_in_good_order_is_missed_only_when_it_is_needed(connect):
    a, b, c = connect(3)
    for each in (a, b):
        each.send(STEP + b"1")
        each.send(STEP + b"2")
    a.leave()
    a.close()
    b_waits = ThreadPoolExecutor(1)
    with b_waits:
        first = b_waits.submit(c.exchange, STEP + b"1", 10)
        assert first.result(10) == [STEP + b"1", STEP + b"1", STEP + b"1"]
        assert c.exchange(STEP + b"2", 10) == [STEP + b"2", STEP + b"2", STEP + b"2"]
    assert error_of(c.exchange, STEP + b"3", 10) == (
        "the process group is aborted: rank 10 has left the process group while others still use it"
    )


def test_looking_up_again_and_again_is_no_loss_of_a_rank_that_left(connect):
    a, b, c = connect(3)
    b.send(STEP)
    b.leave()
    b.close()
    for _ in range(3):
        a.check_alive()
    c.send(STEP)
    assert a.exchange(STEP, 10) == [STEP] * 3
    assert "rank 11 has left the process group while others still use it" in error_of(a.exchange, STEP, 10)


def test_a_rank_that_leaves_while_another_waits_for_a_third_is_no_loss(connect):
    a, b, c = connect(3)
    for each in (a, b):
        each._spins = False
    a.send(STEP + b"1")
    a.send(STEP + b"2")
    a.leave()
    a.close()  # the end of the connection is seen while b waits for c
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(b.exchange, STEP + b"1", 10)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        c.send(STEP + b"1")
        assert waiting.result(10) == [STEP + b"1"] * 3
        c.send(STEP + b"2")
        assert b.exchange(STEP + b"2", 10) == [STEP + b"2"] * 3
    c.send(STEP + b"3")
    assert "rank 10 has left" in error_of(b.exchange, STEP + b"3", 10)


def test_a_rank_that_dies_after_its_part_while_another_waits_for_a_third_is_missed_when_it_is_needed(
    connect, monkeypatch
):
    a, b, c = connect(3)
    for each in (a, b):
        each._spins = False
    read_to_the_end, noticed = b._read_to_the_end, threading.Event()

    def notices(peer):
        message = read_to_the_end(peer)
        noticed.set()
        return message

    monkeypatch.setattr(b, "_read_to_the_end", notices)
    a.send(STEP + b"1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(b.exchange, STEP + b"1", 10)
        die(a)
        assert noticed.wait(10)
        c.send(STEP + b"1")
        assert waiting.result(10) == [STEP + b"1"] * 3
    c.send(STEP + b"2")
    assert error_of(b.exchange, STEP + b"2", 10) == "the process group is aborted: rank 10 has died"


@pytest.mark.parametrize("spins", [True, False])
def test_a_death_is_noticed_while_waiting_for_it_or_for_another(connect, spins):
    for waits_for_it in (True, False):
        a, b, c = connect(3)
        b._spins = spins
        if not waits_for_it:
            a.send(STEP)  # the dead one had done its part
        die(a)
        if waits_for_it:
            c.send(STEP)
        assert error_of(b.exchange, STEP, 10) == "the process group is aborted: rank 10 has died"
        assert "rank 10 has died" in error_of(lambda c=c: [c.exchange(STEP, 10) for _ in range(2)])
        assert "rank 10 has died" in error_of(b.exchange, STEP, 10)  # and it stays so


def test_a_rank_that_is_told_of_an_end_tells_the_others_before_it_goes(connect):
    """Another one may see it go before it hears from the rank that found out."""
    a, b, c = connect(3)
    c._sockets[0].send(MessageKind.ABORT + b"rank 9 has died")
    assert [error_of(each.exchange, STEP, 5) for each in (a, b)] == ["rank 9 has died"] * 2


def test_the_reason_that_another_rank_gives_wins_over_what_is_seen_of_it(connect):
    a, b, c = connect(3)
    b.abort("rank 11 has met a wolf")
    die(a)
    assert error_of(c.exchange, STEP, 10) == "rank 11 has met a wolf"


def test_a_reason_that_is_cut_within_a_character_is_told_all_the_same(connect):
    a, b = connect(2)
    a.abort("é" * LONGEST)  # of two bytes each, behind the one that says what the message is
    assert error_of(b.exchange, STEP, 10).startswith("é" * (LONGEST // 2 - 1))


def test_all_ranks_that_stay_silent_are_named(connect):
    ranks = connect(4)
    ranks[2].send(STEP)
    assert "ranks 11, 13 did not answer within 0.05 s" in error_of(ranks[0].exchange, STEP, 0.05)
    assert "ranks 11, 13 did not answer within 0.05 s" in error_of(ranks[3].exchange, STEP, 10)


def test_a_rank_that_never_reads_is_an_error_and_no_endless_one(connect):
    a, b, _ = connect(3)
    text = error_of(lambda: [a.send(STEP * LONGEST) for _ in range(10_000)])
    assert "does not read its messages" in text
    assert a.reason == text
    assert b.reason is None


def test_leaving_ends_the_wait_of_another_thread(connect):
    a, _ = connect(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(error_of, a.exchange, STEP, 20)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        a.leave()
        assert "rank 10: this process has ended the process group" in waiting.result(10)


def test_a_rank_that_cannot_say_that_it_leaves_stops_waiting_all_the_same(connect, monkeypatch):
    a, b = connect(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(error_of, a.exchange, STEP, 20)
        assert select.select([b._sockets[0]], [], [], 10)[0]  # it has sent, and waits
        monkeypatch.setattr(Peers, "send", lambda *_: fail(OSError(105, "No buffer space available")))
        a.leave()
        assert waiting.result(10) is not None


def test_what_a_rank_sees_when_it_looks_up_ends_its_wait(connect):
    a, _ = connect(2, lambda: fail(CommunicationError("seen elsewhere")))
    assert error_of(a.exchange, STEP, timedelta(days=10).total_seconds()) == "seen elsewhere"


def test_a_timeout_longer_than_the_system_can_count_is_a_long_one(connect):
    a, b = connect(2)
    a._spins = False
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a.exchange, STEP, timedelta(days=1000).total_seconds())
        b.exchange(STEP, timedelta.max.total_seconds())
        assert waiting.result(10) == [STEP, STEP]


def test_memory_is_seen_by_all_and_forgotten_when_it_is_withdrawn(connect):
    ranks = connect(3)
    before = len(os.listdir("/proc/self/fd"))
    pool = StagingPool(ranks[0], 1)
    x = pool.allocate(1000, torch.float32).fill_(1)
    number, _ = pool.locate(x)
    for turn in range(2):
        x.fill_(2 + turn)
        together(*(lambda each=each: each.exchange(STEP, 10) for each in ranks))
        for each in ranks[1:]:
            seen = each.memory(0, number).view(torch.float32)
            assert torch.equal(seen[:1000], x)
            seen[0] = 7
        assert x[0] == 7
    assert len(os.listdir("/proc/self/fd")) == before  # none is kept open for it, on either side
    del x
    pool.allocate(2000, torch.float32)
    pool.announce_freed()
    together(*(lambda each=each: each.exchange(STEP, 10) for each in ranks))
    with pytest.raises(KeyError):
        ranks[1].memory(0, number)


def test_much_memory_may_go_while_nobody_reads(connect):
    a, b = connect(2)
    a.retire_memory(range(5000))
    a.send(STEP)
    assert b.exchange(STEP, 10)[0] == STEP


def test_a_forked_process_does_not_hold_the_connections(connect):
    a, b = connect(2)
    end, start = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(start)
        os.read(end, 1)
        os._exit(0 if a._sockets[1].fileno() == b._sockets[0].fileno() == -1 else 1)
    try:
        die(b)
        assert "rank 11 has died" in error_of(a.exchange, STEP, 5)  # although a process with copies of it lives on
    finally:
        os.close(start)
        os.close(end)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# ------------------------------------------------------------------------------------------- meeting


def close_all(meetings):
    for meeting in meetings:
        for each in meeting.sockets.values():
            each.close()


def test_ranks_meet_those_of_their_host_and_know_of_all():
    store = dist.HashStore()
    meetings = together(*(lambda r=r, h=h: meet(store, r, range(5), h, 10) for r, h in enumerate("baabb")))
    try:
        assert all(meeting.hosts == [[0, 3, 4], [1, 2]] for meeting in meetings)
        for rank, meeting in enumerate(meetings):
            mates = next(host for host in meeting.hosts if rank in host)
            assert sorted(meeting.sockets) == [mate for mate in mates if mate != rank]
            for mate, end in meeting.sockets.items():
                end.send(b"%d to %d" % (rank, mate))
        for rank, meeting in enumerate(meetings):
            for mate, end in meeting.sockets.items():
                assert end.recv(100) == b"%d to %d" % (mate, rank)
    finally:
        close_all(meetings)


def test_the_identity_of_a_host_is_the_same_for_its_processes():
    here = host_identity()
    assert in_child(lambda: int(host_identity() != here)) == 0
