"""Reads the state of an object that is saved under one name, and puts it back.

State that is the same on all ranks is written once. Each rank writes its own state: its random generators, samplers and
loaders, values marked by :func:`per_rank`, local state of a replicated module, and its communication hooks' state.
"""

import copy
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from lockstep._base.devices import is_accelerator
from lockstep._base.inner_tensors import is_plain
from lockstep._base.run_all import RunAll
from lockstep._base.tree import tree_map
from lockstep._base.wrapper import unwrapped
from lockstep.checkpoints.layout import OWN
from lockstep.distributed.replication.replication import own_names, replications_in
from lockstep.errors import CheckpointError, OptionError

MODULE, STATE_DICT, VALUE, GENERATOR = "module", "state_dict", "value", "generator"
TRAINING, COMMON = "training", "training, the same on all ranks"
"""Parts of a module's own state: rounds and hooks. All ranks have the second in common, but the module's file holds its
state dict alone."""


class PerRank(NamedTuple):
    """A value that differs by rank: see :func:`per_rank`."""

    value: Any


def per_rank(value: Any) -> PerRank:
    """Mark a value that differs between ranks, in the arguments of :func:`lockstep.save` and :func:`lockstep.resume`.

    Each rank saves its own. An unmarked value counts as the same on all ranks: the first rank's is saved. Random
    generators, loaders and samplers need no mark.

    Args:
        value: Anything that :func:`lockstep.save` takes.

    Returns:
        The value, marked.

    Example:
        >>> per_rank({"seen": 3}).value
        {'seen': 3}

    Stands for: one file for each rank.
    """
    return value if isinstance(value, PerRank) else PerRank(value)


class Entry(NamedTuple):
    """A name, and the object that is saved or resumed under it."""

    name: str
    target: Any
    """The object without its wrappers."""
    kind: str
    given: Any
    """The object with the wrappers that it was given in."""

    @property
    def is_own(self) -> bool:
        """True if each rank has its own."""
        return self.kind.endswith(OWN)

    @property
    def is_gathered(self) -> bool:
        """True if each rank has a part, so that a save gathers the whole, in collectives."""
        return not self.is_own and callable(getattr(self.target, "gathered_state_dict", None))


class Parts(NamedTuple):
    """The parts of an entry that are written: by the first rank, and by each rank."""

    shared: Any
    own: dict[str, Any]


def entries_of(state: Mapping[str, Any]) -> list[Entry]:
    """Return the entries of keyword arguments, by name; raise :class:`OptionError` for values that cannot be saved."""
    lower = [name.lower() for name in state]
    for name in state:
        if not name.isidentifier() or lower.count(name.lower()) > 1:
            raise OptionError(
                f"{name!r} cannot be the name of something saved: it becomes the name of a file, so it is an "
                "identifier, and differs from the other names by more than upper and lower case"
            )
    return [_entry(name, state[name]) for name in sorted(state)]


def _entry(name: str, value: Any) -> Entry:
    given = value.value if isinstance(value, PerRank) else value
    target = unwrapped(given)
    kind = _kind_of(name, target)
    own = isinstance(value, PerRank) or kind == GENERATOR
    if isinstance(target, DataLoader | Sampler):
        own = own or not getattr(target, "same_on_all_ranks", False)
    return Entry(name, target, kind + OWN if own else kind, given)


def _kind_of(name: str, target: Any) -> str:
    if isinstance(target, torch.Generator):
        return GENERATOR
    if isinstance(target, nn.Module):
        return MODULE
    if callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None)):
        return STATE_DICT
    if isinstance(target, DataLoader | Sampler):
        raise OptionError(
            f"{name} is a {type(target).__name__} without state_dict() and load_state_dict(): where it is in its epoch "
            "cannot be saved; give the loader a lockstep.ResumableSampler around its sampler, and save that"
        )
    return VALUE


# ------------------------------------------------------------------------------------------ reading


