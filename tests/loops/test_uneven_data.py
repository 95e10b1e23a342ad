"""Ranks with unequal numbers of batches, batches that are left out, and agreed stops."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import OrderedDict, UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from lockstep.errors import OptionError, PeerError
from processes import run_processes
from programs.networks import Applying, Signed
from programs.ranks import on_ranks, replicated, scalars, scalars_of
from small_modules import chain, error_of, fails_in_backward, one_weight, x_of
from threaded import count_collectives, run_ranks
from training_loops import WHERE, BadBatchError, Plan, alone, compare, random_plan, train

knowing = pytest.mark.parametrize("known", [True, False], ids=["lengths", "streams"])

# ---------------------------------------------------------------------------- beside one process

PLANS = {
    "streams on shm, wrapped": Plan((3, 1, 2), known=False, wrapped=True, hosts="aaa"),
    "windows": Plan((5, 2), window=2),
    "windows of streams": Plan((5, 2, 3), known=False, window=2),
    "weights": Plan((4, 1), weighted=True, window=3),
    "two modules": Plan((4, 2), modules=2, zeros=True),
    "two groups": Plan((2, 4), modules=2, groups=2),
    "left out": Plan((3, 2), bad=((0, 1, 0, WHERE[0]), (0, 0, 2, WHERE[1]), (1, 1, 1, WHERE[2]))),
    "left out by hand": Plan(
        (3, 2), context=False, bad=((0, 1, 0, WHERE[2]), (0, 0, 2, WHERE[1]), (1, 1, 1, WHERE[0]))
    ),
    "left out on both": Plan((2, 2), context=False, bad=((0, 0, 1, WHERE[1]), (0, 1, 1, WHERE[2]))),
    "left out of two modules": Plan((3, 2), modules=2, bad=((0, 1, 0, WHERE[2]), (1, 0, 1, WHERE[1]))),
    "left out of two modules by hand": Plan(
        (3, 2), modules=2, context=False, bad=((0, 1, 0, WHERE[2]), (1, 0, 1, WHERE[1]))
    ),
    "left out of a window": Plan((4, 4), known=False, window=3, modules=2, bad=((1, 1, 3, WHERE[2]),)),
    "left out of a window again and again": Plan(
        (2, 4), window=3, context=False, bad=((0, 1, 0, WHERE[1]), (0, 1, 1, WHERE[1]), (0, 1, 2, WHERE[2]))
    ),
    "left out with weights": Plan((3, 2), weighted=True, window=2, hosts="aa", bad=((0, 1, 1, WHERE[2]),)),
    "stopped": Plan((4, 2), stop=(1, 0, 2), hosts="aa"),
}


@pytest.mark.parametrize("name", PLANS)
def test_unequal_numbers_of_batches_train_as_one_process_would(name):
    plan = PLANS[name]
    found = compare(plan)

    for length, each in zip(plan.lengths, found, strict=True):
        if plan.stop is None:
            assert each["padded"] == each["turns"] - plan.epochs * length


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("name", ["windows", "left out", "left out by hand", "stopped"])
def test_on_accelerators(name):
    plan = PLANS[name]
    compare(Plan(**{**vars(plan), "device": "sim", "hosts": ""}))


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(
    "name", ["streams on shm, wrapped", "left out with weights", "left out of two modules by hand"]
)
def test_processes_train_as_one_would(name, backend):
    plan = PLANS[name]
    wanted = alone(plan)
    for found in run_processes(len(plan.lengths), train, plan, None, backend=backend):
        assert found["steps"] == wanted["steps"]
        torch.testing.assert_close(found["values"], wanted["values"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_random_loops(seed):
    compare(random_plan(seed))


@pytest.mark.soak
def test_many_random_loops():
    for seed in range(100, 500):
        compare(random_plan(seed))


# ---------------------------------------------------------------------------- batches


def body(model, turns, optimizer=None):
    for x in turns:
        model.zero_grad()
        model(x).sum().backward()
        if optimizer is not None:
            optimizer.step()


@knowing
@on_ranks(2)
def test_nothing_is_sent_but_lengths_at_the_start_and_who_ends_where_lengths_are_unknown(rank, known):
    model = replicated(rank)
    own = [x_of(rank)] * (3 + 2 * rank.rank)
    body(model, [x_of(rank)] * 2)
    with count_collectives(rank) as seen:
        body(model, lockstep.batches(own if known else iter(own), model))
    seen = [each.name for each in seen]
    steps = ["all_reduce"] * 5
    if not known:
        steps.insert(3, "all_gather_single")  # in the last batch of rank 0, which no other rank knows to be it
    lengths = ["all_reduce", "all_gather"] if known else ["all_reduce", "all_reduce"]  # of which some are unknown
    assert seen == [*lengths, *steps]


class Stream(IterableDataset):
    def __init__(self, n, first=0.0):
        self.n, self.first = n, first

    def __iter__(self):
        return iter(self.first + torch.arange(float(self.n)).view(-1, 1))

    def __len__(self):
        return 100  # not what it gives


@on_ranks(2)
def test_data_loaders(rank):
    model = replicated(rank)
    seen = []
    rows = torch.arange(3.0 + 2 * rank.rank).view(-1, 1) + 10 * rank.rank
    for dataset in (Stream(3 + 2 * rank.rank, 10 * rank.rank), TensorDataset(rows)):
        turns = lockstep.batches(DataLoader(dataset, 2), model)
        seen.append(0)
        for batch in turns:
            model(batch[0] if isinstance(batch, list) else batch).sum().backward()
            seen[-1] += 1
        try:
            seen.append(len(turns))
        except TypeError:
            seen.append(None)
    assert seen == [3, None, 3, 3]


@pytest.mark.parametrize("hosts", ["", "aa"])
@on_ranks(2, "hosts")
def test_a_batch_that_counts_nothing_leaves_no_trace(rank):
    model = replicated(rank, lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)))
    part = replicated(rank, lambda: nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]))
    optimizer = torch.optim.Adam([*model.parameters(), *part.parameters()], weight_decay=0.1)
    weights = []
    for _ in range(2):
        turns = lockstep.batches([torch.randn(4, 2, generator=rank.generator())] * (2 + rank.rank), model, part)
        for x in turns:
            optimizer.zero_grad()
            x = torch.full_like(x, torch.nan) if turns.is_padding else x
            loss = model(x).sum() + part[0](x).sum()
            if turns.is_padding:
                loss = loss + part[1](x).sum()  # which no other rank uses
            loss.backward()
            optimizer.step()
            weights.append(turns.weight)
            mean = torch.tensor(lockstep.mean(loss.item(), group=rank.group))
            assert mean.isfinite()
            assert rank.all_equal(mean)
            assert part[1].weight.grad is None
            assert all(rank.all_equal(buffer) for buffer in model.buffers())
    lockstep.check_in_sync(model)
    lockstep.check_in_sync(part)
    assert all(tensor.isfinite().all() for tensor in [*model.state_dict().values(), *part.state_dict().values()])
    assert weights == [1, 1, rank.rank] * 2
    assert int(model[1].num_batches_tracked) == 6  # those of the first rank that has had one


def whose_buffers(rank, lengths, known, modules, passes, leaves_after=None):
    """Whose buffers the modules have after each turn of two loops, of which the second may be left early, and in two
    steps after them."""
    models, own, seen = [replicated(rank, Signed) for _ in range(modules)], [0] * lengths[rank.rank], []

    def step(turn):
        for _ in range(passes):
            sum(model(turn, rank.rank) for model in models).backward()
        seen.extend({model.signature() for model in models})

    for epoch in range(2):
        for turn, _ in enumerate(lockstep.batches(own if known else iter(own), *models, padding=0)):
            step(turn)
            if epoch and turn + 1 == leaves_after:
                break
    step(7)
    step(8)
    return seen


OWNERS = {
    (1, 3): (0, 1, 1),
    (3, 1): (0, 0, 0),
    (1, 4, 2): (0, 1, 1, 1),
    (1, 2, 3): (0, 1, 2),
    (0, 2, 3): (1, 1, 2),
    (2, 1, 3): (0, 0, 2),
}
"""By the lengths of the ranks' loaders, whose buffers all have after each turn."""


