"""An object of the calling thread, which the engine's threads that work for it have, too.

The engine runs the backward of accelerators in threads of its own, and gives them the state of the thread that began
the pass. What a ``threading.local`` holds is not part of that.
"""

import ctypes
import functools
import sys
from typing import Any

import torch


def put(key: str, value: object) -> None:
    """Hold ``value`` under ``key``, in place of what is there."""
    if not _is_reference_taken():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


def get(key: str) -> Any:
    """Return what this thread, or the one that handed its state on, has put under ``key``; None if nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def remove(key: str) -> None:
    """Let go of what is under ``key``.

    A thread that ends with an object in there, be it None, may wait for the interpreter's lock for ever: PyTorch takes
    it to let go of the object. Versions that cannot remove one are left with None.
    """
    take_out = getattr(torch._C, "_remove_obj_from_tls", None)
    if take_out is not None:
        take_out(key)
    else:
        put(key, None)


@functools.cache
def _is_reference_taken() -> bool:
    """Return True if PyTorch takes a reference to what it is given to hold.

    Some versions (2.11 is one) only give one back, when the object is replaced: held objects die while they are in
    use, and the process with them. ``test_what_is_put_lives_until_it_is_removed`` holds it.
    """
    key, probe = "lockstep.probe", object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(key, probe)
    taken = sys.getrefcount(probe) > before
    if not taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))  # the one that PyTorch gives back
    if hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(key)
    else:
        if not taken:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))
        torch._C._stash_obj_in_tls(key, None)
    return taken
