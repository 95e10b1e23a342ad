"""PyTorch's own users of a process group, and this library's, on the `shm` backend in processes, beside Gloo.

DistributedDataParallel with hooks, FSDP, functional collectives, DTensor, compiled code, uneven inputs, checkpoints.
"""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import lockstep
from processes import on_processes, run_processes
from programs.networks import Applying

STEPS = 3


def network(dtype=torch.float32):
    """The same on every rank; large enough that its buckets go every way."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 4)).to(dtype)


def batch(step, dtype=torch.float32):
    """Return what all ranks together see in a step."""
    return torch.randn(12, 20, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def train(model, rows):
    """Trains a model on some of the rows; the gradients of the last step, and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(batch(step, next(model.parameters()).dtype))).square().mean().backward()
        optimizer.step()
    return [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def single():
    """Return what one process gets in double precision from all rows."""
    return train(network(torch.float64), lambda x: x)


def check(results, tolerance=2e-5):
    """All ranks have the same bits, and these are close to those of one process."""
    for got, wanted in zip(results[0], single(), strict=True):
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)
    for others in results[1:]:
        for got, first in zip(others, results[0], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(got, first, strict=True))


def _named():
    """Functional collectives by the names that PyTorch gave them in 2.13, whatever it calls them."""
    names = {
        "all_gather_single": "all_gather_tensor",
        "all_gather_single_autograd": "all_gather_tensor_autograd",
        "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
        "reduce_scatter_single": "reduce_scatter_tensor",
        "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    }
    return SimpleNamespace(
        **{new: getattr(functional, new, None) or getattr(functional, old) for new, old in names.items()}
    )


named = _named()


# ------------------------------------------------------------------------------------ data parallel


def data_parallel(rank, kind, options):
    rows = lambda x: x.chunk(rank.world)[rank.rank]  # noqa: E731
    if kind == "torch":
        model = DistributedDataParallel(network(), **options)
    elif kind == "replicate":
        model = lockstep.replicate(network(), **options)
    else:
        model = lockstep.DistributedDataParallel(network(), **options)
    return train(model, rows)


def every_kind(rank):
    return [data_parallel(rank, kind, {"bucket_cap_mb": 0.1}) for kind in ("torch", "replicate", "lockstep")]


@pytest.mark.parametrize("world", [1, 3])
def test_gradients_are_those_of_one_process(world):
    for results in zip(*run_processes(world, every_kind, backend="shm"), strict=True):
        check(results)


def unused_parameters(rank):
    """Different layers on different ranks, and buffers that the first rank gives the others."""
    layers = nn.ModuleList([network(), network(), nn.BatchNorm1d(20)])
    layers[2].running_mean.fill_(float(rank.rank))
    chosen = Applying(lambda m, x, index: m.layers[index](m.layers[2](x)), (), layers=layers)
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}
    model = DistributedDataParallel(chosen, **options)
    with model.no_sync():
        model(batch(1), rank.rank).sum().backward()
    model(batch(0), rank.rank).sum().backward()
    used = [p.grad.clone() for p in model.module.layers[0].parameters()]
    return used, [b.clone() for b in model.buffers()]


def with_hook(rank, name, kind):
    rows = lambda x: x.chunk(rank.world)[rank.rank]  # noqa: E731
    make = DistributedDataParallel if kind == "torch" else lockstep.DistributedDataParallel
    # One bucket: PyTorch's own reducer does not wait for the callbacks of one before it begins the next.
    model = make(network(), bucket_cap_mb=25)
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, random_seed=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, rows)


def with_builtin_hook(rank, name):
    model = DistributedDataParallel(network())
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    return train(model, lambda x: x.chunk(rank.world)[rank.rank])


