"""``check_in_sync()``: compares the parameters, buffers and optimizers of all ranks, by digest."""

from typing import Never

from torch.nn import Module
from torch.optim import Optimizer

from lockstep._base.arguments import check_module, did_you_mean
from lockstep._base.compiler import outside_compiler
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.groups import Group, needed_group
from lockstep.distributed.replication.in_sync import (
    check_alike,
    check_same_layouts,
    group_of,
    names_of_parameters,
    state_of,
    values_of,
)
from lockstep.errors import UnknownOptionError
from lockstep.phases import Phases


@outside_compiler
def check_in_sync(*objects: Module | Optimizer | Group, process_group: Group | None = None, **unknown: Never) -> None:
    """Raise, on every rank, if modules or optimizers differ between ranks.

    All values of a module are compared, by a digest of their bits, which takes one pass over the module's memory, on
    its device. A single flipped bit always changes it. Of an optimizer all numbers in its ``param_groups`` are
    compared, and, if it is PyTorch's own and not sharded, the tensors of its state::

        check_in_sync(model, optimizer)

    In each step lockstep compares a part of that by itself. What a replicated module leaves to each rank is not
    compared: ``ignored_modules``, ``params_and_buffers_to_ignore``, and buffers with ``buffer_policy="local"``. Nor are
    buffers after a batch that has failed or was left out: they are made equal with the next one.

    Args:
        objects: Any number of modules with the same names, shapes and dtypes on every rank, replicated or not, and of
            optimizers. If a parameter is a ``DTensor``, its local part is compared.
        process_group: The ranks; if None, the group that the first module is replicated over, or the default group.
            It may also be the last positional argument.

    Raises:
        OutOfSyncError: A value or a number differs; names the first ones, the ranks and the digests.
        AgreementError: Parameters or buffers differ between ranks.
        OptionError: An object is neither a module nor an optimizer.
        UnknownOptionError: Another keyword argument is given (a ``TypeError``).
        CommunicationError: There is no group, or a rank does not answer.

    Communicates one all-reduce of 4 KiB for names and layouts, another one for values, one for the numbers of
    optimizers, and more if there is a difference.

    Example:
        >>> import torch, torch.distributed as dist
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = torch.nn.Linear(3, 2)
        >>> check_in_sync(model, torch.optim.SGD(model.parameters()), process_group=group)

    PyTorch has no such function.
    """
    for name in unknown:
        raise UnknownOptionError(
            f"check_in_sync() got an unexpected keyword argument {name!r}; "
            f"{did_you_mean(name, ('module', 'process_group'))}. It compares values when it is called; in every N-th "
            "step of a loop: if run.step % N == 0: check_in_sync(model)"
        )
    if len(objects) > 1 and not isinstance(objects[-1], Module | Optimizer) and hasattr(objects[-1], "rank"):
        objects, process_group = objects[:-1], objects[-1]
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    modules = [each for each in objects if not isinstance(each, Optimizer)]
    for each in modules if objects else [None]:
        check_module(each, "check_in_sync()")
    group = group_of(modules, optimizers) if process_group is None else process_group
    collectives = Collectives(needed_group(group), Phases())
    values = [
        each
        for number, module in enumerate(modules)
        for each in values_of(module, f" of module {number} ({type(module).__name__})" if len(modules) > 1 else "")
    ]
    check_same_layouts(values, collectives, "check_in_sync()")
    names = names_of_parameters(modules)
    values += [each for optimizer in optimizers for each in state_of(optimizer, names)]
    check_alike(
        values,
        optimizers,
        collectives,
        "To leave out a tensor of which each rank has its own, such as a moving average, pass its module to "
        "replicate(ignored_modules=[...])",
    )
