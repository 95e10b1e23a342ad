"""The progress of this rank, in a page of shared memory that other processes can always read.

The page is written by plain stores into memory. Any process of this user on this host can read it through ``/proc``,
even while this process holds the interpreter in a long call, is stopped, or has deadlocked; and a process that has
opened the page before can read it after this one was killed.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from traceback import walk_tb
from types import TracebackType

from torch import UntypedStorage

from lockstep.errors import InspectionError
from lockstep.failures import proc

NAME = "lockstep-progress"
"""The name of the memory in ``/proc/PID/fd``."""


class Phase(StrEnum):
    """The activity of a rank. A program may name others: ``progress.phase("evaluation")``."""

    START_UP = "start-up"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    TRAINING = "training"
    """None of the others: the program's own code between the phases of a step."""
    TEAR_DOWN = "tear-down"


PHASES_OF_A_STEP = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.TRAINING})
"""All other phases were named explicitly."""


@dataclass(frozen=True)
class Snapshot:
    """The content of a page at one moment. Times are of ``time.monotonic()``, which all processes of a host share."""

    run: str
    """The run's name, the same on all its ranks."""
    pid: int
    """The process's number as it sees it itself; 0 after the end of its session."""
    thread: int
    """``threading.get_ident()`` of the thread that trains."""
    rank: int
    world: int
    step: int
    """Number of batches that have been begun, or of steps that the optimizer has made (:attr:`in_batches`); 0 before
    the first, and if neither is counted."""
    phase: str
    started: float
    changed: float
    """The time at which step or phase were last written."""
    waits_for: str
    """The collective of this library in which the rank waits for others; empty if it does not wait."""
    waits_since: float
    in_batches: bool = False
    """True if :attr:`step` is the number of the batch that has been begun last, in a loop over ``batches()``; False if
    it is the number of steps that the optimizer has made."""

    @property
    def where(self) -> str:
        """The step and the phase in words: see :func:`where`."""
        return where(self.step, self.in_batches, self.phase)

    def describe(self) -> str:
        """Return rank, step and phase in words: ``rank 1, at step 12, in forward``."""
        return f"rank {self.rank}, {self.where}" + (f", waiting for {self.waits_for}" if self.waits_for else "")


def where(step: int | None, in_batches: bool, phase: str) -> str:
    """Return in words where a rank is: at a step that it has begun, or after one that it has made.

    A rank whose ``step`` is 0 may be in its first step, or may not count them.
    """
    first = "before its first step" if phase == Phase.START_UP else ""
    place = f"{'at' if in_batches else 'after'} step {step}" if step else first
    return ", ".join(filter(None, (place, phase and f"in {phase}")))


_PAGE = mmap.PAGESIZE
_MAGIC = int.from_bytes(b"lockstep", "little")
_VERSION = 2
_NUMBERS = struct.Struct("<7Q3dQ")  # all words, in the order below
_RUN, _PHASE, _WAITS_FOR, _END = 128, 192, 224, 384  # byte offsets of texts, which end with a zero
# Numbers of words of eight bytes; each is written by one store.
_MAGIC_AT, _VERSION_AT, _PID_AT, _THREAD_AT, _RANK_AT, _WORLD_AT, _STEP_AT = range(7)
_STARTED_AT, _CHANGED_AT, _WAITS_SINCE_AT, _IN_BATCHES_AT = range(7, 11)


