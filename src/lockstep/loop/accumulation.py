"""Gradient accumulation over micro-batches, and means over tokens instead of over ranks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn import Module

from lockstep.distributed.replication.replication import replication_of, replications, replications_in
from lockstep.errors import OptionError


@contextmanager
def accumulate(module: Module, last: bool = True, weight: float | torch.Tensor | None = None) -> Iterator[None]:
    """Run forward and backward of one micro-batch inside: gradients accumulate, and only the ``last`` one synchronises.

    With ``weight``, ``param.grad`` becomes the sum of all gradients divided by the sum of all weights, over all ranks
    and all micro-batches: the gradient of one process with the whole batch. Let the loss be a *sum* over tokens (or
    rows), and let ``weight`` be their number. (Without weights it is the mean of the ranks' means, which is different
    if ranks or micro-batches have different numbers of tokens.)

    Args:
        module: A module from :func:`lockstep.replicate`, or a :class:`lockstep.DistributedDataParallel`. One inside of
            it that is replicated by itself needs a block of its own, with the same backward.
        last: True if the backward pass inside synchronises.
        weight: The number of tokens (or rows) in this rank's loss inside the block, over all its backward passes, or
            the sum of their class weights: a number or a tensor with one element, 0 or more. A tensor on an accelerator
            is read at once, for which the host waits in every block until the device has computed it: count on the CPU.
            Weights are summed in float64, over the ranks and over all blocks since the last synchronisation. Give a
            weight on every rank and in every micro-batch, or nowhere. It counts even if no backward inside reaches a
            trained parameter, except if one has failed, or an exception leaves the block, before that.

    With weights, call ``zero_grad()`` before the first block and not again until the last block has ended. Gradients
    must be None or zero when the first block begins. Do not change the gradients or the module between the blocks.

    Communicates nothing of its own: weights travel with the gradients.

    Raises:
        OptionError: A weight is negative or not finite (raised at once). A weight is missing on some rank (raised on
            every rank). A weight is missing in some micro-batch, there were gradients when the first block began, they
            were changed since or are not complete, the module has changed, or a module inside that is replicated by
            itself has no weight (raised at the end of the backward that synchronises, on that rank; other ranks raise
            ``PeerError``).

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(1, 1, bias=False), process_group=group)
        >>> for number, rows in enumerate([torch.ones(3, 1), 5 * torch.ones(1, 1)]):
        ...     with lockstep.accumulate(model, last=number == 1, weight=len(rows)):
        ...         model(rows).sum().backward()
        >>> model.weight.grad.item()  # (1 + 1 + 1 + 5) / 4
        2.0

    Stands for: ``no_sync()`` around all micro-batches except the last, and a division by all-reduced counts.
    """
    replication = replication_of(module, "accumulate")
    if weight is not None:
        weight = float(weight)
        if not 0 <= weight < float("inf"):
            raise OptionError(f"accumulate() got a weight of {weight}; expected a finite number, 0 or more")
    with ExitStack() as stack:
        if weight is not None and len(list(replications())) > 1:
            for _, inner in replications_in(module):
                if inner is not replication:
                    stack.enter_context(inner.needing_weight())
        stack.enter_context(replication.accumulating(last, weight))
        yield
