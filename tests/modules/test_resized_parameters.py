"""Parameters that get another shape or dtype after replicating are agreed on again, or every rank raises by name."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import AgreementError, LockstepError
from programs.networks import Applying
from programs.ranks import on_ranks

GROUPS = pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
LARGE = 1 << 18


def scaled(*sizes):
    """Weights of any shape: a gradient is the input, everywhere."""

    def forward(m, x, used=None):
        chosen = m.weights if used is None else [m.weights[used]]
        return sum((weight * x).double().sum() for weight in chosen)

    return Applying(forward, (), weights=nn.ParameterList(torch.ones(size) for size in sizes))


def used_once(rank):
    net = lockstep.replicate(scaled(3, 3), process_group=rank.group)
    net(1.0).backward()
    net.zero_grad()
    return net


def grow(net):
    net.weights[1].data = torch.ones(5)


def set_in_place(net):
    with torch.no_grad():
        net.weights[1].set_(torch.ones(7))


CHANGES = {
    "grown": grow,
    "shrunk": lambda net: setattr(net.weights[1], "data", net.weights[1].data[:1].clone()),
    "set in place": set_in_place,
    "storage resized": lambda net: net.weights[1].requires_grad_(False).resize_(2, 4).fill_(1).requires_grad_(),
    "replaced": lambda net: net.weights.__setitem__(1, nn.Parameter(torch.ones(2, 2))),
    "double": lambda net: net.double(),
    "bfloat16": lambda net: setattr(net.weights[0], "data", net.weights[0].data.bfloat16()),
}
SIZES = {"small": (3, 3), "large": (LARGE, 3), "large and changed": (3, LARGE)}


@GROUPS
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2, "hosts")
def test_gradients_are_means_after_a_change_on_all_ranks(rank, change, sizes):
    net = lockstep.replicate(scaled(*sizes), process_group=rank.group)
    for step in range(5):
        if step in (1, 3):
            net.zero_grad()
        if step == 3:
            CHANGES[change](net)
        before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        net(rank.rank + 1.0).backward()
        for p, grad in zip(net.parameters(), before, strict=True):
            assert p.grad.shape == p.shape
            assert p.grad.dtype == p.dtype
            assert torch.equal(p.grad, torch.full_like(p, 1.5) + (0 if grad is None else grad))
    lockstep.check_in_sync(net)


@pytest.mark.parametrize("used", [0, 1])
@on_ranks(2)
def test_a_resized_parameter_that_only_one_rank_uses(rank, used):
    net = used_once(rank)
    grow(net)
    net(1.0, used=used if rank.rank == 0 else 1 - used).backward()
    assert [p.grad.tolist() for p in net.parameters()] == [[0.5] * 3, [0.5] * 5]


@GROUPS
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("change", ["grown", "set in place", "double"])
@on_ranks(2, "hosts")
def test_a_change_on_one_rank_is_an_error_by_name_until_it_is_undone(rank, change, used):
    net = lockstep.replicate(scaled(3, 3), process_group=rank.group)
    net(1.0).backward()
    kept = [p.data for p in net.parameters()]
    if rank.rank == 1:
        CHANGES[change](net)
    messages = set()
    for _ in range(2):
        net.zero_grad()
        with pytest.raises(AgreementError) as caught:
            net(1.0, used=None if used else 0).backward()
        messages.add(str(caught.value))
        traceback.clear_frames(caught.tb)  # and the graph, with which autograd remembers shapes
        assert [p.grad for p in net.parameters()] == [None, None]
    for p, data in zip(net.parameters(), kept, strict=True):
        p.data = data if change != "set in place" else data[:3].clone()
    net(rank.rank + 1.0).backward()
    assert [p.grad.tolist() for p in net.parameters()] == [[1.5] * 3] * 2
    (message,) = messages
    assert rank.all_equal(torch.tensor([*message.encode()]))
    name = "weights.0" if change == "double" else "weights.1"
    assert f"ranks differ in parameter {name}: rank 0 has float32 of shape (3,)" in message


@on_ranks(2)
def test_other_values_in_a_resized_parameter_are_an_error_on_every_rank(rank):
    net = used_once(rank)
    net.weights[1].data = torch.full((5,), 1.0 + rank.rank)
    with pytest.raises(LockstepError, match=r"parameter weights\.1 .*has other values on rank 1"):
        net(1.0).backward()


@on_ranks(2)
def test_a_change_within_a_window_of_weights_is_an_error_on_every_rank(rank):
    net = used_once(rank)
    with pytest.raises(LockstepError):
        with lockstep.accumulate(net, last=False, weight=1):
            net(1.0).backward()
        net.zero_grad()
        grow(net)
        with lockstep.accumulate(net, weight=1):
            net(1.0).backward()
    net.zero_grad()
    net(rank.rank + 1.0).backward()
    assert [p.grad.tolist() for p in net.parameters()] == [[1.5] * 3, [1.5] * 5]
