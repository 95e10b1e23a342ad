"""``lockstep doctor``: checks what this host has for training, measures communication, and says what to do."""

import argparse
import contextlib
import dataclasses
import os
import platform
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from lockstep._base import network
from lockstep._base.deal import Dealt, deal_by_speed
from lockstep.cli import printing
from lockstep.cli.local_ranks import as_rank, run_ranks, say
from lockstep.errors import CommunicationError, OptionError

SIZES = (4 << 10, 1 << 20, 64 << 20)
BYTES_A_TURN = 8 << 20
"""Small messages are sent several times a turn, one after the other, up to this many bytes."""
TESTED = ((2, 11), (2, 15))
"""The oldest and the newest version of PyTorch that the library is tested with."""
FEW_FILES = 4096
SMALL_DEV_SHM = 1 << 30
SHARES_A_RANK = 8
WORTH_BALANCING = 0.05
"""Part of a step's time from which on it is worth while to deal shares by speed."""


@dataclasses.dataclass(frozen=True)
class HostCheck:
    """The result of one check."""

    name: str
    value: str
    status: str = "ok"
    """``ok``, ``note`` (worth knowing), or ``problem`` (something will not work)."""
    advice: str = ""


def run(options: argparse.Namespace) -> int:
    """Print the findings and the times; return 1 if there is a problem."""
    findings = look()
    times: list[dict[str, Any]] = []
    work: list[float] = []
    if not options.no_timing:
        try:
            times, work = _times(options)
            findings.append(_speeds(work))
        except CommunicationError as error:
            findings.append(HostCheck("all-reduce", "failed", "problem", str(error)))
    if options.json:
        document = {
            "findings": [dataclasses.asdict(each) for each in findings],
            "all_reduce": times,
            "work_seconds": work,
        }
        printing.print_json(document)
    else:
        _show(findings, times, options.ranks)
    return int(any(each.status == "problem" for each in findings))


