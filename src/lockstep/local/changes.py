"""Finds, in one pass over a network, what has changed since the last pass.

docs/data_parallel.md ("How changes are noticed") has a table: what can change, how it is noticed, what that costs, and
what is then done. It also lists the changes that are not noticed. One more is noticed late: a write through ``.data``
while a forward of another thread runs reaches the replicas at the next use.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn import Module

from lockstep.errors import NotReplicableError
from lockstep.local.contents import ATOMS, Contents, Inside, changed_names, differing_dicts, identical
from lockstep.local.module_copy import CACHE, HOOKS, OWN, SLOTS, attributes, scripted_names

_flatten = chain.from_iterable
_ATOM_TYPES = frozenset(ATOMS)
# slots are compared on their own, and each replica keeps its own hooks: neither counts as set by a forward
_OF_NO_FORWARD = {*SLOTS, *OWN, CACHE, "_is_full_backward_hook"}


class StructureSnapshot:
    """A network's modules with their classes, its parameters, and the names of its buffers."""

    def __init__(self, modules: list[Module]) -> None:
        self._modules = modules
        self._types = list(map(type, modules))
        self._scripted = [m for m in modules if isinstance(m, torch.jit.ScriptModule)]
        self._python = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        self._owners = [(m, slot, vars(m)[slot]) for m in self._python for slot in SLOTS]
        self._fixed = Contents(d for _, slot, d in self._owners if slot != "_buffers")
        self._buffers = [d for _, slot, d in self._owners if slot == "_buffers"]
        self._buffer_state = self._of_buffers()
        self._script_state = [_script_slots(m) for m in self._scripted]

    def _of_buffers(self) -> tuple[list[int], list[str], list[bool]]:
        absent = [value is None for value in _flatten(map(dict.values, self._buffers))]
        return list(map(len, self._buffers)), list(_flatten(self._buffers)), absent

    def changed(self) -> bool:
        """Return True if anything was added, removed or replaced (other tensors as buffers do not count)."""
        return (
            not all(map(operator.is_, map(type, self._modules), self._types))
            or self._fixed.changed()
            or self._of_buffers() != self._buffer_state
            or not all(map(_alike, map(_script_slots, self._scripted), self._script_state))
        )

    def replaced(self) -> bool:
        """Return True if a module has another dictionary of slots than before, which :meth:`changed` cannot see."""
        return any(vars(module).get(slot) is not d for module, slot, d in self._owners)


def _script_slots(module: torch.jit.ScriptModule) -> tuple[list[Any], list[Any]]:
    """Return the names of a scripted module's slots, and its parameters."""
    parameters = list(module._parameters.items())
    buffers = [(name, tensor is None) for name, tensor in module._buffers.items()]
    return [[name for name, _ in parameters], buffers], [parameter for _, parameter in parameters]


def _alike(one: tuple[list[Any], list[Any]], other: tuple[list[Any], list[Any]]) -> bool:
    return one[0] == other[0] and identical(one[1], other[1])


class _Seen:
    """The state of one module at the last look."""

    def __init__(self, module: Module) -> None:
        self.own = dict(vars(module))
        self.inside: dict[str, Inside] = {}
        self._left_out = {*vars(module), *OWN, *SLOTS, CACHE} - {*attributes(module)}
        self.scripted = isinstance(module, torch.jit.ScriptModule)
        self._script = scripted_names(module)
        self._script_values = _script_values(module, self._script)
        self.look_at_hooks()

    def look_at_hooks(self) -> None:
        """Record the hooks as they are now."""
        self.hooks = {name: self.own[name] for name in HOOKS if name in self.own and name not in self._left_out}
        self._contents = {name: Contents([table]) for name, table in self.hooks.items()}

    def differing(self, module: Module) -> list[str]:
        """Return the names of attributes that were set, deleted or changed inside, except for slots."""
        now = vars(module)
        names = changed_names(now, self.own)
        names += [n for n, hooks in self._contents.items() if n not in names and hooks.changed()]
        names += [n for n, inside in self.inside.items() if n not in names and inside.changed()]
        if self.scripted:  # it stores its methods at their first call
            names = [n for n in names if not isinstance(now.get(n), torch._C.ScriptMethod)]
        return [n for n in names if n not in self._left_out] + self.differing_in_script(module)

    def differing_in_script(self, module: Module) -> list[str]:
        """Return the names of changed attributes of a scripted module's script."""
        now = _script_values(module, self._script)
        return [n for n, a, b in zip(self._script, now, self._script_values, strict=True) if not _same(a, b)]

    def disregard(self, module: Module) -> None:
        """Record the whole ``__dict__`` as seen; call if only attributes that are left out differ."""
        self.own.clear()
        self.own.update(vars(module))

    def take(self, module: Module, names: Iterable[str]) -> None:
        """Record the present values of attributes as seen."""
        for name in names:
            self.inside.pop(name, None)
            if name in vars(module):
                self.own[name] = vars(module)[name]
            else:
                self.own.pop(name, None)
        if self._script:
            self._script_values = _script_values(module, self._script)


