"""Nested values: what is a container, how one is opened, and what comes back when it is built again."""

from __future__ import annotations

import collections
import dataclasses
import functools
import typing
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

from local import containers
from local.containers import PAIRS, Checked, ClassifierOutput, FromItems, Frozen, Point, Registered, Rows, Triple
from lockstep._base.tree import Tree, open_node, tensors_in, tree_map
from lockstep.errors import StructureError


@pytest.fixture
def registered():
    containers.register()
    yield
    containers.unregister()


CONTAINERS = {
    **{name: (make("four", 2), paths) for name, (make, paths) in PAIRS.items()},
    "nested": ({"a": [(1, Point(2, [3]))]}, ["v['a'][0][0]", "v['a'][0][1].x", "v['a'][0][1].y[0]"]),
    "empty tuple": ((), []),
    "empty list": ([], []),
    "empty dict": ({}, []),
    "empty in a list": ([(), {}, 1], ["v[2]"]),
}


@pytest.mark.parametrize(("value", "paths"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_is_taken_apart_and_built_again_of_its_own_leaves_or_new_ones(registered, value, paths):
    tree, before = Tree(value, "v"), repr(value)
    own, new = [leaf.value for leaf in tree.leaves], [f"new {i}" for i in range(len(paths))]
    for leaves in (own, new):
        built = tree.build(leaves)
        assert type(built) is type(value)
        assert [(leaf.path, leaf.value) for leaf in Tree(built, "v").leaves] == list(zip(paths, leaves, strict=True))
        assert (built == value) == (leaves == own)
    assert repr(value) == before


def test_the_containers_cover_every_kind_of_dict_in_collections():
    dicts = [kind for kind in vars(collections).values() if isinstance(kind, type) and issubclass(kind, dict)]
    assert {type(value) for value, _ in CONTAINERS.values()} >= set(dicts)


@pytest.mark.parametrize("make", [list, dict, OrderedDict, lambda x: defaultdict(int, x), Counter, deque])
def test_a_built_in_container_is_a_new_one_each_time(make):
    value = make({"a": 1})
    built = tree_map(lambda leaf: leaf, value)
    assert built == value
    assert built is not value


@pytest.mark.parametrize("value", [FromItems(a=1), Rows([1]), Triple((1, 2)), Frozen(1), Point(1, 2)])
def test_a_container_of_another_class_stays_the_same_object_unless_a_child_is_another(value):
    assert tree_map(lambda leaf: leaf, value) is value


# ------------------------------------------------------------------------ attributes beside the items


class AttrDict(dict):
    """The recipe of which there are thousands."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class Mirror(dict):
    """Items that are attributes, too, set by a constructor that takes something else."""

    def __init__(self, text):
        super().__init__(x=text)
        self.x = text

    def __setitem__(self, key, value):
        raise TypeError("no items")


class ByName(dict):
    """Attributes that its constructor makes of the items it is given by name."""

    def __init__(self, x, y):
        super().__init__(x=x, y=y)
        self.x, self.size = x, len(x)


class Both(tuple):
    """A tuple with names."""

    def __new__(cls, x, y):
        new = super().__new__(cls, (x, y))
        new.x, new.size = x, len(x)
        return new


class Loose(tuple):
    """A tuple that nothing can be made of but a copy."""

    def __new__(cls):
        new = super().__new__(cls, (torch.arange(4), "y"))
        new.x, new.note = new[0], "kept"
        return new


class Marked(list):
    """A list whose first member is an attribute."""

    def __init__(self, first, second, third):
        super().__init__([first, second])
        self.x = first


class Slots(dict):
    """A dict with an attribute in a slot."""

    __slots__ = ("x",)

    def __init__(self, text):
        super().__init__(x=text)
        self.x = text


class Tagged(defaultdict):
    """A subclass of defaultdict."""


@dataclasses.dataclass
class Sequences:
    """A dataclass with all kinds of derived values."""

    x: torch.Tensor
    kind: str = "k"
    size: int = dataclasses.field(init=False)
    mask: typing.Any = dataclasses.field(init=False, default=None)
    later: typing.Any = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        self.size, self.mask, self.valid = len(self.x), self.x > 0, self.x >= 0

    @functools.cached_property
    def total(self):
        return int(self.x.sum())


@dataclasses.dataclass
class Scaled:
    """A dataclass that changes its field."""

    x: torch.Tensor

    def __post_init__(self):
        self.x = self.x / 2


@dataclasses.dataclass(init=False)
class Loaded:
    """A dataclass with another constructor, and a value on demand."""

    x: torch.Tensor

    def __init__(self, x):
        self.x, self.source = x, "file"

    @functools.cached_property
    def count(self):
        return len(self.x)


@dataclasses.dataclass
class Lazy:
    """A dataclass of which a field is not set yet."""

    x: torch.Tensor
    later: int = dataclasses.field(init=False)


def given(value, **attributes):
    """The value, with attributes that are set or asked for before it is halved."""
    for name, attribute in attributes.items():
        object.__setattr__(value, name, attribute)
    return value


def half(leaf):
    return leaf[:2] if isinstance(leaf, torch.Tensor) else leaf


X, FIRST, ABSENT = torch.arange(4), [0, 1], "absent"
HALVED = {
    "a dict that is its own attributes": (AttrDict(x=X, y=1), {"x": FIRST, "y": 1}),
    "copied": (Mirror(X), {"x": FIRST}),
    "by name": (ByName(x=X, y=1), {"x": FIRST, "size": 2}),
    "tuple": (Both(X, 1), {"x": FIRST, "size": 2}),
    "tuple that is copied": (Loose(), {"x": FIRST, "note": "kept"}),
    "list": (Marked(X, 1, 2), {"x": FIRST}),
    "slot": (Slots(X), {"x": FIRST}),
    "set later": (given(FromItems(x=X), note="note", again=X), {"note": "note", "again": FIRST}),
    "a note": (Rows([X], "a note"), {"note": "a note"}),
    "fields": (Point(X, 2), {"x": FIRST, "_fields": ("x", "y")}),
    "factory": (defaultdict(list, x=X), {"default_factory": list}),
    "factory of a subclass": (Tagged(list, x=X), {"default_factory": list}),
    "length of a deque": (deque([X], maxlen=5), {"maxlen": 5}),
    "model output": (ClassifierOutput(x=X, y=3), {"x": FIRST, "loss": None, "y": 3}),
    "a constructor that refuses a chunk": (Checked(X, "label"), {"x": FIRST, "y": "label", "cached": "unset"}),
    "derived": (
        given(Sequences(X, "x"), later=X),
        {"x": FIRST, "kind": "x", "size": 2, "mask": [False, True], "valid": [True] * 2, "later": FIRST, "total": 1},
    ),
    "changed by its constructor": (Scaled(X), {"x": [0, 0.5]}),
    "another constructor": (Loaded(X), {"x": FIRST, "source": "file", "count": 2}),
    "a field that is not set": (Lazy(X), {"x": FIRST, "later": ABSENT}),
}


@pytest.mark.parametrize("name", HALVED)
def test_what_a_container_has_beside_its_items_follows_them(name):
    value, expected = HALVED[name]

    def shown(container):
        found = {name: getattr(container, name, ABSENT) for name in expected}
        return {name: each.tolist() if isinstance(each, torch.Tensor) else each for name, each in found.items()}

    before = shown(value)
    built = tree_map(half, value)
    assert type(built) is type(value)
    assert shown(built) == expected
    assert shown(value) == before
    assert next(tensors_in(built)).shape == (2,)
    if "x" in expected:
        assert built.x is next(tensors_in(built))


def test_a_dict_that_is_its_own_attributes_stays_so():
    built = tree_map(half, AttrDict(x=torch.arange(4)))
    built.later = 3
    assert built["later"] == 3
    assert vars(built) is built


@pytest.mark.parametrize("kind", [FromItems, list, tuple, Frozen])
def test_tensors_that_are_no_items_are_refused_by_name(kind):
    class Extended(kind):
        pass

    value = Extended(torch.arange(4)) if kind is Frozen else Extended({"x": torch.arange(4)})
    value = Extended([torch.arange(4)]) if kind in (list, tuple) else value
    object.__setattr__(value, "mask", {"m": [torch.ones(4)]})
    with pytest.raises(StructureError, match=r"another Extended for inputs: its attribute mask has tensors"):
        Tree(value, "inputs").build(list(map(half, (leaf.value for leaf in Tree(value, "inputs").leaves))))


class Guarded(dict):
    """A dict that shows nothing by its own methods."""

    def items(self):
        raise PermissionError("closed")

    keys = values = __iter__ = __len__ = items


def test_no_method_of_a_container_is_called_to_open_it():
    value = Guarded(x=torch.arange(4))
    assert [leaf.path for leaf in Tree(value, "v").leaves] == ["v['x']"]
    assert next(tensors_in(tree_map(half, value))).tolist() == [0, 1]

    class NoLen(tuple):
        def __len__(self):
            raise NotImplementedError

    assert next(tensors_in(tree_map(half, NoLen((torch.arange(4), 1))))).tolist() == [0, 1]


def test_the_order_of_an_ordered_dict_is_its_own():
    class Ordered(OrderedDict):
        pass

    value = Ordered(a=torch.zeros(4), b=torch.ones(4))
    value.move_to_end("a")
    assert list(tree_map(half, value)) == ["b", "a"]


def test_a_type_of_the_pytree_registry_is_a_container(request):
    value = Registered([1], 2)
    assert open_node(value) is None  # nobody has registered it
    request.getfixturevalue("registered")
    tree = Tree({"r": value}, "v")
    assert [leaf.path for leaf in tree.leaves] == ["v['r'][0][0]", "v['r'][1]"]
    assert tree.build([3, 4]) == {"r": Registered([3], 4)}
    with pytest.raises(StopIteration):  # too few leaves are no silent success
        tree.build([3])


LEAVES = [
    *(None, True, 1, 1.5, 2j, "text", b"bytes", {1, 2}, range(3), Frozen, Point, len, object()),
    *(torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.Size([2, 3]), torch.float32, torch.device("cpu")),
    *(np.ones(3), np.float64(1.5), torch.nn.ModuleList([torch.nn.Linear(1, 1)])),
    torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(1))}),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: type(leaf).__name__)
def test_everything_else_is_a_leaf(leaf):
    assert open_node(leaf) is None
    tree = Tree(leaf, "v")
    assert [each.path for each in tree.leaves] == ["v"]
    assert tree.build([leaf]) is leaf
    assert next(iter(tree_map(lambda value: [value], leaf))) is leaf


def test_tensors_in_finds_every_tensor_in_order():
    a, b, c = (torch.tensor(i) for i in range(3))
    value = {"x": [a, 1, Point(b, "no")], "y": Frozen(c)}
    assert [id(t) for t in tensors_in(value)] == [id(a), id(b), id(c)]
    assert list(tensors_in([1, "a", None])) == []
