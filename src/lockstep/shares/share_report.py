"""The report of a step: one row of bytes from each rank.

A row begins with a head, which means the same on every rank, even if their modules or steps are not the same."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lockstep._base.digests import text_digest
from lockstep.distributed.comm.agreement import check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.record import Packing
from lockstep.distributed.reduction.module.drift import Told
from lockstep.distributed.reduction.report.verdict import LoopVerdict
from lockstep.errors import AgreementError, OptionError, PeerError
from lockstep.shares.balance import Pace
from lockstep.shares.share_step import ShareStep

TRAINING, EVALUATION = 1, 2


class Head(NamedTuple):
    """The beginning of a rank's row. It has the same length on all ranks, for every module and step."""

    step: int
    """A number that tells steps apart."""
    precision: int = 0
    """A number that tells the precisions of forward apart; 0 if no forward has run."""
    modes: int = 0
    """The modes in which forward has run: :data:`TRAINING`, :data:`EVALUATION`, their sum, or 0 if it has not run."""
    buffers: int = 0
    """A digest of the buffers' values, if a program has written any between steps."""
    stops: bool = False
    """True if this rank asks all ranks to stop after this step."""
    skips: bool = False
    """True if this rank leaves out the batch, in a module that is replicated without shares."""
    ends: bool = False
    """True if this rank has no batch after this one."""
    has_failed: bool = False
    """True if this rank has left the step before its end."""
    differs: bool = False
    """True if this rank has another module, or another number of shares, than the ranks have agreed on: then nothing
    follows the head."""
    is_late: bool = False
    """True if another gradient came after its bucket was sent."""
    drift: Told = Told()
    """What it tells of what optimizers have left since the last step."""
    pace: Pace = Pace()
    """How long a share takes on this rank."""

    def to_row(self) -> Tensor:
        """Return the head as bytes."""
        return _HEADS.pack(self)

    @classmethod
    def of_rows(cls, rows: Tensor) -> list[Self]:
        """Return the heads of the rows of all ranks."""
        return _HEADS.unpack(rows[:, :HEAD_BYTES])


_HEADS: Packing[Any] = Packing(Head)
HEAD_BYTES = _HEADS.size
"""Size of a head in bytes."""


@dataclass(frozen=True)
class ShareReport:
    """One rank's report of a step."""

    head: Head
    weights: Sequence[float]
    """The weight of each share: NaN for shares of other ranks, and if no weight was given."""
    used: Sequence[bool]
    """True for each parameter that has a gradient."""
    changed_buffers: Sequence[int]
    """The first share of this rank that has changed each buffer, or -1."""

    @property
    def layout(self) -> struct.Struct:
        """The layout of the report's row behind its head."""
        return layout_of(len(self.weights), len(self.used), len(self.changed_buffers))

    def to_row(self) -> Tensor:
        """Return the report as bytes."""
        body = self.layout.pack(*self.weights, *self.used, *self.changed_buffers)
        return torch.cat([self.head.to_row(), torch.frombuffer(bytearray(body), dtype=torch.uint8)])

    @classmethod
    def of_rows(cls, rows: Tensor, like: Self) -> tuple[list[Self], list[Tensor]]:
        """Return the reports of all ranks, each with as many entries as ``like``, and the bytes behind each."""
        layout, shares = like.layout, len(like.weights)
        end, used = HEAD_BYTES + layout.size, shares + len(like.used)
        reports = []
        for head, row in zip(Head.of_rows(rows), rows[:, HEAD_BYTES:end].tolist(), strict=True):
            values = layout.unpack(bytes(row))
            reports.append(cls(head, values[:shares], values[shares:used], values[used:]))
        return reports, list(rows[:, end:])


def layout_of(shares: int, parameters: int, buffers: int) -> struct.Struct:
    """Return the layout of a report's row behind its head."""
    return struct.Struct(f"<{shares}d{parameters}?{buffers}q")


def number_of(*parts: object) -> int:
    """Return a number that differs for different parts."""
    return text_digest("\n".join(map(repr, parts)))


def check_heads(heads: Sequence[Head], step: ShareStep, collectives: Collectives) -> None:
    """Raise :class:`PeerError`, on every rank, if one has failed, or they are not all at the end of the same step.

    Communicates only if steps differ, and then what :func:`check_same_on_all_ranks` does.
    """
    for rank, head in zip(collectives.global_ranks, heads, strict=True):
        if head.has_failed:
            raise PeerError(
                f"rank {rank} has left the loop over the shares of a batch before its end, by an error (see there), "
                f"break or return, while rank {collectives.global_rank} was at {step}; its gradients are not there"
            )
    others = [n for n, head in enumerate(heads) if head.step != heads[0].step]
    if others:
        first, other = collectives.global_ranks[0], collectives.global_ranks[others[0]]
        try:
            check_same_on_all_ranks(step.describe(), collectives, what="the end of a step with shares")
        except AgreementError as error:
            raise PeerError(
                f"rank {other} is at the end of another step than rank {first} (rank {collectives.global_rank} is at "
                f"{step}): {error}; give every rank the same data set, seed and state_dict"
            ) from None


def check_precision(heads: Sequence[Head], own: str, collectives: Collectives) -> None:
    """Raise :class:`AgreementError`, on every rank, if forward has run in another precision on some rank."""
    given = [
        (each.precision, rank) for each, rank in zip(heads, collectives.global_ranks, strict=True) if each.precision
    ]
    for number, rank in given:
        if number != given[0][0]:
            raise AgreementError(
                f"ranks differ in autocast: forward has not run in the same precisions on rank {rank} as on rank "
                f"{given[0][1]} (on rank {collectives.global_rank}: {own or 'there was none'}); make it the same on all"
            )


def check_modes(heads: Sequence[Head], collectives: Collectives) -> None:
    """Raise :class:`PeerError`, on every rank, if forward has run in training mode only on one, and not on another."""
    ranks = {each.modes: rank for each, rank in zip(reversed(heads), reversed(collectives.global_ranks), strict=True)}
    if TRAINING in ranks and EVALUATION in ranks:
        raise PeerError(
            f"rank {collectives.global_rank}: in this step the module's forward has run in training mode on rank "
            f"{ranks[TRAINING]}, and in evaluation mode on rank {ranks[EVALUATION]}; call train() or eval() on every "
            "rank alike. No gradient has been handed out"
        )


def loops_of(heads: Sequence[Head]) -> LoopVerdict:
    """Return the part of the verdict that concerns loops."""
    going_on = [rank for rank, head in enumerate(heads) if not head.ends]
    ends = len(heads) - len(going_on)
    return LoopVerdict(
        stops=any(head.stops for head in heads),
        skipped=any(head.skips for head in heads),
        some_end=ends > 0,
        all_end=not going_on,
        ends=ends,
        going_on=going_on or None if ends else None,
    )


def weights_of_all(reports: Sequence[ShareReport]) -> list[float] | None:
    """Return the weight of each share, None if none was given; raise :class:`OptionError` if only some were."""
    columns = zip(*(report.weights for report in reports), strict=True)
    given = [[weight for weight in column if not isnan(weight)] for column in columns]
    if not any(given):
        return None
    missing = [share for share, weights in enumerate(given) if not weights]
    if missing:
        raise OptionError(
            f"accumulate(model, weight=...) was given for some shares of a step, and not for share {missing[0]}; give "
            "a weight for every share, 0 where there is nothing, or for none"
        )
    return [weights[0] for weights in given]
