"""PURE: which rank is late, from what all ranks say of themselves, and how that is told."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.failures.failure import Failure, Kind
from lockstep.failures.places import collective_of, compiles, program_frame
from lockstep.failures.progress import Snapshot
from lockstep.failures.stacks import Thread
from lockstep.failures.where import phase_of_files

FRAMES = 8
"""Of a stack, how many of the innermost frames are shown."""


@dataclass(frozen=True)
class Answer:
    """What one rank is doing, said by itself or found out by another rank on its host."""

    rank: int
    pid: int = 0
    step: int | None = None
    """Batches that it had begun; None if nobody knows."""
    phase: str = ""
    """Empty if nobody knows."""
    idle: float = 0.0
    """Seconds since it has written its progress."""
    waits_for: str = ""
    """What it waits for, if it waits for other ranks."""
    begun: int | None = None
    """How many collectives it has begun on the group; None where that is not counted."""
    compiles: bool = False
    answers: bool = True
    """Whether it has said this itself."""
    stopped: bool = False
    silent_host: str = ""
    """The name of its host, if that does not answer, either."""
    stack: str = ""
    """The innermost frames of the thread that trains."""
    place: str = ""
    """The innermost line of the program's own code."""

    @classmethod
    def of(cls, seen: Snapshot, thread: Thread | None, now: float, **more: Any) -> "Answer":
        """From a page of progress, and the stack of the thread that trains, if there is one."""
        idle = now - seen.changed
        if thread is None:
            return cls(seen.rank, seen.pid, seen.step, seen.phase, idle, seen.waits_for, **more)
        phase = phase_of_files((frame.file for frame in thread.frames), seen.phase)
        waits_for = seen.waits_for or collective_of(thread)
        own = program_frame(thread)
        place = f"line {own.line} of {own.file}, in {own.function}" if own is not None else ""
        more.update(compiles=compiles(thread), stack=thread.innermost(FRAMES), place=place)
        return cls(seen.rank, seen.pid, seen.step, phase, idle, waits_for, **more)

    def to_json(self) -> dict[str, Any]:
        """What travels."""
        return asdict(self)

    def line(self) -> str:
        """In one line, where it is."""
        if self.step is None:
            return f"rank {self.rank}: not known; it does not answer"
        what = f"waits in {self.waits_for}" if self.waits_for else f"is in {self.phase}"
        return f"rank {self.rank}: step {self.step}, {what}" + (f", called from {self.place}" if self.place else "")


def late(answers: Sequence[Answer], waited: float) -> Answer | None:
    """The rank for which another one has ``waited`` some seconds; None if that cannot be told.

    It is one that does not wait for others: if there are several, one that cannot even answer, else the one that is
    furthest behind. A rank that goes from step to step meanwhile is not meant. If all wait, it is the one that is
    furthest behind, and the others are in a later collective; None if all are in the same.
    """
    known = [each for each in answers if each.begun is not None]
    counted = len(known) == len(answers)

    def behind(each: Answer) -> tuple[bool, int, int, float]:
        return each.answers and not each.stopped, (each.begun or 0) if counted else 0, each.step or 0, -each.idle

    busy = [each for each in answers if not each.waits_for or each.stopped]
    if busy:
        return min((each for each in busy if not each.answers or each.idle > waited / 2), key=behind, default=None)
    first, last = min(answers, key=behind), max(answers, key=behind)
    if behind(first)[1:3] != behind(last)[1:3]:
        return first
    return _odd_one_out(answers)


def absent(answers: Sequence[Answer]) -> Answer | None:
    """The rank that others have waited for in vain, until their time was over; None if that cannot be told.

    It is one that cannot answer; else one that does not wait, and has begun fewer collectives than another one. (Whose
    own time has just been over does not wait any more, either, but has begun as many.)
    """
    silent = [each for each in answers if not each.answers or each.stopped]
    most = max((each.begun for each in answers if each.begun is not None), default=0)
    elsewhere = [each for each in answers if not each.waits_for and each.begun is not None and each.begun < most]
    return min(silent or elsewhere, key=lambda each: (each.begun or 0, each.step or 0, -each.idle), default=None)


def _odd_one_out(answers: Sequence[Answer]) -> Answer | None:
    """Of ranks that are equally far, one that waits for something that most others do not."""
    waits = [each.waits_for for each in answers]
    rarest = min(answers, key=lambda each: waits.count(each.waits_for))
    return rarest if waits.count(rarest.waits_for) < len(answers) else None


def stalled(found: Answer, answers: Sequence[Answer], waiting: Answer, waited: float, limit: str) -> Failure:
    """The failure to tell: ``found`` is late, and ``waiting`` is the rank that has waited too long for it."""
    what = f"rank {waiting.rank} has waited {waited:.0f} s for it, longer than the limit ({limit}). {_condition(found)}"
    return _failure(found, answers, what)


def waited_in_vain(found: Answer, answers: Sequence[Answer], waiting: int, error: str) -> Failure:
    """The failure to tell: ``found`` is not where the others are, and rank ``waiting`` has raised an error for it."""
    return _failure(found, answers, f"rank {waiting} has waited for it in vain ({error}). {_condition(found)}")


def _failure(found: Answer, answers: Sequence[Answer], what: str) -> Failure:
    others = "\n".join(each.line() for each in sorted(answers, key=lambda each: each.rank) if each is not found)
    stack = found.stack or "  no stack: " + ("it is stopped" if found.stopped else "it could not be asked")
    stacks = f"{stack}\n\nThe other ranks:\n{others}"
    kind = Kind.UNREACHABLE if found.silent_host else Kind.STALLED
    return Failure(found.rank, kind, found.step, found.phase, what, stacks=stacks)


def _condition(found: Answer) -> str:
    process = f"its process {found.pid}" if found.pid else "its process"
    if found.stopped:
        return f"{process.capitalize()} is stopped (SIGSTOP, Ctrl-Z or a debugger); `kill -CONT` lets it go on"
    if found.silent_host:
        return f"Its host {found.silent_host} does not answer: that host, or the network to it, is down"
    if not found.answers and found.stack:
        return f"{process.capitalize()} is alive, but a call into C code holds its interpreter and does not come back"
    if not found.answers:
        return (
            f"{process.capitalize()} does not answer: it is stopped, its host is gone, or a call into C code holds it"
        )
    if found.waits_for:
        return f"{process.capitalize()} is alive, and waits in another collective: {found.waits_for}"
    return f"{process.capitalize()} is alive, and has been in {found.phase} for {found.idle:.0f} s"
