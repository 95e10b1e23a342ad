"""Ranks that die, fail, fall behind or drift apart: every other rank raises, soon, and says which and why.

Ranks are threads where nothing but gradients and errors is looked at.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CommunicationError, OptionError, PeerError
from processes import RankEndedError, in_child, on_processes, run_processes
from programs.ranks import makes_means, on_ranks, replicated
from small_modules import CallInBackward, error_of
from threaded import run_ranks

RAISED = "this rank's own error"


def fail():
    raise KeyError(RAISED)


def leave():
    os._exit(3)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    """Three layers; a function may be called in backward behind the gradients of the last ones."""

    def __init__(self, buffered=0, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(3))
        if buffered:
            self.register_buffer("kept", torch.zeros(buffered))

    def forward(self, x, call=None, behind=1):
        for number, layer in enumerate(self.layers):
            if call is not None and number == len(self.layers) - behind:
                x = CallInBackward.apply(x, call)
            x = layer(x)
        return x.square().sum()


def inputs(rank, seed=0):
    return torch.randn(2, 4, generator=rank.generator(seed))


def mean_gradients(rank, model, seed):
    return makes_means(rank, model, lambda model: model(inputs(rank, seed)))


def raises(call, error, *texts):
    """A call ends with just this error, whose message has the texts."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert all(text in str(caught.value) for text in texts), caught.value


OWN = KeyError, repr(RAISED)


# ---------------------------------------------------------------------------------- backward raises


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-5}])
@pytest.mark.parametrize(("failing", "behind"), [(0, 1), (1, 2)])
@on_ranks(3)
def test_the_others_are_told_and_training_goes_on(rank, failing, behind, options, first):
    """One rank's backward fails, in the first round or later; then training goes on."""
    model = replicated(rank, Net, **options)
    if not first:
        mean_gradients(rank, model, 1)
        model.zero_grad()
    words = f"rank {rank.rank}: backward failed on rank {failing} in round {1 if first else 2};"
    others = PeerError, words, "that rank's own error says why. No gradient has been handed out"
    call, told = (fail, OWN) if rank.rank == failing else (None, others)
    raises(lambda: model(inputs(rank), call, behind).backward(), *told)
    assert [mean_gradients(rank, model, seed) for seed in range(3)] == [True] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])  # these cannot carry the report
@pytest.mark.parametrize(("policy", "value"), [("rank0", 1.0), ("mean", 1.5)])
@pytest.mark.parametrize("size", [3, 100_000])
@on_ranks(2)
def test_the_others_are_told_where_there_are_buffers(rank, size, policy, value, dtype):
    """As above, with buffers that ride, or that take a collective of their own."""
    model = lockstep.replicate(Net(size, dtype), process_group=rank.group, buffer_policy=policy, bucket_cap_mb=1e-5)

    def run(seed, call=None):
        model.zero_grad()
        x = inputs(rank, seed).to(model.layers[0].weight.dtype)
        model(x, call, 2).abs().backward()

    run(0)
    model.kept.fill_(rank.rank + 1.0)
    raised = error_of(lambda: run(1, fail if rank.rank == 1 else None))
    kept, seen = model.kept[0].item(), []
    for seed in (2, 3):
        model.kept.fill_(rank.rank + 1.0)
        run(seed)
        seen.append(model.kept.unique().item())
    equal = all(rank.all_equal(torch.view_as_real(p.grad) if p.is_complex() else p.grad) for p in model.parameters())
    assert (raised, kept) == [(PeerError, 1.0), (KeyError, 2.0)][rank.rank]
    assert (seen, equal) == ([value] * 2, True)


@pytest.mark.parametrize(("failing", "who"), [((0,), "rank 0"), ((0, 1), "2 ranks")])
def test_the_others_are_told_where_there_are_several_modules(failing, who):
    def train(rank):
        one, other = (replicated(rank, Net) for _ in range(2))
        others = PeerError, f"the backward pass failed on {who} before its gradients were reduced"
        call, told = (fail, OWN) if rank.rank in failing else (None, others)
        raises(lambda: (one(inputs(rank), call, 2) + other(inputs(rank))).backward(), *told)
        assert [mean_gradients(rank, module, 1) for module in (one, other)] == [True, True]

    run_ranks(1 + len(failing), train)


