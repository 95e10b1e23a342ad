"""``watch()``: makes failures known among the ranks of an existing process group."""

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lockstep._base.debug import log_of
from lockstep._base.devices import current_index, has_work, wait_for_accelerator
from lockstep._base.forked_groups import keep_for_ever
from lockstep._base.network import host_identity
from lockstep._base.store import in_background
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.group_state import (
    end_groups,
    forget_watcher,
    watch_group,
    watched_groups,
)
from lockstep.distributed.comm.groups import (
    Group,
    backends_of,
    companion_timeout,
    global_ranks,
    resolve_group,
)
from lockstep.errors import OptionError, PeerError, PeerFailure
from lockstep.failures.channel import LEFT_SECONDS, LINK_SECONDS, FailureChannel
from lockstep.failures.connections import Connections
from lockstep.failures.failure import Failure, Kind, chain, follows_from_another, of_exception, peer_failure_in
from lockstep.failures.inquiry import Inquirer
from lockstep.failures.progress import Phase, Progress
from lockstep.failures.stacks import answering, no_collection, own_stack
from lockstep.failures.stall import StallLimits
from lockstep.failures.whereabouts import FRAMES
from lockstep.phases import Phases
from lockstep.session.environment import LAUNCHERS
from lockstep.session.step_counter import StepCounter
from lockstep.session.values_at_end import ValuesAtEnd
from lockstep.session.waits_of_rank import WaitsOfRank

END_SECONDS = 600.0
"""Seconds that ranks under ``watch()`` wait for each other at its start, and at its end to hear of failures, if the
group's time-out is not shorter."""
ABORT_SECONDS = 5.0
"""Seconds that a session waits for NCCL to abort before it leaves a group to the end of the process. A process gets
twice as many to release its groups, to come back from its accelerator after a failure, and to end."""
LAUNCHER_SECONDS = 1.0
"""Seconds that the launcher is given to notice the process that has failed first."""
PRINT_SECONDS = 3.0
"""Seconds for which SIGTERM does not keep this process from saying why it ends."""


