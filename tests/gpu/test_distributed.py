"""Many processes on a GPU: one rank over NCCL, and two that share a GPU over Gloo.

Ranks are processes of their own (`processes.py`); with several GPUs there would be nothing here that one does not show.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import lockstep
from lockstep.errors import OptionError, OutOfSyncError
from one_gpu import CYCLES, LIMIT, LONG
from processes import on_processes, run_processes

MIB = 1 << 20

Pair = namedtuple("Pair", "left right")


class Network(nn.Module):
    """Small layers that share a bucket, a large one that travels alone, buffers, and a layer used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.large = nn.Linear(16, 1100), nn.BatchNorm1d(1100), nn.Linear(1100, 1000)
        self.last, self.extra = nn.Linear(1000, 4), nn.Linear(16, 4)

    def forward(self, x, extra=False):
        y = self.last(self.large(self.norm(self.first(x)).relu()).tanh())
        return y + self.extra(x) if extra else y


WAYS = {
    "replicate": lambda module, **options: lockstep.replicate(module, **options),
    "wrapper": lambda module, **options: lockstep.DistributedDataParallel(module, **options),
}


def begin(device):
    """The device, and the group that goes with it; products of matrices are exact enough to compare."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if device == "cpu":  # a dry run
        return torch.device("cpu"), None
    torch.cuda.set_device(0)
    return torch.device("cuda", 0), dist.new_group(backend="nccl") if dist.get_world_size() == 1 else None


def inputs(step, rank, device):
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def gradients(module):
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def train(model, rank, device, steps=5, sync=True):
    """The gradients after each step; step 1 is accumulated into step 2 under no_sync, step 3 uses the extra layer."""
    update, seen = torch.optim.SGD(model.parameters(), 0.05), []
    for step in range(steps):
        with model.no_sync() if sync and step == 1 else contextlib.nullcontext():
            model(inputs(step, rank, device), extra=step == 3 and rank == 0).square().mean().backward()
        seen.append(gradients(model))
        if step != 1:
            update.step()
            update.zero_grad()
    return seen


# ---------------------------------------------------------------------------------- one rank, NCCL


def alone(rank, device):
    device, group = begin(device)
    plain = rank.make(Network).to(device)
    local = copy.deepcopy(plain)
    wanted = train(local, 0, device, sync=False)
    for name, way in WAYS.items():
        model = way(copy.deepcopy(plain), process_group=group)
        torch.testing.assert_close(train(model, 0, device), wanted, msg=lambda text, name=name: f"{name}: {text}")
        assert {p.device for p in model.parameters()} == {b.device for b in model.buffers()} == {device}
        torch.testing.assert_close([*model.buffers()], [*local.buffers()])
        lockstep.check_in_sync(model)
        assert lockstep.loop.statistics(model).calls["collective"] > 5
        model.register_comm_hook(group, fp16_compress_hook)
        model.zero_grad()
        model(inputs(9, 0, device)).square().mean().backward()
        assert all(grad is None or grad.isfinite().all() for grad in gradients(model))
        del model
    (mean,) = lockstep.loop.mean_over_ranks([torch.full((3,), 2.0, device=device)], group)
    assert mean.tolist() == [2.0] * 3


def test_one_rank_over_nccl_trains_as_a_plain_module(home):
    run_processes(1, alone, home.type, timeout=LIMIT)


def frozen_meanwhile(rank, device):
    """A layer is frozen when its forward has run: before backward, in a hook, or between two backwards of a step."""
    device, group = begin(device)
    plain = rank.make(Network).to(device)
    model = lockstep.replicate(copy.deepcopy(plain), process_group=group)
    for step in range(6):
        for each in (plain, model):
            each.zero_grad()
            loss = each(inputs(step, 0, device)).square().mean()
            if step % 3 == 2:
                loss.backward(retain_graph=True)
            if step % 3 == 1:
                loss.register_hook(lambda gradient, each=each: each.last.requires_grad_(False) and None)
            else:
                each.last.requires_grad_(False)
            loss.backward()
            each.last.requires_grad_(True)
        torch.testing.assert_close(gradients(model), gradients(plain), msg=lambda text, step=step: f"{step}: {text}")


def test_a_layer_may_be_frozen_when_its_forward_has_run(home):
    run_processes(1, frozen_meanwhile, home.type, timeout=LIMIT)


# ------------------------------------------------------------------------------ two ranks, one GPU


def shared(rank, device):
    device, _ = begin(device)
    plain = rank.make(Network).to(device)
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), find_unused_parameters=True)
    wanted = []
    for step in range(3):
        reference.zero_grad()
        reference(inputs(step, rank.rank, device), extra=step == 1 and rank.rank == 0).square().mean().backward()
        wanted.append(gradients(reference))
    for way in WAYS.values():
        model = way(rank.make(Network, seed=rank.rank).to(device))
        for step in range(3):
            model.zero_grad()
            model(inputs(step, rank.rank, device), extra=step == 1 and rank.rank == 0).square().mean().backward()
            for (name, p), theirs in zip(model.named_parameters(), wanted[step], strict=True):
                ours = torch.zeros_like(p) if p.grad is None else p.grad
                theirs = torch.zeros_like(p) if theirs is None else theirs
                torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
        lockstep.check_in_sync(model)
        train(model, rank.rank, device)
        lockstep.check_in_sync(model)
        with torch.no_grad():
            next(model.parameters())[0, 0] += rank.rank
        with pytest.raises(OutOfSyncError, match=r"first\.weight is out of sync"):
            lockstep.check_in_sync(model)
        del model


def test_two_ranks_on_one_gpu_have_the_gradients_of_the_reference(home):
    run_processes(2, shared, home.type, timeout=LIMIT)


@pytest.mark.usefixtures("gpu")
@on_processes(2, timeout=LIMIT)
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank):
    device, _ = begin("cuda")
    model = lockstep.replicate(nn.Linear(4, 4).to(device))
    scaler, update = torch.amp.GradScaler("cuda", init_scale=2.0**10), torch.optim.SGD(model.parameters(), 0.1)
    changed = []
    for overflow in (False, True, False):
        before = model.weight.detach().clone()
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.ones(2, 4, device=device)).float().sum()
        scaler.scale(loss * (float("inf") if overflow and rank.rank == 1 else 1.0)).backward()
        scaler.step(update)
        scaler.update()
        update.zero_grad()
        changed.append(not torch.equal(before, model.weight))
    lockstep.check_in_sync(model)
    assert changed == [True, False, True]


# ------------------------------------------------------------------------------------- placement


class Keeps(nn.Module):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.given = args, kwargs
        return self.weight.sum()


@pytest.mark.usefixtures("gpu")
@on_processes(1, timeout=LIMIT)
def test_inputs_are_moved_to_device_id(rank):
    device, group = begin("cuda")
    here = torch.ones(2, device=device)
    arguments = torch.ones(3), Pair(torch.ones(1), here), {"list": [torch.ones(1), "text", None]}
    for model in (
        lockstep.replicate(Keeps().to(device), process_group=group, device_id=0),
        lockstep.replicate(Keeps().to(device), process_group=group, device_id=device),
        lockstep.DistributedDataParallel(Keeps().to(device), process_group=group, device_ids=[0]),
    ):
        model(*arguments, key=torch.ones(1)).backward()
        (x, pair, nested), kwargs = getattr(model, "module", model).given
        tensors = [x, *pair, nested["list"][0], kwargs["key"]]
        assert {tensor.device for tensor in tensors} == {device}
        assert pair.right is here
        assert type(pair) is Pair
        assert nested["list"][1:] == ["text", None]
        state = lockstep.replicate.state(model)
        assert (model.device_ids if hasattr(model, "module") else state._ddp_weakref().device_ids) == [0]
    left = lockstep.replicate(Keeps().to(device), process_group=group)
    left(*arguments)
    assert left.given[0][0] is arguments[0]  # without device_id nothing is moved


# --------------------------------------------------------------------------------------- waiting


@pytest.mark.usefixtures("gpu")
@on_processes(1, timeout=LIMIT)
def test_backward_does_not_wait_for_the_gpu(rank):
    """While the GPU is busy with what came before, a whole step is given to it; the report is read in the next one."""
    device, group = begin("cuda")
    x = inputs(0, 0, device)
    for way in WAYS.values():
        model = way(rank.make(Network).to(device), process_group=group)

        def step(model=model) -> None:
            model.zero_grad()
            model(x, extra=True).square().mean().backward()

        for _ in range(4):  # the plan settles, and whatever is allocated is there
            step()
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        step()
        assert not torch.cuda.current_stream().query(), "the host has waited for the GPU in backward"
        torch.cuda.synchronize()
        del model, step


@pytest.mark.usefixtures("gpu")
@on_processes(1, timeout=LIMIT)
def test_backward_on_a_stream_of_its_own(rank):
    """On a stream that is kept busy, whoever does not wait for it reads gradients that are not there yet."""
    device, group = begin("cuda")
    plain = rank.make(Network).to(device)
    local, stream = copy.deepcopy(plain), torch.cuda.Stream()
    for name, way in WAYS.items():
        model = way(copy.deepcopy(plain), process_group=group)
        for step in range(4):
            x = inputs(step, 0, device)
            for module in (local, model):
                module.zero_grad()
            local(x).square().mean().backward()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
                model(x).square().mean().backward()
                got = gradients(model)
            stream.synchronize()
            torch.testing.assert_close(got, gradients(local), msg=lambda text, n=name, s=step: f"{n}, step {s}: {text}")
        del model


class Slow(torch.autograd.Function):
    """The identity; in backward, what follows on its stream has to wait."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(CYCLES)
        return gradient


