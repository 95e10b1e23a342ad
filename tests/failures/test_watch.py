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
from lockstep.failures import channel
from lockstep.session import watch
from lockstep.session.watch import forget_failed_passes
from processes import on_processes, run_processes


def waits_by_itself(rank, folder, backend, own_group):
    """Rank 1 fails, and its process lives on until the others have raised; they wait for it in ``all_reduce``."""
    survivors = dist.new_group([0, 2], backend="gloo")
    group = dist.new_group(backend=backend) if own_group else dist.group.WORLD
    raised = None
    try:
        with lockstep.watch(group):
            dist.all_reduce(torch.ones(3), group=group)
            if rank.rank == 1:
                raise ValueError("of rank 1")
            dist.all_reduce(torch.ones(3), group=group)
    except (ValueError, lockstep.errors.PeerFailure) as error:
        raised = error
    if rank.rank == 1:
        for other in (0, 2):
            os.close(os.open(folder / f"{other} has raised", os.O_RDONLY))
        return type(raised), ""
    values = torch.ones(3)
    dist.all_reduce(values, group=survivors)
    os.close(os.open(folder / f"{rank.rank} has raised", os.O_WRONLY))
    return type(raised), str(raised), raised.rank, values.tolist()


@pytest.mark.parametrize("own_group", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_collective_of_the_program_ends_when_a_peer_fails_and_other_groups_go_on(tmp_path, backend, own_group):
    for rank in (0, 2):
        os.mkfifo(tmp_path / f"{rank} has raised")
    first, failed, last = run_processes(
        3, waits_by_itself, tmp_path, backend, own_group, backend=backend, group_timeout=600.0
    )
    assert failed == (ValueError, "")
    for rank, (kind, message, named, values) in ((0, first), (2, last)):
        assert kind is lockstep.errors.PeerFailure
        assert message.startswith(f"rank {rank} stops, because rank 1 failed")
        assert "ValueError: of rank 1" in message
        assert named == 1
        assert values == [2.0] * 3


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


def one_step_more(rank):
    model = lockstep.replicate(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with lockstep.watch():
            for _ in range(3):
                model(torch.ones(1, 1)).sum().backward()
                if rank.rank == 1:
                    optimizer.step()
    except lockstep.errors.PeerError as error:
        return type(error), str(error).partition(":")[0], "ranks 0 and 1 are not in the same step" in str(error)


def test_what_all_ranks_raise_is_no_waiting_in_vain():
    """The first one tells the other of its error, which has the same one."""
    kinds, texts, named = zip(*run_processes(2, one_step_more), strict=True)
    assert named == (True, True)
    assert set(kinds) <= {lockstep.errors.PeerError, lockstep.errors.PeerFailure}
    for here, (kind, text) in enumerate(zip(kinds, texts, strict=True)):
        told = rf"rank {here} stops, because rank {1 - here} failed( .*,)? in backward"
        assert re.fullmatch(told if kind is lockstep.errors.PeerFailure else f"rank {here}", text)


def comes_alone(rank):
    if rank.rank == 1:
        os._exit(1)
    with pytest.raises(lockstep.errors.CommunicationError, match=r"^rank 1 of 2 did not come within 2 s"):
        lockstep.watch()


def test_a_rank_that_ends_before_the_watch_is_named_after_the_time_out_of_the_group():
    first, _ = run_processes(2, comes_alone, group_timeout=2.0, errors=True)
    assert first.error is None


def fail(_):
    raise ValueError


@on_processes(2)
def test_a_watch_that_cannot_begin_is_an_error(rank):
    watch._find_connections_of_gloo = lambda group, connections: fail(group)
    with pytest.raises((ValueError, lockstep.errors.PeerFailure)):
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