def _times(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the times of the slowest rank, by backend and size; and the time of the same work on each rank."""
    settings = {
        "backends": usable_backends(),
        "sizes": SIZES,
        "rounds": options.rounds,
        "timeout": options.timeout,
    }
    by_rank = run_ranks("lockstep.cli.doctor", settings, options.ranks, options.timeout)
    rows = [max(rows, key=lambda row: row["seconds"]) for rows in zip(*(each["rows"] for each in by_rank), strict=True)]
    times = [{**row, "copies": row["seconds"] / row["copy_seconds"]} for row in rows]
    return times, [each["work_seconds"] for each in by_rank]


def _speeds(work: list[float]) -> HostCheck:
    """Say whether a rank is slower than the others, and how ``balance="speed"`` would deal shares to them."""
    shares = SHARES_A_RANK * len(work)
    dealt = Dealt(deal_by_speed(shares, work), work)
    slow, ratio = work.index(max(work)), max(work) / min(work)
    value = f"rank {slow} takes {ratio:.2f} times as long as the fastest" if len(work) > 1 else "one rank"
    if dealt.saved < WORTH_BALANCING:
        return HostCheck("speed of the ranks", value)
    advice = (
        f'look for what else runs there; GlobalBatches(balance="speed") would deal {shares} shares as '
        f"{' + '.join(map(str, dealt.deal))}, and save {dealt.saved:.0%} of a step"
    )
    return HostCheck("speed of the ranks", value, "note", advice)


def _show(findings: list[HostCheck], times: list[dict[str, Any]], ranks: int) -> None:
    width = max(len(each.name) for each in findings)
    for each in findings:
        mark = {"ok": " ", "note": "?", "problem": "!"}[each.status]
        print(f"{mark} {each.name.ljust(width)}  {each.value}")
        if each.advice:
            print(f"  {' ' * width}  -> {each.advice}")
    if times:
        rows = [
            (
                f"{printing.size(row['bytes'])}, {row['backend']}",
                printing.seconds(row["seconds"]),
                f"{row['bytes'] / row['seconds'] / 1e9:.3g} GB",
                f"{row['copies']:.1f}",
            )
            for row in times
        ]
        headers = ("size, backend", "time", "reduced a second", "time / one copy")
        printing.print_table(f"all-reduce between {ranks} ranks on this host", headers, rows)


# ---------------------------------------------------------------------------------------- what is looked at


def look() -> list[HostCheck]:
    """Return all findings, in the order in which they are shown. Communicates nothing, and starts nothing."""
    return [*_versions(), *_devices(), *_backends(), *_memory(), *_limits(), *_threads(), *_network()]


def usable_backends() -> list[str]:
    """Return the backends on which two ranks of this host can be timed."""
    names = ["gloo"] if dist.is_gloo_available() else []
    names += ["shm"] if _can_share_memory() else []
    return names + (["nccl"] if dist.is_nccl_available() and torch.cuda.device_count() >= 2 else [])


def _versions() -> Iterator[HostCheck]:
    yield HostCheck("lockstep", f"{lockstep.__version__} in {Path(lockstep.__file__).parent}")
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    (oldest, newest), tested = TESTED, f"tested with {TESTED[0][0]}.{TESTED[0][1]} to {TESTED[1][0]}.{TESTED[1][1]}"
    if oldest <= (major, minor) <= newest:
        yield HostCheck("PyTorch", torch.__version__)
    else:
        yield HostCheck("PyTorch", torch.__version__, "note", f"install a version that lockstep is {tested}")
    yield HostCheck("Python", f"{platform.python_version()} ({sys.executable})")
    if sys.platform == "linux":
        yield HostCheck("system", f"Linux {platform.release()}, {platform.machine()}")
    else:
        yield HostCheck("system", platform.platform(), "note", "the library is tested on Linux; shm needs it")


def _devices() -> Iterator[HostCheck]:
    cores = usable_cores()
    limited = f" of {os.cpu_count()}" if cores != os.cpu_count() else ""
    yield HostCheck("processor", f"{_processor()}, {cores}{limited} cores")
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        yield HostCheck("accelerators", f"{torch.accelerator.device_count()} of type {kind.type if kind else '?'}")
    else:
        yield HostCheck("accelerators", "none")


def _backends() -> Iterator[HostCheck]:
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    available = [name for name in names if getattr(dist, f"is_{name}_available", lambda: False)()]
    if _can_share_memory():
        yield HostCheck("backends", ", ".join(["shm", *available]))
    else:
        advice = "shm needs Linux and memfd_create, which a sandbox may forbid; use gloo"
        yield HostCheck("backends", ", ".join(available), "note", advice)


def _memory() -> Iterator[HostCheck]:
    with contextlib.suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        small = free < SMALL_DEV_SHM
        advice = "data loader workers pass batches through it: start the container with --shm-size 8g, or num_workers=0"
        yield HostCheck("/dev/shm", f"{free / 2**20:,.0f} MiB free", "note" if small else "ok", advice if small else "")
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        yield HostCheck("memory of the container", "no limit" if limit == "max" else f"{int(limit) / 2**30:,.1f} GiB")


def _limits() -> Iterator[HostCheck]:
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FEW_FILES:
        advice = f"many ranks or workers open many files: ulimit -n {FEW_FILES if hard < 0 else min(hard, 65536)}"
        yield HostCheck("open files", f"at most {soft}", "note", advice)
    else:
        yield HostCheck("open files", f"at most {soft}")


def _threads() -> Iterator[HostCheck]:
    variable = os.environ.get("OMP_NUM_THREADS")
    value = f"{torch.get_num_threads()} for each rank (OMP_NUM_THREADS {variable or 'is not set'})"
    if variable is None:
        advice = "each of several ranks would use all cores: set OMP_NUM_THREADS to cores / ranks (torchrun sets 1)"
        yield HostCheck("intra-op threads", value, "note", advice)
    else:
        yield HostCheck("intra-op threads", value)


def _network() -> Iterator[HostCheck]:
    name, address = socket.gethostname(), network.address_of_own_name()
    if address is None:
        advice = f"add {name} to /etc/hosts, or set {network.INTERFACE_VARIABLE}=lo for ranks of one host"
        yield HostCheck("host name", f"{name} has no address", "problem", advice)
    elif network.is_loopback(address):
        advice = (
            f"other hosts cannot reach this one there. session() finds another address; without one, "
            f"{network.SET_INTERFACE}"
        )
        yield HostCheck("host name", f"{name} is {address}, a loopback address", "note", advice)
    else:
        yield HostCheck("host name", f"{name} is {address}")
    chosen = os.environ.get(network.INTERFACE_VARIABLE)
    if chosen is not None:
        address = None
        with contextlib.suppress(OptionError):
            address = network.chosen_address()
        if address is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            yield HostCheck("interface", f"{chosen} has no address", "problem", f"this host has {names}")
        else:
            yield HostCheck("interface", f"{chosen}, {address}")


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _can_share_memory() -> bool:
    try:
        os.close(os.memfd_create("lockstep-doctor"))
    except (AttributeError, OSError):
        return False
    return True


# ------------------------------------------------------------------------------------------ in each process


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return one row for each backend and size: this rank's median seconds of an all-reduce and of a copy; and the
    seconds of some work, which is the same on all ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=options["timeout"]))
    groups = {name: dist.new_group(backend=name) for name in options["backends"]}
    rows = [row for size in options["sizes"] for row in _measure_size(groups, size, options["rounds"])]
    work = _measure_work(options["rounds"])
    dist.destroy_process_group()
    return {"rows": rows, "work_seconds": work}


def _measure_work(rounds: int) -> float:
    """Return the median seconds of some products of matrices, while all ranks compute the same."""
    a, times = torch.ones(256, 256), []
    for number in range(-1, rounds):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(20):
            a @ a
        if number >= 0:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _measure_size(groups: dict[str, Any], size: int, rounds: int) -> list[dict[str, Any]]:
    calls = {name: _all_reduce(name, group, size) for name, group in groups.items()}
    source, target = torch.zeros(size // 4), torch.zeros(size // 4)
    calls["copy"] = lambda: target.copy_(source)
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = max(1, min(50, BYTES_A_TURN // size))
    for number in range(-1, rounds):
        say(f"all-reduce of {printing.size(size)}, round {max(number, 0) + 1} of {rounds}")
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            if number >= 0:
                times[name].append((time.perf_counter() - begin) / repeats)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {"backend": name, "bytes": size, "seconds": medians[name], "copy_seconds": medians["copy"]} for name in groups
    ]


def _all_reduce(name: str, group: Any, size: int) -> Callable[[], object]:
    if name != "nccl":
        tensor = torch.zeros(size // 4)
        return lambda: dist.all_reduce(tensor, group=group)
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    on_device = torch.zeros(size // 4, device=device)

    def call() -> None:
        dist.all_reduce(on_device, group=group)
        torch.cuda.synchronize(device)

    return call


if __name__ == "__main__":
    as_rank(measure)
