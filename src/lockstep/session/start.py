"""Brings the ranks of a session together: each finds its place, the store, the others, and the group."""

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore

from lockstep import network
from lockstep.devices import accelerator, resolve_device
from lockstep.distributed.comm.collectives import backends_of
from lockstep.errors import AgreementError, CommunicationError, DeviceError, OptionError
from lockstep.failures.channel import LINK_SECONDS, FailureChannel
from lockstep.failures.connections import Connections
from lockstep.failures.progress import Progress
from lockstep.failures.stall import StallLimits
from lockstep.session.watch import Watch, attach, make_channel, run_name, unused_part
from lockstep.store import ANSWER_SECONDS, BoundedStore, StoreLostError, bounded

CONNECT_SECONDS = 0.1
"""Seconds between two attempts to reach the store."""
TELL_SECONDS = 5.0
"""Seconds after which a rank says that it still waits for the store."""
RESOLVE_SECONDS = 30.0
"""Seconds for which an unknown host name may become known: a cluster that has just started a host may need that."""
GIVE_UP_SECONDS = 1.0
"""Seconds to wait for the making of a group that another rank's failure has made useless."""
OF_EACH_RANK = {"device", "time_limit"}
"""Options that may differ between ranks."""

_log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class SessionOptions:
    """The arguments of :func:`session`."""

    backend: str | None = None
    device: str | torch.device | None = None
    timeout: float = 600.0
    seed: int = 0
    stall_factor: float | None = 20.0
    stall_minimum: float = 60.0
    time_limit: float | None = None
    link_timeout: float = LINK_SECONDS


# ------------------------------------------------------------------------------------- which process of a run this is


@dataclass(frozen=True)
class Environment:
    """The place of a process in its run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The number of this process on its host."""
    local_world_size: int = 1
    alone: bool = True
    """True if no launcher has started this process as a rank: then there is no store to meet others at."""
    run: str = ""
    """The name of the run, the same on all ranks; empty if it has none."""
    address: str = ""
    port: int = 0
    """The port at ``address`` at which the ranks meet."""
    launcher_has_store: bool = False
    """True if the launcher hosts the store there; else rank 0 does."""

    @property
    def is_one_host(self) -> bool:
        """True if all ranks are on this host."""
        return self.local_world_size == self.world_size


