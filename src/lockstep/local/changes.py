"""What has changed on a network since the last look, noticed in one cheap pass over it.

A pass costs a comparison of dictionaries in C for each module, and a few numbers for each tensor; it allocates
nothing that grows with the number of replicas. It tells apart what is cheap to carry over (an attribute, a hook, a
buffer that was replaced) from what makes replicas stale as a whole (other submodules or parameters, another dtype or
device).

Not noticed: a plain attribute that is replaced by an equal one of an immutable type (there is no difference to see),
and what happens inside objects that replicas share with the network by reference anyway.
"""

import itertools
import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.local.module_copy import HOOKS, OWN, SLOTS, attributes

_flatten = chain.from_iterable
_version_of: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
_requires_grad: Callable[[Tensor], bool] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

# values that == tells apart as well as `is` does: nothing can happen inside them
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    torch.device,
    torch.dtype,
    torch.Size,
    Module,
)


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

    def _take(self) -> None:
        self._then = [dict(d) for d in self._now]
        self.training = any(d.get("training") for d in self._then)
        hooks = [d[name] for d in self._now for name in HOOKS if name in d]
        self._no_hooks = [h for h in hooks if not h]
        self._hooks = [(h, dict(h)) for h in hooks if h]
        loose = [
            (d, name, value)
            for d in self._now
            for name, value in d.items()
            if name not in SLOTS and name not in OWN and not _is_plain(value)
        ]
        self._loose = loose
        self._contents = [(v, _contents(v)) for _, _, v in loose if isinstance(v, list | dict | set)]

    def changed(self) -> bool:
        """Whether any attribute was set or deleted, any hook added or removed, since the last look."""
        try:
            if self._now != self._then:
                return True
        except (RuntimeError, ValueError):  # tensors and arrays have no truth value: they differ
            return True
        return (
            any(self._no_hooks)
            or any(hooks != before for hooks, before in self._hooks)
            or any(d[name] is not value for d, name, value in self._loose)
            or any(not _identical(_contents(value), before) for value, before in self._contents)
        )

    def take_changes(self) -> list[tuple[int, list[str]]]:
        """The module numbers and names of what has changed; from now on these count as seen."""
        before = self._then
        hooks = {id(h): b for h, b in self._hooks}
        contents = {id(v): b for v, b in self._contents}
        changes = []
        for (index, module), now, then in zip(self._modules, self._now, before, strict=True):
            names = [n for n in attributes(module) if _differs(n, now, then, hooks, contents)]
            names += [n for n in then if n not in now]
            if names:
                changes.append((index, names))
        self._take()
        return changes


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _differs(
    name: str,
    now: dict[str, Any],
    then: dict[str, Any],
    hooks: dict[int, Any],
    contents: dict[int, list[Any]],
) -> bool:
    value = now[name]
    if name not in then or value is not then[name]:
        return True
    if name in HOOKS:
        return bool(value != hooks.get(id(value), {}))
    return id(value) in contents and not _identical(_contents(value), contents[id(value)])


_never = itertools.count()


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:  # inference tensors count no versions: take them as written each time
        return [next(_never) if tensor.is_inference() else tensor._version for tensor in tensors]


def _contents(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _identical(one: Iterable[Any], other: Iterable[Any]) -> bool:
    one, other = list(one), list(other)
    return len(one) == len(other) and all(map(operator.is_, one, other))


class Tensors:
    """Where the values of some tensors are, and whether they were written."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._versions = _versions(tensors)
        self._places = list(map(Tensor.data_ptr, tensors))
        self._kinds = [(t.dtype, t.device, t.shape) for t in tensors]
        self._gradients = list(map(_requires_grad, tensors))

    def changed(self, tensors: list[Tensor]) -> bool:
        """Whether ``tensors`` are others than these, or were moved or written."""
        return not _identical(tensors, self.tensors) or self.moved() or bool(self.written())

    def moved(self) -> bool:
        """Whether any tensor's data is elsewhere now: moved, retyped, resized, or replaced through ``.data``."""
        if list(map(Tensor.data_ptr, self.tensors)) != self._places:
            return True
        return not all(self._places) and [(t.dtype, t.device, t.shape) for t in self.tensors] != self._kinds

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
