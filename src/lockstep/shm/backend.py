"""The ``shm`` backend for the CPU of a group that has another backend for accelerators, ``"cpu:shm,cuda:nccl"``.

From PyTorch 2.15 on: before, only whole process groups can be written in Python.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from lockstep.shm.gloo import CollectivesOfGloo, MessageWork
from lockstep.shm.group import ProcessGroupShm
from lockstep.shm.many_hosts import Algorithm
from lockstep.shm.native import NativeCollectives
from lockstep.shm.works import ShmWork

_Backend: Any = Backend  # its type has overloads that no method here could match


class BackendShm(NativeCollectives, CollectivesOfGloo, _Backend):
    """The collectives of a :class:`ProcessGroupShm`, as a backend of PyTorch's own process group."""

    def __init__(self, group: ProcessGroupShm) -> None:
        _Backend.__init__(self, group.rank(), group.size())
        self.group = group
        """The group that it is a backend of."""
        self._global_ranks = group._global_ranks

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "shm"

    name = getBackendName

    @property
    def options(self) -> Any:
        """The options that the group was made with."""
        return self.group.options

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time that a collective may take."""
        self.group.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group: collectives that wait fail, here and on other ranks."""
        self.group.shutdown()

    def abort(self) -> None:
        """End the group on every rank, at once."""
        self.group.abort()

    def _begin(self, what: str, run: Callable[[Algorithm], object], outputs: list[Tensor], opts: Any) -> ShmWork:
        return self.group._begin(what, run, outputs, opts)

    def _message(self, begin: Callable[[Any], Any], tensors: list[Tensor], what: str, other: int | None) -> MessageWork:
        return self.group._message(begin, tensors, what, other)

    def _gloo_group(self) -> Any:
        return self.group._gloo_group()


def is_one_of_several(group: dist.ProcessGroup | None) -> bool:
    """Return True if a group that PyTorch is making has backends for several kinds of devices.

    PyTorch does not say it: but such a group is called after the backend of its accelerator.
    """
    return group is not None and group.name() not in ("custom", "undefined")
