"""The other ranks of a host, and Unix sockets to them, one for each pair of ranks.

A signal is a short message (``messages.py`` has its kinds). It blocks where it has to wait, so it costs nothing where
ranks outnumber cores; what was written to shared memory before it was sent is seen by whoever has received it, on every
processor; and the connection ends at once when a process dies, however it dies. Messages keep their boundaries
(``SOCK_SEQPACKET``).
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
from lockstep.shm.constants import LIVENESS_SECONDS
from lockstep.shm.messages import MessageKind
from lockstep.shm.shared_memory import map_bytes

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
    """The ranks of this host, numbered by their order (``local_rank``). One thread at a time sends and receives."""

    def __init__(
        self,
        global_ranks: Sequence[int],
        local_rank: int,
        sockets: dict[int, socket.socket],
        *,
        program_waits: Callable[[], bool] = lambda: True,
        check_elsewhere: Callable[[], object] | None = None,
    ) -> None:
        self.global_ranks, self.local_rank = list(global_ranks), local_rank
        """What messages call the ranks of this host, and which of them is this one."""
        self._sockets = sockets  # by local rank
        self._program_waits = program_waits  # for what is exchanged: then its core has nothing else to do
        self._check_elsewhere = check_elsewhere  # called now and then in a wait: raises if another host has given up
        self._read_ahead: dict[int, deque[bytes]] = {}  # read before they were needed, from ranks that have gone
        self._left: set[int] = set()
        self._memory: dict[tuple[int, int], Tensor] = {}
        self._announced: dict[int, tuple[int, int]] = {}  # memory whose descriptor comes with the next message
        self._spins = self.size <= len(os.sched_getaffinity(0))
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._process = os.getpid()
        self._farewell = f"rank {self.global_ranks[local_rank]}: this process has ended the shm process group"
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
        return len(self.global_ranks)

    # ---------------------------------------------------------------------------------- signals

    def exchange(self, message: bytes, timeout: float) -> list[bytes]:
        """Send a message to every other rank and return everybody's, by local rank.

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
        for peer, each in self._sockets.items():
            try:
                each.send(message)
            except (BrokenPipeError, ConnectionResetError):
                pass  # what it has sent before its end is read first, when its next message is needed
            except BlockingIOError:
                # Who does not read the last messages of a rank sees the end of the connection.
                if message[:1] not in (MessageKind.ABORT, MessageKind.LEAVE):
                    self.fail(f"{self._describe([peer])} does not read its messages")

    def _spin(self, received: list[bytes], missing: set[int]) -> None:
        until = time.perf_counter() + (PATIENT_SPIN_SECONDS if self._program_waits() else SPIN_SECONDS)
        while True:
            self._receive_available(received, missing)
            if not missing or time.perf_counter() > until:
                return
            # Who is waited for may need this very core, on a machine that has other work, too.
            os.sched_yield()

    def _sleep(self, received: list[bytes], missing: set[int], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        peers = {each.fileno(): peer for peer, each in self._sockets.items()}
        for fd, peer in peers.items():  # of those whose message is there, only the end is of interest
            poll.register(fd, select.POLLIN if peer in missing else 0)
        while missing:
            left = max(0.0, deadline - time.monotonic())
            limit = LIVENESS_SECONDS if self._check_elsewhere is not None else LONGEST_POLL_SECONDS
            ready = poll.poll(min(left, limit) * 1e3)
            if self._closing.is_set():
                raise CommunicationError(self._farewell)
            if not ready and left > limit:
                if self._check_elsewhere is not None:
                    self._check_elsewhere()
            elif not ready:
                self.fail(
                    f"{self._describe(missing)} did not answer within {timeout:g} s: stalled, or not in this collective"
                )
            for fd, _ in ready:
                if fd == self._wake:
                    continue
                peer = peers[fd]
                if peer in missing:
                    message = self._receive(peer)
                    if message is not None:
                        received[peer] = message
                        missing.discard(peer)
                        poll.modify(fd, 0)
                else:
                    poll.unregister(fd)
                    if abort := self._read_to_the_end(peer):  # perhaps after all had done their part here
                        self._receive_available(received, missing)
                        if missing:
                            self._abort_as(abort)

    def _receive_available(self, received: list[bytes], missing: set[int]) -> None:
        """Receive the messages that have come."""
        for peer in tuple(missing):
            message = self._receive(peer)
            if message is not None:
                received[peer] = message
                missing.discard(peer)

    def _read_to_the_end(self, peer: int) -> bytes | None:
        """Read what is left of a rank that has gone, and has done its part so far; raises if it has died.

        Returns its last message if it has ended the group, which is kept for the next time that it is needed.
        """
        if peer in self._left:  # it is missed when it is needed
            return None
        messages: deque[bytes] = self._read_ahead.setdefault(peer, deque())
        while message := self._receive(peer, leaving=True):
            messages.append(message)
            if message[:1] == MessageKind.ABORT:
                self._left.add(peer)
                return message
        return None

    def _abort_as(self, message: bytes) -> None:
        """End the group for the reason that another rank has given, and raise."""
        # The others are told, too: one of them may see the end of this rank first
        # (test_a_rank_that_is_told_of_an_end_tells_the_others_before_it_goes).
        self.abort(message[1:].decode(errors="replace"))  # a long one may be cut anywhere
        raise CommunicationError(str(self.reason))

    def _receive(self, peer: int, leaving: bool = False) -> bytes | None:
        """Receive the next message of a collective from one rank, if it is there; handle all others on the way.

        Of a rank that is ``leaving`` the messages are read to the last, and kept by the caller.
        """
        if not leaving and (ahead := self._read_ahead.get(peer)):
            if ahead[0][:1] == MessageKind.ABORT:
                self._abort_as(ahead[0])
            return ahead.popleft()
        connection = self._sockets[peer]
        while True:
            try:
                message = self._receive_memory(peer) if peer in self._announced else connection.recv(LONGEST)
            except BlockingIOError:
                return None
            except ConnectionResetError:  # it closed with something unread; what it had sent comes after this
                continue
            kind = message[:1]
            if kind in (MessageKind.COLLECTIVE, MessageKind.STEP):
                return message
            if kind == MessageKind.FILE:
                continue
            if kind == MessageKind.MEMORY:
                self._announced[peer] = _MEMORY.unpack(message)[1:]
            elif kind == MessageKind.RETIRED:
                for number in array.array("I", message[1:]):
                    self._memory.pop((peer, number), None)
            elif kind == MessageKind.ABORT and leaving:
                return message
            elif kind == MessageKind.ABORT:
                self._abort_as(message)
            elif kind == MessageKind.LEAVE and leaving:
                self._left.add(peer)
                return None
            else:
                self._fail_without(peer, kind == MessageKind.LEAVE or peer in self._left)

    def _fail_without(self, peer: int, left: bool) -> None:
        """Raise as a rank has gone that is needed; another one may have said why before it."""
        for other in self._sockets:
            if other != peer:
                self._raise_if_aborted_by(other)
        if left:
            self.fail(f"{self._describe([peer])} has left the process group while others still use it")
        self.fail(f"{self._describe([peer])} has died")

    def _raise_if_aborted_by(self, peer: int) -> None:
        try:
            while message := self._sockets[peer].recv(LONGEST):
                if message[:1] == MessageKind.ABORT:
                    self._abort_as(message)
        except OSError:
            return

    def _describe(self, peers: Iterable[int]) -> str:
        return _in_words(self.global_ranks[peer] for peer in peers)

    # ----------------------------------------------------------------------------------- memory

    def send_memory(self, number: int, size: int, fd: int) -> None:
        """Give every other rank a descriptor of shared memory of this rank."""
        self.send(_MEMORY.pack(MessageKind.MEMORY, number, size))
        for each in self._sockets.values():
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(each, [MessageKind.FILE], [fd])

    def retire_memory(self, numbers: Sequence[int]) -> None:
        """Tell every other rank to unmap memory of this rank; in few messages, as nobody may be reading."""
        for begin in range(0, len(numbers), _NUMBERS):
            self.send(MessageKind.RETIRED + array.array("I", numbers[begin : begin + _NUMBERS]).tobytes())

    def memory(self, peer: int, number: int) -> Tensor:
        """Return the bytes of shared memory of another rank."""
        return self._memory[peer, number]

    def _receive_memory(self, peer: int) -> bytes:
        """Receive the message that brings memory, and map that; or another one, of a rank that ends in between."""
        message, ancillary, _, _ = self._sockets[peer].recvmsg(LONGEST, socket.CMSG_SPACE(_FD))
        if message[:1] == MessageKind.FILE:
            number, size = self._announced.pop(peer)
            if not ancillary:
                raise OSError(f"cannot take the memory of {self._describe([peer])}: too many open files?")
            fds = array.array("i", ancillary[0][2][:_FD])
            try:
                self._memory[peer, number] = torch.frombuffer(map_bytes(fds[0], size), dtype=torch.uint8)
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
            self.send(_abort_message(reason))
        self._close(reason)

    def leave(self, reason: str | None = None) -> None:
        """End this rank's part in good order or, for a reason, everybody's; also while another thread waits."""
        if self.reason is None:
            self._farewell = reason or self._farewell
            with suppress(OSError):  # the other thread has just closed everything
                self.send(MessageKind.LEAVE if reason is None else _abort_message(reason))
            # Also if it could not be sent: the other thread must not wait on
            # (test_a_rank_that_cannot_say_that_it_leaves_stops_waiting_all_the_same).
            self._closing.set()
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
            raise CommunicationError(self._farewell)
        for fd, _ in self._ends.poll(0):
            peer = next(peer for peer, each in self._sockets.items() if each.fileno() == fd)
            self._ends.unregister(fd)
            if abort := self._read_to_the_end(peer):
                self._abort_as(abort)

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that is the rank."""
        return self._process != os.getpid()

    def close_in_child(self) -> None:
        """Close what a forked process has of its parent's connections; the parent's stay open."""
        self.reason = _forked(self._process, self.global_ranks[self.local_rank])
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


def _in_words(global_ranks: Iterable[int]) -> str:
    ranks = sorted(global_ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _forked(parent: int, rank: int) -> str:
    return (
        f"process {os.getpid()} cannot use the shm process group: it was forked from process {parent}, which is rank "
        f"{rank} of it. Communicate there, or give this process a group of its own"
    )


def _abort_message(reason: str) -> bytes:
    return MessageKind.ABORT + reason.encode()[: LONGEST - 1]


_alive: "weakref.WeakSet[Peers]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process, such as one that loads data, must not keep a dead rank's connections open."""
    for peers in list(_alive):
        peers.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
