"""lockstep: data-parallel training for PyTorch whose replicas stay in lockstep, or say at once why they cannot."""

from lockstep import errors as errors
from lockstep import local as local
from lockstep.local.data_parallel import DataParallel as DataParallel
from lockstep.local.data_parallel import data_parallel as data_parallel
from lockstep.local.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from lockstep.phases import Event as Event
from lockstep.phases import Statistics as Statistics

__version__ = "0.1.0"
