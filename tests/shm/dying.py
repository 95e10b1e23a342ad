"""Ranks that are killed at a chosen point of a training loop, and what is left in those that survive.

A few processes go through many groups, one after the other: in each, one rank is a process of its own, made to die.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import random
import signal
import socket
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import processes  # starts the server that processes are forked off
from lockstep.distributed import ProcessGroupShm, ShmOptions
from lockstep.shm import rendezvous, runtime
from lockstep.shm.arithmetic import TensorReduction
from lockstep.shm.messages import MessageKind
from lockstep.shm.peers import Peers
from lockstep.shm.staging import Staging

TIMEOUT = 20.0
_context = processes._context


def slowness() -> float:
    """How many times as long as on an idle machine things may take here: processes that want a core, for each core."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class Kill(NamedTuple):
    """One group: which rank dies, how, and after how many times of what (or after how many milliseconds)."""

    number: int
    victim: int
    point: str
    count: int
    hosts: str


class Seen(NamedTuple):
    """What a survivor has seen: what was raised and when, and what is left once the group is destroyed."""

    rank: int
    error: str
    text: str
    when: float
    left: list[str]


# -------------------------------------------------------------------------------------------- loop


def loop(group: Any, seed: int) -> None:
    """Collectives of every kind and in every way, the same on all ranks, without end."""
    rng = random.Random(seed)
    shared = [group.allocate(80_000) for _ in range(3)]  # the first time they are used, they are sent to the others
    own, small = torch.ones(700_000), torch.ones(1000)
    parts = [torch.empty(1000) for _ in range(group.size())]
    scattered = torch.empty(20_000)
    whole = [torch.ones(20_000) for _ in range(group.size())]
    ways = [
        lambda: group.allreduce([small]),
        lambda: group.allreduce([own]),
        lambda: group.allreduce([rng.choice(shared)]),
        lambda: group.allreduce([group.allocate(rng.randrange(40_000, 60_000))]),
        lambda: group.broadcast([own]),
        lambda: group.broadcast([shared[0]]),
        lambda: group.allgather([parts], [small]),
        lambda: group.reduce_scatter([scattered], [whole]),
        lambda: group.barrier(),
    ]
    while True:
        for tensor in (own, small, *shared):
            tensor.fill_(1.0)
        pending = [rng.choice(ways)() for _ in range(rng.randrange(1, 4))]
        for work in pending:
            work.wait()


# -------------------------------------------------------------------------------------- the victim


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _after(count: int, call: Any, before: bool) -> Any:
    """The function, which dies at its call number ``count``: before it does its work, or after.

    If that call raises, as one that would block does, the process dies after the first later call that returns.
    """
    calls = itertools.count(1)

    def called(*args: Any, **kwargs: Any) -> Any:
        last = next(calls) >= count
        if last and before:
            _die()
        result = call(*args, **kwargs)
        if last:
            _die()
        return result

    return called


def _half_sent(peers: Peers, message: bytes) -> None:
    """The first of the others gets the message, and nobody else."""
    first = next(iter(peers._sockets.values()))
    with contextlib.suppress(OSError):
        first.send(message)
    _die()


