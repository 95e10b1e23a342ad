"""Keeps process groups that must never be destroyed: in forked processes, it would wait for threads of the parent."""

import ctypes
import os
import threading
import weakref
from typing import Any

_groups: "weakref.WeakSet[Any]" = weakref.WeakSet()
_lock = threading.RLock()
_held: list[Any] = []


def keep_in_forks(group: Any) -> None:
    """Let processes that are forked from this one never destroy their copy of a process group, even at their end."""
    with _lock:
        _groups.add(group)


def keep_for_ever(group: Any) -> None:
    """Let this process never destroy a process group, even at its end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


# Groups are held from before the fork on: Python may collect garbage in the child before any function here runs.
def _before_fork() -> None:
    _lock.acquire()
    _held.extend(_groups)


def _in_parent() -> None:
    held = _held[:]
    _held.clear()
    _lock.release()
    del held  # a group that nothing else refers to any more may take its time


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()
    for group in _held:
        keep_for_ever(group)
    _held.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
