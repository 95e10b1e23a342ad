"""The Gloo group beside shared memory, and the collectives that use it.

As elsewhere, ranks compare what they are about to run, and notice ranks that have died. Messages from one rank to
another are the exception: they are not ordered with the collectives.
"""

import os
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep._base.compiler import outside_compiler
from lockstep._base.forked_groups import keep_in_forks
from lockstep._base.network import INTERFACE_VARIABLE
from lockstep._base.store import FetchedAddresses
from lockstep._base.texts import first_line
from lockstep.errors import AgreementError, CommunicationError, LayoutError
from lockstep.shm.arguments import check_numel, check_tensors, check_writable, flatten, unflatten, with_overloads
from lockstep.shm.constants import GRACE_SECONDS, LIVENESS_SECONDS
from lockstep.shm.inter_host import wait_alive
from lockstep.shm.many_hosts import Algorithm
from lockstep.shm.messages import CollectiveKind, Descriptor, Op
from lockstep.shm.works import ShmWork

_Gloo: Any = dist.ProcessGroupGloo  # its type does not have its options


def make_gloo_group(
    store: Any, rank: int, size: int, timeout: timedelta, address: str | None, *, lazy: bool = False
) -> Any:
    """Make a Gloo group that listens under an address of this host; None leaves that to Gloo.

    A ``lazy`` group connects two ranks when they first use it, so that no rank waits here for one that dies meanwhile,
    or for a slow link. (If a living rank never comes, the first use fails after Gloo's own attempts to connect, some
    15 s, even if the time-out is shorter.)
    """
    options = _Gloo._Options()
    options._devices = _devices(address, lazy)
    options._threads = 2 * len(options._devices)  # as PyTorch does
    options._timeout = timeout
    addresses = store if lazy else FetchedAddresses(store, size)  # refer to it until Gloo has read it
    group = _Gloo(addresses, rank, size, options)
    keep_in_forks(group)
    return group


def _devices(address: str | None, lazy: bool) -> list[Any]:
    if address is not None:
        return [_Gloo.create_device(hostname=address, lazy_init=lazy)]
    chosen = list(filter(None, os.environ.get(INTERFACE_VARIABLE, "").split(",")))
    if chosen:
        return [_Gloo.create_device(interface=each, lazy_init=lazy) for each in chosen]
    return [_Gloo.create_default_device(lazy_init=lazy)]


def wait_for(work: Any, group: Any, algorithm: Algorithm) -> None:
    """Wait for a work of a Gloo group; raise if a rank dies or has ended the group."""
    try:
        wait_alive(work, algorithm.check_alive)
    except CommunicationError:
        group.abort()  # else destroying the group would wait for this work
        raise
    try:
        work.wait()
    except RuntimeError as error:
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:  # Gloo may be the first to notice a death, and does not know whose
            algorithm.check_alive()
            time.sleep(LIVENESS_SECONDS / 10)
        raise CommunicationError(f"Gloo, beside the shm process group: {first_line(error)}") from error


_Calls = queue.SimpleQueue[tuple[Callable[[], object], list[BaseException], threading.Lock]]
_idle: list[_Calls] = []
"""Threads that have waited, and can do so again: what each takes calls from."""
os.register_at_fork(after_in_child=_idle.clear)


def waiting_elsewhere(call: Callable[[], object]) -> Iterator[None]:
    """Run a call that may wait for ever on another thread; yield now and then until it is over, and raise its error.

    Who stops asking leaves the thread to its wait.
    """
    try:
        calls = _idle.pop()
    except IndexError:
        calls = _Calls()
        threading.Thread(target=_serve, args=(calls,), name="lockstep waits", daemon=True).start()
    over, errors = threading.Lock(), list[BaseException]()
    over.acquire()
    calls.put((call, errors, over))
    while not over.acquire(timeout=LIVENESS_SECONDS):
        yield
    _idle.append(calls)
    if errors:
        raise errors.pop()


def _serve(calls: _Calls) -> None:
    while True:
        call, errors, over = calls.get()
        try:
            call()
        except BaseException as error:
            errors.append(error)
        del call, errors  # before the caller goes on, which may end the interpreter: see in_background()
        over.release()


