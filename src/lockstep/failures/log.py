"""The log of failures, in the store of a group: every rank reads the same entries in the same order.

Each entry has a number, which is claimed by ``compare_set``; so of two ranks that fail at once one is the first, for
all that reach the store. Who does not reach it goes by what it is told.
"""

import threading
from collections.abc import Callable
from typing import Any

from lockstep.failures.failure import Failure
from lockstep.store import BoundedStore, StoreLostError


class FailureLog:
    """The failures of a run, in the order that is the same for all ranks."""

    def __init__(self, store: Any) -> None:
        self._bounded_store = BoundedStore(store)
        self._lock = threading.Lock()
        self.entries: list[Failure] = []
        """What has been read so far."""

    def append(self, failure: Failure) -> Failure:
        """Write an entry behind those that are there; return the first of all, or this one if the store is lost."""
        text = failure.pack()
        try:
            with self._lock:
                while True:
                    there = self._bounded_store.compare_set(_key(len(self.entries)), "", text)
                    self.entries.append(Failure.unpack(there))
                    if there == text:
                        break
        except StoreLostError:
            pass
        return self.first or failure

    def read(self) -> list[Failure]:
        """Read what has been written since; return all entries. Raises :class:`StoreLostError`."""
        with self._lock:
            while self._bounded_store.check([_key(len(self.entries))]):
                self.entries.append(Failure.unpack(self._bounded_store.get(_key(len(self.entries)))))
        return self.entries

    def look(self, found: Callable[[Failure], object]) -> None:
        """Call ``found`` with the first entry, from another thread, if there is one; does not wait for the store."""
        self._bounded_store.look(_key(0), lambda text: found(Failure.unpack(text)))

    def close(self) -> None:
        """End the connection; use the log no more."""
        self._bounded_store.close()

    @property
    def first(self) -> Failure | None:
        """The first entry, if one has been read."""
        return self.entries[0] if self.entries else None


def _key(number: int) -> str:
    return f"failure {number}"
