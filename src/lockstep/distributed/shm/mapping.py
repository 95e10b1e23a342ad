"""Shared memory, mapped into this process."""

import ctypes
import mmap
import os
import weakref
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_bytes(fd: int, size: int) -> Any:
    """Shared memory as an array of bytes, unmapped with it; Python's ``mmap`` would keep a descriptor open for each."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {size} bytes of shared memory: {os.strerror(code)}")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory
