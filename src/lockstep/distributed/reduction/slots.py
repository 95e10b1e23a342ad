"""Notices other parameters or modules in a module's slots, by comparing references.

Whatever puts them there - an assigned checkpoint, a replaced layer, ``weight_norm``, a parametrization, a conversion
that makes new parameters, a write to ``module._parameters`` - ends as another object in a dictionary of some module.
The dictionaries are looked up each time: a list from which a module is deleted makes itself another one. That takes
about 50 ns for each parameter, and as much for each module; values do not count.
"""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, call, is_
from typing import Any
from weakref import ref

from torch.nn import Module

_END = object()
"""Stands behind the last entry, so that a list that has become longer or shorter differs there."""
_SLOTS = attrgetter("_parameters", "_modules")


class SlotWatch:
    """What stands in the parameter and module slots of ``modules``, to be compared with what stands there later."""

    retired = False
    """It is kept by a module until another one takes its place."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._modules = list(map(ref, modules))  # they lead to the reducer, which has this
        self._known = list(self._now())

    def changed(self) -> bool:
        """Whether anything else stands there now than at first."""
        try:
            return not all(map(is_, self._now(), self._known))
        except AttributeError:  # of None: a module is gone
            return True

    def _now(self) -> Iterable[Any]:
        dictionaries = chain.from_iterable(map(_SLOTS, map(call, self._modules)))
        return chain(chain.from_iterable(map(dict.values, dictionaries)), (_END,))
