"""Objects that live for as long as a module does, and that its copies and pickles do not have.

Gradients of a part of a network are to be synchronised also when the wrapper around it, or the whole, has been dropped.
So each module holds what synchronises its parameters, which does not lead back to it. An entry among its attributes
would be seen and copied; but one of the dictionaries that every module has, empty for most, can carry an object
without showing it. It pickles and copies as the plain dictionary.
"""

from collections import OrderedDict
from typing import Any

from torch.nn import Module

_ATTRIBUTE = "_load_state_dict_post_hooks"


class _KeepingDict(OrderedDict[int, Any]):
    """A module's hooks as before, and the objects that it keeps."""

    def __init__(self, entries: Any = ()) -> None:
        super().__init__(entries)
        self.kept: list[Any] = []

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


def keep(module: Module, thing: Any, instead_of: Any = None) -> None:
    """Let ``thing`` live for as long as ``module``, ``instead_of`` another; one that has been retired is let go."""
    hooks = vars(module)[_ATTRIBUTE]
    if not isinstance(hooks, _KeepingDict):
        hooks = _KeepingDict(hooks)
        vars(module)[_ATTRIBUTE] = hooks
    hooks.kept = [each for each in hooks.kept if each not in (thing, instead_of) and not each.retired]
    hooks.kept.append(thing)
