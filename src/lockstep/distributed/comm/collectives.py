"""The only file that calls ``torch.distributed`` collectives: on an explicit group, labelled and counted.

A group is a result of ``init_process_group`` or ``new_group``, a dimension of a ``DeviceMesh``, or a bare backend such
as ``dist.ProcessGroupGloo(...)``; nothing here uses the default group. Only messages name ranks as ranks of the default
group, even in a smaller group: see :func:`global_ranks`. For each group this process keeps a :class:`GroupState`.
"""

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import islice
from statistics import median
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Backend

from lockstep.abilities import Abilities, Addition, Chunks, abilities_of
from lockstep.buckets import TensorSpec, plan_buckets
from lockstep.distributed.comm import waits
from lockstep.distributed.comm.companion import make_companion, store_for_companion
from lockstep.errors import AgreementError, CommunicationError, OptionError, PeerFailure
from lockstep.forked_groups import keep_in_forks
from lockstep.phases import Phases
from lockstep.store import in_background

Group = Any
"""A ``dist.ProcessGroup`` or a bare backend: both have ``rank()`` and ``size()``."""

T = TypeVar("T")


class Watcher(Protocol):
    """Tells the ranks of a group of each other's failures; connected by :func:`watch_group`."""

    global_ranks: list[int]

    def enter(self, phase: str) -> None:
        """Record the training phase, for other ranks' error messages."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Note that, inside, this rank waits for the others in the collective ``what``."""

    def check(self) -> None:
        """Raise :class:`PeerFailure` if another rank has failed."""

    def check_waiting(self, ranks: Collection[int], since: float) -> None:
        """As :meth:`check`, for a rank that has waited since ``since``; raise as well if one of ``ranks`` has left."""

    def compare_calls(self, key: str, what: str, ranks: Collection[int]) -> str:
        """Return in words which collectives ``ranks`` were in that have noticed that they differ; all call it with the
        same ``key``."""

    def explain(self, error: BaseException) -> PeerFailure | None:
        """Return the failure of another rank that has caused an error, if there is one or soon will be."""


BATCHES_OF_A_LOOP = 1 << 32
"""The number of a batch is that of its loop, times this, and its own in the loop."""


