"""Functions of the user that another process has to find: by file and name."""

import importlib.util
import inspect
import operator
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import OptionError


@dataclass(frozen=True)
class Source:
    """A function at the top level of a file; ``arguments`` are those that a ``functools.partial`` gives it, pickled."""

    file: str
    module: str
    name: str
    arguments: bytes = b""

    def load(self) -> Callable[..., Any]:
        """Import the file, and return the function."""
        if self.module not in sys.modules:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            if spec is None or spec.loader is None:
                raise OptionError(f"{self.file} is no Python file; expected FILE.py:FUNCTION")
            folder = str(Path(self.file).resolve().parent)
            if folder not in sys.path:
                sys.path.insert(0, folder)
            module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        try:
            function: Callable[..., Any] = operator.attrgetter(self.name)(sys.modules[self.module])
        except AttributeError:
            raise OptionError(f"{self.file} has no function {self.name}") from None
        if self.arguments:
            args, kwargs = pickle.loads(self.arguments)
            return partial(function, *args, **kwargs)
        return function


def source_of(function: Any, what: str) -> Source:
    """Return where other processes find a function; raise :class:`OptionError` if they cannot."""
    arguments = b""
    if isinstance(function, partial):
        arguments, function = pickle.dumps((function.args, function.keywords)), function.func
    name = getattr(function, "__qualname__", None)
    if name is None or "<" in name:
        raise OptionError(
            f"{what} is {name or type(function).__name__}, which other processes cannot import; give a function at the "
            "top level of a file (functools.partial may add arguments)"
        )
    module = function.__module__
    file = getattr(sys.modules.get(module), "__file__", None) or inspect.getfile(function)
    return Source(str(Path(file).resolve()), "lockstep_case" if module == "__main__" else module, name, arguments)


def parse_source(text: str, what: str) -> Source:
    """Return the source that ``FILE.py:FUNCTION`` names."""
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise OptionError(f"{what} is {text!r}; expected FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise OptionError(f"{what} is {text!r}, but there is no file {file}; expected FILE.py:FUNCTION")
    return Source(str(Path(file).resolve()), f"lockstep_case_{Path(file).stem}", name)
