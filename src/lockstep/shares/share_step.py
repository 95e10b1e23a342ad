"""One step over all ranks, and its audit: the share that is computed again, the rank that does it, the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep._base.deal import Deal
from lockstep._base.digests import Digests
from lockstep._base.seeds import derive_seed
from lockstep.distributed.comm.agreement import Line, objects_of
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import AuditError
from lockstep.shares.share_tree import shares_of


class Audit(NamedTuple):
    """A share that is computed a second time."""

    share: int
    owner: int
    """The rank that computes the share for the step."""
    auditor: int
    """The rank that computes it again: another one, if there is one."""


def plan_audit(every: int | None, seed: int, epoch: int, batch: int, deal: Deal) -> Audit | None:
    """Return the audit of a step with this ``deal``, or None; one of ``every`` steps, at random, has one."""
    if every is None or derive_seed(seed, "audit", epoch, batch) % every:
        return None
    world = len(deal)
    share = derive_seed(seed, "audited share", epoch, batch) % sum(deal)
    owner = next(rank for rank in range(world) if share in shares_of(rank, deal))
    other = derive_seed(seed, "auditor", epoch, batch) % max(1, world - 1)
    return Audit(share, owner, (owner + 1 + other) % world)


@dataclass(frozen=True)
class ShareStep:
    """One step of the whole world."""

    seed: int
    epoch: int
    batch: int
    rows: tuple[int, ...]
    """Number of rows of each share; no share is empty."""
    shares: int
    """Number of shares of a step that has enough rows."""
    deal: Deal
    """Number of shares of each rank."""
    next_deal: Deal
    """That of the next step, if batches are used in order."""
    samples: int
    """Number of samples of the data set."""
    is_shuffled: bool
    """True if each epoch has an order of its own."""
    cut: int | None = None
    """A number that tells the samples of the shares from others with as many rows, if shares are cut by cost."""
    audit: Audit | None = None
    """The share that is computed a second time, if any."""

    @property
    def count(self) -> int:
        """The number of shares of this step."""
        return len(self.rows)

    def loaded_by(self, rank: int) -> list[tuple[int, bool]]:
        """Return the shares that a rank loads, in order, each with True if it is computed again, for the audit."""
        own = [(share, False) for share in shares_of(rank, self.deal)]
        again = [(self.audit.share, True)] if self.audit is not None and self.audit.auditor == rank else []
        return own + again

    def __str__(self) -> str:
        return f"batch {self.batch} of epoch {self.epoch}"

    def describe(self) -> list[Line]:
        """Return the lines that must be the same on all ranks."""
        return [
            Line("epoch", str(self.epoch)),
            Line("batch of the epoch", str(self.batch)),
            Line("seed of the batches", str(self.seed)),
            Line("length of the data set", str(self.samples)),
            Line("order of the data set", "shuffled" if self.is_shuffled else "as it is"),
            Line("shares of the batches", str(self.shares)),
            Line("rows in each share", ", ".join(map(str, self.rows))),
            Line("samples in each share, by cost", str(self.cut)),
            Line("shares of each rank", ", ".join(map(str, self.deal))),
            Line("shares of each rank in the next batch", ", ".join(map(str, self.next_deal))),
            Line("audit", str(self.audit)),
        ]


class Evidence:
    """Digests of a module's tensors after a share, on the rank that computed it and on the one that did so again."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._rows: dict[bool, list[int]] = {}

    def note(self, tensors: Sequence[Tensor | None], again: bool) -> None:
        """Record the results of the share on this rank, which has computed it, ``again`` or for the first time."""
        self._rows[again] = Digests([torch.empty(0) if each is None else each for each in tensors]).each()

    def compare(self, audit: Audit, step: str, collectives: Collectives) -> None:
        """Raise :class:`AuditError`, on every rank, if the two results have different bits."""
        empty = [0] * len(self._names)
        own = [self._rows.get(again, empty) for again in (False, True)]
        (first, _), (_, second) = objects_of([audit.owner, audit.auditor], own, "digests of a share", collectives)
        differing = [name for name, a, b in zip(self._names, first, second, strict=True) if a != b]
        if differing:
            ranks = [collectives.global_ranks[rank] for rank in (audit.owner, audit.auditor)]
            raise AuditError(
                f"share {audit.share} of {step}, which rank {ranks[0]} has computed, had different bits when rank "
                f"{ranks[1]} computed it again: {differing[0]} is the first of {len(differing)} tensors that differ, "
                f"of {len(self._names)}. Either one of the two ranks computes wrongly (memory, a processor), or the "
                "computation is not deterministic (a kernel with atomics, a random generator of the program, data that "
                "differ by rank). Gradients are as they were before the step. Load the last checkpoint; leave out a "
                "rank that is named again and again"
            )
