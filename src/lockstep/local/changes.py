"""What has changed on a network since the last look, noticed in one cheap pass over it.

A pass costs a comparison of dictionaries in C for each module, and a few numbers for each tensor; it allocates
nothing that grows with the number of replicas. It tells apart what is cheap to carry over (an attribute, a hook, a
buffer that was replaced) from what makes replicas stale as a whole (other submodules or parameters, another dtype or
device).

Not noticed: an attribute that is replaced by an equal string or the like, and what happens inside objects that
replicas share with the network by reference anyway.
"""

import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from lockstep.local.module_copy import CACHE, HOOKS, OWN, SLOTS, attributes, parts_of

_flatten = chain.from_iterable
_version_of: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
_requires_grad: Callable[[Tensor], bool] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

# values in which nothing can happen, so that one that equals another does as well. (Numbers are not among them:
# 1 == 1.0 == True, and an int promotes to other dtypes than a float.)
_PLAIN = frozenset({type(None), bool, str, bytes, torch.device, torch.dtype, torch.Size})
# containers that are replaced, never changed
_FIXED = (tuple, frozenset, types.MethodType, functools.partial, weakref.ref)


class Structure:
    """Which modules, parameters and buffer names a network has, by identity."""

    def __init__(self, modules: list[Module]) -> None:
        python = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        self._scripted = [m for m in modules if isinstance(m, torch.jit.ScriptModule)]
        self._owners = [(vars(m), slot, vars(m)[slot]) for m in python for slot in SLOTS]
        filled = [(slot, d) for _, slot, d in self._owners if d]
        self._empty = [d for _, _, d in self._owners if not d]
        self._named = [d for _, d in filled]
        self._fixed = [d for slot, d in filled if slot != "_buffers"]
        self._buffers = [d for slot, d in filled if slot == "_buffers"]
        self._names = list(_flatten(self._named))
        self._values = list(_flatten(map(dict.values, self._fixed)))
        self._absent = [value is None for value in _flatten(map(dict.values, self._buffers))]
        self._training = [m.training for m in self._scripted]

    def changed(self) -> bool:
        """Whether anything was added, removed or replaced (a buffer replaced by another tensor does not count)."""
        return (
            any(self._empty)
            or list(_flatten(self._named)) != self._names
            or not all(map(operator.is_, self._values, _flatten(map(dict.values, self._fixed))))
            or [value is None for value in _flatten(map(dict.values, self._buffers))] != self._absent
            or [m.training for m in self._scripted] != self._training
        )

    def replaced(self) -> bool:
        """Whether a module's dictionary of slots is another object than it was, which :meth:`changed` cannot see."""
        return any(holder[slot] is not d for holder, slot, d in self._owners)


class Attributes:
    """The plain attributes and the hooks of a network's modules; :attr:`training`: whether any of them trains."""

    def __init__(self, modules: list[Module]) -> None:
        self._modules = [(i, m) for i, m in enumerate(modules) if not isinstance(m, torch.jit.ScriptModule)]
        self._now = [vars(m) for _, m in self._modules]
        self._take()

    def _take(self, *, hooks: bool = True) -> None:
        self._then = [dict(d) for d in self._now]
        self.training = any(d.get("training") for d in self._then)
        if hooks:
            self._registered = RemovableHandle.next_id
            found = [d[name] for d in self._now for name in HOOKS if name in d]
            self._no_hooks = [h for h in found if not h]
            self._hooks = [(h, dict(h)) for h in found if h]
        loose = [
            (number, name, value)
            for number, d in enumerate(self._now)
            for name, value in d.items()
            if name not in SLOTS and name not in OWN and name != CACHE and not _is_plain(value)
        ]
        self._holders = [self._now[number] for number, _, _ in loose]
        self._names = [name for _, name, _ in loose]
        self._values = [value for _, _, value in loose]
        self._contents = [(number, name, c, parts_of(c)) for number, name, v in loose for c in _containers(v)]

    def changed(self, *, quick: bool = False) -> bool:
        """Whether any attribute was set or deleted, any hook added or removed, since the last look.

        A quick look takes it that a hook is added by registering it.
        """
        try:
            if self._now != self._then:
                return True
        except (RuntimeError, ValueError):  # tensors and arrays have no truth value: they differ
            return True
        return (
            not all(map(operator.is_, map(dict.__getitem__, self._holders, self._names), self._values))
            or (not (quick and RemovableHandle.next_id == self._registered) and any(self._no_hooks))
            or any(hooks != before for hooks, before in self._hooks)
            or any(not identical(parts_of(c) or (), before or ()) for _, _, c, before in self._contents)
        )

    def take_changes(self) -> list[tuple[int, list[str]]]:
        """The module numbers and names of what has changed; from now on these count as seen."""
        hooks = {id(h): b for h, b in self._hooks}
        inside = {(i, n) for i, n, c, before in self._contents if not identical(parts_of(c) or (), before or ())}
        changes = []
        for number, ((index, module), now, then) in enumerate(zip(self._modules, self._now, self._then, strict=True)):
            names = [n for n in attributes(module) if (number, n) in inside or _differs(n, now, then, hooks)]
            names += [n for n in then if n not in now and n != CACHE]
            if names:
                changes.append((index, names))
        self._take()
        return changes

    def disregard(self) -> None:
        """Let attributes that have changed count as seen, but hooks as before."""
        self._take(hooks=False)


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, Module | type)


