"""Links to PyTorch and Python by name, made without their inventories: nothing is fetched while the pages are built.

A name is linked if it exists in what is installed; whoever misspells one is told, as for the library's own names.
"""

import builtins
import functools
import importlib
import sys
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import lockstep  # noqa: F401  (its packages are looked into below)

TORCH = "https://docs.pytorch.org/docs/stable/"
PYTHON = "https://docs.python.org/3/library/"
PACKAGES = ["lockstep", "lockstep.errors", "lockstep.distributed", "lockstep.local"]  # names in them need no prefix
_kept: dict[str, list[str]] = {}
PAGES = {  # names that are documented together, on one page
    "torch.distributed.algorithms.": "distributed.algorithms.join.html#",
    "torch.distributed.fsdp.": "distributed.fsdp.fully_shard.html#",
    "torch.distributed.": "distributed.html#",
    "torch.profiler.": "profiler.html#",
    "torch.Tensor": "tensors.html#",
    "torch.device": "tensor_attributes.html#",
    "torch.dtype": "tensor_attributes.html#",
}


def address(name: str) -> str | None:
    """Return where a name is documented; None if there is no such name."""
    if name.startswith("torch."):
        if not _exists(name):
            return None
        for prefix, page in PAGES.items():
            if name.startswith(prefix):
                return f"{TORCH}{page}{name}"
        return f"{TORCH}generated/{name}.html"
    found = getattr(builtins, name, None)
    if found is None:
        return None
    page = "exceptions" if isinstance(found, type) and issubclass(found, BaseException) else "functions"
    return f"{PYTHON}{page}.html#{name}"


@functools.cache
def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return bool(module) and hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def _resolve(app: Sphinx, env: Any, node: Any, content: nodes.TextElement) -> nodes.Node | None:
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"]
    if (package := next((each for each in PACKAGES if hasattr(sys.modules[each], name)), None)) is not None:
        domain = env.domains["py"]
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"{package}.{name}", node, content)
    url = address(name) or address(f"torch.nn.{name}")
    if url is not None:
        return nodes.reference("", "", content, refuri=url, internal=False)
    return content if node["reftype"] == "class" and _exists(name) else None  # a type in a signature, without a page


def _keep(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings of attributes are sentences; napoleon would take what is before a colon for a type."""
    if what in ("attribute", "property"):
        _kept[name] = list(lines)


def _put_back(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    if name in _kept:
        lines[:] = _kept.pop(name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("missing-reference", _resolve)
    app.connect("autodoc-process-docstring", _keep, priority=400)
    app.connect("autodoc-process-docstring", _put_back, priority=600)
    return {"parallel_read_safe": True}
