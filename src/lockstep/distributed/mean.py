"""The mean over the ranks of a program's own tensors, which autograd can go through: for ``torch.autograd.grad``."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from lockstep.distributed.agreement import Description, Line, agree, describe_tensor
from lockstep.distributed.collectives import Collectives, Group, resolve_group
from lockstep.distributed.reduction.second_order import Mean
from lockstep.errors import CommunicationError
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

    Communicates one all-gather of some bytes, which compares the shapes, another one if a tensor has a graph, and one
    all-reduce for each dtype and device; in each backward through it, the latter again. Waits for them. Every rank must
    call it, and run backward through it, equally often. Strides may differ. The means have a graph on every rank if a
    tensor of any rank has one, so that ``backward()`` goes through them on all.

    Raises:
        AgreementError: Ranks pass other shapes, dtypes or numbers of tensors, on every rank.
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
    graphs = agree(Description(lines), [1] if has_graph else [], collectives)
    joined = torch.empty(0, requires_grad=True) if any(graphs) else None
    means = Mean.apply(collectives, joined, *listed)
    return means[0] if isinstance(tensors, Tensor) else tuple(means)


def _described(tensor: Any) -> str:
    return describe_tensor(tensor, layout=False) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
