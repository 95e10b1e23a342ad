"""Refuses optimizers that PyTorch's ``_apply_optimizer_in_backward`` runs in backward.

They step in the autograd node that accumulates a parameter's gradient: on what this rank alone has computed.
"""

import sys
from collections.abc import Callable, Iterable

from torch.nn import Parameter

from lockstep.errors import NotReplicableError

_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def check_optimizers(named: Callable[[], Iterable[tuple[str, Parameter]]]) -> None:
    """Raise :class:`NotReplicableError` for a parameter that has such an optimizer; ``named`` is asked for parameters
    and their names where any has one."""
    module = sys.modules.get(_MODULE)
    if module is not None and getattr(module, "param_to_acc_grad_map", True):  # else it has not been called
        for name, parameter in named():
            if hasattr(parameter, "_in_backward_optimizers"):
                raise NotReplicableError(
                    f"parameter {name} has an optimizer from _apply_optimizer_in_backward(), which steps before "
                    "gradients are reduced; step in a hook of your own (parameter.register_post_accumulate_grad_hook), "
                    "which waits for the reduced gradient, or after backward"
                )
