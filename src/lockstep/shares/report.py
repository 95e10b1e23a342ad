"""What ranks tell each other at the end of a step: one row of whole numbers from each."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import isnan

import torch
from torch import Tensor

from lockstep.distributed.collectives import Collectives
from lockstep.errors import AgreementError, OptionError, PeerError
from lockstep.shares.state import Step


@dataclass(frozen=True)
class Report:
    """What one rank has to say of a step."""

    step: int
    """A number that tells steps apart."""
    weights: Sequence[float]
    """What each share counts: NaN for shares of other ranks, and where no weight was given."""
    used: Sequence[bool]
    """Which parameters have a gradient."""
    changed_buffers: Sequence[int]
    """The first share of this rank that has changed each buffer, or -1."""
    precision: int = 0
    """A number that tells the precisions of forward apart; 0 if there was none."""
    late: Sequence[bool] = ()
    """For which buckets another gradient has come after they had left."""
    has_failed: bool = False
    """Whether this rank has left the step before its end."""
    loop: int = 0
    """What this rank says of its loop: an encoded :class:`~lockstep.distributed.decisions.LoopStatus`."""

    @staticmethod
    def row_bytes(shares: int, parameters: int, buffers: int, buckets: int) -> int:
        """How many bytes :meth:`to_row` gives where there are so many shares, parameters, buffers, and buckets that may
        be late."""
        return 8 * (4 + shares + parameters + buffers + buckets)

    def to_row(self) -> Tensor:
        """As whole numbers."""
        weights = struct.unpack(f"<{len(self.weights)}q", struct.pack(f"<{len(self.weights)}d", *self.weights))
        head = self.step, self.has_failed, self.loop, self.precision
        return torch.tensor(
            [*head, *weights, *self.used, *self.changed_buffers, *self.late], dtype=torch.int64, device="cpu"
        )

    @classmethod
    def of_row(cls, row: Sequence[int], like: "Report") -> "Report":
        """What :meth:`to_row` gave, of a rank whose report has as many entries as ``like``."""
        entries = iter(row)
        step, has_failed, loop, precision = next(entries), bool(next(entries)), next(entries), next(entries)
        bits = struct.pack(f"<{len(like.weights)}q", *islice(entries, len(like.weights)))
        weights = struct.unpack(f"<{len(like.weights)}d", bits)
        used = [bool(each) for each in islice(entries, len(like.used))]
        changed = list(islice(entries, len(like.changed_buffers)))
        return cls(step, weights, used, changed, precision, [bool(each) for each in entries], has_failed, loop)


def number_of(*parts: object) -> int:
    """A number that is another one for other parts."""
    digest = hashlib.blake2b("\n".join(map(repr, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def check_reports(reports: Sequence[Report], report: Report, step: Step, collectives: Collectives) -> None:
    """Raise :class:`PeerError`, on every rank, if one has failed, or is at the end of another step than ``report``."""
    for rank, other in zip(collectives.global_ranks, reports, strict=True):
        if other.has_failed:
            raise PeerError(
                f"rank {rank} has left the loop over the shares of a batch before its end, by an error (see there), "
                f"break or return, while rank {collectives.global_rank} was at {step}; its gradients are not there"
            )
        if other.step != report.step:
            raise PeerError(
                f"rank {rank} is at the end of another step than rank {collectives.global_rank}, which is at {step}: "
                "it has another batch, other shares, or another module; give every rank the same data set, seed and "
                "state_dict, and change modules on all ranks alike"
            )


def check_precision(reports: Sequence[Report], own: str, collectives: Collectives) -> None:
    """Raise :class:`AgreementError`, on every rank, if forward has run in another precision on some rank."""
    given = [(r.precision, rank) for r, rank in zip(reports, collectives.global_ranks, strict=True) if r.precision]
    for number, rank in given:
        if number != given[0][0]:
            raise AgreementError(
                f"ranks differ in autocast: forward has not run in the same precisions on rank {rank} as on rank "
                f"{given[0][1]} (on rank {collectives.global_rank}: {own or 'there was none'}); make it the same on all"
            )


def weights_of_all(reports: Sequence[Report]) -> list[float] | None:
    """What each share counts, None if no weights were given; raises :class:`OptionError` if some were."""
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
