"""Compares the values of parameters and buffers between ranks.

A :class:`ValueChecker` compares them in every N-th round; each rank's report carries its digest. Parameters are read
after backward, between the optimizer steps of all ranks. Buffers that were equal on all ranks are read before forward
changes them. With shares a round is a step: parameters are read at its end, buffers at its start. A
:class:`DriftDetector` suspects that parameters were changed on gradients that had not been reduced.
"""

import warnings
from collections.abc import Hashable, Iterable, Sequence
from ctypes import string_at
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch
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


NOTHING, PARAMETERS, PARAMETERS_AND_BUFFERS = 0, 1, 2
"""The tensors in a rank's digest; nothing on a rank that has not read its values."""


class ValueChecker:
    """Compares the values of one module between ranks."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._of_buffers: Digests | None = None
        self._of_parameters: Digests | None = None

    def is_due(self, number: int) -> bool:
        """Return True if values are compared in round ``number``."""
        return number % self.every == 0

    def digest_buffers(self, buffers: Sequence[Tensor | None]) -> None:
        """Read buffers that are equal on all ranks, once, before the forward passes of a round."""
        if self._of_buffers is None:
            self._of_buffers = Digests([torch.empty(0) if tensor is None else tensor for tensor in buffers])

    def digest(self, parameters: Sequence[Tensor], device: torch.device) -> tuple[int, Tensor]:
        """Return this rank's digest of eight bytes, and before it the kind of tensors that it is of."""
        self._of_parameters = Digests(parameters)
        digest = self._of_parameters.digest(device)
        if self._of_buffers is None:
            return PARAMETERS, digest
        return PARAMETERS_AND_BUFFERS, digest + 5 * self._of_buffers.digest(device)

    def forget(self) -> None:
        """Drop the digests: the round is over."""
        self._of_buffers = self._of_parameters = None

    def check(
        self,
        told: Iterable[tuple[int, Hashable]],
        parameters: Sequence[str],
        buffers: Sequence[str],
        collectives: Collectives,
    ) -> None:
        """Raise :class:`OutOfSyncError`, on every rank, if digests differ between ranks.

        ``told``: kind and digest of each rank; ``parameters`` and ``buffers``: names of the tensors read, the same on
        all ranks. Communicates only if digests differ: what :func:`all_gather_object` does, for a digest of each
        tensor.
        """
        kinds: dict[int, set[Hashable]] = {}
        for kind, digest in told:
            kinds.setdefault(kind, set()).add(digest)
        kinds.pop(NOTHING, None)
        if any(len(different) > 1 for different in kinds.values()):
            raise OutOfSyncError(self._difference(parameters, buffers, collectives))

    def _difference(self, parameters: Sequence[str], buffers: Sequence[str], collectives: Collectives) -> str:
        of_parameters, of_buffers = self._of_parameters, self._of_buffers
        own = [0] * len(parameters) if of_parameters is None else of_parameters.each()
        own += [0] * len(buffers) if of_buffers is None else of_buffers.each()
        row = [of_parameters is not None, of_buffers is not None, *own]
        rows = all_gather_object(row, "digests of values", collectives)
        names = [*(f"parameter {name}" for name in parameters), *(f"buffer {name}" for name in buffers)]
        for place, name in enumerate(names):
            ranks: dict[int, list[int]] = {}
            for rank, (sees, sees_buffers, *digests) in zip(collectives.global_ranks, rows, strict=True):
                if sees and (place < len(parameters) or sees_buffers):
                    ranks.setdefault(digests[place], []).append(rank)
            if len(ranks) > 1:
                sides = sorted(ranks.values(), key=len, reverse=True)
                return (
                    f"rank {collectives.global_rank}: {name} is out of sync: "
                    f"{', '.join(_named(side) for side in sides[:-1])} {'has' if len(sides[0]) == 1 else 'have'} other "
                    f"values than {_named(sides[-1])}. Something changed it on one rank only: memory that is broken, "
                    "an optimizer step on gradients that were not synchronised, a learning rate or a random number "
                    "that differs by rank. No gradient has been handed out; load a checkpoint from before"
                )
        return (
            f"rank {collectives.global_rank}: ranks have given different digests of their values, and equal ones of "
            "each parameter and buffer: values were changed while they were looked at, or what computes digests is "
            "broken on a rank"
        )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


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
