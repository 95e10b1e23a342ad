"""Detects parameters that were changed on gradients that had not been reduced."""

import warnings
from collections.abc import Sequence
from ctypes import string_at
from operator import attrgetter
from typing import NamedTuple

from torch.nn import Parameter

from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.parameters import ManagedParameter
from lockstep.distributed.reduction.values import find_difference
from lockstep.dtensors import is_dtensor

_version_of = attrgetter("parameter._version")
_PARAMETERS, _BYTES = 3, 64  # how many parameters are compared, and how many bytes of each


class Drift(NamedTuple):
    """A parameter whose values differ between ranks."""

    name: str
    """The first parameter that differs."""
    other: int | None
    """The rank whose values differ from those of the group's first; None if values have not been compared."""
    first: int = 0
    """The group's first rank."""


class DriftDetector:
    """Compares version counters when a backward pass begins; costs nothing while every pass synchronises.

    A change through ``p.data`` does not raise the counter. On the CPU, where reading does not wait for a device, the
    first bytes of some parameters are compared as well: an optimizer step changes nearly all of them.

    A change may be harmless, such as a checkpoint loaded on all ranks. The rank's report therefore only tells of a
    suspicion, and the ranks then compare values. Without a pass that synchronises they cannot; there, a second change
    is taken for an optimizer step.
    """

    def __init__(self, parameters: Sequence[ManagedParameter], global_rank: int) -> None:
        self._parameters, self._global_rank = parameters, global_rank
        self._versions: list[int] | None = None
        plain = [member for member in parameters if not is_dtensor(member.parameter)]
        self._some = plain[:: max(1, -(-len(plain) // _PARAMETERS))]
        self._first_bytes: list[bytes] = []
        self.suspects = False
        """True if parameters were changed while their gradients were local, and the ranks have not compared them
        since."""

    @property
    def is_unused(self) -> bool:
        """True if no gradient is local to this rank, and no drift is suspected."""
        return self._versions is None and not self.suspects

    @property
    def has_local_gradients(self) -> bool:
        """True if some pass since the last round has not synchronised: gradients are this rank's only."""
        return self._versions is not None

    def check(self, synchronises: bool) -> None:
        """Look at the parameters as a backward pass begins; warn if they have changed twice since the last one that
        synchronised, and this one does not."""
        before = self._versions
        if before is None and synchronises:
            return
        versions = list(map(_version_of, self._parameters))
        first_bytes = _first_bytes([member.parameter for member in self._some])
        changed = None if before is None else self._changed(before, versions, first_bytes)
        self._versions, self._first_bytes = (None, []) if synchronises else (versions, first_bytes)
        if changed is not None:
            again, self.suspects = self.suspects, True
            if again and not synchronises:
                warn_of_drift(Drift(changed, None), self._global_rank)

    def compare(self, parameters: Sequence[ManagedParameter], collectives: Collectives) -> Drift | None:
        """Compare values between all ranks, which all must call this; return the same difference on every rank.

        Communicates what :func:`find_difference` does.
        """
        self.suspects = False
        found = find_difference([(each.name, each.parameter) for each in parameters], collectives)
        return None if found is None else Drift(found.name, found.rank, collectives.global_ranks[0])

    def _changed(self, before: Sequence[int], versions: Sequence[int], first_bytes: Sequence[bytes]) -> str | None:
        """Return the name of the first parameter whose values have changed."""
        if before != versions:
            return next(m.name for m, old, new in zip(self._parameters, before, versions, strict=True) if old != new)
        for member, was, now in zip(self._some, self._first_bytes, first_bytes, strict=True):
            if was != now:
                return member.name
        return None

    def forget(self) -> None:
        """Note that gradients are the same on all ranks again; a suspicion stays until values are compared."""
        self._versions, self._first_bytes = None, []


def _first_bytes(parameters: Sequence[Parameter]) -> list[bytes]:
    """Return the first bytes of each parameter; empty unless it is contiguous and in host memory."""
    return [
        string_at(p.data_ptr(), min(_BYTES, p.nbytes)) if p.is_cpu and p.is_contiguous() and p.nbytes else b""
        for p in parameters
    ]


def warn_of_drift(drift: Drift, rank: int) -> None:
    """Warn that replicas have drifted apart because a synchronisation was left out."""
    differs = f", and has other values on rank {drift.other} than on rank {drift.first}"
    how = ", again and again" if drift.other is None else differs
    warnings.warn(
        f"rank {rank}: parameter {drift.name} was changed while its gradient was only one rank's{how}: the replicas "
        "have drifted apart. The last backward before optimizer.step() must not be under no_sync() or "
        "set_requires_gradient_sync(False)",
        stacklevel=3,
    )
