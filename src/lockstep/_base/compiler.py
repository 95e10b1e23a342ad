"""Makes ``torch.compile`` and replicas work together, and imports the compiler only where it is used."""

import copy
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Module
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

T = TypeVar("T")
P = ParamSpec("P")


def outside_compiler(function: Callable[P, T]) -> Callable[P, T]:
    """Make ``function`` run uncompiled even inside code that ``torch.compile`` compiles: threads cannot be traced."""
    return _uncompiled(function, recursive=True)


def calls_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Make ``function`` run uncompiled inside code that ``torch.compile`` compiles, but compile what it calls."""
    return _uncompiled(function, recursive=False)


def _uncompiled(function: Callable[P, T], recursive: bool) -> Callable[P, T]:
    disabled = _disable_dynamo(function, recursive=recursive)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Outside compiled code, the disabled function would cost 2 us a call, and show in each traceback.
        if is_dynamo_compiling() or get_eval_frame_callback() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@outside_compiler
def call_outside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` uncompiled, even from code that ``torch.compile`` compiles."""
    return function(*args, **kwargs)


current_transform = torch._C._functorch.peek_interpreter_stack
"""Returns the innermost transform of ``torch.func`` that this thread is in, or None."""


def is_recorded() -> bool:
    """Return True if operations of this thread are recorded or transformed, not run: by ``torch.jit.trace``,
    ``make_fx``, ``torch.export``, ``torch.func`` or forward-mode autograd."""
    return (
        torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or current_transform() is not None
        or forward_ad._current_level >= 0
        or (_dispatch_modes() > 0 and any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()))
    )


def is_observed() -> bool:
    """Return True if a mode, such as ``FlopCounterMode``, sees the operations of this thread, and not of others."""
    return _dispatch_modes() > 0 or any(
        type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(_function_modes())
    )


_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


def is_in_compiled_backward() -> bool:
    """Return True if the code being compiled belongs to a backward pass, which compiled autograd makes one function."""
    dynamo: Any = torch._dynamo
    return bool(dynamo.compiled_autograd.in_compiled_autograd_region)


def is_compiled(module: Module) -> bool:
    """Return True if a module is the result of ``torch.compile(module)``."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def recompiled(compiled: Any, replica: Module) -> Any:
    """Compile for a replica what ``module.compile()`` has compiled: compiled code calls the module it was made for."""
    context = sys.modules["torch._dynamo.eval_frame"]._TorchDynamoContext
    cells = (cell.cell_contents for cell in compiled.__closure__ or ())
    wrap = next((c for c in cells if isinstance(c, context)), None)
    return torch.compile(replica._call_impl) if wrap is None else _isolated(wrap)(replica._call_impl)


def recompile(compiled: Any, replica: Any) -> None:
    """Make a replica of a ``torch.compile(module)`` compile the module inside the replica."""
    vars(replica)["dynamo_ctx"] = _isolated(compiled.dynamo_ctx)
    replica._initialize()


def _isolated(context: Any) -> Any:
    """Return a compiler like ``context`` whose compilations count on their own, if Dynamo can distinguish them.

    Otherwise those of all replicas count towards the one ``torch._dynamo.config.recompile_limit`` of their common code,
    and replicas beyond it run uncompiled. ``torch.compile(isolate_recompiles=True)`` does this for users' modules.
    """
    numbers = getattr(sys.modules["torch._dynamo.eval_frame"], "_next_isolate_recompiles_id", None)
    if numbers is None or not hasattr(context, "_isolate_recompiles_id"):  # an older version of PyTorch
        return context
    isolated = copy.copy(context)
    isolated._isolate_recompiles_id = next(numbers)
    return isolated
