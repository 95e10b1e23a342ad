"""Training with shares: the same bits on any number of ranks, and errors where that could not be."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
import threaded
from lockstep._base.buckets import TensorSpec
from lockstep._base.deal import equal_deal
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import AgreementError, AuditError, NotReplicableError, OptionError, PeerError, ShareError
from lockstep.phases import Phases
from lockstep.shares import share_exchange as reduction
from lockstep.shares.share_exchange import ExchangePlan
from programs.networks import Applying
from programs.ranks import on_ranks, replicated, scalars
from share_runs import (
    CELLS,
    MODELS,
    ROWS,
    backward,
    batches_of,
    data_of,
    digits,
    forever,
    make_optimizer,
    train,
    train_all,
)
from small_modules import fails_in_backward, one_weight
from threaded import count_collectives, run_ranks

on_gloo_and_shm = pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])


@pytest.fixture(scope="module")
def alone():
    """The fingerprints of one rank."""
    return run_ranks(1, train_all)[0]


def test_cells_differ(alone):
    assert len(set(alone)) == len(CELLS)


EVERY_WORLD = list(itertools.product([1, 2, 3, 4, 8], ["gloo", "shm"]))
SOME_WORLDS = [(2, "gloo"), (3, "shm")]  # one rank is what they are compared with


@pytest.mark.parametrize(
    ("world", "backend"),
    [pytest.param(*case, marks=[] if case in SOME_WORLDS else pytest.mark.around) for case in EVERY_WORLD],
)
def test_threads_come_to_the_same_bits(alone, world, backend):
    hosts = "a" * world if backend == "shm" else ""
    assert run_ranks(world, train_all, hosts=hosts, timeout=300) == [alone] * world


def test_a_module_that_is_dropped_is_freed_with_its_process_group():
    def work(rank):
        model, data = linear(rank)
        backward(model, next(iter(data)))
        return weakref.ref(model), weakref.ref(model.weight), weakref.ref(rank.group)

    links = list(itertools.chain(*run_ranks(2, work)))
    gc.collect()
    assert [link() for link in links] == [None] * 6


@pytest.mark.parametrize("hosts", ["ab", "aab", "abab"])
@on_ranks(None, "hosts", timeout=300)
def test_ranks_of_several_hosts_come_to_the_same_bits(rank, alone, hosts):
    """On an `shm` group, whose ranks have no memory in common then."""
    assert [train(rank, CELLS[1]), train(rank, CELLS[6])] == [alone[1], alone[6]]


@pytest.mark.parametrize("shares", [3, 5, 6])
def test_shares_need_not_be_a_power_of_two(shares):
    found = [run_ranks(world, train, CELLS[0], 2, shares, None, shares * 3) for world in (1, 2, 3)]
    assert len(set(itertools.chain(*found))) == 1


# ------------------------------------------------------------------------------------ gradients


def with_rows(rank, module, size=4, shares=4, **options):
    """The module with shares, and batches of the rows in their order."""
    data = batches_of(rank, ROWS, size, shares)
    return lockstep.replicate(module, shares=shares, process_group=rank.group, **options), data


def linear(rank, shares=4, **options):
    """y = w * x with w = 0, so that the gradient of w is the sum of the x."""
    return with_rows(rank, one_weight(0.0), 8, shares, **options)


def gradients_of(model, batches):
    """The gradients of each batch by itself."""
    found = []
    for batch in batches:
        model.zero_grad()
        backward(model, batch)
        found.append(scalars(model))
    return found


@on_ranks(3)
def test_gradients_are_divided_by_the_rows_of_the_world(rank):
    assert gradients_of(*linear(rank)) == [[3.5], [11.5]]


def weighted(*weights):
    """A share whose weights are numbers, or functions of its rows; only the first comes with a backward pass."""

    def step(model, x):
        for number, weight in enumerate(weights):
            with lockstep.accumulate(model, weight=weight(x) if callable(weight) else weight):
                if number == 0:
                    model(x).sum().backward()

    return step


def several_passes(model, x):
    model(x).sum().backward()
    (10 * model(x)).sum().backward()


# Weights divide the sum, 28, by 4 times what they add up to in a share, and by nothing if that is 0.
STEPS = {
    "a mean": ({"loss": "mean"}, lambda model, x: model(x).mean().backward(), 3.5),
    "several passes": ({}, several_passes, 38.5),
    "the sum of the rows as the weight": ({}, weighted(torch.sum), 1.0),
    "small weights": ({}, weighted(0.0625, 0.0625), 56.0),
    "no weight": ({}, weighted(0.0, 0.0), 28.0),
    "weights that add up": ({}, weighted(3.0, 1.0), 1.75),
}


@pytest.mark.parametrize(("options", "step", "expected"), STEPS.values(), ids=STEPS)
@on_ranks(2)
def test_what_each_share_contributes(rank, options, step, expected):
    model, data = linear(rank, **options)
    for (x,) in next(iter(data)):
        step(model, x)
    assert model.weight.grad.item() == expected


@on_ranks(1)
def test_sparse_gradients_are_refused_by_name(rank):
    model = lockstep.replicate(nn.Embedding(4, 2, sparse=True), shares=4, process_group=rank.group)
    with pytest.raises(NotReplicableError, match=r"parameter weight has a gradient of layout torch\.sparse_coo"):
        backward(model, next(iter(batches_of(rank, TensorDataset(torch.arange(4))))))


@on_ranks(1)
def test_gradients_that_a_program_drops_are_held_by_nobody(rank):
    model, data = linear(rank)
    backward(model, next(iter(data)))
    gradient = weakref.ref(model.weight.grad)
    model.zero_grad()
    assert gradient() is None


@on_ranks(2, raises=OptionError, says="share 3")
def test_a_weight_that_is_missing_is_an_error_on_every_rank(rank):
    model, data = linear(rank)
    for batch in data:
        for number, (x,) in enumerate(batch):
            with lockstep.accumulate(model, weight=None if rank.rank == 1 and number else 1.0):
                model(x).sum().backward()


@on_ranks(2)
def test_gradients_from_before_a_step_are_added_to(rank):
    model, data = linear(rank)
    for batch in data:
        backward(model, batch)
    assert model.weight.grad.item() == 15.0


def branches():
    """Uses one of two weights, by the size of x, and a third one never."""
    small, large, idle = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    forward = lambda m, x: (x * (m.small if x.max() < 4 else m.large)).sum()  # noqa: E731
    return Applying(forward, (), small=small, large=large, idle=idle)


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks(None, "world")
def test_parameters_that_some_shares_do_not_use(rank):
    assert gradients_of(*with_rows(rank, branches(), 8)) == [[6 / 8, 22 / 8, None], [None, 92 / 8, None]]


@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks(None, "world")
def test_a_gradient_of_minus_zero_keeps_its_sign(rank):
    model, data = with_rows(rank, branches())
    for (x,) in next(iter(data)):
        model(x.view(1) * -0.0 if x == 2 else x.view(1) + 4).backward()
    assert model.small.grad.item() == 0
    assert torch.signbit(model.small.grad).item()


@on_ranks(2)
def test_half_precision_is_added_in_float32_and_rounded_once(rank):
    model = replicated(rank, lambda: nn.Linear(1, 1, bias=False).bfloat16(), shares=4)
    for (x,) in next(iter(batches_of(rank, TensorDataset(torch.tensor([[256.0], [1.0], [1.0], [1.0]]))))):
        model(x.bfloat16()).sum().backward()
    rounded = torch.tensor(259 / 4).bfloat16().item()  # in bfloat16, 256 + 1 is 256
    assert (model.weight.grad.dtype, model.weight.grad.item()) == (torch.bfloat16, rounded)
    assert rounded != 64


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None, "world")
def test_layouts_of_gradients_are_those_of_the_parameters(rank):
    model = replicated(rank, lambda: digits().to(memory_format=torch.channels_last), shares=4)
    for x, _ in next(iter(batches_of(rank, data_of("digits"), 8))):
        model(x).sum().backward()
    assert [p.grad.stride() for p in model.parameters()] == [p.stride() for p in model.parameters()]


@on_ranks(2)
def test_a_gradient_scaler_sees_the_reduced_gradient(rank):
    model, data = linear(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = []
    for batch in data:
        optimizer.zero_grad()
        for (x,) in batch:
            x = x / 0 if x.max() == 1 and rank.rank == 0 else x  # an infinity in one share of one rank
            scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append(model.weight.item())
    assert (weights, scaler.get_scale()) == ([0.0, -11.5], 2.0)


@on_ranks(3)
def test_several_modules_take_part_in_a_step(rank):
    first, data = linear(rank)
    second, _ = linear(rank)
    for (x,) in next(iter(data)):
        second(first(x) + x).sum().backward()
    assert (first.weight.grad.item(), second.weight.grad.item()) == (0.0, 3.5)


@on_gloo_and_shm
@on_ranks(2, "hosts")
def test_modules_are_numbered_alike_whatever_has_been_freed(rank):
    """One rank's collector has taken a model that was dropped, the other's has not yet."""
    kept, model = [], linear(rank)[0]
    model.myself = model
    if rank.rank == 1:
        kept.append(model)
    del model
    rank.gather(torch.zeros(1))
    gc.collect()
    model, data = linear(rank)
    backward(model, next(iter(data)))
    assert (model.weight.grad.item(), len(kept)) == [(3.5, 0), (3.5, 1)][rank.rank]


def plain_and_shares(rank):
    """A module without shares, whose output one with shares is given."""
    plain = replicated(rank, lambda: nn.Linear(1, 1))
    model, data = linear(rank, shares=8)
    return plain, model, data


@pytest.mark.parametrize("hosts", ["", "aaa"], ids=["gloo", "shm"])
@on_ranks(3, "hosts")
def test_a_module_without_shares_may_be_trained_in_the_same_step(rank):
    """After the shares of a batch; inside, it runs under ``no_grad()``."""
    plain, model, data = plain_and_shares(rank)
    nn.init.ones_(plain.weight), nn.init.zeros_(plain.bias)
    found = []
    for batch in data:
        model.zero_grad(), plain.zero_grad()
        for (x,) in batch:
            with torch.no_grad():
                hidden = plain(x)
            model(hidden).sum().backward()
        (plain(torch.full((1, 1), float(rank.rank)))).sum().backward()
        found.append((model.weight.grad.item(), plain.weight.grad.item()))
    assert found == [(3.5, 1.0), (11.5, 1.0)]


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks(None, "world")
def test_a_module_without_shares_that_is_reached_in_a_share_is_an_error_by_name(rank):
    """On every rank; and all can go on without it, and with it outside of shares."""
    plain, model, data = plain_and_shares(rank)
    found = []
    for batch in data:
        plain.requires_grad_(batch.number == 0)
        try:
            for (x,) in batch:
                model(plain(x)).sum().backward()
        except (ShareError, PeerError) as error:
            found.append(str(error))
    plain.requires_grad_(True)(torch.ones(1, 1)).sum().backward()
    assert len(found) == 1
    assert f"rank {rank.rank}: a backward pass in share" in found[0]
    assert "replicated without shares over the same process group" in found[0]
    assert model.weight.grad is not None
    assert plain.bias.grad is not None


@on_ranks(2)
def test_a_layer_that_is_new_takes_part(rank):
    model, data = with_rows(rank, nn.Sequential(nn.Linear(1, 1)), 8)
    found = []
    for batch in itertools.islice(forever(data), 6):
        model.zero_grad()
        backward(model, batch)
        found.append(scalars(model))
        if batch.number == 1:
            model[0] = nn.Linear(1, 1, bias=batch.epoch == 1)  # fewer parameters than before, and more
            for parameter in model.parameters():
                nn.init.zeros_(parameter)
    assert found == [[3.5, 1.0], [11.5, 1.0], [3.5], [11.5], [3.5, 1.0], [11.5, 1.0]]


# ------------------------------------------------------------------------------------- buffers


def writing(write, **buffers):
    """The sum of its input times 0, a weight. Before it, `write(module, x)` may write to the buffers."""

    def forward(m, x):
        write(m, x)
        return (x * m.weight).sum()

    tensors = {name: torch.as_tensor(value) for name, value in buffers.items()}
    return Applying(forward, (), weight=nn.Parameter(torch.zeros(1)), **tensors)


def kinds_of_buffers():
    """Counts, and keeps a mean of what it sees; has constants that no mean of themselves gives back."""

    def write(m, x):
        if x.min() >= 2:
            m.mean.mul_(0.5).add_(0.5 * x.mean())
            m.count += 1
            m.flags[int(x.min()) % 3] = True

    return writing(write, constant=[0.1], mean=[0.1], count=0, flags=[False] * 3)


def test_buffers_begin_each_share_alike_and_are_averaged():
    def work(rank):
        model, data = with_rows(rank, kinds_of_buffers(), 6, 6)
        backward(model, next(iter(data)))
        return [buffer.tolist() for buffer in model.buffers()]

    found = [buffers for world in (1, 2, 3, 6) for buffers in run_ranks(world, work)]
    constant, mean, count, flags = found[0]
    assert all(buffers == found[0] for buffers in found)
    assert constant == torch.tensor([0.1]).tolist()
    assert mean[0] == pytest.approx((0.1 + 0.1 + sum(0.05 + 0.5 * x for x in (2, 3, 4, 5))) / 6)
    assert (count, flags) == (1, [False, False, True])


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None, "world")
def test_buffers_of_any_floating_dtype_are_averaged_in_float32_at_least(rank):
    """The mean over five shares of 1, 1 + e, 1 + e, 1 + e, 1 + e is rounded once."""

    def write(m, x):
        if x.min() >= 1:
            m.low.fill_(1.0078125)  # the next number of half precision
            m.rotation += x.mean() * 1j

    half = torch.tensor((1 + 4 * 1.0078125) / 5).bfloat16().item()
    model, data = with_rows(rank, writing(write, low=torch.ones(1).bfloat16(), rotation=[0j]), 5, 5)
    backward(model, next(iter(data)))
    assert (model.low.item(), model.rotation.item()) == (half, pytest.approx(2j))


def scaled():
    """Saves its buffer in the graph, after it has given it another value."""

    def forward(m, x):
        m.scale = m.scale + x.detach().mean()
        return m.layer(x) * m.scale

    return Applying(forward, (), layer=one_weight(), scale=torch.ones(1))


@on_gloo_and_shm
@on_ranks(2, "hosts")
def test_a_graph_that_outlives_the_step_sees_the_buffers_that_it_has_saved(rank):
    """One row in each of four shares: they make 1, 2, 3 and 4 of a buffer that is 1 before, and 2.5 after the step."""
    model, data = with_rows(rank, scaled())
    for (x,) in next(iter(data)):
        out = model(x)
        out.backward(retain_graph=True)
    averaged = model.scale.item()
    found = (averaged, torch.autograd.grad(out, model.layer.weight)[0].item())
    assert found == [(2.5, 1 * 2.0), (2.5, 3 * 4.0)][rank.rank]


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_step_that_was_left_leaves_buffers_as_they_were(rank, failing):
    """In the first share, and in a later one; the next step begins from the values before."""
    model = replicated(rank, kinds_of_buffers, shares=4)
    before = [buffer.clone() for buffer in model.buffers()]
    for batch in itertools.islice(batches_of(rank, TensorDataset(ROWS[4:][0])), 2):
        with contextlib.suppress(ZeroDivisionError, PeerError):
            for number, (x,) in enumerate(batch):
                model(x).backward()
                if batch.number == 0 and rank.rank == 0 and number == failing:
                    raise ZeroDivisionError
        if batch.number == 0:
            assert all(map(torch.equal, before, model.buffers()))
    assert all(map(rank.all_equal, model.buffers()))
    _, *found = [buffer.tolist() for buffer in model.buffers()]
    assert found == [[pytest.approx(0.05 + 0.5 * 9.5)], 1, [False, False, True]]


@on_ranks(1)
def test_a_step_that_cannot_begin_leaves_what_was_loaded_after_a_step_that_was_left(rank):
    model, data = with_rows(rank, kinds_of_buffers())
    with contextlib.suppress(ZeroDivisionError):
        for (x,) in next(iter(data)):
            model(x).backward()
            raise ZeroDivisionError
    model.mean.fill_(7.0)
    with pytest.raises(OptionError, match="a batch of 2 shares"):
        list(next(iter(batches_of(rank, shares=2))))
    assert model.mean.item() == 7.0


# ------------------------------------------------------------------------ collectives of a step


@pytest.mark.parametrize(
    ("world", "hosts", "expected"),
    [
        (2, "", ["all_to_all_single", "all_gather_single"]),
        (3, "", ["all_to_all_single", "all_to_all_single", "all_gather_single"]),
        (3, "aaa", ["add_in_order"]),
    ],
)
@pytest.mark.usefixtures("sees_additions")
@on_ranks(None, "world", "hosts")
def test_gradients_buffers_counters_and_reports_travel_together(rank, expected):
    """In each step but the first, whose buffers nobody expects to change. On three ranks some have two partial sums."""
    model = replicated(rank, digits, shares=8)
    for batch in batches_of(rank, data_of("digits"), 32, 8, shuffle=True):
        with count_collectives(rank) as seen:
            for x, y in batch:
                nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    assert [each.name for each in seen] == expected
    assert model[1].num_batches_tracked.item() == 2


@on_gloo_and_shm
@on_ranks(2, "hosts")
def test_buffers_that_change_in_some_steps_only(rank):
    """Neither in the step after one in which they have changed, nor before."""

    def write(m, x):
        if 4 <= x.min() < 8 or x.min() >= 12:
            m.mean.mul_(2)
            m.count += 1

    model, data = with_rows(rank, writing(write, mean=[1.0], count=0))
    found = []
    for batch in data:
        backward(model, batch)
        found.append((model.mean.item(), model.count.item(), model.weight.grad.item()))
        model.zero_grad()
    assert found == [(1.0, 0, 1.5), (2.0, 1, 5.5), (2.0, 1, 9.5), (4.0, 2, 13.5)]


@on_gloo_and_shm
@on_ranks(2, "hosts")
def test_a_counter_that_shares_of_one_rank_alone_change(rank):
    """In several steps, one after the other; the last rank's shares have the largest rows."""

    def write(m, x):
        if x.min() % 4 >= 2:
            m.count += 1

    model, data = with_rows(rank, writing(write, count=0))
    for batch in data:
        backward(model, batch)
    assert model.count.item() == 4


