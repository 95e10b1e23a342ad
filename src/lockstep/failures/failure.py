"""A failure of a rank as a message, the log of failures, and the error that the other ranks raise.

The log is in the store of a group: every rank reads the same entries in the same order. Each entry has a number, which
``compare_set`` claims; so of two ranks that fail at once one is the first, for all ranks that reach the store. A rank
that does not reach it relies on what the others tell it.
"""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from traceback import format_exception, format_exception_only
from typing import Any

from lockstep._base.debug import log_of
from lockstep._base.store import BoundedStore, StoreLostError
from lockstep._base.texts import LONGEST_HEADLINE, shortened
from lockstep.errors import AgreementError, CommunicationError, PeerError, PeerFailure, StalledError
from lockstep.failures.progress import Snapshot, phase_of, where

LONGEST_TRACEBACK = 48 * 1024
"""Number of characters of a traceback that are sent: with its headline, a failure fits into one message of the ring,
whatever the characters are."""


class Kind(StrEnum):
    """The way in which a rank failed."""

    RAISED = "raised"
    """An exception left its training."""
    ENDED = "ended"
    """Its process ended without a message: killed, or by ``os._exit``."""
    LEFT = "left"
    """It has left in good order while others still need it."""
    UNCLOSED = "unclosed"
    """Its program has ended without closing its session or watch; nobody knows whether with an error."""
    STALLED = "stalled"
    """It is alive and makes no progress."""
    UNREACHABLE = "unreachable"
    """Its host, or the network to it, is down."""
    DEADLOCKED = "deadlocked"
    """It waits for ranks that wait for it, in different collectives; ``what`` says which, and is the whole message."""
    GAVE_UP = "gave up"
    """It has waited for others in vain, and no rank knows which of them is at fault."""
    ABSENT = "absent"
    """It did not come to meet the others; ``what`` is the whole message."""


@dataclass(frozen=True)
class Failure:
    """One rank's failure, as it is written to the log and raised on all others."""

    rank: int
    kind: Kind
    step: int | None
    """The step in which it was (:attr:`Snapshot.step`); 0 before the first, None if unknown."""
    phase: str
    what: str = ""
    """The exception's type and message; for other kinds, further details."""
    traceback: str | None = None
    stacks: str | None = None
    """The stacks of its threads, if they could be obtained."""
    in_batches: bool = False
    """What ``step`` counts, as :attr:`Snapshot.in_batches` says."""
    is_late: bool = False
    """True for an error of an accelerator, which the host hears of at a later call: ``step`` is the one of that."""

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> "Failure":
        """Rebuild a failure from its fields as JSON has them."""
        return cls(**{**fields, "kind": Kind(fields["kind"])})

    @property
    def summary(self) -> str:
        """The failure in one sentence: ``rank 1 failed at step 12, in forward: ValueError: bad value``."""
        if self.kind in (Kind.DEADLOCKED, Kind.ABSENT):
            return self.what
        between = ", " if self.kind in (Kind.LEFT, Kind.UNCLOSED) else " "
        parts = f"rank {self.rank} {_VERBS[self.kind]}", self._place
        return between.join(filter(None, parts)) + (f": {self.what}" if self.what else "")

    @property
    def _place(self) -> str:
        if self.kind in (Kind.LEFT, Kind.UNCLOSED):
            return where(self.step, False, "")
        if self.is_late and self.step:
            seen = f", noticed in {self.phase}" if self.phase else ""
            return f"at or before step {self.step if self.in_batches else self.step + 1}{seen}"
        return where(self.step, self.in_batches, self.phase)

    def error(self, here: int) -> PeerFailure:
        """Return the error to raise on rank ``here``, which may be the failed rank itself if the others gave it up."""
        if here == self.rank and self.kind is not Kind.DEADLOCKED:
            why = "it made no progress" if self.kind is Kind.STALLED else "it could not be reached"
            return StalledError(
                f"rank {here} was given up by the others, because {' '.join(filter(None, (why, self._place)))}: "
                f"{self.what}. They have ended, so it cannot go on",
                **self._fields(),
            )
        parts = [f"rank {here} stops, because {self.summary}"]
        if self.traceback:
            parts.append(f"What rank {self.rank} raised:\n{_indented(self.traceback)}")
        if self.stacks:
            parts.append(f"What rank {self.rank} was doing:\n{_indented(self.stacks)}")
        return PeerFailure("\n\n".join(parts), **self._fields())

    def _fields(self) -> dict[str, Any]:
        """Return the attributes of the error that programs can read."""
        reason = self.what or _VERBS[self.kind]
        if self.kind is Kind.DEADLOCKED:
            reason = reason.partition("\n")[0]
        same = ("rank", "step", "phase", "traceback", "stacks")
        return {"reason": reason, **{name: getattr(self, name) for name in same}}


