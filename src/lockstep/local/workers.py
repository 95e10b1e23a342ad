"""Runs replicas side by side, each in a thread that is kept for the next call.

A call takes as many idle threads as it has replicas (and starts threads only if there are too few), hands each its job,
and waits for all of them, whatever happens; only then is the first failure raised. Threads wait in the pool for the
next call: in the steady state no thread is started, and none ends.
"""

import contextvars
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from lockstep.devices import CPU, DeviceLike, accelerator, resolve_device
from lockstep.errors import LengthError
from lockstep.local.context import CallerContext
from lockstep.local.exceptions import raise_failures
from lockstep.local.exchange import Exchange, Replica, Turns, current_replica, enter_replica, turns_on
from lockstep.local.random_streams import ReplicaStreams
from lockstep.local.scatter_gather import move
from lockstep.tree import tensors_in


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[DeviceLike | None] | None = None,
) -> list[Any]:
    """Call each module with its inputs, all at the same time, one worker thread for each.

    Args:
        modules: one for each replica.
        inputs: for each module a tuple or list of positional arguments, or anything else as the only argument.
        kwargs_tup: for each module its keyword arguments.
        devices: for each module its device. It is current while the module runs, and the tensors of the output are
            moved to it. None takes the device of the module's first tensor input and moves nothing, as PyTorch's Python
            function does. (PyTorch's C++ function moves the outputs there.)

    Returns the outputs in the order of the modules. Workers see the caller's grad mode, inference mode, autocast,
    current streams, default device, saved-tensor hooks and ``contextvars``, and share the caller's intra-op threads.
    Modules, and callables with tensors among their inputs, run one after the other where they are on one accelerator,
    as they share its random generator.

    Raises :class:`~lockstep.errors.LengthError` if the lists differ in length. If a module fails, the call first waits
    for all others. Then it raises the first failure with its original type, with the replica and the device in the
    message, the original exception as the cause, and the other failures in the message. Communicates nothing except
    moved outputs. Stands for ``torch.nn.parallel.parallel_apply``.

    >>> import torch
    >>> parallel_apply([torch.neg, torch.abs], [torch.ones(1), torch.ones(1)])
    [tensor([-1.]), tensor([1.])]
    """
    count = len(modules)
    for name, entries in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        if entries is not None and len(entries) != count:
            raise LengthError(
                f"The number of modules {count} is not equal to the number of {name} {len(entries)}: "
                "give one entry for each module"
            )
    arguments = [args if isinstance(args, list | tuple) else (args,) for args in inputs]
    keywords: Sequence[Mapping[str, Any]] = kwargs_tup or [{}] * count
    given = [None if d is None else resolve_device(d) for d in devices] if devices is not None else [None] * count
    calls = [
        partial(_apply, module, args, kwargs, device)
        for module, args, kwargs, device in zip(modules, arguments, keywords, given, strict=True)
    ]
    homes = [d or _device_of(args, kwargs) for d, args, kwargs in zip(given, arguments, keywords, strict=True)]
    places = [home or _current_device() for home in homes]
    known = [
        place if home is not None or isinstance(module, torch.nn.Module) else None
        for module, home, place in zip(modules, homes, places, strict=True)
    ]
    return run(calls, places, known)


def _apply(
    module: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None
) -> Any:
    output = module(*args, **kwargs)
    return output if device is None else move(output, device)


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Return the device of the first tensor among the arguments themselves, else of the first one inside them."""
    values = [*args, *kwargs.values()]
    tensors = chain((value for value in values if isinstance(value, torch.Tensor)), tensors_in(values))
    return next((tensor.device for tensor in tensors), None)


def _current_device() -> torch.device:
    found = accelerator()
    return CPU if found is None else torch.device(found.type, torch.accelerator.current_device_index())


@dataclass(slots=True)
class _Failure:
    error: BaseException


def run(
    calls: Sequence[Callable[[], Any]],
    devices: Sequence[torch.device],
    shared: Sequence[torch.device | None] | None = None,
) -> list[Any]:
    """Run calls side by side, each on its device, and return their results; failures as in :func:`parallel_apply`.

    Calls on one accelerator take turns; ``shared`` has None for a call that is not known to compute on its device.
    """
    if not calls:
        return []
    turns = turns_on(devices if shared is None else shared)
    results = [_run_here(calls[0], devices[0])] if len(calls) == 1 else _run_on_workers(calls, devices, turns)
    failures = [(i, result.error) for i, result in enumerate(results) if isinstance(result, _Failure)]
    if failures:
        raise_failures(failures, devices)
    return results


def _run_here(call: Callable[[], Any], device: torch.device) -> Any:
    """Run one call in this thread: the caller's whole context is here already, except for the current device."""
    try:
        with torch.accelerator.device_index(device.index):
            return call()
    except BaseException as error:
        return _Failure(error)


