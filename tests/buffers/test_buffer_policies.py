"""Buffers by policy: whose values ranks end up with, how they travel; what backward has saved is never written."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.reduction.module.buffer_sync import PACKED_BYTES
from lockstep.errors import AgreementError
from processes import run_processes
from programs.ranks import on_ranks
from small_modules import one_weight, x_of
from tensor_classes import Attributed
from threaded import count_collectives, run_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
]


class Scale(nn.Module):
    """y = w * x, and buffers."""

    def __init__(self, dtype=torch.float32, **buffers):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return self.weight * x


def step(model, x=1.0):
    model.zero_grad()
    output = model(torch.full((1,), x, dtype=model.weight.dtype))
    output.backward(torch.ones_like(output))


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


def name_of(dtype):
    return f"{dtype}s".removeprefix("torch.")


def drawn(rank, dtype, *shape):
    """Values that differ by rank and fill the dtype."""
    raw = torch.randn(shape, generator=rank.generator(7), dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(raw, raw.flip(-1) if shape else raw).to(dtype)
    if dtype == torch.bool:
        return raw > 0
    return raw.to(dtype) if dtype.is_floating_point else (raw * 50).abs().to(dtype)


# ---------------------------------------------------------------------------------- whose values


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    "carrier", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=name_of
)
@pytest.mark.parametrize("policy", ["rank0", "mean", "local"])
@on_ranks(2)
def test_every_dtype_behind_gradients_of_every_dtype(rank, policy, carrier, hooked):
    """Each rank has set other values since the module was replicated."""
    model = Scale(carrier, **{name_of(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in DTYPES})
    lockstep.replicate(model, process_group=rank.group, buffer_policy=policy)
    if hooked:
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    before = {dtype: rank.gather(drawn(rank, dtype, 2, 3)) for dtype in DTYPES}
    for dtype, values in before.items():
        getattr(model, name_of(dtype)).copy_(values[rank.rank])
    for _ in range(2):  # once is enough, and twice is no more
        step(model)
    for dtype, (first, second) in before.items():
        after = getattr(model, name_of(dtype))
        if policy == "mean" and (dtype.is_floating_point or dtype.is_complex):
            torch.testing.assert_close(after, (first / 2 + second / 2).to(dtype))
            assert rank.all_equal(after)
        else:
            assert bits(after) == bits(second if policy == "local" and rank.rank else first), dtype


AWKWARD = {
    "floats": torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3.4e38, 1 / 3]),
    "doubles": torch.tensor([-0.0, 1e308, 5e-324, 1 / 3], dtype=torch.float64),
    "halves": torch.tensor([-0.0, 65504.0, 6e-8], dtype=torch.float16),
    "brains": torch.tensor([-0.0, 3e38, 1e-40], dtype=torch.bfloat16),
    "longs": torch.tensor([2**63 - 1, -(2**63), -1, 2**53 + 1]),
    "bytes": torch.arange(256, dtype=torch.uint8),
    "complex": torch.tensor([complex(-0.0, float("nan")), complex(1 / 3, -0.0)]),
}


@pytest.mark.parametrize("carrier", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=name_of)
@on_ranks(3)
def test_values_of_rank_0_arrive_bit_for_bit(rank, carrier):
    wanted = {name: bits(value) for name, value in AWKWARD.items()}
    model = Scale(carrier, **{name: torch.zeros_like(value) for name, value in AWKWARD.items()})
    lockstep.replicate(model, process_group=rank.group)
    for name, value in AWKWARD.items():
        getattr(model, name).copy_(value if rank.rank == 0 else drawn(rank, value.dtype, *value.shape))
    step(model)
    lockstep.check_in_sync(model)
    assert {name: bits(getattr(model, name)) for name in AWKWARD} == wanted


@on_ranks(2)
def test_every_shape_and_layout(rank):
    shapes = {
        "scalar": drawn(rank, torch.float32),
        "empty": torch.zeros(0, 3),
        "empty_count": torch.zeros(0, dtype=torch.int64),
        "transposed": drawn(rank, torch.float32, 3, 4).t(),
        "strided": drawn(rank, torch.float64, 4, 6)[:, ::2],
        "last": drawn(rank, torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "count": torch.tensor(rank.rank + 5),
    }
    model = Scale(**{name: torch.zeros_like(tensor) for name, tensor in shapes.items()})
    model.strided = torch.zeros(4, 6, dtype=torch.float64)[:, ::2]
    lockstep.replicate(model, process_group=rank.group)
    for name, tensor in shapes.items():
        getattr(model, name).copy_(tensor)
    strides = {name: getattr(model, name).stride() for name in shapes}
    step(model)
    assert {name: getattr(model, name).stride() for name in shapes} == strides
    assert all(rank.all_equal(getattr(model, name)) for name in shapes)
    assert rank.rank or all(torch.equal(getattr(model, name), tensor) for name, tensor in shapes.items())


@on_ranks(2)
def test_buffers_that_are_not_saved_are_kept_equal_and_ignored_ones_are_not(rank):
    equal = {"kept": 1.0, "hidden": 1.0, "part.deep": 1.0}
    model = Scale(kept=torch.zeros(1), own=torch.zeros(1))
    model.register_buffer("hidden", torch.zeros(1), persistent=False)
    model.part = Scale(deep=torch.zeros(1), skipped=torch.zeros(1))
    model.out = Scale(whole=torch.zeros(1))
    lockstep.replicate(
        model,
        ignored_modules=[model.out],
        process_group=rank.group,
        params_and_buffers_to_ignore=["own", "part.skipped"],
    )
    for _, buffer in model.named_buffers():
        buffer.fill_(rank.rank + 1.0)
    step(model)
    own = (1.0, 2.0)[rank.rank]
    found = {name: buffer.item() for name, buffer in model.named_buffers()}
    assert found == {**equal, "own": own, "part.skipped": own, "out.whole": own}


# ---------------------------------------------------------------------------------- how they travel


@pytest.mark.parametrize(("policy", "expected"), [("rank0", 0.0), ("mean", 0.5)])
@pytest.mark.parametrize("bytes_over", [0, 4, 16])
@on_ranks(2)
def test_large_buffers_take_one_collective_more(rank, policy, expected, bytes_over):
    # A small one goes first, so that a buffer of the whole size has no room left beside it.
    elements = (PACKED_BYTES + bytes_over) // 4 - 3
    more = ["broadcast" if policy == "rank0" else "all_reduce"] if bytes_over else []
    model = Scale(large=torch.zeros(elements), small=torch.zeros(3))
    if elements * 4 > PACKED_BYTES:  # of several large ones, too
        model.register_buffer("other", torch.zeros(elements))
    lockstep.replicate(model, process_group=rank.group, buffer_policy=policy)
    step(model)
    for _, buffer in model.named_buffers():
        buffer.fill_(rank.rank)
    with count_collectives(rank) as sent:
        step(model)
    assert rank.all_equal(model.large)
    values = {value for _, buffer in model.named_buffers() for value in (buffer[0].item(), buffer[-1].item())}
    assert values == {expected}
    assert sorted(each.name for each in sent) == sorted(["all_reduce", *more])


@on_ranks(2)
def test_large_buffers_of_several_dtypes(rank):
    tensors = {name_of(dtype): torch.zeros(300_000, dtype=dtype) for dtype in (*DTYPES[:3], *DTYPES[6:])}
    model = Scale(**tensors)
    lockstep.replicate(model, process_group=rank.group, buffer_policy="mean")
    for _, buffer in model.named_buffers():
        buffer.fill_(rank.rank * 3)
    with count_collectives(rank) as sent:
        step(model)
    values = {name: {buffer[0].item(), buffer[-1].item()} for name, buffer in model.named_buffers()}
    assert values == {
        **{name_of(dtype): {1.5} for dtype in DTYPES[:3]},
        **{name_of(dtype): {0} for dtype in DTYPES[6:]},
    }
    # one for all integers, and one in the first round for the order
    assert [each.name for each in sent].count("broadcast") == 2


@pytest.mark.parametrize("policy", ["rank0", "mean", "local"])
@on_ranks(2)
def test_small_buffers_and_unused_parameters_take_no_collective(rank, policy):
    once = ["all_reduce"]
    # hooks are compared, gradients reduced; the order of gradients is told
    first = ["all_reduce", "all_reduce", "broadcast"]
    torch.manual_seed(0)
    model = rank.make(lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "n": nn.BatchNorm1d(2)}))
    lockstep.replicate(model, process_group=rank.group, buffer_policy=policy)
    sent = []
    for number in range(5):
        model.zero_grad()
        branch = model["a" if (rank.rank + number) % 2 else "b"]
        before = lockstep.loop.statistics(model).calls["collective"]
        with count_collectives(rank) as seen:
            model["n"](branch(torch.randn(3, 2, generator=rank.generator(number)))).square().sum().backward()
        sent.append([each.name for each in seen])
        assert lockstep.loop.statistics(model).calls["collective"] == before + len(seen)
    assert sent == [first, *[once] * 4]


# ---------------------------------------------------------------------------------- places and changes


@on_ranks(2)
def test_tied_buffers_stay_tied(rank):
    shared = torch.zeros(2)
    model = Scale(one=shared, other=shared)
    model.part = Scale(third=shared)
    lockstep.replicate(model, process_group=rank.group)
    model.one.fill_(rank.rank + 1)
    step(model)
    assert model.one is model.other is model.part.third
    assert model.one.tolist() == [1.0, 1.0]
    graph = (torch.ones(2, requires_grad=True) * model.one).sum()  # now it must be replaced, in all places
    model.one.fill_(rank.rank + 7)
    step(model)
    assert model.one is model.other is model.part.third
    assert model.one.tolist() == [7.0, 7.0]
    del graph


@on_ranks(2)
def test_another_tensor_of_the_same_kind_takes_the_place(rank):
    model = Scale(kept=torch.zeros(2), tracked=torch.zeros(1))
    lockstep.replicate(model, process_group=rank.group)
    old = model.kept
    model.kept = torch.full((2,), rank.rank + 1.0)
    model.tracked = model.weight * (rank.rank + 2)  # part of a graph
    step(model)
    assert (old.tolist(), model.kept.tolist(), model.tracked.item()) == ([0.0, 0.0], [1.0, 1.0], 2.0)


@on_ranks(2)
def test_buffers_that_are_gone_are_left_out(rank):
    model = Scale(one=torch.zeros(1), other=torch.zeros(1), large=torch.zeros(100_000), kept=torch.zeros(1))
    model.part = Scale(deep=torch.zeros(1))
    lockstep.replicate(model, process_group=rank.group)
    model.one = model.large = None
    del model.other, model.part
    model.kept.fill_(rank.rank + 1.0)
    step(model)
    step(model)
    model.one, model.large = torch.full((1,), rank.rank + 5.0), torch.full((100_000,), rank.rank + 6.0)
    step(model)
    assert (model.kept.item(), model.one.item(), model.large[-1].item()) == (1.0, 5.0, 6.0)


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("shape", [(2,), (3, 4), (90_000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=name_of)
@on_ranks(2)
def test_buffers_of_another_shape_or_dtype_are_agreed_on_anew(rank, size, shape, dtype):
    model = Scale(kept=torch.zeros(size), other=torch.zeros(2))
    lockstep.replicate(model, process_group=rank.group)
    step(model)
    model.kept = torch.full(shape, rank.rank + 1, dtype=dtype)
    model.other.fill_(rank.rank + 2)
    step(model)
    seen = [model.kept.unique().tolist(), model.other.tolist()]
    model.kept.fill_(rank.rank + 5)
    with count_collectives(rank) as sent:
        step(model)
    large = model.kept.nbytes > PACKED_BYTES
    assert len(sent) == 1 + large
    assert [*seen, model.kept.unique().tolist(), model.weight.grad.item()] == [[1], [2.0, 2.0], [5], 1.0]


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("last", [0, 1, 2])
@on_ranks(3)
def test_another_shape_on_one_rank_is_an_error_on_all(rank, size, last):
    model = Scale(kept=torch.zeros(size))
    lockstep.replicate(model, process_group=rank.group)
    step(model)
    if rank.rank == last:
        model.kept = torch.zeros(2)
    mine, theirs = ((2,), (size,)) if last == 0 else ((size,), (2,))
    words = f"buffer kept: rank 0 has float32 of shape {mine}; rank {last or 1} has float32 of shape {theirs}"
    with pytest.raises(AgreementError, match=re.escape(words)):
        step(model)
    model.kept = torch.zeros(size)
    step(model)
    assert model.weight.grad.item() == 1.0


@pytest.mark.parametrize("size", [3, 100_000])
@on_ranks(2)
def test_another_class_on_one_rank_is_an_error_on_all(rank, size):
    """A class may keep its values elsewhere, and then other values are sent."""
    plain = f"float32 of shape ({size},)"
    error = (
        f"ranks differ in buffer kept: rank 0 has {plain}; rank 1 has {plain}, Attributed of float32 ({size},); "
        'make it the same on all ranks. If each rank is to have its own, pass buffer_policy="local" for all buffers, '
        "or the module of this one as ignored_modules=[...]"
    )
    model = Scale(kept=torch.zeros(size))
    lockstep.replicate(model, process_group=rank.group)
    step(model)
    if rank.rank == 1:
        model.kept = torch.zeros(size).as_subclass(Attributed)
    with pytest.raises(AgreementError) as caught:
        step(model)
    model.kept = torch.zeros(size)
    step(model)
    assert (str(caught.value), model.weight.grad.item()) == (error, 1.0)


# ---------------------------------------------------------------------------------- what backward has saved


def product(model, x, how):
    """x times the buffer, which backward needs; saved as it is or as a view."""
    kept = model.kept
    seen = {"itself": kept, "view": kept.view(2, 1).squeeze(1), "slice": kept[:], "part": kept.narrow(0, 0, 2)}[how]
    return (model.weight * x * seen).sum()


@pytest.mark.parametrize("policy", ["rank0", "mean"])
@pytest.mark.parametrize("how", ["itself", "view", "slice", "part"])
@pytest.mark.parametrize("size", [2, PACKED_BYTES // 4 + 2])
@on_ranks(2)
def test_a_pending_backward_finds_the_values_it_has_saved(rank, policy, how, size):
    after = {"rank0": 1.0, "mean": 1.5}[policy]
    model = Scale(kept=torch.full((size,), 1.0))
    lockstep.replicate(model, process_group=rank.group, buffer_policy=policy)
    model.kept.fill_(rank.rank + 1.0)
    seen = model.kept if size > 2 else None
    if seen is not None:  # views of the first two
        model.kept = seen
        seen = seen[:2]
        loss = (model.weight * 3.0 * seen).sum()
    else:
        loss = product(model, 3.0, how)
    step(model)  # ends with other values in the buffer
    now = model.kept[0].item()
    model.zero_grad()
    loss.backward()
    assert (now, model.weight.grad.item()) == (after, (6.0 * 1 + 6.0 * 2) / 2)


@on_ranks(2)
def test_two_forwards_and_one_backward_with_a_moving_average_out_of_place(rank):
    """The reference overwrites what the first forward has saved, in silence: 1.0 where 1.25 is right."""

    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("average", torch.zeros(1))

        def forward(self, x):
            self.average = 0.5 * self.average + 0.5 * x
            return self.weight * self.average

    model = Average()
    lockstep.replicate(model, process_group=rank.group)
    x = torch.full((1,), rank.rank + 1.0)
    losses = [model(x), model(x)]
    sum(losses).sum().backward()
    first = model.weight.grad.item(), model.average.item()
    kept = model(x)
    model.zero_grad()
    model(x).sum().backward()  # replaces the buffer of which `kept` has saved an earlier one
    model.zero_grad()
    kept.sum().backward()
    # Averages: 0.5 and 0.75 of x at first; then 0.5 * 0.75 + 0.5 * x, with rank 0's 0.75 on both.
    assert first == ((1.25 + 2.5) / 2, 0.75)
    assert model.weight.grad.item() == (0.375 + 0.5 + 0.375 + 1.0) / 2


@on_ranks(2)
def test_backward_twice_through_one_graph(rank):
    model = Scale(kept=torch.ones(2))
    lockstep.replicate(model, process_group=rank.group)
    model.kept.fill_(rank.rank + 1.0)
    loss = product(model, 1.0, "itself")
    seen = []
    for _ in range(3):
        model.zero_grad()
        loss.backward(retain_graph=True)
        seen.append(model.weight.grad.item())
    assert (seen, model.kept.tolist()) == ([3.0, 3.0, 3.0], [1.0, 1.0])


@on_ranks(2)
def test_a_free_buffer_is_written_in_place_and_counts_versions(rank):
    model = Scale(kept=torch.zeros(2), large=torch.zeros(100_000))
    lockstep.replicate(model, process_group=rank.group, buffer_policy="mean")
    step(model)
    for name in ("kept", "large"):
        tensor = getattr(model, name)
        pointer, version = tensor.data_ptr(), tensor._version
        tensor.fill_(rank.rank)
        step(model)
        assert getattr(model, name) is tensor
        assert tensor.data_ptr() == pointer
        assert tensor._version > version + 1
        assert tensor[0].item() == 0.5


@on_ranks(2)
def test_a_saved_buffer_is_replaced_and_the_old_one_stays(rank):
    model = Scale(kept=torch.zeros(2))
    lockstep.replicate(model, process_group=rank.group, buffer_policy="mean")
    model.kept.fill_(rank.rank)
    old, version = model.kept, model.kept._version
    loss = product(model, 1.0, "itself")
    step(model)
    assert model.kept is not old
    assert (old.tolist(), old._version) == ([rank.rank] * 2, version)
    assert model.kept.tolist() == [0.5] * 2
    loss.backward()


@on_ranks(2)
def test_rank_0_keeps_its_own_tensor_whoever_has_saved_it(rank):
    model = Scale(kept=torch.zeros(2))
    lockstep.replicate(model, process_group=rank.group)
    loss, kept, version = product(model, 1.0, "itself"), model.kept, model.kept._version
    step(model)
    loss.backward()
    assert rank.rank > 0 or (model.kept is kept and kept._version == version)


def test_a_detached_alias_is_never_wrong_in_silence():
    def call(rank):
        model = Scale(kept=torch.zeros(2))
        lockstep.replicate(model, process_group=rank.group)
        model.kept.fill_(rank.rank + 1.0)
        loss = (model.weight * model.kept.detach()).sum()
        step(model)
        model.zero_grad()
        with lockstep.accumulate(model, last=False):
            try:
                loss.backward()
            except RuntimeError as error:
                return "modified by an inplace operation" in str(error)
        return model.weight.grad.item() == 2 * (rank.rank + 1.0)

    assert run_ranks(2, call) == [True, True]


@on_ranks(2)
def test_buffers_made_in_inference_mode_and_buffers_that_want_gradients(rank):
    with torch.inference_mode():
        frozen = torch.zeros(2)
    model = Scale(frozen=frozen, trained=torch.zeros(2, requires_grad=True))
    lockstep.replicate(model, process_group=rank.group)
    for _ in range(2):
        with torch.inference_mode():
            model.frozen.fill_(rank.rank + 3.0)
        with torch.no_grad():
            model.trained.fill_(rank.rank + 4.0)
        step(model)
    assert model.frozen.tolist() == [3.0, 3.0]
    assert model.trained.tolist() == [4.0, 4.0]
    assert model.trained.requires_grad is True
    assert model.trained.is_leaf is True


@on_ranks(2)
def test_buffers_are_left_alone_where_gradients_are(rank):
    model = Scale(kept=torch.zeros(1))
    lockstep.replicate(model, process_group=rank.group)
    seen = []
    with model.no_sync():
        model.kept.fill_(rank.rank + 1.0)
        step(model)
        seen.append(model.kept.item())
    model.eval()
    with torch.no_grad():
        model(torch.ones(1))
    seen.append(model.kept.item())
    step(model)
    seen.append(model.kept.item())
    assert seen == [[1.0, 1.0, 1.0], [2.0, 2.0, 1.0]][rank.rank]


# ---------------------------------------------------------------------------------- batch normalisation


def normalised():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double()


def batch(rank, number):
    return torch.randn(5, 4, generator=rank.generator(number), dtype=torch.float64) + rank.rank


def train_normalised(rank, policy, accumulated):
    """Parameters and buffers of torch's DistributedDataParallel and of ours, after a few steps."""
    results = []
    for make in (nn.parallel.DistributedDataParallel, lockstep.DistributedDataParallel):
        options = {} if make is nn.parallel.DistributedDataParallel else {"buffer_policy": policy}
        model = make(rank.make(normalised), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(6):
            if accumulated:
                with model.no_sync():
                    model(batch(rank, 100 + number)).square().mean().backward()
            model(batch(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.clone() for name, value in model.module.state_dict().items()})
    return results


@pytest.mark.parametrize("accumulated", [False, True])
def test_batch_normalisation_trains_as_with_the_reference(accumulated):
    results = run_processes(2, train_normalised, "rank0", accumulated)
    (theirs, _), _ = results
    for _, ours in results:
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], msg=name)


