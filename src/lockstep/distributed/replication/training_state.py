"""Saves and loads the training state of a replicated module; names the entries that each rank has for itself."""

from typing import Any

from torch.nn import Module

from lockstep.distributed.replication.replication import find_replication, replication_of


def own_names(module: Module, inner: Module) -> set[str]:
    """Return the names of parameters and buffers in ``inner`` (the module, or the wrapped one) that are not replicated.

    These are the ones that a replicated module at or below it leaves out (``ignored_modules``,
    ``params_and_buffers_to_ignore``), and its buffers under the policy ``"local"``.
    """
    own: set[int] = set()
    shared: set[int] = set()
    for each in module.modules():
        replication = find_replication(each)
        if replication is not None:
            kept, equal = replication.own_and_replicated()
            own.update(map(id, kept))
            shared.update(map(id, equal))
    named = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    return {name for name, tensor in named if id(tensor) in own - shared}


def training_state_dict(module: Module) -> dict[str, Any]:
    """Return the state that training resumes from, besides the ``state_dict`` of the module and the optimizer.

    Args:
        module: A module from :func:`lockstep.replicate`, or a :class:`lockstep.DistributedDataParallel`.

    Returns:
            The round's number, the bucket plan as JSON, and the state of each communication hook: its ``state_dict()``
            if it has one, else its attributes without process groups. Hook states may differ between ranks (error
            feedback of PowerSGD), so save one for each rank. ``torch.save`` and distributed checkpoints can store it.

    Communicates nothing.

    Raises :class:`NotReplicableError` for a module that is not replicated.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(2, 1), process_group=group)
        >>> training_state_dict(model)["round"]
        0

    Stands for: pickling the state of a communication hook by hand, as PyTorch's documentation shows for PowerSGD.
    """
    return replication_of(module, "training_state_dict").training_state()


def load_training_state_dict(module: Module, state_dict: dict[str, Any]) -> None:
    """Load a state returned by :func:`training_state_dict`, on every rank.

    Register the same hooks in the same order before. A module that is not set up yet loads it then. Communicates
    nothing now; a plan that is new to the module is compared among the ranks, in one small all-gather, before it is
    used.

    Raises :class:`NotReplicableError` or :class:`LayoutError` if the state is of other hooks or of another module.

    Stands for: the counterpart of :func:`training_state_dict`.
    """
    replication_of(module, "load_training_state_dict").restore(state_dict)
