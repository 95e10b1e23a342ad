"""Gives the processes that were started together a part of the store that no earlier start has used.

``torchrun`` hosts one store for all its restarts, so the keys of killed processes are still there. It does not tell how
often it has started the ranks: each host counts its own restarts. So each process draws a random number, and rank 0
gives a token, the name of a new part of the store, to each number that it finds. A token for a process that has ended
is never read.
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
    """Yield a part of the store that only the ranks of this start use; all have to meet inside the block.

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
    """Give the token to each number that appears, until all ranks have met; some numbers belong to killed processes."""
    keys, served = [f"of rank {rank}" for rank in range(1, world)], set[str]()
    while True:
        with contextlib.suppress(StoreLostError):  # it may answer again; whoever waits for it hears if it does not
            for key in keys:
                if bounded_store.check([key]) and (number := bounded_store.get(key)) not in served:
                    bounded_store.set(number, token)
                    served.add(number)
        if met.wait(LOOK_SECONDS):
            return
