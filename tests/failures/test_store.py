"""Stores whose calls all end; and no other call to a store anywhere."""

from __future__ import annotations

import ast
import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import lockstep
import processes
from lockstep._base import network
from lockstep._base.store import BoundedStore, FetchedAddresses, StoreLostError, bounded, in_background, own_connection

SOURCE = Path(lockstep.__file__).parent
METHODS = {name for name in dir(dist.Store) if not name.startswith("_")} - {"clone", "set_timeout"}


def store_calls(source: str) -> list[str]:
    """Calls of methods of plain stores: by the name, which for others is `bounded_store`."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in METHODS
        and (name := ast.unparse(node.func.value).lower()).endswith("store")
        and not name.endswith("bounded_store")
    ]


def test_the_search_finds_calls():
    source = "self._store.check([key])\nprefix_store.get(key)\nself._bounded_store.get(key)\nPrefixStore('x', store)"
    assert store_calls(source) == ["self._store.check([key])", "prefix_store.get(key)"]


def test_values_of_a_store_that_gives_one_at_a_time(tmp_path):
    store = BoundedStore(dist.FileStore(str(tmp_path / "store"), 1))
    for key in "abc":
        store.set(key, key * 2)
    assert store.get_all(["c", "a"]) == ["cc", "aa"]


class Counted(dist.Store):
    """Stands for a store that is far: the requests that it gets."""

    def __init__(self, ranks):
        super().__init__()
        self.values = {f"0/{rank}": b"\xff %d" % rank for rank in ranks}
        self.asked = []

    def set(self, key, value):
        self.asked.append(("set", key))
        self.values[key] = value

    def wait(self, keys, timeout=None):
        self.asked.append(("wait", *keys))

    def get(self, key):
        self.asked.append(("get", key))
        return self.values[key]


def test_the_addresses_of_all_ranks_are_fetched_once():
    far = Counted([0, 2])
    near = FetchedAddresses(far, 3)
    near.set("0/1", b"\xff 1")
    for _ in range(2):
        for rank in range(3):
            near.wait([f"0/{rank}"], timedelta(seconds=5))
            assert near.get(f"0/{rank}") == b"\xff %d" % rank
    assert far.asked == [("set", "0/1"), ("wait", "0/0", "0/2"), ("get", "0/0"), ("get", "0/2")]


@pytest.mark.parametrize("is_only_reader", [True, False])
def test_values_are_waited_for(is_only_reader):
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    there, later = (dist.TCPStore("127.0.0.1", tcp.port, timeout=timedelta(seconds=30)) for _ in range(2))
    with closing(BoundedStore(there, 30)) as store:
        assert store.wait_for([], 0.1, is_only_reader=is_only_reader) == []
        assert store.wait_for(["a"], 0.1, is_only_reader=is_only_reader) is None
        with ThreadPoolExecutor() as pool:
            waits = pool.submit(store.wait_for, ["b"], 30, is_only_reader=is_only_reader)
            later.set("b", "value")
            assert waits.result(30) == ["value"]
        assert store.wait_for(["b"], 0.1, is_only_reader=is_only_reader) == ["value"]


def test_several_readers_of_a_value_that_comes_later():
    """To read it before it is there wakes those that wait for it, with nothing."""
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    stores = [dist.TCPStore("127.0.0.1", tcp.port, timeout=timedelta(seconds=30)) for _ in range(4)]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        readers = [stack.enter_context(closing(BoundedStore(each, 30))) for each in stores[1:]]
        for number in range(20):
            waits = [pool.submit(each.wait_for, [f"{number}"], 30) for each in readers]
            stores[0].set(f"{number}", "value")
            assert [each.result(30) for each in waits] == [["value"]] * 3


def test_no_store_is_called_without_a_limit():
    files = [file for file in SOURCE.rglob("*.py") if file != SOURCE / "_base" / "store.py"]
    assert len(files) > 100
    assert {str(file): found for file in files if (found := store_calls(file.read_text()))} == {}


def test_keys_and_values():
    store = BoundedStore(dist.PrefixStore("a", dist.HashStore()))
    assert not store.check(["key"])
    assert store.compare_set("key", "", "first") == "first"
    assert store.compare_set("key", "", "second") == "first"
    store.set("other", "value")
    assert store.get("other") == "value"
    assert store.get_all(["other", "key"]) == ["value", "first"]
    assert store.wait(["key", "other"], 1.0)
    assert not store.wait(["missing"], 0.05)
    found, seen = [], threading.Event()
    store.look("missing", found.append)
    store.wait([], 0.0)  # calls have an order
    store.look("key", lambda value: [found.append(value), seen.set()])
    assert seen.wait(30)
    assert found == ["first"]


def be_host(file):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Path(file).write_text(f"{store.port}\n")
    multiprocessing.parent_process().join()


@pytest.fixture
def host(tmp_path):
    """A process that hosts a store, and the store."""
    os.mkfifo(tmp_path / "port")
    process = processes.start(be_host, str(tmp_path / "port"))
    yield process, dist.TCPStore("127.0.0.1", int((tmp_path / "port").read_text()), is_master=False)
    process.kill()
    process.join()


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)  # it may run on for a moment after the signal has been sent


def test_calls_end_while_the_process_of_the_store_is_stopped_and_work_again_after_that(host):
    process, plain = host
    store = BoundedStore(own_connection(plain, 30.0), 0.2)
    store.set("key", "value")
    stop(process)
    for call in (
        lambda: store.check(["key"]),
        lambda: store.get("key"),  # at once: the thread still waits for the first
        lambda: store.compare_set("key", "", "x"),
        lambda: store.wait(["missing"], 0.1),
    ):
        with pytest.raises(StoreLostError, match="does not answer within"):
            call()
    looked = threading.Event()
    store.look("key", lambda _: looked.set())
    os.kill(process.pid, signal.SIGCONT)
    assert looked.wait(30)
    assert store.get("key") == "value"


CALLS = {
    "check": lambda store, _: store.check(["key"]),
    "compare_set": lambda store, _: store.compare_set("key", "", "x"),
    "get_all": lambda store, _: store.get_all(["key"]),
    "wait": lambda store, _: store.wait(["missing"], 0.1),
    "between two requests": lambda store, goes_on: store._call(lambda plain: [goes_on.wait(), plain.check(["key"])]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_thread_of_a_lost_store_ends_when_it_is_closed(call, host, monkeypatch):
    """It waits for a socket in `recv`, in `poll`, or not yet, when the socket is looked for first."""
    process, plain = host
    store, others, goes_on = (
        BoundedStore(own_connection(plain, 600.0), 0.2),
        set(threading.enumerate()),
        threading.Event(),
    )
    shut_down_in = network.shut_down_in

    def too_early(*args):
        shut_down_in(*args)
        goes_on.set()

    monkeypatch.setattr(network, "shut_down_in", too_early)
    store.set("key", "value")
    (thread,) = set(threading.enumerate()) - others
    stop(process)
    with pytest.raises(StoreLostError):
        call(store, goes_on)
    store.close(shut_down=True)
    thread.join(30)
    assert not thread.is_alive()


def test_a_store_whose_process_has_ended_is_lost(host):
    process, plain = host
    store = BoundedStore(own_connection(plain, 30.0))
    process.kill()
    process.join()
    with pytest.raises(StoreLostError, match="the store at which the ranks meet is lost"):
        store.get("key")


@pytest.mark.parametrize("closed", [False, True])
def test_the_thread_ends_with_the_store(closed):
    others = set(threading.enumerate())
    store = BoundedStore(dist.HashStore())

    def threads():
        return {each for each in threading.enumerate() if each.name == "lockstep store"} - others

    assert threads() == set()
    store.set("key", "value")
    (thread,) = threads()
    if closed:
        store.close()
    else:
        del store
        gc.collect()
    thread.join(30)
    assert threads() == set()
    if closed:
        with pytest.raises(StoreLostError, match="its group has ended"):
            store.get("key")


def test_what_is_made_under_a_limit():
    go_on = threading.Event()
    with pytest.raises(StoreLostError):
        bounded(lambda: go_on.wait(30), 0.05)
    go_on.set()
    assert bounded(lambda: 3, 30) == 3
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 30)


def test_a_call_in_the_background_lets_go_of_what_it_holds_before_it_is_over() -> None:
    """A thread that frees tensors while the interpreter ends aborts the process, after a training that was right."""
    may_end, is_over, freed = threading.Event(), threading.Event(), list[bool]()

    def look(_: Future[None]) -> None:
        freed.append(alive() is None)
        is_over.set()

    held = set[int]()
    future, alive = in_background(partial(lambda held: may_end.wait(30), held)), weakref.ref(held)
    del held
    future.add_done_callback(look)
    may_end.set()
    assert is_over.wait(30)
    assert freed == [True]


def test_no_call_that_may_wait_runs_in_place_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process with too many threads; but for a program that ends, on Python 3.12."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        bounded(lambda: pytest.fail("it waits for ever"), 30)
