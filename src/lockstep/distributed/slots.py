"""Notices, at the cost of comparing references, that other parameters or modules stand in a module's slots.

Whatever puts them there - an assigned checkpoint, a replaced layer, ``weight_norm``, a parametrization, a conversion
that makes new parameters, a write to ``module._parameters`` - ends as another object in a dictionary of some module.
Looking into all dictionaries takes about 50 ns for each parameter; values do not count.
"""

from collections.abc import Iterable
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch.nn import Module

_SLOTS = ("_parameters", "_modules")
_END = object()
"""Stands behind the last entry, so that a list that has become longer or shorter differs there."""


class SlotWatch:
    """What stands in the parameter and module slots of ``modules``, to be compared with what stands there later."""

    def __init__(self, modules: Iterable[Module]) -> None:
        watched = list(modules)
        self._owners = [vars(module) for module in watched]
        self._known = [vars(module)[name] for name in _SLOTS for module in watched]
        self._parameters = _Slots([module._parameters for module in watched])
        self._children = _Slots([module._modules for module in watched if module._modules])
        self._leaves: list[dict[str, Any]] = [module._modules for module in watched if not module._modules]

    def changed(self) -> bool:
        """Whether anything else stands there now than at first."""
        now = chain.from_iterable(map(itemgetter(name), self._owners) for name in _SLOTS)
        replaced = not all(map(is_, now, self._known))  # a list from which a module is deleted makes itself another
        return replaced or self._parameters.changed() or self._children.changed() or any(self._leaves)


class _Slots:
    """The entries of some dictionaries."""

    def __init__(self, dictionaries: list[dict[str, Any]]) -> None:
        self._dictionaries = dictionaries
        self._known = [*self._now(), _END]

    def changed(self) -> bool:
        return not all(map(is_, chain(self._now(), (_END,)), self._known))

    def _now(self) -> Iterable[Any]:
        return chain.from_iterable(map(dict.values, self._dictionaries))
