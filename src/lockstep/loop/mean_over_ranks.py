"""``mean_over_ranks()``: the differentiable mean of tensors over the ranks, for ``torch.autograd.grad``."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, overload
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep._base.compiler import outside_compiler
from lockstep._base.dtensors import like_parameter, local_part
from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks, describe_tensor
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.groups import Group, needed_group
from lockstep.distributed.reduction.autograd.engine import current_pass
from lockstep.distributed.reduction.autograd.graph import MEANS, MeanInPass, mark_output, reach_of
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.reduction.report.decisions import decisions_of
from lockstep.distributed.reduction.scheduler import scheduler_of
from lockstep.errors import GradientError, OptionError, PeerError
from lockstep.phases import Phases


@overload
def mean_over_ranks(tensors: Tensor, process_group: Group | None = None) -> Tensor: ...
@overload
def mean_over_ranks(tensors: Sequence[Tensor], process_group: Group | None = None) -> tuple[Tensor, ...]: ...
def mean_over_ranks(tensors: Tensor | Sequence[Tensor], process_group: Group | None = None) -> Any:
    """Return the mean over the ranks of a tensor, or of each of several; differentiable once.

    ``torch.autograd.grad`` returns the gradients of this rank alone, even for a replicated module. This function
    averages them over the ranks. A loss may be built on the result: its backward averages the incoming gradients, so
    that a replicated module gets the gradient of the mean of the ranks' losses. That backward has no graph: gradients
    of the second order are possible, and those of higher orders are refused. A rank at a padding batch of
    :func:`lockstep.batches` is left out of both means.

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
        AgreementError: Shapes, dtypes or the number of tensors differ between ranks. Raised on every rank.
        OptionError: A tensor is None, sparse or of integers. Raised on every rank.
        CommunicationError: There is no group, or a rank does not answer.
        GradientError: A pass through the means has ``create_graph=True`` (raised by that pass).

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
    means = _means([tensors] if isinstance(tensors, Tensor) else list(tensors), needed_group(process_group))
    return means[0] if isinstance(tensors, Tensor) else means


@outside_compiler
def _means(listed: list[Tensor], group: Group) -> tuple[Tensor, ...]:
    collectives = Collectives(group, Phases())
    lines = [Line("the number of tensors given to mean_over_ranks()", str(len(listed)))]
    lines += [Line(f"tensor {n} given to mean_over_ranks()", _described(each)) for n, each in enumerate(listed)]
    has_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in listed if isinstance(tensor, Tensor))
    modules = scheduler_of(group).modules.numbered()
    wrong = [n for n, each in enumerate(listed) if not _has_mean(each)]
    behind = numbers_behind(listed, modules) if has_graph and not wrong else []
    numbers = [has_graph, decisions_of(group).counts_nothing, *behind]
    answers = check_same_on_all_ranks(lines, collectives, numbers, what="mean_over_ranks()")
    if wrong:  # the same on all ranks
        raise OptionError(
            f"{lines[1 + wrong[0]].name} is {lines[1 + wrong[0]].value}; pass dense tensors of floating or complex "
            "numbers"
        )
    joined = torch.empty(0, requires_grad=True) if any(row[0] for row in answers) else None
    padding = padding_ranks([row[1] for row in answers])
    counting = _Counting(collectives, not padding[collectives.rank], 1 / padding.count(False))
    means: tuple[Tensor, ...] = _Mean.apply(counting, joined, *listed) if listed else ()
    for number in sorted({number for row in answers for number in row[2:]} & modules.keys()):
        lead_to(modules[number], means[0])
    return means


def padding_ranks(answers: Sequence[object]) -> list[bool]:
    """Return, for each rank, True if it is at a padding batch, as the ranks have said, and some rank is not: its rows
    are not those of the batch, and what its loss says of those counts nothing."""
    return [bool(each) for each in answers] if not all(answers) else [False] * len(answers)


