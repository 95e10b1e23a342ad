"""watch() over a group that is there already: the program's own collectives end with the first failure, too."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import CommunicationError, PeerError, PeerFailure
from lockstep.failures import channel
from lockstep.session import watch
from lockstep.session.watch import forget_failed_passes
from processes import on_processes, run_processes


@pytest.fixture
def have_raised(tmp_path):
    """Pipes, by rank: each end of one waits for the other."""
    pipes = {rank: tmp_path / f"{rank} has raised" for rank in (0, 2)}
    for each in pipes.values():
        os.mkfifo(each)
    return pipes


@pytest.mark.parametrize("own_group", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_processes(3, "backend", group_timeout=600.0)
def test_a_collective_of_the_program_ends_when_a_peer_fails_and_other_groups_go_on(
    rank, have_raised, backend, own_group
):
    """Rank 1 fails, and its process lives on until the others have raised; they wait for it in ``all_reduce``."""
    survivors = dist.new_group([0, 2], backend="gloo")
    group = dist.new_group(backend=backend) if own_group else dist.group.WORLD
    told = rf"^rank {rank.rank} stops, because rank 1 failed.*ValueError: of rank 1"
    error, words = (ValueError, "^of rank 1") if rank.rank == 1 else (PeerFailure, told)
    with pytest.raises(error, match=words) as raised, lockstep.watch(group):
        dist.all_reduce(torch.ones(3), group=group)
        if rank.rank == 1:
            raise ValueError("of rank 1")
        dist.all_reduce(torch.ones(3), group=group)
    if rank.rank == 1:
        for pipe in have_raised.values():
            os.close(os.open(pipe, os.O_RDONLY))
        return
    assert raised.value.rank == 1
    values = torch.ones(3)
    dist.all_reduce(values, group=survivors)
    assert values.tolist() == [2.0] * 3
    os.close(os.open(have_raised[rank.rank], os.O_WRONLY))


@on_processes(2)
def test_the_group_goes_on_after_a_watch_in_which_nobody_failed(rank):
    """Rank 1 is done with the watch at once, and rank 0 long after that; the group belongs to the program."""
    watch.LEFT_SECONDS = channel.LEFT_SECONDS = 0.2
    with lockstep.watch():
        if rank.rank == 0:
            time.sleep(0.5)
    values = torch.ones(1)
    dist.all_reduce(values)
    assert values.item() == 2.0


@on_processes(2)
def test_what_all_ranks_raise_is_no_waiting_in_vain(rank):
    """The first one tells the other of its error, which has the same one."""
    model = lockstep.replicate(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = pytest.raises((PeerError, PeerFailure), match="ranks 0 and 1 are not in the same step")
    with told as raised, lockstep.watch():
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
            if rank.rank == 1:
                optimizer.step()
    by_the_other = rf"rank {rank.rank} stops, because rank {1 - rank.rank} failed( .*,)? in backward"
    begin = {PeerError: f"rank {rank.rank}", PeerFailure: by_the_other}[type(raised.value)]
    assert re.fullmatch(begin, str(raised.value).partition(":")[0])


@pytest.mark.parametrize("where", ["forward", "training"])
@on_processes(2)
def test_an_error_between_forward_and_backward_is_none_in_forward(rank, where):
    model = lockstep.replicate(torch.nn.Linear(1, 1))
    if where == "forward":
        model.register_forward_pre_hook(lambda *_: 1 // (1 - rank.rank) and None)
    told = PeerFailure, f"rank 1 failed in {where}: ZeroDivisionError"
    error, words = told if rank.rank == 0 else (ZeroDivisionError, "by zero")
    with pytest.raises(error, match=words), lockstep.watch():
        out = model(torch.ones(1, 1))
        (out / (1 // (1 - rank.rank))).sum().backward()


def comes_alone(rank):
    channel.START_UP_SECONDS = 0.1  # nobody reads its store any more
    if rank.rank == 1:
        os._exit(1)
    with pytest.raises(CommunicationError, match=r"^rank 1 of 2 did not come within 2 s"):
        lockstep.watch()


def test_a_rank_that_ends_before_the_watch_is_named_after_the_time_out_of_the_group():
    first, _ = run_processes(2, comes_alone, group_timeout=2.0, errors=True)
    assert first.error is None


def fail(_):
    raise ValueError


@on_processes(2)
def test_a_watch_that_cannot_begin_is_an_error(rank):
    watch._find_connections_of_gloo = lambda group, connections: fail(group)
    with pytest.raises((ValueError, PeerFailure)):
        lockstep.watch()


def failed_pass():
    """Return what a hook refers to that a failed pass was about to call."""
    kept = torch.ones(1)
    weight = torch.ones(2, 2, requires_grad=True)
    weight.register_post_accumulate_grad_hook(fail)
    hidden = torch.ones(2, 2, requires_grad=True).relu()
    hidden.register_hook(lambda _, kept=kept: None)
    with contextlib.suppress(ValueError):
        (hidden @ weight).sum().backward()
    return weakref.ref(kept)


def test_what_a_failed_pass_has_left_in_the_engine_goes_with_the_watch():
    kept = failed_pass()
    gc.collect()
    assert kept() is not None  # else nothing has to be done any more
    forget_failed_passes()
    assert kept() is None
