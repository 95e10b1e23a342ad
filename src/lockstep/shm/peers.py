"""Connections between the ranks of one host: Unix sockets, one for each pair of ranks.

A signal is a short message. It blocks where it has to wait, so it costs nothing where ranks outnumber cores; what was
written to shared memory before it was sent is seen by whoever has received it, on every processor; and the connection
ends at once when a process dies, however it dies. Messages keep their boundaries (``SOCK_SEQPACKET``) and begin with a
byte that says what they are:

====  =====================================================================
byte  message
====  =====================================================================
C     a collective begins: its descriptor (``descriptor.py``)
P     a piece of it has been written, or read
M     memory follows: its number and size; the next message brings it along
D     memory that is not used any more: the numbers
A     the group is aborted: a text that says why
L     this rank has left the group
====  =====================================================================
"""

import array
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from lockstep.errors import CommunicationError
from lockstep.shm.mapping import map_bytes
from lockstep.shm.meeting import LOOK_SECONDS

LONGEST = 4096
"""Bytes of the longest message."""
SPIN_SECONDS = 50e-6
"""How long a rank looks for messages before it goes to sleep, where there is a core for every rank."""
PATIENT_SPIN_SECONDS = 1e-3
"""The same where the program waits for the result: its core has nothing else to do."""
LONGEST_POLL_SECONDS = 86400.0

_MEMORY = struct.Struct("<cIQ")
_NUMBERS = (LONGEST - 1) // struct.calcsize("I")  # in a message
_FD = struct.calcsize("i")


