"""``import lockstep.patch``: puts lockstep's classes in place of PyTorch's, for programs that wrap by themselves.

It is meant for frameworks that call ``DistributedDataParallel`` or ``DataParallel`` inside: Accelerate, the
transformers ``Trainer``, Lightning and ignite. Lockstep's classes are subclasses of PyTorch's, so ``isinstance``
checks still hold. The classes are replaced in PyTorch's modules and in all others that have imported them already, so
the order of imports does not matter; modules that were wrapped before stay as they are. ``lockstep run --patch
script.py`` does the same for a program that is not to be changed.

To use the ``shm`` backend with such a framework, make the default process group before the framework would:
``torch.distributed.init_process_group("shm")``, or ``lockstep run --patch --backend shm script.py``.

Communicates nothing.
"""

import sys
from types import ModuleType

import torch.nn.parallel

import lockstep

_HOMES = ("torch.nn", "torch.nn.parallel", "torch.nn.parallel.distributed", "torch.nn.parallel.data_parallel")
_OURS = {
    torch.nn.parallel.DistributedDataParallel: lockstep.DistributedDataParallel,
    torch.nn.parallel.DataParallel: lockstep.DataParallel,
}
_replaced: list[tuple[ModuleType, str, type]] = []


def apply() -> list[str]:
    """Replace the classes wherever modules have them; return their names, ``module.name``. Importing calls this."""
    found = []
    for module_name, module in list(sys.modules.items()):
        package = module_name.partition(".")[0]
        if not isinstance(module, ModuleType) or package == "lockstep":
            continue
        if package == "torch" and module_name not in _HOMES:
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in _OURS:
                _replaced.append((module, name, value))
                setattr(module, name, _OURS[value])
                found.append(f"{module_name}.{name}")
    return found


def undo() -> None:
    """Put PyTorch's classes back."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)


apply()
