"""The memory that ``group.allocate`` gives, in which collectives need no copy."""

import ctypes
import itertools
import weakref
from collections import deque

import torch
from torch import Tensor

from lockstep.shm.peers import Peers
from lockstep.shm.shared_memory import SharedMemory, mark_in_use

PAGE_BYTES = 4096
"""What sizes are rounded up to."""


class Pool:
    """Shared memory of this rank that tensors of the program lie in; what is free again is kept for the same size.

    Tensors may be allocated and dropped by any thread; what the other ranks are told, they are told by
    :meth:`announce_freed` and :meth:`locate`, which only the thread that runs a collective calls.
    """

    def __init__(self, peers: Peers, first_number: int) -> None:
        self._peers, self._numbers = peers, itertools.count(first_number)
        self._in_use: dict[int, SharedMemory] = {}  # by address
        self._free: dict[int, deque[SharedMemory]] = {}  # by size
        self._known_to_peers: set[int] = set()
        self._discarded: deque[int] = deque()
        self._closed = False

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of one dimension, uninitialised, whose memory every rank of the host can see."""
        size = max(1, -(-numel * dtype.itemsize // PAGE_BYTES)) * PAGE_BYTES
        try:
            memory = self._free[size].popleft()
        except (KeyError, IndexError):
            self._discard_free()
            memory = SharedMemory(next(self._numbers), size)
        self._in_use[memory.address] = memory
        mark_in_use(memory.address, True)
        owner = (ctypes.c_char * size).from_buffer(memory.bytes)  # lives as long as the tensor's storage
        weakref.finalize(owner, _release, weakref.ref(self), memory).atexit = False
        return torch.frombuffer(owner, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Find the memory in which a tensor lies, as its number and the byte; None if it lies elsewhere."""
        storage = tensor.untyped_storage()
        memory = self._in_use.get(storage.data_ptr())
        if memory is None:
            return None
        if memory.number not in self._known_to_peers:
            self._peers.send_memory(memory.number, memory.size, memory.fd)
            self._known_to_peers.add(memory.number)
            memory.close()
        return memory.number, int(tensor.storage_offset()) * tensor.itemsize

    def announce_freed(self) -> None:
        """Tell the other ranks which memory they need not keep mapped any more."""
        freed = []
        while self._discarded:
            number = self._discarded.popleft()
            if number in self._known_to_peers:
                self._known_to_peers.discard(number)
                freed.append(number)
        self._peers.retire_memory(freed)

    def release(self, memory: SharedMemory) -> None:
        """Take back memory whose last tensor has gone, in whichever thread that happens."""
        if self._in_use.pop(memory.address, None) is None:
            return
        mark_in_use(memory.address, False)
        if not self._closed and self._peers.reason is None:  # else a late rank may still write to it
            self._free.setdefault(memory.size, deque()).append(memory)

    def close(self) -> None:
        """Keep no free memory any more."""
        self._closed = True
        self._free.clear()

    def _discard_free(self) -> None:
        """Give up the free memory: a new size is asked for, so sizes have changed."""
        for same_size in list(self._free.values()):
            while same_size:
                memory = same_size.popleft()
                memory.close()
                self._discarded.append(memory.number)


def _release(pool: "weakref.ref[Pool]", memory: SharedMemory) -> None:
    owner = pool()
    if owner is not None:
        owner.release(memory)
