"""Finds a rank that makes no progress; all ranks then raise an error with its name and its place in the code.

A thread of each rank checks once a second whether the rank has waited for others longer than it should. If so, it asks
all ranks where they are. A rank that cannot answer - it is stopped, or a call into C code holds its interpreter - is
inspected from outside by a rank of its host, through the page opened when all met. Then all are told which rank is
late.

From top to bottom: how long ranks wait (:class:`Deadline`), what the stack of a thread shows, what a rank is doing
(:class:`StallAnswer`), and which rank is late according to the answers of all: these know no channel, so tests can
give them tables. Below them is the thread that asks (:class:`StallWatch`).
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.errors import InspectionError, OptionError
from lockstep.failures import proc
from lockstep.failures.channel import FailureChannel
from lockstep.failures.failure import Failure, Kind
from lockstep.failures.program_lines import OURS, STANDARD, TORCH, program_frame
from lockstep.failures.progress import PHASES_OF_A_STEP, Snapshot, phase_of_files, where
from lockstep.failures.stacks import Thread, ask, own_stack

FIRST_STEPS = 5
"""Number of steps that have the longer limit of the start: kernels are chosen, caches filled, modules compiled."""
EARLY = 0.9
"""Ranks ask which one is late after this part of a time-out, however long their steps are."""
FRAMES = 8
"""Number of innermost frames of a stack that are shown."""
ANSWER_SECONDS = 4.0
"""Seconds that ranks have to answer one that has waited for them in vain."""


# ------------------------------------------------------------------------------------------------ how long ranks wait


@dataclass(frozen=True)
class StallLimits:
    """The limits after which a rank is late.

    Within a step: ``factor`` times the median step, but at least ``minimum`` seconds, and at most :attr:`patience`. In
    the first steps, while something is compiled, and in every other phase (start-up, a checkpoint, an evaluation, any
    that the program names): :attr:`patience`.
    """

    factor: float = 20.0
    minimum: float = 60.0
    timeout: float = 600.0
    """Seconds after which a collective fails anyway; that error blames no rank, or the one that has waited."""

    def __post_init__(self) -> None:
        for name in ("factor", "minimum", "timeout"):
            value = getattr(self, name)
            if not value > 0:
                raise OptionError(f"the limit of a stall has {name}={value!r}, expected a number above 0")

    @property
    def patience(self) -> float:
        """The longest limit in seconds, unless ``minimum`` is more; it leaves time to ask the ranks where they are."""
        return EARLY * self.timeout


class Deadline:
    """The present limit, from how long the steps of this rank have taken; call :meth:`observe` regularly, from ``now``
    on, at which it has made no step."""

    def __init__(self, limits: StallLimits, now: float) -> None:
        self._limits = limits
        self._count = 0
        self._since = self._observed = now
        self._lengths: deque[float] = deque(maxlen=64)

    def observe(self, count: int, now: float) -> None:
        """Record how many steps the rank has begun; steps between two calls count with their mean length.

        If steps are not counted, collectives are counted instead: they take less time, but no limit is that short.
        """
        if count > max(self._count, 1):
            begin = self._since if self._count else self._observed  # the first step came after the last call
            self._lengths.append((now - begin) / (count - self._count))
        if count != self._count:
            self._since = now
            self._count = count
        self._observed = now

    def seconds(self, phase: str) -> float:
        """Return how many seconds others may wait for a rank that is in a phase."""
        if phase not in PHASES_OF_A_STEP or self._count <= FIRST_STEPS:
            return max(self._limits.patience, self._limits.minimum)
        of_steps = self._limits.factor * statistics.median(self._lengths)
        return max(self._limits.minimum, min(of_steps, self._limits.patience))

    def explain(self, phase: str) -> str:
        """Return how :meth:`seconds` was determined, for a message."""
        if phase not in PHASES_OF_A_STEP:
            return f"the limit in {phase}"
        if self._count <= FIRST_STEPS:
            return "the limit in the first steps"
        median = statistics.median(self._lengths)
        factor, least, most = self._limits.factor, self._limits.minimum, self._limits.patience
        at_most = f", at most {most:g} s" if factor * median > most > least else ""
        return f"{factor:g} times the median step of {median:.3g} s, at least {least:g} s{at_most}"


# -------------------------------------------------------------------------------------------------- what a stack says

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


# ------------------------------------------------------------------------------------------------- which rank is late


@dataclass(frozen=True)
class StallAnswer:
    """The activity of one rank, reported by itself or found out by another rank on its host."""

    rank: int
    pid: int = 0
    step: int | None = None
    """See :attr:`Snapshot.step`; None if unknown."""
    phase: str = ""
    """Empty if unknown."""
    idle: float = 0.0
    """Seconds since it last wrote its progress."""
    waits_for: str = ""
    """The collective that it waits in, if it waits for other ranks."""
    begun: int | None = None
    """Number of collectives that it has begun on the group; None if they are not counted."""
    compiles: bool = False
    answers: bool = True
    """True if it has answered itself."""
    stopped: bool = False
    silent_host: str = ""
    """The name of its host, if the host does not answer, either."""
    stack: str = ""
    """The innermost frames of the thread that trains."""
    place: str = ""
    """The innermost line of the program's own code that it is at."""
    in_batches: bool = False
    """See :attr:`Snapshot.in_batches`."""

    @classmethod
    def of(cls, seen: Snapshot, thread: Thread | None, now: float, **more: Any) -> "StallAnswer":
        """Make an answer from a page of progress, and the stack of the thread that trains, if there is one."""
        idle = now - seen.changed
        more["in_batches"] = seen.in_batches
        if thread is None:
            return cls(seen.rank, seen.pid, seen.step, seen.phase, idle, seen.waits_for, **more)
        phase = phase_of_files((frame.file for frame in thread.frames), seen.phase)
        waits_for = seen.waits_for or collective_of(thread)
        own = program_frame(thread)
        place = f"line {own.line} of {own.file}, in {own.function}" if own is not None else ""
        more.update(compiles=compiles(thread), stack=thread.innermost(FRAMES), place=place)
        return cls(seen.rank, seen.pid, seen.step, phase, idle, waits_for, **more)

    def line(self) -> str:
        """Return where the rank is, in one line."""
        if self.step is None:
            return f"rank {self.rank}: not known; it does not answer"
        what = f"waits in {self.waits_for}" if self.waits_for else f"is in {self.phase}"
        called = f"called from {self.place}" if self.place else ""
        return f"rank {self.rank}: " + ", ".join(filter(None, (where(self.step, self.in_batches, ""), what, called)))