def uneven(rank, kind):
    make = DistributedDataParallel if kind == "torch" else lockstep.DistributedDataParallel
    model = make(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    with Join([model]):
        for step in range(2 + 2 * rank.rank):
            optimizer.zero_grad()
            model(batch(step).chunk(rank.world)[rank.rank]).square().mean().backward()
            optimizer.step()
            seen.append([p.grad.clone() for p in model.parameters()])
    assert len(seen) == 2 + 2 * rank.rank
    return seen, [p.detach().clone() for p in model.parameters()]


def functional_collectives(rank):
    own, group = rank.rank, dist.group.WORLD
    results = []
    for numel in (6, 60_000):
        x = torch.arange(float(numel)) + own
        results += [
            functional.all_reduce(x, "sum", group),
            functional.all_reduce(x, "avg", group),
            named.all_gather_single(x, 0, group),
            named.reduce_scatter_single(x, "max", 0, group),
            functional.broadcast(x, 1, group),
            functional.all_to_all_single(x, None, None, group),
            *functional.all_reduce_coalesced([x, x + 1], "sum", group),
            *named.all_gather_single_coalesced([x, x + 1], group),
            *named.reduce_scatter_single_coalesced([x, x + 1], "sum", [0, 0], group),
        ]
        assert x[0] == own  # it stays as it is
    y = torch.ones(3, requires_grad=True)
    gathered = named.all_gather_single_autograd(y * (own + 1), 0, group).wait()
    gathered.mul(2).sum().backward()  # PyTorch 2.11 refuses an expanded gradient, such as sum's, for any backend
    results = [result.wait() if hasattr(result, "wait") else result for result in results]
    assert len(results) == 24
    return results, y.grad


# Two ranks have only one order in which to add. Each row: what each of them does, with what, and how near it is.
AS_WITH_GLOO = {
    "static graph": (data_parallel, ("torch", {"static_graph": True}), {}),
    "views of buckets": (data_parallel, ("torch", {"gradient_as_bucket_view": True}), {}),
    "unused parameters and buffers": (unused_parameters, (), {}),
    **{f"builtin hook {name}": (with_builtin_hook, (name,), {}) for name in ("ALLREDUCE", "FP16_COMPRESS")},
    **{f"uneven, {kind}": (uneven, (kind,), {}) for kind in ("torch", "lockstep")},
    "functional collectives": (functional_collectives, (), {}),
}
# PowerSGD begins further collectives, and waits for them, in callbacks of futures.
HOOKS = {
    f"{name}, {kind}": (with_hook, (name, kind), {"rtol": 1e-4, "atol": 1e-6})
    for name in ("fp16", "PowerSGD")
    for kind in ("torch", "lockstep")
}


def use(rank, names):
    """What each of these gives, one after the other."""
    return [function(rank, *args) for function, args, _ in map((AS_WITH_GLOO | HOOKS).get, names)]


@pytest.mark.parametrize("names", [[*AS_WITH_GLOO], pytest.param([*HOOKS], marks=pytest.mark.numpy)], ids=len)
def test_what_uses_a_process_group_gets_the_same_as_with_gloo(names):
    both = (zip(*run_processes(2, use, names, backend=backend), strict=True) for backend in ("shm", "gloo"))
    for name, ours, gloo in zip(names, *both, strict=True):
        function, _, near = (AS_WITH_GLOO | HOOKS)[name]
        close = near or {"rtol": 0, "atol": 0}
        torch.testing.assert_close(ours, gloo, **close, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
        if function is data_parallel or name.startswith("fp16"):
            check(ours, 2e-2 if near else 2e-5)


# ----------------------------------------------------------------------------- sharded, and DTensor


def sharded(rank, shape):
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gradients, weights = train(model, lambda x: x.chunk(rank.world)[rank.rank])
    assert all(isinstance(each, DTensor) for each in (*gradients, *weights))
    return [g.full_tensor() for g in gradients], [w.full_tensor() for w in weights]


@pytest.mark.parametrize("shape", [(2,), *(pytest.param(shape, marks=pytest.mark.around) for shape in [(3,), (2, 2)])])
def test_fully_sharded_training_is_that_of_one_process(shape):
    check(run_processes(torch.Size(shape).numel(), sharded, shape, backend="shm"))


@on_processes(3, backend="shm")
def test_distributed_tensors_are_multiplied_and_redistributed(rank):
    mesh = init_device_mesh("cpu", (rank.world,))
    x = torch.arange(7 * 5.0).view(7, 5)  # does not divide evenly
    weight = torch.arange(5 * 6.0).view(5, 6)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    product = rows @ distribute_tensor(weight, mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
    columns = product.redistribute(mesh, [Shard(1)])
    partial = distribute_tensor(x, mesh, [Shard(1)]) @ distribute_tensor(weight, mesh, [Shard(0)])
    assert torch.equal(product.full_tensor(), x @ weight)
    assert torch.equal(columns.full_tensor(), x @ weight)
    assert torch.equal(partial.full_tensor(), x @ weight)
    assert torch.equal(columns.sum().full_tensor(), (x @ weight).sum())
    assert columns.to_local().shape[1] == 2


@pytest.mark.around
@on_processes(2, backend="shm")
def test_collectives_can_be_compiled(rank):
    gather = named.all_gather_single

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return total + gather(x, 0, dist.group.WORLD).sum()

    assert step(torch.full((4,), rank.rank + 1.0)).tolist() == [18.0] * 4


# ------------------------------------------------------------------------------------- checkpoints


def checkpointed(rank, folder):
    mesh = init_device_mesh("cpu", (rank.world,))
    model = fully_shard(network(), mesh=mesh)
    train(model, lambda x: x.chunk(rank.world)[rank.rank])
    state = {"model": model.state_dict(), "steps": STEPS}
    checkpoint.save(state, checkpoint_id=folder)
    saved = [p.full_tensor().clone() for p in model.parameters()]
    other = fully_shard(copy.deepcopy(network()), mesh=mesh)
    loaded = {"model": other.state_dict(), "steps": 0}
    checkpoint.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["model"])
    assert loaded["steps"] == STEPS
    for got, wanted in zip(other.parameters(), saved, strict=True):
        assert torch.equal(got.full_tensor(), wanted)
    return saved


def loaded_by_fewer(rank, folder):
    state = {"model": network().state_dict(), "steps": 0}
    checkpoint.load(state, checkpoint_id=folder)
    return list(state["model"].values())


@pytest.mark.numpy
def test_a_distributed_checkpoint_is_saved_and_loaded(tmp_path):
    saved = run_processes(3, checkpointed, str(tmp_path), backend="shm")
    for weights in run_processes(2, loaded_by_fewer, str(tmp_path), backend="shm"):
        assert all(torch.equal(x, y) for x, y in zip(weights, saved[0], strict=True))


def profiler_shows_what_another_thread_ends():
    """Return True if this PyTorch's profiler has a label that one thread entered and another left; 2.11 has not."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], acc_events=True) as profiler:
        label = torch.autograd._record_function_with_args_enter("handed on")
        thread = threading.Thread(target=torch.autograd._record_function_with_args_exit, args=(label,))
        thread.start()
        thread.join()
    return any(event.name == "handed on" for event in profiler.events())


@on_processes(2, backend="shm")
def test_a_profiler_shows_collectives_and_their_sizes(rank):
    x = torch.ones(1000)
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], record_shapes=True, acc_events=True) as profiler:
        for _ in range(3):
            dist.all_reduce(x)
        pending = dist.broadcast(x, 0, async_op=True)
        model = DistributedDataParallel(nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        pending.wait()
        dist.all_gather([torch.empty(7), torch.empty(7)], x[:7])
        dist.barrier()
    events = [(event.name, event.input_shapes) for event in profiler.events() if event.name.startswith("shm:")]
    shows_background = profiler_shows_what_another_thread_ends()
    assert events.count(("shm:all_reduce", [[1000]])) == 3
    if shows_background:  # a worker may have run them
        assert ("shm:all_reduce", [[20]]) in events  # the gradients of PyTorch's DDP
        assert ("shm:broadcast", [[1000]]) in events
    assert ("shm:all_gather", [[7], [7]]) in events
    assert ("shm:barrier", []) in events
