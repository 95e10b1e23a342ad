"""Noticing what has changed on a network: the modules and slots, the attributes and hooks, the tensors."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from lockstep._base import tensor_state
from lockstep._base.tensor_state import Change, TensorSnapshot
from lockstep.local.changes import StructureSnapshot
from lockstep.local.contents import differing_dicts, identical


@pytest.fixture(params=["guarded", "gone through"], autouse=True)
def without_guards(request, monkeypatch):
    """Also where nothing tells that tensors are laid out as they were."""
    if request.param == "gone through":
        monkeypatch.setattr(tensor_state, "_TensorGuards", None)


def block():
    block = nn.Sequential(OrderedDict(linear=nn.Linear(2, 2), norm=nn.BatchNorm1d(2)))
    block.register_parameter("absent", None)
    block.register_buffer("nothing", None)
    block.rate = 0.5
    return block


def network():
    return nn.Sequential(OrderedDict(one=block(), two=block(), act=nn.ReLU()))


def modules_of(net):
    return list(net.modules())


def hook(*_):
    return None


STRUCTURAL = {
    "swap a submodule": lambda n: setattr(n.one, "linear", nn.Linear(2, 2)),
    "add a submodule": lambda n: n.two.add_module("extra", nn.Identity()),
    "add the first submodule": lambda n: n.act.add_module("extra", nn.Identity()),
    "remove a submodule": lambda n: n.two.__delattr__("norm"),
    "set a submodule to None": lambda n: setattr(n.two, "norm", None),
    "append to a Sequential": lambda n: n.append(nn.ReLU()),
    "swap a parameter": lambda n: setattr(n.one.linear, "bias", nn.Parameter(torch.ones(2))),
    "add a parameter": lambda n: n.one.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "remove a parameter": lambda n: n.one.linear.__delattr__("bias"),
    "set a parameter to None": lambda n: setattr(n.one.linear, "bias", None),
    "give an absent parameter": lambda n: setattr(n.one, "absent", nn.Parameter(torch.ones(1))),
    "add a buffer": lambda n: n.two.register_buffer("mask", torch.ones(1)),
    "add the first buffer": lambda n: n.act.register_buffer("mask", torch.ones(1)),
    "remove a buffer": lambda n: n.one.norm.__delattr__("running_mean"),
    "set a buffer to None": lambda n: setattr(n.one.norm, "running_mean", None),
    "give an absent buffer": lambda n: setattr(n.one, "nothing", torch.ones(1)),
    "exchange two submodules": lambda n: n._modules.update(one=n.two, two=n.one),
    "another order": lambda n: n._modules.update(two=n._modules.pop("two")),
}


@pytest.mark.parametrize("change", STRUCTURAL.values(), ids=STRUCTURAL)
def test_structure_notices(change):
    net = network()
    structure = StructureSnapshot(modules_of(net))
    assert not structure.changed()
    change(net)
    assert structure.changed()


def test_structure_does_not_count_values():
    net = network()
    structure = StructureSnapshot(modules_of(net))
    net.train(False)
    net(torch.ones(3, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    net.one.rate = 0.1
    net.one.norm.running_mean = torch.ones(2)  # a buffer by another tensor: only its value is another
    net.one.register_forward_hook(hook)
    assert not structure.changed()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_a_scripted_module_by_its_parameters():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    structure = StructureSnapshot(modules_of(scripted))
    scripted.eval()
    assert not structure.changed()
    modules_of(scripted)[1].weight = nn.Parameter(torch.ones(2, 2))
    assert structure.changed()


# --------------------------------------------------------------------------------------- tensors


def some_tensors():
    return [torch.ones(2, 3), torch.zeros(4, requires_grad=True), torch.empty(0), torch.arange(3)]


def set_data(make):
    def change(t):
        t.data = make(t)

    return change


SQUARE, EMPTY = torch.arange(4.0).view(2, 2), torch.empty(0)
MOVES = {
    "other data": (torch.ones(2, 3), set_data(torch.clone)),
    "other dtype": (torch.ones(2, 3), set_data(torch.Tensor.double)),
    "fewer rows of the same data": (torch.ones(2, 3), set_data(lambda t: t.data[:1])),
    "another view of the same data": (torch.ones(2, 3), set_data(lambda t: t.data.view(3, 2))),
    "transposed": (torch.ones(2, 3), set_data(lambda t: t.data.t())),
    "transposed in place": (torch.ones(2, 3), torch.Tensor.t_),
    "a square matrix transposed": (SQUARE, set_data(lambda t: t.data.t())),
    "resized": (torch.ones(2, 3), lambda t: t.resize_(20, 20)),
    "other dtype, where no data tells": (EMPTY, set_data(torch.Tensor.double)),
}


@pytest.mark.parametrize(("tensor", "change"), MOVES.values(), ids=MOVES)
def test_moved(tensor, change):
    listed = [tensor.clone(), torch.ones(3)]
    tensors = TensorSnapshot(listed)
    assert tensors.change() is Change.NONE
    with torch.no_grad():
        change(listed[0])
    assert tensors.change() in (Change.PLACES, Change.KINDS)


def test_moved_to_another_device(sim):
    tensor = torch.ones(3, device="sim:0")
    tensors = TensorSnapshot([tensor])
    tensor.data = tensor.data.to("sim:1")
    assert tensors.change() in (Change.PLACES, Change.KINDS)


def test_written():
    listed = some_tensors()
    tensors = TensorSnapshot(listed)
    assert tensors.written() == []
    with torch.no_grad():
        listed[1].add_(1)
        listed[3][0] = 5
        listed[3].zero_()
    assert tensors.written() == [1, 3]
    assert tensors.written() == []
    listed[0].mul_(1)
    assert tensors.written() == [0]
    listed[1].data.add_(1)  # leaves no trace
    assert tensors.written() == []
    assert tensors.change() is Change.NONE


def test_inference_tensors_count_as_written_each_time():
    with torch.inference_mode():
        frozen = torch.ones(2)
    other = torch.ones(2)
    tensors = TensorSnapshot([other, frozen])
    assert tensors.written() == [1]
    other.add_(1)
    assert tensors.written() == [0, 1]
    assert tensors.change() is Change.NONE


def test_layouts_in_another_state_of_the_thread():
    listed = some_tensors()
    tensors = TensorSnapshot(listed)
    for _ in range(2):
        assert tensors.change() is Change.NONE
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            assert tensors.change() is Change.NONE
            assert tensors.change() is Change.NONE
    listed[0].t_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tensors.change() is Change.KINDS


def test_swapped_in_place_with_the_data_where_it_was():
    weight = nn.Parameter(torch.ones(2))
    tensors = TensorSnapshot([weight])
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach()))
    assert tensors.change(gradients=False) is Change.NONE  # gradients would go elsewhere
    assert tensors.change() is Change.PLACES


def test_requirements():
    listed = some_tensors()
    tensors = TensorSnapshot(listed)
    assert tensors.change() is Change.NONE
    listed[1].requires_grad_(False)
    assert tensors.change() is Change.REQUIREMENTS
    tensors.take_requirements()
    assert tensors.change() is Change.NONE
    listed[1].requires_grad_(True)
    assert tensors.change() is Change.REQUIREMENTS


def test_identical_compares_by_identity():
    listed = some_tensors()
    assert identical(listed, list(listed))
    assert not identical(listed, listed[:-1])
    assert not identical(listed, [*listed, torch.ones(1)])
    assert not identical(listed, [listed[0].clone(), *listed[1:]])
    assert not identical(listed, [listed[1], listed[0], *listed[2:]])


def test_sparse_tensors_are_known_by_identity_and_version():
    sparse = torch.eye(2).to_sparse()
    tensors = TensorSnapshot([torch.ones(2), sparse])
    assert tensors.change() is Change.NONE
    sparse.mul_(2)
    assert tensors.written() == [1]


NET = nn.Linear(2, 2)
OTHERS = {
    "another value": {"a": 1, "b": nn.Linear(2, 2)},
    "a value that is equal": {"a": True, "b": NET},
    "another name": {"a": 1, "c": NET},
    "one more": {"a": 1, "b": NET, "c": 2},
    "one less": {"b": NET},
    "another order": {"b": NET, "a": 1},
}


def test_a_dictionary_with_the_same_items_does_not_differ():
    assert differing_dicts([{}, {"a": 1, "b": NET}], [{}, {"a": 1, "b": NET}]) == []


@pytest.mark.parametrize("now", OTHERS.values(), ids=OTHERS)
def test_a_dictionary_with_other_items_differs(now):
    assert differing_dicts([{"d": 3}, now, {}], [{"d": 3}, {"a": 1, "b": NET}, {}]) == [1]
