"""Finds, in one pass over a network, whether its structure has changed, and parameters that a forward has made.

docs/data_parallel.md ("How changes are noticed") has a table: what can change, how it is noticed, what that costs, and
what is then done. One change is noticed late: a write through ``.data`` while a forward of another thread runs reaches
the replicas at the next use.
"""

import operator
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn import Module

from lockstep.errors import NotReplicableError
from lockstep.local.contents import DictionaryContents, identical
from lockstep.local.module_copy import SLOTS, is_scripted

_flatten = chain.from_iterable


class StructureSnapshot:
    """A network's modules with their classes, its parameters, and the names of its buffers."""

    def __init__(self, modules: list[Module]) -> None:
        self._modules = modules
        self._types = list(map(type, modules))
        self._scripted = [m for m in modules if is_scripted(m)]
        owners = [(slot, vars(m)[slot]) for m in modules if not is_scripted(m) for slot in SLOTS]
        self._empty = [d for _, d in owners if not d]
        self._fixed = [d for slot, d in owners if d and slot != "_buffers"]
        self._contents = DictionaryContents(self._fixed)
        self._buffers = [d for slot, d in owners if d and slot == "_buffers"]
        self._buffer_state = self._of_buffers()
        self._script_state = [_script_slots(m) for m in self._scripted]

    def _of_buffers(self) -> tuple[list[int], list[str], list[bool]]:
        absent = [value is None for value in _flatten(map(dict.values, self._buffers))]
        return list(map(len, self._buffers)), list(_flatten(self._buffers)), absent

    def changed(self) -> bool:
        """Return True if anything was added, removed or replaced (other tensors as buffers do not count)."""
        return (
            not all(map(operator.is_, map(type, self._modules), self._types))
            or any(self._empty)
            or self._contents.differ(self._fixed)
            or self._of_buffers() != self._buffer_state
            or not all(map(_alike, map(_script_slots, self._scripted), self._script_state))
        )


def _script_slots(module: torch.jit.ScriptModule) -> tuple[list[Any], list[Any]]:
    """Return the names of a scripted module's slots, and its parameters."""
    parameters = list(module._parameters.items())
    buffers = [(name, tensor is None) for name, tensor in module._buffers.items()]
    return [[name for name, _ in parameters], buffers], [parameter for _, parameter in parameters]


def _alike(one: tuple[list[Any], list[Any]], other: tuple[list[Any], list[Any]]) -> bool:
    return one[0] == other[0] and identical(one[1], other[1])


class ReplicaSlots:
    """The parameters and submodules that all replicas have, to refuse parameters that a forward makes.

    A module may make a parameter at its first forward (``if self.weight is None: self.weight = Parameter(...)``). In
    replicas, each would get a parameter of its own with other values, and only the network's would ever be trained,
    with the gradient of its own rows. That is refused by name once the forward has ended. By then the network has its
    parameter, so the next use is right. ``replicas`` has the modules of each, the root first.
    """

    def __init__(self, replicas: Sequence[Sequence[Module]]) -> None:
        self._roots = [modules[0] for modules in replicas]
        python = [[m for m in modules if not is_scripted(m)] for modules in replicas]
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
