"""What a replicated module has done so far."""

from torch.nn import Module

from lockstep.distributed.replication import replication_of
from lockstep.phases import Statistics


def statistics(module: Module) -> Statistics:
    """How often each phase ran for a replicated module, and for how many seconds of this rank's time.

    ``calls["collective"]`` counts collectives; ``seconds["wait"]`` is what backward waited for them at its end.
    Communicates nothing.

    Stands for: ``DistributedDataParallel._get_ddp_logging_data``.
    """
    return replication_of(module, "statistics").statistics()
