"""Copies of a module tree that are whole: their own submodules, hooks and slots, and attributes that mean their own
parts.

A copy shares every plain attribute with its original by reference, as PyTorch's replicas do. What differs is what leads
back into the tree: a list of layers, a bound method, a weak reference to a parent, a list of parameters. Such values
are *translated*: rebuilt with the copy's own modules and tensors in them.
"""

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from lockstep.compiler import is_compiled, recompiled
from lockstep.errors import NotReplicableError

_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.FunctionType,
    torch.device,
    torch.dtype,
)
SLOTS = ("_parameters", "_buffers", "_modules")
HOOKS = tuple(name for name, value in vars(Module()).items() if isinstance(value, dict) and name not in SLOTS)
CACHE = "_lockstep_replica_sets"  # where a network keeps its replicas for the functional calls
OWN = {*HOOKS, "_non_persistent_buffers_set"}  # what PyTorch keeps in every module, and no replica shares


def check_replicable(network: Module) -> None:
    """Raise :class:`~lockstep.errors.NotReplicableError` for a network that cannot have replicas, with the reason."""
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
    """The map from a network's modules and tensors to those of one copy, and what follows from it for other values."""

    def __init__(self) -> None:
        self._counterparts: dict[int, Any] = {}
        self.tensors: dict[int, Any] = {}  # only for as long as these tensors are sure to live
        self._open: set[int] = set()

    def add(self, original: object, counterpart: object) -> None:
        """Let ``original`` mean ``counterpart`` in the copy. The caller keeps ``original`` alive."""
        self._counterparts[id(original)] = counterpart

    def __contains__(self, original: object) -> bool:
        return id(original) in self._counterparts

    def __call__(self, value: Any) -> Any:
        """``value`` as the copy has it: itself, unless something in it means another thing there."""
        if isinstance(value, _ATOMS):
            return value
        if id(value) in self._counterparts:
            return self._counterparts[id(value)]
        if id(value) in self.tensors:
            return self.tensors[id(value)]
        rebuild = _parts(value)
        if rebuild is None or id(value) in self._open:
            return value
        parts, build = rebuild
        self._open.add(id(value))  # a container may hold itself
        try:
            translated = [self(part) for part in parts]
        finally:
            self._open.discard(id(value))
        same = all(new is old for new, old in zip(translated, parts, strict=True))
        return value if same else build(translated)


