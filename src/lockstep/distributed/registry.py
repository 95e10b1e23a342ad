"""Which module has which replication. Modules do not carry it, so that their copies and pickles are plain."""

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.nn import Module

from lockstep.errors import NotReplicableError

if TYPE_CHECKING:
    from lockstep.distributed.replication import Replication

_replications: "weakref.WeakKeyDictionary[Module, weakref.ref[Replication]]" = weakref.WeakKeyDictionary()


def register(module: Module, replication: "Replication") -> None:
    """Remember the replication of a module or wrapper, which itself keeps it alive: it may lead back to the module."""
    _replications[module] = weakref.ref(replication)


def find(module: Module) -> "Replication | None":
    """The replication of a module, of a wrapper, or of what ``torch.compile`` made of one; None if it has none."""
    link = _replications.get(module) or _replications.get(getattr(module, "_orig_mod", module))
    return None if link is None else link()


def get(module: Module, caller: str) -> "Replication":
    """The replication of a module or a wrapper; raises :class:`NotReplicableError` if it has none."""
    found = find(module)
    if found is None:
        raise NotReplicableError(
            f"{caller}() got a {type(module).__name__} that is not replicated; pass the module that went through "
            "replicate(), or the DistributedDataParallel around it"
        )
    return found


def replicated_children(module: Module) -> Iterator[Module]:
    """The modules below ``module`` that have a replication of their own."""
    return (child for child in module.modules() if child is not module and child in _replications)
