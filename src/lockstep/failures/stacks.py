"""Reads the Python stacks of a process, even while it cannot run any Python.

A process that can be asked has a handler for a real-time signal (``faulthandler.register``). The handler writes the
stacks of all threads into memory that the asking process reads through ``/proc``. It is C code that needs no
interpreter lock, so a process answers from within an endless loop, a deadlock, or a C call that never releases the
lock. The system restarts the calls that the signal interrupts, and no handler of the program's own runs. A stopped
process cannot answer.
"""

import contextlib
import faulthandler
import fcntl
import gc
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.errors import InspectionError
from lockstep.failures import proc

NAME = "lockstep-stacks-"
"""The name of the memory in ``/proc/PID/fd``, before the process's own number and that of the signal."""

SECONDS = 5.0  # limit for a process that can answer: the handler runs when one of its threads is next scheduled
_POLL = 0.002


@dataclass(frozen=True)
class Frame:
    """One line of code that a thread is at."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f'  File "{self.file}", line {self.line}, in {self.function}' + (f"\n    {text}" if text else "")


@dataclass(frozen=True)
class Thread:
    """A thread and its frames, innermost last, as in a traceback."""

    ident: int
    """The value of ``threading.get_ident()`` in that thread."""
    name: str
    frames: tuple[Frame, ...]

    def innermost(self, count: int = 6) -> str:
        """Return the innermost frames, as a traceback shows them."""
        left_out = len(self.frames) - count
        lines = [f"  ... {left_out} outer frames"] if left_out > 0 else []
        return "\n".join(lines + [str(frame) for frame in self.frames[-count:]]) or "  no Python frame"


@dataclass(frozen=True)
class Stacks:
    """The threads of a process at one moment; the oldest, which is the main thread, comes first."""

    threads: tuple[Thread, ...]

    def of(self, ident: int) -> Thread | None:
        """Return the thread with that ``ident``, if there is one."""
        return next((thread for thread in self.threads if thread.ident == ident), None)

    def __str__(self) -> str:
        parts = [f"Thread {t.ident:#x}{f' ({t.name})' if t.name else ''}:\n{t.innermost(100)}" for t in self.threads]
        return "\n\n".join(parts)


# ------------------------------------------------------------------------------------ of this process


class _NoCollection:
    """Lets no garbage collection begin inside the block; may be nested, in any threads.

    Before Python 3.12 a collection may begin while the object of a frame is made, and what it runs may end the thread
    that the frame is of, as the end of a process group does. The object is of memory that is gone then, and the process
    crashes, or hangs (``test_a_collection_that_ends_the_thread_whose_stack_is_read``).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection, or a signal, may come here again
        self._inside = 0
        self._was_enabled = False
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        if self._inside and self._was_enabled:
            gc.enable()
        self._lock, self._inside = threading.RLock(), 0

    def __enter__(self) -> None:
        if sys.version_info < (3, 12):
            with self._lock:
                self._inside += 1
                if self._inside == 1:
                    self._was_enabled = gc.isenabled()
                    gc.disable()

    def __exit__(self, *error: object) -> None:
        if sys.version_info < (3, 12):
            with self._lock:
                if self._inside == 1 and self._was_enabled:
                    gc.enable()
                self._inside = max(0, self._inside - 1)  # 0 before, if it was forked inside


no_collection = _NoCollection()
"""To be entered where frames of other threads are read."""


def own_stack(ident: int) -> Thread | None:
    """Return the stack of a thread of this process, if it exists; needs the interpreter, unlike :func:`ask`."""
    with no_collection:
        frame = sys._current_frames().get(ident)
        if frame is None:
            return None
        walked = [Frame(at.f_code.co_filename, line, at.f_code.co_name) for at, line in traceback.walk_stack(frame)]
        del frame  # of this function, if it is its own thread's: it would keep itself, and all objects of its callers
    return Thread(ident, "", tuple(walked[::-1]))


