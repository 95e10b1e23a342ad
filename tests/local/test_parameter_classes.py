"""Replicas have parameters and buffers of the network's classes, with its attributes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from lockstep.local import replicate
from programs.networks import Applying
from tensor_classes import Attributed, Marked, Opaque, Packed, Quantised, State


def holding(weight, buffer=None):
    network = Applying(weight=weight, sizes=(2, 1))
    network.register_buffer("table", buffer)
    return network


@pytest.mark.parametrize("make", [nn.Parameter, Marked, Quantised, lambda t: nn.Parameter(t.as_subclass(Attributed))])
def test_trained_parameters_keep_their_class_and_attributes(make, devices, first):
    network = holding(make(torch.ones(2, 2)).requires_grad_()).to(first)
    network.weight.no_decay = True
    places = devices(2)
    for replica in replicate(network, places):
        assert type(replica.weight) is type(network.weight)
        assert replica.weight.no_decay is True
        assert isinstance(replica.weight, nn.Parameter)
    network.weight.no_decay = False
    one, other = replicate(network, places)
    assert one.weight.no_decay is other.weight.no_decay is False
    del network.weight.no_decay
    assert not hasattr(replicate(network, places)[1].weight, "no_decay")
    out = sum((replica.weight.to(first) * (n + 1)).sum() for n, replica in enumerate(replicate(network, places)))
    out.backward()
    assert network.weight.grad.tolist() == [[3.0, 3.0]] * 2


def test_attributes_that_a_replica_writes_are_not_the_networks():
    network = holding(nn.Parameter(torch.ones(2)))
    network.weight.calls = 0
    replicate(network, ["cpu"] * 2)[1].weight.calls += 1
    assert network.weight.calls == 0
    assert replicate(network, ["cpu"] * 2)[1].weight.calls == 0


def frozen(kind):
    return {
        "packed": lambda: nn.Parameter(Packed(torch.ones(2, 2, dtype=torch.int8), torch.tensor(0.5)), False),
        "quantised": lambda: Quantised(torch.ones(2, 2, dtype=torch.uint8), State(torch.ones(2))),
        "marked": lambda: Marked(torch.ones(2), requires_grad=False),
        "float8": lambda: nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False),
        "uint16": lambda: nn.Parameter(torch.ones(2, dtype=torch.uint16), requires_grad=False),
        "opaque": lambda: nn.Parameter(Opaque(torch.ones(2)), requires_grad=False),
        "sparse": lambda: nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False),
    }[kind]()


@pytest.mark.parametrize("kind", ["packed", "quantised", "marked", "float8", "uint16", "opaque", "sparse"])
def test_frozen_parameters_of_any_class(kind):
    network = holding(frozen(kind))
    network.weight.no_decay = True
    wrapper = lockstep.DataParallel(network, ["cpu"] * 3)
    for _ in range(2):
        wrapper(torch.ones(6, 2)).sum().backward()
    for replica in replicate(network, ["cpu"] * 2):
        assert type(replica.weight) is type(network.weight)
        assert replica.weight.no_decay
        assert not replica.weight.requires_grad
    if kind == "packed":
        network.weight.scale.fill_(3.0)
        assert replicate(network, ["cpu"] * 2)[1].weight.whole().tolist() == [[3.0, 3.0]] * 2
    if kind == "quantised":
        assert replicate(network, ["cpu"] * 2)[1].weight.state is network.weight.state


def test_frozen_parameters_of_any_class_on_other_devices(sim):
    for kind in ("packed", "quantised", "marked"):
        network = holding(frozen(kind)).to("sim:0")
        if kind == "quantised":
            nested = State(torch.ones(1, device="sim:0"))
            state = State(torch.full((2,), 7.0, device="sim:0"), nested=nested)
            network.weight = Quantised(torch.ones(2, 2, dtype=torch.uint8, device="sim:0"), state)
        first, second = replicate(network, ["sim:0", "sim:1"])
        assert type(first.weight) is type(second.weight) is type(network.weight)
        assert second.weight.device == torch.device("sim:1")
        if kind == "packed":
            assert second.weight.payload.device == torch.device("sim:1")
            assert second.weight.whole().tolist() == [[0.5] * 2] * 2
        if kind == "quantised":
            assert network.weight.state.absmax.device == torch.device("sim:0")
            assert second.weight.state.nested.absmax.device == torch.device("sim:1")
            assert second.weight.state.absmax.tolist() == [7.0, 7.0]


BUFFERS = {
    "packed": lambda: Packed(torch.ones(2, 2, dtype=torch.int8), torch.ones(())),
    "attributed": lambda: torch.ones(2).as_subclass(Attributed),
    "parameter": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
    "plain": lambda: torch.ones(2),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_keep_their_class_and_attributes(kind):
    network = holding(nn.Parameter(torch.ones(1)), BUFFERS[kind]())
    network.table.origin = "here"
    for replica in replicate(network, ["cpu"] * 2):
        assert type(replica.table) is type(network.table)
        assert replica.table.origin == "here"
    second = replicate(network, ["cpu"] * 2)[1]
    (second.table.scale if kind == "packed" else second.table).fill_(9.0)
    assert (network.table.scale if kind == "packed" else network.table).max() == 1
