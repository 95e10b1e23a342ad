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
from processes import on_processes
from programs.networks import Applying, OnDemand
from programs.ranks import called_by, clear, holds_means, on_ranks, own_gradients, replicated
from small_modules import error_of, filled
from threaded import count_collectives, run_ranks

BFLOAT16, FLOAT16 = HALF = (torch.bfloat16, torch.float16)
several_groups = pytest.mark.parametrize("groups", ["gloo", "one host", "two hosts"])


def run(world, function, *args, groups="gloo", **options):
    """Ranks on Gloo, on `shm` on one host, or on `shm` on two."""
    hosts = {"gloo": "", "one host": "a" * world, "two hosts": "a" * (world // 2) + "b" * (world - world // 2)}[groups]
    return run_ranks(world, function, *args, hosts=hosts, **options)


def on_groups(world):
    """The test is called on each of so many ranks, on groups of each kind."""
    return lambda test: several_groups(called_by(run, world, ["groups"], None, (), {})(test))


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


large = functools.partial(OnDemand, 4000)


def on_demand(rank, half, make=OnDemand, **options):
    return replicated(rank, make, reduce_dtype=half, **options)


def batch(rank, step=0):
    return torch.randn(4, 3, generator=rank.generator(step), device="cpu").to(rank.device)


def of_this_rank(rank, model, number=0, **kwargs):
    return own_gradients(model, lambda each: each(batch(rank, number), **kwargs))


def holds_rounded_means(rank, model, own, half, factor=1.0):
    """Return True if the gradients are, bit for bit, what all ranks' make together."""
    return holds_means(rank, model, own, lambda tensors: mean_of(tensors, half) * factor, rtol=0, atol=0)


def step(rank, model, half, number=0, **kwargs):
    model.zero_grad()
    own = of_this_rank(rank, model, number, **kwargs)
    model(batch(rank, number), **kwargs).backward()
    return holds_rounded_means(rank, model, own, half)


# ------------------------------------------------------------------------------------- right gradients


def trains(rank, half, make, cap):
    model = on_demand(rank, half, make, bucket_cap_mb=cap)
    for number in range(4):
        assert step(rank, model, half, number)
    model(batch(rank), extra=rank.rank > 0).backward()  # late, and so in float32
    for number in range(3):  # parameters that only some ranks use
        assert step(rank, model, half, number, extra=number % 2 == 0 and rank.rank > 0)
    assert all(rank.all_equal(p.grad) for p in model.parameters() if p.grad is not None)


networks = pytest.mark.parametrize(("make", "cap"), [(large, None), (OnDemand, None), (OnDemand, 0.00005)])


@pytest.mark.usefixtures("small_pieces")
@several_groups
@networks
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(5, marks=pytest.mark.around)])
def test_gradients_are_rounded_once_and_equal_on_all_ranks(world, half, make, cap, groups):
    run(world, trains, half, make, cap, groups=groups)


@pytest.mark.parametrize(("world", "groups"), [(2, "one host"), pytest.param(3, "two hosts", marks=pytest.mark.around)])
def test_large_gradients_in_pieces_of_the_usual_size(world, groups):
    run(world, trains, BFLOAT16, functools.partial(OnDemand, 300_000), None, groups=groups)


