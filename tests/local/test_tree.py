"""Nested values: what is a container, how one is opened, and what comes back when it is built again."""

from __future__ import annotations

import collections
import dataclasses
import functools
import typing
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from lockstep._base.tree import Tree, open_node, tensors_in, tree_map
from lockstep.errors import StructureError

Point = namedtuple("Point", "x y")


class Pair(typing.NamedTuple):
    """A named tuple of the other sort, with a default."""

    first: typing.Any
    second: typing.Any = 7


@dataclasses.dataclass
class Batch:
    """A dataclass whose parts must have at least four rows: a chunk of it could not be made by its constructor."""

    rows: typing.Any
    label: typing.Any = None
    cached: typing.Any = dataclasses.field(init=False, default="unset")

    def __post_init__(self):
        if len(self.rows) < 4:
            raise ValueError("a batch has at least four rows")


def rows_and_name(name, **options):
    return dataclasses.make_dataclass(name, [("rows", typing.Any), ("name", str, name)], **options)


Frozen = rows_and_name("Frozen", frozen=True)
Slotted = rows_and_name("Slotted", slots=True)
FrozenSlotted = rows_and_name("FrozenSlotted", frozen=True, slots=True)


class Output(OrderedDict):
    """What the outputs of well-known model libraries are: fields that are also items, and no `update`."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args, **kwargs):
        raise RuntimeError("no update")


@dataclasses.dataclass
class ClassifierOutput(Output):
    """One of them."""

    logits: typing.Any = None
    loss: typing.Any = None
    hidden: typing.Any = None


class FromItems(dict):
    """A dict that builds from items."""


class Rows(list):
    """A list with a note on it."""

    def __init__(self, items, note):
        super().__init__(items)
        self.note = note


class Triple(tuple):
    """A tuple with a name of its own."""

    __slots__ = ()


class Registered:
    """A type that PyTorch's pytree registry knows."""

    def __init__(self, rows, note):
        self.rows = rows
        self.note = note

    def __eq__(self, other):
        return type(other) is Registered and (self.rows, self.note) == (other.rows, other.note)

    __hash__ = None


@pytest.fixture
def registered():
    pytree.register_pytree_node(
        Registered, lambda r: ([r.rows], r.note), lambda children, note: Registered(children[0], note)
    )
    yield
    pytree._deregister_pytree_node(Registered)


CONTAINERS = {
    "tuple": ((1, 2), ["v[0]", "v[1]"]),
    "list": ([1, 2], ["v[0]", "v[1]"]),
    "dict": ({"a": 1, 2: 2}, ["v['a']", "v[2]"]),
    "namedtuple": (Point(1, 2), ["v.x", "v.y"]),
    "typing.NamedTuple": (Pair(1), ["v.first", "v.second"]),
    "OrderedDict": (OrderedDict(b=1, a=2), ["v['b']", "v['a']"]),
    "defaultdict": (defaultdict(list, a=1), ["v['a']"]),
    "Counter": (Counter("aab"), ["v['a']", "v['b']"]),
    "dict subclass": (FromItems(a=1), ["v['a']"]),
    "deque": (deque([1, 2], maxlen=5), ["v[0]", "v[1]"]),
    "tuple subclass": (Triple((1, 2, 3)), ["v[0]", "v[1]", "v[2]"]),
    "list subclass": (Rows([1, 2], "note"), ["v[0]", "v[1]"]),
    "model output": (ClassifierOutput(logits=1, hidden=(2, 3)), ["v['logits']", "v['hidden'][0]", "v['hidden'][1]"]),
    "dataclass": (Batch([1, 2, 3, 4], "x"), [*(f"v.rows[{i}]" for i in range(4)), "v.label", "v.cached"]),
    "frozen dataclass": (Frozen(1), ["v.rows", "v.name"]),
    "dataclass with slots": (Slotted(1), ["v.rows", "v.name"]),
    "frozen dataclass with slots": (FrozenSlotted(1), ["v.rows", "v.name"]),
    "nested": ({"a": [(1, Point(2, [3]))]}, ["v['a'][0][0]", "v['a'][0][1].x", "v['a'][0][1].y[0]"]),
    "empty tuple": ((), []),
    "empty list": ([], []),
    "empty dict": ({}, []),
    "empty in a list": ([(), {}, 1], ["v[2]"]),
}


