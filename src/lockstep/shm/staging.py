"""The memory through which a host's ranks move tensors: ``group.allocate``, and staging memory for other tensors.

Each rank has two buffers for data and two for results, one of each in either half of its staging memory. The halves are
used in turn: every exchange of messages switches to the other half. A buffer is written again two exchanges later, and
by then every other rank has said that it has read the buffer. So the memory is bounded, whatever the size of a tensor,
and one exchange per chunk is enough.
"""

import ctypes
import itertools
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.shm.messages import Descriptor, MessageKind, compare, location_of, with_location
from lockstep.shm.peers import Peers
from lockstep.shm.shared_memory import SharedMemory, mark_in_use

CHUNK_BYTES = 2 * 1024 * 1024
"""Number of bytes that one rank writes to its staging memory at a time."""
ALIGNMENT = 64
"""Alignment of shards, in bytes: one cache line."""
STAGING = 0
"""Number of a rank's staging memory; the memory of the pool has the numbers after it."""
PAGE_BYTES = 4096
"""Sizes of shared memory are rounded up to a multiple of this many bytes."""


class StagingPool:
    """Shared memory of this rank that holds tensors of the program; freed memory is kept for tensors of the same size.

    Any thread may allocate and drop tensors. The other ranks are told only by :meth:`announce_freed` and
    :meth:`locate`, which only the thread that runs a collective calls.
    """

    def __init__(self, peers: Peers, first_number: int) -> None:
        self._peers = peers
        self._numbers = itertools.count(first_number)
        self._in_use: dict[int, SharedMemory] = {}  # by address
        self._free: dict[int, deque[SharedMemory]] = {}  # by size
        self._discarded: deque[int] = deque()  # numbers of memory that the other ranks have mapped
        self._closed = False

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised one-dimensional tensor in memory that every rank of the host can map."""
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
        """Return the number of the memory in which a tensor lies, and the byte where it begins; None if it is
        elsewhere.

        The first call for a piece of memory sends its descriptor to the other ranks of the host.
        """
        storage = tensor.untyped_storage()
        memory = self._in_use.get(storage.data_ptr())
        if memory is None:
            return None
        if memory.fd >= 0:  # closed once they have it
            self._peers.send_memory(memory.number, memory.size, memory.fd)
            memory.close()
        return memory.number, int(tensor.storage_offset()) * tensor.itemsize

    def announce_freed(self) -> None:
        """Tell the other ranks which memory they can unmap."""
        freed = []
        while self._discarded:
            freed.append(self._discarded.popleft())  # a comprehension is one call more
        self._peers.retire_memory(freed)

    def release(self, memory: SharedMemory) -> None:
        """Take back memory whose last tensor is gone, in whichever thread that happens."""
        if self._in_use.pop(memory.address, None) is None:
            return
        mark_in_use(memory.address, False)
        if not self._closed and self._peers.reason is None:  # else a late rank may still write to it
            self._free.setdefault(memory.size, deque()).append(memory)

    def close(self) -> None:
        """Drop the free memory, and keep none from now on."""
        self._closed = True
        self._free.clear()

    def _discard_free(self) -> None:
        """Discard the free memory: a program that asks for a new size seldom needs the old ones again."""
        for same_size in list(self._free.values()):
            while same_size:
                memory = same_size.popleft()
                if memory.fd < 0:
                    self._discarded.append(memory.number)
                memory.close()


def _release(pool: "weakref.ref[StagingPool]", memory: SharedMemory) -> None:
    owner = pool()
    if owner is not None:
        owner.release(memory)


class Staging:
    """The buffers of all ranks of a host, the half that is in use, and the memory that the ranks allocated."""

    def __init__(self, peers: Peers, memory: SharedMemory) -> None:
        self.peers = peers
        self.local_rank = peers.local_rank
        self.size = peers.size
        self.pool = StagingPool(peers, first_number=STAGING + 1)
        self._own_bytes = torch.frombuffer(memory.bytes, dtype=torch.uint8)
        self._data: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._results: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._half = 0

    @staticmethod
    def staging_bytes(size: int) -> int:
        """Return the size of the staging memory that each of ``size`` ranks needs."""
        return 2 * (CHUNK_BYTES + _result_bytes(size))

    def data(self, rank: int, half: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer in which a rank puts its data."""
        found = self._data.get((rank, half, dtype))
        return self._view_both(rank, half, dtype)[0] if found is None else found

    def result(self, rank: int, half: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer in which a rank puts its part of a result, as large as a rank's shard of a chunk."""
        found = self._results.get((rank, half, dtype))
        return self._view_both(rank, half, dtype)[1] if found is None else found

    def _view_both(self, rank: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        whole = self._own_bytes if rank == self.local_rank else self.peers.memory(rank, STAGING)
        size = whole.numel() // 2
        data, results = whole[half * size : (half + 1) * size].split([CHUNK_BYTES, size - CHUNK_BYTES])
        key = rank, half, dtype
        self._data[key], self._results[key] = both = data.view(dtype), results.view(dtype)
        return both

    def own_data(self, dtype: torch.dtype) -> Tensor:
        """Return the buffer in which this rank can put data before the next exchange."""
        return self.data(self.local_rank, self._half, dtype)

    def agree(
        self, descriptor: Descriptor, timeout: float, tensor: Tensor | None = None, factor: float = 1.0
    ) -> tuple[int, list[bytes]]:
        """Exchange descriptors, with the factor of this rank's tensor and its location if that is in shared memory.

        Returns the half in which data was put before, and the messages of the ranks. Raises
        :class:`~lockstep.errors.AgreementError` on every rank unless all descriptors are equal.
        """
        self.pool.announce_freed()
        location = self.pool.locate(tensor) if tensor is not None else None
        messages = self.exchange(with_location(descriptor.pack(), location, factor), timeout)
        compare(messages, self.peers.global_ranks)
        return 1 - self._half, messages

    def allocated_tensors(self, messages: list[bytes], own: Tensor) -> list[Tensor] | None:
        """Return the tensors of all ranks, as large as ``own``; None unless all lie in memory from ``allocate``."""
        tensors = []
        for rank, message in enumerate(messages):
            tensor = self.allocated_tensor(rank, message, own)
            if tensor is None:
                return None
            tensors.append(tensor)
        return tensors

    def allocated_tensor(self, rank: int, message: bytes, like: Tensor) -> Tensor | None:
        """Return the tensor that a rank announced, as large as ``like``; None unless it is from ``allocate``."""
        location = location_of(message)
        if location is None or rank == self.local_rank:
            return like if location is not None else None
        number, offset = location
        return self.peers.memory(rank, number)[offset : offset + like.nbytes].view(like.dtype)

    def close(self) -> None:
        """Drop all memory except pieces in which tensors of the program lie."""
        self._data.clear()
        self._results.clear()
        self._own_bytes = torch.empty(0, dtype=torch.uint8)
        self.pool.close()

    def step(self, timeout: float) -> int:
        """Exchange messages within a collective; return the half that was in use until then."""
        self.exchange(MessageKind.STEP, timeout)
        return 1 - self._half

    def exchange(self, message: bytes, timeout: float) -> list[bytes]:
        """Exchange messages, and switch to the other half."""
        messages = self.peers.exchange(message, timeout)
        self._half = 1 - self._half
        return messages

    def move_chunks(
        self,
        count: int,
        timeout: float,
        put: Callable[[int], object],
        use: Callable[[int, int], object],
        take: Callable[[int, int], object] | None = None,
    ) -> None:
        """Move ``count`` chunks: all ranks ``put(chunk)``, exchange messages, then ``use(chunk, half)`` the data.

        If ``use`` leaves results for other ranks in the buffers, ``take(chunk, half)`` reads them one exchange later.
        """
        for chunk in range(count + (take is not None)):
            if chunk < count:
                put(chunk)
            half = self.step(timeout)
            if take is not None and chunk:
                take(chunk - 1, 1 - half)
            if chunk < count:
                use(chunk, half)


def shard_numel(numel: int, size: int, itemsize: int) -> int:
    """Return the number of elements in each of ``size`` ranks' shards; the last shards may be shorter or empty."""
    aligned = max(1, ALIGNMENT // itemsize)
    return -(-numel // (size * aligned)) * aligned


def _result_bytes(size: int) -> int:
    return shard_numel(CHUNK_BYTES, size, 1)
