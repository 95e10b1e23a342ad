"""Dictionaries that are only gone through after they were written, with numbers of PyTorch's and without."""

from __future__ import annotations

import pytest
from torch import nn

from lockstep.local import dict_versions
from lockstep.local.dict_versions import DictWatch, WrittenDicts


@pytest.fixture(params=["numbered", "gone through"], autouse=True)
def numbers(request, monkeypatch):
    if request.param == "gone through":
        monkeypatch.setattr(dict_versions, "_version_of", None)
    elif dict_versions._version_of is None:
        pytest.skip("this PyTorch, or this Python, has no numbers for dictionaries")


def written(now, then):
    return WrittenDicts([now], [then]).numbers()


class Plain:
    def __init__(self):
        self.a, self.b = object(), object()

    def store(self):
        self.a = object()


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.a, self.b = object(), object()

    def store(self):
        self.a = object()


WRITES = {
    "in a method": lambda o: o.store(),
    "from outside": lambda o: setattr(o, "a", object()),
    "past the class": lambda o: object.__setattr__(o, "a", object()),
    "a new one": lambda o: setattr(o, "c", 1),
    "deleted": lambda o: delattr(o, "b"),
    "in the dictionary": lambda o: vars(o).update(a=object()),
    "a new one in the dictionary": lambda o: vars(o).setdefault("c", 1),
    "taken out of the dictionary": lambda o: vars(o).pop("b"),
    "another of the same name": lambda o: (delattr(o, "b"), setattr(o, "b", object())),
}


@pytest.mark.parametrize("kind", [Plain, Layer])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_to_an_attribute_is_noticed(write, kind):
    """More than once: the interpreter stores in other ways after some times, and in other ways for other objects."""
    objects = [kind() for _ in range(100)]
    now = [vars(o) for o in objects]
    then = [dict(d) for d in now]
    watched = WrittenDicts(now, then)
    assert watched.numbers() == []
    for number, each in enumerate(objects):
        write(each)
        assert watched.numbers() == [number]
        assert watched.numbers() == [number]  # until it was taken
        then[number] = dict(now[number])
        assert watched.numbers() == []
    assert all(vars(o) is d for o, d in zip(objects, now, strict=True))


def test_an_attribute_put_back_is_no_change():
    layer = Layer()
    then = dict(vars(layer))
    watched = WrittenDicts([vars(layer)], [then])
    assert watched.numbers() == []
    kept, layer.a = layer.a, object()
    layer.a = kept
    assert watched.numbers() == []
    del layer.a
    layer.a = kept  # in another order
    assert watched.numbers() == []


def test_one_and_true_are_not_the_same():
    layer = Layer()
    layer.a = True
    watched = WrittenDicts([vars(layer)], [dict(vars(layer))])
    layer.a = 1
    assert watched.numbers() == [0]


def test_dictionaries_are_compared_again_only_after_a_write():
    one, other = {"a": 1}, {"b": 2}
    watch, asked = DictWatch([one, other, one]), []

    def compare(answer):
        asked.append(answer)
        return answer

    assert watch.same(lambda: compare(True))
    assert watch.same(lambda: compare(True))
    counted = dict_versions._version_of is not None
    assert len(asked) == (1 if counted else 2)
    other["b"] = 3
    assert not watch.same(lambda: compare(False))
    assert not watch.same(lambda: compare(False))  # still another: nothing was found to be the same since
    assert watch.same(lambda: compare(True))
    watch.reset()
    assert not watch.same(lambda: compare(False))


@pytest.mark.parametrize("dicts", [[{}], [{"a": 1}, {}]], ids=["empty", "one of two empty"])
def test_empty_dictionaries_are_compared_each_time(dicts):
    """From Python 3.12 on nobody is told of the update that fills one."""
    watch = DictWatch(dicts)
    assert watch.same(lambda: True)
    dicts[-1].update(b=1)
    assert not watch.same(lambda: False)


def test_another_function_of_that_name_is_not_used():
    assert not dict_versions._counts_writes(lambda d: 0)
    assert not dict_versions._counts_writes(len)
    assert not dict_versions._counts_writes(lambda: 0)
    assert not dict_versions._counts_writes(iter(range(10**6)).__next__)