class Progress:
    """The page of a rank. Writing one number takes about a tenth of a microsecond, and cannot fail.

    After :meth:`close`, and in a process forked off this one, no other process sees what is written. On systems
    without such memory (other than Linux), only this process sees it at any time.

    Example::

        progress = Progress(run="digits", rank=0, world=2)
        progress.step = 1
        with progress.phase(Phase.FORWARD):
            ...
        progress.close()
    """

    def __init__(self, run: str, rank: int, world: int) -> None:
        self._use(memoryview(bytearray(_PAGE)))
        now = time.monotonic()
        _NUMBERS.pack_into(
            self._bytes, 0, _MAGIC, _VERSION, os.getpid(), threading.get_ident(), rank, world, 0, now, now, 0.0, 0
        )
        self._bytes[_RUN:_PHASE] = _padded(run, _PHASE - _RUN)
        self.current_phase = Phase.START_UP
        self._resumed_at = 0
        self._fd = -1
        if proc.available():
            self._fd = proc.create_memory(NAME)
            self._share()
        _all.add(self)

    @property
    def step(self) -> int:
        """The number of batches that have been begun, or of steps that the optimizer has made (:attr:`in_batches`)."""
        return self._words[_STEP_AT]

    @step.setter
    def step(self, step: int) -> None:
        self._words[_STEP_AT] = step
        self._times[_CHANGED_AT] = time.monotonic()

    @property
    def steps_made(self) -> int:
        """The steps of this process, counted as :attr:`step` is, without those before it resumed."""
        return max(0, self.step - self._resumed_at)

    def resume_at(self, step: int) -> None:
        """Go on from a step of an earlier process."""
        self.step = self._resumed_at = step

    @property
    def in_batches(self) -> bool:
        """True if batches have been counted: steps of the optimizer do not count any more."""
        return bool(self._words[_IN_BATCHES_AT])

    def begin_batch(self) -> None:
        """Count a batch."""
        self._words[_IN_BATCHES_AT] = 1
        self.step += 1

    @property
    def current_phase(self) -> str:
        """The activity of this rank: a :class:`Phase`, or a name of the program's own, of at most 31 bytes."""
        return _text(self._bytes[_PHASE:_WAITS_FOR])

    @current_phase.setter
    def current_phase(self, phase: str) -> None:
        self._bytes[_PHASE:_WAITS_FOR] = _padded(phase, _WAITS_FOR - _PHASE)
        self._times[_CHANGED_AT] = time.monotonic()

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Set another phase inside the block. The former one returns after it, but not after an error, which shows
        it."""
        before = bytes(self._bytes[_PHASE:_WAITS_FOR])
        self.current_phase = phase
        yield
        self._bytes[_PHASE:_WAITS_FOR] = before
        self._times[_CHANGED_AT] = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark the rank, inside the block, as waiting for the others in a collective of this library."""
        self._bytes[_WAITS_FOR:_END] = _padded(what, _END - _WAITS_FOR)
        self._times[_WAITS_SINCE_AT] = time.monotonic()
        try:
            yield
        finally:
            self._times[_WAITS_SINCE_AT] = 0.0

    def read(self) -> Snapshot:
        """Return the content of the page."""
        return _read(bytes(self._bytes[:_END]))

    def close(self) -> None:
        """Withdraw the page: others no longer find it. Its values stay for this process."""
        if self in _all:
            _all.discard(self)
            self._words[_PID_AT] = 0
            self._leave()

    def _share(self) -> None:
        """Move the page's content to memory that others can find, and continue there."""
        os.ftruncate(self._fd, _PAGE)
        shared = memoryview(mmap.mmap(self._fd, _PAGE))
        os.close(self._fd)  # the mapping has a descriptor of its own
        self._fd = -1
        shared[:] = self._bytes
        self._use(shared)

    def _leave(self) -> None:
        """Continue in memory of this process alone. The shared memory is freed with its last view."""
        self._use(memoryview(bytearray(self._bytes)))

    def _use(self, memory: memoryview) -> None:
        self._bytes = memory
        self._words = memory.cast("Q")
        self._times = memory.cast("d")


class Page:
    """The mapped page of another process: it can be read as long as this object exists, even after that process ends.

    It keeps no descriptor, of which a rank would have one for each other rank on its host: PyTorch maps it, since a
    ``mmap`` of Python before 3.13 keeps one.
    """

    def __init__(self, path: str) -> None:
        """Map the page at a path."""
        if os.stat(path).st_size < _PAGE:  # PyTorch would make it longer
            raise InspectionError("this page of a process's progress is not written yet")
        self._memory = UntypedStorage.from_file(path, True, _PAGE)

    def read(self) -> Snapshot:
        """Return the present content of the page."""
        return _read(ctypes.string_at(self._memory.data_ptr(), _END))


