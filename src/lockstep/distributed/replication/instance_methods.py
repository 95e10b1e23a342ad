"""Methods added to one module: they are found on it, and its copies, pickles and ``vars()`` do not have them.

A module that is replicated keeps its class, so what it gains belongs to the instance. Entries in its ``__dict__`` would
be copied along, by ``copy`` and ``pickle`` and by the many classes that copy their ``__dict__`` themselves
(``__deepcopy__``, ``__getstate__``, ``torch.fx.GraphModule``), and an entry ``__reduce_ex__`` of a shallow copy would
pickle the module that it was copied from. So the ``__dict__`` becomes one that shows the added methods to nothing but
attribute access: Python reads the dictionary itself, and everything else goes through the methods below.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from weakref import getweakrefcount

from torch.nn import Module

from lockstep._base.wrapper import ModuleHook


class InstanceDict(dict[str, Any]):
    """The ``__dict__`` of a module, with methods that only attribute access finds."""

    __slots__ = ("_methods",)

    def __init__(self, attributes: Mapping[str, Any], methods: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(attributes)
        self._methods = methods
        super().update(methods)

    def __iter__(self) -> Iterator[str]:  # dict() and update() read a dictionary whose class has this through keys()
        return (name for name in super().__iter__() if self[name] is not self._methods.get(name, self))

    def __len__(self) -> int:
        return len(self._attributes())

    def keys(self) -> Any:
        """Return the names of the attributes."""
        return self._attributes().keys()

    def values(self) -> Any:
        """Return the values of the attributes."""
        return self._attributes().values()

    def items(self) -> Any:
        """Return the attributes."""
        return self._attributes().items()

    def _attributes(self) -> dict[str, Any]:
        return {name: self[name] for name in self}

    def copy(self) -> dict[str, Any]:
        """Return a plain dictionary, without the hooks that act on this module alone."""
        attributes = self._attributes()
        for name, flags in _HOOKS.items():
            hooks = attributes.get(name) or OrderedDict()
            # A handle refers to the very dictionary, also in a copy; a copied hook does nothing:
            # test_handles_of_hooks_still_remove_them.
            own = [] if getweakrefcount(hooks) else [key for key in hooks if isinstance(hooks[key], ModuleHook)]
            for each in (name, *flags) if own else ():
                kept = attributes.get(each, {})
                attributes[each] = type(kept)((key, value) for key, value in kept.items() if key not in own)
        return attributes

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.copy().items())

    def __repr__(self) -> str:
        return repr(self._attributes())


_HOOKS = {
    "_forward_pre_hooks": ["_forward_pre_hooks_with_kwargs"],
    "_forward_hooks": ["_forward_hooks_with_kwargs", "_forward_hooks_always_called"],
}
"""The dictionaries of a module's forward hooks, and those of the flags of the same hooks."""


def add_methods(module: Module, methods: Mapping[str, Callable[..., Any]], undo: ExitStack) -> None:
    """Add methods to a module; ``undo`` removes them."""
    before = vars(module)
    undo.callback(_set_dict, module, before)
    _set_dict(module, InstanceDict(before, methods))


def remove_all(module: Module) -> None:
    """Remove the methods that were added to a module, and the forward hooks that act on this module alone."""
    for name, flags in _HOOKS.items():
        for key in [key for key, hook in vars(module)[name].items() if isinstance(hook, ModuleHook)]:
            for each in (name, *flags):
                vars(module)[each].pop(key, None)
    _set_dict(module, dict(vars(module)))


def _set_dict(module: Module, attributes: dict[str, Any]) -> None:
    object.__setattr__(module, "__dict__", attributes)
