"""The companion of a process group: a group of the same ranks, over which lockstep sends what is on the CPU.

The group that the program made is the program's. Gradients and buffers of modules on the CPU, agreements, statuses,
means, sharded steps and saves go over its companion instead, so that they never meet the program's own collectives.
Tensors on accelerators, and communication hooks, stay on the program's group.

A program may communicate inside of backward, as layers do that normalise over all ranks. Buckets leave while backward
runs, at moments that depend on the rank; so also a ``shm`` group has a companion.

The companion is a ``shm`` group, which uses Gloo only between hosts. If a rank cannot share memory, all ranks learn why
while they meet, and make a Gloo group. Groups without a store cannot have a companion.
"""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lockstep.distributed.comm.groups import shm_group_of
from lockstep.shm.gloo import make_gloo_group
from lockstep.shm.group import ProcessGroupShm
from lockstep.shm.rendezvous import PLACE_OF_RENDEZVOUS, CannotShareMemoryError, give_up

_WITHOUT_STORE = {"fake", "mpi", "threaded"}
"""Backends of the CPU whose ranks do not meet at a store."""
_PLACE, _PLACE_OF_SHM = "lockstep companion", "shm"
"""The part of the group's store in which the companion is made, and the part of that for ``shm``."""


def store_for_companion(group: Any, backends: str) -> Any | None:
    """Return the store at which the ranks of a group can make a companion, or None if the group has none.

    ``backends`` are the names of the group's backends.
    """
    of_cpu = next((name for name in backends.split(",") if name.startswith("cpu:")), backends).removeprefix("cpu:")
    if of_cpu in _WITHOUT_STORE or (of_cpu in ("gloo", "shm") and group.size() == 1):
        return None
    try:
        return dist.distributed_c10d._world.pg_map[group][1]
    except (KeyError, TypeError):  # a bare backend
        own = shm_group_of(group)
        return None if own is None else own._store


def make_companion(group: Any, store: Any, rank: int, global_ranks: Sequence[int], timeout: timedelta) -> Any:
    """Make the companion of a group, with its options if it is a ``shm`` group; every rank of it has to call it.

    Communicates a few keys of the store, and connects the ranks. Raises
    :class:`~lockstep.errors.CommunicationError` on all ranks if one of them does not come within the time-out.
    """
    store, size, own = PrefixStore(_PLACE, store), len(global_ranks), shm_group_of(group)
    options = None if own is None else own.options
    try:
        made = ProcessGroupShm(PrefixStore(_PLACE_OF_SHM, store), rank, size, timeout, options, global_ranks)
        if own is not None:
            own._ends_with(made)
        return made
    except CannotShareMemoryError as error:  # on every rank
        if rank == 0:
            text = "what lockstep sends between CPUs goes over a Gloo group of its own instead of shared memory: %s"
            logging.getLogger("lockstep").info(text, error)
        return make_gloo_group(PrefixStore("gloo", store), rank, size, timeout, None)


def give_up_companion(store: Any, size: int, why: str) -> None:
    """Let the ranks that still make the companion raise, which wait for a rank that does not come; any thread may call
    it."""
    give_up(PrefixStore(PLACE_OF_RENDEZVOUS, PrefixStore(_PLACE_OF_SHM, PrefixStore(_PLACE, store))), size, why)
