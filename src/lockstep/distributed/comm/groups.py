"""Properties of a process group: its ranks, its backends, the device of its control tensors, its time-out.

A group is a result of ``init_process_group`` or ``new_group``, a dimension of a ``DeviceMesh``, or a bare backend such
as ``dist.ProcessGroupGloo(...)``.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from lockstep.errors import CommunicationError, OptionError
from lockstep.shm.backend import BackendShm
from lockstep.shm.group import ProcessGroupShm

Group = Any
"""A ``dist.ProcessGroup`` or a bare backend: both have ``rank()`` and ``size()``."""


def control_device(group: Group) -> torch.device:
    """Return the device of small control tensors: the CPU if the group can send them, else the current accelerator."""
    backends = backends_of(group)
    if backends in ("gloo", "fake", "mpi", "shm") or "cpu:" in backends:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # None in a CUDA build without a device
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def companion_timeout(group: Group) -> timedelta:
    """Return the time-out of a group's companion: the shortest one of its backends, less a tenth if that is NCCL's or
    another of an accelerator.

    After their time-out these end the process, without the names of ranks. Collectives on the device are begun before
    the report is waited for, so without the tenth they would be over first.
    """
    own, accelerator = shm_group_of(group), torch.accelerator.current_accelerator(check_available=True)
    found = [] if own is None else [timedelta(seconds=own._timeout)]
    for device in (torch.device("cpu"), accelerator):
        try:
            backend = group._get_backend(device)
            limit, waits_on_host = backend.options._timeout, backend.name() in ("gloo", "mpi")
        except (RuntimeError, AttributeError, TypeError):  # there is none for the device
            continue
        if isinstance(limit, timedelta):
            found.append(limit if waits_on_host else 0.9 * limit)
    return min(found, default=timedelta(minutes=30))


def shm_group_of(group: Group) -> ProcessGroupShm | None:
    """Return the ``shm`` group that sends a group's tensors on the CPU, or None."""
    try:
        found = group._get_backend(torch.device("cpu"))
    except (RuntimeError, AttributeError, TypeError):  # a bare backend of PyTorch, or there is none for the CPU
        return None
    found = found.group if isinstance(found, BackendShm) else found
    return found if isinstance(found, ProcessGroupShm) else None


def backends_of(group: Group) -> str:
    """Return the names of a group's backends: one, or pairs such as ``cpu:gloo,cuda:nccl``."""
    try:
        return str(dist.get_backend_config(group))
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError):  # a bare backend
        return str(group.name())


def resolve_group(group: Group | None) -> Group | None:
    """Return ``group``, or the default group, or None if there is none yet.

    Raises :class:`CommunicationError` on a rank outside of the group, and :class:`OptionError` for an object that is
    not a group.
    """
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise CommunicationError(
            "this process is not in the process group that it was given: dist.new_group() returns "
            "GroupMember.NON_GROUP_MEMBER on ranks that it leaves out. Make this call on the ranks of the group alone"
        )
    if not isinstance(group, dist.ProcessGroup | Backend):
        raise OptionError(f"expected a process group, got {type(group).__name__}; leave it out for the default group")
    return group


def needed_group(group: Group | None) -> Group:
    """Return what :func:`resolve_group` does; raise :class:`CommunicationError` if there is no group yet."""
    found = resolve_group(group)
    if found is None:
        raise CommunicationError(
            "there is no process group yet: begin one by `with lockstep.session() as run:`, or call "
            "torch.distributed.init_process_group(), before this"
        )
    return found


def global_ranks(group: Group) -> Sequence[int]:
    """Return the group's ranks, in order, as ranks of the default group, which is how messages name them.

    A group unknown to the default group, such as a bare backend, has its own numbers.
    """
    return registered_ranks(group) or range(group.size())


def is_registered(group: Group) -> bool:
    """Return True if the default group knows the group."""
    return registered_ranks(group) is not None


def registered_ranks(group: Group) -> list[int] | None:
    """Return the group's ranks as ranks of the default group; None if that does not know the group."""
    if not dist.is_initialized():
        return None
    try:
        return dist.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError):
        return None