class GroupState:
    """State that outlives the objects that use a group; does not refer to the group."""

    def __init__(self, process: int) -> None:
        self.process = process
        """The id of the process that is a rank of the group."""
        self.is_inherited = False
        """True in a process forked from it, which must not communicate: its messages would be taken for the rank's."""
        self.watcher: Watcher | None = None
        """Tells of failures of the group's ranks, or None."""
        self.lost = ""
        """The reason why this rank cannot communicate over the group any more, or an empty text."""
        self.makes_companion = threading.Lock()
        """Held by the thread that makes :attr:`companion`."""
        self.companion: Group | None = None
        """The group that sends tensors on the CPU instead of the group, from its first use on: see ``companion.py``."""
        self.begun = waits.BegunCollectives()
        """The collectives that this library has begun on the group and its companion."""
        self.batch = 0
        """The number of the last batch, and, in units of :data:`BATCHES_OF_A_LOOP`, of its loop. Kept when the
        decisions are freed with the last module, which happens at a different time on each rank
        (test_uneven_data.py, test_batches_are_numbered_alike_whatever_has_been_freed)."""
        self.modules_with_shares = 0
        """The number of modules with shares replicated so far; kept when modules are freed
        (test_shares.py, test_modules_are_numbered_alike_whatever_has_been_freed)."""
        self.shared: weakref.WeakValueDictionary[Callable[..., Any], Any] = weakref.WeakValueDictionary()
        """The objects of :func:`shared_object`, by their class."""

    def lose(self, reason: str) -> None:
        """Note that this rank cannot communicate over the group any more; the first reason counts."""
        self.lost = self.lost or reason

    def begin_loop(self) -> None:
        """Count a loop over batches: ranks that have left one at different batches are at the same number again."""
        self.batch = (self.batch // BATCHES_OF_A_LOOP + 1) * BATCHES_OF_A_LOOP

    def next_batch(self) -> None:
        """Count a batch."""
        self.batch += 1


_states: "weakref.WeakKeyDictionary[Group, GroupState]" = weakref.WeakKeyDictionary()
_without_group = GroupState(os.getpid())
_lock = threading.RLock()
watchers: list[Watcher] = []
"""The watchers of all groups. Empty in most programs: then a step looks at nothing else."""


def state_of(group: Group | None) -> GroupState:
    """Return the state of a group, or of a process that trains alone if it is None."""
    if group is None:
        return _without_group
    with _lock:
        state = _states.get(group)
        if state is None:
            state = _states[group] = GroupState(os.getpid())
            keep_in_forks(group)
        return state


def shared_object(kind: Callable[[Any], T], group: Group | None) -> T:
    """Return the object of a class for a group: one in a process, as long as it is referred to."""
    shared = state_of(group).shared
    with _lock:
        found: T | None = shared.get(kind)
        if found is None:
            found = shared[kind] = kind(group)
        return found


def watch_group(group: Group, watcher: Watcher) -> None:
    """Let waits for this group's collectives ask ``watcher`` for failures from now on."""
    state_of(group).watcher = watcher
    watchers.append(watcher)


def end_groups(watcher: Watcher, reason: str) -> None:
    """End, on this rank and the others, what watched ranks use to send tensors on the CPU, so that waits raise."""
    for _, group, _ in watched_groups(watcher):
        state = _states.get(group)
        abilities = abilities_of(group if state is None or state.companion is None else state.companion)
        if abilities is not None:
            with contextlib.suppress(RuntimeError):
                abilities._abort(reason)


def leave_companions() -> None:
    """Leave the companions of groups that have been destroyed; modules that still exist keep them otherwise."""
    for group, state in list(_states.items()):
        if state.companion is not None and not _is_registered(group):
            with contextlib.suppress(RuntimeError):
                state.companion.shutdown()


def forget_watcher(watcher: Watcher) -> None:
    """Remove a watcher from its groups."""
    watchers[:] = [each for each in watchers if each is not watcher]
    for state in list(_states.values()):
        if state.watcher is watcher:
            state.watcher = None


def begun_on(group: Group) -> waits.BegunCollectives:
    """Return the collectives that this library has begun on a group."""
    state = _states.get(group)
    return state.begun if state is not None else waits.BegunCollectives()


def watched_groups(watcher: Watcher) -> Iterator[tuple[str, Group, Sequence[int]]]:
    """Yield the groups whose ranks all belong to a watcher: names that are the same on all ranks, and the ranks.

    Bare backends have no such name, except for the one that is watched itself.
    """
    watched = set(watcher.global_ranks)
    world = dist.distributed_c10d._world
    for group in list(world.pg_map) if dist.is_initialized() else []:
        ranks = _registered_ranks(group)
        if ranks and len(ranks) > 1 and watched.issuperset(ranks):
            yield str(world.pg_names.get(group)), group, ranks
    for group, state in list(_states.items()):
        if state.watcher is watcher and not _is_registered(group):
            yield "that is watched", group, watcher.global_ranks


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held the old one
    watchers.clear()
    waits.forget()
    if dist.is_available():
        for group in dist.distributed_c10d._world.pg_map:
            _states.setdefault(group, GroupState(os.getppid()))
    for state in _states.values():
        state.is_inherited = True
        state.watcher = None


os.register_at_fork(after_in_child=_forked)


# --------------------------------------------------------------------------------- collectives


_SLICE = timedelta(seconds=0.2)
"""Time between two checks, while a rank waits, for a failure of another rank."""
_GROUPS_OWN_TIMEOUT = timedelta(0)
"""What PyTorch passes for no timeout of the call; works written in Python expect the argument."""


class _ExitDelay:
    """Delays the exit of the interpreter until the group's threads have released all tensors.

    A thread of Gloo may hold the last reference to a tensor for a moment after its collective has been waited for. To
    release it, the thread needs the interpreter, and aborts the process if that is exiting. There is no event to wait
    for, so a short time is slept.
    """

    SECONDS = 0.1

    def __init__(self) -> None:
        self._last = -self.SECONDS
        atexit.register(self._delay)

    def waited(self) -> None:
        """Note that a collective has been waited for."""
        self._last = time.monotonic()

    def _delay(self) -> None:
        time.sleep(max(0.0, self._last + self.SECONDS - time.monotonic()))


_exit_delay = _ExitDelay()


class Pending:
    """A collective under way."""

    def __init__(self, works: Sequence[Any], owner: "Collectives", call: waits.Call, in_slices: bool) -> None:
        self.works = works
        self.call = call
        self._owner = owner
        self._in_slices = in_slices

    def wait(self) -> None:
        """Return when the tensor holds the result (for the current stream, on devices with streams)."""
        watcher = self._owner.watcher if watchers else None
        try:
            for work in self.works:
                if watcher is None:
                    work.wait(_GROUPS_OWN_TIMEOUT)
                else:
                    with watcher.waiting(self.call.what), waits.Waiting(self.call):
                        self._owner.wait_watched(work, watcher, self._in_slices)
        except PeerFailure:
            raise
        except RuntimeError as error:
            raise self._owner.failure(self.call.what, error) from error
        _exit_delay.waited()

    def done(self) -> bool:
        """Return True if :meth:`wait` would return immediately."""
        return all(work.is_completed() for work in self.works)


class _Sender:
    """A group that sends tensors, and what its backend can do."""

    __slots__ = ("abilities", "group", "in_slices")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.abilities = abilities_of(group)
        self.in_slices = {each.rpartition(":")[2] for each in backends_of(group).split(",")} == {"gloo"}
        """True if its works have to be waited for in slices: see :meth:`Collectives.wait_watched`."""

    @property
    def shares_memory(self) -> bool:
        """True if all ranks reduce in shared memory."""
        return self.abilities is not None and self.abilities._shares_memory


class Collectives:
    """The collectives of one owner over one group; ``phases`` counts them as ``collective``, and waiting as
    ``wait``.

    Tensors on the CPU go over the group's companion, which the first of them makes, or over the group itself if
    ``uses_companion`` is False.
    """

    def __init__(self, group: Group, phases: Phases, *, uses_companion: bool = True) -> None:
        self.group = group
        self.phases = phases
        self.comm_stats = CommStats()
        self.rank: int = group.rank()
        self.world: int = group.size()
        self.global_ranks = global_ranks(group)
        self._registered = _is_registered(group)
        self._state = state_of(group)
        self._given = _Sender(group)
        self._store = store_for_companion(group, backends_of(group)) if uses_companion else None
        self._on_cpu: _Sender | None = self._given if self._store is None else None
        self.device = control_device(group) if self._store is None else torch.device("cpu")
        """The device of small control tensors."""
        self._begin_only = dist.AllreduceOptions()
        self._waited_for = dist.AllreduceOptions()
        self._begin_only.asyncOp, self._waited_for.asyncOp = True, False

    def _sender(self, tensor: Tensor, what: str) -> _Sender:
        """Return what sends a tensor."""
        if not tensor.is_cpu:
            return self._given
        return self._on_cpu or self._find_companion(what)

    def _find_companion(self, what: str) -> _Sender:
        """Return the companion; make it if this is its first use."""
        self.check_alive()
        state = self._state
        with state.makes_companion:
            if state.companion is None:
                try:
                    state.companion = self._make_companion(what)
                except BaseException:
                    state.lose(f"it did not connect to them when it used the group for the first time, in {what}")
                    raise
        self._on_cpu = _Sender(state.companion)
        return self._on_cpu

    def _make_companion(self, what: str) -> Group:
        """Make the companion on a thread of its own, as that waits for the other ranks; raise if one of them fails."""
        limit = companion_timeout(self.group)
        made = in_background(lambda: make_companion(self._store, self.rank, self.global_ranks, limit))
        call = waits.Call(self.group, self._state.begun.add(), "companion", what)
        watcher, since = self.watcher, time.monotonic()
        with watcher.waiting(what) if watcher is not None else contextlib.nullcontext(), waits.Waiting(call):
            while not futures.wait([made], _SLICE.total_seconds()).done:
                if watcher is not None:
                    watcher.check_waiting(self.global_ranks, since)
        try:
            return made.result()
        except RuntimeError as error:
            raise self.failure(what, error) from error

    @property
    def watcher(self) -> Watcher | None:
        """The watcher of the group, or one that watches all of its ranks; None if there is none."""
        if not watchers:
            return None
        if self._state.watcher is not None:
            return self._state.watcher
        if self._registered:
            for watcher in watchers:
                if set(self.global_ranks) <= set(watcher.global_ranks):
                    return watcher
        return None

    def enter(self, phase: str) -> None:
        """Record the training phase, for other ranks' error messages."""
        if watchers and (watcher := self.watcher) is not None:
            watcher.enter(phase)

    def wait_watched(self, work: Any, watcher: Watcher, in_slices: bool) -> None:
        """Wait for a work; raise :class:`PeerFailure` if the watcher knows of one.

        If a rank fails, ``shm`` and NCCL are aborted, which ends the wait. A Gloo work is waited for in short slices,
        since it can be waited for again after a timeout.
        """
        watcher.check()
        if not in_slices:
            work.wait(_GROUPS_OWN_TIMEOUT)
            return
        since = time.monotonic()
        while not _is_over(work):
            watcher.check_waiting(self.global_ranks, since)

    @property
    def global_rank(self) -> int:
        """The number of this rank in messages."""
        return self.global_ranks[self.rank]

    @property
    def is_alive(self) -> bool:
        """True unless the group has been destroyed, belongs to the process that this one was forked from, or this rank
        is lost."""
        if self._state.is_inherited or self._state.lost:
            return False
        return not self._registered or self.group in dist.distributed_c10d._world.pg_group_ranks

    def check_alive(self) -> None:
        """Raise unless :attr:`is_alive`."""
        self._check_process()
        if self._state.lost:
            raise CommunicationError(
                f"rank {self.global_rank} can no longer take part in what the other ranks of its process group do: "
                f"{self._state.lost}. Destroy the group and make another, or start anew"
            )
        if not self.is_alive:
            raise CommunicationError(
                f"rank {self.global_rank}: the process group has been destroyed; gradients cannot be synchronised any "
                "more. Destroy it after the last backward, or run this one under no_sync()"
            )

    def begun(self) -> int | None:
        """Return the number of collectives begun in this process, on all groups that count them; None if this does
        not."""
        groups = {*dist.distributed_c10d._world.pg_map, self.group}
        if sequence_number_on(self.group) is None:
            return None
        return sum(sequence_number_on(group) or 0 for group in groups)

    @property
    def is_lost(self) -> bool:
        """True if :meth:`lose` has been called for the group on this rank."""
        return bool(self._state.lost)

    def lose(self, reason: str) -> None:
        """Send nothing more: others wait for what this rank cannot send, and would take anything else for it.

        Aborts the group on all ranks, if its backend can.
        """
        if not self._state.lost:
            self._state.lose(reason)
            for sender in (self._given, self._on_cpu):
                if sender is not None and sender.abilities is not None:
                    sender.abilities._abort(f"rank {self.global_rank} is lost: {reason}")

    def _check_process(self) -> None:
        if self._state.is_inherited:
            raise CommunicationError(
                f"process {os.getpid()} cannot communicate: it was forked from process {self._state.process}, which is "
                f"{self._place()}. Run backward there; in a forked process, run it "
                "under no_sync(), or on a module that is not replicated"
            )

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory for repeated messages, shared with the other ranks if the backend can."""
        abilities = self._abilities if device.type == "cpu" else None
        return plain_memory(numel, dtype, device) if abilities is None else abilities.allocate(numel, dtype)

    @property
    def _abilities(self) -> Abilities | None:
        """What the group that sends tensors on the CPU can do."""
        return (self._on_cpu or self._find_companion("first use of the process group")).abilities

    def follows_stream(self, device: torch.device) -> bool:
        """Return True if collectives on this device, and callbacks of their futures, run in the order of its stream.

        They do not on the CPU, nor where Gloo copies tensors of an accelerator to the host and back: its threads run
        callbacks at a time that differs between ranks.
        """
        if device.type == "cpu":
            return False
        try:
            backend = self.group._get_backend(device)
        except (RuntimeError, AttributeError):  # a bare backend
            backend = self.group
        return backend.name() not in ("gloo", "mpi")

    def all_reduce(self, tensor: Tensor, what: str, factor: float = 1.0, *, blocking: bool = False) -> Pending:
        """Start to sum a tensor, times each rank's ``factor``, over the ranks, in place.

        ``blocking``: the caller waits for it next, so no other thread has to make it progress.
        """
        # NCCL returns no work for a collective that is not asynchronous.
        options = self._waited_for if blocking and tensor.is_cpu else self._begin_only
        self.comm_stats.reduces(tensor)
        with self.phases.phase("collective", f"all_reduce, {what}"):
            sender = self._sender(tensor, what)
            if sender.abilities is not None:  # it multiplies while it copies
                return self._begin(what, sender, sender.abilities.allreduce, [tensor], options, factor=factor)
            if factor != 1:
                tensor.mul_(factor)
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            # As in dist.all_reduce, without its checks, which take longer than the collective of a small tensor.
            return self._begin(what, sender, sender.group.allreduce, [real], options)

    def mean_rounded_to(self, half: torch.dtype, tensor: Tensor, what: str, *, blocking: bool = False) -> Pending:
        """Start to replace a tensor by the mean over ranks that share memory, added in float32, of what is rounded to
        half precision, and rounded again: see :class:`~lockstep.abilities.Abilities`.

        ``blocking``: as in :meth:`all_reduce`.
        """
        sender = self._sender(tensor, what)
        assert sender.abilities is not None
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        options.asyncOp = not blocking
        self.comm_stats.reduces(tensor)
        with self.phases.phase("collective", f"all_reduce, {what}"):
            return self._begin(what, sender, sender.abilities.allreduce, [tensor], options, rounded_to=half)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        """Start to broadcast a tensor from rank ``source``, in place."""
        with self.phases.phase("collective", f"broadcast, {what}"):
            sender = self._sender(tensor, what)
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = source, 0, True
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            needed = None if sender.shares_memory else [source] if source != self.rank else []
            return self._begin(what, sender, sender.group.broadcast, [real], options, needed=needed)

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], what: str, factor: float = 1.0
    ) -> Iterator[tuple[int, Tensor]]:
        """Sum many tensors, times ``factor``, over the ranks, in a few large all-reduces of contiguous copies.

        Yields the index and the contiguous sum of each tensor as they arrive; strides may differ between ranks.
        """
        tensors = [tensor.detach() for tensor in tensors]
        for bucket in plan_buckets([TensorSpec.of(tensor).contiguous() for tensor in tensors]).buckets:
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            torch._foreach_copy_(bucket.views(flat), bucket.take(tensors))
            self.all_reduce(flat, what, factor, blocking=True).wait()
            yield from zip((slot.index for slot in bucket.slots), bucket.views(flat), strict=True)

    def broadcast_coalesced(
        self, tensors: Sequence[Tensor], what: str, source: int = 0
    ) -> Iterator[tuple[int, Tensor]]:
        """Broadcast many tensors from rank ``source``, in a few large broadcasts of bytes: not every backend knows
        every dtype.

        Yields the index and the contiguous values of each tensor as they arrive; strides may differ between ranks.
        """
        specs = [TensorSpec("", (tensor.nbytes,), (1,), torch.uint8, tensor.device) for tensor in tensors]
        for bucket in plan_buckets(specs).buckets:
            flat = torch.zeros(bucket.numel, dtype=torch.uint8, device=bucket.device)
            members = bucket.take(tensors)
            values = [
                view.view(each.dtype).view(each.shape) for view, each in zip(bucket.views(flat), members, strict=True)
            ]
            torch._foreach_copy_(values, members)
            self.broadcast(flat, what, source).wait()
            yield from zip((slot.index for slot in bucket.slots), values, strict=True)

    def all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape, in rank order."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        with self.phases.phase("collective", f"all_gather, {what}"):
            sender = self._sender(tensor, what)
            options = AllgatherOptions()
            options.asyncOp = True
            self._begin(what, sender, sender.group.allgather, [gathered], [tensor], options).wait()
        return gathered

    def all_gather_flat(self, output: Tensor, tensor: Tensor, what: str) -> Pending:
        """Start to gather one-dimensional tensors, of the same length on all ranks, into one.

        ``tensor`` may be this rank's part of ``output``.
        """
        output, tensor = _real(output), _real(tensor)
        with self.phases.phase("collective", f"all_gather, {what}"):
            sender = self._sender(tensor, what)
            options = AllgatherOptions()
            options.asyncOp = True
            return self._begin(what, sender, sender.group._allgather_base, output, tensor, options)

    def gather_in_chunks(self, chunks: Chunks, what: str) -> Pending:
        """Start to gather chunks between ranks that share memory: see :class:`~lockstep.abilities.Abilities`."""
        sender = self._on_cpu or self._find_companion(what)
        assert sender.abilities is not None
        with self.phases.phase("collective", f"all_gather, {what}"):
            return self._begin(what, sender, sender.abilities._gather_in_chunks, chunks, self._waited_for)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], what: str
    ) -> Pending:
        """Start to send ``sent[r]`` elements of a one-dimensional tensor to each rank ``r``, and to receive
        ``received[r]`` elements from it, in the order of ranks."""
        options = dist.AllToAllOptions()
        options.asyncOp = True
        each = 2 if tensor.is_complex() else 1
        sizes = [each * n for n in received], [each * n for n in sent]
        with self.phases.phase("collective", f"all_to_all, {what}"):
            sender = self._sender(tensor, what)
            needed = None if sender.shares_memory else [rank for rank, numel in enumerate(received) if numel]
            output, tensor = _real(output), _real(tensor)
            return self._begin(what, sender, sender.group.alltoall_base, output, tensor, *sizes, options, needed=needed)

    @property
    def shares_memory(self) -> bool:
        """True if all ranks reduce tensors on the CPU in shared memory."""
        return (self._on_cpu or self._find_companion("first use of the process group")).shares_memory

    def can_add_in_order(self, device: torch.device) -> bool:
        """Return True if :meth:`add_in_order` works for tensors from :meth:`empty` on a device."""
        return device.type == "cpu" and self.shares_memory

    def add_in_order(
        self,
        tensor: Tensor,
        numel: int,
        additions: Sequence[Addition],
        what: str,
        gathered: int = 0,
        *,
        blocking: bool = False,
    ) -> Pending:
        """Start to add parts of tensors in shared memory: see :class:`~lockstep.abilities.Abilities`.

        ``blocking``: as in :meth:`all_reduce`.
        """
        sender = self._sender(tensor, what)
        assert sender.abilities is not None
        each = 2 if tensor.is_complex() else 1
        sizes = each * numel, additions, each * gathered
        options = self._waited_for if blocking else self._begin_only
        with self.phases.phase("collective", f"add_in_order, {what}"):
            return self._begin(what, sender, sender.abilities._add_in_order, _real(tensor), *sizes, options)

    def _begin(
        self,
        what: str,
        sender: _Sender,
        collective: Callable[..., Any],
        *args: Any,
        needed: Sequence[int] | None = None,
        **options: Any,
    ) -> Pending:
        """Begin a collective; ``needed`` are the ranks without which it cannot end, or None for all."""
        if self._state.is_inherited:
            self._check_process()
        try:
            work = collective(*args, **options)
        except (RuntimeError, ValueError) as error:
            raise self.failure(what, error) from error
        if work is None:
            raise CommunicationError(f"{what}: this process is not in the process group it was given")
        call = waits.Call(self.group, self._state.begun.add(), collective.__name__, what, needed)
        return Pending((work,), self, call, sender.in_slices)

    def _place(self) -> str:
        if list(self.global_ranks) == list(range(self.world)):
            return f"rank {self.global_rank} of {self.world}"
        return f"rank {self.global_rank}, in a group of {self.world} ranks"

    def failure(self, what: str, error: BaseException) -> CommunicationError | PeerFailure:
        """Return the error to raise for an exception of a collective."""
        watcher = self.watcher
        if isinstance(error, AgreementError):
            return self._difference(what, error, watcher)
        if watcher is not None and not isinstance(error, OptionError):
            known = watcher.explain(error)
            if known is not None:
                return known
        gist = (str(error) or type(error).__name__).splitlines()[0]
        return CommunicationError(
            f"{self._place()}: {what} failed: {gist}. Another rank has ended, was stopped, or did "
            "not run the same backward passes (one batch less, another branch under no_sync) or make the same calls "
            "(the step of a sharded optimizer, mean() or save() on one rank alone); look at the first error of the "
            "other ranks"
        )

    def _difference(self, what: str, error: AgreementError, watcher: Watcher | None) -> CommunicationError:
        """Return the error to raise where all ranks have noticed that their collectives are not the same."""
        if watcher is None:
            return CommunicationError(f"{self._place()}: {what} failed: {error}")
        key = f"{hash(tuple(self.global_ranks))} {self._state.begun.count}"
        calls = watcher.compare_calls(key, f'"{what}"', self.global_ranks)
        return CommunicationError(f"{self._place()}: the ranks made different calls:\n{calls}\n({error})")


def _is_over(work: Any) -> bool:
    """Wait for a moment; return True if the work is over, and raise if it has failed."""
    try:
        work.wait(_SLICE)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait(_GROUPS_OWN_TIMEOUT)  # raises, unless it was completed just now
    return True


def _real(tensor: Tensor) -> Tensor:
    """View a one-dimensional complex tensor as one of real numbers, two for each element."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def plain_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised memory of this process."""
    return torch.empty(numel, dtype=dtype, device=device)


def control_device(group: Group) -> torch.device:
    """Return the device of small control tensors: the CPU if the group can send them, else the current accelerator."""
    backends = backends_of(group)
    if backends in ("gloo", "fake", "mpi", "shm") or "cpu:" in backends:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # None in a CUDA build without a device
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def sequence_number_on(group: Group) -> int | None:
    """Return the number of collectives that this process has begun on a group and its companion; None if the group
    does not count them."""
    state = _states.get(group)
    groups = {group} if state is None or state.companion is None else {group, state.companion}
    try:
        return sum(int(each._get_sequence_number_for_group()) for each in groups)
    except (RuntimeError, AttributeError):
        return None


def companion_timeout(group: Group) -> timedelta:
    """Return the time-out of a group's companion: the shortest one of its backends, less a tenth if that is NCCL's or
    another of an accelerator.

    After their time-out these end the process, without the names of ranks. Collectives on the device are begun before
    the report is waited for, so without the tenth they would be over first.
    """
    found, accelerator = [], torch.accelerator.current_accelerator(check_available=True)
    for device in (torch.device("cpu"), accelerator):
        try:
            backend = group._get_backend(device)
            limit, waits_on_host = backend.options._timeout, backend.name() in ("gloo", "mpi")
        except (RuntimeError, AttributeError, TypeError):  # there is none for the device
            continue
        if isinstance(limit, timedelta):
            found.append(limit if waits_on_host else 0.9 * limit)
    return min(found, default=timedelta(minutes=30))


def backends_of(group: Group) -> str:
    """Return the names of a group's backends: one, or pairs such as ``cpu:gloo,cuda:nccl``."""
    try:
        return str(dist.get_backend_config(group))
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError):  # a bare backend
        return str(group.name())