@knowing
@pytest.mark.parametrize(("modules", "passes"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("host", ["", "a"], ids=["gloo", "shm"])
def test_buffers_are_those_of_the_first_rank_that_has_a_batch(known, modules, passes, host):
    for lengths, owners in OWNERS.items():
        loop = list(enumerate(owners))
        world = len(lengths)
        for found in run_ranks(world, whose_buffers, lengths, known, modules, passes, hosts=host * world):
            assert found == [*loop, *loop, (7, 0), (8, 0)]


@knowing
def test_buffers_are_those_of_rank_0_again_after_a_loop_that_was_left_early(known):
    for found in run_ranks(2, whose_buffers, (1, 4), known, 1, 1, 2):
        assert found == [(0, 0), (1, 1), (2, 1), (3, 1), (0, 0), (1, 1), (7, 0), (8, 0)]


def statistics(count):
    """A buffer of so many elements, of which each rank's forward makes another."""

    def forward(m, value):
        m.values = torch.full_like(m.values, value)
        return m.weight.sum()

    return Applying(forward, (), weight=nn.Parameter(torch.ones(1)), values=torch.zeros(count))


@knowing
@pytest.mark.parametrize("count", [2, 100_000], ids=["in the report", "large"])
@on_ranks(3)
def test_mean_buffers_are_those_of_the_ranks_that_have_a_batch(rank, known, count):
    lengths = (1, 0, 2)
    model, seen = replicated(rank, lambda: statistics(count), buffer_policy="mean"), []
    own = [0] * lengths[rank.rank]
    for _ in range(2):
        for _ in lockstep.batches(own if known else iter(own), model, padding=0):
            model(2.0**rank.rank).backward()
            seen.append(set(model.values.tolist()))
    model(2.0**rank.rank).backward()
    assert [*seen, {round(each, 4) for each in model.values.tolist()}] == [{2.5}, {4.0}, {2.5}, {4.0}, {2.3333}]


@pytest.mark.filterwarnings("ignore:.*SGD.step.. uses the gradient")  # to which a pass has added zeros
@pytest.mark.parametrize("unfrozen", [False, True])
@on_ranks(2)
def test_a_backward_after_the_round_of_a_batch_that_counts_nothing(rank, unfrozen):
    model = replicated(rank, chain)
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    model[1].requires_grad_(not unfrozen)
    for turn, x in enumerate(lockstep.batches([x_of(rank)] * (3 - 2 * rank.rank), model)):
        optimizer.zero_grad()
        if turn == 1:
            model.requires_grad_(True)
        model(x).sum().backward()
        with model.no_sync():
            (0 * model(x)).sum().backward()
        optimizer.step()
    assert all(rank.all_equal(parameter) for parameter in model.parameters())
    assert model[1].weight.item() != 1


@on_ranks(2)
def test_statistics_of_a_forward_after_the_round_of_a_batch_that_counts_nothing(rank):
    model = lockstep.replicate(nn.BatchNorm1d(1), process_group=rank.group, buffer_policy="local")
    for x in lockstep.batches([torch.randn(4, 1)] * (1 + rank.rank), model):
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
    assert int(model.num_batches_tracked) == [2, 4][rank.rank]


@on_ranks(2)
def test_gradients_that_are_kept(rank):
    """Gradients are never set to None: what is there counts as the mean that it was."""
    model = replicated(rank)
    seen = []
    for x in lockstep.batches([x_of(rank)] * (1 + rank.rank), model):
        model(x).sum().backward()
        seen.append(model.weight.grad.item())
    assert seen == [1.5, 3.5]


@on_ranks(2)
def test_a_rank_whose_backward_fails_stops_with_the_others(rank):
    model = replicated(rank)
    decisions = lockstep.loop.stop_when(lambda: rank.rank == 0, rank.group)
    error = error_of(fails_in_backward(model(x_of(rank)), rank.rank == 1).sum().backward)
    assert (error, decisions.should_stop) == [(PeerError, True), (ArithmeticError, True)][rank.rank]


@knowing
@on_ranks(2)
def test_a_rank_without_any_batch(rank, known):
    model, own = replicated(rank), [x_of(rank)] * (2 * rank.rank)
    with pytest.raises(OptionError, match="rank 0 has no batch at all"):
        body(model, lockstep.batches(own if known else iter(own), model))
    turns = lockstep.batches(own if known else iter(own), model, padding=torch.ones(1, 1))
    assert [scalars_of(model, loss=model(x).sum()) for x in turns] == [[2.0]] * 2


@pytest.mark.parametrize("padding", [None, torch.ones(1, 1)])
@pytest.mark.parametrize("known", [(True, True), (False, False), (True, False)])
@on_ranks(2)
def test_no_rank_has_a_batch(rank, known, padding):
    model = replicated(rank)
    counts = []
    for count in (0, 2, 0):
        own = [x_of(rank)] * count
        turns = lockstep.batches(own if known[rank.rank] else iter(own), model, padding=padding)
        counts.append(sum(model(x).sum().backward() is None for x in turns))
    assert (counts, model.weight.grad.item()) == ([0, 2, 0], 3.0)


class Lying(list):
    def __len__(self):
        return 3


def lies(rank, gives):
    model = replicated(rank)
    own = Lying([x_of(rank)] * gives) if rank.rank else [x_of(rank)] * 3
    body(model, lockstep.batches(own, model))


def test_a_loader_that_gives_another_number_than_it_says():
    first, second = run_ranks(2, lies, 2, errors=True)
    assert isinstance(first, PeerError)
    assert "the loader has a length of 3, and has given 2 batches" in str(second)
    with pytest.raises(OptionError, match="the loader has a length of 3, and has given 4 batches"):
        run_ranks(2, lies, 4, group_timeout=1.0)  # for which the other rank waits


class Row:
    def __init__(self, x):
        self.x = x


class Items(OrderedDict):
    """A dict of a class of its own."""


@dataclass
class Fields:
    x: torch.Tensor | None


def without_x(batch):
    x = batch.x
    del batch.x
    return x


CHANGED = {
    "a dict": (lambda x: {"x": x}, lambda batch: batch.pop("x")),
    "a dict of a class of its own": (lambda x: Items(x=x), lambda batch: batch.pop("x")),
    "what acts as a dict": (lambda x: UserDict(x=x), lambda batch: batch.pop("x")),
    "one without tensors": (lambda x: UserDict(x=x.tolist()), lambda batch: torch.tensor(batch.pop("x"))),
    "an object": (Row, without_x),
    "a dataclass": (Fields, without_x),
    "a tensor": (torch.clone, lambda batch: batch.mul_(2) / 2),
    "in a list": (lambda x: [Fields(x)], lambda batch: without_x(batch.pop())),
    "in the object": (lambda x: [{"x": Row(x)}], lambda batch: without_x(batch[0]["x"])),
}


@pytest.mark.parametrize(("make", "take"), CHANGED.values(), ids=CHANGED)
@on_ranks(2)
def test_a_batch_that_the_loop_takes_apart_or_writes_to_is_as_it_was_when_it_is_repeated(rank, make, take):
    model = replicated(rank)
    seen = []
    for batch in lockstep.batches([make(x_of(rank)) for _ in range(1 + 2 * rank.rank)], model):
        seen.append(take(batch))
        model(seen[-1]).sum().backward()
    assert all(torch.equal(x, x_of(rank)) for x in seen)
    assert len(seen) == 3


def refills(rank):
    """On rank 1 it is the same tensor again and again, which nobody writes to."""
    model, memory = replicated(rank), torch.ones(1, 1)
    given = (memory if rank.rank else memory.fill_(value) for value in (1.0, 2.0, 3.0))
    for x in lockstep.batches(given, model):
        model(x).sum().backward()


def test_a_loader_that_writes_each_batch_into_the_memory_of_the_one_before():
    first, second = run_ranks(2, refills, errors=True)
    assert isinstance(first, OptionError)
    assert "has no length, and writes each batch into the memory of the one before" in str(first)
    assert isinstance(second, PeerError)


@on_ranks(2)
def test_a_loader_may_write_to_other_rows_of_the_memory_whose_rows_it_gives(rank):
    def rows():
        memory = torch.zeros(3, 1)
        for row in memory.split(1):
            yield row.fill_(rank.rank + 1.0)

    model = replicated(rank)
    assert [model(x).sum().backward() for x in lockstep.batches(rows(), model)] == [None] * 3


@on_ranks(2)
def test_a_rank_that_has_run_out_and_goes_on_without_backward(rank):
    model = replicated(rank)
    told = pytest.raises(PeerError) if rank.rank else pytest.raises(OptionError, match="without a synchronisation")
    with told:
        for turn, x in enumerate(lockstep.batches(iter([x_of(rank)] * (1 + 2 * rank.rank)), model)):
            if rank.rank or turn == 0:
                model(x).sum().backward()


@on_ranks(2)
def test_evaluation_neither_pads_nor_drops(rank):
    turns = lockstep.batches([1.0] * (1 + rank.rank), replicated(rank))
    with torch.no_grad():
        assert list(turns) == [1.0] * (1 + rank.rank)


@pytest.mark.parametrize("leaves_out", [1, 15, 256])
@on_ranks(2)
def test_a_rank_that_leaves_out_batches_by_itself_is_told_by_name(rank, leaves_out):
    """Rank 1 catches its own errors, and goes on with the next batch."""
    model, me = replicated(rank), rank.rank
    distance = f"{leaves_out} {('ahead of', 'behind')[me]}"
    told = f"rank {me}: rank {1 - me} is {distance} this rank in the batches of its loop"
    with pytest.raises(PeerError, match=told):
        for number, x in enumerate(lockstep.batches([x_of(rank)] * (leaves_out + 2), model)):
            if rank.rank == 1 and 0 < number <= leaves_out:
                continue
            model(x).sum().backward()


@on_ranks(2)
def test_the_loop_may_end_early(rank):
    model = replicated(rank)
    seen = []
    for _ in range(2):
        turns = lockstep.batches([x_of(rank)] * (4 if rank.rank else 1), model)
        for number, x in enumerate(turns):
            body(model, [x])
            seen.append(model.weight.grad.item())
            if number == 2:
                break
        seen.append(turns.is_padding)
    body(model, [x_of(rank)])
    assert [*seen, model.weight.grad.item()] == [1.5, 2.0, 2.0, False] * 2 + [1.5]


@pytest.mark.parametrize(("change", "layers"), [("replaced", 2), ("inserted", 3)])
@on_ranks(2)
def test_a_new_layer_where_a_rank_has_run_out_is_an_error_on_all(rank, change, layers):
    """Both ranks put it in when rank 1 has run out; then both have a batch again."""
    model, raised = replicated(rank, chain), []
    for turn, x in enumerate(lockstep.batches([x_of(rank)] * (2 - rank.rank), model)):
        if turn == 1 and change == "replaced":
            model[0] = one_weight()
        if turn == 1 and change == "inserted":
            model.insert(0, one_weight())
        raised.append(error_of(model(x).sum().backward))
    assert raised == [None, OptionError if rank.rank else PeerError]
    assert scalars(model) == [None] * layers
    model(x_of(rank)).sum().backward()
    assert scalars(model) == [1.5] * layers


@pytest.mark.parametrize(
    ("layers", "weight", "after", "expected"),
    [
        ([1], None, False, [(1 + 1 + 1 + 2) / 2] * 2),
        ([0, 1], None, False, [(1 + 1 + 1 + 2) / 2] * 2),
        ([1], None, True, [(1 + 1 + 1 + 2) / 2, (1 + 1) / 2]),
        ([1], 4, False, [pytest.approx((1 + 1 + 1 + 2) / 16)] * 2),
        ([0, 1], 4, False, [pytest.approx((1 + 1 + 1 + 2) / 16)] * 2),
    ],
)
@on_ranks(2)
def test_a_rank_that_has_run_out_contributes_what_it_had_of_new_layers(rank, layers, weight, after, expected):
    """The ranks have not agreed on them yet when rank 1 runs out."""
    model = replicated(rank, chain)
    for turn, x in enumerate(lockstep.batches([x_of(rank)] * (3 - 2 * rank.rank), model)):
        for layer in layers if turn == 0 and not after else ():
            model[layer] = one_weight()
        with lockstep.accumulate(model, last=turn == 2, weight=weight):
            model(x).sum().backward()
        for layer in layers if turn == 0 and after else ():
            model[layer] = one_weight()
    assert scalars(model) == expected


@pytest.mark.parametrize("has_gradient", [False, True])
@on_ranks(2)
def test_what_a_rank_that_has_run_out_has_of_an_unfrozen_layer_does_not_count(rank, has_gradient):
    before = 4 if has_gradient else 0
    model = replicated(rank, chain)
    new = next(model[1].parameters()).requires_grad_(False)
    if has_gradient:
        new.grad = torch.full_like(new, 4.0)
    for turn, x in enumerate(lockstep.batches([x_of(rank)] * (2 - rank.rank), model)):
        if turn == 1:
            new.requires_grad_(True)
            with model.no_sync():  # passes of one batch, one after the other
                model(x).sum().backward()
        with lockstep.accumulate(model, last=turn == 1):
            model(x).sum().backward()
    assert scalars(model) == [(1 + 1 + 1 + 2) / 2, (before + before + 1 + 1) / 2]


# ---------------------------------------------------------------------------- what is left out


@on_ranks(2)
def test_skip_on_leaves_buffers_and_the_optimizer_as_they_were(rank):
    usual, left_out = (False, False), (True, True)
    model = lockstep.replicate(nn.Sequential(nn.BatchNorm1d(1), one_weight()), process_group=rank.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        before = [each.clone() for each in (*model.buffers(), *model.parameters())]
        with lockstep.loop.skip_on(BadBatchError, modules=[model]):
            y = model(torch.randn(4, 1))
            if rank.rank == step == 1:
                raise BadBatchError
            fails_in_backward(y, (rank.rank, step) == (0, 2), BadBatchError).sum().backward()
        optimizer.step()
        after = [*model.buffers(), *model.parameters()]
        seen.append((lockstep.loop.skipped(model), all(torch.equal(a, b) for a, b in zip(before, after, strict=True))))
        assert all(rank.all_equal(each) for each in after)
    lockstep.check_in_sync(model)
    assert seen == [usual, left_out, left_out, usual]


@on_ranks(2)
def test_other_errors_are_told(rank):
    model = replicated(rank)
    told = pytest.raises(ZeroDivisionError if rank.rank else PeerError)
    with told, lockstep.loop.skip_on(BadBatchError, modules=[model]):
        fails_in_backward(model(x_of(rank)), rank.rank == 1, ZeroDivisionError).sum().backward()


@on_ranks(2)
def test_a_gradient_scaler(rank):
    model = replicated(rank)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.5), torch.amp.GradScaler("cpu", init_scale=8.0)
    seen = []
    for number in range(3):
        optimizer.zero_grad()
        with lockstep.loop.skip_on(BadBatchError, modules=[model]):
            if (number, rank.rank) == (1, 0):
                raise BadBatchError
            scaler.scale(model(x_of(rank)).sum()).backward()
        if not lockstep.loop.skipped(model):
            scaler.step(optimizer)
            scaler.update()
        seen.append(model.weight.item())
    assert seen == [0.25, 0.25, -0.5]


@pytest.mark.parametrize("hosts", ["", "aa"])
@on_ranks(2, "hosts")
def test_a_batch_is_left_out_after_its_forward(rank):
    """No batches(): forward counts are told, and the next step is as if nothing had been."""
    model = replicated(rank)
    for number in range(3):
        model.zero_grad()
        y = model(x_of(rank)).sum()
        if rank.rank and number == 1:
            lockstep.loop.skip_batch(model)
        else:
            y.backward()
        assert (lockstep.loop.skipped(model), *scalars(model)) == ((True, None) if number == 1 else (False, 1.5))


@on_ranks(2)
def test_a_batch_is_left_out_after_an_earlier_failure(rank):
    usual = False, 1.5
    model = replicated(rank)
    seen = []
    for number in range(4):
        model.zero_grad()
        y = model(x_of(rank))
        with contextlib.suppress(BadBatchError, PeerError):
            if rank.rank and number == 2:
                lockstep.loop.skip_batch(model)
            else:
                fails_in_backward(y, (rank.rank, number) == (1, 0), BadBatchError).sum().backward()
        seen.append((lockstep.loop.skipped(model), *scalars(model)))
    assert seen == [(False, None), usual, (True, None), usual]


# ---------------------------------------------------------------------------- agreement


@on_ranks(3)
def test_a_flag_that_any_rank_has(rank):
    assert lockstep.loop.agree(rank.rank == 1, rank.group)
    assert not lockstep.loop.agree(rank.rank == 5, rank.group)


@on_ranks(2, raises=OptionError, says="agree() got a Tensor on rank 1: Boolean value of Tensor with more than one")
def test_a_flag_that_is_neither_true_nor_false_is_an_error_on_all_ranks(rank):
    lockstep.loop.agree(torch.ones(2) if rank.rank else False, rank.group)


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@on_ranks(2, "hosts")
def test_batches_are_numbered_alike_whatever_has_been_freed(rank):
    """One rank's collector has taken the model of a loop before, the other's has not yet."""

    def train(rank, batches):
        model = replicated(rank)
        model.cycle = [model]
        for x in lockstep.batches([x_of(rank)] * batches, model):
            model.zero_grad()
            model(x).sum().backward()
        return model

    model = train(rank, 4)
    kept = [model] if rank.rank == 1 else []
    del model
    rank.gather(torch.zeros(1))
    gc.collect()
    assert (train(rank, 3).weight.grad.item(), len(kept)) == [(1.5, 0), (1.5, 1)][rank.rank]


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@on_ranks(2, "hosts")
def test_only_a_process_group_can_be_asked_whether_to_stop(rank):
    """A module would be a loop of its own, which nobody asks to stop."""
    with pytest.raises(OptionError, match=r"expected a process group, got .*Linear"):
        lockstep.should_stop(replicated(rank))
    assert not lockstep.should_stop(rank.group)


# ---------------------------------------------------------------------------- read ahead


def prefetched(batches):
    """Give each batch once the next one has been read."""
    read = iter(batches)
    upcoming = next(read)
    for following in read:
        yield upcoming
        upcoming = following
    yield upcoming


def read_ahead(rank, around, length, known):
    loader = [torch.ones(1, 1)] * (length + 1 - rank.rank)
    loader = loader if known else iter(loader)
    model = replicated(rank)
    turns = lockstep.batches(prefetched(loader) if around == "loader" else loader, model)
    for number, x in enumerate(prefetched(turns) if around == "batches" else turns):
        window = lockstep.accumulate(model, last=number % 2 == 1)
        with window if around == "window" else lockstep.loop.skip_on(BadBatchError, modules=[model]):
            if around == "first left out" and number == 0:
                raise BadBatchError
            model(x).sum().backward()


@knowing
@pytest.mark.parametrize(
    ("around", "length", "warns"),
    [
        ("batches", 3, 1),
        ("batches", 2, 0),  # could be a step of two batches
        ("loader", 5, 0),
        ("window", 4, 0),
        ("first left out", 5, 0),
    ],
)
def test_what_reads_ahead_of_the_loop_is_warned_of_where_a_rank_has_run_out(around, length, warns, known):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, read_ahead, around, length, known)
    told = [str(each.message) for each in caught if "the backward came after" in str(each.message)]
    assert [text.startswith("rank 1: of each batch") for text in told] == [True] * warns
