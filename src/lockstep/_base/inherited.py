"""Refuses the names of PyTorch's classes that have no meaning in lockstep's subclasses.

Such a name would rely on attributes that do not exist here. So each is overridden, or refused by name
(``tests/ddp/test_inherited_names.py`` checks them all): :func:`refusing` handles those that nothing else handles, in
any release of PyTorch.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from torch.nn import Module

from lockstep._base.texts import DOCUMENTATION

C = TypeVar("C", bound=type)
_PAGE = f"{DOCUMENTATION}/distributed_reference.html#pytorch-s-class"


class Refused:
    """A name that a class inherits but that has no meaning in it: raises an AttributeError with a message."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        raise AttributeError(self.message)


def refusing(base: type, instead: Mapping[str, str]) -> Callable[[C], C]:
    """Refuse every name of ``base`` in a subclass, unless the subclass or a class before ``base`` defines it.

    Names of ``Module`` that ``base`` overrides become ``Module``'s again. ``instead`` gives the advice for a name; all
    others have one message. Attributes that ``base`` sets in its methods are refused by :func:`refusal`.
    """

    def decorate(cls: C) -> C:
        order = cls.__mro__[: cls.__mro__.index(base)]
        overridden = {name for kind in order for name in vars(kind)}
        for name in (vars(base).keys() | instead.keys()) - overridden:
            if not (name.startswith("__") and name.endswith("__")):
                plain = getattr(Module, name, None)
                setattr(cls, name, plain or Refused(message(cls.__name__, name, instead.get(name))))
        cls._refused_base = base  # type: ignore[attr-defined]
        return cls

    return decorate


def message(owner: str, name: str, instead: str | None = None) -> str:
    """Return the message for a name that is refused."""
    text = instead or f"it belongs to PyTorch's own machinery, which does not run here; {_PAGE} lists what does"
    return f"lockstep's {owner} has no {name!r}: {text}"


def _refusal(cls: type, name: str) -> str | None:
    """Return the message for an attribute that does not exist; None if PyTorch's class has no such attribute either."""
    for kind in cls.__mro__:
        held = vars(kind).get(name)
        if held is not None:
            return held.message if isinstance(held, Refused) else None
    base: type | None = getattr(cls, "_refused_base", None)
    methods = vars(base).values() if base is not None else ()
    used = any(name in method.__code__.co_names for method in methods if hasattr(method, "__code__"))
    return message(cls.__name__, name) if used else None


refusal: Callable[[type, str], str | None] = cache(_refusal)
""":func:`_refusal` with a cache: in every step, ``zero_grad()`` asks for an attribute that does not exist."""