def late(answers: Sequence[StallAnswer], waited: float) -> StallAnswer | None:
    """Return the rank for which another one has ``waited`` that many seconds; None if it cannot be determined.

    It is a rank that does not wait for others; of several, one that cannot even answer, else the one that is furthest
    behind. A rank that proceeds from step to step meanwhile does not count. If all wait, it is the one that is furthest
    behind, while others are in a later collective; None if all are in the same.
    """
    known = [each for each in answers if each.begun is not None]
    counted = len(known) == len(answers)

    def behind(each: StallAnswer) -> tuple[bool, int, int, float]:
        return each.answers and not each.stopped, (each.begun or 0) if counted else 0, each.step or 0, -each.idle

    busy = [each for each in answers if not each.waits_for or each.stopped]
    if busy:
        return min((each for each in busy if not each.answers or each.idle > waited / 2), key=behind, default=None)
    first, last = min(answers, key=behind), max(answers, key=behind)
    if behind(first)[1:3] != behind(last)[1:3]:
        return first
    return _odd_one_out(answers)


def absent(answers: Sequence[StallAnswer]) -> StallAnswer | None:
    """Return the rank that others have waited for until their time-out; None if it cannot be determined.

    It is a rank that cannot answer; else one that does not wait and has begun fewer collectives than another one. (A
    rank whose own time-out is just over does not wait any more, either, but has begun as many.)
    """
    silent = [each for each in answers if not each.answers or each.stopped]
    most = max((each.begun for each in answers if each.begun is not None), default=0)
    elsewhere = [each for each in answers if not each.waits_for and each.begun is not None and each.begun < most]
    return min(silent or elsewhere, key=lambda each: (each.begun or 0, each.step or 0, -each.idle), default=None)


def _odd_one_out(answers: Sequence[StallAnswer]) -> StallAnswer | None:
    """Return one of equally advanced ranks that waits for something that most others do not wait for."""
    waits = [each.waits_for for each in answers]
    rarest = min(answers, key=lambda each: waits.count(each.waits_for))
    return rarest if waits.count(rarest.waits_for) < len(answers) else None


def stalled(
    found: StallAnswer, answers: Sequence[StallAnswer], waiting: StallAnswer, waited: float, limit: str
) -> Failure:
    """Return the failure to report if ``found`` is late and the rank ``waiting`` has waited for it too long."""
    what = f"rank {waiting.rank} has waited {waited:.0f} s for it, longer than the limit ({limit}). {_condition(found)}"
    return _failure(found, answers, what)


