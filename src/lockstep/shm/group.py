"""The ``shm`` process group: PyTorch's methods of a process group, over shared memory.

The collectives of ``native.py`` run in ``one_host.py`` or ``many_hosts.py``, in the order in which they were begun
(``works.py``). All others - gather, scatter, all-to-all, send and receive - use a Gloo group beside it (``gloo.py``).
"""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from lockstep._base import debug
from lockstep._base.abilities import Abilities, Addition, Chunks
from lockstep.errors import AgreementError, CommunicationError, OptionError
from lockstep.shm.arguments import check_message
from lockstep.shm.gloo import CollectivesOfGloo, MessageWork
from lockstep.shm.many_hosts import Algorithm
from lockstep.shm.native import NativeCollectives
from lockstep.shm.runtime import Runtime, ShmOptions
from lockstep.shm.works import ShmWork, WorkQueue

_ProcessGroup: Any = dist.ProcessGroup  # its type has overloads that no method here could match


class ProcessGroupShm(NativeCollectives, CollectivesOfGloo, _ProcessGroup):
    """The group that ``init_process_group("shm")`` and ``new_group(backend="shm")`` make.

    It has the collectives of ``torch.distributed``, and one more method, :meth:`allocate`. Error messages give ranks of
    the default group.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(minutes=30),
        options: ShmOptions | None = None,
        global_ranks: Sequence[int] = (),
    ) -> None:
        _ProcessGroup.__init__(self, rank, size)
        self._store = store
        self._timeout = timeout.total_seconds()
        self._options = options or ShmOptions()
        self._global_ranks = list(global_ranks) or list(range(size))
        self._global_rank = self._global_ranks[rank]
        self._queue = WorkQueue(f"shm rank {self._global_rank}")
        self._runtime = Runtime(
            store, rank, self._global_ranks, self._timeout, self._options, self._queue.is_waited_for
        )
        self._beside: list[ProcessGroupShm] = []
        self._messaged: set[int | None] = set()
        """The ranks to or from which a message has begun, so that Gloo is connected to them."""
        self._begun = 0
        self._splits = 0
        self._group_name = ""
        self._group_desc = ""
        gloo = dist.ProcessGroup.BackendType.GLOO  # code in C++ wants a backend for the CPU: since 2.15, at once
        self._register_backend(torch.device("cpu"), gloo, self._runtime.gloo)
        self._set_default_backend(gloo)
        self._end = weakref.finalize(self, _end, self._queue, self._runtime)

    def __repr__(self) -> str:
        ended = self._runtime.peers.reason
        state = f"{self._begun} collectives begun" if ended is None else f"ended: {ended}"
        return f"ProcessGroupShm(rank {self._global_rank} of ranks {self._global_ranks}, {state})"

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor of one dimension, uninitialised, in memory that every rank of the host can see.

        Collectives on it, and on views of it without gaps, need no copy if every rank's tensor lies in such memory.
        Communicates nothing. The memory is freed with the tensor and its views.

        Example:
            >>> group = ProcessGroupShm(dist.HashStore(), 0, 1)
            >>> bucket = group.allocate(1024, torch.bfloat16)
            >>> bucket.shape
            torch.Size([1024])
        """
        return self._runtime.staging.pool.allocate(numel, dtype)

    @property
    def _abilities(self) -> Abilities:
        """The extra methods that :func:`lockstep.replicate` uses: this group has them itself."""
        return self

    @property
    def _shares_memory(self) -> bool:
        return self._runtime.inter_host is None

    def _add_in_order(
        self, tensor: Tensor, numel: int, additions: Sequence[Addition], gathered: int, opts: dist.AllreduceOptions
    ) -> ShmWork:
        return self._begin("add_in_order", lambda a: a.add_in_order(tensor, numel, additions, gathered), [tensor], opts)

    def _gather_in_chunks(self, chunks: Chunks, opts: Any) -> ShmWork:
        return self._begin("all_gather", lambda algorithm: algorithm.gather_in_chunks(chunks), [], opts)

    # -------------------------------------------------------------------------- what PyTorch asks

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "shm"

    name = getBackendName

    def setGroupName(self, name: str) -> None:
        """Set the name under which PyTorch finds the group."""
        self._group_name = name

    def getGroupName(self) -> str:
        """Return the name under which PyTorch finds the group."""
        return self._group_name

    def setGroupDesc(self, description: str) -> None:
        """Set the description of the group."""
        self._group_desc = description

    def getGroupDesc(self) -> str:
        """Return the text that says what the group is for."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "ProcessGroupShm":
        if torch.device(device).type != "cpu":
            raise OptionError(f"the shm process group has no backend for {device}, only for the CPU")
        return self

    @property
    def options(self) -> ShmOptions:
        """The options that the group was made with."""
        return self._options

    @property
    def supports_splitting(self) -> bool:
        """False: ``dist.split_group`` needs an accelerator; :meth:`split_group` works everywhere."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """False: the backend has no way of its own to coalesce collectives for PyTorch."""
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        if self._runtime.gloo is not None:
            self._runtime.gloo.set_timeout(timeout)

    set_timeout = _set_default_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: ranks compare the collectives that they run."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has begun."""
        return self._begun

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: ShmOptions | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> "ProcessGroupShm | None":
        """Make a group of some ranks of this one; return None on all other ranks. Every rank has to call it."""
        self._splits += 1
        members = sorted(ranks)
        if self.rank() not in members:
            return None
        store = PrefixStore(f"split {self._splits} {group_name or ''} {members}", self._store)
        global_ranks = [self._global_ranks[rank] for rank in members]
        limit, options = timeout or timedelta(seconds=self._timeout), opts or self._options
        group = ProcessGroupShm(store, members.index(self.rank()), len(members), limit, options, global_ranks)
        if group_name is not None:
            group._set_group_name(group_name)
        group._set_group_desc(group_desc or f"split of {self.group_desc}")
        return group

    def _ends_with(self, other: "ProcessGroupShm") -> None:
        """Let another group of the same ranks end when this one is shut down or aborted."""
        self._beside.append(other)

    def shutdown(self) -> None:
        """Leave the group: collectives that wait fail, here and on other ranks."""
        self._end()
        for each in self._beside:
            each.shutdown()

    def abort(self) -> None:
        """End the group on every rank, at once."""
        self._abort(f"rank {self._global_rank} called abort()")

    def _abort(self, reason: str) -> None:
        self._runtime.abort(f"the process group is aborted: {reason}", collective_may_run=True)
        self._end()
        for each in self._beside:
            each._abort(reason)

    # ----------------------------------------------------------------------------------- machinery

    def _begin(self, what: str, run: Callable[[Algorithm], object], outputs: list[Tensor], opts: Any) -> ShmWork:
        if self._runtime.peers.inherited:
            raise CommunicationError(str(self._runtime.peers.reason))
        asked_timeout = getattr(opts, "timeout", None)
        timeout = (
            asked_timeout.total_seconds()
            if asked_timeout is not None and asked_timeout > timedelta(0)
            else self._timeout
        )
        runtime, global_rank = self._runtime, self._global_rank

        def run_collective(_: Any = self) -> None:  # holds the group: it is in use until this has run
            _run(runtime, run, timeout, global_rank)

        self._begun += 1
        if debug.printed:
            debug.log_of("shm").debug("%s, collective %d of group %s", what, self._begun, self.getGroupName())
        work = ShmWork(self._queue, run_collective, outputs, what)
        return self._queue.add(work, background=getattr(opts, "asyncOp", True))

    def _message(self, begin: Callable[[Any], Any], tensors: list[Tensor], what: str, other: int | None) -> MessageWork:
        check_message(tensors, what)
        peers, gloo = self._runtime.peers, self._gloo_group()

        def is_gone() -> bool:
            return other is not None and peers.is_gone(self._global_ranks[other])

        connects = other not in self._messaged
        check = self._runtime.check_in_use
        work = MessageWork(lambda: begin(gloo), tensors, what, check, is_gone, connects=connects)
        self._messaged.add(other)
        return work

    def _gloo_group(self) -> Any:
        self._runtime.peers.check_open()
        return self._runtime.gloo


def _run(runtime: Runtime, run: Callable[[Algorithm], object], timeout: float, global_rank: int) -> None:
    """Run a collective; a failure on this rank alone ends the group, as the others would wait for ever."""
    # Check before anything is written: a rank that is late may still read the memory
    # (test_what_is_tried_again_after_a_timeout_does_not_reach_the_late_rank).
    runtime.peers.check_open()
    algorithm = runtime.algorithm(timeout)
    try:
        if torch.is_inference_mode_enabled():  # memory that is made in inference mode could not be written elsewhere
            with torch.inference_mode(False):
                run(algorithm)
        else:
            run(algorithm)
    except (AgreementError, OptionError):
        raise  # on every rank, before anything was moved
    except CommunicationError as error:
        runtime.abort(str(error))
        raise
    except BaseException as error:
        runtime.abort(f"the process group is aborted: rank {global_rank} failed in a collective: {error!r}")
        raise


def _end(queue: WorkQueue, runtime: Runtime) -> None:
    """Leave, let the threads end, and close; also called when the group is collected, or the interpreter ends."""
    if runtime.peers.inherited:  # the threads are the parent's, and locks may be held for ever
        return
    runtime.leave()
    queue.close_and_wait()
    runtime.close()