@on_ranks(2, group_timeout=2.0)
def test_hooks_that_go_on_failing_on_one_rank_end_in_a_timeout_on_the_others(rank):
    model = replicated(rank, Net)

    def hook(state, bucket):
        if rank.rank == 1:
            raise KeyError(RAISED)
        return bucket.buffer()

    model.register_comm_hook(None, hook)
    told = CommunicationError, "rank 0 of 2: backward() failed: ", "look at the first error of the other ranks"
    raises(lambda: model(inputs(rank)).backward(), *(told, OWN)[rank.rank])


def limited_to(bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.RLIM_INFINITY))


@on_processes(2, backend="shm")
def test_an_allocation_that_fails_is_told(rank):
    """The memory of a bucket cannot be had on one rank, at the end of backward; then it can."""
    model = lockstep.replicate(rank.make(lambda: nn.Linear(700, 700)))
    limited_to(1 << 20 if rank.rank == 1 else resource.RLIM_INFINITY)
    raised = error_of(lambda: model(torch.ones(1, 700)).sum().backward())
    limited_to(resource.RLIM_INFINITY)
    model.zero_grad()
    model(torch.full((1, 700), rank.rank + 1.0)).sum().backward()
    assert (raised, model.weight.grad.unique().item()) == [(PeerError, 1.5), (OSError, 1.5)][rank.rank]


# ---------------------------------------------------------------------------------- ranks that end


HOW = {"exit": (leave, 3), "kill": (be_killed, -signal.SIGKILL), "between": (None, 1)}


def ends(rank, how):
    model = lockstep.replicate(rank.make(Net), bucket_cap_mb=1e-5)
    mean_gradients(rank, model, 0)
    model.zero_grad()
    if how == "between" and rank.rank == 1:
        raise KeyError(RAISED)
    model(inputs(rank), HOW[how][0] if rank.rank == 1 else None, 2).backward()


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_ends_is_an_error_on_the_others(how):
    first, ended, last = run_processes(3, ends, how, errors=True, group_timeout=3.0)
    assert ended.returncode == HOW[how][1]
    assert isinstance(ended.error, KeyError if how == "between" else RankEndedError)
    for rank, outcome in ((0, first), (2, last)):
        assert type(outcome.error) is CommunicationError, outcome
        assert str(outcome.error).startswith(f"rank {rank} of 3: ")
        assert "backward() failed" in str(outcome.error)
        assert "Another rank has ended, was stopped, or did not run the same backward passes" in str(outcome.error)
        assert outcome.returncode == 1


@on_ranks(2, group_timeout=2.0)
def test_a_rank_with_one_backward_less_is_an_error_on_the_others(rank):
    model = replicated(rank, Net)
    for step in range(2):
        model.zero_grad()
        model(inputs(rank, step)).backward()
    if rank.rank == 0:
        told = "rank 0 of 2: backward() failed", "one batch less"
        raises(lambda: model(inputs(rank)).backward(), CommunicationError, *told)


@pytest.mark.parametrize("ahead", [1, 5, 15])
@on_ranks(2)
def test_ranks_in_different_rounds_do_not_mix_their_gradients(rank, ahead):
    model = replicated(rank, Net)
    mean_gradients(rank, model, 0)
    if rank.rank == 1:
        state = lockstep.distributed.training_state_dict(model)
        lockstep.distributed.load_training_state_dict(model, {**state, "round": state["round"] + ahead})
    raises(
        lambda: model(inputs(rank)).backward(),
        PeerError,
        f"rank {rank.rank} is in its synchronised backward number {2 + ahead * rank.rank}",
        f"rank {1 - rank.rank} is {ahead} {('ahead', 'behind')[rank.rank]}",
        "Let every rank run backward for every batch, or use join()",
    )


# ---------------------------------------------------------------------------------- the group


