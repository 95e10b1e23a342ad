"""Lets replicas that share an accelerator take turns: on the host, they run one after the other.

An accelerator has one random generator. Code that reads the generator's state in forward and restores it in backward,
such as activation checkpointing, gets the same numbers again only if no other replica draws between the reading and the
drawing; and fused operations draw without any hook. So on each accelerator only one replica runs at a time, in the
order of the list. It lets the next one run when it ends, or when it waits for the others at a meeting
(:mod:`~lockstep.local.exchange`), which must not be inside a checkpointed segment. The device does its work in one
order in any case. CPU replicas have random streams of their own (:mod:`~lockstep.local.random_streams`) and never wait.
"""

import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch


class Turns:
    """The replicas on one accelerator. One of them runs at a time; at first all want to run, and the first one
    begins."""

    def __init__(self, replicas: Collection[int]) -> None:
        self._alone = len(replicas) < 2  # then nothing waits
        self._changed = threading.Condition()
        self._wanting = set(replicas)
        self._running = False

    @contextmanager
    def taken(self, replica: int) -> Iterator[None]:
        """Wait until ``replica`` may run, and keep the others from running inside the block."""
        self._take(replica)
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def given_up(self, replica: int) -> Iterator[None]:
        """Let other replicas run inside the block, which is inside a :meth:`taken` block."""
        self._end()
        try:
            yield
        finally:
            self._take(replica)

    def _take(self, replica: int) -> None:
        if self._alone:
            return
        with self._changed:
            self._wanting.add(replica)
            self._changed.wait_for(lambda: not self._running and min(self._wanting) == replica)
            self._wanting.discard(replica)
            self._running = True

    def _end(self) -> None:
        if self._alone:
            return
        with self._changed:
            self._running = False
            self._changed.notify_all()


_NO_TURNS = Turns(())


def turns_on(devices: Sequence[torch.device | None]) -> list[Turns]:
    """Return the turns that each replica takes, given their devices; None stands for a replica that never waits."""
    sharing: dict[torch.device, list[int]] = defaultdict(list)
    for index, device in enumerate(devices):
        if device is not None and device.type != "cpu":
            sharing[device].append(index)
    turns: dict[torch.device | None, Turns] = {device: Turns(replicas) for device, replicas in sharing.items()}
    return [turns.get(device, _NO_TURNS) for device in devices]
