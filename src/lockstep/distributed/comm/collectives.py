"""The only file that calls ``torch.distributed`` collectives: on an explicit group, labelled and counted.

A group is a result of ``init_process_group`` or ``new_group``, a dimension of a ``DeviceMesh``, or a bare backend such
as ``dist.ProcessGroupGloo(...)``; nothing here uses the default group. Only messages name ranks as ranks of the default
group, even in a smaller group: see :func:`global_ranks`. For each group this process keeps a :class:`GroupState`.
"""

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from lockstep._base.abilities import Abilities, Addition, Chunks, abilities_of
from lockstep._base.buckets import TensorSpec, plan_buckets
from lockstep._base.compiler import current_transform
from lockstep._base.store import in_background
from lockstep._base.texts import first_line
from lockstep.distributed.comm import waits
from lockstep.distributed.comm.comm_stats import CommStats
from lockstep.distributed.comm.companion import give_up_companion, make_companion, store_for_companion
from lockstep.distributed.comm.group_state import Watcher, begun_in_process, number_on, state_of, watchers
from lockstep.distributed.comm.groups import (
    Group,
    backends_of,
    companion_timeout,
    control_device,
    global_ranks,
    is_registered,
)
from lockstep.errors import AgreementError, CommunicationError, OptionError, PeerFailure
from lockstep.phases import Phases

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
        self.last_wait = -self.SECONDS
        """When a collective was waited for last."""
        atexit.register(self._delay)

    def _delay(self) -> None:
        time.sleep(max(0.0, self.last_wait + self.SECONDS - time.monotonic()))


_exit_delay = _ExitDelay()


class Pending(NamedTuple):
    """A collective under way."""

    work: Any
    """What the process group has returned for it."""
    owner: "Collectives"
    call: waits.Call
    in_slices: bool
    """True if it is waited for in slices: see :meth:`Collectives.wait_watched`."""

    def wait(self) -> None:
        """Return when the tensor holds the result (for the current stream, on devices with streams)."""
        watcher = self.owner.watcher if watchers else None
        try:
            if watcher is None:
                self.work.wait(_GROUPS_OWN_TIMEOUT)
            else:
                with watcher.waiting(self.call.in_words), waits.Waiting(self.call):
                    self.owner.wait_watched(self.work, watcher, self.in_slices)
        except PeerFailure:
            raise
        except RuntimeError as error:
            raise self.owner.failure(self.call.what, error) from error
        _exit_delay.last_wait = time.monotonic()

    def linger(self, seconds: float) -> None:
        """Wait for some seconds at most, whether the other ranks come or not; for tensors on the CPU.

        Another thread sends what this rank has begun. If the process is about to end, that thread needs a moment.
        """
        with contextlib.suppress(RuntimeError):  # it was not over, and goes on
            self.work.wait(timedelta(seconds=seconds))

    def done(self) -> bool:
        """Return True if :meth:`wait` would return immediately."""
        return bool(self.work.is_completed())