def pages_of(pid: int) -> list[Page]:
    """Return the pages of a process, by rank: several if its threads are ranks, none if it has no session.

    Raises :class:`InspectionError` if there is no such process, or this user may not inspect it.
    """
    numbers = proc.status_of(pid).numbers
    if not proc.may_look_into(pid):
        raise InspectionError(f"process {pid} belongs to another user, and may not be looked into; ask as that user")
    pages: dict[int, Page] = {}  # by inode: a process may have opened its own page a second time, to read it
    for _, path in proc.shared_memories(pid, NAME):
        with contextlib.suppress(OSError, RuntimeError, InspectionError):  # closed since, not complete, or of no use
            inode, page = os.stat(path).st_ino, Page(path)
            if page.read().pid == numbers[-1]:  # and not of another process, whose page it reads
                pages[inode] = page
    return sorted(pages.values(), key=lambda page: page.read().rank)


def page_of(pid: int, run: str, rank: int) -> Page | None:
    """Return the page of one rank of a run, if the process has it."""
    of_rank = ((page, page.read()) for page in pages_of(pid))
    return next((page for page, seen in of_rank if (seen.run, seen.rank) == (run, rank)), None)


def _read(page: bytes) -> Snapshot:
    magic, version, pid, thread, rank, world, step, *times, in_batches = _NUMBERS.unpack_from(page)
    started, changed, waits_since = times
    if (magic, version) != (_MAGIC, _VERSION):
        raise InspectionError(
            f"this page of a process's progress is of format {version}, and this lockstep reads format {_VERSION}; "
            "use the version with which the process runs"
        )
    waits_for = _text(page[_WAITS_FOR:_END]) if waits_since else ""
    run, phase = _text(page[_RUN:_PHASE]), _text(page[_PHASE:_WAITS_FOR])
    return Snapshot(
        run, pid, thread, rank, world, step, phase, started, changed, waits_for, waits_since, bool(in_batches)
    )


@functools.lru_cache(256)
def _padded(text: str, size: int) -> bytes:
    """Return as many whole characters as fit, padded with zeros."""
    data = text.encode()[: size - 1].decode(errors="ignore").encode()
    return data.ljust(size, b"\0")


def _text(data: bytes | memoryview) -> str:
    return bytes(data).partition(b"\0")[0].decode(errors="replace")


# -------------------------------------------------------------------------------- the phase that a traceback shows

_FILES = (
    # The outermost frame that is known decides: a forward that is recomputed in backward is backward.
    ("/torch/utils/data/", Phase.DATA),
    ("/torch/optim/", Phase.OPTIMIZER),
    ("/torch/amp/grad_scaler.py", Phase.OPTIMIZER),
    ("/torch/_tensor.py", Phase.BACKWARD),
    ("/torch/autograd/__init__.py", Phase.BACKWARD),
    ("/torch/autograd/graph.py", Phase.BACKWARD),
    ("/torch/serialization.py", Phase.CHECKPOINT),
    ("/lockstep/checkpoints/sampler.py", Phase.DATA),  # goes through a loader
    ("/lockstep/checkpoints/", Phase.CHECKPOINT),
    ("/torch/nn/modules/module.py", Phase.FORWARD),
)
_NOT_NAMED = PHASES_OF_A_STEP | {Phase.START_UP, Phase.CHECKPOINT}


def phase_of(traceback: TracebackType | None, otherwise: str) -> str:
    """Return the phase of PyTorch's or this library's code that a traceback shows; ``otherwise`` if it shows neither.

    The phase is read from the traceback, so that a step costs nothing.

    A phase that the program has named itself, such as ``evaluation``, is given as ``otherwise`` and stays in front.
    """
    return phase_of_files((frame.f_code.co_filename for frame, _ in walk_tb(traceback)), otherwise)


def phase_of_files(files: Iterable[str], otherwise: str) -> str:
    """Do the same as :func:`phase_of` with the files of the frames, from the outermost to the innermost."""
    found = next((phase for file in files if (phase := _phase_of_file(file))), None)
    if found is None or found == otherwise:
        return otherwise
    return found if otherwise in _NOT_NAMED else f"{otherwise}, in {found}"


def _phase_of_file(file: str) -> str | None:
    name = file.replace("\\", "/")
    return next((phase for part, phase in _FILES if part in name), None)


# ----------------------------------------------------------------------------------------------- all pages

_all: "weakref.WeakSet[Progress]" = weakref.WeakSet()


def _forked() -> None:
    """Detach the pages in a forked process: it is not the rank that its parent is, and must not write as that rank."""
    for progress in _all:
        progress._leave()
    _all.clear()


os.register_at_fork(after_in_child=_forked)
