"""Errors for names that have moved, or that users look for in another package."""

_ROOMS = {
    "checkpoints": ("Resumed", "per_rank"),
    "distributed": ("load_training_state_dict", "training_state_dict"),
    "local": ("Event", "Statistics", "SyncBatchNorm", "data_parallel"),
    "loop": (
        "Batches",
        "TrainingStatistics",
        "accumulate",
        "agree",
        "batches",
        "check_in_sync",
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
    ),
    "errors": ("PeerFailure",),
    "sharding": ("ShardedOptimizer", "full_state_dict", "shard_optimizer"),
    "shares": ("GlobalBatches", "audit", "fingerprint"),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}


def where_it_is(package: str, name: str) -> AttributeError:
    """Return the error for a name that ``package`` does not have, which says where it is, if any package has it."""
    room = _HOMES.get(name)
    hint = "" if room is None else f"; it is in lockstep.{room}: from lockstep.{room} import {name}"
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