GIVEN_UP = frozenset([Kind.STALLED, Kind.UNREACHABLE, Kind.DEADLOCKED])
"""The kinds that are reported of a rank that may be alive, and is told, too."""

_VERBS = {
    Kind.RAISED: "failed",
    Kind.ENDED: "has ended without a word (its process was killed, crashed, or called os._exit)",
    Kind.LEFT: "has left the training in good order, while others still needed it",
    Kind.UNCLOSED: "has ended its program without closing its session or watch, while others still needed it",
    Kind.STALLED: "makes no progress",
    Kind.UNREACHABLE: "cannot be reached",
    Kind.DEADLOCKED: "waits for ranks that wait for it",
    Kind.GAVE_UP: "gave up waiting for the other ranks",
}


class FailureLog:
    """The failures of a run, in an order that is the same for all ranks."""

    def __init__(self, store: Any) -> None:
        """Keep the log in a store that is on a connection of its own."""
        self.bounded_store = BoundedStore(store)
        self._lock = threading.Lock()
        self.entries: list[Failure] = []
        """The entries read so far."""

    def append(self, failure: Failure) -> Failure:
        """Append an entry; return the first entry of the log, or the new entry if the store is lost."""
        text = json.dumps(asdict(failure))
        try:
            with self._lock:
                while True:
                    there = self.bounded_store.compare_set(_key(len(self.entries)), "", text)
                    self.entries.append(_unpacked(there))
                    log_of("failures").debug("entry %d: %s", len(self.entries), there)
                    if there == text:
                        break
        except StoreLostError:
            pass
        return self.first or failure

    def read(self) -> list[Failure]:
        """Read the new entries; return all entries. Raises :class:`StoreLostError`."""
        with self._lock:
            while (text := self.bounded_store.read(_key(len(self.entries)))) is not None:
                self.entries.append(_unpacked(text))
        return self.entries

    def look(self, found: Callable[[Failure], object]) -> None:
        """Call ``found`` with the first entry, if there is one, from another thread; does not wait for the store."""
        self.bounded_store.look(_key(0), lambda text: found(_unpacked(text)))

    def close(self) -> None:
        """Close the connection; the log cannot be used any more."""
        self.bounded_store.close(shut_down=True)

    @property
    def first(self) -> Failure | None:
        """The first entry, if any has been read."""
        return self.entries[0] if self.entries else None


def _key(number: int) -> str:
    return f"failure {number}"


def _unpacked(text: str) -> Failure:
    return Failure.of_fields(json.loads(text))


def of_exception(error: BaseException, seen: Snapshot) -> Failure:
    """Return the failure of this rank, whose training an exception has left, and whose progress was ``seen``.

    The traceback may show a more precise phase than the one that was recorded.
    """
    first = origin(error)
    what = _headline(first)
    if first is not error:
        what += f" (and while that was handled: {_headline(error)})"
    text = shortened("".join(format_exception(error)).rstrip(), LONGEST_TRACEBACK)
    phase = phase_of(first.__traceback__, seen.phase)
    is_late = type(first).__name__ == "AcceleratorError" or "CUDA error" in str(first)
    return Failure(seen.rank, Kind.RAISED, seen.step, phase, what, text, in_batches=seen.in_batches, is_late=is_late)


def origin(error: BaseException) -> BaseException:
    """Return the original exception, not one that was raised while the original was handled."""
    seen = {id(error)}
    while error.__cause__ is None and not error.__suppress_context__ and error.__context__ is not None:
        if id(error.__context__) in seen:
            break
        error = error.__context__
        seen.add(id(error))
    return error


def follows_from_another(error: BaseException) -> bool:
    """Return True if an exception says, or may say, that another rank has failed rather than this one.

    Not one that all ranks raise, because they differ."""
    if any(isinstance(each.__cause__, AgreementError) for each in chain(error)):
        return False
    return any(isinstance(each, PeerError | CommunicationError) or _is_of_a_group(each) for each in chain(error))


def peer_failure_in(error: BaseException) -> PeerFailure | None:
    """Return the failure of another rank from which an exception follows, if the exception contains it."""
    return next((each for each in chain(error) if isinstance(each, PeerFailure)), None)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and those from which it was raised or that were being handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


_WORDS_OF_GROUPS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Operation timed out!",
    "Application timeout caused pair closure",
    "NCCL",
    "Socket Timeout",
)


def _is_of_a_group(error: BaseException) -> bool:
    """Return True if a process group or store of PyTorch raised it: these raise a RuntimeError when they lose a
    peer."""
    if not isinstance(error, RuntimeError):
        return False
    kinds = {each.__name__ for each in type(error).__mro__}
    return "DistError" in kinds or any(words in str(error) for words in _WORDS_OF_GROUPS)


def _headline(error: BaseException) -> str:
    lines = format_exception_only(error)
    return shortened(next((line for line in lines if not line.startswith(" ")), lines[-1]).strip(), LONGEST_HEADLINE)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
