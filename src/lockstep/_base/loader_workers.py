"""Protects the workers of data loaders from signals that ask all processes to stop.

A Ctrl-C, ``torchrun`` and most schedulers send their signal to every process of the program. A rank that is about to
write a checkpoint would lose its loader's workers.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from multiprocessing import util
from multiprocessing.process import BaseProcess

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
_protected: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()


@contextlib.contextmanager
def workers_protected() -> Iterator[None]:
    """Protect processes that are started inside the block from stop signals; put it around ``iter(loader)``.

    They still end as PyTorch's workers do: when their loader's iterator is dropped, or a few seconds after this process
    has ended. One that is stuck is killed when this process ends. If signals cannot be blocked (Windows), nothing
    happens.

    A process inherits the set of blocked signals, whether it is forked or spawned. So they are blocked in this thread
    meanwhile; a signal that arrives is handled by another thread, or right after.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    _register()
    before = set(multiprocessing.active_children())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        _protected.update(set(multiprocessing.active_children()) - before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_those_left() -> None:
    """Kill workers that have not ended by themselves when this process ends: multiprocessing would SIGTERM and wait."""
    left = [worker for worker in _protected if worker.is_alive()]
    if left and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise: a worker has been killed
    for worker in left:
        worker.kill()


def _register() -> None:
    """Make sure that :func:`_end_those_left` is called, before multiprocessing waits; PyTorch has asked workers to end
    by then. A function of ``atexit`` would not do: processes that multiprocessing has started do not call those.
    """
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        util.Finalize(None, _end_those_left, exitpriority=1)


_registered_in = -1
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_protected.clear)  # these workers belong to the parent
