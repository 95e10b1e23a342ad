"""Brings the ranks of a session together: device and backend, the failure channel, and the group."""

import contextlib
import functools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from lockstep._base import network
from lockstep._base.arguments import check_backend, check_number
from lockstep._base.debug import log_of
from lockstep._base.devices import accelerator, current_index, resolve_device
from lockstep._base.store import ANSWER_SECONDS, BoundedStore, port_of
from lockstep.distributed.comm.groups import backends_of
from lockstep.errors import AgreementError, CommunicationError, DeviceError, InspectionError, OptionError
from lockstep.failures.channel import LINK_SECONDS, FailureChannel
from lockstep.failures.connections import Connections
from lockstep.failures.progress import Progress, page_of
from lockstep.failures.stall import StallLimits
from lockstep.session.environment import Environment, read_local_rank
from lockstep.session.meeting import meeting_place, part_of_incarnation
from lockstep.session.stop_requests import STOP_SIGNALS
from lockstep.session.watch import (
    Watch,
    check_link_timeout,
    make_channel,
    run_name,
    store_of,
    unused_part,
    watch_over,
)

GIVE_UP_SECONDS = 1.0
"""Seconds to wait for the making of a group that another rank's failure has made useless."""
OF_EACH_RANK = {"device", "time_limit", "stop_signals"}
"""Options that may differ between ranks."""

_log = log_of("session")


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
    stop_signals: Sequence[Signals] = STOP_SIGNALS

    def __post_init__(self) -> None:
        caller = "session()"
        if self.backend is not None:
            check_backend(self.backend, caller)
        if self.device is not None:
            _check_device(self.device, caller)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise OptionError(f"{caller}: seed is {self.seed!r}, expected an int")
        check_number(self.timeout, "timeout", caller, " of seconds")
        if self.stall_factor is not None:
            check_number(self.stall_factor, "stall_factor", caller)
        check_number(self.stall_minimum, "stall_minimum", caller, " of seconds")
        if not isinstance(self.time_limit, int | float | None):
            raise OptionError(f"{caller}: time_limit is {self.time_limit!r}, expected a number of seconds, or None")
        check_link_timeout(self.link_timeout, caller)


def _check_device(device: Any, caller: str) -> None:
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"{caller}: expected a device such as 'cpu' or 'cuda:0', got {device!r}: {error}") from None


# -------------------------------------------------------------------------------------------- its device, its backend


def choose_device(asked: str | torch.device | None, environment: Environment) -> torch.device:
    """Return the device, and make it current, so that no tensor gets to another accelerator by mistake."""
    found = accelerator()
    if asked is None and found is None:
        return torch.device("cpu")
    if found is None and torch.device(asked or "cpu").type not in ("cpu", "meta"):
        raise DeviceError(
            f"session(device={str(asked)!r}): PyTorch sees no accelerator in this process; leave the device out to "
            "train on the CPU, or see what `python -m torch.utils.collect_env` and CUDA_VISIBLE_DEVICES say"
        )
    device = torch.device(found.type) if asked is None and found is not None else resolve_device(asked or "cpu")
    if device.type == "cpu":
        return device
    if asked is None or torch.device(asked).index is None:
        count, local_rank = torch.accelerator.device_count(), environment.local_rank or 0
        processes = max(environment.local_world_size, local_rank + 1)  # alike on all ranks, if it is known
        if processes > count:
            raise DeviceError(
                f"{processes} processes on this host, which has {count} accelerator{'s' if count > 1 else ''} of type "
                f'{device.type}: type `torchrun --nproc-per-node {count}`, or `session(device="cpu")` for the CPU'
            )
        device = torch.device(device.type, local_rank)
    torch.accelerator.set_device_index(device.index)
    return device


def choose_backend(device: torch.device) -> str:
    """Return the backend that suits a device: shared memory for the CPU, with Gloo between hosts."""
    if device.type == "cpu":
        return "shm" if sys.platform == "linux" else "gloo"
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


# ----------------------------------------------------------------------------------- options that have to be the same


