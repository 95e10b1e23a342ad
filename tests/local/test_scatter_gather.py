"""Nested inputs split over devices, nested outputs put together."""

from __future__ import annotations

import re
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from local import containers
from local.containers import PAIRS, Pair, Point, Registered
from lockstep._base.tree import Tree
from lockstep.errors import StructureError
from lockstep.local import gather, scatter, scatter_gather, scatter_kwargs, shared
from lockstep.local.scatter_gather import move, split_sizes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _registered():
    containers.register()
    yield
    containers.unregister()


def members(value):
    """The two members of one of the containers, which stand first."""
    return [leaf.value for leaf in Tree(value, "v").leaves][:2]


@pytest.mark.parametrize("name", PAIRS)
def test_every_container_is_split_and_put_together_again(devices, name):
    d, both = devices(2), (torch.randn(4, 3), torch.arange(4))
    value = PAIRS[name][0](*both)
    shares = scatter(value, d)
    for i, share in enumerate(shares):
        assert type(share) is type(value)
        for chunk, whole in zip(members(share), both, strict=True):
            assert chunk.device == d[i]
            assert torch.equal(chunk.cpu(), whole[2 * i : 2 * i + 2])
    for target in (*d, CPU):
        back = gather(shares, target)
        assert type(back) is type(value)
        for whole, tensor in zip(members(back), both, strict=True):
            assert whole.device == target
            assert torch.equal(whole.cpu(), tensor)


@pytest.mark.parametrize("kind", [Point, Pair])
def test_named_tuples_with_fields_on_mixed_devices_are_gathered(sim, kind):
    shares = [kind(torch.ones(1, device="sim:0"), torch.zeros(1)), kind(torch.ones(2), torch.zeros(2, device="sim:1"))]
    for target in ("cpu", 0):
        back = gather(shares, target)
        assert back._fields == ("x", "y")
        assert [t.device.type for t in back] == ["cpu" if target == "cpu" else "sim"] * 2
        assert [t.tolist() for t in back] == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("rows", "sizes"), [(9, [2, 1, 1, 1, 1, 1, 1, 1]), (8, [1] * 8), (2, [1, 1]), (1, [1]), (0, [0])]
)
def test_no_device_is_idle_unless_there_are_fewer_rows(devices, rows, sizes):
    shares = scatter([torch.arange(rows), "flag"], devices(8))
    assert [len(x) for x, _ in shares] == sizes
    assert [each for x, _ in shares for each in x.tolist()] == list(range(rows))
    assert [flag for _, flag in shares] == ["flag"] * len(sizes)
    inputs, kwargs = scatter_kwargs((), {"x": torch.arange(rows)}, devices(8))
    assert inputs == ((),) * len(sizes)
    assert [len(k["x"]) for k in kwargs] == sizes


def test_one_plan_for_all_leaves_keeps_rows_together(devices):
    value = {"x": torch.arange(7), "deep": [(torch.arange(7) * 10,), {"y": torch.arange(7.0)[:, None]}]}
    shares = scatter(value, devices(3))
    assert [share["x"].tolist() for share in shares] == [[0, 1, 2], [3, 4], [5, 6]]
    for share in shares:
        assert (share["x"] * 10).tolist() == share["deep"][0][0].tolist()
        assert share["x"].tolist() == share["deep"][1]["y"][:, 0].tolist()


@pytest.mark.parametrize("rows", [4, 5, 9])
def test_beside_a_batch_a_tensor_with_a_row_for_each_replica_gives_one_to_each(rows):
    counts = torch.arange(3.0, requires_grad=True)
    shares = scatter({"counts": counts, "x": torch.arange(rows)}, ["cpu"] * 3)
    assert [share["counts"].tolist() for share in shares] == [[0], [1], [2]]
    assert torch.cat([share["x"] for share in shares]).tolist() == list(range(rows))
    sum((i + 1) * share["counts"].sum() for i, share in enumerate(shares)).backward()
    assert counts.grad.tolist() == [1, 2, 3]
    shares = scatter([torch.ones(2, 6), torch.tensor([[1, 2]])], ["cpu"] * 2, dim=1, split=[2, 1])
    assert [[x.shape[1], c.tolist()] for x, c in shares] == [[4, [[1]]], [2, [[2]]]]