# ------------------------------------------------------- buckets that leave in the last backward


@pytest.fixture
def sees_additions(monkeypatch):
    """Counts the collective of shared memory by this name."""
    monkeypatch.setitem(threaded._NAMES, "_add_in_order", "add_in_order")


@pytest.fixture
def small_buckets(monkeypatch):
    """Each gradient has a bucket."""
    monkeypatch.setattr(reduction, "CAP_BYTES", 1)


def two_layers(rank):
    return replicated(rank, lambda: nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)), shares=4)


@pytest.mark.parametrize(
    ("hosts", "name", "expected"),
    [("", "all_to_all_single", [0, 0, 5, 7, 9]), ("aa", "add_in_order", [0, 0, 5, 5, 9])],
    ids=["gloo", "shm"],
)
@pytest.mark.usefixtures("sees_additions", "small_buckets")
@on_ranks(2, "hosts")
def test_buckets_leave_while_the_last_share_runs_backward(rank, name, expected):
    """Seen by what has been sent when backward comes to the first of two layers; from the second step on. The first
    step sends one thing more, with which ranks say that they have not agreed on anything yet.

    Where ranks share memory none leaves before the end.
    """
    model, sent = two_layers(rank), []
    with count_collectives(rank) as seen:

        def note(*_):
            sent.append(sum(each.name == name for each in seen))

        for batch in itertools.islice(batches_of(rank, shuffle=True), 2):
            for (x,) in batch:
                hidden = model[0](x)
                hidden.register_hook(note)
                model[1](hidden).sum().backward()
        note()
    assert sent == expected


