"""The log of failures, in the store of a group: every rank reads the same entries in the same order.

Each entry has a number, which is claimed by ``compare_set``; so of two ranks that fail at once one is the first, for
all. The store may be lost with the process that hosts it; then the log says so, and nothing more is read or written.
"""

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from lockstep.failures.failure import Failure

_PATIENCE = timedelta(seconds=5)
"""How long the store's host may take to answer."""


def own_connection(store: Any) -> Any:
    """The same store through a connection of its own: one that a thread waits on is held by it."""
    clone = store.clone()
    innermost = clone
    while isinstance(innermost, PrefixStore):
        innermost = innermost.underlying_store
    if isinstance(innermost, TCPStore):  # clones of other stores are those stores themselves
        clone.set_timeout(_PATIENCE)
    return clone


class FailureLog:
    """The failures of a run, in the order that is the same for all ranks. Not for use by two threads at once."""

    def __init__(self, store: Any) -> None:
        self.store = own_connection(store)
        """The store, through a connection that nobody waits on for long."""
        self.entries: list[Failure] = []
        """What has been read so far."""
        self.lost = False
        """Whether the store cannot be reached any more."""

    def append(self, failure: Failure) -> None:
        """Write an entry behind those that are there."""
        text = failure.pack()
        try:
            while not self.lost:
                there = self.store.compare_set(f"failure {len(self.entries)}", "", text)
                self.entries.append(Failure.unpack(there))
                if there.decode() == text:
                    return
        except RuntimeError:
            self.lost = True

    def read(self) -> list[Failure]:
        """Read what has been written since; returns all entries."""
        try:
            while not self.lost and self.store.check([key := f"failure {len(self.entries)}"]):
                self.entries.append(Failure.unpack(self.store.get(key)))
        except RuntimeError:
            self.lost = True
        return self.entries