def _containers(value: Any, depth: int = 8) -> Iterator[Any]:
    """``value`` and what is nested in it, as far as something can be put in or taken out."""
    parts = parts_of(value) if depth else None
    if parts is None:
        return
    if not isinstance(value, _FIXED):
        yield value
    for part in parts:
        yield from _containers(part, depth - 1)


def _differs(name: str, now: dict[str, Any], then: dict[str, Any], hooks: dict[int, Any]) -> bool:
    value = now[name]
    if name not in then or value is not then[name]:
        return True
    return name in HOOKS and bool(value != hooks.get(id(value), {}))


_never = itertools.count()


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:  # inference tensors count no versions: take them as written each time
        return [next(_never) if tensor.is_inference() else tensor._version for tensor in tensors]


def addresses(tensors: list[Tensor]) -> list[int]:
    """Where the data of each tensor is in memory."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # a sparse tensor has no one address: only its identity and its version tell
        return [t.data_ptr() if t.layout == torch.strided else -1 for t in tensors]


def _layouts(tensors: list[Tensor]) -> tuple[list[int], list[Any]]:
    try:
        return list(map(Tensor.numel, tensors)), list(map(Tensor.stride, tensors))
    except RuntimeError:
        return [t.numel() for t in tensors], [t.stride() if t.layout == torch.strided else None for t in tensors]


def _kinds(tensors: list[Tensor]) -> list[tuple[torch.dtype, torch.device, torch.Size]]:
    return [(t.dtype, t.device, t.shape) for t in tensors]


def identical(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether both have the same objects, in the same order."""
    one, other = list(one), list(other)
    return len(one) == len(other) and all(map(operator.is_, one, other))


class Tensors:
    """Where the values of some tensors are, and whether they were written."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._versions = _versions(tensors)
        self._addresses, self._layouts, self._kinds = addresses(tensors), _layouts(tensors), _kinds(tensors)
        self._gradients = list(map(_requires_grad, tensors))

    def moved(self, *, quick: bool = False) -> bool:
        """Whether any tensor's data is elsewhere now: moved, retyped, resized, or replaced through ``.data``.

        A quick look takes it that other data is at another address.
        """
        if addresses(self.tensors) != self._addresses or not (quick or _layouts(self.tensors) == self._layouts):
            return True
        return not all(self._addresses) and self.retyped()  # no data has no address

    def retyped(self) -> bool:
        """Whether any tensor has another dtype, device or shape now."""
        return _kinds(self.tensors) != self._kinds

    def requirements_changed(self) -> bool:
        """Whether ``requires_grad`` of any tensor is another than at the last look."""
        gradients = list(map(_requires_grad, self.tensors))
        if gradients == self._gradients:
            return False
        self._gradients = gradients
        return True

    def written(self) -> list[int]:
        """The numbers of the tensors that were written since the last look, by their version counters."""
        versions = _versions(self.tensors)
        if versions == self._versions:
            return []
        then, self._versions = self._versions, versions
        return [i for i, (old, new) in enumerate(zip(then, versions, strict=True)) if old != new]
