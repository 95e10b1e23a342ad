"""The memory in which a host's ranks move tensors: what ``group.allocate`` gives, and staging memory for all others.

Each rank has two buffers for data and two for results, in the two halves of its staging memory, which are used in turn:
with every exchange of messages the half changes. A buffer is written again two exchanges later, and by then every other
rank has said that it has read it. So the memory is bounded, whatever the size of a message, and one exchange for each
chunk is enough.
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
"""What one rank writes to its staging memory at a time."""
ALIGNMENT = 64
"""Of shards, in bytes: a line of the cache."""
STAGING = 0
"""The number of a rank's staging memory; those of the pool follow."""
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


class Staging:
    """The buffers of all ranks of a host, which half is in use, and the memory that the ranks allocated."""

    def __init__(self, peers: Peers, memory: SharedMemory) -> None:
        self.peers = peers
        self.local_rank, self.size = peers.local_rank, peers.size
        self.pool = Pool(peers, first_number=STAGING + 1)
        self._own_bytes = torch.frombuffer(memory.bytes, dtype=torch.uint8)
        self._buffers: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._half = 0

    @staticmethod
    def staging_bytes(size: int) -> int:
        """Return the size of the staging memory that each of ``size`` ranks needs."""
        return 2 * (CHUNK_BYTES + _result_bytes(size))

    def data(self, rank: int, half: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer in which a rank puts data."""
        return self._both(rank, half, dtype)[0]

    def result(self, rank: int, half: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer in which a rank puts its part of a result, as large as a rank's shard of a chunk."""
        return self._both(rank, half, dtype)[1]

    def _both(self, rank: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = rank, half, dtype
        if key not in self._buffers:
            whole = self._own_bytes if rank == self.local_rank else self.peers.memory(rank, STAGING)
            size = whole.numel() // 2
            data, results = whole[half * size : (half + 1) * size].split([CHUNK_BYTES, size - CHUNK_BYTES])
            self._buffers[key] = data.view(dtype), results.view(dtype)
        return self._buffers[key]

    def own_data(self, dtype: torch.dtype) -> Tensor:
        """Return the buffer in which this rank may put data before the next exchange."""
        return self.data(self.local_rank, self._half, dtype)

    def agree(
        self, descriptor: Descriptor, timeout: float, tensor: Tensor | None = None, factor: float = 1.0
    ) -> tuple[int, list[bytes]]:
        """Exchange descriptors, with the location of a tensor if it is in shared memory, and its factor.

        Returns the half in which data was put before, and what the ranks said. Raises
        :class:`~lockstep.errors.AgreementError` on every rank unless all said the same.
        """
        self.pool.announce_freed()
        location = self.pool.locate(tensor) if tensor is not None else None
        messages = self.exchange(with_location(descriptor.pack(), location, factor), timeout)
        compare(messages, self.peers.global_ranks)
        return 1 - self._half, messages

    def allocated_tensors(self, messages: list[bytes], own: Tensor) -> list[Tensor] | None:
        """Return the tensors of all ranks, as large as the own one, if all lie in memory that they allocated."""
        tensors = []
        for rank, message in enumerate(messages):
            tensor = self.allocated_tensor(rank, message, own)
            if tensor is None:
                return None
            tensors.append(tensor)
        return tensors

    def allocated_tensor(self, rank: int, message: bytes, like: Tensor) -> Tensor | None:
        """Return the tensor that a rank has announced, as large as the own one, if it lies in such memory."""
        location = location_of(message)
        if location is None or rank == self.local_rank:
            return like if location is not None else None
        number, offset = location
        return self.peers.memory(rank, number)[offset : offset + like.nbytes].view(like.dtype)

    def close(self) -> None:
        """Drop all memory but what tensors of the program lie in."""
        self._buffers.clear()
        self._own_bytes = torch.empty(0, dtype=torch.uint8)
        self.pool.close()

    def step(self, timeout: float) -> int:
        """Exchange messages within a collective; returns the half that was in use until then."""
        self.exchange(MessageKind.STEP, timeout)
        return 1 - self._half

    def exchange(self, message: bytes, timeout: float) -> list[bytes]:
        """Exchange messages, and change the half."""
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
        """Move ``count`` chunks: all ranks ``put(chunk)``, then ``use(chunk, half)`` what the others have put.

        If ``use`` leaves results in the buffers for those, ``take(chunk, half)`` gets them after the next exchange.
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
    """Return the elements of each of ``size`` ranks' shard; the last ones may have less, or none."""
    aligned = max(1, ALIGNMENT // itemsize)
    return -(-numel // (size * aligned)) * aligned


def _result_bytes(size: int) -> int:
    return shard_numel(CHUNK_BYTES, size, 1)
