"""Ranks that have noticed together that they differ tell each other which call of the program each of them is in."""

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from lockstep.failures.deadlock import advice
from lockstep.failures.program_lines import place_of
from lockstep.failures.progress import Progress
from lockstep.failures.stacks import own_stack

SECONDS = 1.0
"""Seconds that a rank waits for what the others tell."""
_KEPT = 16
_CALLED_FROM = ", called from "


class Calls:
    """Exchanges which collectives ranks were in, over a failure channel."""

    def __init__(self, progress: Progress, rank: int, tell: Callable[..., object]) -> None:
        self._progress = progress
        self._rank = rank
        self._tell = tell
        self._changed = threading.Condition()
        self._told: dict[str, dict[int, str]] = {}

    def compare(self, key: str, what: str, ranks: Collection[int]) -> str:
        """Return in words which collectives the ranks were in that have noticed that theirs are not the same.

        Each of the ``ranks`` has to call it with the same ``key``, and ``what`` it was in itself. Waits a second for
        ranks that do not, such as those in a collective of the program.
        """
        place = place_of(own_stack(threading.get_ident()))
        steps = self._progress.read().steps_in_words
        own = f"in {what}" + (steps and f", {steps}") + (place and f"{_CALLED_FROM}{place}")
        self._tell("call", rank=self._rank, key=key, text=own)
        self._note(self._rank, key, own)
        until = time.monotonic() + SECONDS
        with self._changed:
            told = self._told[key]
            while not told.keys() >= set(ranks) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            found = {rank: told.get(rank, "in another collective") for rank in sorted(ranks)}
        lines = [f"  rank {rank} {text}" for rank, text in found.items()]
        collectives = (text.partition(_CALLED_FROM)[0] for text in found.values())
        return "\n".join([*lines, advice(collectives)])

    def hear(self, message: dict[str, Any]) -> None:
        """Take what another rank tells."""
        self._note(message["rank"], message["key"], message["text"])

    def _note(self, rank: int, key: str, text: str) -> None:
        with self._changed:
            self._told.setdefault(key, {})[rank] = text
            while len(self._told) > _KEPT:
                del self._told[next(iter(self._told))]
            self._changed.notify_all()