def _parts(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What may lead into the tree inside ``value``, and how to build a like value of other parts."""
    if isinstance(value, types.MethodType):
        return [value.__self__], lambda new: types.MethodType(value.__func__, new[0])
    if isinstance(value, functools.partial):
        count, names = len(value.args), list(value.keywords)
        parts = [value.func, *value.args, *value.keywords.values()]
        return parts, lambda new: functools.partial(
            new[0], *new[1 : 1 + count], **dict(zip(names, new[1 + count :], strict=True))
        )
    if isinstance(value, weakref.ref):
        return [value()], lambda new: weakref.ref(new[0])
    if isinstance(value, dict):
        count = len(value)
        return [*value, *value.values()], lambda new: _refilled(value, dict(zip(new[:count], new[count:], strict=True)))
    if isinstance(value, tuple):
        named = hasattr(value, "_fields")
        return list(value), lambda new: type(value)(*new) if named else type(value)(new)
    if isinstance(value, list | set | frozenset | deque):
        return list(value), lambda new: _refilled(value, new)
    if is_dataclass(value):
        names = [f.name for f in fields(value) if hasattr(value, f.name)]
        return [getattr(value, name) for name in names], lambda new: _with_fields(value, names, new)
    return None


def _refilled(value: Any, new: Any) -> Any:
    if isinstance(value, frozenset):
        return type(value)(new)
    filled = copy.copy(value)
    filled.clear()
    filled.extend(new) if isinstance(value, list | deque) else filled.update(new)
    return filled


def _with_fields(value: Any, names: list[str], new: list[Any]) -> Any:
    filled = copy.copy(value)
    for name, part in zip(names, new, strict=True):
        object.__setattr__(filled, name, part)
    return filled


class ModuleCopy:
    """One copy of a network: :attr:`root`, and its modules in the order of the network's.

    It is whole after :meth:`bind` has put tensors into all slots and :meth:`set_all_attributes` has run.
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
        self._holding: list[tuple[int, str]] = []

    def bind(self, kind: str, slots: Sequence[tuple[int, str]], tensors: Iterable[torch.Tensor | None]) -> None:
        """Put tensors into slots: ``kind`` is ``_parameters`` or ``_buffers``, a slot (module number, name)."""
        owners = self._slots[kind]
        for (index, name), tensor in zip(slots, tensors, strict=True):
            owners[index][name] = tensor

    def rebind_attributes(self) -> None:
        """Translate anew the attributes that hold tensors, after other tensors were bound."""
        if not self._holding:
            return
        with self._tensors_known():
            for index, name in self._holding:
                vars(self.modules[index])[name] = self._translate(vars(self._originals[index])[name])

    def set_all_attributes(self) -> None:
        """Take over every attribute of every module of the network."""
        self.set_attributes((index, attributes(module)) for index, module in enumerate(self._originals))
        for module in self.modules:
            if isinstance(module, torch.nn.RNNBase):
                vars(module)["flatten_parameters"] = _already_flat

    def set_attributes(self, changes: Iterable[tuple[int, Iterable[str]]]) -> None:
        """Take over attributes of the network's modules, by number; one that is gone there goes here too."""
        with self._tensors_known():
            for index, names in changes:
                for name in names:
                    self._set_attribute(index, name)

    def _set_attribute(self, index: int, name: str) -> None:
        original, module = self._originals[index], self.modules[index]
        source, target = vars(original), vars(module)
        if (index, name) in self._holding:
            self._holding.remove((index, name))
        if name not in source:
            target.pop(name, None)
        elif name in OWN:
            target[name] = _own(source[name], self._translate)
        elif name == "_compiled_call_impl" and source[name] is not None:
            target[name] = recompiled(source[name], module)
        elif name == "forward" and is_compiled(original):
            module._initialize()  # type: ignore[operator]
        else:
            target[name] = self._translate(source[name])
            if target[name] is not source[name] and _holds_tensor(source[name]):
                self._holding.append((index, name))

    @contextmanager
    def _tensors_known(self) -> Iterator[None]:
        """Within the block, the network's tensors mean those in the copy's slots."""
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


def _already_flat() -> None:
    """Stands for ``flatten_parameters`` in replicas: their weights lie as the network's do, and have to stay there."""


class _ScriptSlots:
    """The slots of a scripted module, which are not those of Python."""

    def __init__(self, module: torch.jit.ScriptModule, kind: str) -> None:
        self._module, self._kind = module, kind

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, self._kind)[name]

    def __setitem__(self, name: str, tensor: torch.Tensor | None) -> None:
        self._module._c.setattr(name, tensor)


def _slots(module: Module, kind: str) -> Any:
    return _ScriptSlots(module, kind) if isinstance(module, torch.jit.ScriptModule) else vars(module)[kind]


def _own(value: Any, translate: Translation) -> Any:
    """A copy of a module's hooks, with its own means of calling them; or of a set of names."""
    if not value:
        return type(value)()
    if isinstance(value, dict):
        return _refilled(value, {key: translate(hook) for key, hook in value.items()})
    return copy.copy(value)


def parts_of(value: Any) -> list[Any] | None:
    """What may lead into the tree inside ``value``, or None for a value that is not looked into."""
    opened = None if isinstance(value, _ATOMS) else _parts(value)
    return None if opened is None else opened[0]


def _holds_tensor(value: Any, depth: int = 8) -> bool:
    """Whether there is a tensor inside a value that was translated, so that it must be again when tensors change."""
    if isinstance(value, torch.Tensor):
        return True
    return depth > 0 and any(_holds_tensor(part, depth - 1) for part in parts_of(value) or ())


def attributes(module: Module) -> list[str]:
    """The names of the instance attributes that a copy takes over; a scripted module keeps its state elsewhere."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return [name for name in vars(module) if name not in SLOTS and name != CACHE]


def _shells(module: Module) -> list[tuple[Module, Module]]:
    """Modules paired with modules of the same class that have their own empty slots, and share all else for now."""
    if isinstance(module, torch.jit.ScriptModule):
        return list(zip(module.modules(), copy.deepcopy(module).modules(), strict=True))
    if is_compiled(module):  # hands attributes that are set on it to the module inside
        shell = module.__new__(type(module))
        vars(shell).update(vars(module))
    elif isinstance(module, LazyModuleMixin):  # whose own idea of a replica is an error, even once it has its shapes
        shell = Module._replicate_for_data_parallel(module)
    else:
        shell = module._replicate_for_data_parallel()  # a class may have its own idea of a replica
    for kind in ("_parameters", "_buffers"):
        vars(shell)[kind] = dict.fromkeys(vars(module)[kind])
    return [(module, shell)]
