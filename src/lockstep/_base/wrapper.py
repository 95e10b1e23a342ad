"""Code that wrapped modules share: hooks on one module, checkpoints with and without a prefix, wrong options."""

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import ref

from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

from lockstep._base.arguments import did_you_mean
from lockstep.errors import UnknownOptionError

Init = TypeVar("Init", bound=Callable[..., None])


class ModuleHook:
    """A hook on one module: calls ``act`` with what PyTorch gives to a hook, and returns its result.

    Copies and pickles of it do nothing, nor does it for copies of the module that share it.
    """

    def __init__(self, module: Module | None, act: Callable[..., Any]) -> None:
        self._module = None if module is None else ref(module)
        """None in a copy."""
        self._act = act

    def __call__(self, module: Module, *given: Any) -> Any:
        return self._act(module, *given) if self._module is not None and self._module() is module else None

    def __deepcopy__(self, memo: Any) -> "ModuleHook":
        return ModuleHook(None, lambda *_: None)  # not what it calls, which a copy of the module would keep alive

    def __reduce__(self) -> Any:
        # It takes any arguments and returns None, and loads without lockstep.
        return getattr, (nullcontext(), "__exit__")


def is_of_module(state_dict: Mapping[str, Any], module: Module) -> bool:
    """Return True if a checkpoint has the keys of the wrapped module itself rather than keys with ``module.``."""
    plain = module.state_dict().keys()
    return len(state_dict.keys() & plain) > len(state_dict.keys() & {f"module.{key}" for key in plain})


def unwrapped(model: Any) -> Any:
    """Return the module inside wrappers that add a prefix to its names; anything else as it is."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(model, Module) and isinstance(getattr(model, "_orig_mod", None), Module):  # compiled
            model = model._orig_mod
        else:
            return model


def unknown_option(caller: str, name: str, known: Collection[str]) -> UnknownOptionError:
    """Return the error for an option that does not exist; it names the nearest option that does, and all of them."""
    return UnknownOptionError(f"{caller}() got an unexpected keyword argument {name!r}; {did_you_mean(name, known)}")


def naming_options(init: Init) -> Init:
    """Make a constructor raise :class:`UnknownOptionError` for keyword arguments that it does not have."""
    known = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise unknown_option(type(self).__name__, name, known)
        init(self, *args, **kwargs)

    return cast(Init, checked)
