"""Containers that inputs and outputs come in: `PAIRS[name]` is how one is made of two members, and their paths."""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import torch
from torch.utils import _pytree as pytree

Point = namedtuple("Point", "x y")


class Pair(typing.NamedTuple):
    """A named tuple of the other sort, with a default."""

    x: typing.Any
    y: typing.Any = 7


@dataclasses.dataclass
class Checked:
    """A dataclass that must have at least four rows: its constructor refuses a chunk."""

    x: typing.Any
    y: typing.Any = None
    cached: typing.Any = dataclasses.field(init=False, default="unset")

    def __post_init__(self):
        if len(self.x) < 4:
            raise ValueError("a batch has at least four rows")


def of_two_fields(name, **options):
    return dataclasses.make_dataclass(name, [("x", typing.Any), ("y", typing.Any, name)], **options)


Frozen = of_two_fields("Frozen", frozen=True)
Slotted = of_two_fields("Slotted", slots=True)
FrozenSlotted = of_two_fields("FrozenSlotted", frozen=True, slots=True)


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

    x: typing.Any = None
    loss: typing.Any = None
    y: typing.Any = None


class FromItems(dict):
    """A dict that builds from items."""


class Rows(list):
    """A list with a note on it."""

    def __init__(self, items, note="note"):
        super().__init__(items)
        self.note = note


class Triple(tuple):
    """A tuple with a name of its own."""

    __slots__ = ()


class Wrapping(tuple):
    """A tuple whose constructor takes any number of entries, so a list of them is one entry to it."""

    def __new__(cls, *entries):
        return super().__new__(cls, entries)


class Registered:
    """A type that PyTorch's pytree registry knows."""

    def __init__(self, x, y, note="note"):
        self.x, self.y, self.note = x, y, note

    def __repr__(self):
        return self.note  # so that different ones look the same

    def __eq__(self, other):
        return type(other) is Registered and vars(self) == vars(other)

    __hash__ = object.__hash__


def register():
    flatten, build = lambda r: ([r.x, r.y], r.note), lambda children, note: Registered(*children, note)
    pytree.register_pytree_node(Registered, flatten, build, serialized_type_name="Registered")


def unregister():
    pytree._deregister_pytree_node(Registered)


INDICES, KEYS, FIELDS = ["v[0]", "v[1]"], ["v['x']", "v['y']"], ["v.x", "v.y"]
PAIRS = {
    "tuple": (lambda x, y: (x, y), INDICES),
    "list": (lambda x, y: [x, y], INDICES),
    "deque": (lambda x, y: deque([x, y], maxlen=5), INDICES),
    "tuple subclass": (lambda x, y: Triple((x, y)), INDICES),
    "tuple of arguments": (Wrapping, INDICES),
    "list subclass": (lambda x, y: Rows([x, y]), INDICES),
    "registered type": (Registered, INDICES),
    "dict": (lambda x, y: {"x": x, "y": y}, KEYS),
    "OrderedDict": (lambda x, y: OrderedDict(x=x, y=y), KEYS),
    "defaultdict": (lambda x, y: defaultdict(list, x=x, y=y), KEYS),
    "Counter": (lambda x, y: Counter({"x": x, "y": y}), KEYS),
    "dict subclass": (lambda x, y: FromItems(x=x, y=y), KEYS),
    "model output": (lambda x, y: ClassifierOutput(x=x, y=y), KEYS),
    "namedtuple": (Point, FIELDS),
    "typing.NamedTuple": (Pair, FIELDS),
    "dataclass that checks": (Checked, [*FIELDS, "v.cached"]),
    "frozen dataclass": (Frozen, FIELDS),
    "dataclass with slots": (Slotted, FIELDS),
    "frozen dataclass with slots": (FrozenSlotted, FIELDS),
    "return type of torch": (lambda x, y: torch.return_types.max((x, y)), INDICES),
}
