"""Compares the values of parameters and buffers, and of what optimizers keep of them, between ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from lockstep._base.digests import Digests, text_digest
from lockstep._base.texts import ranks_in_words
from lockstep.distributed.comm.agreement import all_gather_object, first_differing
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import OutOfSyncError


def check_equal_values(
    named: Sequence[tuple[str, Tensor]],
    collectives: Collectives,
    kind: str = "parameter",
    what: str = "was put into the module after it was replicated",
) -> None:
    """Raise :class:`OutOfSyncError`, on every rank, if a tensor differs between ranks: see :func:`compare`."""
    found = compare(named, collectives) if named else None
    if found is not None:
        raise OutOfSyncError(
            f"{kind} {found.name} {what}, and has other values on rank {found.rank} than on rank "
            f"{collectives.global_ranks[0]}, so gradients are of different networks; no gradient has been handed out. "
            "Give every rank the same values (the same checkpoint, the same seed, "
            "torch.distributed.broadcast) before forward, or replicate when the module is complete. If forward chooses "
            "values by its first batch, run one forward on the same batch on every rank before"
        )


class Differences(NamedTuple):
    """The tensors that differ between ranks."""

    names: list[str]
    """Their names; those of parameters begin with this word, those of what optimizers keep do not."""
    rank: int
    """The first rank on which the first of them differs from the first rank, as messages name it."""
    digests: str
    """The digests of the first one on all ranks."""
    parameters: int
    """The number of all parameters that were compared."""

    @property
    def name(self) -> str:
        """The name of the first one."""
        return self.names[0]

    def __str__(self) -> str:
        first, *others = self.names
        more = f". So {'is' if len(others) == 1 else 'are'} {', '.join(others[:2])}" if others else ""
        more += f" and {len(others) - 2} more" if len(others) > 2 else ""
        return f"{first} is out of sync: {self.digests}{more}"

    @property
    def cause(self) -> str:
        """The usual causes of such differences, by what differs."""
        own, buffers = (sum(name.startswith(kind) for name in self.names) for kind in ("parameter ", "buffer "))
        if buffers and not own:
            return "Buffers differ: something writes to them on one rank alone, or its forwards were other ones"
        if not own:
            return "The optimizer's state alone differs: one rank has loaded it, or changed it; do so on all ranks"
        if own < self.parameters:
            alone = "something writes to them on one rank alone, or steps them with gradients of its own"
            return f"Some weights differ: {alone}"
        if own + buffers < len(self.names):
            return (
                "Weights and the optimizer's state differ: steps have used other gradients on some rank (clipped or "
                "set there alone, a GradScaler with another scale), or one rank has loaded a checkpoint"
            )
        return (
            "All weights differ: one rank has written to them after a step (an average written back, a checkpoint), or "
            "has stepped with another learning rate or other gradients"
        )


Gather = Callable[[Any, str], list[Any]]
"""A function that returns the values of all ranks, as :func:`all_gather_object` does."""


def compare(
    named: Sequence[tuple[str, Tensor]],
    collectives: Collectives,
    present: Sequence[int] | None = None,
    gather: Gather | None = None,
) -> Differences | None:
    """Compare tensors by their bits on the ranks that are ``present`` in the group, or all; return what differs, the
    same on all ranks.

    Communicates what :func:`all_gather_object`, or ``gather`` in its place, does, twice if there is a difference.
    """
    gather = gather or partial(all_gather_object, collectives=collectives)
    present = range(collectives.world) if present is None else present
    digests = Digests([tensor for _, tensor in named])
    whole = [text_digest(repr([name for name, _ in named])), int(digests.digest(collectives.device))]
    rows = gather(whole, "digest of all values")
    if first_differing([rows[rank] for rank in present]) is None:
        return None
    own = {name: digest for (name, _), digest in zip(named, digests.each(), strict=True)}
    each_of = gather(own, "digests of values")
    names = dict.fromkeys(name for rank in present for name in each_of[rank])
    differing = [name for name in names if len({each_of[rank].get(name) for rank in present}) > 1]
    having: dict[int | None, list[int]] = {}
    for rank in present:
        having.setdefault(each_of[rank].get(differing[0]), []).append(collectives.global_ranks[rank])
    texts = ("nothing" if digest is None else f"digest {digest % 2**64:016x}" for digest in having)
    told_by = (f"{text} on {ranks_in_words(ranks)}" for text, ranks in zip(texts, having.values(), strict=True))
    count = sum(name.startswith("parameter ") for name in names)
    return Differences(differing, list(having.values())[1][0], ", ".join(told_by), count)
