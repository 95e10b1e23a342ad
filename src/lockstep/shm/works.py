"""Collectives that have been begun: run in order, by the thread that waits for one, or by a separate thread.

A rank that waits runs the collectives that are due itself, so that no thread has to wake up for them. A worker thread
runs the others in the background. Futures, whose callbacks may begin and wait for further collectives, are completed by
one worker while another stands by.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep._base.compiler import outside_compiler
from lockstep.errors import CommunicationError, LockstepError

_profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_enter: Callable[..., Any] = torch.autograd._record_function_with_args_enter  # type: ignore[attr-defined]
_exit: Callable[[Any], None] = torch.autograd._record_function_with_args_exit  # type: ignore[attr-defined]

SMALL_BYTES = 1024
"""A finished work is kept for a while if its outputs have at most this many bytes."""
CLOSE_SECONDS = 5.0
"""Seconds that the end of a group waits, in all, for callbacks of futures that do not return."""


class ShmWork(dist.Work):
    """A collective under way, with the methods of ``torch.distributed.Work``."""

    def __init__(
        self, queue: "WorkQueue", run: Callable[[], object], outputs: list[Tensor], what: str = "collective"
    ) -> None:
        super().__init__()
        self.run = run
        self.outputs = outputs
        self.done = False
        self.error: BaseException | None = None
        self.trigger: torch.futures.Future[None] | None = None
        self.future: torch.futures.Future[list[Tensor]] | None = None
        """Completed by ``trigger``: C++ code would take an error set on a Python future for a value."""
        self._queue = queue
        self._recorded = _enter(f"shm:{what}", *outputs) if _profiler_enabled() else None  # with sizes; till its end

    def end(self, error: BaseException | None) -> None:
        """Mark the collective as over."""
        self.error = error
        self.done = True
        if self._recorded is not None:
            _exit(self._recorded)

    @outside_compiler
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the tensors hold the result; raise the error of the collective."""
        self._queue.finish(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Return True if the collective is over."""
        return self.done

    def is_success(self) -> bool:
        """Return True if the collective is over and has not failed."""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """Return the exception of the collective; None if it has not failed."""
        return self.error

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return self.outputs

    def synchronize(self) -> None:
        """Wait; a CPU has no stream to wait on."""
        self.wait()

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Return a future with the list of the output tensors.

        For float16 tensors this waits for the collective first: PyTorch's built-in FP16 hook, in C++, cannot use a
        future that Python completes.
        """
        if any(output.dtype == torch.float16 for output in self.outputs):
            self.wait()
            future: Any = torch._C.fork(lambda: self.outputs)  # calls it here and now
            return cast("torch.futures.Future[list[Tensor]]", future)
        return self._queue.future_of(self)


class WorkQueue:
    """The collectives of one group, in the order in which the program began them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting = 0  # threads that wait for a collective
        self._condition = threading.Condition()
        self._begun: deque[ShmWork] = deque()
        self._completions: deque[ShmWork] = deque()
        self._running = False
        self._closed = False
        self._recent: deque[ShmWork] = deque(maxlen=256)
        """Keeps works alive for C++ code that waits for a work after Python dropped it, as PyTorch's Join does."""
        self._ready = 0  # workers that wait, or run a collective
        self._workers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def add(self, work: ShmWork, background: bool) -> ShmWork:
        """Append a collective; unless ``background``, the caller is about to wait for it."""
        with self._condition:
            if self._closed:
                raise CommunicationError("the process group has been destroyed")
            self._begun.append(work)
            if sum([output.numel() * output.itemsize for output in work.outputs]) <= SMALL_BYTES:
                self._recent.append(work)
            if background:
                self._call_worker()
        return work

    def finish(self, work: ShmWork, timeout: float = 0.0) -> None:
        """Wait until ``work`` is over; run it, and the collectives before it, unless another thread does."""
        with self._condition:
            if timeout > 0 and not work.done:  # somebody else has to run it, so that this thread can stop waiting
                self._call_worker()
                if not self._condition.wait_for(lambda: work.done, timeout):
                    raise CommunicationError(f"the collective was not over after {timeout:g} s; it goes on")
            self._waiting += 1
            try:
                while not work.done:
                    if self._running or not self._begun:
                        self._condition.wait()
                    else:
                        self._run_next()
            finally:
                self._waiting -= 1

    def is_waited_for(self) -> bool:
        """Return True if a thread waits for a collective."""
        return self._waiting > 0

    def future_of(self, work: ShmWork) -> "torch.futures.Future[list[Tensor]]":
        """Return the future of a collective; made when it is first asked for."""
        with self._condition:
            future = work.future
            if future is None:
                work.trigger = torch.futures.Future()
                future = work.future = work.trigger.then(lambda _: _outcome(work))
                if work.done:
                    _complete(work)
                else:
                    self._call_worker()
        return future

    def close_and_wait(self) -> None:
        """Accept nothing more, fail what has not begun, and wait until the worker threads end, or briefly."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            while self._begun and not self._running:
                self._run_next()
            self._recent.clear()
            workers = [each for each in self._workers if each is not threading.current_thread()]
        until = time.monotonic() + CLOSE_SECONDS
        for worker in workers:
            worker.join(max(0.0, until - time.monotonic()))

    def _run_next(self) -> None:
        """Run the first collective, and those behind it if the queue was closed meanwhile: they fail, and no other
        thread comes to run them. The condition is locked before and after, but not while a collective runs."""
        self._run_first()
        while self._closed and self._begun and not self._running:
            self._run_first()

    def _run_first(self) -> None:
        work = self._begun.popleft()
        self._running = True
        # Other threads may add collectives, or wait for earlier ones, while this one moves data.
        self._condition.release()
        failed: BaseException | None = None
        try:
            work.run()
        except LockstepError as error:
            failed = error
        except BaseException as error:
            failed = _wrapped(error)
            if not isinstance(error, Exception):
                raise
        finally:
            del work.run  # perhaps the last reference to the group, whose end waits for other threads
            self._condition.acquire()
            self._running = False
            work.end(failed)
            if work.error is not None and work in self._recent:  # its traceback refers to the group
                self._recent.remove(work)
            if work.future is not None:
                self._completions.append(work)
                self._call_worker()
            self._condition.notify_all()

    def _call_worker(self) -> None:
        """Make sure that a worker is about to look for work; call with the condition locked."""
        if self._ready:
            self._condition.notify_all()
        else:
            worker = threading.Thread(target=self._work, name=f"lockstep {self._name}", daemon=True)
            self._workers.add(worker)
            self._ready += 1
            worker.start()

    def _work(self) -> None:
        with self._condition:
            while True:
                if self._completions:
                    self._complete_next()
                elif self._begun and not self._running:
                    self._run_next()
                elif self._closed:
                    self._ready -= 1
                    return
                else:
                    self._condition.wait()

    def _complete_next(self) -> None:
        work = self._completions.popleft()
        self._ready -= 1
        self._call_worker()  # to stand by while this one runs callbacks
        self._condition.release()
        try:
            _complete(work)
        finally:
            self._condition.acquire()
            self._ready += 1


def _complete(work: ShmWork) -> None:
    assert work.trigger is not None
    work.trigger.set_result(None)


def _outcome(work: "ShmWork") -> list[Tensor]:
    if work.error is not None:
        raise work.error
    return work.outputs


def _wrapped(error: BaseException) -> Any:
    wrapped = CommunicationError(f"a collective failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
