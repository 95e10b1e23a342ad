"""The functions that a training loop calls: batches, accumulation, stops, skipped batches, metrics, checks."""

from lockstep.loop.accumulation import accumulate as accumulate
from lockstep.loop.balanced_sampler import BalancedSampler as BalancedSampler
from lockstep.loop.batches import Batches as Batches
from lockstep.loop.batches import batches as batches
from lockstep.loop.gather_rows import GatheredRows as GatheredRows
from lockstep.loop.gather_rows import gather_rows as gather_rows
from lockstep.loop.in_sync import check_in_sync as check_in_sync
from lockstep.loop.mean_over_ranks import mean_over_ranks as mean_over_ranks
from lockstep.loop.metrics import mean as mean
from lockstep.loop.metrics import total as total
from lockstep.loop.shard import shard as shard
from lockstep.loop.statistics import TrainingStatistics as TrainingStatistics
from lockstep.loop.statistics import statistics as statistics
from lockstep.loop.stop_and_skip import agree as agree
from lockstep.loop.stop_and_skip import should_stop as should_stop
from lockstep.loop.stop_and_skip import skip_batch as skip_batch
from lockstep.loop.stop_and_skip import skip_on as skip_on
from lockstep.loop.stop_and_skip import skipped as skipped
from lockstep.loop.stop_and_skip import stop_when as stop_when

__all__ = [
    "BalancedSampler",
    "Batches",
    "GatheredRows",
    "TrainingStatistics",
    "accumulate",
    "agree",
    "batches",
    "check_in_sync",
    "gather_rows",
    "mean",
    "mean_over_ranks",
    "shard",
    "should_stop",
    "skip_batch",
    "skip_on",
    "skipped",
    "statistics",
    "stop_when",
    "total",
]
