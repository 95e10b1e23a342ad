"""Ranks as threads of one process: each has a group of its own, Gloo's over loopback or `shm`: the real collectives.

`run_ranks(2, function)` calls `function(rank)` in two threads and gives back what they return. There is no default
process group. What ranks share here and processes would not: torch's global random numbers, the default dtype,
environment variables, and the modules' globals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lockstep.distributed import ProcessGroupShm, ShmOptions

CONNECT = timedelta(seconds=60)  # to meet; a short timeout is meant for collectives, not for threads that start late

CPU = torch.device("cpu")

_random_numbers = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a rank is given: its number, how many there are, and its process group."""

    rank: int
    world: int
    group: Any
    device: torch.device = CPU
    """Where tensors are made by default, for ranks on accelerators."""

    def generator(self, seed: int = 0) -> torch.Generator:
        """Random numbers that differ from rank to rank; those of `torch.manual_seed` are shared by the threads."""
        return torch.Generator().manual_seed(1000 * seed + self.rank)

    def make(self, factory: Callable[[], Any], seed: int = 0) -> Any:
        """Return what `factory()` gives under `torch.manual_seed(seed)`: with the same seed, the same on every rank."""
        with _random_numbers, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return factory()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, bit for bit; shape and dtype must be the same on all."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # as bytes: Gloo does not know every dtype
        parts = [torch.empty_like(flat) for _ in range(self.world)]
        if flat.numel():
            dist.all_gather(parts, flat, group=self.group)
        return [part.view(tensor.dtype).reshape(tensor.shape) for part in parts]

    def all_equal(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is the same on every rank, bit for bit (so a NaN equals itself)."""
        first, *others = (part.reshape(-1).view(torch.uint8) for part in self.gather(tensor))
        return all(torch.equal(first, other) for other in others)


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 90.0,
    group_timeout: float = 30.0,
    errors: bool = False,
    hosts: str = "",
    device: str = os.environ.get("LOCKSTEP_RANKS_DEVICE", ""),
    control: bool = True,
) -> list[Any]:
    """Calls `function(Rank(...), *args)` in `world` threads and returns what they return, by rank.

    `hosts` gives them `shm` groups instead of Gloo's, and names the host of each rank by a letter: "aabb", or "aa".
    `device` is a type of accelerators: each rank has one of its own, on which tensors are made by default. `control`:
    see `for_accelerators`.

    If ranks raise, the error that was raised first is raised here - the others mostly follow from it - with a note that
    names its rank. With `errors=True` nothing is raised, and an error stands in its rank's place. A rank that has
    ended, well or not, keeps its connections until all have: peers that wait for it do so for `group_timeout` seconds.
    After `timeout` seconds it is a TimeoutError that shows where each rank is.
    """
    store = dist.HashStore()
    groups: list[Any] = [None] * world
    results: list[Any] = [None] * world
    failed: list[int] = []  # in the order of time

    def work(number: int) -> None:
        try:
            groups[number] = (_shm_group if hosts else new_gloo_group)(store, number, world, group_timeout, hosts)
            with contextlib.ExitStack() as stack:
                place = torch.device(device, number) if device else CPU
                if device:
                    groups[number] = for_accelerators(store, groups[number], control)
                    stack.enter_context(torch.accelerator.device_index(number))
                    stack.enter_context(place)
                results[number] = function(Rank(number, world, groups[number], place), *args)
        except BaseException as error:
            results[number] = error
            failed.append(number)

    # Daemons, so that one that hangs for good does not keep the interpreter from ending.
    threads = [threading.Thread(target=work, args=(n,), name=f"rank {n}", daemon=True) for n in range(world)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"ranks still at work after {timeout} s\n{_where(threads, results)}")

    for number in failed:
        _let_go(results[number])
    _destroy(groups)
    if failed and not errors:
        first = results[failed[0]]
        others = [f"rank {number}: {type(results[number]).__name__}" for number in failed[1:]]
        first.add_note("; ".join([f"raised by rank {failed[0]} of {world}", *others]))
        raise first
    return results


def _shm_group(store: dist.Store, rank: int, world: int, timeout: float, hosts: str) -> ProcessGroupShm:
    options = ShmOptions(host=hosts[rank])
    group = ProcessGroupShm(store, rank, world, CONNECT, options)
    group.set_timeout(timedelta(seconds=timeout))
    return group


def new_gloo_group(store: dist.Store, rank: int, world: int, timeout: float, _hosts: str = "") -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [_device(os.getpid())]
    options._timeout = CONNECT
    group = dist.ProcessGroupGloo(dist.PrefixStore("ranks", store), rank, world, options)
    group.set_timeout(timedelta(seconds=timeout))
    return group


@functools.cache
def _device(_process: int) -> Any:
    """What listens for all groups: a thread of Gloo, for whose end the end of each group would wait 10 ms."""
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


def for_accelerators(store: dist.Store, backend: dist.ProcessGroupGloo, control: bool = True) -> dist.ProcessGroup:
    """A group for simulated accelerators, which sum on the CPU (see `sim`).

    Without `control` it goes by another name, as a backend for accelerators alone: what ranks agree on, and what they
    say in a round, travels over accelerators, too.

    (A class of its own, in Python, would hold Python's lock while Gloo waits for a thread that needs it.)
    """
    kinds = dist.ProcessGroup.BackendType
    group, kind = dist.ProcessGroup(store, backend.rank(), backend.size()), kinds.GLOO if control else kinds.NCCL
    group._set_default_backend(kind)
    group._register_backend(CPU, kind, backend)
    return group


def _where(threads: list[threading.Thread], results: list[Any]) -> str:
    """The stacks of the ranks that are at work, and the errors of the others."""
    frames = sys._current_frames()
    lines = []
    for thread, result in zip(threads, results, strict=True):
        if thread.is_alive() and thread.ident in frames:
            lines += [f"{thread.name} is at:\n", *traceback.format_stack(frames[thread.ident])]
        elif isinstance(result, BaseException):
            lines += [f"{thread.name} failed:\n", *traceback.format_exception(result)]
        else:
            lines.append(f"{thread.name} is done\n")
    return "".join(lines)


def _let_go(error: BaseException | None) -> None:
    """Drops the local variables that an error's traceback keeps: models, and the group with its sockets and threads."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        error = pending.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            pending += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]


def _destroy(groups: list[Any]) -> None:
    """Ends the groups. A model that was attached to one is mostly part of a cycle, so the collector has to look.

    They end in this thread: a thread of Gloo that ends its own group waits for itself, and the process aborts. So this
    one keeps them until others have let go of them, such as a thread of Gloo that is about to leave a callback.
    """
    groups[:] = [group for group in groups if group is not None]
    alive = [weakref.ref(group) for group in groups]
    gc.disable()  # other threads collect nothing
    try:
        for generation in range(3):  # the cheap ones first
            if _mine_alone(groups):
                break
            gc.collect(generation)
        deadline = time.monotonic() + 0.1  # for groups that somebody keeps for good
        while not _mine_alone(groups) and time.monotonic() < deadline:
            time.sleep(0.001)
        groups.clear()
        if any(group() is not None for group in alive):  # those that refer to themselves
            gc.collect()
    finally:
        gc.enable()


def _mine_alone(groups: list[Any]) -> bool:
    return all(sys.getrefcount(group) <= 3 for group in groups)  # the list, the loop and the call


# ---------------------------------------------------------------------------------------- counting


class Collective(NamedTuple):
    """A collective as a rank issued it: its name in torch.distributed, and the elements that this rank gave."""

    name: str
    numel: int
    dtype: torch.dtype | None


_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "monitored_barrier": "monitored_barrier",
    "recv": "recv",
    "recv_anysource": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "scatter": "scatter",
    "send": "send",
}
# Where the functions of torch.distributed find a group's collectives, whoever calls them and by whichever name.
_CLASSES = (dist.ProcessGroup, dist.ProcessGroupGloo.__mro__[1], ProcessGroupShm)


class _Counter(NamedTuple):
    group: Any
    thread: int
    seen: list[Collective]


_counters: list[_Counter] = []
_originals: list[tuple[type, str, Any]] = []
_counting = threading.Lock()


@contextlib.contextmanager
def count_collectives(rank: Rank) -> Iterator[list[Collective]]:
    """A list that grows by each collective that this thread issues, or any thread on this rank's group, until the end.

    Those of `Rank.gather` and `Rank.all_equal` are among them. Seen is what goes through Python: not DDP's C++ reducer.
    """
    counter = _Counter(rank.group, threading.get_ident(), [])
    with _counting:
        if not _counters:
            _watch()
        _counters.append(counter)
    try:
        yield counter.seen
    finally:
        with _counting:
            _counters[:] = [other for other in _counters if other is not counter]
            if not _counters:
                _unwatch()


def _watch() -> None:
    for cls in _CLASSES:
        for method in _NAMES.keys() & vars(cls).keys():
            original = vars(cls)[method]
            _originals.append((cls, method, original))
            setattr(cls, method, _counted(original, _NAMES[method]))


def _unwatch() -> None:
    while _originals:
        setattr(*_originals.pop())


def _counted(original: Any, name: str) -> Callable[..., Any]:
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        # Outputs come before inputs; some collectives have one for both, and some have inputs on one rank only.
        given = [list(_tensors(arg)) for arg in (*args, *kwargs.values())]
        tensors = next((found for found in reversed(given) if found), [])
        record = Collective(name, sum(t.numel() for t in tensors), tensors[0].dtype if tensors else None)
        thread = threading.get_ident()
        with _counting:
            for counter in _counters:
                if counter.group is group or counter.thread == thread:
                    counter.seen.append(record)
        return original(group, *args, **kwargs)

    return collective


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
