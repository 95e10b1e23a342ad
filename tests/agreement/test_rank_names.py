"""Messages name ranks as ranks of the default group, also where a group has only some of them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.buckets.gradient_buckets import _check_all as check_all
from lockstep.errors import (
    AgreementError,
    CommunicationError,
    NotReplicableError,
    OptionError,
    OutOfSyncError,
    PeerError,
)
from lockstep.phases import Phases
from processes import run_processes
from programs.networks import Applying
from small_modules import fails_in_backward

MEMBERS = [1, 2]


def two_layers(width=4):
    forward = lambda m, x: m.last(m.first(x)).square().sum()  # noqa: E731
    return Applying(forward, (), first=nn.Linear(4, width), last=nn.Linear(width, 4))


def net(rank, group):
    return lockstep.replicate(rank.make(two_layers), process_group=group)


def batch():
    return torch.ones(2, 4)


def other_shape(rank, group):
    lockstep.replicate(two_layers(4 if rank.rank == 1 else 5), process_group=group)


def other_strides(rank, group):
    model = two_layers()
    if rank.rank == 2:
        model.first.weight.data = model.first.weight.data.t().contiguous().t()
    lockstep.replicate(model, process_group=group)


def other_names(rank, group):
    lockstep.replicate(nn.ModuleDict({"a" if rank.rank == 1 else "b": nn.Linear(2, 2)}), process_group=group)


def one_layer_less(rank, group):
    lockstep.replicate(nn.ModuleList(nn.Linear(2, 2) for _ in range(3 - rank.rank)), process_group=group)


def not_replicable(rank, group):
    lockstep.replicate(two_layers() if rank.rank == 1 else nn.EmbeddingBag(4, 2, max_norm=1.0), process_group=group)


def failed_backward(rank, group, modules=1):
    models = [net(rank, group) for _ in range(modules)]
    loss = sum(model(batch()) for model in models)
    fails_in_backward(loss, rank.rank == 2, KeyError).backward()


def failed_backward_of_two_modules(rank, group):
    failed_backward(rank, group, modules=2)


def past_forward(rank, group):
    model = net(rank, group)
    (model(batch()) if rank.rank == 1 else model.first(batch()).sum()).backward()


def weight_missing(rank, group):
    model = net(rank, group)
    if rank.rank == 1:
        with lockstep.accumulate(model, weight=2):
            model(batch()).backward()
    else:
        model(batch()).backward()


def out_of_sync(rank, group):
    model = net(rank, group)
    with torch.no_grad():
        model.first.weight.add_(rank.rank)
    lockstep.check_in_sync(model)


def new_values(rank, group):
    model = net(rank, group)
    model(batch()).backward()
    model.last = nn.Linear(4, 4)
    nn.init.constant_(model.last.weight, rank.rank)
    nn.init.constant_(model.last.bias, 0)
    model(batch()).backward()


def new_on_one_rank(rank, group):
    model = net(rank, group)
    model(batch()).backward()
    if rank.rank == 2:
        model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    model(batch()).backward()


def local_step(rank, group):
    model = net(rank, group)
    model.set_requires_gradient_sync(False)
    model(batch()).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def destroyed(rank, group):
    model = net(rank, group)
    model(batch()).backward()
    dist.destroy_process_group(group)
    model(batch()).backward()


def failed_collective(rank, group):
    raise Collectives(group, Phases()).failure("all_reduce, gradients", RuntimeError("Connection reset"))


def late_gradient_not_put_together(rank, group):
    check_all(KeyError() if rank.rank == 2 else None, Collectives(group, Phases()))


def forked(rank, group):
    collectives = Collectives(group, Phases())
    there, here = os.pipe()
    child = os.fork()
    if not child:
        try:
            collectives.check_alive()
        except CommunicationError as error:
            os.write(here, str(error).encode())
        os._exit(0)
    os.close(here)
    os.waitpid(child, 0)
    with os.fdopen(there) as told:
        raise CommunicationError(told.read())


CASES = {
    other_shape: (AgreementError, ["(4, 4)", "rank 1 has", "rank 2 has", "make it the same"]),
    other_strides: (AgreementError, ["of rank 2 appears not to match strides of the same param in process 1"]),
    other_names: (AgreementError, ["where rank 1 has parameter a.weight", "rank 2 has parameter b.weight"]),
    one_layer_less: (AgreementError, ["rank 1 has parameter 1.weight", "rank 2 has no such", "entries on rank 1, "]),
    not_replicable: (AgreementError, ["rank 2 cannot replicate its module: "]),
    failed_backward: (PeerError, ["rank 1: backward failed on rank 2 in round 1"]),
    failed_backward_of_two_modules: (PeerError, ["rank 1: the backward pass failed on rank 2 before"]),
    past_forward: (PeerError, ["rank {}: ranks 1 and 2 are not in", "on rank 1 it went through the", "on rank 2 thr"]),
    weight_missing: (OptionError, ["rank 2 gave no weight in round 1"]),
    out_of_sync: (OutOfSyncError, ["first.weight", " on rank 1, ", " on rank 2. Some weights differ: something"]),
    new_values: (OutOfSyncError, ["last.weight", "other values on rank 2 than on rank 1, "]),
    new_on_one_rank: (AgreementError, ["last.weight", "replicated on rank 2, and still the same on rank 1;"]),
    local_step: (UserWarning, ["rank {}: SGD.step() uses the gradient of parameter first.weight of this rank alone"]),
    destroyed: (CommunicationError, ["rank {}: the process group has been destroyed"]),
    failed_collective: (CommunicationError, ["rank {}, in a group of 2 ranks: all_reduce, gradients failed"]),
    late_gradient_not_put_together: (PeerError, ["rank 1: rank 2 could not put together the late gradients"]),
    forked: (CommunicationError, ["which is rank {}, in a group of 2 ranks. Run backward there"]),
}


def in_a_group_of_some(rank, names):
    """Return what each case raises; in groups of their own, so that no module shares one with another case's."""
    raised = {}
    for name in names:
        group = dist.new_group(MEMBERS)
        if rank.rank in MEMBERS:
            try:
                globals()[name](rank, group)
            except Exception as error:
                raised[name] = type(error), str(error)
    return raised


@pytest.fixture(scope="module")
def raised():
    return run_processes(3, in_a_group_of_some, [case.__name__ for case in CASES])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_ranks_of_a_smaller_group_are_named_as_ranks_of_the_default_group(raised, case):
    expected, words = CASES[case]
    for rank in MEMBERS:
        kind, message = raised[rank].get(case.__name__, (None, ""))
        if kind in (KeyError, NotReplicableError):  # the rank's own
            assert rank == 2
            continue
        assert issubclass(kind, expected), message
        for word in words:
            assert word.format(rank) in message
        assert "rank 0" not in message
