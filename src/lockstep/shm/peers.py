"""The other ranks of a host, with a Unix socket to each of them.

A signal is a short message (``messages.py`` has its kinds). Waiting for one blocks, so it costs nothing where ranks
outnumber cores. Everything written to shared memory before a message was sent is visible to its receiver, on every
processor. The connection ends at once when a process dies, however it dies. Messages keep their boundaries
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

from lockstep._base.texts import ranks_in_words
from lockstep.errors import CommunicationError
from lockstep.shm.constants import LIVENESS_SECONDS
from lockstep.shm.messages import MessageKind
from lockstep.shm.shared_memory import map_bytes

LONGEST = 4096
"""Size of the longest message, in bytes."""
SPIN_SECONDS = 50e-6
"""Seconds that a rank polls for messages before it sleeps, where there is a core for every rank."""
PATIENT_SPIN_SECONDS = 1e-3
"""The same where the program waits for the result, so that its core has nothing else to do."""
LONGEST_POLL_SECONDS = 86400.0
GRACE_SECONDS = 1.0
"""Seconds that a rank goes on waiting for others, once one has died that had done its part in the exchange: perhaps
that was all its work."""

_MEMORY = struct.Struct("<cIQ")
_NUMBERS = (LONGEST - 1) // struct.calcsize("I")  # in a message
_FD = struct.calcsize("i")


class Peers:
    """The ranks of this host, numbered in order (``local_rank``). One thread at a time sends and receives."""

    def __init__(
        self,
        global_ranks: Sequence[int],
        local_rank: int,
        sockets: dict[int, socket.socket],
        *,
        program_waits: Callable[[], bool] = lambda: True,
        check_elsewhere: Callable[[], object] | None = None,
    ) -> None:
        self.global_ranks = list(global_ranks)
        self.local_rank = local_rank
        """The global ranks of this host, for use in messages, and the index of this rank among them."""
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
        self._farewell = f"rank {self.global_ranks[local_rank]}: this process has ended the process group"
        self.reason: str | None = None
        """Why the group cannot be used any more."""
        self._ends = select.poll()
        for each in sockets.values():
            each.setblocking(False)
            self._ends.register(each, 0)  # only the end of a connection is of interest
        _alive.add(self)

    @property
    def size(self) -> int:
        """The number of ranks on this host."""
        return len(self.global_ranks)

    # ---------------------------------------------------------------------------------- signals

    def exchange(self, message: bytes, timeout: float) -> list[bytes]:
        """Send a message to every other rank and return the messages of all ranks, by local rank.

        Raises :class:`CommunicationError` naming the ranks that have died, have left, or stay silent for ``timeout``
        seconds; the group cannot be used after that.
        """
        self.check_open()
        self.send(message)
        received = [message] * self.size
        missing = set(self._sockets)
        # Waking up from a poll takes longer than most ranks need for their part, so look for a short time first.
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
                pass  # messages sent before the peer's end are read first, when its next message is needed
            except BlockingIOError:
                # A rank that does not read a final message notices the end of the connection instead.
                if message[:1] not in (MessageKind.ABORT, MessageKind.LEAVE):
                    self.fail(f"{self._describe([peer])} does not read its messages")

    def _spin(self, received: list[bytes], missing: set[int]) -> None:
        until = time.perf_counter() + (PATIENT_SPIN_SECONDS if self._program_waits() else SPIN_SECONDS)
        while True:
            self._receive_available(received, missing)
            if not missing or time.perf_counter() > until:
                return
            # The rank that is waited for may need this very core, even here, if the machine has other work.
            os.sched_yield()

    def _sleep(self, received: list[bytes], missing: set[int], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        died: int | None = None  # a rank that has, after it had done its part
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        peers = {each.fileno(): peer for peer, each in self._sockets.items()}
        for fd, peer in peers.items():  # for a peer whose message is here, only the end is of interest
            poll.register(fd, select.POLLIN if peer in missing else 0)
        while missing:
            seconds_left = max(0.0, deadline - time.monotonic())
            limit = LIVENESS_SECONDS if self._check_elsewhere is not None else LONGEST_POLL_SECONDS
            ready = poll.poll(min(seconds_left, limit) * 1e3)
            if self._closing.is_set():
                raise CommunicationError(self._farewell)
            if not ready and seconds_left > limit:
                if self._check_elsewhere is not None:
                    self._check_elsewhere()
            elif not ready and died is not None:
                self._fail_without(died, left=False)
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
                    elif peer not in self._left:
                        # It had done its part here, so the others may still come; but not in the next exchange.
                        deadline, died = min(deadline, time.monotonic() + GRACE_SECONDS), peer

    def _receive_available(self, received: list[bytes], missing: set[int]) -> None:
        for peer in tuple(missing):
            message = self._receive(peer)
            if message is not None:
                received[peer] = message
                missing.discard(peer)

    def _read_to_the_end(self, peer: int) -> bytes | None:
        """Read the remaining messages of a rank that is gone and had done its part so far, and keep them; return the
        last one if that ended the group.
        """
        if peer in self._left:  # an error only when its next message is needed
            return None
        messages: deque[bytes] = self._read_ahead.setdefault(peer, deque())
        while message := self._receive(peer, leaving=True):
            messages.append(message)
            if message[:1] == MessageKind.ABORT:
                self._left.add(peer)
                return message
        return None

    def _abort_as(self, message: bytes) -> None:
        """End the group for the reason that another rank gave, and raise."""
        # Tell the others, too: one of them may see the end of this rank first
        # (test_a_rank_that_is_told_of_an_end_tells_the_others_before_it_goes).
        self.abort(message[1:].decode(errors="replace"))  # a long one may be cut anywhere
        raise CommunicationError(str(self.reason))

    def _receive(self, peer: int, leaving: bool = False) -> bytes | None:
        """Receive the next message of a collective from one rank, if it has arrived; handle all others on the way.

        From a rank that is ``leaving``, messages are read to the last, and the caller keeps them.
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
            elif leaving:  # the end
                if kind == MessageKind.LEAVE:
                    self._left.add(peer)
                return None
            else:
                self._fail_without(peer, kind == MessageKind.LEAVE or peer in self._left)

    def _fail_without(self, peer: int, left: bool) -> None:
        """Raise because a rank that is needed is gone; prefer the reason that another rank may have sent before."""
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
        return ranks_in_words(self.global_ranks[peer] for peer in peers)

    # ----------------------------------------------------------------------------------- memory

    def send_memory(self, number: int, size: int, fd: int) -> None:
        """Send a descriptor of this rank's shared memory to every other rank."""
        self.send(_MEMORY.pack(MessageKind.MEMORY, number, size))
        for each in self._sockets.values():
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(each, [MessageKind.FILE], [fd])

    def retire_memory(self, numbers: Sequence[int]) -> None:
        """Tell every other rank to unmap memory of this rank, in few messages: the others may not be reading."""
        for begin in range(0, len(numbers), _NUMBERS):
            self.send(MessageKind.RETIRED + array.array("I", numbers[begin : begin + _NUMBERS]).tobytes())

    def memory(self, peer: int, number: int) -> Tensor:
        """Return the shared memory of another rank as a tensor of bytes."""
        return self._memory[peer, number]

    def _receive_memory(self, peer: int) -> bytes:
        """Receive the message that brings memory, and map the memory; or the last message of a rank that ends first."""
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
        self.reason = f"the process group is aborted: {why}"
        self.abort(self.reason)
        raise CommunicationError(self.reason)

    def abort(self, reason: str) -> None:
        """End the group, and tell every other rank why."""
        with suppress(OSError):
            self.send(_abort_message(reason))
        self._close(reason)

    def leave(self, reason: str | None = None) -> None:
        """Leave the group or, given a reason, end it for every rank; may be called while another thread waits."""
        if self.reason is None:
            self._farewell = reason or self._farewell
            with suppress(OSError):  # the other thread has just closed everything
                self.send(MessageKind.LEAVE if reason is None else _abort_message(reason))
            # Even if the message could not be sent: the other thread must stop waiting
            # (test_a_rank_that_cannot_say_that_it_leaves_stops_waiting_all_the_same).
            self._closing.set()
            with suppress(OSError):
                os.eventfd_write(self._wake, 1)

    def check_open(self) -> None:
        """Raise if the group has ended for this rank."""
        if self.reason is not None:
            raise CommunicationError(self.reason)

    def check_in_use(self) -> None:
        """Raise if the group has ended for this rank, or is about to; any thread may call it."""
        self.check_open()
        if self._closing.is_set():
            raise CommunicationError(self._farewell)

    def is_gone(self, global_rank: int) -> bool:
        """Return True if a rank of this host has closed its connection, or has died; any thread may call it."""
        peer = self.global_ranks.index(global_rank) if global_rank in self.global_ranks else -1
        poll = select.poll()  # of its own: one thread at a time may use each
        with suppress(KeyError, ValueError, OSError):  # on another host, this rank, or closed
            poll.register(self._sockets[peer], 0)
            return bool(poll.poll(0))
        return False

    def check_alive(self) -> None:
        """Raise if another rank has died, or this one has left; no message of a living rank is read."""
        self.check_in_use()
        for fd, _ in self._ends.poll(0):
            peer = next(peer for peer, each in self._sockets.items() if each.fileno() == fd)
            self._ends.unregister(fd)
            if abort := self._read_to_the_end(peer):
                self._abort_as(abort)
            if peer not in self._left:
                self._fail_without(peer, left=False)

    @property
    def inherited(self) -> bool:
        """True if this process was forked from the process of the rank."""
        return self._process != os.getpid()

    def close_in_child(self) -> None:
        """Close a forked process's copies of its parent's connections; the parent's stay open."""
        self.reason = _forked(self._process, self.global_ranks[self.local_rank])
        self.close()

    def close(self) -> None:
        """Close the connections; call when no thread uses them any more."""
        self._close("the process group has been destroyed")
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _close(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
        for each in self._sockets.values():
            each.close()
        self._memory.clear()


def _forked(parent: int, rank: int) -> str:
    return (
        f"process {os.getpid()} cannot use the shm process group: it was forked from process {parent}, which is rank "
        f"{rank} of it. Communicate there, or give this process a group of its own"
    )


def _abort_message(reason: str) -> bytes:
    return MessageKind.ABORT + reason.encode()[: LONGEST - 1]


_alive: "weakref.WeakSet[Peers]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked process, such as a data loader's: it must not keep a dead rank's open."""
    for peers in list(_alive):
        peers.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