@pytest.mark.parametrize(("hosts", "buckets", "expected"), [("ab", 3, 2), ("aab", 3, 0), ("aab", 12, 11), ("aa", 3, 0)])
@on_ranks(None, "hosts")
def test_buckets_leave_early_where_memory_for_them_is_there(rank, hosts, buckets, expected):
    """Never the last. On three ranks of two hosts one of three would take a fifth gradient, and one of twelve not."""
    specs = [TensorSpec("", (2048, 2048), (2048, 1), torch.float32, torch.device("cpu"))] * buckets
    assert ExchangePlan(specs, [], equal_deal(8, rank.world), Collectives(rank.group, Phases())).leave_early == expected


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("leaves_out", [False, True])
@on_gloo_and_shm
def test_a_second_backward_after_buckets_have_left_counts(hosts, leaves_out):
    """On rank 1 only, in its last share; beside one rank, of which no bucket leaves. Rank 0 may leave out the second of
    three layers in its last share, so that its buckets wait for the end; rank 1 has sent them, and asks for them
    again."""

    def work(rank):
        layers = rank.make(lambda: nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 3), nn.Linear(3, 1)))
        model, data = with_rows(rank, layers)
        found = []
        for batch in itertools.islice(forever(data), 6):
            model.zero_grad()
            for (x,) in batch:
                skips = leaves_out and batch.number >= 2 and x.item() % 4 == 1
                (model[2](model[0](x)) if skips else model(x)).sum().backward()
                if batch.number >= 2 and x.item() % 4 == 3:
                    model(10 * x).square().sum().backward()
            found.append([p.grad.tolist() for p in model.parameters()])
        return found

    assert run_ranks(2, work, hosts=hosts) == run_ranks(1, work) * 2


