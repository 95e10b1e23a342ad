"""``statistics()``: counts and times of a replicated module so far."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from torch.nn import Module

from lockstep.distributed.comm.agreement import all_gather_object
from lockstep.distributed.replication.reducer_replication import ReducerReplication
from lockstep.distributed.replication.replication import replication_of
from lockstep.phases import Statistics


@dataclass(slots=True)
class TrainingStatistics(Statistics):
    """Counts and times of a replicated module on this rank so far.

    ``calls`` and ``seconds`` are by phase: ``calls["collective"]`` is the number of collectives, ``seconds["wait"]``
    the time that backward waited for them.
    """

    rounds: int = 0
    """Number of backward passes that have synchronised."""
    bytes_reduced: int = 0
    """Bytes of this rank's gradients, buffers and reports that were all-reduced."""
    exposed_seconds: float = 0.0
    """Seconds that backward waited for communication, including the time until slower ranks arrived."""
    hidden_seconds: float = 0.0
    """Seconds of communication while backward ran."""
    unused: list[str] = field(default_factory=list)
    """Names of the parameters without a gradient on this rank in the last round."""
    plan_changes: dict[str, int] = field(default_factory=dict)
    """How often gradients were moved to other buckets, by reason."""
    waited: list[float] = field(default_factory=list)
    """The ``exposed_seconds`` of each rank, if all ranks were asked."""
    own_seconds: list[float | None] = field(default_factory=list)
    """The seconds of each rank's own work in a round, if all ranks were asked: from the end of one wait to the start of
    the next, the median of its last 16 rounds. None before its second round."""
    own_seconds_before: list[float | None] = field(default_factory=list)
    """The same for the rounds before those, up to 240; None if there were none."""

    shares: list[int] = field(default_factory=list)
    """The number of shares of each rank in the last step; empty without shares, as are the following."""
    share_seconds: list[float | None] = field(default_factory=list)
    """The seconds of a share on each rank, the median of its last steps. None before its third step."""
    saved_by_deal: float | None = None
    """The part of the slowest rank's time that this deal of shares saves, beside an equal one: 0.25 is a quarter."""

    @property
    def late_rank(self) -> int | None:
        """The rank that has waited least, for which the others have waited; None without ``all_ranks``."""
        return min(range(len(self.waited)), key=self.waited.__getitem__) if self.waited else None

    @property
    def slower_than_others(self) -> list[float | None]:
        """For each rank, ``own_seconds`` divided by the median of the other ranks; 2.0 means twice as long."""
        return [
            _ratio(own, [other for each, other in enumerate(self.own_seconds) if each != rank and other is not None])
            for rank, own in enumerate(self.own_seconds)
        ]

    @property
    def slower_than_before(self) -> list[float | None]:
        """For each rank, ``own_seconds`` divided by ``own_seconds_before``; 2.0 means twice as long as before."""
        return [
            _ratio(own, [] if before is None else [before])
            for own, before in zip(self.own_seconds, self.own_seconds_before, strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and properties as one dictionary, for a logger."""
        return asdict(self) | {
            "late_rank": self.late_rank,
            "slower_than_others": self.slower_than_others,
            "slower_than_before": self.slower_than_before,
        }

    def as_json(self) -> str:
        """Return all fields and properties as one line of JSON."""
        return json.dumps(self.as_dict())


def statistics(module: Module, *, all_ranks: bool = False) -> TrainingStatistics:
    """Return counts and times of a replicated module on this rank: rounds, bytes, hidden and exposed communication.

    They are always recorded, as plain numbers. Of a module with shares: how these are dealt to the ranks, and how long
    one takes on each.

    Args:
        module: A module from :func:`lockstep.replicate`, or a :class:`lockstep.DistributedDataParallel`.
        all_ranks: If True, gather from all ranks how long they have waited, and how long their own work takes. Every
            rank must then call this function. ``late_rank`` has waited least since the beginning;
            ``slower_than_others`` and ``slower_than_before`` compare the last 16 rounds.

    Communicates nothing; with ``all_ranks`` one all-reduce, and one all-gather of 128 bytes from each rank.

    Raises :class:`~lockstep.errors.NotReplicableError` for a module that is not replicated.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(2, 1), process_group=group)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> seen = statistics(model)
        >>> seen.rounds, seen.unused, seen.bytes_reduced > 0
        (1, [], True)

    Stands for: ``DistributedDataParallel._get_ddp_logging_data``.
    """
    replication = replication_of(module, "statistics")
    phases = replication.statistics()
    reducer = replication.reducer if isinstance(replication, ReducerReplication) else None
    found = TrainingStatistics(phases.calls, phases.seconds, exposed_seconds=phases.seconds.get("wait", 0.0))
    if replication.dealt is not None:
        dealt = replication.dealt
        found.shares = list(dealt.deal)
        found.share_seconds = [seconds if isfinite(seconds) else None for seconds in dealt.seconds]
        found.saved_by_deal = dealt.saved if isfinite(dealt.saved) else None
    if reducer is None:
        return found
    found.rounds = reducer.rounds
    found.bytes_reduced = reducer.collectives.comm_stats.bytes_reduced
    found.hidden_seconds = reducer.collectives.comm_stats.hidden_seconds
    found.plan_changes = dict(reducer.common.plan_changes)
    used = reducer.rank_state.used_at_last
    found.unused = [each.name for each in reducer.parameters if each.index < len(used) and not used[each.index]]
    if all_ranks:
        collectives = reducer.collectives
        own = found.exposed_seconds, collectives.comm_stats.recent, collectives.comm_stats.before
        rows: list[Any] = all_gather_object(own, "statistics()", collectives)
        found.waited = [waited for waited, _, _ in rows]
        found.own_seconds = [own for _, own, _ in rows]
        found.own_seconds_before = [before for _, _, before in rows]
    return found


def _ratio(own: float | None, others: Sequence[float]) -> float | None:
    """Return a time divided by the median of others; None if either is unknown."""
    reference = median(others) if others else 0.0
    return own / reference if own is not None and reference else None
