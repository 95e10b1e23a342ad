"""A store of ``torch.distributed`` whose calls all end; no other file calls a store.

Most calls of PyTorch's ``TCPStore`` wait for its answer without a limit. If the store's host is cut off, they return
when TCP gives up, after some 15 minutes; if its process is stopped, never. So each call runs on a thread of its own,
and the caller waits for a limited time. While ranks connect, a working store may be silent for long: its only thread
asks the name service for the name of each address that connects, and waits for the answer.
"""

import copy
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore

from lockstep._base import network
from lockstep._base.texts import first_line
from lockstep.errors import CommunicationError

T = TypeVar("T")

ANSWER_SECONDS = 3.0
"""Seconds that the store's process may take to answer."""


CLOSE_SECONDS = 0.5
"""Seconds to wait for the end of a store's thread."""

LOOK_SECONDS = 0.05
"""Seconds between two looks at what the thread of a lost store waits for."""


class StoreLostError(CommunicationError):
    """A store does not answer: its host is cut off, or its process has ended or is stopped."""


class BoundedStore:
    """A store that is called on a thread of its own: no call takes longer than ``seconds``.

    A call that takes longer raises :class:`StoreLostError`, and so does, at once, each further one until the store
    answers again. Keys and values are those of ``torch.distributed``'s stores. The thread starts at the first call, and
    ends with :meth:`close`, or with this object.
    """

    def __init__(self, store: Any, seconds: float = ANSWER_SECONDS) -> None:
        self.raw = store
        """The plain store, to be passed on but not called."""
        self._seconds = seconds
        self._caller = _StoreThread()
        self._look: Future[None] | None = None
        self._end = weakref.finalize(self, self._caller.calls.put, None)

    def part(self, name: str, seconds: float) -> "BoundedStore":
        """Return a part of this store, with a limit of its own; it has the same thread, and ends with this one."""
        part = copy.copy(self)
        part.raw, part._seconds = self.raw and PrefixStore(name, self.raw), seconds
        return part

    def close(self, *, shut_down: bool = False) -> None:
        """End the thread when the calls that have begun are over; further calls raise :class:`StoreLostError`.

        With ``shut_down`` a call that waits for an answer raises, too: only for a store on a connection of its own.
        """
        self._end()
        is_busy = self._caller.is_busy_after(CLOSE_SECONDS)
        until = time.monotonic() + ANSWER_SECONDS
        while is_busy and shut_down and time.monotonic() < until:  # between two requests it waits for no socket yet
            network.shut_down_in(self._caller.native_id, port_of(self.raw))
            is_busy = self._caller.is_busy_after(LOOK_SECONDS)
        self.raw = None  # what still refers to this object must not keep the connection

    def set(self, key: str, value: str, seconds: float | None = None) -> None:
        """Write a value; ``seconds`` is the limit of this call."""
        self._call(lambda store: store.set(key, value), seconds)

    def read(self, key: str) -> str | None:
        """Return the value of a key, or None if it has none; does not wait for one."""
        return self._call(lambda store: _read(store, key))

    def get(self, key: str) -> str:
        """Return an existing value."""
        value = self.read(key)
        return self._call(lambda store: _text(store.get(key))) if value is None else value

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """Return existing values, with one request if the store can."""

        def get_all(store: Any) -> list[str]:
            values = store.multi_get(list(keys)) if store.has_extended_api() else map(store.get, keys)
            return list(map(_text, values))

        return self._call(get_all)

    def delete(self, key: str) -> None:
        """Remove a value, if the store can."""

        def delete(store: Any) -> None:
            with suppress(NotImplementedError):
                store.delete_key(key)

        self._call(delete)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys have values."""
        return self._call(lambda store: bool(store.check(list(keys))))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Write ``desired`` if the value is ``expected`` ("" for none); return the value afterwards."""
        return self._call(lambda store: _text(store.compare_set(key, expected, desired)))

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Return True as soon as all keys have values, or False after some seconds.

        Do not call it again after that: a late answer would be taken for that of the later call.
        """

        def wait(store: Any) -> bool:
            try:
                store.wait(list(keys), timedelta(seconds=seconds))
            except RuntimeError:
                return bool(store.check(list(keys)))  # raises if the store is lost
            return True

        return self._call(wait, seconds + min(self._seconds, ANSWER_SECONDS))

    def wait_for(self, keys: Sequence[str], seconds: float, *, is_only_reader: bool = False) -> list[str] | None:
        """Return the values as soon as all keys have one, or None after some seconds; do not call it again after that.

        It is quicker where this process ``is_only_reader`` of these keys, as in a group of two.
        """

        def wait_for(store: Any) -> list[str] | None:
            try:
                return list(map(_text, _wait_for(store, list(keys), timedelta(seconds=seconds), is_only_reader)))
            except RuntimeError:
                return list(map(_text, map(store.get, keys))) if store.check(list(keys)) else None

        return self._call(wait_for, seconds + min(self._seconds, ANSWER_SECONDS))

    def look(self, key: str, found: Callable[[str], object]) -> None:
        """Call ``found`` with the value of a key, on another thread, if it exists; does not wait for the store.

        Does nothing while an earlier look has not been answered.
        """
        if self._look is not None and not self._look.done():
            return

        def look(store: Any) -> None:
            try:
                text = _read(store, key)
            except RuntimeError:  # lost: not left to the future, as its traceback refers to this object
                return
            if text is not None:
                found(text)

        self._look = self._submit(look)

    def _submit(self, function: "Callable[[Any], T]") -> "Future[T]":
        store = self.raw
        return self._caller.submit(_StoreCall(lambda: function(store)))

    def _call(self, function: "Callable[[Any], T]", seconds: float | None = None) -> T:
        seconds = self._seconds if seconds is None else seconds
        if not self._end.alive:
            raise StoreLostError("the store at which the ranks meet is used no more: its group has ended")
        if self._caller.waited() > seconds:
            raise _lost(seconds)
        future = self._submit(function)
        try:
            result: T = future.result(seconds)
        except TimeoutError:
            future.cancel()  # in case it has not begun, because an earlier call still waits
            raise _lost(seconds) from None
        except RuntimeError as error:
            raise _failed(error) from error
        return result


class FetchedAddresses(Store):
    """A store at which the ranks of one Gloo group meet: it reads what all of them have written with one request.

    Gloo reads it rank by rank, its own too, with three requests each, one after the other: where the store's host is
    far, that is most of what it takes to connect. The keys of the ranks end with their numbers. Refer to this object as
    long as Gloo uses it.
    """

    def __init__(self, store: Any, size: int) -> None:
        super().__init__()
        self._store = store
        self._size = size
        self._fetched: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._fetched[key] = value
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ranks have written theirs; raises what the store does after the time-out."""
        for key in keys:
            if key not in self._fetched:
                place = key.removesuffix(key.rpartition("/")[2])
                wanted = [each for rank in range(self._size) if (each := f"{place}{rank}") not in self._fetched]
                found = _wait_for(self._store, wanted, timeout, self._size == 2)
                self._fetched |= zip(wanted, found, strict=True)

    def get(self, key: str) -> bytes:
        """Return a value that has been waited for."""
        self.wait([key])
        value: bytes = self._fetched[key]
        return value


