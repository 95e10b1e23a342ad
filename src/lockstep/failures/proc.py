"""Reads from ``/proc`` about another process of this host: its state, its signals, the memory that it shares.

A process that has a session holds two pieces of memory without a file (``memfd_create``), with names that this library
chooses. A process with the permission to inspect it finds them in ``/proc/PID/fd``; nothing has to be registered
anywhere, and nothing is left behind when the process is killed.
"""

import contextlib
import os
import sys
from dataclasses import dataclass

from lockstep.errors import InspectionError

_LINK = "/memfd:{name} (deleted)"


def available() -> bool:
    """Return True if this system has the ``/proc`` and the memory without files that this room needs: Linux does."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def create_memory(name: str) -> int:
    """Return a descriptor of memory that others find under a name; closed in programs that this process starts."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


@dataclass(frozen=True)
class ProcessStatus:
    """The fields of ``/proc/PID/status`` that this room uses."""

    state: str
    """R: running, S: sleeping, D: sleeping uninterruptibly, T: stopped, t: held by a debugger, Z: ended."""
    numbers: tuple[int, ...]
    """The process's number here, and in each container that it is in; the last is the one that it sees itself."""
    caught: int
    ignored: int
    pending: int

    @property
    def stopped(self) -> bool:
        """True if a signal or a debugger has stopped the process, so that it does nothing until it is continued."""
        return self.state in "Tt"

    @property
    def ended(self) -> bool:
        """True if the process has ended, and its parent has not noticed yet."""
        return self.state in "ZX"

    def catches(self, number: int) -> bool:
        """Return True if a handler is installed for a signal, so that it does not end the process."""
        return bool(self.caught >> (number - 1) & 1)

    def leaves_alone(self, number: int) -> bool:
        """Return True if a signal neither has a handler nor is ignored."""
        return not (self.caught | self.ignored) >> (number - 1) & 1

    def has_pending(self, number: int) -> bool:
        """Return True if a signal that was sent to the process has not been handled by any thread yet."""
        return bool(self.pending >> (number - 1) & 1)


def status_of(pid: int) -> ProcessStatus:
    """Return the status of a process, by its number; raise :class:`InspectionError` if there is no such process."""
    fields = _fields(f"/proc/{pid}/status")
    if fields is None:
        raise InspectionError(f"there is no process {pid} on this host; it may have ended")
    return ProcessStatus(
        state=fields["State"][0],
        numbers=tuple(int(number) for number in fields.get("NSpid", str(pid)).split()),
        caught=int(fields["SigCgt"], 16),
        ignored=int(fields["SigIgn"], 16),
        pending=int(fields["ShdPnd"], 16),
    )


def threads_that_block(pid: int, number: int) -> set[int]:
    """Return the threads of a process that block a signal, as a thread does while it runs the handler."""
    found = set()
    for thread in _listing(f"/proc/{pid}/task"):
        fields = _fields(f"/proc/{pid}/task/{thread}/status")
        if fields is not None and int(fields["SigBlk"], 16) >> (number - 1) & 1:
            found.add(int(thread))
    return found


def processes() -> list[int]:
    """Return the numbers of all processes that ``/proc`` shows to this one."""
    return sorted(int(name) for name in _listing("/proc") if name.isdecimal())


def children_of(pid: int) -> list[int]:
    """Return the numbers of a process's children; none where the system does not list them."""
    found: list[int] = []
    for thread in _listing(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def shared_memories(pid: int, prefix: str) -> list[tuple[str, str]]:
    """Return names, beginning with ``prefix``, and paths of a process's memories; none if it may not be inspected."""
    start, end = _LINK.format(name=prefix + "\0").split("\0")
    found = []
    for number in _listing(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):  # closed since
            link = os.readlink(path)
            if link.startswith(start) and link.endswith(end):
                found.append((prefix + link[len(start) : -len(end)], path))
    return found


def may_look_into(pid: int) -> bool:
    """Return True if this process may inspect another one: it has the same user, or this one is the superuser."""
    try:
        os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return False
    except OSError:
        return True  # it has ended
    return True


def _fields(path: str) -> dict[str, str] | None:
    try:
        with open(path) as file:
            pairs = [line.partition(":") for line in file]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return {name: value.strip() for name, _, value in pairs}


def _listing(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
