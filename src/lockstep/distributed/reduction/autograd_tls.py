"""Thread-local objects that PyTorch also passes on to the engine's threads.

The engine runs the backward of accelerators in its own threads, and gives them the thread-local state of the thread
that began the pass. A ``threading.local`` is not part of that state.
"""

import ctypes
import functools
import sys
from typing import Any

import torch


def put(key: str, value: object) -> None:
    """Store ``value`` under ``key``, replacing an earlier value."""
    if not _is_reference_taken():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


def get(key: str) -> Any:
    """Return the value stored under ``key`` by this thread or by the one that began the pass; None if there is none."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def remove(key: str) -> None:
    """Remove the value stored under ``key``.

    A thread that ends with an object stored, even None, may deadlock: PyTorch takes the interpreter's lock to release
    the object. PyTorch versions that cannot remove an entry keep None.
    """
    take_out = getattr(torch._C, "_remove_obj_from_tls", None)
    if take_out is not None:
        take_out(key)
    else:
        put(key, None)


@functools.cache
def _is_reference_taken() -> bool:
    """Return True if PyTorch takes a reference to a stored object.

    Some versions (such as 2.11) only release one when the object is replaced, so a stored object is freed while in use,
    and the process crashes: ``test_what_is_put_lives_until_it_is_removed``.
    """
    key, probe = "lockstep.probe", object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(key, probe)
    taken = sys.getrefcount(probe) > before
    if not taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))  # PyTorch releases a reference that it has not taken
    if hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(key)
    else:
        if not taken:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))
        torch._C._stash_obj_in_tls(key, None)
    return taken