def _script_values(module: Any, names: list[str]) -> list[Any]:
    return [module._c.getattr(name) for name in names]


def _same(one: Any, other: Any) -> bool:
    """Return True if two values of a script are the same; they are new objects each time."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return _same([*one.items()], [*other.items()])
    return one is other or (type(one) in _ATOM_TYPES and (one == other or (one != one and other != other)))


class AttributeSnapshot:
    """The attributes and hooks of a network's modules, and the parts inside them, by identity."""

    def __init__(self, modules: list[Module]) -> None:
        self._modules = modules
        self._known: set[int] | None = None
        self._seen = [_Seen(module) for module in modules]
        self._dicts = list(map(vars, modules))
        self._own = [seen.own for seen in self._seen]
        self._scripted = [(m, s) for m, s in zip(modules, self._seen, strict=True) if s.scripted]
        for module, seen in zip(modules, self._seen, strict=True):
            self._open(module, seen, attributes(module))
        self._gather()
        self._gather_hooks()

    def changed(self) -> bool:
        """Return True if any attribute was set or deleted, or any hook added or removed, since the last look."""
        return self._replaced() or bool(differing_dicts(self._dicts, self._own)) or self._changed_inside()

    def _replaced(self) -> bool:
        """Return True if any module has another dictionary of attributes."""
        return not all(map(operator.is_, map(vars, self._modules), self._dicts))

    def _changed_inside(self) -> bool:
        """Return True if anything changed inside attributes: tables of hooks, containers, scripts."""
        return (
            self._hooks.changed()
            or any(inside.changed() for inside in self._insides)
            or any(seen.differing_in_script(module) for module, seen in self._scripted)
        )

    def take_changes(self, *, hooks: bool = True) -> list[tuple[int, list[str]]]:
        """Return the numbers of changed modules with the names of changed attributes; these count as seen afterwards.

        Without ``hooks``, changed hooks are not returned, and still count as changed.
        """
        changes = self._differences()
        if not hooks:
            changes = [(i, kept) for i, names in changes if (kept := [n for n in names if n not in OWN])]
        for index, names in changes:
            self._seen[index].take(self._modules[index], names)
            self._open(self._modules[index], self._seen[index], names)
        if changes:
            self._gather()
        if changes and hooks:
            for index, _ in changes:
                self._seen[index].look_at_hooks()
            self._gather_hooks()
        return changes

    @property
    def leading(self) -> set[tuple[int, str]]:
        """The module numbers and names of attributes that lead to different objects in each replica."""
        return {(i, name) for i, seen in enumerate(self._seen) for name, inside in seen.inside.items() if inside.leads}

    def holding(self, tensors: set[int]) -> list[tuple[int, list[str]]]:
        """Return the module numbers and names of attributes that contain any of the tensors, given their ids."""
        found = [
            (i, [name for name, inside in seen.inside.items() if inside.tensors & tensors])
            for i, seen in enumerate(self._seen)
            if seen.inside
        ]
        return [(i, names) for i, names in found if names]

    def _differences(self) -> list[tuple[int, list[str]]]:
        written = differing_dicts(self._dicts, self._own)
        everywhere = self._replaced() or self._changed_inside()
        numbers = range(len(self._modules)) if everywhere else written
        changes = {i: names for i in numbers if (names := self._seen[i].differing(self._modules[i]))}
        for i in written:
            if i not in changes:
                self._seen[i].disregard(self._modules[i])
        return list(changes.items())

    def _open(self, module: Module, seen: _Seen, names: Iterable[str]) -> None:
        """Look for parts inside those of the attributes that may have any."""
        for name in names:
            value = seen.own.get(name)
            if type(value) not in _ATOM_TYPES and name not in OWN and (inside := Inside(value, self._ids())):
                seen.inside[name] = inside

    def _ids(self) -> set[int]:
        """Return the ids of all modules, parameters and buffers."""
        if self._known is None:
            slots = (getattr(m, kind).values() for m in self._modules for kind in ("_parameters", "_buffers"))
            self._known = {*map(id, self._modules), *map(id, _flatten(slots))} - {id(None)}
        return self._known

    def _gather(self) -> None:
        """Collect all objects except hooks that :meth:`changed` compares."""
        self._known = None
        if self._replaced():
            self._dicts = list(map(vars, self._modules))
        self._insides = [inside for seen in self._seen for inside in seen.inside.values()]

    def _gather_hooks(self) -> None:
        self._hooks = Contents(table for seen in self._seen for table in seen.hooks.values())