class Watch:
    """The context manager that :func:`watch` returns, with the state of the channel."""

    def __init__(
        self,
        channel: FailureChannel | None,
        timeout: float = END_SECONDS,
        connections: Connections | None = None,
        resources: contextlib.ExitStack | None = None,
        *,
        keeps_group: bool = False,
    ) -> None:
        """Watch over a channel; None for a single rank. ``connections`` are Gloo's connections, if they are known.

        ``resources`` are closed at the end. With ``keeps_group`` the group goes on after the watch, unless a rank
        fails.
        """
        self.channel = channel
        self._timeout = timeout
        self._keeps_group = keeps_group
        self._resources = resources or contextlib.ExitStack()
        self._inquirer: Inquirer | None = None
        self._connections = connections or Connections()
        self._aborted: list[tuple[Group, Future[None]]] = []
        self._aborting = threading.Lock()
        self._device = current_index()
        self._left = threading.Event()
        self._process = os.getpid()
        self._ended = False
        self._closed = True  # unless the end of the program ends the watch

    def check(self) -> None:
        """Raise :class:`PeerFailure` if another rank has failed; reads one attribute, and communicates nothing."""
        if self.channel is not None:
            self.channel.check()

    def enter(self, phase: str) -> None:
        """Record the phase of the step that this rank enters; if this rank fails, errors on other ranks show the
        phase."""
        if self.channel is not None:
            self.channel.enter(phase)

    def attach(self, group: Group) -> None:
        """Make waits for a group's collectives hear of failures, and end the group at the first one, so that they
        raise."""
        channel = self.channel
        assert channel is not None
        watch_group(group, channel)
        self._device = current_index()
        channel.when_failed(lambda failure: say_at_once(failure, channel.rank))

        def end(failure: Failure) -> None:
            end_groups(channel, failure.summary)
            if "gloo" in backends_of(group):
                self._connections.shut_down()
            self._abort_groups("nccl", "cpu:shm")

        channel.when_failed(end)

    def _abort_groups(self, *backends: str) -> None:
        """Begin to abort the groups of the watched ranks that have one of these backends.

        Each is aborted on a thread of its own: NCCL may wait for the device, and for the kernels of another group.
        """
        channel = self.channel
        assert channel is not None
        with self._aborting:
            begins = not self._aborted
            known = [group for group, _ in self._aborted]
            for _, group, _ in watched_groups(channel):
                if group not in known and any(name in backends_of(group) for name in backends):
                    self._aborted.append((group, in_background(group.abort)))
            if begins and self._aborted:
                in_background(lambda: self._end_unless_left(channel))

    def _end_unless_left(self, channel: FailureChannel) -> None:
        """End this process if the thread that trains does not come back from the accelerator after the groups were
        aborted: kernels may wait for ranks that have ended, and nothing can raise in a thread that waits for them."""
        thread = channel.progress.read().thread
        place: object = None
        while True:
            with no_collection:
                frame = sys._current_frames().get(thread)
                before, place = place, frame and (id(frame), frame.f_lasti)
                del frame
            if place is not None and place == before and has_work(self._device):
                break
            if self._left.wait(2 * ABORT_SECONDS):
                return
        why = "" if channel.failure is None else f", though {channel.failure.summary}"
        stack = own_stack(thread)
        text = "rank %d still waits for its accelerator after %g s%s. The process is ended. It was here:\n%s"
        where = stack.innermost(FRAMES) if stack is not None else ""
        log_of("session").error(text, channel.rank, 2 * ABORT_SECONDS, why, where)
        end_process()

    def may_destroy_groups(self) -> bool:
        """Return True unless a group is still being aborted after some seconds: to destroy it would take as long.

        Such a group is left to the end of the process.
        """
        with self._aborting:
            aborted = list(self._aborted)
        wait([each for _, each in aborted], ABORT_SECONDS)
        stuck = [group for group, each in aborted if not each.done()]
        for group in stuck:
            keep_for_ever(group)
        if stuck:
            text = "%s has not aborted its communicator within %g s: the group is left to the end of the process"
            log_of("session").error(text, backends_of(stuck[0]), ABORT_SECONDS)
            end_process_after_main_thread()
        return not stuck

    def ask_where_ranks_are(self, group: Callable[[], Group | None], limits: StallLimits | None) -> None:
        """From now on find ranks that wait for each other for ever, and ranks of the group that make no progress; every
        rank has to call it.

        Without limits no rank is late; but after a time-out the rank that the others waited for is named.
        """
        assert self.channel is not None
        look = WaitsOfRank(self.channel, group, lambda: self._device)
        self._inquirer = Inquirer(self.channel, limits, look)

    def count_steps(self) -> None:
        """Count the steps of the program's optimizers in this rank's page of progress, until the watch ends."""
        assert self.channel is not None
        self._resources.callback(StepCounter(self.channel.progress, self.enter).close)

    def end_with_the_program(self, end: Callable[[BaseException | None], object]) -> None:
        """Call ``end``, with the exception or None, when the program ends, unless the watch was ended before.

        This does not use ``atexit``, which the processes of ``multiprocessing`` do not run. A program that ends by
        SystemExit does not tell the status here; processes of ``multiprocessing`` do not tell any exception from
        Python 3.13 on. So the others are told that the watch was not closed.
        """
        before = sys.excepthook
        ends = [end]  # nothing once the watch has ended: a thread that was made before refers to the hook

        def told(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
            try:
                for each in ends:
                    each(error)
            except PeerFailure as failure:
                return before(type(failure), failure, failure.__traceback__)
            return before(kind, error, traceback)

        def forget() -> None:
            last.cancel()
            ends.clear()
            if sys.excepthook is told:
                sys.excepthook = before

        def end_of_program() -> None:
            self._closed = False
            end(sys.exception())

        sys.excepthook = told
        last = Finalize(None, end_of_program, exitpriority=0)
        self._resources.callback(forget)

    def end(
        self,
        error: BaseException | None = None,
        release: Callable[[], object] = lambda: None,
        values: ValuesAtEnd | None = None,
        last_words: "LastWords | None" = None,
    ) -> None:
        """Tell the others how this rank ends, release the group by ``release``, wait for the others, and close.

        ``error`` is the exception that left the training, None if it is over. If another rank has failed, raises
        :class:`PeerFailure`, from the error if there is one. Without an error, waits for this rank's accelerator
        first, and raises its error, if it has one. If all ranks end with ``values``, compares these.
        """
        if self._ended or self._process != os.getpid():
            return
        self._ended = True
        broken = self._error_of_device(values) if error is None else None
        with self._resources:
            self._leave(error or broken, release, values, last_words)
        if broken is not None:
            raise broken

    def _error_of_device(self, values: ValuesAtEnd | None) -> BaseException | None:
        """Return the error of this rank's accelerator, which shows when its work is done, after the last call of the
        program, or when ``values`` are read."""
        try:
            wait_for_accelerator(self.check)
            if values is not None:
                values.tell()
        except PeerFailure:  # the channel knows it
            return None
        except BaseException as error:  # Ctrl-C, too
            return error
        return None

    def last_words(self, error: BaseException | None, on_sigterm: Any = None) -> "LastWords | None":
        """Delay the launcher's SIGTERM from now on if this rank ends with an ``error``, or because another has failed.

        ``on_sigterm``: the handler that is there when the training is over; None: the present one.
        """
        if self.channel is None or (error is None and self.channel.failure is None):
            return None
        return LastWords(on_sigterm)

    def _leave(
        self,
        error: BaseException | None,
        release: Callable[[], object],
        values: ValuesAtEnd | None,
        last_words: "LastWords | None",
    ) -> None:
        channel = self.channel
        if channel is None:
            self._release(release)
            return
        last_words = last_words or self.last_words(error)
        to_raise = self._tell(channel, error)
        try:
            channel.announce_end(self._closed or error is not None)
            if self._inquirer is not None:
                self._inquirer.close()
            channel.wait_until_told()
            failed = not is_orderly(error)
            if error is not None:
                forget_failed_passes()
            if not failed and not self._keeps_group and self._ends_with_others(channel):
                failed = not channel.wait_for_others(self._timeout) or channel.knows_failure
            if failed:
                self._abort_groups("nccl")  # its kernels may wait for ranks that no longer take part
            self._release(release)
            if not channel.wait_for_others(LEFT_SECONDS):
                if not self._keeps_group or error is not None or channel.failure is not None:
                    self._connections.shut_down()
                    self._connections.close()  # others may wait for this rank, which no longer takes part
                channel.wait_for_others(self._timeout)
            if values is not None and error is None:
                values.check()
        finally:
            forget_watcher(channel)
            channel.close()
            self._connections.close()
            self._left.set()
        if to_raise is None and channel.failure is not None and (error is None or peer_failure_in(error) is not None):
            to_raise = channel.error()
        if to_raise is not None:
            for note in getattr(error, "__notes__", ()):
                to_raise.add_note(note)
            (last_words or LastWords()).wait_for_launcher()
            end_soon()
            # The point at which this rank waited for the other one is of no interest; it is the __context__.
            raise to_raise from None

    def _ends_with_others(self, channel: FailureChannel) -> bool:
        """Return True if a group is released only once all ranks do it: NCCL's waits for ranks that still need this
        one, and for ever for those that have aborted theirs."""
        return any("nccl" in backends_of(group) for _, group, _ in watched_groups(channel))

    def _release(self, release: Callable[[], object]) -> None:
        """Call ``release`` on another thread; leave it to the end of the process if it takes too long."""
        if self._keeps_group:
            release()
            return
        released = in_background(release)
        if wait([released], 2 * ABORT_SECONDS).not_done:
            text = "the process group has not been released within %g s: it is left to the end of the process"
            log_of("session").error(text, 2 * ABORT_SECONDS)
            end_process_after_main_thread()
        else:
            released.result()

    def _tell(self, channel: FailureChannel, error: BaseException | None) -> PeerFailure | None:
        """Report an error of this rank. If it follows from another rank's failure, return that failure instead."""
        if error is None or peer_failure_in(error) is not None:
            return None
        if is_orderly(error) and channel.progress.current_phase != Phase.START_UP:  # at start-up, all need this rank
            return None
        own = of_exception(error, channel.progress.read())
        if not follows_from_another(error):
            channel.report(own)
            return None
        if (known := channel.explain(error)) is not None:
            return known
        if any(isinstance(each, PeerError) for each in chain(error)):  # all ranks raise it: they have heard each other
            channel.report(own)
            return None
        # It waited for others until its time-out. That is not its own failure, but that of the rank that did not come.
        *_, cause = chain(error)  # the error of the group itself
        gist = str(cause).partition("\n")[0]
        absent = self._inquirer.find_absent(gist) if self._inquirer is not None else None
        if channel.failure is None:
            channel.report(absent or replace(own, kind=Kind.GAVE_UP))
        return channel.error() if channel.failure is not None else None

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(error)


def watch(
    group: Group | None = None,
    store: Any = None,
    *,
    stall_factor: float | None = 20.0,
    stall_minimum: float = 60.0,
    link_timeout: float = LINK_SECONDS,
) -> Watch:
    """Make every failure of a rank known on all other ranks of its group, at once and by name.

    Every rank of the group has to call it at the same time. From then on, if a rank raises, is killed, or leaves while
    others wait for it, all others raise :class:`~lockstep.errors.PeerFailure` in the collective of lockstep in which
    they wait. :func:`lockstep.session` includes this.

    Args:
        group: the process group; the default group if None.
        store: the store at which the ranks meet; the group's own if None. A bare backend has no store.
        stall_factor: a rank fails if it keeps another rank waiting for this many times the median step. None: no such
            limit. During the first steps and compilation the limit is nine tenths of the group's time-out, at most nine
            minutes. It is never more than that, unless ``stall_minimum`` is.
        stall_minimum: the smallest value of that limit, in seconds.
        link_timeout: seconds, at least 1. If nothing arrives from another host for this time, not even its system's
            answer to a probe, the ranks of that host have failed. After a pause of the network that is two seconds
            shorter (which it takes to try the host once more) training goes on.

    Use it as a context manager around the training: an exception that passes through it is sent to the others, with
    its traceback. Otherwise an exception is sent when it ends the program.

    Communicates, at the start, a few keys in the store, one connection to each of two neighbours (on the loopback
    interface, or on the interface that leads to the store), and over Gloo twice 64 KiB from each rank to each other
    rank. After that each rank reads one key of the store in every second, and sends nothing until a rank fails.

    Raises :class:`~lockstep.errors.PeerFailure` if another rank fails before all have met,
    :class:`~lockstep.errors.CommunicationError` if one does not come within the group's time-out (at most ten minutes),
    and :class:`~lockstep.errors.OptionError` if there is no group, or no store.

    Example:
        >>> with lockstep.watch(group):  # doctest: +SKIP
        ...     train(model)

    PyTorch has no such function; its ``monitored_barrier`` names late ranks, but costs a barrier.
    """
    check_link_timeout(link_timeout, "watch()")
    group = resolve_group(group)
    if group is None:
        raise OptionError("watch() needs a process group: call init_process_group() before, or pass one as group=")
    ranks = global_ranks(group)
    if len(ranks) == 1:
        return Watch(None)
    if store is None:
        store = store_of(group)
    resources = contextlib.ExitStack()
    name = getattr(group, "group_name", "") if dist.is_initialized() else ""
    store = unused_part(store, f"watch over {name}", group.rank())
    progress = Progress(run_name("watch"), ranks[group.rank()], len(ranks))
    resources.callback(progress.close)
    resources.enter_context(answering())
    progress.current_phase = Phase.TRAINING
    timeout = min(END_SECONDS, companion_timeout(group).total_seconds())
    limits = StallLimits(stall_factor, stall_minimum, timeout) if stall_factor is not None else None
    with resources:
        this = watch_over(group, store, progress, timeout, link_timeout, limits, resources)
    this.count_steps()
    this.end_with_the_program(this.end)
    return this


def watch_over(
    group: Group,
    store: Any,
    progress: Progress,
    timeout: float,
    link_timeout: float,
    limits: StallLimits | None,
    resources: contextlib.ExitStack,
) -> Watch:
    """Return the watch over an existing group of several ranks; the watch takes over the ``resources``."""
    connections = Connections()
    channel = make_channel(store, group.rank(), global_ranks(group), progress, timeout, link_timeout)
    this = Watch(channel, timeout, connections, resources.pop_all(), keeps_group=True)
    this.attach(group)
    try:
        _find_connections_of_gloo(group, connections)
        this.check()  # a failure before this point could not end any connections
    except BaseException as error:
        this.end(error)
        raise
    this.ask_where_ranks_are(weakref.ref(group), limits)
    return this


def make_channel(
    store: Any, rank: int, ranks: Sequence[int], progress: Progress, timeout: float, link_timeout: float
) -> FailureChannel:
    """Return the channel of this rank, in a part of the store that no other channel has used."""
    store = PrefixStore("failures", store)
    return FailureChannel(store, rank, ranks, progress, host_identity(), timeout, link_timeout)


def check_link_timeout(seconds: float, caller: str) -> None:
    """Raise :class:`OptionError` for a limit that is not possible for a connection."""
    if not isinstance(seconds, int | float) or not seconds >= 1:
        raise OptionError(f"{caller}: link_timeout is {seconds!r}, expected a number of seconds of at least 1")


def run_name(of_run: str) -> str:
    """Return the name of a run on its host: the program's name, and ``of_run`` to distinguish its runs."""
    return f"{Path(sys.argv[0]).stem or 'python'}-{of_run}"


def end_process_after_main_thread() -> None:
    """Let the system end this process if it takes long to end once its main thread has ended: threads, and what runs
    last, may still wait for the device. Not by ``atexit``, which comes after threads that are waited for."""

    def end() -> None:
        threading.main_thread().join()
        end_process(2 * ABORT_SECONDS)

    in_background(end)


def end_process(seconds: float = 0.0) -> None:
    """End this process after some seconds, whatever its threads do: by SIGALRM, unless the program handles that."""
    if seconds and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.alarm(round(seconds))  # also if no thread of Python runs by then
        return
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGALRM if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL else signal.SIGKILL)


