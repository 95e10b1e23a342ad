"""``mean()``, ``total()``: exact means and sums of a program's own numbers over the ranks."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from lockstep._base.compiler import outside_compiler
from lockstep._base.devices import CPU
from lockstep._base.digests import text_digest
from lockstep._base.tree import Leaf, Tree
from lockstep.distributed.comm.agreement import Line, all_gather_object, first_differing, objects_of
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.groups import Group, needed_group
from lockstep.distributed.comm.record import are_alike, bits_of
from lockstep.distributed.reduction.report.decisions import Decisions, decisions_of
from lockstep.errors import AgreementError, OptionError
from lockstep.phases import Phases

T = TypeVar("T")
_DIGEST_BITS = 64
_AT_ONCE = 64
"""Numbers that travel with the comparison of what ranks pass; further ones take a second all-reduce."""


@outside_compiler
def mean(values: T, weight: float | Tensor = 1.0, group: Group | None = None) -> T:
    """Return the mean over all ranks of each number in ``values``, with each rank's ``weight``.

    If a rank's numbers are means, pass what they divide by as ``weight``: the number of rows, or of labels that are not
    padding, or the sum of the labels' class weights for a cross entropy with these. The result is the mean over those
    of all ranks, even if ranks have unequal numbers of them, or none (weight 0). A padding batch
    (:func:`lockstep.batches`) has no weight here.

    Args:
        values: A number, a tensor, or nested containers of numbers and tensors, with the same structure on every rank.
            If the weight is 0, they are ignored, even NaN.
        weight: The weight of this rank's numbers: 0 or more.
        group: The ranks; the default group if None.

    Returns:
            The same structure and values on all ranks: a float for a number, a tensor of the same shape for a tensor
            (of its dtype if that is floating, else float64). Sums are taken in float64, so means of whole numbers are
            exact if their sums, times the weights, stay below 2**53.

    Communicates one all-reduce of 131 numbers of float64, and waits for it. More than 64 values take a second one.
    Tensors on an accelerator, and the weight, are read with one copy, which waits for the device; the results go back
    with another.

    Raises:
        AgreementError: Structures, shapes or names differ between ranks; raised on every rank.
        OptionError: A value is not a number, a weight is not one number, negative or not finite, or all weights are 0;
            raised on every rank.
        CommunicationError: There is no group, or a rank does not answer.

    Example:
        >>> import torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> lockstep.mean({"loss": 0.25, "right": 3}, weight=4, group=group)
        {'loss': 0.25, 'right': 3.0}

    Stands for: ``all_reduce`` of sums and of counts, and the division.
    """
    decisions = decisions_of(needed_group(group))
    found = _sum(values, weight, "mean", decisions)
    if found.parts and not 0 < found.weights < float("inf"):
        others = f" and {len(found.parts) - 1} more" if len(found.parts) > 1 else ""
        raise OptionError(
            f"mean() of {found.tree.leaves[0].path}{others}: the weights of all {decisions.group.size()} ranks add up "
            f"to {found.weights:g}, so there is no mean. Call it where some rank has something to count: not for a "
            "batch that was left out (lockstep.loop.skipped()); lockstep.loop.agree(weight > 0) tells all ranks "
            "whether one has"
        )
    means: T = found.build(found.sums / found.weights)
    return means


@outside_compiler
def total(counts: T, group: Group | None = None) -> T:
    """Return the sum over all ranks of each number in ``counts``.

    Use it if one step has several losses, each with its own denominator. The denominator is needed before the first
    backward: if gradients accumulate over several micro-batches, pass the count of all micro-batches of this rank. In a
    padding batch (:func:`lockstep.batches`) counts are ignored.

    Args:
        counts: A number, a tensor, or nested containers of numbers and tensors, with the same structure on every rank.
        group: The ranks; the default group if None.

    Returns:
        The same structure and values on all ranks, in the types that :func:`mean` returns.

    Communicates and raises as :func:`mean` does.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(1, 2, bias=False), process_group=group)
        >>> words, rows = lockstep.loop.total([6, 3], group)
        >>> with lockstep.accumulate(model, weight=6):  # divides by all words, so the second loss by all rows
        ...     of_words, of_rows = model(torch.ones(3, 1)).sum(0)
        ...     (of_words + of_rows * (words / max(rows, 1))).backward()
        >>> model.weight.grad.tolist()  # 3 / 6, 3 / 3
        [[0.5], [1.0]]

    In PyTorch: ``all_reduce`` of the counts.
    """
    decisions = decisions_of(needed_group(group))
    found = _sum(counts, 1.0, "total", decisions)
    totals: T = found.build(found.sums)
    return totals


class _Sums(NamedTuple):
    """The values that were given, and the sums over the ranks of their numbers and of the weights."""

    tree: Tree
    parts: list["_Part"]
    sums: Tensor
    weights: float

    def build(self, numbers: Tensor) -> Any:
        """Return numbers in the structure of the values that were given."""
        pieces = numbers.cpu().split([part.values.numel() for part in self.parts])
        homes = [CPU if part.tensor is None else part.tensor.device for part in self.parts]
        pieces = _move_together(pieces, homes)
        return self.tree.build([part.like(piece) for part, piece in zip(self.parts, pieces, strict=True)])


def _sum(values: Any, weight: float | Tensor, caller: str, decisions: Decisions) -> _Sums:
    """Sum the values of all ranks, each multiplied by its rank's ``weight``; errors name ``caller``."""
    collectives = Collectives(decisions.group, Phases())
    tree = Tree(values, "values" if caller == "mean" else "counts")
    parts = [_part(leaf, caller) for leaf in tree.leaves]
    lines = [Line(leaf.path, part.kind) for leaf, part in zip(tree.leaves, parts, strict=True)]
    problems = [
        f"{line.name}, a {line.value}; pass numbers, tensors, or containers of them"
        for line, part in zip(lines, parts, strict=True)
        if not part.is_number
    ]
    together = [*(part.values for part in parts), _one_number(weight).to(torch.float64).reshape(1)]
    *numbers, of_rank = _move_together(together, [collectives.device] * len(together))
    own = of_rank.item()
    if not 0 <= own < float("inf"):
        expected = f"{own if own == own else repr(weight)[:80]}, expected a finite number, 0 or more"
        problems.insert(0, f"a weight of {expected}")
        lines.append(Line(f"the weight given to {caller}()", expected))
    pads = decisions.counts_nothing
    with torch.no_grad():
        flat = torch.cat(numbers or [of_rank[:0]])
        sums, weights, padding = _sums(flat, 0.0 if pads else own, pads, lines, caller, collectives, decisions)
        if padding == collectives.world:  # none of the ranks has a batch in a loop over other ranks: they are alike
            sums, weights, _ = _sums(flat, own, pads, lines, caller, collectives, decisions)
    if problems:  # the same on all ranks, or the sums would have raised
        raise OptionError(f"{caller}() got {problems[0]}")
    return _Sums(tree, parts, sums, weights)


