"""Runs replicas: one after the other on one device, side by side on several.

On one device all run in the caller's thread, with everything that belongs to it, each with all intra-op threads and the
caller's random generators. They need threads of their own in two cases: on several devices, and where they meet
(:mod:`~lockstep.local.exchange`). The first replica runs in the caller's thread even then. If it comes to a meeting, it
begins the others on workers, and lets them run. (If it ends without a meeting, no other replica can meet it any more.)

Workers are kept: a call takes as many as it needs, starts new ones only if there are too few, and waits until all of
them have ended, whatever happens. In the steady state no thread is started, and none ends.
"""

import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from lockstep._base.debug import log_of
from lockstep._base.devices import CPU, DeviceLike, accelerator, resolve_device
from lockstep._base.tree import tensors_in
from lockstep.errors import LengthError
from lockstep.local.context import CallerContext
from lockstep.local.exceptions import raise_failures
from lockstep.local.exchange import Replica, ReplicaExchange, current_replica, turns_on
from lockstep.local.scatter_gather import move


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[DeviceLike | None] | None = None,
) -> list[Any]:
    """Call each module with its inputs: side by side on different devices, one after the other on the same device.

    Args:
        modules: one for each replica.
        inputs: for each module a tuple or list of positional arguments, or anything else as the only argument.
        kwargs_tup: for each module its keyword arguments.
        devices: for each module its device. It is current while the module runs, and the tensors of the output are
            moved to it. None takes the device of the module's first tensor input and moves nothing, as PyTorch's Python
            function does. (PyTorch's C++ function moves the outputs there.)

    Returns the outputs in the order of the modules. If all are on one device, such as the CPU, they run in the caller's
    thread. On several devices all but the first run in threads that are kept; they see the caller's grad mode,
    inference mode, autocast, current streams, default device, intra-op threads, saved-tensor hooks and ``contextvars``.
    A module without ``devices`` and without tensors among its inputs is on the current accelerator, or the CPU.

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
    return run(calls, [home or _current_device() for home in homes])


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
class _WorkerFailure:
    error: BaseException


def run(calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> list[Any]:
    """Run calls, each on its device, and return their results; turns and failures as in :func:`parallel_apply`."""
    results = _Group(calls, devices).run() if calls else []
    failures = [(i, result.error) for i, result in enumerate(results) if isinstance(result, _WorkerFailure)]
    try:
        if failures:
            raise_failures(failures, devices)
        return results
    finally:
        del results, failures  # the frames of a failure lead here: no circle back to the failure


class _Group:
    """The calls of one run: :meth:`run` runs the first one in this thread, and the others here or on workers."""

    def __init__(self, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> None:
        self._calls = calls
        self._devices = devices
        self._results: list[Any] = [None] * len(calls)
        self._context = CallerContext.capture(devices)
        self._outer = current_replica()
        self._turns = turns_on(devices)
        self._several_devices = len(set(devices)) > 1
        self._exchange = ReplicaExchange(self._turns, None if self._several_devices else self._begin_others)
        self._workers: list[_Worker] = []
        self._running = _Running()

    def run(self) -> list[Any]:
        """Run all calls, and return their results when every one has ended; failures are among the results."""
        # On one device the others begin when the first replica meets them (SyncBatchNorm), or run here, one by one:
        # threads would share one random generator, and gain nothing.
        if self._several_devices:
            self._begin_others()
        try:
            for index in range(len(self._calls)):
                if index == 0 or not self._workers:
                    self._run_here(index)
            self._running.wait()
        except BaseException as interrupt:
            self._running.wait_after(interrupt)
            raise
        else:
            return self._results
        finally:
            self._results = [None] * len(self._calls)  # no circle, as above; a worker that is left behind writes to it
            if self._running.ended:
                _pool.give_back(self._workers)

    def _begin_others(self) -> None:
        self._workers = _pool.take(len(self._calls) - 1)
        self._running = _Running(len(self._workers))
        for index, worker in enumerate(self._workers, 1):
            worker.jobs.put((self, index, self._running))

    def _run_here(self, index: int) -> None:
        """Run a call in the caller's thread; what is no ``Exception``, such as a Ctrl-C, is raised at once."""
        handled = sys.exception()
        try:
            self._results[index] = self._run(index, self._context.run_here)
        except Exception as error:
            if (interrupt := _interrupt_before(error, handled)) is not None:
                raise interrupt  # noqa: B904, the error becomes its context
            self._results[index] = _WorkerFailure(error)

    def run_on_worker(self, index: int) -> None:
        """Run a call in another thread than the caller's."""
        try:
            self._results[index] = self._context.variables.copy().run(self._run, index, self._context.run)
        except BaseException as error:
            self._results[index] = _WorkerFailure(error)

    def _run(self, index: int, run: Callable[[Callable[[], Any], torch.device], Any]) -> Any:
        count = len(self._calls)
        call = partial(run, self._calls[index], self._devices[index])
        try:
            with self._turns[index].taken(index):
                return call() if count == 1 else Replica(index, count, self._exchange, self._outer).run(call)
        finally:
            self._exchange.leave(index)


def _interrupt_before(error: BaseException | None, handled: BaseException | None) -> BaseException | None:
    """Return what interrupted a call before it raised ``error``, unless the caller was handling that already.

    If a second Ctrl-C comes while the first one leaves a ``threading.Condition``, that raises a ``RuntimeError``.
    """
    while error is not None and error is not handled:
        if not isinstance(error, Exception):
            return error
        error = error.__context__
    return None


class _Running:
    """The calls that run on workers: how many there are, and a way to wait until the last one has ended."""

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._all_ended = threading.Event()
        if count == 0:
            self._all_ended.set()

    @property
    def ended(self) -> bool:
        return self._all_ended.is_set()

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._all_ended.set()

    def wait(self) -> None:
        self._all_ended.wait()

    def wait_after(self, interrupt: BaseException) -> None:
        """Wait although there was a Ctrl-C; a second one is raised here."""
        if not self.ended:
            log_of("local").warning(
                "lockstep: %s waits until %d replicas have ended; a second one does not wait",
                type(interrupt).__name__,
                self._count,
            )
            self.wait()


class _Worker:
    """A daemon thread that runs one job after another."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[_Group, int, _Running]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name=f"lockstep-worker-{next(self._numbers)}", daemon=True).start()

    def _loop(self) -> None:
        while True:
            group, index, running = self.jobs.get()
            group.run_on_worker(index)
            del group  # before the caller goes on: a waiting worker must not keep tensors alive
            running.end()


class _WorkerPool:
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
            while len(self._idle) < count:
                self._idle.append(_Worker())
            taken, self._idle = self._idle[:count], self._idle[count:]
        return taken

    def give_back(self, workers: list[_Worker]) -> None:
        with self._lock:
            self._idle = workers + self._idle  # replica i runs on the same thread next time


_pool = _WorkerPool()
