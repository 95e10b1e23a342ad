"""``mean_over_ranks()``: the differentiable mean of tensors over the ranks, for ``torch.autograd.grad``."""

from collections.abc import Mapping, Sequence
from typing import Any, overload
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks, describe_tensor
from lockstep.distributed.comm.collectives import Collectives, Group, resolve_group
from lockstep.distributed.reduction.engine import BackwardPass, current_pass
from lockstep.distributed.reduction.graph import MEANS, MeanInPass, ReachableLeaves, mark_output, means_behind, reach_of
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.reduction.scheduler import scheduler_of
from lockstep.dtensors import like_parameter, local_part
from lockstep.errors import AgreementError, CommunicationError, PeerError
from lockstep.phases import Phases


@overload
def mean_over_ranks(tensors: Tensor, process_group: Group | None = None) -> Tensor: ...
@overload
def mean_over_ranks(tensors: Sequence[Tensor], process_group: Group | None = None) -> tuple[Tensor, ...]: ...
def mean_over_ranks(tensors: Tensor | Sequence[Tensor], process_group: Group | None = None) -> Any:
    """Return the mean over the ranks of a tensor, or of each of several; differentiable any number of times.

    ``torch.autograd.grad`` returns the gradients of this rank alone, even for a replicated module. This function
    averages them over the ranks. A loss may be built on the result: its backward averages the incoming gradients, so
    that a replicated module gets the gradient of the mean of the ranks' losses.

    Args:
        tensors: A tensor, or a sequence of tensors: floating or complex, of the same shapes and dtypes on every rank.
        process_group: The ranks; the default group if None.

    Returns:
        New tensors, of the same shapes and dtypes, as a tuple if a sequence was given.

    Communicates one small all-gather, which compares the shapes, and one all-reduce for each dtype and device, and
    waits for them. Each backward through the means repeats the all-reduces. Every rank must call this function, and run
    backward through the means, equally often. ``torch.autograd.grad`` goes through all means behind its outputs, even
    if they do not lead to its inputs on this rank. Strides may differ. If a tensor has a graph on any rank, the means
    have a graph on every rank, so that ``backward()`` goes through them everywhere.

    Raises:
        AgreementError: Shapes, dtypes or the number of tensors differ between ranks, or the tensors' graphs go through
            earlier means on some ranks only. Raised on every rank.
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
    earlier = [each for each in means_behind(listed) if each.collectives.group is group] if has_graph else []
    modules = scheduler_of(group).modules.numbered()
    behind = _numbers_behind(listed, modules) if has_graph else []
    graphs = check_same_on_all_ranks(lines, collectives, [len(earlier), *behind] if has_graph else [])
    _check_earlier_means([row[0] if row else 0 for row in graphs], collectives)
    joined = [torch.empty(0, requires_grad=True)] if any(graphs) else []
    *means, _ = _Mean.apply(collectives, len(joined), *joined, *listed)
    for number in sorted({number for row in graphs for number in row[1:]} & modules.keys()):
        _lead_to(modules[number], means[0])
    return means[0] if isinstance(tensors, Tensor) else tuple(means)


def _check_earlier_means(counts: Sequence[int], collectives: Collectives) -> None:
    """Raise, on every rank, if a pass through the new means would reach earlier means on some ranks only."""
    for rank, count in zip(collectives.global_ranks, counts, strict=True):
        if count != counts[0]:
            raise AgreementError(
                f"mean_over_ranks() got tensors whose graph contains {counts[0]} earlier mean(s) over the ranks on "
                f"rank {collectives.global_ranks[0]}, and {count} on rank {rank}. The backward of a mean is a "
                "collective, which every rank has to run. If a gradient is constant on a rank, the graph there does "
                "not lead to the earlier mean: pass gradient + 0 * parameter in place of each gradient "
                "(0 * parameter where there is none), from the first order on"
            )


def _numbers_behind(tensors: Sequence[Tensor], modules: Mapping[int, Reducer]) -> list[int]:
    """Return the numbers of the replicated modules whose parameters these tensors depend on."""
    reach = reach_of({"tensors": tensors, "accumulate_grad": True}) if modules else ReachableLeaves()
    return [number for number, module in modules.items() if module.is_within(reach, False)]


def _lead_to(module: Reducer, mean: Tensor) -> None:
    """Tell ``module`` of every pass through ``mean``, since it may reach its parameters on other ranks only."""
    reached = WeakMethod(module.on_output_grad)

    def tell(grads: object) -> None:
        if (method := reached()) is not None:
            method()

    if mean.grad_fn is not None:  # else under no_grad()
        mean.grad_fn.register_prehook(tell)
        mark_output(mean, module, None)


def _described(tensor: Any) -> str:
    return describe_tensor(tensor, layout=False) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"


# ------------------------------------------------------------------------------------- through autograd


class _Mean(Function):
    """The mean of several tensors over the ranks; forward and backward are the same operation.

    The first ``linked`` tensors are empty. They give the function a graph on every rank, and link it to earlier means,
    so that a pass through this one reaches those afterwards. The last output is empty as well: it links later means to
    this one.
    """

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, linked: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All-reduce the tensors."""
        ctx.set_materialize_grads(False)
        links, tensors = tensors[:linked], tensors[linked:]
        parts = [local_part(tensor) for tensor in tensors]
        likes = [part.new_zeros(()).expand(part.shape) for part in parts]
        ctx.likes = [like_parameter(like, tensor) for like, tensor in zip(likes, tensors, strict=True)]
        ctx.in_pass = MeanInPass(collectives, ctx.likes, links[0] if links else None)
        ctx.to_links = [torch.empty_like(each) for each in links]  # gradients that only carry on the pass
        means = list(tensors)
        for number, mean in collectives.all_reduce_coalesced(parts, MEANS, 1 / collectives.world):
            means[number] = like_parameter(torch.empty_like(parts[number]).copy_(mean), tensors[number])
        handle = parts[0].new_empty(0) if parts else torch.empty(0)
        ctx.save_for_backward(handle)
        return *means, handle

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """All-reduce the gradients; one that is None on all ranks stays None.

        Raises :class:`PeerError` if the pass has failed on another rank before.
        """
        in_pass, this = ctx.in_pass, current_pass()
        in_pass.taken_in = this
        *given, _ = grads
        whole = [torch.zeros_like(like) if grad is None else grad for grad, like in zip(given, ctx.likes, strict=True)]
        first = local_part(whole[0])
        flags = torch.tensor([False, *(grad is not None for grad in given)], dtype=first.dtype, device=first.device)
        linked = _links(ctx, this) if torch.is_grad_enabled() else []  # enabled with ``create_graph``
        *means, heard, handle = _Mean.apply(in_pass.collectives, len(linked), *linked, *whole, flags)
        if linked and this is not None:
            this.whole.means[in_pass.collectives.group] = handle
        failed, *there = heard.tolist()
        if failed != failed:  # NaN
            raise PeerError(
                f"rank {in_pass.collectives.global_rank}: backward failed on another rank before it came to a mean "
                "over the ranks that this rank's goes through (mean_over_ranks()); that rank's own error says why. No "
                "gradient has been handed out"
            )
        found = [mean if each else None for mean, each in zip(means, there, strict=True)]
        return None, None, *ctx.to_links, *found


def _links(ctx: Any, this: BackwardPass | None) -> list[Tensor]:
    """Return the tensors that a mean taken in a pass is linked to.

    A leaf, so that it has a graph on every rank, the last mean taken in the pass, and the one whose backward it is.
    """
    collectives = ctx.in_pass.collectives
    last = None if this is None else this.whole.means.get(collectives.group)
    joined = torch.empty(0, device=collectives.device, requires_grad=True)
    return [joined, *([] if last is None else [last]), *ctx.saved_tensors]
