"""A replicated module keeps its class, and its copies and pickles are plain, however they are made."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import pytest
import torch
from torch import fx, nn

import lockstep
from lockstep.distributed import Replicated
from lockstep.errors import NotReplicableError
from programs.ranks import on_ranks, replicated
from threaded import count_collectives, run_ranks

T = TypeVar("T")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


class Base(ABC, nn.Module):
    @abstractmethod
    def forward(self, x): ...


class Abstract(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


class OfAType(Generic[T], Plain):
    pass


class Slots:
    __slots__ = ("first", "second")


class Slotted(Slots, Plain):
    __slots__ = ("third",)


class Closed(Plain):
    """Sets no attributes once it is made, and has attributes of any name."""

    def __setattr__(self, name, value):
        if "layer" in self.__dict__.get("_modules", ()):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def __getattr__(self, name):
        return name if name.startswith("any_") else super().__getattr__(name)


class StateByCopy(Plain):
    def __getstate__(self):
        return self.__dict__.copy()


class StateByDict(Plain):
    """As lightning.LightningModule."""

    def __getstate__(self):
        return {**dict(self.__dict__), "extra": 1}

    def __setstate__(self, state):
        del state["extra"]
        self.__dict__ = state


class Reduced(Plain):
    def __reduce__(self):
        return type(self), (), self.__dict__


class Rebuilt(Plain):
    def __reduce_ex__(self, protocol):
        return rebuild, (type(self), self.__dict__)


def rebuild(kind, attributes):
    made = kind.__new__(kind)
    made.__dict__.update(attributes)
    return made


class DeepBySetting(Plain):
    """The recipe for __deepcopy__ that most classes follow."""

    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            setattr(made, name, copy.deepcopy(value, memo))
        return made


class DeepByDict(Plain):
    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


class Shallow(Plain):
    def __copy__(self):
        return rebuild(type(self), self.__dict__)


class Full(Plain):
    """A buffer, hooks of its own, plain attributes, one of which is a layer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.path, self.calls = [self.layer], 0
        self.register_forward_hook(counted)
        self.register_forward_pre_hook(seen, with_kwargs=True)

    def forward(self, x):
        return self.layer(x) * self.scale


def counted(module, args, output):
    module.calls += 1


def seen(module, args, kwargs):
    return args, kwargs


class Slow(Full):
    """Copies itself in its own way."""

    def __deepcopy__(self, memo):
        copied = type(self)()
        copied.load_state_dict(self.state_dict())
        copied.calls = self.calls
        return copied


def traced():
    return fx.symbolic_trace(Plain())


def by_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


KINDS = [
    Plain,
    Abstract,
    OfAType[int],
    Slotted,
    Closed,
    StateByCopy,
    StateByDict,
    Reduced,
    Rebuilt,
    DeepBySetting,
    DeepByDict,
    Shallow,
    Full,
    Slow,
    traced,
]
WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of a copy": lambda module: copy.deepcopy(copy.copy(module)),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "pickle, oldest protocol": lambda module: pickle.loads(pickle.dumps(module, 0)),
    "pickle of a copy": lambda module: pickle.loads(pickle.dumps(copy.copy(module))),
    "save": by_save,
}


def check_plain(rank, module, copied):
    """The copy is a module of the plain class, with the same values, that nothing synchronises."""
    assert type(copied) is type(module) or isinstance(module, fx.GraphModule)  # which makes a class for each
    assert not isinstance(copied, Replicated)
    assert not hasattr(copied, "no_sync")
    with pytest.raises(NotReplicableError, match=r"no_sync\(\) got a"):
        Replicated.no_sync(copied)
    with pytest.raises(NotReplicableError):
        lockstep.loop.statistics(copied)
    wanted, found = module.state_dict(), copied.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(one, other) for one, other in zip(wanted.values(), found.values(), strict=True))
    if isinstance(copied, Full):  # other classes may take hooks of ours along, which do nothing in the copy
        assert len(copied._forward_hooks) == len(copied._forward_pre_hooks) == 1
        assert copied._forward_pre_hooks_with_kwargs.keys() == copied._forward_pre_hooks.keys()
        assert (copied.path, copied.calls) == ([copied.layer], module.calls)
    if copied.layer is not module.layer:
        assert all(one.data_ptr() != found[name].data_ptr() for name, one in wanted.items())
        assert not any(p._post_accumulate_grad_hooks for p in copied.parameters())
    before = getattr(copied, "calls", None)
    x = torch.full((1, 2), rank.rank + 1.0)
    with count_collectives(rank) as sent:
        y = copied(x)
        if copied.layer is not module.layer:
            y.sum().backward()
    assert before is None or copied.calls == before + 1
    assert torch.equal(y, module(x))
    assert sent == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", str(kind)))
