"""A part of a store for the processes that have been started together, where others have used the store before.

``torchrun`` hosts one store for all its restarts, so that what killed processes have written is still there, and tells
nobody how often it has started which ranks: hosts count their restarts each for itself. So each process draws a number
of its own, and rank 0 gives a token, the name of a new part of the store, to each number that it finds. A token that is
given to a process that has ended is never read.
"""

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from lockstep.errors import CommunicationError
from lockstep.store import BoundedStore, StoreLostError, own_connection

LOOK_SECONDS = 0.02
"""Seconds between two looks of rank 0 for processes that have come."""


@contextlib.contextmanager
def part_of_incarnation(store: Any, rank: int, world: int, timeout: float) -> Iterator[Any]:
    """Give the part of a store that the ranks of this start have to themselves; all have to meet inside the block.

    Communicates two values of each rank through the store. Raises :class:`CommunicationError` if rank 0 does not come
    within ``timeout`` seconds.
    """
    # Rank 0 answers the others while it uses the store itself.
    bounded = BoundedStore(store if rank else own_connection(store, timeout), timeout)
    try:
        if rank:
            yield PrefixStore(_ask(bounded, rank, world, timeout), store)
            return
        token, met = secrets.token_hex(8), threading.Event()
        thread = threading.Thread(target=_serve, args=(bounded, world, token, met), name="lockstep meets", daemon=True)
        thread.start()
        try:
            yield PrefixStore(token, store)
        finally:
            met.set()
            thread.join()
    finally:
        bounded.close()


def _ask(bounded_store: BoundedStore, rank: int, world: int, timeout: float) -> str:
    number = secrets.token_hex(8)
    bounded_store.set(f"of rank {rank}", number)
    if not bounded_store.wait([number], timeout):
        raise CommunicationError(
            f"rank {rank}: rank 0 of {world} has not come within {timeout:g} s; look at the errors of that process"
        )
    return bounded_store.get(number)


def _serve(bounded_store: BoundedStore, world: int, token: str, met: threading.Event) -> None:
    """Give the token to whoever comes, until all have met: a number may be that of a process that was killed."""
    keys, served = [f"of rank {rank}" for rank in range(1, world)], set[str]()
    while True:
        with contextlib.suppress(StoreLostError):  # it may answer again; whoever waits for it hears if it does not
            for key in keys:
                if bounded_store.check([key]) and (number := bounded_store.get(key)) not in served:
                    bounded_store.set(number, token)
                    served.add(number)
        if met.wait(LOOK_SECONDS):
            return
