"""What replicas see of attributes of a network: values that lead into it, and objects of other classes."""

from __future__ import annotations

import itertools
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lockstep import DataParallel
from lockstep.errors import NotReplicableError
from lockstep.local import ReplicaSet
from lockstep.local.attributes import Attributes
from lockstep.local.translation import LIMIT, Translation, is_plain, leads
from programs.networks import Applying, Slotted

CPU = torch.device("cpu")
CPUS = ["cpu", "cpu"]


OLD, NEW = nn.Linear(1, 1), nn.Linear(1, 1)
KNOWN = {id(OLD): NEW}


class Layer(nn.Linear):
    def method(self):
        return self


BOUND, COUNTERPART = Layer(1, 1), Layer(1, 1)
KNOWN[id(BOUND)] = COUNTERPART


def test_a_container_that_is_shared_or_contains_itself_is_rebuilt_once():
    shared = [OLD]
    circle = {"one": shared, "two": (shared,)}
    circle["self"] = circle
    assert leads(circle, KNOWN)
    translated = Translation(KNOWN)(circle)
    assert translated["one"] is translated["two"][0]
    assert translated["one"] == [NEW]
    assert translated["self"] is translated


Named = namedtuple("Named", "layer")


@dataclass
class Holder:
    layer: nn.Module


class Subclass(list):
    pass


@pytest.mark.parametrize(
    "value",
    [Named(OLD), Holder(OLD), Subclass([OLD]), lambda: OLD, [1, "a", None, {"b": 2}], [], itertools.repeat(OLD)],
)
def test_any_other_value_stays_the_same_object(value):
    assert not leads(value, KNOWN)
    assert Translation(KNOWN)(value) is value


def test_a_value_with_very_many_parts_is_not_looked_into():
    parts = [OLD] + [0] * LIMIT
    assert not leads(parts, KNOWN)
    assert is_plain(parts)
    assert Translation(KNOWN)(parts) is parts
    assert not leads([[[0]] * 2 for _ in range(LIMIT)] + [OLD], KNOWN)


class NoLength(tuple):
    """As e3nn's ``Irreps``."""

    def __len__(self):
        raise NotImplementedError

    __iter__ = __eq__ = __contains__ = __len__
    __hash__ = None


class Closed(dict):
    def items(self):
        raise PermissionError

    values = keys = __iter__ = __len__ = items


class Unloaded(list):
    def __iter__(self):
        raise RuntimeError

    __len__ = __iter__


class Unequal:
    def __eq__(self, other):
        raise ValueError

    __hash__ = __bool__ = __len__ = __eq__


class Anything:
    def __getattr__(self, name):
        raise RuntimeError(name)


OBJECTS = {
    "tuple": lambda: NoLength((1, torch.ones(1))),
    "dict": lambda: Closed(a=torch.ones(1)),
    "list": lambda: Unloaded([torch.ones(1)]),
    "equal": Unequal,
    "list of them": lambda: [Unequal(), (Anything(), NoLength())],
    "dict of them": lambda: {1: Unequal(), "a": Closed()},
    "any attribute": Anything,
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("leading", [False, True])
def test_no_method_of_an_object_is_called(make, leading, devices, first):
    """Whether it stands alone or beside a layer of the network."""
    network = nn.Sequential(nn.Linear(3, 2)).to(first)
    value = make()
    network[0].note = [value, network[0]] if leading else value
    replicas = ReplicaSet(network, devices(2))
    for _ in range(2):
        for replica in replicas.refresh():
            note = vars(replica[0])["note"]
            assert (note[0] if leading else note) is value
            assert not leading or note[1] is replica[0]


def test_attributes_in_slots(devices, first):
    network = Slotted().to(first)
    parallel, x = DataParallel(network, devices(2)), torch.randn(4, 3).to(first)
    for network.rate in (2.0, 3.0):
        torch.testing.assert_close(parallel(x), network(x))
    replica = parallel._replicas.refresh()[1]
    assert replica.layers[0] is replica.linear
    del network.rate
    assert not hasattr(parallel._replicas.refresh()[1], "rate")


# ----------------------------------------------------------------------------- what forward itself does


def test_a_hidden_state_belongs_to_the_rows_of_its_replica(devices, first):
    """Until it is set anew."""

    def forward(m, x):
        m.hidden = m.cell(x, None if m.hidden is None else m.hidden.detach())
        return m.hidden

    network, twin = (Applying(forward, cell=nn.GRUCell(3, 3), hidden=None).to(first) for _ in range(2))
    twin.load_state_dict(network.state_dict())
    parallel, x = DataParallel(network, devices(3)), torch.randn(6, 3).to(first)
    for step in range(4):
        if step == 2:
            network.hidden = twin.hidden = None
        torch.testing.assert_close(parallel(x), twin(x))


def test_what_forward_deletes_is_gone_in_its_replica(devices, first):
    def forward(m, x):
        if hasattr(m, "start"):
            del m.start
        return m.linear(x)

    network = Applying(forward, start=True).to(first)
    parallel, x = DataParallel(network, devices(2)), torch.randn(4, 3).to(first)
    for _ in range(2):
        parallel(x)
        assert [hasattr(replica, "start") for replica in parallel._replicas.refresh()] == [False, False]
    network.start = True
    assert [hasattr(replica, "start") for replica in parallel._replicas.refresh()] == [True, True]


def test_an_interrupted_look_at_attributes_is_repeated(monkeypatch):
    """A change is not taken for known before every replica is prepared for it."""
    replicas = ReplicaSet(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), [CPU] * 2)
    replicas.refresh()
    prepare, numbers = Attributes._prepare, []

    def interrupted(self, index, *args, **kwargs):
        numbers.append(index)
        if len(numbers) == 2:
            raise KeyboardInterrupt
        prepare(self, index, *args, **kwargs)

    monkeypatch.setattr(Attributes, "_prepare", interrupted)
    for layer in replicas.network:
        layer.scale = 2.0
    with pytest.raises(KeyboardInterrupt):
        replicas.refresh()
    for replica in replicas.refresh():
        assert [layer.scale for layer in replica] == [2.0, 2.0]


@pytest.mark.parametrize("beside", [0, 1])
def test_hooks_that_a_replica_registers_are_not_the_networks_and_gone_at_the_next_use(devices, first, beside):
    net = nn.Sequential(nn.Linear(1, 1)).to(first)
    for _ in range(beside):
        net[0].register_forward_hook(lambda *_: None)
    replicas = ReplicaSet(net, devices(2))
    replica = replicas.refresh()[1]
    replica[0].register_forward_hook(lambda *_: None)
    assert (len(net[0]._forward_hooks), len(replica[0]._forward_hooks)) == (beside, beside + 1)
    assert len(replicas.refresh()[1][0]._forward_hooks) == beside


def test_containers_nested_too_deeply_are_named():
    network = nn.Linear(2, 2)
    deep = [network]
    for _ in range(3000):
        deep = [deep]
    network.deep = deep
    with pytest.raises(NotReplicableError, match="attribute deep of a Linear"):
        ReplicaSet(network, [CPU, CPU]).refresh()
