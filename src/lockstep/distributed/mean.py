"""The mean over the ranks of a program's own tensors, which autograd can go through: for ``torch.autograd.grad``."""

from collections.abc import Sequence
from typing import Any, overload
from weakref import WeakMethod

import torch
from torch import Tensor

from lockstep.distributed.agreement import Description, Line, check_same_on_all_ranks, describe_tensor
from lockstep.distributed.collectives import Collectives, Group, resolve_group
from lockstep.distributed.reduction.graph import reach_of
from lockstep.distributed.reduction.modules import ScheduledModule
from lockstep.distributed.reduction.scheduler import scheduler_of
from lockstep.distributed.reduction.second_order import Mean, means_behind
from lockstep.errors import AgreementError, CommunicationError
from lockstep.phases import Phases


@overload
def mean_over_ranks(tensors: Tensor, process_group: Group | None = None) -> Tensor: ...
@overload
def mean_over_ranks(tensors: Sequence[Tensor], process_group: Group | None = None) -> tuple[Tensor, ...]: ...
def mean_over_ranks(tensors: Tensor | Sequence[Tensor], process_group: Group | None = None) -> Any:
    """The mean over the ranks of a tensor, or of each of several; differentiable any number of times.

    ``torch.autograd.grad`` gives this rank's gradients, also for a replicated module: nothing tells the library that
    they are meant to be shared. This makes them the mean, and a loss built on the result has the right gradients:
    backward averages the incoming gradients over the ranks, so that, with parameters whose gradients are averaged as
    well, it is the gradient of the mean over the ranks of their losses.

    Args:
        tensors: A tensor, or a sequence of them: floating or complex, of the same shapes and dtypes on every rank.
        process_group: The ranks; the default group if None.

    Returns:
        New tensors, of the same shapes and dtypes, as a tuple if a sequence was given.

    Communicates one all-gather of some bytes, which compares the shapes, another one if a tensor has a graph, a few
    more if it has on some ranks only, and one all-reduce for each dtype and device; in each backward through it, the
    latter again. Waits for them. Every rank must call it, and run backward through it, equally often: also
    ``torch.autograd.grad`` goes through all means behind its outputs, whether they lead to its inputs on this rank or
    not. Strides may differ. The means have a graph on every rank if a tensor of any rank has one, so that
    ``backward()`` goes through them on all.

    Raises:
        AgreementError: Ranks pass other shapes, dtypes or numbers of tensors, or tensors whose graph goes through
            earlier means on some ranks only, on every rank.
        CommunicationError: There is no group, or a rank does not answer.

    Example:
        >>> import torch, torch.distributed as dist
        >>> store = dist.HashStore()
        >>> group = dist.ProcessGroupGloo(store, 0, 1)
        >>> weight = torch.tensor([2.0], requires_grad=True)
        >>> (grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        >>> (shared,) = mean_over_ranks([grad], group)
        >>> shared.square().sum().backward()  # a gradient penalty
        >>> shared.item(), weight.grad.item()
        (12.0, 288.0)

    Stands for: ``torch.distributed.nn.functional.all_reduce`` divided by the world size.
    """
    group = resolve_group(process_group)
    if group is None:
        raise CommunicationError("there is no process group yet; call torch.distributed.init_process_group() first")
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    collectives = Collectives(group, Phases())
    lines = [Line("the number of tensors given to mean_over_ranks()", str(len(listed)))]
    lines += [Line(f"tensor {n} given to mean_over_ranks()", _described(each)) for n, each in enumerate(listed)]
    has_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in listed if isinstance(tensor, Tensor))
    graphs = check_same_on_all_ranks(
        Description(lines), [1, means_behind(listed, group)] if has_graph else [], collectives
    )
    _check_earlier_means([row[1] if row else 0 for row in graphs], collectives)
    joined = [torch.empty(0, requires_grad=True)] if any(graphs) else []
    modules = _modules_behind(listed if has_graph else [], collectives) if any(graphs) and not all(graphs) else []
    reached = [WeakMethod(each.reached) for each in modules]
    *means, _ = Mean.apply(collectives, reached, len(joined), *joined, *listed)
    return means[0] if isinstance(tensors, Tensor) else tuple(means)


def _check_earlier_means(counts: Sequence[int], collectives: Collectives) -> None:
    """Raise, on every rank, if a pass through the new means would go on through others on some ranks only."""
    for rank, count in zip(collectives.global_ranks, counts, strict=True):
        if count != counts[0]:
            raise AgreementError(
                f"mean_over_ranks() got tensors whose graph goes through {counts[0]} earlier mean(s) over the ranks on "
                f"rank {collectives.global_ranks[0]}, and through {count} on rank {rank}. Going back through those "
                "takes all ranks, and where gradients are constant there is no way to them: use "
                "backward(create_graph=True) in place of torch.autograd.grad and mean_over_ranks()"
            )


def _modules_behind(tensors: Sequence[Tensor], collectives: Collectives) -> list[ScheduledModule]:
    """The replicated modules to whose parameters these tensors lead on any rank, some of which have no graph."""
    modules = scheduler_of(collectives.group).modules
    known = dict(zip(modules.ids(), modules, strict=True))
    reach = reach_of({"tensors": tensors, "accumulate_grad": True})
    numbers = [number for number, module in known.items() if module.is_within(reach, False)]
    found = {number for row in check_same_on_all_ranks(Description([]), numbers, collectives) for number in row}
    return [known[number] for number in sorted(found & known.keys())]


def _described(tensor: Any) -> str:
    return describe_tensor(tensor, layout=False) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
