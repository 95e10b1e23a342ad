"""What goes wrong on one rank's GPU, or only there, and what backends have not: every rank ends with an error that
names it, or is right.

Two ranks over NCCL where it allows them on the GPUs that there are, else over Gloo. Ranks are processes.
"""

from __future__ import annotations

import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import LockstepError, OutOfSyncError, PeerError, PeerFailure
from one_gpu import LIMIT, NCCL, allows_several_ranks, place_of
from processes import on_processes, run_processes

QUICK = 30.0
"""Seconds within which all ranks have to end: far less than a time-out of NCCL."""


@pytest.fixture(params=[NCCL, "gloo"])
def backend(request, home):
    if request.param == NCCL and not (home.type == "cuda" and allows_several_ranks()):
        pytest.skip("NCCL allows several ranks on one GPU from 2.30 on")
    return request.param


def network():
    return nn.Sequential(nn.Embedding(10, 32), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))


def train(rank, what, steps=6):
    """Train in a session; rank 1 does something else in step 3. Returns the seconds from there to its end."""
    device = place_of(rank)
    began = time.monotonic()
    try:
        with lockstep.session(device=str(device)) as run:
            model = lockstep.replicate(rank.make(network).to(device))
            optimizer = torch.optim.AdamW(model.parameters())
            for step in range(steps):
                ids = torch.randint(10, (4, 2), device=device)
                began = time.monotonic()
                if step == 3 and rank.rank == 1:
                    ids = what(ids, model, run)
                if ids is None:
                    break
                optimizer.zero_grad()
                model(ids).square().mean().backward()
                optimizer.step()
    finally:
        seconds = time.monotonic() - began
        print(f"rank {rank.rank} ended after {seconds:.1f} s")
        assert seconds < QUICK
    return seconds


def index_beyond_the_table(ids, model, run):
    """A kernel asserts: from then on every call of CUDA in this process fails."""
    return ids + 10


def too_large(ids, model, run):
    torch.empty(1 << 50, device=ids.device)
    return ids


def fails_in_backward(ids, model, run):
    def fail(gradient):
        raise ValueError("intended")

    model[2].weight.register_hook(fail)
    return ids


def asserts_in_backward(ids, model, run):
    """The kernel that asserts is one of backward's."""

    def gather(gradient):
        return gradient.flatten()[torch.full_like(gradient, gradient.numel(), dtype=torch.long).flatten()].view_as(
            gradient
        )

    model[2].weight.register_hook(gather)
    return ids


def leaves(ids, model, run):
    raise RuntimeError("intended")


def goes_on_alone(ids, model, run):
    """A mean that only this rank asks for."""
    lockstep.mean(model(ids).sum())
    return ids


def returns_early(ids, model, run):
    return None


def sums_alone(ids, model, run):
    """A collective of the program's own, whose result is asked for at once."""
    total = torch.ones(3, device=ids.device)
    dist.all_reduce(total, group=run.group)
    print(total.sum().item())
    return ids


def sums_alone_and_goes_on(ids, model, run):
    """The same, without a look at the result: over NCCL all ranks come through this backward on the host."""
    dist.all_reduce(torch.ones(3, device=ids.device), group=run.group)
    return ids


def checks_alone(ids, model, run):
    lockstep.check_in_sync(model)
    return ids


