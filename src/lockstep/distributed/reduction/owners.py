"""Which reducer synchronises the gradient of a parameter: the one that claimed it last."""

import threading
from collections.abc import Iterable
from typing import Protocol
from weakref import ref

from torch.nn import Parameter


class Owner(Protocol):
    """A reducer, as what chooses parameters knows it."""

    retired: bool
    """True if another replication has taken over all of its parameters."""

    def manages(self, parameter: Parameter) -> bool:
        """Return True if it synchronises a parameter, or will when the ranks have agreed on it."""

    def has_in_module(self, parameter: Parameter) -> bool:
        """Return True if its module has the parameter on this rank."""

    def is_newcomer(self, parameter: Parameter) -> bool:
        """Return True if the parameter is new on this rank, and the ranks have not agreed on it yet."""

    def present(self) -> list[Parameter]:
        """Return the parameters that its module still has."""

    def hold_hooks(self) -> None:
        """A parameter has users' hooks, to be run when its gradient is reduced."""

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
