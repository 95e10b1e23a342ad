"""The forms in which PyTorch's process groups take the arguments of a collective.

Each collective of PyTorch has one form with lists of tensors and an object of options, and one with single tensors and
values: ``allreduce([x], options)`` and ``allreduce(x, op, timeout)``, by position or by name. Methods of the ``shm``
group are written for the former; :func:`with_overloads` brings the latter to it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lockstep.errors import UnknownOptionError

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""What PyTorch calls a value, and the field of the options that it is."""


def with_overloads(
    options: Callable[[], Any], tensors: Sequence[str], values: Sequence[str] = (), single: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method take single values in place of options.

    The method has as many arguments for tensors as there are ``tensors``, each entry the names that one has, and then
    ``opts``. ``values`` are the names of what may be given instead, in their order. Where a ``single`` tensor is given,
    it becomes a list of one, and a list beside it a list of one list.

    Example:
        >>> import torch.distributed as dist
        >>> @with_overloads(dist.ReduceOptions, ["tensors tensor"], ["root", "op", "timeout"])
        ... def reduce(self, tensors, opts):
        ...     return opts.rootRank
        >>> reduce(None, [], root=3)
        3
    """
    names = [each.split() for each in tensors]

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def collective(self: Any, *given: Any, **named: Any) -> Any:
            given_tensors = list(given[: len(names)])
            for known in names[len(given_tensors) :]:
                name = next((each for each in known if each in named), None)
                if name is None:
                    raise TypeError(f"{method.__name__}() needs {' or '.join(known)}")
                given_tensors.append(named.pop(name))
            given_values = given[len(names) :]
            if named.keys() - {"factor"} or any(each is not None for each in given_values):
                opts = _options(method.__name__, given_values, named, options(), values)
            else:
                opts = options()
            return method(self, *(_as_lists(given_tensors) if single else given_tensors), opts, **named)

        return collective

    return decorate


def _options(what: str, given: Sequence[Any], named: dict[str, Any], opts: Any, values: Sequence[str]) -> Any:
    """Return the options that were given, or new ones from single values, which are taken out of ``named``."""
    if "opts" in named:
        given = [named.pop("opts"), *given]
    if given and hasattr(given[0], "asyncOp"):
        if len(given) > 1 or named.keys() - {"factor"}:
            raise TypeError(f"{what}() takes options, or single values; it was given both")
        return given[0]
    if len(given) > len(values):
        raise TypeError(f"{what}() takes the tensors and {', '.join(values)}; it was given {len(given)} values")
    asked = dict(zip(values, given, strict=False))
    for name in [each for each in named if each != "factor"]:
        if name not in values:
            raise UnknownOptionError(
                f"{what}() has no argument {name!r}; next to the tensors it takes {', '.join(values)}"
            )
        if name in asked:
            raise TypeError(f"{what}() was given {name} twice")
        asked[name] = named.pop(name)
    for name, value in asked.items():
        if value is not None:
            setattr(opts, _FIELDS[name], value)
    return opts


def _as_lists(given: list[Any]) -> list[Any]:
    """Make lists of single tensors, as a collective takes them, and a list of lists of a list beside one."""
    if not any(isinstance(each, Tensor) for each in given):
        return given
    return [[each] if isinstance(each, Tensor) or each else each for each in given]
