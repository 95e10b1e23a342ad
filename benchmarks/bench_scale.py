"""Claim: nothing that a step does grows with the number of ranks.

One process is a rank of a group of 2 to 65,536 ranks that sends nothing (PyTorch's ``fake`` backend). What a sum over
ranks that say the same would give is written into the report, so that a step does what it does in a real group. Printed
are the CPU times of one rank: making replicas, the first step, a settled step, steps of a loop over batches that ends,
a comparison of weights, a sharded step; and the size of the report. Each world has a process of its own; worlds take
turns, and medians over the rounds are printed, with the ratio to the smallest world. Not in it: the time of messages,
which grows with the network, and what other ranks do.

Then one rank's channel of failures, in a world of up to 32,768 ranks: its two neighbours in the ring are sockets on
which another process sends what they would pass on, when a session begins (where each rank is) and when it ends (that
each has left). Printed are the seconds, and this rank's CPU time.

Then as many processes as there are ranks, up to 32 on this host, train in a session. Printed are the seconds from
entering the session until the slowest rank is in it, and from leaving it until all have left; the CPU time of a rank in
a settled step; and the descriptors of a rank (the median: one hosts the store), both also with PyTorch's DDP on Gloo.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
from harness import arguments, ratio, table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WORLDS = (2, 64, 1024, 8192, 65536)
CHANNEL_WORLDS = (64, 1024, 8192, 32768)
REAL_WORLDS = (2, 4, 8, 16, 32)


def timed(call: Callable[[], object], count: int = 1) -> float:
    """Return the median CPU time of calls, in milliseconds."""
    times = []
    for _ in range(count):
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return 1e3 * median(times)


class Arrived:
    """A collective that is over."""

    def wait(self) -> None:
        """Return at once."""


_arrived: dict[int, Tensor] = {}


def arrive(_: object, output: Tensor, *__: object) -> Arrived:
    """Return a gather that is over, of zeros: memory that has had them keeps them, as a network writes by itself."""
    if output.data_ptr() not in _arrived:
        _arrived[output.data_ptr()] = output.zero_()
    return Arrived()


def sum_as_ranks_that_say_the_same() -> None:
    """Let all-reduces of what ranks compare give what they would if all ranks had sent the same."""
    from lockstep.distributed.comm import agreement
    from lockstep.distributed.comm.collectives import Collectives
    from lockstep.distributed.reduction.report.status import ReportLayout

    read = ReportLayout.read

    def read_sum(layout: ReportLayout, row: Tensor) -> object:
        with torch.no_grad():
            row[: layout.packed_buffers.start].mul_(dist.get_world_size())
        return read(layout, row)

    ReportLayout.read = read_sum  # type: ignore[method-assign]
    agreement.are_alike = lambda sums, ranks: True
    # The fake group copies what this rank sends to the place of each other rank, which the network does in a real one.
    Collectives.all_gather_flat = arrive  # type: ignore[method-assign,assignment]


def one_world(world: int, layers: int, count: int) -> None:
    """Print what one rank of a world measures."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    import lockstep

    sum_as_ranks_that_say_the_same()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    x = torch.randn(4, 64)
    found = {"replicate": timed(lambda: lockstep.replicate(model))}

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    def loop() -> None:
        for batch in lockstep.batches([x] * 3):
            model.zero_grad()
            model(batch).sum().backward()

    found["first step"] = timed(step)
    timed(step, 5)
    found["step"] = timed(step, count)
    found["batches of 3 steps"] = timed(loop, 3)
    found["check_in_sync"] = timed(lambda: lockstep.check_in_sync(model), 3)
    optimizer = lockstep.shard_optimizer(torch.optim.AdamW(model.parameters()))
    step()
    found["first sharded step"] = timed(optimizer.step)
    times = []
    for _ in range(max(3, count // 4)):
        step()
        times.append(timed(optimizer.step))
    found["sharded step"] = median(times)
    print(json.dumps(found), flush=True)


def channel_of(world: int) -> None:
    """Print what the channel of rank 0 takes to begin and to end, in seconds and CPU seconds."""
    from lockstep.failures import channel
    from lockstep.failures.progress import Progress
    from lockstep.failures.ring import Connection, Place

    (next_here, next_there), (previous_here, previous_there) = socket.socketpair(), socket.socketpair()
    begin, end = os.pipe()
    feeder = os.fork()
    if feeder == 0:
        next_here.close()
        previous_here.close()
        for number, kind in enumerate(("here", "left")):
            if number:
                os.read(begin, 1)
            orders = range(1, world // 2 + 1), range(world - 1, world // 2, -1)  # each message comes the shorter way
            both = [
                threading.Thread(target=pass_on, args=(each, order, kind, number))
                for each, order in zip((next_there, previous_there), orders, strict=True)
            ]
            for each in both:
                each.start()
            for each in both:
                each.join()
        os.read(begin, 1)
        os._exit(0)
    next_there.close()
    previous_there.close()
    own = Place("h0", "node0", os.getpid(), "127.0.0.1", 1)
    ring = (Connection(next_here, 1, 20), Connection(previous_here, world - 1, 20))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with mock.patch.object(channel.FailureChannel, "_meet_neighbours", return_value=(ring, listener, own)):
        wall, cpu = time.perf_counter(), time.process_time()
        made = channel.FailureChannel(dist.HashStore(), 0, range(world), Progress("bench", 0, world), "h0", 30.0)
    found = {"start": time.perf_counter() - wall, "start, CPU": time.process_time() - cpu}
    wall, cpu = time.perf_counter(), time.process_time()
    os.write(end, b"x")
    made.announce_end()
    assert made.wait_for_others(30.0)
    found |= {"end": time.perf_counter() - wall, "end, CPU": time.process_time() - cpu}
    print(json.dumps(found), flush=True)
    os.write(end, b"x")
    os.waitpid(feeder, 0)
    os._exit(0)


def pass_on(there: socket.socket, ranks: range, kind: str, number: int) -> None:
    """Send a message of each rank, and read whatever comes."""
    from lockstep.failures.failure import Failure, Kind
    from lockstep.failures.ring import Place

    threading.Thread(target=read_all, args=(there,), daemon=True).start()
    for rank in ranks:
        message: dict[str, object] = {"kind": kind, "id": [rank, 1 + number]}
        if kind == "here":
            place = Place(f"host{rank // 8}", f"node{rank // 8}", 1000 + rank, "10.0.0.1", 1234)
            message |= {"rank": rank, "place": asdict(place)}
        else:
            message["failure"] = asdict(Failure(rank, Kind.LEFT, 3, "tear-down", ""))
        data = json.dumps(message).encode()
        there.sendall(struct.pack("<I", len(data)) + data)


def read_all(there: socket.socket) -> None:
    while there.recv(1 << 20):
        pass


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def network(layers: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))


def in_session(device: str, backend: str, layers: int, count: int) -> dict[str, float]:
    """What one of several processes measures; times are those of a clock that all have."""
    import lockstep

    before, begun = descriptors(), time.monotonic()
    with lockstep.session(device=device, backend=backend) as run:
        entered = time.monotonic()
        cpu = settled_step(lockstep.replicate(network(layers)()), count)
        held = descriptors() - before
        run.agree(False)
        leaving = time.monotonic()
    left = time.monotonic()
    return {"begun": begun, "entered": entered, "step": cpu, "held": held, "leaving": leaving, "left": left}


def with_ddp(device: str, backend: str, layers: int, count: int) -> dict[str, float]:
    before = descriptors()
    dist.init_process_group(backend)
    cpu = settled_step(DistributedDataParallel(network(layers)(), gradient_as_bucket_view=True), count)
    held = descriptors() - before
    dist.destroy_process_group()
    return {"step": cpu, "held": held}


def settled_step(model: nn.Module, count: int) -> float:
    """Return the CPU time of a step, in milliseconds."""
    x = torch.randn(4, 64)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    timed(step, 5)
    return timed(step, count)


def real_world(world: int, layers: int, count: int) -> list[str]:
    """Return a row of the table of real ranks."""
    import gpu_ranks

    ended = gpu_ranks.run(in_session, world, "cpu", "shm", layers, count, limit=200)
    plain = gpu_ranks.run(with_ddp, world, "cpu", "gloo", layers, count, limit=200)
    if any(each.code for each in (*ended, *plain)):
        raise RuntimeError(f"{world} ranks: {[*ended, *plain]}")
    of = {name: [each.result[name] for each in ended] for name in ended[0].result}
    starts, ends = max(of["entered"]) - max(of["begun"]), max(of["left"]) - max(of["leaving"])
    steps = median(of["step"]), median(each.result["step"] for each in plain)
    held = median(of["held"]), median(each.result["held"] for each in plain)
    return [
        str(world),
        f"{starts:.2f}",
        f"{ends:.2f}",
        *(f"{each:.1f}" for each in steps),
        *(f"{each:.0f}" for each in held),
    ]


def apart(what: str, *args: int) -> dict[str, float]:
    """Return what a process of its own prints last."""
    command = [sys.executable, __file__, what, *map(str, args)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    args = arguments(__doc__, 3)
    layers, count = (10, 4) if args.quick else (100, 40)
    worlds, channels, real = WORLDS, CHANNEL_WORLDS, REAL_WORLDS
    if args.quick:
        worlds, channels, real = worlds[:2], channels[:2], real[:2]
    times: dict[int, list[dict[str, float]]] = {world: [] for world in worlds}
    for number in range(args.rounds):
        for world in worlds if number % 2 == 0 else worlds[::-1]:
            times[world].append(apart("--one", world, layers, count))
    medians = {world: {name: median(each[name] for each in rows) for name in rows[0]} for world, rows in times.items()}
    smallest = medians[worlds[0]]
    rows = [
        [f"{world:,}", *(f"{value:.1f} ({value / smallest[name]:.2f})" for name, value in found.items())]
        for world, found in medians.items()
    ]
    headers = ["ranks", *(f"{name}, ms" for name in smallest)]
    table("CPU time of one rank, and its ratio to the smallest world", headers, rows)
    smallest, largest = (medians[world] for world in (worlds[0], worlds[-1]))
    for name in ("step", "replicate", "sharded step"):
        ratio(f"{name} of {worlds[-1]:,} ranks over that of {worlds[0]}", largest[name], smallest[name])
    from lockstep.distributed.reduction.report.status import ReportLayout

    sizes = {world: 4 * ReportLayout(0, 0, world, 0, torch.float32).numel for world in worlds}
    print(f"bytes of the report, without used and late parameters: {sizes}")
    rows = [[f"{world:,}", *(f"{value:.2f}" for value in apart("--channel", world).values())] for world in channels]
    table("the channel of one rank, in seconds", ["ranks", "start", "start, CPU", "end", "end, CPU"], rows)
    headers = ["ranks", "start, s", "end, s", "CPU of a step, ms", "DDP's, ms", "descriptors", "DDP's"]
    rows = [real_world(world, layers, count) for world in real]
    table("processes on this host, each a rank in a session on shm; and with DDP on Gloo", headers, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one_world(*map(int, sys.argv[2:]))
    elif sys.argv[1:2] == ["--channel"]:
        channel_of(int(sys.argv[2]))
    else:
        main()