def _half_reduced(reduction: TensorReduction, sources: Any, out: torch.Tensor) -> None:
    out[: out.numel() // 2] = 0.5
    _die()


def _late(count: int, call: Any, last: Any) -> Any:
    """The function, whose call number ``count`` is ``last`` in its stead."""
    calls = itertools.count(1)
    return lambda *args, **kwargs: (last if next(calls) >= count else call)(*args, **kwargs)


def prepare(kill: Kill) -> None:
    """Change what the library does in this process so that it is killed where it has to be."""
    n = kill.count
    match kill.point:
        case "sends half":
            Peers.send = _late(n, Peers.send, _half_sent)
        case "has sent":
            Peers.send = _after(n, Peers.send, before=False)
        case "exchanges":
            Peers.exchange = _after(n, Peers.exchange, before=False)
        case "receives":
            Peers._receive = _after(n, Peers._receive, before=False)
        case "reduces":
            TensorReduction.__call__ = _late(n, TensorReduction.__call__, _half_reduced)
        case "has reduced":
            TensorReduction.__call__ = _after(n, TensorReduction.__call__, before=False)
        case "puts":
            Staging.own_data = _after(n, Staging.own_data, before=False)
        case "announces memory":  # the descriptor does not follow, to one rank or more
            socket.send_fds = _after(1 + n % 7, socket.send_fds, before=True)
        case "takes memory":
            Peers._receive_memory = _after(1 + n % 4, Peers._receive_memory, before=bool(n % 2))
        case "knows nobody":  # it has said where it is
            rendezvous._addresses = _after(1, rendezvous._addresses, before=False)
        case "connects":
            name = "_connect" if kill.victim else "_hello"  # the first rank is the one that all others connect to
            setattr(rendezvous, name, _after(1, getattr(rendezvous, name), before=bool(n % 2)))
        case "has met":
            runtime.meet = _after(1, runtime.meet, before=False)
        case "makes the rest":
            runtime.make_gloo_group = _after(1, runtime.make_gloo_group, before=True)
        case "leaves":
            Peers.leave = _after(1, Peers.leave, before=False)
        case "leaves half":
            Peers.leave = lambda peers, reason=None: _half_sent(peers, MessageKind.LEAVE)
        case "closes":
            Peers.close = _after(1, Peers.close, before=False)
        case "after a time" | "leaves a child" | "leaves a loader":
            pass
        case _:
            raise AssertionError(kill)


IN_COLLECTIVES = ["sends half", "has sent", "exchanges", "receives", "reduces", "has reduced", "puts"]
IN_MEMORY = ["announces memory", "takes memory"]
AT_THE_BEGINNING = ["knows nobody", "connects", "has met", "makes the rest"]
AT_THE_END = ["leaves", "leaves half", "closes"]
WITH_CHILDREN = ["leaves a child", "leaves a loader"]
POINTS = ["after a time"] * 3 + IN_COLLECTIVES + IN_MEMORY + AT_THE_BEGINNING + AT_THE_END + WITH_CHILDREN


def victim(kill: Kill, world: int, port: int) -> None:
    prepare(kill)
    group = _group(kill, kill.victim, world, port)
    if kill.point == "after a time":
        threading.Timer(kill.count / 1000, _die).start()
    if kill.point in AT_THE_END + WITH_CHILDREN:
        group.allreduce([torch.ones(70_000)]).wait()
    if kill.point in AT_THE_END:
        group.shutdown()
    elif kill.point in WITH_CHILDREN:
        _fork(kill.point)
        _die()
    loop(group, kill.number)


def _fork(how: str) -> None:
    """Start a process that lives on for longer than the others may take to notice the death of this one."""
    warnings.simplefilter("ignore")  # of forking with threads
    if how == "leaves a loader":
        loader = torch.utils.data.DataLoader(range(100), num_workers=1, multiprocessing_context="fork")
        next(iter(loader))
    elif os.fork() == 0:
        time.sleep(2)
        os._exit(0)


def _group(kill: Kill, rank: int, world: int, port: int) -> Any:
    store = dist.PrefixStore(f"{kill.number}", dist.TCPStore("127.0.0.1", port, is_master=False))
    return ProcessGroupShm(store, rank, world, timedelta(seconds=TIMEOUT), ShmOptions(host=kill.hosts[rank]))


# --------------------------------------------------------------------------------------- survivors


def shared_maps() -> list[str]:
    """The memory of groups that this process maps, or has a descriptor of."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:lockstep" in line]
    fds = [target for target in _descriptors() if "memfd:lockstep" in target]
    return maps[:3] + fds[:3]


def _descriptors() -> list[str]:
    targets = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of listing them
            targets.append(os.readlink(each))
    return targets


def _threads() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("lockstep")}


def survive(kill: Kill, rank: int, world: int, port: int) -> Seen:
    """Run the loop until it raises, destroy the group, and look what is left."""
    before = len(_descriptors())
    error, when = "", 0.0
    group = None
    try:
        group = _group(kill, rank, world, port)
        if kill.point in AT_THE_END + WITH_CHILDREN:
            group.allreduce([torch.ones(70_000)]).wait()
        loop(group, kill.number)
    except Exception as raised:
        when = time.monotonic()
        kind, error = type(raised), str(raised)
    if group is not None:
        group.shutdown()
    del group
    gc.collect()
    left = shared_maps() + sorted(_threads())
    until = time.monotonic() + 2 * slowness()  # Gloo's own connections end in the background
    while (now := len(_descriptors())) > before and time.monotonic() < until:
        time.sleep(0.005)
    if now > before:
        left.append(f"{now - before} descriptors")
    return Seen(rank, kind.__name__, error, when, left)


def survivor(pipe: Any, world: int, port: int) -> None:
    importlib.import_module("lockstep")
    # What a process makes once, and keeps: connections to the store are there with each group.
    with contextlib.suppress(EOFError):
        while True:
            kill, rank = pipe.recv()
            pipe.send(survive(kill, rank, world, port))


# ------------------------------------------------------------------------------------- the driver


def _start(started: list[Any], function: Any, *args: Any) -> Any:
    process = _context.Process(target=function, args=args)
    process.start()
    started.append(process)
    return process


def run_kills(kills: list[Kill]) -> list[tuple[Kill, float, int, list[Seen]]]:
    """Run all; gives back when the victim of each was dead, its exit code, and what the others have seen."""
    world = len(kills[0].hosts)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, started, results = [], [], []
    try:
        for _ in range(world - 1):
            here, there = _context.Pipe()
            with there:
                _start(started, survivor, there, world, store.port)
            pipes.append(here)
        victims = (_start(started, victim, kill, world, store.port) for kill in kills)
        following = next(victims)
        for kill in kills:
            process, following = following, next(victims, None)  # the next one is on its way meanwhile
            others = [rank for rank in range(world) if rank != kill.victim]
            for pipe, rank in zip(pipes, others, strict=True):
                pipe.send((kill, rank))
            process.join(TIMEOUT * slowness())
            dead = time.monotonic()
            for pipe in pipes:
                if not pipe.poll(TIMEOUT * slowness()):
                    raise TimeoutError(f"{kill}: a survivor hangs; the victim's exit code is {process.exitcode}")
            results.append((kill, dead, process.exitcode, [pipe.recv() for pipe in pipes]))
            started.remove(process)
            process.close()
    finally:
        for pipe in pipes:
            pipe.close()
        for process in started:
            process.join(5 if len(results) == len(kills) else 0)
            process.kill()
            process.join()
            process.close()
    return results
