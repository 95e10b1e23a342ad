"""Values that differ by rank are found in every N-th round, by name; values that are equal never are."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch import nn

import lockstep
from bit_differences import BIT_DIFFERENCES, Values
from lockstep.errors import AgreementError, NotReplicableError, OptionError, OutOfSyncError
from small_modules import one_weight, x_of
from threaded import count_collectives, run_ranks

EVERY = 3
NOTHING = contextlib.nullcontext()
KINDS = ["gradient", "weight", "buffer"]


def network():
    return nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 600), nn.Linear(600, 1))


def nothing():
    pass


def step(rank, model, optimizer, number, before_step=nothing, after_step=nothing):
    optimizer.zero_grad()
    x = torch.randn(4, 8, generator=rank.generator(number), device="cpu").to(rank.device)
    model(x).square().mean().backward()
    before_step()
    optimizer.step()
    after_step()


def flips_a_bit(rank, seed):
    """A bit flips on one rank; the tensor's name, how many steps that has taken to be found, and what was said."""
    numbers = random.Random(seed)
    model = lockstep.replicate(rank.make(network), process_group=rank.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    lockstep.check_in_sync(model, every=EVERY)
    kind, other = KINDS[seed % 3], numbers.randrange(rank.world)
    floating = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    trained = [name for name, _ in model.named_parameters() if name != "0.bias"]  # which has none, but for rounding
    name = numbers.choice(floating if kind == "buffer" else trained)
    # A buffer is made equal at the end of each round: it has to flip in the one before it is looked at, first or again.
    when = EVERY * (1 + seed % 2) - 1 if kind == "buffer" else numbers.randrange(1, EVERY + 1)
    place, bit = numbers.random(), numbers.randrange(20 if kind == "gradient" else 8, 30)  # 30 makes all ranks' NaN

    def flip():
        if rank.rank != other:
            return
        tensor = model.get_buffer(name) if kind == "buffer" else model.get_parameter(name)
        tensor = tensor.grad if kind == "gradient" else tensor.data
        bits = tensor.view(-1).view(torch.int32)
        largest = int(tensor.view(-1).abs().argmax())  # rounding may undo what is small
        bits[int(place * len(bits)) if kind == "buffer" else largest] ^= 1 << bit

    for number in range(when + EVERY):
        try:
            now = flip if number == when - 1 else nothing
            step(rank, model, optimizer, number, *((now, nothing) if kind == "gradient" else (nothing, now)))
        except OutOfSyncError as error:
            return name, other, number + 1 - when, str(error)
    return name, other, None, ""


def check_flip(seed, **how):
    for name, other, steps, text in run_ranks(3, flips_a_bit, seed, **how):
        kind = "buffer" if KINDS[seed % 3] == "buffer" else "parameter"
        others = ", ".join(str(rank) for rank in range(3) if rank != other)
        assert steps is not None, seed
        assert steps <= EVERY
        assert f"{kind} {name} is out of sync: ranks {others} have other values than rank {other}." in text


@pytest.mark.parametrize("seed", range(12))
def test_a_bit_that_flips_is_found(seed):
    check_flip(seed, hosts="aaa" if seed % 2 else "")


@pytest.mark.parametrize("difference", BIT_DIFFERENCES)
def test_every_difference_in_bits_is_found(difference):
    change, first = BIT_DIFFERENCES[difference]

    def call(rank):
        module = lockstep.replicate(Values(), process_group=rank.group)
        lockstep.check_in_sync(module, every=1)
        module().backward()
        if rank.rank == 1:
            with torch.no_grad():
                change(module)
        with pytest.raises(OutOfSyncError, match=f": {first} is out of sync"):
            module().backward()

    run_ranks(2, call)


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("seed", range(3))
def test_on_accelerators(seed):
    check_flip(seed, device="sim")


@pytest.mark.soak
def test_a_hundred_bits():
    for seed in range(100, 200):
        check_flip(seed)


def equal(rank, policy):
    """Values that are equal when they are looked at, whatever the ranks do between."""
    made = rank.make(network)
    model = lockstep.DistributedDataParallel(made, process_group=rank.group, buffer_policy=policy)
    optimizer = torch.optim.Adam(model.parameters())
    lockstep.check_in_sync(model, every=1)
    number = 0
    for _ in range(2):
        for x in lockstep.batches([torch.randn(4, 8)] * (2 + rank.rank), model):
            optimizer.zero_grad()
            with model.no_sync():
                model(x).sum().backward()
            with lockstep.loop.skip_on(ZeroDivisionError, modules=[model]):
                1 / (number != 4 + rank.rank)
                model(x).sum().backward()
            optimizer.step()
            number += 1
            if rank.rank:  # alone
                with torch.no_grad():
                    model(x)
                model.eval()
                model(x)
                model.train()
    with contextlib.suppress(ZeroDivisionError, lockstep.errors.PeerError):
        y = model(torch.randn(4, 8))
        if rank.rank:
            y.register_hook(lambda grad: 1 / 0)
        y.sum().backward()
    for _ in range(2):
        optimizer.zero_grad()
        model.module(torch.randn(4, 8)).sum().backward()  # past the wrapper's forward
        optimizer.step()
    return number


@pytest.mark.parametrize("policy", ["rank0", "mean", "local"])
def test_equal_values_are_never_called_different(policy):
    assert run_ranks(2, equal, policy) == [6, 6]


def counted(rank):
    model = lockstep.replicate(one_weight(), process_group=rank.group)
    lockstep.check_in_sync(model, every=2)
    for _ in range(2):
        model(x_of(rank)).sum().backward()
    with count_collectives(rank) as seen:
        for _ in range(4):
            model(x_of(rank)).sum().backward()
    lockstep.check_in_sync(model, every=0)
    with torch.no_grad():
        model.weight += rank.rank
    for _ in range(4):
        model(x_of(rank)).sum().backward()
    return [each.name for each in seen]


def test_nothing_more_is_sent_and_zero_ends_it():
    assert run_ranks(2, counted) == [["all_reduce"] * 4] * 2


def goes_on(rank):
    """No gradient is handed out, and each look says it again."""
    model = lockstep.replicate(one_weight(), process_group=rank.group)
    lockstep.check_in_sync(model, every=2)
    with torch.no_grad():
        model.weight += rank.rank
    seen = []
    for number in range(4):
        model.zero_grad()
        with pytest.raises(OutOfSyncError, match="rank 0 has other values than rank 1") if number % 2 else NOTHING:
            model(x_of(rank)).sum().backward()
        seen.append(None if model.weight.grad is None else model.weight.grad.item())
    return seen


def test_no_gradient_is_handed_out():
    assert run_ranks(2, goes_on) == [[1.5, None] * 2] * 2


def test_what_cannot_be():
    def differs(rank):
        lockstep.check_in_sync(lockstep.replicate(one_weight(), process_group=rank.group), every=2 + rank.rank)

    for error in run_ranks(2, differs, errors=True):
        assert isinstance(error, AgreementError)
        assert "ranks differ in check_in_sync(every=...): rank 0 has 2; rank 1 has 3" in str(error)

    def wrong(rank):
        model = lockstep.replicate(one_weight(), process_group=rank.group)
        with pytest.raises(OptionError, match="got every=-1; expected"):
            lockstep.check_in_sync(model, every=-1)
        with pytest.raises(OptionError, match="got every=3, and a group"):
            lockstep.check_in_sync(model, rank.group, every=3)
        with pytest.raises(NotReplicableError, match=r"check_in_sync\(\) got a Linear"):
            lockstep.check_in_sync(one_weight(), every=3)

    run_ranks(1, wrong)
