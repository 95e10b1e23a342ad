"""Noticing what has changed on a network: the modules and slots, the attributes and hooks, the tensors."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from lockstep import tensor_state
from lockstep.local.changes import AttributeSnapshot, StructureSnapshot
from lockstep.local.contents import differing_dicts, identical
from lockstep.tensor_state import Change, TensorSnapshot


@pytest.fixture(params=["guarded", "gone through"], autouse=True)
def without_guards(request, monkeypatch):
    """Also where nothing tells that tensors are laid out as they were."""
    if request.param == "gone through":
        monkeypatch.setattr(tensor_state, "_TensorGuards", None)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_parameter("absent", None)
        self.register_buffer("nothing", None)
        self.rate = 0.5

    def forward(self, x):
        return self.norm(self.linear(x)) * self.rate


def network():
    return nn.Sequential(OrderedDict(one=Block(), two=Block(), act=nn.ReLU()))


def modules_of(net):
    return list(net.modules())


def hook(*_):
    return None


# ------------------------------------------------------------------------------------- structure

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
    assert not structure.replaced()


def test_structure_notices_that_a_dictionary_of_slots_was_replaced():
    net = network()
    structure = StructureSnapshot(modules_of(net))
    net.one._parameters = dict(net.one._parameters)
    assert structure.replaced()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_a_scripted_module_by_its_mode_and_its_parameters():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    structure, attributes = StructureSnapshot(modules_of(scripted)), AttributeSnapshot(modules_of(scripted))
    assert not structure.changed()
    assert not attributes.changed()
    scripted.eval()
    assert dict(attributes.take_changes()) == {0: ["training"], 1: ["training"], 2: ["training"]}
    assert not attributes.changed()
    assert not structure.changed()
    modules_of(scripted)[1].weight = nn.Parameter(torch.ones(2, 2))
    assert structure.changed()


# ------------------------------------------------------------------------------------ attributes


@dataclass
class Holder:
    layer: object


class Equal:
    """Every one equals every other."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    __hash__ = None


def with_attributes():
    net = network()
    one = net.one
    one.number, one.flag, one.text, one.nothing_yet = 1, True, "a", None
    one.tensor, one.scalar = torch.zeros(3), torch.tensor(1.0)
    one.array = np.zeros(3)
    one.items, one.table, one.names = [1, 2], {"a": 1}, {"x"}
    one.nested = {"stages": [[one.linear], []]}
    one.queue = deque([one.linear])
    one.holder = Holder(one.linear)
    one.pair = (one.linear, [one.norm])
    one.equal = Equal()
    return net


CHANGES = {
    "number": ("number", lambda m: setattr(m, "number", 2)),
    "bool": ("flag", lambda m: setattr(m, "flag", False)),
    "str": ("text", lambda m: setattr(m, "text", "b")),
    "None to a value": ("nothing_yet", lambda m: setattr(m, "nothing_yet", 3)),
    "value to None": ("text", lambda m: setattr(m, "text", None)),
    "new": ("brand_new", lambda m: setattr(m, "brand_new", 1)),
    "deleted": ("number", lambda m: delattr(m, "number")),
    "tensor": ("tensor", lambda m: setattr(m, "tensor", torch.ones(3))),
    "equal tensor": ("tensor", lambda m: setattr(m, "tensor", torch.zeros(3))),
    "equal scalar tensor": ("scalar", lambda m: setattr(m, "scalar", torch.tensor(1.0))),
    "tensor of another shape": ("tensor", lambda m: setattr(m, "tensor", torch.zeros(4))),
    "tensor to None": ("tensor", lambda m: setattr(m, "tensor", None)),
    "array": ("array", lambda m: setattr(m, "array", np.ones(3))),
    "equal array": ("array", lambda m: setattr(m, "array", np.zeros(3))),
    "array of another shape": ("array", lambda m: setattr(m, "array", np.zeros(4))),
    "equal list, another": ("items", lambda m: setattr(m, "items", [1, 2])),
    "list appended to": ("items", lambda m: m.items.append(3)),
    "list item replaced": ("items", lambda m: m.items.__setitem__(0, 7)),
    "list emptied": ("items", lambda m: m.items.clear()),
    "list reordered": ("items", lambda m: m.items.reverse()),
    "dict value": ("table", lambda m: m.table.update(a=2)),
    "dict key": ("table", lambda m: m.table.update(b=2)),
    "set": ("names", lambda m: m.names.add("y")),
    "deque": ("queue", lambda m: m.queue.append(m.norm)),
    "nested list": ("nested", lambda m: m.nested["stages"][0].append(m.norm)),
    "nested empty list": ("nested", lambda m: m.nested["stages"][1].append(m.norm)),
    "list in a tuple": ("pair", lambda m: m.pair[1].append(m.linear)),
    "dataclass field": ("holder", lambda m: setattr(m.holder, "layer", m.norm)),
    "equal object": ("equal", lambda m: setattr(m, "equal", Equal())),
    "training": ("training", lambda m: m.train(False) and m.linear.train() and m.norm.train()),
}


