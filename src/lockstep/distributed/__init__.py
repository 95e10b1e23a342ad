"""Many processes: replication over a process group."""

from lockstep.distributed.accumulation import accumulate as accumulate
from lockstep.distributed.checkpoint import load_training_state_dict as load_training_state_dict
from lockstep.distributed.checkpoint import training_state_dict as training_state_dict
from lockstep.distributed.ddp import DistributedDataParallel as DistributedDataParallel
from lockstep.distributed.in_sync import check_in_sync as check_in_sync
from lockstep.distributed.loop import agree as agree
from lockstep.distributed.loop import should_stop as should_stop
from lockstep.distributed.loop import skip_batch as skip_batch
from lockstep.distributed.loop import skip_on as skip_on
from lockstep.distributed.loop import skipped as skipped
from lockstep.distributed.loop import stop_when as stop_when
from lockstep.distributed.mean import mean_over_ranks as mean_over_ranks
from lockstep.distributed.metrics import mean as mean
from lockstep.distributed.reduction.comm_hooks import GradBucket as GradBucket
from lockstep.distributed.replicate import Replicated as Replicated
from lockstep.distributed.replicate import replicate as replicate
from lockstep.distributed.statistics import statistics as statistics
from lockstep.distributed.uneven import Batches as Batches
from lockstep.distributed.uneven import batches as batches
from lockstep.distributed.uneven import shard as shard
from lockstep.shm import ProcessGroupShm as ProcessGroupShm
from lockstep.shm import ShmOptions as ShmOptions

__all__ = [
    "Batches",
    "DistributedDataParallel",
    "GradBucket",
    "ProcessGroupShm",
    "Replicated",
    "ShmOptions",
    "accumulate",
    "agree",
    "batches",
    "check_in_sync",
    "load_training_state_dict",
    "mean",
    "mean_over_ranks",
    "replicate",
    "shard",
    "should_stop",
    "skip_batch",
    "skip_on",
    "skipped",
    "statistics",
    "stop_when",
    "training_state_dict",
]
