"""Simulated accelerators for the session, device fixtures, a watch over what tests leave behind, and workers' turns."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.assertion import rewrite

# Workers share the cores, and ranks share a worker. Here, and not in a fixture: torch reads both when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# PyTorch's flight recorder is shared by all groups of a process, and 2.11 does not lock what it notes of them: ranks
# that are threads crash now and then as they begin a collective, in FlightRecorder::recordWithResetEnabled.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
# PyTorch asks the resolver for the name of 127.0.0.1 at each connection to a store. One lost answer of a name server
# would stop all tests that begin just then for five seconds, which is longer than some wait for a store.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

import torch

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # `import sim`, whatever pytest's import mode
    sys.path.insert(0, HERE)

import pairwise  # noqa: E402
import sim as simulator  # noqa: E402
import workers  # noqa: E402
from workers import pytest_xdist_make_scheduler  # noqa: E402, F401

try:
    import numpy  # noqa: F401

    HAS_NUMPY = True
except ModuleNotFoundError:
    HAS_NUMPY = False
DEVICES = 8
_backend = pytest.StashKey[ModuleType | str]()


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts a run in the background has it ignore Ctrl-C; tests send SIGINT, and so do their processes.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True  # else pytest attaches its handlers to each of these forty, for each test
    if not any("examples" in each for each in config.option.ignore or ()):
        os.environ.setdefault("LOCKSTEP_TEST_EXAMPLES", "1")  # read by processes.py in the workers
    # Here, and not in a fixture: autograd counts the devices at the first backward pass of the process.
    # The folder holds the compiled backend; processes that tests start look there, too.
    if (cache := getattr(config, "cache", None)) is not None:
        os.environ.setdefault("LOCKSTEP_SIM_CACHE", str(cache.mkdir("sim")))
        os.environ.setdefault("LOCKSTEP_TEST_TURNS", str(cache.mkdir("turns")))
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        # Its workers load the backend; it is compiled while they start, and import PyTorch.
        if not torch.accelerator.is_available():
            threading.Thread(target=simulator.build).start()
        threading.Thread(target=_rewrite_asserts, args=(config,)).start()
    else:
        config.stash[_backend] = simulator.load(DEVICES)


def _rewrite_asserts(config: pytest.Config) -> None:
    """Do once what each worker of the first run in a clone would do for all files: four seconds of its time.

    By names that pytest may change; then the workers do it.
    """
    left_out = tuple(str(Path(each).absolute()) for each in config.option.ignore or ())
    with contextlib.suppress(Exception):
        for file in Path(HERE).rglob("test_*.py"):
            compiled = rewrite.get_cache_dir(file) / (file.name.removesuffix(".py") + rewrite.PYC_TAIL)
            if not (sys.dont_write_bytecode or compiled.exists() or str(file).startswith(left_out)):
                compiled.parent.mkdir(exist_ok=True)
                stat, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, compiled)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--products", action="store_true", help="all cases of tests with three parameters and more")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument for argument in config.args)  # somebody wants just these
    if not (named or config.option.products):
        others = set(pairwise.left_out(items))
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    for item in items:
        if not HAS_NUMPY and item.get_closest_marker("numpy"):
            item.add_marker(pytest.mark.skip(reason="PyTorch needs NumPy there"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Where NumPy is not installed, as in `make test-bare`, leave out the files that use it, or Hypothesis."""
    if HAS_NUMPY or not collection_path.is_file():
        return None
    uses = "numpy|hypothesis|checkpoints.runs import"
    return bool(re.search(uses, collection_path.read_text())) or None


def pytest_report_header(config: pytest.Config) -> str:
    backend = config.stash.get(_backend, None)
    return f"simulated accelerators: {f'none, {backend}' if isinstance(backend, str) else DEVICES}"


# ---------------------------------------------------------------------------------------- workers


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    gc.disable()  # whatever is made now stays
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Outermost, so that waiting for other workers does not count towards the test's own limit."""
    folder = os.environ.get("LOCKSTEP_TEST_TURNS") if hasattr(item.config, "workerinput") else None
    gc.collect()
    gc.freeze()  # Ranks that are threads end with collections, which then search no more than the test has made.
    with workers.turn(folder, alone=item.get_closest_marker("alone") is not None):
        return (yield)


# ---------------------------------------------------------------------------------------- devices


