"""Ranks agree before they move data: a difference is an error on every rank; equal values, at first and later."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from bit_differences import BIT_DIFFERENCES, Values
from lockstep.distributed.comm.agreement import all_gather_object, objects_of
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import (
    AgreementError,
    NotReplicableError,
    OptionError,
    OutOfSyncError,
    UnknownOptionError,
)
from lockstep.phases import Phases
from programs.networks import Applying
from programs.ranks import error_on_all, on_ranks, replicated
from threaded import count_collectives, run_ranks


def a_parameter(name, *shape, dtype=torch.float32, trained=True):
    return name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trained)


def a_buffer(name, *shape, dtype=torch.float32):
    return name, torch.zeros(shape, dtype=dtype)


def net(*entries):
    """A module of copies of parameters and buffers, by name."""
    module = nn.Module()
    for name, tensor in copy.deepcopy(entries):  # all at once: what is tied stays so
        (module.register_parameter if isinstance(tensor, nn.Parameter) else module.register_buffer)(name, tensor)
    return module


A, B = a_parameter("a", 2, 3), a_parameter("b", 4)
COUNT, MEAN = a_buffer("count", dtype=torch.int64), a_buffer("mean", 4)
OF_4 = "float32 of shape (4,), trained"

# What the last rank has, what all others have, and words of the error; {} is the last rank's number.
DIFFERENCES = {
    "name": (
        [A, a_parameter("c", 4)],
        [A, B],
        ["rank 0 has parameter b (", "rank {} has parameter c (", "of another module"],
    ),
    "order": (
        [B, A],
        [A, B],
        [
            "rank 0 has parameter a (float32 of shape (2, 3)",
            "rank {} has parameter b (float32 of shape (4,)",
            "in another order",
        ],
    ),
    "shape": (
        [A, a_parameter("b", 5)],
        [A, B],
        [f"parameter b: rank 0 has {OF_4}; rank {{}} has float32 of shape (5,), trained"],
    ),
    "transposed": (
        [a_parameter("a", 3, 2)],
        [A],
        ["parameter a: rank 0 has float32 of shape (2, 3), trained; rank {} has float32 of shape (3, 2), trained"],
    ),
    "dtype": (
        [A, a_parameter("b", 4, dtype=torch.bfloat16)],
        [A, B],
        [f"parameter b: rank 0 has {OF_4}; rank {{}} has bfloat16 of shape (4,), trained"],
    ),
    "frozen": (
        [A, a_parameter("b", 4, trained=False)],
        [A, B],
        [f"parameter b: rank 0 has {OF_4}; rank {{}} has float32 of shape (4,), frozen"],
    ),
    "one parameter more": ([A, B], [A], [f"rank {{}} has parameter b ({OF_4}), rank 0 has no such thing"]),
    "one parameter less": ([A], [A, B], [f"rank 0 has parameter b ({OF_4}), rank {{}} has no such thing"]),
    "tied on one rank": (
        [A, ("b", A[1])],
        [A, a_parameter("b", 2, 3)],
        ["rank 0 has parameter b (float32 of shape (2, 3), trained), rank {} has no such thing"],
    ),
    "one parameter more before buffers": (
        [A, B, COUNT],
        [A, COUNT],
        ["rank 0 has buffer count (", "rank {} has parameter b ("],
    ),
    "name of a buffer": (
        [A, a_buffer("counted", dtype=torch.int64)],
        [A, COUNT],
        ["rank 0 has buffer count (", "rank {} has buffer counted ("],
    ),
    "order of buffers": (
        [A, MEAN, COUNT],
        [A, COUNT, MEAN],
        ["rank 0 has buffer count (", "rank {} has buffer mean (", "in another order"],
    ),
    "shape of a buffer": (
        [A, a_buffer("mean", 5)],
        [A, MEAN],
        ["buffer mean: rank 0 has ", "of shape (4,); rank {} has", "of shape (5,)"],
    ),
    "dtype of a buffer": (
        [A, a_buffer("mean", 4, dtype=torch.float64)],
        [A, MEAN],
        ["buffer mean: ", "rank 0 has float32 of shape (4,); rank {} has float64 of shape (4,)"],
    ),
    "one buffer less": ([A, COUNT], [A, COUNT, MEAN], ["rank 0 has buffer mean (", "rank {} has no such thing"]),
}

OPTIONS = {
    "size of buckets": (
        {"bucket_cap_mb": 1},
        {},
        "option bucket_cap_mb: rank 0 has (1048576, 26214400); rank {} has (1048576,)",
    ),
    "policy": (
        {"buffer_policy": "mean"},
        {"buffer_policy": "rank0"},
        "option buffer_policy: rank 0 has rank0; rank {} has mean",
    ),
    "flag of the policy": (
        {"forward_sync_buffers": False},
        {},
        "option buffer_policy: rank 0 has rank0; rank {} has local",
    ),
}


def check_refused(world, make, options, words):
    """The error is the same everywhere, and no rank's values went anywhere."""

    def refuse(rank):
        with count_collectives(rank) as sent:
            try:
                lockstep.replicate(make(rank.rank), process_group=rank.group, **options(rank.rank))
            finally:
                assert {each.name for each in sent} == {"all_reduce", "all_gather"}
                assert len(sent) == 5  # if digests differ, digests; the same of descriptions, and their texts

    message = error_on_all(world, refuse)
    for word in words:
        assert word.format(world - 1) in message