class CopyAttributes:
    """The attributes of the copies' modules except for hooks, to find those that a forward has set on one copy.

    ``copies`` has the modules of each copy.
    """

    def __init__(self, copies: Sequence[Sequence[Module]]) -> None:
        self._width = len(copies[0]) if copies else 1
        modules = _flatten(copies)
        self._now = [{} if isinstance(m, torch.jit.ScriptModule) else vars(m) for m in modules]
        self._then = list(map(dict, self._now))

    def take_changes(self) -> list[tuple[int, list[tuple[int, list[str]]]]]:
        """Return the attributes that were set or deleted since the last look; from now on they count as seen.

        For each copy with changes: its number, and the numbers of modules with the names of their changed attributes.
        """
        found: dict[int, list[tuple[int, list[str]]]] = defaultdict(list)
        for number in differing_dicts(self._now, self._then):
            copy, index = divmod(number, self._width)
            names = changed_names(self._now[number], self._then[number])
            if names := [name for name in names if name not in _OF_NO_FORWARD]:
                found[copy].append((index, names))
            self._then[number] = dict(self._now[number])
        return list(found.items())

    def look_again(self, copy: int, indices: Iterable[int]) -> None:
        """Record the present attributes of some modules of a copy as seen."""
        for index in indices:
            number = copy * self._width + index
            self._then[number] = dict(self._now[number])


class ReplicaSlots:
    """The parameters and submodules that all replicas have, to refuse parameters that a forward makes.

    A module may make a parameter at its first forward (``if self.weight is None: self.weight = Parameter(...)``). In
    replicas, each would get a parameter of its own with other values, and only the network's would ever be trained,
    with the gradient of its own rows. That is refused by name once the forward has ended. By then the network has its
    parameter, so the next use is right. ``replicas`` has the modules of each, the root first.
    """

    def __init__(self, replicas: Sequence[Sequence[Module]]) -> None:
        self._roots = [modules[0] for modules in replicas]
        python = [[m for m in modules if not isinstance(m, torch.jit.ScriptModule)] for modules in replicas]
        self._slots = [vars(m)[kind] for modules in python for m in modules for kind in ("_parameters", "_modules")]
        self.look()

    def look(self) -> None:
        """Record the present contents of the slots as legitimate."""
        self._values = list(_flatten(map(dict.values, self._slots)))

    def forget(self) -> None:
        """Drop all references to tensors until the next :meth:`look`."""
        self._values = []

    def check(self) -> None:
        """Raise :class:`~lockstep.errors.NotReplicableError` if forward has given a replica a parameter of its own.

        Two cases are allowed: a parameter that was in another slot already (forward ties weights), and, where no
        gradient is wanted, a parameter that replaces another.
        """
        values = list(_flatten(map(dict.values, self._slots)))
        if identical(values, self._values):
            return
        known = {id(value) for value in self._values}
        replaced = not torch.is_grad_enabled() and _filled(values) == _filled(self._values)
        made = [] if replaced else list(self._unknown(known))
        self.look()
        if made:
            names = ", ".join(f"{name} in replica {number}" for number, name in made)
            raise NotReplicableError(
                f"forward has made parameters that only one replica has: {names}. The replicas' values differ, and the "
                "gradients of all but the first would be lost. Make parameters before the module is replicated: in "
                "__init__, or by one call of the module itself. (What the first replica made is the module's now.)"
            )

    def _unknown(self, known: set[int]) -> Iterator[tuple[int, str]]:
        for number, root in enumerate(self._roots):
            for name, parameter in root.named_parameters():
                if id(parameter) not in known:
                    yield number, name


def _filled(values: Sequence[object]) -> list[bool]:
    return [value is not None for value in values]
