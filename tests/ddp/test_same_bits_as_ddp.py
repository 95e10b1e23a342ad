"""The same numbers as PyTorch's DistributedDataParallel, bit by bit where the arithmetic is, and as one process.

Both multiply each gradient by 1/W and sum the buckets. Two numbers have one sum, so over two ranks every bit is the
same, however the gradients lie in their buckets. Over more ranks the order of the sum decides the last bits. Gradients
of modules on the CPU go over the group's companion, so they have the bits of a ``shm`` group; under a communication
hook, which sends over the program's group, they have DDP's.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F

import lockstep
from ddp_reference import gradients, values
from processes import on_processes, run_processes
from programs.networks import STRUCTURES, Applying

ROWS = 3  # of each rank in each step


def bag():
    """Sparse gradients from a bag of embeddings and dense ones from a layer; the whole is of one dtype."""
    forward = lambda m, x: m.linear(m.bag((x.abs() * 100).long() % 20))  # noqa: E731
    return Applying(forward, (4, 2), bag=nn.EmbeddingBag(20, 4, mode="sum", sparse=True))


STRUCTURED = ("mlp", "batch norm", "channels last", "attention", "LSTM", "tied", "several dtypes")
MODELS = {"bag": bag, **{name: STRUCTURES[name] for name in STRUCTURED}}
WAYS = {
    "torch": lambda module, **options: nn.parallel.DistributedDataParallel(module, **options),
    "torch with views": lambda module, **options: WAYS["torch"](module, gradient_as_bucket_view=True, **options),
    "wrapper": lambda module, **options: lockstep.DistributedDataParallel(module, **options),
    "replicate": lambda module, **options: lockstep.replicate(module, **options),
}


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
    return draw[:, :3], draw[:, 3:]


def optimizers(model: nn.Module, kind: str) -> list[Any]:
    if kind == "SGD":
        return [torch.optim.SGD(model.parameters(), 0.05)]  # with a momentum it refuses sparse gradients
    sparse = [p for m in model.modules() if isinstance(m, nn.EmbeddingBag) for p in m.parameters()]
    dense = [p for p in model.parameters() if all(p is not other for other in sparse)]
    return [torch.optim.Adam(dense, 0.01), *([torch.optim.SparseAdam(sparse, 0.01)] if sparse else [])]


def train(rank, model, optimizer: str, dtype: torch.dtype, steps: range = range(5), ranks=None) -> list[Any]:
    """Trains on this rank's rows, or on those of all `ranks` as one process would; the gradients of each step."""
    updates, seen = optimizers(model, optimizer), []
    for step in steps:
        parts = [batch(step, number, dtype) for number in (ranks or [rank.rank])]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        for update in updates:
            update.zero_grad()
        F.mse_loss(model(x), y).backward()
        seen.append([g.coalesce().to_dense() if g.is_sparse else g for g in gradients(model)])
        for update in updates:
            update.step()
    return seen


def kept(rank, module: nn.Module) -> list[torch.Tensor]:
    """All values; in the reference the other ranks get the buffers of rank 0 only in the next forward."""
    return values(module) if rank.rank == 0 else [parameter.detach().clone() for parameter in module.parameters()]


def assert_equal(got, wanted, what: str, **tolerance) -> None:
    torch.testing.assert_close(got, wanted, **(tolerance or {"rtol": 0, "atol": 0}), msg=lambda text: f"{what}: {text}")


# ------------------------------------------------------------------------------ against the reference

CASES = [
    *((name, torch.float32, kind) for name in MODELS for kind in ("SGD", "Adam")),
    *((name, torch.float64, "Adam") for name in MODELS if name != "several dtypes"),
    *((name, torch.bfloat16, "SGD") for name in ("mlp", "batch norm", "attention")),
]

# Each model once, each dtype and optimizer with several.
FEW = [
    ("mlp", torch.bfloat16, "SGD"),
    ("batch norm", torch.float32, "SGD"),
    ("channels last", torch.float32, "Adam"),
    ("attention", torch.float64, "Adam"),
    ("LSTM", torch.float32, "Adam"),
    ("bag", torch.float32, "SGD"),
    ("tied", torch.float64, "Adam"),
    ("several dtypes", torch.float32, "Adam"),
]


def compare(rank, bucket_cap_mb, cases):
    for name, dtype, optimizer in cases:
        plain = rank.make(MODELS[name])
        plain = plain if name == "several dtypes" else plain.to(dtype)
        model = WAYS["torch"](copy.deepcopy(plain), bucket_cap_mb=bucket_cap_mb)
        wanted, trained = train(rank, model, optimizer, dtype), kept(rank, model)
        for way in [*WAYS][1:]:
            model = WAYS[way](copy.deepcopy(plain), bucket_cap_mb=bucket_cap_mb)
            what = f"{name}, {dtype}, {optimizer}, {way}"
            for step, (got, grads) in enumerate(zip(train(rank, model, optimizer, dtype), wanted, strict=True)):
                assert_equal(got, grads, f"{what}, gradients of step {step}")
            assert_equal(kept(rank, model), trained, f"{what}, values")


@pytest.mark.parametrize(
    ("world", "bucket_cap_mb", "cases"),
    [
        pytest.param(1, None, CASES, marks=pytest.mark.soak),
        pytest.param(2, None, CASES, marks=pytest.mark.around),
        pytest.param(2, 1e-5, CASES, marks=pytest.mark.around),
        (2, 1e-5, FEW),
    ],
    ids=["1", "2", "2, small buckets", "2, small buckets, few"],
)
def test_every_bit_is_the_same_over_two_ranks(world, bucket_cap_mb, cases):
    run_processes(world, compare, bucket_cap_mb, cases)