class Peers:
    """The other ranks of the host. Not thread-safe: one thread at a time sends and receives."""

    def __init__(self, ranks: Sequence[int], own: int, sockets: dict[int, socket.socket]) -> None:
        self.ranks, self.own = list(ranks), own
        """The ranks of the group that this host has, and the own one's place among them."""
        self._sockets = sockets  # by place
        self._ahead: dict[int, deque[bytes]] = {}  # read before their time, from ranks that have gone
        self._left: set[int] = set()
        self._memory: dict[tuple[int, int], Tensor] = {}
        self._announced: dict[int, tuple[int, int]] = {}  # memory whose descriptor comes with the next message
        self._spins = len(self.ranks) <= len(os.sched_getaffinity(0))
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._process = os.getpid()
        self._last_words = f"rank {self.ranks[own]}: this process has ended the shm process group"
        self.is_waited_for: Callable[[], bool] = lambda: True
        """Whether the program waits for what is exchanged: then its core has nothing else to do."""
        self.look: Callable[[], object] | None = None
        """Called now and then in a wait: raises if the group has ended elsewhere."""
        self.reason: str | None = None
        """Why the group cannot be used any more."""
        self._ends = select.poll()
        for each in sockets.values():
            each.setblocking(False)
            self._ends.register(each, 0)  # of interest is who goes
        _alive.add(self)

    @property
    def size(self) -> int:
        """How many ranks the host has."""
        return len(self.ranks)

    # ---------------------------------------------------------------------------------- signals

    def exchange(self, message: bytes, timeout: float) -> list[bytes]:
        """Send a message to every other rank and return everybody's, by place.

        Raises :class:`CommunicationError` naming the ranks that have died, have left, or stay silent for ``timeout``
        seconds; the group is of no use then.
        """
        self.check_open()
        self.send(message)
        received = [message] * self.size
        missing = set(self._sockets)
        if self._spins:
            self._spin(received, missing)
        if missing:
            self._sleep(received, missing, timeout)
        return received

    def send(self, message: bytes) -> None:
        """Send a message to every other rank."""
        for place, each in self._sockets.items():
            try:
                each.send(message)
            except (BrokenPipeError, ConnectionResetError):
                pass  # its last words come first, when they are read
            except BlockingIOError:
                if message[:1] not in (b"A", b"L"):  # who does not read them sees the end of the connection
                    self.fail(f"{self._names([place])} does not read its messages")

    def _spin(self, received: list[bytes], missing: set[int]) -> None:
        until = time.perf_counter() + (PATIENT_SPIN_SECONDS if self.is_waited_for() else SPIN_SECONDS)
        while True:
            self._take_what_is_there(received, missing)
            if not missing or time.perf_counter() > until:
                return

    def _sleep(self, received: list[bytes], missing: set[int], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        places = {each.fileno(): place for place, each in self._sockets.items()}
        for fd, place in places.items():  # of those whose message is there, only the end is of interest
            poll.register(fd, select.POLLIN if place in missing else 0)
        while missing:
            left = max(0.0, deadline - time.monotonic())
            limit = LOOK_SECONDS if self.look is not None else LONGEST_POLL_SECONDS
            ready = poll.poll(min(left, limit) * 1e3)
            if self._closing.is_set():
                raise CommunicationError(self._last_words)
            if not ready and left > limit:
                if self.look is not None:
                    self.look()
            elif not ready:
                self.fail(
                    f"{self._names(missing)} did not answer within {timeout:g} s: stalled, or not in this collective"
                )
            for fd, _ in ready:
                if fd == self._wake:
                    continue
                place = places[fd]
                if place in missing:
                    message = self._receive(place)
                    if message is not None:
                        received[place] = message
                        missing.discard(place)
                        poll.modify(fd, 0)
                else:
                    poll.unregister(fd)
                    if aborted := self._read_to_the_end(place):  # perhaps after all had done their part here
                        self._take_what_is_there(received, missing)
                        if missing:
                            self._abort_as(aborted)

    def _take_what_is_there(self, received: list[bytes], missing: set[int]) -> None:
        """Take the messages that have come."""
        for place in tuple(missing):
            message = self._receive(place)
            if message is not None:
                received[place] = message
                missing.discard(place)

    def _read_to_the_end(self, place: int) -> bytes | None:
        """Read what is left of a rank that has gone, and has done its part so far; raises if it has died.

        Returns its last message if it has ended the group, which is kept for the next time that it is needed.
        """
        if place in self._left:  # it is missed when it is needed
            return None
        messages: deque[bytes] = self._ahead.setdefault(place, deque())
        while message := self._receive(place, leaving=True):
            messages.append(message)
            if message[:1] == b"A":
                self._left.add(place)
                return message
        return None

    def _abort_as(self, message: bytes) -> None:
        """End the group for the reason that another rank has given, and raise."""
        self.abort(message[1:].decode())  # told on: another rank may see the end of this one first
        raise CommunicationError(str(self.reason))

    def _receive(self, place: int, leaving: bool = False) -> bytes | None:
        """The next message of a collective from one rank, if it is there; everything else is dealt with here."""
        if not leaving and (ahead := self._ahead.get(place)):
            if ahead[0][:1] == b"A":
                self._abort_as(ahead[0])
            return ahead.popleft()
        each = self._sockets[place]
        while True:
            try:
                message = self._take_memory(place) if place in self._announced else each.recv(LONGEST)
            except BlockingIOError:
                return None
            except ConnectionResetError:  # it closed with something unread; what it had sent comes after this
                continue
            kind = message[:1]
            if kind in (b"C", b"P"):
                return message
            if kind == b"F":
                continue
            if kind == b"M":
                self._announced[place] = _MEMORY.unpack(message)[1:]
            elif kind == b"D":
                for number in array.array("I", message[1:]):
                    self._memory.pop((place, number), None)
            elif kind == b"A" and leaving:
                return message
            elif kind == b"A":
                self._abort_as(message)
            elif kind == b"L" and leaving:
                self._left.add(place)
                return None
            else:
                self._lost(place, kind == b"L" or place in self._left)

    def _lost(self, place: int, left: bool) -> None:
        """A rank has gone; another one may have said why before it."""
        for other in self._sockets:
            if other != place:
                self._look_for_abort(other)
        if left:
            self.fail(f"{self._names([place])} has left the process group while others still use it")
        self.fail(f"{self._names([place])} has died")

    def _look_for_abort(self, place: int) -> None:
        try:
            while message := self._sockets[place].recv(LONGEST):
                if message[:1] == b"A":
                    self.abort(message[1:].decode())
                    raise CommunicationError(str(self.reason))
        except OSError:
            return

    def _names(self, places: Iterable[int]) -> str:
        ranks = sorted(self.ranks[place] for place in places)
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

    # ----------------------------------------------------------------------------------- memory

    def share(self, number: int, size: int, fd: int) -> None:
        """Give every other rank a piece of this rank's memory."""
        self.send(_MEMORY.pack(b"M", number, size))
        for each in self._sockets.values():
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(each, [b"F"], [fd])

    def withdraw(self, numbers: Sequence[int]) -> None:
        """Tell every other rank to forget pieces of memory; in few messages, as nobody may be reading."""
        for begin in range(0, len(numbers), _NUMBERS):
            self.send(b"D" + array.array("I", numbers[begin : begin + _NUMBERS]).tobytes())

    def memory(self, place: int, number: int) -> Tensor:
        """The bytes of a piece of another rank's memory."""
        return self._memory[place, number]

    def _take_memory(self, place: int) -> bytes:
        """The message that brings memory, which is mapped; or another one, from a rank that ends in between."""
        message, ancillary, _, _ = self._sockets[place].recvmsg(LONGEST, socket.CMSG_SPACE(_FD))
        if message[:1] == b"F":
            number, size = self._announced.pop(place)
            if not ancillary:
                raise OSError(f"cannot take the memory of {self._names([place])}: too many open files?")
            fds = array.array("i", ancillary[0][2][:_FD])
            try:
                self._memory[place, number] = torch.frombuffer(map_bytes(fds[0], size), dtype=torch.uint8)
            finally:
                os.close(fds[0])
        return message

    # -------------------------------------------------------------------------------------- end

    def fail(self, why: str) -> None:
        """Abort the group: tell every other rank why, and raise."""
        self.reason = f"the shm process group is aborted: {why}"
        self.abort(self.reason)
        raise CommunicationError(self.reason)

    def abort(self, reason: str) -> None:
        """Tell every other rank why the group ends, and end it."""
        with suppress(OSError):
            self.send(b"A" + reason.encode()[: LONGEST - 1])
        self._close(reason)

    def leave(self, reason: str | None = None) -> None:
        """End this rank's part in good order or, for a reason, everybody's; also while another thread waits."""
        if self.reason is None:
            self._last_words = reason or self._last_words
            with suppress(OSError):  # the other thread has just closed everything
                self.send(b"L" if reason is None else b"A" + reason.encode()[: LONGEST - 1])
            self._closing.set()  # also if it could not be sent: the other thread must not wait on
            with suppress(OSError):
                os.eventfd_write(self._wake, 1)

    def check_open(self) -> None:
        """Raise if the group has ended for this rank."""
        if self.reason is not None:
            raise CommunicationError(self.reason)

    def check_alive(self) -> None:
        """Raise if one of the ranks has died, or this one has left; reads nothing from those that are there."""
        self.check_open()
        if self._closing.is_set():
            raise CommunicationError(self._last_words)
        for fd, _ in self._ends.poll(0):
            place = next(place for place, each in self._sockets.items() if each.fileno() == fd)
            self._ends.unregister(fd)
            if aborted := self._read_to_the_end(place):
                self._abort_as(aborted)

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that is the rank."""
        return self._process != os.getpid()

    def close_in_child(self) -> None:
        """Close what a forked process has of its parent's connections; the parent's stay open."""
        self.reason = (
            f"process {os.getpid()} cannot use the shm process group: it was forked from process {self._process}, "
            f"which is rank {self.ranks[self.own]} of it. Communicate there, or give this process a group of its own"
        )
        self.close()

    def close(self) -> None:
        """Close the connections, when no thread uses them any more."""
        self._close("this process has destroyed the shm process group")
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _close(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
        for each in self._sockets.values():
            each.close()
        self._memory.clear()


_alive: "weakref.WeakSet[Peers]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process, such as one that loads data, must not keep a dead rank's connections open."""
    for peers in list(_alive):
        peers.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
