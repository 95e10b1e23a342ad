"""Names that our classes inherit from PyTorch's, so that ``isinstance`` holds, without running its constructor.

What such a name would do there rests on attributes that are not here. So each is overridden, or refused by name
(``tests/api/test_inherited_names.py`` walks them all): :func:`refusing` sees to those that nobody thought of, in any
release of PyTorch.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.nn import Module

C = TypeVar("C", bound=type)


class Refused:
    """Stands in a class for a name that it inherits and that has no meaning in it."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        raise AttributeError(self.message)


def refusing(base: type, instead: Mapping[str, str]) -> Callable[[C], C]:
    """Refuse, in a class, every name of ``base`` that neither it nor what stands before ``base`` defines.

    Names that ``base`` overrides of ``Module``'s become ``Module``'s again. ``instead`` says for each name what to use;
    its other names, attributes that the constructor of ``base`` sets, are refused by :func:`refusal`.
    """

    def decorate(cls: C) -> C:
        order = cls.__mro__[: cls.__mro__.index(base)]
        ours = {name for kind in order for name in vars(kind)}
        for name in vars(base).keys() - ours:
            if not (name.startswith("__") and name.endswith("__")):
                plain = getattr(Module, name, None)
                setattr(cls, name, plain or Refused(message(cls.__name__, name, instead.get(name))))
        cls._refused_attributes = {  # type: ignore[attr-defined]
            name: message(cls.__name__, name, text) for name, text in instead.items() if name not in ours
        }
        return cls

    return decorate


def message(owner: str, name: str, instead: str | None) -> str:
    """What is said of a name that is refused."""
    text = (
        instead or "it belongs to PyTorch's own machinery, which does not run here; docs/distributed.md lists what does"
    )
    return f"lockstep's {owner} has no {name!r}: {text}"


def refusal(cls: type, name: str) -> str | None:
    """What to say of an attribute that is not there; None if it is not one of those that are refused."""
    for kind in cls.__mro__:
        held = vars(kind).get(name)
        if held is not None:
            return held.message if isinstance(held, Refused) else None
    attributes: Mapping[str, str] = getattr(cls, "_refused_attributes", {})
    return attributes.get(name)
