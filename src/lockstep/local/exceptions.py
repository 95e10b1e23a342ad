"""Failures of replicas, raised in the caller's thread with their own type; the message has replica and device."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep._base.devices import device_label
from lockstep.errors import ReplicaError
from lockstep.local.exchange import ReplicaMissingError


def raise_failures(failures: Sequence[tuple[int, BaseException]], devices: Sequence[torch.device]) -> None:
    """Raise the first of the replicas' failures, which are given with replica numbers; the message lists the others."""
    causes = [f for f in failures if not isinstance(f[1], ReplicaMissingError)]  # these follow from another's failure
    (index, error), *others = causes or failures
    where = f"in replica {index} on device {device_label(devices[index])}"
    trace = "".join(traceback.format_exception(error))
    message = f"Caught {type(error).__name__} {where}.\nOriginal {trace}"
    for other, its_error in others:
        message += f"\nAlso failed: replica {other} on device {device_label(devices[other])}: {its_error!r}"
    raise _rebuilt(error, message) from error


class _Verbatim(str):
    """A message that is its own repr: KeyError shows the repr of its argument."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _rebuilt(error: BaseException, message: str) -> BaseException:
    """Return an exception of the same type with a new message.

    The constructor is the user's: it may ask for other arguments, or the type may not show its arguments. Then the
    message becomes a note. If no exception of the type can be made at all, the result is a :class:`ReplicaError`.
    """
    kind, text = type(error), _Verbatim(message)
    for attempt in (lambda: kind(text), lambda: _bare(kind, text), lambda: _bare(kind, text, *error.args[1:])):
        rebuilt = _attempted(attempt, error)
        if rebuilt is not None and message in str(rebuilt):
            return rebuilt
    alike = _attempted(lambda: kind(*error.args), error) or _attempted(lambda: _bare(kind, *error.args), error)
    if alike is None:
        return ReplicaError(message)
    alike.add_note(message)
    return alike


def _attempted(attempt: Callable[[], BaseException], error: BaseException) -> BaseException | None:
    """Return the result of ``attempt`` with the attributes of ``error``; None if it fails or has another type."""
    try:
        rebuilt = attempt()
        str(rebuilt)
    except Exception:  # whatever a constructor of the user's raises only means that it cannot be used this way
        return None
    if type(rebuilt) is not type(error):
        return None
    rebuilt.__dict__.update({name: value for name, value in error.__dict__.items() if name != "__notes__"})
    if isinstance(error, SystemExit) and isinstance(rebuilt, SystemExit):
        rebuilt.code = error.code
    return rebuilt


def _bare(kind: type[BaseException], *args: Any) -> BaseException:
    """Return an exception whose constructor was not called."""
    bare = kind.__new__(kind, *args)
    bare.args = args
    return bare
