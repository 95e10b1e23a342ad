"""Which optimizers may be cut, and how fine: a table of PyTorch's classes; for any other class the program decides.

An optimizer that treats each element of a parameter for itself may be cut anywhere (``"element"``). One that treats
each parameter for itself needs whole ones (``"tensor"``). ``tests/sharding/test_granularity.py`` compares each entry
with the optimizer that is not cut, bit for bit, with all options.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch.optim import Optimizer

from lockstep.errors import OptionError, ShardingError, UnknownOptimizerError

Granularity = Literal["element", "tensor"]

TABLE: dict[str, Granularity | Literal["nothing"]] = {
    "ASGD": "element",
    "Adadelta": "element",
    "Adafactor": "tensor",  # factors of rows and columns, and the root mean square of a parameter
    "Adagrad": "element",
    "Adam": "element",
    "AdamW": "element",
    "Adamax": "element",
    "LBFGS": "nothing",  # one direction for all parameters
    "Muon": "tensor",  # orthogonalises whole matrices
    "NAdam": "element",
    "RAdam": "element",
    "RMSprop": "element",
    "Rprop": "element",
    "SGD": "element",
    "SparseAdam": "tensor",  # sparse gradients have no slices
}
"""Classes of ``torch.optim``, with every option that they take (``differentiable`` is refused for all)."""

_WORDS = (
    'granularity="tensor" gives each rank whole parameters: right if step() treats each parameter for itself, without '
    'a norm or another number of several parameters, random numbers, or communication. granularity="element" also '
    "cuts parameters: right if step() treats each element for itself. If neither holds, use the optimizer as it is"
)


def granularity_of(kind: type[Optimizer], given: str | None) -> Granularity:
    """Return how fine an optimizer of this class is cut; raises :class:`UnknownOptimizerError` if neither the table nor
    the program says it."""
    if given is not None and given not in get_args(Granularity):
        raise OptionError(f"granularity is {given!r}, and can be 'element' or 'tensor'. {_WORDS}")
    in_table = _known(kind)
    if in_table == "nothing":
        raise ShardingError(
            f"{kind.__name__} works on all parameters at once, so it cannot be sharded; use it as it is"
        )
    if given == "element" and in_table == "tensor":
        raise OptionError(f"{kind.__name__} needs whole parameters, so its granularity cannot be 'element'")
    found = given or in_table
    if found is None:
        raise UnknownOptimizerError(
            f"shard_optimizer() does not know the step of {kind.__module__}.{kind.__qualname__}, so say how its state "
            f"may be divided. {_WORDS}"
        )
    return "element" if found == "element" else "tensor"


def is_known(kind: type[Optimizer]) -> bool:
    """Return True if the step of a class is one in the table."""
    return _known(kind) is not None


def _known(kind: type[Optimizer]) -> str | None:
    """Return the entry of a class, or of the one from which it has all of its step; None if there is none."""
    for base in kind.__mro__:
        name = base.__name__
        if name in TABLE and base is getattr(torch.optim, name, None):
            return TABLE[name] if _steps_like(kind, base) else None
    return None


def _steps_like(kind: Any, base: Any) -> bool:
    own_step = step_of(base)
    is_pytorchs = own_step.__module__.startswith("torch.optim")  # and not what a program has put into the class
    return is_pytorchs and step_of(kind) is own_step and _init_group(kind) is _init_group(base)


def _init_group(kind: Any) -> Any:
    return getattr(kind, "_init_group", None)


def step_of(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """Return the step of an optimizer's class without its hooks."""
    step: Callable[[Optimizer], object] = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
