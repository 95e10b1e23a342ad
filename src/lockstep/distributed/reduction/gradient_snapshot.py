"""Finds the gradients that a backward pass has changed, by a look before it and one after it.

Autograd either sets ``.grad`` to a new object, or adds to the existing one, which raises its version. Comparing
references and versions therefore shows every change, whatever was called (the module, a part of it, its wrapper) and
whether or not it was compiled. A look takes about 0.1 us for each parameter that has a gradient, and a quarter of that
for one that has none.

Gradients that are views of a bucket are ``view.data``, so that each has its own version.
"""

from collections.abc import Sequence
from itertools import compress, repeat
from operator import and_, attrgetter, is_, is_not, ne, or_
from typing import Any

from torch import Tensor
from torch.nn import Parameter

grad_of = attrgetter("grad")
_version_of = attrgetter("_version")


class GradientSnapshot:
    """The gradients of ``parameters`` and their versions at this moment."""

    __slots__ = ("_grads", "_versions", "parameters")

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = parameters
        self._grads: list[Tensor | None] = list(map(grad_of, parameters))
        self._versions: list[int] | None = None  # None: no parameter has a gradient
        if any(map(is_not, self._grads, repeat(None))):
            self._versions = _versions(self._grads)

    def changed(self) -> Sequence[int]:
        """Return the positions of gradients that have been set or changed since."""
        now: list[Any] = list(map(grad_of, self.parameters))
        if self._versions is None:
            if type(None) not in map(type, now):
                return range(len(now))
            return list(compress(range(len(now)), map(is_not, now, repeat(None))))
        versions = _versions(now)
        if versions == self._versions and all(map(is_, now, self._grads)):
            return ()
        changed = map(or_, map(ne, versions, self._versions), map(is_not, now, self._grads))
        come = list(map(and_, changed, map(is_not, now, repeat(None))))  # a gradient that was given up has not come
        return range(len(now)) if False not in come else list(compress(range(len(now)), come))

    def missing(self, positions: Sequence[int], now: Sequence[Any]) -> Sequence[int]:
        """Return those of these positions whose gradient, as it is ``now``, has not been set or changed since."""
        if self._versions is None:
            return list(compress(positions, map(is_, now, repeat(None)))) if type(None) in map(type, now) else ()
        return [
            position
            for position, grad in zip(positions, now, strict=True)
            if grad is None or (grad is self._grads[position] and _version(grad) == self._versions[position])
        ]


def _versions(grads: Sequence[Any]) -> list[int]:
    try:
        return list(map(_version_of, grads))
    except (AttributeError, RuntimeError):  # None has no version, nor has an inference tensor
        return list(map(_version, grads))


def _version(grad: Tensor | None) -> int:
    """Return the version of a gradient; 0 without a gradient, and for an inference tensor, which has no version."""
    return 0 if grad is None or grad.is_inference() else grad._version
