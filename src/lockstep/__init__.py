"""lockstep: data-parallel training for PyTorch whose replicas stay in lockstep, or say at once why they cannot."""

from lockstep import distributed as distributed
from lockstep import errors as errors
from lockstep import local as local
from lockstep.checkpoints import ResumableSampler as ResumableSampler
from lockstep.checkpoints import Resumed as Resumed
from lockstep.checkpoints import per_rank as per_rank
from lockstep.checkpoints import resume as resume
from lockstep.checkpoints import save as save
from lockstep.data.global_batches import GlobalBatches as GlobalBatches
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
from lockstep.distributed.metrics import total as total
from lockstep.distributed.replicate import replicate as replicate
from lockstep.distributed.statistics import TrainingStatistics as TrainingStatistics
from lockstep.distributed.statistics import statistics as statistics
from lockstep.distributed.uneven import Batches as Batches
from lockstep.distributed.uneven import batches as batches
from lockstep.distributed.uneven import shard as shard
from lockstep.errors import PeerFailure as PeerFailure
from lockstep.local.data_parallel import DataParallel as DataParallel
from lockstep.local.data_parallel import data_parallel as data_parallel
from lockstep.local.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from lockstep.phases import Event as Event
from lockstep.phases import Statistics as Statistics
from lockstep.session.session import Session as Session
from lockstep.session.session import session as session
from lockstep.session.watch import watch as watch
from lockstep.shares.audit import audit as audit
from lockstep.shares.fingerprint import fingerprint as fingerprint
from lockstep.shm import register as _register_backend

__version__ = "0.1.0"

__all__ = [
    "Batches",
    "DataParallel",
    "DistributedDataParallel",
    "Event",
    "GlobalBatches",
    "PeerFailure",
    "ResumableSampler",
    "Resumed",
    "Session",
    "Statistics",
    "SyncBatchNorm",
    "TrainingStatistics",
    "__version__",
    "accumulate",
    "agree",
    "audit",
    "batches",
    "check_in_sync",
    "data_parallel",
    "distributed",
    "errors",
    "fingerprint",
    "load_training_state_dict",
    "local",
    "mean",
    "mean_over_ranks",
    "per_rank",
    "replicate",
    "resume",
    "save",
    "session",
    "shard",
    "should_stop",
    "skip_batch",
    "skip_on",
    "skipped",
    "statistics",
    "stop_when",
    "total",
    "training_state_dict",
    "watch",
]

_register_backend()