@on_gloo_and_shm
@pytest.mark.parametrize(("modules", "spoils"), [(1, None), (2, None), (2, 0), (2, 1)])
@on_ranks(2, "hosts", group_timeout=10.0)
def test_a_rank_that_leaves_a_step_is_told_to_the_others_and_all_can_go_on(rank, modules, spoils):
    """Rank 1 raises in its second share, or spoils a module, so that it cannot put the step together. With several
    modules, ranks have told each other already which of them take part."""
    model, data = linear(rank)
    all_of_them = [model, *(linear(rank)[0] for _ in range(modules - 1))]
    own = "a bad share" if spoils is None else "parameter extra was put into the module"
    told = own if rank.rank else "rank 1 has left the loop over the shares"
    found = []
    for batch in itertools.islice(forever(data), 4):
        model.zero_grad()
        try:
            for number, (x,) in enumerate(batch):
                sum(each(x).sum() for each in all_of_them).backward()
                if (batch.epoch, batch.number, rank.rank, number) == (1, 0, 1, 1):
                    if spoils is None:
                        raise ZeroDivisionError(own)
                    all_of_them[spoils].extra = nn.Parameter(torch.zeros(1))
        except (ZeroDivisionError, NotReplicableError, PeerError) as error:
            found.append(str(error)[: len(told)])
            if spoils is not None:
                all_of_them[spoils].extra = None
        else:
            found.append(model.weight.grad.item())
    assert found == [3.5, 11.5, told, 11.5]


