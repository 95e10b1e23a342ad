"""Optimizers that PyTorch's ``_apply_optimizer_in_backward`` runs in backward, made to run on reduced gradients.

It hooks them to the autograd node that accumulates a parameter's gradient, where they step on what this rank alone has
computed. Their handles are an attribute of the parameter up to PyTorch 2.11, and in a map of their module later.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.errors import NotReplicableError

_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


class StepOptimizers:
    """Does what PyTorch's hook does: lets a parameter's optimizers step, and drops its gradient."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = optimizers

    def __call__(self, parameter: Parameter) -> None:
        """The gradient of ``parameter`` is there, reduced."""
        for optimizer in self._optimizers:
            optimizer.step()
        parameter.grad = None


def any_applied() -> bool:
    """Whether any parameter of this process may have such optimizers; cheap."""
    module = sys.modules.get(_MODULE)
    return module is not None and len(getattr(module, "param_to_acc_grad_map", "?")) > 0


def take_over(parameter: Parameter) -> StepOptimizers | None:
    """Unhook a parameter's optimizers; returns what is to be called instead, None if it has none.

    Raises :class:`NotReplicableError` where this version of PyTorch does not say what it has hooked.
    """
    optimizers = getattr(parameter, "_in_backward_optimizers", None)
    if not optimizers:
        return None
    for handle in _handles(parameter):
        handle.remove()
    return StepOptimizers(optimizers)


def _handles(parameter: Any) -> Sequence[Any]:
    handles: Sequence[Any] | None = getattr(parameter, "_optimizer_hook_handles", None)
    if handles is None:
        in_map = getattr(sys.modules.get(_MODULE), "param_to_optim_hook_handle_map", None)
        if in_map is None:
            raise NotReplicableError(
                "a parameter has optimizers from _apply_optimizer_in_backward(), and this version of PyTorch does not "
                "say how they are hooked, so they cannot wait for reduced gradients; step in a hook of your own "
                "(parameter.register_post_accumulate_grad_hook)"
            )
        handles = in_map.get(parameter, ())
    assert handles is not None
    return handles
