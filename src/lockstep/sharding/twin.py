"""The twin of a sharded optimizer: an optimizer of the same class and options, over the pieces of one rank."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import ShardingError

_OWN = {"param_groups", "state", "step"}
"""Attributes that an optimizer does not share with its twin; its hooks are not shared either."""


def make_twin(optimizer: Optimizer, kind: type[Optimizer]) -> Optimizer:
    """Return an optimizer of class ``kind`` without state or parameters, with the options of each group of
    ``optimizer``."""
    twin = kind.__new__(kind)
    vars(twin).update(shared_attributes(optimizer), state=defaultdict(dict))
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_"):
            vars(twin)[name] = type(value)() if isinstance(value, OrderedDict) else value
    vars(twin)["param_groups"] = [{**group, "params": []} for group in optimizer.param_groups]
    return twin


def shared_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer without parameters, state and hooks: defaults, GradScaler's factors,
    others."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OWN and not name.startswith(("_optimizer_", "_sharding"))
    }


def step_of(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """Return the step of an optimizer's class without its hooks, which the sharded optimizer runs."""
    step: Callable[[Optimizer], object] = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def check_attributes(optimizer: Optimizer) -> None:
    """Raise :class:`ShardingError` if an optimizer holds its parameters in other places than its groups and state."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in shared_attributes(optimizer).items():
        if any(id(each) in own for each in _leaves(value, 3)):
            raise ShardingError(
                f"{type(optimizer).__name__} keeps its parameters in its attribute {name!r}: it works on all of them "
                "at once, so its state cannot be sharded; use it as it is"
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


def copied_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the options of a group, without its parameters."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