@pytest.mark.usefixtures("small_buckets")
@on_gloo_and_shm
@on_ranks(2, "hosts")
def test_a_rank_that_leaves_a_step_after_buckets_have_left_is_told_to_the_others(rank):
    """Of two layers, the last one's buckets have left when backward comes to the first."""
    model, found = two_layers(rank), []
    told = ["rank 1 has left the loop over the shares", "a bad batch"][rank.rank]
    for batch in itertools.islice(forever(batches_of(rank, size=8)), 5):
        model.zero_grad()
        try:
            for number, (x,) in enumerate(batch):
                bad = (rank.rank, number, batch.epoch, batch.number) == (1, 1, 1, 0)
                model[1](fails_in_backward(model[0](x), bad)).sum().backward()
            assert rank.all_equal(model[0].weight.grad)
            found.append(model[0].weight.grad.tolist())
        except (ArithmeticError, PeerError) as error:
            found.append(str(error)[: len(told)])
    assert found[2:] == [told, found[1], found[0]]


@on_gloo_and_shm
@on_ranks(2, "hosts")
def test_a_rank_that_gets_batches_of_other_shares_is_told_to_the_others(rank):
    model, _ = linear(rank)
    found = []
    for number in range(3):
        model.zero_grad()
        try:
            backward(model, next(iter(batches_of(rank, size=8, shares=8 if number == 1 and rank.rank else 4))))
            found.append(model.weight.grad.item())
        except (OptionError, PeerError) as error:
            found.append(type(error))
    assert found == [[3.5, PeerError, 3.5], [3.5, OptionError, 3.5]][rank.rank]


# ------------------------------------------------------------------------- the order of things


@on_ranks(1)
def test_a_backward_outside_of_a_share_is_an_error_by_name(rank):
    model, _ = linear(rank)
    with pytest.raises(ShareError, match=r"parameter weight.*shares=4.*for \.\.\. in batch"):
        model(torch.ones(1, 1)).sum().backward()
    (gradient,) = torch.autograd.grad(model(torch.ones(1, 1)).sum(), [model.weight])
    assert gradient.item() == 1.0


