"""Hooks parameters at the moment at which they are registered in a module that is replicated already.

A look at the slots (``slots.py``) needs an occasion: the module's forward, or a gradient of a parameter with a hook.
After ``load_state_dict(assign=True)`` no old parameter is left to get one, and training may go past the module's
forward. So PyTorch's hooks on registrations, which concern all modules of the process, give new parameters theirs. They
are registered with the first replicated module.
"""

import threading
from typing import Any

from torch.compiler import is_compiling
from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from lockstep.distributed.keeping import keep, kept_by
from lockstep.distributed.reduction.parameter_hooks import NewcomerHook, attach, can_have_gradient, listener_of
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.selection import without_replicated

_lock = threading.Lock()
_watching: list[Any] = []


def watch_registrations() -> None:
    """From now on, in this process."""
    with _lock:
        if not _watching:
            _watching.append(register_module_parameter_registration_hook(_parameter_registered))
            _watching.append(register_module_module_registration_hook(_module_registered))


def _parameter_registered(module: Module, name: str, parameter: Parameter | None) -> None:
    if is_compiling():
        return
    reducer = _reducer_of(module)
    if reducer is not None and parameter is not None:
        _hook(name, parameter, reducer)


def _module_registered(module: Module, name: str, submodule: Module | None) -> None:
    if is_compiling():
        return
    reducer = _reducer_of(module)
    if reducer is not None and submodule is not None:
        for key, parameter in submodule.named_parameters():
            _hook(f"{name}.{key}", parameter, reducer)
        for each in without_replicated(submodule):
            keep(each, reducer)  # for what is registered in it before ranks have agreed on it


def _reducer_of(module: Module) -> Reducer | None:
    """What synchronises the own parameters of a part: of several, the first whose module still has the part."""
    reducers = [each for each in kept_by(module) if isinstance(each, Reducer)]
    if len(reducers) > 1:  # searching modules takes time, and one is all that most parts have been in
        reducers = [each for each in reducers if each.setup.members.belong_to(module)] or reducers
    return reducers[0] if reducers else None


def _hook(name: str, parameter: Parameter, reducer: Reducer) -> None:
    """Only a hint: the reducer looks at the slots when the gradient comes."""
    if not is_lazy(parameter) and can_have_gradient(parameter) and listener_of(parameter) is None:
        attach(parameter, NewcomerHook(name, reducer), reducer)
