"""Shared memory, mapped into this process; in a forked process it becomes the child's own, as all other memory does.

A fork would leave parent and child with the same shared memory: a data loader's worker that calls ``zero_grad`` would
do it to its parent's gradients, and to a collective under way. So each mapping is replaced in the child, at its
address: by a copy, taken before the fork, where tensors of the program lie in it; by zeros elsewhere.
"""

import ctypes
import mmap
import os
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
_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED, _MREMAP_TO = 0x10, 0x1 | 0x2  # of Linux, on every processor


class _Mappings:
    """All shared memory of this process, and what a fork makes of it."""

    def __init__(self) -> None:
        self._all: dict[int, weakref.ref[Any]] = {}  # by address
        self._used: set[int] = set()
        self._copies: list[tuple[Any, int | None]] = []
        """During a fork: what is used, which so stays mapped, and where its copy is, if there was room for one."""

    def add(self, memory: Any) -> None:
        self._all[ctypes.addressof(memory)] = weakref.ref(memory)

    def remove(self, address: int, size: int) -> None:
        self._all.pop(address, None)
        self._used.discard(address)
        _libc.munmap(address, size)

    def use(self, address: int, used: bool) -> None:
        (self._used.add if used else self._used.discard)(address)

    def before_fork(self) -> None:
        living = [ref() for address, ref in list(self._all.items()) if address in self._used]
        for memory in living:
            if memory is not None:
                copy = _map(None, len(memory), _READ_WRITE, _OWN)
                self._copies.append((memory, copy))
                if copy is not None:
                    ctypes.memmove(copy, memory, len(memory))

    def in_parent(self) -> None:
        copies, self._copies = self._copies, []
        for memory, copy in copies:
            if copy is not None:
                _libc.munmap(copy, len(memory))

    def in_child(self) -> None:
        copies, self._copies = self._copies, []
        mapped, self._all = self._all, {}
        self._used.clear()
        for ref in mapped.values():
            memory = ref()
            if memory is not None:
                _map(ctypes.addressof(memory), len(memory), _READ_WRITE, _OWN | _MAP_FIXED)
        for memory, copy in copies:
            address, size = ctypes.addressof(memory), len(memory)
            if copy is None or _libc.mremap(copy, size, size, _MREMAP_TO, address) == _FAILED:
                # No room for a copy: a crash of who touches it is better than values that are wrong.
                _map(address, size, _NO_ACCESS, _OWN | _MAP_FIXED)


def _map(address: int | None, size: int, access: int, how: int, fd: int = -1) -> int | None:
    mapped: int = _libc.mmap(address, size, access, how, fd, 0)
    return None if mapped == _FAILED else mapped


_mappings = _Mappings()
os.register_at_fork(
    before=_mappings.before_fork, after_in_parent=_mappings.in_parent, after_in_child=_mappings.in_child
)


def map_bytes(fd: int, size: int) -> Any:
    """Shared memory as an array of bytes, unmapped with it; Python's ``mmap`` would keep a descriptor open for each."""
    address = _map(None, size, _READ_WRITE, mmap.MAP_SHARED, fd)
    if address is None:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {size} bytes of shared memory: {os.strerror(code)}")
    memory = (ctypes.c_char * size).from_address(address)
    _mappings.add(memory)
    weakref.finalize(memory, _mappings.remove, address, size).atexit = False
    return memory


def use(address: int, used: bool) -> None:
    """Say whether tensors of the program lie in the memory that is mapped at an address: then a child gets a copy."""
    _mappings.use(address, used)