def own_connection(store: Any, timeout: float) -> Any:
    """Return the same store with a connection of its own: a thread that waits on a connection blocks it."""

    def connect() -> Any:
        clone = store.clone()
        if isinstance(_innermost(clone), TCPStore):  # clones of other stores are those stores themselves
            clone.set_timeout(timedelta(seconds=timeout))
        return clone

    try:
        return bounded(connect, timeout)
    except DistError as error:
        raise _failed(error) from error


def bounded(function: "Callable[[], T]", seconds: float) -> "T":
    """Return the result of a call that may wait for a store without a limit, such as one that makes it.

    Raises :class:`StoreLostError` after some seconds; the call goes on, on a thread of its own.
    """
    try:
        return in_background(function).result(seconds)
    except TimeoutError:
        raise _lost(seconds) from None


def in_background(function: "Callable[[], T]") -> "Future[T]":
    """Return the future of a call that runs on a thread of its own, which does not keep an interpreter from ending."""
    call = _StoreCall(function)
    try:
        threading.Thread(target=call.run, name="lockstep background", daemon=True).start()
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise
        call.run()  # Python 3.12 starts no threads once the main thread has ended
    return call.future


def all_in_background(functions: "Iterable[Callable[[], T]]", threads: int) -> "list[Future[T]]":
    """Return the futures of calls that run on some threads of their own. Those of ``concurrent.futures`` take no calls
    once the main thread has ended."""
    calls = [_StoreCall(function) for function in functions]
    waiting = deque(calls)

    def run() -> None:
        with suppress(IndexError):  # none waits
            while True:
                waiting.popleft().run()

    for _ in calls[:threads]:
        in_background(run)
    return [call.future for call in calls]


