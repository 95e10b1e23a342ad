"""Makes ``torch.compile`` and replicas work together, and imports the compiler only where it is used."""

import copy
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

T = TypeVar("T")
P = ParamSpec("P")


def outside_compiler(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, run as it is even inside of what ``torch.compile`` compiles: threads cannot be traced."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Where nothing is compiled, the way around the compiler would cost 2 us a call, and show in each traceback.
        run: Callable[P, T] = disabled if is_dynamo_compiling() or get_eval_frame_callback() is not None else function
        return run(*args, **kwargs)

    return call


def is_in_compiled_backward() -> bool:
    """Whether the code that is being compiled is of a backward pass, which compiled autograd makes one function of."""
    dynamo: Any = torch._dynamo
    return bool(dynamo.compiled_autograd.in_compiled_autograd_region)


def is_compiled(module: Module) -> bool:
    """Whether a module is what ``torch.compile(module)`` returns."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def recompiled(compiled: Any, replica: Module) -> Any:
    """What ``module.compile()`` made, for a replica: compiled code calls the module that it was made for."""
    context = sys.modules["torch._dynamo.eval_frame"]._TorchDynamoContext
    cells = (cell.cell_contents for cell in compiled.__closure__ or ())
    wrap = next((c for c in cells if isinstance(c, context)), None)
    return torch.compile(replica._call_impl) if wrap is None else _isolated(wrap)(replica._call_impl)


def recompile(compiled: Any, replica: Any) -> None:
    """Let a replica of what ``torch.compile(module)`` returned compile the module inside of it."""
    vars(replica)["dynamo_ctx"] = _isolated(compiled.dynamo_ctx)
    replica._initialize()


def _isolated(context: Any) -> Any:
    """A compiler like ``context`` whose compilations count on their own, where Dynamo can tell them apart.

    Otherwise all replicas' count towards the one ``torch._dynamo.config.recompile_limit`` of the code that they share,
    and those beyond it run uncompiled. ``torch.compile(isolate_recompiles=True)`` does this for modules of the user's.
    """
    numbers = getattr(sys.modules["torch._dynamo.eval_frame"], "_next_isolate_recompiles_id", None)
    if numbers is None or not hasattr(context, "_isolate_recompiles_id"):  # an older PyTorch
        return context
    isolated = copy.copy(context)
    isolated._isolate_recompiles_id = next(numbers)
    return isolated
