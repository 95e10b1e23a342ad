"""Where a rank is, as it tells all others, or as another rank of its host sees it from outside."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.failures.program_lines import OURS, STANDARD, TORCH, place_of
from lockstep.failures.progress import Snapshot, phase_of_files, where
from lockstep.failures.stacks import Thread

FRAMES = 8
"""Number of innermost frames of a stack that are shown."""

_WAITS = (f"{TORCH}/distributed/", f"{OURS}/shm/", f"{OURS}/distributed/comm/collectives.py")
_COMPILES = (f"{TORCH}/_dynamo/convert_frame.py", f"{TORCH}/_inductor/compile_fx.py")


def collective_of(thread: Thread) -> str:
    """Return the function of ``torch.distributed`` or this library in which a thread waits for others, or ""."""
    inner = [frame for frame in thread.frames if not frame.file.startswith("<")]
    while inner and inner[-1].file.startswith(STANDARD) and "site-packages" not in inner[-1].file:
        inner.pop()  # the lock or the socket that is waited for
    if not inner or not inner[-1].file.startswith(_WAITS):
        return ""
    function = inner[-1].function
    while inner and inner[-1].file.startswith(_WAITS):
        if "logger" not in inner[-1].file:
            function = inner[-1].function
        inner.pop()
    return function


def compiles(thread: Thread) -> bool:
    """Return True if a thread is compiling a model."""
    return any(frame.file.startswith(_COMPILES) for frame in thread.frames)


@dataclass(frozen=True)
class Wait:
    """One thread of a rank that waits for other ranks in a collective."""

    group: str
    """The name of the group, the same on all ranks."""
    number: int
    """The number of the collective on this group."""
    kind: str
    """The kind of collective, if it is known; ranks in different kinds of one number are not in the same collective."""
    needed: tuple[int, ...]
    """The ranks without which it cannot end, numbered as all ranks are."""
    exact: bool = True
    """False if messages between two ranks are counted, too, so that numbers may differ between the ranks. Then a rank
    has not launched the collective only if it is exactly one behind."""
    what: str = ""
    """The collective in words."""
    place: str = ""
    """The line of the program that this thread is at."""


@dataclass(frozen=True)
class Whereabouts:
    """Where one rank is: all that ranks answer when one of them asks."""

    rank: int
    pid: int = 0
    step: int | None = None
    """See :attr:`Snapshot.step`; None if unknown."""
    in_batches: bool = False
    """See :attr:`Snapshot.in_batches`."""
    phase: str = ""
    """Empty if unknown."""
    idle: float = 0.0
    """Seconds since it last wrote its progress."""
    waits_for: str = ""
    """The collective that the thread that trains waits in, if it waits for other ranks."""
    place: str = ""
    """The innermost line of the program's own code that this thread is at, with its text."""
    stack: str = ""
    """The innermost frames of this thread."""
    compiles: bool = False
    answers: bool = True
    """True if it has answered itself."""
    stopped: bool = False
    silent_host: str = ""
    """The name of its host, if the host does not answer, either."""
    begun: int | None = None
    """Number of collectives that it has begun on the watched group; None if they are not counted."""
    number: int | None = None
    """Changes with everything that the rest says: as long as it stays the same, each thread has been in the same wait,
    and nothing has been launched. None if the threads were not looked at."""
    waits: tuple[Wait, ...] = ()
    """Of each thread that could launch collectives one. Empty if the rank does not wait, or is done."""
    launched: Mapping[str, int] = field(default_factory=dict)
    """For each group the number of the last collective that the rank has launched; without the groups in which another
    thread could launch the next one."""
    seconds: float = 0.0
    """For how long it has been in all of its waits."""
    has_left: bool = False
    """True if it will launch nothing more."""

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> "Whereabouts":
        """Rebuild an answer from its fields as JSON has them."""
        waits = tuple(Wait(**{**each, "needed": tuple(each["needed"])}) for each in fields["waits"])
        return cls(**{**fields, "waits": waits})

    def seen_at(self, seen: Snapshot, thread: Thread | None, now: float) -> "Whereabouts":
        """Add what a page of progress says, and the stack of the thread that trains, if there is one."""
        page: dict[str, Any] = {
            "pid": seen.pid,
            "step": seen.step,
            "in_batches": seen.in_batches,
            "idle": now - seen.changed,
        }
        if thread is None:
            return replace(self, **page, phase=seen.phase, waits_for=seen.waits_for)
        phase = phase_of_files((frame.file for frame in thread.frames), seen.phase)
        shown: dict[str, Any] = {
            "place": place_of(thread),
            "stack": thread.innermost(FRAMES),
            "compiles": compiles(thread),
        }
        return replace(self, **page, **shown, phase=phase, waits_for=seen.waits_for or collective_of(thread))

    @property
    def steps(self) -> str:
        """How many steps its optimizer has made, in words; empty before the first, and where batches are counted."""
        return "" if self.in_batches else where(self.step, False, "")

    def line(self) -> str:
        """Return where the rank is, in one line."""
        if self.step is None:
            return f"rank {self.rank}: not known; it does not answer"
        what = f"waits in {self.waits_for}" if self.waits_for else f"is in {self.phase}"
        called = f"called from {self.place.partition(': `')[0]}" if self.place else ""
        return f"rank {self.rank}: " + ", ".join(filter(None, (where(self.step, self.in_batches, ""), what, called)))
