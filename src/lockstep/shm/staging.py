"""The staging memory of a host's ranks, over which they move what does not lie in memory that they share.

Each rank has two buffers for data and two for results, in the two halves of its staging memory, which are used in turn:
with every exchange of messages the half changes. A buffer is written again two exchanges later, and by then every other
rank has said that it has read it. So the memory is bounded, whatever the size of a message, and one exchange for each
chunk is enough.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.shm.messages import Descriptor, MessageKind, compare, location_of, with_location
from lockstep.shm.peers import Peers
from lockstep.shm.pool import Pool
from lockstep.shm.shared_memory import SharedMemory

CHUNK_BYTES = 2 * 1024 * 1024
"""What one rank writes to its staging memory at a time."""
ALIGNMENT = 64
"""Of shards, in bytes: a line of the cache."""
STAGING = 0
"""The number of a rank's staging memory; those of the pool follow."""


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
