"""Everything at once: `check_in_sync()` of modules and optimizers, and `save()`, which writes nothing that differs."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OutOfSyncError
from programs.ranks import on_ranks, replicated
from threaded import run_ranks


def trained(rank, **options):
    net = replicated(rank, lambda: nn.Linear(4, 3), **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return net, optimizer


CHANGES = {
    "rate": (
        lambda net, optimizer: optimizer.param_groups[0].update(lr=0.01),
        "optimizer AdamW, group 0, lr: 0.1 on ranks 0, 2, 0.01 on rank 1",
    ),
    "state": (
        lambda net, optimizer: optimizer.state[net.bias]["exp_avg"][1].add_(1),
        "exp_avg of parameter bias in AdamW is out of sync: digest ",
    ),
    "weight": (lambda net, optimizer: net.weight.data[1, 1].add_(1), "parameter weight"),
}
each_change = pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)


def message(call):
    with pytest.raises(OutOfSyncError) as caught:
        call()
    return str(caught.value)


@each_change
def test_any_number_of_modules_and_optimizers_are_compared(change, words):
    def work(rank):
        net, optimizer = trained(rank)
        other = nn.Linear(2, 2).requires_grad_(False)
        nn.init.ones_(other.weight), nn.init.ones_(other.bias)
        lockstep.check_in_sync(net, optimizer, other, torch.optim.SGD(net.parameters()))
        lockstep.check_in_sync(optimizer)
        if rank.rank == 1:
            change(net, optimizer)
        return message(lambda: lockstep.check_in_sync(optimizer, other, net))

    first, *others = run_ranks(3, work)
    assert others == [first, first]
    assert first.startswith(words)


@each_change
def test_what_has_drifted_is_not_saved(change, words, tmp_path):
    def work(rank):
        net, optimizer = trained(rank)
        lockstep.save(tmp_path, model=net, optimizer=optimizer, group=rank.group)
        before = sorted(tmp_path.glob("save-*"))
        if rank.rank == 1:
            change(net, optimizer)
        text = message(lambda: lockstep.save(tmp_path, model=net, optimizer=optimizer, group=rank.group))
        assert sorted(tmp_path.glob("save-*")) == before
        lockstep.save(tmp_path, model=net, optimizer=optimizer, group=rank.group, check=False)
        return text

    first, *others = run_ranks(3, work)
    assert others == [first, first]
    assert "Nothing has been saved" in first
    assert first.startswith(words)


@on_ranks(2)
def test_what_differs_by_design_is_saved(rank, tmp_path):
    """Modules that are not replicated, values of each rank, buffers, a sharded optimizer."""
    net, optimizer = trained(rank)
    net.register_buffer("seen", torch.tensor(rank.rank))
    average = nn.Linear(2, 2)
    nn.init.constant_(average.weight, rank.rank)
    own = lockstep.checkpoints.per_rank(average.weight.detach())
    lockstep.save(tmp_path, model=net, optimizer=optimizer, average=average, own=own, group=rank.group)
    net, optimizer = trained(rank, init_sync=False)
    net.bias.data += rank.rank
    lockstep.save(tmp_path, model=net, optimizer=optimizer, group=rank.group)
    net, optimizer = trained(rank)
    optimizer = lockstep.shard_optimizer(optimizer)
    lockstep.save(tmp_path, model=net, optimizer=optimizer, group=rank.group)
