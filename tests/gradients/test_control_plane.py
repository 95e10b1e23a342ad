"""A group whose backend is for accelerators alone: what ranks say in a round travels over its companion."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.group_state import state_of
from lockstep.errors import PeerError
from lockstep.phases import Phases
from processes import on_processes
from small_modules import fails_in_backward

pytestmark = pytest.mark.usefixtures("sim")


@contextlib.contextmanager
def sums():
    """The devices of the sums until the end, and whether each is a report."""
    seen, plain = set(), Collectives.all_reduce

    def all_reduce(self, tensor, what, *args, **options):
        seen.add((tensor.device.type, what.startswith("report")))
        return plain(self, tensor, what, *args, **options)

    Collectives.all_reduce = all_reduce
    try:
        yield seen
    finally:
        Collectives.all_reduce = plain


@on_processes(2, device="sim", group_timeout=20)
def test_a_group_for_accelerators_alone_has_a_companion_for_the_cpu(rank):
    """Rank 1 fails one of its steps."""
    group = dist.new_group()
    plain_device = lockstep.distributed.comm.collectives.control_device
    # Simulated accelerators sum on the CPU, so that no group of theirs is for accelerators alone: this one looks as if.
    lockstep.distributed.comm.collectives.control_device = lambda each: (
        rank.device if each is group else plain_device(each)
    )
    model = lockstep.replicate(
        rank.make(lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))), process_group=group
    )
    errors = []
    with sums() as seen:
        for step in range(6):
            model.zero_grad()
            loss = model(torch.full((2, 2), rank.rank + 1.0) + torch.arange(2.0)[:, None]).sum()
            try:
                fails_in_backward(loss, step == 4 and rank.rank == 1).backward()
            except (ArithmeticError, PeerError) as error:
                errors.append((step, type(error)))
            else:
                assert all(rank.all_equal(parameter.grad) for parameter in model.parameters())
                assert all(rank.all_equal(buffer) for buffer in model.buffers())
    assert errors == [(4, ArithmeticError if rank.rank else PeerError)]
    assert {device for device, is_report in seen if is_report} == {"cpu"}
    assert type(state_of(group).companion).__name__ == "ProcessGroupShm"


class LikeNccl:
    """A bare backend that returns no work for a collective that is not asynchronous, as NCCL does."""

    def rank(self):
        return 0

    def size(self):
        return 1

    def name(self):
        return "nccl"

    def allreduce(self, tensors, options):
        done = torch.futures.Future()
        done.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(done) if options.asyncOp else None


@pytest.mark.parametrize("blocking", [False, True])
def test_a_sum_on_an_accelerator_that_is_waited_for_next_is_asynchronous_all_the_same(blocking):
    collectives = Collectives(LikeNccl(), Phases())
    collectives.all_reduce(torch.ones(3, device="meta"), "test", blocking=blocking).wait()


@on_processes(1, device="sim")
def test_one_rank_does_not_wait_for_an_accelerator_to_send_its_report(rank):
    group = dist.new_group()
    module, plain_backends = lockstep.distributed.comm.collectives, lockstep.distributed.comm.collectives.backends_of
    module.backends_of = lambda each: "nccl" if each is group else plain_backends(each)
    module.control_device = lambda each: rank.device  # as for a group of NCCL alone
    with sums() as seen:
        model = lockstep.replicate(rank.make(lambda: nn.Linear(2, 1)), process_group=group)
        for _ in range(3):
            model(torch.ones(2, 2)).sum().backward()
        lockstep.check_in_sync(model)
    assert seen == {("sim", False), ("cpu", True), ("cpu", False)}  # gradients, reports, what ranks compare
