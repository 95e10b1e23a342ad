"""Copies whole module trees: submodules, hooks, slots, and attributes that refer to parts of the tree.

A copy shares every plain attribute with its original by reference, as PyTorch's replicas do. The exceptions are values
that lead back into the tree: a list of layers, a bound method, a weak reference to a parent, a list of parameters. Such
values are *translated*: rebuilt with the copy's own modules and tensors in them.
"""

import copy
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from lockstep.compiler import is_compiled, recompile, recompiled
from lockstep.errors import NotReplicableError
from lockstep.local.contents import ATOMS, opened, refilled

SLOTS = ("_parameters", "_buffers", "_modules")
TensorSlot = tuple[str, int, str]
"""A place for a tensor: ``"_parameters"`` or ``"_buffers"``, the number of the module, and the name."""
HOOKS = tuple(name for name, value in vars(Module()).items() if isinstance(value, dict) and name not in SLOTS)
CACHE = "_lockstep_replica_sets"  # where a network keeps its replicas for the functional calls
OWN = {*HOOKS, "_non_persistent_buffers_set"}  # kept by PyTorch in every module, and never shared with a replica
_SCRIPTED = {"_c", "_concrete_type", "_actual_script_module", "_initializing", "_name", "forward"}  # a script's body


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
        if isinstance(module, torch.jit.ScriptModule):
            for child_name, child in module.named_modules():
                if not isinstance(child, torch.jit.ScriptModule):
                    raise NotReplicableError(
                        "Cannot replicate network where python modules are children of ScriptModule: "
                        f"{f'{name}.{child_name}'.strip('.')} is a {type(child).__name__} inside the scripted "
                        f"{name or 'network'}. Script the whole subtree, or none of it."
                    )


class Translation:
    """Maps a network's modules and tensors to the modules and tensors of one copy; also rebuilds other values.

    :attr:`found_tensor` is True if the last call met one of the tensors.
    """

    def __init__(self) -> None:
        self._counterparts: dict[int, Any] = {}
        self.tensors: dict[int, Any] = {}  # only for as long as these tensors are sure to live
        self.found_tensor = False
        self._open: set[int] = set()

    def add(self, original: object, counterpart: object) -> None:
        """Map ``original`` to ``counterpart`` in the copy. The caller keeps ``original`` alive."""
        self._counterparts[id(original)] = counterpart

    def __contains__(self, original: object) -> bool:
        return id(original) in self._counterparts

    def __call__(self, value: Any) -> Any:
        """Return the copy's version of ``value``: ``value`` itself, unless a part of it has a counterpart."""
        self.found_tensor = False
        return self._translated(value)

    def _translated(self, value: Any) -> Any:
        if isinstance(value, ATOMS):
            return value
        if id(value) in self._counterparts:
            return self._counterparts[id(value)]
        if id(value) in self.tensors:
            self.found_tensor = True
            return self.tensors[id(value)]
        rebuild = opened(value)
        if rebuild is None or id(value) in self._open:
            return value
        parts, build = rebuild
        self._open.add(id(value))  # a container may hold itself
        try:
            translated = [self._translated(part) for part in parts]
        finally:
            self._open.discard(id(value))
        same = all(new is old for new, old in zip(translated, parts, strict=True))
        return value if same else build(translated)


