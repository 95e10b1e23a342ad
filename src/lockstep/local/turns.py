"""Replicas that share an accelerator run one after the other on the host.

An accelerator has one random generator. What reads its state in forward and sets it again in backward, as activation
checkpointing does, gets the same numbers again only if no other replica draws between its reading and its drawing; and
fused operations draw without asking anybody. So of the replicas on one accelerator one runs at a time, in the order of
the list, and lets the next one run when it ends or waits for the others at a meeting
(:mod:`~lockstep.local.exchange`), where no checkpointed segment may be. The device does its work in one order in any
case. CPU replicas have streams of their own (:mod:`~lockstep.local.random_streams`), and wait for nobody.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Turns:
    """Who of the replicas on one accelerator runs. Before they start all want to, the first of them first."""

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
        """Let the next one run."""
        with self._changed:
            self._running = None
            self._changed.notify_all()


class Turn:
    """One replica's turn, if it has others on its accelerator; if not, nothing waits."""

    def __init__(self, turns: Turns | None, replica: int) -> None:
        self._turns, self._replica = turns, replica

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within the block, no other replica on this accelerator runs."""
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
        """Within the block, which is inside of :meth:`taken`, others may run."""
        if self._turns is None:
            yield
            return
        self._turns.end()
        try:
            yield
        finally:
            self._turns.take(self._replica)


def turns_on(devices: Sequence[torch.device | None]) -> list[Turn]:
    """The turn of each replica, given their devices; None for one that waits for nobody."""
    sharing: dict[torch.device, list[int]] = {}
    for index, device in enumerate(devices):
        if device is not None and device.type != "cpu":
            sharing.setdefault(device, []).append(index)
    turns = {device: Turns(replicas) for device, replicas in sharing.items() if len(replicas) > 1}
    return [Turn(turns.get(device) if device is not None else None, index) for index, device in enumerate(devices)]