def waited_in_vain(found: StallAnswer, answers: Sequence[StallAnswer], waiting: int, error: str) -> Failure:
    """Return the failure to report if ``found`` is not where the others are, so that rank ``waiting`` got an error."""
    return _failure(found, answers, f"rank {waiting} has waited for it in vain ({error}). {_condition(found)}")


def _failure(found: StallAnswer, answers: Sequence[StallAnswer], what: str) -> Failure:
    others = "\n".join(each.line() for each in sorted(answers, key=lambda each: each.rank) if each.rank != found.rank)
    stack = found.stack or "  no stack: " + ("it is stopped" if found.stopped else "it could not be asked")
    stacks = f"{stack}\n\nThe other ranks:\n{others}"
    kind = Kind.UNREACHABLE if found.silent_host else Kind.STALLED
    calls = {each.waits_for for each in answers if each.waits_for.endswith("()")}  # such as save()
    if calls and {each.waits_for for each in answers} != calls:
        call = min(calls)
        what += f". Call {call} on every rank, not under `if run.is_main`"
    return Failure(found.rank, kind, found.step, found.phase, what, stacks=stacks, in_batches=found.in_batches)


def _condition(found: StallAnswer) -> str:
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


# ----------------------------------------------------------------------------------------------- the thread that asks