_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return the place of this process, from the variables that ``torchrun`` sets.

    Without ``RANK`` and ``WORLD_SIZE`` the process is alone. Raises :class:`OptionError` if only some of the variables
    are set, or one is not a number.
    """
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return Environment()
    missing = [name for name in _NEEDED if name not in variables]
    if missing:
        raise OptionError(
            f"the environment has {', '.join(name for name in _NEEDED if name in variables)}, but not "
            f"{', '.join(missing)}: start the processes with torchrun, which sets all of them, or unset all of them to "
            "run alone"
        )
    rank, world = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise OptionError(f"RANK is {rank}, but WORLD_SIZE is {world}: ranks are 0 to {world - 1}")
    return Environment(
        rank=rank,
        world_size=world,
        local_rank=_number(variables, "LOCAL_RANK", rank),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE", 0),  # 0: unknown
        alone=False,
        run=variables.get("TORCHELASTIC_RUN_ID", ""),
        address=variables["MASTER_ADDR"],
        port=_number(variables, "MASTER_PORT"),
        launcher_has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(variables: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = variables.get(name)
    if text is None and otherwise is not None:
        return otherwise
    try:
        return int(str(text))
    except ValueError:
        raise OptionError(f"the environment variable {name} is {text!r}, expected a whole number") from None


# -------------------------------------------------------------------------------------------- its device, its backend


def choose_device(asked: str | torch.device | None, environment: Environment) -> torch.device:
    """Return the device, made current so that nothing is put on another one of its kind by mistake."""
    found = accelerator()
    if asked is None and found is None:
        return torch.device("cpu")
    device = torch.device(found.type) if asked is None and found is not None else resolve_device(asked or "cpu")
    if device.type == "cpu":
        return device
    if asked is None or torch.device(asked).index is None:
        count = torch.accelerator.device_count()
        processes = max(environment.local_world_size, environment.local_rank + 1)  # alike on all ranks, if it is known
        if processes > count:
            raise DeviceError(
                f"{processes} processes on this host, which has {count} accelerator{'s' if count > 1 else ''} of type "
                f'{device.type}: type `torchrun --nproc-per-node {count}`, or `session(device="cpu")` for the CPU'
            )
        device = torch.device(device.type, environment.local_rank)
    torch.accelerator.set_device_index(device.index)
    return device


def choose_backend(device: torch.device, environment: Environment) -> str:
    """Return the backend that suits a device: shared memory if all ranks train on the CPU of one host."""
    if device.type == "cpu":
        return "shm" if sys.platform == "linux" and (environment.is_one_host or environment.alone) else "gloo"
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


# ---------------------------------------------------------------------------------- the store at which the ranks meet


def meeting_place(environment: Environment, timeout: float) -> Any:
    """Return the store; unless a launcher has one, rank 0 makes it, without waiting for the others.

    Raises :class:`CommunicationError` if the store cannot be reached within ``timeout`` seconds.
    """
    addresses = _resolve(environment, timeout)
    if environment.launcher_has_store or environment.rank:
        _wait_for_store(environment, timeout)
    elif not any(map(network.is_own, addresses)):
        text = (
            "rank 0 hosts the store at which the ranks meet, but MASTER_ADDR=%s (%s) is not its host; trying for %g s"
        )
        _log.warning(text, environment.address, ", ".join(addresses), timeout)
    try:
        return bounded(lambda: _connect(environment, timedelta(seconds=timeout)), timeout)
    except (DistError, StoreLostError) as error:
        if isinstance(error, DistError) and environment.rank == 0 and not environment.launcher_has_store:
            raise  # its port is in use
        raise _no_store(environment, timeout, error) from error


def _resolve(environment: Environment, timeout: float) -> list[str]:
    """Return the addresses of the host at which the ranks meet; a new name may take a moment to be known."""
    limit = min(timeout, RESOLVE_SECONDS)
    deadline, told = time.monotonic() + limit, False
    while True:
        try:
            return network.addresses_of_host(environment.address)
        except OSError as error:
            what = (
                f"rank {environment.rank}: the name in MASTER_ADDR={environment.address} cannot be resolved ({error})"
            )
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"{what}, not for {limit:g} s; give a name or an address of the host of rank 0 that this host knows"
                ) from error
            if not told:
                _log.warning("%s; trying for %g s", what, limit)
                told = True
        time.sleep(CONNECT_SECONDS)


def _connect(environment: Environment, timeout: timedelta) -> Any:
    if environment.launcher_has_store:
        found = dist.rendezvous(  # type: ignore[attr-defined]
            "env://", environment.rank, environment.world_size, timeout=timeout
        )
        return next(iter(found))[0]
    return TCPStore(
        environment.address,
        environment.port,
        environment.world_size,
        is_master=environment.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _wait_for_store(environment: Environment, timeout: float) -> None:
    """Return when a process listens at the address of the store."""
    begin, where, told = time.monotonic(), (environment.address, environment.port), False
    while True:
        left = begin + timeout - time.monotonic()
        try:
            socket.create_connection(where, timeout=max(CONNECT_SECONDS, min(left, TELL_SECONDS))).close()
            return
        except OSError as error:
            if left < 0:
                raise _no_store(environment, timeout, error) from error
            if not told and time.monotonic() > begin + TELL_SECONDS:
                text = "rank %d: nobody answers at MASTER_ADDR=%s, MASTER_PORT=%d yet (%s)%s; trying for %g s"
                _log.warning(text, environment.rank, *where, error, _hint(environment), timeout)
                told = True
        time.sleep(CONNECT_SECONDS)


def _no_store(environment: Environment, timeout: float, error: Exception) -> CommunicationError:
    host = "the launcher" if environment.launcher_has_store else f"rank 0 of {environment.world_size}"
    gist = (str(error) or type(error).__name__).splitlines()[0]
    return CommunicationError(
        f"rank {environment.rank}: {host}, at whose store {environment.address}:{environment.port} the ranks meet, did "
        f"not come within {timeout:g} s, or has ended since ({gist}); look at the errors of that process, and whether "
        f"MASTER_ADDR and MASTER_PORT are right{_hint(environment)}"
    )


def _hint(environment: Environment) -> str:
    """Return a hint if the address is one that leads from each host to itself."""
    with contextlib.suppress(OSError):
        if not environment.is_one_host and all(
            map(network.is_loopback, network.addresses_of_host(environment.address))
        ):
            return (
                f". {environment.address} is a loopback address here: if the store is on another host, give that one's "
                "address (under torchrun by --local-addr there)"
            )
    return ""


# ----------------------------------------------------------------------------------- options that have to be the same


def check_same_options(options: Mapping[str, Any], rank: int, store: Any) -> None:
    """Raise :class:`AgreementError` on a rank that was called with other options than rank 0.

    That is then this rank's failure, and all others hear of it. Communicates one value through the store.
    """
    own = json.loads(json.dumps({k: v for k, v in options.items() if k not in OF_EACH_RANK}, default=repr))
    store, key, timeout = PrefixStore("options", store), "of rank 0", options["timeout"]
    with contextlib.closing(BoundedStore(store, timeout)) as bounded_store:
        if rank == 0:
            bounded_store.set(key, json.dumps(own))
            return
        if not bounded_store.wait([key], timeout):
            raise CommunicationError(
                f"rank {rank}: rank 0 has not told its options within {timeout:g} s; look at what it is doing"
            )
        of_rank_0 = json.loads(bounded_store.get(key))
    for name, theirs in of_rank_0.items():
        if own.get(name) != theirs:
            raise AgreementError(
                f"session(): ranks differ in {name}: {theirs} on rank 0, {own.get(name)} on rank {rank}; give "
                f"it the same on all ranks{_HINTS.get(name, '')}"
            )


_HINTS = {
    "seed": ". Random numbers differ by rank with one seed, too: run.generator, torch.rand()",
    "backend": ". Without one it follows from the device: cpu on some ranks only is another backend",
}


# ---------------------------------------------------------------------------------------------------------- the group


def join(
    options: SessionOptions,
    environment: Environment,
    backend: str,
    progress: Progress,
    resources: contextlib.ExitStack,
) -> Watch:
    """Connect to the other ranks: first the failure channel, then the group; on an error, take all of it down."""
    limit = timedelta(seconds=options.timeout)
    if environment.world_size == 1:
        _make_group(backend, HashStore(), environment, limit)
        return Watch(None, resources=resources.pop_all())
    _stay_on_loopback(environment)
    connections, waits_for_store = Connections(), Connections()
    # The channel makes a connection of its own. This one is the group's: ending it interrupts a thread that waits
    # there.
    with waits_for_store.recording():
        store = unused_part(meeting_place(environment, options.timeout), "session", environment.rank)
    channel = make_channel(
        store,
        environment.rank,
        range(environment.world_size),
        progress,
        options.timeout,
        options.link_timeout,
    )
    watch = Watch(channel, options.timeout, connections, resources.pop_all())
    limits = None
    if options.stall_factor is not None:
        limits = StallLimits(options.stall_factor, options.stall_minimum, options.timeout)

    def make_group() -> None:
        check_same_options(asdict(options) | {"backend": backend}, environment.rank, store)
        _make_group(backend, store, environment, limit)

    try:
        watch.look_for_stalls(lambda: dist.group.WORLD, limits)
        _choose_interface(channel)
        with connections.recording():
            _while_nobody_fails(
                channel,
                make_group,
                lambda: waits_for_store.shut_down(except_port=environment.port),
                options.timeout,
            )
    except BaseException as error:
        watch.end(error)
        raise
    gloo = "gloo" in backends_of(dist.group.WORLD)
    attach(channel, dist.group.WORLD, connections if gloo else None)
    return watch


def name_of_run(environment: Environment) -> str:
    """Return the run's name: the program's, with the launcher's run id, the port of the store, or the process id."""
    if environment.alone:
        return run_name(str(os.getpid()))
    return run_name(str(environment.port) if environment.run in ("", "none") else environment.run[:8])