def is_orderly(error: BaseException | None) -> bool:
    """Return True for no exception, and for one that ends a program, or a generator, without a failure."""
    return isinstance(error, GeneratorExit | None) or (isinstance(error, SystemExit) and error.code in (None, 0))


def _find_connections_of_gloo(group: Group, connections: Connections) -> None:
    """Find Gloo's connections, by a collective; other backends have none, as the ``shm`` group ends its own itself."""
    if "gloo" not in backends_of(group):
        return
    collectives, world = Collectives(group, Phases(), uses_companion=False), group.size()

    def exchange(size: int) -> None:
        sent = torch.zeros(world * size, dtype=torch.uint8, device="cpu")
        sizes = [size] * world
        collectives.all_to_all(torch.empty_like(sent), sent, sizes, sizes, "first look at the connections").wait()

    connections.recognise(exchange, world - 1)


_used: dict[tuple[str, int], int] = {}


def unused_part(store: Any, name: str, rank: int) -> Any:
    """Return an unused part of a store: the next one of this name, the same on all ranks."""
    number = _used[name, rank] = _used.get((name, rank), 0) + 1
    return PrefixStore(f"lockstep {name} {number}", store)


def store_of(group: Group) -> Any:
    """Return the store at which the ranks of a group met."""
    try:
        return dist.distributed_c10d._world.pg_map[group][1]
    except (KeyError, TypeError):
        raise OptionError("watch() cannot find the store of this group; pass it as store=") from None


