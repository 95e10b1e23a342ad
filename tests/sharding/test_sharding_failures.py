"""What goes wrong in a step, on one rank or on all: an error by name everywhere, and weights from before the step."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import lockstep
from lockstep.errors import (
    AgreementError,
    AlreadyManagedError,
    CommunicationError,
    LayoutError,
    LockstepError,
    NotReplicableError,
    PeerError,
    ShardingError,
)
from lockstep.sharding import full_state_dict, shard_optimizer, streams
from lockstep.sharding.optimizer import shards_of
from processes import run_processes
from programs.ranks import on_ranks
from sharded_runs import (
    adamw,
    backward,
    begun,
    equal,
    failing_sgd,
    made,
    network,
    replicated,
    results,
    same_without_sharding,
    train,
    values,
    without_sharding_too,
)
from threaded import run_ranks


@pytest.mark.parametrize("hosts", ["", "aaa"])
@pytest.mark.parametrize("nbytes", [1024, streams.CHUNK_BYTES])
def test_a_step_that_fails_on_one_rank_fails_on_all_and_weights_are_those_from_before(hosts, nbytes, monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_BYTES", nbytes)

    def failing(rank, sharded):
        model, optimizer = begun(rank, failing_sgd, sharded=sharded, granularity="element", steps=2)
        before, state = results(model, optimizer)
        optimizer.zero_grad()
        backward(rank, model, 2)
        if sharded:
            optimizer.fails = ValueError if rank.rank == 1 else None
            expected = (ValueError, "on purpose") if optimizer.fails else (PeerError, "failed on rank 1 .*on purpose")
            with pytest.raises(expected[0], match=expected[1]):
                optimizer.step()
            assert equal(values(model), before)
            optimizer.fails = None
            with pytest.raises(ShardingError, match=r"step 3 of the optimizer has failed.*Load a checkpoint"):
                optimizer.step()
            optimizer.load_state_dict(state)
        optimizer.step()
        return values(model)

    same_without_sharding(len(hosts) or 2, failing, hosts=hosts)


@on_ranks(2)
def test_a_step_that_is_interrupted_leaves_an_optimizer_that_says_so(rank):
    model, optimizer = begun(rank, failing_sgd, granularity="element")
    backward(rank, model, 0)
    optimizer.fails = Interrupt
    with pytest.raises(Interrupt):
        optimizer.step()
    with pytest.raises(ShardingError, match="step 1 of the optimizer was cut short"):
        optimizer.step()


class Interrupt(BaseException):
    """Is no Exception, as KeyboardInterrupt, which would end the tests."""


def add_a_step(model, optimizer):
    shards_of(optimizer).steps += 1


DIFFERENCES = {
    "rate": (
        lambda model, optimizer: optimizer.param_groups[0].update(lr=0.02),
        r"differ in the options of parameter group 0 .*'lr': 0.01,.* on rank 0, .*'lr': 0.02",
    ),
    "a rate that is a tensor": (
        lambda model, optimizer: optimizer.param_groups[0]["lr"].mul_(2),
        r"'lr': 0.25,.* on rank 0, .*'lr': 0.5",
    ),
    "gradients": (
        lambda model, optimizer: setattr(model[0].weight, "grad", None),
        r"parameters of group 0 that have no gradient .*: \[\] on rank 0, \[0\] on rank 1",
    ),
    "groups": (
        lambda model, optimizer: optimizer.add_param_group({"params": list(model[4].parameters())}),
        "differ in the number of parameter groups .*: 1 on rank 0, 2 on rank 1",
    ),
    "steps": (add_a_step, "differ in what they do .*: step 2 on rank 0, step 3 on rank 1"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
@on_ranks(2)
def test_ranks_that_differ_are_an_error_by_name_and_nothing_is_changed(rank, name):
    change, words = DIFFERENCES[name]
    model = replicated(rank)
    optimizer = shard_optimizer(adamw(model[0].parameters()))
    train(rank, model, optimizer, range(1))
    before, state = results(model, optimizer)
    if name == "a rate that is a tensor":
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    backward(rank, model, 1)
    if rank.rank:
        change(model, optimizer)
    with pytest.raises(AgreementError, match=words):
        optimizer.step()
    assert equal(values(model), before)
    assert name == "groups" or equal(full_state_dict(optimizer, all_ranks=True)["state"], state["state"])


@pytest.mark.filterwarnings("ignore:.*uses the gradient of parameter")  # before the error
@on_ranks(2)
def test_gradients_of_one_rank_alone_are_an_error_also_of_modules_that_were_replicated_later(rank):
    first, second = replicated(rank), replicated(rank)
    optimizer = made(adamw, first, True)
    optimizer.add_param_group({"params": list(second.parameters())})
    again = lockstep.DistributedDataParallel(first, process_group=rank.group)
    for module in (second, again):
        with module.no_sync():
            backward(rank, module, 1)
        with pytest.raises(ShardingError, match="gradients are those of one rank alone"):
            optimizer.step()
        optimizer.zero_grad()
        backward(rank, module, 2)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*uses the gradient of parameter")  # before the error
@on_ranks(2)
def test_only_one_rank_has_local_gradients_and_all_raise(rank):
    model, optimizer = begun(rank)
    backward(rank, model, 0)
    if rank.rank:
        model.set_requires_gradient_sync(False)
        backward(rank, model, 1)
    kind, words = (ShardingError, "one rank alone") if rank.rank else (PeerError, "rank 1 cannot take step 1")
    with pytest.raises(kind, match=words):
        optimizer.step()


def join(rank):
    model = lockstep.DistributedDataParallel(rank.make(network))
    optimizer = made(adamw, model, True)
    with Join([model]):
        for step in range(2 - rank.rank):
            backward(rank, model, step)
            optimizer.step()


def test_join_is_an_error():
    outcomes = run_processes(2, join, errors=True, group_timeout=10)
    assert all(isinstance(each.error, LockstepError | RuntimeError) for each in outcomes)
    assert any("lockstep.batches()" in str(each.error) for each in outcomes)


def killed(rank):
    model = lockstep.replicate(rank.make(network))
    optimizer = made(failing_sgd, model, True, "element")
    train(rank, model, optimizer, range(2))
    backward(rank, model, 2)
    if rank.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError):
        optimizer.step()
    return True


def test_a_rank_that_is_killed_before_its_step_is_an_error_on_the_others():
    first, second = run_processes(2, killed, errors=True, group_timeout=10)
    assert first.result
    assert second.returncode == -signal.SIGKILL


class Dying(torch.optim.SGD):
    """Ends its process after it has changed some weights."""

    dies = False

    def step(self, closure=None):
        super().step(closure)
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_in_step(rank):
    model = lockstep.replicate(rank.make(network))
    optimizer = made(lambda p: Dying(p, lr=0.1), model, True, "element")
    optimizer.dies = rank.rank == 1
    backward(rank, model, 2)
    with pytest.raises(CommunicationError):
        optimizer.step()
    with pytest.raises(
        ShardingError, match="step 1 of the optimizer was cut short, so the weights may be of two steps"
    ):
        optimizer.step()
    return True


def test_a_rank_that_is_killed_in_its_step_leaves_an_optimizer_that_says_so():
    first, _ = run_processes(2, killed_in_step, errors=True, group_timeout=10)
    assert first.result, first


def killed_while_weights_are_gathered(rank):
    streams.CHUNK_BYTES = 1024
    model = lockstep.replicate(rank.make(network))
    optimizer = made(lambda p: torch.optim.SGD(p, lr=0.1), model, True)
    backward(rank, model, 2)
    if rank.rank:
        own = shards_of(optimizer)._moves[1]
        own.copy_in = lambda number, _: number == 3 and os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError, match=r"\brank(\(s\))? [01]\b"):
        optimizer.step()
    with pytest.raises(ShardingError, match="step 1 of the optimizer was cut short"):
        optimizer.step()
    return True


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_is_killed_while_weights_are_gathered_is_an_error_on_the_others(backend):
    first, second = run_processes(2, killed_while_weights_are_gathered, errors=True, group_timeout=10, backend=backend)
    assert first.result, first
    assert second.returncode == -signal.SIGKILL


def test_an_error_while_weights_are_gathered_in_shared_memory_is_one_on_every_rank(monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_BYTES", 1024)

    def failing(rank):
        model, optimizer = begun(rank)
        backward(rank, model, 0)
        if rank.rank:
            shards_of(optimizer)._moves[0].copy_out = fail
        with pytest.raises(CommunicationError, match=r"ValueError.*on purpose"):
            optimizer.step()
        with pytest.raises(ShardingError, match="step 1 of the optimizer was cut short"):
            optimizer.step()

    run_ranks(2, failing, hosts="aa")


def fail(number, _):
    if number == 2:
        raise ValueError("on purpose")


# ------------------------------------------------------------------------------------- what is refused


@on_ranks(2)
def test_uses_that_make_no_sense_are_refused(rank):
    model, optimizer = begun(rank)
    with pytest.raises(AlreadyManagedError, match="has been sharded already"):
        shard_optimizer(optimizer)
    with pytest.raises(AlreadyManagedError, match=r"parameter 0\.weight has a sharded optimizer already"):
        shard_optimizer(adamw(model[0].parameters()))
    with pytest.raises(NotReplicableError, match="no parameter of this optimizer is in a replicated module"):
        shard_optimizer(adamw(network().parameters()))
    other = replicated(rank)
    with pytest.raises(NotReplicableError, match=r"parameter 1 of group 0, of shape \(2,\), is in no replicated"):
        shard_optimizer(adamw([other[0].weight, nn.Parameter(torch.zeros(2))]))

    with pytest.raises(NotReplicableError, match="is in no replicated module"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1


@on_ranks(2)
def test_sparse_gradients_and_parameters_that_are_retyped_are_refused(rank):
    sparse = replicated(rank, lambda: nn.Embedding(50, 8, sparse=True))
    optimizer = made(lambda p: torch.optim.SGD(p, lr=0.1), sparse, True)
    sparse(torch.tensor([1, 2 + rank.rank])).sum().backward()
    with pytest.raises(ShardingError, match="parameter weight has a sparse gradient"):
        optimizer.step()
    dense = replicated(rank)
    optimizer = made(adamw, dense, True)
    train(rank, dense, optimizer, range(1))
    for parameter in dense.parameters():
        parameter.data = parameter.data.double()
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(LayoutError, match=r"parameter 0\.weight had dtype, shape and device .*float32.*float64"):
        optimizer.step()


@without_sharding_too(2)
def test_parameters_whose_memory_has_moved_are_stepped_where_they_are(rank, sharded):
    model, optimizer = begun(rank, sharded=sharded, steps=2)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    train(rank, model, optimizer, range(2, 4))
    return results(model, optimizer)


def transposed(data):
    return data.t().contiguous().t()


def with_gaps(data):
    return data.repeat_interleave(2, 1)[:, ::2]


@pytest.mark.parametrize(
    ("change", "words"), [(transposed, "another memory format"), (with_gaps, "whose elements lie side by side")]
)
@on_ranks(2)
def test_parameters_whose_slices_of_state_no_longer_fit_are_refused(rank, change, words):
    model, optimizer = begun(rank)
    model[2].weight.data = transposed(model[2].weight.data)  # it has no state yet
    train(rank, model, optimizer, range(1))
    model[0].weight.data = change(model[0].weight.data)
    before = values(model)
    with pytest.raises((LayoutError, PeerError), match=rf"parameter 0\.weight has .*{words}"):
        train(rank, model, optimizer, range(1, 2))
    assert equal(values(model), before)


@pytest.mark.parametrize("make", [adamw, torch.optim.Adafactor])
@without_sharding_too(2)
def test_another_memory_format_before_state_is_loaded_or_after_it_is_saved(rank, sharded, make):
    model, optimizer = begun(rank, make, sharded=sharded, steps=2)
    model[2].weight.data = transposed(model[2].weight.data)
    state = full_state_dict(optimizer, all_ranks=True)
    slices = optimizer.state_dict()
    del optimizer
    model[0].weight.data = transposed(model[0].weight.data)
    optimizer = made(make, model, sharded)
    model[2].weight.data = model[2].weight.data.contiguous()
    if sharded and make is adamw and rank.rank == 0:
        with pytest.raises(LayoutError, match="slice of another memory format"):
            optimizer.load_state_dict(slices)
    optimizer.load_state_dict(state)
    train(rank, model, optimizer, range(2, 4))
    return values(model), full_state_dict(optimizer, all_ranks=True)["state"]


@on_ranks(2)
def test_parameters_that_share_memory_are_refused(rank):
    def tied():
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        net[1].weight = net[0].weight
        nn.utils.parametrizations.weight_norm(net[1])
        return net

    model = replicated(rank, tied)
    with pytest.raises(LayoutError, match=r"parameters .*weight.* share memory"):
        shard_optimizer(adamw(model.parameters()))
