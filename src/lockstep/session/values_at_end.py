"""Compares the replicas of a session that ends well: nothing that has drifted apart since the last look goes unnoticed.

Each rank tells its digests around the ring of the failure channel before it tells that it is done, and compares when
all are done. So nobody waits for a rank that still trains, and no collective is begun that another rank might take for
one of its own. Only if digests differ, the ranks tell each other more.
"""

import json
import threading
import time
from typing import Any

from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.replication.in_sync import PartAtEnd, check_alike, parts_at_end
from lockstep.errors import CommunicationError, OutOfSyncError
from lockstep.failures.channel import FailureChannel

ANSWER_SECONDS = 30.0
"""Seconds that ranks which are done wait for each other's digests of tensors; some may take long to release a group."""
_PIECE = 1 << 18
"""Number of characters of a message."""


class ValuesAtEnd:
    """The digests of one session that this rank tells, and is told."""

    def __init__(self, channel: FailureChannel, collectives: Collectives) -> None:
        self._channel = channel
        self._collectives = collectives
        self._parts: list[PartAtEnd] = []
        self._changed = threading.Condition()
        self._pieces: dict[str, dict[int, list[str]]] = {}  # by what is told, and by rank
        channel.on("values", self._hear)

    def tell(self) -> None:
        """Tell digests of the parameters of replicated modules, and of the optimizers that have stepped them.

        Reads all of it once. Call it before :meth:`FailureChannel.announce_end`."""
        self._parts = parts_at_end(self._collectives.world)
        self._say([[each.key, each.digest()] for each in self._parts], "digests")

    def check(self) -> None:
        """Raise :class:`OutOfSyncError`, on every rank, if replicas differ; call it when all ranks are done.

        Nothing is compared if a rank has ended with an error, or without closing its session, and nothing that some
        rank does not have any more, or has in another dtype by now.
        """
        rows = self._told("digests")
        if rows is None or self._channel.knows_failure:
            return
        digests = [_by_key(row) for row in rows]
        differing = {
            (key, number)
            for key, own in digests[0].items()
            for number, digest in enumerate(own)
            if all(len(each.get(key, ())) == len(own) for each in digests)
            and any(each[key][number] != digest for each in digests)
        }
        found = [part for place, part in zip(_places(self._parts), self._parts, strict=True) if place in differing]
        if found:
            self._raise([each for each in found if each.watch is found[0].watch])

    def _raise(self, parts: list[PartAtEnd]) -> None:
        """Raise the error for parts of one module that differ."""
        watch = parts[0].watch
        since = f"step {watch.alike_after}" if watch.alike_after else "replicate()"
        end = f", after step {watch.round}" if watch.round else ""
        advice = (
            f"It has come between {since} and the end of the session{end}. What one rank does to its model alone when "
            "the training is over (averaged weights for a last test), do to a copy of it"
        )
        values = [each for part in parts for each in part.values]
        optimizers = [each for part in parts for each in part.optimizers]
        try:
            check_alike(values, optimizers, self._collectives, advice, gather=self._gather)
        except CommunicationError as error:
            raise OutOfSyncError(f"replicas differ at the end of the session, and {error}. {advice}") from error
        raise OutOfSyncError(f"replicas have differed at the end of the session. {advice}")

    def _gather(self, value: Any, what: str) -> list[Any]:
        """Return what all ranks tell, in their order."""
        self._say(value, what)
        until = time.monotonic() + ANSWER_SECONDS
        with self._changed:
            while (rows := self._told(what)) is None:
                if self._channel.knows_failure or (left := until - time.monotonic()) <= 0:
                    raise CommunicationError(f"not all ranks have told their {what}")
                self._changed.wait(min(left, 0.1))
        return rows

    def _say(self, value: Any, what: str) -> None:
        rank, text = self._channel.rank, json.dumps(value)
        for start in range(0, len(text), _PIECE):
            message = {"rank": rank, "what": what, "left": len(text[start + _PIECE :]), "text": text[start:][:_PIECE]}
            self._channel.tell("values", **message)
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        with self._changed:
            pieces = self._pieces.setdefault(message["what"], {}).setdefault(message["rank"], [])
            pieces.append(message["text"])
            if not message["left"]:
                pieces[:] = ["".join(pieces), ""]
            self._changed.notify_all()

    def _told(self, what: str) -> list[Any] | None:
        """Return what all ranks have told; None if some have not."""
        pieces = self._pieces.get(what, {})
        texts = [pieces.get(rank, []) for rank in self._channel.global_ranks]
        return None if any(not each or each[-1] for each in texts) else [json.loads(each[0]) for each in texts]


def _by_key(row: list[list[int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for key, digest in row:
        found.setdefault(key, []).append(digest)
    return found


def _places(parts: list[PartAtEnd]) -> list[tuple[int, int]]:
    """Return for each part its key, and its number among those of that key."""
    return [(each.key, sum(other.key == each.key for other in parts[:at])) for at, each in enumerate(parts)]