def _run_on_workers(
    calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device], turns: Sequence[Turns]
) -> list[Any]:
    context = CallerContext.capture(devices)
    total = torch.get_num_threads()
    shares = iter(_shares(total, sum(device.type == "cpu" for device in devices)))
    group = _Group(context, turns)
    streams = ReplicaStreams(len(calls))
    workers = _pool.take(len(calls))
    for index, (worker, call, device) in enumerate(zip(workers, calls, devices, strict=True)):
        threads = next(shares) if device.type == "cpu" else None
        worker.jobs.put(_Job(call, device, index, group, context.variables.copy(), threads, streams))
    interrupted = group.wait()
    streams.end()
    _threads.restore(total)
    _pool.give_back(workers)
    if interrupted is not None:
        raise interrupted
    results, group.results = (
        group.results,
        [],
    )  # the frames of a failure lead to the group: no circle back to the failure
    return results


def _shares(total: int, parts: int) -> list[int]:
    """Split the caller's intra-op threads among the CPU workers, at least one each."""
    return [max(1, total // parts + (i < total % parts)) for i in range(parts)]


class _IntraOpThreads:
    """The number of intra-op threads of workers. A thread that sets its own also sets the default of later threads."""

    def __init__(self) -> None:
        self._default: int | None = None  # the number that was set last here

    def set(self, count: int) -> None:
        """Give the calling thread ``count`` intra-op threads."""
        if count != torch.get_num_threads():  # ask each time: a forward may have set another number
            self._default = count
            torch.set_num_threads(count)

    def restore(self, count: int) -> None:
        """Make ``count``, which the calling thread has, the default again.

        Even if only a call inside a worker has set another number: for that call, the worker's share was the default.
        """
        if self._default not in (None, count):
            self._default = count
            torch.set_num_threads(count)


_threads = _IntraOpThreads()


class _Group:
    """The jobs of one call: their results, and a way to wait until the last job has ended."""

    def __init__(self, context: CallerContext, turns: Sequence[Turns]) -> None:
        self.context = context
        self.turns = turns
        self.exchange = Exchange(turns)
        self.results: list[Any] = [None] * len(turns)
        self._running = len(turns)
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def end(self, index: int, result: Any) -> None:
        self.results[index] = result
        self.exchange.leave(index)
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._ended.put(None)

    def wait(self) -> BaseException | None:
        """Wait for the last job. A Ctrl-C meanwhile is returned, for the caller to raise; a second one is raised
        here."""
        interrupted = None
        while True:
            try:
                self._ended.get()
            except BaseException as error:
                if interrupted is not None:
                    raise
                interrupted = error
                logging.getLogger("lockstep").warning(
                    "lockstep: %s waits until %d replicas have ended; a second one does not wait",
                    type(error).__name__,
                    self._running,
                )
            else:
                return interrupted


@dataclass(slots=True)
class _Job:
    call: Callable[[], Any]
    device: torch.device
    index: int
    group: _Group
    variables: contextvars.Context
    threads: int | None
    streams: ReplicaStreams

    def result(self) -> Any:
        try:
            return self.variables.run(self._called)
        except BaseException as error:
            return _Failure(error)

    def _called(self) -> Any:
        group = self.group
        enter_replica(Replica(self.index, len(group.results), group.exchange, current_replica()))
        with group.turns[self.index].taken(self.index), self.streams.drawing_from(self.index):
            return group.context.run(self.call, self.device)


class _Worker:
    """A daemon thread that runs one job after another."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name=f"lockstep-worker-{next(self._numbers)}", daemon=True).start()

    def _loop(self) -> None:
        while True:
            job = self.jobs.get()
            if job.threads is not None:
                _threads.set(job.threads)
            group, index, result = job.group, job.index, job.result()
            del job  # before the caller goes on: a waiting worker must not keep tensors alive
            group.end(index, result)
            del group, result


class _Pool:
    """Idle workers. A call inside a worker takes other workers, since those that run are not in the pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._process = os.getpid()

    def take(self, count: int) -> list[_Worker]:
        with self._lock:
            if self._process != os.getpid():  # a forked process has none of its parent's threads
                self._idle = []
                self._process = os.getpid()
            taken, self._idle = self._idle[:count], self._idle[count:]
        return taken + [_Worker() for _ in range(count - len(taken))]

    def give_back(self, workers: list[_Worker]) -> None:
        with self._lock:
            self._idle = workers + self._idle  # replica i runs on the same thread next time


_pool = _Pool()
