"""Modules that change between steps with shares: the same bits on any number of ranks where all change them alike, an
error by name on every rank where one does, and a step later all is well again."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
import threaded
from lockstep.errors import AgreementError, NotReplicableError, OutOfSyncError, PeerError
from lockstep.shares import share_exchange as reduction
from lockstep.shares.module import ShareModule
from programs.ranks import on_ranks
from share_runs import forever
from threaded import count_collectives, run_ranks

ROWS = TensorDataset(torch.linspace(-1, 1, 32, dtype=torch.float64).view(16, 2))
HOSTS = ["--", "aa", "aab"]
"""Two and three ranks: over Gloo, in memory that they share, and over both."""


def on(hosts, function, *args, **options):
    """Return what ranks on these hosts return; "-" is for Gloo."""
    return run_ranks(len(hosts), function, *args, hosts=hosts.replace("-", ""), **options)


def layer(start=0.0, inputs=2, outputs=2):
    made = nn.Linear(inputs, outputs)
    for number, parameter in enumerate(made.parameters()):
        values = torch.linspace(start, start + 1, parameter.numel()) + number
        parameter.data = values.view_as(parameter)
    return made


def network():
    return nn.Sequential(layer(-1.0), nn.BatchNorm1d(2), layer(0.5))


def train(rank, change, alone=False, steps=5, backs_out=None):
    """Return what each step has given: gradients and buffers, or an error. After the second step the module is
    changed, on the last rank only if `alone`; `backs_out` takes that back after the fourth."""
    model = lockstep.replicate(network(), shares=4, process_group=rank.group)
    data = lockstep.shares.GlobalBatches(ROWS, 8, 4, shuffle=False, process_group=rank.group)
    found = []
    for number, batch in enumerate(itertools.islice(forever(data), steps)):
        if number == 2 and (not alone or rank.rank + 1 == rank.world):
            kept = change(model)
        if number == 4 and backs_out is not None and rank.rank + 1 == rank.world:
            backs_out(model, kept)
        model.zero_grad()
        before = values_of(model)
        try:
            for (x,) in batch:
                model(x.to(model[0].weight.dtype)).square().sum().backward()
        except (AgreementError, OutOfSyncError, NotReplicableError, PeerError) as error:
            assert values_of(model) == before  # gradients, and buffers
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append(values_of(model))
    return found


def values_of(model):
    gradients = [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]
    return gradients, [buffer.flatten().tolist() for buffer in model.buffers()]


# ------------------------------------------------------------------------------- what programs do to their modules


def append_a_layer(model):
    model.append(layer(2.0))


def remove_the_normalisation(model):
    kept = model[1]
    model[1] = nn.Identity()
    return kept


def put_the_normalisation_back(model, kept):
    model[1] = kept


def replace_a_layer(model):
    kept = model[2]
    model[2] = layer(0.25)
    return kept


def put_the_layer_back(model, kept):
    model[2] = kept


def freeze_a_layer(model):
    model[0].requires_grad_(False)


def thaw_the_layer(model, kept):
    model[0].requires_grad_(True)


def exchange_layers(model):
    model[0], model[2] = model[2], model[0]


def exchange_layers_again(model, kept):
    exchange_layers(model)


def exchange_weights(model):
    model[0].weight, model[2].weight = model[2].weight, model[0].weight


def register_a_buffer(model):
    model[2].register_buffer("extra", torch.zeros(3))


def delete_the_buffer(model, kept):
    del model[2].extra


def write_a_buffer(model):
    kept = model[1].running_mean.clone()
    model[1].running_mean.fill_(9.0)
    return kept


def write_the_buffer_back(model, kept):
    model[1].running_mean.copy_(kept)


def make_it_double(model):
    model.double()


def make_it_single(model, kept):
    model.float()


def nothing(model):
    pass


ALIKE = [
    nothing,
    append_a_layer,
    remove_the_normalisation,
    replace_a_layer,
    freeze_a_layer,
    exchange_layers,
    exchange_weights,
    register_a_buffer,
    write_a_buffer,
    make_it_double,
]
ALONE = [
    (append_a_layer, lambda model, kept: model.pop(3), ["rank {last} has parameter 3.weight"]),
    (remove_the_normalisation, put_the_normalisation_back, ["rank 0 has parameter 1.weight"]),
    (replace_a_layer, put_the_layer_back, ["parameter 2.weight is another object", "on rank {last}", "rank 0"]),
    (freeze_a_layer, thaw_the_layer, ["parameter 0.weight", "trained; rank {last} has", "frozen; make it the same"]),
    (
        exchange_layers,
        exchange_layers_again,
        ["parameter 0.weight", "rank {last} has", "which was parameter 2.weight before, trained; make it"],
    ),
    (register_a_buffer, delete_the_buffer, ["rank {last} has buffer 2.extra"]),
    (write_a_buffer, write_the_buffer_back, ["buffer 1.running_mean", "other values on rank {last} than on rank 0"]),
    (make_it_double, make_it_single, ["parameter 0.weight", "rank 0 has float32", "rank {last} has float64"]),
]


# ------------------------------------------------------------------------------------------------------- the tests


CELLS = [
    *(pytest.param(change, reduction.CAP_BYTES, id=f"{change.__name__}-one bucket") for change in ALIKE),
    *(
        pytest.param(change, 1, id=f"{change.__name__}-many buckets", marks=[] if is_quick else pytest.mark.around)
        for change, is_quick in (
            (append_a_layer, True),
            (freeze_a_layer, False),
            (exchange_weights, False),
            (make_it_double, False),
        )
    ),
]


@pytest.mark.parametrize(("change", "cap"), CELLS)
def test_a_change_on_all_ranks_gives_the_same_bits_on_any_number(change, cap, monkeypatch):
    monkeypatch.setattr(reduction, "CAP_BYTES", cap)
    wanted = run_ranks(1, train, change)[0]
    assert not any(isinstance(step, str) for step in wanted)
    for hosts in HOSTS:
        assert on(hosts, train, change) == [wanted] * len(hosts)


@pytest.mark.parametrize("hosts", ["aab", *(pytest.param(hosts, marks=pytest.mark.around) for hosts in ("--", "aa"))])
@pytest.mark.parametrize(("change", "backs_out", "words"), ALONE, ids=[change.__name__ for change, _, _ in ALONE])
def test_a_change_on_one_rank_is_an_error_on_every_rank_until_it_is_undone(change, backs_out, words, hosts):
    wanted = run_ranks(1, train, nothing, False, 6)[0]
    results = on(hosts, train, change, True, 6, backs_out)
    assert all(result == results[0] for result in results)
    assert results[0][:2] == wanted[:2]
    assert results[0][2] == results[0][3]
    assert results[0][2].startswith(("AgreementError", "OutOfSyncError"))
    for word in words:
        assert word.format(last=len(hosts) - 1) in results[0][2]
    gradients, buffers = zip(*results[0][4:], strict=True)
    assert list(gradients) == [gradients for gradients, _ in wanted[4:]]
    assert buffers[0] != results[0][1][1]  # of the normalisation, which has gone on


@pytest.mark.parametrize("hosts", ["--", "aa"])
def test_a_new_layer_that_begins_with_other_values_on_each_rank_is_an_error(hosts):
    def work(rank):
        return train(rank, lambda model: model.append(layer(rank.rank)), steps=3)[2]

    for error in on(hosts, work):
        assert error.startswith("OutOfSyncError: parameter 3.weight was put into the module")


@pytest.mark.parametrize("hosts", ["--", "aa"])
def test_a_new_buffer_that_begins_with_other_values_on_each_rank_is_an_error(hosts):
    """As one that forward registers, from what a rank has seen."""

    def work(rank):
        return train(rank, lambda model: model.register_buffer("seen", torch.full((1,), rank.rank)), steps=3)[2]

    for error in on(hosts, work):
        assert error.startswith("OutOfSyncError: buffer seen was registered or written between steps")


@pytest.mark.parametrize("hosts", ["-", "--", "aa"])
def test_a_layer_that_comes_while_a_step_is_under_way_is_an_error(hosts):
    """On the last rank, in its last share."""

    def work(rank):
        model = lockstep.replicate(network(), shares=4, process_group=rank.group)
        data = lockstep.shares.GlobalBatches(ROWS, 8, 4, shuffle=False, process_group=rank.group)
        found = []
        for batch in itertools.islice(forever(data), 4):
            model.zero_grad()
            try:
                for number, (x,) in enumerate(batch):
                    if (batch.epoch, batch.number, number) == (0, 1, len(batch) - 1) and rank.rank + 1 == rank.world:
                        append_a_layer(model)
                    model(x.float()).square().sum().backward()
                found.append(values_of(model)[0])
            except (NotReplicableError, PeerError) as error:
                found.append(str(error)[:40])
                if rank.rank + 1 == rank.world:
                    del model[3]
        return found

    *others, last = on(hosts, work)
    assert last[1] == "parameter 3.weight was put into the module"[:40]
    for each in others:
        assert each[1] == f"rank {len(others)} has left the loop over the shares"[:40]
        assert [each[0], *each[2:]] == [last[0], *last[2:]]
    assert last[2] == last[0]


@pytest.mark.parametrize("hosts", ["--", "aa"])
def test_a_module_that_is_another_one_at_its_first_step_is_an_error(hosts):
    def work(rank):
        model = lockstep.replicate(network(), shares=4, process_group=rank.group, init_sync=False)
        if rank.rank:
            append_a_layer(model)
        data = lockstep.shares.GlobalBatches(ROWS, 8, 4, process_group=rank.group)
        with pytest.raises(AgreementError, match=r"rank 1 has parameter 3\.weight"):
            for (x,) in next(iter(data)):
                model(x.float()).sum().backward()
        return True

    assert on(hosts, work) == [True, True]


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_at_a_batch_with_another_number_of_shares_is_told(hosts):
    """Fourteen rows: a batch of eight, in four shares, and one of two, in two."""

    def work(rank):
        model = lockstep.replicate(network(), shares=4, process_group=rank.group)
        rows = TensorDataset(ROWS.tensors[0][:10])
        data = lockstep.shares.GlobalBatches(rows, 8, 4, shuffle=False, last="smaller", process_group=rank.group)
        found = []
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

    results = on(hosts, work)
    alone = run_ranks(1, work)[0]
    for result in results:
        assert result[:2] == alone[:2]
        assert "is at the end of another step" in result[2]


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("hosts", ["--", "aa"])
def test_a_rank_that_cannot_begin_a_step_is_told_to_the_others_and_changes_nothing(hosts, modules):
    """The hook of an optimizer in backward is found where a step begins."""

    def work(rank):
        model = lockstep.replicate(network(), shares=4, process_group=rank.group)
        others = [lockstep.replicate(layer(), shares=4, process_group=rank.group) for _ in range(modules - 1)]
        data = lockstep.shares.GlobalBatches(ROWS, 8, 4, shuffle=False, process_group=rank.group)
        found = []
        for number, batch in enumerate(itertools.islice(forever(data), 5)):
            model.zero_grad()
            if number == 2 and rank.rank == 1:
                handle = model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
                before = model[1].running_mean.clone()
                model[1].running_mean.fill_(3.0)  # by a program, between steps
            try:
                for (x,) in batch:
                    sum(each(x.float()).square().sum() for each in (model, *others)).backward()
                found.append(values_of(model)[0])
            except (NotReplicableError, PeerError) as error:
                found.append(f"{type(error).__name__}: {error}"[:40])
                if rank.rank == 1:
                    assert model[1].running_mean.tolist() == [3.0, 3.0]
                    handle.remove()
                    model[1].running_mean.copy_(before)
        return found

    first, second = on(hosts, work)
    assert first[2] == "PeerError: rank 1 has left the loop over"
    assert second[2] == "NotReplicableError: parameter 0.weight h"
    assert first[:2] + first[3:] == second[:2] + second[3:]
    assert len(first) == 5


@on_ranks(2)
def test_a_buffer_that_one_rank_has_written_before_a_step_that_cannot_begin_is_found_in_the_next_one(rank):
    model = lockstep.replicate(network(), shares=4, process_group=rank.group)
    data = lockstep.shares.GlobalBatches(ROWS, 8, 4, shuffle=False, process_group=rank.group)
    found = []
    for number, batch in enumerate(itertools.islice(forever(data), 4)):
        if number == 2 and rank.rank == 1:
            handle = model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
            model[1].running_mean.fill_(3.0)
        try:
            for (x,) in batch:
                model(x.float()).square().sum().backward()
        except (NotReplicableError, OutOfSyncError, PeerError) as error:
            found.append(type(error).__name__)
            if number == 2 and rank.rank == 1:
                handle.remove()
    assert found == [["PeerError", "OutOfSyncError"], ["NotReplicableError", "OutOfSyncError"]][rank.rank]


@pytest.mark.parametrize("hosts", ["--", "aa"])
def test_only_a_step_that_differs_from_the_one_before_is_agreed_on(hosts, monkeypatch):
    """A last batch with fewer shares is known beforehand."""
    monkeypatch.setitem(threaded._NAMES, "_add_in_order", "add_in_order")

    def work(rank):
        model = lockstep.replicate(network(), shares=4, process_group=rank.group)
        rows = TensorDataset(ROWS.tensors[0][:10])
        data = lockstep.shares.GlobalBatches(rows, 8, 4, last="smaller", process_group=rank.group)
        names = []
        for number, batch in enumerate(itertools.islice(forever(data), 6)):
            if number == 5:
                freeze_a_layer(model)
            with count_collectives(rank) as seen:
                for (x,) in batch:
                    model[2](x.float()).sum().backward()
            names.append([each.name for each in seen])
        return names

    for names in on(hosts, work):
        assert names[1] == names[2] == names[3] == names[4]
        assert len(names[0]) > len(names[1]) < len(names[5])


@pytest.mark.parametrize("hosts", HOSTS[:2])
def test_a_module_in_a_cycle_may_be_collected_while_a_step_begins(hosts, monkeypatch):
    """Of each training a module is left that only a cycle refers to, and any allocation may start the collector."""
    opens = ShareModule.open

    def collecting_first(module, step):
        gc.collect()
        opens(module, step)

    def work(rank):
        data = lockstep.shares.GlobalBatches(ROWS, 8, 4, shuffle=False, process_group=rank.group)
        left = lockstep.replicate(network(), shares=4, process_group=rank.group)
        left.itself = [left]
        model = lockstep.replicate(network(), shares=4, process_group=rank.group)
        del left
        (batch, *_) = itertools.islice(forever(data), 1)
        for (x,) in batch:
            model(x.to(model[0].weight.dtype)).square().sum().backward()
        assert rank.all_equal(model[0].weight.grad)

    monkeypatch.setattr(ShareModule, "open", collecting_first)
    on(hosts, work)