@pytest.mark.parametrize(("last", "others", "words"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_difference_between_modules_is_an_error_on_every_rank(last, others, words):
    world = 3 if words == DIFFERENCES["shape"][2] else 2
    check_refused(world, lambda rank: net(*(last if rank == world - 1 else others)), lambda _: {}, words)


@pytest.mark.parametrize(("last", "others", "words"), OPTIONS.values(), ids=OPTIONS)
def test_a_difference_between_options_is_an_error_on_every_rank(last, others, words):
    check_refused(3, lambda _: net(A), lambda rank: last if rank == 2 else others, [words])


@on_ranks(2)
def test_the_wrapper_compares_too_and_ranks_can_go_on(rank):
    with pytest.raises(AgreementError, match="ranks differ in parameter weight"):
        lockstep.DistributedDataParallel(nn.Linear(2, 2 + rank.rank), process_group=rank.group)
    ddp = lockstep.DistributedDataParallel(nn.Linear(1, 1), process_group=rank.group)
    ddp(torch.full((1, 1), rank.rank + 1.0)).sum().backward()
    assert ddp.module.weight.grad.item() == 1.5


@on_ranks(2)
def test_what_is_ignored_may_differ(rank):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1 + rank.rank, 1), nn.BatchNorm1d(1 + rank.rank))
    lockstep.replicate(model, ignored_modules=[model[1], model[2]], process_group=rank.group)
    named = net(A, a_parameter("b", 2 + rank.rank), a_buffer("c", 3 + rank.rank))
    lockstep.replicate(named, process_group=rank.group, params_and_buffers_to_ignore=["b", "c"])


def test_a_rank_that_cannot_replicate_its_module_tells_the_others():
    def call(rank):
        module = nn.Linear(1, 1)
        if rank.rank == 1:
            module._parameters["bias"] = module.bias * 1  # no leaf
        kind = NotReplicableError if rank.rank == 1 else AgreementError
        with pytest.raises(kind) as caught, count_collectives(rank) as sent:
            lockstep.replicate(module, process_group=rank.group)
        return str(caught.value), {each.name for each in sent}

    reason = "parameter bias is not a leaf of autograd; register a Parameter"
    (told, *names), (raised, *own), third = run_ranks(3, call)
    assert raised.startswith(reason)
    assert told == third[0] == f"rank 1 cannot replicate its module: {raised}"
    assert names == own == [{"all_reduce", "all_gather"}]


@on_ranks(2)
def test_an_option_that_does_not_go_with_the_module_of_one_rank(rank):
    ids = [0] if rank.rank == 0 else None
    kind = OptionError if rank.rank == 0 else AgreementError
    with pytest.raises(kind, match="device_ids and output_device arguments only work with") as caught:
        lockstep.DistributedDataParallel(nn.Linear(1, 1), device_ids=ids, process_group=rank.group)
    assert str(caught.value).startswith("rank 0 cannot replicate its module: ") == [False, True][rank.rank]


@pytest.mark.parametrize("entries", [[A], [A, COUNT, MEAN]])
@on_ranks(2)
def test_agreeing_takes_two_small_sums(rank, entries):
    with count_collectives(rank) as sent:
        lockstep.replicate(net(*entries), process_group=rank.group)
    assert [each.name for each in sent if each.name != "broadcast"] == ["all_reduce", "all_reduce"]
    assert max(each.numel for each in sent if each.name == "all_reduce") <= 1024


