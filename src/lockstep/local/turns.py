"""Lets replicas that share an accelerator take turns: on the host, they run one after the other.

An accelerator has one random generator. Code that reads the generator's state in forward and restores it in backward,
such as activation checkpointing, gets the same numbers again only if no other replica draws between the reading and the
drawing; and fused operations draw without any hook. So on each accelerator only one replica runs at a time, in the
order of the list. It lets the next one run when it ends, or when it waits for the others at a meeting
(:mod:`~lockstep.local.exchange`), which must not be inside a checkpointed segment. The device does its work in one
order in any case. CPU replicas have random streams of their own (:mod:`~lockstep.local.random_streams`) and never wait.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Turns:
    """The replicas on one accelerator. One of them runs at a time; at first all want to run, and the first one
    begins."""

    def __init__(self, replicas: Sequence[int]) -> None:
        self._changed = threading.Condition()
        self._wanting = set(replicas)
        self._running: int | None = None

    def take(self, replica: int) -> None:
        """Wait until ``replica`` may run."""
        with self._changed:
            self._wanting.add(replica)
            self._changed.wait_for(lambda: self._running is None and min(self._wanting) == replica)
            self._wanting.discard(replica)
            self._running = replica

    def end(self) -> None:
        """Let the next replica run."""
        with self._changed:
            self._running = None
            self._changed.notify_all()


class Turn:
    """The turn of one replica; if no other replica is on its accelerator, nothing waits."""

    def __init__(self, turns: Turns | None, replica: int) -> None:
        self._turns = turns
        self._replica = replica

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Keep all other replicas on this accelerator from running inside the block."""
        if self._turns is None:
            yield
            return
        self._turns.take(self._replica)
        try:
            yield
        finally:
            self._turns.end()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Let other replicas run inside the block, which is inside a :meth:`taken` block."""
        if self._turns is None:
            yield
            return
        self._turns.end()
        try:
            yield
        finally:
            self._turns.take(self._replica)


def turns_on(devices: Sequence[torch.device | None]) -> list[Turn]:
    """Return the turn of each replica, given their devices; None stands for a replica that never waits."""
    sharing: dict[torch.device, list[int]] = {}
    for index, device in enumerate(devices):
        if device is not None and device.type != "cpu":
            sharing.setdefault(device, []).append(index)
    turns = {device: Turns(replicas) for device, replicas in sharing.items() if len(replicas) > 1}
    return [Turn(turns.get(device) if device is not None else None, index) for index, device in enumerate(devices)]
