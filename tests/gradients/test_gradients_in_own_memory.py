"""Gradients that lie in memory of the program, which it reads itself: the mean is there, as with PyTorch's DDP."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep
from ddp_reference import both, ddp_class
from lockstep.errors import PeerError
from lockstep.loop import skip_batch
from lockstep.sharding import shard_optimizer
from lockstep.shares import GlobalBatches
from processes import on_processes
from programs.networks import Applying
from programs.ranks import on_ranks, replicated
from small_modules import fails_in_backward
from threaded import run_ranks

pytestmark = pytest.mark.usefixtures("alone_from_64_kib")

SIDES = {"one bucket": 8, "parts": 100, "a bucket of its own": 130}
sides = pytest.mark.parametrize("side", SIDES)


def layers(side=8):
    """Layers, of which one may be large; a forward may leave out the last one."""

    def forward(m, x, extra=True):
        out = m.last(m.middle(m.linear(x).tanh()).tanh())
        return out + m.extra(x) if extra else out

    return Applying(forward, (4, side), middle=nn.Linear(side, side), last=nn.Linear(side, 2), extra=nn.Linear(4, 2))


# What a program does with its gradients: it gives every parameter one, and returns what it will read of it.


def one_flat_tensor(module):
    """With something of its own behind the gradients."""
    parameters = list(module.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters) + 5, dtype=parameters[0].dtype)
    parts = flat.split([*(p.numel() for p in parameters), 5])
    for p, part in zip(parameters, parts, strict=False):
        p.grad = part.view_as(p)
    return [flat[:-5]]


def each_kept(module):
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    return [p.grad for p in module.parameters()]


def each_detached(module):
    return [grad.detach() for grad in each_kept(module)]


def memory_of_numpy(module):
    """Nothing of PyTorch refers to the memory, but for the gradients."""
    arrays = [torch.zeros(p.numel(), device="cpu").numpy() for p in module.parameters()]
    for p, array in zip(module.parameters(), arrays, strict=True):
        p.grad = torch.frombuffer(memoryview(array), dtype=torch.float32).view_as(p).data
    return arrays


WAYS = [one_flat_tensor, each_kept, each_detached, memory_of_numpy]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda each: each.__name__)


def content(memory):
    return torch.cat([torch.as_tensor(each).flatten() for each in memory]).clone()


def clear(memory):
    for each in memory:
        each[...] = 0


def has_gradients(memory, reference, **close):
    """What the program reads are the gradients of a reference."""
    torch.testing.assert_close(content(memory), content([p.grad for p in reference.parameters()]), **close)


def equal_and_not_zero(rank, memory):
    return rank.all_equal(memory[0]) and bool(memory[0].any())


def beside(rank, make, **options):
    """A replicated module, and a copy for one process that has the rows of all ranks."""
    module = rank.make(make)
    reference = copy.deepcopy(module)
    return lockstep.replicate(module, process_group=rank.group, **options), reference


def numbers(rows, step):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step), device="cpu").to(
        torch.get_default_device()
    )


def square(module, x):
    return module(x).square().sum()


def train(rank, implementation, way, side, options=(), micro_batches=1):
    """Five steps of an optimizer that reads the memory itself, beside one process that has all rows."""
    module = rank.make(lambda: layers(SIDES[side]))
    reference = copy.deepcopy(module)
    options = dict(options)
    hook, micro_batches = options.pop("hook", False), options.pop("micro_batches", micro_batches)
    ddp = ddp_class(implementation)(module, process_group=rank.group, **options)
    if hook:
        ddp.register_comm_hook(None, lambda _, bucket: bucket.buffer() * 1)
    memory = way(module)
    ids = [id(p.grad) for p in module.parameters()]
    close = {"rtol": 2e-2, "atol": 1e-2} if "reduce_dtype" in options else {"rtol": 1e-4, "atol": 1e-5}
    for step in range(5):
        clear(memory)
        reference.zero_grad()
        x = numbers(2 * rank.world * micro_batches, step)
        own = x.chunk(rank.world)[rank.rank].chunk(micro_batches)
        for number, rows in enumerate(own):
            with ddp.no_sync() if number < micro_batches - 1 else contextlib.nullcontext():
                square(ddp, rows).backward()
        (square(reference, x) / rank.world).backward()
        has_gradients(memory, reference, **close)
        assert [id(p.grad) for p in module.parameters()] == ids
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            p.data.sub_(p.grad, alpha=0.01)
            q.data.copy_(p.data)


@both
@pytest.mark.parametrize("way", [one_flat_tensor, each_kept, memory_of_numpy])
@on_processes(2)
def test_beside_ddp(rank, implementation, way):
    train(rank, implementation, way, "parts", micro_batches=2)


@ways
@sides
@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@on_ranks(2, "hosts")
def test_the_mean_is_where_the_program_reads_it(rank, way, side):
    train(rank, "lockstep", way, side)


OPTIONS = {
    "accumulated": {"micro_batches": 3},
    "a hook": {"hook": True},
    "half precision": {"reduce_dtype": torch.bfloat16},
    "small buckets": {"bucket_cap_mb": 1e-4},
}


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(3)
def test_the_mean_is_there_with_every_option(rank, options):
    train(rank, "lockstep", one_flat_tensor, "parts", OPTIONS[options])


@pytest.mark.usefixtures("sim")
@sides
@on_ranks(2, device="sim")
def test_the_mean_is_there_on_accelerators(rank, side):
    train(rank, "lockstep", one_flat_tensor, side)


# --------------------------------------------------------------------- gradients that nobody keeps


@pytest.mark.parametrize("assigned", [False, True])
@on_ranks(2)
def test_gradients_that_nobody_keeps_go_into_a_bucket(rank, assigned):
    """What autograd made in an earlier pass, or the program only assigned."""
    module = replicated(rank, layers)
    for step in range(4):
        module.zero_grad()
        if assigned:
            for p in module.parameters():
                p.grad = torch.zeros_like(p)
        else:
            with module.no_sync():
                module(numbers(2, step)).sum().backward()
        module(numbers(2, step)).sum().backward()
        assert len({p.grad.untyped_storage().data_ptr() for p in module.parameters()}) == 1


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@on_ranks(2, "hosts")
def test_gradients_follow_their_buckets_to_a_new_plan(rank):
    """They stay in buckets also when these are planned anew, after the first step."""
    module, places = replicated(rank, layers, bucket_cap_mb=1e-4), []
    for step in range(3):
        module.zero_grad(set_to_none=False)
        module(numbers(2, step)).sum().backward()
        places.append([p.grad.data_ptr() for p in module.parameters()])
    assert places[0] != places[-1]


@on_ranks(2)
def test_gradients_of_the_first_step_that_the_program_keeps(rank):
    """As fused optimizers do: a list of the gradients that there are after the first step."""
    module, kept = replicated(rank, layers), []
    for step in range(4):
        for grad in kept:
            grad.zero_()
        if step == 2:
            module.linear.weight.grad = None
        (module(numbers(2, step)).sum() * (rank.rank + 1)).backward()
        if not step:
            kept = [p.grad for p in module.parameters()]
        assert [rank.all_equal(grad) for grad in kept] == [True] * len(kept)


# ---------------------------------------------------------------------------- unusual gradients


@sides
@on_ranks(2)
def test_parameters_that_some_ranks_or_none_use(rank, side):
    module = replicated(rank, lambda: layers(SIDES[side]))
    for on_rank_1 in (True, False, True):
        memory = one_flat_tensor(module)
        before = [p.grad for p in module.parameters()]
        with torch.no_grad():
            memory[0].add_(1.0)
        module(numbers(2, rank.rank), extra=on_rank_1 and rank.rank == 1).square().sum().backward()
        assert rank.all_equal(memory[0])
        assert all(p.grad is b for p, b in zip(module.parameters(), before, strict=True))
        assert bool(torch.all(module.extra.bias.grad == 1)) is not on_rank_1


@pytest.mark.parametrize("dense_memory", [True, False])
@on_ranks(2)
def test_sparse_gradients_in_memory_of_the_program(rank, dense_memory):
    """Beside a dense one."""
    module, reference = beside(rank, lambda: nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)))
    if dense_memory:
        memory = one_flat_tensor(module)
    else:
        with module.no_sync():
            (0 * module(torch.tensor([0])).sum()).backward()
        memory = [p.grad for p in module.parameters()]
    rows = torch.tensor([[0, 1], [1, 5]])
    for _ in range(3):
        reference.zero_grad()
        for each in memory:
            each.zero_()
        square(module, rows[rank.rank]).backward()
        (square(reference, rows) / 2).backward()
        got = torch.cat([each.to_dense().flatten() for each in memory])
        torch.testing.assert_close(got, torch.cat([p.grad.to_dense().flatten() for p in reference.parameters()]))


@pytest.mark.parametrize("side", [8, 300_000], ids=["in a bucket", "alone"])
@on_processes(2)
def test_gradients_that_are_distributed_tensors(rank, side):
    """Two replicas, whose mesh has a second dimension of one rank."""
    mesh = DeviceMesh("cpu", torch.arange(2).view(2, 1), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(float(side * 4)).view(side, 4) % 13
    weight = nn.Parameter(DTensor.from_local(whole.clone(), mesh["tp"], [Shard(0)]))
    module = lockstep.replicate(nn.ParameterList([weight, torch.ones(3)]), process_group=mesh["dp"].get_group())
    flat = torch.zeros(side * 4 + 3)
    weight.grad = DTensor.from_local(flat[: side * 4].view(side, 4), mesh["tp"], [Shard(0)])
    module[1].grad = flat[side * 4 :]
    given = weight.grad
    for _ in range(3):
        flat.zero_()
        loss = (weight * weight * (rank.rank + 1)).sum().redistribute(placements=[Replicate()]).to_local()
        (loss + (module[1] * rank.rank).sum()).backward()
        torch.testing.assert_close(flat[:-3].view(side, 4), 3 * whole)
        torch.testing.assert_close(flat[-3:], torch.full((3,), 0.5))
        assert module[0].grad is given


def with_a_recomputed_layer(module, x):
    hidden = checkpoint(module.extra, x.requires_grad_(), use_reentrant=True)
    return (module(x + 0 * hidden.sum()) + hidden).square().sum()


@on_ranks(2)
def test_gradients_that_come_again_when_their_bucket_has_left(rank):
    """The layer that comes first in the plan gets one more gradient when its bucket has left."""
    module, reference = beside(rank, layers, bucket_cap_mb=1e-4)
    memory, x = one_flat_tensor(module), numbers(4, 0)
    for _ in range(4):
        clear(memory)
        reference.zero_grad()
        with_a_recomputed_layer(module, x.chunk(2)[rank.rank].clone()).backward()
        (with_a_recomputed_layer(reference, x.clone()) / 2).backward()
        has_gradients(memory, reference)


# ------------------------------------------------------------------------ several modules, and loops


@on_ranks(2)
def test_a_module_that_this_rank_has_not_reached(rank):
    """A pass of rank 0 does not reach the second module, whose gradient another rank has."""
    first, second = (replicated(rank, layers) for _ in range(2))
    memory = one_flat_tensor(second)
    for step in range(3):
        first.zero_grad()
        clear(memory)
        loss = first(numbers(2, step)).sum()
        if rank.rank:
            loss = loss + second(numbers(2, step)).sum()
        loss.backward()
        assert equal_and_not_zero(rank, memory)


@on_ranks(2)
def test_padding_batches(rank):
    """Rank 1 runs out first: at its padding batches it gets the gradients of rank 0."""
    module = replicated(rank, layers)
    memory, found = one_flat_tensor(module), []
    for step, _ in enumerate(lockstep.batches([0] * (4 - rank.rank), module)):
        clear(memory)
        (module(numbers(2, step)).sum() * (rank.rank + 1)).backward()
        found.append(equal_and_not_zero(rank, memory))
    assert found == [True] * 4


# ------------------------------------------------------------------------------------- gradients that are dropped


def dropped(rank, how, side, piled):
    """On no rank the memory has what one rank has computed."""
    module = replicated(rank, lambda: layers(SIDES[side]))
    for step in range(3):
        memory, is_bad = one_flat_tensor(module), step == 1 and rank.rank == 1
        if piled:
            with module.no_sync():
                module(numbers(2, step)).sum().backward()
        with contextlib.suppress(ArithmeticError, PeerError):
            out = module(numbers(2, step + rank.rank))
            if is_bad and how == "skips":
                skip_batch(module)
            else:
                fails_in_backward(out, is_bad).sum().backward()
        assert rank.all_equal(memory[0])
        assert bool(memory[0].any()) == (step != 1)
        assert (module.linear.weight.grad is None) == (step == 1)


@pytest.mark.parametrize("how", ["fails", "skips"])
@pytest.mark.parametrize("piled", [False, True])
@sides
def test_gradients_that_are_dropped_are_zero_in_memory_of_the_program(how, side, piled, caplog):
    run_ranks(2, dropped, how, side, piled)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.split(":")[0] for text in told] == ["gradients whose memory the program keeps were dropped (8)"] * 2


@pytest.fixture
def told():
    return threading.Event()


@pytest.fixture
def seen():
    return threading.Barrier(2)


@on_ranks(2)
def test_what_arrives_after_a_failure_is_not_written_to_memory_of_the_program(rank, told, seen):
    """Rank 0 fails after a large gradient has left. Rank 1 sends its own when rank 0 is done with its batch."""
    module = replicated(rank, lambda: nn.ParameterList([torch.ones(4), torch.ones(1024, 20)]))
    memory = one_flat_tensor(module)
    for step in range(4):
        clear(memory)
        small = fails_in_backward(module[0].sum().view(1), step == 3 and rank.rank == 0)
        loss = (small * 1.0 + (module[1] * small.detach()).sum()).sum()
        if step == 3 and rank.rank:
            told.wait(30)
        with contextlib.suppress(ArithmeticError, PeerError):
            loss.backward()
        if step == 3 and not rank.rank:
            told.set()
    seen.wait(30)
    assert not memory[0].any()


# --------------------------------------------------------------------------------------------- shares, shards


@ways
@on_ranks(2)
def test_with_shares(rank, way):
    module, reference = beside(rank, layers, shares=4)
    memory = way(module)
    given = [p.grad for p in module.parameters()] if way is one_flat_tensor else []
    x = numbers(16, 0)
    batches = GlobalBatches(TensorDataset(x), 8, shares=4, shuffle=False, process_group=rank.group)
    for step, batch in enumerate(batches):
        clear(memory)
        reference.zero_grad()
        for (rows,) in batch:
            square(module, rows).backward()
        (square(reference, x[8 * step : 8 * step + 8]) / 8).backward()
        has_gradients(memory, reference)
        assert all(p.grad is grad for p, grad in zip(module.parameters(), given, strict=False))


@on_ranks(2)
def test_a_sharded_optimizer(rank):
    """It reads the memory as a plain one does."""
    module, reference = beside(rank, layers)
    optimizer = shard_optimizer(torch.optim.AdamW(module.parameters(), 0.1))
    plain = torch.optim.AdamW(reference.parameters(), 0.1)
    memory = one_flat_tensor(module)
    for step in range(4):
        clear(memory)
        plain.zero_grad()
        x = numbers(4, step)
        square(module, x.chunk(2)[rank.rank]).backward()
        (square(reference, x) / 2).backward()
        optimizer.step()
        plain.step()
        torch.testing.assert_close(list(module.parameters()), list(reference.parameters()))
