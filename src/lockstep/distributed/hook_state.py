"""State of communication hooks, saved and loaded: error feedback, iteration counts, random numbers."""

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from lockstep.errors import HookError


def hook_state(state: Any) -> Any:
    """What of a hook's state is worth keeping: its own ``state_dict``, or its attributes without process groups.

    Of NumPy's random numbers, which PowerSGD draws, the state is kept, so that ``torch.load(weights_only=True)`` takes
    it.
    """
    if state is None or _is_group(state):
        return None
    if callable(getattr(state, "state_dict", None)):
        return state.state_dict()
    if isinstance(state, Mapping):
        return dict(state)
    attributes = getattr(state, "__dict__", None)
    if attributes is None:
        names = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
        attributes = {name: getattr(state, name) for name in names if hasattr(state, name)}
    return {name: _plain(value) for name, value in attributes.items() if not _is_group(value)}


def restore_hook_state(state: Any, saved: Any) -> None:
    """Put what :func:`hook_state` has kept into the state of the hook that is registered now."""
    if saved is None:
        return
    if callable(getattr(state, "load_state_dict", None)):
        state.load_state_dict(saved)
    elif isinstance(state, dict):
        state.clear()
        state.update(saved)
    elif state is None:
        raise HookError(
            "the training state holds a communication hook's state, but the hook was registered without one"
        )
    else:
        for name, value in saved.items():
            numbers: Any = getattr(state, name, None)
            if _is_numpys_numbers(numbers) and isinstance(value, Mapping):
                numbers.set_state(value)
            else:
                setattr(state, name, value)


def _plain(value: Any) -> Any:
    if not _is_numpys_numbers(value):
        return value
    state = value.get_state(legacy=False)
    return {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}


def _is_numpys_numbers(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.RandomState)


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup) or (hasattr(value, "rank") and hasattr(value, "allreduce"))