@on_ranks(2)
def test_an_optimizers_step_inside_of_a_step_is_an_error(rank):
    model, data = linear(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    for (x,) in next(iter(data)):
        other.step()
        model(x).sum().backward()
        with pytest.raises(ShareError, match="inside of its share"):
            optimizer.step()
    optimizer.step()
    assert model.weight.item() == -3.5


@on_ranks(2)
def test_a_step_that_was_left_has_no_gradients_and_the_next_one_has(rank):
    model, data = linear(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for batch in data:
        for (x,) in batch:
            model(x).sum().backward()
            if batch.number == 0:
                break
        if batch.number == 0:
            with pytest.raises(ShareError, match="batch 0 of epoch 0 was left"):
                optimizer.step()
            assert model.weight.grad is None
        else:
            optimizer.step()
    assert model.weight.item() == -11.5


@on_ranks(1)
def test_an_error_in_a_share_leaves_random_numbers_as_they_were(rank):
    model, data = linear(rank)
    before = random.getstate()
    with pytest.raises(ZeroDivisionError):
        for batch in data:
            for (x,) in batch:
                model(x / random.random()).sum().backward()
                raise ZeroDivisionError
    del batch
    assert random.getstate() == before


@on_ranks(1)
def test_a_batch_is_gone_through_once_and_one_at_a_time(rank):
    _, data = linear(rank)
    first = next(iter(data))
    second = next(iter(data))
    for number, _ in enumerate(first):
        if number == 1:
            with pytest.raises(ShareError, match="while batch 0 of epoch 0 is under way"):
                list(second)
    with pytest.raises(ShareError, match="gone through already"):
        iter(first)


OTHER_BATCHES = {
    "another batch": (lambda rank: ({}, {"epoch": 0, "batch": rank}), "batch of the epoch: rank 0 has 0; rank 1 has 1"),
    "another epoch": (lambda rank: ({}, {"epoch": rank, "batch": 0}), "epoch: rank 0 has 0; rank 1 has 1"),
    "another seed": (lambda rank: ({"seed": rank}, {}), "seed of the batches: rank 0 has 0; rank 1 has 1"),
    "another order": (lambda rank: ({"shuffle": rank == 1}, {}), "rank 0 has as it is; rank 1 has shuffled"),
    "another data set": (
        lambda rank: ({"rows": TensorDataset(torch.ones(16 + rank, 1))}, {}),
        "length of the data set: rank 0 has 16; rank 1 has 17",
    ),
    "larger batches": (lambda rank: ({"size": 4 + 4 * rank}, {}), "rank 0 has 1, 1, 1, 1; rank 1 has 2, 2, 2, 2"),
}


@on_gloo_and_shm
@pytest.mark.parametrize(("others", "words"), OTHER_BATCHES.values(), ids=OTHER_BATCHES)
@on_ranks(2, "hosts")
def test_ranks_at_different_batches_are_told(rank, others, words):
    model, _ = linear(rank)
    options, state = others(rank.rank)
    data = batches_of(rank, **{"size": 8, **options})
    data.load_state_dict({"epoch": 0, "batch": 0, **state})
    with pytest.raises(PeerError, match="rank 1 is at the end of another step than rank 0") as told:
        for batch in data:
            backward(model, batch)
    assert words in str(told.value)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.no_sync(),
        lambda model: model.set_requires_gradient_sync(False),
        lambda model: model.register_comm_hook(None, lambda state, bucket: bucket.buffer()),
        lambda model: lockstep.accumulate(model, last=False).__enter__(),
    ],
)
@on_ranks(1)
def test_what_shares_decide_is_refused(rank, use):
    model, _ = linear(rank)
    with pytest.raises(OptionError, match="shares=4"):
        use(model)


@on_ranks(3)
def test_options_that_make_no_sense(rank):
    for words, options in {
        "2 shares are too few for 3 ranks": {"shares": 2},
        "whole number from 1": {"shares": 0},
        "loss must be one of": {"shares": 8, "loss": "max"},
        "buffer_policy='mean' beside shares": {"shares": 8, "buffer_policy": "mean"},
    }.items():
        with pytest.raises(OptionError, match=words):
            replicated(rank, **options)


@on_ranks(1)
def test_modules_and_batches_have_the_same_number_of_shares(rank):
    model, _ = linear(rank)
    with pytest.raises(OptionError, match=r"8 shares.*shares=4"):
        list(next(iter(batches_of(rank, size=8, shares=8))))
    assert model.weight.grad is None


@on_ranks(1)
def test_hooks_that_would_see_the_gradients_of_a_share_are_refused(rank):
    model, data = linear(rank)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(NotReplicableError, match="parameter weight has a post-accumulate-grad hook"):
        list(next(iter(data)))


@on_ranks(2)
def test_ranks_with_other_shares_differ(rank):
    with pytest.raises(AgreementError, match="ranks differ in shares"):
        linear(rank, shares=4 + rank.rank)


def test_each_share_of_each_step_has_random_numbers_of_its_own():
    def work(rank):
        _, data = linear(rank)
        return [torch.rand(()).item() for batch in itertools.islice(forever(data), 6) for _ in batch]

    found = [run_ranks(1, work) for _ in range(2)]  # on several: test_random_numbers_of_each_kind_belong_to_the_share
    drawn, again = (sorted(number for numbers in ranks for number in numbers) for ranks in found)
    assert drawn == again
    assert len(set(drawn)) == 6 * 4


@on_ranks(1)
def test_a_step_that_is_left_in_a_share_for_comparison_is_over(rank):
    model, data = linear(rank)
    lockstep.shares.audit(model, every=1)
    batches = iter(data)
    for _ in (first := next(batches)):
        if first.is_auditing:
            break
    lockstep.shares.audit(model, every=None)
    for number, (x,) in enumerate(second := next(batches)):
        assert number >= 4 or not second.is_auditing
        with lockstep.accumulate(model, weight=1.0):
            model(x).sum().backward()


# ------------------------------------------------------------------------------------- settings


@on_ranks(1)
def test_a_run_that_goes_on_with_another_setting_is_told_which(rank):
    model, data = linear(rank)
    state = lockstep.distributed.training_state_dict(model)
    lockstep.distributed.load_training_state_dict(model, state)
    state["settings"]["intra-op threads"] = "64"
    with pytest.raises(AgreementError, match=r"saved intra-op threads was 64, now.*set_num_threads\(64\)"):
        lockstep.distributed.load_training_state_dict(model, state)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(AgreementError, match="deterministic algorithms was off, now it is on"):
            list(next(iter(data)))
    finally:
        torch.use_deterministic_algorithms(False)


def steps_under_autocast(rank, state, enabled):
    model, data = linear(rank)
    if state is not None:
        lockstep.distributed.load_training_state_dict(model, state)
    for (x,) in next(iter(data)):
        with torch.autocast("cpu", enabled=enabled(rank)):
            model(x).sum().backward()
    return lockstep.distributed.training_state_dict(model)