class MessageWork(dist.Work):
    """A message to or from one rank, under way: a work of Gloo, with errors that name the rank.

    ``check_in_use`` raises if the group has ended; ``is_gone`` tells if the other rank has left it, or has died.
    The first message to a rank ``connects`` to it, and may wait for that.
    """

    def __init__(
        self,
        begin: Callable[[], Any],
        tensors: list[Tensor],
        what: str,
        check_in_use: Callable[[], object],
        is_gone: Callable[[], bool],
        *,
        connects: bool,
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._what = what
        self._check_in_use = check_in_use
        self._is_gone = is_gone
        self._work: Any = None

        def begin_here() -> None:
            self._work = begin()

        if connects:
            self._run(begin_here)
        else:
            with self._errors():
                begin_here()

    def _run(self, call: Callable[[], object]) -> None:
        """Run a call of Gloo on another thread, as nothing interrupts its wait for a rank that does not come."""
        grace = 0.0
        with self._errors():
            for _ in waiting_elsewhere(call):
                self._check_in_use()
                grace += LIVENESS_SECONDS if self._is_gone() else 0.0
                if grace > GRACE_SECONDS:  # the message may have come before
                    raise self._error("it is connected no more")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._error(first_line(error)) from error

    def _error(self, gist: str) -> CommunicationError:
        return CommunicationError(
            f"{self._what}: that rank has died, has left, or did not answer in time; look at its errors "
            f"(Gloo, beside the shm process group: {gist})"
        )

    @outside_compiler
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the message has been sent or received; raise if the group ends, or the other rank is gone."""
        work = self._work
        self._run(lambda: work.wait(timeout) if timeout > timedelta(0) else work.wait())
        return True

    def synchronize(self) -> None:
        """Wait; a CPU has no stream to wait on."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if the message is over."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return True if the message is over and has not failed."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Return the exception that Gloo raised."""
        return self._work.exception()

    def result(self) -> list[Tensor]:
        """Return the tensors of the message."""
        return self._tensors

    def get_future(self) -> Any:
        """Return the future of Gloo's work: so far, there is none."""
        return self._work.get_future()

    def _source_rank(self) -> int:
        """Return the rank that has sent the message; PyTorch's ``recv`` asks for it."""
        return int(self._work._source_rank())


class CollectivesOfGloo:
    """The collectives that run on Gloo. Each is a method of its own: PyTorch's C++ code looks them up by name."""

    rank: Callable[[], int]
    size: Callable[[], int]
    _global_ranks: list[int]
    """The group's ranks as ranks of the default group, for use in messages."""

    @abstractmethod
    def _begin(self, what: str, run: Callable[[Algorithm], object], outputs: list[Tensor], opts: Any) -> ShmWork:
        """Begin a collective that calls ``run``; profilers show it under the name ``what``."""

    @abstractmethod
    def _message(self, begin: Callable[[Any], Any], tensors: list[Tensor], what: str, other: int | None) -> MessageWork:
        """Call ``begin`` with the Gloo group, for a message to or from a rank of the group; None for any rank."""

    @abstractmethod
    def _gloo_group(self) -> Any:
        """Return the Gloo group; raises if the shm group has ended."""

    def _begin_on_gloo(
        self,
        kind: CollectiveKind,
        given: list[Tensor],
        outputs: list[Tensor],
        opts: Any,
        begin: Callable[[Any, list[Tensor]], Any],
    ) -> ShmWork:
        """Call ``begin`` with a Gloo group once all ranks say that they run the same.

        It gets the bytes of each output, in one dimension: Gloo does not know every dtype.
        """
        what = kind.name.lower()
        check_tensors([*given, *outputs], what)
        check_writable(outputs, what)
        root = self._global_ranks[opts.rootRank]
        descriptor = Descriptor(kind, given[0].dtype, given[0].numel(), root=root)

        def run(algorithm: Algorithm) -> None:
            algorithm.agree(descriptor)
            group = self._gloo_group()
            flat = [flatten([each]) for each in outputs]
            received = [each.view(torch.uint8) for each in flat]
            wait_for(begin(group, received), group, algorithm)
            for each, output in zip(flat, outputs, strict=True):
                unflatten(each, [output])

        return self._begin(what, run, outputs, opts)

    @outside_compiler
    @with_overloads(dist.GatherOptions, ["output_tensors", "input_tensors input_tensor"], ["root", "timeout"])
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """Give one rank the tensors of all ranks."""
        flat = [each for given in outputs for each in given]
        check_tensors(inputs, "gather")
        check_numel(flat, inputs[0].numel(), "gather")

        def begin(group: Any, received: list[Tensor]) -> Any:
            return group.gather(_nested(received, outputs), _bytes_of_each(inputs), opts)

        return self._begin_on_gloo(CollectiveKind.GATHER, inputs, flat, opts, begin)

    @outside_compiler
    @with_overloads(dist.ScatterOptions, ["output_tensors output_tensor", "input_tensors"], ["root", "timeout"])
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Give every rank one of the root's tensors."""
        flat = [each for given in inputs for each in given]
        check_tensors(outputs, "scatter")
        check_numel(flat, outputs[0].numel(), "scatter")

        def begin(group: Any, received: list[Tensor]) -> Any:
            return group.scatter(received, _nested(_bytes_of_each(flat), inputs), opts)

        return self._begin_on_gloo(CollectiveKind.SCATTER, [*outputs, *flat], outputs, opts, begin)

    @outside_compiler
    @with_overloads(dist.AllToAllOptions, ["output_tensors", "input_tensors"])
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        """Give every rank one tensor of each rank."""
        for tensors in inputs, outputs:
            if len(tensors) != self.size():
                raise LayoutError(f"all_to_all: expected {self.size()} tensors, one for each rank, got {len(tensors)}")
        sent, taken = ([each.numel() for each in tensors] for tensors in (inputs, outputs))
        return self._begin_all_to_all(inputs, outputs, sent, taken, opts)

    @outside_compiler
    @with_overloads(
        dist.AllToAllOptions, ["output", "input", "output_split_sizes", "input_split_sizes"], ["timeout"], single=False
    )
    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> Any:
        """Give every rank a part of each rank's tensor, concatenated in one tensor."""
        sent, taken = self._parts(x, input_sizes, "input"), self._parts(output, output_sizes, "output")
        return self._begin_all_to_all([x], [output], sent, taken, opts)

    def _parts(self, x: Tensor, sizes: list[int], what: str) -> list[int]:
        """Return how many elements of a tensor go to each rank, or come from it; raise if they do not make it up."""
        size, rows = self.size(), x.shape[0] if x.dim() else 1
        if not sizes:
            if x.numel() % size:  # Gloo, which gets bytes, would cut an element in two
                raise LayoutError(
                    f"all_to_all_single: expected a multiple of {size} elements, a part for each rank, got "
                    f"{x.numel()} in the {what}; give split sizes for parts that are not equal"
                )
            return [x.numel() // size] * size
        if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
            raise LayoutError(
                f"all_to_all_single: expected {size} split sizes of the {what}, one for each rank, that make up its "
                f"size in dimension 0, {rows}, got {sizes}"
            )
        return [each * (x.numel() // max(1, rows)) for each in sizes]

    def _begin_all_to_all(
        self, inputs: list[Tensor], outputs: list[Tensor], sent: list[int], taken: list[int], opts: Any
    ) -> ShmWork:
        check_tensors([*inputs, *outputs], "all_to_all")
        check_writable(outputs, "all_to_all")
        descriptor, each = Descriptor(CollectiveKind.ALL_TO_ALL, inputs[0].dtype), inputs[0].element_size()

        def run(algorithm: Algorithm) -> None:
            algorithm.agree(descriptor)
            group = self._gloo_group()
            self._check_parts(sent, taken, group, algorithm)
            received = flatten(outputs)
            # Up to PyTorch 2.11 Gloo has all-to-all for single tensors only.
            in_bytes = [[n * each for n in sizes] for sizes in (taken, sent)]
            work = group.alltoall_base(received.view(torch.uint8), flatten(inputs).view(torch.uint8), *in_bytes, opts)
            wait_for(work, group, algorithm)
            unflatten(received, outputs)

        return self._begin("all_to_all", run, outputs, opts)

    def _check_parts(self, sent: list[int], taken: list[int], group: Any, algorithm: Algorithm) -> None:
        """Raise on all ranks unless each expects what the others send to it.

        Gloo ends a process that gets more than it expects, and does not tell one that gets less.
        """
        own = self.rank()
        # Summed over all ranks, what goes from one to another is added by the one and taken away by the other.
        balance = sum(crc32(b"%d %d %d" % (own, to, n)) for to, n in enumerate(sent))
        balance -= sum(crc32(b"%d %d %d" % (of, own, n)) for of, n in enumerate(taken))
        total = torch.tensor([balance], device="cpu")
        algorithm.all_reduce(total, Op.SUM)
        if not total.item():
            return
        parts = torch.tensor([sent, taken], device="cpu")
        of_all = [torch.empty_like(parts) for _ in sent]
        wait_for(group.allgather([of_all], [parts]), group, algorithm)
        sends, expects = torch.stack(of_all).unbind(1)
        wrong = [
            f"rank {self._global_ranks[i]} sends {sends[i, j]} to rank {self._global_ranks[j]}, which expects "
            f"{expects[j, i]}"
            for i, j in (sends != expects.T).nonzero().tolist()
        ]
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise AgreementError(
            "all_to_all: other numbers of elements are sent than expected, and no data has been moved: "
            f"{'; '.join(wrong[:4])}{more}. The split sizes of a rank's input have to be those that the other ranks "
            "give for their outputs; the group can be used further"
        )

    alltoall_base = all_to_all_single

    @outside_compiler
    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:
        """Send tensors to one rank."""
        what = f"send from rank {self._global_ranks[self.rank()]} to rank {self._global_ranks[dstRank]}"
        return self._message(lambda group: group.send(tensors, dstRank, tag), tensors, what, dstRank)

    @outside_compiler
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:
        """Receive tensors from one rank."""
        what = f"receive on rank {self._global_ranks[self.rank()]} from rank {self._global_ranks[srcRank]}"
        return self._message(lambda group: group.recv(tensors, srcRank, tag), tensors, what, srcRank)

    @outside_compiler
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive tensors from any rank that sends some."""
        what = f"receive on rank {self._global_ranks[self.rank()]} from any rank"
        return self._message(lambda group: group.recv_anysource(tensors, tag), tensors, what, None)


def _bytes_of_each(tensors: list[Tensor]) -> list[Tensor]:
    return [flatten([each]).view(torch.uint8) for each in tensors]


def _nested(flat: list[Tensor], like: list[list[Tensor]]) -> list[list[Tensor]]:
    """Group tensors in lists that are as long as the lists of ``like``."""
    following = iter(flat)
    return [[next(following) for _ in given] for given in like]