def resolve_group(group: Group | None) -> Group | None:
    """Return ``group``, or the default group, or None if there is none yet."""
    if group is not None:
        return group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def needed_group(group: Group | None) -> Group:
    """Return ``group``, or the default group.

    Raises :class:`CommunicationError` if there is none, and :class:`OptionError` for an object that is not a group.
    """
    found = resolve_group(group)
    if found is None:
        raise CommunicationError(
            "there is no process group yet: begin one by `with lockstep.session() as run:`, or call "
            "torch.distributed.init_process_group(), before this"
        )
    if not isinstance(found, dist.ProcessGroup | Backend):
        raise OptionError(f"expected a process group, got {type(found).__name__}; leave it out for the default group")
    return found


def global_ranks(group: Group) -> Sequence[int]:
    """Return the group's ranks, in order, as ranks of the default group, which is how messages name them.

    A group unknown to the default group, such as a bare backend, has its own numbers.
    """
    return _registered_ranks(group) or range(group.size())


def _is_registered(group: Group) -> bool:
    return _registered_ranks(group) is not None


def _registered_ranks(group: Group) -> list[int] | None:
    if not dist.is_initialized():
        return None
    try:
        return dist.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError):
        return None


# ---------------------------------------------------------------------------------- statistics


RECENT = 16
"""Number of rounds in the present median of step times."""
KEPT = 256
"""Number of rounds whose step times are remembered, including the recent ones."""


