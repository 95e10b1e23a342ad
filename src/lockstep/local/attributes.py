"""Gives the attributes of a network's modules to the modules of its copies, at each use.

What a copy sees is what the network has now, as with ``torch.nn.DataParallel``: every module of a copy gets a new
``__dict__``, which is the network's with the copy's own slots and tables of hooks in it. Values that lead to modules,
parameters or buffers of the network are rebuilt with those of the copy (:mod:`~lockstep.local.translation`).

There is one exception. What forward sets on the network, which is the first replica, belongs to that replica. The
others keep what their own forward has set there, until somebody else sets it: a hidden state or a cache of the first
replica is on its device and has its rows.
"""

import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Module

from lockstep._base.compiler import is_compiled, recompile, recompiled
from lockstep._base.tree import slot_members
from lockstep.errors import NotReplicableError
from lockstep.local.contents import DictionaryContents, changed_names, differing_dicts
from lockstep.local.module_copy import CACHE, HOOKS, SLOTS, FormerParameters, ModuleCopy, is_scripted, scripted_names
from lockstep.local.translation import Translation, is_plain, leads, opens

_TABLES = (*HOOKS, "_non_persistent_buffers_set")  # PyTorch keeps them in every module; a replica has its own
_COMPILED = "_compiled_call_impl"  # what module.compile() has made
_OF_NO_FORWARD = {*SLOTS, *_TABLES, CACHE, _COMPILED}
_set_dict = vars(Module)["__dict__"].__set__
_OF_SCRIPTS = {"_c", "_concrete_type", "_actual_script_module", "_initializing", "_name", "forward", *_OF_NO_FORWARD}

_Attributes = dict[str, Any]  # the __dict__ of a module


class Attributes:
    """The attributes of ``modules``; :meth:`give` sets them on ``copies``, whose slots have been filled."""

    def __init__(self, modules: Sequence[Module], copies: Sequence[ModuleCopy]) -> None:
        self._copies = copies
        self._scripted = [i for i, module in enumerate(modules) if is_scripted(module)]
        numbers = [i for i, module in enumerate(modules) if not is_scripted(module)]
        self._all = modules
        self._modules = [modules[i] for i in numbers]
        self._rows = [[copy.modules[i] for i in numbers] for copy in copies]
        self._own = [[_own_attributes(*pair) for pair in zip(self._modules, row, strict=True)] for row in self._rows]
        self._own_tables = [[own[n] for own in owns for n in _TABLES if n in own] for owns in self._own]
        self._members = [
            (i, members) for i, module in enumerate(self._modules) if (members := slot_members(type(module)))
        ]
        self._kept: dict[int, set[str]] = {}
        self._may_lead: dict[int, list[str]] = {}
        self._new: list[list[_Attributes]] = [[{} for _ in self._modules] for _ in copies]
        """What every module of a copy gets at each use, before values that lead into the network are replaced."""
        now = [vars(module).copy() for module in modules if not is_scripted(module)]
        for index, attributes in enumerate(now):
            self._prepare(index, attributes, compiled=attributes.get(_COMPILED) is not None)
        self._note(now)

    def _note(self, now: list[_Attributes]) -> None:
        """Record what the network's modules have now; the copies have been prepared for it."""
        self._then, self._contents = now, DictionaryContents(now)
        self._places = [(i, name) for i, attributes in enumerate(now) for name in _TABLES if name in attributes]
        self._tables = [now[i][name] for i, name in self._places]

    # What the network has #

    def follow_network(self) -> bool:
        """Look at what the network has now; return False if a module has other dictionaries of slots than before."""
        changes = self._changes()
        for index, names in changes.items():
            if index in self._kept:
                self._kept[index] -= names
        return not any(names.intersection(SLOTS) for names in changes.values())

    def keep_what_forward_set(self) -> None:
        """Let attributes that have changed since :meth:`follow_network` belong to each replica itself."""
        for index, names in self._changes().items():
            self._kept.setdefault(index, set()).update(names - _OF_NO_FORWARD)

    def _changes(self) -> dict[int, set[str]]:
        """Return the names of the attributes that were set or deleted since the last call, by number of the module."""
        if not self._contents.differ(list(map(vars, self._modules))):
            return {}
        now, then = [vars(module).copy() for module in self._modules], self._then
        changes = {index: changed_names(now[index], then[index]) for index in differing_dicts(now, then)}
        for index, names in changes.items():
            self._prepare(index, now[index], compiled=_COMPILED in names)
        self._note(now)  # last: after an interruption the changes are found again
        return changes

    def _prepare(self, index: int, now: _Attributes, *, compiled: bool) -> None:
        """Prepare what the copies of a module get, and find the attributes that may lead into the network."""
        if compiled:
            self._compile(index, now.get(_COMPILED))
        for new, own in zip(self._new, self._own, strict=True):
            # made item by item, a dictionary has no room for more, and its copies take half the time
            new[index] = {name: value for name, value in (now | own[index]).items() if name != CACHE}
        found = [n for n, value in now.items() if n not in _OF_NO_FORWARD and _may_lead(value)]
        self._may_lead.pop(index, None)
        if found:
            self._may_lead[index] = found

    def _compile(self, index: int, compiled: Any) -> None:
        """Compile the copies of a module that was compiled in place."""
        for row, owns in zip(self._rows, self._own, strict=True):
            owns[index].pop(_COMPILED, None)
            if compiled is not None:
                owns[index][_COMPILED] = recompiled(compiled, row[index])

    # What the copies get #

    def give(self) -> None:
        """Set all attributes of all copies."""
        tables = self._filled_tables()
        leading = self._leading()
        for number, copy in enumerate(self._copies):
            if any(self._own_tables[number]):  # forward has put hooks there
                for table in self._own_tables[number]:
                    table.clear()
            translate = Translation(copy.counterparts(self._all) if tables or leading or self._members else {})
            given = self._new[number].copy()
            for index, name, value in leading:
                given[index] = given[index] | {name: _own_value(translate, value, type(self._modules[index]), name)}
            for index, name, table in tables:
                own = translate(table)
                given[index] = given[index] | {name: table.copy() if own is table else own}
            self._set(self._rows[number], given, translate)
            for index in self._scripted:
                _follow_script(self._all[index], copy.modules[index])

    def _set(self, row: list[Module], given: list[_Attributes], translate: Translation) -> None:
        for index, names in self._kept.items():
            given[index] = _kept(names, vars(row[index]), given[index])
        deque(map(_set_dict, row, map(dict.copy, given)), maxlen=0)  # a module's at once: another thread may run it
        for index, members in self._members:
            _copy_members(members, self._modules[index], row[index], translate)

    def _filled_tables(self) -> list[tuple[int, str, Any]]:
        """Return the network's tables of hooks that are not empty, usually none, with their modules and names."""
        if not any(self._tables):
            return []
        return [(*place, table) for place, table in zip(self._places, self._tables, strict=True) if table]

    def _leading(self) -> list[tuple[int, str, Any]]:
        """Return the attributes that lead into the network: the numbers of their modules, their names and values."""
        values = ((i, name, self._then[i][name]) for i, names in self._may_lead.items() for name in names)
        candidates = [(i, n, value) for i, n, value in values if not (opens(value) and is_plain(value))]
        if not candidates or not self._copies:
            return []
        known = self._copies[0].counterparts(self._all)
        return [each for each in candidates if leads(each[2], known)]


