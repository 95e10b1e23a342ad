"""How many copies go from one accelerator to another: few flat ones, and none of what is there already."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from local.test_functions import leaf, linked
from lockstep.local import Broadcast, ReplicaSet, comm
from lockstep.local.functions import link
from programs.networks import mlp
from programs.one_device import loss_of, on

THERE, BACK = ("sim:0", "sim:1"), ("sim:1", "sim:0")
SIM = [torch.device("sim", index) for index in range(3)]
CAPS = [(8 << 10, 1), (2 << 10, 4), (1, 8), (3 << 10, 3)]  # of bytes, and in how many buffers they put 8 KiB


def ones(*sizes, place="sim:0", dtype=torch.float32):
    return [torch.ones(size, dtype=dtype, device=place) for size in sizes]


def kibibytes(place="sim:0"):
    return ones(*[256] * 8, place=place)


def replicas_of(make, *places):
    return lambda: ReplicaSet(on(SIM[0], make), [SIM[i] for i in places])


def layers():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))


def weights():
    return [leaf(4, on=SIM[0]) for _ in range(10)]


def there_and_back(tensors):
    copies = Broadcast.apply([0, 1], *tensors)
    torch.autograd.backward(copies, [torch.ones_like(c) for c in copies])


def from_linked(copies):
    """Backward from replicas on three devices, whose parameters are there."""
    torch.autograd.backward(copies, [torch.ones_like(c) for c in copies], retain_graph=True)


COPIES = {  # what is made once, what is done with it twice, and the copies of the second time
    "a buffer for each dtype and device": (
        lambda: [*ones(*[10] * 20), *ones(*[5] * 20, dtype=torch.int64)],
        lambda tensors: comm.broadcast_coalesced(tensors, SIM),
        {THERE: 2, ("sim:0", "sim:2"): 2},
    ),
    "nothing at home": (lambda: ones(4, 3), lambda tensors: comm.broadcast_coalesced(tensors, [0, 0]), {}),
    "nothing at home, in a sum": (lambda: ones(4, 3), lambda tensors: comm.reduce_add_coalesced([tensors] * 2, 0), {}),
    "gather: each tensor elsewhere": (
        lambda: [torch.ones(2, 3, device=d) for d in (*SIM, "cpu")],
        lambda tensors: comm.gather(tensors, 0, 0),
        {BACK: 1, ("sim:2", "sim:0"): 1, ("cpu", "sim:0"): 1},
    ),
    **{
        f"a cap of {cap} bytes": (
            kibibytes,
            lambda tensors, cap=cap: comm.broadcast_coalesced(tensors, [1], cap),
            {THERE: buffers},
        )
        for cap, buffers in CAPS
    },
    **{
        f"a cap of {cap} bytes, in a sum": (
            lambda: [kibibytes(), kibibytes("sim:1")],
            lambda rows, cap=cap: comm.reduce_add_coalesced(rows, 0, cap),
            {BACK: buffers},
        )
        for cap, buffers in CAPS
    },
    "Broadcast, and its gradients": (weights, there_and_back, {THERE: 1, BACK: 1}),
    **{
        f"gradients of {count} linked replicas": (
            lambda count=count: [c for row in linked(weights(), SIM[:count]) for c in row],
            from_linked,
            {(f"sim:{i}", "sim:0"): 1 for i in range(1, count)},
        )
        for count in (1, 3)
    },
    "linking": (
        lambda: (weights(), [t.detach().to(SIM[1]) for t in weights()]),
        lambda made: link(made[1], list(range(10)), made[0]),
        {},
    ),
    "parameters of replicas": (replicas_of(layers, 0, 1), ReplicaSet.refresh, {THERE: 1}),
    "and of two on one device": (replicas_of(mlp, 0, 1, 1), ReplicaSet.refresh, {THERE: 1}),
    "parameters, and their gradients": (
        replicas_of(layers, 0, 1),
        lambda replicas: loss_of(replicas.refresh(), torch.ones(2, 1, 8)).backward(),
        {THERE: 1, BACK: 1},
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_how_many_copies_it_takes(sim, name):
    make, use, expected = COPIES[name]
    made = make()
    for _ in range(2):  # the first time also tries the connections
        sim.reset_copies()
        use(made)
    found = {pair: count.calls for pair, count in sim.copies().items()}
    assert {pair: calls for pair, calls in found.items() if "cpu" not in pair or pair in expected} == expected