def _one_number(weight: float | Tensor) -> Tensor:
    """Return a weight as a tensor of one element: NaN if it is not one number, as the other ranks are to be told."""
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return weight.detach()
    try:
        return torch.tensor(float(weight), dtype=torch.float64, device="cpu")
    except Exception:
        return torch.tensor(torch.nan, dtype=torch.float64, device="cpu")


def _move_together(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Return flat tensors of one dtype, each on its device, with one copy from each device to each other one."""
    found = list(tensors)
    ways = [(tensor.device, device) for tensor, device in zip(tensors, devices, strict=True)]
    for source, target in set(ways):
        if source == target:
            continue
        places = [place for place, way in enumerate(ways) if way == (source, target)]
        together = torch.cat([tensors[place] for place in places]).to(target)
        for place, piece in zip(places, together.split([tensors[place].numel() for place in places]), strict=True):
            found[place] = piece
    return found


class _Part(NamedTuple):
    """A leaf: a description, its numbers in float64 as one flat tensor, and the original if it was a tensor."""

    kind: str
    values: Tensor
    tensor: Tensor | None = None
    is_number: bool = True

    def like(self, values: Tensor) -> Any:
        """Return means in the type of the leaf."""
        if self.tensor is None:
            return values.item()
        dtype = self.tensor.dtype if self.tensor.is_floating_point() else torch.float64
        return values.view(self.tensor.shape).to(dtype)


def _part(leaf: Leaf, caller: str) -> _Part:
    value = leaf.value
    if isinstance(value, Tensor) and not value.is_complex():
        numbers = value.detach().to(torch.float64).reshape(-1)
        return _Part(f"tensor of shape {tuple(value.shape)}", numbers, value.detach())
    if isinstance(value, int | float):
        return _Part("number", torch.tensor([value], dtype=torch.float64, device="cpu"))
    return _Part(f"{type(value).__name__}, which has no {caller}", torch.empty(0, dtype=torch.float64), None, False)


def _sums(
    flat: Tensor,
    weight: float,
    pads: bool,
    lines: Sequence[Line],
    caller: str,
    collectives: Collectives,
    decisions: Decisions,
) -> tuple[Tensor, float, float]:
    """Return the sums of all ranks' numbers, times their weights, and of the weights; and how many ranks are at a
    padding batch, as this one if it ``pads``.

    The bits of a digest of the structure of a rank's values travel in front. If digests differ, all ranks know, and
    exchange descriptions of their values. Requests to stop travel with them.
    """
    digest = text_digest(repr([caller, *lines]), bits=_DIGEST_BITS)
    numbers = [*bits_of(digest, _DIGEST_BITS), weight, pads, decisions.asks_to_stop()]
    head = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    flat = flat * weight if weight else torch.zeros_like(flat)  # whatever the numbers are
    row = torch.zeros(len(head) + _AT_ONCE, dtype=torch.float64, device=collectives.device)
    row[: len(head)] = head
    first = flat[:_AT_ONCE]
    row[len(head) : len(head) + first.numel()] = first
    collectives.all_reduce(row, f"{caller}()").wait()
    *digests, weights, padding, stops = row[: len(head)].tolist()
    decisions.hear_requests(stops > 0)
    if not are_alike(digests, collectives.world):
        other = first_differing(all_gather_object(digest, "mean() or total()", collectives))
        assert other is not None
        _raise_difference(lines, other, caller, collectives)
    rest = flat[_AT_ONCE:]
    if rest.numel():
        collectives.all_reduce(rest, f"{caller}()").wait()
    return torch.cat([row[len(head) :][: first.numel()], rest]), weights, padding


def _raise_difference(lines: Sequence[Line], other: int, caller: str, collectives: Collectives) -> NoReturn:
    """Raise on all ranks, because rank ``other`` has given a different structure from the first rank; name both."""
    both = objects_of([0, other], [Line(f"{caller}()", ""), *lines], "mean() or total()", collectives)
    pairs = zip_longest(*both, fillvalue=Line("nothing", ""))
    mine, other_line = next((Line(*a), Line(*b)) for a, b in pairs if a != b)
    raise AgreementError(
        f"{caller}() got {_text(mine)} on rank {collectives.global_ranks[0]}, and {_text(other_line)} in its place on "
        f"rank {collectives.global_ranks[other]}; give it the same names, shapes and kinds on every rank, with weight "
        "0 where there is nothing to count"
    )


def _text(line: Line) -> str:
    return f"{line.name} (a {line.value})" if line.value else line.name