def read(entry: Entry) -> Parts:
    """Return the parts of an entry that are to be written."""
    target = entry.target
    if entry.kind.startswith(GENERATOR):
        return Parts(None, {"state": target.get_state()})
    if not entry.kind.startswith(MODULE):
        state = target if entry.kind.startswith(VALUE) else target.state_dict()
        return Parts(None, {"state": state}) if entry.is_own else Parts(state, {})
    state = target.state_dict()
    own: dict[str, Any] = {}
    if entry.is_own:
        return Parts(None, {"state": state})
    names = own_names(entry.given, target)
    if names:
        own["tensors"] = {name: tensor for name, tensor in state.items() if name in names}
    for name, each in replications_in(entry.target):
        if each.ready:
            own.setdefault(COMMON if each.training_is_common else TRAINING, {})[name] = each.training_state()
    return Parts(state, own)


def common_parts(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a rank's own state that are the same on all ranks; any number of ranks can use them."""
    return {name: parts for name, parts in own.items() if name == COMMON}


# ------------------------------------------------------------------------------------------ putting back


def check_target(entry: Entry, saved: str) -> None:
    """Raise :class:`CheckpointError` unless a saved state of the kind ``saved`` can be put into an entry."""
    if entry.kind.removesuffix(OWN) != saved.removesuffix(OWN):
        raise CheckpointError(
            f"{entry.name} was saved as a {saved.removesuffix(OWN)}, and is to be resumed into a "
            f"{type(entry.target).__name__}; give resume() what save() was given"
        )
    if entry.kind.startswith(VALUE) and not isinstance(entry.target, dict | list | Tensor):
        raise CheckpointError(
            f"{entry.name} is a {type(entry.target).__name__}, which cannot be filled in place; leave it out of "
            f"resume() and take it from the result: .values[{entry.name!r}]"
        )


def folder_named(path: "str | os.PathLike[str]", caller: str) -> Path:
    """Return the folder of checkpoints that a program names, ``~`` expanded; raise :class:`OptionError` for the name of
    a file, unless a folder has it already."""
    folder = Path(path).expanduser()
    if folder.suffix in (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".safetensors") and not folder.is_dir():
        raise OptionError(
            f"{caller}: the path is a folder, in which each checkpoint is a folder; got the name of a file, "
            f"{os.fspath(path)!r}. Write {str(folder.with_suffix(''))!r}"
        )
    return folder


def check_named(unnamed: tuple[object, ...], call: str) -> None:
    """Raise :class:`OptionError` if objects were given to a call without a name."""
    if unnamed:
        kind = type(unnamed[0]).__name__
        raise OptionError(
            f"{call} got a {kind} without a name; give each object one, which its state has in the checkpoint: "
            f"{call.removesuffix('()')}(path, model=model, optimizer=optimizer)"
        )


def put_back(entry: Entry, parts: Parts) -> None:
    """Restore the saved state of an object, except for the parts that :func:`restore_training` restores.

    ``parts.own`` is empty if this rank's own part is missing.
    """
    target = entry.target
    state: Any = parts.own.get("state") if parts.shared is None else parts.shared
    if entry.kind.startswith(GENERATOR):
        target.set_state(state)
    elif entry.kind.startswith(VALUE):
        _fill(entry.name, target, state)
    elif entry.kind.startswith(MODULE):
        state.update(parts.own.get("tensors", {}))  # in place: the versions of its modules are an attribute of it
        target.load_state_dict(state)
    else:
        target.load_state_dict(state)


def restore_training(entry: Entry, parts: Parts, steps: RunAll, *, ready: bool) -> None:
    """Restore rounds and hooks of the replicated modules inside an object: of the modules that are ready, or of the
    others.

    Continues with the others if one fails: a module's state may have to be agreed on in the next round.
    """
    if not entry.kind.startswith(MODULE):
        return
    found = dict(replications_in(entry.target))
    for name, state in {**parts.own.get(TRAINING, {}), **parts.own.get(COMMON, {})}.items():
        if name in found and found[name].ready == ready:
            with steps:
                found[name].restore(state)
        elif name not in found and ready:
            warnings.warn(
                f"{entry.name} was replicated when it was saved, and is not now; call resume() after replicate(), or "
                "what its communication hooks have kept is lost",
                stacklevel=2,
            )


def copy_of(entry: Entry) -> Parts:
    """Return the parts that would restore an object's present state; tensors are copied to the CPU."""
    if entry.kind.startswith(VALUE) and not isinstance(entry.target, Tensor):
        return Parts(copy.copy(entry.target), {})  # its members are replaced, not written to
    return HostCopies().of({entry.name: read(entry)})[entry.name]


class HostCopies:
    """Copies of the state to save, on the CPU, so that no later step changes it; memory is kept for the next copies.

    Memory that is touched for the first time costs four times the copying. What comes from an accelerator is copied to
    pinned memory, all at once, and the host waits once for each device, at the end.
    """

    def __init__(self) -> None:
        self._free = defaultdict[Any, list[Tensor]](list)

    def of(self, parts: Mapping[str, Parts]) -> dict[str, Parts]:
        """Return copies of the parts; those of the call before are no longer valid.

        If tensors share memory, as tied parameters do, their copies share it, too.
        """
        call = _CopyingCall(self._free)
        with torch.inference_mode(False):  # memory that is made inside could not be written to outside
            copies = {name: Parts(call.copy(each.shared), call.copy(each.own)) for name, each in parts.items()}
        call.wait()
        self._free = call.used  # memory that this call did not need is given up
        return copies


class _CopyingCall:
    """One call of :meth:`HostCopies.of`."""

    def __init__(self, free: "defaultdict[Any, list[Tensor]]") -> None:
        self.used = defaultdict[Any, list[Tensor]](list)
        """The memory of the copies, by its kind."""
        self._free = free
        self._seen: dict[Any, Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, value: Any) -> Any:
        """Return a copy of a nested value; its tensors are on the CPU, and complete after :meth:`wait`."""
        made = tree_map(self._copy_leaf, value)
        if hasattr(value, "_metadata"):
            made._metadata = copy.deepcopy(value._metadata)
        return made

    def wait(self) -> None:
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()

    def _copy_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        is_usual = type(leaf) is Tensor and not vars(leaf) and is_plain(leaf) and not leaf.is_quantized
        if not is_accelerator(leaf.device):
            return self._copy_values(leaf) if is_usual and not leaf.is_meta else copy.deepcopy(leaf)
        self._devices.add(leaf.device)
        if is_usual:
            return self._copy_values(leaf)
        if not is_plain(leaf) or leaf.is_quantized:
            return _copy_whole(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            made = self._copy_values(leaf).detach().as_subclass(type(leaf)).requires_grad_(leaf.requires_grad)
        vars(made).update(self.copy(vars(leaf)))
        return made

    def _copy_values(self, tensor: Tensor) -> Tensor:
        is_pinned = tensor.device.type != "cpu"
        shape = tensor.dtype, tensor.size(), tensor.stride()
        kind = *shape, is_pinned
        key = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), *shape, tensor.requires_grad
        if key not in self._seen or not tensor.numel():
            free = self._free[kind]
            memory = free.pop() if free else torch.empty_like(tensor.detach(), device="cpu", pin_memory=is_pinned)
            self.used[kind].append(memory)
            copied = memory.detach().copy_(tensor.detach(), non_blocking=is_pinned)
            self._seen[key] = copied.requires_grad_(tensor.requires_grad)
        return self._seen[key]


def _copy_whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor of an accelerator whose values lie in other tensors, on the CPU if its class can move
    there."""
    try:
        moved = tensor.detach().cpu()
    except (RuntimeError, NotImplementedError, TypeError):
        moved = tensor
    if type(moved) is type(tensor) and moved.device != tensor.device:
        return moved.requires_grad_(tensor.requires_grad)
    return copy.deepcopy(tensor)


def _fill(name: str, target: Any, value: Any) -> None:
    if isinstance(target, Tensor):
        if target.shape != value.shape or target.dtype != value.dtype:
            raise CheckpointError(
                f"{name} was saved with shape {tuple(value.shape)} and dtype {value.dtype}, and is to be resumed into "
                f"a tensor of shape {tuple(target.shape)} and dtype {target.dtype}"
            )
        with torch.no_grad():
            target.copy_(value)
    elif isinstance(target, dict):
        target.clear()
        target.update(value)
    else:
        target[:] = value