class _Answering:
    """Lets this process be asked for its stacks with :func:`ask` inside the block, on Linux; elsewhere does nothing.

    A process that is forked meanwhile cannot be asked unless it calls this itself. May be nested, in any threads.
    """

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forked)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._signal = 0
        self._fd = -1

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._wanted += 1
            if self._wanted == 1 and proc.available():
                self._install()
        try:
            yield
        finally:
            with self._lock:
                self._wanted -= 1
                if self._wanted == 0 and self._signal:
                    self._uninstall()

    def _install(self) -> None:
        own = proc.status_of(os.getpid())
        free = (number for number in range(signal.SIGRTMAX - 8, signal.SIGRTMIN, -1) if own.leaves_alone(number))
        number = next(free, 0)
        if number:  # otherwise the program has handlers for all of them, and cannot be asked
            self._fd = proc.create_memory(f"{NAME}{os.getpid()}-{number}")
            fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)  # the asking process empties it first
            self._signal = number
            faulthandler.register(number, file=self._fd, all_threads=True)

    def _uninstall(self) -> None:
        with _locked(self._fd, seconds=1.0):  # else a process that is asking now would end this one by its signal
            faulthandler.unregister(self._signal)
        os.close(self._fd)
        self._signal = 0
        self._fd = -1

    def _forked(self) -> None:
        """Stop answering in a forked process: it would write its stacks where its parent writes its own."""
        if self._signal:
            faulthandler.unregister(self._signal)
            os.close(self._fd)
        self._forget()


answering = _Answering()


# ---------------------------------------------------------------------------------- of another process


def ask(pid: int, seconds: float = SECONDS) -> Stacks:
    """Return the stacks of a process of this host, which may be this one.

    Raises :class:`InspectionError` that gives the reason if there are none: there is no such process, it belongs to
    another user, has no session, is stopped, or was busy in the system for longer than ``seconds``.
    """
    if not proc.available():
        raise InspectionError(f"the stacks of a process can be asked for on Linux only; this is {sys.platform}")
    itself = proc.status_of(pid).numbers[-1]
    if not proc.may_look_into(pid):
        raise InspectionError(f"process {pid} belongs to another user, and may not be asked; ask as that user")
    for name, path in proc.shared_memories(pid, f"{NAME}{itself}-"):  # not the memories of others that it is asking
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # its session has just ended
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                return _ask(pid, int(name.rpartition("-")[2]), fd, time.monotonic() + seconds)
            finally:
                os.close(fd)
    raise InspectionError(
        f"process {pid} has no session of lockstep: it cannot be asked for its stacks. Loader workers and other "
        "processes that a rank has started are not asked either; give the number of the rank's process"
    )


def _ask(pid: int, number: int, fd: int, deadline: float) -> Stacks:
    with _locked(fd, deadline - time.monotonic()) as alone:
        if not alone:
            raise InspectionError(f"process {pid} is being asked for its stacks by another process; try again")
        status = _able(pid)
        if not status.catches(number):
            raise InspectionError(f"process {pid} is just ending its session")
        blocking = proc.threads_that_block(pid, number)
        if not status.has_pending(number):  # else another process has asked before, and the answer is still to come
            os.ftruncate(fd, 0)
            os.kill(pid, number)
        while not _answered(pid, number, fd, blocking):
            if time.monotonic() > deadline:
                raise InspectionError(
                    f"process {pid} has not shown its stacks in time: it waits inside the system (state "
                    f"{status.state}: for a disk or a device, for instance), or gets no processor"
                )
            time.sleep(_POLL)
            status = _able(pid)
        return _parsed(os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace"))


def _able(pid: int) -> proc.ProcessStatus:
    """Return the status of a process; raise unless it can answer."""
    status = proc.status_of(pid)
    if status.ended:
        raise InspectionError(f"process {pid} has ended; its parent has not noticed yet")
    if status.stopped:
        raise InspectionError(
            f"process {pid} is stopped (SIGSTOP, Ctrl-Z or a debugger) and runs nothing; continue it with "
            f"`kill -CONT {pid}`"
        )
    return status


def _answered(pid: int, number: int, fd: int, blocking: set[int]) -> bool:
    """Return True if the stacks are complete. A thread blocks the signal while it runs the handler."""
    if os.fstat(fd).st_size == 0 or proc.status_of(pid).has_pending(number):
        return False
    return proc.threads_that_block(pid, number) <= blocking


@contextlib.contextmanager
def _locked(fd: int, seconds: float) -> Iterator[bool]:
    """Keep others from asking the process, and the process from ceasing to answer; yield False after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                yield False
                return
            time.sleep(_POLL)
    try:
        yield True
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


_THREAD = re.compile(r"^(?:Thread|Current thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def _parsed(text: str) -> Stacks:
    """Parse faulthandler's output: threads from newest to oldest, frames from the innermost outwards."""
    threads: list[tuple[int, str, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((int(head[1], 16), head[2] or "", []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][2].append(Frame(frame[1], 0 if frame[2] == "???" else int(frame[2]), frame[3]))
    if len({ident for ident, _, _ in threads}) < len(threads):  # includes an answer that another process did not await
        first = threads[0][0]
        threads = threads[max(i for i, (ident, _, _) in enumerate(threads) if ident == first) :]
    return Stacks(tuple(Thread(ident, name, tuple(frames[::-1])) for ident, name, frames in reversed(threads)))
