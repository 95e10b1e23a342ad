"""``mean()``: exact means of a program's own numbers over unequal shards."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from lockstep.digests import text_digest
from lockstep.distributed.comm.agreement import Line, first_differing, objects_of
from lockstep.distributed.comm.collectives import Collectives, Group
from lockstep.distributed.reduction.decisions import decisions_of
from lockstep.errors import AgreementError, OptionError
from lockstep.loop.stop_and_skip import known_group
from lockstep.phases import Phases
from lockstep.tree import Leaf, Tree

T = TypeVar("T")
_AT_ONCE = 64
"""Numbers that travel with the comparison of what ranks pass; further ones take a second all-reduce."""


def mean(values: T, weight: float | Tensor = 1.0, group: Group | None = None) -> T:
    """Return the mean over all ranks of each number in ``values``, with each rank's ``weight``.

    If a rank's numbers are means over rows (or tokens), pass the number of rows as ``weight``: the result is the mean
    over all rows of all ranks, even if ranks have unequal numbers of them, or none (weight 0). A padding batch
    (:func:`lockstep.batches`) has no weight here.

    Args:
            values: A number, a tensor, or nested containers of them; of the same structure on every rank. They are
            ignored if the weight is 0, even NaN. weight: The weight of this rank's numbers: 0 or more.
        group: The ranks; the default group if None.

    Returns:
            The same structure and values on all ranks: a float for a number, a tensor of the same shape for a tensor
            (of its dtype if that is floating, else float64). Sums are taken in float64, so means of whole numbers are
            exact if their sums, times the weights, stay below 2**53.

    Communicates one all-reduce, of 64 numbers and two for each rank; a second one where there are more than 64. Waits
    for it.

    Raises:
            AgreementError: Structures, shapes or names differ between ranks; raised on every rank. OptionError: A value
            is not a number, a weight is negative or not finite, or all weights are 0; raised on every rank.
        CommunicationError: There is no group, or a rank does not answer.

    Example:
        >>> import torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> lockstep.mean({"loss": 0.25, "right": 3}, weight=4, group=group)
        {'loss': 0.25, 'right': 3.0}

    Stands for: ``all_reduce`` of sums and of counts, and the division.
    """
    found = known_group(group)
    collectives = Collectives(found, Phases())
    own = 0.0 if decisions_of(found).is_padding else float(weight)
    tree = Tree(values, "values")
    parts = [_part(leaf) for leaf in tree.leaves]
    lines = [Line(leaf.path, part.kind) for leaf, part in zip(tree.leaves, parts, strict=True)]
    if not 0 <= own < float("inf"):
        lines.append(Line("the weight given to mean()", f"{own}, expected a finite number, 0 or more"))
    with torch.no_grad():
        numbers = [part.values.to(collectives.device) for part in parts if own]
        flat = torch.zeros(sum(part.values.numel() for part in parts), dtype=torch.float64, device=collectives.device)
        if numbers:
            torch.cat(numbers, out=flat)
        sums, weights = _sums(flat.mul_(own), own, lines, collectives)
    _check(lines, parts)
    if parts and not 0 < weights < float("inf"):
        others = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        raise OptionError(
            f"mean() of {lines[0].name}{others}: the weights of all {collectives.world} ranks add up "
            f"to {weights:g}, so there is no mean. Call it where some rank has something to count: not for a batch "
            "that was left out (lockstep.loop.skipped()); lockstep.agree(weight > 0) tells all ranks whether one has"
        )
    pieces = (sums / weights).split([part.values.numel() for part in parts])
    means: T = tree.build([part.like(piece) for part, piece in zip(parts, pieces, strict=True)])
    return means


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
        return values.view(self.tensor.shape).to(self.tensor.device, dtype)


def _part(leaf: Leaf) -> _Part:
    value = leaf.value
    if isinstance(value, Tensor) and not value.is_complex():
        numbers = value.detach().to(torch.float64).reshape(-1)
        return _Part(f"tensor of shape {tuple(value.shape)}", numbers, value.detach())
    if isinstance(value, int | float):
        return _Part("number", torch.tensor([value], dtype=torch.float64, device="cpu"))
    return _Part(f"{type(value).__name__}, which has no mean", torch.empty(0, dtype=torch.float64), None, False)


def _sums(flat: Tensor, weight: float, lines: Sequence[Line], collectives: Collectives) -> tuple[Tensor, float]:
    """Return the sums of all ranks' numbers, and of their weights.

    In front travels a digest of what each rank has given, in places of its own. If there are different ones, all ranks
    know, and exchange what they have given.
    """
    world = collectives.world
    row = torch.zeros(world + 1 + _AT_ONCE, dtype=torch.float64, device=collectives.device)
    row[collectives.rank] = text_digest(repr(list(lines)), bits=48)  # exact in float64
    row[world] = weight
    first = flat[:_AT_ONCE]
    row[world + 1 : world + 1 + first.numel()] = first
    collectives.all_reduce(row, "means").wait()
    other = first_differing(row[:world].tolist())
    if other is not None:
        _raise_difference(lines, other, collectives)
    rest = flat[_AT_ONCE:]
    if rest.numel():
        collectives.all_reduce(rest, "more means").wait()
    return torch.cat([row[world + 1 :][: first.numel()], rest]), row[world].item()


def _raise_difference(lines: Sequence[Line], other: int, collectives: Collectives) -> NoReturn:
    """Ranks have given different things, ``other`` something else than the first: raise on all, and name it."""
    told = objects_of([0, other], lines, "what was given to mean()", collectives)
    pairs = zip_longest(*told, fillvalue=Line("nothing", ""))
    mine, its = next((Line(*a), Line(*b)) for a, b in pairs if a != b)
    raise AgreementError(
        f"mean() got {_text(mine)} on rank {collectives.global_ranks[0]}, and {_text(its)} in its place on "
        f"rank {collectives.global_ranks[other]}; give it the same names, shapes and kinds on every rank, with weight "
        "0 where there is nothing to count"
    )


def _text(line: Line) -> str:
    return f"{line.name} (a {line.value})" if line.value else line.name


def _check(lines: Sequence[Line], parts: Sequence[_Part]) -> None:
    """Raise for what is wrong on all ranks alike."""
    if len(lines) > len(parts):
        raise OptionError(f"mean() got a weight of {lines[-1].value}")
    for line, part in zip(lines, parts, strict=True):
        if not part.is_number:
            raise OptionError(f"mean() got {line.name}, a {line.value}; pass numbers, tensors, or containers of them")