def test_what_is_marked_as_shared_goes_whole_to_every_replica():
    weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    shares = scatter([torch.arange(4), {"w": shared(weight), "n": [shared([torch.ones(4, 4), 7])]}], ["cpu"] * 2)
    assert [x.tolist() for x, _ in shares] == [[0, 1], [2, 3]]
    for i, (_, rest) in enumerate(shares):
        assert rest["n"][0][0].shape == (4, 4)
        assert rest["n"][0][1] == 7
        assert rest["w"].tolist() == [1, 2, 3]
        (rest["w"] * (i + 1)).sum().backward()
    assert weight.grad.tolist() == [3, 3, 3]
    assert [share.tolist() for share in scatter(shared(torch.ones(1)), ["cpu"] * 3)] == [[1]] * 3


def test_a_tensor_without_dimensions_goes_whole_to_every_replica(devices):
    d = devices(2)
    scale = torch.tensor(2.0, requires_grad=True)
    shares = scatter((torch.arange(4.0), scale), d)
    assert [(share[1].device, share[1].item()) for share in shares] == [(d[0], 2.0), (d[1], 2.0)]
    sum((x.sum() * s).to(CPU) for x, s in shares).backward()
    assert scale.grad.item() == 6.0
    assert len(scatter([scale], d)) == 2


def test_everything_else_is_given_by_reference(devices):
    things = [object(), np.ones(3), {1, 2}, torch.nn.Linear(1, 1), "text", 3.5, None, print, torch.Size([2, 9])]
    for share in scatter([torch.ones(2), *things], devices(2)):
        assert all(a is b for a, b in zip(share[1:], things, strict=True))


WITHOUT = [None, (), [], {}, "text", [(), {}], {"unused": []}, Counter("aab")]


@pytest.mark.parametrize("value", WITHOUT, ids=str)
def test_none_empty_containers_and_values_without_tensors_go_to_every_replica_and_back(devices, value):
    shares = scatter(value, devices(3))
    assert shares == [value] * 3
    assert [type(share) for share in shares] == [type(value)] * 3
    assert gather(shares, "cpu") == value
    assert gather(shares[:1], "cpu") == value
    assert gather([(torch.ones(1, device=d), value) for d in devices(2)], "cpu")[1] == value
    assert scatter_kwargs((), value if value == {} else None, devices(2)) == (((), ()), ({}, {}))


def test_replicas_do_not_share_their_lists():
    first, second = scatter({"tags": ["a"], "x": torch.ones(2)}, ["cpu", "cpu"])
    first["tags"].append("b")
    assert second["tags"] == ["a"]


def test_arguments_come_as_tuples_and_dicts_for_each_replica(devices):
    d = devices(2)
    inputs, kwargs = scatter_kwargs((torch.arange(3), None), {"y": torch.arange(3), "flag": []}, d)
    assert [[a[0].tolist(), a[1]] for a in inputs] == [[[0, 1], None], [[2], None]]
    assert [[k["y"].tolist(), k["flag"]] for k in kwargs] == [[[0, 1], []], [[2], []]]
    assert (type(inputs), type(kwargs)) == (tuple, tuple)
    assert [type(a) for a in inputs] == [tuple] * 2


# ------------------------------------------------------------------------------------------ split


@pytest.mark.parametrize(
    ("rows", "parts", "weights", "sizes"),
    [
        (9, 2, [2, 1], [6, 3]),
        (10, 2, [3, 1], [8, 2]),
        (10, 3, [1, 1, 1], [4, 3, 3]),
        (4, 2, [0.5, 1.5], [1, 3]),
        (100, 8, [63, 1, 1, 1, 1, 1, 1, 1], [90, 2, 2, 2, 1, 1, 1, 1]),
        (9, 8, [100, 1, 1, 1, 1, 1, 1, 1], [2, 1, 1, 1, 1, 1, 1, 1]),
        (12, 3, [1000, 1, 1], [10, 1, 1]),
        (2, 3, [5, 1, 1], [1, 1]),
        (3, 3, [5, 1, 1], [1, 1, 1]),
        (0, 2, [2, 1], [0]),
    ],
)
def test_weights_share_the_rows_out_and_leave_no_device_without_one(rows, parts, weights, sizes):
    assert split_sizes(rows, parts, weights) == sizes