@pytest.mark.parametrize(("name", "change"), CHANGES.values(), ids=CHANGES)
def test_attributes_notice_exactly_what_changed(name, change):
    net = with_attributes()
    attributes = AttributeSnapshot(modules_of(net))
    assert not attributes.changed()
    assert attributes.take_changes() == []
    change(net.one)
    assert attributes.changed()
    assert attributes.take_changes() == [(1, [name])]  # module number 1 is net.one
    assert not attributes.changed()
    assert attributes.take_changes() == []


def test_several_changes_at_once():
    net = with_attributes()
    attributes = AttributeSnapshot(modules_of(net))
    net.one.number, net.one.tensor, net.one.array = 5, torch.ones(3), np.ones(3)
    net.one.items.append(3)
    del net.one.text
    net.two.rate = 0.1
    net.eval()
    changes = dict(attributes.take_changes())
    modules = modules_of(net)
    assert {m for m, names in changes.items() if "training" in names} == set(range(len(modules)))
    assert {*changes[1]} == {"training", "number", "tensor", "array", "items", "text"}
    assert {*changes[modules.index(net.two)]} == {"training", "rate"}


def test_tensors_beside_other_changes_do_not_hide_them():
    """Comparing two tensors has no truth value: what follows must be looked at all the same."""
    net = with_attributes()
    attributes = AttributeSnapshot(modules_of(net))
    net.one.tensor, net.one.zzz = torch.ones(3), 1
    assert dict(attributes.take_changes())[1] == ["tensor", "zzz"]


def test_slots_are_no_attributes():
    net = network()
    attributes = AttributeSnapshot(modules_of(net))
    net.one.linear = nn.Linear(2, 2)
    net.one.norm.running_mean = torch.ones(2)
    net.two.register_buffer("mask", torch.ones(1))
    assert attributes.take_changes() == []


def test_what_a_network_writes_in_place_is_no_change_of_attributes():
    net = with_attributes()
    attributes = AttributeSnapshot(modules_of(net))
    net.one.tensor.add_(1)  # replicas share it by reference
    net.one.array += 1
    net(torch.randn(4, 2)).sum().backward()
    assert not attributes.changed()