WRONG = {
    "index": (index_beyond_the_table, RuntimeError, "device-side assert"),
    "memory": (too_large, RuntimeError, "out of memory|allocate|Invalid"),
    "backward": (fails_in_backward, ValueError, "intended"),
    "assert in backward": (asserts_in_backward, RuntimeError, "device-side assert"),
    "exception": (leaves, RuntimeError, "intended"),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_rank_that_fails_is_named(gpu, backend, what):
    wrong, kind, words = WRONG[what]
    other, failed = run_processes(2, train, wrong, timeout=LIMIT, backend=backend, errors=True)
    assert isinstance(failed.error, kind), failed
    assert re.search(words, f"{failed.error} {failed.stderr}"), failed  # NCCL's watchdog may end the process itself
    assert isinstance(other.error, PeerError), other
    assert "rank 1" in str(other.error)
    assert "CUDA error" not in str(other.error) or "at or before step" in str(other.error)
    assert other.error.rank == 1


@pytest.mark.parametrize("wrong", [goes_on_alone, checks_alone], ids=lambda each: each.__name__)
def test_what_only_one_rank_calls_is_named(home, backend, wrong):
    for ended in run_processes(2, train, wrong, timeout=LIMIT, backend=backend, errors=True):
        assert isinstance(ended.error, LockstepError), (ended, ended.stderr)
        assert any(name in str(ended.error) for name in ("mean", "check_in_sync", "backward")), ended.error


def test_a_rank_that_leaves_early_ends(gpu, backend):
    """Though NCCL waits, when it destroys a communicator, for ranks that have aborted theirs."""
    other, left = run_processes(2, train, returns_early, timeout=LIMIT, backend=backend, errors=True)
    assert left.returncode == 0, left
    assert isinstance(other.error, PeerFailure), other
    assert "rank 1 has left the training in good order" in str(other.error)


@pytest.mark.parametrize("wrong", [sums_alone, sums_alone_and_goes_on], ids=lambda each: each.__name__)
def test_a_collective_of_the_program_on_one_rank_is_named_on_all(gpu, wrong):
    """A rank that never comes back from the GPU is ended, with the same words in its log."""
    if not allows_several_ranks():
        pytest.skip("NCCL allows several ranks on one GPU from 2.30 on")
    for ended in run_processes(2, train, wrong, timeout=LIMIT, backend=NCCL, errors=True):
        assert ended.error is not None, ended
        text = f"{ended.error} {ended.stderr}"
        assert isinstance(ended.error, LockstepError) or ended.returncode == -signal.SIGALRM, ended
        assert "wait for each other in different collectives" in text, ended


@pytest.mark.usefixtures("gpu")
@on_processes(2, "backend", timeout=LIMIT)
def test_a_batch_that_is_too_large_for_one_rank_is_left_out_on_all(rank):
    """A batch that does not fit into one rank's memory is left out on all."""
    device = place_of(rank)
    with lockstep.session(device=str(device)):
        model = lockstep.replicate(rank.make(network).to(device))
        optimizer, left_out = torch.optim.SGD(model.parameters(), 0.1), []
        for step in range(5):
            optimizer.zero_grad()
            with lockstep.loop.skip_on(torch.OutOfMemoryError):
                ids = torch.randint(10, (4, 2), device=device)
                if step == 2 and rank.rank == 1:
                    torch.empty(1 << 42, device=device)
                model(ids).square().mean().backward()
            if lockstep.loop.skipped(model):
                left_out.append(step)
                continue
            optimizer.step()
        lockstep.check_in_sync(model)
    assert left_out == [2]


@on_processes(2, "backend", timeout=LIMIT)
def test_rows_of_all_ranks(rank):
    """Sparse gradients of as many rows as each rank has, which are dense when rank 1 has a penalty on the weight."""
    device = place_of(rank)
    table = lockstep.replicate(rank.make(lambda: nn.Embedding(10, 3, sparse=True)).to(device))
    seen = []
    for penalty in (0.0, 0.0, 1.0):
        table.zero_grad()
        loss = table(torch.arange(2 + 3 * rank.rank, device=device)).sum()
        (loss + table.weight.sum() if penalty and rank.rank else loss).backward()
        seen.append((table.weight.grad.is_sparse, table.weight.grad.to_dense()[:, 0].tolist()))
    sparse, dense = [1.0] * 2 + [0.5] * 3 + [0.0] * 5, [1.5] * 2 + [1.0] * 3 + [0.5] * 5
    assert seen == [(True, sparse)] * 2 + [(False, dense)]


@on_processes(2, "backend", timeout=LIMIT)
def test_weights_that_differ_are_named(rank):
    device = place_of(rank)
    model = lockstep.replicate(rank.make(network).to(device))
    for _ in range(3):
        model(torch.ones(4, 2, dtype=torch.long, device=device)).square().mean().backward()
    with torch.no_grad():
        model[2].weight[3, 7] += rank.rank
    with pytest.raises(OutOfSyncError, match=r"2\.weight"):
        lockstep.check_in_sync(model)


def misplaced(rank):
    """The batch is on the CPU, the module on the GPU."""
    device = place_of(rank)
    with lockstep.session(device=str(device)):
        model = lockstep.replicate(rank.make(network).to(device))
        model(torch.ones(4, 2, dtype=torch.long, device="cpu" if rank.rank else device)).sum().backward()


def test_a_batch_on_the_cpu_fails_by_name(gpu, backend):
    other, failed = run_processes(2, misplaced, timeout=LIMIT, backend=backend, errors=True)
    assert "same device" in str(failed.error)
    assert isinstance(other.error, PeerError | PeerFailure)
    assert other.error.rank == 1