def test_weights_apply_to_every_leaf(devices):
    shares = scatter([torch.arange(6), torch.arange(6)], devices(2), split=[2, 1])
    assert [[t.tolist() for t in share] for share in shares] == [[[0, 1, 2, 3]] * 2, [[4, 5]] * 2]
    inputs, kwargs = scatter_kwargs((torch.arange(6),), {"y": torch.arange(6)}, devices(2), split=[1, 2])
    assert [[len(a[0]), len(k["y"])] for a, k in zip(inputs, kwargs, strict=True)] == [[2, 2], [4, 4]]


@pytest.mark.parametrize("dim", [1, -1])
def test_another_dimension_can_be_split(devices, dim):
    shares = scatter([torch.arange(6).view(2, 3)], devices(2), dim)
    assert [share[0].tolist() for share in shares] == [[[0, 1], [3, 4]], [[2], [5]]]
    assert gather(shares, "cpu", dim)[0].tolist() == [[0, 1, 2], [3, 4, 5]]


# ----------------------------------------------------------------------------------------- gather


array = np.arange(3)
NAN = float("nan")


class Stubborn:
    """Cannot be compared."""

    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("do not compare me")


EQUAL = {
    "int": (1, 1, 1),
    "str": ("a", "a", "a"),
    "bool": (True, True, True),
    "array": (array, array.copy(), array.copy()),
    "size": (torch.Size([2, 3]), torch.Size([2, 3]), torch.Size([2, 3])),
    "dtype": (torch.float32,) * 3,
    "set": ({1, 2}, {2, 1}, {1, 2}),
}
STUBBORN = Stubborn()
EQUAL["not compared"] = (STUBBORN,) * 3
DIFFERENT = {
    "int": (1, 2, 1),
    "last": (1, 1, 2),
    "str": ("a", "b", "a"),
    "bool and int": (True, 1, True),
    "int and float": (1, 1.0, 1),
    "None and int": (None, 1, 1),
    "size": (torch.Size([2, 3]), torch.Size([1, 3]), torch.Size([1, 3])),
    "values of an array": (np.ones(3), np.zeros(3)),
    "an array of one element first": (np.ones(1), np.ones(3)),
    "an array of one element last": (np.ones(3), np.ones(1)),
    "arrays without elements": (np.ones((0,)), np.ones((0, 2))),
    "arrays of as many elements": (np.ones((2, 1)), np.ones((1, 2))),
    "not to be compared": (STUBBORN, Stubborn()),
    "nan and a number": (NAN, 1.0),
    "nan in complex numbers": (complex(1, NAN), complex(2, NAN)),
}


@pytest.mark.parametrize("leaves", EQUAL.values(), ids=EQUAL)
def test_equal_leaves_come_back_once(leaves):
    assert gather(leaves, "cpu") is leaves[0]
    back = gather([{"x": torch.ones(1), "leaf": leaf} for leaf in leaves], "cpu")
    assert back["leaf"] is leaves[0]


@pytest.mark.parametrize("leaves", DIFFERENT.values(), ids=DIFFERENT)
def test_differing_leaves_come_back_as_a_list_in_replica_order(leaves):
    for back in (gather(leaves, "cpu"), gather([[torch.ones(1), leaf] for leaf in leaves], "cpu")[1]):
        assert type(back) is list
        assert all(a is b for a, b in zip(back, leaves, strict=True))


