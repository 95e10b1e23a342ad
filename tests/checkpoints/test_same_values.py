"""Values that are saved once for all ranks are the same on all, or an error names them and how to mark them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.checkpoints.same_values import told
from lockstep.errors import AgreementError, OutOfSyncError
from processes import on_processes
from programs.ranks import on_ranks

EQUAL = [
    (3, 3),
    ({"a": 1, "b": 2.5}, {"b": 2.5, "a": 1}),
    ({"x", "y", "z"}, {"z", "y", "x"}),
    (torch.arange(6).view(2, 3), torch.tensor([[0, 3], [1, 4], [2, 5]]).t()),
    ([torch.tensor(float("nan"))], [torch.tensor(float("nan"))]),
    ("x" * 100, "x" * 100),
    (torch.tensor(1 + 2j).conj(), torch.tensor(1 - 2j)),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
]
DIFFERENT = [
    (3, 4),
    (1, 1.0),
    (1, True),
    ([1, [2]], [[1], 2]),
    ([[1], 2], [[1, 2]]),
    ({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}}),
    ([1, 2], (1, 2)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    ("x" * 100, "x" * 99 + "y"),
    ({"a": {"b": torch.zeros(1)}}, {"a": {"b": torch.ones(1)}}),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_values_are_told_alike(one, other):
    assert told(one) == told(other)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_tensor_is_told_by_its_class():
    one, other = (torch.quantize_per_tensor(value, 0.1, 0, torch.qint8) for value in (torch.ones(2), torch.zeros(3)))
    assert told(one) == told(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_values_are_not(one, other):
    assert told(one) != told(other)


@on_ranks(2)
def test_a_value_that_differs_by_rank_is_named_and_may_be_marked(rank, tmp_path):
    with pytest.raises(AgreementError) as raised:
        lockstep.save(tmp_path, group=rank.group, epoch=rank.rank, names=["a"])
    own = lockstep.checkpoints.per_rank(rank.rank)
    folder = lockstep.save(tmp_path, group=rank.group, epoch=own, names=["a"])
    found = lockstep.resume(tmp_path, group=rank.group)
    told = "save(): ranks differ in epoch: it is 0 on rank 0, and 1 on rank 1. One file has it"
    assert str(raised.value).startswith(told)
    assert "epoch=lockstep.checkpoints.per_rank(...)" in str(raised.value)
    assert (folder.exists(), found.values["epoch"]) == (True, rank.rank)


@on_ranks(2)
def test_the_state_of_an_object_that_differs_by_rank_is_named_too(rank, tmp_path):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    scheduler.step(rank.rank)
    with pytest.raises(AgreementError, match=r"ranks differ in scheduler: .*scheduler=lockstep\.checkpoints\.per_rank"):
        lockstep.save(tmp_path, group=rank.group, scheduler=scheduler)
    lockstep.save(tmp_path, group=rank.group, scheduler=scheduler, check=False)
    lockstep.save(tmp_path, group=rank.group, scheduler=lockstep.checkpoints.per_rank(scheduler))
    scheduler.best = -1
    lockstep.resume(tmp_path, group=rank.group, scheduler=lockstep.checkpoints.per_rank(scheduler))
    assert scheduler.best == rank.rank


@on_processes(4)
def test_a_module_that_is_another_one_on_other_ranks_is_not_saved_once_for_all(rank, tmp_path):
    half = rank.rank % 2
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][half]
    expert = lockstep.replicate(rank.make(lambda: torch.nn.Linear(2, 1)), process_group=group)
    other = lockstep.replicate(torch.nn.Linear(2, 1 + half), process_group=group)
    lockstep.save(tmp_path, expert=expert)
    with torch.no_grad():
        expert.weight.fill_(half)
    with pytest.raises(OutOfSyncError, match=r"weight of expert .*per_rank\(module.state_dict\(\)\)"):
        lockstep.save(tmp_path, expert=expert)
    with pytest.raises(AgreementError, match="ranks differ in what is replicated, which is saved once"):
        lockstep.save(tmp_path, other=other)
    sharded = lockstep.shard_optimizer(torch.optim.Adam(expert.parameters()))
    with pytest.raises(AgreementError, match=r"over which sharded is .*: \[0, 2\] on rank 0, \[1, 3\] on rank 1"):
        lockstep.save(tmp_path, sharded=sharded)
    lockstep.save(tmp_path, expert=lockstep.checkpoints.per_rank(expert.state_dict()))
    found = lockstep.resume(tmp_path).values["expert"]
    assert torch.equal(found["weight"], expert.weight)
    own = [dist.new_group([number]) for number in range(4)][rank.rank]
    with pytest.warns(RuntimeWarning, match=f"a process group of rank {rank.rank} alone"):
        alone = lockstep.replicate(torch.nn.Linear(2, 1), process_group=own)
    torch.nn.init.constant_(alone.weight, rank.rank)
    with pytest.raises(OutOfSyncError, match="weight of alone"):
        lockstep.save(tmp_path, alone=alone)


@on_processes(4)
def test_a_module_that_is_another_one_on_other_ranks_is_in_no_snapshot_for_all(rank, tmp_path):
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank.rank % 2]
    expert = lockstep.replicate(torch.nn.Linear(2, 1), process_group=group)
    torch.nn.init.constant_(expert.weight, rank.rank % 2)
    with lockstep.session() as run:
        assert run.snapshot(tmp_path, every=1, expert=lockstep.checkpoints.per_rank(expert.state_dict()))
        with pytest.raises(OutOfSyncError, match=r"weight of expert .*per_rank\(module.state_dict\(\)\)"):
            run.snapshot(tmp_path / "other", every=1, expert=expert)


def test_a_module_without_a_group_is_saved(tmp_path):
    model = lockstep.replicate(torch.nn.Linear(2, 1))
    lockstep.save(tmp_path, model=model)
    other = torch.nn.Linear(2, 1)
    lockstep.resume(tmp_path, model=other)
    assert torch.equal(other.weight, model.weight)