def _make_group(backend: str, store: Any, environment: Environment, timeout: timedelta) -> None:
    dist.init_process_group(
        backend, store=store, rank=environment.rank, world_size=environment.world_size, timeout=timeout
    )


def _while_nobody_fails(
    channel: FailureChannel, make: Callable[[], object], give_up: Callable[[], object], timeout: float
) -> None:
    """Make the group on another thread, since that waits for other ranks in C++; raise if one of them fails meanwhile,
    or after ``timeout`` seconds, which the group's own calls to the store do not observe.

    Then ``give_up`` ends the wait, and a group that is made nevertheless is destroyed.
    """
    made: Future[None] = Future()
    lock, given_up = threading.Lock(), False
    current = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def work() -> None:
        try:
            if current is not None:
                torch.accelerator.set_device_index(current)
            make()
            with lock:
                if given_up:
                    dist.destroy_process_group()
                made.set_result(None)
        except BaseException as error:
            made.set_exception(error)

    awake = threading.Event()
    channel.when_failed(lambda _: awake.set())
    made.add_done_callback(lambda _: awake.set())
    threading.Thread(target=work, name="lockstep makes the group", daemon=True).start()
    with channel.progress.waiting("process group"):
        awake.wait(timeout + ANSWER_SECONDS)
    with lock:
        given_up = not made.done()
    if given_up:
        give_up()
        wait([made], GIVE_UP_SECONDS)
        channel.check()
        raise CommunicationError(f"rank {channel.rank}: the process group could not be made within {timeout:g} s")
    made.result()


def _choose_interface(channel: FailureChannel) -> None:
    """Tell Gloo which interface leads to other hosts, if ranks are on several and this host's own name has no address
    at which they reach it."""
    own = channel.places[channel.rank].host
    others = [place.ip for place in channel.places.values() if place.host != own]
    if others and (address := network.address_for_gloo(others)) and (interface := network.interface_of(address)):
        os.environ[network.INTERFACE_VARIABLE] = interface


def _stay_on_loopback(environment: Environment) -> None:
    """Keep Gloo's traffic on the loopback interface if all ranks are on this host."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names and environment.is_one_host:
        os.environ.setdefault(network.INTERFACE_VARIABLE, names[0])
