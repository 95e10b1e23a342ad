"""Optimizers whose state, and the work of whose step, is divided between the ranks."""

from lockstep._base.moved import where_it_is as _where_it_is
from lockstep.sharding.optimizer import ShardedOptimizer as ShardedOptimizer
from lockstep.sharding.optimizer import full_state_dict as full_state_dict
from lockstep.sharding.optimizer import shard_optimizer as shard_optimizer
from lockstep.sharding.state_slice import StateSlice as StateSlice

__all__ = ["ShardedOptimizer", "StateSlice", "full_state_dict", "shard_optimizer"]


def __getattr__(name: str) -> object:
    raise _where_it_is(__name__, name)