MEANS = [
    (FLOAT16, [60000.0] * 4, 1.0, 60000.0 // 32 * 32),  # the sum is larger than any float16
    (FLOAT16, [6e-8] * 4, 1.0, 2.0**-24),  # a fourth of it is smaller than any float16
    (FLOAT16, [2.0**-24, 0, 0, 0], 1.0, 0.0),  # as the mean is
    (FLOAT16, [60000.0] * 3 + [0.0], 4 / 3, 45000.0 // 32 * 32 * (4 / 3)),
    (BFLOAT16, [1.0, 2.0**-8, 2.0**-8, 2.0**-8], 1.0, (1 + 2.0**-6) / 4),  # 1 if rounded at each rank
    (FLOAT16, [1e6, 0, 0, 0], 1.0, float("inf")),
    (BFLOAT16, [float("inf"), 0, 0, 0], 1.0, float("inf")),
    (BFLOAT16, [0, float("nan"), 0, 0], 1.0, float("nan")),
    (BFLOAT16, [0, float("inf"), 0, float("-inf")], 1.0, float("nan")),
]


@pytest.mark.parametrize(("half", "values", "factor", "wanted"), MEANS)
@on_groups(4)
def test_what_becomes_of_large_small_and_other_numbers(rank, half, values, factor, wanted):
    ranks = Collectives(rank.group, Phases())
    tensors = [torch.full((numel,), float(values[rank.rank])) for numel in (0, 1, 2, 3, 7, 300_000)]
    under_way = [begin_mean(ranks, half, tensor, "tensor", factor) for tensor in tensors if len(tensor)]
    for each in under_way:
        each.wait()
    gather_all(under_way)
    for tensor in tensors[1:]:
        assert torch.equal(tensor, tensor[0].expand_as(tensor)) or tensor.isnan().all()
    assert tensors[1][0].item() == pytest.approx(wanted, rel=1e-7, abs=0, nan_ok=True)


KINDS = (torch.float32, torch.float64, BFLOAT16, FLOAT16)


@on_ranks(2)
def test_other_dtypes_than_float32_travel_as_they_are(rank):
    make = lambda: nn.ModuleList(nn.Linear(2, 3, bias=False, dtype=dtype) for dtype in KINDS)  # noqa: E731
    model = on_demand(rank, BFLOAT16, make)
    rows = on_demand(rank, BFLOAT16, lambda: filled(nn.Embedding(4, 2, sparse=True)))
    value = 1 + 2.0**-12 * (rank.rank + 1)
    for _ in range(3):
        clear(model, rows)
        sum((layer(torch.full((1, 2), value).to(layer.weight.dtype)).sum() for layer in model), 0.0).backward()
        (rows(torch.tensor([rank.rank])).sum() * value).backward()
    assert [layer.weight.grad.flatten()[0].item() for layer in model] == [1.0, 1 + 1.5 * 2.0**-12, 1.0, 1.0]
    assert rows.weight.grad.coalesce().values()[:, 0].tolist() == [(1 + 2.0**-12) / 2, (1 + 2.0**-11) / 2]


@on_groups(4)
def test_gradients_of_parameters_in_the_same_half_precision_are_added_in_float32(rank):
    """They are 1 on the first rank, 1/256 on all others."""
    layer = on_demand(rank, BFLOAT16, lambda: nn.Linear(1, 1, bias=False, dtype=BFLOAT16))
    layer(torch.full((1, 1), 2.0**-8 if rank.rank else 1.0, dtype=BFLOAT16)).sum().backward()
    assert layer.weight.grad.item() == (1 + 2.0**-6) / 4


@on_groups(3)
def test_small_buffers_and_the_report_stay_exact(rank):
    """A used parameter on one rank alone, and buffers that half precision would round."""
    model = on_demand(rank, BFLOAT16)
    model.register_buffer("seen", torch.tensor([1 + 2.0**-20, float(rank.rank)]))
    for number in range(3):
        step(rank, model, BFLOAT16, number, extra=rank.rank == 1)
        assert model.extra.weight.grad is not None
        assert model.seen.tolist() == [1 + 2.0**-20, 0.0]
        assert rank.all_equal(model.norm.running_var)


# ------------------------------------------------------------------------------- steps of other kinds


@on_ranks(3)
def test_accumulated_gradients_are_rounded_once(rank):
    model = on_demand(rank, BFLOAT16)
    step(rank, model, BFLOAT16)
    model.zero_grad()
    own = [of_this_rank(rank, model, number) for number in range(3)]
    for number in range(3):
        with lockstep.accumulate(model, last=number == 2):
            model(batch(rank, number)).backward()
    assert holds_rounded_means(rank, model, [sum(each) for each in zip(*own, strict=True)], BFLOAT16)


@on_ranks(3)
def test_weights(rank):
    """Weights of 1, 3 and 3: their sum divides the sum."""
    layer = on_demand(rank, BFLOAT16, lambda: nn.Linear(1, 1, bias=False))
    for _ in range(2):
        layer.zero_grad()
        with lockstep.accumulate(layer, weight=3.0 if rank.rank else 1.0):
            layer(torch.tensor([[7.0]])).sum().backward()
    assert layer.weight.grad.item() == pytest.approx(3.0, rel=1e-6)


def twice():
    """A layer that is computed again inside of backward, twice: its gradient comes in pieces, the second one late."""

    def forward(m, x, again=True):
        for index in (0, 1, 0, 2):
            layer = m.layers[index]
            x = (checkpoint(layer, x, use_reentrant=True) if again else layer(x)).tanh()
        return x.square().mean()

    return Applying(forward, (), layers=nn.ModuleList(nn.Linear(3, 3) for _ in range(3)))


@on_ranks(3)
def test_late_gradients_are_added_to_what_has_been_rounded(rank):
    """In float32: they are few, and have no bucket. From then on that bucket waits, and all is rounded once."""
    model, late = on_demand(rank, BFLOAT16, twice, bucket_cap_mb=0.00001), []
    for number in range(4):
        model.zero_grad()
        own = of_this_rank(rank, model, number, again=False)
        with count_collectives(rank) as sent:
            model(batch(rank, number).requires_grad_()).backward()
        late.append(any(each.dtype is torch.int64 for each in sent[-4:]))
        assert holds_means(rank, model, own, rtol=1e-2, atol=1e-4)
    assert holds_rounded_means(rank, model, own, BFLOAT16)
    assert True in late
    assert not late[-1]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("initial", [True, False])
@on_processes(3, "backend")
def test_ranks_that_have_run_out_of_batches(rank, initial):
    model = lockstep.DistributedDataParallel(rank.make(lambda: nn.Linear(2, 1, bias=False)), reduce_dtype=FLOAT16)
    shares = [1.0, 1.0, 2 / 3, 1 / 3] if initial else [1.0] * 4
    with model.join(divide_by_initial_world_size=initial):
        for share in shares[: 2 + rank.rank]:
            model.zero_grad()
            model(torch.tensor([[40000.0, 3.0]])).sum().backward()
            found = model.module.weight.grad.flatten().tolist()
            assert found == pytest.approx([40000.0 * share, 3.0 * share], rel=2e-3)


def fails(rank, make, cap):
    """Rank 1 fails in every other step."""
    model = on_demand(rank, BFLOAT16, make, bucket_cap_mb=cap)
    for number in range(0, 6, 2):
        assert step(rank, model, BFLOAT16, number)
        model.zero_grad()
        error = error_of(model(batch(rank, number + 1), fails=rank.rank == 1).backward)
        assert error is (ArithmeticError if rank.rank == 1 else PeerError)
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("small_pieces")
@several_groups
@networks
@pytest.mark.parametrize("world", [2, 3])
def test_after_a_backward_that_fails_on_one_rank_all_go_on(world, make, cap, groups):
    run(world, fails, make, cap, groups=groups)


@on_ranks(3, group_timeout=10)
def test_a_rank_that_fails_waits_for_nobody(rank):
    """It has its own exception before another rank has come to its backward."""
    model = on_demand(rank, BFLOAT16)
    step(rank, model, BFLOAT16)
    step(rank, model, BFLOAT16)
    loss = model(batch(rank), fails=rank.rank == 0)
    if rank.rank == 1:
        rank.group.recv([torch.zeros(1)], 0, 7).wait()
    assert error_of(loss.backward) is (PeerError if rank.rank else ArithmeticError)
    if rank.rank == 0:
        rank.group.send([torch.ones(1)], 1, 7).wait()


@on_groups(3)
def test_several_modules_of_which_each_has_its_own(rank):
    models = [on_demand(rank, half) for half in (BFLOAT16, None, FLOAT16)]
    for number in range(4):
        own = [of_this_rank(rank, model, number) for model in models]
        clear(*models)
        sum(model(batch(rank, number)) for model in models).backward()
        assert holds_rounded_means(rank, models[0], own[0], BFLOAT16)
        assert holds_means(rank, models[1], own[1])
        assert holds_rounded_means(rank, models[2], own[2], FLOAT16)


@pytest.mark.filterwarnings("ignore:backward.create_graph=True.:UserWarning")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@on_ranks(3)
def test_backward_with_a_graph(rank):
    model = on_demand(rank, BFLOAT16)
    for number in range(2):
        model.zero_grad()
        own = of_this_rank(rank, model, number)
        model(batch(rank, number)).backward(create_graph=True)
        assert holds_rounded_means(rank, model, own, BFLOAT16)
        assert not any(p.grad.requires_grad for p in model.parameters() if p.grad is not None)


# ---------------------------------------------------------------------------------- what is communicated


@pytest.mark.parametrize("world", [2, 3])
@on_ranks(None, "world")
def test_bytes_and_collectives(rank):
    model = on_demand(rank, BFLOAT16)
    for number in range(3):
        step(rank, model, BFLOAT16, number, extra=True)
    model.zero_grad()
    with count_collectives(rank) as seen:
        model(batch(rank), extra=True).backward()
    numel = sum(p.numel() for p in model.parameters())
    part = 2 * -(-numel // 3)
    report = "all_reduce", seen[1].numel
    assert [(each.name, each.numel) for each in seen] == {
        2: [("all_gather_single", 2 * numel), report],  # bytes
        3: [("all_to_all_single", 3 * part), report, ("all_gather_single", part)],
    }[rank.world]


# -------------------------------------------------------------------------------------------- refusals


def test_only_half_precision():
    for dtype in (torch.float32, torch.float64, "bfloat16", torch.float8_e4m3fn):
        with pytest.raises(OptionError, match=r"reduce_dtype must be torch.bfloat16 or torch.float16, or None"):
            lockstep.replicate(nn.Linear(1, 1), reduce_dtype=dtype)


@on_ranks(2)
def test_communication_hooks_are_refused(rank):
    model = on_demand(rank, BFLOAT16)
    with pytest.raises(OptionError, match=r"register_comm_hook\(\): this module's gradients travel in reduce_dtype"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    assert step(rank, model, BFLOAT16)


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("kinds", [(BFLOAT16, FLOAT16), (None, BFLOAT16)])
@on_ranks(2)
def test_ranks_with_different_options(rank, kinds, init_sync):
    with pytest.raises(AgreementError, match="option reduce_dtype") as raised:
        model = on_demand(rank, kinds[rank.rank], init_sync=init_sync)
        model(batch(rank)).backward()
    assert str(kinds[0]) in str(raised.value)
    assert str(kinds[1]) in str(raised.value)


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
    for make, cap in ((large, None), (OnDemand, 0.00005)):
        on_accelerators(world, trains, BFLOAT16, make, cap)
    if world > 1:
        on_accelerators(world, fails, OnDemand, 0.00005)
