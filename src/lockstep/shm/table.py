"""What the ranks of a host move data over: a table on which each has places of its own that all can see.

Each rank has two places to put data and two to put results, used in turn: with every exchange of messages the turn
passes. A place is written again two exchanges later, and by then every other rank has said that it has read it. So the
memory is bounded, whatever the size of a message, and one exchange for each piece is enough.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.shm.descriptor import Descriptor, compare, place_of, with_place
from lockstep.shm.memory import Piece, Pool
from lockstep.shm.peers import Peers

PIECE_BYTES = 2 * 1024 * 1024
"""What one rank puts on the table at a time."""
ALIGNMENT = 64
STAGING = 0
"""The number of the piece of memory with a rank's places."""


class Table:
    """The places of all ranks of a host, the memory that they allocated to share, and whose turn it is."""

    def __init__(self, peers: Peers, staging: Piece, timeout: float) -> None:
        self.peers, self.timeout = peers, timeout
        self.own, self.size = peers.own, peers.size
        self.pool = Pool(peers, STAGING)
        self._own_bytes = torch.frombuffer(staging.map, dtype=torch.uint8)
        self._places: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._turn = 0

    @staticmethod
    def staging_bytes(size: int) -> int:
        """The memory that each of ``size`` ranks needs for its places."""
        return 2 * (PIECE_BYTES + _result_bytes(size))

    def place(self, rank: int, turn: int, dtype: torch.dtype) -> Tensor:
        """Where a rank puts data."""
        return self._both(rank, turn, dtype)[0]

    def result(self, rank: int, turn: int, dtype: torch.dtype) -> Tensor:
        """Where a rank puts its part of a result, as large as one rank's share of a piece."""
        return self._both(rank, turn, dtype)[1]

    def _both(self, rank: int, turn: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = rank, turn, dtype
        if key not in self._places:
            whole = self._own_bytes if rank == self.own else self.peers.memory(rank, STAGING)
            half = whole.numel() // 2
            data, results = whole[turn * half : (turn + 1) * half].split([PIECE_BYTES, half - PIECE_BYTES])
            self._places[key] = data.view(dtype), results.view(dtype)
        return self._places[key]

    def own_place(self, dtype: torch.dtype) -> Tensor:
        """Where this rank may put data before the next exchange."""
        return self.place(self.own, self._turn, dtype)

    def agree(
        self, descriptor: Descriptor, tensor: Tensor | None = None, factor: float = 1.0
    ) -> tuple[int, list[bytes]]:
        """Exchange descriptors, with the place of a tensor if it is in shared memory, and its factor.

        Returns the turn in which data was put before, and what the ranks said. Raises
        :class:`~lockstep.errors.AgreementError` on every rank unless all said the same.
        """
        self.pool.publish()
        place = self.pool.locate(tensor) if tensor is not None else None
        messages = self.exchange(with_place(descriptor.pack(), place, factor))
        compare(messages, self.peers.ranks)
        return 1 - self._turn, messages

    def shared(self, messages: list[bytes], own: Tensor) -> list[Tensor] | None:
        """The tensors of all ranks, as large as the own one, if all lie in shared memory."""
        tensors = []
        for rank, message in enumerate(messages):
            tensor = self.shared_by(rank, message, own)
            if tensor is None:
                return None
            tensors.append(tensor)
        return tensors

    def shared_by(self, rank: int, message: bytes, like: Tensor) -> Tensor | None:
        """The tensor that a rank has announced, as large as the own one, if it lies in shared memory."""
        place = place_of(message)
        if place is None or rank == self.own:
            return like if place is not None else None
        number, offset = place
        return self.peers.memory(rank, number)[offset : offset + like.nbytes].view(like.dtype)

    def close(self) -> None:
        """Let go of all memory but what tensors of the program lie in."""
        self._places.clear()
        self._own_bytes = torch.empty(0, dtype=torch.uint8)
        self.pool.close()

    def step(self) -> int:
        """One exchange within a collective; returns the turn that is over."""
        self.exchange(b"P")
        return 1 - self._turn

    def exchange(self, message: bytes) -> list[bytes]:
        """Exchange messages, and pass the turn."""
        messages = self.peers.exchange(message, self.timeout)
        self._turn = 1 - self._turn
        return messages

    def in_pieces(
        self,
        count: int,
        put: Callable[[int], object],
        use: Callable[[int, int], object],
        take: Callable[[int, int], object] | None = None,
    ) -> None:
        """Move ``count`` pieces: all ranks ``put(piece)``, then ``use(piece, turn)`` what the others have put.

        If ``use`` leaves results on the table, ``take(piece, turn)`` gets them after the next exchange.
        """
        for piece in range(count + (take is not None)):
            if piece < count:
                put(piece)
            turn = self.step()
            if take is not None and piece:
                take(piece - 1, 1 - turn)
            if piece < count:
                use(piece, turn)


def share(numel: int, size: int, itemsize: int) -> int:
    """The elements of each of ``size`` ranks' share; the last ones may have less, or none."""
    aligned = max(1, ALIGNMENT // itemsize)
    return -(-numel // (size * aligned)) * aligned


def _result_bytes(size: int) -> int:
    return share(PIECE_BYTES, size, 1)
