"""What a replicated module has done so far."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn import Module

from lockstep.distributed.replication import replication_of
from lockstep.phases import Statistics


@dataclass(slots=True)
class TrainingStatistics(Statistics):
    """What a replicated module has done so far, on this rank.

    ``calls`` and ``seconds`` are those of each phase: ``calls["collective"]`` counts collectives, ``seconds["wait"]``
    is what backward waited for them.
    """

    rounds: int = 0
    """Backward passes that have synchronised."""
    bytes_reduced: int = 0
    """Bytes of this rank's gradients, buffers and reports that have gone into all-reduces."""
    exposed_seconds: float = 0.0
    """How long backward has stood still for communication that nothing hid, the other ranks' lateness included."""
    hidden_seconds: float = 0.0
    """How long communication was under way while backward went on."""
    unused: list[str] = field(default_factory=list)
    """Parameters that had no gradient on this rank in the last round, by name."""
    plan_changes: dict[str, int] = field(default_factory=dict)
    """Why gradients were put into other buckets, and how often."""
    waited: list[float] = field(default_factory=list)
    """By rank, if all ranks were asked: their ``exposed_seconds``."""

    @property
    def late_rank(self) -> int | None:
        """The rank that has waited least, for which the others have waited; None if ranks were not asked."""
        return min(range(len(self.waited)), key=self.waited.__getitem__) if self.waited else None

    def as_dict(self) -> dict[str, Any]:
        """Everything as one dictionary, for a logger."""
        return asdict(self) | {"late_rank": self.late_rank}

    def as_json(self) -> str:
        """Everything as one line of JSON."""
        return json.dumps(self.as_dict())


def statistics(module: Module, *, all_ranks: bool = False) -> TrainingStatistics:
    """What a replicated module has done so far on this rank: rounds, bytes, communication that was hidden or not.

    Always on: what is counted are plain numbers.

    Args:
        module: A module from :func:`lockstep.replicate`, or a :class:`lockstep.DistributedDataParallel`.
        all_ranks: Whether to ask all ranks how long they have waited; then every rank has to call this. The rank that
            has waited least is the one for which the others have waited. Compare two calls for what has happened
            between them.

    Communicates nothing; with ``all_ranks`` one all-gather of one number.

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
    phases, reducer = replication.statistics(), replication.reducer
    found = TrainingStatistics(phases.calls, phases.seconds, exposed_seconds=phases.seconds.get("wait", 0.0))
    if reducer is None:
        return found
    found.rounds = reducer.rounds
    found.bytes_reduced = reducer.collectives.traffic.bytes_reduced
    found.hidden_seconds = reducer.collectives.traffic.hidden_seconds
    found.plan_changes = dict(reducer.setup.plan_changes)
    used = reducer.outcome.usage.latest
    found.unused = [each.name for each in reducer.parameters if each.index < len(used) and not used[each.index]]
    if all_ranks:
        own = torch.tensor([found.exposed_seconds], dtype=torch.float64, device=reducer.collectives.device)
        found.waited = [float(each) for each in reducer.collectives.all_gather(own, "waiting of the ranks")]
    return found