class _StoreCall:
    """One call and its result."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = [function]  # run() takes it out
        self.future: Future[Any] = Future()

    def run(self) -> None:
        function = self._function.pop()
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            del function
            self.future.set_exception(error)
        else:
            # Who waits may end the interpreter: a thread that then frees tensors, or what else takes the GIL in C++,
            # would abort the process.
            del function
            self.future.set_result(result)


class _StoreThread:
    """Runs calls in order, on a thread that starts at the first one and ends at None. Holds no reference to the
    :class:`BoundedStore`, so that it ends with that."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[_StoreCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._since: float | None = None

    def submit(self, call: _StoreCall) -> "Future[Any]":
        self.calls.put(call)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="lockstep store", daemon=True)
                self._thread.start()
        return call.future

    def waited(self) -> float:
        """Return the seconds for which the thread has waited for an answer."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def is_busy_after(self, seconds: float) -> bool:
        """Return True if the thread has not ended after some seconds; False on the thread itself."""
        with self._lock:  # it may be about to start
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return False
        thread.join(seconds)
        return thread.is_alive()

    @property
    def native_id(self) -> int:
        return 0 if self._thread is None else self._thread.native_id or 0

    def _serve(self) -> None:
        while (call := self.calls.get()) is not None:
            self._since = time.monotonic()
            call.run()
            self._since = None
            del call


def address_towards(store: Any) -> str:
    """Return the address of this host from which packets to a store's host leave; loopback if that is this host."""
    host = getattr(_innermost(store), "host", None)
    if host:
        return network.address_towards(host) or network.LOOPBACK
    own = network.address_of_own_name()  # a store in a file or in this process
    return own if own is not None and network.own_name_is_reachable() else network.LOOPBACK


def port_of(store: Any) -> int:
    """Return the port of the process that hosts a store; 0 if it has none."""
    return int(getattr(_innermost(store), "port", 0))


def _innermost(store: Any) -> Any:
    """Return the store under all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _read(store: Any, key: str) -> str | None:
    """Return the value of a key as text, or None."""
    value = _read_bytes(store, key)
    return None if value is None else _text(value)


def _read_bytes(store: Any, key: str) -> bytes | str | None:
    """Return the value of a key, or None. A ``TCPStore`` is asked once: its ``get`` waits first, with another question,
    which takes as long as the first where its host is far."""
    if isinstance(_innermost(store), TCPStore):
        value: bytes | str = store.compare_set(key, _NOT_THERE, _NOT_THERE)  # what is expected, if there is nothing
        return None if value in (_NOT_THERE, _NOT_THERE.encode()) else value
    return store.get(key) if store.check([key]) else None


def _wait_for(store: Any, keys: list[str], timeout: timedelta | None, is_only_reader: bool) -> list[bytes | str]:
    """Return the values of a plain store as soon as all keys have one; raises what the store does after the time-out.

    Every request takes a round trip to the store's host. A single value is mostly there already: to read it is one. But
    to read what is not there lets a ``TCPStore`` tell those that wait for it that it is, so there must be no others. A
    ``TCPStore`` that is asked for values waits for them, which is two; so it is asked to wait before only where it
    would wait for too long.
    """
    if is_only_reader and len(keys) == 1 and (value := _read_bytes(store, keys[0])) is not None:
        return [value]
    if not keys:
        return []
    if timeout is not None and not (store.has_extended_api() and store.timeout <= timeout):
        store.wait(keys, timeout)
    return store.multi_get(keys) if store.has_extended_api() else list(map(store.get, keys))


_NOT_THERE = "lockstep: no value"


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()


def _lost(seconds: float) -> StoreLostError:
    return StoreLostError(
        f"the store at which the ranks meet does not answer within {seconds:g} s: its host is cut off, or its process "
        "has ended or is stopped"
    )


def _failed(error: BaseException) -> StoreLostError:
    gist = first_line(error)
    return StoreLostError(f"the store at which the ranks meet is lost: {gist}")
