"""Simulated accelerators: several devices `sim:0`, `sim:1`, ... on a machine that has none.

`load()` builds a PyTorch backend from the .cpp files beside, with the machine's C++ compiler (once: the result is
kept in a cache folder), and registers it. From then on `sim` is a device type like `cuda`, torch.accelerator
speaks for it, and `torch.sim` (device.py) is its module. Memory is host memory with a tag, and operators run on
the CPU at once. What that does show:

- placement: operators refuse tensors of different devices with PyTorch's own message, allocation fails
  beyond the memory a device claims to have, and fresh memory is NaN, never accidentally zero;
- threads: autograd runs one thread for each device, the current device and streams are per thread;
- transfers: `copies()` counts them, `break_peer_copies()` makes a connection deliver garbage;
- streams and events: `stream_log()` tells what was recorded, waited for and synchronised, `launches()` how
  many kernels ran on which stream;
- random numbers: every device has a generator of its own, which draws what the CPU's draws from its seed;
- collectives: those of a process group with a backend for the CPU (Gloo) run there, on copies. Results arrive when
  the work is waited for; before, the tensor holds NaN.

What it cannot show: asynchronous execution (every operator has finished when the call returns, so a missing
wait changes no result: look at the log instead), speed and overlap (event times are host times), the memory
that a kernel needs while it runs, the rounding and non-determinism of a GPU, device-side assertions, sparse
and nested tensors, device graphs, and compiled code. Loading has to come before the first backward pass of the
process: that is when autograd starts its threads.

Moving a module from the CPU to such a backend makes new Parameter objects: parameters that modules share
are not shared afterwards, and an optimizer built before holds the old ones. (From one simulated device to
another, and everywhere on CUDA, they are kept.) That is PyTorch's behaviour and stays so here; build shared
parameters after the move, or move within `keeping_parameters()`, which uses PyTorch's own setting for it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from . import device as _device

__all__ = [
    "Copies",
    "Line",
    "break_peer_copies",
    "copies",
    "devices",
    "keeping_parameters",
    "launches",
    "load",
    "mend",
    "reset",
    "reset_copies",
    "reset_stream_log",
    "set_properties",
    "stream_log",
]

_SOURCES = [Path(__file__).with_name(name) for name in ("backend.h", "backend.cpp", "collectives.cpp")]
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w"]
_FAULTS = ["none", "flip", "zero", "stale"]  # in the order of backend.cpp
_ACTIONS = ["record", "wait", "set", "sync stream", "sync device", "sync event", "use", "copy"]  # likewise


# ------------------------------------------------------------------------------------------ loading


def load(devices: int = 8, cache: Path | str | None = None) -> types.ModuleType | str:
    """Make `devices` simulated devices; return this module, or the reason why that cannot be.

    The compiled backend is kept in `cache`: by default $LOCKSTEP_SIM_CACHE, or a folder of the user's own
    cache. A second call returns the same devices.
    """
    this = sys.modules[__name__]
    backend = torch._C._get_privateuse1_backend_name()
    if backend == "sim" and hasattr(torch, "sim"):
        count = _device.device_count()
        return this if count == devices else f"{count} simulated devices were loaded, not {devices}"
    if backend != "privateuseone":
        return f"the backend {backend!r} is loaded in this process"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return f"this machine has an accelerator ({accelerator.type}); PyTorch knows one kind at a time"

    built = build(cache)
    if isinstance(built, str):
        return built
    torch.utils.rename_privateuse1_backend("sim")
    torch.ops.load_library(built)
    torch.ops.lockstep_sim.init(devices)
    torch._register_device_module("sim", _device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if torch.distributed.is_available():
        torch.distributed.Backend.backend_capability["gloo"].append("sim")
    reset()
    _start_autograd()
    reset()
    return this


def _start_autograd() -> None:
    """Start autograd's threads, one for each device, and have them idle when the process ends.

    After a backward pass such a thread still takes Python's lock, to drop what the pass held; PyTorch aborts
    the process if the interpreter is already ending then. At exit the threads get a moment for that.
    """
    for device in devices():
        try:
            with torch.enable_grad():
                torch.ones((), device=device, requires_grad=True).backward()
        except RuntimeError as error:
            raise RuntimeError("load() has to come before the first backward pass of the process") from error
    atexit.register(time.sleep, 0.1)


def build(cache: Path | str | None = None) -> Path | str:
    """The compiled backend, or the reason why it cannot be compiled. One process compiles it, and others wait."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lockstep-sim"
    cache = Path(cache or os.environ.get("LOCKSTEP_SIM_CACHE", default))
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        return "no C++ compiler to build the simulated accelerators with (g++)"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    key = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES))
    key.update("\0".join([torch.__version__, torch.__file__, compiler, abi, *_FLAGS]).encode())
    library = cache / f"sim-{key.hexdigest()[:16]}.so"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / "building", "w") as building:
            fcntl.flock(building, fcntl.LOCK_EX)
            reason = "" if library.exists() else _compile([compiler, *_FLAGS, abi], library)
    except OSError as error:
        return f"the simulated accelerators cannot be built here: {error}"
    return reason or library


