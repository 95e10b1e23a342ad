"""What ``torch.compile`` means for replicas. The compiler takes seconds to import: that is left to those who use it."""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.nn import Module

from lockstep.errors import NotReplicableError

T = TypeVar("T")
P = ParamSpec("P")


def outside_compiler(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, run as it is even inside of what ``torch.compile`` compiles: threads cannot be traced."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        run: Callable[P, T] = disabled if "torch._dynamo" in sys.modules else function
        return run(*args, **kwargs)

    return call


def hooks_of_compiled_backward() -> Sequence[Any] | None:
    """The hooks that compiled autograd calls in the backward pass under way; None where it is not at work.

    It runs a backward pass as one compiled function, and drops what was queued for its end: that is its last hook.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is None or not compiled_autograd.in_compiled_autograd_region:
        return None
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals is vars(compiled_autograd) and "hooks" in frame.f_locals:
            hooks: Sequence[Any] = frame.f_locals["hooks"]
            return hooks
        frame = frame.f_back
    raise NotReplicableError(
        "compiled autograd of this version of PyTorch does not say which hooks it runs, so nothing tells when backward "
        "ends and gradients can be handed out; run backward of a replicated module outside of it"
    )


def is_compiled(module: Module) -> bool:
    """Whether a module is what ``torch.compile(module)`` returns."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def recompiled(compiled: Any, replica: Module) -> Any:
    """What ``module.compile()`` made, for a replica: compiled code calls the module that it was made for."""
    context = sys.modules["torch._dynamo.eval_frame"]._TorchDynamoContext
    cells = (cell.cell_contents for cell in compiled.__closure__ or ())
    wrap = next((c for c in cells if isinstance(c, context)), torch.compile)
    return wrap(replica._call_impl)