class ModuleCopy:
    """One copy of a network: :attr:`root`, and its modules in the same order as the network's.

    It is complete after :meth:`bind` has put tensors into all slots and :meth:`set_all_attributes` has run.
    """

    def __init__(self, network: Module) -> None:
        self._originals = list(network.modules())
        self._translate = Translation()
        for module in self._originals:
            if module not in self._translate:
                for original, shell in _shells(module):
                    self._translate.add(original, shell)
        self.modules: list[Module] = [self._translate(module) for module in self._originals]
        self.root = self.modules[0]
        for module, shell in zip(self._originals, self.modules, strict=True):
            if not isinstance(module, torch.jit.ScriptModule):
                vars(shell)["_modules"] = {name: self._translate(child) for name, child in module._modules.items()}
        self._slots = {kind: [_slots(module, kind) for module in self.modules] for kind in ("_parameters", "_buffers")}
        self._holding: set[tuple[int, str]] = set()
        self._replaced: list[tuple[Any, Any]] = []

    def bind(self, slots: Iterable[TensorSlot], tensors: Iterable[torch.Tensor | None]) -> None:
        """Put tensors into slots."""
        for (kind, index, name), tensor in zip(slots, tensors, strict=True):
            owner = self._slots[kind][index]
            if self._holding and (old := owner[name]) is not tensor:
                self._replaced.append((old, tensor))
            owner[name] = tensor

    def rebind_attributes(self) -> list[int]:
        """Update attributes that hold tensors to the tensors that were bound instead since the last call.

        The copy's own values are translated, not the network's, so that whatever the copy's forward has put beside the
        tensors stays. Returns the numbers of the modules that have other attributes now.
        """
        if not self._replaced:
            return []
        substitute = Translation()
        substitute.tensors = {id(old): new for old, new in self._replaced if old is not None}
        for index, name in self._holding:
            own = vars(self.modules[index])
            if name in own:
                own[name] = substitute(own[name])
        self._replaced.clear()
        return sorted({index for index, _ in self._holding})

    def set_all_attributes(self, leading: Container[tuple[int, str]] | None = None) -> None:
        """Take over all attributes of all modules of the network; see :meth:`set_attributes`."""
        self.set_attributes(((index, attributes(module)) for index, module in enumerate(self._originals)), leading)
        for index, module in enumerate(self.modules):
            vars(module)["_former_parameters"] = FormerParameters(self._slots["_parameters"][index])
            if isinstance(module, torch.nn.RNNBase):
                vars(module)["flatten_parameters"] = _already_flat

    def set_attributes(
        self, changes: Iterable[tuple[int, Iterable[str]]], leading: Container[tuple[int, str]] | None = None
    ) -> None:
        """Take over attributes of the network's modules, by number; one that is gone there is removed here too.

        Attributes not in ``leading``, if that is given, are known not to lead into the tree: the copy shares the
        object.
        """
        with self._tensors_known():
            for index, names in changes:
                for name in names:
                    self._set_attribute(index, name, leading is None or (index, name) in leading)

    def _set_attribute(self, index: int, name: str, leads: bool) -> None:
        original, module = self._originals[index], self.modules[index]
        source, target = vars(original), vars(module)
        self._holding.discard((index, name))
        if isinstance(original, torch.jit.ScriptModule) and name in scripted_names(original):
            script: Any = module._c
            script.setattr(name, original._c.getattr(name))
        elif name not in source:
            target.pop(name, None)
        elif name in OWN:
            target[name] = _own(source[name], self._translate)
        elif name == "_compiled_call_impl" and source[name] is not None:
            target[name] = recompiled(source[name], module)
        elif name == "forward" and is_compiled(original):
            recompile(original, module)
        elif not leads:
            target[name] = source[name]
        else:
            target[name] = self._own_value(source[name], original, name)
            if self._translate.found_tensor:
                self._holding.add((index, name))

    def _own_value(self, value: Any, owner: Module, name: str) -> Any:
        try:
            return self._translate(value)
        except RecursionError:
            raise NotReplicableError(
                f"attribute {name} of a {type(owner).__name__} leads to a module, parameter or buffer of the network "
                "through containers that are nested too deeply to be rebuilt for a replica"
            ) from None

    @contextmanager
    def _tensors_known(self) -> Iterator[None]:
        """Map the network's tensors to those in the copy's slots inside the block."""
        self._translate.tensors = {
            id(tensor): owners[index][name]
            for kind, owners in self._slots.items()
            for index, original in enumerate(self._originals)
            for name, tensor in getattr(original, kind).items()
            if tensor is not None
        }
        try:
            yield
        finally:
            self._translate.tensors = {}


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


def _already_flat() -> None:
    """Replace ``flatten_parameters`` in replicas: their weights lie as the network's do, and must stay there."""


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
    return _ScriptSlots(module, kind) if isinstance(module, torch.jit.ScriptModule) else vars(module)[kind]


def _own(value: Any, translate: Translation) -> Any:
    """Copy a module's hooks, translated to the copy's methods; or a set of names."""
    if not value:
        return type(value)()
    if isinstance(value, dict):
        return refilled(value, {key: translate(hook) for key, hook in value.items()})
    return copy.copy(value)


def attributes(module: Module) -> list[str]:
    """Return the names of the instance attributes that a copy takes over; for a scripted module also its script's."""
    if isinstance(module, torch.jit.ScriptModule):
        left_out = {*_SCRIPTED, *SLOTS, *OWN}
        own = [n for n, v in vars(module).items() if n not in left_out and not isinstance(v, torch._C.ScriptMethod)]
        return [*own, *(name for name in scripted_names(module) if name not in own)]
    return [name for name in vars(module) if name not in SLOTS and name != CACHE]


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
    if isinstance(module, torch.jit.ScriptModule):
        return list(zip(module.modules(), copy.deepcopy(module).modules(), strict=True))
    if is_compiled(module):  # hands attributes that are set on it to the module inside
        shell = module.__new__(type(module))
        vars(shell).update(vars(module))
    elif isinstance(module, LazyModuleMixin):  # its own method raises, even once the module has its shapes
        shell = Module._replicate_for_data_parallel(module)
    else:
        shell = module._replicate_for_data_parallel()  # a class may make its replicas itself
    for kind in ("_parameters", "_buffers"):
        vars(shell)[kind] = dict.fromkeys(vars(module)[kind])
    return [(module, shell)]