def _own_attributes(module: Module, copy: Module) -> _Attributes:
    """Return the attributes that a module of a copy has for good, or only it has."""
    if is_compiled(module):
        recompile(module, copy)
    there, here = vars(module), vars(copy)
    own = {name: value for name, value in here.items() if name not in there}  # its class may make replicas itself
    if is_compiled(module):
        own |= {name: value for name, value in here.items() if name in there and value is not there[name]}
    own |= {slot: here[slot] for slot in SLOTS} | {name: type(there[name])() for name in _TABLES if name in there}
    own["_former_parameters"] = FormerParameters(here["_parameters"])
    if isinstance(module, torch.nn.RNNBase):
        own["flatten_parameters"] = _already_flat
    return own


def _already_flat() -> None:
    """Replace ``flatten_parameters`` in replicas: their weights lie as the network's do, and must stay there."""


def _may_lead(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return not is_plain(value)
    return opens(value) or issubclass(type(value), torch.Tensor | Module)


def _own_value(translate: Translation, value: Any, owner: type, name: str) -> Any:
    try:
        return translate(value)
    except RecursionError:
        raise NotReplicableError(
            f"attribute {name} of a {owner.__name__} leads to a module, parameter or buffer of the network through "
            "containers that are nested too deeply to be rebuilt for a replica"
        ) from None


def _kept(names: set[str], old: _Attributes, new: _Attributes) -> _Attributes:
    """Return new attributes, with some as a replica's forward has left them."""
    given = {name: value for name, value in new.items() if name not in names}
    return given | {name: old[name] for name in names if name in old}


def _copy_members(
    members: Iterable[types.MemberDescriptorType], module: Module, copy: Module, translate: Translation
) -> None:
    for member in members:
        try:
            member.__set__(copy, translate(member.__get__(module)))
        except AttributeError:  # not set
            member.__set__(copy, None)
            member.__delete__(copy)


def _follow_script(script: Any, copy: Any) -> None:
    """Set the attributes of a scripted module on its copy: those of the script, and those of the Python object."""
    for name in scripted_names(script):
        copy._c.setattr(name, script._c.getattr(name))
    there, here = _of_object(script), _of_object(copy)
    for name in here.keys() - there.keys():
        del vars(copy)[name]
    vars(copy).update(there)


def _of_object(script: Any) -> _Attributes:
    """Return the attributes of a scripted module's Python object; it keeps methods there that were called."""
    items = vars(script).items()
    return {n: v for n, v in items if n not in _OF_SCRIPTS and not isinstance(v, torch._C.ScriptMethod)}
