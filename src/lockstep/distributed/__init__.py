"""Many processes: replication over a process group."""

from lockstep.distributed.accumulation import accumulate as accumulate
from lockstep.distributed.checkpoint import load_training_state_dict as load_training_state_dict
from lockstep.distributed.checkpoint import training_state_dict as training_state_dict
from lockstep.distributed.ddp import DistributedDataParallel as DistributedDataParallel
from lockstep.distributed.in_sync import check_in_sync as check_in_sync
from lockstep.distributed.mean import mean_over_ranks as mean_over_ranks
from lockstep.distributed.reduction.comm_hooks import GradBucket as GradBucket
from lockstep.distributed.replicate import Replicated as Replicated
from lockstep.distributed.replicate import replicate as replicate
from lockstep.distributed.statistics import statistics as statistics
from lockstep.shm import ProcessGroupShm as ProcessGroupShm
from lockstep.shm import ShmOptions as ShmOptions

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "ProcessGroupShm",
    "Replicated",
    "ShmOptions",
    "accumulate",
    "check_in_sync",
    "load_training_state_dict",
    "mean_over_ranks",
    "replicate",
    "statistics",
    "training_state_dict",
]