def test_dicts_are_matched_by_key():
    """In any order, and also by keys that look the same and are not."""
    one, other = Registered(1, 2), Registered(1, 3)
    back = gather([{one: torch.tensor([1]), other: torch.tensor([2])}] * 2, "cpu")
    assert (back[one].tolist(), back[other].tolist()) == ([1, 1], [2, 2])
    back = gather([{"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)}], "cpu")
    assert {key: value.tolist() for key, value in back.items()} == {"a": [0, 0], "b": [1, 1]}


def test_registered_types_that_differ_in_what_they_keep_beside_are_refused():
    with pytest.raises(StructureError, match="cannot gather outputs: the structures differ"):
        gather([Registered(torch.ones(1), 2, "one"), Registered(torch.ones(1), 2, "other")], "cpu")


def test_move_takes_every_tensor_to_a_device_differentiably(sim):
    x = torch.ones(2, device="sim:0", requires_grad=True)
    value = {"x": x, "y": [torch.ones(1), "text"]}
    moved = move(value, 1)
    assert [moved["x"].device.index, moved["y"][0].device.index, moved["y"][1]] == [1, 1, "text"]
    (moved["x"] * 3).sum().backward()
    assert x.grad.device == torch.device("sim:0")
    assert x.grad.tolist() == [3, 3]
    assert move(moved, 1) is moved  # it is there already


# ------------------------------------------------------------- what cannot be split, or put together


class Bounds(tuple):
    """A tuple whose constructor takes its two entries."""

    def __new__(cls, low, high):
        new = super().__new__(cls, (low, high))
        new.unit = "m"
        return new


class OfName(dict):
    """A dict whose constructor takes a name, and would take a list of items for one."""

    def __init__(self, name):
        super().__init__()
        self.name = name


def test_containers_with_constructors_of_their_own_keep_their_contents():
    x, named = torch.arange(4), OfName("batch")
    named["x"] = x
    for i, (bounds, of_name) in enumerate(args[0] for args in scatter(((Bounds(x, x + 1), named),), [CPU, CPU])):
        rows = [2 * i, 2 * i + 1]
        assert (type(bounds), type(of_name)) == (Bounds, OfName)
        assert (bounds[0].tolist(), bounds[1].tolist(), bounds.unit) == (rows, [r + 1 for r in rows], "m")
        assert (of_name.name, list(of_name), of_name["x"].tolist()) == ("batch", ["x"], rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: complex(1, float("nan")),
        lambda: np.float64("nan"),
        lambda: np.array([1.0, float("nan")]),
        lambda: {"loss": float("nan")},
    ],
)
def test_nan_on_every_replica_comes_back_once(make):
    one, other = make(), make()
    assert gather([(torch.ones(1), one), (torch.ones(1), other)], CPU)[1] == pytest.approx(one, nan_ok=True)


# -------------------------------------------------------------------------------- tensors inside of objects


class Store:
    """As graph libraries have it: what a batch has is in an object of its own, by name."""

    def __init__(self, **named):
        self.mapping = named


class Graphs:
    def __init__(self, x):
        self.store = Store(x=x, ptr=[0, 1])
        self.store.mapping["batch"] = self  # a circle


class Slotted:
    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = rows


class Listed:
    def __init__(self, rows):
        self.history = [{"step": 1, "rows": (rows,)}]


class Plain:
    """A configuration."""

    def __init__(self, _):
        self.rate, self.layers, self.names = 0.1, [1, 2], {"a": None}
        self.many = list(range(10_000))


class Trains(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.register_buffer("rows", rows)


class Holder:
    """Parameters, and a module, are no part of a batch."""

    def __init__(self, rows):
        self.parameters, self.module = [nn.Parameter(rows)], Trains(rows)


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [Graphs, Slotted, Listed])
def test_objects_with_tensors_inside_warn_once(kind):
    looked_into = scatter_gather._looked_into
    looked_into.discard(kind)
    x, given = torch.arange(4.0), kind(torch.arange(4.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scatter((x, given), ["cpu"])[0][1] is given  # one replica
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            (_, first), (_, second) = scatter((x, {"graph": given}), ["cpu", "cpu"])
            assert first["graph"] is second["graph"] is given
    (warning,) = seen
    assert re.match(rf"inputs\[1\]\['graph'\] is a .*{kind.__name__}, which holds tensors", str(warning.message))


@pytest.mark.parametrize("kind", [Plain, Trains, Holder, lambda rows: lambda: rows, lambda rows: rows.as_subclass(Sub)])
def test_what_holds_no_rows_does_not_warn(kind):
    scatter((torch.arange(4.0), kind(torch.arange(4.0))), ["cpu", "cpu"])
