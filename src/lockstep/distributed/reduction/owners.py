"""Which reducer synchronises the gradient of a parameter, and what keeps that reducer alive.

The reducer that has claimed a parameter last synchronises it. Gradients of a part of a network are synchronised also
when the wrapper around it, or the whole network, has been dropped. So each module holds the reducer of its parameters,
which does not lead back to the module. An entry among the module's attributes would be seen and copied; but one of the
dictionaries that every module has, empty for most, can carry an object without showing it. It pickles and copies as the
plain dictionary.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import ref

from torch.nn import Module, Parameter


class Owner(Protocol):
    """A reducer, as what chooses parameters knows it."""

    retired: bool
    """True if another replication has taken over all of its parameters."""

    def manages(self, parameter: Parameter) -> bool:
        """Return True if it synchronises a parameter, or will when the ranks have agreed on it."""

    def has_in_module(self, parameter: Parameter) -> bool:
        """Return True if its module has the parameter on this rank."""

    def is_added(self, parameter: Parameter) -> bool:
        """Return True if the parameter is new on this rank, and the ranks have not agreed on it yet."""

    def present(self) -> list[Parameter]:
        """Return the parameters that its module still has."""

    def hold_hooks(self) -> None:
        """Note that a parameter has users' hooks, to be run when its gradient is reduced."""

    def gradient_triggered(self, index: int) -> None:
        """Autograd has accumulated the gradient of the parameter with that number, which has a trigger."""

    def retire(self) -> None:
        """Another replication has taken over all parameters."""


_owners: dict[int, "ref[Owner]"] = {}
"""By the identity of a parameter; that is its own for as long as the reducer lives, which holds it. A weak reference to
the parameter itself would keep it from being swapped (``torch.utils.swap_tensors``)."""
_lock = threading.Lock()
_generation = 0


def claim(parameters: Iterable[Parameter], owner: Owner) -> None:
    """From now on ``owner`` synchronises the gradients of these parameters, and no other reducer does."""
    global _generation
    with _lock:
        for number in [number for number, known in _owners.items() if known() is None]:
            del _owners[number]
        link = ref(owner)
        for parameter in parameters:
            _owners[id(parameter)] = link
        _generation += 1


def owner_of(parameter: Parameter) -> Owner | None:
    """Return what synchronises the gradient of a parameter, if anything does."""
    link = _owners.get(id(parameter))
    owner = None if link is None else link()
    return owner if owner is not None and owner.manages(parameter) else None


def generation() -> int:
    """Return a number that is another one after each :func:`claim`."""
    return _generation


_ATTRIBUTE = "_load_state_dict_post_hooks"


class _KeepingDict(OrderedDict[int, Any]):
    """A module's hooks as before, and the objects that it keeps."""

    def __init__(self, entries: Any = ()) -> None:
        super().__init__(entries)
        self.kept: list[Any] = []

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


def attach_to_module(module: Module, thing: Any, instead_of: Any = None) -> None:
    """Let ``thing`` live for as long as ``module``, ``instead_of`` another; one that has been retired is let go."""
    hooks = vars(module)[_ATTRIBUTE]
    if not isinstance(hooks, _KeepingDict):
        hooks = _KeepingDict(hooks)
        vars(module)[_ATTRIBUTE] = hooks
    hooks.kept = [each for each in hooks.kept if each not in (thing, instead_of) and not each.retired]
    hooks.kept.append(thing)