class CommStats:
    """Counts the collectives of one module, and records this rank's step times.

    A step time is the time from the end of one wait to the start of the next: the rank's own work, which is data,
    forward, backward and optimizer. It tells a slow rank from those that wait for it. Medians exclude an occasional
    validation or checkpoint.
    """

    __slots__ = ("_ended", "_step_times", "bytes_reduced", "hidden_seconds")

    def __init__(self) -> None:
        self.bytes_reduced = 0
        """Bytes of this rank's tensors that were all-reduced."""
        self.hidden_seconds = 0.0
        """Seconds from the first collective of each round to the end of backward: communication that backward hid."""
        self._step_times: deque[float] = deque(maxlen=KEPT)
        self._ended: float | None = None

    def reduces(self, tensor: Tensor) -> None:
        """Count a tensor that is all-reduced; of a sparse one, its values (test_a_sparse_bucket)."""
        self.bytes_reduced += tensor._values().nbytes if tensor.is_sparse else tensor.nbytes

    def waits(self, begun: float | None, now: float) -> None:
        """Note that this rank waits for a round from ``now`` on; ``begun``: when its first collective began, if any."""
        if self._ended is not None:
            self._step_times.append(now - self._ended)
        if begun is not None:
            self.hidden_seconds += now - begun

    def has_waited(self, now: float) -> None:
        """Note that the round is over."""
        self._ended = now

    @property
    def recent(self) -> float | None:
        """Seconds per step, the median of the last 16; None before the second round."""
        return median(islice(reversed(self._step_times), RECENT)) if self._step_times else None

    @property
    def before(self) -> float | None:
        """Seconds per step, the median of those before the last 16; None if there are none."""
        count = len(self._step_times) - RECENT
        return median(islice(self._step_times, count)) if count > 0 else None