class Branches(nn.Module):
    """Two branches, on two streams, whose gradients are in one bucket; those of the left one come late."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, stream):
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            right = self.right(x)
        left = Slow.apply(self.left(x))  # its backward comes first
        here.wait_stream(stream)
        return (left * left).sum() + (right * right).sum()


@pytest.mark.usefixtures("gpu")
@on_processes(1, timeout=LIMIT)
def test_a_bucket_of_gradients_from_two_streams(rank):
    """Whoever copies the bucket on the stream of its last gradient reads others that are not there yet."""
    device, group = begin("cuda")
    local, stream = rank.make(Branches).to(device), torch.cuda.Stream()
    model = lockstep.replicate(copy.deepcopy(local), process_group=group)
    for step in range(5):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(device)
        for module in (local, model):
            module.zero_grad()
            module(x, stream).backward()
        got = gradients(model)
        torch.cuda.synchronize()
        torch.testing.assert_close(got, gradients(local), msg=lambda text, step=step: f"step {step}: {text}")


# ---------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("on_side_stream", [True, False])
@pytest.mark.usefixtures("gpu")
@on_processes(1, timeout=LIMIT)
def test_a_captured_step_is_refused_and_graphed_callables_are_replicated(rank, on_side_stream):
    """A whole step is refused before anything is sent, also if the steps before it have run on the default stream,
    which must not wait for one that is captured; graphs of forward and backward alone are not."""
    device, group = begin("cuda")
    plain, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device), inputs(0, 0, device)
    model = lockstep.replicate(copy.deepcopy(plain), process_group=group)
    side = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    before = lockstep.loop.statistics(model).calls["collective"]
    with pytest.raises(OptionError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x).square().mean().backward()
    assert lockstep.loop.statistics(model).calls["collective"] == before
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(plain), (x.clone(),))
    replicated = lockstep.replicate(graphed, process_group=group)
    for step in range(4):
        x = inputs(step, 0, device)
        for module in (plain, replicated, model):
            module.zero_grad()
            module(x).square().mean().backward()
        torch.testing.assert_close(gradients(replicated), gradients(plain))
        torch.testing.assert_close(gradients(model), gradients(plain))


# ---------------------------------------------------------------------------------------- memory


def held(device):
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


@pytest.mark.usefixtures("gpu")
@on_processes(1, timeout=LIMIT)
def test_gradients_have_no_second_copy(rank):
    """Bytes that a module and its gradients hold after backward, plain and in each way."""
    device, group = begin("cuda")
    x, sizes = torch.ones(2, 512, device=device), {}
    ways = {
        "plain": lambda module, **options: module,
        **WAYS,
        "torch": lambda module, **options: nn.parallel.DistributedDataParallel(module, **options),
    }
    for _ in range(2):  # the first time, libraries take what they need
        for name, way in ways.items():
            before = held(device)
            layers = [nn.Linear(512, 512, bias=False) for _ in range(16)]  # 1 MiB each, in buckets
            model = way(nn.Sequential(*layers, nn.Linear(512, 8192, bias=False)).to(device), process_group=group)
            for _ in range(3):
                model.zero_grad()
                model(x).sum().backward()
            sizes[name] = held(device) - before
            del model, layers
    assert max(sizes["replicate"], sizes["wrapper"]) <= sizes["plain"] + MIB, sizes
    assert sizes["torch"] >= sizes["plain"] + 31 * MIB, sizes  # what the reference holds by default