def _compile(compiler: list[str], library: Path) -> str:
    """Compile the files side by side, and link them; return an empty text, or the reason why that cannot be."""
    from torch.utils import cpp_extension  # where it is needed: a build of PyTorch for CUDA writes of what it finds

    lib = Path(torch.__file__).parent / "lib"
    include = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        unfinished = Path(scratch) / library.name
        objects = {str(unfinished.with_name(f"{each.stem}.o")): str(each) for each in _SOURCES if each.suffix == ".cpp"}
        commands = [[*compiler, *include, "-c", source, "-o", made] for made, source in objects.items()]
        link = [*compiler, "-shared", *objects, "-o", str(unfinished), f"-L{lib}", "-ltorch", "-ltorch_cpu", "-lc10"]
        for together in (commands, [link]):
            runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in together]
            for run, said in [(run, run.communicate()[1]) for run in runs]:
                if run.returncode:
                    errors = [line for line in said.splitlines() if "error" in line]
                    return f"the simulated accelerators do not compile here: {(errors or ['no message'])[0]}"
        os.replace(unfinished, library)  # whole or not at all
    return ""


def devices(n: int | None = None) -> list[torch.device]:
    """The first `n` devices (all of them by default)."""
    return [torch.device("sim", i) for i in range(_device.device_count() if n is None else n)]


# --------------------------------------------------------------------------- counters and the log


class Copies(NamedTuple):
    """The transfers from one place to another."""

    calls: int = 0
    bytes: int = 0


class _Copies(dict[tuple[str, str], Copies]):
    def __missing__(self, key: tuple[str, str]) -> Copies:
        return Copies()


class Line(NamedTuple):
    """One line of the stream log.

    action: "record" (`event` is recorded on the stream), "wait" (the stream waits for `event`), "set" (the
    stream becomes the current one of its device, in some thread), "use" (a tensor is marked as in use on the
    stream: record_stream), "copy" (a transfer from `source` to `target` runs on the stream; one between
    devices runs on the stream of its source, as on CUDA), "sync stream" (the host waits for the stream, also in a
    copy to the host that is not a `non_blocking` one to pinned memory), "sync device" or "sync event".
    """

    action: str
    device: str
    stream: int  # torch.Stream.stream_id; 0 is the default stream
    event: int = 0  # the number of the event, 0 where there is none
    source: str = ""  # of a copy
    target: str = ""


def _name(index: int) -> str:
    return "cpu" if index < 0 else f"sim:{index}"


def copies() -> dict[tuple[str, str], Copies]:
    """The transfers since `reset_copies`: {("cpu", "sim:0"): Copies(calls, bytes), ...}.

    Pairs without a transfer are absent, and read as Copies(0, 0). Reading a number (`.item()`, `if tensor:`)
    is a transfer to the host. Copies within a device are not counted.
    """
    rows = torch.ops.lockstep_sim.copies().tolist()
    return _Copies({(_name(i), _name(j)): Copies(calls, size) for i, j, calls, size in rows})


def reset_copies() -> None:
    """Forget the transfers so far."""
    torch.ops.lockstep_sim.reset_copies()


def stream_log() -> list[Line]:
    """Return what happened on streams since `reset_stream_log`, in order; the latest million lines."""
    lines = []
    for action, device, stream, event, source, target in torch.ops.lockstep_sim.stream_log().tolist():
        ends = (_name(source), _name(target)) if _ACTIONS[action] == "copy" else ()
        lines.append(Line(_ACTIONS[action], _name(device), stream, event, *ends))
    return lines


def launches() -> dict[tuple[str, int], int]:
    """How many kernels ran since `reset_stream_log`, by (device, stream number)."""
    return {(_name(device), stream): n for device, stream, n in torch.ops.lockstep_sim.launches().tolist()}


def reset_stream_log() -> None:
    """Empty the stream log and the count of kernels."""
    torch.ops.lockstep_sim.reset_stream_log()


# -------------------------------------------------------------------------- faults and properties


def break_peer_copies(src: int, dst: int, broken: bool = True, *, how: str = "flip") -> None:
    """Let direct copies from device `src` to device `dst` deliver garbage, or mend them.

    how: "flip" (every bit is wrong), "zero" (zeros arrive) or "stale" (nothing arrives).
    """
    torch.ops.lockstep_sim.break_peer(src, dst, _FAULTS.index(how) if broken else 0)


def mend() -> None:
    """Mend all connections."""
    for src in range(_device.device_count()):
        for dst in range(_device.device_count()):
            torch.ops.lockstep_sim.break_peer(src, dst, 0)


def set_properties(index: int, **values: object) -> None:
    """Set what `torch.sim.get_device_properties(index)` says: total_memory, multi_processor_count, name, ...

    `total_memory` also limits what can be allocated on the device.
    """
    _device._properties[index] = dataclasses.replace(_device.get_device_properties(index), **values)
    torch.ops.lockstep_sim.set_total_memory(index, _device._properties[index].total_memory)


def reset() -> None:
    """Back to the state after loading: healthy connections, usual properties, empty counters and log."""
    mend()
    _device._properties.clear()
    for index in range(_device.device_count()):
        torch.ops.lockstep_sim.set_total_memory(index, _device.Properties().total_memory)
    reset_copies()
    reset_stream_log()


@contextlib.contextmanager
def keeping_parameters() -> Iterator[None]:
    """Within: `nn.Module.to()` keeps the Parameter objects, as it does for CUDA without this."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
