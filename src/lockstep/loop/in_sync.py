"""``check_in_sync()``: compares the parameters and buffers of all ranks, by digest."""

from torch.nn import Module, Parameter

from lockstep.arguments import check_module
from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks, describe_tensor
from lockstep.distributed.comm.collectives import Collectives, Group, resolve_group
from lockstep.distributed.reduction.values import find_difference
from lockstep.distributed.replication.replication import find_replication, replication_of
from lockstep.errors import CommunicationError, OptionError, OutOfSyncError
from lockstep.phases import Phases


def check_in_sync(module: Module, process_group: Group | None = None, *, every: int | None = None) -> None:
    """Raise, on every rank, if a parameter or buffer of ``module`` differs between ranks.

    Values are compared by a digest of their bits. The digest takes one pass over the module's memory, on its device.
    Call this function every few hundred steps, or before saving.

    With ``every=100``, every hundredth backward that synchronises compares the values, too: the parameters at that
    time, and the buffers as they were before forward (unless each rank has its own). If they differ, ``backward()``
    raises on every rank. The digest travels with the gradients; a single flipped bit always changes it. A module
    replicated with shares is compared at the end of every hundredth step, where the loop over the shares raises.

    Args:
        module: A module with the same names, shapes and dtypes on every rank, replicated or not. If a parameter is a
            ``DTensor``, its local part is compared.
        process_group: The ranks; if None, the group that the module is replicated over, or the default group.
        every: From now on also compare the values in every N-th round of a replicated module (or step with shares).
            Give the same number on all ranks. 0 ends it.

    Raises:
        OutOfSyncError: A value differs; names the first tensor, the ranks and both digests.
        AgreementError: Parameters, buffers or ``every`` differ between ranks.
        OptionError: ``module`` is not a module; ``every`` is negative, or is given with a group.
        NotReplicableError: ``every`` is given, and the module is not replicated.
        CommunicationError: There is no group, or a rank does not answer.

    Communicates one all-gather of 128 bytes for names and layouts, another one for values, and more if there is a
    difference. With ``every``, a round communicates one all-gather more if there is a difference.

    Example:
        >>> import torch, torch.distributed as dist
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> check_in_sync(torch.nn.Linear(3, 2), group)

    PyTorch has no such function.
    """
    check_module(module, "check_in_sync()")
    replication = find_replication(module)
    if every is not None:
        replication = replication_of(module, "check_in_sync")
        if every < 0 or process_group is not None:
            raise OptionError(
                f"check_in_sync() got every={every}{', and a group' if process_group is not None else ''}; expected a "
                "number of rounds, 0 or more, and no group: the module has one"
            )
    group = replication.group if process_group is None and replication is not None else resolve_group(process_group)
    if group is None:
        raise CommunicationError("there is no process group yet; call torch.distributed.init_process_group() first")
    collectives = Collectives(group, Phases())
    named = [*module.named_parameters(), *module.named_buffers()]
    lines = [Line(name, describe_tensor(tensor, layout=False)) for name, tensor in named]
    values = [(f"{'parameter' if isinstance(each, Parameter) else 'buffer'} {name}", each) for name, each in named]
    check_same_on_all_ranks([Line("check_in_sync(every=...)", str(every)), *lines], collectives)
    if every is not None and replication is not None:
        replication.watch_values(every)
    found = find_difference(values, collectives)
    if found is not None:
        raise OutOfSyncError(
            f"{found.name} is out of sync: digest {found.digests[0]} on rank {found.first}, "
            f"{found.digests[1]} on rank {found.rank}; something changed it on one rank only, such as an optimizer "
            "step on gradients that were not synchronised, or a random number that differs by rank"
        )