class StallWatch:
    """Finds ranks that make no progress, until :meth:`close`.

    Every rank of the channel has to make one. ``begun`` returns the number of collectives that this rank has begun on
    the watched group, or None. Without ``limits`` it names no late rank by itself, but answers others, finds a missing
    rank when it is asked to, and looks for lost links to other hosts while this rank waits.
    """

    def __init__(self, channel: FailureChannel, limits: StallLimits | None, begun: Callable[[], int | None]) -> None:
        self._channel = channel
        self._progress = channel.progress
        self._begun = begun
        self._limits = limits or StallLimits()
        self._names_late_ranks = limits is not None
        self._deadline = Deadline(self._limits, time.monotonic())
        self._begun_before = begun() or 0
        self._answer_seconds = min(10.0, max(0.5, self._limits.minimum / 6))
        self._others_hold_off = 3 * self._answer_seconds
        self._waits_in: tuple[str, int | None, int] = ("", None, 0)
        self._waits_since = 0.0
        self._ask_again = 0.0
        self._answers: dict[int, StallAnswer] = {}
        self._inquiry = ""
        self._inquires = threading.Lock()
        self._changed = threading.Condition()
        self._over = threading.Event()
        channel.on("asked", self._asked)
        channel.on("look", self._asked_to_look)
        channel.on("answer", self._answered)
        self._thread: threading.Thread | None = None
        if limits is not None or channel.has_other_hosts:
            self._thread = threading.Thread(target=self._run, name="lockstep stalls", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._thread is not None and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._answer_seconds)

    def find_absent(self, error: str) -> Failure | None:
        """Return the failure of the rank for which this one waited until an ``error``; None if it is not found."""
        with self._progress.waiting("a collective that timed out"):
            answers = self._inquire(ANSWER_SECONDS)
        found = self._with_host(absent(answers))
        return waited_in_vain(found, answers, self._channel.rank, error) if found is not None else None

    # ------------------------------------------------------------------------------------ its thread

    def _run(self) -> None:
        look = min(1.0, self._limits.minimum / 10)
        while not self._over.wait(look) and self._channel.failure is None:
            self._look()

    def _look(self) -> None:
        seen, now = self._progress.read(), time.monotonic()
        begun = self._begun()
        self._deadline.observe(self._progress.steps_made or (begun or 0) - self._begun_before, now)
        waited = self._waited(seen, begun, now)
        if waited:
            self._channel.look_for_lost_links()
        if not self._names_late_ranks or waited <= self._deadline.seconds(seen.phase) or now < self._ask_again:
            return
        answers = self._inquire(self._answer_seconds)
        found = self._with_host(late(answers, waited))
        if self._channel.failure is not None or self._over.is_set():
            return
        own = next(each for each in answers if each.rank == self._channel.rank)
        if found is None or found.rank == own.rank or not self._is_too_late(found, waited):
            # If this rank is the late one, another rank has to ask and report it. tests/failures/test_stall.py:
            # asks_first
            self._ask_again = time.monotonic() + self._limits.minimum + self._others_hold_off
            return
        self._channel.report(stalled(found, answers, own, waited, self._deadline.explain(found.phase or seen.phase)))

    def _waited(self, seen: Snapshot, begun: int | None, now: float) -> float:
        """Return the seconds that this rank has waited in its present collective, 0 if it does not wait.

        A collective of the program counts from when it was first seen here.
        """
        if seen.waits_for:
            return now - seen.waits_since
        thread = own_stack(seen.thread)
        waits_in = (collective_of(thread) if thread is not None else "", begun, seen.step)
        if waits_in != self._waits_in:
            self._waits_in = waits_in
            self._waits_since = now
        return now - self._waits_since if waits_in[0] else 0.0

    def _is_too_late(self, found: StallAnswer, waited: float) -> bool:
        if found.compiles or (found.phase and found.phase not in PHASES_OF_A_STEP):
            return waited > self._limits.patience
        return True

    def _inquire(self, seconds: float) -> list[StallAnswer]:
        """Ask all ranks for their activity; for those that do not answer, ask ranks of their hosts."""
        with self._inquires:
            own = self._own_answer()
            with self._changed:
                self._inquiry = f"{self._channel.rank} {time.monotonic()}"
                self._answers = {own.rank: own}
            self._channel.tell("asked", inquiry=self._inquiry)
            self._wait_for_answers(seconds / 2)
            if missing := self._missing():
                self._look_at(missing)
                self._channel.tell("look", inquiry=self._inquiry, ranks=missing)
                self._wait_for_answers(seconds / 2)
            places = self._channel.places
            unknown = [StallAnswer(rank, places[rank].pid, answers=False) for rank in self._missing()]
            with self._changed:
                return [*self._answers.values(), *unknown]

    def _with_host(self, found: StallAnswer | None) -> StallAnswer | None:
        """Add to the answer of a rank that could not give it whether its host answers."""
        if found is None or found.answers:
            return found
        return replace(found, silent_host=self._channel.hosts.silent([found.rank]).get(found.rank, ""))

    def _wait_for_answers(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with self._changed:
            while self._missing() and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _missing(self) -> list[int]:
        return [rank for rank in self._channel.global_ranks if rank not in self._answers]

    def _own_answer(self) -> StallAnswer:
        seen, now = self._progress.read(), time.monotonic()
        return StallAnswer.of(seen, own_stack(seen.thread), now, begun=self._begun())

    def _look_at(self, ranks: list[int]) -> None:
        """Answer for ranks of this host that cannot do it themselves."""
        for rank in ranks:
            if rank in self._channel.pages:
                self._note(seen_from_outside(self._channel, rank, self._answer_seconds), self._inquiry)

    # ---------------------------------------------------------------------------- the channel's thread

    def _asked(self, message: dict[str, Any]) -> None:
        """Answer another rank that asks; it will report what it finds, so this rank need not ask for a while."""
        self._ask_again = time.monotonic() + self._others_hold_off
        self._channel.tell("answer", inquiry=message["inquiry"], answer=self._own_answer())

    def _asked_to_look(self, message: dict[str, Any]) -> None:
        """Look at ranks of this host for another rank: the first one here that can answers for those that cannot."""
        ranks = [rank for rank in message["ranks"] if rank in self._channel.pages]
        able = set(self._channel.hosts.ranks_with(self._channel.rank)) - set(message["ranks"])
        if ranks and min(able, default=None) == self._channel.rank:
            threading.Thread(target=self._tell_of, args=(ranks, message["inquiry"]), daemon=True).start()

    def _tell_of(self, ranks: list[int], inquiry: str) -> None:
        for rank in ranks:
            answer = seen_from_outside(self._channel, rank, self._answer_seconds)
            self._channel.tell("answer", inquiry=inquiry, answer=answer)

    def _answered(self, message: dict[str, Any]) -> None:
        self._note(StallAnswer(**message["answer"]), message["inquiry"])

    def _note(self, answer: StallAnswer, inquiry: str) -> None:
        with self._changed:
            if inquiry == self._inquiry:
                self._answers.setdefault(answer.rank, answer)
                self._changed.notify_all()


def seen_from_outside(channel: FailureChannel, rank: int, seconds: float) -> StallAnswer:
    """Return the activity of a rank of this host that does not answer, as far as it is visible from outside."""
    pid, stopped = channel.places[rank].pid, False
    try:
        seen = channel.pages[rank].read()
        stopped = proc.available() and proc.status_of(pid).stopped
        thread = None if stopped else _thread_of(pid, seen.thread, seconds)
        return StallAnswer.of(seen, thread, time.monotonic(), answers=False, stopped=stopped)
    except InspectionError:  # it has ended
        return StallAnswer(rank, pid, answers=False, stopped=stopped)


def _thread_of(pid: int, ident: int, seconds: float) -> Thread | None:
    try:
        return ask(pid, seconds).of(ident)
    except InspectionError:
        return None