# ---------------------------------------------------------------------------------- later agreement


def test_without_init_sync_ranks_compare_when_the_first_backward_begins():
    def call(rank):
        model = rank.make(lambda: nn.Linear(1, 1 + rank.rank))
        with count_collectives(rank) as sent:
            lockstep.replicate(model, process_group=rank.group, init_sync=False)
            output = model(torch.ones(1, 1))
        assert sent == []
        with count_collectives(rank) as sent:
            try:
                output.sum().backward()
            finally:
                assert {each.name for each in sent} == {"all_reduce", "all_gather"}

    words = "ranks differ in parameter weight: rank 0 has float32 of shape (1, 1), trained; rank 1 has"
    assert words in error_on_all(2, call)


@on_ranks(2)
def test_without_init_sync_values_stay_as_they_are_and_gradients_are_shared(rank):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, rank.rank)
    model.register_buffer("kept", torch.tensor(float(rank.rank)))
    lockstep.replicate(model, process_group=rank.group, init_sync=False, buffer_policy="local")
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), rank.rank + 1.0)).sum().backward()
    assert (model.weight.item(), model.kept.item(), model.weight.grad.item()) == (rank.rank, rank.rank, 1.5)


@on_ranks(2)
def test_init_sync_itself_is_compared(rank):
    module = nn.Linear(1, 1)
    with pytest.raises(
        AgreementError, match="option init_sync: rank 0 has True, buffers True; rank 1 has False, buffers False"
    ):
        lockstep.replicate(module, process_group=rank.group, init_sync=rank.rank == 0)
        module(torch.ones(1, 1)).sum().backward()


# ---------------------------------------------------------------------------------- equal at the start


