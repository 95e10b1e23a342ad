"""The ``shm`` backend of ``torch.distributed``: collectives through shared memory among the ranks of a host.

``import lockstep`` registers it; ``torch.distributed.init_process_group("shm")`` uses it. From PyTorch 2.14 on no
import is needed: an entry point of the package leads PyTorch to :func:`register`.
"""

import importlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from lockstep.shm.backend import BackendShm
    from lockstep.shm.group import ProcessGroupShm as ProcessGroupShm
    from lockstep.shm.runtime import ShmOptions as ShmOptions

BACKEND = "shm"


def register() -> None:
    """Register the backend with ``torch.distributed``, unless it is registered already."""
    if dist.is_available() and not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(given: Any, options: "ShmOptions | None") -> "ProcessGroupShm | BackendShm":
    from lockstep.shm.backend import BackendShm, is_one_of_several
    from lockstep.shm.group import ProcessGroupShm

    group = ProcessGroupShm(
        given.store, given.group_rank, given.group_size, given.timeout, options, given.global_ranks_in_group
    )
    return BackendShm(group) if is_one_of_several(getattr(given, "process_group", None)) else group


_WHERE = {"ProcessGroupShm": "group", "ShmOptions": "runtime"}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
