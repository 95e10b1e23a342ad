"""Notices parameters that were changed on gradients that only this rank had."""

import warnings
from collections.abc import Sequence

from lockstep.distributed.gradients import ManagedParameter


class DriftWatch:
    """Looks at version counters when a backward pass begins; costs nothing while every pass synchronises."""

    def __init__(self, parameters: Sequence[ManagedParameter], rank: int) -> None:
        self._parameters, self._rank = parameters, rank
        self._versions: list[int] | None = None

    def look(self, synchronises: bool) -> None:
        """A backward pass begins; warns if parameters have changed since one that did not synchronise."""
        before = self._versions
        if before is None and synchronises:
            return
        versions = [member.parameter._version for member in self._parameters]
        self._versions = None if synchronises else versions
        if before is not None and before != versions:
            names = zip(self._parameters, before, versions, strict=True)
            changed = next(member.name for member, old, new in names if old != new)
            warnings.warn(
                f"rank {self._rank}: parameter {changed} was changed while its gradient was only this rank's: the "
                "replicas "
                "have drifted apart. The last backward before optimizer.step() must not be under no_sync() or "
                "set_requires_gradient_sync(False)",
                stacklevel=3,
            )

    def forget(self) -> None:
        """Gradients are common again."""
        self._versions = None