REGISTRATIONS = {
    "forward": ("_forward_hooks", lambda m: m.register_forward_hook(hook)),
    "forward, kwargs": ("_forward_hooks", lambda m: m.register_forward_hook(hook, with_kwargs=True)),
    "always called": ("_forward_hooks_always_called", lambda m: m.register_forward_hook(hook, always_call=True)),
    "forward pre": ("_forward_pre_hooks", lambda m: m.register_forward_pre_hook(hook)),
    "forward pre, kwargs": (
        "_forward_pre_hooks_with_kwargs",
        lambda m: m.register_forward_pre_hook(hook, with_kwargs=True),
    ),
    "backward": ("_backward_hooks", lambda m: m.register_full_backward_hook(hook)),
    "backward pre": ("_backward_pre_hooks", lambda m: m.register_full_backward_pre_hook(hook)),
    "state dict": ("_state_dict_hooks", lambda m: m.register_state_dict_post_hook(hook)),
    "state dict pre": ("_state_dict_pre_hooks", lambda m: m.register_state_dict_pre_hook(hook)),
    "load": ("_load_state_dict_post_hooks", lambda m: m.register_load_state_dict_post_hook(hook)),
}


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize(("name", "register"), REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_hooks_added_and_removed(name, register, others):
    net = network()
    for _ in range(others):
        register(net.two.linear)
    attributes = AttributeSnapshot(modules_of(net))
    number = modules_of(net).index(net.two.linear)
    handle = register(net.two.linear)
    assert attributes.changed()
    ((where, names),) = attributes.take_changes()
    assert where == number
    assert name in names
    assert not attributes.changed()
    if handle is not None:  # hooks on state dicts of the older kind stay for ever
        handle.remove()
        assert attributes.changed()
        ((where, names),) = attributes.take_changes()
        assert where == number
        assert name in names


def test_a_hook_replaced_by_another():
    net = network()
    handle = net.one.register_forward_hook(hook)
    attributes = AttributeSnapshot(modules_of(net))
    handle.remove()
    net.one.register_forward_hook(hook)  # the same function, at another place in the order
    assert attributes.take_changes() == [(1, ["_forward_hooks"])]


# --------------------------------------------------------------------------------------- tensors


def some_tensors():
    return [torch.ones(2, 3), torch.zeros(4, requires_grad=True), torch.empty(0), torch.arange(3)]


def set_data(make):
    def change(t):
        t.data = make(t)

    return change


MOVES = {
    "other data": set_data(torch.clone),
    "other dtype": set_data(torch.Tensor.double),
    "fewer rows of the same data": set_data(lambda t: t.data[:1]),
    "another view of the same data": set_data(lambda t: t.data.view(3, 2)),
    "transposed": set_data(lambda t: t.data.t()),
    "transposed in place": torch.Tensor.t_,
    "resized": lambda t: t.resize_(20, 20),
}


@pytest.mark.parametrize("change", MOVES.values(), ids=MOVES)
def test_moved(change):
    listed = [torch.ones(2, 3), torch.ones(3)]
    tensors = TensorSnapshot(listed)
    assert tensors.change() is Change.NONE
    with torch.no_grad():
        change(listed[0])
    assert tensors.change() in (Change.PLACES, Change.KINDS)


def test_moved_when_a_square_matrix_is_transposed():
    weight = torch.arange(4.0).view(2, 2)
    tensors = TensorSnapshot([weight])
    weight.data = weight.data.t()
    assert tensors.change() in (Change.PLACES, Change.KINDS)


def test_moved_without_data():
    """Empty tensors have no data, so only their kind tells."""
    empty = torch.empty(0)
    tensors = TensorSnapshot([empty])
    assert tensors.change() is Change.NONE
    empty.data = torch.empty(0, dtype=torch.float64)
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


def test_a_write_through_data_leaves_no_trace():
    listed = some_tensors()
    tensors = TensorSnapshot(listed)
    listed[1].data.add_(1)
    assert tensors.written() == []
    assert tensors.change() is Change.NONE


def test_an_optimizer_step_writes():
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    tensors = TensorSnapshot(parameters)
    for optimizer in (torch.optim.SGD(parameters, 0.1), torch.optim.Adam(parameters, foreach=True)):
        sum(p.sum() for p in parameters).backward()
        optimizer.step()
        assert tensors.written() == [0, 1]


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


# ------------------------------------------------------------------------------ dictionaries and copies

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
