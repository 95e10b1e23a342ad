"""Memory that the ranks of a host share: anonymous files, without a name anywhere, so that nothing can be left behind.

A piece of memory is made by one rank (``memfd_create``: no entry in ``/dev/shm``, none of its limits; only processes
that were handed the descriptor can map it) and goes when the last process that maps it has gone. Its size is sealed,
so no rank can pull it away under another.
"""

import ctypes
import fcntl
import itertools
import os
import weakref
from collections import deque

import torch
from torch import Tensor

from lockstep.shm.mapping import map_bytes, use
from lockstep.shm.peers import Peers

ALIGNMENT = 4096


class Piece:
    """Shared memory of this rank."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.fd = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.map = map_bytes(self.fd, size)
        except BaseException:
            self.close()
            raise
        self.address = ctypes.addressof(self.map)

    def close(self) -> None:
        """The descriptor is not needed any more; the memory stays mapped as long as it is used."""
        self._close()
        self.fd = -1


class Pool:
    """What ``group.allocate`` hands out. Memory that is not used any more is kept for requests of the same size.

    Tensors may be allocated and dropped by any thread; what the other ranks are told, they are told by :meth:`publish`
    and :meth:`locate`, which only the thread that runs a collective calls.
    """

    def __init__(self, peers: Peers, first: int) -> None:
        self._peers, self._numbers = peers, itertools.count(first + 1)
        self._used: dict[int, Piece] = {}  # by address
        self._idle: dict[int, deque[Piece]] = {}  # by size
        self._shared: set[int] = set()
        self._dropped: deque[int] = deque()
        self._closed = False

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of one dimension, uninitialised, whose memory every rank of the host can see."""
        size = max(1, -(-numel * dtype.itemsize // ALIGNMENT)) * ALIGNMENT
        try:
            piece = self._idle[size].popleft()
        except (KeyError, IndexError):
            self._trim()
            piece = Piece(next(self._numbers), size)
        self._used[piece.address] = piece
        use(piece.address, True)
        owner = (ctypes.c_char * size).from_buffer(piece.map)  # lives as long as the tensor's storage
        weakref.finalize(owner, _release, weakref.ref(self), piece).atexit = False
        return torch.frombuffer(owner, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """In which piece of memory a tensor of this rank lies, and at which byte; None if it lies elsewhere."""
        storage = tensor.untyped_storage()
        piece = self._used.get(storage.data_ptr())
        if piece is None:
            return None
        if piece.number not in self._shared:
            self._peers.share(piece.number, piece.size, piece.fd)
            self._shared.add(piece.number)
            piece.close()
        return piece.number, int(tensor.storage_offset()) * tensor.itemsize

    def publish(self) -> None:
        """Tell the other ranks of memory that has gone."""
        gone = []
        while self._dropped:
            number = self._dropped.popleft()
            if number in self._shared:
                self._shared.discard(number)
                gone.append(number)
        self._peers.withdraw(gone)

    def release(self, piece: Piece) -> None:
        """The last tensor in it has gone; runs wherever that happens."""
        if self._used.pop(piece.address, None) is None:
            return
        use(piece.address, False)
        if not self._closed and self._peers.reason is None:  # else a late rank may still write to it
            self._idle.setdefault(piece.size, deque()).append(piece)

    def close(self) -> None:
        """Keep nothing any more."""
        self._closed = True
        self._idle.clear()

    def _trim(self) -> None:
        """A new size is asked for: what lies idle is of no use any more."""
        for pieces in list(self._idle.values()):
            while pieces:
                piece = pieces.popleft()
                piece.close()
                self._dropped.append(piece.number)


def _release(pool: "weakref.ref[Pool]", piece: Piece) -> None:
    owner = pool()
    if owner is not None:
        owner.release(piece)