def test_copies_and_pickles(kind):
    world = 1 if kind is traced else 2  # tracing and loading change a global, so that ranks cannot be threads
    mean = (world + 1) / 2

    def call(rank):
        module = kind()
        before = type(module)
        assert lockstep.replicate(module, process_group=rank.group) is module
        assert type(module) is before
        assert isinstance(module, Replicated)
        for copied in (way(module) for way in WAYS.values()):
            check_plain(rank, module, copied)
            if copied.layer is not module.layer:
                again = lockstep.replicate(copied, process_group=rank.group)
                again.layer(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
                # Its own backward above, and this one, as means over the ranks.
                assert copied.layer.weight.grad.tolist() == [[2 * mean, 2 * mean]] * 2
        assert b"lockstep" not in pickle.dumps(module)
        with module.no_sync():
            module(torch.ones(1, 2)).sum().backward()
        module.zero_grad()
        module(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
        return module.layer.weight.grad.tolist()

    assert run_ranks(world, call) == [[[mean, mean]] * 2] * world


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_copy_of_what_holds_a_replicated_module(rank, way):
    child = lockstep.replicate(Full(), process_group=rank.group)
    copied = WAYS[way](nn.ModuleDict({"child": child, "other": nn.Linear(2, 2)}))
    assert type(copied) is nn.ModuleDict
    if copied["child"] is not child:
        check_plain(rank, child, copied["child"])
    parent = lockstep.replicate(nn.ModuleList([Full()]), process_group=rank.group)
    check_plain(rank, parent[0], WAYS[way](parent)[0])
    child.zero_grad()
    child.layer(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
    assert child.layer.weight.grad.tolist() == [[1.5, 1.5]] * 2


@on_ranks(1)
def test_a_copy_that_was_changed_is_what_is_pickled(rank):
    """Not the module that it was copied from, which a method of the instance would know."""
    module = lockstep.replicate(Shallow(), process_group=rank.group)
    copied = copy.copy(module)
    copied.own = 3
    assert [way(copied).own for way in WAYS.values()] == [3] * len(WAYS)


@on_ranks(2)
def test_a_graph_module_that_is_edited_after_replicating(rank):
    module = replicated(rank, lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    for node in module.graph.nodes:
        if node.target == "1":
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    module(-torch.full((1, 2), rank.rank + 1.0)).sum().backward()
    twin = copy.deepcopy(module)
    assert torch.equal(twin(torch.ones(1, 2)), module(torch.ones(1, 2)))
    assert not isinstance(twin, Replicated)
    assert getattr(module, "0").weight.grad.tolist() == [[-1.5, -1.5]] * 2


class OwnMethods(Plain):
    def no_sync(self):
        return "its own"


@on_ranks(2)
def test_a_module_keeps_methods_of_its_own(rank):
    module = lockstep.replicate(OwnMethods(), process_group=rank.group)
    assert module.no_sync() == "its own"
    with Replicated.no_sync(module):
        module(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
    local = module.layer.weight.grad.tolist()
    module.set_requires_gradient_sync(requires_gradient_sync=True)
    module(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
    n = (1.0, 2.0)[rank.rank]
    assert (local, module.layer.weight.grad.tolist()) == ([[n, n]] * 2, [[3.0, 3.0]] * 2)


class Delegating(nn.Module):
    """Has the attributes of the module inside, as wrappers of other libraries do."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.own = inner, nn.Linear(2, 2, bias=False)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@on_ranks(2)
def test_methods_of_a_replicated_module_inside_are_not_taken_for_own_ones(rank):
    inner = lockstep.replicate(Plain(), process_group=rank.group)
    outer = lockstep.replicate(Delegating(inner), process_group=rank.group)
    with outer.no_sync():
        outer.own(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
    n = (1.0, 2.0)[rank.rank]
    assert outer.own.weight.grad.tolist() == [[n, n]] * 2


@on_ranks(1)
def test_handles_of_hooks_still_remove_them(rank):
    """Those registered before replicating, of every kind, and those that a copy has taken along."""
    module, ran = Plain(), []
    module.handles = [
        module.register_forward_hook(lambda *_: ran.append("forward")),
        module.register_load_state_dict_post_hook(lambda *_: ran.append("load")),
        module.register_state_dict_post_hook(lambda *_: ran.append("state")),
    ]
    lockstep.replicate(module, process_group=rank.group)
    later = module.layer.register_state_dict_post_hook(lambda *_: ran.append("later"))
    later.remove()
    copies = [WAYS[way](module) for way in ("deepcopy", "deepcopy of a copy")]
    for each in (*copies, module):
        for handle in each.handles:
            handle.remove()
        each(torch.ones(1, 2))
        each.load_state_dict(each.state_dict())
    assert ran == []


@on_ranks(1)
def test_a_replicated_module_is_freed_without_a_search_for_garbage(rank):
    module = lockstep.replicate(Plain(), process_group=rank.group)
    link = weakref.ref(module)
    del module
    assert link() is None


@on_ranks(1)
def test_tracing_exporting_and_compiling(rank):
    x = torch.ones(1, 2)
    module = lockstep.replicate(Plain(), process_group=rank.group)
    expected = module(x)
    others = [
        fx.symbolic_trace(module),
        torch.export.export(module, (x,)).module(),
        torch.compile(module, backend="eager", fullgraph=True),
        torch.optim.swa_utils.AveragedModel(module),
        module._replicate_for_data_parallel(),
    ]
    assert isinstance(others[2], Replicated)
    assert others[2].no_sync == module.no_sync
    assert all(torch.equal(other(x), expected) for other in others[:-1])
    assert not hasattr(others[-1], "no_sync")
    assert torch.equal(torch.func.functional_call(module, dict(module.named_parameters()), (x,)), expected)


class Equal(Plain):
    """Equal to all others of its class; its property is not to be asked for."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1

    @property
    def no_sync(self):
        raise RuntimeError("asked for")


@on_ranks(2)
def test_modules_that_are_equal_are_replicated_each_for_itself(rank):
    modules = Equal(), Equal(), Equal()
    for module in modules[:2]:
        lockstep.replicate(module, process_group=rank.group)
        module(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
    states = {id(lockstep.replicate.state(module)._replication) for module in modules[:2]}
    grads = [module.layer.weight.grad.tolist() for module in modules[:2]]
    assert [isinstance(module, Replicated) for module in modules] == [True, True, False]
    assert len(states) == 2
    assert grads == [[[1.5, 1.5]] * 2] * 2


class WithoutTargets(nn.Linear):
    """A class whose ``named_parameters()`` takes other arguments than PyTorch's, and leaves some out (torchrl)."""

    def __init__(self, width):
        super().__init__(width, width)
        self._target_weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def named_parameters(self, prefix=""):
        return ((name, each) for name, each in super().named_parameters(prefix) if not name.startswith("_target"))

    def parameters(self):
        return (each for _, each in self.named_parameters())


@on_ranks(2)
def test_a_class_may_name_its_parameters_in_its_own_way(rank):
    torch.manual_seed(rank.rank)
    model = lockstep.replicate(WithoutTargets(2), process_group=rank.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 2), float(rank.rank))).sum().backward()
        optimizer.step()
    lockstep.check_in_sync(model, optimizer)
    assert model.weight.grad.tolist() == [[0.5, 0.5], [0.5, 0.5]]
