"""Errors for names that have moved, or that users look for in another package."""

import importlib
from importlib.util import find_spec
from types import ModuleType

_ROOMS = ("loop", "local", "distributed", "checkpoints", "errors", "sharding", "shares")


def where_it_is(package: str, name: str) -> AttributeError:
    """Return the error for a name that ``package`` does not have, which says where it is, if any package has it."""
    # ``from PACKAGE import FILE`` asks for the name before it imports the file, also while a room is being imported
    elsewhere = name.isidentifier() and not name.startswith("_") and find_spec(f"{package}.{name}") is None
    room = next((each for each in _ROOMS if elsewhere and _has(f"lockstep.{each}", name)), None)
    hint = "" if room is None else f"; it is in lockstep.{room}: from lockstep.{room} import {name}"
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}")


def _has(package: str, name: str) -> bool:
    found = vars(importlib.import_module(package)).get(name)
    return found is not None and not isinstance(found, ModuleType)