def compare_under_a_hook(rank):
    for name in ("mlp", "attention"):
        plain = rank.make(MODELS[name])
        models = {way: WAYS[way](copy.deepcopy(plain)) for way in WAYS}
        for model in models.values():
            model.register_comm_hook(None, allreduce_hook)
        for step, grads in enumerate(gradients_of_steps(rank, models)):
            # until the first backward has shown an order, each has its own
            tolerance = {"rtol": 1e-5, "atol": 1e-7} if step == 0 else {}
            for way, got in grads.items():
                assert_equal(got, grads["torch"], f"{name}, {way}, step {step}", **tolerance)


def compare_with_a_group_in_shared_memory(rank):
    shm = dist.new_group(backend="shm")
    for make in (MODELS["attention"], lambda: nn.Linear(3, 300, bias=False)):
        plain = rank.make(make)
        models = {way: WAYS[way](copy.deepcopy(plain)) for way in ("torch", "wrapper", "replicate")}
        models["shm"] = lockstep.replicate(copy.deepcopy(plain), process_group=shm)
        for step, grads in enumerate(gradients_of_steps(rank, models)):
            for way, got in grads.items():
                tolerance = {"rtol": 1e-5, "atol": 1e-7} if way == "torch" else {}
                assert_equal(got, grads["shm"], f"{way}, step {step}", **tolerance)


def gradients_of_steps(rank, models):
    for step in range(3):
        x = torch.randn(2, 3, generator=rank.generator(step))
        for model in models.values():
            model.zero_grad()
            model(x).square().mean().backward()
        yield {way: gradients(model) for way, model in models.items()}


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.around)])
@pytest.mark.parametrize("compare", [compare_under_a_hook, compare_with_a_group_in_shared_memory])
def test_every_bit_is_the_same_over_more_ranks(world, compare):
    run_processes(world, compare)


# ----------------------------------------------------------------------------- against one process


@pytest.mark.parametrize(
    "world",
    [pytest.param(1, marks=pytest.mark.soak), 3, *(pytest.param(world, marks=pytest.mark.around) for world in (2, 4))],
)
@on_processes(None, "world")
def test_parts_of_a_batch_train_as_the_whole_batch_in_one_process(rank):
    for name in ("bag", "tied", "mlp", "attention", "LSTM"):
        plain = rank.make(MODELS[name]).double()
        whole = copy.deepcopy(plain)
        wanted = train(rank, whole, "Adam", torch.float64, ranks=range(rank.world))
        for way in ("wrapper", "replicate"):
            model = WAYS[way](copy.deepcopy(plain), bucket_cap_mb=1e-5)
            got = train(rank, model, "Adam", torch.float64)
            assert_equal(got, wanted, f"{name}, {way}, gradients", rtol=1e-9, atol=1e-12)
            assert_equal(values(model), values(whole), f"{name}, {way}, values", rtol=1e-9, atol=1e-10)
            lockstep.check_in_sync(model)


# ---------------------------------------------------------------------------------------- checkpoints

KINDS = {"plain": lambda module: module, **{way: WAYS[way] for way in ("torch", "wrapper", "replicate")}}


def inner(model):
    return model.module if hasattr(model, "module") else model


def loaded(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=True)


def save(state) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def train_on(rank, model, update, steps):
    for step in steps:
        x, y = batch(step, rank.rank, torch.float32)
        update.zero_grad()
        F.mse_loss(model(x), y).backward()
        update.step()


@on_processes(2)
def test_checkpoints_go_from_any_way_to_any_other(rank):
    """Trains in each way, saves, loads in each other way, and goes on; every way ends with the same bits."""
    plain = rank.make(MODELS["batch norm"])
    checkpoints = {}
    for way in ("torch", "wrapper", "replicate"):
        model = KINDS[way](copy.deepcopy(plain))
        update = torch.optim.Adam(model.parameters(), 0.01)
        train_on(rank, model, update, range(2))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": update.state_dict()}, file)
        checkpoints[way] = file.getvalue()
        checkpoints[way, "without prefix"] = save(
            {"model": inner(model).state_dict(), "optimizer": update.state_dict()}
        )
    ends = {}
    for source, saved in checkpoints.items():
        for way, make in KINDS.items():
            prefixed = any(key.startswith("module.") for key in loaded(saved)["model"])
            model = make(rank.make(MODELS["batch norm"], seed=1))
            target = model if prefixed == (way in ("torch", "wrapper")) or way == "wrapper" else None
            state = loaded(saved)["model"]
            if target is None and prefixed:  # as scripts do for a plain module
                nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
            (target or inner(model)).load_state_dict(state)
            update = torch.optim.Adam(model.parameters(), 0.01)
            update.load_state_dict(loaded(saved)["optimizer"])
            if way == "plain":
                assert_equal(values(model), [*state.values()], f"{source} to {way}")
                continue
            train_on(rank, model, update, range(2, 4))
            ends[source, way] = [parameter.detach() for parameter in model.parameters()]
    first = next(iter(ends.values()))
    for what, end in ends.items():
        assert_equal(end, first, f"{what}")
    assert len(ends) == 6 * 3
