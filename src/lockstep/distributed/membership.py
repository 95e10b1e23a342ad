"""Which parameters a reducer has, and how they come to be others.

Modules change while they are trained. When a backward pass reaches the module, its slots are looked at
(``slots.py``). A rank that finds other parameters or modules there hooks the new ones, so that their gradients are
noticed, and says so in its report. Then all ranks choose what is replicated anew, in the same backward: they compare
names, order, shapes and dtypes, and the values of what is new to any of them, since gradients of different values have
no common mean. What differs is an error by name, on every rank, in this backward and each one that follows, until it is
the same again.

A tensor that was swapped (``torch.utils.swap_tensors``) stays the same object and loses its hook. That concerns this
rank alone: it counts what such a parameter has as gradient, and hooks it again.
"""

from collections.abc import Sequence
from sys import getrefcount
from typing import Any, NamedTuple
from weakref import ref

from torch.nn import Module, Parameter

from lockstep.distributed.agreement import Description, check_new_everywhere, check_same_on_all_ranks
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.keeping import keep
from lockstep.distributed.reduction.arrivals import Arrivals
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.parameter_hooks import (
    HookDictionary,
    NewcomerHook,
    ParameterHook,
    attach,
    can_have_gradient,
    detach,
    listener_of,
)
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.registrations import watch_registrations
from lockstep.distributed.selection import Contents, Selection, describe_parameter
from lockstep.distributed.slots import SlotWatch
from lockstep.distributed.values import check_equal_values
from lockstep.errors import LockstepError


class _Attached(NamedTuple):
    """A parameter with a hook of ours, and what shows whether it still has it."""

    parameter: Parameter
    address: int
    hooks: object
    references: int

    @classmethod
    def of(cls, parameter: Parameter) -> "_Attached":
        hooks = parameter._post_accumulate_grad_hooks
        return cls(parameter, parameter._cdata, hooks, getrefcount(hooks))

    @property
    def lost(self) -> bool:
        """Whether another tensor has taken the place of the one that was hooked, and perhaps its address."""
        return self.parameter._cdata != self.address or getrefcount(self.hooks) < self.references - 1


