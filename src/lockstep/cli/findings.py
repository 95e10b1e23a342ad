"""What `lockstep doctor` looks at on this host: each look gives a finding, with what to do where something is amiss."""

import contextlib
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import lockstep
from lockstep import network

TESTED = ((2, 11), (2, 15))
"""The oldest and the newest PyTorch that the library is tested with."""
FEW_FILES = 4096
SMALL_DEV_SHM = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str
    status: str = "ok"
    """``ok``, ``note`` (worth knowing), or ``problem`` (something will not work)."""
    advice: str = ""


def look() -> list[Finding]:
    """All findings, in the order in which they are shown. Communicates nothing, and starts nothing."""
    return [*_versions(), *_devices(), *_backends(), *_memory(), *_limits(), *_threads(), *_network()]


def usable_backends() -> list[str]:
    """Backends on which two ranks of this host can be timed."""
    names = ["gloo"] if dist.is_gloo_available() else []
    names += ["shm"] if _can_share_memory() else []
    return names + (["nccl"] if dist.is_nccl_available() and torch.cuda.device_count() >= 2 else [])


def _versions() -> Iterator[Finding]:
    yield Finding("lockstep", f"{lockstep.__version__} in {Path(lockstep.__file__).parent}")
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    (oldest, newest), told = TESTED, f"tested with {TESTED[0][0]}.{TESTED[0][1]} to {TESTED[1][0]}.{TESTED[1][1]}"
    if oldest <= (major, minor) <= newest:
        yield Finding("PyTorch", torch.__version__)
    else:
        yield Finding("PyTorch", torch.__version__, "note", f"install a version that lockstep is {told}")
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    if sys.platform == "linux":
        yield Finding("system", f"Linux {platform.release()}, {platform.machine()}")
    else:
        yield Finding("system", platform.platform(), "note", "the library is tested on Linux; shm needs it")


def _devices() -> Iterator[Finding]:
    cores = usable_cores()
    limited = f" of {os.cpu_count()}" if cores != os.cpu_count() else ""
    yield Finding("processor", f"{_processor()}, {cores}{limited} cores")
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        yield Finding("accelerators", f"{torch.accelerator.device_count()} of type {kind.type if kind else '?'}")
    else:
        yield Finding("accelerators", "none")


def _backends() -> Iterator[Finding]:
    there = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if _is_available(name)]
    if _can_share_memory():
        yield Finding("backends", ", ".join(["shm", *there]))
    else:
        advice = "shm needs Linux and memfd_create, which a sandbox may forbid; use gloo"
        yield Finding("backends", ", ".join(there), "note", advice)


def _memory() -> Iterator[Finding]:
    with contextlib.suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        small = free < SMALL_DEV_SHM
        advice = "data loader workers pass batches through it: start the container with --shm-size 8g, or num_workers=0"
        yield Finding("/dev/shm", f"{free / 2**20:,.0f} MiB free", "note" if small else "ok", advice if small else "")
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        yield Finding("memory of the container", "no limit" if limit == "max" else f"{int(limit) / 2**30:,.1f} GiB")


def _limits() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FEW_FILES:
        advice = f"many ranks or workers open many files: ulimit -n {FEW_FILES if hard < 0 else min(hard, 65536)}"
        yield Finding("open files", f"at most {soft}", "note", advice)
    else:
        yield Finding("open files", f"at most {soft}")


def _threads() -> Iterator[Finding]:
    said = os.environ.get("OMP_NUM_THREADS")
    value = f"{torch.get_num_threads()} for each rank (OMP_NUM_THREADS {said or 'is not set'})"
    if said is None:
        advice = "each of several ranks would use all cores: set OMP_NUM_THREADS to cores / ranks (torchrun sets 1)"
        yield Finding("intra-op threads", value, "note", advice)
    else:
        yield Finding("intra-op threads", value)


def _network() -> Iterator[Finding]:
    name, address = socket.gethostname(), network.address_of_own_name()
    if address is None:
        advice = f"add {name} to /etc/hosts, or set {network.INTERFACE_VARIABLE}=lo for ranks of one host"
        yield Finding("host name", f"{name} has no address", "problem", advice)
    elif network.is_loopback(address):
        advice = (
            f"other hosts cannot reach this one there. session() finds another address; without one, "
            f"{network.SET_INTERFACE}"
        )
        yield Finding("host name", f"{name} is {address}, a loopback address", "note", advice)
    else:
        yield Finding("host name", f"{name} is {address}")
    chosen = os.environ.get(network.INTERFACE_VARIABLE)
    if chosen is not None:
        addresses = network.chosen_address()
        if addresses is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            yield Finding("interface", f"{chosen} has no address", "problem", f"this host has {names}")
        else:
            yield Finding("interface", f"{chosen}, {addresses}")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _is_available(name: str) -> bool:
    return bool(getattr(dist, f"is_{name}_available", lambda: False)())


def _can_share_memory() -> bool:
    try:
        os.close(os.memfd_create("lockstep-doctor"))
    except (AttributeError, OSError):
        return False
    return True
