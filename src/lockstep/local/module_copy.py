"""Copies whole module trees: modules of the same classes, with slots of their own.

Attributes are set at each use (:mod:`~lockstep.local.attributes`).
"""

import copy
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from lockstep._base.compiler import is_compiled
from lockstep.errors import NotReplicableError

SLOTS = ("_parameters", "_buffers", "_modules")
TensorSlot = tuple[str, int, str]
"""A place for a tensor: ``"_parameters"`` or ``"_buffers"``, the number of the module, and the name."""
HOOKS = tuple(name for name, value in vars(Module()).items() if isinstance(value, dict) and name not in SLOTS)
CACHE = "_lockstep_replica_sets"  # where a network keeps its replicas for the functional calls


def check_replicable(network: Module) -> None:
    """Raise :class:`~lockstep.errors.NotReplicableError`, with the reason, for a network that cannot have replicas."""
    for name, module in network.named_modules():
        if isinstance(module, LazyModuleMixin) and hasattr(module, "_initialize_hook"):
            raise NotReplicableError(
                f"Attempted to use an uninitialized parameter: {name or 'the network'} is a {type(module).__name__} "
                "whose parameters have no shape yet. Modules with uninitialized parameters can't be used with "
                "`DataParallel`. Run a dummy forward pass to correctly initialize the modules"
            )
    for name, module in network.named_modules():
        if is_scripted(module):
            for child_name, child in module.named_modules():
                if not is_scripted(child):
                    raise NotReplicableError(
                        "Cannot replicate network where python modules are children of ScriptModule: "
                        f"{f'{name}.{child_name}'.strip('.')} is a {type(child).__name__} inside the scripted "
                        f"{name or 'network'}. Script the whole subtree, or none of it."
                    )


class ModuleCopy:
    """One copy of a network: :attr:`root`, and its modules in the same order as the network's.

    It is complete after :func:`put` has put tensors into all slots and
    :class:`~lockstep.local.attributes.Attributes` has set the attributes.
    """

    def __init__(self, network: Module) -> None:
        originals = list(network.modules())
        copies: dict[int, Module] = {}
        for module in originals:
            if id(module) not in copies:
                copies |= {id(original): shell for original, shell in _shells(module)}
        self._of_modules = {id(module): copies[id(module)] for module in originals}
        self.modules = list(self._of_modules.values())
        self.root = self.modules[0]
        for module, shell in zip(originals, self.modules, strict=True):
            if not is_scripted(module):
                children = module._modules.items()
                vars(shell)["_modules"] = {name: copies.get(id(child)) for name, child in children}
        self._slots = {kind: [_slots(module, kind) for module in self.modules] for kind in ("_parameters", "_buffers")}

    def holders(self, slots: Iterable[TensorSlot]) -> list[Any]:
        """Return the dictionary, or what takes its place, that each slot is in."""
        return [self._slots[kind][index] for kind, index, _ in slots]

    def counterparts(self, originals: Sequence[Module]) -> dict[int, Any]:
        """Return what this copy has in place of the network's modules, parameters and buffers, by their ids."""
        tensors = {
            id(tensor): owners[index][name]
            for kind, owners in self._slots.items()
            for index, original in enumerate(originals)
            for name, tensor in getattr(original, kind).items()
            if tensor is not None
        }
        return tensors | self._of_modules


def put(holders: Iterable[Any], names: Iterable[str], tensors: Iterable[torch.Tensor | None]) -> None:
    """Put tensors into slots."""
    deque(map(operator.setitem, holders, names, tensors), maxlen=0)


class FormerParameters(Mapping[str, torch.Tensor]):
    """A replica's own parameters by name, as they are now, under the attribute that PyTorch's replicas have."""

    def __init__(self, slots: Any) -> None:
        self._slots = slots

    def __getitem__(self, name: str) -> torch.Tensor:
        if (tensor := self._slots[name]) is None:
            raise KeyError(name)
        return tensor  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return (name for name, tensor in self._slots.items() if tensor is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _ScriptSlots:
    """The slots of a scripted module, which are not Python dictionaries."""

    def __init__(self, module: torch.jit.ScriptModule, kind: str) -> None:
        self._module = module
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, self._kind)[name]

    def __setitem__(self, name: str, tensor: torch.Tensor | None) -> None:
        self._module._c.setattr(name, tensor)


def _slots(module: Module, kind: str) -> Any:
    return _ScriptSlots(module, kind) if is_scripted(module) else vars(module)[kind]


def is_scripted(module: Module) -> "TypeGuard[torch.jit.ScriptModule]":
    """Return True if a module runs a script of TorchScript."""
    return isinstance(module, torch.jit.ScriptModule)


def scripted_names(module: Any) -> list[str]:
    """Return the names of a scripted module's attributes that can be set and are not parameters or buffers; none for
    other modules."""
    if not hasattr(module, "_concrete_type"):
        return []
    kinds: dict[str, tuple[Any, bool]] = module._concrete_type.get_attributes()
    slots = {name for held in (module._parameters, module._buffers) for name, _ in held.items()}
    return [n for n, (kind, _) in kinds.items() if n not in slots and str(kind) != "NoneType"]


def _shells(module: Module) -> list[tuple[Module, Module]]:
    """Pair modules with new ones of the same class that have empty slots of their own and share everything else."""
    if is_scripted(module):
        return list(zip(module.modules(), copy.deepcopy(module).modules(), strict=True))
    if is_compiled(module):  # hands attributes that are set on it to the module inside
        shell = module.__new__(type(module))
        vars(shell).update(vars(module))
    elif isinstance(
        module, torch.fx.GraphModule
    ):  # its own method makes a class, which misses later edits of the graph
        shell = object.__new__(type(module))
        vars(shell).update(vars(module), _modules=module._modules.copy())
    elif isinstance(module, LazyModuleMixin):  # its own method raises, even once the module has its shapes
        shell = Module._replicate_for_data_parallel(module)
    else:
        shell = module._replicate_for_data_parallel()  # a class may make its replicas itself
    vars(shell).pop("_is_replica", None)  # says that parameters() is empty (torchdiffeq), which it is not
    for kind in ("_parameters", "_buffers"):
        vars(shell)[kind] = dict.fromkeys(vars(module)[kind])
    return [(module, shell)]
