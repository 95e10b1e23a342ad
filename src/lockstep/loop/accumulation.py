"""Gradient accumulation over micro-batches, and means over tokens instead of over ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import Module

from lockstep.distributed.replication.replication import replication_of
from lockstep.errors import OptionError


@contextmanager
def accumulate(module: Module, last: bool = True, weight: float | torch.Tensor | None = None) -> Iterator[None]:
    """One micro-batch: backward passes inside pile up gradients, and synchronise only if it is the ``last`` of a batch.

    With ``weight``, gradients become the mean over what is counted, on all ranks and in all micro-batches together,
    and not the mean of the ranks' means, which is another number wherever ranks or micro-batches count differently.
    Let the loss be a *sum* over tokens (or rows), and ``weight`` the number of them; then ``param.grad`` is the sum of
    all gradients divided by the sum of all weights, as one process with the whole batch would have it.

    Args:
        module: A module from :func:`lockstep.replicate`, or a :class:`lockstep.DistributedDataParallel`.
        last: Whether the backward pass inside synchronises.
        weight: What this rank's loss inside counts, of all backward passes together: a number or a tensor with one
            element, 0 or more. Weights are summed in float64, from the first block after a synchronisation to the one
            that synchronises, and over the ranks. Give one on every rank and in every micro-batch, or on none. It
            counts whether or not a backward inside reaches anything that is trained; not if an exception leaves the
            block before that.

    With weights, call ``zero_grad()`` before the first block, and not again until the last one has ended: gradients
    have to be None or zero when the first block begins, and to stay as they are between backward passes. The module
    must not change meanwhile.

    Communicates nothing of its own: weights ride with the gradients.

    Raises:
        OptionError: A weight is negative or not finite (at once). At the end of the backward that synchronises, on the
            rank that it concerns, while other ranks raise ``PeerError``: a weight is missing in some micro-batch, there
            were gradients when the first block began, they were changed since, or are not complete, or the module
            has changed. On every rank: a weight is missing on some rank.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(1, 1, bias=False), process_group=group)
        >>> for number, rows in enumerate([torch.ones(3, 1), 5 * torch.ones(1, 1)]):
        ...     with lockstep.accumulate(model, last=number == 1, weight=len(rows)):
        ...         model(rows).sum().backward()
        >>> model.weight.grad.item()  # (1 + 1 + 1 + 5) / 4
        2.0

    Stands for: ``no_sync()`` around all but the last micro-batch, and dividing by numbers that had to be all-reduced
    first.
    """
    replication = replication_of(module, "accumulate")
    if weight is not None:
        weight = float(weight)
        if not 0 <= weight < float("inf"):
            raise OptionError(f"accumulate() got a weight of {weight}; expected a finite number, 0 or more")
    with replication.accumulating(last, weight):
        yield