class Membership:
    """The parameters of one reducer; see :class:`lockstep.distributed.reduction.members.Membership`."""

    def __init__(self, selection: Selection, contents: Contents, delayed: Sequence[Parameter], values: bool) -> None:
        self._selection, self._values = selection, values
        self._delayed = {id(parameter) for parameter in delayed}
        self._attached: list[_Attached] = []
        self._reducer: ref[Reducer] | None = None
        self.parameters = _managed(contents)
        self.trained = [each.index for each in self.parameters if each.parameter.requires_grad]
        """The parameters, by number, that were trained on any rank when ranks agreed on them."""
        self.arrivals = Arrivals()
        """Which of their gradients come in a pass."""
        self._last_slot: tuple[dict[str, Any], str, Any] = {}, "", None
        self._watch = self._watched()

    def _watched(self) -> SlotWatch:
        return SlotWatch(owner for _, owner in self._selection.owners())

    def _named(self) -> list[tuple[str, int]]:
        return [(each.name, id(each.parameter)) for each in self.parameters]

    @property
    def last(self) -> list[int]:
        """The parameters, by number, whose gradients leave last."""
        return [each.index for each in self.parameters if id(each.parameter) in self._delayed]

    def attach(self, reducer: Reducer) -> None:
        """Let gradients of all parameters tell the reducer, which every module of theirs keeps from now on."""
        self._reducer = ref(reducer)
        watch_registrations()
        self.arrivals.set_hooks(_hook(each, reducer) for each in self.parameters)
        self._attached = [_Attached.of(each.parameter) for each in self.parameters]
        self._last_slot = _last_slot([owner for _, owner in self._selection.owners()])
        for _, owner in self._selection.owners():
            keep(owner, reducer)
        keep(self._selection.module, self)

    @property
    def _reducer_now(self) -> Reducer:
        """The reducer that has been given to :meth:`attach`, and that asks now."""
        reducer = self._reducer() if self._reducer is not None else None
        assert reducer is not None
        return reducer

    @property
    def retired(self) -> bool:
        """Whether its reducer is over."""
        reducer = self._reducer() if self._reducer is not None else None
        return reducer is None or reducer.retired

    @property
    def present(self) -> list[ManagedParameter]:
        """Those parameters that the module still has, if it is there itself."""
        if not self._selection.alive:
            return self.parameters
        there = {id(parameter) for parameter in self._selection.module.parameters()}
        return [each for each in self.parameters if id(each.parameter) in there]

    def has(self, parameter: Parameter) -> bool:
        """Whether the module has the parameter now, and synchronises it."""
        return self._selection.alive and any(tensor is parameter for _, tensor in self._selection.named_tensors())

    def owns(self, module: Module) -> bool:
        """Whether it synchronises the own parameters of ``module``, a part."""
        return self._selection.alive and any(owner is module for _, owner in self._selection.owners())

    def changed(self) -> bool:
        """Whether other parameters or modules stand in the module's slots."""
        return self._watch.changed()

    def sample(self) -> object:
        """What stands now in the slot of one parameter, the last that is trained."""
        slots, key, _ = self._last_slot
        return slots.get(key)

    def is_own(self, sample: object) -> bool:
        """Whether that, as a forward has found it, was the module's own parameter, and not lent to it meanwhile."""
        return sample is self._last_slot[2] or sample is self.sample()

    def welcome(self) -> tuple[list[ManagedParameter], set[int]]:
        """Let gradients of parameters that are new on this rank open a round; returns them, and the identities of those
        that have gone."""
        reducer = self._reducer_now
        try:
            contents = self._selection.contents(reducer)
        except LockstepError:
            return [], set()  # told to all when they compare
        known = {id(each.parameter) for each in self.parameters}
        managed = _managed(contents)
        new = [each for each in managed if id(each.parameter) not in known]
        for each in new:
            if listener_of(each.parameter) is not reducer:
                attach(each.parameter, NewcomerHook(each.name, reducer), reducer)
        return new, known - {id(each.parameter) for each in managed}

    def hook_again(self, idle: Sequence[int]) -> list[int]:
        """Of the parameters in ``idle``, those that have a gradient and had lost their hook; they have it again."""
        reducer, found = self._reducer_now, []
        for index in idle:
            if self._attached[index].parameter.grad is not None and self._attached[index].lost:
                each = self.parameters[index]
                if listener_of(each.parameter) not in (None, reducer):
                    continue  # it has been moved to another replicated module, whose hook it has
                self.arrivals.replace_hook(index, _hook(each, reducer))
                self._attached[index] = _Attached.of(each.parameter)
                found.append(index)
        return found

    def renew(self, collectives: Collectives) -> list[ManagedParameter]:
        """Choose the parameters anew, with all other ranks; returns the new ones that any rank has a gradient of.

        Raises on every rank if ranks differ, and then leaves everything as it is. Communicates what :func:`agree`
        does, and one broadcast for each bucket of new parameters.
        """
        reducer, contents, failure = self._reducer_now, Contents([], [], frozenset()), ""
        try:
            contents = self._selection.contents(reducer)
        except LockstepError as error:
            failure = str(error)
        known = {id(each.parameter): each.name for each in self.parameters}
        lines = [describe_parameter(n, p, contents, trained=False, earlier=known) for n, p in contents.parameters]
        managed = _managed(contents)
        new = [each for each in managed if id(each.parameter) not in known]
        numbers = [2 * each.index + (each.parameter.grad is not None) for each in new]
        trained = [each.index for each in managed if each.parameter.requires_grad]
        rows = check_same_on_all_ranks(Description(lines, failure), [len(new), *numbers, *trained], collectives)
        trained = sorted({index for row in rows for index in row[1 + row[0] :]})
        rows = [row[1 : 1 + row[0]] for row in rows]
        told = {number for row in rows for number in row}
        names, indices = [each.name for each in managed], [{number // 2 for number in row} for row in rows]
        check_new_everywhere(names, indices, collectives.global_ranks)
        if self._values:
            check_equal_values([(each.name, each.parameter) for each in new], collectives)
        self._watch = self._watched()
        if told or [(each.name, id(each.parameter)) for each in managed] != self._named():
            for old in self.parameters:
                detach(old.parameter, reducer)
            self.parameters, self.trained, self.arrivals = managed, trained, Arrivals()
            self.attach(reducer)
        return [self.parameters[i] for i in sorted({number // 2 for number in told if number % 2})]


def _hook(each: ManagedParameter, reducer: Reducer) -> HookDictionary:
    return attach(each.parameter, ParameterHook(each.index, each.name, reducer), reducer)


def _last_slot(owners: Sequence[Module]) -> tuple[dict[str, Any], str, Any]:
    """Where the last trained parameter stands."""
    for owner in reversed(owners):
        for key, parameter in reversed(owner._parameters.items()):
            if parameter is not None and parameter.requires_grad:
                return owner._parameters, key, parameter
    return {}, "", None


def _managed(contents: Contents) -> list[ManagedParameter]:
    trainable = [(name, parameter) for name, parameter in contents.parameters if can_have_gradient(parameter)]
    return [
        ManagedParameter(index, name, parameter, id(parameter) in contents.sparse)
        for index, (name, parameter) in enumerate(trainable)
    ]
