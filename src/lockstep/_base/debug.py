"""One logger for each room of the library, and ``LOCKSTEP_DEBUG``, which prints what some rooms do to stderr.

``LOCKSTEP_DEBUG=rounds,failures`` turns printing on, and keeps the library's frames in tracebacks of its errors: no
result depends on it. docs/logging.md is for users.
"""

import logging
import os
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import torch

from lockstep._base.arguments import did_you_mean
from lockstep.errors import LockstepError, OptionError
from lockstep.phases import printed_rooms

ROOMS = {
    "checkpoints": "what is saved, and what a run resumes from",
    "failures": "messages of ranks about failures, and what is recorded",
    "local": "the phases of DataParallel on each replica",
    "rounds": "each collective of a step, what waits for it, and how long both take",
    "session": "how ranks meet and end",
    "shm": "collectives over shared memory, and groups that begin and end",
}
"""The rooms, and what they print."""

printed = printed_rooms
"""The rooms that are printed. Code that runs in each step asks this before it makes a message."""


def log_of(room: str) -> logging.Logger:
    """Return the logger of a room: ``lockstep.ROOM``, below the logger ``lockstep``."""
    return logging.getLogger(f"lockstep.{room}")


def print_rooms(names: str) -> None:
    """Print the debug messages of rooms, whose names are separated by commas, or of all rooms if one is ``all``.

    Raises :class:`OptionError` for a room that does not exist.
    """
    chosen = {name.strip() for name in names.split(",") if name.strip()}
    for name in chosen - {"all", *ROOMS}:
        raise OptionError(f"LOCKSTEP_DEBUG: there is no room {name!r}; {did_you_mean(name, ['all', *ROOMS])}")
    rank = os.environ.get("RANK")
    place = f"process {os.getpid()}" if rank is None else f"rank {rank}"
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d {place} %(name)s: %(message)s", "%H:%M:%S"))
    for room in ROOMS if "all" in chosen else chosen:
        log_of(room).setLevel(logging.DEBUG)
        log_of(room).addHandler(handler)
        printed.add(room)


_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep


def leave_out_own_frames(error: BaseException | None) -> None:
    """Take the frames of this library, and those of PyTorch that lead to it, out of the tracebacks of its own errors:
    of ``error``, and of those behind it.

    Users find their own line above the sentence that says what is wrong. With ``LOCKSTEP_DEBUG`` all frames stay.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen and not printed:
        seen.add(id(error))
        if isinstance(error, LockstepError):
            error.__traceback__ = _without_own(error.__traceback__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _without_own(traceback: TracebackType | None) -> TracebackType | None:
    kept = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_OURS):
            kept.append(traceback)
        traceback = traceback.tb_next
    while len(kept) > 1 and kept[-1].tb_frame.f_code.co_filename.startswith(_TORCH):
        kept.pop()
    for outer, inner in pairwise([*kept, None]):
        if outer is not None:
            outer.tb_next = inner
    return kept[0] if kept else None