class Odd(nn.Module):
    """Parameters and buffers of every kind, filled with what differs from rank to rank."""

    def __init__(self, generator):
        super().__init__()

        def drawn(*shape, dtype=torch.float32):
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * 10).to(dtype)

        self.weight = nn.Parameter(drawn(3, 4))
        self.tied = self.weight
        self.frozen = nn.Parameter(drawn(5), requires_grad=False)
        self.integer = nn.Parameter(drawn(3, dtype=torch.int64), requires_grad=False)
        self.scalar = nn.Parameter(drawn())
        self.nothing = nn.Parameter(drawn(0, 3))
        self.register_parameter("none", None)
        self.complex = nn.Parameter(torch.complex(drawn(2), drawn(2)))
        self.short = nn.Parameter(drawn(7, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(drawn(4, 3).t())
        self.sliced = nn.Parameter(drawn(4, 6)[:, ::2])
        self.image = nn.Parameter(drawn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("flag", drawn(6) > 0)
        self.register_buffer("count", drawn(dtype=torch.int32))
        self.register_buffer("wide", drawn(3, dtype=torch.complex128))
        self.register_buffer("strided", drawn(4, 6)[:, ::2])
        self.register_buffer("expanded", drawn(3, 1).expand(3, 4).contiguous().t())
        self.register_buffer("tied_buffer", self.flag)
        self.register_buffer("missing", None)
        self.register_buffer("hidden", drawn(2), persistent=False)
        self.register_buffer("trained", drawn(2).requires_grad_())
        self.register_buffer("signed", torch.tensor([-0.0, float("nan"), float("-inf")]) * drawn().sign().abs())


def as_bytes(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def named(module):
    return [*module.named_parameters(), *module.named_buffers()]


@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_every_kind_of_value_is_made_equal_in_place(rank, wrapped):
    odd = Odd(rank.generator())
    before = {name: (tensor, tensor.clone(), tensor.stride(), tensor.requires_grad) for name, tensor in named(odd)}
    objects = {name: id(tensor) for name, tensor in odd.named_parameters()}
    if wrapped:
        lockstep.DistributedDataParallel(odd, process_group=rank.group)
    else:
        lockstep.replicate(odd, process_group=rank.group)
    assert {name: id(tensor) for name, tensor in odd.named_parameters()} == objects
    assert odd.tied is odd.weight
    assert odd.tied_buffer is odd.flag
    assert odd.missing is None
    for name, tensor in named(odd):
        assert rank.all_equal(tensor), name
        _, values, stride, trained = before[name]
        assert (tensor.stride(), tensor.requires_grad, tensor.dtype) == (stride, trained, values.dtype)
        if rank.rank == 0:
            assert torch.equal(as_bytes(tensor), as_bytes(values)), name
    differed = [name for name, (_, values, *_) in before.items() if not rank.all_equal(values)]
    assert {"weight", "integer", "image", "flag", "wide", "hidden"} <= set(differed)
    lockstep.check_in_sync(odd, rank.group)


@on_ranks(2)
def test_values_larger_than_a_broadcast_are_made_equal(rank):
    model = nn.Module()
    for number, millions in enumerate([1, 3, 2]):
        value = torch.full((millions << 20,), float(rank.rank * 10 + number))
        model.register_parameter(f"p{number}", nn.Parameter(value))
    lockstep.replicate(model, process_group=rank.group)
    assert [(p.min().item(), p.max().item()) for p in model.parameters()] == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)]


# ---------------------------------------------------------------------------------- all_gather_object

VALUES = {
    "short": (lambda rank: [rank, None, 0.1, "\u00e9"], []),
    "short and equal": (lambda _: {"a": [1.5, True]}, []),
    "long and equal": (lambda _: "\u00e9" * 1000, []),
    "of 120 bytes": (lambda rank: str(rank) * 118, []),
    "of 121 bytes on one rank": (lambda rank: "x" * (119 if rank == 1 else 118), [121]),
    "long on one rank": (lambda rank: "x" * 998 if rank == 2 else None, [1000]),
    "long and different": (lambda rank: str(rank) * 998, [1000]),
    "in three pieces": (lambda rank: str(rank) * (2500 if rank else 10), [1000, 1000, 502]),
    "long and equal on two ranks": (lambda rank: str(rank // 2) * 998, [1000]),
}
"""What ranks have, and how many bytes of each follow the first 128 if values differ, at most 1000 at once."""


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr("lockstep.distributed.comm.agreement._BYTES_AT_ONCE", 3000)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("case", VALUES)
@on_ranks(3)
def test_values_of_any_length_are_gathered(rank, case):
    (value, follows), collectives = VALUES[case], Collectives(rank.group, Phases())
    with count_collectives(rank) as sent:
        gathered = all_gather_object(value(rank.rank), "values", collectives)
    assert gathered == [value(rank) for rank in range(3)]
    equal = value(0) == value(1) == value(2)
    assert [each.numel for each in sent] == ([1024] if equal else [1024, 128, *follows])
    assert objects_of([2, 0], value(rank.rank), "values", collectives) == [value(2), value(0)]


# ---------------------------------------------------------------------------------- check_in_sync


def in_sync(rank, change):
    """Look after `change(module)` on the last rank."""
    module = rank.make(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    module.register_buffer("flags", torch.tensor([True, False]))
    lockstep.replicate(module, process_group=rank.group)
    with count_collectives(rank) as sent:
        lockstep.check_in_sync(module)
    assert [each.name for each in sent] == ["all_reduce"] * 2
    if rank.rank == rank.world - 1:
        with torch.no_grad():
            change(module)
    lockstep.check_in_sync(module)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda m: m[0].bias[2].add_(1e-6), "parameter 0.bias"),
        (lambda m: m[1].running_var.mul_(2), "buffer 1.running_var"),
        (lambda m: m[1].num_batches_tracked.add_(1), "buffer 1.num_batches_tracked"),
        (lambda m: m.flags.logical_not_(), "buffer flags"),
        (lambda m: (m[1].bias.add_(1), m[0].weight.zero_()), "parameter 0.weight"),
        (lambda m: m[1].bias.fill_(-0.0), "parameter 1.bias"),  # bit by bit
    ],
)
def test_check_in_sync_names_the_first_difference_on_every_rank(change, first):
    message = error_on_all(3, in_sync, change, error=OutOfSyncError)
    assert message.startswith(f"{first} is out of sync: digest ")
    assert " on ranks 0, 1, digest " in message
    assert " on rank 2" in message


@pytest.mark.parametrize("difference", BIT_DIFFERENCES)
@on_ranks(2)
def test_check_in_sync_finds_every_difference_in_bits(rank, difference):
    change, first = BIT_DIFFERENCES[difference]
    module = Values()
    lockstep.check_in_sync(module, rank.group)
    if rank.rank == 1:
        with torch.no_grad():
            change(module)
    with pytest.raises(OutOfSyncError, match=f"^{first} is out of sync"):
        lockstep.check_in_sync(module, rank.group)


@on_ranks(2)
def test_check_in_sync_takes_any_module_with_a_group_and_says_if_modules_differ(rank):
    same = rank.make(lambda: nn.Linear(2, 2))
    lockstep.check_in_sync(same, rank.group)
    lockstep.check_in_sync(lockstep.DistributedDataParallel(same, process_group=rank.group))
    with pytest.raises(OutOfSyncError, match=r"parameter weight is out of sync"):
        lockstep.check_in_sync(rank.make(lambda: nn.Linear(2, 2), seed=rank.rank), rank.group)
    with pytest.raises(
        AgreementError, match=r"ranks differ in weight: rank 0 has float32 of shape \(2, 2\); rank 1 has"
    ) as caught:
        lockstep.check_in_sync(nn.Linear(2, 2 + rank.rank), process_group=rank.group)
    assert not isinstance(caught.value, OutOfSyncError)
    with pytest.raises(AgreementError, match=r"rank 1 has running_mean .*, rank 0 has no such thing"):
        lockstep.check_in_sync(nn.BatchNorm1d(2, track_running_stats=rank.rank == 1), rank.group)
    lockstep.check_in_sync(nn.Identity(), rank.group)


@on_ranks(2)
def test_check_in_sync_leaves_out_buffers_of_which_each_rank_has_its_own(rank):
    module = nn.BatchNorm1d(3)
    model = lockstep.DistributedDataParallel(module, process_group=rank.group, buffer_policy="local")
    module.running_mean += rank.rank
    lockstep.check_in_sync(model)
    with torch.no_grad():
        module.bias += rank.rank
    with pytest.raises(OutOfSyncError, match=r"parameter module\.bias is out of sync"):
        lockstep.check_in_sync(model)


@on_ranks(2)
def test_check_in_sync_between_steps_with_shares_changes_nothing(rank):
    """After a difference, too: the next step has the gradients that it would have had."""
    found = []
    for looks in (False, True):
        model = replicated(rank, lambda: nn.Linear(4, 2), shares=4)
        data = TensorDataset(torch.arange(48.0).view(12, 4))
        for batch in lockstep.shares.GlobalBatches(data, 4, 4, process_group=rank.group):
            for (x,) in batch:
                model(x).square().sum().backward()
            if looks:
                lockstep.check_in_sync(model)
                kept = model.bias.detach().clone()
                model.bias.data += rank.rank
                with pytest.raises(OutOfSyncError, match="parameter bias is out of sync"):
                    lockstep.check_in_sync(model)
                model.bias.data.copy_(kept)
        found.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["every", "proces_group"])
def test_check_in_sync_says_how_to_look_in_every_nth_step(name):
    with pytest.raises(UnknownOptionError) as caught:
        lockstep.check_in_sync(nn.Linear(1, 1), **{name: 100})
    assert f"check_in_sync() got an unexpected keyword argument {name!r}; " in str(caught.value)
    assert "module, process_group. " in str(caught.value)
    assert str(caught.value).endswith("if run.step % N == 0: check_in_sync(model)")


@on_ranks(2)
def test_values_are_compared_bit_by_bit_but_not_their_layout(rank):
    module = nn.Module()
    value = torch.tensor([[float("nan"), 1.0], [float("inf"), -0.0]])
    module.register_buffer("value", value if rank.rank == 0 else value.t().contiguous().t())
    module.register_buffer("empty", torch.empty(0, 2))
    lockstep.check_in_sync(module, rank.group)


@on_ranks(2)
def test_what_a_module_leaves_to_each_rank_is_not_compared(rank):
    model = Applying(average=nn.BatchNorm1d(2, affine=False))
    lockstep.replicate(model, process_group=rank.group, ignored_modules=[model.average])
    model.average.running_mean.fill_(rank.rank)
    lockstep.check_in_sync(model)
    with pytest.raises(OutOfSyncError, match=r"pass its module to replicate\(ignored_modules="):
        lockstep.check_in_sync(model.average, rank.group)