def test_autocast_is_part_of_the_agreement():
    state = run_ranks(2, steps_under_autocast, None, lambda rank: True)[0]
    assert run_ranks(1, steps_under_autocast, state, lambda rank: True)[0]["settings"] == state["settings"]
    for error in run_ranks(2, steps_under_autocast, state, lambda rank: False, errors=True):
        assert isinstance(error, AgreementError)
        assert "saved autocast was autocast to torch.bfloat16, now it is no autocast" in str(error)
    for error in run_ranks(2, steps_under_autocast, None, lambda rank: rank.rank == 0, errors=True):
        assert isinstance(error, AgreementError)
        assert "ranks differ in autocast" in str(error)


@pytest.mark.parametrize("both", [False, True], ids=["one mode", "both modes on the first rank"])
@on_ranks(3)
def test_modes_that_differ_are_an_error_on_every_rank(rank, both):
    """A step later all is well."""
    model, data = linear(rank)
    told = []
    for number, batch in enumerate(itertools.islice(data, 2)):
        model.train(number == 1 or rank.rank != 2)
        try:
            for (x,) in batch:
                model(x).sum().backward()
                if both and rank.rank == 0:
                    model.train(not model.training)
            told.append(model.weight.grad is not None)
        except PeerError as error:
            told.append(str(error))
        model.zero_grad()
    told, fine = told
    assert f"in training mode on rank {int(both)}, and in evaluation mode on rank 2; call train() or" in told
    assert fine


@on_ranks(1)
def test_the_training_state_of_other_shares_is_refused(rank):
    state = lockstep.distributed.training_state_dict(linear(rank)[0])
    with pytest.raises(OptionError, match="begun with shares=4"):
        lockstep.distributed.load_training_state_dict(linear(rank, shares=8)[0], state)


# ----------------------------------------------------------------------------------------- data


SAMPLES = 90


def resumed(rank, cell, state, steps):
    """Trains to so many steps in all, from a state or from the beginning; gives the state, the fingerprint, and which
    samples this rank has seen in which epoch."""
    model = replicated(rank, MODELS[cell.model], shares=8)
    optimizer = make_optimizer(cell.optimizer, model)
    numbered = TensorDataset(*data_of(cell.model).tensors, torch.arange(SAMPLES))
    data = lockstep.shares.GlobalBatches(numbered, 32, 8, last="smaller", process_group=rank.group)
    seen = []
    if state is not None:
        state = copy.deepcopy(state)  # ranks are threads
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        data.load_state_dict(state["data"])
        lockstep.distributed.load_training_state_dict(model, state["training"])
    done = lockstep.distributed.training_state_dict(model)["steps"]
    for batch in itertools.islice(forever(data), steps - done):
        optimizer.zero_grad()
        for x, y, numbers in batch:
            seen += [(batch.epoch, number) for number in numbers.tolist()]
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
    return (
        {**state, "training": lockstep.distributed.training_state_dict(model)},
        lockstep.shares.fingerprint(model, optimizer),
        seen,
    )


def check_resuming(cell, cuts, steps):
    ((_, expected, samples),) = run_ranks(1, resumed, cell, None, steps)
    assert len(set(samples)) == len(samples) > steps // 3 * SAMPLES - 1  # three batches an epoch
    for number, cut in enumerate(cuts):
        before, other = number % 4, (number + 1 + number // 4 % 3) % 4  # never the same
        first = run_ranks(1 + before, resumed, cell, None, cut)
        rest = run_ranks(1 + other, resumed, cell, first[0][0], steps)
        assert {found for _, found, _ in rest} == {expected}
        assert sorted(sample for _, _, seen in first + rest for sample in seen) == sorted(samples)


def test_a_run_that_is_resumed_on_other_ranks_comes_to_the_same_bits():
    check_resuming(CELLS[1], [2, 5], 8)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cell", [CELLS[1], CELLS[4]], ids=["digits", "characters"])
def test_runs_that_are_stopped_at_random_steps(cell):
    cuts = torch.randint(1, 40, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    check_resuming(cell, cuts, 40)


class Noisy:
    """Samples with a random number in them, of each kind."""

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return torch.tensor([number, torch.rand(()).item(), random.random()])


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_of_samples_are_the_same_in_any_worker(workers):
    def rows(workers, batches):
        data = lockstep.shares.GlobalBatches(Noisy(), 4, 2, seed=3, num_workers=workers)
        return torch.cat([x for batch in itertools.islice(forever(data), batches) for x in batch])

    torch.manual_seed(0)
    found, before = rows(workers, 6), torch.random.get_rng_state()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(found, rows(0, 6))
    first, second = found[:12], found[12:]
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(12))
    assert not set(first[:, 1].tolist()) & set(second[:, 1].tolist())
    assert len(set(found[:, 2].tolist())) == 24


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None, "world")
def test_all_ranks_stop_at_the_same_step_if_one_is_asked_to(rank):
    model, data = linear(rank)
    reasons, stops = [], []
    decisions = lockstep.loop.stop_when(lambda: reasons, rank.group)
    for _ in range(2):
        for batch in lockstep.batches(data, group=rank.group):
            backward(model, batch)
            stops.append(decisions.should_stop)
            if len(stops) == 3 and rank.rank == rank.world - 1:
                reasons.append("asked")
    assert stops == [False, False, False, True]


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None, "world")
def test_an_epoch_that_is_gone_on_with_has_as_many_batches_as_are_left(rank):
    model, _ = linear(rank)
    data = batches_of(rank)
    for batch in lockstep.batches(data, group=rank.group):
        backward(model, batch)
        if batch.number == 1:
            break
    left, numbers = lockstep.batches(data, group=rank.group), []
    for batch in left:
        backward(model, batch)
        numbers.append(batch.number)
    assert (len(left), numbers, data.epoch) == (2, [2, 3], 1)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("names_the_module", [False, True])
