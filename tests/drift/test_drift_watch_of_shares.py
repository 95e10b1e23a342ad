"""With shares, too, values that differ by rank are found at the end of every N-th step; equal values never are."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
import threaded
from lockstep.errors import AgreementError, LockstepError, NotReplicableError, OptionError, OutOfSyncError, PeerError
from share_runs import digits, forever
from threaded import count_collectives, run_ranks

NOTHING = contextlib.nullcontext()


def nothing(rank, model, optimizer, number):
    """Stands for what a test does before a step."""


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2200), nn.Linear(2200, 1))


def batches_of(rank, shares=4, rows=32):
    with torch.device("cpu"):
        x = torch.arange(rows * 4.0).mul(0.37).sin().view(rows, 4)
    return forever(
        lockstep.shares.GlobalBatches(
            TensorDataset(x), 12, shares, seed=1, shuffle=False, last="smaller", process_group=rank.group
        )
    )


def made(rank, make=network, shares=4, **options):
    return lockstep.replicate(rank.make(make), shares=shares, process_group=rank.group, **options)


def run_step(model, batch):
    for (x,) in batch:
        model(x.to(next(model.parameters()).device)).square().sum().backward()


def train(rank, every, before=nothing, steps=6, rate=None):
    """For each step, the error that it ends with, or None."""
    model = made(rank)
    optimizer = torch.optim.SGD(model.parameters(), rate(rank.rank) if rate else 0.1, momentum=0.5)
    lockstep.check_in_sync(model, every=every)
    found = []
    for number, batch in enumerate(itertools.islice(batches_of(rank), steps), 1):
        before(rank, model, optimizer, number)
        optimizer.zero_grad()
        try:
            run_step(model, batch)
        except LockstepError as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        optimizer.step()
        found.append(None)
    return found


# ----------------------------------------------------------------------------------- values that differ


@pytest.mark.parametrize("hosts", ["", "aaa", "aab"])
@pytest.mark.parametrize(("every", "steps"), [(1, 1), (2, 1), (3, 2)])
def test_a_learning_rate_that_differs_is_found(hosts, every, steps):
    found = run_ranks(3, train, every, nothing, 4, lambda rank: 0.2 if rank == 1 else 0.1, hosts=hosts)
    for rank, errors in enumerate(found):
        assert errors[:steps] == [None] * steps
        text = (
            f"OutOfSyncError: rank {rank}: parameter 0.weight is out of sync: ranks 0, 2 have other values than rank 1."
        )
        assert all(error.startswith(text) for error in errors[steps:]), errors
        assert "a learning rate or a random number that differs by rank" in errors[-1]


def flips(name):
    def flip(rank, model, _, number):
        if (rank.rank, number) == (2, 3):
            tensor = dict([*model.named_parameters(), *model.named_buffers()])[name].data
            tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << 22)

    return flip


@pytest.mark.parametrize("hosts", ["", "aaa"])
@pytest.mark.parametrize("name", ["0.bias", "3.weight", "4.weight", "1.running_mean"])
def test_a_bit_that_flips_is_found_before_gradients_are_handed_out(hosts, name):
    kind = "buffer" if "running" in name else "parameter"
    for errors in run_ranks(3, train, 1, flips(name), 4, hosts=hosts):
        assert errors[:2] == [None] * 2
        for error in errors[2:]:
            assert f"{kind} {name} is out of sync: ranks 0, 1 have other values than rank 2." in error
            assert "No gradient has been handed out" in error


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("name", ["3.weight", "0.bias", "1.running_mean"])
def test_on_accelerators(name):
    for errors in run_ranks(3, train, 1, flips(name), 4, device="sim"):
        assert errors[:2] == [None] * 2
        assert f"{name} is out of sync: ranks 0, 1 have other values than rank 2." in errors[2]


def split(rank):
    """A network on two accelerators of each rank."""
    first, second = (torch.device("sim", 2 * rank.rank + number) for number in range(2))
    layers = nn.Sequential(rank.make(lambda: nn.Linear(4, 3)).to(first), rank.make(lambda: nn.Linear(3, 2)).to(second))
    model = lockstep.replicate(layers, shares=4, process_group=rank.group)
    lockstep.check_in_sync(model, every=1)
    for number, batch in enumerate(itertools.islice(batches_of(rank), 3)):
        if number == 2 and rank.rank:
            with torch.no_grad():
                model[1].bias[0] += 1
        with pytest.raises(OutOfSyncError, match=r"parameter 1\.bias is out of sync") if number == 2 else NOTHING:
            for (x,) in batch:
                model[1](model[0](x.to(first)).to(second)).sum().backward()
    return True


@pytest.mark.usefixtures("sim")
def test_a_module_on_two_accelerators():
    assert run_ranks(2, split, device="sim") == [True] * 2


def test_a_forward_that_writes_its_parameters_on_ranks_with_shares_only():
    """In the last step, which has a share less than there are ranks: before an optimizer changes them."""

    class Clamping(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(max=0.1)
            return super().forward(x)

    def work(rank):
        model = made(rank, lambda: Clamping(4, 1), shares=3)
        lockstep.check_in_sync(model, every=1)
        data = lockstep.shares.GlobalBatches(
            TensorDataset(torch.ones(8, 4)), 6, 3, last="smaller", shuffle=False, process_group=rank.group
        )
        found = []
        for batch in data:
            try:
                run_step(model, batch)
            except OutOfSyncError as error:
                found.append(str(error))
            else:
                found.append(len(batch))
                with torch.no_grad():
                    model.weight += 1
        return found

    for rank, (shares, error) in enumerate(run_ranks(3, work)):
        assert shares == 1
        assert f"rank {rank}: parameter weight is out of sync: ranks 0, 1 have other values than rank 2." in error


# -------------------------------------------------------------------------------- values that are equal


def equal(rank):
    """Values that are equal at the end of each step, whatever is done between."""
    model = made(rank)
    lockstep.check_in_sync(model, every=1)
    optimizer = torch.optim.AdamW(model.parameters())
    batches, kept = batches_of(rank), None
    for number in range(12):
        batch = next(batches)
        if number % 3 == 0:  # else gradients accumulate
            optimizer.zero_grad()
        if number == 4:
            continue  # a batch that all leave out
        if number == 5:
            with pytest.raises(ZeroDivisionError if rank.rank else PeerError):
                for place, (x,) in enumerate(batch):
                    model(x).sum().backward()
                    if rank.rank and place + 1 == len(batch):
                        raise ZeroDivisionError
            continue
        for (x,) in batch:
            with lockstep.accumulate(model, weight=len(x)):
                model(x).square().sum().backward()
        if rank.rank:  # alone
            model.eval()
            model(torch.ones(3, 4))
            model.train()
        optimizer.step()
        if number == 2:
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            state = lockstep.distributed.training_state_dict(model)
        if number == 7:
            model.load_state_dict(kept)
            lockstep.distributed.load_training_state_dict(model, state)
            assert lockstep.distributed.training_state_dict(model)["steps"] == 3
        if number == 8:
            model.append(rank.make(lambda: nn.Linear(1, 1)))
            optimizer.add_param_group({"params": list(model[-1].parameters())})
        if number == 9:
            model[0].requires_grad_(False)
        if number == 10:
            model[1].running_mean.fill_(2.0)
    return lockstep.distributed.training_state_dict(model)["steps"]


@pytest.mark.parametrize("hosts", ["", "aaa", "aab"])
def test_equal_values_are_never_called_different(hosts):
    assert run_ranks(3, equal, hosts=hosts) == [3 + 4] * 3


def test_steps_with_fewer_shares_than_ranks():
    """Every second batch of a data set of 13 rows has a single one."""

    def work(rank):
        model = made(rank, lambda: nn.Linear(4, 1), shares=3)
        lockstep.check_in_sync(model, every=1)
        for batch in itertools.islice(batches_of(rank, 3, rows=13), 6):
            run_step(model, batch)
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad
        return lockstep.distributed.training_state_dict(model)["steps"]

    assert run_ranks(3, work) == [6] * 3


def test_audits_go_on_beside_it():
    def work(rank):
        model = made(rank)
        lockstep.shares.audit(model, every=1)
        lockstep.check_in_sync(model, every=1)
        for batch in itertools.islice(batches_of(rank), 3):
            run_step(model, batch)
        return True

    assert run_ranks(2, work) == [True] * 2


# ------------------------------------------------------------------------------------ when, and how


@pytest.mark.parametrize(
    ("hosts", "expected"), [("", ["all_to_all_single", "all_to_all_single"]), ("aa", ["add_in_order"])]
)
def test_nothing_more_is_sent(hosts, expected, monkeypatch):
    monkeypatch.setitem(threaded._NAMES, "_add_in_order", "add_in_order")

    def work(rank):
        model = made(rank, lambda: nn.Linear(4, 1))
        lockstep.check_in_sync(model, every=2)
        batches = batches_of(rank)
        run_step(model, next(batches))
        with count_collectives(rank) as seen:
            run_step(model, next(batches))
        return [each.name for each in seen]

    assert run_ranks(2, work, hosts=hosts) == [expected] * 2


def toggled(rank):
    """Off, on in the middle, off again: in which steps drift is told."""
    model = made(rank, lambda: nn.Linear(4, 1))
    batches, found = batches_of(rank), []
    for number in range(12):
        if number == 3:
            lockstep.check_in_sync(model, every=4)
        if number == 4:
            with torch.no_grad():
                model.weight += rank.rank
        if number == 10:
            with pytest.raises(OutOfSyncError):
                lockstep.check_in_sync(model, every=0)
        try:
            run_step(model, next(batches))
        except OutOfSyncError:
            found.append(number)
    return found, lockstep.distributed.training_state_dict(model)["steps"]


def test_it_is_switched_on_and_off():
    """A step that has failed is not counted: the next one is looked at again."""
    assert run_ranks(2, toggled) == [([7, 8, 9], 9)] * 2


def two(rank, watched, where):
    """Two modules with shares, and one without; the values of one drift."""
    modules = [made(rank, lambda: nn.Linear(4, 1)), made(rank, lambda: nn.Linear(4, 1))]
    modules.append(lockstep.replicate(rank.make(lambda: nn.Linear(4, 1)), process_group=rank.group))
    lockstep.check_in_sync(modules[watched], every=2)
    found = []
    for batch in itertools.islice(batches_of(rank), 4):
        try:
            for (x,) in batch:
                (modules[0](x) + modules[1](x)).sum().backward()
            modules[2](torch.ones(1, 4)).sum().backward()
            found.append(None)
        except OutOfSyncError as error:
            found.append(str(error))
        with torch.no_grad():
            modules[where].weight += rank.rank
    return found


@pytest.mark.parametrize("watched", range(3))
def test_several_modules(watched):
    assert run_ranks(2, two, watched, (watched + 1) % 3) == [[None] * 4] * 2
    for found in run_ranks(2, two, watched, watched):
        assert found[::2] == [None, None if watched == 2 else found[2]]
        assert "parameter weight is out of sync: rank 0 has other values than rank 1." in found[1]


def test_ranks_go_on_when_values_are_equal_again():
    def repair(rank, model, optimizer, number):
        with torch.no_grad():
            for parameter in model.parameters():
                if number == 2:
                    parameter.add_(rank.rank)
                    model[1].running_var.data.add_(rank.rank)
                if number == 4:
                    parameter.fill_(0.5)
            if number == 4:
                for buffer in model.buffers():
                    buffer.fill_(1)
                optimizer.state.clear()

    for errors in run_ranks(3, train, 1, repair):
        assert [error is None for error in errors] == [True, False, False, True, True, True]


def test_gradients_and_buffers_are_what_they_were_before():
    def work(rank):
        model = made(rank, digits)
        lockstep.check_in_sync(model, every=1)
        data = TensorDataset(torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
        batches = forever(lockstep.shares.GlobalBatches(data, 16, 4, process_group=rank.group))
        run_step(model, next(batches))
        before = [each.clone() for each in (*(p.grad for p in model.parameters()), *model.buffers())]
        with torch.no_grad():
            model[0].weight += rank.rank
        with pytest.raises(OutOfSyncError, match=r"parameter 0\.weight"):
            run_step(model, next(batches))
        after = (*(p.grad for p in model.parameters()), *model.buffers())
        return all(map(torch.equal, before, after))

    assert run_ranks(2, work) == [True] * 2


# ----------------------------------------------------------------------------------- what cannot be


def test_a_module_that_gets_ready_at_its_first_use_is_watched_from_the_first_step_on():
    def work(rank):
        model = made(rank, lambda: nn.Linear(4, 1), init_sync=False)
        lockstep.check_in_sync(model, every=1)
        model.weight.data += rank.rank
        with pytest.raises(
            OutOfSyncError, match="parameter weight is out of sync: rank 0 has other values than rank 1"
        ):
            run_step(model, next(batches_of(rank)))

    run_ranks(2, work)


def test_a_training_state_that_only_one_rank_has_loaded_is_told():
    """Its steps are counted otherwise from then on, and ranks might never look in the same one."""

    def load(rank, model, _, number):
        state = {**lockstep.distributed.training_state_dict(model), "steps": 4}
        if number == 5 or (rank.rank, number) == (1, 3):
            lockstep.distributed.load_training_state_dict(model, state)

    for errors in run_ranks(2, train, 3, load):
        assert [error is None for error in errors] == [True, True, False, False, True, True]
        assert errors[2].startswith("AgreementError: rank 0 compares values in this step")
        assert "and rank 1 does not: its value of every is different, or it has finished a different" in errors[2]


def test_numbers_that_differ_are_told():
    for error in run_ranks(2, lambda rank: train(rank, 1 + rank.rank), errors=True):
        assert isinstance(error, AgreementError)
        assert "ranks differ in check_in_sync(every=...): rank 0 has 1; rank 1 has 2" in str(error)


def test_what_makes_no_sense():
    def work(rank):
        model = made(rank)
        with pytest.raises(OptionError, match="got every=-1; expected"):
            lockstep.check_in_sync(model, every=-1)
        with pytest.raises(NotReplicableError, match=r"check_in_sync\(\) got a Linear"):
            lockstep.check_in_sync(model[0], every=1)
        lockstep.check_in_sync(model, every=1)
        run_step(model, next(batches_of(rank)))  # on one rank there is nothing to compare

    run_ranks(1, work)


@pytest.mark.parametrize("use", [lockstep.loop.skip_batch, lambda model: next(iter(lockstep.batches([1], model)))])
def test_what_goes_by_rounds_is_refused_in_a_sentence(use):
    def work(rank):
        with pytest.raises(
            OptionError, match=r"a module's rounds of gradients: this module is replicated with shares=4"
        ):
            use(made(rank))

    run_ranks(1, work)