@pytest.mark.parametrize("policy", ["rank0", "mean", "local"])
@on_ranks(3)
def test_running_statistics_of_each_policy(rank, policy):
    model = rank.make(normalised)
    lockstep.replicate(model, process_group=rank.group, buffer_policy=policy)
    running = torch.zeros(6, dtype=torch.float64)
    for number in range(4):
        x = batch(rank, number)
        with torch.no_grad():
            means = rank.gather(model[0](x).mean(0))
        model(x).square().mean().backward()
        used = {"rank0": means[0], "mean": sum(means) / len(means), "local": means[rank.rank]}[policy]
        running = 0.9 * running + 0.1 * used
    torch.testing.assert_close(model[1].running_mean, running)
    assert model[1].num_batches_tracked.item() == 4
    assert rank.all_equal(model[1].running_mean) is (policy != "local")


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@on_ranks(2, "hosts")
def test_each_rank_keeps_its_own_when_the_module_has_changed(rank):
    wanted = [[[n * (rank + 1.0)] * 2 for n in (1, 2, 3)] for rank in range(2)]
    model = lockstep.replicate(Scale(buffer=torch.zeros(2)), process_group=rank.group, buffer_policy="local")
    step(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    seen = []
    for _ in range(3):
        model.buffer.add_(rank.rank + 1)
        step(model)
        seen.append(model.buffer.tolist())
    assert seen == wanted[rank.rank]


class Marked(nn.Module):
    """Layers, and a buffer that holds what forward was given."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([one_weight()])
        self.register_buffer("mark", torch.zeros(1))

    def forward(self, x, mark):
        self.mark = torch.full((1,), mark)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@on_ranks(2)
def test_means_are_right_in_the_round_in_which_the_module_has_changed(rank):
    """Nothing travels with its report; buffers are made equal when ranks have agreed anew."""
    model = lockstep.replicate(Marked(), process_group=rank.group, buffer_policy="mean")
    seen = []
    for turn in range(4):
        if turn == 2:
            model.layers.append(one_weight())
        model(x_of(rank), 4.0 * turn + 2 * rank.rank).backward()
        seen.append(model.mark.item())
    assert seen == [1.0, 5.0, 9.0, 13.0]


def of_a_frozen_module(rank, kind, policy):
    module = lockstep.replicate(nn.BatchNorm1d(1), process_group=rank.group, buffer_policy=policy)
    module.requires_grad_(kind == "trained")
    if kind == "in evaluation":
        module.eval()
    for _ in range(4):
        with torch.set_grad_enabled(kind != "without gradients"):
            module(torch.randn(3, 1))
        if kind == "written by hand":
            module.running_mean.fill_(1)
            module.track_running_stats = module.training = False


@pytest.mark.parametrize("policy", ["rank0", "local"])
@pytest.mark.parametrize(
    "kind", ["frozen", "without gradients", "trained", "in evaluation", "written by hand"], ids=lambda kind: kind
)
def test_forwards_that_change_buffers_of_a_frozen_module_are_warned_of_once(kind, policy, recwarn):
    run_ranks(2, of_a_frozen_module, kind, policy)
    told = [str(each.message) for each in recwarn if "whose parameters are all frozen" in str(each.message)]
    drifts = policy == "rank0" and kind in ("frozen", "without gradients")
    assert sorted(text[: text.index(":")] for text in told) == (["rank 0", "rank 1"] if drifts else [])
