"""Compares the values of parameters and buffers between ranks.

A :class:`DriftDetector` suspects that parameters were changed on gradients that had not been reduced.
"""

import warnings
from collections.abc import Sequence
from ctypes import string_at
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter

from lockstep.digests import Digests
from lockstep.distributed.comm.agreement import all_gather_object, first_differing
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.managed_parameters import ManagedParameter
from lockstep.errors import OutOfSyncError
from lockstep.inner_tensors import is_plain


def check_equal_values(
    named: Sequence[tuple[str, Tensor]],
    collectives: Collectives,
    kind: str = "parameter",
    what: str = "was put into the module after it was replicated",
) -> None:
    """Raise :class:`OutOfSyncError`, on every rank, if a tensor differs between ranks: see :func:`find_difference`."""
    found = find_difference(named, collectives)
    if found is not None:
        raise OutOfSyncError(
            f"{kind} {found.name} {what}, and has other values on rank {found.rank} than on rank "
            f"{collectives.global_ranks[0]}, so gradients are of different networks; no gradient has been handed out. "
            "Give every rank the same values (the same checkpoint, the same seed, "
            "torch.distributed.broadcast) before forward, or replicate when the module is complete"
        )


class Difference(NamedTuple):
    """The first tensor that differs between some rank and the group's first rank."""

    name: str
    rank: int
    """The rank that differs, as messages name it."""
    first: int
    """The group's first rank."""
    digests: tuple[str, str]
    """The digests of the values on the first rank and on the other one."""


def find_difference(named: Sequence[tuple[str, Tensor]], collectives: Collectives) -> Difference | None:
    """Return the first tensor whose bits differ on some rank from the group's first; the same on every rank.

    Communicates what :func:`all_gather_object` does, and once more if there is a difference.
    """
    if not named:
        return None
    digests = Digests([tensor for _, tensor in named])
    whole = int(digests.digest(collectives.device))
    if first_differing(all_gather_object(whole, "digest of all values", collectives)) is None:
        return None
    rows = all_gather_object(digests.each(), "digests of values", collectives)
    for number, (name, _) in enumerate(named):
        for rank, row in zip(collectives.global_ranks, rows, strict=True):
            if row[number] != rows[0][number]:
                first, other = (f"{each[number] % 2**64:016x}" for each in (rows[0], row))
                return Difference(name, rank, collectives.global_ranks[0], (first, other))
    return None


# ------------------------------------------------------------------------------------------ drift


_version_of = attrgetter("parameter._version")
_PARAMETERS, _BYTES = 3, 64  # how many parameters are compared, and how many bytes of each


class _Seen(NamedTuple):
    """The parameters as a backward pass that does not synchronise has found them."""

    versions: list[int]
    first_bytes: list[bytes]


class DriftDetector:
    """Compares version counters when a backward pass begins; costs nothing while every pass synchronises.

    A change through ``p.data`` does not raise the counter. On the CPU, where reading does not wait for a device, the
    first bytes of some parameters are compared as well: an optimizer step changes nearly all of them.

    A change may be harmless, such as a checkpoint loaded on all ranks. The rank's report therefore only tells of a
    suspicion, and the ranks then compare values. Without a pass that synchronises they cannot; there, a second change
    is taken for an optimizer step.
    """

    def __init__(self, parameters: Sequence[ManagedParameter], global_rank: int) -> None:
        self._parameters = parameters
        self._global_rank = global_rank
        self._seen: _Seen | None = None  # while gradients are local to this rank
        plain = [member for member in parameters if is_plain(member.parameter)]
        self._some = plain[:: max(1, -(-len(plain) // _PARAMETERS))]
        self.suspects = False
        """True if parameters were changed while their gradients were local, and the ranks have not compared them
        since."""

    @property
    def is_unused(self) -> bool:
        """True if no gradient is local to this rank, and no drift is suspected."""
        return self._seen is None and not self.suspects

    @property
    def has_local_gradients(self) -> bool:
        """True if some pass since the last round has not synchronised: gradients are this rank's only."""
        return self._seen is not None

    def check(self, synchronises: bool) -> None:
        """Look at the parameters as a backward pass begins; warn if they have changed twice since the last one that
        synchronised, and this one does not."""
        before = self._seen
        if before is None and synchronises:
            return
        seen = _Seen(
            list(map(_version_of, self._parameters)), _first_bytes([member.parameter for member in self._some])
        )
        changed = None if before is None else self._changed(before, seen)
        self._seen = None if synchronises else seen
        if changed is not None:
            again, self.suspects = self.suspects, True
            if again and not synchronises:
                warn_of_drift(changed, self._global_rank)

    def compare(self, parameters: Sequence[ManagedParameter], collectives: Collectives) -> Difference | None:
        """Compare values between all ranks, which all must call this; return the same difference on every rank.

        Communicates what :func:`find_difference` does.
        """
        self.suspects = False
        return find_difference([(each.name, each.parameter) for each in parameters], collectives)

    def _changed(self, before: _Seen, now: _Seen) -> str | None:
        """Return the name of the first parameter whose values have changed."""
        versions = zip(self._parameters, before.versions, now.versions, strict=True)
        first_bytes = zip(self._some, before.first_bytes, now.first_bytes, strict=True)
        return next((member.name for member, was, then in chain(versions, first_bytes) if was != then), None)

    def forget(self) -> None:
        """Note that gradients are the same on all ranks again; a suspicion stays until values are compared."""
        self._seen = None


def _first_bytes(parameters: Sequence[Parameter]) -> list[bytes]:
    """Return the first bytes of each parameter; empty unless it is contiguous, in host memory of its own."""
    return [
        string_at(p.data_ptr(), min(_BYTES, p.nbytes)) if p.is_cpu and p.is_contiguous() and p.data_ptr() else b""
        for p in parameters
    ]


def warn_of_drift(name: str, rank: int, found: Difference | None = None) -> None:
    """Warn that replicas have drifted apart because a synchronisation was left out.

    ``name``: a parameter that has changed; ``found``: the difference, if values have been compared.
    """
    differs = (
        "again and again" if found is None else f"and has other values on rank {found.rank} than on rank {found.first}"
    )
    warnings.warn(
        f"rank {rank}: parameter {name} was changed while its gradient was only one rank's, {differs}: the replicas "
        "have drifted apart. The last backward before optimizer.step() must not be under no_sync() or "
        "set_requires_gradient_sync(False)",
        stacklevel=3,
    )