# ---------------------------------------------------------------------------------------------------- how a rank ends


def has_launcher() -> bool:
    """Return True if a launcher has started this process; a launcher ends all processes when it notices a failed
    one."""
    return "TORCHELASTIC_RUN_ID" in os.environ or any(each.rank in os.environ for each in LAUNCHERS)


def say_at_once(failure: Failure, here: int) -> None:
    """Log why this rank will stop if a process has ended: the launcher may end this one before it can raise."""
    if has_launcher() and failure.kind is Kind.ENDED:
        log_of("session").error("rank %d stops, because %s", here, failure.summary)


class LastWords:
    """Delays a launcher's SIGTERM for some seconds from now, so that this process ends with its own error.

    Does nothing without a launcher, or if the program handles SIGTERM itself.
    """

    def __init__(self, on_sigterm: Any = None) -> None:
        """``on_sigterm``: what handles SIGTERM when the training is over; None: what does so now."""
        self._until = time.monotonic() + PRINT_SECONDS
        self._came = False
        in_main = threading.current_thread() is threading.main_thread()
        on_sigterm = signal.getsignal(signal.SIGTERM) if on_sigterm is None else on_sigterm
        self._holds = in_main and has_launcher() and on_sigterm is signal.SIG_DFL
        if self._holds:
            signal.signal(signal.SIGTERM, self._note)

    def wait_for_launcher(self) -> None:
        """Give the launcher time to notice the process that failed first: it blames the first that it finds ended."""
        until = time.monotonic() + LAUNCHER_SECONDS
        while self._holds and not self._came and time.monotonic() < until:
            time.sleep(0.02)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if time.monotonic() > self._until:  # the program has gone on after the error
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def end_soon() -> None:
    """Let this process skip the search for garbage when it ends: half a second, for which its launcher waits."""
    if has_launcher():
        atexit.register(gc.freeze)


def forget_failed_passes() -> None:
    """Release what backward passes of this thread had not run when they failed.

    The engine keeps it in a queue until the thread's next pass: a part of the graph, with its memory, and objects that
    hooks on its tensors refer to, such as a replicated model and its group, whose connections would stay open. So run a
    small pass.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        torch.autograd.grad(leaf.clone(), leaf)
