"""Many processes: replication over a process group. The functions for a training loop are in ``lockstep.loop``.

The packages below this one are private.
"""

from lockstep._base.moved import where_it_is
from lockstep.distributed.reduction.buckets.comm_hooks import GradBucket as GradBucket
from lockstep.distributed.replication.ddp import DistributedDataParallel as DistributedDataParallel
from lockstep.distributed.replication.replicate import Replicated as Replicated
from lockstep.distributed.replication.replicate import replicate as replicate
from lockstep.distributed.replication.replication import load_training_state_dict as load_training_state_dict
from lockstep.distributed.replication.replication import training_state_dict as training_state_dict
from lockstep.shm.group import ProcessGroupShm as ProcessGroupShm
from lockstep.shm.runtime import ShmOptions as ShmOptions

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "ProcessGroupShm",
    "Replicated",
    "ShmOptions",
    "load_training_state_dict",
    "replicate",
    "training_state_dict",
]


def __getattr__(name: str) -> object:
    raise where_it_is(__name__, name)