def check_same_options(options: Mapping[str, Any], rank: int, world: int, store: Any) -> None:
    """Raise :class:`AgreementError` if this rank has other options than rank 0.

    This rank has then failed, and all others hear of it. Communicates one value through the store.
    """
    own = json.loads(json.dumps({k: v for k, v in options.items() if k not in OF_EACH_RANK}, default=repr))
    store, key, timeout = PrefixStore("options", store), "of rank 0", options["timeout"]
    with contextlib.closing(BoundedStore(store, timeout)) as bounded_store:
        if rank == 0:
            bounded_store.set(key, json.dumps(own))
            return
        values = bounded_store.wait_for([key], timeout, is_only_reader=world == 2)
        if values is None:
            raise CommunicationError(
                f"rank {rank}: rank 0 has not told its options within {timeout:g} s; look at what it is doing"
            )
        of_rank_0 = json.loads(values[0])
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


@dataclass(frozen=True)
class Joined:
    """The watch, place, device and backend of a rank that has joined the others."""

    watch: Watch
    local_rank: int
    device: torch.device
    backend: str


def join(
    options: SessionOptions, environment: Environment, progress: Progress, resources: contextlib.ExitStack
) -> Joined:
    """Connect to the other ranks: first the failure channel, then the group; on an error, take all of it down."""
    if environment.group_exists:
        return _adopt(options, environment, progress, resources)
    limit = timedelta(seconds=options.timeout)
    if environment.world_size == 1:
        device = choose_device(options.device, environment)
        backend = options.backend or choose_backend(device)
        _make_group(backend, HashStore(), environment, limit)
        return Joined(Watch(None, resources=resources.pop_all()), environment.local_rank or 0, device, backend)
    _refuse_child_of_rank(progress)
    _stay_on_loopback(environment)
    connections, waits_for_store = Connections(), Connections()
    # The channel makes a connection of its own. This one is the group's: ending it interrupts a thread that waits
    # there.
    with contextlib.ExitStack() as until_all_have_met:
        with waits_for_store.recording():
            whole_store = until_all_have_met.enter_context(meeting_place(environment, options.timeout))
        port = environment.port or whole_store.port
        store = unused_part(whole_store, f"session {environment.run}", environment.rank)
        if environment.launcher_has_store:
            part = part_of_incarnation(store, environment.rank, environment.world_size, options.timeout)
            store = until_all_have_met.enter_context(part)
        channel = make_channel(
            store,
            environment.rank,
            range(environment.world_size),
            progress,
            options.timeout,
            options.link_timeout,
        )
    watch = Watch(channel, options.timeout, connections, resources.pop_all())
    try:
        watch.ask_where_ranks_are(lambda: dist.group.WORLD, _stall_limits(options))
        environment = _ask_for_hosts(environment, channel)
        device = choose_device(options.device, environment)
        backend = options.backend or choose_backend(device)
        _stay_on_loopback(environment)
        _choose_interface(channel)

        def make_group() -> None:
            own = asdict(options) | {"backend": backend}
            check_same_options(own, environment.rank, environment.world_size, store)
            _make_group(backend, store, environment, limit)

        with connections.recording():
            _while_nobody_fails(
                channel,
                make_group,
                dist.destroy_process_group,
                lambda: waits_for_store.shut_down(except_port=port),
                options.timeout,
            )
    except BaseException as error:
        watch.end(error)
        raise
    watch.attach(dist.group.WORLD)
    return Joined(watch, environment.local_rank or 0, device, backend)


def place_in_group() -> Environment:
    """Return the place of this process in the default group, which exists already."""
    world = dist.get_world_size()
    return replace(
        read_local_rank(),
        rank=dist.get_rank(),
        world_size=world,
        alone=world == 1,
        port=port_of(store_of(dist.group.WORLD)) if world > 1 else 0,
        group_exists=True,
    )


