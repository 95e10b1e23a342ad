"""``check_in_sync()``: compares the parameters and buffers of all ranks, by digest."""

from typing import Never

from torch.nn import Module, Parameter

from lockstep._base.arguments import check_module, did_you_mean
from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks, describe_tensor
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.groups import Group, needed_group
from lockstep.distributed.reduction.module.equal_values import compare
from lockstep.distributed.replication.replication import find_replication, own_names
from lockstep.errors import OutOfSyncError, UnknownOptionError
from lockstep.phases import Phases


def check_in_sync(module: Module, process_group: Group | None = None, **unknown: Never) -> None:
    """Raise, on every rank, if a parameter or buffer of ``module`` differs between ranks.

    Values are compared by a digest of their bits. The digest takes one pass over the module's memory, on its device.
    A single flipped bit always changes it. Call this function before saving, or in every hundredth step::

        if run.step % 100 == 0:
            check_in_sync(model)

    What a replicated module leaves to each rank is not compared: ``ignored_modules``, ``params_and_buffers_to_ignore``,
    and buffers with ``buffer_policy="local"``. Nor are buffers after a batch that has failed or was left out: they are
    made equal with the next one.

    Args:
        module: A module with the same names, shapes and dtypes on every rank, replicated or not. If a parameter is a
            ``DTensor``, its local part is compared.
        process_group: The ranks; if None, the group that the module is replicated over, or the default group.

    Raises:
        OutOfSyncError: A value differs; names the first tensor, the ranks and both digests.
        AgreementError: Parameters or buffers differ between ranks.
        OptionError: ``module`` is not a module.
        UnknownOptionError: Another keyword argument is given (a ``TypeError``).
        CommunicationError: There is no group, or a rank does not answer.

    Communicates one all-reduce of 4 KiB for names and layouts, another one for values, and more if there is a
    difference.

    Example:
        >>> import torch, torch.distributed as dist
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> check_in_sync(torch.nn.Linear(3, 2), group)

    PyTorch has no such function.
    """
    for name in unknown:
        raise UnknownOptionError(
            f"check_in_sync() got an unexpected keyword argument {name!r}; "
            f"{did_you_mean(name, ('module', 'process_group'))}. It compares values when it is called; in every N-th "
            "step of a loop: if run.step % N == 0: check_in_sync(model)"
        )
    check_module(module, "check_in_sync()")
    replication = find_replication(module)
    of_module = replication.group if process_group is None and replication is not None else process_group
    collectives = Collectives(needed_group(of_module), Phases())
    own = own_names(module, module)
    failed = (each for each in module.modules() if (its := find_replication(each)) and its.has_local_buffers)
    local = {id(buffer) for each in failed for buffer in each.buffers()}
    named = [each for each in (*module.named_parameters(), *module.named_buffers()) if each[0] not in own]
    named = [each for each in named if id(each[1]) not in local]
    lines = [Line(name, describe_tensor(tensor, layout=False)) for name, tensor in named]
    values = [(f"{'parameter' if isinstance(each, Parameter) else 'buffer'} {name}", each) for name, each in named]
    check_same_on_all_ranks(lines, collectives)
    found = compare(values, collectives)
    if found is not None:
        raise OutOfSyncError(
            f"{found}; something changed it on one rank only, such as an optimizer "
            "step on gradients that were not synchronised, or with another learning rate, or a random number that "
            "differs by rank. To leave out a tensor of which each rank has its own, such as a moving average, pass its "
            "module to replicate(ignored_modules=[...])"
        )
