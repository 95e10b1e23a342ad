"""Copies of a module tree that are whole: their own submodules, hooks and slots, and attributes that mean their own
parts.

A copy shares every plain attribute with its original by reference, as PyTorch's replicas do. What differs is what leads
back into the tree: a list of layers, a bound method, a weak reference to a parent, a list of parameters. Such values
are *translated*: rebuilt with the copy's own modules and tensors in them.
"""

import copy
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

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
OWN = {*HOOKS, "_non_persistent_buffers_set"}  # what PyTorch keeps in every module, and no replica shares


def check_replicable(network: Module) -> None:
    """Raise :class:`~lockstep.errors.NotReplicableError` for a network that cannot have replicas, with the reason."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if isinstance(tensor, UninitializedTensorMixin):
            raise NotReplicableError(
                f"Modules with uninitialized parameters cannot be replicated: {name} has no shape yet. Run a dummy "
                "forward through the network first, so that its lazy modules take their shapes."
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
        return list(value.values()), lambda new: _refilled(value, dict(zip(value, new, strict=True)))
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
                shell._modules = {name: self._translate(child) for name, child in module._modules.items()}
        self._slots = {kind: [_slots(module, kind) for module in self.modules] for kind in ("_parameters", "_buffers")}
        self._holding: list[tuple[int, str]] = []

    def bind(self, kind: str, slots: Sequence[tuple[int, str]], tensors: Iterable[torch.Tensor | None]) -> None:
        """Put tensors into slots: ``kind`` is ``_parameters`` or ``_buffers``, a slot (module number, name)."""
        owners = self._slots[kind]
        for (index, name), tensor in zip(slots, tensors, strict=True):
            owners[index][name] = tensor

    def rebind_attributes(self) -> None:
        """Translate anew the attributes that hold tensors, after other tensors were bound."""
        if self._holding:
            self._know_tensors()
        for index, name in self._holding:
            vars(self.modules[index])[name] = self._translate(vars(self._originals[index])[name])

    def set_all_attributes(self) -> None:
        """Take over every attribute of every module of the network."""
        for index, module in enumerate(self._originals):
            self.set_attributes(index, attributes(module))
            _recompile(module, self.modules[index])

    def set_attributes(self, index: int, names: Iterable[str]) -> None:
        """Take over attributes of the network's module number ``index``; one that is gone there goes here too."""
        self._know_tensors(index)
        source, target = vars(self._originals[index]), vars(self.modules[index])
        for name in names:
            if (index, name) in self._holding:
                self._holding.remove((index, name))
            if name not in source:
                target.pop(name, None)
            elif name in OWN:
                target[name] = _own(source[name], self._translate)
            else:
                target[name] = self._translate(source[name])
                if target[name] is not source[name] and _holds_tensor(source[name]):
                    self._holding.append((index, name))

    def _know_tensors(self, only: int | None = None) -> None:
        """Let the network's tensors mean those in the copy's slots: of one module, whose attributes may hold them, or
        all."""
        for kind, owners in self._slots.items():
            for index in range(len(self.modules)) if only is None else (only,):
                for name, tensor in getattr(self._originals[index], kind).items():
                    if tensor is not None:
                        self._translate.add(tensor, owners[index][name])


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


def _holds_tensor(value: Any, depth: int = 8) -> bool:
    """Whether there is a tensor inside a value that was translated, so that it must be again when tensors change."""
    if isinstance(value, torch.Tensor):
        return True
    opened = _parts(value) if depth and not isinstance(value, _ATOMS) else None
    return opened is not None and any(_holds_tensor(part, depth - 1) for part in opened[0])


def attributes(module: Module) -> list[str]:
    """The names of the instance attributes that a copy takes over; a scripted module keeps its state elsewhere."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return [name for name in vars(module) if name not in SLOTS]


def _shells(module: Module) -> list[tuple[Module, Module]]:
    """Modules paired with modules of the same class that have their own empty slots, and share all else for now."""
    if isinstance(module, torch.jit.ScriptModule):
        return list(zip(module.modules(), copy.deepcopy(module).modules(), strict=True))
    shell: Module = module._replicate_for_data_parallel()  # a class may have its own idea of a replica
    shell._parameters, shell._buffers = dict.fromkeys(module._parameters), dict.fromkeys(module._buffers)
    return [(module, shell)]


def _recompile(original: Module, replica: Any) -> None:
    """Compile a replica as its original was: compiled code calls the module that it was made for."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return
    if isinstance(original, dynamo.OptimizedModule):
        replica._initialize()
    compiled = vars(original).get("_compiled_call_impl")
    if compiled is not None:
        cells = (cell.cell_contents for cell in compiled.__closure__ or ())
        wrap = next((c for c in cells if isinstance(c, dynamo._TorchDynamoContext)), torch.compile)
        vars(replica)["_compiled_call_impl"] = wrap(replica._call_impl)
