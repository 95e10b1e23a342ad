"""`reduce_dtype`: gradients travel in half precision, are added in float32, and are rounded once."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.distributed.comm import half_precision
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.half_precision import begin_mean, gather_all
from lockstep.errors import AgreementError, OptionError, PeerError
from lockstep.phases import Phases
from processes import run_processes
from small_modules import error_of, fails_in_backward
from threaded import count_collectives, run_ranks

HALF = (torch.bfloat16, torch.float16)
GROUPS = ("", "a", "two hosts")


def run(world, function, *args, groups="", **options):
    """Ranks on Gloo, on `shm` on one host, or on `shm` on two."""
    hosts = {"": "", "a": "a" * world, "two hosts": "a" * (world // 2) + "b" * (world - world // 2)}[groups]
    return run_ranks(world, function, *args, hosts=hosts, **options)


def mean_of(tensors, half):
    """Return what the ranks are to get: one sum in the order of ranks, in float32, of what is rounded, and rounded."""
    total = torch.zeros_like(tensors[0], dtype=torch.float32)
    for tensor in tensors:
        total += tensor.to(half).float()
    return (total / len(tensors)).to(half).to(tensors[0].dtype)


@pytest.fixture
def small_pieces(monkeypatch, alone_from_64_kib):
    """What is cut into pieces and blocks is cut into smaller ones, and can be smaller itself."""
    monkeypatch.setattr(half_precision, "_PIECE", 6000)
    monkeypatch.setattr(half_precision, "_BLOCK", 1000)


class Net(nn.Module):
    """Layers of which one is used on demand, a large one, a buffer, and a backward that fails on demand."""

    def __init__(self, large=4000):
        super().__init__()
        self.first, self.large = nn.Linear(3, 5), nn.Linear(5, large)
        self.norm, self.extra = nn.BatchNorm1d(5), nn.Linear(3, 5)

    def forward(self, x, extra=False, fails=False):
        y = self.norm(self.first(x))
        y = y + self.extra(x) if extra else y
        return fails_in_backward(self.large(y), fails).square().mean(1).sum()


class Small(Net):
    """The same without the large layer: one bucket."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(5, 7)


def replicated(rank, half, make=Small, **options):
    return lockstep.replicate(rank.make(make), process_group=rank.group, reduce_dtype=half, **options)


def batch(rank, step=0):
    return torch.randn(4, 3, generator=rank.generator(step), device="cpu").to(rank.device)


def own_gradients(model, x, **kwargs):
    """The gradients of this rank alone, zeros where there is none; buffers are as before."""
    before = [buffer.clone() for buffer in model.buffers()]
    found = torch.autograd.grad(model(x, **kwargs), list(model.parameters()), allow_unused=True)
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


def holds_means(rank, model, own, half, factor=1.0):
    """Return True if the gradients are, bit for bit, what all ranks' make together; where there are none, they count as
    zero."""
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        wanted = mean_of(rank.gather(gradient), half) * factor
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert got.dtype is parameter.dtype
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    return True


def step(rank, model, half, number=0, **kwargs):
    model.zero_grad()
    own = own_gradients(model, batch(rank, number), **kwargs)
    model(batch(rank, number), **kwargs).backward()
    return holds_means(rank, model, own, half)


# ------------------------------------------------------------------------------------- right gradients


def trains(rank, half, make, cap):
    model = replicated(rank, half, make, bucket_cap_mb=cap)
    for number in range(4):
        assert step(rank, model, half, number)
    model(batch(rank), extra=rank.rank > 0).backward()  # late, and so in float32
    for number in range(3):  # parameters that only some ranks use
        assert step(rank, model, half, number, extra=number % 2 == 0 and rank.rank > 0)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("make", "cap"), [(Net, None), (Small, None), (Small, 0.00005)])
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(5, marks=pytest.mark.around)])
def test_gradients_are_rounded_once_and_equal_on_all_ranks(world, half, make, cap, groups):
    first, *others = run(world, trains, half, make, cap, groups=groups)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize(("world", "groups"), [(2, "a"), pytest.param(3, "two hosts", marks=pytest.mark.around)])
def test_large_gradients_in_pieces_of_the_usual_size(world, groups):
    first, *others = run(world, trains, torch.bfloat16, functools.partial(Net, 300_000), None, groups=groups)
    for other in others:
        assert all(map(torch.equal, first, other))


