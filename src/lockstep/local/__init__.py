"""One process, many devices: DataParallel and its building blocks."""

from lockstep.local import comm as comm
from lockstep.local.comm import broadcast as broadcast
from lockstep.local.comm import broadcast_coalesced as broadcast_coalesced
from lockstep.local.comm import reduce_add as reduce_add
from lockstep.local.comm import reduce_add_coalesced as reduce_add_coalesced
from lockstep.local.data_parallel import DataParallel as DataParallel
from lockstep.local.data_parallel import data_parallel as data_parallel
from lockstep.local.exchange import current_replica as current_replica
from lockstep.local.functions import Broadcast as Broadcast
from lockstep.local.functions import Gather as Gather
from lockstep.local.functions import ReduceAdd as ReduceAdd
from lockstep.local.functions import ReduceAddCoalesced as ReduceAddCoalesced
from lockstep.local.functions import Scatter as Scatter
from lockstep.local.replicas import ReplicaSet as ReplicaSet
from lockstep.local.replicas import replicate as replicate
from lockstep.local.scatter_gather import gather as gather
from lockstep.local.scatter_gather import scatter as scatter
from lockstep.local.scatter_gather import scatter_kwargs as scatter_kwargs
from lockstep.local.scatter_gather import shared as shared
from lockstep.local.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from lockstep.local.workers import parallel_apply as parallel_apply
from lockstep.phases import Event as Event
from lockstep.phases import Statistics as Statistics

__all__ = [
    "Broadcast",
    "DataParallel",
    "Event",
    "Gather",
    "ReduceAdd",
    "ReduceAddCoalesced",
    "ReplicaSet",
    "Scatter",
    "Statistics",
    "SyncBatchNorm",
    "broadcast",
    "broadcast_coalesced",
    "comm",
    "current_replica",
    "data_parallel",
    "gather",
    "parallel_apply",
    "reduce_add",
    "reduce_add_coalesced",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "shared",
]
