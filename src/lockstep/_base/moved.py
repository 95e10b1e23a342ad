"""Errors for names that have moved, or that users look for in another package."""

import sys
from types import ModuleType

_ROOMS = ("loop", "local", "distributed", "checkpoints", "errors", "sharding", "shares")


def where_it_is(package: str, name: str) -> AttributeError:
    """Return the error for a name that ``package`` does not have, which says where it is, if any package has it."""
    room = None if name.startswith("_") else next((each for each in _ROOMS if _has(f"lockstep.{each}", name)), None)
    hint = "" if room is None else f"; it is in lockstep.{room}: from lockstep.{room} import {name}"
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}")


def _has(package: str, name: str) -> bool:
    found = vars(sys.modules[package]).get(name) if package in sys.modules else None
    return found is not None and not isinstance(found, ModuleType)
