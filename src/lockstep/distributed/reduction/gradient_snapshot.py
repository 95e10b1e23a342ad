"""Sees which gradients a backward pass has changed, by a look before it and one after it.

Autograd gives a parameter a gradient in one of two ways: as another object in ``.grad``, or by adding to the one that
is there, which raises its version. So what a pass has changed shows by comparing references and versions, whatever was
called - the module, a part of it, its wrapper - and whether or not anything was compiled. A look takes about 0.1 us for
each parameter that has a gradient, and a quarter of that for one that has none.

Gradients that share memory have versions of their own: what is handed out of a bucket is ``view.data``.
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
    """The gradients of ``parameters`` as they are now."""

    __slots__ = ("_grads", "_versions", "parameters")

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = parameters
        self._grads: list[Tensor | None] = list(map(grad_of, parameters))
        self._versions: list[int] | None = None  # None: there is no gradient
        if any(map(is_not, self._grads, repeat(None))):
            self._versions = _versions(self._grads)

    def changed(self) -> Sequence[int]:
        """Return which gradients have come since, by position."""
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

    def missing(self, positions: Sequence[int]) -> list[int]:
        """Return which gradients among those at these positions have not come since."""
        now: list[Any] = list(map(grad_of, map(self.parameters.__getitem__, positions)))
        if self._versions is None:
            return list(compress(positions, map(is_, now, repeat(None))))
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
    """Return the version of a gradient; 0 where there is none, or none is kept: of an inference tensor."""
    return 0 if grad is None or grad.is_inference() else grad._version
