"""Batch normalisation over the whole batch instead of each replica's rows."""

import copy
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import checkpoint

from lockstep.errors import LayoutError, NotReplicableError
from lockstep.local.exchange import Replica, current_replica

_numbers = itertools.count()
_CHECKPOINTED = (
    "SyncBatchNorm inside a checkpointed segment of a replica: recomputing it would need the other replicas' rows, "
    "which are recomputed at other times. Leave it out of the segment, checkpoint around the whole DataParallel, or "
    "use torch.nn.BatchNorm there"
)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics, in training, are taken over the rows of all replicas together.

    Arguments and buffers are the same as in ``torch.nn.BatchNorm1d``; inputs have shape (N, C) or (N, C, ...). Inside
    :class:`~lockstep.DataParallel` every replica gets the same mean and variance as one device would with the whole
    batch, forward and backward, and the same running statistics. Outside, and in ``eval()``, it is plain batch
    normalisation. Communicates, in training, count, mean and variance (2 C + 1 numbers) from each replica to each
    other. Inputs in half precision are kept in float32 for backward. Every replica must call the same of these modules
    in the same order; if one does not, all raise an error. Inside another DataParallel, statistics are over all rows of
    the outermost one. In a checkpointed segment of a replica it is an error
    (:class:`~lockstep.errors.NotReplicableError`); around the whole DataParallel it is right.
    Stands for ``torch.nn.SyncBatchNorm``, which needs a process group.

    >>> import torch, lockstep
    >>> network = SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    >>> parallel = lockstep.DataParallel(network, device_ids=["cpu", "cpu"])
    >>> parallel(torch.randn(4, 3)).mean(0).abs().max() < 1e-6
    tensor(True)
    """

    _met_without_graph = False  # the last use was in a replica, without gradients

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meeting = next(_numbers)  # replicas meet under their original's number

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._meeting = next(_numbers)  # a copied or unpickled layer meets on its own

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise LayoutError(f"expected an input of shape (N, C) or (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the input with the statistics of all replicas' rows."""
        self._check_input_dim(input)
        replica = current_replica()
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        if replica is None:
            self._refuse_recomputation()
            return super().forward(input)
        self._refuse_checkpoint(replica)
        dims = [0, *range(2, input.dim())]
        wide = input if input.dtype in (torch.float32, torch.float64) else input.float()
        variance, mean = torch.var_mean(wide, dims, correction=0)
        count = input.numel() // input.shape[1]
        count, mean, variance = self._over_all(replica, count, mean, variance)
        if self.training and self.track_running_stats:
            self._track(count, mean.detach(), variance.detach())
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        return (wide * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _refuse_checkpoint(self, replica: Replica) -> None:
        """Raise inside a checkpointed segment: it is recomputed for one replica, with no other replicas to meet."""
        if any(frame.f_globals.get("__name__") == checkpoint.__name__ for frame in replica.frames()):
            raise NotReplicableError(_CHECKPOINTED)
        self._met_without_graph = not torch.is_grad_enabled()

    def _refuse_recomputation(self) -> None:
        """Raise if a backward pass runs again what replicas ran without a graph: it is another kind of checkpoint."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self._met_without_graph:
            raise NotReplicableError(_CHECKPOINTED)
        self._met_without_graph = False

    def _over_all(self, replica: Replica, count: int, mean: Tensor, variance: Tensor) -> tuple[int, Tensor, Tensor]:
        """Compute the statistics of all rows from those of each replica; gradients flow to every replica's rows."""
        met = replica.all_gather(f"SyncBatchNorm {self._meeting}", (count, mean, variance))
        total = sum(n for n, _, _ in met)
        if total <= 1:
            raise LayoutError("Expected more than 1 value per channel when training, got one in all replicas together")
        parts = [(n / total, m.to(mean.device), v.to(mean.device)) for n, m, v in met]
        mean = torch.stack([weight * m for weight, m, _ in parts]).sum(0)
        variance = torch.stack([weight * (v + (m - mean) ** 2) for weight, m, v in parts]).sum(0)
        return total, mean, variance

    @torch.no_grad()
    def _track(self, count: int, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / int(self.num_batches_tracked) if factor is None else factor
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor or 0.0)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), factor or 0.0)

    @classmethod
    def convert_sync_batchnorm(cls, module: Module) -> Module:
        """Replace every batch normalisation in ``module``, including itself, under all its names; return the module.

        Parameters, buffers, hooks and other attributes (of a pruned layer, say) are kept. Raises
        :class:`~lockstep.errors.NotReplicableError` for a layer that is parametrized, or that has no shapes yet.
        """
        converted: dict[int, Module] = {}
        for owner in list(module.modules()):
            for name, child in owner._modules.items():
                if child is not None and _is_plain_norm(child, cls):
                    owner._modules[name] = converted.setdefault(id(child), converted.get(id(child)) or cls._like(child))
        return cls._like(module) if _is_plain_norm(module, cls) else module

    @classmethod
    def _like(cls, norm: Module) -> "SyncBatchNorm":
        if is_parametrized(norm) or isinstance(norm, LazyModuleMixin):
            lazy = isinstance(norm, LazyModuleMixin)
            reason = "has no shapes yet; run a forward first" if lazy else "is parametrized; convert it before that"
            raise NotReplicableError(f"cannot convert a {type(norm).__name__} to SyncBatchNorm: it {reason}")
        new = cls.__new__(cls)
        own = (dict, set)
        vars(new).update({name: copy.copy(v) if isinstance(v, own) else v for name, v in vars(norm).items()})
        new._meeting = next(_numbers)
        return new


def _is_plain_norm(module: Module, kind: type) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, kind)