def means(rank, half, values, factor):
    ranks = Collectives(rank.group, Phases())
    tensors = [torch.full((numel,), float(values[rank.rank])) for numel in (0, 1, 2, 3, 7, 300_000)]
    under_way = [begin_mean(ranks, half, tensor, "tensor", factor) for tensor in tensors if len(tensor)]
    for each in under_way:
        each.wait()
    gather_all(under_way)
    for tensor in tensors[1:]:
        assert torch.equal(tensor, tensor[0].expand_as(tensor)) or tensor.isnan().all()
    return tensors[1][0].item()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("half", "values", "factor", "wanted"),
    [
        (torch.float16, [60000.0] * 4, 1.0, 60000.0 // 32 * 32),  # the sum is larger than any float16
        (torch.float16, [6e-8] * 4, 1.0, 2.0**-24),  # a fourth of it is smaller than any float16
        (torch.float16, [2.0**-24, 0, 0, 0], 1.0, 0.0),  # as the mean is
        (torch.float16, [60000.0] * 3 + [0.0], 4 / 3, 45000.0 // 32 * 32 * (4 / 3)),
        (torch.bfloat16, [1.0, 2.0**-8, 2.0**-8, 2.0**-8], 1.0, (1 + 2.0**-6) / 4),  # 1 if rounded at each rank
        (torch.float16, [1e6, 0, 0, 0], 1.0, float("inf")),
        (torch.bfloat16, [float("inf"), 0, 0, 0], 1.0, float("inf")),
        (torch.bfloat16, [0, float("nan"), 0, 0], 1.0, float("nan")),
        (torch.bfloat16, [0, float("inf"), 0, float("-inf")], 1.0, float("nan")),
    ],
)
def test_what_becomes_of_large_small_and_other_numbers(half, values, factor, wanted, groups):
    for got in run(4, means, half, values, factor, groups=groups):
        assert got == pytest.approx(wanted, rel=1e-7, abs=0, nan_ok=True)


def other_dtypes(rank, half):
    def make():
        return nn.ModuleList(nn.Linear(2, 3, bias=False, dtype=dtype) for dtype in KINDS)

    model = lockstep.replicate(rank.make(make), process_group=rank.group, reduce_dtype=half)
    rows = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(rows.weight)
    lockstep.replicate(rows, process_group=rank.group, reduce_dtype=half)
    value = 1 + 2.0**-12 * (rank.rank + 1)
    for _ in range(3):
        for layer in model:
            layer.zero_grad()
        sum((layer(torch.full((1, 2), value).to(layer.weight.dtype)).sum() for layer in model), 0.0).backward()
        rows.zero_grad()
        (rows(torch.tensor([rank.rank])).sum() * value).backward()
    return {layer.weight.dtype: layer.weight.grad.flatten()[0].item() for layer in model} | {
        "sparse": rows.weight.grad.coalesce().values()[:, 0].tolist()
    }


KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def test_other_dtypes_than_float32_travel_as_they_are():
    for got in run_ranks(2, other_dtypes, torch.bfloat16):
        assert got[torch.float32] == 1.0
        assert got[torch.float64] == 1 + 1.5 * 2.0**-12
        assert got["sparse"] == [(1 + 2.0**-12) / 2, (1 + 2.0**-11) / 2]
        assert got[torch.bfloat16] == got[torch.float16] == 1.0


def in_bfloat16(rank, half):
    """The mean of gradients that are in bfloat16 themselves: 1 on the first rank, 1/256 on all others."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    lockstep.replicate(layer, process_group=rank.group, reduce_dtype=half)
    layer(torch.full((1, 1), 2.0**-8 if rank.rank else 1.0, dtype=torch.bfloat16)).sum().backward()
    return layer.weight.grad.item()


@pytest.mark.parametrize("groups", GROUPS)
def test_gradients_of_parameters_in_the_same_half_precision_are_added_in_float32(groups):
    assert run(4, in_bfloat16, torch.bfloat16, groups=groups) == [(1 + 2.0**-6) / 4] * 4


def report_and_buffers(rank, half):
    """A used parameter on one rank alone, and buffers that half precision would round."""
    model = replicated(rank, half, Small)
    model.register_buffer("seen", torch.tensor([1 + 2.0**-20, float(rank.rank)]))
    found = []
    for number in range(3):
        step(rank, model, half, number, extra=rank.rank == 1)
        found.append((model.extra.weight.grad is not None, model.seen.tolist(), rank.all_equal(model.norm.running_var)))
    return found


@pytest.mark.parametrize("groups", GROUPS)
def test_small_buffers_and_the_report_stay_exact(groups):
    assert run(3, report_and_buffers, torch.bfloat16, groups=groups) == [[(True, [1 + 2.0**-20, 0.0], True)] * 3] * 3


# ------------------------------------------------------------------------------- steps of other kinds


def accumulates(rank, half):
    model = replicated(rank, half)
    step(rank, model, half)
    model.zero_grad()
    own = [torch.zeros_like(p) for p in model.parameters()]
    for number in range(3):
        own = [a + b for a, b in zip(own, own_gradients(model, batch(rank, number)), strict=True)]
        with lockstep.accumulate(model, last=number == 2):
            model(batch(rank, number)).backward()
    return holds_means(rank, model, own, half)


def test_accumulated_gradients_are_rounded_once():
    assert all(run_ranks(3, accumulates, torch.bfloat16))


def weighted(rank, half):
    """Weights of 1, 3 and 3: their sum divides the sum."""
    layer = lockstep.replicate(nn.Linear(1, 1, bias=False), process_group=rank.group, reduce_dtype=half)
    for _ in range(2):
        layer.zero_grad()
        with lockstep.accumulate(layer, weight=3.0 if rank.rank else 1.0):
            layer(torch.tensor([[7.0]])).sum().backward()
    return layer.weight.grad.item()


def test_weights():
    assert run_ranks(3, weighted, torch.bfloat16) == [pytest.approx(3.0, rel=1e-6)] * 3


class Twice(nn.Module):
    """A layer that is computed again inside of backward, twice: its gradient comes in pieces, the second one late."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, again=True):
        for index in (0, 1, 0, 2):
            x = checkpoint(self.layers[index], x, use_reentrant=True) if again else self.layers[index](x)
            x = x.tanh()
        return x.square().mean()


def computes_again(rank, half):
    model = replicated(rank, half, Twice, bucket_cap_mb=0.00001)
    late = []
    for number in range(4):
        model.zero_grad()
        own = own_gradients(model, batch(rank, number), again=False)
        with count_collectives(rank) as sent:
            model(batch(rank, number).requires_grad_()).backward()
        late.append(any(each.dtype is torch.int64 for each in sent[-4:]))
        for parameter, gradient in zip(model.parameters(), own, strict=True):
            torch.testing.assert_close(parameter.grad, sum(rank.gather(gradient)) / rank.world, rtol=1e-2, atol=1e-4)
            assert rank.all_equal(parameter.grad)
        if number == 3:
            holds_means(rank, model, own, half)
    return late


def test_late_gradients_are_added_to_what_has_been_rounded():
    """In float32: they are few, and have no bucket. From then on that bucket waits, and all is rounded once."""
    for late in run_ranks(3, computes_again, torch.bfloat16):
        assert True in late
        assert not late[-1]


def joins(rank, half, initial):
    model = lockstep.DistributedDataParallel(rank.make(lambda: nn.Linear(2, 1, bias=False)), reduce_dtype=half)
    found = []
    with model.join(divide_by_initial_world_size=initial):
        for _ in range(2 + rank.rank):
            model.zero_grad()
            model(torch.tensor([[40000.0, 3.0]])).sum().backward()
            found.append(model.module.weight.grad.flatten().tolist())
    return found


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("initial", [True, False])
def test_ranks_that_have_run_out_of_batches(initial, backend):
    all_of = run_processes(3, joins, torch.float16, initial, backend=backend)
    shares = [1.0, 1.0, 2 / 3, 1 / 3] if initial else [1.0] * 4
    for rank, found in enumerate(all_of):
        for got, share in zip(found, shares[: 2 + rank], strict=True):
            assert got == pytest.approx([40000.0 * share, 3.0 * share], rel=2e-3)


def fails(rank, half, make, cap, failing):
    model = replicated(rank, half, make, bucket_cap_mb=cap)
    seen = []
    for number in range(6):
        fault = number % 2 == 1 and rank.rank == failing
        x = batch(rank, number)
        if number % 2 == 1:
            model.zero_grad()
            seen.append(error_of(lambda x=x, fault=fault: model(x, fails=fault).backward()))
            assert all(p.grad is None for p in model.parameters())
        else:
            assert step(rank, model, half, number)
    return seen


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("make", "cap"), [(Net, None), (Small, None), (Small, 0.00005)])
@pytest.mark.parametrize("world", [2, 3])
def test_after_a_backward_that_fails_on_one_rank_all_go_on(world, make, cap, groups):
    for rank, seen in enumerate(run(world, fails, torch.bfloat16, make, cap, 1, groups=groups)):
        assert seen == [ArithmeticError if rank == 1 else PeerError] * 3