@pytest.mark.parametrize(("value", "paths"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_is_taken_apart_and_built_again(value, paths):
    tree = Tree(value, "v")
    assert [leaf.path for leaf in tree.leaves] == paths
    built = tree.build([leaf.value for leaf in tree.leaves])
    assert type(built) is type(value)
    assert built == value


@pytest.mark.parametrize("make", [list, dict, OrderedDict, lambda x: defaultdict(int, x), Counter, deque])
def test_a_built_in_container_is_a_new_one_each_time(make):
    value = make({"a": 1})
    built = tree_map(lambda leaf: leaf, value)
    assert built == value
    assert built is not value


@pytest.mark.parametrize("value", [FromItems(a=1), Rows([1], "note"), Triple((1, 2)), Frozen(1), Point(1, 2)])
def test_a_container_of_another_class_stays_the_same_object_unless_a_child_is_another(value):
    assert tree_map(lambda leaf: leaf, value) is value


@pytest.mark.parametrize(("value", "paths"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_is_built_of_new_leaves_in_their_order(value, paths):
    tree = Tree(value, "v")
    marks = [f"new {i}" for i in range(len(paths))]
    before = repr(value)
    built = tree.build(marks)
    assert type(built) is type(value)
    assert [(leaf.path, leaf.value) for leaf in Tree(built, "v").leaves] == list(zip(paths, marks, strict=True))
    assert repr(value) == before


class Tagged(defaultdict):
    """A subclass of defaultdict."""


def test_what_a_container_knows_beside_its_children_is_kept():
    for kind in (defaultdict, Tagged):
        built = tree_map(str, kind(list, a=1))
        assert (type(built), built, built.default_factory) == (kind, {"a": "1"}, list)
    assert tree_map(str, deque([1], maxlen=5)).maxlen == 5
    assert tree_map(str, Rows([1], "note")).note == "note"
    assert tree_map(str, Point(1, 2))._fields == ("x", "y")
    assert list(tree_map(str, OrderedDict(b=1, a=2))) == ["b", "a"]


def test_a_model_output_is_built_with_its_fields():
    built = tree_map(lambda leaf: leaf + 1, ClassifierOutput(logits=1, hidden=3))
    assert (built.logits, built.loss, built.hidden) == (2, None, 4)
    assert built["hidden"] == 4
    assert "loss" not in built


def test_a_dataclass_whose_constructor_refuses_a_chunk():
    built = tree_map(lambda leaf: leaf, Batch([1, 2, 3, 4]))
    short = Tree(Batch(torch.arange(4)), "v").build([torch.arange(1), "label", "cached"])
    assert built.rows == [1, 2, 3, 4]
    assert (len(short.rows), short.label, short.cached) == (1, "label", "cached")


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


class Named(dict):
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


def half(leaf):
    return leaf[:2] if isinstance(leaf, torch.Tensor) else leaf


MIRRORS = {
    "its own attributes": AttrDict(x=torch.arange(4), y=1),
    "copied": Mirror(torch.arange(4)),
    "by name": Named(x=torch.arange(4), y=1),
    "tuple": Both(torch.arange(4), 1),
    "tuple that is copied": Loose(),
    "list": Marked(torch.arange(4), 1, 2),
    "slot": Slots(torch.arange(4)),
}


@pytest.mark.parametrize("value", MIRRORS.values(), ids=MIRRORS)
def test_attributes_that_are_items_follow_them(value):
    built = tree_map(half, value)
    assert type(built) is type(value)
    assert built.x.tolist() == [0, 1]
    assert built.x is next(tensors_in(built))
    assert getattr(built, "size", 2) == 2
    assert getattr(built, "note", "kept") == "kept"
    assert value.x.tolist() == [0, 1, 2, 3]


def test_a_dict_that_is_its_own_attributes_stays_so():
    built = tree_map(half, AttrDict(x=torch.arange(4)))
    built.later = 3
    assert built["later"] == 3
    assert vars(built) is built


def test_an_attribute_that_was_set_later_is_kept():
    value = FromItems(x=torch.arange(4))
    value.note, value.again = "note", value["x"]
    built = tree_map(half, value)
    assert (built.note, built.again.tolist()) == ("note", [0, 1])


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


@dataclasses.dataclass
class Sequences:
    """A dataclass with all kinds of derived values."""

    rows: torch.Tensor
    kind: str = "k"
    size: int = dataclasses.field(init=False)
    mask: typing.Any = dataclasses.field(init=False, default=None)
    later: typing.Any = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        self.size, self.mask, self.valid = len(self.rows), self.rows > 0, self.rows >= 0

    @functools.cached_property
    def total(self):
        return int(self.rows.sum())


def test_what_a_dataclass_derives_from_its_fields_is_derived_again():
    value = Sequences(torch.arange(4), "x")
    value.later = torch.arange(4)
    assert value.total == 6
    built = tree_map(half, value)
    assert (built.rows.tolist(), built.kind, built.size, built.total) == ([0, 1], "x", 2, 1)
    assert (built.mask.tolist(), built.valid.tolist(), built.later.tolist()) == ([False, True], [True] * 2, [0, 1])
    assert (value.size, value.total) == (4, 6)


def test_a_dataclass_that_changes_its_fields_is_copied():
    @dataclasses.dataclass
    class Scaled:
        rows: torch.Tensor

        def __post_init__(self):
            self.rows = self.rows / 2

    assert tree_map(half, Scaled(torch.arange(4.0))).rows.tolist() == [0, 0.5]


def test_a_dataclass_with_another_constructor_and_a_value_on_demand():
    @dataclasses.dataclass(init=False)
    class Loaded:
        rows: torch.Tensor

        def __init__(self):
            self.rows, self.source = torch.arange(4), "file"

        @functools.cached_property
        def count(self):
            return len(self.rows)

    value = Loaded()
    assert value.count == 4
    built = tree_map(half, value)
    assert (built.rows.tolist(), built.source, built.count) == ([0, 1], "file", 2)


def test_a_field_that_is_not_set_yet_stays_so():
    @dataclasses.dataclass
    class Lazy:
        rows: int
        later: int = dataclasses.field(init=False)

    built = tree_map(lambda leaf: leaf + 1, Lazy(1))
    assert built.rows == 2
    assert not hasattr(built, "later")


def test_a_type_of_the_pytree_registry_is_a_container(request):
    value = Registered([1, 2], "note")
    assert open_node(value) is None  # nobody has registered it
    request.getfixturevalue("registered")
    tree = Tree({"r": value}, "v")
    assert [leaf.path for leaf in tree.leaves] == ["v['r'][0][0]", "v['r'][0][1]"]
    assert tree.build([3, 4]) == {"r": Registered([3, 4], "note")}
    with pytest.raises(StopIteration):  # too few leaves are no silent success
        tree.build([3])


def test_the_return_types_of_torch_are_containers():
    value = torch.ones(2, 3).max(dim=1)
    built = tree_map(lambda leaf: leaf + 1, value)
    assert type(built) is torch.return_types.max
    assert built.values.tolist() == [2.0, 2.0]
    assert [t.dtype for t in tensors_in(value)] == [torch.float32, torch.int64]


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


def test_the_containers_of_this_file_cover_every_kind_of_dict_in_collections():
    dicts = [kind for kind in vars(collections).values() if isinstance(kind, type) and issubclass(kind, dict)]
    assert {type(value) for value, _ in CONTAINERS.values()} >= set(dicts)
