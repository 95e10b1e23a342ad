"""Nothing waits too little: wrong waits show as wrong values, because the streams in question are kept busy."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import lockstep
from lockstep._base.devices import on_streams, side_stream
from lockstep.local import ReplicaSet, broadcast, comm, gather, parallel_apply, reduce_add_coalesced, replicate, scatter

ROWS, COLUMNS = 64, 1 << 12


def pinned(value: float) -> torch.Tensor:
    return torch.full((ROWS, COLUMNS), value).pin_memory()


class Where(nn.Module):
    """Notes the current stream and device, and gives its input back."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.device.index, torch.cuda.current_stream(x.device).cuda_stream))
        assert torch.cuda.current_device() == x.device.index
        return x + 0


def test_work_on_a_chunk_waits_for_its_copy(gpu, busy):
    # The copies queue behind a sleep on the side stream, into memory that was just given back full of NaN.
    side = side_stream(gpu)
    with side:
        poison = torch.full((ROWS, COLUMNS), float("nan"), device=gpu)
    x, room = pinned(3.0), torch.empty(4 * ROWS, COLUMNS, device=gpu)  # whatever allocates, and may wait, does it now
    torch.cuda.synchronize()
    del poison, room
    busy(side)
    chunks = scatter(x, [gpu, gpu])
    copies = [chunk + 0 for chunk in chunks]
    assert not side.query(), "the sleep was too short to show anything"
    for copy in copies:
        torch.testing.assert_close(copy.cpu(), torch.full((ROWS // 2, COLUMNS), 3.0))


def test_scattering_does_not_wait_for_the_compute_stream(gpu, busy):
    x = pinned(1.0)
    scatter(x, [gpu, gpu])
    torch.cuda.synchronize()
    busy()
    scatter(x, [gpu, gpu])
    done = side_stream(gpu).record_event()
    done.synchronize()
    assert not torch.cuda.current_stream(gpu).query(), "the copies came after the work that was queued before them"
    torch.cuda.synchronize()


def test_a_chunk_is_not_reused_while_the_compute_stream_reads_it(gpu, busy):
    ones, twos, room = pinned(1.0), pinned(2.0), torch.empty(4 * ROWS, COLUMNS, device=gpu)
    torch.cuda.synchronize()
    del room
    (first,) = scatter(ones, [gpu])
    busy()
    copy = first + 0
    del first  # its memory belongs to the side stream: only record_stream keeps it until the sum has run
    later = [scatter(twos, [gpu]) for _ in range(4)]
    torch.testing.assert_close(copy.cpu(), torch.full((ROWS, COLUMNS), 1.0))
    del later


def test_threads_that_scatter_at_once_keep_their_streams(gpu):
    lost = []

    def scatter_often() -> None:
        mine, x = torch.cuda.Stream(gpu), pinned(1.0)
        with on_streams([mine]):
            for _ in range(100):
                scatter(x, [gpu, gpu])
                if torch.cuda.current_stream(gpu) != mine:
                    lost.append(threading.current_thread().name)
                    return

    threads = [threading.Thread(target=scatter_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost


def test_scattering_to_other_gpus_makes_no_context_on_the_current_one():
    program = (
        "import torch, lockstep.local as local\n"
        "local.scatter(torch.ones(4), [1, 1])\n"
        "assert not torch._C._cuda_hasPrimaryContext(0)"
    )
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("only one CUDA device")
    subprocess.run([sys.executable, "-c", program], check=True)


def test_workers_run_on_the_callers_streams(gpu):
    mine = torch.cuda.Stream(gpu)
    modules = [Where(), Where()]
    x = torch.ones(2, device=gpu)
    with torch.cuda.stream(mine):
        parallel_apply(modules, [x, x], devices=[gpu, gpu])
    mine.synchronize()
    assert [m.seen for m in modules] == [[(0, mine.cuda_stream)]] * 2
    parallel_apply(modules, [x, x], devices=[gpu, gpu])
    default = torch.cuda.default_stream(gpu).cuda_stream
    assert [m.seen[1] for m in modules] == [(0, default)] * 2, "a worker kept the stream of the call before"


def test_workers_run_on_the_callers_stream_of_each_gpu(gpus):
    streams = [torch.cuda.Stream(device) for device in gpus]
    modules = [Where() for _ in gpus]
    inputs = [torch.ones(2, device=device) for device in gpus]
    before = [torch.cuda.current_stream(device) for device in gpus]
    torch.cuda.synchronize()
    try:
        for stream in streams:
            torch.cuda.set_stream(stream)
        torch.cuda.set_device(gpus[0])
        parallel_apply(modules, inputs, devices=gpus)
    finally:
        for stream in before:
            torch.cuda.set_stream(stream)
        torch.cuda.set_device(gpus[0])
    assert [m.seen for m in modules] == [[(d.index, s.cuda_stream)] for d, s in zip(gpus, streams, strict=True)]
    torch.cuda.synchronize()


def test_workers_forget_the_streams_of_an_earlier_call(gpus):
    def of_last(_: torch.Tensor) -> int:
        return torch.cuda.current_stream(gpus[-1]).cuda_stream

    x = torch.ones(2, device=gpus[0])
    with on_streams([torch.cuda.Stream(gpus[-1])]):
        parallel_apply([torch.neg] * len(gpus), [x.to(device) for device in gpus], devices=gpus)
    default = torch.cuda.default_stream(gpus[-1]).cuda_stream
    assert parallel_apply([of_last, of_last], [x, x.cpu()]) == [default] * 2


def test_inputs_made_late_on_the_callers_stream(gpu, busy):
    mine = torch.cuda.Stream(gpu)
    network = nn.Linear(4, 4).to(gpu)
    parallel = lockstep.DataParallel(network, [gpu, gpu])
    with torch.no_grad():
        expected = network(torch.full((8, 4), 5.0, device=gpu))
        parallel(torch.zeros(8, 4, device=gpu))
    torch.cuda.synchronize()
    with torch.cuda.stream(mine), torch.no_grad():
        x = torch.zeros(8, 4, device=gpu)
        busy(mine)
        x += 5
        y = parallel(x)
    mine.synchronize()
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_refresh_on_another_stream_sees_updates_queued_there(gpu, busy, persistent):
    mine = torch.cuda.Stream(gpu)
    network = nn.Linear(64, 64).to(gpu)
    x = torch.ones(2, 64, device=gpu)
    replicas = ReplicaSet(network, [gpu, gpu])
    replicas.refresh()
    torch.cuda.synchronize()
    with torch.cuda.stream(mine), torch.no_grad():
        busy(mine)
        network.weight.fill_(1.0)
        network.bias.fill_(2.0)
        current = replicas.refresh() if persistent else replicate(network, [gpu, gpu])
        outputs = [replica(x) for replica in current]
    mine.synchronize()
    for output in outputs:
        torch.testing.assert_close(output, torch.full_like(output, 66.0))


def test_a_transfer_to_other_gpus_waits_for_updates(gpus, busy):
    network = nn.Linear(64, 64).to(gpus[0])
    replicas = ReplicaSet(network, gpus)
    replicas.refresh()
    torch.cuda.synchronize()
    with torch.no_grad():
        busy()
        network.weight.fill_(1.0)
        network.bias.fill_(2.0)
        for replica, device in zip(replicas.refresh(), gpus, strict=True):
            output = replica(torch.ones(2, 64, device=device))
            torch.testing.assert_close(output, torch.full_like(output, 66.0))


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_the_host_does_not_wait_for_any_gpu_in_forward(gpus, busy, grad):
    parallel, x = lockstep.DataParallel(nn.Linear(64, 64).to(gpus[0]), gpus), torch.ones(64, 64, device=gpus[0])
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            parallel(x)
        for device in gpus:
            torch.cuda.synchronize(device)
        busy()
        parallel(x)
        assert not torch.cuda.current_stream(gpus[0]).query(), "the sleep was too short, or forward has waited"


def test_a_tree_of_copies_waits_on_every_branch(gpus, busy):
    targets = [torch.zeros(ROWS, COLUMNS, device=device) for device in gpus[1:]]
    source = torch.zeros(ROWS, COLUMNS, device=gpus[0])
    comm.fill_all(targets, source)
    for device in gpus:
        torch.cuda.synchronize(device)
        busy(device=device)
    source += 3
    comm.fill_all(targets, source)
    sums = [target + 1 for target in targets]
    for total in sums:
        torch.testing.assert_close(total.cpu(), torch.full((ROWS, COLUMNS), 4.0))


def test_training_on_another_stream(gpu, busy, exact):
    torch.manual_seed(1)
    one, many = nn.Linear(8, 8).to(gpu), nn.Linear(8, 8).to(gpu)
    many.load_state_dict(one.state_dict())
    parallel = lockstep.DataParallel(many, [gpu, gpu])
    x, y = torch.randn(3, 10, 8).pin_memory(), torch.randn(3, 10, 8)
    mine = torch.cuda.Stream(gpu)
    mine.wait_stream(torch.cuda.current_stream(gpu))
    for number in range(3):  # the replicas' edges are made on one stream, and used on both in turn
        nn.functional.mse_loss(one(x[number].to(gpu)), y[number].to(gpu)).backward()
        stream = mine if number != 1 else torch.cuda.current_stream(gpu)
        with torch.cuda.stream(stream):
            busy(stream)
            loss = nn.functional.mse_loss(parallel(x[number]), y[number].to(gpu))
            busy(stream)
            loss.backward()
            del loss  # its graph would keep the accumulators of its stream for the next step
        if stream is mine:
            torch.cuda.current_stream(gpu).wait_stream(mine)
        else:
            mine.wait_stream(stream)
    torch.testing.assert_close(many.weight.grad, one.weight.grad)
    torch.testing.assert_close(many.bias.grad, one.bias.grad)


def test_a_change_of_stream_between_steps_is_followed(gpu, recwarn):
    parallel = lockstep.DataParallel(nn.Linear(8, 8).to(gpu), [gpu, gpu])
    x = torch.ones(4, 8, device=gpu)
    parallel(x).sum().backward()
    torch.cuda.synchronize()
    mine = torch.cuda.Stream(gpu)
    with torch.cuda.stream(mine):
        parallel.step(torch.sum, x)
    mine.synchronize()
    assert not [w for w in recwarn if "AccumulateGrad" in str(w.message)]


def test_outputs_gathered_on_the_host_are_there(gpu, busy):
    busy()
    late = torch.full((ROWS, COLUMNS), 1.0, device=gpu) + 1
    assert torch.equal(gather([late, late], "cpu"), torch.full((2 * ROWS, COLUMNS), 2.0))
    busy()
    (sums,) = reduce_add_coalesced([[late + 1], [late]], "cpu")
    assert torch.equal(sums, torch.full((ROWS, COLUMNS), 5.0))


def test_copies_among_gpus_wait_on_both_sides(gpus, busy):
    busy()
    late = torch.full((ROWS, COLUMNS), 1.0, device=gpus[0]) + 1
    copies = broadcast(late, gpus)
    busy(device=gpus[1])
    terms = [copy * 2 for copy in copies]
    total = reduce_add_coalesced([[term] for term in terms], gpus[0])[0]
    torch.testing.assert_close(total, torch.full((ROWS, COLUMNS), 4.0 * len(gpus), device=gpus[0]))


@pytest.mark.parametrize("mine", [True, False])
def test_training_on_a_stream_of_each_gpu(gpus, busy, exact, recwarn, mine):
    torch.manual_seed(1)
    one, many = nn.Linear(8, 8).to(gpus[0]), nn.Linear(8, 8).to(gpus[0])
    many.load_state_dict(one.state_dict())
    parallel = lockstep.DataParallel(many, gpus)
    x = torch.randn(4 * len(gpus), 8, device=gpus[0])
    one(x).square().sum().backward()
    streams = [torch.cuda.Stream(device) if mine else torch.cuda.current_stream(device) for device in gpus]
    for device in gpus:
        torch.cuda.synchronize(device)
    with on_streams(streams):
        loss = parallel(x).square().sum()
        for stream, device in zip(streams, gpus, strict=True):
            busy(stream, device)
        loss.backward()
        grads = [p.grad.clone() for p in many.parameters()]
        streams[0].synchronize()
    for grad, parameter in zip(grads, one.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)
    assert not [w for w in recwarn if "AccumulateGrad" in str(w.message)]