def does_not_wait(rank):
    """The failing rank has its own exception before another rank has come to its backward."""
    model = replicated(rank, torch.bfloat16)
    step(rank, model, torch.bfloat16)
    step(rank, model, torch.bfloat16)
    loss = model(batch(rank), fails=rank.rank == 0)
    if rank.rank == 0:
        raised = error_of(loss.backward)
        rank.group.send([torch.ones(1)], 1, 7).wait()
        return raised
    if rank.rank == 1:
        rank.group.recv([torch.zeros(1)], 0, 7).wait()
    return error_of(loss.backward)


def test_a_rank_that_fails_waits_for_nobody():
    assert run_ranks(3, does_not_wait, group_timeout=10) == [ArithmeticError, PeerError, PeerError]


def several(rank, half):
    models = [replicated(rank, half), replicated(rank, None), replicated(rank, torch.float16, Small)]
    for number in range(4):
        own = [own_gradients(model, batch(rank, number)) for model in models]
        for model in models:
            model.zero_grad()
        sum(model(batch(rank, number)) for model in models).backward()
        assert holds_means(rank, models[0], own[0], half)
        for parameter, gradient in zip(models[1].parameters(), own[1], strict=True):
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, sum(rank.gather(gradient)) / rank.world)
        assert holds_means(rank, models[2], own[2], torch.float16)
    return True


