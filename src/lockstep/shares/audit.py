"""``audit()``: computes shares again on other ranks, and compares their bits."""

from torch.nn import Module

from lockstep.distributed.replication.replication import replication_of
from lockstep.errors import OptionError
from lockstep.shares.share_replication import ShareReplication


def audit(model: Module, every: int | None = 100) -> None:
    """From the next iteration over batches on, let another rank compute a random share again in one of ``every`` steps.

    Gradients and buffers are compared bit by bit with the first results. That finds silent corruption of data, a
    processor that computes wrongly, and kernels that are not deterministic. A single rank computes the share again
    itself, which finds kernels that are not deterministic.

    On the rank that computes a share again, the loop over the batch's shares runs once more, with that share's rows. If
    the loop sums losses, for example, it has to check ``batch.is_auditing``, or they count twice. The seed of the
    batches determines the steps, shares and ranks. An audited step takes the time of one share more.

    Args:
        model: A module from ``lockstep.replicate(model, shares=...)``; all modules of a step are audited together.
        every: One of ``every`` steps is audited, on average. None ends the audits. Give the same on every rank.

    Communicates, in such a step, an all-reduce of 4 KiB, and others of about 25 bytes for each parameter and
    buffer.

    Raises:
        OptionError: ``every`` is not a whole number above 0, or the module is replicated without shares.
        AuditError: At the end of a loop over shares, on every rank: bits differ. Names the ranks, the share, and the
            first parameter or buffer.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(1, 1), shares=2, process_group=group)
        >>> lockstep.shares.audit(model, every=1)
        >>> rows = torch.utils.data.TensorDataset(torch.ones(4, 1))
        >>> batch = next(iter(lockstep.shares.GlobalBatches(rows, batch_size=4, shares=2, process_group=group)))
        >>> [batch.is_auditing for (x,) in batch if model(x).sum().backward() is None]
        [False, False, True]

    PyTorch has no such function.
    """
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise OptionError(f"audit(): every is a whole number above 0, or None, got {every!r}")
    replication = replication_of(model, "audit")
    if not isinstance(replication, ShareReplication):
        raise OptionError("audit() got a module that is replicated without shares; use replicate(model, shares=...)")
    replication.audit(every)
