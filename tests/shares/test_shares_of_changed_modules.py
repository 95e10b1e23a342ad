"""Modules that change between steps with shares: the same bits on any number of ranks where all change them alike, an
error by name on every rank where one does, and a step later all is well again."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import threaded
from lockstep.errors import AgreementError, NotReplicableError, OutOfSyncError, PeerError
from lockstep.shares import share_exchange as reduction
from lockstep.shares.module import ShareModule
from programs.ranks import on_ranks, replicated
from share_runs import batches_of, forever
from threaded import count_collectives, run_ranks

ROWS = TensorDataset(torch.linspace(-1, 1, 32, dtype=torch.float64).view(16, 2))
GROUPS = {"gloo": (2, ""), "shm": (2, "aa"), "hosts": (3, "aab")}
"""The number of ranks, and their hosts: over Gloo, in memory that they share, and over both."""
two_ranks = pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])


def layer(start=0.0, inputs=2, outputs=2):
    made = nn.Linear(inputs, outputs)
    for number, parameter in enumerate(made.parameters()):
        values = torch.linspace(start, start + 1, parameter.numel()) + number
        parameter.data = values.view_as(parameter)
    return made


def network():
    return nn.Sequential(layer(-1.0), nn.BatchNorm1d(2), layer(0.5))


def shared(rank, rows=ROWS, **options):
    """The network with shares, and batches."""
    return replicated(rank, network, shares=4), batches_of(rank, rows, 8, **options)


def outcomes(models, data, steps, begin, in_share=None):
    """Return what each step has given: gradients and buffers of the first module, or an error, which leaves them alone.

    Step `number` begins after `begin(number)`, and each of its shares after `in_share(number, share)`.
    """
    found, model = [], models[0]
    for number, batch in enumerate(itertools.islice(forever(data), steps)):
        begin(number)
        model.zero_grad()
        before = values_of(model)
        try:
            for share, (x,) in enumerate(batch):
                if in_share is not None:
                    in_share(number, share)
                sum(each(x.to(each[0].weight.dtype)).square().sum() for each in models).backward()
        except (AgreementError, OutOfSyncError, NotReplicableError, PeerError) as error:
            assert in_share is not None or values_of(model) == before
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append(values_of(model))
    return found


def train(rank, change, alone=False, steps=5):
    """After the second step the module is changed; if `alone` on the last rank only, which takes it back after the
    fourth."""
    model, data = shared(rank)
    kept = []

    def begin(number):
        if number == 2 and (not alone or rank.rank + 1 == rank.world):
            kept.append(change.do(model))
        if number == 4 and alone and rank.rank + 1 == rank.world:
            change.undo(model, *kept)

    return outcomes([model], data, steps, begin)


def values_of(model):
    gradients = [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]
    return gradients, [buffer.flatten().tolist() for buffer in model.buffers()]


# ------------------------------------------------------------------------------- what programs do to their modules


def put(model, place, new):
    """Return the layer that was there."""
    kept, model[place] = model[place], new
    return kept


def exchange_layers(model, _=None):
    model[0], model[2] = model[2], model[0]


def exchange_weights(model):
    model[0].weight, model[2].weight = model[2].weight, model[0].weight


def write(model, values):
    """Return the mean that was there."""
    kept = model[1].running_mean.clone()
    model[1].running_mean.copy_(torch.as_tensor(values))
    return kept


class Change(NamedTuple):
    """What is done to a module, what takes it back, and words of the error if one rank alone does it."""

    do: Callable[[Any], Any]
    undo: Callable[[Any, Any], Any] | None = None
    """Is given what `do` has returned; None for a change of all ranks only."""
    words: tuple[str, ...] = ()


CHANGES = {
    "nothing": Change(lambda model: None),
    "a layer more": Change(
        lambda model: model.append(layer(2.0)),
        lambda model, _: model.pop(3),
        ("rank {last} has parameter 3.weight",),
    ),
    "no normalisation": Change(
        lambda model: put(model, 1, nn.Identity()),
        lambda model, kept: put(model, 1, kept),
        ("rank 0 has parameter 1.weight",),
    ),
    "another layer": Change(
        lambda model: put(model, 2, layer(0.25)),
        lambda model, kept: put(model, 2, kept),
        ("parameter 2.weight is another object", "on rank {last}", "rank 0"),
    ),
    "a frozen layer": Change(
        lambda model: model[0].requires_grad_(False),
        lambda model, _: model[0].requires_grad_(True),
        ("parameter 0.weight", "trained; rank {last} has", "frozen; make it the same"),
    ),
    "layers exchanged": Change(
        exchange_layers,
        exchange_layers,
        ("parameter 0.weight", "rank {last} has", "which was parameter 2.weight before, trained; make it"),
    ),
    "weights exchanged": Change(exchange_weights),
    "a buffer more": Change(
        lambda model: model[2].register_buffer("extra", torch.zeros(3)),
        lambda model, _: delattr(model[2], "extra"),
        ("rank {last} has buffer 2.extra",),
    ),
    "a buffer written": Change(
        lambda model: write(model, 9.0),
        lambda model, kept: write(model, kept),
        ("buffer 1.running_mean", "other values on rank {last} than on rank 0"),
    ),
    "double precision": Change(
        lambda model: model.double(),
        lambda model, _: model.float(),
        ("parameter 0.weight", "rank 0 has float32", "rank {last} has float64"),
    ),
}


# ------------------------------------------------------------------------------------------------------- the tests


SLOWLY = ["a frozen layer", "weights exchanged", "double precision"]
MANY_BUCKETS = ["a layer more", *(pytest.param(name, marks=pytest.mark.around) for name in SLOWLY)]


def check_same_bits(name):
    wanted = run_ranks(1, train, CHANGES[name])[0]
    assert not any(isinstance(step, str) for step in wanted)
    for world, hosts in GROUPS.values():
        assert run_ranks(world, train, CHANGES[name], hosts=hosts) == [wanted] * world


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_on_all_ranks_gives_the_same_bits_on_any_number(name):
    check_same_bits(name)


@pytest.mark.parametrize("name", MANY_BUCKETS)
def test_a_change_on_all_ranks_gives_the_same_bits_in_many_buckets(name, monkeypatch):
    monkeypatch.setattr(reduction, "CAP_BYTES", 1)
    check_same_bits(name)


@pytest.mark.parametrize(
    "group", ["hosts", *(pytest.param(name, marks=pytest.mark.around) for name in ("gloo", "shm"))]
)
@pytest.mark.parametrize("name", [name for name, change in CHANGES.items() if change.undo])
def test_a_change_on_one_rank_is_an_error_on_every_rank_until_it_is_undone(name, group):
    wanted = run_ranks(1, train, CHANGES["nothing"], False, 6)[0]
    world, hosts = GROUPS[group]
    results = run_ranks(world, train, CHANGES[name], True, 6, hosts=hosts)
    assert all(result == results[0] for result in results)
    assert results[0][:2] == wanted[:2]
    assert results[0][2] == results[0][3]
    assert results[0][2].startswith(("AgreementError", "OutOfSyncError"))
    for word in CHANGES[name].words:
        assert word.format(last=world - 1) in results[0][2]
    gradients, buffers = zip(*results[0][4:], strict=True)
    assert list(gradients) == [gradients for gradients, _ in wanted[4:]]
    assert buffers[0] != results[0][1][1]  # of the normalisation, which has gone on


NEW = {
    "layer": (
        lambda model, rank: model.append(layer(rank)),
        "OutOfSyncError: parameter 3.weight was put into the module",
    ),
    "buffer": (  # as one that forward registers, from what a rank has seen
        lambda model, rank: model.register_buffer("seen", torch.full((1,), rank)),
        "OutOfSyncError: buffer seen was registered or written between steps",
    ),
}


@two_ranks
@pytest.mark.parametrize(("add", "words"), NEW.values(), ids=NEW)
@on_ranks(2, "hosts")
def test_what_is_new_and_begins_with_other_values_on_each_rank_is_an_error(rank, add, words):
    *_, error = train(rank, Change(lambda model: add(model, rank.rank)), steps=3)
    assert error.startswith(words)


@pytest.mark.parametrize(("world", "hosts"), [(1, ""), (2, ""), (2, "aa")])
def test_a_layer_that_comes_while_a_step_is_under_way_is_an_error(world, hosts):
    """On the last rank, in its last share."""

    def work(rank):
        model, data = shared(rank)
        changes = rank.rank + 1 == rank.world

        def in_share(number, share):
            if changes and (number, share) == (1, 4 // world - 1):
                model.append(layer(2.0))

        def begin(number):
            if changes and number == 2:
                del model[3]

        return outcomes([model], data, 4, begin, in_share)

    *others, last = run_ranks(world, work, hosts=hosts)
    assert last[1].startswith("NotReplicableError: parameter 3.weight was put into the module")
    for each in others:
        assert each[1].startswith(f"PeerError: rank {len(others)} has left the loop over the shares")
        assert [each[0], *each[2:]] == [last[0], *last[2:]]
    assert last[2][0] == last[0][0]


@two_ranks
@on_ranks(2, "hosts", raises=AgreementError, says="rank 1 has parameter 3.weight")
def test_a_module_that_is_another_one_at_its_first_step_is_an_error(rank):
    model = replicated(rank, network, shares=4, init_sync=False)
    if rank.rank:
        model.append(layer(2.0))
    for (x,) in next(iter(batches_of(rank, ROWS, 8))):
        model(x.float()).sum().backward()


TEN_ROWS = TensorDataset(ROWS.tensors[0][:10])
"""A batch of eight, in four shares, and one of two, in two."""


@pytest.mark.parametrize(("world", "hosts"), GROUPS.values(), ids=GROUPS)
def test_a_rank_at_a_batch_with_another_number_of_shares_is_told(world, hosts):
    def work(rank):
        (model, data), found = shared(rank, TEN_ROWS, last="smaller"), []
        for number, batch in enumerate(itertools.islice(forever(data), 5)):
            if number == 2 and rank.rank == 1:
                continue  # which the others compute: they meet this rank's next one
            model.zero_grad()
            try:
                for (x,) in batch:
                    model[2](x.float()).square().sum().backward()
                found.append(model[2].weight.grad.tolist())
            except PeerError as error:
                found.append(str(error)[:40])
                break
        return found

    alone = run_ranks(1, work)[0]
    for result in run_ranks(world, work, hosts=hosts):
        assert result[:2] == alone[:2]
        assert "is at the end of another step" in result[2]


def cannot_begin(rank, modules, puts_back):
    """Before the third of five steps, rank 1 registers an optimizer's hook and writes a buffer; later it may have its
    value again."""
    model, data = shared(rank)
    others = [replicated(rank, lambda: nn.Sequential(layer()), shares=4) for _ in range(modules - 1)]
    kept = []

    def begin(number):
        if number == 2 and rank.rank == 1:
            kept.append(model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None))
            kept.append(write(model, 3.0))
        if number == 3 and rank.rank == 1:
            kept[0].remove()
            if puts_back:
                write(model, kept[1])

    return outcomes([model, *others], data, 5, begin)


@pytest.mark.parametrize("modules", [1, 2])
@two_ranks
def test_a_rank_that_cannot_begin_a_step_is_told_to_the_others_and_changes_nothing(hosts, modules):
    """The hook of an optimizer in backward is found where a step begins."""
    first, second = run_ranks(2, cannot_begin, modules, True, hosts=hosts)
    assert first[2].startswith("PeerError: rank 1 has left the loop over")
    assert second[2].startswith("NotReplicableError: parameter 0.weight has")
    assert first[:2] + first[3:] == second[:2] + second[3:]
    assert len(first) == 5


@on_ranks(2)
def test_a_buffer_that_one_rank_has_written_before_a_step_that_cannot_begin_is_found_in_the_next_one(rank):
    *_, at_once, next_one, _ = cannot_begin(rank, 1, puts_back=False)
    assert at_once.startswith(["PeerError", "NotReplicableError"][rank.rank])
    assert next_one.startswith("OutOfSyncError")


@pytest.fixture
def sees_additions(monkeypatch):
    monkeypatch.setitem(threaded._NAMES, "_add_in_order", "add_in_order")


@pytest.mark.usefixtures("sees_additions")
@two_ranks
@on_ranks(2, "hosts")
def test_only_a_step_that_differs_from_the_one_before_is_agreed_on(rank):
    """A last batch with fewer shares is known beforehand."""
    (model, data), names = shared(rank, TEN_ROWS, shuffle=True, last="smaller"), []
    for number, batch in enumerate(itertools.islice(forever(data), 6)):
        if number == 5:
            model[0].requires_grad_(False)
        with count_collectives(rank) as seen:
            for (x,) in batch:
                model[2](x.float()).sum().backward()
        names.append([each.name for each in seen])
    assert names[1] == names[2] == names[3] == names[4]
    assert len(names[0]) > len(names[1]) < len(names[5])


@pytest.fixture
def collects_when_a_step_begins(monkeypatch):
    opens = ShareModule.open

    def collecting_first(module, step):
        gc.collect()
        opens(module, step)

    monkeypatch.setattr(ShareModule, "open", collecting_first)


@pytest.mark.usefixtures("collects_when_a_step_begins")
@two_ranks
@on_ranks(2, "hosts")
def test_a_module_in_a_cycle_may_be_collected_while_a_step_begins(rank):
    """Of each training a module is left that only a cycle refers to, and any allocation may start the collector."""
    left, _ = shared(rank)
    left.itself = [left]
    model, data = shared(rank)
    del left
    for (x,) in next(iter(data)):
        model(x.float()).square().sum().backward()
    assert rank.all_equal(model[0].weight.grad)