@on_ranks(None, "world")
def test_a_batch_with_shares_cannot_be_left_out(rank, names_the_module):
    model, data = linear(rank)
    told = pytest.raises(PeerError) if rank.rank else pytest.raises(OptionError, match="shares")
    with told:
        for batch in lockstep.batches(data, group=rank.group):
            for (x,) in batch:
                if rank.rank == 0:
                    lockstep.loop.skip_batch(*([model] if names_the_module else []), group=rank.group)
                model(x).sum().backward()


def test_a_batch_that_nobody_goes_through_is_left_out():
    data = lockstep.shares.GlobalBatches(ROWS, 4, 2, shuffle=False)
    found = [[x for (rows,) in batch for x in rows.flatten().tolist()] for batch in data if batch.number != 1]
    assert found == [[0, 1, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_data_sets_that_cannot_be_cut_into_shares_are_refused():
    for words, given, options in [
        ("map-style", (Stream(), 4, 2), {}),
        ("one for each of the 8 shares", (ROWS, 4, 8), {}),
        ("do not fill one batch", (ROWS, 32, 8), {}),
        ("sampler, which it decides", (ROWS, 8, 8), {"sampler": range(16)}),
    ]:
        with pytest.raises(OptionError, match=words):
            lockstep.shares.GlobalBatches(*given, **options)
    with pytest.raises(OptionError, match="batch_size=8, these have batch_size=4"):
        state = lockstep.shares.GlobalBatches(ROWS, 8, 2).state_dict()
        lockstep.shares.GlobalBatches(ROWS, 4, 2).load_state_dict(state)


# --------------------------------------------------------------------------------------- audits


def flip(gradient, element, bit):
    """The gradient with one bit of one element turned over."""
    flipped = gradient.clone()
    flipped.view(-1).view(torch.int32)[element] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    return flipped


@pytest.mark.parametrize("world", [1, 2, 3])
def test_audits_of_what_is_computed_rightly_change_nothing(world):
    def work(rank, every):
        data = batches_of(rank, data_of("digits"), 32, 8, shuffle=True, last="smaller")
        model = replicated(rank, digits, shares=8)
        lockstep.shares.audit(model, every=every)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        audited = 0
        for batch in itertools.islice(forever(data), 4):
            optimizer.zero_grad()
            for x, y in batch:
                audited += batch.is_auditing
                with lockstep.accumulate(model, weight=len(x)):
                    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
        return lockstep.shares.fingerprint(model), audited

    found = run_ranks(world, work, 1)
    assert sum(audited for _, audited in found) == 4
    assert {print_ for print_, _ in found} == {run_ranks(1, work, None)[0][0]}


def flips_until_found(rank, seed, every, broken=1):
    """A rank turns over a bit of one gradient of every share. What the audit says, and after how many steps."""
    generator = torch.Generator().manual_seed(seed)
    model = two_layers(rank)
    lockstep.shares.audit(model, every=every)
    name, parameter = list(model.named_parameters())[seed % 4]
    element, bit = (int(torch.randint(n, (1,), generator=generator)) for n in (parameter.numel(), 32))
    if rank.rank == broken:
        parameter.register_hook(lambda gradient: flip(gradient, element, bit))
    data = batches_of(rank, seed=seed, shuffle=True)
    for steps, batch in enumerate(forever(data), 1):
        try:
            backward(model, batch)
        except AuditError as error:
            return steps, str(error), f"the gradient of {name} is the first of 1 tensors that differ, of 4"
    raise AssertionError


@pytest.mark.parametrize("seed", range(8))
def test_a_bit_that_a_rank_turns_over_is_found_by_name(seed):
    for steps, message, expected in run_ranks(2, flips_until_found, seed, 1):
        assert steps == 1
        assert expected in message
        assert "rank 0" in message
        assert "rank 1" in message


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_hundred_bits_are_found_within_the_expected_number_of_steps():
    """Rank 1 of 3 has a part in two of three audits, and one of four steps is audited: 6 steps on average."""
    steps = [run_ranks(3, flips_until_found, seed, 4)[0][0] for seed in range(100)]
    assert len(steps) == 100
    assert 4 < sum(steps) / 100 < 8


@on_ranks(1)
def test_a_kernel_that_is_not_deterministic_is_found_by_one_rank(rank):
    model, data = linear(rank)
    lockstep.shares.audit(model, every=1)
    calls = itertools.count()
    model.weight.register_hook(lambda gradient: gradient + 1e-6 * next(calls))
    with pytest.raises(AuditError, match=r"share \d of batch 0 of epoch 0, which rank 0 has computed"):
        backward(model, next(iter(data)))


@on_ranks(1)
def test_audits_that_make_no_sense(rank):
    with pytest.raises(OptionError, match="without shares"):
        lockstep.shares.audit(lockstep.replicate(nn.Linear(1, 1), process_group=rank.group))
    with pytest.raises(OptionError, match="whole number above 0"):
        lockstep.shares.audit(linear(rank)[0], every=0)
