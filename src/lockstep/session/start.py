"""Brings the ranks of a session together: device and backend, the failure channel, and the group."""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from lockstep import network
from lockstep.devices import accelerator, resolve_device
from lockstep.distributed.collectives import backends_of
from lockstep.errors import AgreementError, CommunicationError, DeviceError
from lockstep.failures.channel import LINK_SECONDS, FailureChannel
from lockstep.failures.connections import Connections
from lockstep.failures.progress import Progress
from lockstep.failures.stall import StallLimits
from lockstep.session.environment import Environment
from lockstep.session.meeting import meeting_place
from lockstep.session.watch import Watch, attach, make_channel, run_name, unused_part
from lockstep.store import ANSWER_SECONDS, BoundedStore

GIVE_UP_SECONDS = 1.0
"""Seconds to wait for the making of a group that another rank's failure has made useless."""
OF_EACH_RANK = {"device", "time_limit"}
"""Options that may differ between ranks."""


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
    with contextlib.ExitStack() as until_all_have_met:
        with waits_for_store.recording():
            whole_store = until_all_have_met.enter_context(meeting_place(environment, options.timeout))
        port = environment.port or whole_store.port
        store = unused_part(whole_store, f"session {environment.run}", environment.rank)
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
                lambda: waits_for_store.shut_down(except_port=port),
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
