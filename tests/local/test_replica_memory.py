"""Buffers of a replica that share memory: each is a tensor of its own for whoever writes to it."""

import pytest
import torch
from torch import nn

from lockstep import DataParallel
from lockstep.errors import NotReplicableError
from lockstep.local import ReplicaSet
from programs.networks import Applying


def resizing(elements):
    """Gives its scale the size of the input's rows when it first sees some, in place, as quantizers do."""

    def forward(m, x):
        if m.scale.numel() < x.shape[1]:
            m.scale.resize_(x.shape[1]).fill_(2.0)
        return x * m.scale * m.weight * m.rest.mean()

    rest, weight = torch.full((100,), 3.0), nn.Parameter(torch.ones(()))
    return Applying(forward, scale=torch.ones(elements), rest=rest, weight=weight)


@pytest.mark.parametrize(("kind", "elements"), [("cpu", 4), ("sim", 1), ("sim", 4)])
def test_a_buffer_made_larger_in_place_is_refused_by_name(kind, elements, devices):
    network = DataParallel(resizing(elements).to(devices(1)[0]), device_ids=devices(2))
    with pytest.raises(NotReplicableError, match=f"buffer scale .* in place, from {elements} elements to 64"):
        network(torch.ones(4, 64, device=devices(1)[0]))


@pytest.mark.parametrize("alone_first", [False, True])
def test_a_buffer_that_has_its_size_already_is_written_in_place(devices, first, alone_first):
    """On the CPU, a vector of one element may grow."""
    network = resizing(1).to(first)
    if alone_first or first.type != "cpu":
        network(torch.ones(1, 64, device=first))
    wrapped = DataParallel(network, device_ids=devices(2))
    assert torch.equal(wrapped(torch.ones(4, 64, device=first)), torch.full((4, 64), 6.0, device=first))


def test_forward_may_drop_and_replace_buffers():
    """It has no buffers after its first forward, and a larger one in the place of a third."""

    def forward(m, x):
        if hasattr(m, "a"):
            del m.a
        m.b, m.c = None, torch.ones(30)
        return m.linear(x)

    network = Applying(forward, a=torch.ones(3), b=torch.ones(3), c=torch.ones(3))
    wrapped, x = DataParallel(network, device_ids=["cpu", "cpu"]), torch.ones(4, 3)
    for _ in range(2):
        assert torch.equal(wrapped(x), network.linear(x))


def test_forward_may_assign_a_larger_part_of_another_buffer(devices, first):
    def forward(m, x):
        m.mask = m.whole[: x.shape[1]]
        return x * m.mask

    whole, x = torch.ones(64), torch.ones(4, 16, device=first)
    network = Applying(forward, whole=whole, mask=whole[:4]).to(first)
    assert torch.equal(DataParallel(network, device_ids=devices(2))(x), x)


def test_copied_buffers_keep_order_values_and_versions_of_their_own():
    network = nn.Module()
    kept = {
        "a": torch.arange(3.0), "b": torch.tensor(1), "c": torch.arange(4), "d": torch.arange(6.0).view(2, 3),
        "e": torch.empty(0), "f": torch.arange(8.0)[::2], "g": torch.arange(3) * 1j, "h": torch.ones(2).half(),
    }  # fmt: skip
    for name, value in kept.items():
        network.register_buffer(name, value)
    first, second = ReplicaSet(network, [torch.device("cpu")] * 2).refresh()
    for name, value in kept.items():
        copy = getattr(second, name)
        assert getattr(first, name) is value
        assert copy.dtype == value.dtype
        assert torch.equal(copy, value)
        assert copy.data_ptr() != value.data_ptr() or not value.numel()
    second.a.add_(1)
    assert (second.a._version, second.f._version) == (1, 0)
    assert torch.equal(network.a, torch.arange(3.0))
    assert torch.equal(second.f, network.f)


def test_copied_buffers_can_be_viewed_as_any_dtype():
    network = nn.Module()
    for name, numel in {"a": 4, "b": 5, "c": 16, "d": 6, "e": 32}.items():
        network.register_buffer(name, torch.arange(numel, dtype=torch.uint8))
    _, second = ReplicaSet(network, [torch.device("cpu")] * 2).refresh()
    for name in "ce":
        assert torch.equal(getattr(second, name).view(torch.complex128), getattr(network, name).view(torch.complex128))


def test_a_buffer_resized_in_place_in_the_network_is_copied_anew():
    network = nn.Module()
    network.register_buffer("a", torch.ones(2))
    network.register_buffer("b", torch.ones(2))
    replicas = ReplicaSet(network, [torch.device("cpu")] * 2)
    replicas.refresh()
    network.a.resize_(5).fill_(4.0)
    _, second = replicas.refresh()
    assert torch.equal(second.a, torch.full((5,), 4.0))
    assert torch.equal(second.b, torch.ones(2))