@pytest.mark.parametrize("groups", GROUPS)
def test_several_modules_of_which_each_has_its_own(groups):
    assert all(run(3, several, torch.bfloat16, groups=groups))


def with_graph(rank, half):
    model = replicated(rank, half)
    for number in range(2):
        model.zero_grad()
        own = own_gradients(model, batch(rank, number))
        model(batch(rank, number)).backward(create_graph=True)
        holds_means(rank, model, own, half)
        assert not any(p.grad.requires_grad for p in model.parameters() if p.grad is not None)
    return True


@pytest.mark.filterwarnings("ignore:backward.create_graph=True.:UserWarning")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_backward_with_a_graph():
    assert all(run_ranks(3, with_graph, torch.bfloat16))


# ---------------------------------------------------------------------------------- what is communicated


def collectives_of(rank, half):
    model = replicated(rank, half)
    for number in range(3):
        step(rank, model, half, number, extra=True)
    model.zero_grad()
    with count_collectives(rank) as sent:
        model(batch(rank), extra=True).backward()
    return [(each.name, each.numel) for each in sent]


def test_bytes_and_collectives():
    numel = sum(p.numel() for p in Small().parameters())
    gathered, report = run_ranks(2, collectives_of, torch.bfloat16)[0]
    assert gathered == ("all_gather_single", 2 * numel)  # bytes
    assert report[0] == "all_reduce"
    sliced, report, gathered = run_ranks(3, collectives_of, torch.bfloat16)[0]
    each = 2 * -(-numel // 3)
    assert (sliced, report[0], gathered) == (("all_to_all_single", 3 * each), "all_reduce", ("all_gather_single", each))


# -------------------------------------------------------------------------------------------- refusals


def test_only_half_precision():
    for dtype in (torch.float32, torch.float64, "bfloat16", torch.float8_e4m3fn):
        with pytest.raises(OptionError, match=r"reduce_dtype must be torch.bfloat16 or torch.float16, or None"):
            lockstep.replicate(nn.Linear(1, 1), reduce_dtype=dtype)


def registers(rank):
    model = replicated(rank, torch.bfloat16)
    with pytest.raises(OptionError, match=r"register_comm_hook\(\): this module's gradients travel in reduce_dtype"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    return step(rank, model, torch.bfloat16)


def test_communication_hooks_are_refused():
    assert all(run_ranks(2, registers))


def differs(rank, kinds, init_sync):
    model = rank.make(Small)
    try:
        lockstep.replicate(model, process_group=rank.group, reduce_dtype=kinds[rank.rank], init_sync=init_sync)
        model(batch(rank)).backward()
    except AgreementError as error:
        return str(error)


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float16), (None, torch.bfloat16)])
def test_ranks_with_different_options(kinds, init_sync):
    for message in run_ranks(2, differs, kinds, init_sync):
        assert "option reduce_dtype" in message
        assert str(kinds[0]) in message
        assert str(kinds[1]) in message


# ---------------------------------------------------------------------------------------- accelerators


@pytest.mark.parametrize(
    ("world", "control"),
    [
        (2, True),
        (3, False),
        *(pytest.param(*each, marks=pytest.mark.around) for each in [(1, True), (2, False), (3, True)]),
    ],
)
@pytest.mark.usefixtures("sim", "small_pieces")
def test_on_accelerators(world, control):
    on_accelerators = functools.partial(run_ranks, device="sim", control=control, group_timeout=5)
    for make, cap in ((Net, None), (Small, 0.00005)):
        on_accelerators(world, trains, torch.bfloat16, make, cap)
    if world > 1:
        for rank, seen in enumerate(on_accelerators(world, fails, torch.bfloat16, Small, 0.00005, 1)):
            assert seen == [ArithmeticError if rank == 1 else PeerError] * 3
