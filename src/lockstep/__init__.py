"""lockstep: data-parallel training for PyTorch. Replicas stay equal, or every rank raises an error that says why not.

This module has the sixteen names that most programs need. Other names are in ``lockstep.local`` (one process, many
devices), ``lockstep.distributed`` (many processes), ``lockstep.loop`` (functions for a training loop),
``lockstep.shares`` (the same bits on any number of ranks), ``lockstep.sharding`` (optimizers whose state is divided
between the ranks), ``lockstep.checkpoints`` (saving and resuming) and ``lockstep.errors``.
"""

import importlib as _importlib
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING

from lockstep import shm as _shm
from lockstep._base.debug import print_rooms as _print_rooms
from lockstep._base.moved import where_it_is as _where_it_is

if _TYPE_CHECKING:
    from lockstep import distributed as distributed
    from lockstep import errors as errors
    from lockstep import local as local
    from lockstep import loop as loop
    from lockstep import sharding as sharding
    from lockstep import shares as shares
    from lockstep.checkpoints import ResumableSampler as ResumableSampler
    from lockstep.checkpoints import resume as resume
    from lockstep.checkpoints import save as save
    from lockstep.distributed import DistributedDataParallel as DistributedDataParallel
    from lockstep.distributed import replicate as replicate
    from lockstep.local import DataParallel as DataParallel
    from lockstep.loop import accumulate as accumulate
    from lockstep.loop import batches as batches
    from lockstep.loop import check_in_sync as check_in_sync
    from lockstep.loop import mean as mean
    from lockstep.loop import should_stop as should_stop
    from lockstep.session.session import Session as Session
    from lockstep.session.session import session as session
    from lockstep.session.watch import watch as watch
    from lockstep.sharding import full_state_dict as full_state_dict
    from lockstep.sharding import shard_optimizer as shard_optimizer

# Each is imported when it is first used: workers of a loader, and tools, import a program's file, not its training.
_PACKAGES = ("distributed", "errors", "local", "loop", "sharding", "shares")
_MORE_PACKAGES = ("checkpoints", "failures", "phases")  # which no program needs in its first lines
_WHERE = {
    "DataParallel": "lockstep.local",
    "DistributedDataParallel": "lockstep.distributed",
    "ResumableSampler": "lockstep.checkpoints",
    "Session": "lockstep.session.session",
    "accumulate": "lockstep.loop",
    "batches": "lockstep.loop",
    "check_in_sync": "lockstep.loop",
    "full_state_dict": "lockstep.sharding",
    "mean": "lockstep.loop",
    "replicate": "lockstep.distributed",
    "resume": "lockstep.checkpoints",
    "save": "lockstep.checkpoints",
    "session": "lockstep.session.session",
    "shard_optimizer": "lockstep.sharding",
    "should_stop": "lockstep.loop",
    "watch": "lockstep.session.watch",
}

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "ResumableSampler",
    "Session",
    "accumulate",
    "batches",
    "check_in_sync",
    "full_state_dict",
    "mean",
    "replicate",
    "resume",
    "save",
    "session",
    "shard_optimizer",
    "should_stop",
    "watch",
]

_shm.register()
_print_rooms(_os.environ.get("LOCKSTEP_DEBUG", ""))
# The name ``session`` is the function's: the package is imported here, so that no later import binds it to the name.
_importlib.import_module("lockstep.session")
del globals()["session"]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", *_PACKAGES])


def __getattr__(name: str) -> object:
    if name in _PACKAGES + _MORE_PACKAGES:
        return _importlib.import_module(f"lockstep.{name}")
    if name not in _WHERE:
        raise _where_it_is(__name__, name)
    found = globals()[name] = getattr(_importlib.import_module(_WHERE[name]), name)
    return found
