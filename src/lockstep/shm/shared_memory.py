"""Shared memory without a name, mapped into this process; a forked process gets separate memory instead.

One rank makes it (``memfd_create``: no entry in ``/dev/shm``, and none of its limits; only processes that were handed
the descriptor can map it). So nothing can be left behind: the memory is freed with the last process that maps it. Its
size is sealed, so that no rank can truncate it under another.

After a fork, parent and child would have the same shared memory: a data loader's worker that calls ``zero_grad`` would
zero its parent's gradients, and change the data of a collective under way. So each mapping is replaced in the child, at
the same address: by a copy, taken before the fork, where tensors of the program lie in it; by zeros elsewhere.
"""

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

_FAILED = ctypes.c_void_p(-1).value
_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED, _MREMAP_TO = 0x10, 0x1 | 0x2  # of Linux, on every processor


class _Forks(threading.local):
    """What a thread keeps while it forks: other threads may fork at the same time."""

    def __init__(self) -> None:
        self.copies: list[tuple[Any, int | None]] = []
        """The memory in use, each with the address of its copy, None if there was no room."""


class _Mappings:
    """All shared memory of this process, with the handlers that replace it in a forked process."""

    def __init__(self) -> None:
        self._all: dict[int, weakref.ref[Any]] = {}  # by address
        self._in_use: set[int] = set()
        self._forks = _Forks()

    def add(self, memory: Any) -> None:
        self._all[ctypes.addressof(memory)] = weakref.ref(memory)

    def remove(self, address: int, size: int) -> None:
        self._all.pop(address, None)
        self._in_use.discard(address)
        _libc.munmap(address, size)

    def mark(self, address: int, in_use: bool) -> None:
        (self._in_use.add if in_use else self._in_use.discard)(address)

    def before_fork(self) -> None:
        living = [ref() for address, ref in list(self._all.items()) if address in self._in_use]
        for memory in living:
            if memory is not None:
                copy = _map(None, len(memory), _READ_WRITE, _PRIVATE)
                self._forks.copies.append((memory, copy))
                if copy is not None:
                    ctypes.memmove(copy, memory, len(memory))

    def in_parent(self) -> None:
        for memory, copy in self._forks.copies:
            if copy is not None:
                _libc.munmap(copy, len(memory))
        self._forks.copies.clear()

    def in_child(self) -> None:
        mapped, self._all = self._all, {}
        self._in_use.clear()
        for ref in mapped.values():
            memory = ref()
            if memory is not None:
                _map(ctypes.addressof(memory), len(memory), _READ_WRITE, _PRIVATE | _MAP_FIXED)
        for memory, copy in self._forks.copies:
            address, size = ctypes.addressof(memory), len(memory)
            if copy is None or _libc.mremap(copy, size, size, _MREMAP_TO, address) == _FAILED:
                # No room for a copy: better that an access crashes than that it finds wrong values.
                _map(address, size, _NO_ACCESS, _PRIVATE | _MAP_FIXED)
        self._forks.copies.clear()


def _map(address: int | None, size: int, access: int, how: int, fd: int = -1) -> int | None:
    mapped: int = _libc.mmap(address, size, access, how, fd, 0)
    return None if mapped == _FAILED else mapped


_mappings = _Mappings()
os.register_at_fork(
    before=_mappings.before_fork, after_in_parent=_mappings.in_parent, after_in_child=_mappings.in_child
)


def map_bytes(fd: int, size: int) -> Any:
    """Map shared memory as an array of bytes, unmapped with it; ``mmap`` would keep a descriptor open for each."""
    address = _map(None, size, _READ_WRITE, mmap.MAP_SHARED, fd)
    if address is None:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {size} bytes of shared memory: {os.strerror(code)}")
    memory = (ctypes.c_char * size).from_address(address)
    _mappings.add(memory)
    weakref.finalize(memory, _mappings.remove, address, size).atexit = False
    return memory


def mark_in_use(address: int, in_use: bool) -> None:
    """Record if tensors of the program lie in the memory at an address; if so, a forked process gets a copy of it."""
    _mappings.mark(address, in_use)


class SharedMemory:
    """Memory that this rank made for the ranks of its host to map."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        """The number by which the ranks refer to it, and its size in bytes."""
        self.fd = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.bytes = map_bytes(self.fd, size)
        except BaseException:
            self.close()
            raise
        self.address = ctypes.addressof(self.bytes)

    def close(self) -> None:
        """Close the descriptor, which is no longer needed; the memory stays mapped as long as it is used."""
        self._close()
        self.fd = -1
