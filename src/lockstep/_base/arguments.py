"""Checks arguments that several functions take: errors name the argument and the expected values."""

import difflib
from collections.abc import Collection
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from lockstep.errors import OptionError


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of an error's message: the nearest of the known names, if one is near, and all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {near[0]}? There are " if near else "there are ") + ", ".join(known)


def check_module(module: Any, caller: str) -> None:
    """Raise :class:`OptionError` unless ``module`` is a module."""
    if not isinstance(module, Module):
        raise OptionError(f"{caller}: expected a torch.nn.Module, got {type(module).__name__}; give the model itself")


def check_number(value: Any, name: str, caller: str, unit: str = "") -> None:
    """Raise :class:`OptionError` unless ``value`` is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        hint = f"; write {value.total_seconds()}" if isinstance(value, timedelta) else ""
        raise OptionError(f"{caller}: {name} is {value!r}, expected a number{unit} above 0{hint}")


def check_backend(backend: Any, caller: str) -> None:
    """Raise :class:`OptionError` unless PyTorch has such a backend here: ``"shm"``, ``"cpu:gloo,cuda:nccl"``."""
    if not isinstance(backend, str):
        raise OptionError(f'{caller}: backend is {backend!r}, expected a name such as "shm"')
    known = [each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED]
    known += [each.name for each in entry_points(group="torch.distributed.backends") if each.name not in known]
    built = [each for each in known if getattr(dist, f"is_{each}_available", lambda: True)()]
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if name not in known:
            raise OptionError(f"{caller}: there is no backend {name!r}; {did_you_mean(name, built)}")
        if name not in built:
            raise OptionError(
                f"{caller}: PyTorch is built without the backend {name!r} here; there are {', '.join(built)}"
            )