def numbers_behind(tensors: Sequence[Tensor], modules: Mapping[int, Reducer]) -> list[int]:
    """Return the numbers of the replicated modules whose parameters these tensors depend on."""
    if not modules:
        return []
    reach = reach_of({"tensors": tensors, "accumulate_grad": True})
    return [number for number, module in modules.items() if module.is_within(reach, False)]


def lead_to(module: Reducer, mean: Tensor) -> None:
    """Tell ``module`` of every pass through ``mean``, since it may reach its parameters on other ranks only."""
    reached = WeakMethod(module.on_output_grad)

    def tell(grads: object) -> None:
        if (method := reached()) is not None:
            method()

    if mean.grad_fn is not None:  # else under no_grad()
        mean.grad_fn.register_prehook(tell)
        mark_output(mean, module, None)


def _has_mean(value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    return dense and (value.is_floating_point() or value.is_complex())


def _described(tensor: Any) -> str:
    if tensor is None:
        return "None (torch.autograd.grad(..., materialize_grads=True) gives zeros in its place)"
    return describe_tensor(tensor, layout=False) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"


# ------------------------------------------------------------------------------------- through autograd


class _Counting(NamedTuple):
    """The ranks over which a mean is taken: those that are not at a padding batch."""

    collectives: Collectives
    is_one: bool
    """True if this rank is one of them; else zeros are sent in place of its tensors."""
    factor: float
    """One divided by their number."""

    def means(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the means of tensors, in the strides and classes of the tensors."""
        means, parts = list(tensors), [local_part(tensor) for tensor in tensors]
        sent = parts if self.is_one else list(map(torch.zeros_like, parts))
        for number, mean in self.collectives.all_reduce_coalesced(sent, MEANS, self.factor):
            means[number] = like_parameter(torch.empty_like(parts[number]).copy_(mean), tensors[number])
        return tuple(means)


class _Mean(Function):
    """The mean of several tensors over the ranks; the gradients of the backward are means, too.

    ``joined`` is an empty leaf that gives the function a graph on every rank if it has one on any.
    """

    @staticmethod
    def forward(ctx: Any, counting: _Counting, joined: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        parts = [local_part(tensor) for tensor in tensors]
        likes = [part.new_zeros(()).expand(part.shape) for part in parts]
        ctx.likes = [like_parameter(like, tensor) for like, tensor in zip(likes, tensors, strict=True)]
        ctx.in_pass, ctx.counting = MeanInPass(counting.collectives, ctx.likes, joined), counting
        return counting.means(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """All-reduce the gradients; one that is None on all ranks stays None.

        Raises :class:`PeerError` if the pass has failed on another rank before.
        """
        if torch.is_grad_enabled():  # with ``create_graph``
            raise GradientError(
                "a backward pass with create_graph=True goes through mean_over_ranks(), whose own backward has no "
                "graph: means over the ranks are for gradients of the second order. Leave out create_graph=True in "
                "this pass; for higher orders use torch.distributed.nn.functional.all_reduce(gradient) / world_size, "
                "with the same graph on every rank"
            )
        in_pass = ctx.in_pass
        in_pass.taken_in = current_pass()
        whole = [torch.zeros_like(like) if grad is None else grad for grad, like in zip(grads, ctx.likes, strict=True)]
        first = local_part(whole[0])
        flags = torch.tensor([False, *(grad is not None for grad in grads)], dtype=first.dtype, device=first.device)
        *means, heard = ctx.counting.means([*whole, flags])
        failed, *there = heard.tolist()
        if failed != failed:  # NaN
            raise PeerError(
                f"rank {in_pass.collectives.global_rank}: backward failed on another rank before it came to a mean "
                "over the ranks that this rank's goes through (mean_over_ranks()); that rank's own error says why. No "
                "gradient has been handed out"
            )
        found = [mean if each else None for mean, each in zip(means, there, strict=True)]
        to_joined = None if in_pass.joined is None else torch.empty_like(in_pass.joined)
        return None, to_joined, *found
