"""Detects some of the optimizers that do more than their granularity allows."""

from collections.abc import Collection, Iterator
from inspect import unwrap
from types import CodeType
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import OptionError, ShardingError
from lockstep.sharding.granularity import is_known

_SENDS = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_reduce_coalesced", "all_to_all"),
    *("all_to_all_single", "batch_isend_irecv", "broadcast", "isend", "reduce_scatter", "reduce_scatter_tensor"),
}
"""Collectives whose names no method of tensors has."""
_OWN = {"param_groups", "state"}


def check_can_be_sharded(optimizer: Optimizer) -> None:
    """Raise :class:`ShardingError` or :class:`OptionError` if an optimizer cannot step on a part of its parameters."""
    attributes = vars(optimizer)
    if not attributes.keys() >= _OWN:
        raise ShardingError(
            f"{type(optimizer).__name__} has no groups and state of its own: it wraps another optimizer; call "
            "shard_optimizer() with that one, before it is wrapped"
        )
    if "step" in attributes and not hasattr(attributes["step"], "_wrapped_by_lr_sched"):
        raise ShardingError("optimizer.step has been replaced on this instance; call shard_optimizer() before that")
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptionError(f"parameter group {number} has differentiable=True, which cannot go through slices")
    if not is_known(type(optimizer)):
        _check_communicates_nothing(type(optimizer))
        _check_attributes(optimizer)


def _check_communicates_nothing(kind: type[Optimizer]) -> None:
    step: Any = unwrap(kind.step)
    if not hasattr(step, "__code__"):
        return
    names = set(_names_in(step.__code__))
    uses_package = any(_is_distributed(step.__globals__.get(name)) for name in names) or "distributed" in names
    if uses_package and names & _SENDS:
        raise ShardingError(
            f"{kind.__name__}.step() communicates through torch.distributed ({', '.join(sorted(names & _SENDS))}), so "
            "ranks cannot step on different parameters; use it as it is, or an optimizer that does not communicate"
        )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)


def _is_distributed(value: Any) -> bool:
    return value is torch.distributed or str(getattr(value, "__module__", "")).startswith("torch.distributed")


def _check_attributes(optimizer: Optimizer) -> None:
    """Raise :class:`ShardingError` if an optimizer holds its parameters in other places than its groups and state."""
    in_groups = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    groups = [id(group) for group in optimizer.param_groups]
    for name, value in vars(optimizer).items():
        if name in _OWN:
            continue
        if isinstance(value, Optimizer) and [id(group) for group in value.param_groups] != groups:
            raise ShardingError(
                f"{type(optimizer).__name__} has another optimizer in its attribute {name!r}, with groups of its own; "
                "call shard_optimizer() with that one, before it is wrapped"
            )
        if any(id(each) in in_groups for each in _leaves(value, 3)):
            raise ShardingError(
                f"{type(optimizer).__name__} keeps its parameters in its attribute {name!r}, so it would step on all "
                "of them on every rank; use it as it is"
            )


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, dict) and depth:
        for each in (*value.keys(), *value.values()):
            yield from _leaves(each, depth - 1)
    elif isinstance(value, list | tuple | set) and depth:
        for each in value:
            yield from _leaves(each, depth - 1)
    elif isinstance(value, Tensor):
        yield value


def check_slices(kind: type[Optimizer], state: dict[Tensor, dict[str, Any]]) -> None:
    """Raise :class:`ShardingError` if the state of a slice is not one of numbers and plain tensors of its shape."""
    for tensor, values in state.items():
        for name, value in values.items():
            fits = type(value) is Tensor and (value.shape == tensor.shape or value.numel() == 1)
            if not fits and not isinstance(value, int | float | bool | str | None):
                what = f"a {type(value).__name__}" + (
                    f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                )
                raise ShardingError(
                    f"{kind.__name__} has {what} in its state ({name!r}) for a slice of shape {tuple(tensor.shape)}: "
                    'it does not treat each element for itself; shard it with granularity="tensor"'
                )


class RandomNumbers:
    """The states of the generators of the CPU and of some devices at one moment."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._devices = [each for each in devices if each.type != "cpu"]
        self._states = self._now()

    def _now(self) -> list[Tensor]:
        states = [torch.get_device_module(each).get_rng_state(each) for each in self._devices]
        return [torch.get_rng_state(), *states]

    def check_none_drawn(self, kind: type[Optimizer]) -> None:
        """Raise :class:`ShardingError` if random numbers have been drawn since."""
        if not all(map(torch.equal, self._states, self._now())):
            raise ShardingError(
                f"{kind.__name__}.step() draws random numbers, of which ranks that step on different parameters draw "
                "others than one rank alone; use it as it is"
            )