@on_processes(2)
def test_a_group_that_has_been_destroyed(rank):
    model = lockstep.replicate(rank.make(Net))
    mean_gradients(rank, model, 0)
    model.zero_grad()
    rank.all_equal(torch.ones(1))  # all are done with it
    dist.destroy_process_group()
    model(inputs(rank))
    with model.no_sync():
        model(inputs(rank)).backward()
    told = f"rank {rank.rank}: the process group has been destroyed; gradients cannot be synchronised"
    raises(lambda: model(inputs(rank)).backward(), CommunicationError, told, "or run this one under no_sync()")


@on_processes(2)
def test_a_group_that_comes_later_is_waited_for(rank, tmp_path):
    dist.destroy_process_group()
    model = lockstep.replicate(rank.make(Net, seed=rank.rank))
    words = "a replicated module was used before there is a process group; put the training into `with"
    with pytest.raises(CommunicationError, match=words):
        model(inputs(rank))
    store = dist.FileStore(str(tmp_path / "store"), rank.world)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world, timeout=timedelta(seconds=60))
    model(inputs(rank)).backward()
    lockstep.check_in_sync(model)
    assert all(rank.all_equal(parameter.grad) for parameter in model.parameters())


@on_processes(3)
def test_a_rank_outside_of_the_group_is_told(rank, tmp_path):
    group = dist.new_group([0, 1])
    if rank.rank == 2:
        for call in (
            lambda: lockstep.replicate(Net(), process_group=group),
            lambda: lockstep.replicate(Net(), process_group=group, shares=2),
            lambda: lockstep.DistributedDataParallel(Net(), process_group=group),
            lambda: lockstep.mean(torch.ones(1), group=group),
            lambda: lockstep.save(tmp_path, group=group),
            lambda: lockstep.watch(group),
        ):
            with pytest.raises(CommunicationError, match="this process is not in the process group that it was given"):
                call()
        with pytest.raises(OptionError, match="expected a process group, got str"):
            lockstep.replicate(Net(), process_group="gloo")
    else:
        model = lockstep.replicate(rank.make(Net), process_group=group)
        model(inputs(rank)).backward()
        lockstep.check_in_sync(model)


# ---------------------------------------------------------------------------------- forks


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_processes(2, "backend")
def test_a_child_that_runs_backward_is_told_and_does_not_take_its_parents_place(rank):
    """A child that runs backward does not take its parent's place; neither does one that replicates."""
    model = lockstep.replicate(nn.Linear(3, 1))
    hooked = lockstep.replicate(nn.Linear(3, 1), process_group=dist.new_group())
    asked = []
    hooked.register_comm_hook(None, lambda state, bucket: asked.append(1) or dist.all_reduce(bucket.buffer()))
    parent = os.getpid()

    def backward(network):
        network(torch.ones(2, 3)).sum().backward()

    def child():
        told = (
            f"process {os.getpid()} cannot communicate: it was forked from process {parent}, which is rank {rank.rank}"
        )
        for call in (lambda: backward(model), lambda: backward(hooked), lambda: lockstep.replicate(nn.Linear(2, 2))):
            with pytest.raises(CommunicationError, match=told):
                call()
        with model.no_sync():
            backward(model)
        return 3 + len(asked)

    code = in_child(child)
    model.zero_grad()
    model((rank.rank + 1) * torch.ones(2, 3)).sum().backward()
    assert (code, model.weight.grad.tolist()) == (3, [[3.0, 3.0, 3.0]])


@pytest.mark.around
def test_a_forked_process_that_collects_garbage_at_once_destroys_no_group_of_its_parent():
    """Its copies of groups have no threads; a function of another library may be the first that runs in it."""
    program = """
import gc, os, signal, sys
gc.disable()
os.register_at_fork(after_in_child=gc.collect)

from datetime import timedelta

import torch, torch.distributed as dist, lockstep
from lockstep.shm.gloo import make_gloo_group

cycle = []
cycle.append(cycle)
cycle.append(lockstep.replicate(torch.nn.Linear(1, 1), process_group=dist.ProcessGroupGloo(dist.HashStore(), 0, 1)))
cycle.append(make_gloo_group(dist.HashStore(), 0, 1, timedelta(seconds=5), "127.0.0.1"))
del cycle
child = os.fork()
if not child:
    os._exit(7)
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
signal.alarm(20)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr
