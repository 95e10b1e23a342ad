"""Finds out whether a host is down, or only the network between it and this one; asks a constant number of hosts.

A host that is silent here may still be reached from others. So whoever loses one asks a rank of each of a few other
hosts, over the ring, whether that host answers there.
"""

import contextlib
import errno
import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from lockstep._base import network
from lockstep._base.texts import ranks_in_words
from lockstep.failures.failure import Failure, Kind
from lockstep.failures.ring import Place

WITNESSES = 3
"""Number of other hosts that are asked, and tried."""
REACH_SECONDS = 1.0
"""Seconds that a host has to answer an attempt to connect."""
ANSWER_SECONDS = REACH_SECONDS + 1.0
"""Seconds that a rank of another host has to say whether it reaches a host."""


class Inquiry(NamedTuple):
    """What an inquiry about a host has found."""

    failure: Failure
    answers: bool
    """True if the host was tried, and answers: then there is no failure."""
    is_cut_off: bool
    """True if none of some other hosts answers to this one."""


class Hosts:
    """What one rank can learn about the hosts of others, given the ``places`` of all ranks that are known so far.

    ``tell`` sends a message around the ring; its answers have to come to :meth:`asked` and :meth:`answered`.
    """

    def __init__(self, rank: int, places: Mapping[int, Place], tell: Callable[..., object]) -> None:
        self._rank = rank
        self._places = places
        self._tell = tell
        self._numbers = itertools.count()
        self._inquiry = ""
        self._reached: dict[int, bool] = {}  # whether the lost host answers there, by the rank that has tried it
        self._changed = threading.Condition()

    def ranks_with(self, rank: int) -> list[int]:
        """Return the ranks on the same host as a rank, in order."""
        places = dict(self._places)
        return sorted(each for each in places if rank in places and places[each].host == places[rank].host)

    def silent(self, ranks: Collection[int]) -> dict[int, str]:
        """Return those of a few ranks whose hosts do not answer an attempt to connect, with the names of the hosts.

        Opens one socket for each host but this one, and waits for a second at most.
        """
        tried = self._tried(ranks)
        return {rank: self._places[rank].name for rank in ranks if tried.get(rank) is Reach.SILENT}

    def _tried(self, ranks: Collection[int]) -> dict[int, "Reach"]:
        own = self._places[self._rank].host
        hosts = {self._places[rank].host for rank in ranks} - {own}
        doors = {host: door for host, (_, door) in self._doors().items() if host in hosts}
        answers = dict(zip(doors, reach([(each.ip, each.port) for each in doors.values()], REACH_SECONDS), strict=True))
        return {rank: answers[host] for rank in ranks if (host := self._places[rank].host) in answers}

    def at(self, addresses: Collection[str]) -> list[int]:
        """Return one rank for each other host that has one of some addresses, as far as the ring knows them."""
        own = self._places[self._rank].host
        return [rank for host, (rank, door) in self._doors().items() if host != own and door.ip in addresses]

    def inquire(self, rank: int, seen: str, *, tries: bool = False) -> "Inquiry":
        """Return the failure of a rank whose host is silent; ``seen`` says which rank has noticed what.

        Waits two seconds at most for what other hosts say, as this one may be the one that is cut off. With ``tries``
        the host may be there: it is tried meanwhile.
        """
        until = time.monotonic() + ANSWER_SECONDS
        own, lost = self._places[self._rank], self._places[rank]
        witnesses = self._witnesses((own.host, lost.host))
        with self._changed:
            self._inquiry = f"{self._rank} {next(self._numbers)}"
            self._reached = {}
        if witnesses:
            self._tell("reach", inquiry=self._inquiry, of=rank, ranks=witnesses)
        tried = self._tried([*witnesses, rank] if tries else witnesses)
        answers = tries and tried.get(rank) is not Reach.SILENT
        silent = [each for each in witnesses if tried.get(each) is Reach.SILENT]
        if not answers and len(silent) < len(witnesses):  # if this host reaches none of them, no answer will come
            self._wait_for_answers(witnesses, until)
        reached = dict(self._reached)

        def names(chosen: Callable[[int], object]) -> list[str]:
            return [self._places[each].name for each in witnesses if chosen(each)]

        failure = unreachable(
            self.ranks_with(rank),
            lost.name,
            seen,
            own.name,
            names(lambda each: each in reached or tried.get(each) in (Reach.ANSWERS, Reach.REFUSES)),
            names(lambda each: each in silent and each not in reached),
            names(reached.get),
        )
        is_cut_off = bool(silent) and len(silent) == len(witnesses) and not reached
        return Inquiry(failure, answers, is_cut_off)

    def asked(self, message: dict[str, Any]) -> None:
        """Answer whether the host of a rank answers here, if this rank is asked; tries it on a thread of its own."""
        if self._rank in message["ranks"] and message["of"] in self._places:
            what = message["inquiry"], message["of"]
            threading.Thread(target=self._try, args=what, name="lockstep reach", daemon=True).start()

    def answered(self, message: dict[str, Any]) -> None:
        """Take the answer of another rank."""
        with self._changed:
            if message["inquiry"] == self._inquiry:
                self._reached[message["rank"]] = message["answers"]
                self._changed.notify_all()

    def _try(self, inquiry: str, rank: int) -> None:
        self._tell("reached", inquiry=inquiry, rank=self._rank, answers=not self.silent([rank]))

    def _wait_for_answers(self, witnesses: Collection[int], until: float) -> None:
        """Wait until all have answered, or one that reaches the host."""
        with self._changed:
            while len(self._reached) < len(witnesses) and not any(self._reached.values()):
                if (left := until - time.monotonic()) <= 0:
                    return
                self._changed.wait(left)

    def _witnesses(self, without: Collection[str]) -> list[int]:
        """Return one rank of each of a few hosts, spread over all."""
        others = [rank for host, (rank, _) in self._doors().items() if host not in without]
        return others[:: max(1, len(others) // WITNESSES)][:WITNESSES]

    def _doors(self) -> dict[str, tuple[int, Place]]:
        """Return, for each host, the first rank that listens where other hosts reach it, and its place."""
        doors: dict[str, tuple[int, Place]] = {}
        for rank, place in sorted(dict(self._places).items()):
            if not network.is_loopback(place.ip):
                doors.setdefault(place.host, (rank, place))
        return doors


def unreachable(
    ranks: Sequence[int],
    host: str,
    seen: str,
    own: str,
    answering: Sequence[str],
    silent: Sequence[str],
    reaching: Sequence[str],
) -> Failure:
    """Return the failure of all ``ranks`` of a ``host`` that is silent; ``seen`` says which rank noticed what.

    ``answering`` and ``silent`` are some hosts other than these two that answer, or do not answer, to ``own``, the
    observing host: if none does, it is cut off itself. The hosts that are ``reaching`` the silent one as well show that
    only the network between the two is down.
    """
    what = f"{seen}, where {ranks_in_words(ranks)} {'are' if len(ranks) > 1 else 'is'}"
    still = f"{_listed(answering)} still answer{'s' if len(answering) == 1 else ''} {own}"
    if reaching:
        one, other = sorted((own, host))
        what += f"; {_listed(reaching)} still reach{'es' if len(reaching) == 1 else ''} both, so that the network "
        what += f"between {one} and {other} is down"
    elif answering and silent:
        what += f"; {still}, {_listed(silent)} {'do' if len(silent) > 1 else 'does'} not, so that "
        what += f"{_listed([host, *silent])}, or the network to them, are down"
    elif answering:
        what += f"; {still}, so that {host} or its network is down"
    elif silent:
        what += f"; {_listed(silent)} {'do' if len(silent) > 1 else 'does'} not answer either: {own} is cut off"
    else:
        what += f": {host}, {own}, or the network between them is down"
    return Failure(min(ranks), Kind.UNREACHABLE, None, "", what)


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names))


class Reach(Enum):
    """The result of an attempt to connect to another host."""

    ANSWERS = auto()
    REFUSES = auto()
    """The host is there, but no process listens."""
    SILENT = auto()
    """Nothing came back: the host, or the network, is down."""
    UNKNOWN = auto()
    """It could not be tried: this process has no descriptor left."""


def reach(doors: Sequence[tuple[str, int]], seconds: float) -> list[Reach]:
    """Return the result of an attempt to connect to each address and port, all tried at once for some seconds.

    Takes a socket for each: give it few.
    """
    found = [Reach.SILENT] * len(doors)
    with contextlib.ExitStack() as stack:
        tried: dict[int, tuple[int, socket.socket]] = {}
        poll = select.poll()
        for number, (ip, port) in enumerate(doors):
            try:
                each = stack.enter_context(socket.socket(network.family_of(ip), socket.SOCK_STREAM))
            except OSError:
                found[number] = Reach.UNKNOWN
                continue
            each.setblocking(False)
            if (error := each.connect_ex((ip, port))) != errno.EINPROGRESS:  # such as that no route leads there
                found[number] = _REACH.get(error, Reach.SILENT)
                continue
            tried[each.fileno()] = number, each
            poll.register(each, select.POLLOUT)
        until = time.monotonic() + seconds
        while tried and (left := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1e3):
                number, each = tried.pop(fd)
                poll.unregister(fd)
                found[number] = _REACH.get(each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), Reach.SILENT)
    return found


_REACH = {0: Reach.ANSWERS, errno.ECONNREFUSED: Reach.REFUSES}
