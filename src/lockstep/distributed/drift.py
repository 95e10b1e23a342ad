"""Notices parameters that were changed on gradients that only this rank had."""

import warnings
from collections.abc import Sequence
from ctypes import string_at

from torch.nn import Parameter

from lockstep.distributed.dtensors import is_dtensor
from lockstep.distributed.gradients import ManagedParameter

_PARAMETERS, _BYTES = 3, 64  # of so many parameters so many bytes are compared


class DriftWatch:
    """Looks at version counters when a backward pass begins; costs nothing while every pass synchronises.

    A change through ``p.data`` leaves the counter as it was. On the CPU, where looking does not mean waiting, the first
    bytes of some parameters are compared, too: a step changes nearly all.
    """

    def __init__(self, parameters: Sequence[ManagedParameter], global_rank: int) -> None:
        self._parameters, self._global_rank = parameters, global_rank
        self._versions: list[int] | None = None
        plain = [member for member in parameters if not is_dtensor(member.parameter)]
        self._some = plain[:: max(1, -(-len(plain) // _PARAMETERS))]
        self._first_bytes: list[bytes] = []

    def look(self, synchronises: bool) -> None:
        """A backward pass begins; warns if parameters have changed since one that did not synchronise."""
        before = self._versions
        if before is None and synchronises:
            return
        versions = [member.parameter._version for member in self._parameters]
        first_bytes = _first_bytes([member.parameter for member in self._some])
        changed = None if before is None else self._changed(before, versions, first_bytes)
        self._versions, self._first_bytes = (None, []) if synchronises else (versions, first_bytes)
        if changed is not None:
            warnings.warn(
                f"rank {self._global_rank}: parameter {changed} was changed while its gradient was only this rank's: "
                "the replicas have drifted apart. The last backward before optimizer.step() must not be under "
                "no_sync() or set_requires_gradient_sync(False)",
                stacklevel=3,
            )

    def _changed(self, before: Sequence[int], versions: Sequence[int], first_bytes: Sequence[bytes]) -> str | None:
        """The name of the first parameter that has other values than it had."""
        for member, old, new in zip(self._parameters, before, versions, strict=True):
            if old != new:
                return member.name
        for member, was, now in zip(self._some, self._first_bytes, first_bytes, strict=True):
            if was != now:
                return member.name
        return None

    def forget(self) -> None:
        """Gradients are common again."""
        self._versions, self._first_bytes = None, []


def _first_bytes(parameters: Sequence[Parameter]) -> list[bytes]:
    """The first bytes of each parameter; none where they are not in this host's memory side by side."""
    return [
        string_at(p.data_ptr(), min(_BYTES, p.nbytes)) if p.is_cpu and p.is_contiguous() and p.nbytes else b""
        for p in parameters
    ]