def _adopt(
    options: SessionOptions, environment: Environment, progress: Progress, resources: contextlib.ExitStack
) -> Joined:
    """Watch over the existing default group, which stays as it is, and find the place of this rank on its host."""
    group: Any = dist.group.WORLD
    backend = dist.get_backend()
    names = {backend, dist.get_backend_config()}
    if options.backend not in {None, *names}:
        raise OptionError(
            f"session(backend={options.backend!r}): the process group that exists already has the backend "
            f"{backends_of(group)}, and stays as it is; leave backend out, or end the group before the session"
        )
    bound, asked = group.bound_device_id, options.device
    if bound is not None and asked is not None and resolve_device(asked) != bound:
        raise OptionError(
            f"session(device={str(asked)!r}): the process group that exists already is bound to {bound}, and stays as "
            "it is; leave device out, or end the group before the session"
        )
    if options.timeout != SessionOptions.timeout and environment.rank == 0:
        text = "session(timeout=%g) is not that of the process group, which exists already and keeps its own"
        _log.warning(text, options.timeout)
    if environment.world_size == 1:
        watch = Watch(None, resources=resources.pop_all())
    else:
        store = unused_part(store_of(group), "session", environment.rank)
        limits = _stall_limits(options)
        watch = watch_over(group, store, progress, options.timeout, options.link_timeout, limits, resources)
    try:
        if watch.channel is not None:
            check = functools.partial(
                check_same_options, asdict(options), environment.rank, environment.world_size, store
            )
            _while_nobody_fails(watch.channel, check, lambda: None, lambda: None, options.timeout)
            environment = _ask_for_hosts(environment, watch.channel)
        device = choose_device(asked if bound is None else bound, environment)
    except BaseException as error:
        watch.end(error)
        raise
    return Joined(
        watch, environment.local_rank or 0, device, backend if backend != "undefined" else dist.get_backend_config()
    )


def _ask_for_hosts(environment: Environment, channel: FailureChannel) -> Environment:
    """Find by communication what the launcher has not set: the number of this process on its host, of how many."""
    on_host = channel.hosts.ranks_with(channel.rank)
    return replace(
        environment,
        local_rank=on_host.index(channel.rank) if environment.local_rank is None else environment.local_rank,
        local_world_size=environment.local_world_size or len(on_host),
    )


def _stall_limits(options: SessionOptions) -> StallLimits | None:
    if options.stall_factor is None:
        return None
    return StallLimits(options.stall_factor, options.stall_minimum, options.timeout)


def name_of_run(environment: Environment) -> str:
    """Return the run's name: the program's, with the launcher's run id, the port of the store, or the process id."""
    if environment.alone:
        return run_name(str(os.getpid()))
    return run_name(str(environment.port) if environment.run in ("", "none") else environment.run[:8])


def _refuse_child_of_rank(progress: Progress) -> None:
    """Raise :class:`OptionError` in a process that a rank has started, and that would join its run as that rank."""
    parent, own = os.getppid(), progress.read()
    with contextlib.suppress(InspectionError):
        if page_of(parent, own.run, own.rank) is not None:
            raise OptionError(
                f"process {parent}, which has started this one, is rank {own.rank} of {own.world} of this run already, "
                "and its variables are inherited: give session(alone=True) to train in this process alone"
            )


def _make_group(backend: str, store: Any, environment: Environment, timeout: timedelta) -> None:
    if "nccl" in backend:  # after its time-out PyTorch sleeps for four times as long before it ends the process
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    dist.init_process_group(
        backend, store=store, rank=environment.rank, world_size=environment.world_size, timeout=timeout
    )


def _while_nobody_fails(
    channel: FailureChannel,
    make: Callable[[], object],
    undo: Callable[[], object],
    give_up: Callable[[], object],
    timeout: float,
) -> None:
    """Make the group on another thread, since that waits for other ranks in C++; raise if one of them fails meanwhile,
    or after ``timeout`` seconds, which the group's own calls to the store do not observe.

    Then ``give_up`` ends the wait, and ``undo`` is called if the group is made nevertheless.
    """
    made: Future[Any] = Future()
    lock, given_up = threading.Lock(), False
    current = current_index()

    def work() -> None:
        try:
            if current is not None:
                torch.accelerator.set_device_index(current)
            make()
            with lock:
                if given_up:
                    undo()
                made.set_result(None)
        except BaseException as error:
            made.set_exception(error)

    failed: Future[Any] = Future()
    channel.when_failed(failed.set_result)
    threading.Thread(target=work, name="lockstep makes the group", daemon=True).start()
    with channel.progress.waiting("process group"):
        wait([made, failed], timeout + ANSWER_SECONDS, FIRST_COMPLETED)
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