class _Sender:
    """A group that sends tensors, and what its backend can do."""

    __slots__ = ("abilities", "group", "in_slices", "of_what")

    def __init__(self, group: Group, of_what: str = "") -> None:
        self.group = group
        self.of_what = of_what
        """Ends the names of its collectives: one over the companion is not the one with the same number over the group,
        and ranks that are in one each wait for ever."""
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
        self._registered = is_registered(group)
        self._state = state_of(group)
        self._store = store_for_companion(group, backends_of(group)) if uses_companion else None
        self._given = _Sender(group, "" if self._store is None else " of accelerators")
        self._on_cpu: _Sender | None = self._given if self._store is None else None
        self.device = control_device(group) if self._store is None else torch.device("cpu")
        """The device of small control tensors."""
        self._begin_only = dist.AllreduceOptions()
        self._waited_for = dist.AllreduceOptions()
        self._begin_only.asyncOp, self._waited_for.asyncOp = True, False

    def __repr__(self) -> str:
        companion = "none yet" if self._state.companion is None else type(self._state.companion).__name__
        return f"Collectives(rank {self.rank} of {self.world}, {type(self.group).__name__}, companion: {companion})"

    def _sender(self, tensor: Tensor, what: str) -> _Sender:
        if not tensor.is_cpu:
            return self._given
        return self._on_cpu or self._find_companion(what)

    def _find_companion(self, what: str) -> _Sender:
        """Return the companion; make it if this is its first use."""
        self.check_alive()
        state, what = self._state, waits.name_of_call(what)
        # Threads may use the group for the first time at once, and every rank makes one companion.
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
        made = in_background(lambda: make_companion(self.group, self._store, self.rank, self.global_ranks, limit))
        call = waits.Call(self.group, self._state.begun.add(), "companion", what)
        watcher, since = self.watcher, time.monotonic()
        try:
            with watcher.waiting(what) if watcher is not None else contextlib.nullcontext(), waits.Waiting(call):
                while not futures.wait([made], _SLICE.total_seconds()).done:
                    if watcher is not None:
                        watcher.check_waiting(self.global_ranks, since)
        except BaseException as error:
            why = f"rank {self.global_rank} gave up: {first_line(error)}"
            in_background(lambda: give_up_companion(self._store, self.world, why))
            raise
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
        if self._state.is_inherited or self._state.lost or self._state.session_ended:
            return False
        return not self._registered or self.group in dist.distributed_c10d._world.pg_group_ranks

    def check_alive(self) -> None:
        """Raise unless :attr:`is_alive`."""
        if self.is_alive:
            return
        self._check_process()
        if self._state.lost:
            raise CommunicationError(
                f"rank {self.global_rank} can no longer take part in what the other ranks of its process group do: "
                f"{self._state.lost}. Destroy the group and make another, or start anew"
            )
        raise CommunicationError(f"rank {self.global_rank}: {self._why_gone()}")

    def _why_gone(self) -> str:
        if self._state.session_ended:
            return (
                "the session has ended; indent this line below `with lockstep.session()`. In a new session, replicate "
                "the module anew"
            )
        return (
            "the process group has been destroyed; gradients cannot be synchronised any more. Destroy it after the "
            "last backward, or run this one under no_sync()"
        )

    def begun(self) -> int | None:
        """Return the number of collectives begun in this process, on all groups that count them; None if this does
        not."""
        # All groups: a program may sum gradients over another one than that of the module.
        return begun_in_process(self.group)

    def program_begun(self) -> int | None:
        """Return :meth:`begun` without the collectives of this library on the group."""
        total = self.begun()
        return None if total is None else total - self._state.begun.count

    @property
    def is_lost(self) -> bool:
        """True if :meth:`lose` has been called for the group on this rank."""
        return bool(self._state.lost)

    def lose(self, reason: str) -> None:
        """Stop using the group: the next message would be paired with the one that this rank could not send.

        Aborts the group on all ranks, if its backend can.
        """
        if not self._state.lost:
            self._state.lose(reason)
            # The other ranks would wait for the message until the group's time-out.
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
        self.comm_stats.bytes_reduced += tensor._values().nbytes if tensor.is_sparse else tensor.nbytes
        with self.phases.phase("collective", f"all_reduce, {what}"):
            sender = self._sender(tensor, what)
            if sender.abilities is not None:  # it multiplies while it copies
                return self._begin(what, sender, sender.abilities._all_reduce, [tensor], options, factor)
            if factor != 1:
                tensor.mul_(factor)
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            # As in dist.all_reduce, without its checks, which take longer than the collective of a small tensor.
            return self._begin(what, sender, sender.group.allreduce, [real], options)

    def mean_rounded_to(self, half: torch.dtype, tensor: Tensor, what: str, *, blocking: bool = False) -> Pending:
        """Start to replace a tensor by the mean over ranks that share memory, added in float32, of what is rounded to
        half precision, and rounded again: see :class:`~lockstep._base.abilities.Abilities`.

        ``blocking``: as in :meth:`all_reduce`.
        """
        sender = self._sender(tensor, what)
        assert sender.abilities is not None
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        options.asyncOp = not blocking
        self.comm_stats.bytes_reduced += tensor.nbytes
        with self.phases.phase("collective", f"all_reduce, {what}"):
            return self._begin(what, sender, sender.abilities._all_reduce, [tensor], options, 1.0, half)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        """Start to broadcast a tensor from rank ``source``, in place."""
        with self.phases.phase("collective", f"broadcast, {what}"):
            sender = self._sender(tensor, what)
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = source, 0, True
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            # Over sockets the source waits for nobody, and the others for it alone: ranks that are right must not look
            # like a deadlock. In shared memory all meet.
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
        """Start to gather chunks between ranks that share memory: see :class:`~lockstep._base.abilities.Abilities`."""
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
        """Start to add parts of tensors in shared memory: see :class:`~lockstep._base.abilities.Abilities`.

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
        if self._state.is_inherited or self._state.session_ended:
            self.check_alive()
        if current_transform() is not None:  # backends would fail while they send, and give up the group
            raise OptionError(
                f"rank {self.global_rank}: {waits.name_of_call(what)} is called inside a transform of torch.func, "
                "whose tensors have no memory that could be sent. Call it outside, and take gradients through it with "
                "torch.autograd.grad"
            )
        try:
            work = collective(*args, **options)
        except (RuntimeError, ValueError) as error:
            raise self.failure(what, error) from error
        if work is None:
            raise CommunicationError(
                f"{waits.name_of_call(what)}: this process is not in the process group it was given"
            )
        kind = collective.__name__.lstrip("_") + sender.of_what
        call = waits.Call(self.group, self._state.begun.add(), kind, what, needed)
        if sender.of_what:
            self._state.begun.note_on_device(call, number_on(self.group) if watchers else None)
        return Pending(work, self, call, sender.in_slices)

    def _place(self) -> str:
        if list(self.global_ranks) == list(range(self.world)):
            return f"rank {self.global_rank} of {self.world}"
        return f"rank {self.global_rank}, in a group of {self.world} ranks"

    def failure(self, what: str, error: BaseException) -> CommunicationError | PeerFailure:
        """Return the error to raise for an exception of a collective."""
        watcher, what = self.watcher, waits.name_of_call(what)
        if isinstance(error, AgreementError):
            return self._difference(what, error, watcher)
        if watcher is not None and not isinstance(error, OptionError):
            known = watcher.explain(error)
            if known is not None:
                return known
        if not self.is_alive and not self._state.lost:
            return CommunicationError(f"{self._place()}: {self._why_gone()}")
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
        calls = watcher.compare_calls(key, what + self._state.in_loop, self.global_ranks)
        return CommunicationError(f"{self._place()}: the ranks made different calls:\n{calls}")


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
