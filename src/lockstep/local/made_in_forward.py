"""Refuses parameters that a forward makes, since only one replica would have them.

A module may make a parameter at its first forward (``if self.weight is None: self.weight = Parameter(...)``). In
replicas, each would get a parameter of its own with other values, and only the network's would ever be trained, with
the gradient of its own rows. That is refused by name once the forward has ended. By then the network has its parameter,
so the next use is right.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch.nn import Module

from lockstep.errors import NotReplicableError
from lockstep.local.contents import identical

_flatten = chain.from_iterable


class ReplicaSlots:
    """The parameters and submodules that all replicas have; ``replicas`` has the modules of each, the root first."""

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