@pytest.fixture(scope="session", autouse=True)
def memory_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the snapshots that runs which were to fail have left, of the folders of these tests."""
    yield
    from lockstep.checkpoints.memory import ROOT, MemoryFolder

    for memory in map(MemoryFolder, ROOT.glob(f"lockstep-{os.getuid()}/*")):
        if memory.path.startswith(str(tmp_path_factory.getbasetemp())):
            memory.remove()


@pytest.fixture
def sim(pytestconfig: pytest.Config) -> Iterator[ModuleType]:
    """The simulated accelerators, freshly reset; skips where there are none."""
    backend = pytestconfig.stash[_backend]
    if isinstance(backend, str):
        pytest.skip(backend)
    backend.reset()
    yield backend
    backend.reset()


@pytest.fixture(params=["cpu", "sim"])
def kind(request: pytest.FixtureRequest) -> str:
    """A device type: the test runs on the CPU and on simulated accelerators."""
    if request.param == "sim":
        request.getfixturevalue("sim")
    return request.param


@pytest.fixture
def devices(kind: str) -> Callable[[int], list[torch.device]]:
    """A function n -> the devices of n replicas: the CPU n times, or n different accelerators (8 at most)."""

    def first_devices(n: int) -> list[torch.device]:
        assert kind == "cpu" or n <= DEVICES
        return [torch.device("cpu")] * n if kind == "cpu" else simulator.devices(n)

    return first_devices


@pytest.fixture
def first(devices: Callable[[int], list[torch.device]]) -> torch.device:
    """The first device of the kind."""
    return devices(1)[0]


# ---------------------------------------------------------------------------------------- sizes


@pytest.fixture
def alone_from_64_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 64 KiB and more travel alone, instead of those of 4 MiB: what ranks do is the same, and is quick."""
    from lockstep.distributed.reduction.buckets import plan

    monkeypatch.setattr(plan, "plan_reduction", functools.partial(plan.plan_reduction, single_bytes=64 * 1024))


# ---------------------------------------------------------------------------------------- threads


@pytest.fixture
def store() -> torch.distributed.Store:
    """Where ranks meet for another group than their own."""
    return torch.distributed.HashStore()


@pytest.fixture
def draws_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """PowerSGD draws its first guess, seeded alike on all ranks, from the random numbers of the process."""
    fork_rng, turn = torch.random.fork_rng, threading.RLock()

    @contextlib.contextmanager
    def fork_in_turn(*args: Any, **kwargs: Any) -> Iterator[None]:
        with turn, fork_rng(*args, **kwargs):
            yield

    monkeypatch.setattr(torch.random, "fork_rng", fork_in_turn)


# ------------------------------------------------------------------------------- what a test leaves

GRACE = 10.0  # seconds that threads and processes get to end after a test


def _accelerated() -> bool:
    return torch.accelerator.is_available()


def _device_types() -> list[str]:
    return ["cpu", torch.accelerator.current_accelerator().type] if _accelerated() else ["cpu"]


def _autocast() -> Any:
    kinds = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _device_types()]
    return kinds, torch.is_autocast_cache_enabled()


def _set_autocast(state: Any) -> None:
    kinds, cached = state
    for k, enabled, dtype in kinds:
        torch.set_autocast_enabled(k, enabled)
        torch.set_autocast_dtype(k, dtype)
    torch.set_autocast_cache_enabled(cached)


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _streams() -> list[int]:
    count = torch.accelerator.device_count() if _accelerated() else 0
    return [torch.accelerator.current_stream(i).stream_id for i in range(count)]


# Settings of the process or of the main thread: how to read one and, where it can be done, put it back.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _set_default_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "inference mode": (torch.is_inference_mode_enabled, None),
    "autocast": (_autocast, _set_autocast),
    "anomaly mode": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "parameter swapping": (
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
    ),
    "current device": (
        lambda: torch.accelerator.current_device_index() if _accelerated() else None,
        lambda index: index is None or torch.accelerator.set_device_index(index),
    ),
    "current streams": (_streams, None),
}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _children() -> set[int]:
    """The processes that this one has started, without the tracker that multiprocessing keeps."""
    found = {child.pid for child in multiprocessing.active_children()}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:  # unless it has ended
            found.update(map(int, file.read().split()))
    return found - {getattr(resource_tracker._resource_tracker, "_pid", None)}


def _new(now: Callable[[], set], before: set) -> set:
    """Return what is there beyond `before`, after a moment to end in."""
    end = time.monotonic() + GRACE
    while (left := now() - before) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def _seed() -> None:
    """What `torch.manual_seed(0)` does, which formats a stack trace for each kind of accelerator that is not there."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if _accelerated():
        torch.get_device_module().manual_seed_all(0)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """Seeds the random numbers, and fails a test that leaves threads, processes or changed settings."""
    _seed()
    threads, children = _threads(), _children()
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    yield
    left = [f"thread {thread.name}" for thread in _new(_threads, threads)]
    left += [f"process {pid}" for pid in _new(_children, children)]
    for name, (read, put_back) in SETTINGS.items():
        if (now := read()) != before[name]:
            left.append(f"{name}: {before[name]} -> {now}")
            if put_back is not None:
                put_back(before[name])
    if left:
        pytest.fail(f"the test left behind: {'; '.join(left)}", pytrace=False)
