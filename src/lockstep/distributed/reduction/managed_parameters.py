"""A parameter whose gradient is synchronised, and the reducer that synchronises it.

The reducer that claimed a parameter last synchronises it, even after the wrapper or the whole network has been dropped.
So each module holds the reducer of its parameters, which does not refer back to the module. An attribute of the module
would be visible and copied. Instead, one of the dictionaries that every module has (empty for most) is replaced by a
subclass that carries the reducer; it is copied and pickled as the plain dictionary.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.buckets import TensorSpec
from lockstep.dtensors import local_part, matching_gradient
from lockstep.errors import LayoutError


class ManagedParameter:
    """A parameter whose gradient is synchronised, with its name and its index among those of the module."""

    __slots__ = ("__weakref__", "_kind", "index", "name", "parameter", "sparse", "spec")

    def __init__(self, index: int, name: str, parameter: Parameter, sparse: bool) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.sparse = sparse
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        spec = TensorSpec.of(local_part(parameter), name)
        self.spec = TensorSpec(name, spec.shape, spec.stride, dtype, spec.device)
        self._kind = _kind_of(parameter)

    def take(self, grad: Tensor) -> Tensor:
        """Return this rank's part of a gradient as a plain tensor; raise if its dtype or shape is not as planned."""
        local = matching_gradient(grad.detach(), self.parameter)
        self.check(local)
        return local

    def check(self, local: Tensor) -> None:
        """Raise :class:`LayoutError` if a parameter or gradient is not of the planned dtype, shape and device."""
        spec = self.spec
        if local.shape != spec.shape or local.dtype != spec.dtype or local.device != spec.device:
            raise LayoutError(
                f"parameter {self.name} had gradients of {spec.dtype}, shape {spec.shape}, on {spec.device} when its "
                f"module was replicated, and has one of {local.dtype}, shape {tuple(local.shape)}, on {local.device} "
                "now; change shape, dtype and device of a module before replicating it"
            )

    def check_parameter(self) -> None:
        """Raise :class:`LayoutError` if the dtype, shape or device of the parameter has changed."""
        kind = _kind_of(self.parameter)
        if kind != self._kind:
            raise LayoutError(
                f"parameter {self.name} was {_describe(*self._kind)} when its module was replicated, and is "
                f"{_describe(*kind)} now; change shape, dtype and device of a module before replicating it"
            )

    def zeros(self) -> Tensor:
        """Return zeros of the planned dtype and shape; if gradients are sparse, a tensor without entries."""
        spec = self.spec
        if self.sparse:
            size = (1, 0), (0, *spec.shape[1:])
            indices = torch.empty(size[0], dtype=torch.int64, device=spec.device)
            values = torch.empty(size[1], dtype=spec.dtype, device=spec.device)
            return torch.sparse_coo_tensor(indices, values, spec.shape, check_invariants=True).coalesce()
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).zero_()


def _kind_of(parameter: Parameter) -> tuple[torch.dtype, torch.Size, torch.device]:
    return parameter.dtype, parameter.shape, parameter.device


def _describe(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    return f"{dtype}, shape {tuple(shape)}, on {device}"


class Owner(Protocol):
    """The part of a reducer that code which selects parameters depends on."""

    retired: bool
    """True if another replication has taken over all of its parameters."""

    def manages(self, parameter: Parameter) -> bool:
        """Return True if it synchronises the parameter, or will once the ranks have agreed on it."""

    def has_in_module(self, parameter: Parameter) -> bool:
        """Return True if its module has the parameter on this rank."""

    def is_added(self, parameter: Parameter) -> bool:
        """Return True if the parameter is new on this rank, and not agreed on yet."""

    def present(self) -> list[Parameter]:
        """Return the parameters that its module still has."""

    def hold_hooks(self) -> None:
        """Note that a parameter has hooks of the user, to be run after its gradient has been reduced."""

    def gradient_triggered(self, index: int) -> None:
        """Note that autograd has accumulated the gradient of parameter ``index``, which has a trigger."""

    def retire(self) -> None:
        """Stop synchronising: another replication has taken over all parameters."""


_owners: dict[int, "ref[Owner]"] = {}
"""By ``id(parameter)``: the id stays valid because the reducer holds the parameter. A weak reference to the parameter
would make ``torch.utils.swap_tensors`` refuse it."""
_lock = threading.Lock()
_generation = 0


def claim(parameters: Iterable[Parameter], owner: Owner) -> None:
    """Let ``owner``, and no other reducer, synchronise the gradients of these parameters from now on."""
    global _generation
    with _lock:
        for number in [number for number, known in _owners.items() if known() is None]:
            del _owners[number]
        link = ref(owner)
        for parameter in parameters:
            _owners[id(parameter)] = link
        _generation += 1


def owner_of(parameter: Parameter) -> Owner | None:
    """Return the reducer that synchronises the gradient of a parameter, or None."""
    link = _owners.get(id(parameter))
    owner = None if link is None else link()
    return owner if owner is not None and owner.manages(parameter) else None


def generation() -> int:
    """Return a number that changes with each :func:`claim`."""
    return _generation


_ATTRIBUTE = "_load_state_dict_post_hooks"


class _KeepingDict(OrderedDict[int, Any]):
    """The module's hooks, and the objects that it keeps alive."""

    def __init__(self, entries: Any = ()) -> None:
        super().__init__(entries)
        self.kept: list[Any] = []

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


def attach_to_module(module: Module, thing: Any, instead_of: Any = None) -> None:
    """Keep ``thing`` alive as long as ``module``, and let go of ``instead_of`` and of objects that have retired."""
    hooks = vars(module)[_ATTRIBUTE]
    if not isinstance(hooks, _KeepingDict):
        hooks = _KeepingDict(hooks)
        vars(module)[_ATTRIBUTE] = hooks
    hooks.kept = [each for each in hooks.kept if each not in (thing, instead_of) and not each.retired]
    hooks.kept.append(thing)
